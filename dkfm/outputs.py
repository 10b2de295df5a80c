"""Scores on disk: whole chunks written by their owner, read back, receipted, and completed by a marker."""

import os
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import ClassVar

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm import formats, store
from dkfm.ahead import one_behind
from dkfm.errors import DamagedStoreError, StoreError
from dkfm.formats import CRC_BYTES
from dkfm.kernels.rows import Array
from dkfm.tiling import count, row_slices

_AT_ONCE = 2**17
"""Values that are read back at a time."""

_SOON = 2**20
"""Bytes from which on a piece is made durable when it is written: the end of a chunk then waits for its last alone."""

__all__ = ["Chunks", "Receipt", "complete", "create", "open_complete", "verify", "write_chunk"]


@dataclass(frozen=True)
class Receipt:
    """What a task says of the chunk that it wrote and read back.

    The checksum is of the data alone: over the data and its own checksum it would be the same number for all.
    """

    chunk: int
    invalid_rows: int
    crc32c: int


def create(
    path: Path,
    name: str,
    shape: tuple[int, int],
    chunk_rows: int,
    model: str,
    source: str,
    overwrite: bool,
    dtype: str = "float64",
) -> str:
    """Create an output of one array of scores (n, width), chunked by rows; return the id of this run."""
    run = uuid.uuid4().hex
    about: dict[str, object] = {"output": name, "model": model, "source": source, "run": run}
    with store.making(path, "scores", about, [name], overwrite=overwrite) as group:
        store.add_array(group, name, shape, (chunk_rows, shape[1]), dtype)
    return run


def write_chunk(path: Path, run: str, name: str, chunk: int, pieces: Generator[Array]) -> Receipt:
    """Write one chunk durably, a piece of its rows while the next is made, read it back, and return the receipt.

    Raises
    ------
    StoreError
        The output at this path belongs to another run by now: a chunk that is late has no name there.
    """
    _require_run(path, run)
    info = formats.read_array(path / name)
    with closing(pieces), store.chunk_file(path / name, (chunk, 0)) as file:
        written = _Written(path / name, np.dtype(info.dtype), chunk, file)
        one_behind(pieces, written.add)
        store.require_place(path / name, info, (chunk, 0), (written.rows, *info.shape[1:]))
        written.end(info)
        _require_run(path, run)
    return Receipt(chunk, written.invalid_rows, written.checksum)


