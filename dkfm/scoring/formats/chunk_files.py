"""Write the chunks of an output durably in any format, read them back, and compute their checksums.

An undamaged existing chunk is kept, because every task of a job would write the same scores.
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.background_io import overlap_writes
from dkfm.core.chunking import row_slices
from dkfm.errors import DamagedStoreError
from dkfm.storage.output_files import OutputLocation, PendingFile

if TYPE_CHECKING:
    import pyarrow as pa

READ_BYTES = 2**20
"""Bytes that are read back at a time."""

_SYNC_BYTES = 2**20
"""Number of bytes after which a file is flushed to disk, so that the last flush is short."""

_MAX_COMMITS = 5
"""Largest number of attempts to rename a file into place if another task's file had the name a moment ago."""


@dataclass(frozen=True)
class OutputColumns:
    """Columns of one output of a model."""

    output: str
    """Name of the output."""
    width: int
    """Number of columns."""
    prefix: str
    """Prefix of the names of the columns in a table."""
    dtype: str
    """Dtype of the columns."""
    labels: tuple[str, ...] = ()
    """Names of the targets or classes of the columns; none if they have no names."""

    @property
    def has_codes(self) -> bool:
        """Whether the values are codes of classes."""
        return self.dtype == "int64"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def names(self) -> list[str]:
        """Names of the columns in a table; a single column may have the name of the output."""
        if self.labels:
            return [f"{self.output}_{label}" for label in self.labels]
        is_single = self.prefix == self.output and self.width == 1
        return [self.output] if is_single else [f"{self.prefix}{i}" for i in range(self.width)]


@dataclass(frozen=True)
class Piece:
    """Some rows of a chunk: the scores (n, width) of each output by name, and the ids of the rows if they have any."""

    scores: Mapping[str, npt.NDArray[np.generic]]
    ids: "pa.Array | None" = None


@dataclass(frozen=True)
class Chunk:
    """A chunk of an output: its number and its number of rows."""

    number: int
    rows: int


@dataclass(frozen=True, eq=False)
class FileSummary:
    """Summary of one file of a chunk."""

    crc32c: int
    """Checksum of the values and padding of a Zarr file, without its own at the end; of a whole Parquet file."""
    bytes: int
    """Size of the file."""
    invalid_mask: npt.NDArray[np.bool_]
    """Rows with NaN, or without a class, in any column."""


def combine_summaries(summaries: Sequence[FileSummary]) -> tuple[int, tuple[int, ...], int]:
    """Return the fields of a receipt: rows that are invalid in any file, the checksum of each file, and all bytes."""
    invalid = int(np.logical_or.reduce([file.invalid_mask for file in summaries]).sum())
    return invalid, tuple(file.crc32c for file in summaries), sum(file.bytes for file in summaries)


class ChunkFile(Protocol):
    """One file of a chunk that is being written."""

    def write_piece(self, piece: Piece) -> None:
        """Write some rows."""

    def finish(self) -> None:
        """Write the bytes after the last row."""

    def commit(self, *, exclusive: bool) -> bool:
        """Give the file its final name; return False, and change nothing, if `exclusive` and the name exists."""

    @property
    def summary(self) -> FileSummary:
        """Summary of the file, once it is finished."""


class ChunkFormat(Protocol):
    """Format of chunks on disk."""

    @property
    def output_location(self) -> OutputLocation:
        """Location of the output."""

    @property
    def folder_names(self) -> list[str]:
        """Names of the folders of all chunks, which are made before the first chunk."""

    def file_names(self, number: int) -> list[str]:
        """Return the names of the files of a chunk."""

    def begin_chunk_files(self, chunk: Chunk, stack: ExitStack) -> list[ChunkFile]:
        """Begin the files of a chunk; the stack removes those that were not committed."""

    def summarize_file(self, chunk: Chunk, file_number: int, stream: IO[bytes]) -> FileSummary | None:
        """Read and check a file of a chunk; return its summary, or None if it is not as this format writes it."""

    def encode_trailer(self, crc32c: int) -> bytes:
        """Return the last bytes of a file with a checksum."""


def write_chunk_files(
    chunk_format: ChunkFormat,
    chunk: Chunk,
    pieces: Generator[Piece],
    n_pieces: int,
    require_current: Callable[[], None],
    distrusts_existing_files: bool = False,
) -> tuple[list[FileSummary], bool]:
    """Write a chunk durably and read it back, unless it exists undamaged; write a piece while the next is computed.

    Parameters
    ----------
    chunk_format : ChunkFormat
        Format and location of the files.
    chunk : Chunk
        Number and rows of the chunk.
    pieces : generator of Piece
        All rows of the chunk.
    n_pieces : int
        Number of pieces.
    require_current : callable
        Raises if another output has replaced this one; called before the first row and before files are committed.
    distrusts_existing_files : bool
        Whether existing files of this chunk may hold other scores; they are replaced if they do.

    Returns
    -------
    list of FileSummary
        Summary of each file.
    bool
        Whether the chunk existed already.
    """
    require_current()
    distrusts_existing_files = distrusts_existing_files or chunk_format.output_location.can_receive_stale_writes
    existing = None if distrusts_existing_files else _summarize_or_remove_files(chunk_format, chunk, require_current)
    if existing is not None:
        pieces.close()
        # The task that wrote the files may have been killed before it flushed their directory entries.
        chunk_format.output_location.sync_names(chunk_format.file_names(chunk.number))
        return existing, True
    with closing(pieces), ExitStack() as stack:
        files = chunk_format.begin_chunk_files(chunk, stack)

        def write_piece(piece: Piece) -> None:
            for file in files:
                file.write_piece(piece)

        overlap_writes(pieces, write_piece, n_pieces)
        for file in files:
            file.finish()
        require_current()
        contents = [
            _commit_or_keep_existing(chunk_format, chunk, number, file, require_current, distrusts_existing_files)
            for number, file in enumerate(files)
        ]
        return contents, False


