"""What a fit is given: points, or the Gram matrix itself."""

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt
from sklearn.preprocessing import StandardScaler

from dkfm.core.chunking import row_slices
from dkfm.core.frames import is_dask_array, is_dask_collection, unwrap
from dkfm.core.rows import Array, Rows, as_array, as_float64, as_rows
from dkfm.errors import InvalidInputError, KernelError, NotSupportedError
from dkfm.files import local, temporary
from dkfm.gram import build
from dkfm.kernels import Affine
from dkfm.kernels.base import Kernel
from dkfm.sources.base import Source, read_finite
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd

TILE_VALUES = 2**23
"""Of a Gram matrix, read at a time."""

_GRAM = "The Gram matrix"

_SYMMETRY = 1e-8
"""Of the largest value: more than rounding does to a kernel that is symmetric."""

_LEAST_WEIGHT = float(np.finfo(np.float64).tiny / np.finfo(np.float64).eps)
"""Of the largest sample weight: with it kernel values of 1 have all their digits, and as many more below them."""

Numbers = npt.NDArray[np.intp]


class TrainingData(Protocol):
    """Training rows, as the fitted model will score them."""

    @property
    def kernel(self) -> Kernel:
        """The kernel, every parameter resolved."""

    @property
    def landmarks(self) -> Rows:
        """The rows as landmarks of a model."""

    @property
    def width(self) -> int:
        """How many float64 values a landmark takes."""

    @property
    def numbers(self) -> "Numbers | None":
        """Which of the rows that a fit was given they are, where they are of them."""

    def gram(self, tile_rows: int | None, workspace: str | Path | None, progress: bool = False) -> Array:
        """Return the Gram matrix, Fortran-contiguous, in fresh memory."""

    def tiles(self) -> Iterator[Rows]:
        """Yield all rows, some at a time."""

    def some(self, numbers: Numbers) -> Rows:
        """Return the rows of some numbers."""

    def diagonal(self) -> Array:
        """Return k(x, x) of all rows, (N,)."""

    def columns(self) -> Callable[[int], Array]:
        """Return the function from the number of a row to its kernel values with all rows, (N,)."""

    def subset(self, numbers: Numbers) -> "TrainingData":
        """Return some of the rows as training rows themselves."""


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows that a kernel compares: they are the landmarks."""

    kernel: Kernel
    landmarks: Rows
    width: int
    numbers: Numbers | None = None

    def gram(self, tile_rows: int | None, workspace: str | Path | None, progress: bool = False) -> Array:
        """Return k(X, X), computed on the current Dask client or on threads of this process."""
        return build.driver_gram(
            self.kernel, self.landmarks, tile_rows=tile_rows, workspace=workspace, progress=progress
        )

    def tiles(self) -> Iterator[Rows]:
        """Yield all rows at once: a model takes its own tiles of what is in memory."""
        yield self.landmarks

    def some(self, numbers: Numbers) -> Rows:
        """Return some landmarks."""
        return self.landmarks[numbers]

    def diagonal(self) -> Array:
        """Return the self-similarities."""
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            found = self.kernel.evaluate_diagonal(self.landmarks)
        if not np.isfinite(found).all():
            row = int(np.isfinite(found).argmin())
            raise KernelError(f"{self.kernel!r} returned {found[row]} for rows {row} and {row}.")
        return found

    def subset(self, numbers: Numbers) -> "TrainingRows":
        """Return some of the points."""
        among = None if self.numbers is None else self.numbers[numbers]
        return TrainingRows(self.kernel, self.landmarks[numbers], self.width, among)

    def columns(self) -> Callable[[int], Array]:
        """Return the function from the number of a row to its kernel values with all rows, (N,)."""
        values = self.kernel.make_evaluator(self.landmarks)

        def column(number: int) -> Array:
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
                found: Array = values(self.landmarks[number : number + 1])[0]
            if not np.isfinite(found).all():
                other = int(np.isfinite(found).argmin())
                raise KernelError(f"{self.kernel!r} returned {found[other]} for rows {number} and {other}.")
            return found

        return column


@dataclass(frozen=True, eq=False)
class PrecomputedGram:
    """A Gram matrix that the user brings; the landmarks are the numbers of its columns, all or some."""

    kernel: Kernel
    source: Source
    numbers: Numbers

    @property
    def landmarks(self) -> Array:
        """The numbers of the columns, (N, 1)."""
        return self.numbers.astype(np.float64)[:, np.newaxis]

    width = 1

    def gram(self, tile_rows: int | None, workspace: str | Path | None, progress: bool = False) -> Array:
        """Return a copy of the matrix, or of the part that is of the numbers, once it is seen to be symmetric."""
        n = len(self.numbers)
        K, start = np.empty((n, n), order="F"), 0
        for tile in self.tiles():
            K.T[start : start + len(tile)] = tile[:, self.numbers]
            start += len(tile)
        _require_symmetric(K)
        return K

    def tiles(self) -> Iterator[Array]:
        """Yield the rows of the matrix that are of the numbers."""
        rows_at_once = max(1, TILE_VALUES // self.source.shape[1])
        for part in row_slices(len(self.numbers), rows_at_once):
            yield self._rows(self.numbers[part])

    def some(self, numbers: Numbers) -> Rows:
        """Return some rows of the matrix."""
        return self._rows(self.numbers[numbers])

    def diagonal(self) -> Array:
        """Return the diagonal of the matrix."""
        diagonal, start = np.empty(len(self.numbers)), 0
        for tile in self.tiles():
            place = slice(start, start + len(tile))
            diagonal[place] = tile[np.arange(len(tile)), self.numbers[place]]
            start = place.stop
        return diagonal

    def columns(self) -> Callable[[int], Array]:
        """Return the function from the number of a row to its kernel values with all rows, (N,)."""
        K = self.gram(None, None)
        return lambda number: K[:, number].copy()

    def subset(self, numbers: Numbers) -> "PrecomputedGram":
        """Return the part of some rows and columns."""
        return PrecomputedGram(self.kernel, self.source, self.numbers[numbers])

    def _rows(self, numbers: Numbers) -> Array:
        """Return rows of the matrix, read in runs that lie beside each other."""
        ascending, back = np.unique(numbers, return_inverse=True)
        runs = np.split(ascending, np.flatnonzero(np.diff(ascending) > 1) + 1)
        rows = np.concatenate([_dense(read_finite(self.source, slice(int(r[0]), int(r[-1]) + 1))) for r in runs])
        return rows if len(back) == len(ascending) and (np.diff(back) == 1).all() else rows[back]


def load_lazy_frame(X: object) -> object:
    """Return what a fit is given: a dask data frame as one in memory, anything else `unwrap`."""
    X = unwrap(X)
    lazy_frame = hasattr(X, "map_partitions") and hasattr(X, "compute") and not is_dask_array(X)
    return cast("dd.DataFrame", X).compute() if lazy_frame else X


def is_float32(X: object) -> bool:
    """Whether all that a fit is given is float32."""
    types = np.ravel(np.asarray(getattr(X, "dtypes", getattr(X, "dtype", None)), dtype=object))
    return len(types) > 0 and all(kind == np.float32 for kind in types)


def as_training_data(kernel: Kernel, X: object, *, copy: bool = True) -> TrainingData:
    """Return what a fit is given, checked; the kernel is resolved on it. Without `copy` the rows stay the user's."""
    if kernel.is_precomputed:
        return _given_dask(kernel, X) if is_dask_collection(X) else _given(kernel, open_source(X, _GRAM))
    rows = as_float64(as_rows(X))
    resolved = kernel.resolve(rows)
    if not isinstance(rows, np.ndarray):
        own_rows = rows.copy() if copy else rows
        return TrainingRows(resolved, own_rows, MemorySource(rows).row_values, np.arange(rows.shape[0]))
    # The landmarks are the model's own: the user may change the rows.
    own = rows.copy() if copy and np.may_share_memory(rows, np.asarray(X)) else np.ascontiguousarray(rows)
    return TrainingRows(resolved, own, rows.shape[1], np.arange(len(own)))


