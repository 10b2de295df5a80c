"""Factor ``S K S + alpha = L L'`` in tiles, by tasks on threads or on a Dask cluster; K is computed on demand.

A task computes one tile ``L_ij`` from the tiles to the left of it in the rows i and j, and writes it durably. It starts
when the tiles that it reads exist. The operations of a tile and their order do not depend on where it is computed, so
the factor is bitwise equal on any number of threads or workers.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from dkfm.core import budget, chunking
from dkfm.core.rows import Array, Rows
from dkfm.errors import ClusterError, NotPSDError
from dkfm.execution import memory
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import find_client
from dkfm.execution.executors import Executor, open_executor
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, require_fit_worker
from dkfm.files import local, temporary_folders
from dkfm.gram import build, product_costs
from dkfm.gram.linear_systems.tile_store import (
    Pair,
    TileStore,
    count_lower_tiles,
    disk_bytes,
    open_tile_store,
)
from dkfm.gram.shared_arrays import open_shared_arrays
from dkfm.gram.stored_gram import existing_bytes
from dkfm.kernels.base import Kernel, evaluate_block
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics.roots import EPS, ROUNDING_SHARE
from dkfm.numerics.supervised.ridge import make_indefinite_error
from dkfm.sources.base import Source, digest_rows, read_finite
from dkfm.sources.memory import MemorySource
from dkfm.storage import zarr_store

_BLOCK_COLUMNS = 128
"""Number of columns that one call of SciPy's triangular solver solves."""


@dataclass(frozen=True, eq=False)
class FactorTask:
    """Data from which a tile of the factor is computed, besides other tiles."""

    kernel: Kernel
    rows: Source
    """Training rows X, where the tasks read them."""
    row_scales: Source | None
    """Square roots of the weights of the rows, (N, 1); None without weights."""
    alpha: float
    """Number that is added to the diagonal."""
    store: TileStore
    requirements: WorkerRequirements | None


@contextmanager
def open_tiled_factor(
    kernel: Kernel,
    X: Rows,
    alpha: float,
    roots: Array | None = None,
    *,
    tile_rows: int | None = None,
    workspace: str | Path | None = None,
    progress: bool = False,
) -> Iterator[TileStore]:
    """Yield the factor (N, N) of ``S K S + alpha``, with a diagonal S, in lower tiles on disk.

    Tasks compute it on the current Dask client, whose workers must see the folder, or on threads of this process.

    Parameters
    ----------
    kernel : Kernel
        Kernel with all parameters resolved.
    X : ndarray or csr_array of shape (N, d)
        Training rows.
    alpha : float
        Number that is added to the diagonal, not negative.
    roots : ndarray of shape (N,), optional
        Diagonal of S, positive: the square roots of the weights of the rows. 1 by default.
    tile_rows : int, optional
        Rows and columns of a tile; 2,048 by default.
    workspace : str or Path, optional
        Folder in which the factor stays. A killed computation resumes with the missing tiles, and other fits with the
        same rows, roots and alpha reuse the factor. By default it is temporary.
    progress : bool
        Whether to show a progress bar.

    Raises
    ------
    NotPSDError
        The matrix is not positive definite; the message names the row. If alpha is 0, this includes a row that is, up
        to rounding, in the span of the rows before it.
    BudgetError
        A tile does not fit in memory, or the factor does not fit on the disk.
    ClusterError
        A tile killed its workers repeatedly, or the cluster is gone.
    """
    n, source, client = X.shape[0], MemorySource(X), find_client(None)
    size, column = min(n, build.checked_tile_rows(tile_rows)), as_column_unless_ones(roots)
    identity = make_factor_identity(kernel, X, alpha, roots)
    with _open_folder(kernel, workspace, n, size) as folder:
        store = open_tile_store(folder / build.name_store("factor", identity), identity, n, size)
        try:
            with open_executor(client) as executor:
                _compute_tiles(store, kernel, source, column, alpha, executor, progress)
        except NotPSDError:
            if client is None:  # no task is running, and no later fit needs the tiles
                zarr_store.remove_own_store(store.root, "factor")
            raise
        store.mark_complete()
        yield store


def make_factor_identity(kernel: Kernel, X: Rows, alpha: float, roots: Array | None) -> dict[str, object]:
    """Return JSON values that identify a factor of `open_tiled_factor`."""
    column = as_column_unless_ones(roots)
    digest = "" if column is None else digest_rows(MemorySource(column))
    return {**build.make_gram_identity(kernel, MemorySource(X)), "alpha": alpha, "roots": digest}


