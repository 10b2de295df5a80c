"""Compute the triangular root ``W = D^-1 L'^(-1)`` of ``D^-1 K D^-1 = L L'`` from tiles of L, into a store.

The features of the Cholesky basis are ``k(z, X) W``. A task computes some whole chunks of columns of W, one after the
other from the last block of rows to the first, and writes them durably.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from dkfm.core import budget, chunking, cpus
from dkfm.core.rows import Array
from dkfm.errors import ClusterError, InvalidInputError, NotSupportedError, StoreError, StoreExistsError
from dkfm.execution import memory
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import find_client, is_inside_worker
from dkfm.execution.executors import open_executor
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, check_this_worker
from dkfm.files import local
from dkfm.gram import roads
from dkfm.gram.linear_systems.tile_store import TileStore
from dkfm.gram.linear_systems.tiled_cholesky import open_tiled_factor, solve_from_right
from dkfm.gram.shared_arrays import open_shared_arrays
from dkfm.gram.stored_gram import existing_bytes
from dkfm.gram.training_data import TrainingData, TrainingRows
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics.map_error_bounds import Residuals
from dkfm.numerics.pivoted_cholesky import RESIDUAL_ROUNDING
from dkfm.numerics.roots import Root, nonzero_lengths, row_lengths
from dkfm.sources.base import Source
from dkfm.storage import own_files, raw_chunk_reader, streamed_weights, zarr_schema, zarr_store

PANEL_COLUMNS = 512
"""Columns of the root that a task computes together, or as many as one chunk has."""

_NAME = "root"


@dataclass(frozen=True)
class RootTask:
    """What columns of the root are computed from, and where they are written."""

    factor: TileStore
    root: Path
    lengths: Source | None
    """Diagonal of D, (N, 1), where the tasks read it; None if it is 1."""
    requirements: WorkerRequirements | None


def compute_tiled_root(
    data: TrainingData, tile_rows: int | None, workspace: str | Path | None, progress: bool = False
) -> tuple[Root, Residuals]:
    """Return the root of a Gram matrix of full rank, whose weights stay in a store, and the residuals of its rows.

    The tasks run on the current Dask client, or on threads of this process.

    Parameters
    ----------
    data : TrainingData
        Rows in memory, each of which is a pivot.
    tile_rows : int, optional
        Rows and columns of a tile of the factor; 2,048 by default.
    workspace : str or Path
        Folder of the factor and of the root, which stay there: a fit that was killed goes on.
    progress : bool
        Whether to show a progress bar.

    Raises
    ------
    InvalidInputError
        The kernel is precomputed, or there is no workspace.
    NotSupportedError
        The kernel is code, by which the files would not be found.
    NotPSDError
        A row is within rounding of the span of the rows before it; the message names it.
    BudgetError
        A task does not fit in memory, or the factor or the root on the disk.
    ClusterError
        A task killed its workers again and again, or the cluster is gone.
    """
    if not isinstance(data, TrainingRows) or workspace is None:
        raise InvalidInputError("A root in tiles needs points, which a precomputed kernel has not, and a workspace.")
    if not is_code_free(data.kernel):
        raise NotSupportedError(
            f"The files of a root in tiles are found by the kernel, and {data.kernel!r:.100} is code."
        )
    lengths = row_lengths(data.diagonal())
    divisors = nonzero_lengths(lengths)
    with open_tiled_factor(
        data.kernel,
        data.rows_as_landmarks,
        0.0,
        np.square(1 / divisors),
        tile_rows=tile_rows,
        workspace=workspace,
        progress=progress,
    ) as factor:
        root, digest = _open_root_store(factor)
        _compute_columns(factor, root, divisors, progress)
        with local.translate_write_errors(root):
            zarr_store.write_marker(root, {"digest": digest})
        values, residuals = _measure_residuals(factor)
    info = zarr_schema.read_array_info(root / _NAME)
    weights = streamed_weights.open_weights(root, digest, _NAME, info, True)
    return Root(weights, values, np.zeros(0), lengths, triangular=True), residuals


def choose_columns(n: int) -> tuple[int, int]:
    """Return the columns of a chunk of the root of N rows, and those that a task computes together.

    >>> choose_columns(40_000)
    (13, 507)
    """
    chunk = min(n, streamed_weights.count_columns_within(streamed_weights.CHUNK_BYTES, n, 8))
    return chunk, max(1, PANEL_COLUMNS // chunk) * chunk


def disk_bytes(n: int) -> int:
    """Return the bytes on disk of the root of N rows, in whole chunks, zeros included.

    >>> disk_bytes(40_000)
    12800960000
    """
    chunk, _ = choose_columns(n)
    return 8 * n * chunk * chunking.count_tiles(n, chunk)


def task_bytes(n: int, tile_rows: int) -> int:
    """Return the bytes of a task: its columns, and the chunk that is written."""
    chunk, columns = choose_columns(n)
    return budget.inverse_task_bytes(n, tile_rows, min(n, columns) + chunk)


def _open_root_store(factor: TileStore) -> tuple[Path, str]:
    """Open the store of the root of a factor beside it, or create it; return its folder and its digest."""
    n, chunk = factor.n, choose_columns(factor.n)[0]
    root = factor.root.with_name(factor.root.name.replace("factor", _NAME, 1))
    attributes = {"identity": zarr_schema.read_group(factor.root, "factor")["identity"]}
    if not zarr_store.is_taken(root):
        try:
            with zarr_store.new_store(root, _NAME, attributes, [_NAME]) as group:
                zarr_store.add_array(group, _NAME, (n, n), (n, chunk))
        except StoreExistsError:  # another process has just created it
            if not zarr_store.is_taken(root):
                raise
    try:
        found = zarr_schema.read_group(root, _NAME)
        info = zarr_schema.read_array_info(root / _NAME)
    except StoreError:
        found, info = {}, None
    if info is None or found.get("identity") != attributes["identity"] or info.chunks != (n, chunk):
        raise StoreExistsError(f"{root} holds something that is not the root of this factor; it was left untouched.")
    own_files.remove_partial_files(root, found, local.ABANDONED_SECONDS)
    return root, root.stem


def _compute_columns(factor: TileStore, root: Path, lengths: Array, progress: bool) -> None:
    """Compute the columns of the root that are missing in its store."""
    n, each = factor.n, task_bytes(factor.n, factor.tile_rows)
    panels = list(chunking.row_slices(n, choose_columns(n)[1]))[::-1]  # the last takes the longest
    memory.require_disk(root, disk_bytes(n) - existing_bytes(root), "The root")
    column = None if (lengths == 1).all() else lengths[:, np.newaxis]
    with (
        open_executor(find_client(None)) as executor,
        open_shared_arrays(executor, each, 8 * n, "The lengths of the rows", root.parent) as shared,
        shared.share(lengths[:, np.newaxis]) as readable,
    ):
        if executor.client is None:
            have = memory.task_budget(None, executor.threads)
            budget.require_fits(each, have, "Columns of the root", "use fewer threads, or more memory")
        seconds = roads.factor_seconds(n, executor.threads)
        text = f"triangular root of {n:,} rows, {len(panels)} panels, in {root}, on {describe_place(executor)}"
        log_stage("solve", text, seconds=seconds, rows=n, threads=executor.threads)
        task = RootTask(factor, root, None if column is None else readable, shared.requirements)
        tasks = ((task, columns) for columns in panels)
        tally = run_tasks(executor, "dkfm-solve", compute_root_columns, tasks, len(panels), progress)
    if tally.fatal_tasks:
        raise ClusterError(f"Every worker died that computed some columns of the root in {root}; the others stay.")


def compute_root_columns(task: RootTask, columns: slice) -> slice:
    """Compute some columns of the root and write those of their chunks that do not exist or are not sound."""
    check_this_worker(task.requirements)
    array, n = task.root / _NAME, task.factor.n
    chunk = choose_columns(n)[0]
    starts = range(columns.start, columns.stop, chunk)
    parts = [(start // chunk, slice(start, min(start + chunk, columns.stop))) for start in starts]
    missing = [(number, part) for number, part in parts if not _has_chunk(array, number, (n, chunk))]
    for number in {number for number, _ in parts} - {number for number, _ in missing}:
        zarr_store.sync_chunk(array, (0, number))  # a killed process may not have synced it
    if not missing:
        return columns
    with single_blas_thread():
        panel = _solve_columns(task.factor, columns)
    if task.lengths is not None:
        panel /= cast("Array", task.lengths.read(slice(0, columns.stop)))[:, 0]
    for number, part in missing:
        values = np.zeros((n, part.stop - part.start))
        values[: columns.stop] = panel[part.start - columns.start : part.stop - columns.start].T
        zarr_store.write_chunk(array, (0, number), values)
    return columns


def _has_chunk(array: Path, number: int, shape: tuple[int, int]) -> bool:
    file = array / "c" / "0" / str(number)
    if not file.exists():
        return False
    try:
        raw_chunk_reader.read_chunk(np.empty(shape), file, checked=True)
    except (ValueError, OSError):
        return False
    return True


def _solve_columns(factor: TileStore, columns: slice) -> Array:
    """Return some columns of ``L'^(-1)``, transposed and without the zeros below them: (w, stop of the columns)."""
    width, last = columns.stop - columns.start, (columns.stop - 1) // factor.tile_rows
    blocks = [slice(rows.start, min(rows.stop, columns.stop)) for rows in map(factor.rows, range(last + 1))]
    panel = np.zeros((width, columns.stop))
    panel[np.arange(width), np.arange(columns.start, columns.stop)] = 1.0
    for j in reversed(range(last + 1)):
        part = np.ascontiguousarray(panel[:, blocks[j]])
        for i in range(j + 1, last + 1):
            with factor.open_tile((i, j)) as tile:
                part -= panel[:, blocks[i]] @ tile[: blocks[i].stop - blocks[i].start]
        with factor.open_tile((j, j)) as triangle:
            solve_from_right(part, triangle[: part.shape[1], : part.shape[1]], transposed=False)
        panel[:, blocks[j]] = part
    return panel