def standardize_columns(kernel: Kernel, X: object, sample_weight: object) -> tuple[Kernel, dict[str, object]]:
    """Return the kernel of rows whose columns have the mean 0 and the variance 1 over X, and what they had."""
    if kernel.is_precomputed:
        raise InvalidInputError("A precomputed kernel has no rows to standardize.")
    rows = as_float64(as_rows(X))
    if not isinstance(rows, np.ndarray):
        raise NotSupportedError("Sparse rows are not standardized: centred they would be dense.")
    weights = None if sample_weight is None else _checked(sample_weight, len(rows))
    scaler = StandardScaler().fit(rows, sample_weight=weights)  # it knows which columns are constant up to rounding
    mean, scale = scaler.mean_, scaler.scale_
    return kernel.warp(Affine(tuple(1 / scale), tuple(-mean / scale))), {"mean": mean, "scale": scale}


def apply_weights(given: TrainingData, sample_weight: object) -> tuple[TrainingData, Array]:
    """Return the training rows of a positive weight, and the weights (N,); all are 1 without any."""
    n = given.landmarks.shape[0]
    if sample_weight is None:
        return given, np.ones(n)
    weights = _checked(sample_weight, n)
    kept = np.flatnonzero(weights)
    return (given, weights) if len(kept) == n else (given.subset(kept), weights[kept])


