"""Batch scoring: every row there and right, whatever the chunks; outputs that are not finished are never read."""

import importlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dkfm
from dkfm import kernels
from dkfm.core import budget, cpus
from dkfm.errors import (
    BudgetError,
    DamagedStoreError,
    DkfmError,
    DkfmWarning,
    IncompleteStoreError,
    InvalidInputError,
    KernelError,
    StoreError,
    StoreExistsError,
    UnsupportedStoreError,
)
from dkfm.files import local
from dkfm.scoring import completion, marker, output_store, planning
from dkfm.scoring.formats.chunk_files import OutputColumns
from dkfm.sources.opening import open_source
from dkfm.storage import zarr_store
from helpers.recorded import drop_resource_warnings
from helpers.scoring_jobs import score, write


def begun(root, rows, width, chunk_rows):
    """Make an output without chunks."""
    about = {"path": "", "digest": ""}, {"name": "", "stamp": ""}, {"on_invalid": "raise"}
    columns = (OutputColumns("scores", width, "kernelpca", "float64"),)
    return output_store.create_output(
        output_store.Output(root, columns, rows, chunk_rows, "float64", *about), overwrite=False
    )


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 50))
@settings(max_examples=10)
def test_any_chunking_gives_the_rows_of_transform(tmp_path_factory, n, chunk, source_chunk):
    folder, rng = tmp_path_factory.mktemp("job"), np.random.default_rng(n)
    fitted = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(30, 3)))
    fitted.save(folder / "model")
    Z = rng.normal(size=(n, 3))
    zarr.create_array(folder / "z.zarr", data=Z, chunks=(source_chunk, 2))
    report = dkfm.batch_score(folder / "model", folder / "z.zarr", folder / "out", chunk_rows=chunk, progress=False)
    found = dkfm.open_scores(folder / "out")
    assert (report.rows, report.chunks, found.shape) == (n, -(-n // min(chunk, n)), (n, 2))
    np.testing.assert_allclose(found.compute(scheduler="synchronous"), fitted.transform(Z), atol=1e-12)


@pytest.mark.slow
def test_every_output_of_a_map_can_be_scored(rng, tmp_path):
    Z = rng.normal(size=(30, 3))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0)).fit(rng.normal(size=(40, 3)))
    dkfm.batch_score(phi, Z, tmp_path / "f", progress=False)
    dkfm.batch_score(phi, Z, tmp_path / "r", output="residual", chunk_rows=7, progress=False)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "f").compute(), phi.transform(Z), atol=1e-12)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "r").compute()[:, 0], phi.residual(Z), atol=1e-12)
    with pytest.raises(InvalidInputError, match="it has features, residual"):
        dkfm.batch_score(phi, Z, tmp_path / "x", output="labels", progress=False)
    assert not (tmp_path / "x").exists()


