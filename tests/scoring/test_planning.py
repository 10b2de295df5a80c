"""Measured plans: what a dry run measures, where, and that it leaves nothing."""

import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from sklearn.exceptions import NotFittedError

import dkfm
from dkfm import kernels
from dkfm.core import budget
from dkfm.errors import InvalidInputError, StoreError, WorkerDiedError
from dkfm.files.object_store import Remote
from dkfm.scoring import output_store, planning, tasks
from dkfm.sources import chunk_cache
from dkfm.sources.opening import open_source
from dkfm.sources.parquet import ParquetSource

_SLOW = 0.02
"""Seconds that are added to what a test slows down."""


def _plan(job, **options):
    return dkfm.plan_score(*job, **{"chunk_rows": 10} | options)


@pytest.mark.parametrize("name", ["scores.zarr", "new/folder/scores.parquet"])
def test_a_plan_measures_the_files_of_chunks_where_they_will_be_and_leaves_nothing(job, tmp_path, monkeypatch, name):
    before = sorted(tmp_path.iterdir())
    sync, synced = os.fsync, []

    def slow(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        time.sleep(_SLOW)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    plan = _plan((*job[:2], tmp_path / name), output=["scores", "reconstruction_error"])
    files = 1 if name.endswith("parquet") else 2
    assert plan.chunk_seconds > files * _SLOW  # half of what the syncs of a file and its folder add
    assert plan.file_seconds == pytest.approx(10 * plan.chunk_seconds / plan.threads)
    places = {path.split("/.dkfm-plan-")[0] for path in synced if "/timed" in path}
    assert places == {str(tmp_path)}
    assert sorted(tmp_path.iterdir()) == before


def test_a_plan_beside_an_unfinished_output_leaves_it_as_it_is(job, tmp_path):
    dkfm.batch_score(*job, chunk_rows=10, progress=False)
    (job[2] / "_COMPLETE").unlink()
    (job[2] / "scores/c/3/0").write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert _plan(job).done == 9
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_plan_of_an_output_that_cannot_be_written_counts_its_files_as_predicted(job, monkeypatch):
    def refuse(*_, **__):
        raise StoreError("It cannot be written.")

    monkeypatch.setattr(output_store, "create_output", refuse)
    assert _plan(job).chunk_seconds == budget.CHUNK_SECONDS


def test_a_trial_that_fails_leaves_nothing_while_others_write(job, tmp_path, monkeypatch):
    before, write = sorted(tmp_path.iterdir()), tasks.write_chunk_files

    def fail_later(chunk_format, chunk, *rest, **options):
        if chunk.number == 3:
            raise StoreError("The disk is full.")
        for number in range(2_000 if chunk.number == 2 else 0):  # what is removed meanwhile would not be empty
            with suppress(OSError):
                (chunk_format.output_location.root / f"{number}").touch()
        return write(chunk_format, chunk, *rest, **options)

    monkeypatch.setattr(tasks, "write_chunk_files", fail_later)
    assert _plan(job).chunk_seconds == budget.CHUNK_SECONDS
    assert sorted(tmp_path.iterdir()) == before


def test_a_trial_that_kills_its_workers_leaves_the_prediction(job, monkeypatch):
    def die(*_, **__):
        raise WorkerDiedError("A worker died.")

    monkeypatch.setattr(tasks, "write_chunk_files", die)
    assert _plan(job).chunk_seconds == budget.CHUNK_SECONDS


def test_a_plan_of_rows_without_ids_is_made_and_the_job_names_the_row(made, tmp_path):
    table = pq.read_table(made / "rows.parquet")
    ids = pa.array([None if number == 50 else str(number) for number in range(100)])
    pq.write_table(table.set_column(1, "id", ids), tmp_path / "rows.parquet", write_statistics=False)
    paths, options = (
        (made / "model", tmp_path / "rows.parquet", tmp_path / "out"),
        {"chunk_rows": 10, "id_column": "id"},
    )
    assert dkfm.plan_score(*paths, **options).chunks == 10
    with pytest.raises(InvalidInputError, match="Row 50 of"):
        dkfm.batch_score(*paths, **options, progress=False)


def test_a_plan_keeps_no_rows_in_memory(fitted, tmp_path):
    zarr.create_array(tmp_path / "z.zarr", data=np.ones((400, 4)), chunks=(200, 4))
    _plan((fitted, tmp_path / "z.zarr", tmp_path / "out"))
    assert not len(chunk_cache._chunks)


def test_a_plan_whose_chunks_are_done_writes_none(job, monkeypatch):
    dkfm.batch_score(*job, chunk_rows=10, progress=False)
    monkeypatch.setattr(tasks, "write_chunk_files", None)
    assert _plan(job).done == 10


def test_a_plan_measures_rows_that_the_job_would_refuse(fitted, rng, tmp_path):
    rows = rng.normal(size=(40, 4))
    rows[:3] = np.nan
    assert _plan((fitted, rows, tmp_path / "out")).row_seconds > 0


def test_a_plan_asks_an_object_store_for_its_response_time_and_writes_nothing(job, monkeypatch):
    size, memory = Remote.size, "memory://dkfm-planned"

    def answer_slowly(self, name=""):
        time.sleep(_SLOW)
        return size(self, name)

    monkeypatch.setattr(Remote, "size", answer_slowly)
    plans = [_plan((*job[:2], f"{memory}/out.zarr"), output=names) for names in (["scores"], None)]
    for plan in plans:
        assert plan.chunk_seconds > budget.CHUNK_SECONDS + 6 * _SLOW
    remote = pytest.importorskip("fsspec").filesystem("memory")
    assert not remote.exists("/dkfm-planned")


def test_a_plan_of_one_column_says_one_column(rng, tmp_path):
    model = dkfm.KernelPCA(1).fit(rng.normal(size=(9, 1)))
    plan = dkfm.plan_score(model, rng.normal(size=(20, 1)), tmp_path / "out")
    assert str(plan).startswith("rows    20 of 1 column, to 1 column of scores\n")


def test_an_estimator_that_is_not_fitted_is_said_to_be_none(tmp_path):
    with pytest.raises(NotFittedError, match="This KernelPCA instance is not fitted yet"):
        dkfm.batch_score(dkfm.KernelPCA(2), np.eye(5), tmp_path / "out")
    with pytest.raises(InvalidInputError, match="model must be a path or a fitted estimator"):
        dkfm.batch_score(dkfm.KernelPCA, np.eye(5), tmp_path / "out")


def test_a_plan_counts_what_a_process_keeps_of_a_source_once(fitted, rng, tmp_path, monkeypatch):
    table, path = pa.table({f"x{i}": rng.normal(size=200) for i in range(4)}), tmp_path / "rows.parquet"
    pq.write_table(table, path, row_group_size=50)
    kept = ParquetSource.open(path).cached_bytes
    for chunk_rows in (10, 100):  # parts of row groups, and whole ones
        options = {"chunk_rows": chunk_rows, "columns": table.column_names}
        plan = dkfm.plan_score(fitted, path, tmp_path / "out", **options)
        with monkeypatch.context() as patch:
            patch.setattr(ParquetSource, "cached_bytes", kept + 10**6)
            more = dkfm.plan_score(fitted, path, tmp_path / "out", **options)
        assert more.model_bytes - plan.model_bytes == 10**6
        assert more.task_bytes == plan.task_bytes


def test_tasks_of_a_kernel_whose_values_take_long_score_fewer_rows(rng):
    X, Z, plans = rng.dirichlet(np.ones(50), size=200), np.zeros((400_000, 50)), []
    for kernel in (
        kernels.Gaussian(1.0),
        kernels.JensenShannon(),
        0.5 * kernels.JensenShannon() + kernels.Gaussian(1.0),
    ):
        model = dkfm.KernelPCA(2, kernel=kernel).fit(X).model_
        plans.append(planning.plan_with_model_in_memory(model, ["scores"], open_source(Z)))
    simple, slow, of_both = plans
    assert slow.row_seconds > 20 * simple.row_seconds
    assert slow.row_seconds < of_both.row_seconds < 1.1 * slow.row_seconds
    assert slow.chunk_rows < simple.chunk_rows
    of_two_columns = kernels.JensenShannon().on([3, 7])
    assert of_two_columns.estimate_extra_value_seconds(50) == kernels.JensenShannon().estimate_extra_value_seconds(2)
