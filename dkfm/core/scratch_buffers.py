"""Buffers that each thread reuses, because the system hands out new memory slowly, page by page."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array

_MAX_CACHED_BYTES = 2**25
"""A larger buffer is freed after use."""

_CACHE_LINE = 64
"""Alignment in bytes, also of the widest vector registers. NumPy's own memory is off by 16 or 48 bytes, which costs
`exp` a fifth of its speed.
"""


def allocate_aligned(size: int) -> npt.NDArray[np.uint8]:
    """Return `size` bytes of new memory that start at a cache line."""
    memory = np.empty(size + _CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return memory[first : first + size]


class ThreadBuffer(threading.local):
    """A buffer for each thread."""

    def __init__(self) -> None:
        self._cached = np.empty(0, np.uint8)

    @contextmanager
    def borrow(self, rows: int, columns: int, dtype: np.dtype[np.floating]) -> Iterator[Array]:
        """Yield an uninitialized array; a nested call, from inside a kernel, gets a buffer of its own."""
        size = rows * columns * dtype.itemsize
        buffer, self._cached = self._cached, np.empty(0, np.uint8)
        if len(buffer) < size:
            buffer = allocate_aligned(size)
        try:
            yield buffer[:size].view(dtype).reshape(rows, columns)
        finally:
            if len(buffer) <= _MAX_CACHED_BYTES:
                self._cached = buffer
