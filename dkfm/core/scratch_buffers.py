"""Memory that a thread uses again and again: fresh memory is handed out page by page, and slowly."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array

_KEPT_BYTES = 2**25
"""A larger one is not kept for the next call."""

_LINE = 64
"""Where a line of the processor's cache begins, and its widest registers are read at once; NumPy's memory begins 16 or
48 bytes behind, which costs `exp` a fifth of its speed.
"""


def allocate_aligned(size: int) -> npt.NDArray[np.uint8]:
    """Return so many bytes of new memory that begins with a line."""
    memory = np.empty(size + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size]


class ThreadBuffer(threading.local):
    """A buffer for each thread."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)

    @contextmanager
    def taken(self, rows: int, columns: int, dtype: np.dtype[np.floating]) -> Iterator[Array]:
        """Lend an array with anything in it; who asks meanwhile, from inside a kernel, gets another."""
        size = rows * columns * dtype.itemsize
        held, self._held = self._held, np.empty(0, np.uint8)
        if len(held) < size:
            held = allocate_aligned(size)
        try:
            yield held[:size].view(dtype).reshape(rows, columns)
        finally:
            if len(held) <= _KEPT_BYTES:
                self._held = held
