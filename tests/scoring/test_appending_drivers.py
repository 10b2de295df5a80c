"""Appending while drivers are killed, or several of them write to the same output."""

from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import dkfm
from dkfm.errors import InvalidInputError, StoreError
from dkfm.scoring import output_store, run
from dkfm.storage.output_files import LocalOutput
from helpers.growing_folder import GrowingFolder


@pytest.fixture
def folder(tmp_path):
    return GrowingFolder(tmp_path)


class KilledError(Exception):
    """Stands for a kill."""


# The warning is true after a bad file, and absent where the kill came first; `test_appending` asks for it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Files of .* have changed")
@pytest.mark.parametrize("chunk_rows", [10, 40])
@pytest.mark.parametrize("output", ["out", "out.parquet"])
@pytest.mark.parametrize("after_a_bad_file", [False, True])
def test_a_kill_between_any_two_lines_loses_nothing(output, chunk_rows, after_a_bad_file, tmp_path, monkeypatch):
    """Every change of the disk by the driver is the last one once; readers refuse, or see the old output or the new."""
    write, remove = LocalOutput.write_file, LocalOutput.remove_files
    for left in range(40):
        folder = GrowingFolder(tmp_path / str(left)).add(m=35)
        folder.score(output, id_column="id")
        folder.add(a=22)
        if after_a_bad_file:
            new = folder.root / "in" / "a.parquet"
            good = new.read_bytes()
            pq.write_table(pa.table(pq.read_table(new).to_pydict() | {"b": [np.nan] * 22}), new)
            with pytest.raises(InvalidInputError, match="must be finite"):
                folder.score(output, chunk_rows=chunk_rows, id_column="id")
            new.write_bytes(good)
        count = iter(range(left))

        def change(how, *arguments, count=count):
            if next(count, None) is None:
                raise KilledError
            how(*arguments)

        monkeypatch.setattr(LocalOutput, "write_file", lambda *a, change=change: change(write, *a))
        monkeypatch.setattr(LocalOutput, "remove_files", lambda *a, change=change: change(remove, *a))
        ended = False
        with suppress(KilledError):
            folder.score(output, chunk_rows=chunk_rows, id_column="id")
            ended = True
        monkeypatch.undo()
        with suppress(StoreError):
            assert len(dkfm.open_scores(folder.root / output)) in (35, 57)
        report = folder.score(output, chunk_rows=chunk_rows, id_column="id")
        assert report.rows == 57
        assert report.scored_rows <= 27 or chunk_rows == 40
        folder.check(output)
        if ended:
            assert left > 5
            return
    raise AssertionError("The job did not end.")


def test_an_append_that_was_killed_after_the_marker_went_keeps_the_files_that_were_finished(folder, monkeypatch):
    folder.add(m=35).score()
    folder.add(a=5)

    def stop(output):
        raise KeyboardInterrupt

    monkeypatch.setattr(output_store, "replace_description", stop)
    with pytest.raises(KeyboardInterrupt):
        folder.score()
    monkeypatch.undo()
    (folder.root / "in" / "m.parquet").unlink()
    with pytest.raises(InvalidInputError, match=r"has lost m\.parquet, which was scored"):
        folder.score()


@pytest.mark.slow
def test_a_second_driver_that_began_before_the_first_ended_finishes_the_same_output(folder, monkeypatch):
    folder.add(m=35).score()
    folder.add(a=22)
    find = output_store.find_output
    runs = []

    def find_and_let_another_driver_run(*arguments, **options):
        found = find(*arguments, **options)
        if not runs:
            runs.append(None)
            runs.append(folder.score())
        return found

    monkeypatch.setattr("dkfm.scoring.job_setup.output_store.find_output", find_and_let_another_driver_run)
    report = folder.score()
    assert (report.scored_chunks, runs[1].scored_chunks) == (0, 3)
    folder.check()


@pytest.mark.slow
def test_a_whole_chunk_that_another_driver_wrote_after_the_scan_is_scored_again(folder, monkeypatch):
    folder.add(d=25).score()
    folder.add(e=20)
    log = run.log_scoring_start

    def write_another_chunk(*given):
        zarr.open_array(folder.root / "out" / "scores", mode="r+")[30:40] = 7.0  # of other rows
        log(*given)

    monkeypatch.setattr(run, "log_scoring_start", write_another_chunk)
    folder.score()
    folder.check()
