"""The chunks of sources that this process decoded last: many tasks want parts of one, which is decoded once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from dkfm.kernels.rows import Array

__all__ = ["forget", "is_part", "part"]

_KEPT = 2
"""Threads that want parts of chunks may stand on both sides of a border."""

_lock = threading.Lock()
_chunks: OrderedDict[Hashable, Array] = OrderedDict()


def is_part(rows: int, chunk_rows: int) -> bool:
    """Whether so many rows are much less than a chunk, which is then decoded once for many tasks.

    >>> is_part(500, 1000), is_part(1000, 1000)
    (True, False)
    """
    return 2 * rows <= chunk_rows


def part(key: Hashable, decode: Callable[[], Array], rows: slice) -> Array:
    """Return a copy of some rows of a chunk, decoded if it is not there; the oldest one is let go first."""
    with _lock:
        if key not in _chunks:
            while len(_chunks) >= _KEPT:
                _chunks.popitem(last=False)
            _chunks[key] = decode()
        _chunks.move_to_end(key)
        return _chunks[key][rows].copy()  # a view would keep the chunk alive


def forget() -> None:
    """Let go of what was kept for the next task of a job that has none."""
    with _lock:
        _chunks.clear()