def _measure_residuals(factor: TileStore) -> tuple[Array, Residuals]:
    """Return the pivots (N,), the squares of the diagonal of L, and what 0, 1, .. N features leave of the rows."""
    values, largest, lowest = np.empty(factor.n), np.zeros(factor.n + 1), 0.0
    threads = 1 if is_inside_worker() else cpus.COUNT
    with ThreadPoolExecutor(threads, thread_name_prefix="dkfm-residuals") as pool:
        for block, (pivots, shares, least) in enumerate(
            pool.map(partial(_measure_block, factor), range(factor.blocks))
        ):
            rows = factor.rows(block)
            values[rows] = pivots
            np.maximum(largest[: rows.stop + 1], shares, out=largest[: rows.stop + 1])
            np.maximum(largest[rows.stop + 1 :], shares[-1], out=largest[rows.stop + 1 :])
            lowest = min(lowest, least)
    limits = np.append(np.full(factor.n, np.inf), 0.0)
    return values, Residuals(largest, lowest, noise=RESIDUAL_ROUNDING, limits=limits)


def _measure_block(factor: TileStore, block: int) -> tuple[Array, Array, float]:
    """Return the pivots of a block of rows, the largest share that 0, 1, .. features leave of one, and the smallest."""
    rows = factor.rows(block)
    left, shares = np.ones(rows.stop - rows.start), np.ones(rows.stop + 1)
    for k in range(block + 1):
        with factor.open_tile((block, k)) as tile:
            squares = np.square(tile)
        pivots = squares.diagonal().copy()
        np.subtract(left[:, np.newaxis], np.cumsum(squares, axis=1, out=squares), out=squares)
        columns = factor.rows(k)
        shares[columns.start + 1 : columns.stop + 1] = np.maximum(squares.max(axis=0), 0.0)
        left = squares[:, -1].copy()
    return pivots, shares, float(left.min())