def test_two_runs_give_the_same_bytes(job, tmp_path):
    score(job, chunk_rows=30)
    dkfm.batch_score(job[0], job[1], tmp_path / "again", chunk_rows=30, progress=False)
    for chunk in range(4):
        name = f"scores/c/{chunk}/0"
        assert (job[2] / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.slow
def test_an_output_that_exists_is_left_untouched(job, fitted, tmp_path):
    score(job)
    before = (job[2] / "_COMPLETE").read_bytes()
    with pytest.raises(StoreExistsError, match="complete output of another job: chunk_rows is 9"):
        score(job, chunk_rows=9)
    with pytest.raises(StoreExistsError, match="dkfm model store"):
        dkfm.batch_score(fitted, job[1], job[0], progress=False)
    assert (job[2] / "_COMPLETE").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(StoreExistsError):
            dkfm.batch_score(job[0], job[1], tmp_path / "mine", overwrite=overwrite, progress=False)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"
    assert score(job, overwrite=True, chunk_rows=9).chunks == 12


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_invalid_row_stops_the_job_by_number_before_its_chunk_is_written(job, value):
    rows = np.load(job[1])
    rows[57, 2] = value
    np.save(job[1], rows)
    with pytest.raises(InvalidInputError, match=r"z\.npy must be finite, and row 57 contains .* in column 2;"):
        score(job, chunk_rows=10)
    assert not list((job[2] / "scores" / "c").glob("5/*"))  # nor what was begun of it
    with pytest.raises(IncompleteStoreError):
        dkfm.open_scores(job[2])


def test_invalid_rows_can_score_nan_and_are_counted(job, fitted):
    rows = np.load(job[1])
    rows[[3, 57, 58], [0, 1, 2]] = [np.nan, np.inf, 1e300]
    np.save(job[1], rows)
    report = score(job, chunk_rows=10, on_invalid="nan")
    found = dkfm.open_scores(job[2]).compute()
    assert report.invalid_rows == 2
    assert np.flatnonzero(np.isnan(found).any(axis=1)).tolist() == [3, 57]
    good = np.setdiff1d(np.arange(100), [3, 57])
    np.testing.assert_allclose(found[good], fitted.transform(rows[good]), atol=1e-12)


def test_rows_that_overflow_the_kernel_are_invalid_too(rng, tmp_path):
    pca = dkfm.KernelPCA(1, kernel=kernels.Polynomial(3)).fit(rng.normal(size=(9, 1)))
    Z = np.array([[1.0], [1e200], [2.0]])
    with pytest.raises(KernelError, match="Row 1 of source overflows Polynomial"):
        dkfm.batch_score(pca, Z, tmp_path / "a", progress=False)
    assert dkfm.batch_score(pca, Z, tmp_path / "b", on_invalid="nan", progress=False).invalid_rows == 1


def test_bad_jobs_are_refused_in_one_sentence_before_anything_is_written(job, tmp_path, rng):
    np.save(tmp_path / "wide.npy", rng.normal(size=(5, 7)))
    nothing = dkfm.KernelPCA().fit(np.ones((3, 4)))
    for model, source, options, words in [
        (job[0], tmp_path / "wide.npy", {}, "7 columns and the model was fitted with 4"),
        (job[0], tmp_path / "none.npy", {}, "There is no"),
        (tmp_path / "none", job[1], {}, "There is nothing at"),
        (job[0], job[1], {"on_invalid": "skip"}, "on_invalid"),
        *((job[0], job[1], {"chunk_rows": bad}, "chunk_rows") for bad in (0, 2.5, "a", True)),
        (3, job[1], {}, "path or a fitted estimator"),
        (nothing, job[1], {}, "do not vary"),
    ]:
        with pytest.raises(DkfmError, match=words) as caught:
            dkfm.batch_score(model, source, tmp_path / "out", progress=False, **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_a_task_that_does_not_fit_is_refused_with_both_numbers(job, monkeypatch):
    from dkfm.execution import memory

    # Less than a tile of the fixture's rows: a task counts the rows that it has, not a full tile.
    monkeypatch.setattr(memory, "measure_free_memory", lambda: 2_000)
    with pytest.raises(BudgetError, match=r"needs .*bytes.*are there"):
        score(job)
    assert not job[2].exists()


def test_an_unfinished_or_damaged_output_is_refused_by_readers(job):
    score(job, chunk_rows=30)
    chunk = job[2] / "scores" / "c" / "2" / "0"
    good, marker = chunk.read_bytes(), (job[2] / "_COMPLETE").read_bytes()
    assert dkfm.verify_scores(job[2]).rows == 100
    chunk.write_bytes(bytes([good[0] ^ 4]) + good[1:])
    with pytest.raises(DamagedStoreError, match="Chunk 2"):
        dkfm.verify_scores(job[2])
    with pytest.raises(DamagedStoreError, match="Chunk 2"):
        dkfm.open_scores(job[2]).compute(scheduler="synchronous")
    os.truncate(chunk, 50)
    with pytest.raises(DamagedStoreError, match="Chunk 2"):
        dkfm.open_scores(job[2])
    chunk.unlink()
    with pytest.raises(DamagedStoreError):
        dkfm.open_scores(job[2])
    chunk.write_bytes(good)
    told = json.loads(marker)
    shorter = told | {"crc32c": told["crc32c"][1:]}
    wrong = [told | {"crc32c": crc} for crc in (3, ["a", None, 1, 2], [["a"]] * 4, [[1, 2]] * 4, [[-1]] * 4, None)]
    others = [told | {"sum": "0" * 64}, told | {"bytes": [1.5] * 4}, told | {"invalid_rows": [True] * 4}]
    for text in map(json.dumps, [shorter, {}, *wrong, *others]):
        (job[2] / "_COMPLETE").write_text(text)
        with pytest.raises(DamagedStoreError):
            dkfm.open_scores(job[2])
    (job[2] / "_COMPLETE").write_bytes(marker)
    assert dkfm.open_scores(job[2]).shape == (100, 3)


def test_receipts_are_those_of_the_data_on_disk_and_differ_from_chunk_to_chunk(job):
    import google_crc32c

    score(job, chunk_rows=30)
    marker = json.loads((job[2] / "_COMPLETE").read_text())
    local = [(job[2] / "scores" / "c" / str(i) / "0").read_bytes() for i in range(4)]
    assert marker["crc32c"] == [[google_crc32c.value(raw[:-4])] for raw in local]
    assert len({crc for (crc,) in marker["crc32c"]}) == 4


def test_chunks_that_changed_places_are_found(job):
    score(job, chunk_rows=30)
    first, second = (job[2] / "scores" / "c" / str(i) / "0" for i in range(2))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    with pytest.raises(DamagedStoreError, match=r"^Chunks 0, 1 of .* are .* \(scores/c/0/0, scores/c/1/0\)"):
        dkfm.verify_scores(job[2])


def test_a_task_of_an_earlier_run_writes_nothing_into_a_later_one(job):
    score(job, chunk_rows=30)
    before = output_store.read_output(job[2])
    score(job, chunk_rows=30, overwrite=True)
    with pytest.raises(StoreError, match="another run"):
        write(before, 0, (np.zeros((30, 3)) for _ in range(1)))
    assert dkfm.verify_scores(job[2]).rows == 100


def test_a_run_that_was_replaced_does_not_complete_the_other(job):
    score(job, chunk_rows=30)
    before = output_store.read_output(job[2])
    receipts = dict(enumerate(marker.read_receipt_table(before)))
    score(job, chunk_rows=30, overwrite=True)
    with pytest.raises(StoreError, match="another run"):
        completion.complete_output(before, receipts)
    assert dkfm.verify_scores(job[2]).rows == 100


def test_a_chunk_that_a_late_task_wrote_over_is_found_by_its_readers_and_by_the_next_run(job):
    score(job, chunk_rows=30)
    good = (job[2] / "scores" / "c" / "0" / "0").read_bytes()
    zarr_store.open_array(job[2], "scores", "r+")[:30] = 0.0
    with pytest.raises(DamagedStoreError, match="Chunk 0"):
        dkfm.open_scores(job[2]).compute(scheduler="synchronous")
    assert score(job).scored_chunks == 1
    assert (job[2] / "scores" / "c" / "0" / "0").read_bytes() == good


def test_scores_that_were_opened_are_not_those_of_a_later_run(job, rng):
    score(job, chunk_rows=30)
    before = dkfm.open_scores(job[2])
    score(job, chunk_rows=30, overwrite=True)
    assert dkfm.open_scores(job[2]).name != before.name
    with pytest.raises(StoreError, match="another run"):
        before.compute(scheduler="synchronous")


def test_a_chunk_that_is_lost_after_opening_is_an_error_and_not_nan(job):
    score(job, chunk_rows=30)
    scores = dkfm.open_scores(job[2])
    (job[2] / "scores" / "c" / "1" / "0").unlink()
    assert np.isfinite(scores[:30].compute(scheduler="synchronous")).all()
    with pytest.raises(DamagedStoreError, match="Chunk 1"):
        scores[25:35].compute(scheduler="synchronous")


def test_nothing_is_written_inside_a_model(job):
    for inside in ("scores.zarr", "deep/er/scores.zarr"):
        with pytest.raises(InvalidInputError, match="which this job reads"):
            dkfm.batch_score(job[0], job[1], job[0] / inside, progress=False)
    dkfm.load(job[0])


def test_what_does_not_read_back_as_it_was_written_is_no_chunk(job, monkeypatch):
    honest = os.pread
    monkeypatch.setattr(os, "pread", lambda *a: bytes(honest(*a)[:-1]) + b"?")
    with pytest.raises(DamagedStoreError, match="read back"):
        score(job)
    with pytest.raises(IncompleteStoreError):
        dkfm.open_scores(job[2])


def test_every_chunk_and_every_name_is_durable_before_the_marker(job, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or fsync(fd))
    score(job, chunk_rows=30)
    root = job[2]
    marker = next(i for i, path in enumerate(synced) if "_COMPLETE" in path)
    first_chunk = next(i for i, path in enumerate(synced) if path.startswith(str(root / "scores/c")))
    made = synced[:first_chunk]
    assert any(path.endswith(".partial/scores") for path in made), "the folder of all chunks, before it has its name"
    assert str(root.parent) in made
    for chunk in range(4):
        folders = [str(root / path) for path in (f"scores/c/{chunk}", "scores/c")]
        assert all(folder in synced[:marker] for folder in folders)
        before = next(i for i, path in enumerate(synced) if path.startswith(f"{folders[0]}/.0."))
        assert before < synced.index(folders[0]), "the values, before they have their name"
    assert str(root) in synced[marker:], "the name of the marker too"


def test_a_job_that_resumes_makes_the_folder_of_chunks_durable_too(job, monkeypatch):
    score(job, chunk_rows=30)
    for name in ("_COMPLETE", "scores/c/1/0"):
        (job[2] / name).unlink()
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or fsync(fd))
    assert score(job, chunk_rows=30).scored_chunks == 1
    assert synced.index(str(job[2] / "scores")) < synced.index(str(job[2] / "scores/c/1"))


def test_the_name_of_a_chunk_that_a_killed_task_wrote_is_durable_before_its_receipt(job, monkeypatch):
    score(job, chunk_rows=30)
    (job[2] / "_COMPLETE").unlink()
    shutil.rmtree(job[2] / "_journal")
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or fsync(fd))
    score(job, chunk_rows=30)
    last = max(i for i, path in enumerate(synced) if "_journal" in path)  # the first may be of other chunks
    assert {str(job[2] / "scores/c/1"), str(job[2] / "scores/c")} <= set(synced[:last])


