"""Store the ids of rows beside the scores of a Zarr output, in a one-dimensional array of integers or of text."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.errors import InvalidInputError
from dkfm.scoring.formats.chunk_files import READ_BYTES, Chunk, FileSummary
from dkfm.storage.array_metadata_checks import CRC_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

DTYPES = ("int64", "string")
"""Data types of ids."""

MAX_TEXT_ROWS = 2**32 - 1
"""Largest number of texts in a chunk, which is stored in 32 bits."""

_COUNT_BYTES = 4
"""Bytes of the number of texts in a chunk, and of the length of each."""

_MAX_TEXT_BYTES = 2**16
"""Largest size of a text id, in bytes."""


@dataclass(frozen=True)
class IdArray:
    """The array of the ids."""

    name: str
    """Name of the array, that of the id column."""
    dtype: str
    """Data type, one of `DTYPES`."""
    chunk_rows: int
    """Rows of a chunk."""

    def file_name(self, number: int) -> str:
        """Return the name of the file of a chunk."""
        return f"{self.name}/c/{number}"

    def summarize_file(self, chunk: Chunk, stream: IO[bytes]) -> FileSummary | None:
        """Read the file of a chunk; return its summary, or None if its size, checksum or any text is wrong."""
        size = stream.seek(0, os.SEEK_END)
        if not self.may_have_size(size):
            return None
        stream.seek(0)
        checksum = 0
        for part in row_slices(size - CRC_BYTES, READ_BYTES):
            checksum = google_crc32c.extend(checksum, stream.read(part.stop - part.start))
        if stream.read(CRC_BYTES + 1) != checksum.to_bytes(CRC_BYTES, "little"):
            return None
        if self.dtype == "string" and not self._has_valid_texts(stream, size - CRC_BYTES):
            return None
        return FileSummary(checksum, size, np.zeros(chunk.rows, np.bool_))

    def may_have_size(self, size: int) -> bool:
        """Return whether the file of a chunk may have a size in bytes."""
        if self.dtype == "int64":
            return size == 8 * self.chunk_rows + CRC_BYTES
        return size >= _COUNT_BYTES * (1 + self.chunk_rows) + CRC_BYTES

    def _has_valid_texts(self, stream: IO[bytes], stop: int) -> bool:
        """Return whether a file has one text for each row before the byte `stop`, and nothing else."""
        stream.seek(0)
        if stream.read(_COUNT_BYTES) != self.header:
            return False
        position = _COUNT_BYTES
        for _ in range(self.chunk_rows):
            length = int.from_bytes(stream.read(_COUNT_BYTES), "little")
            position += _COUNT_BYTES + length
            if length > _MAX_TEXT_BYTES or position > stop:
                return False
            try:
                stream.read(length).decode()
            except UnicodeDecodeError:
                return False
        return position == stop

    def encode(self, ids: npt.NDArray[np.generic]) -> bytes | memoryview:
        """Return the bytes of some ids in a chunk, behind its `header`."""
        if self.dtype == "int64":
            return ids.astype("<i8").tobytes()
        from numcodecs.vlen import VLenUTF8

        return memoryview(VLenUTF8().encode(ids))[_COUNT_BYTES:]

    @property
    def header(self) -> bytes:
        """First bytes of a chunk: the number of texts; empty for integers."""
        return self.chunk_rows.to_bytes(_COUNT_BYTES, "little") if self.dtype == "string" else b""

    def decode(self, data: bytes) -> npt.NDArray[np.generic] | None:
        """Return the ids in the bytes of a chunk without their checksum, padding included; None if there are none."""
        if self.dtype == "int64":
            return np.frombuffer(data, "<i8") if len(data) == 8 * self.chunk_rows else None
        # Each text takes at least the bytes of its length field, so no more texts are decoded than fit into the file.
        if not self.may_have_size(len(data) + CRC_BYTES) or data[:_COUNT_BYTES] != self.header:
            return None
        from numcodecs.vlen import VLenUTF8

        try:
            ids: npt.NDArray[np.generic] = VLenUTF8().decode(data)
        except ValueError:
            return None
        return ids


def choose_id_dtype(name: str, ids: "pa.Array", target: object) -> str:
    """Return the data type in which a Zarr output keeps ids like these.

    Raises
    ------
    InvalidInputError
        The ids are neither integers nor text.
    """
    import pyarrow as pa
    from pyarrow import types

    if types.is_integer(ids.type):
        return "int64"
    if any(is_text(ids.type) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
        with suppress(pa.ArrowNotImplementedError):  # views of text in an older Arrow
            ids[:0].cast(pa.large_string())
            return "string"
    raise InvalidInputError(
        f"A Zarr output keeps ids that are integers or text, and {name!r} is {ids.type!s:.100}; convert it, or "
        f"{propose_parquet(target)}."
    )


def propose_parquet(target: object) -> str:
    """Return a proposal for messages to write Parquet, which supports more types of ids than Zarr."""
    return f"write {str(target).removesuffix('.zarr')}.parquet"


def try_convert_ids(ids: "pa.Array", array: IdArray) -> "tuple[pa.Array, tuple[int, str] | None]":
    """Convert ids to the data type of an array; return them, and the first row that cannot be converted.

    Returns
    -------
    ids : pyarrow.Array
        The ids as int64 or as text.
    fault : tuple of (int, str) or None
        Row, and the rest of a sentence that begins with its number.
    """
    import pyarrow as pa
    from pyarrow import compute

    if ids.null_count:
        return ids, (int(np.argmax(ids.is_null().to_numpy(zero_copy_only=False))), f"has no {array.name!r}")
    dtype = pa.int64() if array.dtype == "int64" else pa.large_string()
    try:
        converted = ids.cast(dtype)
        converted.validate(full=True)  # Arrow does not look at the bytes of text before
    except pa.ArrowInvalid:
        rows = (row for row in range(len(ids)) if not _is_kept(ids[row], dtype))
        reason = "an integer of 2^63 or more" if array.dtype == "int64" else "no valid UTF-8"
        return ids, (next(rows), f"has {reason} for {array.name!r}")
    if array.dtype == "string":
        sizes = compute.binary_length(converted).to_numpy()
        if sizes.max(initial=0) > _MAX_TEXT_BYTES:
            return ids, (int(np.argmax(sizes)), f"has {sizes.max()} bytes for {array.name!r}, over {_MAX_TEXT_BYTES}")
    return converted, None


def _is_kept(value: "pa.Scalar", dtype: "pa.DataType") -> bool:
    import pyarrow as pa

    try:
        value.cast(dtype).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
