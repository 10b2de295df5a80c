"""Rows of Parquet files: the columns that are asked for, by name, from one file or from all files of a folder.

A folder is one on a disk, or a prefix on an object store, of which only the bytes of those columns are asked for.

A source is a value of a few words however many files there are: each process lists them and reads their footers itself,
once, and refuses them if they have changed. Memory is that of the rows asked for, and of the row groups that hold an
end of them.
"""

import threading
import uuid
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from dkfm import decoded, footers, listing
from dkfm.errors import InvalidInputError
from dkfm.footers import Footers, pa
from dkfm.kernels.rows import Array
from dkfm.remote import Remote, Root

__all__ = ["ParquetSource"]

_BATCH_VALUES = 2**22
"""Values that are decoded at a time."""

_MAX_GROUP_BYTES = 2**33
"""No row group is larger, by what its footer says, or as float64."""

_KEPT = 4
"""Tables whose footers a process keeps."""

_lock = threading.Lock()
_tables: dict[Hashable, Footers] = {}


@dataclass(frozen=True)
class ParquetSource:
    """Rows of the columns of a Parquet file, or of all `*.parquet` files below a folder in the order of their names.

    Files and folders whose names begin with "_" or "." are not looked at. Nulls are NaN.
    """

    place: Root
    shape: tuple[int, int]
    chunk_rows: int
    """Rows of the largest row group: they are decoded together."""
    listing: str
    """The stamp of its files when it was opened."""
    places: tuple[int, ...] | range | None
    """Where its columns stand in the first file; None where they were not chosen, and are all that it has."""
    id_column: str | None = None
    single: bool = False
    """Whether rows of float32 are read as they are, where all columns are."""
    opened: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """Which opening of the table this is: what was decoded for an earlier one may have changed since."""

    @classmethod
    def open(cls, place: Root, columns: Sequence[str] | None = None, id_column: str | None = None) -> "ParquetSource":
        """Read the footers of a file, or of all files of a folder.

        Parameters
        ----------
        place : Path or Remote
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
        place = place if isinstance(place, Remote) else Path(place).absolute()
        found, table = footers.read(place, _checked(columns), id_column)
        longest = int(np.diff(table.first_rows).max())
        with _lock:
            _keep((place, found, table.places, id_column), table)
        return cls(place, (int(table.first_rows[-1]), len(table.columns)), longest, found, table.places, id_column)

    @property
    def path(self) -> Path | None:
        """Where it is on this machine; None on an object store."""
        return None if isinstance(self.place, Remote) else self.place

    @property
    def name(self) -> str:
        """The path, or the URL without credentials."""
        return str(self.place)

    @property
    def row_values(self) -> int:
        """The columns."""
        return self.shape[1]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        return self._table.columns

    def stamp(self) -> str:
        """Return a digest of the names, the sizes, and the times of change or ETags of its files."""
        return listing.read(self.place)[0]

    def where(self, row: int) -> tuple[str, int]:
        """Return the file that holds a row, and the number of the row in it."""
        table = self._table
        group = table.group_of(row)
        return str(table.file_of(group).path), row - table.first_row_of_file(group)

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
                out[...] = decoded.part((self.opened, self.single, group), partial(self._decoded, group), part)
        return values

    def read_ids(self, rows: slice) -> "pa.Array":
        """Return the ids of some rows.

        Raises
        ------
        InvalidInputError
            The source was opened without an id column.
        """
        if self.id_column is None:
            raise InvalidInputError(f"{self.place} was opened without ids; name their column with id_column=.")
        table = self._table
        start, stop, _ = rows.indices(self.shape[0])
        found = []
        for group, part in _parts(table, start, stop):
            for first, batch in _batches(table, group, (self.id_column,)):
                if first >= part.stop:
                    break
                found.append(batch.column(0)[max(0, part.start - first) : part.stop - first])
            table.file_of(group).require_same()  # which an end before the last batch leaves out
        return pa.concat_arrays(found) if found else pa.array([], table.id_type)

    @property
    def _table(self) -> Footers:
        key = (self.place, self.listing, self.places, self.id_column)
        with _lock:
            if key not in _tables:
                _keep(key, footers.read(self.place, self.places, self.id_column, expected=self.listing)[1])
            return _tables[key]

    def _dtype(self, table: Footers) -> np.dtype[np.floating]:
        return np.dtype(np.float32 if self.single and table.single else np.float64)

    def _decoded(self, group: int) -> Array:
        table = self._table
        held = table.rows_of(group)
        _require_modest(8 * (held.stop - held.start) * self.shape[1], table, group)
        values = np.empty((held.stop - held.start, self.shape[1]), self._dtype(table))
        self._decode(group, values)
        return values

    def _decode(self, group: int, values: Array) -> None:
        """Fill an array with the rows of a row group."""
        table = self._table
        kind = pa.from_numpy_dtype(values.dtype)
        for first, batch in _batches(table, group, table.columns):
            part = values[first : first + batch.num_rows]
            for place, name in enumerate(table.columns):
                part[:, place] = batch.column(name).cast(kind, safe=False).to_numpy(zero_copy_only=False)


def _checked(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise InvalidInputError(f"columns must be a list of names, and is {columns!r:.100}.")
    footers.require_once(columns, "columns names")
    return tuple(columns)


def _keep(key: Hashable, table: Footers) -> None:
    while len(_tables) >= _KEPT:
        del _tables[next(iter(_tables))]
    _tables[key] = table


def _parts(table: Footers, start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Yield the row groups that hold some rows, and which of their rows those are."""
    while start < stop:
        group = table.group_of(start)
        held = table.rows_of(group)
        yield group, slice(start - held.start, min(stop, held.stop) - held.start)
        start = held.stop


def _batches(table: Footers, group: int, columns: tuple[str, ...]) -> Iterator[tuple[int, "pa.RecordBatch"]]:
    """Yield the rows of a row group, some at a time, each with the number of its first; raise if they are not all."""
    file, number, held = table.file_of(group), int(table.numbers[group]), table.rows_of(group)
    rows, first = held.stop - held.start, 0
    with footers.opened(file) as parquet:
        _require_modest(footers.declared_bytes(parquet.metadata, number, columns), table, group)
        for batch in parquet.iter_batches(
            batch_size=max(1, _BATCH_VALUES // len(columns)),
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
    raise InvalidInputError(f"{file.path} is damaged: its row group {number} must have {rows} rows, and has others.")


def _require_modest(bytes_: int, table: Footers, group: int) -> None:
    if not 0 <= bytes_ <= _MAX_GROUP_BYTES:
        raise InvalidInputError(
            f"The row group {table.numbers[group]} of {table.file_of(group).path} takes {bytes_} bytes, and at most "
            f"{_MAX_GROUP_BYTES} are read at a time: write it in smaller row groups, or read fewer columns."
        )