def _checked(sample_weight: object, n: int) -> Array:
    weights = np.asarray(sample_weight)
    if weights.shape != (n,) or weights.dtype.kind not in "biuf":
        raise InvalidInputError(
            f"sample_weight must be a number for each row, {(n,)}, and its shape is {weights.shape}."
        )
    weights = weights.astype(np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
        raise InvalidInputError("sample_weight must be finite, not negative, and not zero for every row.")
    with np.errstate(over="ignore"):  # what overflows is refused here
        most, total = float(weights.max()), float(weights.sum())
    if most < _LEAST_WEIGHT or total == np.inf:
        raise InvalidInputError(
            f"sample_weight must have a finite sum and a largest weight of at least {_LEAST_WEIGHT:.0e}, for their "
            f"products with kernel values, and has {total:.1e} and {most:.1e}; multiply the weights by a number."
        )
    return weights


def _given(kernel: Kernel, source: Source) -> PrecomputedGram:
    if source.shape[0] != source.shape[1]:
        raise InvalidInputError(
            f"A precomputed kernel is fitted to a Gram matrix, square; the shape of this is {source.shape}."
        )
    return PrecomputedGram(kernel.resolve(_dense(read_finite(source, slice(0, 1)))), source, np.arange(source.shape[0]))


def _given_dask(kernel: Kernel, X: object) -> PrecomputedGram:
    shape = getattr(X, "shape", ())
    if len(shape) != 2 or any(np.isnan(length) for length in shape):
        raise InvalidInputError("A Gram matrix as a dask array must have two dimensions of known lengths.")
    # A graph may cost more than it holds: every chunk is computed once.
    return _given(kernel, _spooled(cast("da.Array", X)))


def _spooled(X: "da.Array") -> Source:
    """Write a matrix to a file without a name, which is gone with the last array that maps it, or with the process."""
    place, start = Path(tempfile.gettempdir()), 0
    temporary.require_room(place, 8 * math.prod(X.shape), "The Gram matrix")
    with local.translate_write_errors(place), tempfile.TemporaryFile() as file:
        for length in filter(None, X.chunks[0]):
            # Written, not mapped: on a full disk a mapped page ends the process.
            rows = _dense(as_array(X[start : start + length].compute(), _GRAM))
            file.write(np.ascontiguousarray(rows, np.float64).data)
            start += length
        file.flush()
        return MemorySource(np.memmap(file, np.float64, "r", shape=X.shape), _GRAM)


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
