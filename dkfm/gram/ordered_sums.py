"""Add the results of tasks in the order of their numbers, so that a sum is bitwise equal wherever the tasks run."""

import uuid
from pathlib import Path

import numpy as np

from dkfm.core.chunking import row_slice
from dkfm.core.rows import Array
from dkfm.files import local
from dkfm.sources.npy import load_npy, save_npy

_MAX_WAITING_BYTES = 2**26
"""Largest number of bytes of parts that wait in memory, in addition to the size of the sum."""


class OrderedSums:
    """Sum parts of each block of rows of an array in the order of their numbers, from 0 on; early parts wait.

    Parameters
    ----------
    total : ndarray of shape (n, p)
        Sum, to which the parts are added.
    block_rows : int
        Rows of a block.
    folder : Path, optional
        Folder for early parts that would take too much memory. For example, a task whose worker died runs again after
        all others, and all later parts of its blocks wait for it.
    """

    def __init__(self, total: Array, block_rows: int, folder: Path | None) -> None:
        self.total, self._block_rows, self._folder = total, block_rows, folder
        self._next: dict[int, int] = {}
        self._early: dict[tuple[int, int], Array | Path] = {}
        self._waiting_bytes = 0

    def add(self, block: int, number: int, part: Array) -> None:
        """Add a part to a block, now or after all parts with lower numbers."""
        following = self._next.get(block, 0)
        if number != following:
            self._early[block, number] = self._keep(part)
            return
        target = self.total[row_slice(block, len(self.total), self._block_rows)]
        target += part
        while (kept := self._early.pop((block, following := following + 1), None)) is not None:
            target += self._take(kept)
        self._next[block] = following

    def _keep(self, part: Array) -> Array | Path:
        if self._folder is None or self._waiting_bytes + part.nbytes <= max(self.total.nbytes, _MAX_WAITING_BYTES):
            self._waiting_bytes += part.nbytes
            return part
        path = self._folder / uuid.uuid4().hex
        with local.translate_write_errors(path):
            save_npy(path, part)
        return path

    def _take(self, kept: Array | Path) -> Array:
        if isinstance(kept, np.ndarray):
            self._waiting_bytes -= kept.nbytes
            return kept
        part: Array = load_npy(kept)  # type: ignore[assignment]  # float64 was written
        kept.unlink()
        return part
