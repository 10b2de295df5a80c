"""Open files for Arrow so that its threads hold no Python objects.

If a thread of Arrow releases a Python object after Python has begun to exit, the process hangs or aborts (issues 33975
and 50482 of Arrow). Arrow uses threads if it prefetches (``pre_buffer=True``) or decodes in its own threads
(``use_threads=True``).
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_GAP_BYTES = 2**13
"""Largest gap between two ranges, in bytes, that takes less time to read than another request."""


@contextmanager
def reopen_natively(file: IO[bytes] | io.RawIOBase) -> "Iterator[pa.NativeFile | IO[bytes] | io.RawIOBase]":
    """Yield a file, reopened as an Arrow file, which reads without Python.

    It is reopened by its descriptor, because another file may have its name by now. A file in memory, which has no
    descriptor, is yielded unchanged.
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
    """Binary file that prefetches ranges of another file, and reads near ranges together.

    Parameters
    ----------
    file : file object
        File that is read; its opener closes it.
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
        """Return the next `size` bytes, fewer at the end of the file; a prefetched range is not copied."""
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
        """Release the prefetched ranges."""
        self._ranges = {}


def _join_near(ranges: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of sorted ranges; ranges that overlap, or have at most `_GAP_BYTES` between them, share a list."""
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
