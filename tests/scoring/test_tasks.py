"""Batch scoring: every row there and right, whatever the chunks; outputs that are not finished are never read."""

import os
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
import zarr

import dkfm
from dkfm.errors import (
    DamagedStoreError,
    StoreError,
)
from dkfm.scoring import output_store, planning, tasks
from dkfm.scoring.formats import chunk_files
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source
from dkfm.storage import zarr_store
from helpers.scoring_jobs import score, write


def test_a_scoring_task_pickles_to_under_ten_kilobytes(job):
    score(job)
    work = tasks.SharedTaskArguments(
        str(job[0]), "0" * 64, (), True, open_source(job[1]), 4, output_store.read_output(job[2]), "raise"
    )
    assert len(pickle.dumps((tasks.score_chunk, work, 3))) < 5_000


def test_a_replaced_model_is_not_taken_for_the_one_that_was_asked_for(job, rng):
    from dkfm.execution.model_cache import get_saved_scorer

    dkfm.KernelPCA(1).fit(rng.normal(size=(9, 4))).save(job[0], overwrite=True)
    with pytest.raises(DamagedStoreError, match="another model"):
        get_saved_scorer(str(job[0]), "f" * 64)


def test_chunks_of_a_plan_are_in_step_with_the_source(fitted, tmp_path):
    zarr.create_array(tmp_path / "z.zarr", shape=(10**6, 4), chunks=(7_000, 4), dtype="f8")
    job = planning.plan_with_model_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"))
    assert job.chunk_rows % 7_000 == 0
    assert job.chunks == -(-(10**6) // job.chunk_rows)
    assert job.task_bytes > job.chunk_rows * 8 * 7


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("rows", [1, 500, 240_000, 1_000_003])
def test_no_thread_waits_for_the_last_chunk_of_another(rows, threads, fitted):
    source = MemorySource(np.broadcast_to(np.zeros(fitted.n_features_in_), (rows, fitted.n_features_in_)))
    alone = planning.plan_with_model_in_memory(fitted.model_, ["scores"], source)
    job = planning.plan_with_model_in_memory(fitted.model_, ["scores"], source, threads=threads)
    assert job.chunk_rows <= alone.chunk_rows
    busiest = job.chunk_rows * -(-job.chunks // threads)
    assert job.chunks == alone.chunks if alone.chunks <= threads else busiest <= 1.02 * (rows / threads + threads)


def test_a_disk_that_fills_up_in_the_middle_of_a_chunk_is_told_in_a_sentence_and_leaves_nothing(job, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chunk_files, "_SYNC_BYTES", 0)
    monkeypatch.setattr(chunk_files.os, "fdatasync", full)
    with pytest.raises(StoreError, match="cannot be written: No space left on device"):
        score(job)
    assert not [path for path in (job[2] / "scores" / "c").rglob("*") if path.is_file()]


def test_a_run_that_is_replaced_while_a_task_scores_is_not_written_into(job):
    score(job, chunk_rows=30)
    before = output_store.read_output(job[2])
    (job[2] / "scores" / "c" / "0" / "0").unlink()

    def late():
        yield np.zeros((20, 3))
        score(job, chunk_rows=30, overwrite=True)
        yield np.zeros((10, 3))

    with pytest.raises(StoreError):
        write(before, 0, late(), 2)
    assert dkfm.verify_scores(job[2]).rows == 100
    assert not list(job[2].rglob("*.partial"))


def test_a_chunk_that_another_task_writes_meanwhile_is_not_removed_as_missing(job, monkeypatch):
    score(job, chunk_rows=30)
    output, path = output_store.read_output(job[2]), job[2] / "scores" / "c" / "0" / "0"
    bytes_of_chunk, removed = path.read_bytes(), []
    path.unlink()

    original = type(output.output_location).find_file_sizes

    def find_file_sizes(location, names):
        found = original(location, names)
        path.write_bytes(bytes_of_chunk)
        return found

    monkeypatch.setattr(type(output.output_location), "find_file_sizes", find_file_sizes)
    monkeypatch.setattr(type(output.output_location), "remove_files", lambda location, names: removed.extend(names))
    write(output, 0, iter([np.zeros((30, 3))]))
    assert not removed
    assert path.read_bytes() == bytes_of_chunk


def test_a_chunk_whose_name_another_task_frees_just_now_takes_it(job, monkeypatch):
    score(job, chunk_rows=30)
    output, path, summarize = (
        output_store.read_output(job[2]),
        job[2] / "scores" / "c" / "0" / "0",
        chunk_files._summarize_file,
    )
    bytes_of_chunk = path.read_bytes()
    path.unlink()

    def pieces():
        yield np.zeros((30, 3))
        path.write_bytes(bytes_of_chunk)  # another task is first

    def find_removed(*arguments):
        path.unlink()
        return summarize(*arguments)

    monkeypatch.setattr(chunk_files, "_summarize_file", find_removed)
    write(output, 0, pieces())
    assert not np.frombuffer(path.read_bytes()[:-4]).any()


def test_a_chunk_is_written_in_order_while_the_next_rows_are_made_and_no_more_are_held(job, monkeypatch):
    made, held = [], []

    def pieces():
        for number in range(10):
            piece = np.full((3, 3), float(number))
            made.append(weakref.ref(piece))
            held.append(sum(reference() is not None for reference in made))
            yield piece
            del piece

    score(job, chunk_rows=30)
    (job[2] / "scores" / "c" / "0" / "0").unlink()
    (held_by_file,), found = write(output_store.read_output(job[2]), 0, pieces(), 10)
    np.testing.assert_array_equal(zarr_store.open_array(job[2], "scores")[:30, 0], np.repeat(np.arange(10.0), 3))
    assert not held_by_file.invalid_mask.any()
    assert not found
    assert max(held) <= 3


FULL_DISK = """
import resource, sys
import numpy as np, dkfm
from dkfm import kernels
from dkfm.errors import StoreError

folder, K = sys.argv[1], kernels.Gaussian(1.0)
X = np.random.default_rng(0).normal(size=(700, 3))
dkfm.ExactFeatureMap(K).fit(X).save(folder + "/model")
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 + 5, 2**20 + 5))
options = {"chunk_rows": 700, "progress": False}
for job in (
    lambda: dkfm.build_gram(K, X, folder + "/gram", tile_rows=500),
    lambda: dkfm.batch_score(folder + "/model", X, folder + "/scores", **options),
):
    try:
        job()
    except StoreError as error:
        print("cannot be written" in str(error))
"""


@pytest.mark.slow
def test_files_that_may_not_grow_are_told_in_a_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("True\nTrue\n", 0), done.stderr
    assert not list(tmp_path.glob("*/*/c/**/*.partial"))


def test_what_a_file_gives_back_too_short_is_no_chunk(job, monkeypatch):
    honest = os.pread
    monkeypatch.setattr(os, "pread", lambda *a: honest(*a)[:-3])
    with pytest.raises(DamagedStoreError, match="read back"):
        score(job)