class _Written:
    """What is in the file of a chunk so far, as it reads back."""

    rows = invalid_rows = checksum = 0

    def __init__(self, array: Path, dtype: np.dtype[np.generic], chunk: int, file: BufferedRandom) -> None:
        self._array, self._dtype, self._chunk, self._file = array, dtype, chunk, file

    def add(self, values: Array) -> None:
        """Write some rows."""
        if values.dtype != self._dtype:
            raise AssertionError(f"Values of {values.dtype} are not of {self._array}.")
        self.checksum = self._put(values, self.checksum)
        if values.nbytes >= _SOON:
            os.fdatasync(self._file.fileno())
        self.rows += len(values)
        self.invalid_rows += int(np.isnan(values.min(axis=1)).sum())

    def end(self, info: formats.ArrayInfo) -> None:
        """Fill the chunk up, and end it with its checksum."""
        for part in row_slices(info.chunks[0] - self.rows, max(1, _AT_ONCE // info.chunks[1])):
            self.checksum = self._put(store.filling(info, (part.stop - part.start, info.chunks[1])), self.checksum)
        self._put(np.frombuffer(self.checksum.to_bytes(CRC_BYTES, "little"), np.uint8), 0)

    def _put(self, values: npt.NDArray[np.generic], checksum: int) -> int:
        """Write values, read them back some at a time, compare them as bits, and return the checksum that goes on."""
        bits = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1).view(f"<u{values.itemsize}")
        place = self._file.tell()
        self._file.write(bits.data)
        self._file.flush()
        for part in row_slices(len(bits), _AT_ONCE):
            some = bits[part]
            found = os.pread(self._file.fileno(), some.nbytes, place + part.start * bits.itemsize)
            if len(found) != some.nbytes or not np.array_equal(np.frombuffer(found, bits.dtype), some):
                raise DamagedStoreError(f"Chunk {self._chunk} of {self._array} does not read back as it was written.")
            checksum = google_crc32c.extend(checksum, found)
        return checksum


def _require_run(path: Path, run: str) -> None:
    if formats.read_group(path, "scores").get("run") != run:
        raise StoreError(f"{path} was replaced by another run while this one worked.")


def _require_receipts(path: Path, name: str, checksums: Sequence[int]) -> None:
    """Compare the checksum that each chunk file ends with to its receipt: four bytes a chunk."""
    for chunk, checksum in enumerate(checksums):
        with _chunk_file(path, name, chunk).open("rb") as file:
            file.seek(-CRC_BYTES, os.SEEK_END)
            if int.from_bytes(file.read(), "little") != checksum:
                raise DamagedStoreError(f"Chunk {chunk} of {path} is not the one of its receipt.")


def _chunk_file(path: Path, name: str, chunk: int) -> Path:
    return path / name / "c" / str(chunk) / "0"


def complete(path: Path, run: str, name: str, receipts: Sequence[Receipt]) -> None:
    """Complete an output with all its receipts, once this process sees every chunk as its receipt says."""
    ordered = sorted(receipts, key=lambda receipt: receipt.chunk)
    columns = {"invalid_rows": [r.invalid_rows for r in ordered], "crc32c": [r.crc32c for r in ordered]}
    _require_run(path, run)
    formats.require_chunks(path / name, formats.read_array(path / name))
    _require_receipts(path, name, columns["crc32c"])
    with store.writing(path):
        store.complete(path, columns)


def open_complete(path: Path) -> tuple[str, store.ZarrArray]:
    """Open a finished output and return the name of its array and the array.

    Raises
    ------
    StoreError
        Not an output, not finished, or a chunk lost or cut short.
    """
    name, array, _ = _open(path)
    return name, array


def _open(path: Path) -> tuple[str, store.ZarrArray, list[int]]:
    attributes = formats.read_group(path, "scores")
    checksums = formats.read_marker(path).get("crc32c")
    name = attributes.get("output")
    if not isinstance(name, str) or "/" in name or name.startswith("."):
        raise DamagedStoreError(f"{path} names no output.")
    info = formats.read_array(path / name)
    formats.require_chunks(path / name, info)
    chunks = count(info.shape[0], info.chunks[0])
    if not isinstance(checksums, list) or len(checksums) != chunks or any(type(c) is not int for c in checksums):
        raise DamagedStoreError(f"The marker of {path} does not have the receipts of its {chunks} chunks.")
    _require_receipts(path, name, checksums)
    return name, store.open_array(path, name), checksums


@dataclass(frozen=True)
class Chunks:
    """Scores (n, width) of a finished output, read by slices; what was lost, changed or replaced since is an error."""

    path: Path
    name: str
    run: str
    shape: tuple[int, ...]
    chunk_rows: int
    dtype: np.dtype[np.floating]
    ndim: ClassVar[int] = 2

    @classmethod
    def open(cls, path: Path) -> "Chunks":
        """Open a finished output, as `open_complete` does."""
        name, array = open_complete(path)
        run = str(formats.read_group(path, "scores").get("run"))
        return cls(path, name, run, array.shape, array.chunks[0], array.dtype)

    def __getitem__(self, places: tuple[slice, ...]) -> Array:
        _require_run(self.path, self.run)
        start, stop, _ = places[0].indices(self.shape[0])
        for chunk in range(start // self.chunk_rows, count(stop, self.chunk_rows)):
            if not _chunk_file(self.path, self.name, chunk).exists():
                raise DamagedStoreError(f"Chunk {chunk} of {self.path} is gone.")
        try:
            return np.asarray(store.open_array(self.path, self.name)[places])
        except (ValueError, RuntimeError, OSError) as error:
            raise DamagedStoreError(f"Rows {start} to {stop} of {self.path} cannot be read: {error}") from None


def verify(path: Path) -> int:
    """Read every chunk of a finished output again, hold it against its receipt, and return the number of rows."""
    name, array, checksums = _open(path)
    for chunk, checksum in enumerate(checksums):
        try:
            raw = _chunk_file(path, name, chunk).read_bytes()
        except OSError as error:
            raise StoreError(f"Chunk {chunk} of {path} cannot be read: {error.strerror}.") from None
        if google_crc32c.value(raw[:-CRC_BYTES]) != checksum:
            raise DamagedStoreError(f"Chunk {chunk} of {path} is not what was written: its checksum differs.")
    return int(array.shape[0])