def read_chunk_files(chunk_format: ChunkFormat, chunk: Chunk) -> list[FileSummary] | None:
    """Read all files of a chunk and return their summaries; None if any is missing or damaged."""
    files = len(chunk_format.file_names(chunk.number))
    return _collect_if_complete([_summarize_file(chunk_format, chunk, number) for number in range(files)])


def _collect_if_complete(files: list[FileSummary | None]) -> list[FileSummary] | None:
    sound = [contents for contents in files if contents is not None]
    return sound if len(sound) == len(files) else None


def _summarize_file(chunk_format: ChunkFormat, chunk: Chunk, file_number: int) -> FileSummary | None:
    """Return the summary of one file of a chunk; None if it is missing or damaged."""
    opened = chunk_format.output_location.open_for_reading(chunk_format.file_names(chunk.number)[file_number])
    if opened is None:
        return None
    with opened:
        return chunk_format.summarize_file(chunk, file_number, opened)


def _summarize_or_remove_files(
    chunk_format: ChunkFormat, chunk: Chunk, require_current: Callable[[], None]
) -> list[FileSummary] | None:
    """Return the summaries of a chunk's files if all are sound; remove those that are damaged."""
    names = chunk_format.file_names(chunk.number)
    # A task of another driver may write a missing file at any moment; such a file must not be removed.
    present = chunk_format.output_location.find_file_sizes(names)
    files = [_summarize_file(chunk_format, chunk, i) if name in present else None for i, name in enumerate(names)]
    damaged = [name for name, contents in zip(names, files, strict=True) if contents is None and name in present]
    if damaged:
        require_current()
        chunk_format.output_location.remove_files(damaged)
    return _collect_if_complete(files)


def _commit_or_keep_existing(
    chunk_format: ChunkFormat,
    chunk: Chunk,
    file_number: int,
    file: ChunkFile,
    require_current: Callable[[], None],
    distrusts_existing_files: bool,
) -> FileSummary:
    """Rename a new file into place and return its summary; if another task's file exists, keep it instead.

    With `distrusts_existing_files`, the other file is replaced if it is damaged or its checksum differs.
    """
    for _ in range(_MAX_COMMITS):
        if file.commit(exclusive=True):
            return file.summary
        existing = _summarize_file(chunk_format, chunk, file_number)
        if distrusts_existing_files and (existing is None or existing.crc32c != file.summary.crc32c):
            require_current()
            file.commit(exclusive=False)
            return file.summary
        if existing is not None:
            return existing
        # Another driver's task may have removed a damaged file between the two lines.
    name = chunk_format.file_names(chunk.number)[file_number]
    raise DamagedStoreError(
        f"{chunk_format.output_location}/{name} was written by another task just now, and is damaged."
    )


class ReadBackWriter:
    """A writable file that reads back every byte as it is written, and computes their checksum."""

    closed = False

    def __init__(self, new: PendingFile) -> None:
        self.new, self.size, self.checksum, self._synced = new, 0, 0, 0

    def write(self, data: "bytes | memoryview") -> int:
        """Write bytes, read them back and compare them, and update the checksum."""
        view = memoryview(data).cast("B")
        file, offset = self.new.file, self.size
        file.write(view)
        file.flush()
        for part in row_slices(len(view), READ_BYTES):
            written = os.pread(file.fileno(), part.stop - part.start, offset + part.start)
            if written != view[part].tobytes():  # comparing memoryviews would be slow, value by value
                raise DamagedStoreError(f"{self.new.name} does not read back as it was written.")
            self.checksum = google_crc32c.extend(self.checksum, written)
        self.size += len(view)
        if self.new.is_synced_on_commit and self.size - self._synced >= _SYNC_BYTES:
            getattr(os, "fdatasync", os.fsync)(file.fileno())  # macOS has only the one that syncs times too
            self._synced = self.size
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def flush(self) -> None:
        """Do nothing, for pyarrow's file protocol: every write is flushed."""

    def close(self) -> None:
        """Do nothing, for pyarrow's file protocol: the owner commits or removes the file."""


def compute_checksum_and_size(file: IO[bytes]) -> tuple[int, int]:
    """Return the CRC32C checksum of the rest of a file, and its size in bytes."""
    checksum = size = 0
    while data := file.read(READ_BYTES):
        checksum, size = google_crc32c.extend(checksum, data), size + len(data)
    return checksum, size


def compute_invalid_mask(values: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Return which rows (n,) contain NaN, or a negative code where values are codes of classes."""
    lowest = values.min(axis=1)
    invalid: npt.NDArray[np.bool_] = lowest < 0 if values.dtype.kind == "i" else np.isnan(lowest)
    return invalid
