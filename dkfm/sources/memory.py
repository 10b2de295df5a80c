"""Read rows of an array, or of columns of a data frame that are selected by name, in the memory of this process."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.display.quantities import format_names
from dkfm.core.frames import (
    describe_known_names,
    require_unique_names,
    select_columns,
    validate_columns_argument,
)
from dkfm.core.rows import Rows, as_float64, as_rows_allow_nonfinite, estimate_float64s_per_row
from dkfm.errors import InvalidInputError, MissingExtraError, extract_reason
from dkfm.storage import csr
from dkfm.storage.zarr_store import view_as_uint8

if TYPE_CHECKING:
    import pyarrow as pa

_CHECKSUM_VALUES = 2**20
"""Values that are copied to C order at a time for a checksum."""


@dataclass(frozen=True, eq=False)
class MemorySource:
    """Rows of a dense or CSR array in the memory of this process."""

    array: Rows
    name: str = "X"
    chunk_rows = 1
    location = None
    cached_bytes = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return (self.array.shape[0], self.array.shape[1])

    @property
    def float64s_per_row(self) -> int:
        """Average memory of a row, in float64 values."""
        return estimate_float64s_per_row(self.array)

    @property
    def max_nnz_per_row_window(self) -> tuple[int, ...]:
        """Largest numbers of stored values in 1, 2, 4, .. consecutive CSR rows; empty if rows are dense."""
        return () if isinstance(self.array, np.ndarray) else csr.max_nnz_per_row_window(self.array)

    def max_size_in_float64s(self, rows: int) -> int:
        """Return the largest memory of any `rows` consecutive rows, in float64 values."""
        max_nnz = self.max_nnz_per_row_window
        return csr.max_csr_size_in_float64s(max_nnz, rows) if max_nnz else rows * self.shape[1]

    def read_overhead_bytes(self, chunks: int) -> int:
        """Return 0: rows are in memory already."""
        return 0

    def with_float32_preserved(self) -> Self:
        """Return the source itself: rows keep the dtype of the array."""
        return self

    def read(self, rows: slice) -> Rows:
        """Return some rows; dense rows are a view."""
        return self.array[rows]

    def stamp(self, *, include_ctime: bool = False) -> str:
        """Return a checksum of the values."""
        rows = self.array
        parts = [rows] if isinstance(rows, np.ndarray) else [rows.data, rows.indices, rows.indptr]
        return f"{rows.shape} {' '.join(str(_checksum_values(part)) for part in parts)}"

    def is_opening_valid(self, current_stamp: str) -> bool:  # nothing is cached when an array is opened
        """Return True: the source is the array itself."""
        return True

    def locate_row(self, row: int) -> tuple[str, int]:
        """Return the name of the source, and the row."""
        return self.name, row


@dataclass(frozen=True, eq=False)
class FrameSource(MemorySource):
    """Rows of some columns of a data frame in the memory of this process. Nulls are NaN."""

    columns: tuple[str, ...] = ()
    """Names of the columns that are read."""
    id_column: str | None = None
    ids: "pa.Array | None" = None
    """Values of the id column."""

    def read_ids(self, rows: slice) -> "pa.Array":
        """Return the ids of some rows; raise an InvalidInputError if there is no id column."""
        if self.ids is None:
            raise InvalidInputError(f"{self.name} was opened without ids; name their column with id_column=.")
        return self.ids[rows]

    def find_file_with_missing_ids(self) -> str | None:
        """Return the name of the data frame if a row has no id."""
        return self.name if self.ids is not None and self.ids.null_count else None

    def write_parquet(self, path: Path) -> None:
        """Write the columns and the ids to a Parquet file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = dict(zip(self.columns, np.asarray(self.array).T, strict=True))
        pq.write_table(pa.table(fields | ({} if self.ids is None else {self.id_column: self.ids})), path)

    def stamp(self, *, include_ctime: bool = False) -> str:
        """Return a checksum of the values and the ids."""
        return super().stamp() if self.ids is None else f"{super().stamp()} {_checksum_ids(self.ids)}"


