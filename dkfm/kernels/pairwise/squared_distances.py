"""Compute squared Euclidean distances of all pairs by one GEMM (matrix product), and of near pairs from differences.

One GEMM of centred, augmented rows gives ``-|x - y|^2``; its error is at most ``8 eps (|x-c|^2 + |y-c|^2)``. Here ``c``
is the mean of the landmarks, or 0 if the mean is close to 0 or rows are sparse. If this error would cost digits of a
small distance, the distance is computed again from differences, so equal rows give exactly 0 in any tile. Distances at
which the error would change the kernel value are computed again too: in float64 for rows of large norms. If a float32
row has many such distances, the whole row is computed in float64. For rows with few columns, all distances are computed
from differences.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, as_float64, is_sparse, scale_columns, squared_norms
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.kernels.pairwise.block_operations import (
    Evaluator,
    PreparedBlock,
    find_pairs,
    has_llvm,
    recompute_rows_in_float64,
)
from dkfm.kernels.pairwise.distance_effects import (
    Effects,
    MapValues,
    VanishingPairs,
    find_squared_cutoff,
)
from dkfm.kernels.pairwise.inner_products import prepare_inner_products

FLOAT32_ERROR = 8 * float(np.finfo(np.float32).eps)
"""Error of a product in float32, relative to the sum of the squared norms of its two rows.

