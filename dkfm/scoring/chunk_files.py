"""Chunks of scores on disk, each written by its owner, once, and read back: as files of Zarr arrays, or of Parquet.

A chunk that is there already, whole, is kept and told of as it is: every task of a job would write the same scores.
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.prefetch import write_behind
from dkfm.errors import DamagedStoreError
from dkfm.storage import zarr_store
from dkfm.storage.output_location import OutputLocation, PendingFile
from dkfm.storage.zarr_codecs import CRC_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 2**20
"""Bytes that are read back at a time."""

_SOON = 2**20
"""Bytes from which on a piece is made durable when it is written: the end of a chunk then waits for its last alone."""


@dataclass(frozen=True)
class OutputColumns:
    """One output of a model: how many columns it has, what their names in a table begin with, and their dtype."""

    output: str
    width: int
    prefix: str
    dtype: str

    @property
    def names(self) -> list[str]:
        """Return a name for each in a table; that of the output itself where it is one."""
        alone = self.prefix == self.output and self.width == 1
        return [self.output] if alone else [f"{self.prefix}{i}" for i in range(self.width)]


@dataclass(frozen=True)
class Piece:
    """Some rows of a chunk: the scores (n, width) of each output, and the rows' ids where they have some."""

    scores: Mapping[str, npt.NDArray[np.generic]]
    ids: "pa.Array | None" = None


@dataclass(frozen=True)
class Chunk:
    """A chunk of an output: its number, and how many rows of its own it has."""

    number: int
    rows: int


@dataclass(frozen=True, eq=False)
class ChunkContents:
    """What one file of a chunk holds: a checksum of it, its bytes, and which rows are NaN, or no code, somewhere."""

    crc32c: int
    bytes: int
    invalid: npt.NDArray[np.bool_]


def summarize(contents: Sequence[ChunkContents]) -> tuple[int, tuple[int, ...], int]:
    """Return what a receipt says of the files of a chunk: rows that are invalid in one of them, checksums, bytes."""
    invalid = int(np.logical_or.reduce([file.invalid for file in contents]).sum())
    return invalid, tuple(file.crc32c for file in contents), sum(file.bytes for file in contents)


class ChunkFile(Protocol):
    """One file of a chunk that is being written."""

    def add(self, piece: Piece) -> None:
        """Write some rows."""

    def end(self) -> None:
        """Write what comes after the last row."""

    def keep(self, *, once: bool) -> bool:
        """Give the file its name; with `once` not in place of another: False where there is one."""

    @property
    def contents(self) -> ChunkContents:
        """What it holds, once it came to its end."""


class ChunkFormat(Protocol):
    """How chunks lie on disk."""

    @property
    def place(self) -> OutputLocation:
        """Where the output lies."""

    def files(self, number: int) -> list[str]:
        """Return the names of the files of a chunk."""

    def begin(self, chunk: Chunk, stack: ExitStack) -> list[ChunkFile]:
        """Begin to write the files of a chunk, which go again with the stack unless they are kept."""

    def contents(self, chunk: Chunk, file: int, opened: IO[bytes]) -> ChunkContents | None:
        """Read a file of a chunk; None where it is not what `begin` and what follows write."""

    def end(self, crc32c: int) -> bytes:
        """Return how a file of this checksum ends, as far as that tells."""


def write_chunk_files(
    form: ChunkFormat, chunk: Chunk, pieces: Generator[Piece], still_wanted: Callable[[], None], doubted: bool = False
) -> tuple[list[ChunkContents], bool]:
    """Write a chunk durably, a piece of its rows while the next is made; return what its files hold, as they read back.

    Parameters
    ----------
    form : Form
    chunk : Chunk
    pieces : generator of Piece
        All rows of the chunk.
    still_wanted : callable
        It raises if this output is not the one it was; called before the first row and before files get their names.
    doubted : bool
        Whether files of this chunk that are there already may hold something else: they are replaced if they do.

    Returns
    -------
    list of Contents
        Of each file.
    bool
        Whether all of it was there before.
    """
    still_wanted()
    doubted = doubted or form.place.late
    found = None if doubted else _found(form, chunk)
    if found is not None:
        pieces.close()
        return found, True
    with closing(pieces), ExitStack() as stack:
        files = form.begin(chunk, stack)

        def add(piece: Piece) -> None:
            for file in files:
                file.add(piece)

        write_behind(pieces, add)
        for file in files:
            file.end()
        still_wanted()
        return [_kept(form, chunk, number, file, still_wanted, doubted) for number, file in enumerate(files)], False


