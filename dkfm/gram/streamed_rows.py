"""Training rows of a source that are never in memory together: a file, a store or an object that is read in tiles."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import zarr

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, stack_rows
from dkfm.errors import KernelError
from dkfm.files.change_detection import Watch
from dkfm.files.row_values import allocate_row_values
from dkfm.gram.training_data import Indices, TrainingRows
from dkfm.kernels.base import Kernel
from dkfm.numerics.certificates import kernel_rounding
from dkfm.sources.base import Source, read_evenly_spaced_rows, read_finite

_TILE_VALUES = 2**21
"""Number of values of the rows that are read at a time."""

_RESOLVING_ROWS = 4096
"""Number of evenly spread rows on which a kernel is resolved, for example to the median distance."""


def is_stored(X: object) -> bool:
    """Return whether X refers to stored rows: a path, a URL, or a Zarr array on disk."""
    return isinstance(X, str | os.PathLike) or (isinstance(X, zarr.Array) and hasattr(X.store, "root"))


def evaluate_finite_diagonal(kernel: Kernel, tile: Rows, start: int) -> Array:
    """Return k(x, x) of a tile of rows from number `start` on, (n,); raise a KernelError if one is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite raise below
        diagonal = kernel.evaluate_diagonal(tile)
    if not np.isfinite(diagonal).all():
        at = int(np.isfinite(diagonal).argmin())
        raise KernelError(f"{kernel!r} returned {diagonal[at]} for row {start + at} with itself.")
    return diagonal


@dataclass(frozen=True, eq=False)
class StreamedRows:
    """Training rows of a source, which are read a few at a time."""

    kernel: Kernel
    source: Source
    watch: Watch | None = None
    """Watch of the source since it was opened, if it may change."""

    @classmethod
    def from_source(cls, kernel: Kernel, rows: "SourceRows") -> "StreamedRows":
        """Return the rows of a source, with the kernel resolved on some of them."""
        return cls(kernel.resolve(read_evenly_spaced_rows(rows.source, _RESOLVING_ROWS)), rows.source, rows.watch)

    @property
    def indexable_rows(self) -> Rows:
        """The rows as `SourceRows`, which reads selected rows."""
        return cast("Rows", SourceRows(self.source))

    @property
    def float64s_per_row(self) -> int:
        """Average memory of a row, in float64 values."""
        return self.source.float64s_per_row

    original_row_indices = None

    def compute_gram(self, tile_rows: int | None, workspace: str | Path | None, progress: bool = False) -> Array:
        """Return k(X, X) of all rows, which are read into memory."""
        return self._load().compute_gram(tile_rows, workspace, progress)

    def iter_row_tiles(self) -> Iterator[Rows]:
        """Yield all rows in blocks."""
        tile_rows = max(1, _TILE_VALUES // max(1, self.float64s_per_row))
        return (read_finite(self.source, part) for part in row_slices(self.source.shape[0], tile_rows))

    def take_rows(self, numbers: Indices) -> Rows:
        """Return the rows of the given numbers."""
        return self.indexable_rows[numbers]

    def diagonal(self) -> Array:
        """Return k(x, x) of all rows, (N,)."""
        diagonal, start = allocate_row_values(self.source.shape[0]), 0
        for tile in self.iter_row_tiles():
            values = evaluate_finite_diagonal(self.kernel, tile, start)
            diagonal[start : start + len(values)] = values
            start += len(values)
        return diagonal

    def find_rounding_probe_rows(self, diagonal: Array) -> Indices:
        """Return the numbers of the rows with the largest rounding errors, given k(x, x) (N,) of all rows."""
        found, start = [], 0
        for tile in self.iter_row_tiles():
            found.append(
                start + kernel_rounding.find_rounding_probe_rows(tile, diagonal[start : start + tile.shape[0]])
            )
            start += tile.shape[0]
        numbers = np.concatenate(found)
        extreme: Indices = numbers[kernel_rounding.find_rounding_probe_rows(self.take_rows(numbers), diagonal[numbers])]
        return np.sort(extreme)

    def make_column_evaluator(self) -> Callable[[int], Array]:
        """Return a function that computes the kernel values (N,) of a row with all rows, which are read into memory."""
        return self._load().make_column_evaluator()

    def subset(self, numbers: Indices) -> TrainingRows:
        """Return some rows in memory."""
        return TrainingRows(self.kernel, self.take_rows(numbers), self.float64s_per_row, numbers)

    def _load(self) -> TrainingRows:
        return self.subset(np.arange(self.source.shape[0]))


@dataclass(frozen=True, eq=False)
class SourceRows:
    """Rows of a source, indexed by number like those of an array."""

    source: Source
    watch: Watch | None = None
    """Watch of the source since it was opened, if it may change."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.source.shape

    def __getitem__(self, numbers: Indices) -> Rows:
        """Read the rows of the given numbers; rows that are close together are read together."""
        ascending, inverse = np.unique(numbers, return_inverse=True)
        tile_rows = max(1, _TILE_VALUES // max(1, self.source.float64s_per_row))
        breaks = np.flatnonzero(np.diff(ascending) > max(1, self.source.chunk_rows)) + 1
        parts = []
        for run in np.split(ascending, breaks):
            for group in np.split(run, np.flatnonzero(np.diff(run // tile_rows)) + 1):
                first = int(group[0])
                parts.append(read_finite(self.source, slice(first, int(group[-1]) + 1))[group - first])
        return stack_rows(parts)[inverse]
