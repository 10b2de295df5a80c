"""Chunks of scores as files of Parquet: a folder that every reader of Parquet takes, one file a chunk."""

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dkfm.errors import MissingExtraError
from dkfm.scoring.chunk_files import (
    CheckedFile,
    Chunk,
    ChunkContents,
    ChunkFile,
    OutputColumns,
    Piece,
    compute_checksum,
    invalid_rows,
)
from dkfm.storage.output_location import OutputLocation

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile, ParquetWriter


def require_pyarrow() -> None:
    """Raise a MissingExtraError where there is no pyarrow."""
    try:
        import pyarrow.parquet  # noqa: F401  # whether it is there
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
    """A file of Parquet for each chunk, not compressed, a checksum in each page; of the same rows the same bytes."""

    place: OutputLocation
    columns: tuple[OutputColumns, ...]
    id_column: str | None = None

    @property
    def names(self) -> list[str]:
        """The columns of a file: the ids, then the scores."""
        scores = [name for columns in self.columns for name in columns.names]
        return scores if self.id_column is None else [self.id_column, *scores]

    @property
    def _row_bytes(self) -> int:
        return sum(columns.width * np.dtype(columns.dtype).itemsize for columns in self.columns)

    def files(self, number: int) -> list[str]:
        """Return the name of the file of a chunk."""
        return [file_name(number)]

    def begin(self, chunk: Chunk, stack: ExitStack) -> list[ChunkFile]:
        """Begin to write the file of a chunk, which goes again with the stack unless it is kept."""
        new = stack.enter_context(self.place.new(file_name(chunk.number)))
        file = _TableFile(self, chunk, CheckedFile(new))
        stack.callback(file.release)
        return [file]

    def contents(self, chunk: Chunk, file: int, opened: IO[bytes]) -> ChunkContents | None:
        """Read the file of a chunk, every page of it; None where it is not a table of its rows and columns."""
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        invalid = [np.zeros(0, np.bool_)]
        try:
            with ParquetFile(opened, page_checksum_verification=True) as table:
                schema = table.schema_arrow
                if schema.names != self.names or (schema.metadata or {}).get(b"dkfm") != _about(chunk):
                    return None
                if table.metadata.num_rows != chunk.rows or opened.seek(0, os.SEEK_END) < chunk.rows * self._row_bytes:
                    return None  # values that a file does not hold are not unpacked
                for group in range(table.num_row_groups):
                    invalid.append(self._invalid(table, group))
            opened.seek(0)
            checksum, size, _ = compute_checksum(opened)
            found = ChunkContents(checksum, size, np.concatenate(invalid))
        except (OSError, ValueError, KeyError, pa.ArrowException):
            return None
        return found if len(found.invalid) == chunk.rows else None

    def _invalid(self, table: "ParquetFile", group: int) -> npt.NDArray[np.bool_]:
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

    def end(self, crc32c: int) -> bytes:
        """Return how a file ends: as all of Parquet do."""
        return b"PAR1"

    def schema(self, chunk: Chunk, ids: "pa.DataType | None") -> "pa.Schema":
        """Return the columns of a file."""
        import pyarrow as pa

        fields = [] if self.id_column is None else [pa.field(self.id_column, ids)]
        for columns in self.columns:
            kind = pa.from_numpy_dtype(np.dtype(columns.dtype))
            fields += [pa.field(name, kind, nullable=False) for name in columns.names]
        return pa.schema(fields, metadata={b"dkfm": _about(chunk)})


def _about(chunk: Chunk) -> bytes:
    return json.dumps({"chunk": chunk.number, "rows": chunk.rows}).encode()


class _TableFile:
    """The file of one chunk."""

    def __init__(self, form: ParquetChunks, chunk: Chunk, file: CheckedFile) -> None:
        self._form, self._chunk, self._file = form, chunk, file
        self._writer: ParquetWriter | None = None
        self._invalid: list[npt.NDArray[np.bool_]] = []

    def add(self, piece: Piece) -> None:
        """Write some rows, as one row group."""
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        schema = self._form.schema(self._chunk, None if piece.ids is None else piece.ids.type)
        if self._writer is None:
            self._writer = ParquetWriter(
                self._file,
                schema,
                compression="none",
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            )
        scores = [piece.scores[columns.output] for columns in self._form.columns]
        columns = [pa.array(values[:, i]) for values in scores for i in range(values.shape[1])]
        table = pa.Table.from_arrays([*([] if piece.ids is None else [piece.ids]), *columns], schema=schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._invalid.append(np.logical_or.reduce([invalid_rows(values) for values in scores]))

    def end(self) -> None:
        """Write the footer."""
        rows = sum(map(len, self._invalid))
        if self._writer is None or rows != self._chunk.rows:
            raise AssertionError(f"{rows} rows are not the {self._chunk.rows} of {self._file.new.name}.")
        self._writer.close()

    def release(self) -> None:
        """Let the writer go, whatever became of the file."""
        if self._writer is not None:
            self._writer.close()

    def keep(self, *, once: bool) -> bool:
        """Give the file its name."""
        return self._file.new.keep(once=once)

    @property
    def contents(self) -> ChunkContents:
        """What it holds."""
        return ChunkContents(self._file.checksum, self._file.size, np.concatenate(self._invalid))
