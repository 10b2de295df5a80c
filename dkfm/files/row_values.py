"""Hold a number for each of many rows: in memory, or in a file if they take more than 256 MB.

The file has no name, so that nothing remains of it after a kill. All its bytes are written before it is mapped, so that
a full disk raises an error when the array is created, instead of killing the process when a value is set.
"""

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.files.local import translate_write_errors
from dkfm.files.temporary_folders import require_room

_MAX_MEMORY_BYTES = 2**28
"""Bytes that are held in memory."""

BLOCK_ROWS = 2**20
"""Number of values that are processed together, in a temporary array in memory."""


def count_memory_and_disk_bytes(n: int) -> tuple[int, int]:
    """Return the bytes in memory and on disk of `allocate_row_values`.

    >>> count_memory_and_disk_bytes(10**6), count_memory_and_disk_bytes(10**8)
    ((8000000, 0), (0, 800000000))
    """
    return (8 * n, 0) if 8 * n <= _MAX_MEMORY_BYTES else (0, 8 * n)


def allocate_row_values(n: int) -> Array:
    """Return an array (n,) to be filled, which lies in the temporary directory if it is large.

    Raises
    ------
    BudgetError
        The disk has too little space for the array.
    StoreError
        The file system refuses to create the file.
    """
    _, size = count_memory_and_disk_bytes(n)
    if not size:
        return np.empty(n)
    folder = Path(tempfile.gettempdir())
    require_room(folder, size, "A number for each row", "use another disk with the variable TMPDIR")
    zeros = bytes(8 * BLOCK_ROWS)
    with translate_write_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        for block in row_slices(n, BLOCK_ROWS):
            file.write(memoryview(zeros)[: 8 * (block.stop - block.start)])
        file.flush()
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.float64)


def iter_blocks(values: Array) -> Iterator[tuple[slice, Array]]:
    """Yield slices of the rows and views of their values."""
    return ((block, values[block]) for block in row_slices(len(values), BLOCK_ROWS))
