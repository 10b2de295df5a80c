"""Batch scoring: every row there and right, whatever the chunks; outputs that are not finished are never read."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import zarr

import dkfm
from dkfm import kernels
from dkfm.core.chunking import count_tiles
from dkfm.errors import (
    BudgetError,
    DamagedStoreError,
    UnsupportedStoreError,
)
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.numerics import links
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import Scorer, prepare_scorer
from dkfm.scoring import output_store, planning, tasks
from dkfm.scoring.formats import chunk_files
from dkfm.scoring.formats.chunk_files import OutputColumns
from dkfm.sources.opening import open_source
from dkfm.sources.zarr import ZarrSource
from dkfm.storage import model_store

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
    score, behind = tasks._score_or_raise, chunk_files.overlap_writes

    def score_all(*given):
        found = score(*given)
        scored.append(1)
        return found

    def late(use, piece):
        written.append(1)
        while len(scored) < min(len(written) + 1, pieces):
            time.sleep(0.001)
        use(piece)

    monkeypatch.setattr(tasks, "_score_or_raise", score_all)
    monkeypatch.setattr(
        chunk_files, "overlap_writes", lambda items, use, count: behind(items, partial(late, use), count)
    )


def measured(model, names, folder, rng, monkeypatch):
    """Return the plan of a job, and the bytes that a prepared model and then a task of it took."""
    import tracemalloc

    d = model.landmarks.shape[1]
    zarr.create_array(folder / "z.zarr", data=rng.normal(size=(3000, d)), chunks=(1000, d))
    source = open_source(folder / "z.zarr")
    job = planning.plan_with_model_in_memory(model, names, source, 1500)
    with single_blas_thread():
        model.kernel(np.ones((1, d)))  # what is compiled or imported once is not a task's
        prepare_scorer(model).score_heads(names, np.ones((1, d)))
    heads = [model.head(name) for name in names]
    columns = tuple(
        OutputColumns(n, head.width, n, head.output_dtype.name) for n, head in zip(names, heads, strict=True)
    )
    about = {"path": "", "digest": ""}, {"name": "", "stamp": ""}, {"on_invalid": "raise"}
    output = output_store.create_output(
        output_store.Output(folder / "out", columns, 3000, 1500, "float64", *about), overwrite=False
    )
    write_late(monkeypatch, count_tiles(1500, job.piece_rows))
    tracemalloc.start()
    try:
        scorer = prepare_scorer(model)
        kept = tracemalloc.get_traced_memory()[0]
        monkeypatch.setattr(tasks, "get_saved_scorer", lambda *_: scorer)
        work = tasks.SharedTaskArguments("", "", (), False, source, job.piece_rows, output, on_invalid="raise")
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
    job = planning.plan_with_model_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"))
    assert job.chunks * job.chunk_rows == 10**7
    assert job.piece_rows * 8 * 4 < 10**7  # it is long, and read in pieces
    # All tasks of a process share the chunk; before, a task was the whole of it, and a part of it was read with it all.
    assert job.model_bytes > 2 * 10**7 * 4 * 8 > 2 * job.task_bytes
    # A part that is not even may lie in two chunks: of both it takes its rows alone.
    uneven = planning.plan_with_model_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"), 30_000)
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


@pytest.mark.slow
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
    job = planning.plan_with_model_in_memory(fitted.model_, ["scores"], open_source(tmp_path / "z.zarr"), 800)
    assert (job.chunks, job.piece_rows) == (1, 200)
    events, read, several = [], ZarrSource.read, Scorer.score_heads
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
    monkeypatch.setattr(Scorer, "score_heads", after_the_next_read)
    dkfm.batch_score(tmp_path / "model", tmp_path / "z.zarr", tmp_path / "out", chunk_rows=800, progress=False)
    assert events.count("read") == events.count("scored") == 4
    assert events.index("scored") >= 1


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["cholesky", "symmetric", "spectral"])
@pytest.mark.parametrize("output", ["features", "residual"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_model_that_is_too_large_is_read_from_its_store_and_scores_the_same(
    basis, output, dtype, tmp_path, rng, monkeypatch
):
    from dkfm.execution import memory
    from dkfm.storage import streamed_weights

    X, Z = rng.normal(size=(600, 5)), rng.normal(size=(500, 5))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis=basis, dtype=dtype, centered=True).fit(X)
    phi.save(tmp_path / "model")
    model, reads, take = phi.model_, [], streamed_weights._ZarrWeights.__getitem__
    monkeypatch.setattr(streamed_weights, "PANEL_BYTES", 600 * 70 * model.dtype.itemsize)
    monkeypatch.setattr(model_store, "CHUNK_BYTES", 600 * 10 * model.dtype.itemsize)
    phi.save(tmp_path / "model", overwrite=True)
    monkeypatch.setattr(
        streamed_weights._ZarrWeights, "__getitem__", lambda self, places: reads.append(places) or take(self, places)
    )
    job = planning.plan_with_model_in_memory(model, [output], open_source(Z), 60)
    monkeypatch.setattr(memory, "measure_free_memory", lambda: job.model_bytes + job.task_bytes - 1)
    monkeypatch.setattr("dkfm.core.cpus.COUNT", 1)
    report = dkfm.batch_score(tmp_path / "model", Z, tmp_path / "out", output=output, chunk_rows=60, progress=False)
    assert report.chunks == 9
    assert len(reads) >= 2 * report.chunks
    found = dkfm.open_scores(tmp_path / "out").compute(scheduler="synchronous")
    expected = phi.transform(Z) if output == "features" else phi.residual(Z)[:, np.newaxis]
    assert found.dtype == expected.dtype == dtype
    head = model.heads[output]
    values, W = np.abs(phi.kernel_(Z, model.original_landmarks)), np.abs(head.weights[:, : head.n_leading_columns])
    error = 64 * np.finfo(dtype).eps * (values @ W + (0 if head.offset is None else np.abs(head.offset)))
    bound = error if head.sqrt_eigenvalues is None else (error * head.sqrt_eigenvalues) @ W.T
    if output == "residual":
        bound = (2 * error).sum(axis=1, keepdims=True) + 64 * np.finfo(dtype).eps
    assert (np.abs(found - expected) <= bound).all()


def test_a_model_that_is_too_large_even_in_parts_is_refused_with_both_numbers(tmp_path, rng, monkeypatch):
    from dkfm.execution import memory

    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="cholesky").fit(rng.normal(size=(600, 5)))
    phi.save(tmp_path / "model")
    monkeypatch.setattr(memory, "measure_free_memory", lambda: 500_000)
    with pytest.raises(BudgetError, match=r"task of 64 rows needs .* are there"):
        dkfm.batch_score(tmp_path / "model", np.ones((1000, 5)), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_streamed_model_that_is_replaced_or_moved_is_never_taken_for_another(tmp_path, rng):
    from dkfm.execution.model_cache import get_saved_scorer, remove_model

    one, other = (dkfm.ExactFeatureMap(kernels.Gaussian(1.0)).fit(rng.normal(size=(30, 2))) for _ in range(2))
    one.save(tmp_path / "model")
    one.save(tmp_path / "copy")
    digest, Z = model_store.load_record(tmp_path / "model", streamed=True).digest, rng.normal(size=(5, 2))
    scorer = get_saved_scorer(str(tmp_path / "model"), digest, stream_weights=True)
    np.testing.assert_allclose(scorer("features", Z), one.transform(Z), atol=1e-12)
    other.save(tmp_path / "model", overwrite=True)
    with pytest.raises(DamagedStoreError, match="replaced"):
        scorer("features", Z)
    again = get_saved_scorer(str(tmp_path / "copy"), digest, stream_weights=True)
    np.testing.assert_allclose(again("features", Z), one.transform(Z), atol=1e-12)
    remove_model(digest)
    assert get_saved_scorer(str(tmp_path / "copy"), digest, stream_weights=True) is not again
    remove_model(digest)


@pytest.mark.slow
def test_rows_of_a_streamed_task_are_as_many_as_memory_takes_whatever_the_chunks(tmp_path, rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="cholesky").fit(rng.normal(size=(600, 50)))
    phi.save(tmp_path / "model")
    model = model_store.load_record(tmp_path / "model", streamed=True).model
    for chunk in (1000, 8191, 8192, 65536):
        zarr.create_array(tmp_path / f"{chunk}", shape=(10**6, 50), chunks=(chunk, 50), dtype="f8")
        job = planning.plan_with_streamed_weights(
            model, ["features"], open_source(tmp_path / f"{chunk}"), lambda shared: 10**8
        )
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
    job, score = planning.plan_with_model_in_memory(model, ["scores"], open_source(Z), 4000), prepare_scorer(model)
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
