"""Several drivers that score into one output: they begin it together, go on together, and all of them finish it."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import StoreExistsError, UnreachableError
from dkfm.files import local
from dkfm.scoring import output_store
from dkfm.storage import store_metadata
from dkfm.storage.output_files import LocalOutput

DRIVERS = 3

TOGETHER = """\
import os, sys, time
from pathlib import Path
from dkfm.scoring import output_store; from dkfm.scoring import run as scoring
from dkfm.cli.app import main

def after_all_are_here(act):
    def waiting(*arguments):
        folder, drivers = Path(sys.argv[1]), int(sys.argv[2])
        (folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 120
        while len(list(folder.iterdir())) < drivers and time.monotonic() < deadline:
            time.sleep(0.001)
        return act(*arguments)
    return waiting

if sys.argv[3] == "fresh":
    output_store.create_output = after_all_are_here(output_store.create_output)
else:
    scoring._JobRun.run = after_all_are_here(scoring._JobRun.run)
main(sys.argv[4:])
"""
"""A `dkfm score` that waits for the others before it creates its output, or goes on with it."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A model, rows and their scores."""
    folder, rng = tmp_path_factory.mktemp("job"), np.random.default_rng(5)
    pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(40, 3)))
    pca.save(folder / "model")
    np.save(folder / "rows.npy", rng.normal(size=(1000, 3)))
    return folder, pca.transform(np.load(folder / "rows.npy"))


def score(job, target, **options):
    options = {"chunk_rows": 20, "progress": False} | options
    return dkfm.batch_score(job[0] / "model", job[0] / "rows.npy", target, **options)


def require_finished(job, target):
    dkfm.verify_scores(target)
    scores = dkfm.open_scores(target)
    values = np.asarray(scores if str(target).endswith(".parquet") else scores.compute(scheduler="synchronous"))
    np.testing.assert_allclose(values, job[1], atol=1e-12)
    if not isinstance(target, str):
        assert not list(target.rglob("*.partial"))


def cut_short(target):
    """Take the marker of an output away, and every other receipt with its chunk left in place."""
    (target / store_metadata.MARKER).unlink()
    for segment in sorted((target / store_metadata.JOURNAL).iterdir())[::2]:
        segment.unlink()


def interposed(monkeypatch, act):
    """Let something happen once, between the look at an output and its creation."""
    create, acts = output_store.create_output, [act]

    def late(*arguments):
        if acts:
            acts.pop()()
        return create(*arguments)

    monkeypatch.setattr(output_store, "create_output", late)


def targets(tmp_path):
    return tmp_path / "out", tmp_path / "out.parquet"


@pytest.mark.costly
@pytest.mark.parametrize("begun_only", [False, True])
def test_a_driver_goes_on_with_an_output_that_another_one_created_just_now(job, tmp_path, monkeypatch, begun_only):
    create = output_store.create_output
    for target in targets(tmp_path):
        with monkeypatch.context() as patch:
            if begun_only:
                interposed(patch, lambda target=target: _begin_as_another(job, target, create))
            else:
                interposed(patch, lambda target=target: score(job, target))
            report = score(job, target)
        assert (report.rows, report.scored_chunks) == (1000, 50 if begun_only else 0)
        require_finished(job, target)


def _begin_as_another(job, target, create):
    """Create an output as another driver does that is killed then."""

    def create_and_die(*arguments):
        create(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_store, "create_output", create_and_die)
        with pytest.raises(KeyboardInterrupt):
            score(job, target)


@pytest.mark.slow
def test_a_driver_takes_the_chunks_of_the_one_that_was_first(job, tmp_path, monkeypatch):
    interposed(monkeypatch, lambda: score(job, tmp_path / "out", chunk_rows=30))
    assert score(job, tmp_path / "out", chunk_rows=None).chunks == 34
    require_finished(job, tmp_path / "out")


@pytest.mark.slow
def test_another_job_that_was_first_is_named_and_nothing_of_it_is_touched(job, tmp_path, monkeypatch):
    target = tmp_path / "out"
    interposed(monkeypatch, lambda: score(job, target, chunk_rows=30))
    with pytest.raises(StoreExistsError, match="another job: chunk_rows is 20 and was 30"):
        score(job, target)
    require_finished(job, target)


