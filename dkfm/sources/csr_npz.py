"""Read CSR rows of untrusted .npz files of scipy.sparse.save_npz: each process unpacks the arrays once and maps them.

On an object store, the file is read while it is unpacked. An error is raised if it changed before or during this.

Nothing is unpickled, no name of a member is used as a path, and no more is unpacked than headers declare. Unpacked
arrays are stored in unnamed files in the temporary folder (TMPDIR), which disappear with the process, however it ends.
"""

import math
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from dkfm.core.lru_cache import LruCache
from dkfm.core.rows import Sparse, require_exact_integers
from dkfm.errors import DkfmError, InvalidInputError, extract_reason
from dkfm.files import change_detection, temporary_folders
from dkfm.files import location as locations
from dkfm.files.local import ReadSizeLimitedReader
from dkfm.files.location import Location, is_remote, open_unbuffered, read_size_and_stamp
from dkfm.sources.base import CsrRows
from dkfm.storage import csr

_PARTS = ("data", "indices", "indptr")
_BUFFER_BYTES = 2**20
"""Bytes that are unpacked at a time."""

_MAX_SMALL_BYTES = 2**10
"""Largest size of the members `format` and `shape`."""

_MAX_READ_BYTES = 2**21
"""Largest read, in bytes. It limits the directory of the archive, each entry of which becomes a Python object."""

_MAX_LENGTH = 2**48
"""Limit of the numbers of rows and columns."""

_ENCRYPTED = 1
"""Flag of an encrypted member."""

_Values = npt.NDArray[np.generic]

_unpacked: LruCache[tuple[_Values, ...]] = LruCache(1)
"""Arrays of at most two files; the disk space of a removed one is free when its last reader is done."""


@dataclass(frozen=True)
class _Header:
    """Header of a member: the offset of the values in bytes, and their shape and dtype."""

    member: zipfile.ZipInfo
    values_offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def bytes(self) -> int:
        """Size of the values, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class NpzSource(CsrRows):
    """CSR rows of a .npz file, compressed or not; its arrays are unpacked into temporary files."""

    opened_stamp: str
    """Stamp of the file when it was opened."""

    @classmethod
    def open(cls, location: Location) -> "NpzSource":
        """Return a source from the headers of a file.

        Raises
        ------
        InvalidInputError
            The file is not a .npz file of a CSR matrix, or its arrays are inconsistent.
        """
        with _open_stamped_archive(location) as (archive, stamp):
            shape, (data, _, indptr) = _read_csr_headers(archive, location)
            runs = _check_indptr_and_count_nnz(
                _read_buffers(archive, indptr, location), indptr, data.shape[0], location
            )
        return cls(location, shape, -(-2 * data.shape[0] // shape[0]) + 1, runs, stamp)

    def stamp(self, *, include_ctime: bool = False) -> str:
        """Return a digest of the file's size, and its time of change or ETag."""
        return _stamp(self.location, include_ctime=include_ctime)

    def is_opening_valid(self, current_stamp: str) -> bool:
        """Return whether `current_stamp` is that of the file when it was opened."""
        return current_stamp == self.opened_stamp

    def read(self, rows: slice) -> Sparse:
        """Return some rows with sorted columns and without duplicates."""
        data, indices, indptr = self._load_arrays()
        start, stop, _ = rows.indices(self.shape[0])
        try:
            pointers = indptr[start : max(start, stop) + 1].astype(np.int64)
            values = csr.value_slice(pointers, data.shape[0])
            # Copy, because duplicates are added up in place, and a view would keep the disk space in use.
            part = csr.assemble_csr(
                pointers, np.array(data[values], np.float64), np.array(indices[values]), self.shape[1]
            )
        except ValueError as error:
            raise InvalidInputError(f"The arrays of {self.location} do not make rows: {error}") from None
        require_exact_integers(data[values])
        part.sum_duplicates()
        return part

    def _load_arrays(self) -> tuple[_Values, ...]:
        """Return the unpacked arrays; unpack them if they are not cached in this process."""
        _require_same(self.location, self.opened_stamp)
        return _unpacked.get_or_compute((self.location, self.opened_stamp), self._unpack)

    def _unpack(self) -> tuple[_Values, ...]:
        with _open_stamped_archive(self.location) as (archive, stamp):
            shape, headers = _read_csr_headers(archive, self.location)
            if (stamp, shape) != (self.opened_stamp, self.shape):
                raise InvalidInputError(f"{self.location} changed since it was opened; open it again.")
            _require_temp_disk(self.location, sum(header.bytes for header in headers))
            data, indices, indptr = headers
            columns = _yield_checked_indices(
                _read_buffers(archive, indices, self.location), indices, shape[1], self.location
            )
            unpacked = _map_on_disk(_read_buffers(archive, data, self.location), data), _map_on_disk(columns, indices)
            return *unpacked, _map_on_disk(_read_buffers(archive, indptr, self.location), indptr)