def test_overwrite_leaves_what_the_user_put_beside_the_scores(job):
    score(job)
    zarr.open_group(job[2], mode="r+").create_array("labels", data=np.ones(3))
    with pytest.raises(StoreExistsError, match="labels"):
        score(job, overwrite=True)
    assert zarr.open_array(job[2] / "labels")[:].tolist() == [1, 1, 1]


def test_a_job_does_not_replace_what_it_reads(job):
    score(job, chunk_rows=30)
    before = (job[2] / "_COMPLETE").read_bytes()
    pca = dkfm.KernelPCA(1).fit(np.eye(3))
    with pytest.raises(InvalidInputError, match="which this job reads"):
        dkfm.batch_score(pca, job[2] / "scores", job[2], overwrite=True, progress=False)
    assert (job[2] / "_COMPLETE").read_bytes() == before


def test_an_output_whose_array_is_a_link_is_refused(job, tmp_path):
    score(job)
    (job[2] / "scores").rename(tmp_path / "outside")
    (job[2] / "scores").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsupportedStoreError, match="link"):
        dkfm.open_scores(job[2])


def test_a_full_disk_is_a_sentence_and_no_finished_output(job, monkeypatch):
    sync_folder = local.sync_folder

    def full(path):
        if path.parent.name == "c":
            raise OSError(28, "No space left on device")
        sync_folder(path)

    monkeypatch.setattr(local, "sync_folder", full)
    with pytest.raises(StoreError, match="No space left on device"):
        score(job)
    monkeypatch.undo()
    with pytest.raises(IncompleteStoreError):
        dkfm.open_scores(job[2])
    assert score(job).scored_chunks == score(job).chunks


