"""Rows of .npy files, read at their offsets and never mapped or unpickled.

A map of a file that is cut short ends the process. No more memory is taken than the file has bytes: its header is read
up to a fixed length, and its shape is checked against its size.
"""

import io
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, require_two_dimensions
from dkfm.errors import InvalidInputError, reason
from dkfm.files.local import open_plain
from dkfm.files.location import Location
from dkfm.files.object_store import Remote
from dkfm.sources import chunk_cache
from dkfm.sources.base import DenseRows

MAX_HEADER = 2**14
"""Bytes of a .npy file that hold any header that NumPy reads without being told to trust it."""

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_BLOCK_BYTES = 2**20
"""Values that are converted are read so many bytes at a time."""


@dataclass(frozen=True)
class Header:
    """What a .npy file says of its array, and where the values begin."""

    shape: tuple[int, ...]
    by_columns: bool
    dtype: np.dtype[np.generic]
    offset: int

    @property
    def file_bytes(self) -> int:
        """Bytes that the file must have."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@lru_cache(maxsize=16)
def parse_header(data: bytes, name: str, size: int) -> Header:
    """Return the header of a file of `size` bytes from its first `MAX_HEADER` bytes.

    Raises
    ------
    InvalidInputError
        No header of the .npy format, one of pickled objects, or one of more values than the file has.
    """
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _READERS:
            raise ValueError(f"its format has version {version}")
        header = Header(*_READERS[version](file), file.tell())
        if header.dtype.hasobject:
            raise ValueError("it holds pickled objects")
        if not all(type(length) is int and length >= 0 for length in header.shape):
            raise ValueError(f"its shape is {header.shape}")
        if size < header.file_bytes:
            raise ValueError(f"it has {size} bytes and needs {header.file_bytes} for its shape {header.shape}")
    except Exception as error:  # whatever NumPy makes of a stranger's header
        raise InvalidInputError(f"{name} cannot be read as a .npy file: {reason(error)}.") from None
    return header


def open_npy(location: Location) -> "NpySource | RemoteNpySource":
    """Read the header of a file or an object."""
    return RemoteNpySource.open(location) if isinstance(location, Remote) else NpySource.open(location)


@dataclass(frozen=True)
class NpySource(DenseRows):
    """Rows of a .npy file, in C or Fortran order, of any real dtype and byte order."""

    @classmethod
    def open(cls, path: Path) -> "NpySource":
        """Read the header of a file."""
        with _open(path) as file:
            header = _read_header(file, path)
        require_two_dimensions(header.shape, header.dtype, str(path))
        return cls(path, (header.shape[0], header.shape[1]))

    def is_of(self, stamp: str) -> bool:  # nothing was kept of the file but its shape
        """Whether the header, read again, says the same."""
        return open_npy(self.location) == self

    def read(self, rows: slice) -> Array:
        """Return some rows.

        Raises
        ------
        InvalidInputError
            The file is no longer what it was, or was cut short meanwhile.
        """
        start, stop, _ = rows.indices(self.shape[0])
        stop, path = max(start, stop), cast("Path", self.location)
        with _open(path) as file:
            header = _read_header(file, path)
            if header.shape != self.shape:
                raise InvalidInputError(f"{path} changed since it was opened; open it again.")
            try:
                return (_by_columns if header.by_columns else _by_rows)(file, header, start, stop, self.keep_float32)
            except (EOFError, OSError) as error:
                told = "the file was cut short" if isinstance(error, EOFError) else reason(error)
                raise InvalidInputError(f"Rows {start} to {stop} of {path} cannot be read: {told}.") from None


@dataclass(frozen=True, kw_only=True)
class RemoteNpySource(DenseRows):
    """Rows of a .npy file on an object store, never unpickled; some rows are one request."""

    dtype: str
    offset: int
    """Where its values begin."""

    @classmethod
    def open(cls, place: Remote) -> "RemoteNpySource":
        """Read the header of a file."""
        size = place.size()
        if size is None:
            raise InvalidInputError(f"There is no {place}.")
        header = parse_header(place.read("", 0, min(size, MAX_HEADER)), place.name, size)
        require_two_dimensions(header.shape, header.dtype, place.name)
        if header.by_columns:
            raise InvalidInputError(
                f"{place} is stored by columns (Fortran order), so that no row can be read alone; "
                "save numpy.ascontiguousarray(X) instead."
            )
        return cls(place, (header.shape[0], header.shape[1]), dtype=header.dtype.str, offset=header.offset)

    def is_of(self, stamp: str) -> bool:  # nothing was kept of the rows but what their head says
        """Whether the header, read again, says the same."""
        return open_npy(self.location) == self

    def decoding_bytes(self, chunks: int) -> int:
        """Return the bytes of the answer of which the rows are made; a chunk is a row."""
        return chunks * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.shape[1] * np.dtype(self.dtype).itemsize

    def read(self, rows: slice) -> Array:
        """Return some rows."""
        start, stop = rows.start, max(rows.start, min(rows.stop, self.shape[0]))
        place = cast("Remote", self.location)
        data = place.read("", self.offset + start * self._row_bytes, self.offset + stop * self._row_bytes)
        if len(data) != (stop - start) * self._row_bytes:
            raise InvalidInputError(f"Rows {start} to {stop} of {place} cannot be read: the file was cut short.")
        return chunk_cache.widen(np.frombuffer(data, self.dtype).reshape(-1, self.shape[1]), self.keep_float32)


def load_npy(path: str | Path) -> npt.NDArray[np.generic]:
    """Return the array of a .npy file.

    Raises
    ------
    InvalidInputError
        It cannot be read as one.
    """
    with _open(path) as file:
        header = _read_header(file, path)
        try:
            values = np.empty(header.shape[::-1] if header.by_columns else header.shape, header.dtype)
            file.seek(header.offset)
            _fill(file, values)
        except (EOFError, OSError, ValueError, MemoryError) as error:
            told = "it was cut short" if isinstance(error, EOFError) else reason(error)
            raise InvalidInputError(f"{path} cannot be read as a .npy file: {told}.") from None
    return values.T if header.by_columns else values


def _open(path: str | Path) -> BufferedReader:
    try:
        return open_plain(path)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read as a .npy file: {error.strerror}.") from None


def _read_header(file: BufferedReader, path: str | Path) -> Header:
    try:
        data, size = os.pread(file.fileno(), MAX_HEADER, 0), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read as a .npy file: {error.strerror}.") from None
    return parse_header(data[: _header_bytes(data)], str(path), size)


def _header_bytes(data: bytes) -> int:
    """Return the bytes before the values, as the file states them; what states nothing is parsed whole."""
    fixed = 10 if data[6:7] == b"\x01" else 12
    return fixed + int.from_bytes(data[8:fixed], "little")


def _by_rows(file: BufferedReader, header: Header, start: int, stop: int, keep_float32: bool) -> Array:
    columns, itemsize = header.shape[1], header.dtype.itemsize
    file.seek(header.offset + start * columns * itemsize)
    kind = chunk_cache.widen(np.empty(0, header.dtype), keep_float32).dtype
    values: Array = np.empty((stop - start, columns), kind)
    if kind == header.dtype:
        _fill(file, values)
        return values
    some = max(1, _BLOCK_BYTES // (columns * itemsize))
    block = np.empty((min(some, len(values)), columns), header.dtype)
    for part in row_slices(len(values), some):
        stored = block[: part.stop - part.start]
        _fill(file, stored)
        values[part] = stored
    return values


def _by_columns(file: BufferedReader, header: Header, start: int, stop: int, keep_float32: bool) -> Array:
    """Return rows that lie apart, a part of every column."""
    n, columns = header.shape
    itemsize, descriptor = header.dtype.itemsize, file.fileno()
    kind = chunk_cache.widen(np.empty(0, header.dtype), keep_float32).dtype
    values: Array = np.empty((columns, stop - start), kind)
    stored = np.empty(stop - start, header.dtype)
    for column in range(columns):
        target = values[column] if kind == header.dtype else stored
        _fill_at(descriptor, target, header.offset + (column * n + start) * itemsize)
        if target is stored:
            values[column] = stored
    return values.T


def _fill(file: BufferedReader, values: npt.NDArray[np.generic]) -> None:
    if values.nbytes and file.readinto(values.reshape(-1).view(np.uint8).data) != values.nbytes:
        raise EOFError


def _fill_at(descriptor: int, values: npt.NDArray[np.generic], offset: int) -> None:
    view = values.view(np.uint8).data
    at = 0
    while at < len(view):
        found = os.preadv(descriptor, [view[at:]], offset + at)
        if found == 0:
            raise EOFError
        at += found
