"""Build a Gram matrix with Dask tasks; each task computes a tile of the lower triangle and writes it and its transpose.

A tile is one chunk of a Zarr array, so no two tasks write the same file. A killed build resumes with the missing tiles.
"""

import hashlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dkfm.core import budget, chunking
from dkfm.core.rows import Array, Rows
from dkfm.errors import ClusterError, DamagedStoreError, InvalidInputError, KernelError, StoreError, StoreExistsError
from dkfm.execution import memory, worker_checks
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import find_client
from dkfm.execution.executors import open_executor
from dkfm.execution.scoring_threads import may_use_threads
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, require_fit_worker
from dkfm.files import change_detection, local, temporary_folders
from dkfm.files.change_detection import Watch
from dkfm.files.local import as_local_path
from dkfm.files.location import require_disjoint
from dkfm.gram.gram_log import log_gram
from dkfm.gram.shared_arrays import make_worker_requirements
from dkfm.gram.stored_gram import StoredGram, disk_bytes, existing_bytes
from dkfm.kernels import KernelSpec, as_kernel, serialization
from dkfm.kernels.base import Kernel, evaluate_block
from dkfm.kernels.serialization import is_code_free
from dkfm.sources.base import Source, digest_rows, read_finite
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source
from dkfm.sources.zarr import CsrCopySource, ZarrSource
from dkfm.storage import csr, own_files, raw_chunk_reader, store_metadata, zarr_store
from dkfm.storage.zarr_store import ZarrArray

if TYPE_CHECKING:
    from distributed import Client

TILE_ROWS = 2048
"""Default rows of a tile, which then has 34 MB: a task is long enough, and fits on any worker."""

_MEMORY_TILE_ROWS = 512
"""Rows of a tile in memory: small, so that all threads finish at about the same time."""


def build_gram(
    kernel: KernelSpec,
    X: object,
    path: str | Path,
    *,
    tile_rows: int | None = None,
    client: "Client | None" = None,
    progress: bool = False,
) -> ZarrArray:
    """Compute the Gram matrix K = k(X, X) into chunked Zarr; the same call resumes a build that was killed.

    Parameters
    ----------
    kernel : Kernel, str, callable or Gaussian process kernel of scikit-learn
        Kernel; see `kernels.as_kernel`.
    X : array-like or scipy.sparse array of shape (N, d), path, or zarr.Array
        Training rows, read tile by tile. A path is that of a .npy file, Parquet files, a Zarr array, or an array in a
        Zarr store, as in store.zarr/array.
    path : str or Path
        Folder of the store. It must not exist, unless it holds an earlier build for the same kernel and rows.
    tile_rows : int, optional
        Rows and columns of a tile, which is one chunk; 2,048 by default.
    client : distributed.Client, optional
        Client of a cluster; by default Dask's current client, else threads of this process. Workers must share the file
        system of `path`.
    progress : bool
        Whether to show a progress bar after two seconds, in a notebook or on a terminal.

    Returns
    -------
    zarr.Array of shape (N, N), float64
        The Gram matrix, exactly symmetric.

    Raises
    ------
    InvalidInputError
        The rows are not a two-dimensional array of finite real numbers; the message names the row.
    KernelError
        The kernel returned a wrong shape, NaN or infinity.
    StoreExistsError
        `path` holds something else; it is left untouched.
    BudgetError
        A tile is too large for a worker, or the matrix is too large for the disk.

    Examples
    --------
    >>> import dkfm, numpy as np, tempfile
    >>> X = np.random.default_rng(0).normal(size=(100, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     K = dkfm.build_gram(dkfm.kernels.Gaussian(2.0), X, folder + "/gram.zarr", tile_rows=40)
    ...     K.shape, K.chunks, float(K[7, 7])
    ((100, 100), (40, 40), 1.0)
    """
    root, source, client = as_local_path(path).absolute(), open_source(X), find_client(client)
    require_disjoint(root, "Gram matrix", [source.location])
    with change_detection.watch(source) as watch:
        kernel = _resolve_kernel(kernel, source)
        identity = make_gram_identity(kernel, source)
        rows = check_and_get_tile_rows(root, "gram", identity, tile_rows) or min(
            checked_tile_rows(tile_rows), source.shape[0]
        )
        if zarr_store.is_taken(root):
            own_files.remove_partial_files(
                root, store_metadata.read_own_attributes(root, "gram"), local.ABANDONED_SECONDS
            )
        if (root / store_metadata.MARKER).exists():
            return _open_finished(root)
        tiles = _compute_tiles(root, kernel, source, identity, rows, client, progress)
        _require_tiles(root)
        check_and_get_tile_rows(root, "gram", identity, None)  # raises if the store was replaced meanwhile
        _discard_if_rows_changed(root, watch, source, identity)
        with local.translate_write_errors(root):
            zarr_store.write_completion_marker(root, {"tiles": tiles})
        return _open_finished(root)


