"""Read and validate the footers of a Parquet table: its files, its columns, and the rows of its row groups.

Footers are untrusted: they are checked against each other and against the request before any page is decoded.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dkfm.core.frames import describe_known_names, format_names, require_unique_names
from dkfm.errors import DkfmError, InvalidInputError, MissingExtraError, UnreachableError, extract_reason
from dkfm.files.arrow_files import RangeReader, reopen_natively
from dkfm.files.local import ReadSizeLimitedReader
from dkfm.files.location import Location, open_unbuffered
from dkfm.sources.parquet_files.listing import TableFile, TableFiles, find_partition_value

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import compute, types
except ImportError as error:
    raise MissingExtraError("Parquet files need pyarrow; install it with pip install 'dkfm[dataframe]'.") from error

__all__ = [  # listed, because other modules import pyarrow from here
    "TableLayout",
    "compute",
    "dictionary_decode_ids",
    "open_parquet_file",
    "pa",
    "pq",
    "read_layout_with_stamp",
    "require_ids",
    "types",
]

_MAX_ROWS = 2**48
"""Largest number of rows of a table."""

_MAX_FOOTER_BYTES = 2**27
"""Largest size of the footer of a file."""

KEPT_FOOTER_BYTES = 2**25
"""Most memory of the footers that are kept with the layout of a table: each may take its share of it."""

_CACHED_FOOTERS = 4
"""Files whose footers a process caches, of those that are not kept."""

_FOOTER_BYTES = 10_000
"""Constant part of the memory of a footer."""

_COLUMN_CHUNK_BYTES = 2_000
"""Part of this memory for each column of each row group; 1,000 to 2,000 were measured."""

_THREADS = 8
"""Footers of objects that are read concurrently, because each takes several requests on an object store."""


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
        Name of the first file whose footer, or partition, says that rows have no ids.
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

    def group_slice(self, group: int) -> slice:
        """Return the rows of a row group, as a slice of the table."""
        return slice(int(self.first_rows[group]), int(self.first_rows[group + 1]))

    def group_file(self, group: int) -> TableFile:
        """Return the file that contains a row group."""
        return self.files[int(self.file_indices[group])]

    def group_footer(self, group: int) -> "pq.FileMetaData":
        """Return the footer of the file that contains a row group."""
        index = int(self.file_indices[group])
        return self.kept_footers[index] or _cached_metadata(self.files[index])

    def file_first_row(self, group: int) -> int:
        """Return the first row of the file that contains a row group."""
        return int(self.first_rows[np.searchsorted(self.file_indices, self.file_indices[group])])


class OpenedFile(NamedTuple):
    """A file of a table, and what reads an object in advance; None for a file, which is read while it is decoded."""

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
        Whether the file may be read without Python: Arrow's own memory is not given back to the system at once.
    dictionary_column : str, optional
        Name of a text column that is read as a dictionary array, so that equal values are stored once.
    """
    file = table.group_file(group)
    with _parquet_errors(file), file.open() as source:
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


@contextmanager
def _parquet_errors(file: TableFile) -> Iterator[None]:
    """Raise an InvalidInputError if a file is damaged, or is not the one listed after the context."""
    try:
        yield
    except DkfmError as error:
        if file.is_remote and not isinstance(error, UnreachableError):
            file.require_same()  # it may be gone, or shorter
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        file.require_same()
        raise InvalidInputError(f"{file} cannot be read as a Parquet file: {extract_reason(error)}.") from error
    file.require_same()  # an object is read with several requests, and an open file may be overwritten


def _read_metadata(file: TableFile) -> "pq.FileMetaData":
    """Read the footer of a file, with a limit on the size that the file declares."""
    with ReadSizeLimitedReader(open_unbuffered(file.location, file.size), _MAX_FOOTER_BYTES) as source:
        metadata = pq.read_metadata(source)
    file.require_same()
    return metadata


