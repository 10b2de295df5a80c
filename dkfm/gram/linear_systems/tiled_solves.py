"""Solve systems with a tiled factor; threads of this process read it once for each of the two triangular solves.

Tasks compute the diagonal of the inverse, which takes as long as the factor.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dkfm.core import budget, chunking, cpus
from dkfm.core.rows import Array
from dkfm.errors import ClusterError
from dkfm.execution import memory
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import is_inside_worker
from dkfm.execution.executors import open_executor
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, require_fit_worker
from dkfm.gram import product_costs
from dkfm.gram.linear_systems.tile_store import Pair, TileStore
from dkfm.gram.linear_systems.tiled_cholesky import solve_from_right
from dkfm.gram.shared_arrays import open_shared_arrays

PANEL_COLUMNS = 512
"""Columns of the inverse of the factor that a task computes together."""


def solve(store: TileStore, right: Array) -> Array:
    """Return ``(L L')^(-1) right`` (N, q), for a factor L (N, N) and right sides (N, q).

    Raises
    ------
    DamagedStoreError
        A tile is missing or damaged.
    """
    from scipy.linalg import solve_triangular

    solution, threads = right.astype(np.float64, order="C"), 1 if is_inside_worker() else cpus.COUNT
    with single_blas_thread(), ThreadPoolExecutor(threads, thread_name_prefix="dkfm-solve") as pool:
        for i in range(store.blocks):
            for part in pool.map(lambda pair: _multiply_tile(store, pair, solution), [(i, k) for k in range(i)]):
                solution[store.rows(i)] -= part
            with store.read_tile_to_buffer((i, i)) as L:
                solution[store.rows(i)] = solve_triangular(L, solution[store.rows(i)], lower=True, check_finite=False)
        for j in reversed(range(store.blocks)):
            pairs = [(i, j) for i in range(j + 1, store.blocks)]
            for part in pool.map(lambda pair: _multiply_tile(store, pair, solution, transposed=True), pairs):
                solution[store.rows(j)] -= part
            with store.read_tile_to_buffer((j, j)) as L:
                solution[store.rows(j)] = solve_triangular(
                    L, solution[store.rows(j)], lower=True, trans="T", check_finite=False
                )
    return solution


def _multiply_tile(store: TileStore, pair: Pair, solution: Array, *, transposed: bool = False) -> Array:
    """Return the product of a tile, or of its transpose, and rows of a solution."""
    with store.read_tile_to_buffer(pair) as tile:
        product: Array = (tile.T if transposed else tile) @ solution[store.rows(pair[0 if transposed else 1])]
    return product


def compute_inverse_diagonal(store: TileStore, *, progress: bool = False) -> Array:
    """Return the diagonal (N,) of ``(L L')^(-1)``, computed by tasks on the current Dask client or on threads.

    Raises
    ------
    BudgetError
        A task does not fit in memory.
    ClusterError
        A task killed its workers repeatedly, or the cluster is gone.
    """
    diagonal, panels = np.empty(store.n), _split_columns(store)
    each = budget.inverse_task_bytes(store.n, store.tile_rows, min(store.tile_rows, PANEL_COLUMNS))

    def place(result: tuple[slice, Array]) -> None:
        diagonal[result[0]] = result[1]

    with (
        open_executor(None) as executor,
        open_shared_arrays(executor, each, 0, "The factor", store.root.parent) as shared,
    ):
        if executor.client is None:
            have = memory.task_budget(None, executor.threads)
            budget.require_fits(each, have, "Columns of the inverse of the factor", "use fewer threads, or more memory")
        seconds = product_costs.factor_seconds(store.n, executor.threads)
        text = f"inverse diagonal of {store.n:,} rows, {len(panels)} panels, on {describe_place(executor)}"
        log_stage("solve", text, seconds=seconds, rows=store.n, threads=executor.threads)
        tasks = ((store, columns, shared.requirements) for columns in panels)
        tally = run_tasks(executor, "dkfm-solve", sum_inverse_squares, tasks, len(panels), progress, place)
    if tally.fatal_task_numbers:
        raise ClusterError("Every worker died that computed some columns of the inverse of the factor.")
    return diagonal


def _split_columns(store: TileStore) -> list[slice]:
    """Return slices of columns that do not cross the boundary of a tile; the longest columns come first."""
    slices = []
    for block in range(store.blocks):
        rows = store.rows(block)
        for part in chunking.row_slices(rows.stop - rows.start, PANEL_COLUMNS):
            slices.append(slice(rows.start + part.start, rows.start + part.stop))
    return slices


def sum_inverse_squares(
    store: TileStore, columns: slice, requirements: WorkerRequirements | None
) -> tuple[slice, Array]:
    """Return the sums of squares (w,) of some columns of the inverse of a factor."""
    require_fit_worker(requirements)
    first, width = columns.start // store.tile_rows, columns.stop - columns.start
    start = store.rows(first).start
    panel = np.zeros((width, store.n - start))  # the transposed columns, from the first block on
    panel[np.arange(width), np.arange(columns.start, columns.stop) - start] = 1.0
    with single_blas_thread():
        for i in range(first, store.blocks):
            block = _shift_slice(store.rows(i), start)
            part = np.ascontiguousarray(panel[:, block])
            for k in range(first, i):
                with store.read_tile_to_buffer((i, k)) as tile:
                    part -= panel[:, _shift_slice(store.rows(k), start)] @ tile.T
            with store.read_tile_to_buffer((i, i)) as triangle:
                solve_from_right(part, triangle)
            panel[:, block] = part
    return columns, np.einsum("ij,ij->i", panel, panel)


def _shift_slice(rows: slice, start: int) -> slice:
    return slice(rows.start - start, rows.stop - start)
