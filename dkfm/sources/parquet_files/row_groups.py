"""Decode row groups of Parquet files, in bounded memory."""

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import groupby

import numpy as np

from dkfm.core.chunking import row_slices, split_by_part
from dkfm.core.rows import Array, require_exact_integers
from dkfm.errors import InvalidInputError
from dkfm.sources.parquet_files.layout import OpenedFile, TableLayout, open_parquet_file
from dkfm.sources.parquet_files.schemas import compute, dictionary_decode_ids, pa, pq, types

_BATCH_VALUES = 2**22
"""Values of a batch that Arrow decodes at a time."""

_VALUES_PER_PASS = 2**21
"""Values of the columns that are decoded in a pass, at least one: Arrow holds all requested columns of a row group."""

_ARROW_COPIES = 7
"""Stored, decompressed, dictionary and decoded copies of values in Arrow; 4.7 to 7 were measured for random float64."""

_MAX_GROUP_BYTES = 2**33
"""Largest size of a row group, as its footer declares it and as float64."""

_COLUMN_BYTES = 2**22
"""Constant part of the limit on the uncompressed bytes of a column of numbers in a row group."""

_VALUE_BYTES = 40
"""Part of this limit for each row."""

_NATIVE_VALUES = 2**19
"""Largest number of values of a row group that is read without Python."""

_SMALL_GROUP_VALUES, _SMALL_GROUP_COLUMNS = 2**13, 2**5
"""Largest values and columns of a small row group; with such groups, two threads were up to twice as slow as one."""

_small_groups_lock = threading.Lock()


def _renew_lock() -> None:
    """Create a new lock in a forked process, which has no thread that could release the old one."""
    global _small_groups_lock  # noqa: PLW0603  # a lock of the process
    _small_groups_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)

_TEXT_PREDICATES = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
"""Predicates for the types of columns whose values may have any length."""

_ID_ROWS = 2**16
"""Ids that are decoded at a time."""

_IDS_BYTES = 2**24
"""Constant part of the limit on the bytes of the ids of a row group, or of a read."""

_ID_BYTES = 512
"""Part of this limit for each row."""


def decode_into_arrays(table: TableLayout, groups: list[tuple[int, Array]]) -> None:
    """Fill the array of each row group; only one thread at a time reads small groups on disk, mostly in Python code."""
    values, columns = max((array.size for _, array in groups), default=0), len(table.columns)
    is_small = values <= _SMALL_GROUP_VALUES and columns <= _SMALL_GROUP_COLUMNS and not table.files[0].is_remote
    with _small_groups_lock if is_small else nullcontext():
        _decode_files_into_arrays(table, groups)


def _decode_files_into_arrays(table: TableLayout, groups: list[tuple[int, Array]]) -> None:
    """Fill the array of each row group with its rows; a file is opened once for all its groups."""
    for _, run in groupby(groups, lambda group: int(table.file_indices[group[0]])):
        in_file = list(run)
        is_small = max(values.size for _, values in in_file) <= _NATIVE_VALUES
        with open_parquet_file(table, in_file[0][0], is_small=is_small) as opened:
            for group, values in in_file:
                _decode_group_into_array(opened, table, group, values)


def _decode_group_into_array(opened: OpenedFile, table: TableLayout, group: int, values: Array) -> None:
    """Fill an array with the rows of a row group, some columns at a time."""
    dtype = pa.from_numpy_dtype(values.dtype)
    for columns in row_slices(len(table.columns), _count_columns_per_pass(len(values))):
        for first, batch in _read_batches(opened, table, group, table.columns[columns]):
            part = values[first : first + batch.num_rows, columns]
            for index, column in enumerate(batch.columns):
                if types.is_int64(column.type) or types.is_uint64(column.type):
                    require_exact_integers(column.drop_null().to_numpy(zero_copy_only=False))
                numbers = column if column.type == dtype else column.cast(dtype, safe=False)
                part[:, index] = numbers.to_numpy(zero_copy_only=False)


def estimate_decoding_bytes(rows: int, columns: int) -> int:
    """Return the bytes that Arrow holds while it decodes a row group."""
    return _ARROW_COPIES * 8 * rows * min(_count_columns_per_pass(rows), columns)