def clear_unpacked() -> None:
    """Clear the cache of unpacked arrays, unless a thread is unpacking; their space is free after their last reader."""
    _unpacked.clear_unless_busy()


def _stamp(path: Location, *, include_ctime: bool = False) -> str:
    try:
        if is_remote(path):
            return change_detection.digest_file_stats([("", *read_size_and_stamp(path))])  # one object, not a prefix
        return locations.stamp(path, include_ctime=include_ctime)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None


def _require_same(path: Location, stamp: str) -> None:
    if _stamp(path) != stamp:
        raise InvalidInputError(f"{path} changed since it was opened; open it again.")


@contextmanager
def _open_stamped_archive(path: Location) -> Iterator[tuple[zipfile.ZipFile, str]]:
    """Open an archive and yield it with its stamp; raise an InvalidInputError if it is damaged or changes meanwhile."""
    stamp = _stamp(path)
    try:
        raw = open_unbuffered(path)
        with ReadSizeLimitedReader(raw, _MAX_READ_BYTES) as file, zipfile.ZipFile(file) as archive:
            yield archive, stamp
    except DkfmError:
        raise
    except Exception as error:  # damage raises many classes, from zipfile, zlib, struct, tokenize
        _require_same(path, stamp)
        cause = getattr(error, "strerror", None) or extract_reason(error)
        raise InvalidInputError(f"{path} cannot be read as a .npz file: {cause}.") from error
    _require_same(path, stamp)  # an object is read with several requests


def _read_csr_headers(archive: zipfile.ZipFile, path: Location) -> tuple[tuple[int, int], list[_Header]]:
    """Return the shape of the rows and the headers of their three arrays; raise an error if these are inconsistent."""
    members = archive.infolist()
    fmt, dims = (_read_header(archive, members, name, path) for name in ("format", "shape"))
    if fmt.shape != () or fmt.dtype.kind not in "SU" or dims.shape != (2,) or dims.dtype.kind not in "iu":
        raise InvalidInputError(f"{path} does not say its format and shape as scipy.sparse.save_npz does.")
    layout = str(_read_small_array(archive, fmt, path).astype("U")[()])
    if layout != "csr":
        raise InvalidInputError(f"{path} holds a matrix of format {layout!r:.50}, not csr: convert it with .tocsr().")
    rows, columns = (int(length) for length in _read_small_array(archive, dims, path))
    if not (0 < rows < _MAX_LENGTH and 0 < columns < _MAX_LENGTH):
        raise InvalidInputError(f"{path} needs at least one row and one column, and its shape is {(rows, columns)}.")
    headers = [_read_header(archive, members, name, path) for name in _PARTS]
    data, indices, indptr = headers
    if data.dtype.kind not in "biuf" or data.dtype.itemsize > 8:
        raise InvalidInputError(f"{path} must hold real numbers of at most 64 bits, and its dtype is {data.dtype}.")
    if indices.dtype.kind != "i" or indptr.dtype.kind != "i":
        raise InvalidInputError(f"{path} must count in integers, and has {indices.dtype} and {indptr.dtype}.")
    if len(data.shape) != 1 or indices.shape != data.shape or indptr.shape != (rows + 1,):
        raise InvalidInputError(
            f"{path} is damaged: for {rows} rows its data, indices and indptr have the shapes "
            f"{data.shape}, {indices.shape} and {indptr.shape}."
        )
    return (rows, columns), headers


