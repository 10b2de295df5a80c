"""Appending: the rows of new files come after the others, what was scored stays, and a kill loses nothing."""

import json
import os
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfm
from dkfm.cli.app import main
from dkfm.errors import DamagedStoreError, DkfmWarning, InvalidInputError, StoreExistsError
from dkfm.scoring import appending, output_store
from dkfm.sources import parquet
from dkfm.sources.parquet_files import journal
from dkfm.sources.parquet_files.journal import read_file_stats
from dkfm.storage.output_files import LocalOutput
from helpers.growing_folder import GrowingFolder


@pytest.fixture
def folder(tmp_path):
    return GrowingFolder(tmp_path)


# Stages in which a folder grows: names of files with their rows.
stages = st.lists(
    st.dictionaries(st.sampled_from([*"bdfhjlnp", "k=1__a", "k=2__a", "k=2__c"]), st.integers(1, 25), max_size=3),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(stages, st.sampled_from(["out", "out.parquet"]), st.integers(1, 30))
def test_any_growth_gives_the_rows_in_the_order_in_which_they_came(grown, output, chunk_rows):
    with tempfile.TemporaryDirectory() as root:
        folder, seen, before = GrowingFolder(root), set(), 0
        for files in grown:
            folder.add(**{name: rows for name, rows in files.items() if name not in seen})
            seen |= set(files)
            if not seen:
                continue
            report = folder.score(output, chunk_rows=chunk_rows, id_column="id")
            rows = len(folder.rows)
            kept = before // chunk_rows * chunk_rows if rows > before else rows
            if before >= chunk_rows or rows == before:  # a chunk of fewer rows is scored again in a larger one
                assert report.scored_rows == rows - kept
            assert report.rows == rows
            before = rows
            folder.check(output)
            parquet._cached_layouts.clear_unless_busy()
            assert folder.score(output, chunk_rows=None, append=False, id_column="id").scored_chunks == 0


def test_files_that_sort_before_others_come_after_them(folder):
    folder.add(m=15).score()
    report = folder.add(a=15).score()
    assert (report.rows, report.scored_rows, report.scored_chunks) == (30, 20, 2)
    folder.check()
    names = read_file_stats(LocalOutput(folder.root / "out"), output_store.read_output(folder.root / "out").creation_id)
    assert [name for name, _, _ in names] == ["m.parquet", "a.parquet"]


@pytest.mark.costly
@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_what_is_lost_after_files_were_appended_is_made_again_in_their_order(output, folder):
    folder.add(m=35).score(output)
    folder.add(a=15, z=3).score(output)
    path = folder.root / output / output_store.read_output(folder.root / output).format.file_names(3)[0]
    good = path.read_bytes()
    path.unlink()
    parquet._cached_layouts.clear_unless_busy()
    assert folder.score(output, append=False).scored_chunks == 1
    assert path.read_bytes() == good
    folder.check(output)


@pytest.mark.slow
def test_small_chunks_of_a_small_output_are_scored_again_in_larger_ones_and_those_of_a_large_one_stay(folder):
    def chunk_rows():
        return output_store.read_output(folder.root / "out").chunk_rows

    folder.add(m=5).score(chunk_rows=None)
    folder.add(n=400).score(chunk_rows=None)
    planned = dkfm.plan_score(folder.root / "model", folder.root / "in", folder.root / "other").chunk_rows
    assert chunk_rows() == planned > 5
    folder.check()
    folder.score(chunk_rows=2, append=False, overwrite=True)
    folder.add(o=3)
    assert 16 * planned >= 405
    folder.score(chunk_rows=None)
    assert chunk_rows() > 2
    folder.score(chunk_rows=2, append=False, overwrite=True)
    appending._MAX_RESCORED_CHUNKS, before = 1, appending._MAX_RESCORED_CHUNKS
    try:
        assert folder.add(p=3).score(chunk_rows=None).scored_rows == 3
    finally:
        appending._MAX_RESCORED_CHUNKS = before
    assert chunk_rows() == 2
    folder.check()


def test_without_append_a_folder_that_grew_is_refused_with_the_way_out(folder):
    folder.add(m=5).score()
    folder.add(a=5, b=5)
    hint = r"has changed since \(2 files are new: append=True \(--append\) scores what is new alone\)"
    with pytest.raises(StoreExistsError, match=hint):
        folder.score(append=False)


def test_a_file_that_changed_or_is_gone_is_refused_and_the_output_stays(folder):
    folder.add(m=15, k=15).score()
    folder.add(a=5)
    changed = folder.root / "in" / "m.parquet"
    os.utime(changed, ns=(1, 1))
    with pytest.raises(InvalidInputError, match=r"m\.parquet has changed since it was scored"):
        folder.score()
    changed.unlink()
    with pytest.raises(InvalidInputError, match=r"in has lost m\.parquet, which was scored"):
        folder.score()
    assert dkfm.open_scores(folder.root / "out").shape == (30, 2)


@pytest.mark.parametrize("remedy", ["repaired", "removed", "removed with its neighbour"])
@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_a_new_file_that_stopped_the_job_may_be_repaired_or_taken_away(output, remedy, folder):
    folder.add(m=35).score(output, id_column="id")
    scored = folder.rows
    folder.add(a=25, b=8)
    bad = folder.root / "in" / "b.parquet"
    good = bad.read_bytes()
    columns = pq.read_table(bad).to_pydict()
    pq.write_table(pa.table(columns | {"b": [np.nan] * 8}), bad)
    with pytest.raises(InvalidInputError, match=r"b\.parquet must be finite, .* in column 'b'"):
        folder.score(output, id_column="id")
    if remedy == "repaired":
        bad.write_bytes(good)
    else:
        bad.unlink()
        folder.rows = folder.rows[:60]
    if remedy == "removed with its neighbour":
        (folder.root / "in" / "a.parquet").unlink()
        folder.rows = scored
    with pytest.warns(DkfmWarning, match=r"the rows after those of its first . files are scored again"):
        report = folder.score(output, id_column="id")
    assert report.rows == len(folder.rows)
    assert report.scored_rows == len(folder.rows) - 30  # full chunks stay
    folder.check(output)
    assert folder.score(output, id_column="id").scored_chunks == 0


def test_full_chunks_that_a_stopped_run_left_need_no_warning(folder):
    folder.add(m=30).score()
    pq.write_table(pa.table({name: [np.nan] for name in "abc"}), folder.root / "in" / "a.parquet")
    with pytest.raises(InvalidInputError, match="must be finite"):
        folder.score()
    (folder.root / "in" / "a.parquet").unlink()
    assert folder.score().scored_chunks == 0
    folder.check()


def test_files_of_a_finished_output_are_refused_though_a_later_run_was_stopped(folder):
    folder.add(m=35).score()
    folder.add(a=5)
    bad = folder.root / "in" / "a.parquet"
    good = bad.read_bytes()
    pq.write_table(pa.table(pq.read_table(bad).to_pydict() | {"b": [np.nan] * 5}), bad)
    with pytest.raises(InvalidInputError, match="must be finite"):
        folder.score()
    bad.write_bytes(good)
    os.utime(folder.root / "in" / "m.parquet", ns=(1, 1))
    with pytest.raises(InvalidInputError, match=r"m\.parquet has changed since it was scored"):
        folder.score()
    (folder.root / "in" / "m.parquet").unlink()
    with pytest.raises(InvalidInputError, match=r"has lost m\.parquet, which was scored"):
        folder.score()


def test_a_count_of_finished_files_that_is_none_is_not_known(folder):
    folder.add(m=5).score()
    output = output_store.find_output(folder.root / "out")
    for count in (-1, True, 1.0, "1", None):
        journal.write_file_stats(output.output_location, output.creation_id, [("m", 1, 2)], count)
        assert journal.read_finished_count(output.output_location, output.creation_id) is None
    journal.write_file_stats(output.output_location, output.creation_id, [("m", 1, 2)], 1)
    assert journal.read_finished_count(output.output_location, output.creation_id) == 1
    assert journal.read_finished_count(output.output_location, "0" * 32) is None


@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_an_output_may_have_fewer_rows_than_a_chunk_once_a_bad_file_is_gone(output, folder):
    folder.add(m=30).score(output, chunk_rows=None)
    folder.add(b=500)
    bad = folder.root / "in" / "b.parquet"
    pq.write_table(pa.table(pq.read_table(bad).to_pydict() | {"c": [np.inf] * 500}), bad)
    with pytest.raises(InvalidInputError, match="must be finite"):
        folder.score(output, chunk_rows=None)
    bad.unlink()
    folder.rows = folder.rows[:30]
    with pytest.warns(DkfmWarning, match="are scored again"):
        folder.score(output, chunk_rows=None)
    folder.check(output)


def test_a_finished_output_in_an_order_of_its_own_names_what_changed(folder):
    folder.add(m=15).score()
    folder.add(a=15).score()
    os.utime(folder.root / "in" / "a.parquet", ns=(1, 1))
    with pytest.raises(StoreExistsError, match=r"the input .* has changed since"):
        folder.score(append=False)


def test_other_settings_and_other_inputs_are_refused(folder, rng):
    folder.add(m=25).score()
    folder.add(a=5)
    with pytest.raises(StoreExistsError, match="chunk_rows is 7 and was 10"):
        folder.score(chunk_rows=7)
    with pytest.raises(StoreExistsError, match="on_invalid is nan and was raise"):
        folder.score(on_invalid="nan")
    with pytest.raises(InvalidInputError, match="overwrite alone"):
        folder.score(overwrite=True)
    np.save(folder.root / "x.npy", rng.normal(size=(5, 3)))
    for source in [folder.root / "x.npy", rng.normal(size=(5, 3)), folder.root / "in" / "m.parquet"]:
        with pytest.raises(InvalidInputError, match=r"append \(--append\) scores the new files of a folder"):
            dkfm.batch_score(folder.root / "model", source, folder.root / "out", append=True)


@pytest.mark.costly
@pytest.mark.parametrize("how", ["gone", "damaged", "of another output"])
def test_an_output_that_did_not_note_its_files_notes_them_while_they_are_the_same(how, folder):
    folder.add(m=25).score()
    output = output_store.read_output(folder.root / "out")
    note = folder.root / "out" / "_journal" / f"{output.creation_id}-000000.json"
    if how == "gone":
        note.unlink()
    else:
        content = json.loads(note.read_text())
        content["files" if how == "damaged" else "crc32c"] = '[["z.parquet", 3, 4]]' if how == "damaged" else 7
        note.write_text(json.dumps(content))
    content = note.read_text() if note.exists() else None
    assert folder.score().scored_chunks == 0
    assert note.read_text() != content
    note.unlink()
    assert folder.score(append=False).scored_chunks == 0
    folder.add(a=5).score()
    folder.check()
    (
        folder.root / "out" / "_journal" / f"{output_store.read_output(folder.root / 'out').creation_id}-000000.json"
    ).unlink()
    for options in ({}, {"append": False}):
        with pytest.raises(DamagedStoreError, match="has lost the order of the files of its input"):
            folder.score(**options)
    with pytest.raises(DamagedStoreError, match="has lost the order of the files of its input"):
        dkfm.verify_scores(folder.root / "out", folder.root / "in")


def test_an_output_that_did_not_note_its_files_is_refused_when_there_are_more(folder):
    folder.add(m=25).score()
    creation_id = output_store.read_output(folder.root / "out").creation_id
    (folder.root / "out" / "_journal" / f"{creation_id}-000000.json").unlink()
    folder.add(a=5)
    with pytest.raises(StoreExistsError, match="did not note the files of its input"):
        folder.score()


@pytest.mark.slow
def test_files_that_were_written_to_with_their_times_put_back_are_scored_again(folder):
    folder.add(m=35).score()
    path = folder.root / "in" / "m.parquet"
    status, before = path.stat(), folder.rows.copy()
    table = pq.read_table(path)
    folder.rows[:35] = before[::-1]
    pq.write_table(
        table.select(["id"])
        .add_column(1, "a", [folder.rows[:, 0]])
        .add_column(2, "b", [folder.rows[:, 1]])
        .add_column(3, "c", [folder.rows[:, 2]]),
        path,
        row_group_size=4,
    )
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    parquet._cached_layouts.clear_unless_busy()
    folder.add(n=5)
    with pytest.warns(DkfmWarning, match="was copied or written to since the chunks"):
        assert folder.score().scored_rows == 40
    folder.check()


@pytest.mark.slow
def test_the_journal_does_not_grow_with_every_append(folder):
    folder.add(a=12).score()
    counts = []
    for name in "bcdefg":
        folder.add(**{name: 12}).score()
        counts.append(len(list((folder.root / "out" / "_journal").iterdir())))
    assert max(counts[2:]) <= counts[1] + 1
    folder.check()


def test_a_name_that_leads_out_of_the_folder_is_no_file_of_it(folder):
    folder.add(m=25).score()
    output = output_store.read_output(folder.root / "out")
    (folder.root / "b.parquet").write_bytes((folder.root / "in" / "m.parquet").read_bytes())
    journal.write_file_stats(output.output_location, output.creation_id, [("../b.parquet", 1, 2)])
    with pytest.raises(InvalidInputError, match=r"has lost \.\./b\.parquet"):
        folder.score()
    with pytest.raises(InvalidInputError, match=r"has no \.\./b\.parquet, whose rows"):
        dkfm.verify_scores(folder.root / "out", folder.root / "in")


def test_the_id_of_an_output_leads_to_no_file_out_of_it(folder):
    folder.add(m=25).score()
    output = output_store.read_output(folder.root / "out")
    stats = read_file_stats(output.output_location, output.creation_id)
    (folder.root / "away-000000.json").write_text("{}")
    for hostile in ("../../away", "/etc/passwd", "x" * 32, ""):
        assert read_file_stats(output.output_location, hostile) is None
        with pytest.raises(DamagedStoreError, match="which dkfm gives to none"):
            journal.write_file_stats(output.output_location, hostile, stats)
    assert (folder.root / "away-000000.json").read_text() == "{}"


@pytest.mark.slow
def test_many_files_are_noted_in_several_segments(folder, monkeypatch):
    monkeypatch.setattr(journal, "_FILES_PER_SEGMENT", 2)
    folder.add(m=5, n=5, o=5, p=5, q=5).score()
    folder.add(a=5).score()
    folder.check()
    output = output_store.read_output(folder.root / "out")
    (folder.root / "out" / "_journal" / f"{output.creation_id}-000002.json").unlink()
    assert read_file_stats(output.output_location, output.creation_id) is None


@pytest.mark.slow
def test_files_that_come_while_new_ones_are_scored_are_left_for_the_next_time(folder, monkeypatch):
    folder.add(m=25).score()
    folder.add(a=25)
    extend = output_store.replace_description

    def extend_while_files_come(output):
        extend(output)
        folder.add(b=10)

    monkeypatch.setattr(output_store, "replace_description", extend_while_files_come)
    assert folder.score().rows == 50
    monkeypatch.undo()
    with pytest.warns(DkfmWarning, match="what is new is not verified"):
        assert dkfm.verify_scores(folder.root / "out", folder.root / "in").rows == 50
    assert folder.score().rows == 60
    folder.check()


@pytest.mark.slow
def test_on_a_cluster_workers_read_the_order_from_the_output(client, folder):
    folder.add(m=35).score(client=client)
    folder.add(a=22, z=4).score(client=client)
    folder.check()
    assert folder.score(client=client, append=False, chunk_rows=None).scored_chunks == 0


def test_a_plan_counts_what_is_new_and_changes_nothing(folder):
    folder.add(m=35).score()
    folder.add(a=22)
    before = {path: path.stat().st_mtime_ns for path in (folder.root / "out").rglob("*")}
    plan = dkfm.plan_score(folder.root / "model", folder.root / "in", folder.root / "out", append=True, chunk_rows=10)
    assert (plan.rows, plan.chunks, plan.done) == (57, 6, 3)
    assert {path: path.stat().st_mtime_ns for path in (folder.root / "out").rglob("*")} == before


@pytest.mark.slow
def test_the_command_appends_too(folder, monkeypatch):
    monkeypatch.chdir(folder.root)
    for files in [{"m": 35}, {"a": 10}]:
        folder.add(**files)
        ended = CliRunner().invoke(main, ["score", "model", "in", "out", "--append", "--chunk-rows", "10"])
        assert (ended.exit_code, ended.exception) == (0, None)
    assert "45 rows, 3 of 5 chunks were there" in ended.stdout
    folder.check()


@pytest.mark.slow
def test_other_readers_of_zarr_see_all_rows(folder):
    import zarr

    folder.add(m=35).score()
    folder.add(a=22).score()
    np.testing.assert_array_equal(
        zarr.open_group(folder.root / "out", mode="r")["scores"][:], dkfm.open_scores(folder.root / "out").compute()
    )
