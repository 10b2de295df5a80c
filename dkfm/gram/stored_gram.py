"""Multiply a Gram matrix out of core: read the tiles of its lower triangle one by one, on threads."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dkfm.core import budget, chunking, cpus
from dkfm.core.rows import Array
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.errors import DamagedStoreError
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import is_inside_worker
from dkfm.storage import raw_chunk_reader, store_metadata

_Products = tuple[slice, Array, slice, Array | None]
"""A slice of rows and the product of a tile for them; the same for its transpose, None on the diagonal."""


@dataclass(frozen=True)
class StoredGram:
    """Gram matrix in a finished store of `build_gram`; each product reads it again."""

    root: Path
    """Folder of the store."""
    threads: int = field(default_factory=lambda: 1 if is_inside_worker() else cpus.COUNT)
    """Threads, each of which holds one tile; by default the cores of this machine, and one inside a Dask worker."""

    def read_lower(self) -> Array:
        """Read the lower triangle into a matrix (N, N) in Fortran order, for LAPACK; the upper one is not set.

        Raises
        ------
        DamagedStoreError
            A tile is missing or cannot be read.
        """
        info = self._array_info
        n, rows = info.shape[0], info.chunks[0]
        K = np.empty((n, n), order="F")
        for i, j in chunking.lower_triangle_tile_indices(n, rows):
            row, column = chunking.row_slice(i, n, rows), chunking.row_slice(j, n, rows)
            with self._read_tile(info, (j, i)) as tile:  # the transpose of a tile has the memory order of K
                K.T[column, row] = tile[: column.stop - column.start, : row.stop - row.start]
        return K

    @property
    def _array_info(self) -> store_metadata.ArrayInfo:
        return store_metadata.read_array_info(self.root / "gram")

    def __matmul__(self, V: Array) -> Array:
        """Return the product (N, p) with V (N, p); repeated products are bitwise equal."""
        info, n = self._array_info, len(V)
        product, right = np.zeros((n, V.shape[1])), np.ascontiguousarray(V)
        pairs = list(chunking.lower_triangle_tile_indices(n, info.chunks[0]))
        with single_blas_thread(), ThreadPoolExecutor(self.threads, thread_name_prefix="dkfm-gram") as pool:
            for rows, part, columns, transposed in self._tile_products(pool, info, pairs, right):
                product[rows] += part
                if transposed is not None:
                    product[columns] += transposed
        return product

    def _tile_products(
        self, pool: ThreadPoolExecutor, info: store_metadata.ArrayInfo, pairs: list[tuple[int, int]], V: Array
    ) -> Iterator[_Products]:
        """Yield the contributions of the tiles in order, with a bounded number of them in flight."""
        pending: deque[Future[_Products]] = deque()
        for pair in pairs:
            pending.append(pool.submit(self._multiply_tile, info, pair, V))
            if len(pending) > 2 * self.threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _multiply_tile(self, info: store_metadata.ArrayInfo, pair: tuple[int, int], V: Array) -> _Products:
        rows, columns = (chunking.row_slice(number, len(V), info.chunks[0]) for number in pair)
        with self._read_tile(info, pair) as chunk:
            tile = chunk[: rows.stop - rows.start, : columns.stop - columns.start]
            # (V' tile)' avoids the copy that a product with a transposed tile would make.
            transposed = None if rows == columns else (V[rows].T @ tile).T
            return rows, tile @ V[columns], columns, transposed

    @contextmanager
    def _read_tile(self, info: store_metadata.ArrayInfo, pair: tuple[int, int]) -> Iterator[Array]:
        file = self.root / "gram" / "c" / str(pair[0]) / str(pair[1])
        with _tile_buffer.borrow(info.chunks[0], info.chunks[1], np.dtype(np.float64)) as tile:
            try:
                raw_chunk_reader.read_chunk_into_array(tile, file, checked=True)
            except (ValueError, OSError) as error:
                raise DamagedStoreError(
                    f"Tile {pair} of {self.root} cannot be read; delete {self.root} and build again: {error}"
                ) from error
            yield tile


_tile_buffer = ThreadBuffer()


def disk_bytes(n: int, width: int, tile_rows: int) -> int:
    """Return the size on disk of a Gram matrix and the rows beside it, in bytes."""
    return budget.gram_store_bytes(n, tile_rows) + 8 * n * width


def existing_bytes(root: Path) -> int:
    """Return the bytes of the files of a store; 0 if there is none."""
    return sum((root / name).stat().st_size for name in store_metadata.list_files(root)) if root.is_dir() else 0
