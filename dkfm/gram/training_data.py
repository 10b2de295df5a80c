"""Training data of a fit: rows, or a precomputed Gram matrix."""

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.frames import convert_container, is_dask_array, is_dask_collection
from dkfm.core.rows import Array, Rows, as_float64, as_rows, as_rows_allow_nonfinite, require_unmasked
from dkfm.errors import InvalidInputError, KernelError, NotSupportedError
from dkfm.files import local, temporary_folders
from dkfm.kernels.base import Kernel
from dkfm.numerics.certificates import kernel_rounding
from dkfm.numerics.model import Model
from dkfm.sources.base import Source, read_finite
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd

TILE_VALUES = 2**23
"""Number of values of a Gram matrix that are read at a time."""

_GRAM_NAME = "The Gram matrix"

_FLOAT32_NAMES = ("float32", "Float32", "float")
"""Names of float32 in NumPy, in polars and pandas, and in Arrow."""

_SYMMETRY_TOLERANCE = 1e-8
"""Difference, relative to the largest value, above which a Gram matrix is not symmetric; rounding stays below it."""

_MIN_MAX_WEIGHT = float(np.finfo(np.float64).tiny / np.finfo(np.float64).eps)
"""Smallest allowed maximum of the sample weights; its products with kernel values down to eps keep all digits."""

Indices = npt.NDArray[np.intp]


