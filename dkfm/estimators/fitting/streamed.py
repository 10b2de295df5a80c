"""Find the pivots of training rows that stay in their source, within the memory of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dkfm.core import budget
from dkfm.execution import memory, progress
from dkfm.execution.clusters.current_client import find_client
from dkfm.execution.executors import open_executor
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.files import change_detection
from dkfm.gram.shared_arrays import open_shared_arrays
from dkfm.gram.streamed_pivots import PivotSearch, find_streamed_pivots
from dkfm.gram.streamed_rows import SourceRows, StreamedRows
from dkfm.numerics.pivoted_cholesky import Pivots, pivot_threshold
from dkfm.sources.base import NamedColumns
from dkfm.sources.opening import open_source

_TYPICAL_RANK = 1024
"""Number of pivots for which workers are asked to have memory."""


def streams_rows(estimator: Any) -> bool:
    """Return whether a fit of an estimator needs no more than tiles of its rows at a time."""
    if not hasattr(estimator, "landmarks"):  # no feature map
        return False
    if estimator.landmarks is None:
        return bool(estimator.basis == "cholesky" and estimator.build == "auto")
    return not isinstance(estimator.landmarks, str) or estimator.landmarks in ("uniform", "pivots", "random_pivots")


@contextmanager
def open_stored_rows(X: object, streams: bool) -> Iterator[tuple[object, tuple[str, ...] | None]]:
    """Yield what an estimator fits to of rows at a path or URL, or in a Zarr array, and the names of its columns.

    With `streams` the rows stay where they are; else they are read into memory.

    Raises
    ------
    InvalidInputError
        The rows changed before the context ended.
    """
    source = open_source(X)
    with change_detection.watch(source) as watch:
        rows = SourceRows(source) if streams else source.read(slice(0, source.shape[0]))
        yield rows, source.columns if isinstance(source, NamedColumns) else None
        watch.require_same("read", "fit again")


def find_pivots(
    data: StreamedRows,
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
    data : StreamedRows
        Training rows.
    limit : int, optional
        Largest number of pivots.
    rng : RandomState, optional
        Draws pivots in proportion to residuals; by default the largest residual is first.
    tol : float, optional
        Error bound that is to be reached.
    workspace : str or Path, optional
        Folder for the files that a cluster's workers read.
    show_progress : bool
        Whether to show a progress bar.

    Raises
    ------
    BudgetError
        The factor of the pivots does not fit in memory.
    """
    source, kernel = data.source, data.kernel
    n, d = source.shape[0], source.mean_values_per_row
    count = min(limit or n, n)
    each = budget.pivot_task_bytes(d, min(count, _TYPICAL_RANK), kernel.peak_blocks, kernel.landmark_copies)
    with (
        open_executor(find_client(None)) as executor,
        open_shared_arrays(executor, each, 0, "The pivots", workspace, source) as shared,
        progress.step_bar("dkfm-root", None, "pivot", show_progress) as bar,
    ):
        where = describe_place(executor)
        log_stage("root", f"up to {count:,} pivots of {n:,} rows of {source.name}, in rounds, on {where}", rows=n)

        def watch_memory(pivots: int, residual: float) -> None:
            bar.update(pivots - bar.n)
            need, have = budget.streamed_pivots_bytes(n, d, pivots), memory.available_memory()
            remedy = f"after {pivots:,} pivots the error bound is {residual**0.5:.1e}: use tol= or n_landmarks="
            budget.require_fits(need - budget.streamed_pivots_bytes(n, d, 0), have, "A larger factor of pivots", remedy)

        draw = np.random.RandomState(0) if rng is None else rng
        search = PivotSearch(pivot_threshold(tol), count, rng is not None, draw, watch_memory)
        return find_streamed_pivots(kernel, source, search, executor, shared)