def test_a_strangers_file_that_came_meanwhile_is_left_untouched(job, tmp_path, monkeypatch):
    target = tmp_path / "out"

    def come():
        target.mkdir()
        (target / "notes.txt").write_text("mine")

    interposed(monkeypatch, come)
    with pytest.raises(StoreExistsError, match="left untouched"):
        score(job, target)
    assert [path.name for path in target.iterdir()] == ["notes.txt"]


def together(monkeypatch, act, drivers=DRIVERS):
    """Run drivers in threads, of which none creates its output before all have looked for it."""
    create, barrier, here = output_store.create_output, threading.Barrier(drivers, timeout=60), threading.local()

    def late(*arguments):
        if not hasattr(here, "was"):
            here.was = barrier.wait()
        return create(*arguments)

    with monkeypatch.context() as patch, ThreadPoolExecutor(drivers) as pool:
        patch.setattr(output_store, "create_output", late)
        return list(pool.map(lambda _: act(), range(drivers)))


@pytest.mark.costly
@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_three_threads_create_one_output_together_and_each_finishes_it(job, tmp_path, monkeypatch, name):
    reports = together(monkeypatch, lambda: score(job, tmp_path / name))
    assert [report.rows for report in reports] == [1000] * DRIVERS
    require_finished(job, tmp_path / name)


@pytest.mark.slow
def test_three_threads_go_on_with_one_output_together(job, tmp_path):
    score(job, tmp_path / "out")
    for prepare in (cut_short, lambda target: None):  # one that was cut short, and a finished one
        prepare(tmp_path / "out")
        with ThreadPoolExecutor(DRIVERS) as pool:
            reports = list(pool.map(lambda _: score(job, tmp_path / "out"), range(DRIVERS)))
        assert [report.rows for report in reports] == [1000] * DRIVERS
        require_finished(job, tmp_path / "out")


@pytest.mark.slow
def test_a_chunk_without_a_receipt_stays_where_it_is_right_and_is_replaced_where_it_is_not(job, tmp_path):
    target = tmp_path / "out"
    score(job, target)
    (target / store_metadata.MARKER).unlink()
    for segment in (target / store_metadata.JOURNAL).iterdir():
        segment.unlink()
    right, wrong = (target / f"scores/c/{number}/0" for number in (3, 7))
    wrong.write_bytes((target / "scores/c/8/0").read_bytes())  # whole, and of other rows
    before = right.stat()
    assert score(job, target).scored_chunks == 50
    assert (right.stat().st_ino, right.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    require_finished(job, target)


@pytest.mark.s3
@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_three_threads_create_one_output_at_a_url_together(job, place, monkeypatch, name):
    target = f"{place.url}/{name}"
    reports = together(monkeypatch, lambda: score(job, target, chunk_rows=100))
    assert [report.rows for report in reports] == [1000] * DRIVERS
    require_finished(job, target)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["fresh", "resumed", "finished"])
def test_three_processes_all_end_well(job, tmp_path, state):
    target, folder = tmp_path / "out", tmp_path / "here"
    folder.mkdir()
    if state != "fresh":
        score(job, target)
    if state == "resumed":
        cut_short(target)
    paths = [str(job[0] / "model"), str(job[0] / "rows.npy"), str(target)]
    command = [sys.executable, "-W", "error", "-c", TOGETHER, str(folder), str(DRIVERS), state, "score", *paths]
    command += ["--chunk-rows", "20", "--no-progress"]
    drivers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(DRIVERS)
    ]
    told = [driver.communicate(timeout=240)[1] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * DRIVERS, told
    require_finished(job, target)


def test_a_file_that_another_driver_sweeps_away_half_written_is_written_again(tmp_path, monkeypatch):
    place, sync, sweeps = LocalOutput(tmp_path), os.fsync, [1, 2, 3]

    def swept(descriptor):
        if sweeps:
            sweeps.pop()
            for path in tmp_path.glob(".*.partial"):
                path.unlink()
        sync(descriptor)

    monkeypatch.setattr(local.os, "fsync", swept)
    place.write_file("segment", b"receipts")
    assert (tmp_path / "segment").read_bytes() == b"receipts"
    assert [path.name for path in tmp_path.iterdir()] == ["segment"]
    sweeps[:] = range(100)
    with pytest.raises(UnreachableError, match=r"another run cleaned up while it was made\.$"):
        place.write_file("segment", b"others")
    assert (tmp_path / "segment").read_bytes() == b"receipts"