class TrainingData(Protocol):
    """Training rows, in the form in which the fitted model scores them."""

    @property
    def kernel(self) -> Kernel:
        """Kernel with all parameters resolved."""

    @property
    def indexable_rows(self) -> Rows:
        """Rows that can be taken by index: the points (N, d), or the row indices (N, 1) of a precomputed kernel.

        They are the landmarks of a model of all rows.
        """

    @property
    def float64s_per_row(self) -> int:
        """Average memory of a row, in float64 values: d for dense rows, 1 for indices, by stored values for CSR."""

    @property
    def original_row_indices(self) -> "Indices | None":
        """Indices (N,) of these rows among the rows passed to the fit; None if they are other points."""

    def compute_gram(self, tile_rows: int | None, workspace: str | Path | None, progress: bool = False) -> Array:
        """Return the Gram matrix (N, N), Fortran-contiguous, in a new array."""

    def iter_row_tiles(self) -> Iterator[Rows]:
        """Yield all rows in blocks of consecutive rows; for a precomputed kernel, rows of the Gram matrix."""

    def take_rows(self, numbers: Indices) -> Rows:
        """Return the rows at the given positions, as the model scores them: points, or whole rows of the matrix."""

    def diagonal(self) -> Array:
        """Return k(x, x) of all rows, (N,)."""

    def find_rounding_probe_rows(self, diagonal: Array) -> Indices:
        """Return the positions of the rows that round most, given the k(x, x) (N,) of all."""

    def make_column_evaluator(self) -> Callable[[int], Array]:
        """Return a function that computes the kernel values (N,) of a row, given by its index, with all rows."""

    def subset(self, numbers: Indices) -> "TrainingData":
        """Return the training data of the given rows."""


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Training rows that the kernel compares directly."""

    kernel: Kernel
    indexable_rows: Rows
    float64s_per_row: int
    """As in `TrainingData`; 0 if the rows are only to be certified, not fitted."""
    original_row_indices: Indices | None = None

    def compute_gram(self, tile_rows: int | None, workspace: str | Path | None, progress: bool = False) -> Array:
        """Return k(X, X), computed on the current Dask client or on threads of this process."""
        from dkfm.gram import build

        return build.compute_driver_gram(
            self.kernel, self.indexable_rows, tile_rows=tile_rows, workspace=workspace, progress=progress
        )

    def iter_row_tiles(self) -> Iterator[Rows]:
        """Yield all rows at once; a model splits rows in memory into tiles itself."""
        yield self.indexable_rows

    def take_rows(self, numbers: Indices) -> Rows:
        """Return the rows of the given indices."""
        return self.indexable_rows[numbers]

    def diagonal(self) -> Array:
        """Return k(x, x) of all rows, (N,)."""
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite raise below
            diagonal = self.kernel.evaluate_diagonal(self.indexable_rows)
        if not np.isfinite(diagonal).all():
            row = int(np.isfinite(diagonal).argmin())
            raise KernelError(f"{self.kernel!r} returned {diagonal[row]} for rows {row} and {row}.")
        return diagonal

    def subset(self, numbers: Indices) -> "TrainingRows":
        """Return the training data of the given rows."""
        original_numbers = None if self.original_row_indices is None else self.original_row_indices[numbers]
        return TrainingRows(self.kernel, self.indexable_rows[numbers], self.float64s_per_row, original_numbers)

    def find_rounding_probe_rows(self, diagonal: Array) -> Indices:
        """Return the positions of the rows that round most, given the k(x, x) (N,) of all."""
        return kernel_rounding.find_rounding_probe_rows(self.indexable_rows, diagonal)

    def make_column_evaluator(self) -> Callable[[int], Array]:
        """Return a function that computes the kernel values (N,) of a row, given by its index, with all rows."""
        evaluator = self.kernel.make_evaluator(self.indexable_rows)

        def evaluate_column(number: int) -> Array:
            with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite raise below
                column: Array = evaluator(self.indexable_rows[number : number + 1])[0]
            if not np.isfinite(column).all():
                other = int(np.isfinite(column).argmin())
                raise KernelError(f"{self.kernel!r} returned {column[other]} for rows {number} and {other}.")
            return column

        return evaluate_column


@dataclass(frozen=True, eq=False)
class PrecomputedGram:
    """A Gram matrix passed by the user, or some of its rows and the columns of the same indices."""

    kernel: Kernel
    source: Source
    original_row_indices: Indices

    @property
    def indexable_rows(self) -> Array:
        """Indices of the columns, (N, 1)."""
        return self.original_row_indices.astype(np.float64)[:, np.newaxis]

    float64s_per_row = 1

    def compute_gram(self, tile_rows: int | None, workspace: str | Path | None, progress: bool = False) -> Array:
        """Return a copy of the rows and columns of the indices; raise an InvalidInputError unless it is symmetric."""
        n = len(self.original_row_indices)
        K, start = np.empty((n, n), order="F"), 0
        for tile in self.iter_row_tiles():
            K.T[start : start + len(tile)] = tile[:, self.original_row_indices]
            start += len(tile)
        _require_symmetric(K)
        return K

    def iter_row_tiles(self) -> Iterator[Array]:
        """Yield the rows of the indices in tiles; each row has all columns of the matrix."""
        for tile in row_slices(len(self.original_row_indices), max(1, TILE_VALUES // self.source.shape[1])):
            yield self._read_matrix_rows(self.original_row_indices[tile])

    def take_rows(self, numbers: Indices) -> Rows:
        """Return the rows at the given positions of `original_row_indices`; each has all columns of the matrix."""
        return self._read_matrix_rows(self.original_row_indices[numbers])

    def diagonal(self) -> Array:
        """Return k(x, x) of the rows of the indices, (N,)."""
        diagonal, start = np.empty(len(self.original_row_indices)), 0
        for tile in self.iter_row_tiles():
            rows = slice(start, start + len(tile))
            diagonal[rows] = tile[np.arange(len(tile)), self.original_row_indices[rows]]
            start = rows.stop
        return diagonal

    def find_rounding_probe_rows(self, diagonal: Array) -> Indices:
        """Return no positions, because the values of the matrix are exact."""
        return np.zeros(0, np.intp)

    def make_column_evaluator(self) -> Callable[[int], Array]:
        """Return a function that computes the kernel values (N,) of a row, given by its index, with all rows."""
        K = self.compute_gram(None, None)
        return lambda number: K[:, number].copy()

    def subset(self, numbers: Indices) -> "PrecomputedGram":
        """Return the part of the matrix with the given rows and columns."""
        return PrecomputedGram(self.kernel, self.source, self.original_row_indices[numbers])

    def _read_matrix_rows(self, numbers: Indices) -> Array:
        """Return rows of the matrix; consecutive rows are read together."""
        ascending, inverse = np.unique(numbers, return_inverse=True)
        runs = np.split(ascending, np.flatnonzero(np.diff(ascending) > 1) + 1)
        blocks = (read_finite(self.source, slice(int(run[0]), int(run[-1]) + 1)) for run in runs)
        rows = np.concatenate([_require_dense_gram(block) for block in blocks])
        return rows if len(inverse) == len(ascending) and (np.diff(inverse) == 1).all() else rows[inverse]


def compute_lazy_frame(X: object) -> object:
    """Return a dask data frame as a data frame in memory, and any other X as `convert_container` returns it."""
    X = convert_container(X)
    lazy_frame = hasattr(X, "map_partitions") and hasattr(X, "compute") and not is_dask_array(X)
    return cast("dd.DataFrame", X).compute() if lazy_frame else X


def is_float32(X: object) -> bool:
    """Return whether X, or every column of it, is float32."""
    X = convert_container(X)
    is_arrow = hasattr(type(X), "column_names")
    types = X.schema.types if is_arrow else getattr(X, "dtypes", getattr(X, "dtype", None))  # type: ignore[attr-defined]
    dtypes = np.ravel(np.asarray(types, dtype=object))
    return len(dtypes) > 0 and all(str(dtype) in _FLOAT32_NAMES for dtype in dtypes)


def as_training_data(kernel: Kernel, X: object, *, copy: bool = True) -> TrainingData:
    """Check the X of a fit and resolve the kernel on it; with `copy=False` the rows may share memory with X."""
    if kernel.is_precomputed:
        if is_dask_collection(X):
            return _gram_from_dask(kernel, X)
        return _gram_from_source(kernel, open_source(X, _GRAM_NAME))
    rows = as_float64(as_rows(X))
    resolved = kernel.resolve(rows)
    if not isinstance(rows, np.ndarray):
        owned_rows = rows.copy() if copy else rows
        return TrainingRows(resolved, owned_rows, MemorySource(rows).float64s_per_row, np.arange(rows.shape[0]))
    # The model owns its landmarks, because the user may change X later.
    owned = rows.copy() if copy and np.may_share_memory(rows, np.asarray(X)) else np.ascontiguousarray(rows)
    return TrainingRows(resolved, owned, rows.shape[1], np.arange(len(owned)))


def take_landmarks(model: Model, rows: TrainingData | None) -> TrainingData:
    """Return the landmarks of a model; those of a precomputed kernel are taken from its training `rows`, if given."""
    if rows is not None and model.kernel.is_precomputed:
        return rows.subset(np.asarray(model.original_landmarks)[:, 0].astype(np.intp))
    return TrainingRows(model.kernel, model.original_landmarks, 0)


def drop_zero_weights(
    data: TrainingData, sample_weight: object, kernel: Kernel | None = None
) -> tuple[TrainingData, Array]:
    """Return the training rows with positive weights, and these weights (N,); without `sample_weight` all are 1.

    If rows are left out, `kernel` is resolved on the remaining rows, because its width may be their median distance.
    Without `kernel`, the kernel of the data is kept.
    """
    n = data.indexable_rows.shape[0]
    if sample_weight is None:
        return data, np.ones(n)
    weights = check_sample_weight(sample_weight, n)
    positive = np.flatnonzero(weights)
    if len(positive) == n:
        return data, weights
    if not isinstance(data, TrainingRows | PrecomputedGram):
        raise NotSupportedError("Rows of weight 0 are left out of fits to rows in memory; leave them out of the file.")
    rows = data.subset(positive)
    if kernel is not None and isinstance(rows, TrainingRows):
        rows = replace(rows, kernel=kernel.resolve(rows.indexable_rows))
    return rows, weights[positive]


def check_sample_weight(sample_weight: object, n: int) -> Array:
    """Return the weights (n,) of rows as float64; raise unless they are finite, not negative and not all zero."""
    require_unmasked(sample_weight, "sample_weight")
    weights = np.asarray(sample_weight)
    if weights.shape != (n,) or weights.dtype.kind not in "biuf":
        raise InvalidInputError(
            f"sample_weight must be a number for each row, {(n,)}; its shape is {weights.shape}, and its dtype "
            f"{weights.dtype}."
        )
    weights = weights.astype(np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
        raise InvalidInputError("sample_weight must be finite, not negative, and not zero for every row.")
    with np.errstate(over="ignore"):  # an infinite sum raises below
        largest, total = float(weights.max()), float(weights.sum())
    if largest < _MIN_MAX_WEIGHT or total == np.inf:
        raise InvalidInputError(
            f"sample_weight must have a finite sum and a largest weight of at least {_MIN_MAX_WEIGHT:.0e}, for their "
            f"products with kernel values, and has {total:.1e} and {largest:.1e}; multiply the weights by a number."
        )
    return weights


def _gram_from_source(kernel: Kernel, source: Source) -> PrecomputedGram:
    if source.shape[0] != source.shape[1]:
        raise InvalidInputError(
            f"A precomputed kernel is fitted to a Gram matrix, square; the shape of this is {source.shape}."
        )
    resolved = kernel.resolve(_require_dense_gram(read_finite(source, slice(0, 1))))
    return PrecomputedGram(resolved, source, np.arange(source.shape[0]))


def _gram_from_dask(kernel: Kernel, X: object) -> PrecomputedGram:
    shape = getattr(X, "shape", ())
    if len(shape) != 2 or any(np.isnan(length) for length in shape):
        raise InvalidInputError("A Gram matrix as a dask array must have two dimensions of known lengths.")
    # A graph may be expensive to compute, so each chunk is computed once and written to a file.
    return _gram_from_source(kernel, _spool(cast("da.Array", X)))


def _spool(X: "da.Array") -> Source:
    """Write a matrix to an unnamed temporary file; it lasts as long as an array maps it."""
    folder, start = Path(tempfile.gettempdir()), 0
    temporary_folders.require_room(folder, 8 * math.prod(X.shape), "The Gram matrix")
    with local.translate_write_errors(folder), tempfile.TemporaryFile() as file:
        for length in filter(None, X.chunks[0]):
            # Writing to a memory map would kill the process on a full disk; `write` raises.
            rows = _require_dense_gram(as_rows_allow_nonfinite(X[start : start + length].compute(), _GRAM_NAME))
            file.write(np.ascontiguousarray(rows, np.float64).data)
            start += length
        file.flush()
        return MemorySource(np.memmap(file, np.float64, "r", shape=X.shape), _GRAM_NAME)


def _require_dense_gram(rows: Rows) -> Array:
    if not isinstance(rows, np.ndarray):
        raise InvalidInputError("A precomputed kernel takes dense rows, and these are sparse.")
    return rows


def _require_symmetric(K: Array) -> None:
    largest = max(float(K.max()), -float(K.min()))
    for rows in row_slices(len(K), 512):
        difference = np.abs(K[rows, : rows.stop] - K.T[rows, : rows.stop])
        if difference.max() > _SYMMETRY_TOLERANCE * largest:
            i, j = np.unravel_index(int(difference.argmax()), difference.shape)
            raise InvalidInputError(f"The Gram matrix is not symmetric: its values at ({rows.start + i}, {j}) differ.")
