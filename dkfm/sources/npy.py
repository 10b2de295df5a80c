"""Read rows of .npy files at their offsets, without memory maps and without unpickling.

If a mapped file is truncated, access to it kills the process. A damaged file cannot cause a large allocation: its
header is read up to a fixed length, and its shape is checked against the size of the file.
"""

import io
import math
import os
import sys
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, require_exact_integers, require_real_matrix
from dkfm.errors import InvalidInputError, extract_reason
from dkfm.files.local import open_plain
from dkfm.files.location import Location
from dkfm.files.object_store import Remote
from dkfm.sources import chunk_cache
from dkfm.sources.base import DenseRows

MAX_HEADER_BYTES = 2**14
"""Bytes at the beginning of a .npy file that contain any header that NumPy reads by default."""

_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_ROWS_PER_WRITE = 4096
"""Rows of an array that are written at a time."""

_BUFFER_BYTES = 2**20
"""Bytes that are read at a time if values must be converted."""


@dataclass(frozen=True)
class Header:
    """Header of a .npy file, and the offset of the values in bytes."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[np.generic]
    offset: int

    @property
    def min_file_bytes(self) -> int:
        """Least size of the file, in bytes."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@lru_cache(maxsize=16)
def parse_header(data: bytes, name: str, size: int) -> Header:
    """Return the header of a file of `size` bytes from its first `MAX_HEADER_BYTES` bytes.

    Raises
    ------
    InvalidInputError
        The header is not that of a .npy file, declares pickled objects, or more values than the file contains.
    """
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _HEADER_READERS:
            raise ValueError(f"its format has version {version}")
        header = Header(*_HEADER_READERS[version](file), file.tell())
        if header.dtype.hasobject:
            raise ValueError("it holds pickled objects")
        if not all(type(length) is int and length >= 0 for length in header.shape):
            raise ValueError(f"its shape is {header.shape}")
        if size < header.min_file_bytes:
            raise ValueError(f"it has {size} bytes and needs {header.min_file_bytes} for its shape {header.shape}")
    except Exception as error:  # NumPy raises many classes for an invalid header
        raise InvalidInputError(f"{name} cannot be read as a .npy file: {extract_reason(error)}.") from None
    return header


def open_npy(location: Location) -> "NpySource | RemoteNpySource":
    """Return a source from the header of a file or an object."""
    return RemoteNpySource.open(location) if isinstance(location, Remote) else NpySource.open(location)


@dataclass(frozen=True)
class NpySource(DenseRows):
    """Rows of a .npy file, in C or Fortran order, of any real dtype and byte order."""

    location: Path

    @classmethod
    def open(cls, path: Path) -> "NpySource":
        """Return a source from the header of a file."""
        with _open(path) as file:
            header = _read_header(file, path)
        _require_real_matrix(header, str(path))
        return cls(path, (header.shape[0], header.shape[1]))

    def is_opening_valid(self, current_stamp: str) -> bool:  # only the shape was kept
        """Return whether the header, read again, gives an equal source."""
        return open_npy(self.location) == self

    def read(self, rows: slice) -> Array:
        """Return some rows.

        Raises
        ------
        InvalidInputError
            The shape in the file changed since it was opened, or the file was truncated.
        """
        start, stop, _ = rows.indices(self.shape[0])
        stop, path = max(start, stop), self.location
        with _open(path) as file:
            header = _read_header(file, path)
            if header.shape != self.shape:
                raise InvalidInputError(f"{path} changed since it was opened; open it again.")
            dtype = chunk_cache.as_float(np.empty(0, header.dtype), self.keep_float32).dtype
            read = _read_columns if header.fortran_order else _read_rows
            try:
                return read(file, header, start, stop, dtype)
            except (EOFError, OSError) as error:
                cause = "the file was cut short" if isinstance(error, EOFError) else extract_reason(error)
                raise InvalidInputError(f"Rows {start} to {stop} of {path} cannot be read: {cause}.") from None


@dataclass(frozen=True)
class RemoteNpySource(DenseRows):
    """Rows of a .npy file on an object store; each read is one request."""

    location: Remote
    _: KW_ONLY
    dtype_str: str
    offset: int
    """Offset of the values in the file, in bytes."""

    @classmethod
    def open(cls, remote: Remote) -> "RemoteNpySource":
        """Return a source from the header of a file."""
        size = remote.size()
        if size is None:
            raise InvalidInputError(f"There is no {remote}.")
        header = parse_header(remote.read("", 0, min(size, MAX_HEADER_BYTES)), remote.redacted_url, size)
        _require_real_matrix(header, remote.redacted_url)
        if header.fortran_order:
            raise InvalidInputError(
                f"{remote} is stored by columns (Fortran order), so that no row can be read alone; "
                "save numpy.ascontiguousarray(X) instead."
            )
        return cls(remote, (header.shape[0], header.shape[1]), dtype_str=header.dtype.str, offset=header.offset)

    def is_opening_valid(self, current_stamp: str) -> bool:  # only the header was kept
        """Return whether the header, read again, gives an equal source."""
        return open_npy(self.location) == self

    def read_overhead_bytes(self, chunks: int) -> int:
        """Return the bytes of the response, which is converted to the rows; a chunk is one row."""
        return chunks * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.shape[1] * np.dtype(self.dtype_str).itemsize

    def read(self, rows: slice) -> Array:
        """Return some rows; raise an InvalidInputError if the file was truncated."""
        remote, start, stop = self.location, rows.start, max(rows.start, min(rows.stop, self.shape[0]))
        data = remote.read("", self.offset + start * self._row_bytes, self.offset + stop * self._row_bytes)
        if len(data) != (stop - start) * self._row_bytes:
            raise InvalidInputError(f"Rows {start} to {stop} of {remote} cannot be read: the file was cut short.")
        return chunk_cache.as_float(np.frombuffer(data, self.dtype_str).reshape(-1, self.shape[1]), self.keep_float32)