def open_frame(
    frame: object, frame_columns: Sequence[str], name: str, columns: Sequence[str] | None, id_column: str | None
) -> FrameSource:
    """Return a source of the named columns of a data frame: the requested ones in their order, or all but the ids.

    The ids may be the index of a pandas data frame, by its name, or by "index" if it has none.

    Raises
    ------
    InvalidInputError
        A column is missing, occurs twice, or does not contain numbers.
    """
    if id_column is not None and id_column not in frame_columns and _index_name(frame) == id_column:
        frame, frame_columns = frame.reset_index(), (id_column, *frame_columns)  # type: ignore[attr-defined]  # of pandas
    require_unique_names(frame_columns, f"{name} has")
    requested = validate_columns_argument(columns)
    selected = tuple(column for column in frame_columns if column != id_column) if requested is None else requested
    for required, use in ((selected, ""), (() if id_column is None else (id_column,), " for ids")):
        if absent := [column for column in required if column not in frame_columns]:
            known = describe_known_names(absent, frame_columns)
            raise InvalidInputError(f"{name} has no {format_names(absent)}{use}; {known}.")
    if not selected:
        raise InvalidInputError(f"{name} needs at least one column of numbers, and none is asked for or there.")
    chosen = frame if selected == tuple(frame_columns) else select_columns(frame, selected)
    array = as_float64(_read_values(chosen, selected, name))
    ids = None if id_column is None else _read_ids(frame, id_column, name)
    return FrameSource(array, name, selected, id_column, ids)


def _index_name(frame: object) -> object:
    """Return the name that `reset_index` gives to the index of a pandas data frame; None of other tables."""
    index = getattr(frame, "index", None)
    if not hasattr(frame, "reset_index") or getattr(index, "nlevels", 1) != 1:
        return None
    return "index" if getattr(index, "name", None) is None else index.name  # type: ignore[union-attr]  # an index


def _read_values(frame: object, columns: tuple[str, ...], name: str) -> Rows:
    """Return the values of a data frame; raise an error that names the first column without numbers."""
    try:
        return as_rows_allow_nonfinite(frame, name)
    except InvalidInputError:
        if not len(frame):  # type: ignore[arg-type]  # every data frame has a length
            raise
        for column in columns:
            try:
                as_rows_allow_nonfinite(select_columns(frame, [column]), name)
            except InvalidInputError as error:
                raise InvalidInputError(
                    f"The column {column!r} of {name} does not hold numbers or booleans ({extract_reason(error)}); "
                    "convert it, leave it out with columns=, or make it the id_column."
                ) from None
        raise


def _read_ids(frame: object, column: str, name: str) -> "pa.Array":
    """Return a column as an Arrow array of a type that is not nested."""
    try:
        import pyarrow as pa

        from dkfm.sources.parquet_files.schemas import dictionary_decode_ids, require_ids
    except ImportError as error:
        raise MissingExtraError("Ids need pyarrow; install it with pip install 'dkfm[dataframe]'.") from error
    chosen = select_columns(frame, [column])
    try:
        if hasattr(chosen, "iloc"):
            table = pa.Table.from_pandas(chosen, preserve_index=False)
        else:  # the way of polars gives text in a type that every Arrow writes to Parquet
            table = chosen.to_arrow() if hasattr(chosen, "to_arrow") else pa.table(chosen)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        cause = extract_reason(error)
        raise InvalidInputError(f"The column {column!r} of {name} cannot be the ids: {cause}.") from None
    dtype = require_ids(table.schema, table.schema, column, name)
    parts = [dictionary_decode_ids(part) for part in table.column(column).chunks]
    return pa.concat_arrays(parts) if table.num_rows else pa.array([], dtype)


def _checksum_values(values: npt.NDArray[np.generic]) -> int:
    """Return the CRC-32C of values in C order, whatever their memory order, without a full copy."""
    checksum = 0
    for part in row_slices(len(values), max(1, _CHECKSUM_VALUES * len(values) // max(1, values.size))):
        checksum = google_crc32c.extend(checksum, view_as_uint8(np.ascontiguousarray(values[part])))
    return checksum


def _checksum_ids(ids: "pa.Array") -> int:
    import pyarrow as pa

    return int(google_crc32c.value(pa.record_batch([ids], ["ids"]).serialize().to_pybytes()))
