"""The protocol of sources: rows of an array, a file or a store, read by slices.

A source on disk is a value of a few words: it travels in a task, and opens its file where it is read.
"""

from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

import numpy as np

from dkfm.core.rows import Rows, require_finite, stack_rows
from dkfm.files import location as locations
from dkfm.files.location import Location
from dkfm.storage import csr


class Source(Protocol):
    """Rows (n, d) that are read by slices."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def location(self) -> Location | None:
        """Where the rows are; None of those in memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def chunk_rows(self) -> int:
        """Rows that are read together whatever is asked for; 1 where it does not matter."""

    @property
    def row_values(self) -> int:
        """How many float64 values a row takes in memory; fewer than its columns where rows are sparse."""

    def values_of(self, rows: int) -> int:
        """Return how many float64 values any so many consecutive rows take in memory, at most."""

    def decoding_bytes(self, chunks: int) -> int:
        """Return the bytes that reading rows of so many chunks takes for a while, beside the rows themselves."""

    def with_float32(self) -> "Source":
        """Return a source whose rows of float32 are read as they are, for a model that would round them anyway."""

    def read(self, rows: slice) -> Rows:
        """Return some rows as float64, not checked for NaN; after `with_float32`, stored float32 stays as it is."""

    def stamp(self) -> str:
        """Return what is another text once the rows have changed: of names, sizes and times, or of values in memory."""

    def state(self) -> str:
        """Return what is another text once anything was written to the rows, whatever was done to the times since."""

    def is_of(self, stamp: str) -> bool:
        """Whether the rows are the ones that were opened, by a stamp that was taken since."""

    def where(self, row: int) -> tuple[str, int]:
        """Return the name of the file that holds a row, and the number of the row in it."""


@runtime_checkable
class Named(Protocol):
    """Rows whose columns have names."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""


@dataclass(frozen=True)
class _Located:
    """Rows at a location, on this file system or on an object store."""

    location: Location
    shape: tuple[int, int]

    @property
    def name(self) -> str:
        """The path, or the URL without credentials."""
        return str(self.location)

    def decoding_bytes(self, chunks: int) -> int:
        """Return 0: rows are read where they will be."""
        return 0

    def stamp(self) -> str:
        """Return a digest of names, sizes, and times of change or ETags."""
        return locations.stamp(self.location)

    def state(self) -> str:
        """Return a digest that no writer can bring back; on an object store the stamp."""
        return locations.state(self.location)

    def where(self, row: int) -> tuple[str, int]:
        """Return the name, and the row."""
        return self.name, row


@dataclass(frozen=True)
class DenseRows(_Located):
    """Dense rows of one file, array or table."""

    chunk_rows: int = 1
    keep_float32: bool = False
    """Whether rows of float32 are read as they are."""

    @property
    def row_values(self) -> int:
        """The columns."""
        return self.shape[1]

    def values_of(self, rows: int) -> int:
        """Return how many float64 values so many rows take in memory."""
        return rows * self.shape[1]

    def with_float32(self) -> Self:
        """Return a source whose rows of float32 are read as they are."""
        return replace(self, keep_float32=True)


@dataclass(frozen=True)
class CsrRows(_Located):
    """CSR rows of one file or store."""

    row_values: int
    runs: tuple[int, ...]
    """Values that 1, 2, 4, .. consecutive rows hold at most."""
    chunk_rows = 1

    def values_of(self, rows: int) -> int:
        """Return how many float64 values take the memory of any so many consecutive rows, at most."""
        return csr.values_in_rows(self.runs, rows)

    def with_float32(self) -> Self:
        """Return the source: sparse rows are float64."""
        return self


def read_finite(source: Source, rows: slice) -> Rows:
    """Read some rows and raise with the number of the first that is not finite."""
    values = source.read(rows)
    require_finite(values, source.name, rows.start)
    return values


def sample_rows(source: Source, rows: int) -> Rows:
    """Read about `rows` rows in sixteen runs, evenly spread over the source."""
    n = source.shape[0]
    run = max(1, rows // 16)
    if n <= rows:
        return read_finite(source, slice(0, n))
    starts = np.linspace(0, n - run, 16).astype(np.intp)
    return stack_rows([read_finite(source, slice(int(a), int(a) + run)) for a in starts])