def load_npy(path: str | Path, rows: int | None = None) -> npt.NDArray[np.generic]:
    """Return the array of a .npy file.

    Parameters
    ----------
    path : str or Path
        Path of the file.
    rows : int, optional
        Number of rows that the file must have.

    Raises
    ------
    InvalidInputError
        The file cannot be read as a .npy file, or has another number of rows; in this case, no row is read.
    """
    with _open(path) as file:
        header = _read_header(file, path)
        if rows is not None and header.shape[:1] != (rows,):
            raise InvalidInputError(f"{path} has the shape {header.shape}, and must have {rows:,} rows.")
        try:
            values = np.empty(header.shape[::-1] if header.fortran_order else header.shape, header.dtype)
            file.seek(header.offset)
            _read_into(file, values)
        except (EOFError, OSError, ValueError, MemoryError) as error:
            cause = "it was cut short" if isinstance(error, EOFError) else extract_reason(error)
            raise InvalidInputError(f"{path} cannot be read as a .npy file: {cause}.") from None
    if values.dtype.kind == "U" and values.size:
        points = values.reshape(-1).view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
        if points.max() > sys.maxunicode:
            raise InvalidInputError(f"{path} cannot be read as a .npy file: its text is not Unicode.")
    return values.T if header.fortran_order else values


def save_npy(path: Path, array: Array) -> None:
    """Write an array in row order, independently of its memory order, because a task reads a range of rows."""
    with path.open("xb") as file:
        write_npy(file, array)


def write_npy(file: BinaryIO, array: npt.NDArray[np.generic]) -> None:
    """Write an array to an open file in row order, some rows at a time."""
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(file, header)
    for part in row_slices(len(array), _ROWS_PER_WRITE):
        file.write(np.ascontiguousarray(array[part]).data)


def _open(path: str | Path) -> BufferedReader:
    try:
        return open_plain(path)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read as a .npy file: {error.strerror}.") from None


def _read_header(file: BufferedReader, path: str | Path) -> Header:
    try:
        data, size = os.pread(file.fileno(), MAX_HEADER_BYTES, 0), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read as a .npy file: {error.strerror}.") from None
    return parse_header(data[: _header_size(data)], str(path), size)


def _header_size(data: bytes) -> int:
    """Return the size in bytes of a header, with its length field, as the file declares it."""
    prefix = 10 if data[6:7] == b"\x01" else 12
    return prefix + int.from_bytes(data[8:prefix], "little")


def _read_rows(file: BufferedReader, header: Header, start: int, stop: int, dtype: np.dtype[np.floating]) -> Array:
    """Return some rows of an array in C order."""
    columns, itemsize = header.shape[1], header.dtype.itemsize
    file.seek(header.offset + start * columns * itemsize)
    values: Array = np.empty((stop - start, columns), dtype)
    if dtype == header.dtype:
        _read_into(file, values)
        return values
    buffer_rows = max(1, _BUFFER_BYTES // (columns * itemsize))
    buffer = np.empty((min(buffer_rows, len(values)), columns), header.dtype)
    for part in row_slices(len(values), buffer_rows):
        stored = buffer[: part.stop - part.start]
        _read_into(file, stored)
        require_exact_integers(stored)
        values[part] = stored
    return values


def _read_columns(file: BufferedReader, header: Header, start: int, stop: int, dtype: np.dtype[np.floating]) -> Array:
    """Return some rows of an array in Fortran order: read a part of each column."""
    n, columns = header.shape
    itemsize, descriptor = header.dtype.itemsize, file.fileno()
    values: Array = np.empty((columns, stop - start), dtype)
    stored = np.empty(stop - start, header.dtype)
    for column in range(columns):
        target = values[column] if dtype == header.dtype else stored
        _fill_at(descriptor, target, header.offset + (column * n + start) * itemsize)
        if target is stored:
            require_exact_integers(stored)
            values[column] = stored
    return values.T


def _read_into(file: BufferedReader, values: npt.NDArray[np.generic]) -> None:
    if values.nbytes and file.readinto(values.reshape(-1).view(np.uint8).data) != values.nbytes:
        raise EOFError


def _fill_at(descriptor: int, values: npt.NDArray[np.generic], offset: int) -> None:
    view = values.view(np.uint8).data
    filled = 0
    while filled < len(view):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if count == 0:
            raise EOFError
        filled += count


def _require_real_matrix(header: Header, name: str) -> None:
    """Raise an InvalidInputError unless a file holds rows of real numbers."""
    if len(header.shape) != 2:
        raise InvalidInputError(
            f"{name} must have two dimensions (rows, columns), and its shape is {header.shape}; save one column as "
            "(n, 1), or one row as (1, n)."
        )
    require_real_matrix(header.shape, header.dtype, name)
