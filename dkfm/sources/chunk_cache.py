"""What sources decode: values in float64, and the chunks that this process decoded last.

Many tasks want parts of one chunk, which is decoded once.
"""

from collections.abc import Callable, Hashable
from functools import partial

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import is_small_part
from dkfm.core.lru_cache import LruCache
from dkfm.core.rows import Array

_AT_ONCE = 10
"""Chunks that Zarr decodes at a time."""

_chunks: LruCache[Array] = LruCache(1)
"""Two chunks: threads that want parts of them may stand on both sides of a border."""


def widen(values: npt.NDArray[np.generic], keep_float32: bool) -> Array:
    """Return values in float64; where `keep_float32` says so, those of float32 as they are."""
    kept = keep_float32 and values.dtype.kind == "f" and values.dtype.itemsize == np.dtype(np.float32).itemsize
    return np.asarray(values, np.float32 if kept else np.float64)


def chunk_bytes(shape: tuple[int, int], chunk_rows: int, chunks: int) -> int:
    """Return the bytes of chunks of rows that Zarr decodes together, as they are stored and as they are decoded.

    >>> chunk_bytes((1000, 10), 100, 3)
    48000
    """
    return 2 * 8 * shape[1] * min(chunk_rows, shape[0]) * min(_AT_ONCE, chunks)


def read_by_chunks(key: tuple[Hashable, ...], rows: slice, chunk_rows: int, read: Callable[[slice], Array]) -> Array:
    """Return some rows; of a chunk much larger than they are, which is kept under the key for those after them."""
    if rows.stop <= rows.start or not is_small_part(rows.stop - rows.start, chunk_rows):
        return read(rows)
    parts = []
    for chunk in range(rows.start // chunk_rows, (rows.stop - 1) // chunk_rows + 1):
        first = chunk * chunk_rows
        wanted = slice(max(0, rows.start - first), min(chunk_rows, rows.stop - first))
        parts.append(cached_part((*key, chunk), partial(read, slice(first, first + chunk_rows)), wanted))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def cached_part(key: Hashable, decode: Callable[[], Array], rows: slice) -> Array:
    """Return a copy of some rows of a chunk, decoded if it is not there."""
    return _chunks.get(key, decode)[rows].copy()  # a view would keep the chunk alive


def clear_chunks() -> None:
    """Let go of what was kept for the next task of a job that has none."""
    _chunks.remove()
