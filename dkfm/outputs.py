"""Scores on disk: whole chunks written by their owner, read back, receipted, and completed by a marker."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import google_crc32c
import numpy as np

from dkfm import formats, store
from dkfm.errors import DamagedStoreError, StoreError
from dkfm.kernels.rows import Array
from dkfm.tiling import count

_TRAILER = 4
"""Bytes of the codec's own checksum after the data; over both, every checksum would be the same number."""

__all__ = ["Chunks", "Receipt", "complete", "create", "open_complete", "verify", "write_chunk"]


@dataclass(frozen=True)
class Receipt:
    """What a task says of the chunk that it wrote and read back; the checksum is of the data alone."""

    chunk: int
    invalid_rows: int
    crc32c: int


def create(
    path: Path, name: str, shape: tuple[int, int], chunk_rows: int, model: str, source: str, overwrite: bool
) -> str:
    """Create an output of one array of scores (n, width), chunked by rows; return the id of this run."""
    run = uuid.uuid4().hex
    about: dict[str, object] = {"output": name, "model": model, "source": source, "run": run}
    with store.making(path, "scores", about, [name], overwrite=overwrite) as group:
        store.add_array(group, name, shape, (chunk_rows, shape[1]))
    return run


def write_chunk(path: Path, run: str, name: str, chunk: int, rows: slice, values: Array) -> Receipt:
    """Write the rows of one chunk durably, read its file back, and return the receipt.

    Raises
    ------
    StoreError
        The output at this path belongs to another run by now: a task that comes late writes nothing.
    """
    if formats.read_group(path, "scores").get("run") != run:
        raise StoreError(f"{path} was replaced by another run while this one worked.")
    with store.writing(path):
        store.open_array(path, name, "r+")[rows] = values
        store.sync_chunk(path / name, f"c/{chunk}/0")
        data = _chunk_file(path, name, chunk).read_bytes()[:-_TRAILER]
    back = np.frombuffer(data, dtype="<f8").reshape(-1, values.shape[1])[: len(values)]
    if not np.array_equal(back, values, equal_nan=True):
        raise DamagedStoreError(f"Chunk {chunk} of {path / name} does not read back as it was written.")
    invalid = int(np.isnan(values).any(axis=1).sum())
    return Receipt(chunk, invalid, int(google_crc32c.value(data)))


def _chunk_file(path: Path, name: str, chunk: int) -> Path:
    return path / name / "c" / str(chunk) / "0"


def complete(path: Path, name: str, receipts: Sequence[Receipt]) -> None:
    """Complete an output with all its receipts, once this process sees every chunk."""
    formats.require_chunks(path / name, formats.read_array(path / name))
    ordered = sorted(receipts, key=lambda receipt: receipt.chunk)
    columns = {"invalid_rows": [r.invalid_rows for r in ordered], "crc32c": [r.crc32c for r in ordered]}
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
    return name, store.open_array(path, name), checksums


@dataclass(frozen=True)
class Chunks:
    """Scores (n, width) of a finished output, read by slices; what was changed on disk is an error that names it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: ClassVar[np.dtype[np.float64]] = np.dtype(np.float64)
    ndim: ClassVar[int] = 2

    def __getitem__(self, places: tuple[slice, ...]) -> Array:
        try:
            return np.asarray(store.open_array(self.path, self.name)[places])
        except (ValueError, RuntimeError, OSError) as error:
            raise DamagedStoreError(f"Rows {places[0]} of {self.path} cannot be read: {error}") from None


def verify(path: Path) -> int:
    """Read every chunk of a finished output again, hold it against its receipt, and return the number of rows."""
    name, array, checksums = _open(path)
    for chunk, checksum in enumerate(checksums):
        try:
            raw = _chunk_file(path, name, chunk).read_bytes()
        except OSError as error:
            raise StoreError(f"Chunk {chunk} of {path} cannot be read: {error.strerror}.") from None
        data, trailer = raw[:-_TRAILER], raw[-_TRAILER:]
        if google_crc32c.value(data) != checksum or int.from_bytes(trailer, "little") != checksum:
            raise DamagedStoreError(f"Chunk {chunk} of {path} is not what was written: its checksum differs.")
    return int(array.shape[0])
