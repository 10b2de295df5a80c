"""What the files of a Parquet table say of themselves: which files, which columns, which rows in which row group.

Footers are a stranger's: they are checked against each other and against what was asked for before any page is decoded.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from dkfm.core.frames import format_names, require_unique_names
from dkfm.errors import DkfmError, InvalidInputError, MissingExtraError, reason
from dkfm.files.local import BoundedReader
from dkfm.files.location import Location, open_unbuffered
from dkfm.sources import parquet_files
from dkfm.sources.parquet_files import TableFile

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import compute, types
except ImportError as error:
    raise MissingExtraError("Parquet files need pyarrow; install it with pip install 'dkfm[dataframe]'.") from error

# Named, as `parquet` takes pyarrow from here.
__all__ = ["Footers", "compute", "declared_bytes", "open_parquet", "pa", "pq", "read_footers", "require_ids"]

TEXTS = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
"""Kinds of columns whose values may have any length."""

_MAX_ROWS, _MAX_FOOTER = 2**48, 2**27
"""Rows of a table, and bytes of the footer of a file."""

_KEPT, _FOOTER_COPIES = 4, 8
"""Files whose footers a process keeps; and how many times its bytes in the file one takes in memory."""

_AT_ONCE = 8
"""Files whose footers are read at a time: on an object store each takes some requests."""


@dataclass(frozen=True)
class Footers:
    """The rows and columns of a table, from the footers of its files.

    Attributes
    ----------
    files : tuple of File
    first_rows : ndarray of shape (row groups + 1,)
        The first row of each row group that has rows, and after them the number of all rows.
    owners, numbers : ndarray of shape (row groups,)
        The file of each row group, and its number in it.
    columns : tuple of str
        The ones that are read.
    places : tuple of int, range or None
        Where they stand in the first file; None where they were not chosen, and are all that it has.
    all_float32 : bool
        Whether all of them are float32 in all files.
    id_type : pyarrow.DataType or None
        Of the ids, if they are asked for.
    footer_bytes : int
        What the footers that a process keeps take in memory.
    """

    files: tuple[TableFile, ...]
    first_rows: npt.NDArray[np.int64]
    owners: npt.NDArray[np.intp]
    numbers: npt.NDArray[np.intp]
    columns: tuple[str, ...]
    places: tuple[int, ...] | range | None
    all_float32: bool
    id_type: "pa.DataType | None"
    footer_bytes: int

    def group_of(self, row: int) -> int:
        """Return the row group of a row."""
        return int(np.searchsorted(self.first_rows, row, side="right")) - 1

    def rows_of(self, group: int) -> slice:
        """Return the rows of a row group."""
        return slice(int(self.first_rows[group]), int(self.first_rows[group + 1]))

    def file_of(self, group: int) -> TableFile:
        """Return the file of a row group."""
        return self.files[int(self.owners[group])]

    def first_row_of_file(self, group: int) -> int:
        """Return the first row of the file that holds a row group."""
        return int(self.first_rows[np.searchsorted(self.owners, self.owners[group])])


@contextmanager
def open_parquet(file: TableFile, *, again: bool = True, ids: str | None = None) -> Iterator["pq.ParquetFile"]:
    """Open a file that is and stays as it was listed; what fails is one sentence.

    Parameters
    ----------
    file : File
    again : bool
        Whether its footer may be one that was read before.
    ids : str, optional
        A column of texts whose values are read once each, however many rows have them.
    """
    file.require_same()
    try:
        metadata = _kept_metadata(file) if again else _metadata(file)
        with (
            file.open() as source,
            pq.ParquetFile(
                source,
                metadata=metadata,
                read_dictionary=None if ids is None else [ids],
                page_checksum_verification=True,
                pre_buffer=file.far,  # few requests; on a disk a row group is read as it is decoded, not before
                memory_map=False,  # a file that is cut while it is mapped ends the process
            ) as parquet,
        ):
            yield parquet
    except DkfmError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        file.require_same()
        raise InvalidInputError(f"{file} cannot be read as a Parquet file: {reason(error)}.") from error
    file.require_same()  # an object is read in parts, and no open file keeps what it was


def _metadata(file: TableFile) -> "pq.FileMetaData":
    """Read the footer of a file, whose length the file states."""
    with BoundedReader(open_unbuffered(file.location, file.bytes), _MAX_FOOTER) as source:
        found = pq.read_metadata(source)
    file.require_same()
    return found


_kept_metadata = lru_cache(maxsize=_KEPT)(_metadata)


def read_footers(
    path: Location, wanted: Sequence[str | int] | None, id_column: str | None, expected: str | None = None
) -> tuple[str, Footers]:
    """Read the footers of a table, and return its stamp too.

    Parameters
    ----------
    path : Path or Remote
    wanted : sequence of str or int, optional
        Columns, by name or by their place in the first file; by default all of it but ids and index.
    id_column : str, optional
    expected : str, optional
        The stamp that the table must have.

    Raises
    ------
    InvalidInputError
        Files, columns or rows that are not those of a table of numbers.
    """
    found, files = parquet_files.list_files(path)
    if expected not in (None, found):
        raise InvalidInputError(f"{path} changed since it was opened; open it again.")
    first, *_ = _described(files[0])
    if wanted is None:
        columns = _natural(first, id_column)
    else:
        columns = tuple(first.names[column] if isinstance(column, int) else column for column in wanted)
    if not columns:
        raise InvalidInputError(f"{path} needs at least one column of numbers, and none is asked for or there.")
    counts: list[int] = []
    owners: list[int] = []
    numbers: list[int] = []
    all_float32, largest = True, 0
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dkfm-footers") as pool:
        for owner, (file, (schema, rows, size)) in enumerate(zip(files, pool.map(_described, files), strict=True)):
            largest = max(largest, size)
            if owner == 0 or not schema.equals(first):
                all_float32 &= _require_numbers(schema, columns, file.location)
                require_ids(schema, first, id_column, file.location)
                if wanted is None and (more := sorted(set(_natural(schema, id_column)) - set(columns))):
                    raise InvalidInputError(f"{file} has {format_names(more)}, which {files[0]} has not; name columns.")
            held = [number for number, count in enumerate(rows) if count]
            counts += [rows[number] for number in held]
            owners += [owner] * len(held)
            numbers += held
    if not 0 < sum(counts) <= _MAX_ROWS:
        raise InvalidInputError(f"{path} needs at least one row, and at most 2**48, and has {sum(counts)}.")
    first_rows = np.array([*accumulate(counts, initial=0)], np.int64)
    places = None if wanted is None else _compact([first.names.index(name) for name in columns])
    at = np.array(owners, np.intp), np.array(numbers, np.intp)
    id_type = None if id_column is None else first.field(id_column).type
    footer_bytes = _FOOTER_COPIES * largest * min(_KEPT, len(files))
    return found, Footers(files, first_rows, *at, columns, places, all_float32, id_type, footer_bytes)


def _described(file: TableFile) -> tuple["pa.Schema", list[int], int]:
    """Return the columns of a file, the rows of its row groups, and the bytes of its footer."""
    with open_parquet(file, again=False) as parquet:
        schema, metadata = parquet.schema_arrow, parquet.metadata
        _ = schema.names  # those that are no text fail here
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    said, found = metadata.num_rows, sum(rows)
    if min(rows, default=0) < 0 or said != found:
        raise InvalidInputError(f"{file} is damaged: it says {said} rows, its row groups {found}.")
    return schema, rows, int(metadata.serialized_size)


def declared_bytes(metadata: "pq.FileMetaData", number: int, columns: Sequence[str]) -> int:
    """Return how many bytes some columns of a row group are without compression, by the footer; -1 for nonsense."""
    group, wanted = metadata.row_group(number), set(columns)
    found = (group.column(place) for place in range(group.num_columns))
    sizes = [column.total_uncompressed_size for column in found if column.path_in_schema in wanted]
    return -1 if min(sizes, default=0) < 0 else sum(sizes)


def _compact(places: list[int]) -> tuple[int, ...] | range:
    run = range(places[0], places[0] + len(places))
    return run if list(run) == places else tuple(places)


def _natural(schema: "pa.Schema", id_column: str | None) -> tuple[str, ...]:
    """Return all columns but the ids, and but the index of a data frame, which pandas does not count as one either."""
    left_out = {id_column, *_index_columns(schema)}
    return tuple(name for name in schema.names if name not in left_out)


def _index_columns(schema: "pa.Schema") -> list[str]:
    try:
        kept = schema.pandas_metadata["index_columns"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # not of pandas, or what it says of itself is no JSON
    return [name for name in kept if isinstance(name, str)] if isinstance(kept, list) else []


def _require_numbers(schema: "pa.Schema", columns: tuple[str, ...], path: Location) -> bool:
    """Raise unless every column is there, once, and holds numbers; return whether all are float32."""
    require_unique_names(schema.names, f"{path} has")
    there = {field.name: field.type for field in schema}
    if missing := [name for name in columns if name not in there]:
        raise InvalidInputError(f"{path} has no {format_names(missing)}; it has {format_names(schema.names)}.")
    for name in columns:
        if not _is_number(there[name]):
            raise InvalidInputError(
                f"The column {name!r} of {path} holds {there[name]!s:.100}, and must hold numbers or booleans; "
                "convert it, leave it out with columns=, or make it the id_column."
            )
    return all(types.is_float32(there[name]) for name in columns)


def _is_number(kind: "pa.DataType") -> bool:
    return any(is_kind(kind) for is_kind in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal))


def require_ids(schema: "pa.Schema", first: "pa.Schema", id_column: str | None, path: Location | str) -> None:
    """Raise unless the ids are there, of a type without parts, the same in every file."""
    if id_column is None:
        return
    if id_column not in schema.names:
        raise InvalidInputError(
            f"{path} has no {format_names([id_column])} for ids; it has {format_names(schema.names)}."
        )
    kind, expected = schema.field(id_column).type, first.field(id_column).type
    if types.is_nested(kind) or types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        raise InvalidInputError(
            f"The ids {id_column!r} of {path} are {kind!s:.100}, and must be plain numbers, text or times."
        )
    if kind != expected:
        raise InvalidInputError(
            f"The ids {id_column!r} of {path} are {kind!s:.100} and those of the first file {expected!s:.100}; "
            "store one type in all files."
        )
