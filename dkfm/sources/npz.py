"""CSR rows in a .npz file of scipy.sparse.save_npz, a stranger's: each process unpacks its arrays once and maps them.

From an object store the file is read as it is unpacked, and refused if it was another one before or after.

Nothing is unpickled, no member's name is a path, and no more is unpacked than headers declare. What is unpacked lies in
files without a name in the temporary folder (TMPDIR), which are gone when the process is, however it ends.
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
from dkfm.core.rows import Sparse
from dkfm.errors import DkfmError, InvalidInputError, reason
from dkfm.files import change_detection, temporary
from dkfm.files import location as locations
from dkfm.files.local import BoundedReader
from dkfm.files.location import Location, is_remote, open_unbuffered, status
from dkfm.sources.base import CsrRows
from dkfm.storage import csr

_PARTS = ("data", "indices", "indptr")
_PIECE = 2**20
_MAX_SMALL = 2**10
"""Bytes of the members that are no part of the rows."""

_MAX_DIRECTORY = 2**21
"""Bytes of the directory of a file, whose every entry becomes an object; no read is longer."""

_MAX_VALUES, _ENCRYPTED = 2**48, 1

_Part = npt.NDArray[np.generic]

_unpacked: LruCache[tuple[_Part, ...]] = LruCache(1)
"""Two files; the space of one that was removed is free once nobody reads it."""


@dataclass(frozen=True)
class _Header:
    """What a member says of itself: how long its header is, and which array comes after it."""

    member: zipfile.ZipInfo
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class NpzSource(CsrRows):
    """CSR rows of a .npz file, compressed or not; what is unpacked lies on a disk."""

    opened: str
    """The stamp of the file when it was opened."""

    @classmethod
    def open(cls, location: Location) -> "NpzSource":
        """Read the headers of a file.

        Raises
        ------
        InvalidInputError
            No .npz file of a CSR matrix, or one whose parts do not fit each other.
        """
        with _archive(location) as (archive, stamp):
            shape, (data, _, indptr) = _checked(archive, location)
            runs = _runs(_pieces(archive, indptr, location), indptr, data.shape[0], location)
        return cls(location, shape, -(-2 * data.shape[0] // shape[0]) + 1, runs, stamp)

    def stamp(self) -> str:
        """Return a digest of the file's size, and its time of change or ETag."""
        return _stamp(self.location)

    def state(self) -> str:
        """Return a digest that no writer can bring back; at a URL the stamp."""
        return _stamp(self.location, exact=True)

    def is_of(self, stamp: str) -> bool:
        """Whether this is the stamp of the file when it was opened."""
        return stamp == self.opened

    def read(self, rows: slice) -> Sparse:
        """Return some rows, their columns in order and none twice."""
        data, indices, indptr = self._parts()
        start, stop, _ = rows.indices(self.shape[0])
        try:
            pointers = indptr[start : max(start, stop) + 1].astype(np.int64)
            values = csr.value_span(pointers, data.shape[0])
            # Copies: duplicates are added up in place, and a view would keep the disk space.
            found = csr.join_csr(pointers, np.array(data[values], np.float64), np.array(indices[values]), self.shape[1])
        except ValueError as error:
            raise InvalidInputError(f"The arrays of {self.location} do not make rows: {error}") from None
        found.sum_duplicates()
        return found

    def _parts(self) -> tuple[_Part, ...]:
        """Return the arrays that this process has unpacked; unpack them if it has not."""
        _require_same(self.location, self.opened)
        return _unpacked.get((self.location, self.opened), self._unpack)

    def _unpack(self) -> tuple[_Part, ...]:
        with _archive(self.location) as (archive, stamp):
            shape, headers = _checked(archive, self.location)
            if (stamp, shape) != (self.opened, self.shape):
                raise InvalidInputError(f"{self.location} changed since it was opened; open it again.")
            _require_room(self.location, sum(header.bytes for header in headers))
            data, indices, indptr = headers
            columns = _within(_pieces(archive, indices, self.location), indices, shape[1], self.location)
            unpacked = _mapped(_pieces(archive, data, self.location), data), _mapped(columns, indices)
            pointers = _mapped(_pieces(archive, indptr, self.location), indptr)
            return *unpacked, pointers


def clear_unpacked() -> None:
    """Let go of what this process has unpacked, and of its disk space once nobody reads it."""
    _unpacked.remove()


def _stamp(path: Location, *, exact: bool = False) -> str:
    try:
        if is_remote(path):
            return change_detection.digest_files([("", *status(path))])  # of one object, not of all below a prefix
        return locations.state(path) if exact else locations.stamp(path)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None


def _require_same(path: Location, stamp: str) -> None:
    if _stamp(path) != stamp:
        raise InvalidInputError(f"{path} changed since it was opened; open it again.")


@contextmanager
def _archive(path: Location) -> Iterator[tuple[zipfile.ZipFile, str]]:
    """Open a file that stays as it is, with its stamp; whatever fails inside becomes one sentence."""
    stamp = _stamp(path)
    try:
        raw = open_unbuffered(path)
        with BoundedReader(raw, _MAX_DIRECTORY) as file, zipfile.ZipFile(file) as archive:
            yield archive, stamp
    except DkfmError:
        raise
    except Exception as error:  # damage has no end of classes, in zipfile, zlib, struct, tokenize
        _require_same(path, stamp)
        told = getattr(error, "strerror", None) or reason(error)
        raise InvalidInputError(f"{path} cannot be read as a .npz file: {told}.") from error
    _require_same(path, stamp)  # an object is read in parts