def read_chunk_files(form: ChunkFormat, chunk: Chunk) -> list[ChunkContents] | None:
    """Return what the files of a chunk hold, every byte read; None where one is not there or not sound."""
    return _all_sound([_read(form, chunk, number) for number in range(len(form.files(chunk.number)))])


def _all_sound(held: list[ChunkContents | None]) -> list[ChunkContents] | None:
    sound = [contents for contents in held if contents is not None]
    return sound if len(sound) == len(held) else None


def _read(form: ChunkFormat, chunk: Chunk, number: int) -> ChunkContents | None:
    opened = form.place.open(form.files(chunk.number)[number])
    if opened is None:
        return None
    with opened:
        return form.contents(chunk, number, opened)


def _found(form: ChunkFormat, chunk: Chunk) -> list[ChunkContents] | None:
    """Return what the files of a chunk hold if all are there and sound; remove those that are not sound."""
    names = form.files(chunk.number)
    held = [_read(form, chunk, number) for number in range(len(names))]
    form.place.remove(name for name, contents in zip(names, held, strict=True) if contents is None)
    return _all_sound(held)


def _kept(
    form: ChunkFormat, chunk: Chunk, number: int, file: ChunkFile, still_wanted: Callable[[], None], doubted: bool
) -> ChunkContents:
    """Give a file its name; where another task was first, what that one wrote is what counts.

    Where that is doubted, or may be of an output that was here before, it has to be the same.
    """
    if file.keep(once=True):
        return file.contents
    name, there = form.files(chunk.number)[number], _read(form, chunk, number)
    if doubted and (there is None or there.crc32c != file.contents.crc32c):
        still_wanted()
        file.keep(once=False)
        return file.contents
    if there is None:
        raise DamagedStoreError(f"{form.place}/{name} was written by another task just now, and is damaged.")
    return there


class CheckedFile:
    """A new file, of which every byte is read back as it is written; for its user a file to write to."""

    closed = False

    def __init__(self, new: PendingFile) -> None:
        self.new, self.size, self.checksum, self._durable = new, 0, 0, 0

    def write(self, data: "bytes | memoryview") -> int:
        """Write bytes, read them back some at a time, and compare; `compute_checksum` goes on."""
        view = memoryview(data).cast("B")
        file, place = self.new.file, self.size
        file.write(view)
        file.flush()
        for part in row_slices(len(view), _AT_ONCE):
            found = os.pread(file.fileno(), part.stop - part.start, place + part.start)
            if found != view[part].tobytes():  # memoryviews are compared value by value
                raise DamagedStoreError(f"{self.new.name} does not read back as it was written.")
            self.checksum = google_crc32c.extend(self.checksum, found)
        self.size += len(view)
        if self.new.durable and self.size - self._durable >= _SOON:
            os.fdatasync(file.fileno())
            self._durable = self.size
        return len(view)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.size

    def flush(self) -> None:
        """Do nothing: what is written is flushed."""

    def close(self) -> None:
        """Do nothing: the file goes on, or goes."""


def compute_checksum(file: IO[bytes], trailer: int = 0) -> tuple[int, int, bytes]:
    """Return the checksum of what is in a file before its last bytes, the bytes in all, and the last ones."""
    checksum, size, held = 0, 0, b""
    while found := file.read(_AT_ONCE):
        size, held = size + len(found), held + found
        checksum = google_crc32c.extend(checksum, held[: len(held) - trailer])
        held = held[len(held) - trailer :] if trailer else b""
    return checksum, size, held


