"""Millions of rows through a saved model: plan, tasks that own whole chunks, receipts, completion marker.

A task carries two paths, a digest and a slice; the model is opened once per worker process.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from dkfm import apply, budget, csr, links, outputs, preflight, tiling
from dkfm.clusters import executor, find_client
from dkfm.errors import InvalidInputError
from dkfm.job import run
from dkfm.kernels import config, trust
from dkfm.kernels.base import Kernel
from dkfm.kernels.rows import Array, Rows, finite_rows, stored_values
from dkfm.model import Model
from dkfm.record import load_record
from dkfm.sources import MemorySource, Source, open_source, read_finite
from dkfm.store import local_path, making, writing
from dkfm.workers import forget, saved_scorer, single_blas_thread

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client

__all__ = [
    "Plan",
    "Savable",
    "ScoreReport",
    "batch_score",
    "main_output",
    "open_scores",
    "plan",
    "score_chunk",
]

_TASK_VALUES = 2**25
"""Kernel values of a task: half a second of work, and some hundred times the scheduler's share."""

_TASK_BYTES = 2**27
"""Rows in and scores out of a task."""

_MAX_CHUNKS = 2**22
"""Receipts that one marker holds."""


@runtime_checkable
class Savable(Protocol):
    """An estimator that writes itself to a store."""

    @property
    def kernel_(self) -> Kernel:
        """The kernel as fitted."""

    def save(self, path: str | Path) -> None:
        """Write the model."""


@dataclass(frozen=True)
class Plan:
    """What a scoring job will do; plain numbers, made before anything is written."""

    rows: int
    columns: int
    width: int
    chunk_rows: int
    chunks: int
    task_bytes: int
    model_bytes: int


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


def plan(model: Model, output: str, source: Source, chunk_rows: int | None = None) -> Plan:
    """Plan a job: chunks of about half a second, in step with the chunks of the source.

    Raises
    ------
    InvalidInputError
        The source has another number of columns than the model.
    """
    n, d, rows, values = model.landmarks.shape[0], model.columns, source.shape[0], source.row_values
    if source.shape[1] != d:
        raise InvalidInputError(f"{source.name} has {source.shape[1]} columns and the model was fitted with {d}.")
    width = model.head(output).width
    if model.kernel.of_numbers and model.head(output).link == links.RESIDUAL:
        raise InvalidInputError("The residual of a precomputed kernel needs k(z, z): use residual(Z, diag=) in Python.")
    if width == 0:
        raise InvalidInputError(f"This model has no {output}: its training rows do not vary.")
    if chunk_rows is None:
        # Whole chunks of the source: a part of one costs as much to read.
        wanted = min(_TASK_VALUES // n, _TASK_BYTES // (16 * (values + width)))
        chunk_rows = max(1, wanted // source.chunk_rows) * source.chunk_rows
    chunk_rows = min(chunk_rows, rows)
    chunks = tiling.count(rows, chunk_rows)
    if chunks > _MAX_CHUNKS:
        raise InvalidInputError(f"{rows} rows in {chunks} chunks are more than {_MAX_CHUNKS}; raise chunk_rows.")
    # Zarr decodes ten chunks at a time, each compressed and decoded, beside the rows asked for.
    touched = min(10, tiling.count(chunk_rows, source.chunk_rows) + 1)
    kernel, read = model.kernel, 2 * 8 * values * min(source.chunk_rows, rows) * touched
    task = read + budget.score_task_bytes(chunk_rows, values, n, width, apply.tile_rows(n), kernel.blocks)
    held, stored = stored_values(model.landmarks), model.head_values
    return Plan(rows, d, width, chunk_rows, chunks, task, budget.model_bytes(n, held, stored, kernel.copies))


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
        Which output of the model: by default "scores" of a KernelPCA and "features" of a map; "residual" of a map.
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
        record = load_record(path, trusted=trusted)
        name = main_output(record.model) if output is None else output
        job = plan(record.model, name, rows, chunk_rows)
        _require_memory(job, client, running.threads)
        _require_outside(target, path, rows)
        shape = (job.rows, job.width)
        run_id = outputs.create(target, name, shape, job.chunk_rows, record.digest, rows.name, overwrite)
        common = (str(path), record.digest, trusted, rows, str(target), run_id, name, on_invalid)
        slices = enumerate(tiling.row_slices(job.rows, job.chunk_rows))
        start = time.perf_counter()
        try:
            tasks = ((*common, chunk, part) for chunk, part in slices)
            receipts = run(running, "dkfm-score", score_chunk, tasks, job.chunks, progress)
        finally:
            forget(record.digest)
        seconds = time.perf_counter() - start
        outputs.complete(target, run_id, name, receipts)
    return ScoreReport(str(target), job.rows, sum(r.invalid_rows for r in receipts), job.chunks, seconds)


def _require_memory(job: Plan, client: "Client | None", threads: int) -> None:
    have = preflight.task_budget(client, threads, job.model_bytes)
    remedy = "use a smaller chunk_rows, a source of smaller chunks, fewer threads, or more memory"
    budget.require(job.task_bytes, have, f"A scoring task of {job.chunk_rows} rows", remedy)


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


def score_chunk(
    model: str,
    digest: str,
    trusted: tuple[str, ...],
    source: Source,
    target: str,
    run_id: str,
    output: str,
    on_invalid: str,
    chunk: int,
    rows: slice,
) -> outputs.Receipt:
    """Score the rows of one chunk, write it, and return its receipt."""
    score = saved_scorer(model, digest, trusted)
    with single_blas_thread():
        if on_invalid == "raise":
            scores = apply.finite_scores(score, output, read_finite(source, rows), source.name, rows.start)
        else:
            scores = _score_valid(score, output, source.read(rows))
    return outputs.write_chunk(Path(target), run_id, output, chunk, rows, scores)


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
