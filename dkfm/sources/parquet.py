"""Rows of Parquet files: the columns that are asked for, by name, from one file or from all files of a folder.

A folder is one on a disk, or a prefix on an object store, of which only the bytes of those columns are asked for.

A source is a value of a few words however many files there are: each process lists them and reads their footers itself,
once, and refuses them if they have changed. Memory is that of the rows asked for, and of the row groups that hold an
end of them.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.frames import check_column_names
from dkfm.core.lru_cache import LruCache
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.files.location import Location
from dkfm.sources import chunk_cache, parquet_files, parquet_footers
from dkfm.sources.base import DenseRows
from dkfm.sources.parquet_footers import Footers, compute, pa, pq

_BATCH_VALUES = 2**22
"""Values of a batch of rows."""

_PASS_VALUES = 2**21
"""Values whose columns are decoded together, or one column: Arrow holds all that it was asked for of a row group."""

_ARROW_COPIES = 7
"""How often: as stored, decompressed, with its dictionary, and decoded; random float64 was measured 4.7 to 7 times."""

_MAX_GROUP_BYTES = 2**33
"""No row group is larger, by what its footer says, or as float64."""

_COLUMN_BYTES, _VALUE_BYTES = 2**22, 40
"""A column of numbers has so many bytes in a row group without compression, and so many for each row, at most."""

_ID_ROWS, _IDS_BYTES, _ID_BYTES = 2**16, 2**24, 512
"""Ids that are decoded at a time; and the bytes that those of a row group, or of a piece of rows, have at most: so
many, and so many for each row.
"""

_tables: LruCache[Footers] = LruCache(3)
"""The footers of four tables."""


@dataclass(frozen=True, kw_only=True)
class ParquetSource(DenseRows):
    """Rows of the columns of a Parquet file, or of all `*.parquet` files below a folder in the order of their names.

    Files and folders whose names begin with "_" or "." are not looked at. Nulls are NaN. A chunk is the largest row
    group, whose rows are decoded together.
    """

    listing: str
    """The stamp of its files when it was opened."""
    places: tuple[int, ...] | range | None
    """Where its columns stand in the first file; None where they were not chosen, and are all that it has."""
    id_column: str | None = None
    opened: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """Which opening of the table this is: what was decoded for an earlier one may have changed since."""

    @classmethod
    def open(
        cls, location: Location, columns: Sequence[str] | None = None, id_column: str | None = None
    ) -> "ParquetSource":
        """Read the footers of a file, or of all files of a folder.

        Parameters
        ----------
        location : Path or Remote
        columns : sequence of str, optional
            Names of the columns that are read, in their order; by default those of the first file in its order, but
            neither the ids nor the index of a data frame.
        id_column : str, optional
            A column that names the rows, of numbers, text or times, for `read_ids`.

        Raises
        ------
        InvalidInputError
            Something else than Parquet files, a column that is missing or does not hold numbers, or no rows.
        """
        found, table = parquet_footers.read_footers(location, check_column_names(columns), id_column)
        longest = int(np.diff(table.first_rows).max())
        _tables.get((location, found, table.places, id_column), lambda: table)
        shape = int(table.first_rows[-1]), len(table.columns)
        return cls(location, shape, longest, listing=found, places=table.places, id_column=id_column)

    def decoding_bytes(self, chunks: int) -> int:
        """Return the bytes of what Arrow holds of one row group, and of footers, however many row groups are read."""
        rows = min(self.chunk_rows, self.shape[0])
        return _ARROW_COPIES * 8 * rows * min(_pass_columns(rows), self.shape[1]) + self._table.footer_bytes

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        return self._table.columns

    def stamp(self) -> str:
        """Return a digest of the names, the sizes, and the times of change or ETags of its files."""
        return parquet_files.list_files(self.location)[0]

    def state(self) -> str:
        """Return a digest of its files that no writer can bring back; at a URL the stamp."""
        return parquet_files.files_state(self.location)

    def is_of(self, stamp: str) -> bool:
        """Whether this is the stamp of its files when they were opened."""
        return stamp == self.listing

    def where(self, row: int) -> tuple[str, int]:
        """Return the file that holds a row, and the number of the row in it."""
        table = self._table
        group = table.group_of(row)
        return str(table.file_of(group)), row - table.first_row_of_file(group)

    def read(self, rows: slice) -> Array:
        """Return some rows; a row group of which they are a part is kept for those after them."""
        table = self._table
        start, stop, _ = rows.indices(self.shape[0])
        values = np.empty((max(0, stop - start), self.shape[1]), self._dtype(table))
        for group, part in _parts(table, start, stop):
            held = table.rows_of(group)
            out = values[held.start + part.start - start : held.start + part.stop - start]
            if len(out) == held.stop - held.start:
                self._decode(group, out)
            else:
                table.file_of(group).require_same()
                out[...] = chunk_cache.cached_part(
                    (self.opened, self.keep_float32, group), partial(self._decoded, group), part
                )
        return values

    def read_ids(self, rows: slice) -> "pa.Array":
        """Return the ids of some rows.

        Raises
        ------
        InvalidInputError
            The source was opened without an id column.
        """
        if self.id_column is None:
            raise InvalidInputError(f"{self.location} was opened without ids; name their column with id_column=.")
        table = self._table
        start, stop, _ = rows.indices(self.shape[0])
        found: list[pa.Array] = []
        left = _IDS_BYTES + _ID_BYTES * (stop - start)
        for group, part in _parts(table, start, stop):
            for first, batch in _id_batches(table, group, self.id_column):
                if first >= part.stop:
                    break
                ids = batch.column(0)[max(0, part.start - first) : part.stop - first]
                left -= _decoded_bytes(ids)
                if left < 0:
                    raise InvalidInputError(
                        f"The ids {self.id_column!r} of {table.file_of(group)} are longer than texts that name a "
                        f"row: those of rows {start} to {stop} have more than {_ID_BYTES} bytes each; choose others."
                    )
                found.append((ids.dictionary_decode() if _is_coded(ids) else ids).cast(table.id_type))
            table.file_of(group).require_same()  # which an end before the last batch leaves out
        return pa.concat_arrays(found) if found else pa.array([], table.id_type)

    @property
    def _table(self) -> Footers:
        key = (self.location, self.listing, self.places, self.id_column)
        expected = self.listing
        return _tables.get(
            key, lambda: parquet_footers.read_footers(self.location, self.places, self.id_column, expected=expected)[1]
        )

    def _dtype(self, table: Footers) -> np.dtype[np.floating]:
        return np.dtype(np.float32 if self.keep_float32 and table.all_float32 else np.float64)

    def _decoded(self, group: int) -> Array:
        table = self._table
        held = table.rows_of(group)
        _require_modest(8 * (held.stop - held.start) * self.shape[1], table, group)
        values = np.empty((held.stop - held.start, self.shape[1]), self._dtype(table))
        self._decode(group, values)
        return values

    def _decode(self, group: int, values: Array) -> None:
        """Fill an array with the rows of a row group, some columns at a time."""
        table = self._table
        kind = pa.from_numpy_dtype(values.dtype)
        with parquet_footers.open_parquet(table.file_of(group)) as parquet:
            for places in row_slices(len(table.columns), _pass_columns(len(values))):
                for first, batch in _batches(parquet, table, group, table.columns[places]):
                    part = values[first : first + batch.num_rows, places]
                    for place, column in enumerate(batch.columns):
                        part[:, place] = column.cast(kind, safe=False).to_numpy(zero_copy_only=False)


def _pass_columns(rows: int) -> int:
    """Return how many columns of so many rows are decoded together."""
    return max(1, _PASS_VALUES // max(1, rows))


def _parts(table: Footers, start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Yield the row groups that hold some rows, and which of their rows those are."""
    while start < stop:
        group = table.group_of(start)
        held = table.rows_of(group)
        yield group, slice(start - held.start, min(stop, held.stop) - held.start)
        start = held.stop


