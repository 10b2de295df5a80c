"""Write chunks of scores as a folder of Parquet files, one file for each chunk."""

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dkfm.errors import MissingExtraError
from dkfm.scoring.formats.chunk_writing import (
    Chunk,
    ChunkFile,
    FileSummary,
    OutputColumns,
    Piece,
    ReadBackWriter,
    compute_checksum_and_size,
    invalid_rows,
)
from dkfm.storage.output_files import OutputLocation

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile, ParquetWriter


def require_pyarrow() -> None:
    """Raise a MissingExtraError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401  # only whether it can be imported
    except ImportError:
        raise MissingExtraError("Parquet needs pyarrow: pip install 'dkfm[dataframe]'.") from None


def file_name(number: int) -> str:
    """Return the name of the file of a chunk.

    >>> file_name(7)
    'part-00007.parquet'
    """
    return f"part-{number:05d}.parquet"


@dataclass(frozen=True)
class ParquetChunks:
    """Chunks as Parquet files without compression and with page checksums; equal rows give equal bytes."""

    output_location: OutputLocation
    columns: tuple[OutputColumns, ...]
    id_column: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of the columns of a file: the ids, if any, then the scores."""
        scores = [name for columns in self.columns for name in columns.names]
        return scores if self.id_column is None else [self.id_column, *scores]

    @property
    def _row_bytes(self) -> int:
        return sum(columns.width * np.dtype(columns.dtype).itemsize for columns in self.columns)

    def file_names(self, number: int) -> list[str]:
        """Return the name of the file of a chunk."""
        return [file_name(number)]

    @property
    def folder_names(self) -> list[str]:
        """Names of the folders of chunks: none, their files are in the folder of the output."""
        return []

    def create_files(self, chunk: Chunk, stack: ExitStack) -> list[ChunkFile]:
        """Begin the file of a chunk; the stack removes it unless it was committed."""
        new = stack.enter_context(self.output_location.create_file(file_name(chunk.number)))
        file = _ParquetChunkFile(self, chunk, ReadBackWriter(new))
        stack.callback(file.close_writer)
        return [file]

    def summarize_file(self, chunk: Chunk, file_number: int, stream: IO[bytes]) -> FileSummary | None:
        """Read every page of a chunk's file; return its summary, or None if its rows or columns are not the chunk's."""
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        invalid = [np.zeros(0, np.bool_)]
        try:
            with ParquetFile(stream, page_checksum_verification=True) as table:
                schema = table.schema_arrow
                if schema.names != self.names or (schema.metadata or {}).get(b"dkfm") != _chunk_metadata(chunk):
                    return None
                if table.metadata.num_rows != chunk.rows or stream.seek(0, os.SEEK_END) < chunk.rows * self._row_bytes:
                    return None  # a small file that unpacks to many values is not read
                for group in range(table.num_row_groups):
                    invalid.append(self._find_invalid_rows(table, group))
            stream.seek(0)
            checksum, size = compute_checksum_and_size(stream)
            contents = FileSummary(checksum, size, np.concatenate(invalid))
        except (OSError, ValueError, KeyError, pa.ArrowException):
            return None
        return contents if len(contents.invalid_mask) == chunk.rows else None

    def _find_invalid_rows(self, table: "ParquetFile", group: int) -> npt.NDArray[np.bool_]:
        """Return which rows of a row group are invalid; raise a ValueError if a column is not one of scores."""
        import pyarrow as pa

        rows = table.read_row_group(group)
        invalid = np.zeros(rows.num_rows, np.bool_)
        for columns in self.columns:
            for name in columns.names:
                column = rows.column(name)
                if column.type != pa.from_numpy_dtype(np.dtype(columns.dtype)) or column.null_count:
                    raise ValueError(f"The column {name} is not one of scores.")
                invalid |= invalid_rows(column.to_numpy()[:, np.newaxis])
        return invalid

    def trailer_bytes(self, crc32c: int) -> bytes:
        """Return the last bytes of every Parquet file."""
        return b"PAR1"

    def build_schema(self, chunk: Chunk, ids: "pa.DataType | None") -> "pa.Schema":
        """Return the schema of the file of a chunk; `ids` is the type of the ids, not their values; None if none."""
        import pyarrow as pa

        fields = [] if self.id_column is None else [pa.field(self.id_column, ids)]
        for columns in self.columns:
            kind = pa.from_numpy_dtype(np.dtype(columns.dtype))
            fields += [pa.field(name, kind, nullable=False) for name in columns.names]
        return pa.schema(fields, metadata={b"dkfm": _chunk_metadata(chunk)})


def _chunk_metadata(chunk: Chunk) -> bytes:
    return json.dumps({"chunk": chunk.number, "rows": chunk.rows}).encode()


class _ParquetChunkFile:
    """The Parquet file of a chunk that is being written."""

    def __init__(self, chunk_format: ParquetChunks, chunk: Chunk, file: ReadBackWriter) -> None:
        self._format, self._chunk, self._file = chunk_format, chunk, file
        self._writer: ParquetWriter | None = None
        self._invalid: list[npt.NDArray[np.bool_]] = []

    def write_piece(self, piece: Piece) -> None:
        """Write some rows, as one row group."""
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        schema = self._format.build_schema(self._chunk, None if piece.ids is None else piece.ids.type)
        if self._writer is None:
            self._writer = ParquetWriter(
                self._file,
                schema,
                compression="none",
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            )
        scores = [piece.scores[columns.output] for columns in self._format.columns]
        columns = [pa.array(values[:, i]) for values in scores for i in range(values.shape[1])]
        table = pa.Table.from_arrays([*([] if piece.ids is None else [piece.ids]), *columns], schema=schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._invalid.append(np.logical_or.reduce([invalid_rows(values) for values in scores]))

    def finish(self) -> None:
        """Write the footer."""
        rows = sum(map(len, self._invalid))
        if self._writer is None or rows != self._chunk.rows:
            raise AssertionError(f"{rows} rows are not the {self._chunk.rows} of {self._file.new.name}.")
        self._writer.close()

    def close_writer(self) -> None:
        """Close the writer, even if the file is not finished."""
        if self._writer is not None:
            self._writer.close()

    def commit(self, *, exclusive: bool) -> bool:
        """Give the file its final name."""
        return self._file.new.commit(exclusive=exclusive)

    @property
    def summary(self) -> FileSummary:
        """Summary of the file."""
        return FileSummary(self._file.checksum, self._file.size, np.concatenate(self._invalid))
