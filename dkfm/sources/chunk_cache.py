"""Convert stored values to float64, and cache the chunks that this process decoded last.

If many tasks read parts of one chunk, it is decoded only once.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import is_at_most_half_chunk, split_by_chunk
from dkfm.core.lru_cache import LruCache
from dkfm.core.rows import Array, as_float64

_CONCURRENT_CHUNKS = 10
"""Chunks that Zarr decodes at a time."""

_chunks: LruCache[Array] = LruCache(1)
"""At most two chunks, because concurrent threads may read on both sides of a chunk boundary."""


def as_float(values: npt.NDArray[np.generic], keep_float32: bool) -> Array:
    """Return values as float64, or float32 values as float32 if `keep_float32`."""
    if keep_float32 and values.dtype.type is np.float32:  # in any byte order
        return np.asarray(values, np.float32)
    return np.asarray(as_float64(cast("Array", values)), np.float64)


def estimate_concurrent_decode_bytes(shape: tuple[int, int], chunk_rows: int, chunks: int) -> int:
    """Return the bytes, both stored and decoded, of the chunks that Zarr decodes at a time: ten, or `chunks` if fewer.

    >>> estimate_concurrent_decode_bytes((1000, 10), 100, 3)
    48000
    """
    return 2 * 8 * shape[1] * min(chunk_rows, shape[0]) * min(_CONCURRENT_CHUNKS, chunks)


def read_rows_caching_chunks(
    key: tuple[Hashable, ...], rows: slice, chunk_rows: int, read: Callable[[slice], Array]
) -> Array:
    """Return some rows; if chunks are at least twice as large, decode and cache whole chunks under `key`."""
    if rows.stop <= rows.start or not is_at_most_half_chunk(rows.stop - rows.start, chunk_rows):
        return read(rows)
    parts = []
    for chunk, part in split_by_chunk(rows.start, rows.stop, chunk_rows):
        whole = slice(chunk * chunk_rows, (chunk + 1) * chunk_rows)
        parts.append(read_cached_part((*key, chunk), partial(read, whole), part))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_cached_part(key: Hashable, decode: Callable[[], Array], rows: slice) -> Array:
    """Return a copy of some rows of a chunk; decode the chunk if it is not cached."""
    # Copied before another thread may decode a chunk; a view would keep the chunk alive.
    return _chunks.call_with_value(lambda chunk: chunk[rows].copy(), key, decode)


def clear_chunks() -> None:
    """Clear the cache at the end of a job, unless a thread is reading a chunk."""
    _chunks.clear_unless_busy()
