"""Find the pivots of training rows, and sum their features, by passes over rows that may stay in their store."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dkfm.core import budget
from dkfm.core.frames import convert_container, is_dask_collection
from dkfm.core.rows import Array, Rows
from dkfm.execution import memory, progress
from dkfm.execution.clusters.current_client import find_client
from dkfm.execution.executors import Executor, open_executor, open_threads
from dkfm.execution.job_input import open_input
from dkfm.execution.scoring_threads import may_use_threads
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.files import change_detection
from dkfm.files.row_values import count_memory_and_disk_bytes
from dkfm.gram.fit_checkpoints import NO_CHECKPOINT, Checkpoint, open_checkpoint
from dkfm.gram.row_passes import RowPasses
from dkfm.gram.shared_arrays import SharedArrays, open_shared_arrays
from dkfm.gram.streamed_pivots import PivotSearch, find_streamed_pivots
from dkfm.gram.streamed_rows import SourceRows, StreamedRows, is_stored
from dkfm.gram.training_data import TrainingData, TrainingRows, as_training_data
from dkfm.kernels.base import Kernel
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics import training_statistics
from dkfm.numerics.model import Head, Model, predict_row_seconds
from dkfm.numerics.pivoted_cholesky import Pivots, forecast_rank, pivot_threshold
from dkfm.numerics.roots import Root
from dkfm.numerics.scorer import prepare_scorer
from dkfm.numerics.training_statistics import WeightedRows
from dkfm.sources.base import NamedColumns, Source, digest_rows, read_finite
from dkfm.sources.memory import MemorySource

_TYPICAL_RANK = 1024
"""Number of pivots for which workers must have memory."""


_MIN_ROWS = 1024
"""Smallest number of rows in memory whose features are summed in tiles."""


def can_stream_rows(estimator: Any, kernel: Kernel) -> bool:
    """Return whether a fit of an estimator with a kernel needs no more than tiles of its rows at a time."""
    if not hasattr(estimator, "landmarks") or kernel.is_precomputed:  # no feature map, or no rows
        return False
    in_rounds = estimator.build in ("auto", "rounds")
    if estimator.landmarks is None:
        return bool(estimator.basis == "cholesky" and in_rounds)
    if isinstance(estimator.landmarks, str) and estimator.landmarks in ("pivots", "random_pivots"):
        return in_rounds
    return not isinstance(estimator.landmarks, str) or estimator.landmarks == "uniform"


def is_stored_or_lazy(X: object, kernel: Kernel, streams: bool) -> bool:
    """Return whether the X of a fit is stored rows or, with `streams`, a dask collection: see `open_stored_rows`."""
    return not kernel.is_precomputed and (is_stored(X) or (streams and is_dask_collection(convert_container(X))))


@contextmanager
def open_stored_rows(
    X: object, streams: bool, fitted_columns: Sequence[str] | None = None
) -> Iterator[tuple[object, tuple[str, ...] | None]]:
    """Open stored rows or a dask collection for a fit; yield the rows and the names of their columns.

    With `streams`, stored rows stay in their store, and those of a collection are in files of a temporary folder. Else
    all rows are read into memory. From tables with column names, `fitted_columns` are read.

    Raises
    ------
    InvalidInputError
        The rows changed before the context ended.
    """
    with (
        open_input(X, "X", find_client(None), fitted_columns=fitted_columns) as source,
        change_detection.require_unchanged(source, "read", "fit again") as watch,
    ):
        if streams:
            rows: object = SourceRows(source, watch)
        else:
            rows = read_finite(source.with_float32_preserved(), slice(0, source.shape[0]))
        yield rows, source.columns if isinstance(source, NamedColumns) else None


def find_pivots(
    data: TrainingData,
    limit: int | None,
    rng: np.random.RandomState | None,
    *,
    tol: float | None,
    workspace: str | Path | None,
    show_progress: bool,
) -> Pivots:
    """Find pivots among the rows of a source, on the current Dask client or on threads of this process.

    Parameters
    ----------
    data : TrainingData
        Training rows, stored or in memory.
    limit : int, optional
        Largest number of pivots.
    rng : RandomState, optional
        Draws pivots in proportion to residuals; by default the largest residual is first.
    tol : float, optional
        Error bound to reach.
    workspace : str or Path, optional
        Folder for the files that the workers of a cluster read, and for the state from which a killed search resumes.
    show_progress : bool
        Whether to show a progress bar.

    Raises
    ------
    BudgetError
        The factor of the pivots does not fit in memory.
    """
    kernel = data.kernel
    source = data.source if isinstance(data, StreamedRows) else MemorySource(data.indexable_rows)
    watch = data.watch if isinstance(data, StreamedRows) else None
    n, d = source.shape[0], source.float64s_per_row
    count = min(limit or n, n)
    each = budget.pivot_task_bytes(d, min(count, _TYPICAL_RANK), kernel.peak_blocks, kernel.landmark_copies)
    draw, threshold = np.random.RandomState(0) if rng is None else rng, pivot_threshold(tol)
    with (
        _open_checkpoint(workspace, kernel, source, tol, limit, rng) as checkpoint,
        open_executor(None) as executor,
        _share_training_rows(source, executor, each, workspace) as (readable, shared),
        progress.step_bar("dkfm-root", None, "pivot", show_progress) as bar,
    ):
        where = describe_place(executor)
        log_stage("root", f"up to {count:,} pivots of {n:,} rows of {source.name}, in rounds, on {where}", rows=n)

        def end_round(pivots: int, largest: list[float]) -> None:
            if watch is not None:  # if rows change, the search might not end
                watch.require_same("read", "fit again")
            bar.total = forecast_rank(np.array(largest), threshold, count)
            bar.update(pivots - bar.n)
            remedy = f"after {pivots:,} pivots the error bound is {largest[-1] ** 0.5:.1e}: use tol= or n_landmarks="
            _require_memory(source, kernel, executor, pivots, pivots, remedy)

        begun = int(checkpoint.numbers.get("pivots", 0))
        _require_memory(source, kernel, executor, begun, 0, "fit fewer rows, or with fewer threads")
        search = PivotSearch(threshold, count, rng is not None, draw, show_progress, end_round)
        return find_streamed_pivots(kernel, readable, search, executor, shared, checkpoint)


def _require_memory(source: Source, kernel: Kernel, executor: Executor, pivots: int, held: int, remedy: str) -> None:
    """Raise a BudgetError unless a round with `pivots` pivots fits in memory; `held` of them are already in memory."""
    (n, _), d = source.shape, source.float64s_per_row
    each = budget.pivot_task_bytes(d, max(1, pivots), kernel.peak_blocks, kernel.landmark_copies)
    need = budget.streamed_pivots_bytes(n, d, pivots, executor.threads * each if executor.client is None else 0)
    if held:  # the factor and the pivots
        need -= 8 * held * (held + d)
    else:
        need += count_memory_and_disk_bytes(n)[0]
    if executor.client is not None:
        have = memory.task_budget(executor.client, executor.threads, needed=each)
        budget.require_fits(each, have, "A tile of rows with the factor of all pivots", remedy)
    what = "A larger factor of pivots" if held else f"The search for pivots of N = {n} rows"
    budget.require_fits(need, memory.clear_caches_and_measure_memory(), what, remedy)


@contextmanager
def _share_training_rows(
    source: Source, executor: Executor, task_bytes: int, workspace: str | Path | None
) -> Iterator[tuple[Source, SharedArrays]]:
    """Yield the rows where the tasks read them, and an object that shares other arrays with the tasks."""
    stored, (n, _) = None if source.location is None else source, source.shape
    need = 0 if stored else 8 * n * source.float64s_per_row
    with open_shared_arrays(executor, task_bytes, need, "The training rows", workspace, stored) as shared:
        if isinstance(source, MemorySource):
            with shared.share(source.array) as readable:
                yield readable, shared
        else:
            yield source, shared


@contextmanager
def _open_checkpoint(
    workspace: str | Path | None,
    kernel: Kernel,
    source: Source,
    tol: float | None,
    limit: int | None,
    rng: np.random.RandomState | None,
) -> Iterator[Checkpoint]:
    """Yield the checkpoint of the rounds in the workspace, if any, and a seed if pivots are drawn at random."""
    seed = None if rng is None else rng.get_state(legacy=False)
    is_drawn_anew = rng is np.random.mtrand._rand  # scikit-learn's generator for random_state=None
    is_known = seed is None or (isinstance(seed, dict) and seed["bit_generator"] == "MT19937" and not is_drawn_anew)
    if workspace is None or not is_known:
        yield NO_CHECKPOINT
        return
    drawn = ""
    if seed is not None:
        drawn = f"{seed['state']['pos']} {digest_rows(MemorySource(seed['state']['key'][:, np.newaxis]))}"
    parameters = {"tol": tol, "limit": limit, "seed": drawn}
    with open_checkpoint(workspace, "pivots", kernel, source, parameters) as checkpoint:
        yield checkpoint


def as_data(kernel: Kernel, X: object) -> TrainingData:
    """Return the training data of rows that `open_stored_rows` has opened, or of others, which are not copied."""
    return StreamedRows(kernel, X.source) if isinstance(X, SourceRows) else as_training_data(kernel, X, copy=False)


def estimate_moment_bytes(d: int, m: int, r: int, columns: int, kernel: Kernel) -> tuple[int, int]:
    """Return the bytes of a process that sums r features from m landmarks: shared ones, and those of each thread.

    Threads share the weights of the features. One result of each thread may wait for earlier results.
    """
    sums = 8 * (columns + r) * (r + 1)
    task = budget.feature_sums_task_bytes(d, m, r, columns, kernel.peak_blocks, kernel.landmark_copies)
    return sums + 8 * m * r, task - 8 * m * r + sums


def count_moment_columns(r: int, triangular: bool) -> int:
    """Return the number of columns of weights whose product takes as long as r features and their products."""
    return r if triangular else 3 * r // 2  # only half of symmetric and triangular products is computed


def compute_feature_moments(
    landmarks: Rows,
    root: Root,
    data: TrainingData,
    weighted: WeightedRows,
    workspace: str | Path | None,
    show_progress: bool,
) -> tuple[Array, Array]:
    """Return sums over training rows: of features (c, r), and of their products (r, r).

    Tasks sum tiles of stored rows, on the current Dask client or on threads of this process. Many rows in memory are
    summed in tiles on threads, or on one thread unless `may_use_threads`. If memory is short, fewer threads are used.

    Raises
    ------
    BudgetError
        The sums do not fit in memory.
    """
    kernel, (m, r), is_streamed = data.kernel, root.weights.shape, isinstance(data, StreamedRows)
    client = find_client(None) if is_streamed else None
    fixed, each = estimate_moment_bytes(data.float64s_per_row, m, r, weighted.n_columns, kernel)
    have, what = memory.clear_caches_and_measure_memory(), f"A pass that sums {r:,} features and their products"
    budget.require_fits(fixed + (each if client is None else 0), have, what, "take fewer landmarks")
    if not is_streamed and not _has_tiles(data):
        return _sum_features_here(landmarks, root, data, weighted)
    source = data.source if isinstance(data, StreamedRows) else MemorySource(data.indexable_rows)
    max_threads = (have - fixed) // each if is_streamed or may_use_threads(kernel) else 1
    n, d = source.shape[0], source.float64s_per_row
    task = budget.feature_sums_task_bytes(d, m, r, weighted.n_columns, kernel.peak_blocks, kernel.landmark_copies)
    with (
        open_threads(max_threads) if client is None else open_executor(client) as executor,
        _share_training_rows(source, executor, task, workspace) as (readable, shared),
    ):
        text = f"sums of {r:,} features of {n:,} rows of {source.name}, on {describe_place(executor)}"
        seconds = n * predict_row_seconds(kernel, m, d, count_moment_columns(r, root.triangular)) / executor.threads
        log_stage("moments", text, seconds=seconds, rows=n)
        passes = RowPasses(kernel, readable, executor, shared, show_progress)
        return passes.compute_feature_moments(landmarks, root, weighted)


def _has_tiles(data: TrainingData) -> bool:
    """Return whether rows in memory are summed in tiles, whose sum is bitwise equal on any number of threads."""
    is_large = isinstance(data, TrainingRows) and data.indexable_rows.shape[0] >= _MIN_ROWS
    return is_large and is_code_free(data.kernel)


def _sum_features_here(landmarks: Rows, root: Root, data: TrainingData, weighted: WeightedRows) -> tuple[Array, Array]:
    """Return the sums of `compute_feature_moments`, tile after tile in this thread."""
    r, columns = root.weights.shape[1], weighted.weighted_columns()
    first, second = np.zeros((weighted.n_columns, r)), np.zeros((r, r))
    scorer = prepare_scorer(Model(data.kernel, landmarks, {"features": Head(root.weights, triangular=root.triangular)}))
    training_statistics.add_features_and_products(
        scorer, data.iter_row_tiles(), columns, weighted.weights, first, second, _add_products
    )
    return first, second


def _add_products(values: Array, out: Array) -> None:
    out += values.T @ values  # NumPy's BLAS, because its threads and those of SciPy's would compete for cores
