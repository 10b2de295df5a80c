"""Lay out the rows and columns of a Parquet table, from the footers of its files, and open its files.

Footers are checked against each other and against the request.
"""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dkfm.core.display.quantities import format_names
from dkfm.core.frames import describe_known_names
from dkfm.errors import InvalidInputError
from dkfm.files.arrow_files import RangeReader, reopen_natively
from dkfm.sources.parquet_files import footers, schemas
from dkfm.sources.parquet_files.footers import FileFooter
from dkfm.sources.parquet_files.listing import TableFile, TableFiles, find_partition_value
from dkfm.sources.parquet_files.schemas import pa, pq

_MAX_ROWS = 2**48
"""Largest number of rows of a table."""

_THREADS = 8
"""Number of footers that are read concurrently, because each takes several requests on an object store."""


@dataclass(frozen=True)
class TableLayout:
    """The rows and columns of a table, from the footers of its files.

    Attributes
    ----------
    files : tuple of TableFile
        Files of the table.
    first_rows : ndarray of shape (row groups + 1,)
        First row of each row group that has rows, and at the end the number of all rows.
    file_indices, group_indices : ndarray of shape (row groups,)
        Index in `files` of the file of each row group, and index of the row group in that file.
    columns : tuple of str
        Names of the columns that are read.
    first_file_column_indices : tuple of int, range or None
        Indices of these columns in the first file; None for the default columns.
    all_float32 : bool
        Whether all these columns are float32 in all files.
    id_type : pyarrow.DataType or None
        Type of the ids, if they are requested.
    partition_ids : tuple of (str or None) or None
        Ids of all rows of each file, if the ids are the values of a partition; None if they are a column of the files.
    kept_footers : tuple of (pyarrow.parquet.FileMetaData or None)
        Footer of each file, so that it is not read again with the rows; None if it is too large to be kept.
    footer_cache_bytes : int
        Memory of these footers, and of others that a process caches, in bytes.
    file_with_missing_ids : str or None
        Name of the first file whose footer or partition shows that rows have no ids.
    """

    files: tuple[TableFile, ...]
    first_rows: npt.NDArray[np.int64]
    file_indices: npt.NDArray[np.intp]
    group_indices: npt.NDArray[np.intp]
    columns: tuple[str, ...]
    first_file_column_indices: tuple[int, ...] | range | None
    all_float32: bool
    id_type: "pa.DataType | None"
    partition_ids: tuple[str | None, ...] | None
    kept_footers: tuple["pq.FileMetaData | None", ...]
    footer_cache_bytes: int
    file_with_missing_ids: str | None = None

    def find_group(self, row: int) -> int:
        """Return the index of the row group that contains a row."""
        return int(np.searchsorted(self.first_rows, row, side="right")) - 1

    def count_group_rows(self, group: int) -> int:
        """Return the number of rows of a row group."""
        return int(self.first_rows[group + 1] - self.first_rows[group])

    def group_file(self, group: int) -> TableFile:
        """Return the file that contains a row group."""
        return self.files[int(self.file_indices[group])]

    def group_footer(self, group: int) -> "pq.FileMetaData":
        """Return the footer of the file that contains a row group."""
        index = int(self.file_indices[group])
        return self.kept_footers[index] or footers.cached_metadata(self.files[index])

    def file_first_row(self, group: int) -> int:
        """Return the first row of the file that contains a row group."""
        return int(self.first_rows[np.searchsorted(self.file_indices, self.file_indices[group])])


class OpenedFile(NamedTuple):
    """A file of a table, and the prefetching reader of an object; None for a local file, which is read on demand."""

    parquet: "pq.ParquetFile"
    column_indices: dict[str, int]
    """Indices of the columns by their paths."""
    reader: RangeReader | None


