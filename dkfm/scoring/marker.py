"""Write and read the marker of a finished output, which holds the receipts of all chunks in columns."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dkfm.errors import DamagedStoreError, IncompleteStoreError
from dkfm.scoring import output_store
from dkfm.scoring.output_store import Output
from dkfm.scoring.receipts import MAX_NUMBER, ChunkReceipt
from dkfm.storage import output_files, store_metadata

_COLUMNS = ("crc32c", "invalid_rows", "bytes")
"""Fields of the receipts in a marker."""


@dataclass(frozen=True, eq=False)
class ReceiptTable:
    """Receipts of all chunks of a finished output, in arrays; receipt objects are created on demand."""

    rows: npt.NDArray[np.int64]
    """Rows of each chunk (chunks,)."""
    crc32c: npt.NDArray[np.uint32]
    """Checksum of each file of each chunk (chunks, files)."""
    invalid_rows: npt.NDArray[np.int64]
    """Rows of each chunk (chunks,) that scored NaN, or have no class."""
    bytes: npt.NDArray[np.int64]
    """Size of all files of each chunk (chunks,)."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> ChunkReceipt:
        rows, invalid, size = (int(column[number]) for column in (self.rows, self.invalid_rows, self.bytes))
        return ChunkReceipt(number, rows, invalid, tuple(self.crc32c[number].tolist()), size)

    def __iter__(self) -> Iterator[ChunkReceipt]:
        return map(self.__getitem__, range(len(self)))

    def __dask_tokenize__(self) -> tuple[object, ...]:
        return "ReceiptTable", self.rows, self.crc32c, self.invalid_rows, self.bytes


def encode_marker(output: Output, receipts: Mapping[int, ChunkReceipt], input_stamp: str) -> bytes:
    """Return the content of the marker of an output, with all receipts and the stamp of the input."""
    ordered = [receipts[number] for number in range(output.n_chunks)]
    columns: list[list[Any]] = [
        [receipt.file_checksums for receipt in ordered],
        [receipt.invalid_rows for receipt in ordered],
        [receipt.bytes for receipt in ordered],
    ]
    content = {
        "sum": _compute_digest(output, columns),
        "input": input_stamp,
        **dict(zip(_COLUMNS, columns, strict=True)),
    }
    return json.dumps(content).encode()


def _compute_digest(output: Output, columns: Sequence[object]) -> str:
    """Return a SHA-256 digest of an output's attributes and of the columns of its receipts."""
    return hashlib.sha256(
        json.dumps([output_store.describe_output(output), *columns], sort_keys=True).encode()
    ).hexdigest()


def read_receipt_table(output: Output) -> ReceiptTable:
    """Return the receipts of all chunks in the marker of a finished output.

    Raises
    ------
    StoreError
        The output is not finished, or its marker belongs to another output.
    """
    marker = _read_required_marker(output)
    columns: list[Any] = [marker.get(name) for name in _COLUMNS]  # values of JSON
    is_complete = all(isinstance(column, list) and len(column) == output.n_chunks for column in columns)
    if not is_complete or marker.get("sum") != _compute_digest(output, columns):
        raise DamagedStoreError(f"The marker of {output.root} is not the one of its {output.n_chunks} chunks and rows.")
    try:
        return _build_table(output, *columns)
    except (TypeError, ValueError):
        raise DamagedStoreError(f"The marker of {output.root} has no receipts that dkfm writes.") from None


def read_input_stamp(output: Output) -> str:
    """Return the stamp of the input of a finished output; empty if its marker is of an old version without one.

    Raises
    ------
    StoreError
        The output is not finished.
    """
    return str(_read_required_marker(output).get("input", ""))


def _read_required_marker(output: Output) -> dict[str, object]:
    found = output_files.read_json(output.output_location, store_metadata.MARKER, store_metadata.MAX_MARKER_BYTES)
    if found is None:
        raise IncompleteStoreError(
            f"{output.root} has no {store_metadata.MARKER} marker: the job did not finish; run the same command again."
        )
    return found


def _build_table(output: Output, checksums: list[list[int]], invalid: list[int], sizes: list[int]) -> ReceiptTable:
    """Return the table of columns that were read from a file; raise a TypeError or a ValueError for impossible ones."""
    files = len(output.format.file_names(0))
    if set(map(type, checksums)) != {list} or set(map(len, checksums)) != {files}:
        raise ValueError("A receipt has a checksum for each file.")
    starts = np.arange(output.n_chunks) * output.chunk_rows
    table = ReceiptTable(
        rows=np.minimum(output.chunk_rows, output.rows - starts),
        crc32c=_parse_integers(list(chain.from_iterable(checksums)), 2**32).astype(np.uint32).reshape(-1, files),
        invalid_rows=_parse_integers(invalid, MAX_NUMBER),
        bytes=_parse_integers(sizes, MAX_NUMBER),
    )
    if (table.invalid_rows > table.rows).any():
        raise ValueError("A receipt has no more invalid rows than rows.")
    return table


def _parse_integers(values: list[int], limit: int) -> npt.NDArray[np.int64]:
    """Return integers as an array; raise a ValueError if one is negative, not below the limit, or of another type."""
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) >= limit:
        raise ValueError("A receipt has numbers.")
    return np.array(values, np.int64)
