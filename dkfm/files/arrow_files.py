"""Open files for Arrow so that its threads hold no objects of Python.

Such a thread may release one after Python has begun to exit, and then the process hangs, or aborts: issues 33975 and
50482 of Arrow. Its threads take part if it reads in advance (``pre_buffer=True``) or decodes in threads of its own
(``use_threads=True``).
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_GAP_BYTES = 2**13
"""Bytes between two ranges that cost less to read than another request."""


@contextmanager
def reopen_natively(file: IO[bytes] | io.RawIOBase) -> "Iterator[pa.NativeFile | IO[bytes] | io.RawIOBase]":
    """Yield a file, opened again by its descriptor, as a file of Arrow, which reads without Python.

    Another file may have its name by now. A file in memory, which has no descriptor, is yielded as it is.
    """
    from pyarrow import OSFile

    try:
        native = OSFile(f"/dev/fd/{file.fileno()}")
    except OSError:  # it is in memory, or this system names no descriptors
        yield file
        return
    with native:
        yield native


class RangeReader:
    """Binary file on top of another one, of which it reads ranges in advance, near ones together.

    Parameters
    ----------
    file : file object
        File that is read; whoever opened it closes it.
    size : int
        Size of the file in bytes; nothing after that is read.
    """

    closed = False

    def __init__(self, file: io.RawIOBase | io.BufferedReader, size: int) -> None:
        self._file, self._size, self._position = file, size, 0
        self._ranges: dict[tuple[int, int], memoryview] = {}

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read ranges, as pairs of start and size in bytes, and keep them until the next call."""
        self._ranges = {}
        ordered = sorted(pair for pair in ranges if pair[0] >= 0 and pair[1] > 0 and sum(pair) <= self._size)
        for joined in _join_near(ordered):
            first = joined[0][0]
            part = memoryview(self._read_range(first, max(map(sum, joined)) - first))
            self._ranges |= {(start, size): part[start - first : start + size - first] for start, size in joined}

    def read(self, size: int = -1) -> bytes | memoryview:
        """Return the next `size` bytes, fewer at the end of the file; a range that was read in advance has no copy."""
        start = self._position
        data = self._ranges.get((start, size)) or self._read_range(start, size)
        self._position = start + len(data)
        return data

    def _read_range(self, start: int, size: int) -> bytes:
        left = max(0, self._size - start)
        self._file.seek(start)
        return self._file.read(left if size < 0 else min(size, left)) or b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, and return it."""
        if whence != io.SEEK_SET:
            offset += self._position if whence == io.SEEK_CUR else self._size
        self._position = offset
        return offset

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Release what was read in advance."""
        self._ranges = {}


def _join_near(ranges: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield sorted ranges in lists: those that overlap, or have at most `_GAP_BYTES` between them, in one."""
    joined: list[tuple[int, int]] = []
    stop = 0
    for start, size in ranges:
        if joined and start - stop > _GAP_BYTES:
            yield joined
            joined = []
        joined.append((start, size))
        stop = max(stop, start + size)
    if joined:
        yield joined