def _check_indptr_and_count_nnz(
    buffers: Iterable[bytes], header: _Header, stored: int, path: Location
) -> tuple[int, ...]:
    """Check the row pointers `indptr`; return the largest numbers of values in 1, 2, 4, .. consecutive rows."""
    pointers = csr.PointerCheck(stored)
    try:
        for buffer in buffers:
            pointers.add(np.frombuffer(buffer, header.dtype))
        return pointers.max_nnz_per_row_window()
    except ValueError as error:
        raise InvalidInputError(f"The arrays of {path} do not make rows: {error}.") from None


def _yield_checked_indices(buffers: Iterable[bytes], header: _Header, columns: int, path: Location) -> Iterator[bytes]:
    """Yield the buffers of CSR `indices`, each after a check; raise an InvalidInputError for an index out of range."""
    for buffer in buffers:
        part = np.frombuffer(buffer, header.dtype)
        if part.min() < 0 or part.max() >= columns:
            raise InvalidInputError(
                f"The arrays of {path} do not make rows: columns must be from 0 to {columns - 1}, and "
                f"are from {part.min()} to {part.max()}."
            )
        yield buffer


def _read_header(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], name: str, path: Location) -> _Header:
    named = [member for member in members if member.filename == f"{name}.npy"]
    if len(named) != 1:
        raise InvalidInputError(
            f"{path} holds {len(named)} arrays named {name!r}; scipy.sparse.save_npz writes one, and dense rows belong "
            "into a .npy file."
        )
    member = named[0]
    if member.flag_bits & _ENCRYPTED or member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise InvalidInputError(f"The array {name!r} of {path} is encrypted, or compressed as NumPy never does.")
    with archive.open(member) as file:
        if np.lib.format.read_magic(file) != (1, 0):  # headers of later versions may be arbitrarily long
            raise InvalidInputError(f"The array {name!r} of {path} is not of version 1.0 of the .npy format.")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
    if dtype.hasobject or dtype.itemsize == 0:
        raise InvalidInputError(f"The array {name!r} of {path} holds objects, which are never unpickled.")
    header = _Header(member, start, shape, dtype)
    if min(shape, default=0) < 0 or start + header.bytes != member.file_size:
        raise InvalidInputError(
            f"The array {name!r} of {path} is damaged: it has {member.file_size - start} bytes, and its shape {shape} "
            f"and dtype {dtype} make {header.bytes}."
        )
    return header


def _read_buffers(archive: zipfile.ZipFile, header: _Header, path: Location) -> Iterator[bytes]:
    """Yield the bytes of an array; raise an InvalidInputError if there are more or fewer than it declares."""
    member = copy(header.member)
    member.file_size += 1  # zipfile stops at the declared size without an error
    remaining = header.bytes
    with archive.open(member) as file:
        _skip(file, header.values_offset)
        while buffer := file.read(min(_BUFFER_BYTES, remaining + 1)):
            remaining -= len(buffer)
            if remaining < 0:
                break
            yield buffer
    if remaining:
        raise InvalidInputError(
            f"The array {header.member.filename} of {path} is damaged: it has more or fewer bytes than it declares."
        )


def _skip(file: IO[bytes], count: int) -> None:
    while count > 0 and (buffer := file.read(count)):
        count -= len(buffer)


def _read_small_array(archive: zipfile.ZipFile, header: _Header, path: Location) -> _Values:
    if header.bytes > _MAX_SMALL_BYTES:
        raise InvalidInputError(f"{path} does not say its format and shape as scipy.sparse.save_npz does.")
    return np.frombuffer(b"".join(_read_buffers(archive, header, path)), header.dtype).reshape(header.shape)


def _require_temp_disk(path: Location, needed: int) -> None:
    """Raise an InvalidInputError unless the disk of the temporary folder has `needed` bytes free."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInputError(
            f"{path} takes {needed} bytes when it is unpacked, and {folder} has {free} free: "
            "make room, set TMPDIR to another folder, or store the rows in Zarr or .npy."
        )
    temporary_folders.warn_of_large_store(Path(folder), needed, f"What {path} is unpacked to")


def _map_on_disk(buffers: Iterable[bytes], header: _Header) -> _Values:
    if header.bytes == 0:
        return np.empty(header.shape, header.dtype)
    with tempfile.TemporaryFile(prefix="dkfm-npz-") as file:
        for buffer in buffers:
            file.write(buffer)
        file.flush()
        return np.memmap(file, header.dtype, "r", shape=header.shape)
