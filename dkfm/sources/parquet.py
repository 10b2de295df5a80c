"""Read rows of Parquet files: the requested columns, by name, of one file or of all files of a folder.

A folder is one on disk, or a prefix on an object store, from which only the bytes of those columns are requested.

A source is a small value for any number of files, because each process lists them and reads their footers once. It
raises an error if files have changed. A read needs memory for the requested rows, and for the row groups at both ends.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from dkfm.core.chunking import split_by_part
from dkfm.core.frames import validate_columns_argument
from dkfm.core.lru_cache import LruCache
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.files.location import Location
from dkfm.sources import chunk_cache
from dkfm.sources.base import DenseRows
from dkfm.sources.parquet_files import row_groups
from dkfm.sources.parquet_files.footers import KEPT_FOOTER_BYTES
from dkfm.sources.parquet_files.journal import StoredNames
from dkfm.sources.parquet_files.layout import TableLayout, read_layout_with_stamp
from dkfm.sources.parquet_files.listing import TableFiles
from dkfm.sources.parquet_files.schemas import pa

_cached_layouts: LruCache[TableLayout] = LruCache(
    KEPT_FOOTER_BYTES, lambda layout: max(layout.footer_cache_bytes, KEPT_FOOTER_BYTES // 3)
)
"""Layouts of at most four tables: the latest, and up to three others, whose footers together take no more memory than
those of a single table may."""


@dataclass(frozen=True, kw_only=True)
class ParquetSource(DenseRows):
    """Rows of columns of a Parquet file, or of all `*.parquet` files below a folder in the order of their names.

    Files and folders whose names begin with "_" or "." are ignored. The keys of partition folders, such as
    ``country=de``, are not columns, but one of them may hold the ids. Nulls are NaN. A chunk has the size of the
    largest row group, because the rows of a group are decoded together.
    """

    table_files: TableFiles
    """Files of the table."""
    opened_stamp: str
    """Stamp of the files when they were opened."""
    first_file_column_indices: tuple[int, ...] | range | None
    """Indices of the columns in the first file; None for the default columns."""
    id_column: str | None = None
    cache_token: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """Random id of this opening, a key of cached chunks: chunks cached for an earlier opening may be outdated."""

    @classmethod
    def open(
        cls,
        location: Location | TableFiles,
        columns: Sequence[str] | None = None,
        id_column: str | None = None,
        excluded_columns: Sequence[str] = (),
    ) -> "ParquetSource":
        """Return a source from the footers of a file, or of all files of a folder.

        Parameters
        ----------
        location : Path, Remote or TableFiles
            File, folder of files, or pattern of files.
        columns : sequence of str, optional
            Names of the columns to read, in this order; by default those of the first file in its order, without the
            ids and the index of a data frame.
        id_column : str, optional
            Name of a column of numbers, text or times with the ids of the rows, for `read_ids`; or the key of partition
            folders, whose values are text.
        excluded_columns : sequence of str
            Names of other columns that are not read by default.

        Raises
        ------
        InvalidInputError
            A file is not a Parquet file, a column is missing or does not contain numbers, or there are no rows.
        """
        table = location if isinstance(location, TableFiles) else TableFiles.parse(location)
        stamp, layout = read_layout_with_stamp(
            table, validate_columns_argument(columns), id_column, excluded=excluded_columns
        )
        largest_group = int(np.diff(layout.first_rows).max())
        _cached_layouts.get_or_compute((table, stamp, layout.first_file_column_indices, id_column), lambda: layout)
        return cls(
            table.location,
            (int(layout.first_rows[-1]), len(layout.columns)),
            largest_group,
            table_files=table,
            opened_stamp=stamp,
            first_file_column_indices=layout.first_file_column_indices,
            id_column=id_column,
        )

    def with_files(self, names: tuple[str, ...] | StoredNames) -> "ParquetSource":
        """Return a source of some of the files, in the order of their names in `names`."""
        table = replace(self.table_files, names=names)
        columns = None if self.first_file_column_indices is None else self.columns
        return replace(ParquetSource.open(table, columns, self.id_column), keep_float32=self.keep_float32)

    @property
    def name(self) -> str:
        """The given name, or the path or pattern, or the URL without credentials."""
        return self.given_name or str(self.table_files)

    def read_overhead_bytes(self, chunks: int) -> int:
        """Return the bytes that Arrow holds of one row group, whatever the number of chunks."""
        return row_groups.estimate_decoding_bytes(min(self.chunk_rows, self.shape[0]), self.shape[1])

    @property
    def cached_bytes(self) -> int:
        """Bytes of the footers that a process keeps."""
        return self._layout.footer_cache_bytes

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are read."""
        return self._layout.columns

    def stamp(self, *, include_ctime: bool = False) -> str:
        """Return a digest of the names, sizes, and times of change or ETags of the files."""
        return self.table_files.stamp(include_ctime=include_ctime)

    def is_opening_valid(self, current_stamp: str) -> bool:
        """Return whether `current_stamp` is that of the files when they were opened."""
        return current_stamp == self.opened_stamp

    def locate_row(self, row: int) -> tuple[str, int]:
        """Return the name of the file that contains a row, and the row number in that file."""
        table = self._layout
        group = table.find_group(row)
        return self.given_name or str(table.group_file(group)), row - table.file_first_row(group)

    def read(self, rows: slice) -> Array:
        """Return some rows; cache a row group that is read in part."""
        table = self._layout
        start, stop, _ = rows.indices(self.shape[0])
        values = np.empty((max(0, stop - start), self.shape[1]), self._decoded_dtype(table))
        whole: list[tuple[int, Array]] = []
        for group, part in split_by_part(start, stop, table.first_rows):
            shift = int(table.first_rows[group]) - start
            out = values[shift + part.start : shift + part.stop]
            if len(out) == table.count_group_rows(group):
                whole.append((group, out))
            else:
                table.group_file(group).require_same()
                out[...] = chunk_cache.read_cached_part(
                    (self.cache_token, self.keep_float32, group), partial(self._decode_group, group), part
                )
        row_groups.decode_into_arrays(table, whole)
        return values

    def read_ids(self, rows: slice) -> "pa.Array":
        """Return the ids of some rows.

        Raises
        ------
        InvalidInputError
            The source was opened without an id column.
        """
        if self.id_column is None:
            raise InvalidInputError(f"{self.name} was opened without ids; name their column with id_column=.")
        start, stop, _ = rows.indices(self.shape[0])
        return row_groups.read_ids(self._layout, start, stop, self.id_column)

    def find_file_with_missing_ids(self) -> str | None:
        """Return the name of the first file whose footer or partition folder shows that rows have no ids."""
        return self._layout.file_with_missing_ids

    @property
    def _layout(self) -> TableLayout:
        key = (self.table_files, self.opened_stamp, self.first_file_column_indices, self.id_column)
        return _cached_layouts.get_or_compute(
            key,
            lambda: read_layout_with_stamp(
                self.table_files, self.first_file_column_indices, self.id_column, expected_stamp=self.opened_stamp
            )[1],
        )

    def _decoded_dtype(self, layout: TableLayout) -> np.dtype[np.floating]:
        return np.dtype(np.float32 if self.keep_float32 and layout.all_float32 else np.float64)

    def _decode_group(self, group: int) -> Array:
        table = self._layout
        rows = table.count_group_rows(group)
        row_groups.require_max_bytes(8 * rows * self.shape[1], table, group)
        values = np.empty((rows, self.shape[1]), self._decoded_dtype(table))
        row_groups.decode_into_arrays(table, [(group, values)])
        return values
