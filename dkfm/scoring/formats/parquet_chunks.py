"""Write chunks of scores as a folder of Parquet files, one file for each chunk."""

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import choose_row_group_rows
from dkfm.errors import MissingExtraError
from dkfm.files.arrow_files import reopen_natively
from dkfm.numerics import links
from dkfm.scoring.formats.chunk_files import (
    Chunk,
    ChunkFile,
    FileSummary,
    OutputColumns,
    Piece,
    ReadBackWriter,
    compute_checksum_and_size,
    compute_invalid_mask,
)
from dkfm.scoring.formats.label_column import Label, labels_to_codes, make_label_array
from dkfm.storage.output_files import OutputLocation

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

_BUFFER_BYTES = 2**20
"""Bytes that Arrow collects before it writes them."""

_MAX_NULL_ROWS = 2**28
"""Largest number of rows of a file smaller than its scores; null rows take no bytes, so any file could claim them."""

_VIEWS = {"string_view": "large_string", "binary_view": "large_binary"}
"""Types with the same values as the types of views."""

_CHECKED_VALUES = 2**20
"""Values of a file that are decoded at a time; each 8 bytes of a label count as one."""


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
    """Chunks as Parquet files without compression and with page checksums; equal rows give equal bytes.

    The columns of an output are null in its invalid rows; in earlier versions they are NaN, or a negative code.
    """

    output_location: OutputLocation
    columns: tuple[OutputColumns, ...]
    id_column: str | None = None
    classes: tuple[Label, ...] = ()
    """Labels in place of the codes of classes; empty if there are no codes, or the files have them as they are."""

    @cached_property
    def labels(self) -> "pa.Array | None":
        """Labels of the classes as the files have them; None if there are none."""
        return make_label_array(self.classes) if self.classes else None

    def find_labels(self, columns: OutputColumns) -> "pa.Array | None":
        """Return the labels that stand for the codes of an output; None if the files have its numbers as they are."""
        return self.labels if columns.has_codes else None

    @property
    def names(self) -> list[str]:
        """Names of the columns of a file: the ids, if any, then the scores."""
        scores = [name for columns in self.columns for name in columns.names]
        return scores if self.id_column is None else [self.id_column, *scores]

    @property
    def repeating_names(self) -> list[str]:
        """Names of the columns whose few values the files list once."""
        return [name for columns in self.columns if self.find_labels(columns) is not None for name in columns.names]

    @property
    def row_bytes(self) -> int:
        """Bytes of the scores of a row; labels are as long as the longest."""
        longest = max((len(str(label).encode()) for label in self.classes), default=0)
        codes = sum(columns.has_codes for columns in self.columns)
        return sum(columns.row_bytes for columns in self.columns) + codes * longest

    def file_names(self, number: int) -> list[str]:
        """Return the name of the file of a chunk."""
        return [file_name(number)]

    @property
    def folder_names(self) -> list[str]:
        """Names of the folders of chunks: none, their files are in the folder of the output."""
        return []

    def begin_chunk_files(self, chunk: Chunk, stack: ExitStack) -> list[ChunkFile]:
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
            with (
                reopen_natively(stream) as opened,
                ParquetFile(opened, page_checksum_verification=True, pre_buffer=False) as table,
            ):
                schema = table.schema_arrow
                if schema.names != self.names or (schema.metadata or {}).get(b"dkfm") != _chunk_metadata(chunk):
                    return None
                if not self.has_types(schema):
                    return None
                most = max(_MAX_NULL_ROWS, stream.seek(0, os.SEEK_END) // self.row_bytes)
                if table.metadata.num_rows != chunk.rows or chunk.rows > most:
                    return None
                rows = max(1, _CHECKED_VALUES // max(len(self.names), self.row_bytes // 8))
                invalid += [self._find_invalid_rows(batch) for batch in table.iter_batches(rows, use_threads=False)]
            stream.seek(0)
            checksum, size = compute_checksum_and_size(stream)
            contents = FileSummary(checksum, size, np.concatenate(invalid))
        except (OSError, ValueError, KeyError, pa.ArrowException):
            return None
        return contents if len(contents.invalid_mask) == chunk.rows else None

    def has_types(self, schema: "pa.Schema") -> bool:
        """Return whether the columns of scores of a file are of their types."""
        return all(
            schema.field(name).type == self._find_type(columns) for columns in self.columns for name in columns.names
        )

    def _find_invalid_rows(self, rows: "pa.RecordBatch") -> npt.NDArray[np.bool_]:
        """Return which rows are invalid; raise a ValueError if a column has a label that is no class."""
        invalid = np.zeros(rows.num_rows, np.bool_)
        for columns in self.columns:
            for name in columns.names:
                invalid |= compute_invalid_mask(self.read_scores(rows.column(name), columns)[:, np.newaxis])
        return invalid

    def encode_trailer(self, crc32c: int) -> bytes:
        """Return the last bytes of every Parquet file."""
        return b"PAR1"

    def build_schema(self, chunk: Chunk, ids: "pa.DataType | None") -> "pa.Schema":
        """Return the schema of the file of a chunk; `ids` is the type of the ids, not their values; None if none."""
        import pyarrow as pa

        fields = [] if self.id_column is None else [pa.field(self.id_column, ids)]
        for columns in self.columns:
            fields += [pa.field(name, self._find_type(columns)) for name in columns.names]
        return pa.schema(fields, metadata={b"dkfm": _chunk_metadata(chunk)})

    def _find_type(self, columns: OutputColumns) -> "pa.DataType":
        """Return the type of the columns of an output."""
        import pyarrow as pa

        labels = self.find_labels(columns)
        return pa.from_numpy_dtype(np.dtype(columns.dtype)) if labels is None else labels.type

    def encode_column(
        self, values: npt.NDArray[np.generic], columns: OutputColumns, invalid: npt.NDArray[np.bool_]
    ) -> "pa.Array":
        """Return a column (n,) of an output as the files have it, null in invalid rows."""
        import pyarrow as pa

        encoded, labels = pa.array(values, mask=invalid if invalid.any() else None), self.find_labels(columns)
        return encoded if labels is None else labels.take(encoded)

    def read_scores(self, column: "pa.Array | pa.ChunkedArray", columns: OutputColumns) -> npt.NDArray[np.generic]:
        """Return a column (n,) of an output with NaN in place of nulls, or the codes of its labels, -1 for null."""
        labels = self.find_labels(columns)
        if labels is not None:
            return labels_to_codes(column, labels)
        return np.asarray(column.fill_null(links.NO_CODE if columns.has_codes else np.nan))


def to_pandas_exactly(column: "pa.ChunkedArray", *, nullable: bool = False) -> "pd.Series[object]":
    """Return ids or labels (n,) as pandas keeps them exactly.

    Integers and booleans are of pandas' nullable dtypes where some are null, or if `nullable` is set.
    Types for which pandas has no dtype, such as dates, decimals and bytes, keep Arrow's, because dask would convert
    them to text.
    """
    import pandas as pd
    import pyarrow as pa
    from pyarrow import types

    dtype = column.type
    if types.is_integer(dtype) or types.is_boolean(dtype):
        if not (column.null_count or nullable):
            return column.to_pandas()
        names = {pa.bool_(): "boolean", pa.uint8(): "UInt8", pa.uint16(): "UInt16", pa.uint32(): "UInt32"}
        names |= {pa.uint64(): "UInt64"}
        extension = pd.api.types.pandas_dtype(names.get(dtype, str(dtype).capitalize()))
        return pd.Series(extension.__from_arrow__(column))
    if str(dtype) in _VIEWS:  # dask's data frames cannot take their elements
        column = column.cast(_VIEWS[str(dtype)])
        dtype = column.type
    own = (types.is_floating, types.is_string, types.is_large_string, types.is_timestamp, types.is_duration)
    if types.is_dictionary(dtype) or any(is_own(dtype) for is_own in own):
        return column.to_pandas()
    return pd.Series(pd.ArrowDtype(dtype).__from_arrow__(column))


def ids_to_numpy(column: "pa.ChunkedArray") -> npt.NDArray[np.generic]:
    """Return a column of ids (n,); integers with nulls become objects, because floats would not be exact."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_integer(column.type) and column.null_count:
        return np.array(column.to_pylist(), dtype=object)
    values: npt.NDArray[np.generic] = column.to_numpy()
    return values


def _chunk_metadata(chunk: Chunk) -> bytes:
    return json.dumps({"chunk": chunk.number, "rows": chunk.rows}).encode()


class _ParquetChunkFile:
    """The Parquet file of a chunk that is being written; pieces of few rows are collected into one row group."""

    def __init__(self, chunk_format: ParquetChunks, chunk: Chunk, file: ReadBackWriter) -> None:
        self._format, self._chunk, self._file = chunk_format, chunk, file
        self._stream: pa.BufferedOutputStream | None = None
        self._writer: ParquetWriter | None = None
        self._invalid: list[npt.NDArray[np.bool_]] = []
        """Which rows of each row group that is written are invalid."""
        self._group_rows = min(chunk.rows, choose_row_group_rows(chunk_format.row_bytes))
        self._collected = 0
        """Rows of the row group that is being collected."""
        self._values: list[npt.NDArray[np.generic]] = []
        """Columns (width, rows) of each output of that row group, of which `_collected` rows are filled."""
        self._ids: list[pa.Array] = []

    def write_piece(self, piece: Piece) -> None:
        """Collect some rows; first write the collected rows as a row group if it would otherwise become too large."""
        scores = [piece.scores[columns.output] for columns in self._format.columns]
        rows = len(scores[0])
        if self._collected + rows > self._group_rows:
            self._write_group()
        if not self._values or self._values[0].shape[1] < self._collected + rows:
            capacity = max(rows, self._group_rows)
            self._values = [np.empty((values.shape[1], capacity), values.dtype) for values in scores]
        for collected, values in zip(self._values, scores, strict=True):
            collected[:, self._collected : self._collected + rows] = values.T
        self._collected += rows
        self._ids += [] if piece.ids is None else [piece.ids]

    def _write_group(self) -> None:
        """Write the rows that are collected, if any, as a row group."""
        import pyarrow as pa

        if not self._collected:
            return
        rows, self._collected = self._collected, 0
        ids, self._ids = [pa.chunked_array(self._ids)] if self._ids else [], []
        masks = [compute_invalid_mask(values[:, :rows].T) for values in self._values]
        self._invalid.append(np.logical_or.reduce(masks))
        columns = [
            self._format.encode_column(column[:rows], entry, mask)
            for entry, values, mask in zip(self._format.columns, self._values, masks, strict=True)
            for column in values
        ]
        schema = self._format.build_schema(self._chunk, ids[0].type if ids else None)
        writer = self._writer or self._open_writer(schema)
        writer.write_table(pa.Table.from_arrays([*ids, *columns], schema=schema), row_group_size=rows)

    def _open_writer(self, schema: "pa.Schema") -> "ParquetWriter":
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        # Arrow writes the header and the values of each page separately, so without a buffer with two calls of Python.
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._file, "w"), _BUFFER_BYTES)
        self._writer = ParquetWriter(
            self._stream,
            schema,
            compression="none",
            use_dictionary=self._format.repeating_names or False,
            write_statistics=False,
            write_page_checksum=True,
        )
        return self._writer

    def finish(self) -> None:
        """Write the last row group and the footer."""
        self._write_group()
        rows = sum(map(len, self._invalid))
        if self._writer is None or rows != self._chunk.rows:
            raise AssertionError(f"{rows} rows are not the {self._chunk.rows} of {self._file.new.name}.")
        self.close_writer()

    def close_writer(self) -> None:
        """Write the footer and what is buffered, even if the file is not finished."""
        if self._writer is not None and self._stream is not None:
            self._writer.close()
            self._stream.close()

    def commit(self, *, exclusive: bool) -> bool:
        """Give the file its final name."""
        return self._file.new.commit(exclusive=exclusive)

    @property
    def summary(self) -> FileSummary:
        """Summary of the file."""
        return FileSummary(self._file.checksum, self._file.size, np.concatenate(self._invalid))
