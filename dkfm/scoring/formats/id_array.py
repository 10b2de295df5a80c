"""Keep the ids of rows beside the scores of a Zarr output: an array of one dimension, of integers or of text."""

import os
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.errors import InvalidInputError
from dkfm.scoring.formats.chunk_writing import READ_BYTES, Chunk, FileSummary, Piece, ReadBackWriter
from dkfm.storage import zarr_store
from dkfm.storage.codec_checks import CRC_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

DTYPES = ("int64", "string")
"""Data types of ids."""

_COUNT_BYTES = 4
"""Bytes of the number of texts in a chunk, and of the length of each."""


@dataclass(frozen=True)
class IdArray:
    """The array of the ids."""

    name: str
    """Name of the array, that of the id column."""
    dtype: str
    """Data type, a key of `DTYPES`."""
    chunk_rows: int
    """Rows of a chunk."""

    def file_name(self, number: int) -> str:
        """Return the name of the file of a chunk."""
        return f"{self.name}/c/{number}"

    def create_file(self, chunk: Chunk, file: ReadBackWriter) -> "IdChunkFile":
        """Begin the file of a chunk."""
        return IdChunkFile(self, chunk, file)

    def summarize_file(self, chunk: Chunk, stream: IO[bytes]) -> FileSummary | None:
        """Read the file of a chunk; return its summary, or None if its size or checksum is wrong."""
        size = stream.seek(0, os.SEEK_END)
        if size < CRC_BYTES or (self.dtype == "int64" and size != 8 * self.chunk_rows + CRC_BYTES):
            return None
        stream.seek(0)
        checksum = 0
        for part in row_slices(size - CRC_BYTES, READ_BYTES):
            checksum = google_crc32c.extend(checksum, stream.read(part.stop - part.start))
        if stream.read(CRC_BYTES + 1) != checksum.to_bytes(CRC_BYTES, "little"):
            return None
        return FileSummary(checksum, size, np.zeros(chunk.rows, np.bool_))

    def encode(self, ids: npt.NDArray[np.generic]) -> bytes:
        """Return the bytes of some ids in a chunk."""
        if self.dtype == "int64":
            return ids.astype("<i8").tobytes()
        from numcodecs.vlen import VLenUTF8

        return bytes(VLenUTF8().encode(ids)[_COUNT_BYTES:])

    @property
    def head(self) -> bytes:
        """First bytes of a chunk: of texts, how many there are."""
        return self.chunk_rows.to_bytes(_COUNT_BYTES, "little") if self.dtype == "string" else b""

    def decode(self, data: bytes) -> npt.NDArray[np.generic] | None:
        """Return the ids in the bytes of a chunk without their checksum, padding included; None if there are none."""
        if self.dtype == "int64":
            return np.frombuffer(data, "<i8") if len(data) == 8 * self.chunk_rows else None
        # Each text takes the bytes of its length at least, so that no more are made than the file has room for.
        if data[:_COUNT_BYTES] != self.head or len(data) < _COUNT_BYTES * (1 + self.chunk_rows):
            return None
        from numcodecs.vlen import VLenUTF8

        try:
            ids: npt.NDArray[np.generic] = VLenUTF8().decode(data)
        except ValueError:
            return None
        return ids


class IdChunkFile:
    """A chunk of ids that is being written."""

    def __init__(self, array: IdArray, chunk: Chunk, file: ReadBackWriter) -> None:
        self._array, self._chunk, self._file = array, chunk, file
        self._rows = self._checksum = 0
        file.write(array.head)

    def write_piece(self, piece: Piece) -> None:
        """Write the ids of some rows."""
        assert piece.ids is not None  # noqa: S101  # for the type checker
        first = self._chunk.number * self._array.chunk_rows + self._rows
        self._file.write(self._array.encode(_to_numpy(piece.ids, self._array, first)))
        self._rows += len(piece.ids)

    def finish(self) -> None:
        """Pad the chunk with the fill value, and append the checksum."""
        if self._rows != self._chunk.rows:
            raise AssertionError(f"{self._rows} rows are not the {self._chunk.rows} of {self._file.new.name}.")
        fill = zarr_store.fill_value(self._array.dtype)
        for part in row_slices(self._array.chunk_rows - self._rows, READ_BYTES // 8):
            self._file.write(self._array.encode(np.full(part.stop - part.start, fill, object)))
        self._checksum = self._file.checksum
        self._file.write(self._checksum.to_bytes(CRC_BYTES, "little"))

    def commit(self, *, exclusive: bool) -> bool:
        """Give the file its final name."""
        return self._file.new.commit(exclusive=exclusive)

    @property
    def summary(self) -> FileSummary:
        """Summary of the file."""
        return FileSummary(self._checksum, self._file.size, np.zeros(self._chunk.rows, np.bool_))


def choose_id_dtype(name: str, ids: "pa.Array", target: object) -> str:
    """Return the data type in which a Zarr output keeps ids like these.

    Raises
    ------
    InvalidInputError
        They are neither integers nor text.
    """
    from pyarrow import types

    if types.is_integer(ids.type):
        return "int64"
    if types.is_string(ids.type) or types.is_large_string(ids.type):
        return "string"
    raise InvalidInputError(
        f"The ids {name!r} are {ids.type!s:.100}, and a Zarr output keeps integers or text; name the output "
        f"{target}.parquet."
    )


def _to_numpy(ids: "pa.Array", array: IdArray, first: int) -> npt.NDArray[np.generic]:
    """Return ids as an array of integers or of texts; `first` is the number of their first row."""
    import pyarrow as pa

    if ids.null_count:
        row = first + int(np.argmax(ids.is_null().to_numpy(zero_copy_only=False)))
        raise InvalidInputError(
            f"Row {row} has no {array.name!r}, and a Zarr output has an id for each row; give it one, or name the "
            "output .parquet."
        )
    if array.dtype == "int64":
        try:
            ids = ids.cast(pa.int64())
        except pa.ArrowInvalid:
            raise InvalidInputError(f"The ids {array.name!r} are larger than 64 bits with a sign hold.") from None
    values: npt.NDArray[np.generic] = ids.to_numpy(zero_copy_only=False)
    return values