def test_chunks_whose_files_take_long_are_warned_of(fitted, tmp_path, monkeypatch):
    rows = np.zeros((4_000, fitted.model_.n_features_in))
    monkeypatch.setattr(planning, "_LONG_SECONDS", 4_000 * budget.CHUNK_SECONDS / cpus.COUNT)
    with pytest.warns(DkfmWarning, match="4,000 chunks of 1 rows are as many files, which alone take about") as warned:
        dkfm.plan_score(fitted, rows, tmp_path / "out", chunk_rows=1)
    (warning,) = drop_resource_warnings(warned)
    suggested = re.search(r"chunk_rows \(--chunk-rows\) of ([\d,]+) or more", str(warning.message))[1]
    assert 1 < int(suggested.replace(",", "")) <= 4_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dkfm.plan_score(fitted, rows, tmp_path / "out", chunk_rows=2)


@pytest.mark.slow
def test_the_time_of_a_plan_is_that_of_its_kernel(tmp_path, monkeypatch):
    (tmp_path / "plain_product.py").write_text("def product(x, y):\n    return float(max(x @ y for _ in range(20)))\n")
    monkeypatch.syspath_prepend(tmp_path)
    product = importlib.import_module("plain_product").product
    rows, seconds = np.random.default_rng(0).normal(size=(60, 3)), []
    for kernel in (kernels.Gaussian(1.0), kernels.Pairwise(product)):  # a thousand times as long
        seconds.append(dkfm.plan_score(dkfm.KernelPCA(2, kernel=kernel).fit(rows), rows, tmp_path / "out").row_seconds)
    assert 0 < 10 * seconds[0] < seconds[1]
    assert not (tmp_path / "out").exists()


def test_a_job_of_too_many_chunks_is_refused_before_it_starts(fitted, tmp_path):
    zarr.create_array(tmp_path / "z.zarr", shape=(10**9, 4), chunks=(10**6, 4), dtype="f8")
    with pytest.raises(InvalidInputError, match="raise chunk_rows"):
        planning.plan_with_model_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"), 100)


def test_a_pipeline_is_refused_in_a_sentence_that_says_what_is_meant(fitted, tmp_path):
    pipeline = make_pipeline(StandardScaler(), dkfm.KernelPCA(2)).fit(np.eye(5))
    told = r"is Pipeline; fit\(X, standardize=True\) or kernels.Standardize take the place"
    with pytest.raises(InvalidInputError, match=told):
        dkfm.batch_score(pipeline, np.eye(5), tmp_path / "out")
    assert not (tmp_path / "out").exists()