@contextmanager
def open_parquet_file(
    table: TableLayout, group: int, *, is_small: bool = False, dictionary_column: str | None = None
) -> Iterator[OpenedFile]:
    """Open the file of a row group; raise an InvalidInputError if it is damaged, or changes after it was listed.

    Parameters
    ----------
    table : TableLayout
        Files of the table.
    group : int
        Number of the row group in the table.
    is_small : bool
        Whether Arrow may read the file without Python; it does not return its own memory to the system at once.
    dictionary_column : str, optional
        Name of a text column that is read as a dictionary array, so that equal values are stored once.
    """
    file = table.group_file(group)
    with footers.parquet_errors(file), file.open() as source:
        reader = RangeReader(source, file.size) if file.is_remote else None
        with (
            nullcontext(reader or source) if reader or not is_small else reopen_natively(source) as opened,
            pq.ParquetFile(
                opened,
                metadata=table.group_footer(group),
                read_dictionary=None if dictionary_column is None else [dictionary_column],
                page_checksum_verification=True,
                pre_buffer=False,  # see `arrow_files`
            ) as parquet,
        ):
            schema = parquet.metadata.schema
            yield OpenedFile(parquet, {schema.column(i).path: i for i in range(len(schema))}, reader)


def read_layout_with_stamp(
    table: TableFiles,
    requested: Sequence[str | int] | None,
    id_column: str | None,
    expected_stamp: str | None = None,
    excluded: Sequence[str] = (),
) -> tuple[str, TableLayout]:
    """Return the stamp and the footers of a table.

    Parameters
    ----------
    table : TableFiles
        Files of the table.
    requested : sequence of str or int, optional
        Columns, by name or by index in the first file; by default all of that file but ids, index and `excluded`.
    id_column : str, optional
        Name of the column of ids, or of the key of the partition folders.
    expected_stamp : str, optional
        Stamp that the table must have.

    Raises
    ------
    InvalidInputError
        The table changed, or its files, columns or rows are not those of a table of numbers.
    """
    stamp, files = table.list_with_stamp()
    if expected_stamp not in (None, stamp):
        raise InvalidInputError(f"{table} changed since it was opened; open it again.")
    first = footers.read_footer(files[0], None).schema
    partition_ids = _find_partition_ids(files, first, id_column)
    file_id_column = id_column if partition_ids is None else None
    columns = _choose_columns(table, files, first, requested, id_column, excluded)
    groups, kept = _RowGroups(), _KeptFooters()
    without_ids = [str(file) for file, value in zip(files, partition_ids or (), strict=False) if value is None]
    all_float32 = True
    with closing(_read_footers(files, file_id_column)) as read:
        for index, (file, footer) in enumerate(read):
            kept.add(footer)
            groups.add(index, footer.group_rows)
            without_ids += [str(file)] * footer.has_null_ids
            if index == 0 or not footer.schema.equals(first):
                schemas.require_ids(footer.schema, first, file_id_column, file.location)
                may_be_empty = index > 0 or requested is not None
                all_float32 &= schemas.require_numbers(footer.schema, columns, file.location, may_be_empty)
                if requested is None:
                    _require_no_more_columns(file, footer.schema, files[0], columns, (id_column, *excluded))
    total = sum(groups.rows)
    if not 0 < total <= _MAX_ROWS:
        raise InvalidInputError(f"{table} needs at least one row, and at most 2**48, and has {total}.")
    indices = None if requested is None and not excluded else _compact_indices([*map(first.names.index, columns)])
    column_id_type = None if id_column is None or partition_ids else schemas.id_value_type(first, id_column)
    return stamp, TableLayout(
        files=files,
        first_rows=np.array([*accumulate(groups.rows, initial=0)], np.int64),
        file_indices=np.array(groups.file_indices, np.intp),
        group_indices=np.array(groups.group_indices, np.intp),
        columns=columns,
        first_file_column_indices=indices,
        all_float32=all_float32,
        id_type=pa.string() if partition_ids else column_id_type,
        partition_ids=partition_ids,
        kept_footers=tuple(kept.footers),
        footer_cache_bytes=kept.count_bytes(),
        file_with_missing_ids=next(iter(without_ids), None),
    )