def _count_columns_per_pass(rows: int) -> int:
    """Return the number of columns that are decoded together, for row groups of `rows` rows."""
    return max(1, _VALUES_PER_PASS // max(1, rows))


def read_ids(table: TableLayout, start: int, stop: int, column: str) -> "pa.Array":
    """Return the ids of the rows from `start` to `stop`; raise an InvalidInputError if they are longer than ids."""
    parts: list[pa.Array] = []
    remaining = _IDS_BYTES + _ID_BYTES * (stop - start)
    for group, part in split_by_part(start, stop, table.first_rows):
        if table.partition_ids is not None:
            value = table.partition_ids[int(table.file_indices[group])]
            parts.append(pa.array([value], pa.string()).take(pa.array(np.zeros(part.stop - part.start, np.int64))))
            continue
        for first, batch in _read_id_batches(table, group, column):
            if first >= part.stop:
                break
            ids = batch.column(0)[max(0, part.start - first) : part.stop - first]
            remaining -= _decoded_id_bytes(ids)
            if remaining < 0:
                raise InvalidInputError(
                    f"The ids {column!r} of {table.group_file(group)} are longer than texts that name a row: those of "
                    f"rows {start} to {stop} have more than {_ID_BYTES} bytes each; choose others."
                )
            parts.append(dictionary_decode_ids(ids).cast(table.id_type))
        table.group_file(group).require_same()  # if the loop ends early, the check after the last batch is skipped
    return pa.concat_arrays(parts) if parts else pa.array([], table.id_type)


def _read_batches(
    opened: OpenedFile, table: TableLayout, group: int, columns: tuple[str, ...]
) -> Iterator[tuple[int, "pa.RecordBatch"]]:
    """Yield batches of columns of a row group, each with the number of its first row in the group."""
    max_bytes = len(columns) * (_COLUMN_BYTES + _VALUE_BYTES * table.count_group_rows(group))
    batch_rows = max(1, _BATCH_VALUES // len(table.columns))
    for first, batch in _read_checked_batches(opened, table, group, columns, batch_rows, max_bytes):
        yield first, batch.select(columns)  # Arrow returns them in the order of the file


def _read_id_batches(table: TableLayout, group: int, column: str) -> Iterator[tuple[int, "pa.RecordBatch"]]:
    """Yield ids of a row group as `_read_batches` does; text ids are dictionary arrays."""
    max_bytes = _IDS_BYTES + _ID_BYTES * table.count_group_rows(group)
    dictionary_column = column if _has_variable_length(table.id_type) else None
    with open_parquet_file(table, group, dictionary_column=dictionary_column) as opened:
        yield from _read_checked_batches(opened, table, group, (column,), _ID_ROWS, max_bytes)


def _read_checked_batches(
    opened: OpenedFile, table: TableLayout, group: int, columns: tuple[str, ...], batch_rows: int, max_bytes: int
) -> Iterator[tuple[int, "pa.RecordBatch"]]:
    """Yield batches of a row group; raise if rows are missing or added, or the footer declares over `max_bytes`."""
    file, number = table.group_file(group), int(table.group_indices[group])
    rows, first = table.count_group_rows(group), 0
    row_group = opened.parquet.metadata.row_group(number)
    chunks = [row_group.column(opened.column_indices[name]) for name in columns]  # others may be encrypted
    require_max_bytes(_sum_declared_bytes(chunks), table, group, max_bytes)
    if opened.reader is not None:
        opened.reader.read_ahead(map(_find_byte_range, chunks))
    for batch in opened.parquet.iter_batches(
        batch_size=batch_rows,
        row_groups=[number],
        columns=list(columns),
        use_threads=False,  # the tasks of a process run in threads already
    ):
        if first + batch.num_rows > rows:
            break
        yield first, batch
        first += batch.num_rows
    else:
        if first == rows:
            return
    raise InvalidInputError(f"{file} is damaged: its row group {number} must have {rows} rows, and has others.")


def _sum_declared_bytes(chunks: "list[pq.ColumnChunkMetaData]") -> int:
    """Return the bytes that a footer declares for columns of a row group, compressed or not; -1 if one is negative."""
    decoded = [chunk.total_uncompressed_size for chunk in chunks]
    stored = [chunk.total_compressed_size for chunk in chunks]
    return -1 if min(*decoded, *stored, 0) < 0 else max(sum(decoded), sum(stored))


def _find_byte_range(chunk: "pq.ColumnChunkMetaData") -> tuple[int, int]:
    """Return the first byte of the pages of a column in a row group, and their number of bytes."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, chunk.total_compressed_size


def _has_variable_length(dtype: "pa.DataType | None") -> bool:
    return dtype is not None and any(is_type(dtype) for is_type in _TEXT_PREDICATES)


def _decoded_id_bytes(ids: "pa.Array") -> int:
    """Return the bytes of ids after dictionary decoding."""
    if not types.is_dictionary(ids.type):
        return int(ids.nbytes)
    if not _has_variable_length(ids.type.value_type):
        return int(dictionary_decode_ids(ids).nbytes)
    lengths = np.asarray(compute.binary_length(ids.dictionary).fill_null(0), np.int64)
    return int(lengths[np.asarray(ids.indices.drop_null(), np.intp)].sum())


def require_max_bytes(bytes_: int, table: TableLayout, group: int, limit: int | None = None) -> None:
    """Raise an InvalidInputError if a row group takes more bytes than are read at a time."""
    limit = _MAX_GROUP_BYTES if limit is None else min(limit, _MAX_GROUP_BYTES)
    if not 0 <= bytes_ <= limit:
        raise InvalidInputError(
            f"The row group {table.group_indices[group]} of {table.group_file(group)} takes {bytes_} bytes, and at "
            f"most {limit} are read at a time: write it in smaller row groups, or read fewer columns."
        )
