"""Compute the triangular root ``W = D^-1 L'^(-1)`` of ``D^-1 K D^-1 = L L'`` from tiles of L, into a store.

The features of the Cholesky basis are ``k(z, X) W``. A task computes a few whole chunks of columns of W, from the last
block of rows to the first, and writes them durably.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np

from dkfm.core import budget, chunking, cpus
from dkfm.core.rows import Array
from dkfm.errors import ClusterError, InvalidInputError, NotSupportedError, StoreError, StoreExistsError
from dkfm.execution import memory
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import is_inside_worker
from dkfm.execution.executors import open_executor
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, require_fit_worker
from dkfm.files import local
from dkfm.gram import product_costs
from dkfm.gram.build import checked_tile_rows, name_store
from dkfm.gram.linear_systems import tile_store
from dkfm.gram.linear_systems.tile_store import TileStore
from dkfm.gram.linear_systems.tiled_cholesky import (
    as_column_unless_ones,
    make_factor_identity,
    open_tiled_factor,
    solve_from_right,
)
from dkfm.gram.shared_arrays import open_shared_arrays
from dkfm.gram.stored_gram import existing_bytes
from dkfm.gram.training_data import TrainingData, TrainingRows
from dkfm.kernels.base import Kernel
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics.map_error_bounds import Residuals
from dkfm.numerics.pivoted_cholesky import RESIDUAL_ROUNDING
from dkfm.numerics.roots import Root, replace_zero_lengths, row_lengths
from dkfm.sources.base import Source
from dkfm.storage import own_files, raw_chunk_reader, store_metadata, streamed_weights, zarr_store

PANEL_COLUMNS = 512
"""Columns of the root that a task computes together, or as many as one chunk has."""

_NAME, _PIVOTS, _RESIDUALS = "root", "pivots", "residuals"
"""Names of the arrays of the store: W, the pivots, and the largest residual of a row after 0, 1, .. N features."""

_RESIDUAL_THREADS = 4

_ROOT_SECONDS = 1.25
"""Time of a root divided by that of its factor; a tile that is read is multiplied by fewer columns."""


@dataclass(frozen=True)
class RootTask:
    """Data from which columns of the root are computed, and the store to which they are written."""

    factor: TileStore
    store_path: Path
    row_scales: Source | None
    """Inverse diagonal of D, (N, 1), where the tasks read it; None if it is 1."""
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
        Folder of the factor and of the root, which stay there. A killed fit resumes, and another fit of the same rows
        reuses them.
    progress : bool
        Whether to show a progress bar.

    Raises
    ------
    InvalidInputError
        The kernel is precomputed, or there is no workspace.
    NotSupportedError
        The kernel has user functions, so later fits could not identify the files.
    NotPSDError
        A row is, up to rounding, in the span of the rows before it; the message names the row.
    BudgetError
        A task does not fit in memory, or the factor or the root does not fit on the disk.
    ClusterError
        A task killed its workers repeatedly, or the cluster is gone.
    """
    require_supported_kernel(data.kernel)
    if not isinstance(data, TrainingRows) or workspace is None:
        raise InvalidInputError("A root in tiles needs rows in memory and a workspace.")
    kernel, X, lengths = data.kernel, data.indexable_rows, row_lengths(data.diagonal())
    roots = 1 / replace_zero_lengths(lengths)
    identity = make_factor_identity(kernel, X, 0.0, roots)
    folder = local.make_folder(local.as_local_path(workspace)).absolute()
    factor_path, root = (folder / name_store(kind, identity) for kind in ("factor", _NAME))
    if not _is_sound(root, identity, X.shape[0]):
        _require_disk_and_memory(root, factor_path, data, tile_rows)
        with open_tiled_factor(
            kernel, X, 0.0, roots, tile_rows=tile_rows, workspace=workspace, progress=progress
        ) as factor:
            _prepare_store(root, identity, factor)
            _compute_columns(factor, root, as_column_unless_ones(roots), progress)
            _write_residuals_and_marker(root, factor)
    return _read_root(root, lengths)


