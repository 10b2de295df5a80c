"""Scores on disk: whole chunks written by their owner, read back, receipted, and completed by a marker."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from dkfm import formats, store
from dkfm.errors import DamagedStoreError, StoreError
from dkfm.kernels.rows import Array
from dkfm.tiling import count

__all__ = ["Receipt", "complete", "create", "open_complete", "verify", "write_chunk"]


@dataclass(frozen=True)
class Receipt:
    """What a task says of the chunk that it wrote and read back."""

    chunk: int
    rows: int
    invalid_rows: int
    nbytes: int
    crc32c: int


def create(
    path: Path, name: str, shape: tuple[int, int], chunk_rows: int, model: str, source: str, overwrite: bool
) -> None:
    """Create an output of one array of scores (n, width), chunked by rows."""
    about: dict[str, object] = {"output": name, "model": model, "source": source}
    group = store.create(path, "scores", about, overwrite=overwrite)
    store.add_array(group, name, shape, (chunk_rows, shape[1]))


def write_chunk(path: Path, name: str, chunk: int, rows: slice, values: Array) -> Receipt:
    """Write the rows of one chunk, read its file back, and return the receipt."""
    store.open_array(path, name, "r+")[rows] = values
    raw = _chunk_file(path, name, chunk).read_bytes()
    back = np.frombuffer(raw[:-4], dtype="<f8").reshape(-1, values.shape[1])[: len(values)]
    if not np.array_equal(back, values, equal_nan=True):
        raise DamagedStoreError(f"Chunk {chunk} of {path / name} does not read back as it was written.")
    invalid = int(np.isnan(values).any(axis=1).sum())
    return Receipt(chunk, len(values), invalid, len(raw), int(google_crc32c.value(raw)))


def _chunk_file(path: Path, name: str, chunk: int) -> Path:
    return path / name / "c" / str(chunk) / "0"


def complete(path: Path, name: str, receipts: Iterable[Receipt]) -> None:
    """Complete an output with all its receipts, once this process sees every chunk."""
    formats.require_chunks(path / name, formats.read_array(path / name))
    ordered = sorted(receipts, key=lambda receipt: receipt.chunk)
    store.complete(path, {"receipts": [asdict(receipt) for receipt in ordered]})


def open_complete(path: Path) -> tuple[str, store.ZarrArray]:
    """Open a finished output and return the name of its array and the array.

    Raises
    ------
    StoreError
        Not an output, not finished, or a chunk lost or cut short.
    """
    attributes = formats.read_group(path, "scores")
    receipts = _receipts(path)
    name = attributes.get("output")
    if not isinstance(name, str) or "/" in name or name.startswith("."):
        raise DamagedStoreError(f"{path} names no output.")
    info = formats.read_array(path / name)
    formats.require_chunks(path / name, info)
    chunks, rows = count(info.shape[0], info.chunks[0]), sum(receipt.rows for receipt in receipts)
    if [receipt.chunk for receipt in receipts] != list(range(chunks)) or rows != info.shape[0]:
        raise DamagedStoreError(f"{path} has {info.shape[0]} rows in {chunks} chunks, and receipts for {rows} rows.")
    return name, store.open_array(path, name)


def _receipts(path: Path) -> list[Receipt]:
    listed = formats.read_marker(path).get("receipts")
    try:
        return [Receipt(**receipt) for receipt in listed]  # type: ignore[attr-defined]  # anything else is caught below
    except TypeError:
        raise DamagedStoreError(f"The marker of {path} is damaged.") from None


def verify(path: Path) -> int:
    """Read every chunk of a finished output again, hold it against its receipt, and return the number of rows."""
    name, array = open_complete(path)
    for receipt in _receipts(path):
        try:
            raw = _chunk_file(path, name, receipt.chunk).read_bytes()
        except OSError as error:
            raise StoreError(f"Chunk {receipt.chunk} of {path} cannot be read: {error.strerror}.") from None
        if google_crc32c.value(raw) != receipt.crc32c:
            raise DamagedStoreError(f"Chunk {receipt.chunk} of {path} is not what was written: its checksum differs.")
    return int(array.shape[0])
