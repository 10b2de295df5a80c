"""Define the protocol of sources: rows of an array, a file or a store that are read by slices.

A source on disk is a small value: it is serialized with a task, and opens its file where it is read.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, runtime_checkable

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Rows, require_finite, stack_rows
from dkfm.files import location as locations
from dkfm.files.location import Location
from dkfm.storage import csr

_READ_VALUES = 2**22
"""Values read at a time to compute a digest."""


class Source(Protocol):
    """Rows (n, d) that are read by slices."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def location(self) -> Location | None:
        """Location of the rows; None if they are in memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""

    @property
    def chunk_rows(self) -> int:
        """Number of rows that are always read together, even if fewer are requested; 1 if rows can be read singly."""

    @property
    def float64s_per_row(self) -> int:
        """Average memory of a row, in float64 values; less than the number of columns if rows are sparse."""

    def max_size_in_float64s(self, rows: int) -> int:
        """Return the largest memory of any `rows` consecutive rows, in float64 values."""

    def read_overhead_bytes(self, chunks: int) -> int:
        """Return the bytes that reading rows of `chunks` chunks needs temporarily, in addition to the rows."""

    @property
    def cached_bytes(self) -> int:
        """Bytes that a process keeps of the source between reads, in addition to decoded chunks."""

    def with_float32_preserved(self) -> "Source":
        """Return a source that reads float32 rows as float32, for a model that would round them anyway."""

    def read(self, rows: slice) -> Rows:
        """Return some rows as float64, unchecked; stored float32 stays so after `with_float32_preserved`."""

    def stamp(self, *, include_ctime: bool = False) -> str:
        """Return a digest that changes when the rows change: of names, sizes and times, or of values in memory.

        If `include_ctime`, it changes when anything is written to the rows, even if times of change are set back.
        """

    def is_opening_valid(self, current_stamp: str) -> bool:
        """Return whether the rows are still those that were opened, given a later `current_stamp`."""

    def locate_row(self, row: int) -> tuple[str, int]:
        """Return the name of the file that contains a row, and the row number in that file."""


@runtime_checkable
class NamedColumns(Protocol):
    """A source whose columns have names."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are read."""


@dataclass(frozen=True)
class _Located:
    """Rows at a location, on this file system or on an object store."""

    location: Location
    shape: tuple[int, int]
    given_name: str = field(default="", compare=False, kw_only=True)
    """Name in messages, of a copy of what the user gave; empty if the location was given."""

    @property
    def name(self) -> str:
        """The given name, or the path, or the URL without credentials."""
        return self.given_name or str(self.location)

    def read_overhead_bytes(self, chunks: int) -> int:
        """Return 0: rows are read directly into the result."""
        return 0

    @property
    def cached_bytes(self) -> int:
        """0: nothing is kept."""
        return 0

    def stamp(self, *, include_ctime: bool = False) -> str:
        """Return a digest of names, sizes, and times of change or ETags."""
        return locations.stamp(self.location, include_ctime=include_ctime)

    def locate_row(self, row: int) -> tuple[str, int]:
        """Return the name of the source, and the row."""
        return self.name, row


@dataclass(frozen=True)
class DenseRows(_Located):
    """Dense rows of one file, array or table."""

    chunk_rows: int = 1
    keep_float32: bool = False
    """Whether float32 rows are read as float32."""

    @property
    def float64s_per_row(self) -> int:
        """Number of columns."""
        return self.shape[1]

    def max_size_in_float64s(self, rows: int) -> int:
        """Return the memory of `rows` rows, in float64 values."""
        return rows * self.shape[1]

    def with_float32_preserved(self) -> Self:
        """Return a source that reads float32 rows as float32."""
        return replace(self, keep_float32=True)


@dataclass(frozen=True)
class CsrRows(_Located):
    """CSR rows of one file or store."""

    float64s_per_row: int
    max_nnz_per_row_window: tuple[int, ...]
    """Largest numbers of stored values in 1, 2, 4, .. consecutive rows."""
    chunk_rows = 1

    def max_size_in_float64s(self, rows: int) -> int:
        """Return the largest memory of any `rows` consecutive rows, in float64 values."""
        return csr.max_csr_size_in_float64s(self.max_nnz_per_row_window, rows)

    def with_float32_preserved(self) -> Self:
        """Return the source itself: sparse rows are always float64."""
        return self


def read_finite(source: Source, rows: slice) -> Rows:
    """Read some rows; raise an InvalidInputError with the file and number of the first row that is not finite."""
    values = source.read(rows)
    columns = source.columns if isinstance(source, NamedColumns) else None
    require_finite(values, source.name, lambda row: source.locate_row(rows.start + row), columns)
    return values


def read_evenly_spaced_rows(source: Source, rows: int) -> Rows:
    """Read about `rows` rows, in sixteen runs evenly spread over the source; raise if one is not finite."""
    n = source.shape[0]
    run_rows = max(1, rows // 16)
    if n <= rows:
        return read_finite(source, slice(0, n))
    starts = np.linspace(0, n - run_rows, 16).astype(np.intp)
    return stack_rows([read_finite(source, slice(int(start), int(start) + run_rows)) for start in starts])


def digest_rows(source: Source) -> str:
    """Return a SHA-256 digest of all rows as float64."""
    sums = hashlib.sha256()
    for part in row_slices(source.shape[0], max(1, _READ_VALUES // source.shape[1])):
        rows = read_finite(source, part)
        for values in [rows] if isinstance(rows, np.ndarray) else [rows.data, rows.indices, np.diff(rows.indptr)]:
            sums.update(values.astype(np.float64, order="C", copy=False).data)
    return sums.hexdigest()