def as_column_unless_ones(roots: Array | None) -> Array | None:
    """Return the diagonal of S as (N, 1); None if it is 1."""
    return None if roots is None or (roots == 1).all() else roots[:, np.newaxis]


@contextmanager
def _open_folder(kernel: Kernel, workspace: str | Path | None, n: int, tile_rows: int) -> Iterator[Path]:
    """Yield the folder of the store: in the workspace, or temporary, as for a kernel with user functions."""
    parent = None if workspace is None else local.make_folder(local.as_local_path(workspace)).absolute()
    if parent is not None and is_code_free(kernel):
        yield parent
        return
    with temporary_folders.open_temporary_folder(
        "factor", parent, need=disk_bytes(n, tile_rows), what="The factor"
    ) as folder:
        yield folder


def _require_disk_and_memory(store: TileStore, executor: Executor, each: int) -> None:
    """Raise a BudgetError unless the disk has space for the missing tiles, and each thread has memory for a task."""
    missing = disk_bytes(store.n, store.tile_rows) - existing_bytes(store.root)
    memory.require_disk(store.root, missing, "The factor")
    have = memory.task_budget(executor.client, executor.threads, needed=None if executor.client is None else each)
    remedy = "use a smaller tile_rows, or fewer threads, or more memory"
    budget.require_fits(each, have, f"A tile of {store.tile_rows} rows", remedy)


def _compute_tiles(
    store: TileStore,
    kernel: Kernel,
    source: MemorySource,
    roots: Array | None,
    alpha: float,
    executor: Executor,
    progress: bool,
) -> None:
    """Compute the missing tiles of a factor."""
    n, width = store.n, source.float64s_per_row
    each = budget.factor_task_bytes(store.tile_rows, width, kernel.peak_blocks, kernel.landmark_copies)
    _require_disk_and_memory(store, executor, each)
    order, total = TileOrder(store.blocks), count_lower_tiles(store.blocks)
    text = f"factor of {n:,} x {n:,} kernel values, {total:,} tiles, in {store.root}, on {describe_place(executor)}"
    if there := store.count_tiles():
        text += f", {there:,} of them there already"
    seconds = None
    if there < total:
        seconds = product_costs.factor_seconds(n, executor.threads, product_costs.value_seconds(kernel, width))
    log_stage("factor", text, seconds=seconds, rows=n, tiles=total, threads=executor.threads)
    with (
        open_shared_arrays(executor, each, 8 * n * (width + 1), "The training rows", store.root.parent) as shared,
        shared.share(source.array) as rows,
        nullcontext() if roots is None else shared.share(roots) as shared_roots,
    ):
        task = FactorTask(kernel, rows, shared_roots, alpha, store, shared.requirements)
        tasks = (None if pair is None else (task, pair) for pair in order)
        tally = run_tasks(executor, "dkfm-factor", factor_tile, tasks, total, progress, order.finish)
    if tally.fatal_task_numbers:
        raise ClusterError(f"Every worker died that computed a tile of the factor in {store.root}; the others stay.")


class TileOrder:
    """Iterate over the tiles of a factor in an order of dependence; None means that the next tile must wait.

    >>> order = TileOrder(2)
    >>> pairs = iter(order)
    >>> next(pairs), next(pairs)
    ((0, 0), None)
    >>> order.finish((0, 0))
    >>> next(pairs)
    (1, 0)
    """

    def __init__(self, blocks: int) -> None:
        self._begun = [0] * blocks
        """Number of tiles of each row that were started; each starts after the one before it has ended."""
        self._done = [0] * blocks

    def __iter__(self) -> Iterator[Pair | None]:
        left = count_lower_tiles(len(self._begun))
        while left:
            ready = [(row, begun) for row, begun in enumerate(self._begun) if self._is_ready(row, begun)]
            # The diagonal tile comes first, because all rows below wait for it.
            pair = min(ready, key=lambda pair: (pair[1] - (pair[0] == pair[1]), pair[0]), default=None)
            if pair is not None:
                self._begun[pair[0]] += 1
                left -= 1
            yield pair

    def _is_ready(self, row: int, column: int) -> bool:
        is_free = column <= row and self._done[row] == column
        return is_free and (column == row or self._done[column] > column)

    def finish(self, pair: Pair) -> None:
        """Note that a tile has been written."""
        self._done[pair[0]] += 1