def _checked(archive: zipfile.ZipFile, path: Location) -> tuple[tuple[int, int], list[_Header]]:
    """Return the shape of the rows and the headers of their three arrays, once these agree."""
    members = archive.infolist()
    form, size = (_header(archive, members, name, path) for name in ("format", "shape"))
    if form.shape != () or form.dtype.kind not in "SU" or size.shape != (2,) or size.dtype.kind not in "iu":
        raise InvalidInputError(f"{path} does not say its format and shape as scipy.sparse.save_npz does.")
    word = str(_small(archive, form, path).astype("U")[()])
    if word != "csr":
        raise InvalidInputError(f"{path} holds a matrix of format {word!r:.50}, not csr: convert it with .tocsr().")
    rows, columns = (int(length) for length in _small(archive, size, path))
    if not (0 < rows < _MAX_VALUES and 0 < columns < _MAX_VALUES):
        raise InvalidInputError(f"{path} needs at least one row and one column, and its shape is {(rows, columns)}.")
    headers = [_header(archive, members, name, path) for name in _PARTS]
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


def _runs(pieces: Iterable[bytes], header: _Header, stored: int, path: Location) -> tuple[int, ...]:
    """Return the `Pointers.runs` of row pointers that are sound."""
    pointers = csr.PointerCheck(stored)
    try:
        for piece in pieces:
            pointers.add(np.frombuffer(piece, header.dtype))
        return pointers.runs()
    except ValueError as error:
        raise InvalidInputError(f"The arrays of {path} do not make rows: {error}.") from None


def _within(pieces: Iterable[bytes], header: _Header, columns: int, path: Location) -> Iterator[bytes]:
    """Yield the columns of values on, once they are seen to be columns of the matrix."""
    for piece in pieces:
        part = np.frombuffer(piece, header.dtype)
        if part.min() < 0 or part.max() >= columns:
            raise InvalidInputError(
                f"The arrays of {path} do not make rows: columns must be from 0 to {columns - 1}, and "
                f"are from {part.min()} to {part.max()}."
            )
        yield piece


def _header(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], name: str, path: Location) -> _Header:
    found = [member for member in members if member.filename == f"{name}.npy"]
    if len(found) != 1:
        raise InvalidInputError(f"{path} holds {len(found)} arrays named {name!r}; scipy.sparse.save_npz writes one.")
    member = found[0]
    if member.flag_bits & _ENCRYPTED or member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise InvalidInputError(f"The array {name!r} of {path} is encrypted, or compressed as NumPy never does.")
    with archive.open(member) as opened:
        if np.lib.format.read_magic(opened) != (1, 0):  # headers of others may be as long as memory
            raise InvalidInputError(f"The array {name!r} of {path} is not of version 1.0 of the .npy format.")
        shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
        start = opened.tell()
    if dtype.hasobject or dtype.itemsize == 0:
        raise InvalidInputError(f"The array {name!r} of {path} holds objects, which are never unpickled.")
    header = _Header(member, start, shape, dtype)
    if min(shape, default=0) < 0 or start + header.bytes != member.file_size:
        raise InvalidInputError(
            f"The array {name!r} of {path} is damaged: it has {member.file_size - start} bytes, and its shape {shape} "
            f"and dtype {dtype} make {header.bytes}."
        )
    return header


def _pieces(archive: zipfile.ZipFile, header: _Header, path: Location) -> Iterator[bytes]:
    """Yield the values of an array; raise once they are more or fewer than it declares."""
    member = copy(header.member)
    member.file_size += 1  # zipfile ends at the size that is declared, and would not tell of more
    left = header.bytes
    with archive.open(member) as opened:
        _skip(opened, header.start)
        while piece := opened.read(min(_PIECE, left + 1)):
            left -= len(piece)
            if left < 0:
                break
            yield piece
    if left:
        raise InvalidInputError(
            f"The array {header.member.filename} of {path} is damaged: it has more or fewer bytes than it declares."
        )


def _skip(opened: IO[bytes], count: int) -> None:
    while count > 0 and (piece := opened.read(count)):
        count -= len(piece)


def _small(archive: zipfile.ZipFile, header: _Header, path: Location) -> _Part:
    if header.bytes > _MAX_SMALL:
        raise InvalidInputError(f"{path} does not say its format and shape as scipy.sparse.save_npz does.")
    return np.frombuffer(b"".join(_pieces(archive, header, path)), header.dtype).reshape(header.shape)


def _require_room(path: Location, needed: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInputError(
            f"{path} takes {needed} bytes when it is unpacked, and {folder} has {free} free: "
            "make room, set TMPDIR to another folder, or store the rows in Zarr or .npy."
        )
    temporary.warn_of_large_store(Path(folder), needed, f"What {path} is unpacked to")


def _mapped(pieces: Iterable[bytes], header: _Header) -> _Part:
    if header.bytes == 0:
        return np.empty(header.shape, header.dtype)
    with tempfile.TemporaryFile(prefix="dkfm-npz-") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        return np.memmap(file, header.dtype, "r", shape=header.shape)