_cached_metadata = lru_cache(maxsize=_CACHED_FOOTERS)(_read_metadata)


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
    first = _read_footer(files[0], None).schema
    partition_ids = _find_partition_ids(files, first, id_column)
    file_id_column = id_column if partition_ids is None else None
    hidden = id_column, *excluded
    for name in excluded:
        if name not in first.names and _find_partition_ids(files, first, name) is None:
            known = describe_known_names([name], first.names)
            raise InvalidInputError(f"{files[0].location} has no {format_names([name])}; {known}.")
    if requested is None:
        columns = _default_columns(first, hidden)
    else:
        columns = tuple(first.names[column] if isinstance(column, int) else column for column in requested)
    if not columns:
        raise InvalidInputError(f"{table} needs at least one column of numbers, and none is asked for or there.")
    counts: list[int] = []
    file_indices, group_indices = list[int](), list[int]()
    without_ids = [str(file) for file, value in zip(files, partition_ids or (), strict=False) if value is None]
    kept: list[pq.FileMetaData | None] = []
    all_float32, largest, kept_bytes = True, 0, 0
    read = partial(_read_footer, id_column=file_id_column, kept_bytes=KEPT_FOOTER_BYTES // len(files))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dkfm-footers") as pool:
        # Threads only wait for each other where files are on disk.
        footers = (pool.map if files[0].is_remote else map)(read, files)
        for file_index, (file, footer) in enumerate(zip(files, footers, strict=True)):
            metadata, schema, rows, size, has_null_ids = footer
            kept.append(metadata)
            largest, kept_bytes = (max(largest, size), kept_bytes) if metadata is None else (largest, kept_bytes + size)
            without_ids += [str(file)] * has_null_ids
            if file_index == 0 or not schema.equals(first):
                require_ids(schema, first, file_id_column, file.location)
                all_float32 &= _require_numbers(schema, columns, file.location, file_index > 0 or requested is not None)
                if requested is None and (more := sorted({*_default_columns(schema, hidden)} - {*columns})):
                    raise InvalidInputError(f"{file} has {format_names(more)}, which {files[0]} has not; name columns.")
            nonempty = [number for number, count in enumerate(rows) if count]
            counts += [rows[number] for number in nonempty]
            file_indices += [file_index] * len(nonempty)
            group_indices += nonempty
    if not 0 < sum(counts) <= _MAX_ROWS:
        raise InvalidInputError(f"{table} needs at least one row, and at most 2**48, and has {sum(counts)}.")
    first_rows = np.array([*accumulate(counts, initial=0)], np.int64)
    places = None if requested is None and not excluded else _compact_indices([*map(first.names.index, columns)])
    indices = np.array(file_indices, np.intp), np.array(group_indices, np.intp)
    id_type = pa.string() if partition_ids else None if id_column is None else _id_value_type(first, id_column)
    footer_bytes = kept_bytes + largest * min(_CACHED_FOOTERS, kept.count(None))
    return stamp, TableLayout(
        *(files, first_rows, *indices, columns, places, all_float32, id_type, partition_ids, tuple(kept), footer_bytes),
        next(iter(without_ids), None),
    )


def _find_partition_ids(
    files: Sequence[TableFile], first: "pa.Schema", id_column: str | None
) -> tuple[str | None, ...] | None:
    """Return the value of a partition in the name of each file; None if the ids are a column, or nowhere."""
    if id_column is None or id_column in first.names:
        return None
    try:
        return tuple(find_partition_value(file.name, id_column) for file in files)
    except KeyError:
        return None


class _FileFooter(NamedTuple):
    """What the footer of one file says."""

    metadata: "pq.FileMetaData | None"
    """The footer itself, if it is small enough to be kept."""
    schema: "pa.Schema"
    group_rows: list[int]
    bytes: int
    """Memory of the footer."""
    has_null_ids: bool


def _read_footer(file: TableFile, id_column: str | None, kept_bytes: int = 0) -> _FileFooter:
    """Read the footer of a file, and keep it if it takes at most some bytes: so none waits for those of other files."""
    with _parquet_errors(file):
        metadata = _read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
        _ = schema.names  # raises an error if a name is not text
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        has_null_ids = id_column is not None and _has_nulls(metadata, id_column)
    declared, total = metadata.num_rows, sum(rows)
    if min(rows, default=0) < 0 or declared != total:
        raise InvalidInputError(f"{file} is damaged: it says {declared} rows, its row groups {total}.")
    size = _FOOTER_BYTES + _COLUMN_CHUNK_BYTES * metadata.num_columns * metadata.num_row_groups
    return _FileFooter(metadata if size <= kept_bytes else None, schema, rows, size, has_null_ids)


def _has_nulls(metadata: "pq.FileMetaData", name: str) -> bool:
    """Return whether the footer of a file says that a column has nulls."""
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    if name not in paths:
        return False  # a nested column
    index = paths.index(name)
    found = (metadata.row_group(number).column(index).statistics for number in range(metadata.num_row_groups))
    return any(one is not None and one.has_null_count and one.null_count > 0 for one in found)


def _compact_indices(indices: list[int]) -> tuple[int, ...] | range:
    consecutive = range(indices[0], indices[0] + len(indices))
    return consecutive if list(consecutive) == indices else tuple(indices)


def _default_columns(schema: "pa.Schema", hidden: Sequence[str | None]) -> tuple[str, ...]:
    """Return all columns but those hidden and the index of a data frame, which pandas does not count as a column."""
    left_out = {*hidden, *_index_columns(schema)}
    return tuple(name for name in schema.names if name not in left_out)


def _index_columns(schema: "pa.Schema") -> list[str]:
    try:
        index_columns = schema.pandas_metadata["index_columns"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # not written by pandas, or its metadata are not valid JSON
    return [name for name in index_columns if isinstance(name, str)] if isinstance(index_columns, list) else []


def _require_numbers(schema: "pa.Schema", columns: tuple[str, ...], path: Location, may_be_empty: bool) -> bool:
    """Raise an error unless each column occurs once and has numbers, or nulls alone; return whether all are float32."""
    require_unique_names(schema.names, f"{path} has")
    column_types = {field.name: field.type for field in schema}
    if missing := [name for name in columns if name not in column_types]:
        is_key = any(f"/{name}=" in str(path) for name in missing)
        hint = " (keys of folders are no features, but may be the id_column)" if is_key else ""
        known = describe_known_names(missing, schema.names)
        raise InvalidInputError(f"{path} has no {format_names(missing)}{hint}; {known}.")
    if wrong := [name for name in columns if not _is_number(column_types[name], may_be_empty)]:
        raise InvalidInputError(
            f"{path} has {format_names(wrong)} of type {column_types[wrong[0]]!s:.100}, and features are numbers or "
            "booleans; leave such columns out (columns=, --columns, --exclude-columns), or name ids (id_column=, "
            "--id-column) or labels (--label-column)."
        )
    return all(types.is_float32(column_types[name]) for name in columns)


def _is_number(dtype: "pa.DataType", may_be_empty: bool) -> bool:
    kinds = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal
    return any(is_kind(dtype) for is_kind in kinds) or (may_be_empty and types.is_null(dtype))


def require_ids(
    schema: "pa.Schema", first_schema: "pa.Schema", id_column: str | None, path: Location | str
) -> "pa.DataType | None":
    """Raise an InvalidInputError unless the id column exists, and all files have one plain type or text; return it."""
    if id_column is None:
        return None
    if id_column not in schema.names:
        known = describe_known_names([id_column], schema.names)
        raise InvalidInputError(f"{path} has no {format_names([id_column])} for ids or labels; {known}.")
    dtype, expected = _id_value_type(schema, id_column), _id_value_type(first_schema, id_column)
    if types.is_nested(dtype) or types.is_dictionary(dtype) or isinstance(dtype, pa.BaseExtensionType):
        raise InvalidInputError(
            f"The column {id_column!r} of {path} holds {dtype!s:.100}, and must hold plain numbers, text or times."
        )
    if dtype != expected and not {dtype, expected} <= {pa.string(), pa.large_string()}:
        raise InvalidInputError(
            f"The column {id_column!r} of {path} holds {dtype!s:.100}, and that of the first file {expected!s:.100}; "
            "ids and labels are of one type in all files."
        )
    return dtype


def _id_value_type(schema: "pa.Schema", id_column: str) -> "pa.DataType":
    """Return the type of ids, of categories that of their values."""
    dtype = schema.field(id_column).type
    return dtype.value_type if types.is_dictionary(dtype) else dtype


def dictionary_decode_ids(ids: "pa.Array") -> "pa.Array":
    """Return ids as plain values: categories, which Arrow calls a dictionary, are decoded."""
    return ids.dictionary_decode() if types.is_dictionary(ids.type) else ids