It holds for rows of different numbers. If all numbers of a row are equal, sums round in one direction, and the error
for 784 columns is up to four times as large.
"""

_FEW_COLUMNS = 4
"""Largest number of columns for which differences cost no more than a GEMM."""

_FEW_COMPILED_COLUMNS = 8
"""The same limit if differences are compiled, with the extra "fast"."""

_NEAR_SHARES = {np.dtype(np.float64): 1e-6, np.dtype(np.float32): 1e-2}
"""Share of |x-c|^2 + |y-c|^2 below which a squared distance is computed again from differences."""

_LARGE_NORMS = 64.0
"""Sum of the squared norms of two rows above which the error of a product is too large for an exponent."""

_LARGEST_FLOAT32_ERROR = 1.0
"""Error of a squared distance in float32 above which the whole row is computed in float64."""

_MANY = 1 / 48
"""Share of the landmarks above which a row is computed in float64 rather than pair by pair."""

_FEW_FLOAT64_COLUMNS = 10
"""Largest number of columns for which the product in float64 costs less than the search for pairs to compute again."""

_MANY_WITHIN_REACH = 1 / 24
"""Share of the mean squared distance above which, with few columns, too many pairs are within reach to search them."""

_ROWS_AT_ONCE = 64
"""Rows that are computed from differences at a time, and fewest rows whose near landmarks are searched at a time."""

_NARROW = 256
"""Largest number of columns for which landmarks are stored by columns; with more, BLAS copies them at little cost."""

_SMALL_MEAN = 1e-3
"""Squared norm of the mean, relative to the mean squared distance from it, up to which the mean counts as 0."""

_DIFFERENCES_AT_ONCE = 2**15
"""Differences in memory at a time."""

_SEARCHED_AT_ONCE = 2**16
"""Values of few landmarks among which near ones are searched at a time; a part of fewer costs mostly its calls."""

_EPS = float(np.finfo(np.float64).eps)

_EXPONENTIAL: Effects = ((np.exp, 1.0),)


def prepare_negative_squared_distances(
    landmarks: Rows,
    scale: float | Array,
    near: float = 0.0,
    effects: Effects = _EXPONENTIAL,
    dtype: np.dtype[np.floating] | None = None,
    map_values: MapValues | None = None,
) -> Evaluator:
    """Return a function from rows Z (n, d) to ``-sum_j ((z_j - x_j) / scale_j)^2`` (n, m), at most 0.

    Parameters
    ----------
    landmarks : ndarray or csr_array of shape (m, d)
        The rows x; Z has the same dtype.
    scale : float or ndarray of shape (d,)
        Divisor of all columns, or of each column.
    near : float
        Smallest share of the squared norms below which differences are used; kernels that take roots need a larger one.
    effects : tuple of (callable, float)
        Kernels that determine up to which distance errors matter, and factors of the minus squared distances they take;
        by default the exponential. If empty, only short distances are computed again.
    dtype : dtype, optional
        Precision of the products, by default that of the landmarks. float64 rows are centred before they are rounded to
        float32.
    map_values : callable, optional
        Kernel that is applied to the distances. Distances at which it is subnormal are replaced by a larger distance,
        at which it is 0.

    Returns
    -------
    Evaluator
        Function of rows Z and optionally an array `out` (n, m), which only dense rows use.
    """
    dtype = dtype or landmarks.dtype
    precision = _Precision(dtype, max(near, _NEAR_SHARES[dtype]), effects, VanishingPairs(map_values))
    sparse = _SparseProducts(landmarks, scale, precision)
    if not isinstance(landmarks, np.ndarray):
        return sparse
    d = landmarks.shape[1]
    is_narrow = d <= _FEW_COLUMNS or (d <= _FEW_COMPILED_COLUMNS and has_llvm())
    dense: PreparedBlock = (_Differences if is_narrow else _CentredProducts)(landmarks, scale, precision)
    return lambda Z, out=None, /: dense(Z, out) if isinstance(Z, np.ndarray) else sparse(Z)


class _Precision(NamedTuple):
    """Dtype of distances, and rules for which of them are computed again or overwritten."""

    dtype: np.dtype[np.floating]
    near: float
    """Share of the squared norms below which differences are used."""
    effects: Effects
    vanishing: VanishingPairs


class _Differences:
    """Compute minus squared distances of rows with a few columns from differences."""

    def __init__(self, landmarks: Array, scale: float | Array, precision: _Precision) -> None:
        self.landmarks, self.scale = landmarks, np.asarray(scale)
        self.dtype, _, _, self.vanishing = precision
        self.lowest, self.highest = landmarks.min(axis=0), landmarks.max(axis=0)
        self.compiled: Callable[[Array, Array], None] | None = None
        if has_llvm():
            from dkfm.kernels.pairwise.squares_llvm import CompiledSquares

            self.compiled = CompiledSquares(landmarks, -1 / np.square(self.scale))

    def __call__(self, Z: Array, out: Array | None = None) -> Array:
        squares: Array = np.empty((len(Z), len(self.landmarks)), self.dtype) if out is None else out
        fill = self.compiled or (self._subtract_numbers if Z.shape[1] == 1 else self._subtract_rows)
        largest = squared_norms(np.maximum(np.abs(Z - self.lowest), np.abs(Z - self.highest)) / self.scale)
        for part in row_slices(len(Z), _ROWS_AT_ONCE):
            fill(Z[part], squares[part])
            self.vanishing.overwrite(squares[part], largest[part])
        return squares

    def _subtract_numbers(self, Z: Array, out: Array) -> None:
        np.subtract(Z, self.landmarks[:, 0], out=out, casting="same_kind")
        out *= float(1 / self.scale.reshape(()))
        out *= out
        np.negative(out, out=out)

    def _subtract_rows(self, Z: Array, out: Array) -> None:
        from scipy.spatial.distance import cdist

        weights = 1 / np.square(self.scale)
        if weights.ndim:
            np.negative(cdist(Z, self.landmarks, "sqeuclidean", w=weights), out=out, casting="same_kind")
        else:  # with weights SciPy takes half as long again
            np.multiply(cdist(Z, self.landmarks, "sqeuclidean"), -weights, out=out, casting="same_kind")


class _Products:
    """Base class for distances of dense and of sparse rows that are computed from products."""

    landmark_squared_norms: Array

    def __init__(self, landmarks: Rows, scale: float | Array, precision: _Precision) -> None:
        self.landmarks, self.scale, self.factors = landmarks, scale, 1 / scale
        self.dtype, self.near, self.effects, self.vanishing = precision
        self._reaches: dict[tuple[float, np.dtype[np.floating], int], float] = {}

    @cached_property
    def float64_evaluator(self) -> Evaluator:
        """The function in float64 of values that are rounded to float32, prepared when the first rows need it."""
        # Distances that are not computed from differences have a relative error of 2e-9, far below that of rounding.
        return prepare_negative_squared_distances(as_float64(self.landmarks), self.scale, effects=())

    @cached_property
    def largest_landmark_norm(self) -> float:
        """Largest squared norm of a landmark."""
        return float(self.landmark_squared_norms.max())

    def find_square_limits(self, dtype: np.dtype[np.floating], z_squared_norms: Array) -> Array | None:
        """Return the squared distance (effects, n) up to which errors of a row's products change each kernel.

        Infinity means all: the row is computed in float64. None stands for 0 everywhere.
        """
        largest_sums = z_squared_norms + self.largest_landmark_norm
        largest = largest_sums.max(initial=0.0)
        if dtype == np.float64 and all(largest * factor <= _LARGE_NORMS for _, factor in self.effects):
            return None
        limits = np.zeros((max(1, len(self.effects)), len(largest_sums)))
        for effect in range(len(self.effects)):
            limits[effect] = self._find_squared_cutoffs_by_row(dtype, largest_sums, effect)
        if dtype == np.float32 and self.landmarks.shape[1] <= _FEW_FLOAT64_COLUMNS:
            typical = z_squared_norms + self.landmark_squared_norms.mean()
            limits[limits > _MANY_WITHIN_REACH * typical] = np.inf
        return limits

    def recompute_inexact_values(self, block: Array, Z: Rows, z_squared_norms: Array, limits: Array | None) -> Array:
        """Recompute in place near pairs from differences, and rows in float64 for which float32 is not enough.

        A pair is near if its squared distance is at most the share `near` of the sum of both squared norms, or if the
        error of the product would change its kernel value: `limits` is what `find_square_limits` returns. Other pairs
        are far apart, so rounding cannot make their value positive.
        """
        landmark_norms = self.landmark_squared_norms
        reaches = self.near * (z_squared_norms + self.largest_landmark_norm)
        # One pass finds the rows that have any near landmark.
        highest = block.max(axis=1)
        if limits is None:
            is_candidate, limits = highest >= -reaches, np.empty((0, len(block)))
            candidates = np.flatnonzero(is_candidate)
        else:
            square_limits = np.max(limits, axis=0)
            reaches, is_wide = np.maximum(reaches, square_limits), square_limits == np.inf
            with np.errstate(invalid="ignore"):  # values that overflowed in float32
                is_candidate = (highest >= -reaches) | is_wide
            self.recompute_rows(block, Z, np.flatnonzero(is_wide))
            candidates = np.flatnonzero(is_candidate & ~is_wide)
        for part in row_slices(len(candidates), max(_ROWS_AT_ONCE, _SEARCHED_AT_ONCE // block.shape[1])):
            rows = candidates[part]
            is_run = rows[-1] - rows[0] == len(rows) - 1  # then no copy is needed
            part_of_block = block[rows[0] : rows[-1] + 1] if is_run else block[rows]
            i, j = find_pairs(part_of_block >= -reaches[rows, np.newaxis])
            values, sums = block[rows[i], j], z_squared_norms[rows[i]] + landmark_norms[j]
            is_near = values >= -self.near * sums
            for limit, (_, factor) in zip(limits, self.effects, strict=False):
                within_reach = values >= -limit[rows[i]]
                is_near |= within_reach & (sums * factor > _LARGE_NORMS) if block.dtype == np.float64 else within_reach
            if block.dtype == np.float32:
                counts = np.bincount(i[is_near], minlength=len(rows))
                many = counts > max(_MANY * block.shape[1], 1)
                self.recompute_rows(block, Z, rows[many])
                is_near &= ~many[i]
            i, j = i[is_near], j[is_near]
            block[rows[i], j] = -self._pair_squared_distances(Z, rows[i], j)
        largest_squares = 2 * (z_squared_norms + self.largest_landmark_norm)
        self.vanishing.overwrite(block, largest_squares, np.where(is_candidate, 0.0, -highest))
        return block

    def recompute_rows(self, block: Array, Z: Rows, numbers: npt.NDArray[np.intp]) -> None:
        """Overwrite some rows of the block, given by number, with values that are computed in float64."""
        if len(numbers):
            recompute_rows_in_float64(block, Z, numbers, self.float64_evaluator)

    def _find_squared_cutoffs_by_row(self, dtype: np.dtype[np.floating], largest_sums: Array, effect: int) -> Array:
        """Return, for each row (n,), the squared distance up to which errors change a kernel; infinity means all.

        `largest_sums` holds the largest sum of the squared norms of the row and of a landmark, and `effect` is the
        number of the kernel.
        """
        factor = self.effects[effect][1]
        limits, sums = np.zeros(len(largest_sums)), largest_sums * factor
        single = dtype == np.float32
        errors = (FLOAT32_ERROR if single else 8 * _EPS) * sums
        matter = errors <= _LARGEST_FLOAT32_ERROR if single else (sums > _LARGE_NORMS) & (sums < np.inf)
        if single:
            limits[~matter] = np.inf
        matter &= errors > 0
        if matter.any() and self._find_squared_cutoff(float(_ceil_log2(errors[matter].max())), dtype, effect) > 0:
            exponents = _ceil_log2(errors, where=matter)
            for exponent in np.unique(exponents[matter]):
                reach = self._find_squared_cutoff(float(exponent), dtype, effect)
                limits[matter & (exponents == exponent)] = reach / factor
        return limits

    def _find_squared_cutoff(self, exponent: float, dtype: np.dtype[np.floating], effect: int) -> float:
        """Return the largest computed squared distance at which an error of ``2^exponent`` changes a kernel's value."""
        key = exponent, dtype, effect
        if key not in self._reaches:  # threads may compute it twice
            self._reaches[key] = find_squared_cutoff(self.effects[effect][0], 2.0**exponent, dtype)
        return self._reaches[key]

    def _pair_squared_distances(
        self, Z: Rows, z_indices: npt.NDArray[np.intp], landmark_indices: npt.NDArray[np.intp]
    ) -> Array:
        """Return the scaled squared distances (k,) of rows Z[z_indices] and their landmarks, from differences."""
        squares = np.empty(len(z_indices))
        width = Z.shape[1]
        if is_sparse(Z) and is_sparse(self.landmarks):
            pairs = (Z, z_indices), (self.landmarks, landmark_indices)
            width = sum(_count_longest_row_float64s(*pair) for pair in pairs)
        for part in row_slices(len(z_indices), max(1, _DIFFERENCES_AT_ONCE // width)):
            difference = as_float64(Z[z_indices[part]]) - self.landmarks[landmark_indices[part]]
            if isinstance(difference, np.matrix):  # of dense and sparse rows
                difference = np.asarray(difference)
            squares[part] = squared_norms(scale_columns(difference, self.factors))
        return squares


def _ceil_log2(errors: Array, where: npt.NDArray[np.bool_] | bool = True) -> Array:
    """Return the exponents of the powers of 2 just above some errors; 0 elsewhere."""
    return np.ceil(np.log2(errors, where=where, out=np.zeros(np.shape(errors))))


def _count_longest_row_float64s(X: Rows, row_indices: npt.NDArray[np.intp]) -> int:
    """Return the memory of the longest of some CSR rows, in dense float64 values."""
    return 2 * int(np.diff(X.indptr)[row_indices].max(initial=0)) + 1  # type: ignore[union-attr]  # the caller has checked that X is CSR


_augmented_rows = ThreadBuffer()


class _CentredProducts(_Products):
    """Compute minus squared distances of dense rows from inner products of centred rows."""

    def __init__(self, landmarks: Array, scale: float | Array, precision: _Precision) -> None:
        super().__init__(landmarks, scale, precision)
        self.centre: Array | None = None
        (m, d), dtype = landmarks.shape, self.dtype
        # For narrow landmarks the product is faster if they are stored by columns.
        fortran = d <= _NARROW
        augmented: Array = np.empty((d + 2, m), dtype).T if fortran else np.empty((m, d + 2), dtype)
        mean = _compute_mean_unless_small(landmarks, self.factors)
        if mean is not None:
            # Any common point is valid; one in the precision of the landmarks keeps float32 rows in float32.
            self.centre = mean.astype(landmarks.dtype)
        self.landmark_squared_norms = self._write_centred_scaled(landmarks, augmented)
        augmented[:, :-2] *= 2
        augmented[:, -2] = -self.landmark_squared_norms
        augmented[:, -1] = 1.0
        self.right: Array = augmented.T

    def _write_centred_scaled(self, rows: Array, out: Array) -> Array:
        """Write ``(x - c) / scale`` of each row to all but two columns of `out`; return its squared norm, (n,)."""
        centred = out[:, :-2]
        if self.centre is None:
            np.multiply(rows, self.factors, out=centred)
        else:
            np.subtract(rows, self.centre, out=centred)
            centred *= self.factors
        return squared_norms(centred)

    def __call__(self, Z: Array, out: Array | None = None) -> Array:
        with _augmented_rows.borrow(Z.shape[0], Z.shape[1] + 2, self.dtype) as left:
            norms = self._write_centred_scaled(Z, left)
            limits = self.find_square_limits(self.dtype, norms)
            if limits is not None and (limits == np.inf).any(axis=0).all():
                block: Array = np.empty((len(Z), len(self.landmarks)), self.dtype) if out is None else out
                self.recompute_rows(block, Z, np.arange(len(Z)))
                self.vanishing.overwrite(block, 2 * (norms + self.largest_landmark_norm))
                return block
            left[:, -2] = 1.0
            left[:, -1] = -norms
            block = np.matmul(left, self.right, out=out)
        return self.recompute_inexact_values(block, Z, norms, limits)


def _compute_mean_unless_small(rows: Array, factors: float | Array) -> Array | None:
    """Return the mean (d,) of rows; None if it overflows, or if centring would hardly reduce norms of scaled rows."""
    with np.errstate(over="ignore", invalid="ignore"):  # rows whose squares overflow are centred
        mean: Array = rows.mean(axis=0, dtype=np.float64)
        squares = np.einsum("ij,ij->j", rows, rows, dtype=np.float64) / len(rows)
        square, total = (float(np.sum(numbers * np.square(factors))) for numbers in (np.square(mean), squares))
        is_small = square <= _SMALL_MEAN * (total - square)
    return None if is_small or not np.isfinite(mean).all() else mean


class _SparseProducts(_Products):
    """Compute minus squared distances from inner products, without centring, if Z or landmarks are sparse."""

    @cached_property
    def scaled_landmarks(self) -> Rows:
        return scale_columns(self.landmarks, self.factors)

    @cached_property
    def inner_product_evaluator(self) -> Evaluator:
        return prepare_inner_products(self.scaled_landmarks)

    @cached_property
    def landmark_squared_norms(self) -> Array:  # type: ignore[override]  # computed only if sparse rows are given
        return squared_norms(self.scaled_landmarks)

    def __call__(self, Z: Rows, out: Array | None = None) -> Array:
        scaled = scale_columns(Z, self.factors)
        norms = squared_norms(scaled)
        block = self.inner_product_evaluator(scaled)
        block *= 2
        block -= norms.astype(block.dtype)[:, np.newaxis]
        block -= self.landmark_squared_norms.astype(block.dtype)
        return self.recompute_inexact_values(block, Z, norms, self.find_square_limits(block.dtype, norms))