def _compute_tiles(
    root: Path,
    kernel: Kernel,
    source: Source,
    identity: dict[str, object],
    rows: int,
    client: "Client | None",
    progress: bool,
) -> int:
    """Create the store unless it exists, compute its missing tiles, and return the number of all tiles."""
    n, width = source.shape[0], chunking.count_tiles(source.max_size_in_float64s(rows), rows)
    with open_executor(client) as executor:
        need = budget.gram_task_bytes(rows, width, kernel.peak_blocks, kernel.landmark_copies)
        have = memory.task_budget(client, executor.threads, needed=None if client is None else need)
        fits = budget.tile_rows_within(have, width, kernel.peak_blocks, kernel.landmark_copies)
        remedy = f"use tile_rows <= {fits}, or fewer threads, or more memory"
        budget.require_fits(need, have, f"A tile of {rows} rows", remedy)
        memory.require_disk(root, disk_bytes(n, source.float64s_per_row, rows) - existing_bytes(root))
        rows = _ensure_store(root, identity, source, rows)
        readable = source if client is None else _store_rows_for_workers(source, root, rows)
        pairs = list(chunking.lower_triangle_tile_indices(n, rows))
        log_gram(kernel, source, len(pairs), f"in {root}", executor, rows)
        requirements = make_worker_requirements(root, source if readable is source else None, need)
        with nullcontext() if client is None else worker_checks.exclude_unfit_with_probe(executor, requirements):
            checked = None if client is None else requirements
            tasks = ((kernel, readable, str(root), pair, rows, checked) for pair in pairs)
            tally = run_tasks(executor, "dkfm-gram", write_tile, tasks, len(pairs), progress)
    if tally.fatal_task_numbers:
        raise ClusterError(
            f"Every worker died that computed the tile {pairs[tally.fatal_task_numbers[0]]}; what else was built stays."
        )
    return len(pairs)


def _discard_if_rows_changed(root: Path, watch: Watch, source: Source, identity: dict[str, object]) -> None:
    """Raise an InvalidInputError, and remove all tiles, if the rows changed during the build.

    If only the metadata changed, as after `chmod`, the rows are read again and compared.
    """
    if watch.is_same() or digest_rows(source) == identity["rows"]:
        return
    with suppress(StoreError):  # the error raised below is more important
        zarr_store.remove_own_store(root, "gram")
    raise InvalidInputError(
        f"{source.name} changed while it was read, so that the tiles of {root} were of two inputs and are removed; "
        "build it again."
    )


def _resolve_kernel(spec: KernelSpec, source: Source) -> Kernel:
    """Return the kernel, with parameters that depend on the rows filled in."""
    kernel = as_kernel(spec)
    if kernel.is_precomputed:
        raise KernelError("The Gram matrix of a precomputed kernel is there already; give it to an estimator's fit.")
    if isinstance(source, MemorySource):
        return kernel.resolve(source.array)
    first = read_finite(source, slice(0, 1))
    evaluate_block(kernel, first, first)  # raises before a store is created
    return kernel


def _open_finished(root: Path) -> ZarrArray:
    _require_tiles(root)
    return zarr_store.open_array(root, "gram")


def _require_tiles(root: Path) -> None:
    try:
        store_metadata.require_chunks(root / "gram", store_metadata.read_array_info(root / "gram"))
    except DamagedStoreError as error:
        raise DamagedStoreError(f"{error} Delete {root} and build again.") from None


def checked_tile_rows(tile_rows: object) -> int:
    """Return the checked `tile_rows` of a user, or 2,048 for None."""
    return TILE_ROWS if tile_rows is None else chunking.require_count(tile_rows, "tile_rows")


def make_gram_identity(kernel: Kernel, source: Source) -> dict[str, object]:
    """Return what identifies a Gram matrix: kernel, digest of the rows, and shape; raise if a row is not finite."""
    # The code of user functions cannot be compared, so a build with one is never resumed.
    name: object = serialization.to_config(kernel) if is_code_free(kernel) else uuid.uuid4().hex
    return {"kernel": name, "rows": digest_rows(source), "shape": list(source.shape)}


