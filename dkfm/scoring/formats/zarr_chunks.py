"""Write chunks of scores as files of Zarr arrays, one file for each output, and one for the ids of the rows."""

import os
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.scoring.formats.chunk_files import (
    READ_BYTES,
    Chunk,
    ChunkFile,
    FileSummary,
    OutputColumns,
    Piece,
    ReadBackWriter,
    compute_invalid_mask,
)
from dkfm.scoring.formats.id_array import IdArray
from dkfm.storage import zarr_store
from dkfm.storage.array_metadata_checks import CRC_BYTES
from dkfm.storage.output_files import OutputLocation

_ENCODED_IDS = 4096
"""Ids that are encoded at a time."""


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
        names = [columns.output for columns in self.columns] + ([] if self.ids is None else [self.ids.name])
        return [f"{name}/c" for name in names]

    def begin_chunk_files(self, chunk: Chunk, stack: ExitStack) -> list[ChunkFile]:
        """Begin the files of a chunk; the stack removes those that were not committed."""
        names = zip(self.file_names(chunk.number), self.folder_names, strict=True)
        writers = [ReadBackWriter(stack.enter_context(self.output_location.create_file(*name))) for name in names]
        files: list[ChunkFile] = [
            _ScoreChunkFile(columns, self.chunk_rows, chunk, writers[i]) for i, columns in enumerate(self.columns)
        ]
        return files if self.ids is None else [*files, _IdChunkFile(self.ids, chunk, writers[-1])]

    def summarize_file(self, chunk: Chunk, file_number: int, stream: IO[bytes]) -> FileSummary | None:
        """Read a file of a chunk; return its summary, or None if its size or checksum is wrong."""
        if self.ids is not None and file_number == len(self.columns):
            return self.ids.summarize_file(chunk, stream)
        columns = self.columns[file_number]
        row, width, dtype = columns.row_bytes, columns.width, np.dtype(columns.dtype)
        if stream.seek(0, os.SEEK_END) != self.chunk_rows * row + CRC_BYTES:
            return None
        stream.seek(0)
        checksum, invalid = 0, np.zeros(self.chunk_rows, np.bool_)
        for part in row_slices(self.chunk_rows, max(1, READ_BYTES // row)):
            raw = stream.read((part.stop - part.start) * row)
            if len(raw) != (part.stop - part.start) * row:
                return None
            checksum = google_crc32c.extend(checksum, raw)
            invalid[part] = compute_invalid_mask(np.frombuffer(raw, dtype.newbyteorder("<")).reshape(-1, width))
        if stream.read(CRC_BYTES + 1) != checksum.to_bytes(CRC_BYTES, "little"):
            return None
        return FileSummary(checksum, self.chunk_rows * row + CRC_BYTES, invalid[: chunk.rows])

    def read_values(self, chunk: Chunk, file_number: int, crc32c: int) -> npt.NDArray[np.generic] | None:
        """Read the scores (n, width) of one output of a chunk; return None if their checksum differs."""
        columns = self.columns[file_number]
        size = self.chunk_rows * columns.row_bytes + CRC_BYTES
        data = self._read_file(self.file_names(chunk.number)[file_number], size, crc32c)
        if data is None:
            return None
        values: npt.NDArray[np.generic] = data.view(np.dtype(columns.dtype).newbyteorder("<"))
        return values.reshape(-1, columns.width)[: chunk.rows]

    def read_ids(self, chunk: Chunk, crc32c: int, chunk_bytes: int) -> npt.NDArray[np.generic] | None:
        """Read the ids (n,) of a chunk, whose files have `chunk_bytes` in all; return None if they are damaged."""
        assert self.ids is not None  # noqa: S101  # for the type checker
        size = chunk_bytes - sum(self.chunk_rows * columns.row_bytes + CRC_BYTES for columns in self.columns)
        data = self._read_file(self.ids.file_name(chunk.number), max(0, size), crc32c)
        ids = None if data is None else self.ids.decode(data.tobytes())
        return None if ids is None else ids[: chunk.rows]

    def _read_file(self, name: str, size: int, crc32c: int) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of a file before its checksum; None if its size or its checksum differs."""
        opened = self.output_location.open_for_reading(name, size)
        if opened is None:
            return None
        with opened:
            raw = opened.read(size + 1)
        if len(raw) != size or raw[-CRC_BYTES:] != self.encode_trailer(crc32c):
            return None
        data = np.frombuffer(raw, np.uint8, size - CRC_BYTES)
        return data if google_crc32c.value(data) == crc32c else None

    def encode_trailer(self, crc32c: int) -> bytes:
        """Return the last bytes of a file, which are the checksum."""
        return crc32c.to_bytes(CRC_BYTES, "little")


class _ZarrChunkFile(ABC):
    """A chunk of one array that is being written."""

    def __init__(self, chunk_rows: int, chunk: Chunk, file: ReadBackWriter) -> None:
        self._chunk_rows, self._chunk, self._file = chunk_rows, chunk, file
        self._invalid: list[npt.NDArray[np.bool_]] = []
        """Which rows of each piece are invalid."""
        self._checksum = 0

    @abstractmethod
    def _pad(self, rows: int) -> None:
        """Write `rows` rows of the fill value, with which missing chunks are read."""

    def finish(self) -> None:
        """Pad the chunk, and append the checksum."""
        rows = sum(map(len, self._invalid))
        if rows != self._chunk.rows:
            raise AssertionError(f"{rows} rows are not the {self._chunk.rows} of {self._file.new.name}.")
        self._pad(self._chunk_rows - rows)
        self._checksum = self._file.checksum
        self._file.write(self._checksum.to_bytes(CRC_BYTES, "little"))

    def commit(self, *, exclusive: bool) -> bool:
        """Give the file its final name."""
        return self._file.new.commit(exclusive=exclusive)

    @property
    def summary(self) -> FileSummary:
        """Summary of the file."""
        return FileSummary(self._checksum, self._file.size, np.concatenate(self._invalid))


class _ScoreChunkFile(_ZarrChunkFile):
    """A chunk of the scores of one output."""

    def __init__(self, columns: OutputColumns, chunk_rows: int, chunk: Chunk, file: ReadBackWriter) -> None:
        super().__init__(chunk_rows, chunk, file)
        self._name, self._width, self._dtype = columns.output, columns.width, np.dtype(columns.dtype)

    def write_piece(self, piece: Piece) -> None:
        """Write some rows."""
        values = piece.scores[self._name]
        if values.dtype != self._dtype or values.shape[1:] != (self._width,):
            raise AssertionError(f"Values of {values.dtype} {values.shape} are not of {self._file.new.name}.")
        self._write(values)
        self._invalid.append(compute_invalid_mask(values))

    def _write(self, values: npt.NDArray[np.generic]) -> None:
        self._file.write(zarr_store.view_as_uint8(np.ascontiguousarray(values, self._dtype.newbyteorder("<"))).data)

    def _pad(self, rows: int) -> None:
        fill = zarr_store.fill_value(self._dtype.name)
        for part in row_slices(rows, max(1, READ_BYTES // (self._width * self._dtype.itemsize))):
            self._write(np.full((part.stop - part.start, self._width), fill, self._dtype))


class _IdChunkFile(_ZarrChunkFile):
    """A chunk of ids."""

    def __init__(self, array: IdArray, chunk: Chunk, file: ReadBackWriter) -> None:
        super().__init__(array.chunk_rows, chunk, file)
        self._array = array
        file.write(array.header)

    def write_piece(self, piece: Piece) -> None:
        """Write the ids of some rows."""
        assert piece.ids is not None  # noqa: S101  # for the type checker
        for rows in row_slices(len(piece.ids), _ENCODED_IDS):
            self._file.write(self._array.encode(piece.ids[rows].to_numpy(zero_copy_only=False)))
        self._invalid.append(np.zeros(len(piece.ids), np.bool_))

    def _pad(self, rows: int) -> None:
        fill = zarr_store.fill_value(self._array.dtype)
        for part in row_slices(rows, _ENCODED_IDS):
            self._file.write(self._array.encode(np.full(part.stop - part.start, fill, object)))
