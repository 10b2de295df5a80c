"""Batch scoring: every row there and right, whatever the chunks; outputs that are not finished are never read."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfm
from dkfm import kernels
from dkfm.core.chunking import count_tiles
from dkfm.errors import (
    BudgetError,
    DamagedStoreError,
    DkfmError,
    IncompleteStoreError,
    InvalidInputError,
    KernelError,
    StoreError,
    StoreExistsError,
    UnsupportedStoreError,
)
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.files import local
from dkfm.numerics import links
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import Scorer, prepare_scorer
from dkfm.scoring import chunk_files, completion, outputs, planning, tasks
from dkfm.scoring.chunk_files import OutputColumns
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source
from dkfm.sources.zarr import ZarrSource
from dkfm.storage import model_store, zarr_store


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


def write(output, number, values):
    """Write one chunk of an output of one array, as its task does."""
    pieces = (chunk_files.Piece({"scores": part}) for part in values)
    still = partial(outputs.require_run, output.root, output.run)
    return chunk_files.write_chunk_files(output.form, output.chunk(number), pieces, still)


def begun(root, rows, width, chunk_rows):
    """Make an output without chunks."""
    about = {"path": "", "digest": ""}, {"name": "", "stamp": ""}, {"on_invalid": "raise"}
    columns = (OutputColumns("scores", width, "kernelpca", "float64"),)
    return outputs.create_output(outputs.Output(root, columns, rows, chunk_rows, "float64", *about), overwrite=False)


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


def test_an_output_that_exists_is_left_untouched(job, fitted, tmp_path):
    score(job)
    before = (job[2] / "_COMPLETE").read_bytes()
    with pytest.raises(StoreExistsError, match="complete output of another job: chunk_rows is '9'"):
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
    with pytest.raises(InvalidInputError, match=r"z\.npy must be finite, and row 57 contains"):
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
        (tmp_path / "none", job[1], {}, "is not a store"),
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
    monkeypatch.setattr(memory, "available_memory", lambda: 2_000)
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
    with pytest.raises(DamagedStoreError, match="Chunk 0"):
        dkfm.verify_scores(job[2])


def test_a_task_of_an_earlier_run_writes_nothing_into_a_later_one(job):
    score(job, chunk_rows=30)
    before = outputs.read_output(job[2])
    score(job, chunk_rows=30, overwrite=True)
    with pytest.raises(StoreError, match="another run"):
        write(before, 0, (np.zeros((30, 3)) for _ in range(1)))
    assert dkfm.verify_scores(job[2]).rows == 100


def test_a_run_that_was_replaced_does_not_complete_the_other(job):
    score(job, chunk_rows=30)
    before = outputs.read_output(job[2])
    receipts = completion.marker_receipts(before)
    score(job, chunk_rows=30, overwrite=True)
    with pytest.raises(StoreError, match="another run"):
        completion.complete_output(before, receipts)
    assert dkfm.verify_scores(job[2]).rows == 100


def test_a_chunk_that_a_late_task_wrote_over_is_found_by_its_readers_and_by_the_next_run(job):
    score(job, chunk_rows=30)
    good = (job[2] / "scores" / "c" / "0" / "0").read_bytes()
    zarr_store.open_array(job[2], "scores", "r+")[:30] = 0.0
    with pytest.raises(DamagedStoreError, match="Chunk 0"):
        dkfm.open_scores(job[2])
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
    for chunk in range(4):
        folders = [str(root / path) for path in (f"scores/c/{chunk}", "scores/c", "scores")]
        assert all(folder in synced[:marker] for folder in folders)
        before = next(i for i, path in enumerate(synced) if path.startswith(f"{folders[0]}/.0."))
        assert before < synced.index(folders[0]), "the values, before they have their name"
    assert str(root) in synced[marker:], "the name of the marker too"


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
        if path.name == "c":
            raise OSError(28, "No space left on device")
        sync_folder(path)

    monkeypatch.setattr(local, "sync_folder", full)
    with pytest.raises(StoreError, match="No space left on device"):
        score(job)
    monkeypatch.undo()
    with pytest.raises(IncompleteStoreError):
        dkfm.open_scores(job[2])
    assert score(job).scored_chunks == score(job).chunks


def test_a_job_of_too_many_chunks_is_refused_before_it_starts(fitted, tmp_path):
    zarr.create_array(tmp_path / "z.zarr", shape=(10**9, 4), chunks=(10**6, 4), dtype="f8")
    with pytest.raises(InvalidInputError, match="raise chunk_rows"):
        planning.plan_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"), 100)


MEMORY = [
    kernels.Gaussian(3.0),
    kernels.Polynomial(7, scale=0.01),
    kernels.Laplacian(3.0),
    sum(kernels.Gaussian(float(s)) for s in range(1, 6)),
    ((kernels.Gaussian(1.0) + kernels.Polynomial(3)) * kernels.Linear() + 1.0) ** 2,
    kernels.Function(lambda X, Y: X @ Y.T),
]


def write_late(monkeypatch, pieces):
    """Let each of some pieces be written once the next is scored, as on a slow disk: a task then holds the most."""
    scored, written = [], []
    score, behind = tasks._score_all, chunk_files.one_behind

    def score_all(*given):
        found = score(*given)
        scored.append(1)
        return found

    def late(use, piece):
        written.append(1)
        while len(scored) < min(len(written) + 1, pieces):
            time.sleep(0.001)
        use(piece)

    monkeypatch.setattr(tasks, "_score_all", score_all)
    monkeypatch.setattr(chunk_files, "write_behind", lambda items, use: behind(items, partial(late, use)))


def measured(model, names, folder, rng, monkeypatch):
    """Return the plan of a job, and the bytes that a prepared model and then a task of it took."""
    import tracemalloc

    d = model.landmarks.shape[1]
    zarr.create_array(folder / "z.zarr", data=rng.normal(size=(3000, d)), chunks=(1000, d))
    source = open_source(folder / "z.zarr")
    job = planning.plan_in_memory(model, names, source, 1500)
    with single_blas_thread():
        model.kernel(np.ones((1, d)))  # what is compiled or imported once is not a task's
        prepare_scorer(model).several(names, np.ones((1, d)))
    columns = tuple(OutputColumns(name, model.head(name).width, name, model.head(name).dtype.name) for name in names)
    about = {"path": "", "digest": ""}, {"name": "", "stamp": ""}, {"on_invalid": "raise"}
    output = outputs.create_output(
        outputs.Output(folder / "out", columns, 3000, 1500, "float64", *about), overwrite=False
    )
    write_late(monkeypatch, count_tiles(1500, job.piece_rows))
    tracemalloc.start()
    try:
        scorer = prepare_scorer(model)
        kept = tracemalloc.get_traced_memory()[0]
        monkeypatch.setattr(tasks, "get_saved_scorer", lambda *_: scorer)
        work = tasks.ChunkWork("", "", (), False, source, job.piece_rows, output, on_invalid="raise")
        with ThreadPoolExecutor(1) as fresh:  # this thread may have a buffer from before
            fresh.submit(tasks.score_chunk, work, 0).result()
        return job, kept, tracemalloc.get_traced_memory()[1] - kept
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", MEMORY, ids=repr)
def test_the_memory_of_a_scoring_task_is_at_most_what_was_planned(kernel, tmp_path, rng, monkeypatch):
    model = Model(kernel, rng.normal(size=(4000, 60)), {"scores": Head(rng.normal(size=(4000, 20)))})
    job, kept, peak = measured(model, ["scores"], tmp_path, rng, monkeypatch)
    assert kept + model.nbytes <= job.model_bytes + 100_000  # a few small objects
    assert peak <= job.task_bytes <= 3 * peak


@pytest.mark.slow
@pytest.mark.parametrize("link", [links.ARGMAX, links.SIGMOID, links.SOFTMAX, links.MODIFIED_HUBER])
def test_the_memory_of_a_task_of_many_classes_is_at_most_what_was_planned(link, tmp_path, rng, monkeypatch):
    W, b = rng.normal(size=(1000, 800)), rng.normal(size=800)
    heads = {"decision": Head(W, b), "outcome": Head(W, b, link=link)}
    model = Model(kernels.Gaussian(3.0), rng.normal(size=(1000, 10)), heads)
    job, _, peak = measured(model, list(heads), tmp_path, rng, monkeypatch)
    assert peak <= job.task_bytes <= 3 * peak


def test_a_chunk_that_is_too_large_is_cut_evenly_and_counted_once_a_process(fitted, tmp_path):
    zarr.create_array(tmp_path / "z.zarr", shape=(10**7, 4), chunks=(10**7, 4), dtype="f8")
    job = planning.plan_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"))
    assert job.chunks * job.chunk_rows == 10**7
    assert job.piece_rows * 8 * 4 < 10**7  # it is long, and read in pieces
    # All tasks of a process share the chunk; before, a task was the whole of it, and a part of it was read with it all.
    assert job.model_bytes > 2 * 10**7 * 4 * 8 > 2 * job.task_bytes
    # A part that is not even may lie in two chunks: of both it takes its rows alone.
    uneven = planning.plan_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"), 30_000)
    assert uneven.model_bytes > 2 * 10**7 * 4 * 8 > 2 * uneven.task_bytes


def test_parts_of_a_chunk_decode_it_once_and_another_opening_decodes_it_anew(tmp_path, rng, monkeypatch):
    rows = rng.normal(size=(1000, 3))
    zarr.create_array(tmp_path / "z.zarr", data=rows, chunks=(400, 3))
    source, decoded, read = open_source(tmp_path / "z.zarr"), [], ZarrSource._read
    monkeypatch.setattr(ZarrSource, "_read", lambda self, part: decoded.append(part) or read(self, part))
    parts = [source.read(slice(a, a + 100)) for a in (0, 100, 400, 200, 500, 300, 600, 800, 700, 900)]
    assert len(decoded) == 3  # two chunks are kept, for threads on both sides of a border
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda a: source.read(slice(a, a + 70)), range(0, 980, 70)))
    np.testing.assert_array_equal(np.vstack(parts), rows[:980])
    zarr.open_array(tmp_path / "z.zarr", mode="r+")[:] = rows + 1
    again = open_source(tmp_path / "z.zarr")
    np.testing.assert_array_equal(again.read(slice(0, 100)), rows[:100] + 1)
    assert source == again


@pytest.mark.parametrize("chunk", [30, 64, 1000], ids=str)
def test_any_cut_of_the_sources_chunks_gives_the_same_scores(fitted, chunk, tmp_path, rng):
    rows = rng.normal(size=(1000, 4))
    zarr.create_array(tmp_path / "z.zarr", data=rows, chunks=(chunk, 4))
    fitted.save(tmp_path / "model")
    for place, rows_of_a_task in enumerate((None, 50, 125, 333)):
        dkfm.batch_score(
            tmp_path / "model", tmp_path / "z.zarr", tmp_path / f"{place}", chunk_rows=rows_of_a_task, progress=False
        )
        found = dkfm.open_scores(tmp_path / f"{place}").compute(scheduler="synchronous")
        np.testing.assert_allclose(found, fitted.transform(rows), atol=1e-13)


def test_a_task_reads_in_pieces_while_it_scores(fitted, tmp_path, monkeypatch):
    zarr.create_array(tmp_path / "z.zarr", data=np.ones((800, 4)), chunks=(100, 4))
    fitted.save(tmp_path / "model")
    job = planning.plan_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"), 800)
    assert (job.chunks, job.piece_rows) == (1, 200)
    events, read, several = [], ZarrSource.read, Scorer.several
    reading = threading.Event()

    def slowly(self, rows):
        events.append("read")
        reading.set()
        return read(self, rows)

    def after_the_next_read(*arguments):
        if events.count("read") < 4:
            assert reading.wait(30)  # by a thread, while this one has its rows already
        reading.clear()
        events.append("scored")
        return several(*arguments)

    monkeypatch.setattr(ZarrSource, "read", slowly)
    monkeypatch.setattr(Scorer, "several", after_the_next_read)
    dkfm.batch_score(tmp_path / "model", tmp_path / "z.zarr", tmp_path / "out", chunk_rows=800, progress=False)
    assert events.count("read") == events.count("scored") == 4
    assert events.index("scored") >= 1


@pytest.mark.parametrize(
    "basis", ["cholesky", *(pytest.param(basis, marks=pytest.mark.slow) for basis in ("symmetric", "spectral"))]
)
@pytest.mark.parametrize("output", ["features", "residual"])
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_model_that_is_too_large_is_read_from_its_store_and_scores_the_same(
    basis, output, dtype, tmp_path, rng, monkeypatch
):
    from dkfm.execution import memory
    from dkfm.storage import stored_weights

    X, Z = rng.normal(size=(600, 5)), rng.normal(size=(500, 5))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis=basis, dtype=dtype, centered=True).fit(X)
    phi.save(tmp_path / "model")
    model, reads, take = phi.model_, [], stored_weights._InStore.__getitem__
    monkeypatch.setattr(stored_weights, "PANEL_BYTES", 600 * 70 * model.dtype.itemsize)
    monkeypatch.setattr(model_store, "_CHUNK_BYTES", 600 * 10 * model.dtype.itemsize)
    phi.save(tmp_path / "model", overwrite=True)
    monkeypatch.setattr(
        stored_weights._InStore, "__getitem__", lambda self, places: reads.append(places) or take(self, places)
    )
    job = planning.plan_in_memory(model, [output], open_source(Z), 60)
    monkeypatch.setattr(memory, "available_memory", lambda: job.model_bytes + job.task_bytes - 1)
    monkeypatch.setattr("dask.system.CPU_COUNT", 1)
    report = dkfm.batch_score(tmp_path / "model", Z, tmp_path / "out", output=output, chunk_rows=60, progress=False)
    assert report.chunks == 9
    assert len(reads) >= 2 * report.chunks
    found = dkfm.open_scores(tmp_path / "out").compute(scheduler="synchronous")
    expected = phi.transform(Z) if output == "features" else phi.residual(Z)[:, np.newaxis]
    assert found.dtype == expected.dtype == dtype
    head = model.heads[output]
    values, W = np.abs(phi.kernel_(Z, model.points)), np.abs(head.weights[:, : head.first])
    error = 64 * np.finfo(dtype).eps * (values @ W + (0 if head.offset is None else np.abs(head.offset)))
    bound = error if head.rotation is None else (error * head.rotation) @ W.T
    if output == "residual":
        bound = (2 * error).sum(axis=1, keepdims=True) + 64 * np.finfo(dtype).eps
    assert (np.abs(found - expected) <= bound).all()


def test_a_model_that_is_too_large_even_in_parts_is_refused_with_both_numbers(tmp_path, rng, monkeypatch):
    from dkfm.execution import memory

    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="cholesky").fit(rng.normal(size=(600, 5)))
    phi.save(tmp_path / "model")
    monkeypatch.setattr(memory, "available_memory", lambda: 500_000)
    with pytest.raises(BudgetError, match=r"task of 64 rows needs .* are there"):
        dkfm.batch_score(tmp_path / "model", np.ones((1000, 5)), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_streamed_model_that_is_replaced_or_moved_is_never_taken_for_another(tmp_path, rng):
    from dkfm.execution.model_cache import get_saved_scorer, remove_model

    one, other = (dkfm.ExactFeatureMap(kernels.Gaussian(1.0)).fit(rng.normal(size=(30, 2))) for _ in range(2))
    one.save(tmp_path / "model")
    one.save(tmp_path / "copy")
    digest, Z = model_store.load_record(tmp_path / "model", streamed=True).digest, rng.normal(size=(5, 2))
    scorer = get_saved_scorer(str(tmp_path / "model"), digest, streamed=True)
    np.testing.assert_allclose(scorer("features", Z), one.transform(Z), atol=1e-12)
    other.save(tmp_path / "model", overwrite=True)
    with pytest.raises(DamagedStoreError, match="replaced"):
        scorer("features", Z)
    again = get_saved_scorer(str(tmp_path / "copy"), digest, streamed=True)
    np.testing.assert_allclose(again("features", Z), one.transform(Z), atol=1e-12)
    remove_model(digest)
    assert get_saved_scorer(str(tmp_path / "copy"), digest, streamed=True) is not again
    remove_model(digest)


def test_rows_of_a_streamed_task_are_as_many_as_memory_takes_whatever_the_chunks(tmp_path, rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="cholesky").fit(rng.normal(size=(600, 50)))
    phi.save(tmp_path / "model")
    model = model_store.load_record(tmp_path / "model", streamed=True).model
    for chunk in (1000, 8191, 8192, 65536):
        zarr.create_array(tmp_path / f"{chunk}", shape=(10**6, 50), chunks=(chunk, 50), dtype="f8")
        job = planning.plan_streamed(model, ["features"], open_source(tmp_path / f"{chunk}"), lambda shared: 10**8)
        assert 1000 <= job.chunk_rows <= 4096
        assert job.task_bytes <= 10**8


@pytest.mark.parametrize(
    "kernel", [kernels.Polynomial(9), kernels.Matern(1.5), kernels.Constant(1.0) + kernels.Gaussian(5.0)], ids=repr
)
def test_the_blocks_of_kernels_that_do_not_fill_or_that_widen_are_counted(kernel, rng, tmp_path):
    import tracemalloc

    from dkfm.numerics.model import Head, Model
    from dkfm.numerics.scorer import prepare_scorer

    n, dtype = 3000, np.dtype(np.float32)
    heads = {"scores": Head(rng.normal(size=(n, 2)).astype(dtype))}
    model, Z = Model(kernel, rng.normal(size=(n, 20)).astype(dtype), heads), rng.normal(size=(4000, 20))
    job, score = planning.plan_in_memory(model, ["scores"], open_source(Z), 4000), prepare_scorer(model)
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(score, "scores", Z[: job.piece_rows]).result()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= job.task_bytes


def test_weights_that_are_read_from_a_store_are_checked(tmp_path, rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="cholesky").fit(rng.normal(size=(30, 2)))
    phi.save(tmp_path / "model")
    head = model_store.load_record(tmp_path / "model", streamed=True).model.heads["features"]
    np.testing.assert_array_equal(head.weights[0:30, 0:30], phi.model_.heads["features"].weights)
    chunk = next((tmp_path / "model").glob("head.*/c/0/0"))
    good = chunk.read_bytes()
    chunk.write_bytes(good[:9] + bytes([good[9] ^ 1]) + good[10:])
    with pytest.raises(DamagedStoreError, match="cannot be read"):
        head.weights[0:30, 0:30]
    chunk.unlink()
    with pytest.raises(DamagedStoreError, match="gone"):
        head.weights[0:30, 0:30]
    below = np.tril(np.ones((30, 30)))
    group = zarr.open_group(tmp_path / "model", mode="r+")
    group[chunk.parents[2].name][:] = below
    with pytest.raises(UnsupportedStoreError, match="triangular"):
        head.weights[0:30, 0:30]


def test_a_scoring_task_pickles_to_under_ten_kilobytes(job):
    score(job)
    work = tasks.ChunkWork(
        str(job[0]), "0" * 64, (), True, open_source(job[1]), 4, outputs.read_output(job[2]), "raise"
    )
    assert len(pickle.dumps((tasks.score_chunk, work, 3))) < 5_000


def test_a_replaced_model_is_not_taken_for_the_one_that_was_asked_for(job, rng):
    from dkfm.execution.model_cache import get_saved_scorer

    dkfm.KernelPCA(1).fit(rng.normal(size=(9, 4))).save(job[0], overwrite=True)
    with pytest.raises(DamagedStoreError, match="another model"):
        get_saved_scorer(str(job[0]), "f" * 64)


def test_chunks_of_a_plan_are_in_step_with_the_source(fitted, tmp_path):
    zarr.create_array(tmp_path / "z.zarr", shape=(10**6, 4), chunks=(7_000, 4), dtype="f8")
    job = planning.plan_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"))
    assert job.chunk_rows % 7_000 == 0
    assert job.chunks == -(-(10**6) // job.chunk_rows)
    assert job.task_bytes > job.chunk_rows * 8 * 7


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("rows", [1, 500, 240_000, 1_000_003])
def test_no_thread_waits_for_the_last_chunk_of_another(rows, threads, fitted):
    source = MemorySource(np.broadcast_to(np.zeros(fitted.n_features_in_), (rows, fitted.n_features_in_)))
    alone = planning.plan_in_memory(fitted.model_, ["scores"], source)
    job = planning.plan_in_memory(fitted.model_, ["scores"], source, threads=threads)
    assert job.chunk_rows <= alone.chunk_rows
    busiest = job.chunk_rows * -(-job.chunks // threads)
    assert job.chunks == alone.chunks if alone.chunks <= threads else busiest <= 1.02 * (rows / threads + threads)


def test_a_disk_that_fills_up_in_the_middle_of_a_chunk_is_told_in_a_sentence_and_leaves_nothing(job, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chunk_files, "_SOON", 0)
    monkeypatch.setattr(chunk_files.os, "fdatasync", full)
    with pytest.raises(StoreError, match="cannot be written: No space left on device"):
        score(job)
    assert not [path for path in (job[2] / "scores" / "c").rglob("*") if path.is_file()]


def test_a_run_that_is_replaced_while_a_task_scores_is_not_written_into(job):
    score(job, chunk_rows=30)
    before = outputs.read_output(job[2])
    (job[2] / "scores" / "c" / "0" / "0").unlink()

    def late():
        yield np.zeros((20, 3))
        score(job, chunk_rows=30, overwrite=True)
        yield np.zeros((10, 3))

    with pytest.raises(StoreError):
        write(before, 0, late())
    assert dkfm.verify_scores(job[2]).rows == 100
    assert not list(job[2].rglob("*.partial"))


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
    (held_by_file,), found = write(outputs.read_output(job[2]), 0, pieces())
    np.testing.assert_array_equal(zarr_store.open_array(job[2], "scores")[:30, 0], np.repeat(np.arange(10.0), 3))
    assert not held_by_file.invalid.any()
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
