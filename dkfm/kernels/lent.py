"""Memory that a thread uses again and again: fresh memory is handed out page by page, and slowly."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dkfm.kernels.rows import Array

__all__ = ["Lent"]

_KEPT_BYTES = 2**25
"""A larger one is not kept for the next call."""


class Lent(threading.local):
    """A buffer for each thread."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)

    @contextmanager
    def taken(self, rows: int, columns: int, dtype: np.dtype[np.floating]) -> Iterator[Array]:
        """Lend an array with anything in it; who asks meanwhile, from inside a kernel, gets another."""
        size = rows * columns * dtype.itemsize
        held, self._held = self._held, np.empty(0, np.uint8)
        if len(held) < size:
            held = np.empty(size, np.uint8)
        try:
            yield held[:size].view(dtype).reshape(rows, columns)
        finally:
            if len(held) <= _KEPT_BYTES:
                self._held = held