@dataclass
class _RowGroups:
    """Row groups that have rows, of the files read so far."""

    rows: list[int] = field(default_factory=list)
    file_indices: list[int] = field(default_factory=list)
    group_indices: list[int] = field(default_factory=list)

    def add(self, file_index: int, group_rows: Sequence[int]) -> None:
        """Add those of a file, from the numbers of rows of all its row groups."""
        nonempty = [number for number, count in enumerate(group_rows) if count]
        self.rows += [group_rows[number] for number in nonempty]
        self.file_indices += [file_index] * len(nonempty)
        self.group_indices += nonempty


@dataclass
class _KeptFooters:
    """Footers of the files read so far, None for each that is too large to be kept, and their sizes in bytes."""

    footers: "list[pq.FileMetaData | None]" = field(default_factory=list)
    kept_bytes: int = 0
    largest_other: int = 0

    def add(self, footer: FileFooter) -> None:
        """Add the footer of a file."""
        self.footers.append(footer.metadata)
        if footer.metadata is None:
            self.largest_other = max(self.largest_other, footer.bytes)
        else:
            self.kept_bytes += footer.bytes

    def count_bytes(self) -> int:
        """Return the memory of the footers that are kept, and of others that a process caches."""
        return self.kept_bytes + self.largest_other * min(footers.CACHED_FOOTERS, self.footers.count(None))


def _choose_columns(
    table: TableFiles,
    files: Sequence[TableFile],
    first: "pa.Schema",
    requested: Sequence[str | int] | None,
    id_column: str | None,
    excluded: Sequence[str],
) -> tuple[str, ...]:
    """Return the names of the columns to read, for the request that `read_layout_with_stamp` takes."""
    for name in excluded:
        if name not in first.names and _find_partition_ids(files, first, name) is None:
            known = describe_known_names([name], first.names)
            raise InvalidInputError(f"{files[0].location} has no {format_names([name])}; {known}.")
    if requested is None:
        columns = schemas.default_columns(first, (id_column, *excluded))
    else:
        columns = tuple(first.names[column] if isinstance(column, int) else column for column in requested)
    if not columns:
        raise InvalidInputError(f"{table} needs at least one column of numbers, and none is asked for or there.")
    return columns


def _read_footers(
    files: Sequence[TableFile], id_column: str | None
) -> Generator[tuple[TableFile, FileFooter], None, None]:
    """Yield each file with its footer."""
    read = partial(footers.read_footer, id_column=id_column, kept_bytes=footers.KEPT_FOOTER_BYTES // len(files))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dkfm-footers") as pool:
        # For files on disk, threads would only wait for each other.
        yield from zip(files, (pool.map if files[0].is_remote else map)(read, files), strict=True)


def _require_no_more_columns(
    file: TableFile, schema: "pa.Schema", first_file: TableFile, columns: Sequence[str], hidden: Sequence[str | None]
) -> None:
    """Raise an InvalidInputError if a file has columns of features that the first file does not have."""
    if more := sorted({*schemas.default_columns(schema, hidden)} - {*columns}):
        raise InvalidInputError(
            f"{file} has {format_names(more)}, which {first_file} has not; name columns (--columns)."
        )


def _find_partition_ids(
    files: Sequence[TableFile], first: "pa.Schema", id_column: str | None
) -> tuple[str | None, ...] | None:
    """Return the value of a partition in the name of each file; None if the ids are in a column, or missing."""
    if id_column is None or id_column in first.names:
        return None
    try:
        return tuple(find_partition_value(file.name, id_column) for file in files)
    except KeyError:
        return None


def _compact_indices(indices: list[int]) -> tuple[int, ...] | range:
    consecutive = range(indices[0], indices[0] + len(indices))
    return consecutive if list(consecutive) == indices else tuple(indices)