def invalid_rows(values: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Return which rows (n,) hold NaN, or of codes of classes none."""
    lowest = values.min(axis=1)
    invalid: npt.NDArray[np.bool_] = lowest < 0 if values.dtype.kind == "i" else np.isnan(lowest)
    return invalid


@dataclass(frozen=True)
class ZarrChunks:
    """Each output is an array of a Zarr group, and each chunk of it a file that ends with its checksum.

    The checksum that is told is of the values alone: over these and their own checksum it would be the same for all.
    """

    place: OutputLocation
    columns: tuple[OutputColumns, ...]
    chunk_rows: int

    def files(self, number: int) -> list[str]:
        """Return the names of the files of a chunk."""
        return [f"{columns.output}/c/{number}/0" for columns in self.columns]

    def begin(self, chunk: Chunk, stack: ExitStack) -> list[ChunkFile]:
        """Begin to write the files of a chunk, which go again with the stack unless they are kept."""
        files: list[ChunkFile] = []
        for columns, path in zip(self.columns, self.files(chunk.number), strict=True):
            new = stack.enter_context(self.place.new(path))
            files.append(_ZarrFile(columns, self.chunk_rows, chunk, CheckedFile(new)))
        return files

    def contents(self, chunk: Chunk, file: int, opened: IO[bytes]) -> ChunkContents | None:
        """Read a file of a chunk; None where it has another size or checksum than it must have."""
        width, dtype = self.columns[file].width, np.dtype(self.columns[file].dtype)
        row = width * dtype.itemsize
        if opened.seek(0, os.SEEK_END) != self.chunk_rows * row + CRC_BYTES:
            return None
        opened.seek(0)
        checksum, invalid = 0, np.zeros(self.chunk_rows, np.bool_)
        for part in row_slices(self.chunk_rows, max(1, _AT_ONCE // row)):
            raw = opened.read((part.stop - part.start) * row)
            if len(raw) != (part.stop - part.start) * row:
                return None
            checksum = google_crc32c.extend(checksum, raw)
            invalid[part] = invalid_rows(np.frombuffer(raw, dtype.newbyteorder("<")).reshape(-1, width))
        if opened.read(CRC_BYTES + 1) != checksum.to_bytes(CRC_BYTES, "little"):
            return None
        return ChunkContents(checksum, self.chunk_rows * row + CRC_BYTES, invalid[: chunk.rows])

    def values(self, chunk: Chunk, file: int, crc32c: int) -> npt.NDArray[np.generic] | None:
        """Read the scores (n, width) of one output of a chunk; None where they are not those of this checksum."""
        width, dtype = self.columns[file].width, np.dtype(self.columns[file].dtype)
        size = self.chunk_rows * width * dtype.itemsize + CRC_BYTES
        opened = self.place.open(self.files(chunk.number)[file], size)
        if opened is None:
            return None
        with opened:
            raw = opened.read(size + 1)
        if len(raw) != size or raw[-CRC_BYTES:] != self.end(crc32c):
            return None
        data = np.frombuffer(raw, np.uint8, len(raw) - CRC_BYTES)
        if google_crc32c.value(data) != crc32c:
            return None
        values: npt.NDArray[np.generic] = data.view(dtype.newbyteorder("<")).reshape(-1, width)[: chunk.rows]
        return values

    def end(self, crc32c: int) -> bytes:
        """Return how a file of this checksum ends: with it."""
        return crc32c.to_bytes(CRC_BYTES, "little")


class _ZarrFile:
    """A chunk of one array."""

    def __init__(self, columns: OutputColumns, chunk_rows: int, chunk: Chunk, file: CheckedFile) -> None:
        self._name, self._dtype, self._chunk, self._file = columns.output, np.dtype(columns.dtype), chunk, file
        self._shape = chunk_rows, columns.width
        self._invalid: list[npt.NDArray[np.bool_]] = []
        self._rows = self._checksum = 0

    def add(self, piece: Piece) -> None:
        """Write some rows."""
        values = piece.scores[self._name]
        if values.dtype != self._dtype or values.shape[1:] != self._shape[1:]:
            raise AssertionError(f"Values of {values.dtype} {values.shape} are not of {self._file.new.name}.")
        self._put(values)
        self._rows += len(values)
        self._invalid.append(invalid_rows(values))

    def _put(self, values: npt.NDArray[np.generic]) -> None:
        self._file.write(zarr_store.view_bytes(np.ascontiguousarray(values, self._dtype.newbyteorder("<"))).data)

    def end(self) -> None:
        """Fill the chunk up with NaN, or -1, as missing ones read, and end it with its checksum."""
        if self._rows != self._chunk.rows:
            raise AssertionError(f"{self._rows} rows are not the {self._chunk.rows} of {self._file.new.name}.")
        rows, width = self._shape
        for part in row_slices(rows - self._rows, max(1, _AT_ONCE // (width * self._dtype.itemsize))):
            self._put(np.full((part.stop - part.start, width), zarr_store.fill_value(self._dtype.name), self._dtype))
        self._checksum = self._file.checksum
        self._file.write(self._checksum.to_bytes(CRC_BYTES, "little"))

    def keep(self, *, once: bool) -> bool:
        """Give the file its name."""
        return self._file.new.keep(once=once)

    @property
    def contents(self) -> ChunkContents:
        """What it holds."""
        return ChunkContents(self._checksum, self._file.size, np.concatenate(self._invalid))