def require_supported_kernel(kernel: Kernel) -> None:
    """Raise unless a root in tiles can be computed for a kernel.

    Raises
    ------
    InvalidInputError
        The kernel is precomputed.
    NotSupportedError
        The kernel has user functions.
    """
    if kernel.is_precomputed:
        raise InvalidInputError("A root in tiles needs rows that a kernel compares, and a precomputed kernel has none.")
    if not is_code_free(kernel):
        raise NotSupportedError(
            f"The files of a root in tiles are found again by the kernel, and {kernel!r:.100} is code, which cannot be "
            "compared; use one of dkfm's kernels, or another build."
        )


def choose_chunk_and_task_columns(n: int) -> tuple[int, int]:
    """Return the columns of a chunk of the root of N rows, and those that a task computes together.

    >>> choose_chunk_and_task_columns(40_000)
    (13, 507)
    """
    chunk = min(n, streamed_weights.count_columns_within(streamed_weights.CHUNK_BYTES, n, 8))
    return chunk, max(1, PANEL_COLUMNS // chunk) * chunk


def disk_bytes(n: int) -> int:
    """Return the bytes on disk of the root of N rows, in whole chunks, zeros included.

    >>> disk_bytes(40_000)
    12800320000
    """
    chunk, _ = choose_chunk_and_task_columns(n)
    return 8 * n * chunk * chunking.count_tiles(n, chunk)


def task_bytes(n: int, tile_rows: int) -> int:
    """Return the bytes of a task: its columns, and the chunk that is written."""
    chunk, columns = choose_chunk_and_task_columns(n)
    return budget.inverse_task_bytes(n, tile_rows, min(n, columns) + chunk)


def root_seconds(n: int, threads: int) -> float:
    """Predict the seconds in which threads compute the root of N rows from its factor, without reading and writing."""
    return _ROOT_SECONDS * product_costs.factor_seconds(n, threads)


def residual_bytes(tile_rows: int) -> int:
    """Return the memory of the driver's threads that read the factor, in bytes; each holds three tiles."""
    return count_residual_threads() * 3 * 8 * tile_rows**2


def _is_sound(root: Path, identity: dict[str, object], n: int) -> bool:
    """Return whether the store of a root exists, is finished, and has no damaged chunk.

    Raises
    ------
    StoreExistsError
        The path holds something else.
    """
    found = _read_attributes(root, identity) if zarr_store.is_taken(root) else None
    if found is None or not (root / store_metadata.MARKER).exists():
        return False
    marker = store_metadata.read_completion_marker(root)
    if marker.get("digest") != _make_root_id(root, found.get("factor")) or not isinstance(marker.get("lowest"), float):
        return False
    return all(
        raw_chunk_reader.has_intact_chunk(root / name, index, chunks)
        for name, (shape, chunks) in _describe_layout(n).items()
        for index in product(*(range(chunking.count_tiles(*pair)) for pair in zip(shape, chunks, strict=True)))
    )


def _make_root_id(root: Path, run: object) -> str:
    """Return the id by which a model refers to the root of a factor."""
    return f"{root.stem}-{run}"


def _describe_layout(n: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shape of each array of a store, and of its chunks."""
    return {
        _NAME: ((n, n), (n, choose_chunk_and_task_columns(n)[0])),
        _PIVOTS: ((n,), (n,)),
        _RESIDUALS: ((n + 1,), (n + 1,)),
    }


def _read_attributes(root: Path, identity: dict[str, object]) -> dict[str, object] | None:
    """Return the attributes of the store of a root; None if it has another layout.

    Raises
    ------
    StoreExistsError
        The path holds something else.
    """
    n = int(identity["shape"][0])  # type: ignore[index]  # a list
    try:
        found = store_metadata.read_own_attributes(root, _NAME)
        infos = {name: store_metadata.read_array_info(root / name) for name in _describe_layout(n)}
    except StoreError:
        found, infos = {}, {}
    if found.get("identity") != identity:
        raise StoreExistsError(f"{root} holds something that is not the root of this factor; it was left untouched.")
    layout = {name: (info.shape, info.chunks) for name, info in infos.items()}
    is_same = layout == _describe_layout(n) and all(info.dtype_name == "float64" for info in infos.values())
    return found if is_same else None


def _prepare_store(root: Path, identity: dict[str, object], factor: TileStore) -> None:
    """Create the store of the root of a factor, or keep an unfinished store of the same root.

    Columns from two factors of a matrix must not be combined, because they may differ by more than rounding.
    """
    if zarr_store.is_taken(root):
        found = _read_attributes(root, identity)
        if found is not None and found.get("factor") == factor.factor_id:
            own_files.remove_partial_files(root, found, local.ABANDONED_SECONDS)
            return
        zarr_store.remove_own_store(root, _NAME)
    layout = _describe_layout(factor.n)
    try:
        with zarr_store.new_store(root, _NAME, {"identity": identity, "factor": factor.factor_id}, layout) as group:
            for name, (shape, chunks) in layout.items():
                zarr_store.add_array(group, name, shape, chunks)
    except StoreExistsError:  # another process has just created it
        found = _read_attributes(root, identity)
        if found is None or found.get("factor") != factor.factor_id:
            raise


def _require_disk_and_memory(root: Path, factor: Path, data: TrainingRows, tile_rows: int | None) -> None:
    """Raise a BudgetError unless the disk has space for the factor and its root, and each thread memory for a task."""
    n, kernel = data.indexable_rows.shape[0], data.kernel
    size = min(n, checked_tile_rows(tile_rows))
    missing = tile_store.disk_bytes(n, size) + disk_bytes(n) - existing_bytes(root) - existing_bytes(factor)
    memory.require_disk(root, missing, "The root, with its factor,")
    each = budget.factor_task_bytes(size, data.float64s_per_row, kernel.peak_blocks, kernel.landmark_copies)
    each = max(each, task_bytes(n, size))
    with open_executor(None) as executor:
        have = memory.task_budget(executor.client, executor.threads, needed=None if executor.client is None else each)
    budget.require_fits(each, have, f"A task of the root of {n:,} rows", "use fewer threads, or fewer rows")


def _compute_columns(factor: TileStore, root: Path, roots: Array | None, progress: bool) -> None:
    """Compute the columns of the root that are missing in its store."""
    n, each = factor.n, task_bytes(factor.n, factor.tile_rows)
    panels = list(chunking.row_slices(n, choose_chunk_and_task_columns(n)[1]))[::-1]  # the last takes the longest
    with (
        open_executor(None) as executor,
        open_shared_arrays(executor, each, 8 * n, "The scales of the rows", root.parent) as shared,
        nullcontext() if roots is None else shared.share(roots) as readable,
    ):
        seconds = root_seconds(n, executor.threads)
        text = f"triangular root of {n:,} rows, {len(panels)} panels, in {root}, on {describe_place(executor)}"
        log_stage("solve", text, seconds=seconds, rows=n, threads=executor.threads)
        task = RootTask(factor, root, readable, shared.requirements)
        tasks = ((task, columns) for columns in panels)
        tally = run_tasks(executor, "dkfm-solve", compute_root_columns, tasks, len(panels), progress)
    if tally.fatal_task_numbers:
        raise ClusterError(f"Every worker died that computed some columns of the root in {root}; the others stay.")


def _write_residuals_and_marker(root: Path, factor: TileStore) -> None:
    """Write the pivots and residuals of a factor to the store of its root, and mark the store complete."""
    values, residuals = _measure_residuals(factor)
    zarr_store.write_chunk(root / _PIVOTS, (0,), values)
    zarr_store.write_chunk(root / _RESIDUALS, (0,), residuals.largest_by_rank)
    with local.translate_write_errors(root):
        zarr_store.write_completion_marker(
            root, {"digest": _make_root_id(root, factor.factor_id), "lowest": residuals.lowest}
        )


def _read_root(root: Path, lengths: Array) -> tuple[Root, Residuals]:
    marker, info = store_metadata.read_completion_marker(root), store_metadata.read_array_info(root / _NAME)
    weights = streamed_weights.open_weights(root, str(marker["digest"]), _NAME, info, True)
    values, largest = (cast("Array", raw_chunk_reader.read_own_array(root / name)) for name in (_PIVOTS, _RESIDUALS))
    limits = np.append(np.full(len(values), np.inf), 0.0)
    residuals = Residuals(largest, float(str(marker["lowest"])), noise=RESIDUAL_ROUNDING, limits=limits)
    return Root(weights, values, np.zeros(0), lengths, triangular=True), residuals


def compute_root_columns(task: RootTask, columns: slice) -> slice:
    """Compute some columns of the root, and write their chunks that are missing or damaged."""
    require_fit_worker(task.requirements)
    array, n = task.store_path / _NAME, task.factor.n
    chunk = choose_chunk_and_task_columns(n)[0]
    starts = range(columns.start, columns.stop, chunk)
    parts = [(start // chunk, slice(start, min(start + chunk, columns.stop))) for start in starts]
    missing = []
    for number, part in parts:
        if raw_chunk_reader.has_intact_chunk(array, (0, number), (n, chunk)):
            zarr_store.sync_chunk(array, (0, number))  # a killed process may not have synced it
        else:
            missing.append((number, part))
    if not missing:
        return columns
    with single_blas_thread():
        panel = _solve_columns(task.factor, columns)
    if task.row_scales is not None:
        panel *= cast("Array", task.row_scales.read(slice(0, columns.stop)))[:, 0]
    for number, part in missing:
        values = np.zeros((n, part.stop - part.start))
        values[: columns.stop] = panel[part.start - columns.start : part.stop - columns.start].T
        zarr_store.write_chunk(array, (0, number), values)
    return columns


def _solve_columns(factor: TileStore, columns: slice) -> Array:
    """Return some columns of ``L'^(-1)``, transposed and without the zeros below them: (w, stop of the columns)."""
    width, last = columns.stop - columns.start, (columns.stop - 1) // factor.tile_rows
    blocks = [slice(rows.start, min(rows.stop, columns.stop)) for rows in map(factor.rows, range(last + 1))]
    panel = np.zeros((width, columns.stop))
    panel[np.arange(width), np.arange(columns.start, columns.stop)] = 1.0
    for j in reversed(range(last + 1)):
        part = np.ascontiguousarray(panel[:, blocks[j]])
        for i in range(j + 1, last + 1):
            with factor.read_tile_to_buffer((i, j)) as tile:
                part -= panel[:, blocks[i]] @ tile[: blocks[i].stop - blocks[i].start]
        with factor.read_tile_to_buffer((j, j)) as triangle:
            solve_from_right(part, triangle[: part.shape[1], : part.shape[1]], transposed=False)
        panel[:, blocks[j]] = part
    return panel


def count_residual_threads() -> int:
    """Return the number of threads of the driver that read the factor."""
    return 1 if is_inside_worker() else min(cpus.COUNT, _RESIDUAL_THREADS)


def _measure_residuals(factor: TileStore) -> tuple[Array, Residuals]:
    """Return the pivots (N,), which are the squared diagonal of L, and the residuals after 0, 1, .. N features."""
    values, largest, lowest = np.empty(factor.n), np.zeros(factor.n + 1), 0.0
    with ThreadPoolExecutor(count_residual_threads(), thread_name_prefix="dkfm-residuals") as pool:
        for block, (pivots, shares, least) in enumerate(
            pool.map(partial(_measure_block, factor), range(factor.blocks))
        ):
            rows = factor.rows(block)
            values[rows] = pivots
            np.maximum(largest[: rows.stop + 1], shares, out=largest[: rows.stop + 1])
            np.maximum(largest[rows.stop + 1 :], shares[-1], out=largest[rows.stop + 1 :])
            lowest = min(lowest, least)
    return values, Residuals(largest, lowest)


def _measure_block(factor: TileStore, block: int) -> tuple[Array, Array, float]:
    """Return the pivots of a block of rows, the largest residual after 0, 1, .. features, and the smallest residual."""
    rows = factor.rows(block)
    left, shares = np.ones(rows.stop - rows.start), np.ones(rows.stop + 1)
    for k in range(block + 1):
        with factor.read_tile_to_buffer((block, k)) as tile:
            squares = np.square(tile)
        pivots = squares.diagonal().copy()
        np.subtract(left[:, np.newaxis], np.cumsum(squares, axis=1, out=squares), out=squares)
        columns = factor.rows(k)
        shares[columns.start + 1 : columns.stop + 1] = np.maximum(squares.max(axis=0), 0.0)
        left = squares[:, -1].copy()
    return pivots, shares, float(left.min())