def check_and_get_tile_rows(root: Path, kind: str, identity: dict[str, object], tile_rows: int | None) -> int | None:
    """Return the tile rows of an earlier build of the same matrix in a store of a kind; None if there is no store."""
    what = kind.replace("gram", "Gram")
    if not zarr_store.is_taken(root):
        return None
    try:
        attributes = store_metadata.read_own_attributes(root, kind)
    except StoreError:
        raise StoreExistsError(
            f"{root} holds something that is not a {what} of dkfm's; it was left untouched."
        ) from None
    if attributes.get("identity") != identity:
        raise StoreExistsError(f"{root} holds the {what} of another kernel or other rows; it was left untouched.")
    begun, n = attributes.get("tile_rows"), int(identity["shape"][0])  # type: ignore[index]  # a list
    if type(begun) is not int or begun < 1:
        raise DamagedStoreError(f"{root} does not say the rows of its tiles.")
    info = store_metadata.read_array_info(root / kind)
    if (info.shape, info.chunks, info.dtype_name) != ((n, n), (begun, begun), "float64"):
        raise DamagedStoreError(
            f"{root} is of {n} rows in tiles of {begun}, and its array is {info.shape}{info.chunks}."
        )
    unfinished = not (root / store_metadata.MARKER).exists()
    if unfinished and tile_rows is not None and begun != min(checked_tile_rows(tile_rows), n):
        raise StoreExistsError(f"{root} was begun with tile_rows={begun}; go on with that, not {tile_rows}.")
    return begun


def _ensure_store(root: Path, identity: dict[str, object], source: Source, rows: int) -> int:
    """Create the store unless it exists, even if another driver just created it; return the rows of its tiles."""
    n, d = source.shape
    if zarr_store.is_taken(root):
        return check_and_get_tile_rows(root, "gram", identity, None) or rows
    sparse = source.array if isinstance(source, MemorySource) and not isinstance(source.array, np.ndarray) else None
    names = ["rows"] if sparse is None else csr.array_names("rows")
    try:
        with zarr_store.new_store(root, "gram", {"identity": identity, "tile_rows": rows}, ["gram", *names]) as group:
            zarr_store.add_array(group, "gram", (n, n), (rows, rows))
            if sparse is None:
                zarr_store.add_array(group, "rows", (n, d), (rows, d))
            else:
                csr.write_csr(group, "rows", sparse)
    except StoreExistsError:
        begun = check_and_get_tile_rows(root, "gram", identity, None)
        if begun is None:
            raise
        return begun
    return rows


def _store_rows_for_workers(source: Source, root: Path, rows: int) -> Source:
    """Write rows in memory beside the Gram matrix, so that workers can read them; return their source."""
    if not isinstance(source, MemorySource):
        return source
    if not isinstance(source.array, np.ndarray):
        return CsrCopySource(root, source.shape, source.float64s_per_row, source.max_nnz_per_row_window, "rows")
    with local.translate_write_errors(root):
        shared = zarr_store.open_array(root, "rows", "r+")
        if shared.shape != source.shape:
            raise DamagedStoreError(f"{root} is of rows {source.shape}, and those beside it are {shared.shape}.")
        for part in chunking.row_slices(source.shape[0], rows):
            shared[part] = source.array[part]
    return ZarrSource.open(root / "rows")


def write_tile(
    kernel: Kernel,
    source: Source,
    root: str,
    pair: tuple[int, int],
    tile_rows: int,
    requirements: WorkerRequirements | None = None,
) -> tuple[int, int]:
    """Compute a tile and write it and its transpose; skip chunks that exist and are undamaged."""
    require_fit_worker(requirements)
    n, (i, j) = source.shape[0], pair
    row, column = chunking.row_slice(i, n, tile_rows), chunking.row_slice(j, n, tile_rows)
    array, images = Path(root) / "gram", [pair] if i == j else [pair, (j, i)]
    missing = [image for image in images if not raw_chunk_reader.has_intact_chunk(array, image, (tile_rows, tile_rows))]
    if missing:
        X = read_finite(source, row)
        Y = X if i == j else read_finite(source, column)
        with single_blas_thread():
            block = evaluate_block(kernel, X, Y, (row.start, column.start))
        for image in missing:
            zarr_store.write_chunk(array, image, block if image == pair else block.T)
    with local.translate_write_errors(Path(root)):
        for image in (image for image in images if image not in missing):
            zarr_store.sync_chunk(array, image)  # a killed build may not have flushed it to disk
    return pair


