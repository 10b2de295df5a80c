"""Rows that are in the memory of this process: of an array, or of a data frame whose columns are taken by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.frames import check_column_names, format_names, require_unique_names, select_columns
from dkfm.core.rows import Rows, as_array, as_float64, row_values
from dkfm.errors import InvalidInputError, MissingExtraError, reason
from dkfm.storage import csr
from dkfm.storage.zarr_store import view_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_TOGETHER = 2**20
"""Values whose order in memory is changed at a time."""


@dataclass(frozen=True, eq=False)
class MemorySource:
    """Rows of an array in this process, dense or CSR."""

    array: Rows
    name: str = "X"
    chunk_rows: int = 1
    location = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return (self.array.shape[0], self.array.shape[1])

    @property
    def row_values(self) -> int:
        """The columns, or what is stored of them."""
        return row_values(self.array)

    @property
    def runs(self) -> tuple[int, ...]:
        """Values that 1, 2, 4, .. consecutive rows hold at most, of CSR rows."""
        return () if isinstance(self.array, np.ndarray) else csr.longest_runs(self.array)

    def values_of(self, rows: int) -> int:
        """Return how many float64 values any so many consecutive rows take in memory, at most."""
        return rows * self.shape[1] if isinstance(self.array, np.ndarray) else csr.values_in_rows(self.runs, rows)

    def decoding_bytes(self, chunks: int) -> int:
        """Return 0: rows are in memory as they are."""
        return 0

    def with_float32(self) -> Self:
        """Return the source: its rows are as the array has them."""
        return self

    def read(self, rows: slice) -> Rows:
        """Return some rows, where they are dense a view of them."""
        return self.array[rows]

    def stamp(self) -> str:
        """Return a checksum of the values."""
        rows = self.array
        parts = [rows] if isinstance(rows, np.ndarray) else [rows.data, rows.indices, rows.indptr]
        return f"{rows.shape} {' '.join(str(_checksum_of(part)) for part in parts)}"

    def state(self) -> str:
        """Return the stamp: values that were written to meanwhile have another one."""
        return self.stamp()

    def is_of(self, stamp: str) -> bool:  # nothing lies between opening and reading an array
        """Return True: the rows are the array's."""
        return True

    def where(self, row: int) -> tuple[str, int]:
        """Return the name, and the row."""
        return self.name, row


@dataclass(frozen=True, eq=False)
class FrameSource(MemorySource):
    """Rows of some columns of a data frame in this process. Nulls are NaN."""

    columns: tuple[str, ...] = ()
    """The names of the columns that are read."""
    id_column: str | None = None
    ids: "pa.Array | None" = None
    """The values of that column."""

    def read_ids(self, rows: slice) -> "pa.Array":
        """Return the ids of some rows."""
        if self.ids is None:
            raise InvalidInputError(f"{self.name} was opened without ids; name their column with id_column=.")
        return self.ids[rows]

    def save(self, path: Path) -> None:
        """Write the columns and the ids to a Parquet file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = dict(zip(self.columns, np.asarray(self.array).T, strict=True))
        pq.write_table(pa.table(fields | ({} if self.ids is None else {self.id_column: self.ids})), path)

    def stamp(self) -> str:
        """Return a checksum of the values and the ids."""
        return super().stamp() if self.ids is None else f"{super().stamp()} {_checksum(self.ids)}"


def open_frame(
    frame: object, names: Sequence[str], name: str, columns: Sequence[str] | None, id_column: str | None
) -> FrameSource:
    """Return the rows of a data frame whose columns have names: those asked for, in their order, or all but the ids.

    Raises
    ------
    InvalidInputError
        A column that is missing, there twice, or does not hold numbers.
    """
    require_unique_names(names, f"{name} has")
    asked = check_column_names(columns)
    wanted = tuple(column for column in names if column != id_column) if asked is None else asked
    for needed, use in ((wanted, ""), (() if id_column is None else (id_column,), " for ids")):
        if missing := [column for column in needed if column not in names]:
            raise InvalidInputError(f"{name} has no {format_names(missing)}{use}; it has {format_names(names)}.")
    if not wanted:
        raise InvalidInputError(f"{name} needs at least one column of numbers, and none is asked for or there.")
    array = as_float64(_values(frame if wanted == tuple(names) else select_columns(frame, wanted), wanted, name))
    return FrameSource(array, name, 1, wanted, id_column, None if id_column is None else _ids(frame, id_column, name))


def _values(frame: object, columns: tuple[str, ...], name: str) -> Rows:
    """Return the values of a data frame; name the column that holds no numbers."""
    try:
        return as_array(frame, name)
    except InvalidInputError:
        for column in columns:
            try:
                as_array(select_columns(frame, [column]), name)
            except InvalidInputError as error:
                raise InvalidInputError(
                    f"The column {column!r} of {name} does not hold numbers or booleans ({reason(error)}); convert it, "
                    "leave it out with columns=, or make it the id_column."
                ) from None
        raise


def _ids(frame: object, column: str, name: str) -> "pa.Array":
    """Return a column as an array of Arrow's, of a type without parts."""
    try:
        import pyarrow as pa

        from dkfm.sources.parquet_footers import require_ids
    except ImportError as error:
        raise MissingExtraError("Ids need pyarrow; install it with pip install 'dkfm[dataframe]'.") from error
    chosen = select_columns(frame, [column])
    try:
        table = pa.Table.from_pandas(chosen, preserve_index=False) if hasattr(chosen, "iloc") else pa.table(chosen)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidInputError(f"The column {column!r} of {name} cannot be the ids: {reason(error)}.") from None
    require_ids(table.schema, table.schema, column, name)
    return pa.concat_arrays(table.column(column).chunks) if table.num_rows else pa.array([], table.schema.types[0])


def _checksum_of(values: npt.NDArray[np.generic]) -> int:
    """Return the crc32c of values in C order, whatever their order is in memory, without a copy of them all."""
    found = 0
    for part in row_slices(len(values), max(1, _TOGETHER * len(values) // max(1, values.size))):
        found = google_crc32c.extend(found, view_bytes(np.ascontiguousarray(values[part])))
    return found


def _checksum(ids: "pa.Array") -> int:
    import pyarrow as pa

    return int(google_crc32c.value(pa.record_batch([ids], ["ids"]).serialize().to_pybytes()))
