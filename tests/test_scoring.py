"""Batch scoring: every row there and right, whatever the chunks; outputs that are not finished are never read."""

import json
import os
import pickle

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfm
from dkfm import kernels, outputs, scoring
from dkfm.errors import (
    BudgetError,
    DamagedStoreError,
    DkfmError,
    IncompleteStoreError,
    InvalidInputError,
    KernelError,
    StoreExistsError,
)
from dkfm.sources import open_source


@pytest.fixture
def fitted(rng):
    return dkfm.KernelPCA(3, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(60, 4)))


@pytest.fixture
def job(fitted, rng, tmp_path):
    """A saved model, a source of 100 rows, and where the output goes."""
    fitted.save(tmp_path / "model")
    np.save(tmp_path / "z.npy", rng.normal(size=(100, 4)))
    return tmp_path / "model", tmp_path / "z.npy", tmp_path / "scores.zarr"


def score(job, **options):
    return dkfm.batch_score(*job, progress=False, **options)


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


def test_an_output_that_exists_is_left_untouched(job, tmp_path):
    score(job)
    before = (job[2] / "_COMPLETE").read_bytes()
    with pytest.raises(StoreExistsError, match="complete dkfm scores store"):
        score(job)
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
    with pytest.raises(InvalidInputError, match=r"z\.npy must be finite, and row 57"):
        score(job, chunk_rows=10)
    assert not (job[2] / "scores" / "c" / "5").exists()
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
    with pytest.raises(KernelError, match="Row 1 of source overflows"):
        dkfm.batch_score(pca, Z, tmp_path / "a", progress=False)
    assert dkfm.batch_score(pca, Z, tmp_path / "b", on_invalid="nan", progress=False).invalid_rows == 1


def test_bad_jobs_are_refused_in_one_sentence_before_anything_is_written(job, tmp_path, rng):
    np.save(tmp_path / "wide.npy", rng.normal(size=(5, 7)))
    nothing = dkfm.KernelPCA().fit(np.ones((3, 4)))
    for model, source, options, words in [
        (job[0], tmp_path / "wide.npy", {}, "7 columns and the model was fitted with 4"),
        (job[0], tmp_path / "none.npy", {}, "There is no"),
        (tmp_path / "none", job[1], {}, "no store"),
        (job[0], job[1], {"on_invalid": "skip"}, "on_invalid"),
        (job[0], job[1], {"chunk_rows": 0}, "chunk_rows"),
        (3, job[1], {}, "path or a fitted estimator"),
        (nothing, job[1], {}, "do not vary"),
    ]:
        with pytest.raises(DkfmError, match=words) as caught:
            dkfm.batch_score(model, source, tmp_path / "out", progress=False, **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_a_task_that_does_not_fit_is_refused_with_both_numbers(job, monkeypatch):
    from dkfm import preflight

    monkeypatch.setattr(preflight, "available_memory", lambda: 100_000)
    with pytest.raises(BudgetError, match=r"needs .*bytes.*are there"):
        score(job)
    assert not job[2].exists()


def test_an_unfinished_or_damaged_output_is_refused_by_readers(job):
    score(job, chunk_rows=30)
    chunk = job[2] / "scores" / "c" / "2" / "0"
    good, marker = chunk.read_bytes(), (job[2] / "_COMPLETE").read_bytes()
    assert outputs.verify(job[2]) == 100
    chunk.write_bytes(bytes([good[0] ^ 4]) + good[1:])
    with pytest.raises(DamagedStoreError, match="Chunk 2"):
        outputs.verify(job[2])
    with pytest.raises(ValueError, match="checksum"):
        dkfm.open_scores(job[2]).compute(scheduler="synchronous")
    os.truncate(chunk, 50)
    with pytest.raises(DamagedStoreError, match="50 bytes"):
        dkfm.open_scores(job[2])
    chunk.unlink()
    with pytest.raises(DamagedStoreError):
        dkfm.open_scores(job[2])
    chunk.write_bytes(good)
    shorter = json.loads(marker)
    shorter["receipts"].pop()
    for text in (json.dumps(shorter), "{}", '{"receipts": [{}]}', '{"receipts": 3}'):
        (job[2] / "_COMPLETE").write_text(text)
        with pytest.raises(DamagedStoreError):
            dkfm.open_scores(job[2])
    (job[2] / "_COMPLETE").write_bytes(marker)
    assert dkfm.open_scores(job[2]).shape == (100, 3)


def test_receipts_are_those_of_the_bytes_on_disk(job):
    import google_crc32c

    score(job, chunk_rows=30)
    for receipt in json.loads((job[2] / "_COMPLETE").read_text())["receipts"]:
        raw = (job[2] / "scores" / "c" / str(receipt["chunk"]) / "0").read_bytes()
        assert (receipt["nbytes"], receipt["crc32c"]) == (len(raw), google_crc32c.value(raw))
        assert receipt["rows"] == (30 if receipt["chunk"] < 3 else 10)


def test_a_scoring_task_pickles_to_under_ten_kilobytes(job):
    digest = "0" * 64
    task = (
        scoring.score_chunk,
        str(job[0]),
        digest,
        open_source(job[1]),
        str(job[2]),
        "scores",
        "raise",
        3,
        slice(0, 9),
    )
    assert len(pickle.dumps(task)) < 10_000


def test_a_replaced_model_is_not_taken_for_the_one_that_was_asked_for(job, rng):
    from dkfm.workers import saved_scorer

    dkfm.KernelPCA(1).fit(rng.normal(size=(9, 4))).save(job[0], overwrite=True)
    with pytest.raises(DamagedStoreError, match="another model"):
        saved_scorer(str(job[0]), "f" * 64)


def test_chunks_of_a_plan_are_in_step_with_the_source(fitted, tmp_path):
    zarr.create_array(tmp_path / "z.zarr", shape=(10**6, 4), chunks=(7_000, 4), dtype="f8")
    job = scoring.plan(fitted.model_, "scores", open_source(tmp_path / "z.zarr"))
    assert job.chunk_rows % 7_000 == 0
    assert job.chunks == -(-(10**6) // job.chunk_rows)
    assert job.task_bytes > job.chunk_rows * 8 * 7