def compute_driver_gram(
    kernel: Kernel,
    X: Rows,
    *,
    tile_rows: int | None = None,
    workspace: str | Path | None = None,
    progress: bool = False,
) -> Array:
    """Return the Gram matrix in this process's memory, in Fortran order; only its lower triangle is meaningful.

    A matrix of few rows is computed directly, a larger one on threads of this process. With a cluster or a workspace, a
    matrix of several tiles is built on disk: in a temporary folder, or in the workspace, where another fit reuses it.
    The matrix of a user function is never kept.
    """
    n, limit, is_cluster = X.shape[0], checked_tile_rows(tile_rows), find_client(None) is not None
    if may_use_threads(kernel) and not is_cluster:
        limit = min(limit, _MEMORY_TILE_ROWS)
    if n <= limit:
        log_gram(kernel, X, 1, "in memory")
        return evaluate_block(kernel, X, X).T
    if not stores_gram(kernel, n, tile_rows, workspace, is_cluster):
        return _compute_in_memory(kernel, X, min(tile_rows or TILE_ROWS, _MEMORY_TILE_ROWS), progress)
    with build_stored_gram(kernel, X, tile_rows=tile_rows, workspace=workspace, progress=progress) as K:
        return K.read_lower()


def stores_gram(kernel: Kernel, n: int, tile_rows: int | None, workspace: str | Path | None, is_cluster: bool) -> bool:
    """Return whether a Gram matrix that the driver needs is built on disk first: several tiles, shared with others."""
    return n > checked_tile_rows(tile_rows) and (is_cluster or (workspace is not None and is_code_free(kernel)))


@contextmanager
def build_stored_gram(
    kernel: Kernel,
    X: Rows,
    *,
    tile_rows: int | None = None,
    workspace: str | Path | None = None,
    progress: bool = False,
) -> Iterator[StoredGram]:
    """Build the Gram matrix on disk and yield it for products; remove it at the end if it is temporary."""
    with _open_store_path(kernel, X, workspace, tile_rows) as path:
        build_gram(kernel, X, path, tile_rows=tile_rows, progress=progress)
        yield StoredGram(path)


def _compute_in_memory(kernel: Kernel, X: Rows, rows: int, progress: bool) -> Array:
    n = X.shape[0]
    K, pairs = np.empty((n, n), order="F"), list(chunking.lower_triangle_tile_indices(n, rows))
    with open_executor(None) as executor:
        log_gram(kernel, X, len(pairs), "in memory", executor)
        tasks = ((K, kernel, X, pair, rows) for pair in pairs)
        run_tasks(executor, "dkfm-gram", _fill_tile, tasks, len(pairs), progress)
    return K


def _fill_tile(K: Array, kernel: Kernel, X: Rows, pair: tuple[int, int], rows: int) -> None:
    row, column = (chunking.row_slice(number, len(K), rows) for number in pair)
    Y = X[column]
    with single_blas_thread():
        # Assign through K.T: the transpose of a tile has the memory order of K.
        K.T[column, row] = evaluate_block(kernel, Y, Y if row == column else X[row], (column.start, row.start))


def find_disk_room(kernel: Kernel, X: Rows | None, workspace: str | Path | None) -> int:
    """Return the bytes that a Gram matrix may take on disk: the free space, and what an earlier build has written."""
    folder = as_local_path(tempfile.gettempdir() if workspace is None else workspace).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    begun = X is not None and workspace is not None and is_code_free(kernel)
    written = existing_bytes(gram_store_path(kernel, X, folder)) if begun and existing == folder else 0
    return shutil.disk_usage(existing).free + written


def gram_store_path(kernel: Kernel, X: object, workspace: str | Path) -> Path:
    """Return the path at which fits with a workspace keep the Gram matrix of a kernel without user functions."""
    return as_local_path(workspace).absolute() / name_store("gram", make_gram_identity(kernel, open_source(X)))


def name_store(kind: str, identity: dict[str, object]) -> str:
    """Return the name of a store of a kind in a workspace, from the JSON values that identify its content."""
    return f"{kind}-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]}.zarr"


@contextmanager
def _open_store_path(kernel: Kernel, X: Rows, workspace: str | Path | None, tile_rows: int | None) -> Iterator[Path]:
    if workspace is not None and is_code_free(kernel):
        yield gram_store_path(kernel, X, workspace)
        return
    n, parent = X.shape[0], None if workspace is None else local.make_folder(as_local_path(workspace))
    need = disk_bytes(n, open_source(X).float64s_per_row, min(checked_tile_rows(tile_rows), n))
    with temporary_folders.open_temporary_folder("gram", parent, need=need, what="The Gram matrix") as folder:
        yield folder / "gram.zarr"
