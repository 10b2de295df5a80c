"""Millions of rows through a saved model: plan, tasks that own whole chunks, receipts, completion marker.

A task carries two paths, a digest and a slice; the model is opened once per worker process.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from dkfm import apply, budget, csr, decoded, npz, outputs, planning, preflight, sources, tiling
from dkfm.ahead import one_ahead
from dkfm.clusters import executor, find_client
from dkfm.errors import InvalidInputError
from dkfm.job import run
from dkfm.kernels import config, trust
from dkfm.kernels.base import Kernel
from dkfm.kernels.rows import Array, Rows, finite_rows
from dkfm.model import Model
from dkfm.planning import Plan
from dkfm.record import load_record
from dkfm.sources import MemorySource, Source, open_source, read_finite
from dkfm.store import local_path, making, writing
from dkfm.workers import forget, saved_scorer, single_blas_thread

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client

__all__ = [
    "Savable",
    "ScoreReport",
    "Work",
    "batch_score",
    "main_output",
    "open_scores",
    "score_chunk",
]


@runtime_checkable
class Savable(Protocol):
    """An estimator that writes itself to a store."""

    @property
    def kernel_(self) -> Kernel:
        """The kernel as fitted."""

    def save(self, path: str | Path) -> None:
        """Write the model."""


@dataclass(frozen=True)
class ScoreReport:
    """What a finished scoring job did."""

    path: str
    rows: int
    invalid_rows: int
    chunks: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        """Rows divided by the seconds from the first task to the last."""
        return self.rows / self.seconds if self.seconds > 0 else float("inf")


def batch_score(
    model: "str | Path | Savable",
    source: object,
    destination: str | Path,
    *,
    output: str | None = None,
    client: "Client | None" = None,
    on_invalid: str = "raise",
    chunk_rows: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
    trusted: Collection[str] = (),
) -> ScoreReport:
    """Score the rows of a source through a model into a Zarr output.

    Parameters
    ----------
    model : path or fitted estimator
        A saved model, or an estimator, which is saved for the time of the job.
    source : path, zarr.Array or array-like of shape (n, d)
        Where the rows are: a .npy file, a Zarr store, or store.zarr/array. On a cluster every worker must see it.
    destination : str or Path
        Where the output is made; it must not exist.
    output : str, optional
        Which output of the model: by default "scores" of a KernelPCA, which has "reconstruction_error" too, and
        "features" of a map, which has "residual".
    client : distributed.Client, optional
        By default the current one, else threads of this process.
    on_invalid : {"raise", "nan"}
        A row with NaN or infinity stops the job before its chunk is written, or scores NaN and is counted.
    chunk_rows : int, optional
        Rows of a task, which is one chunk of the output.
    overwrite : bool
        Whether an earlier output of dkfm's at `destination` is replaced.
    progress : bool
        Whether to show a progress bar.
    trusted : collection of str
        Functions of yours, as ``module:function``, that may be imported and run as the kernel of a saved model; every
        worker must be able to import them.

    Returns
    -------
    ScoreReport

    Raises
    ------
    InvalidInputError, StoreError, BudgetError, ClusterError
        In one sentence each; the output is then without its marker, and no reader takes it for finished.

    Examples
    --------
    >>> import dkfm, numpy as np, tempfile
    >>> X = np.random.default_rng(0).normal(size=(300, 5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dkfm.KernelPCA(2, kernel=dkfm.kernels.Gaussian(3.0)).fit(X[:100]).save(folder + "/model")
    ...     report = dkfm.batch_score(folder + "/model", X, folder + "/scores.zarr", progress=False)
    ...     report.rows, dkfm.open_scores(folder + "/scores.zarr").shape
    (300, (300, 2))
    """
    if on_invalid not in ("raise", "nan"):
        raise InvalidInputError(f'on_invalid must be "raise" or "nan", and is {on_invalid!r}.')
    if chunk_rows is not None:
        chunk_rows = tiling.require_count(chunk_rows, "chunk_rows")
    trusted = trust.as_trusted(trusted)
    target, client = local_path(destination).absolute(), find_client(client)
    with _saved(model) as path, _on_disk(source, client) as rows, executor(client) as running:
        if isinstance(model, Savable):
            trusted = config.functions(model.kernel_)
        record = load_record(path, trusted=trusted, streamed=True)
        name = main_output(record.model) if output is None else output
        job = _planned(record.model, name, rows, chunk_rows, client, running.threads)
        _require_outside(target, path, rows)
        shape, dtype = (job.rows, job.width), str(record.model.dtype)
        run_id = outputs.create(target, name, shape, job.chunk_rows, record.digest, rows.name, overwrite, dtype)
        read = sources.in_single(rows) if record.model.dtype == np.float32 else rows
        work = Work(
            str(path), record.digest, trusted, job.streamed, read, job.piece_rows, str(target), run_id, name, on_invalid
        )
        tasks = ((work, chunk, part) for chunk, part in enumerate(tiling.row_slices(job.rows, job.chunk_rows)))
        start = time.perf_counter()
        try:
            receipts = run(running, "dkfm-score", score_chunk, tasks, job.chunks, progress)
        finally:
            forget(record.digest)
            decoded.forget()
            npz.forget()
        seconds = time.perf_counter() - start
        outputs.complete(target, run_id, name, receipts)
    return ScoreReport(str(target), job.rows, sum(r.invalid_rows for r in receipts), job.chunks, seconds)


def _planned(
    model: Model, output: str, source: Source, chunk_rows: int | None, client: "Client | None", threads: int
) -> Plan:
    """Plan a job with its weights in the memory of every worker, or, where that is too little, read from the store."""
    job = planning.plan(model, output, source, chunk_rows, threads)
    have = preflight.task_budget(client, threads, job.model_bytes)
    if job.task_bytes > have and model.stored_values:
        job = planning.plan_streamed(
            model, output, source, lambda shared: preflight.task_budget(client, threads, shared), chunk_rows
        )
        have = preflight.task_budget(client, threads, job.model_bytes)
    remedy = "use a smaller chunk_rows, a source of smaller chunks, fewer threads, or more memory"
    budget.require(job.task_bytes, have, f"A scoring task of {job.chunk_rows} rows", remedy)
    return job


def _require_outside(target: Path, model: Path, source: Source) -> None:
    """Refuse to replace what is being read."""
    for path in (model, getattr(source, "path", None)):
        if path is not None and path.resolve().is_relative_to(target.resolve()):
            raise InvalidInputError(f"The output {target} would replace {path}, which this job reads.")


def main_output(model: Model) -> str:
    """Return the first output of a model, the one it is made for."""
    return next(iter(model.heads))


@contextmanager
def _saved(model: "str | Path | Savable") -> Iterator[Path]:
    if isinstance(model, str | os.PathLike):
        yield local_path(model).absolute()
        return
    if not isinstance(model, Savable):
        raise InvalidInputError(f"model must be a path or a fitted estimator of dkfm's, and is {model!r:.100}.")
    folder = Path(tempfile.mkdtemp(prefix="dkfm-model-"))
    try:
        model.save(folder / "model")
        yield folder / "model"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _on_disk(source: object, client: "Client | None") -> Iterator[Source]:
    """Yield the rows; those of an array in memory are put where the workers of a client can read them."""
    rows = open_source(source, "source")
    if client is None or not isinstance(rows, MemorySource):
        yield rows
        return
    folder = Path(tempfile.mkdtemp(prefix="dkfm-rows-"))
    try:
        if isinstance(rows.array, np.ndarray):
            with writing(folder):
                np.save(folder / "rows.npy", rows.array)
            yield open_source(folder / "rows.npy")
            return
        with making(folder / "rows.zarr", "rows", {}, csr.array_names("rows")) as group:
            csr.write(group, "rows", rows.array)
        yield csr.CsrSource(folder / "rows.zarr", "rows", rows.shape, rows.row_values)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Work:
    """What all tasks of a job share: paths, names and numbers."""

    model: str
    digest: str
    trusted: tuple[str, ...]
    streamed: bool
    source: Source
    piece_rows: int
    target: str
    run_id: str
    output: str
    on_invalid: str


def score_chunk(work: Work, chunk: int, rows: slice) -> outputs.Receipt:
    """Score the rows of one chunk, write it, and return its receipt."""
    scorer = saved_scorer(work.model, work.digest, work.trusted, work.streamed)
    with single_blas_thread():
        return outputs.write_chunk(Path(work.target), work.run_id, work.output, chunk, _scores(work, scorer, rows))


def _scores(work: Work, scorer: apply.Scorer, rows: slice) -> Generator[Array]:
    """Yield the scores of some rows, piece by piece; while one is scored the next is read."""
    read = read_finite if work.on_invalid == "raise" else _read
    parts = [
        slice(rows.start + part.start, rows.start + part.stop)
        for part in tiling.row_slices(rows.stop - rows.start, work.piece_rows)
    ]
    for part, Z in zip(parts, one_ahead([partial(read, work.source, part) for part in parts]), strict=True):
        if work.on_invalid == "raise":
            yield apply.finite_scores(scorer, work.output, Z, work.source.name, part.start)
        else:
            yield _score_valid(scorer, work.output, Z)


def _read(source: Source, rows: slice) -> Rows:
    return source.read(rows)


def _score_valid(score: apply.Scorer, output: str, Z: Rows) -> Array:
    valid, rows = finite_rows(Z)
    with np.errstate(over="ignore", invalid="ignore"):
        scores = score(output, rows)
    scores[~(valid & np.isfinite(scores).all(axis=1))] = np.nan
    return scores


def open_scores(path: str | Path) -> "da.Array":
    """Open a finished output as a lazy dask array of shape (n, width).

    Raises
    ------
    StoreError
        Nothing there, not finished, or a chunk lost, cut short or without a receipt; when it is computed, a chunk
        whose bytes changed.

    Examples
    --------
    See `batch_score`.
    """
    import dask.array as da

    scores = outputs.Chunks.open(local_path(path).absolute())
    lazy: da.Array = da.from_array(scores, chunks=(scores.chunk_rows, scores.shape[1]), asarray=False)
    return lazy
