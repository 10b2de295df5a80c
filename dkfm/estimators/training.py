"""What a fit is given: points, or the Gram matrix itself."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from dkfm import gram, store
from dkfm.errors import InvalidInputError
from dkfm.kernels.base import Kernel
from dkfm.kernels.rows import Array, Rows, as_array, as_rows, double
from dkfm.sources import MemorySource, Source, open_source, read_finite
from dkfm.tiling import row_slices

if TYPE_CHECKING:
    import dask.array as da

__all__ = ["GivenGram", "Points", "Training", "training"]

_TILE_VALUES = 2**23
"""Of a Gram matrix, read at a time."""

_GRAM = "The Gram matrix"

_SYMMETRY = 1e-8
"""Of the largest value: more than rounding does to a kernel that is symmetric."""


class Training(Protocol):
    """Training rows, as the fitted model will score them."""

    @property
    def kernel(self) -> Kernel:
        """The kernel, every parameter resolved."""

    @property
    def landmarks(self) -> Rows:
        """The model's landmarks."""

    @property
    def width(self) -> int:
        """How many float64 values a landmark takes."""

    def gram(self, tile_rows: int | None, workspace: str | Path | None) -> Array:
        """Return the Gram matrix, Fortran-contiguous, in fresh memory."""

    def tiles(self) -> Iterator[Rows]:
        """Yield all rows, some at a time."""

    def some(self, numbers: npt.NDArray[np.intp]) -> Rows:
        """Return the rows of some ascending numbers."""


@dataclass(frozen=True, eq=False)
class Points:
    """Rows that a kernel compares: they are the landmarks."""

    kernel: Kernel
    landmarks: Rows
    width: int

    def gram(self, tile_rows: int | None, workspace: str | Path | None) -> Array:
        """Return k(X, X), computed on the current Dask client or on threads of this process."""
        return gram.driver_gram(self.kernel, self.landmarks, tile_rows=tile_rows, workspace=workspace)

    def tiles(self) -> Iterator[Rows]:
        """Yield all rows at once: a model takes its own tiles of what is in memory."""
        yield self.landmarks

    def some(self, numbers: npt.NDArray[np.intp]) -> Rows:
        """Return some landmarks."""
        return self.landmarks[numbers]


@dataclass(frozen=True, eq=False)
class GivenGram:
    """A Gram matrix that the user brings; the landmarks are the numbers of its columns."""

    kernel: Kernel
    source: Source

    @property
    def landmarks(self) -> Array:
        """The numbers of the columns, (N, 1)."""
        return np.arange(self.source.shape[0], dtype=np.float64)[:, np.newaxis]

    width = 1

    def gram(self, tile_rows: int | None, workspace: str | Path | None) -> Array:
        """Return a copy of the matrix, once it is seen to be symmetric."""
        n = self.source.shape[0]
        K = np.empty((n, n), order="F")
        for rows, tile in self._tiles():
            K.T[rows] = tile
        _require_symmetric(K)
        return K

    def tiles(self) -> Iterator[Rows]:
        """Yield the rows of the matrix."""
        return (tile for _, tile in self._tiles())

    def some(self, numbers: npt.NDArray[np.intp]) -> Rows:
        """Return some rows of the matrix."""
        ends = ((rows, tile, np.searchsorted(numbers, [rows.start, rows.stop])) for rows, tile in self._tiles())
        return np.concatenate([tile[numbers[a:b] - rows.start] for rows, tile, (a, b) in ends])

    def _tiles(self) -> Iterator[tuple[slice, Array]]:
        n = self.source.shape[0]
        for rows in row_slices(n, max(1, _TILE_VALUES // n)):
            yield rows, _dense(read_finite(self.source, rows))


def training(kernel: Kernel, X: object) -> Training:
    """Return what a fit is given, checked; the kernel is resolved on it."""
    if kernel.of_numbers:
        return _given_dask(kernel, X) if hasattr(X, "__dask_graph__") else _given(kernel, open_source(X, _GRAM))
    rows = double(as_rows(X))
    resolved = kernel.resolve(rows)
    if not isinstance(rows, np.ndarray):
        return Points(resolved, rows.copy(), MemorySource(rows).row_values)
    # The landmarks are the model's own: the user may change the rows.
    own = rows.copy() if np.may_share_memory(rows, np.asarray(X)) else np.ascontiguousarray(rows)
    return Points(resolved, own, rows.shape[1])


def _given(kernel: Kernel, source: Source) -> GivenGram:
    if source.shape[0] != source.shape[1]:
        raise InvalidInputError(
            f"A precomputed kernel is fitted to a Gram matrix, square; the shape of this is {source.shape}."
        )
    return GivenGram(kernel.resolve(_dense(read_finite(source, slice(0, 1)))), source)


def _given_dask(kernel: Kernel, X: object) -> GivenGram:
    shape = getattr(X, "shape", ())
    if len(shape) != 2 or any(np.isnan(length) for length in shape):
        raise InvalidInputError("A Gram matrix as a dask array must have two dimensions of known lengths.")
    # A graph may cost more than it holds: every chunk is computed once, into a file that goes with the fit.
    folder = tempfile.mkdtemp(prefix="dkfm-given-")
    try:
        given = _given(kernel, _spooled(cast("da.Array", X), Path(folder) / "gram.npy"))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(given, shutil.rmtree, folder, ignore_errors=True)
    return given


def _spooled(X: "da.Array", path: Path) -> Source:
    with store.writing(path):
        spool = np.lib.format.open_memmap(path, "w+", np.float64, X.shape)
        start = 0
        for length in filter(None, X.chunks[0]):
            rows = slice(start, start + length)
            spool[rows] = _dense(as_array(X[rows].compute(), _GRAM))
            start += length
        spool.flush()
    return MemorySource(np.load(path, mmap_mode="r"), _GRAM)


def _dense(rows: Rows) -> Array:
    if not isinstance(rows, np.ndarray):
        raise InvalidInputError("A precomputed kernel takes dense rows, and these are sparse.")
    return rows


def _require_symmetric(K: Array) -> None:
    largest = max(float(K.max()), -float(K.min()))
    for rows in row_slices(len(K), 512):
        gap = np.abs(K[rows, : rows.stop] - K.T[rows, : rows.stop])
        if gap.max() > _SYMMETRY * largest:
            i, j = np.unravel_index(int(gap.argmax()), gap.shape)
            raise InvalidInputError(f"The Gram matrix is not symmetric: its values at ({rows.start + i}, {j}) differ.")