def _batches(
    parquet: "pq.ParquetFile", table: Footers, group: int, columns: tuple[str, ...]
) -> Iterator[tuple[int, "pa.RecordBatch"]]:
    """Yield the numbers of a row group, some rows at a time, each with the number of its first."""
    held = table.rows_of(group)
    most = len(columns) * (_COLUMN_BYTES + _VALUE_BYTES * (held.stop - held.start))
    for first, batch in _checked_batches(
        parquet, table, group, columns, max(1, _BATCH_VALUES // len(table.columns)), most
    ):
        yield first, batch.select(columns)  # a file has them in its own order


def _id_batches(table: Footers, group: int, column: str) -> Iterator[tuple[int, "pa.RecordBatch"]]:
    """Yield the ids of a row group as `_batches` does, equal texts of them once."""
    held = table.rows_of(group)
    with parquet_footers.open_parquet(table.file_of(group), ids=column if _is_text(table.id_type) else None) as parquet:
        most = _IDS_BYTES + _ID_BYTES * (held.stop - held.start)
        yield from _checked_batches(parquet, table, group, (column,), _ID_ROWS, most)


def _checked_batches(
    parquet: "pq.ParquetFile", table: Footers, group: int, columns: tuple[str, ...], batch_rows: int, most: int
) -> Iterator[tuple[int, "pa.RecordBatch"]]:
    """Yield batches of a row group; raise if its rows are not all, or if the footer says more than `most` bytes."""
    file, number, held = table.file_of(group), int(table.numbers[group]), table.rows_of(group)
    rows, first = held.stop - held.start, 0
    declared = parquet_footers.declared_bytes(parquet.metadata, number, columns)
    _require_modest(declared, table, group, most)
    for batch in parquet.iter_batches(
        batch_size=batch_rows,
        row_groups=[number],
        columns=list(columns),
        use_threads=False,  # the tasks of a process are its threads
    ):
        if first + batch.num_rows > rows:
            break
        yield first, batch
        first += batch.num_rows
    else:
        if first == rows:
            return
    raise InvalidInputError(f"{file} is damaged: its row group {number} must have {rows} rows, and has others.")


def _is_text(kind: "pa.DataType | None") -> bool:
    return kind is not None and any(is_kind(kind) for is_kind in parquet_footers.TEXTS)


def _is_coded(ids: "pa.Array") -> bool:
    return isinstance(ids.type, pa.DictionaryType)


def _decoded_bytes(ids: "pa.Array") -> int:
    """Return the bytes of ids once they are decoded."""
    if not _is_coded(ids):
        return int(ids.nbytes)
    lengths = np.asarray(compute.binary_length(ids.dictionary).fill_null(0), np.int64)
    return int(lengths[np.asarray(ids.indices.drop_null(), np.intp)].sum())


def _require_modest(bytes_: int, table: Footers, group: int, most: int | None = None) -> None:
    most = _MAX_GROUP_BYTES if most is None else min(most, _MAX_GROUP_BYTES)
    if not 0 <= bytes_ <= most:
        raise InvalidInputError(
            f"The row group {table.numbers[group]} of {table.file_of(group)} takes {bytes_} bytes, and at most "
            f"{most} are read at a time: write it in smaller row groups, or read fewer columns."
        )