def factor_tile(task: FactorTask, pair: Pair) -> Pair:
    """Compute and write a tile of the factor, unless it exists and is intact; return its block numbers."""
    require_fit_worker(task.requirements)
    store, (i, j) = task.store, pair
    if store.has_intact_tile(pair):
        store.sync_tile(pair)  # a killed process may not have flushed it to disk
        return pair
    with single_blas_thread():
        tile, diagonal = _compute_values(task, pair)
        product = np.empty_like(tile)
        for k in range(j):
            with store.read_tile_to_buffer((i, k)) as left:
                if i == j:
                    np.matmul(left, left.T, out=product)
                else:
                    with store.read_tile_to_buffer((j, k), beside_another=True) as right:
                        np.matmul(left, right.T, out=product)
            tile -= product
        if i == j:
            tile = _factor_diagonal(tile, diagonal, store.rows(i).start, task.alpha)
        else:
            with store.read_tile_to_buffer((j, j)) as triangle:
                solve_from_right(tile, triangle)
    store.write_tile(pair, tile)
    return pair


def _compute_values(task: FactorTask, pair: Pair) -> tuple[Array, Array]:
    """Return a tile of ``S K S + alpha``, and its diagonal without alpha."""
    row, column = (task.store.rows(block) for block in pair)
    X = read_finite(task.rows, row)
    Y = X if row == column else read_finite(task.rows, column)
    values = evaluate_block(task.kernel, X, Y, (row.start, column.start))
    if task.row_scales is not None:
        values *= cast("Array", task.row_scales.read(row))
        values *= cast("Array", task.row_scales.read(column)).T
    diagonal = values.diagonal().copy()
    if row == column:
        values.flat[:: len(values) + 1] += task.alpha
    return values, diagonal


def _factor_diagonal(A: Array, diagonal: Array, first: int, alpha: float) -> Array:
    """Return the Cholesky factor of a tile on the diagonal, lower triangular."""
    factored = len(A)
    try:
        L = np.linalg.cholesky(A)
    except np.linalg.LinAlgError:
        from scipy.linalg import lapack

        L, failed = lapack.dpotrf(A, lower=1)  # a factor up to the row that fails, counted from 1; 0 if none does
        factored = int(failed) - 1 if failed else factored
    row = factored
    if alpha == 0:
        low = np.square(L.diagonal()[:factored]) <= ROUNDING_SHARE * diagonal[:factored]
        row = int(low.argmax()) if low.any() else factored
    if row < len(A):
        raise _make_rank_error(A, diagonal, row, first) if alpha == 0 else make_indefinite_error(first + row, alpha)
    return L


def _make_rank_error(A: Array, diagonal: Array, row: int, first: int) -> NotPSDError:
    """Return the error of a row of a tile on the diagonal whose pivot is not above rounding."""
    from scipy.linalg import lapack, solve_triangular

    L = lapack.dpotrf(A[:row, :row], lower=1)[0]
    explained = solve_triangular(L, A[row, :row], lower=True, check_finite=False) if row else np.zeros(0)
    rest = float(A[row, row] - explained @ explained)
    number, size = first + row, float(diagonal[row])
    # Rounding of the values is divided by the roots of earlier pivots, which may be this small.
    rounding = max(1000, number) * EPS / ROUNDING_SHARE**0.5
    if size < 0 or rest < -rounding * max(size, float(diagonal.max())):
        return NotPSDError(
            f"The Gram matrix is not positive semi-definite: of k(x, x) = {size:.3g} of row {number} the rows before "
            f"it leave {rest:.3g}; choose another kernel."
        )
    what = (
        "is the zero vector, with k(x, x) = 0" if size == 0 else "is, up to rounding, in the span of the rows before it"
    )
    return NotPSDError(
        f"Row {number} {what}, and the Gram matrix has no Cholesky factor of full rank; leave such rows out, or use "
        'build="rounds" for a map, or an alpha for a regression.'
    )


def solve_from_right(A: Array, L: Array, *, transposed: bool = True) -> None:
    """Replace A (n, m) by ``A L'^(-1)``, or by ``A L^(-1)`` if not `transposed`, with L (m, m) lower triangular.

    SciPy's triangular solver holds the GIL, so it solves few columns at a time; NumPy's products release it.
    """
    from scipy.linalg import blas

    blocks = list(chunking.row_slices(len(L), _BLOCK_COLUMNS))
    for columns in blocks if transposed else reversed(blocks):
        before, after = slice(columns.start), slice(columns.stop, None)
        if transposed and columns.start:
            A[:, columns] -= A[:, before] @ L[columns, before].T
        elif not transposed and columns.stop < len(L):
            A[:, columns] -= A[:, after] @ L[after, columns]
        solved = blas.dtrsm(1.0, L[columns, columns], A[:, columns].T, lower=1, trans_a=int(not transposed))
        A[:, columns] = solved.T
