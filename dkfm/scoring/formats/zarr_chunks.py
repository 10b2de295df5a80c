"""Write chunks of scores as files of Zarr arrays, one file for each output, and one for the ids of the rows."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.scoring.formats.chunk_writing import (
    READ_BYTES,
    Chunk,
    ChunkFile,
    FileSummary,
    OutputColumns,
    Piece,
    ReadBackWriter,
    invalid_rows,
)
from dkfm.scoring.formats.id_array import IdArray
from dkfm.storage import zarr_store
from dkfm.storage.codec_checks import CRC_BYTES
from dkfm.storage.output_files import OutputLocation


@dataclass(frozen=True)
class ZarrChunks:
    """Chunks of a Zarr group: each output is an array, and each of its chunks a file that ends with a checksum.

    Receipts have the checksum of the values alone. A checksum over values and their own checksum would be constant. The
    ids, if there are any, are the last array.
    """

    output_location: OutputLocation
    columns: tuple[OutputColumns, ...]
    chunk_rows: int
    ids: IdArray | None = None

    def file_names(self, number: int) -> list[str]:
        """Return the names of the files of a chunk."""
        scores = [f"{columns.output}/c/{number}/0" for columns in self.columns]
        return scores if self.ids is None else [*scores, self.ids.file_name(number)]

    @property
    def folder_names(self) -> list[str]:
        """Names of the folders of all chunks, one for each array, which are made before the first chunk."""
        return [f"{name}/c" for name in self.array_names]

    @property
    def array_names(self) -> list[str]:
        """Names of the arrays, in the order of the files of a chunk."""
        scores = [columns.output for columns in self.columns]
        return scores if self.ids is None else [*scores, self.ids.name]

    def create_files(self, chunk: Chunk, stack: ExitStack) -> list[ChunkFile]:
        """Begin the files of a chunk; the stack removes those that were not committed."""
        names = zip(self.file_names(chunk.number), self.folder_names, strict=True)
        writers = [ReadBackWriter(stack.enter_context(self.output_location.create_file(*name))) for name in names]
        files: list[ChunkFile] = [
            _ZarrChunkFile(columns, self.chunk_rows, chunk, writers[i]) for i, columns in enumerate(self.columns)
        ]
        return files if self.ids is None else [*files, self.ids.create_file(chunk, writers[-1])]

    def summarize_file(self, chunk: Chunk, file_number: int, stream: IO[bytes]) -> FileSummary | None:
        """Read a file of a chunk; return its summary, or None if its size or checksum is wrong."""
        if self.ids is not None and file_number == len(self.columns):
            return self.ids.summarize_file(chunk, stream)
        width, dtype = self.columns[file_number].width, np.dtype(self.columns[file_number].dtype)
        row = width * dtype.itemsize
        if stream.seek(0, os.SEEK_END) != self.chunk_rows * row + CRC_BYTES:
            return None
        stream.seek(0)
        checksum, invalid = 0, np.zeros(self.chunk_rows, np.bool_)
        for part in row_slices(self.chunk_rows, max(1, READ_BYTES // row)):
            raw = stream.read((part.stop - part.start) * row)
            if len(raw) != (part.stop - part.start) * row:
                return None
            checksum = google_crc32c.extend(checksum, raw)
            invalid[part] = invalid_rows(np.frombuffer(raw, dtype.newbyteorder("<")).reshape(-1, width))
        if stream.read(CRC_BYTES + 1) != checksum.to_bytes(CRC_BYTES, "little"):
            return None
        return FileSummary(checksum, self.chunk_rows * row + CRC_BYTES, invalid[: chunk.rows])

    def read_values(self, chunk: Chunk, file_number: int, crc32c: int) -> npt.NDArray[np.generic] | None:
        """Read the scores (n, width) of one output of a chunk; return None if their checksum is another."""
        width, dtype = self.columns[file_number].width, np.dtype(self.columns[file_number].dtype)
        size = self.chunk_rows * width * dtype.itemsize + CRC_BYTES
        opened = self.output_location.open_for_reading(self.file_names(chunk.number)[file_number], size)
        if opened is None:
            return None
        with opened:
            raw = opened.read(size + 1)
        if len(raw) != size or raw[-CRC_BYTES:] != self.trailer_bytes(crc32c):
            return None
        data = np.frombuffer(raw, np.uint8, len(raw) - CRC_BYTES)
        if google_crc32c.value(data) != crc32c:
            return None
        values: npt.NDArray[np.generic] = data.view(dtype.newbyteorder("<")).reshape(-1, width)[: chunk.rows]
        return values

    def read_ids(self, chunk: Chunk, crc32c: int, chunk_bytes: int) -> npt.NDArray[np.generic] | None:
        """Read the ids (n,) of a chunk, whose files have `chunk_bytes` in all; return None if they are damaged."""
        assert self.ids is not None  # noqa: S101  # for the type checker
        size = chunk_bytes - sum(
            self.chunk_rows * columns.width * np.dtype(columns.dtype).itemsize + CRC_BYTES for columns in self.columns
        )
        opened = self.output_location.open_for_reading(self.ids.file_name(chunk.number), max(0, size))
        if opened is None:
            return None
        with opened:
            raw = opened.read(max(0, size) + 1)
        data, trailer = raw[:-CRC_BYTES], raw[-CRC_BYTES:]
        if len(raw) != size or trailer != self.trailer_bytes(crc32c) or google_crc32c.value(data) != crc32c:
            return None
        ids = self.ids.decode(data)
        return None if ids is None else ids[: chunk.rows]

    def trailer_bytes(self, crc32c: int) -> bytes:
        """Return the last bytes of a file, which are the checksum."""
        return crc32c.to_bytes(CRC_BYTES, "little")


class _ZarrChunkFile:
    """A chunk of one array that is being written."""

    def __init__(self, columns: OutputColumns, chunk_rows: int, chunk: Chunk, file: ReadBackWriter) -> None:
        self._name, self._dtype, self._chunk, self._file = columns.output, np.dtype(columns.dtype), chunk, file
        self._shape = chunk_rows, columns.width
        self._invalid: list[npt.NDArray[np.bool_]] = []
        self._rows = self._checksum = 0

    def write_piece(self, piece: Piece) -> None:
        """Write some rows."""
        values = piece.scores[self._name]
        if values.dtype != self._dtype or values.shape[1:] != self._shape[1:]:
            raise AssertionError(f"Values of {values.dtype} {values.shape} are not of {self._file.new.name}.")
        self._write(values)
        self._rows += len(values)
        self._invalid.append(invalid_rows(values))

    def _write(self, values: npt.NDArray[np.generic]) -> None:
        self._file.write(zarr_store.view_bytes(np.ascontiguousarray(values, self._dtype.newbyteorder("<"))).data)

    def finish(self) -> None:
        """Pad the chunk with the fill value of missing chunks, and append the checksum."""
        if self._rows != self._chunk.rows:
            raise AssertionError(f"{self._rows} rows are not the {self._chunk.rows} of {self._file.new.name}.")
        rows, width = self._shape
        for part in row_slices(rows - self._rows, max(1, READ_BYTES // (width * self._dtype.itemsize))):
            self._write(np.full((part.stop - part.start, width), zarr_store.fill_value(self._dtype.name), self._dtype))
        self._checksum = self._file.checksum
        self._file.write(self._checksum.to_bytes(CRC_BYTES, "little"))

    def commit(self, *, exclusive: bool) -> bool:
        """Give the file its final name."""
        return self._file.new.commit(exclusive=exclusive)

    @property
    def summary(self) -> FileSummary:
        """Summary of the file."""
        return FileSummary(self._checksum, self._file.size, np.concatenate(self._invalid))
