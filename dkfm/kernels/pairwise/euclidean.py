"""Squared Euclidean distances of all pairs, as exact as one GEMM allows, and exact where rows are near each other.

One GEMM of centred, augmented rows gives ``-|x - y|^2``; its error is at most ``8 eps (|x-c|^2 + |y-c|^2)`` with ``c``
the mean of the landmarks (0 where that is next to nothing, and for sparse rows, whose products stay as they are). Where
the distance is so small that this would cost digits, it is computed again from differences, so equal rows give exactly
0 in any tile; so is, of rows so wide that 1e-12 is too little for that error, what an exponential does not make
nothing of. Rows whose error in float32 would exceed what the caller can bear are computed in float64.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, as_float64, scale_columns, squared_norms
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.kernels.pairwise.blocks import Evaluator, PreparedBlock
from dkfm.kernels.pairwise.inner_products import prepare_inner_products

FLOAT32_LIMIT = 1e-5
"""An exponent that float32 cannot hold to this is computed in float64."""

FLOAT32_ERROR = 8 * float(np.finfo(np.float32).eps)
"""Of a product in float32, as a share of the norms of its two rows."""

_FEW_COLUMNS = 4
"""Up to here differences cost no more than a GEMM."""

_NEAR = {np.dtype(np.float64): 1e-6, np.dtype(np.float32): 1e-2}
"""Below this share of |x-c|^2 + |y-c|^2 a distance is computed again from differences."""

_WIDE = 64.0
"""Squared norms of two rows, together, from which the error of a product is too large for an exponent."""

_EXPONENT = 5e-16
"""What the error of an exponential may be, of rows that are wide: its share is that of the exponent."""

_ROWS_AT_ONCE = 64
"""Rows whose near landmarks are looked up at a time."""

_NARROW = 256
"""Columns of landmarks that BLAS takes sooner by columns; with more, its copying them is little beside the product."""

_AROUND_ZERO = 1e-3
"""Share of the scaled landmarks' mean squared distance from their mean that this mean may have to be taken for 0."""

_VALUES_AT_ONCE = 2**18
"""Differences that are there at a time."""

_EPS = float(np.finfo(np.float64).eps)

_Pairs = Callable[[npt.NDArray[np.intp], npt.NDArray[np.intp]], Array]


def prepare_negative_squared_distances(landmarks: Rows, scale: float | Array, near: float = 0.0) -> Evaluator:
    """Return a function from rows Z (n, d) to ``-sum_j ((z_j - x_j) / scale_j)^2`` (n, m), at most 0.

    Parameters
    ----------
    landmarks : ndarray or csr_array of shape (m, d)
        The rows x; Z has their dtype.
    scale : float or ndarray of shape (d,)
        What columns are divided by.
    near : float
        The least share of the norms below which differences are taken; what takes roots needs more than the default.
    """
    near = max(near, _NEAR[landmarks.dtype])
    sparse = _Sparse(landmarks, scale, near)
    if not isinstance(landmarks, np.ndarray):
        return sparse
    few = landmarks.shape[1] <= _FEW_COLUMNS
    dense: PreparedBlock = _Differences(landmarks, scale) if few else _Centred(landmarks, scale, near)
    return lambda Z, out=None, /: dense(Z, out) if isinstance(Z, np.ndarray) else sparse(Z)


class _Differences:
    """Of a few columns."""

    def __init__(self, landmarks: Array, scale: float | Array) -> None:
        self.landmarks = landmarks
        self.weights = np.full(landmarks.shape[1], 1 / np.square(scale))

    def __call__(self, Z: Array, out: Array | None = None) -> Array:
        from scipy.spatial.distance import cdist

        squares = np.empty((len(Z), len(self.landmarks)), Z.dtype) if out is None else out
        for part in row_slices(len(Z), _ROWS_AT_ONCE):
            squares[part] = cdist(Z[part], self.landmarks, "sqeuclidean", w=self.weights)
        return np.negative(squares, out=squares)


class _Products:
    """What the dense and the sparse way through products share."""

    norms: Array

    def __init__(self, landmarks: Rows, scale: float | Array, near: float) -> None:
        self.landmarks, self.scale, self.near = landmarks, scale, near
        self.factors = 1 / scale

    @cached_property
    def in_double(self) -> Evaluator:
        """The same in float64, made when the first rows ask for it."""
        return prepare_negative_squared_distances(as_float64(self.landmarks), self.scale)

    def mended(self, block: Array, Z: Rows, norms: Array) -> Array:
        """Recompute, in place, what is near from differences, and what float32 cannot hold in float64.

        What is not near is well below 0.
        """
        widest = float(norms.max(initial=0.0)) + float(self.norms.max(initial=0.0))
        double_wide = block.dtype == np.float64 and _WIDE < widest < np.inf  # float32 has its own way, below
        least = float(np.log(8 * _EPS * widest / _EXPONENT)) if double_wide else 0.0
        _recompute_near(block, norms, self.norms, (self.near, least), lambda i, j: self._squares(Z, i, j))
        if block.dtype == np.float32:
            wide = np.flatnonzero(FLOAT32_ERROR * (norms + self.norms.max()) > FLOAT32_LIMIT)
            for part in row_slices(len(wide), 256):
                block[wide[part]] = self.in_double(as_float64(Z[wide[part]]))
        return block

    def _squares(self, Z: Rows, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp]) -> Array:
        """Return the squared distances of pairs, from the differences of their rows as they came."""
        squares = np.empty(len(i))
        dense = isinstance(Z, np.ndarray) or isinstance(self.landmarks, np.ndarray)
        width = Z.shape[1] if dense else _longest(Z, i) + _longest(self.landmarks, j)
        for part in row_slices(len(i), max(1, _VALUES_AT_ONCE // width)):
            difference = as_float64(Z[i[part]]) - self.landmarks[j[part]]
            squares[part] = squared_norms(scale_columns(_rows(difference), self.factors))
        return squares


def _longest(X: Rows, rows: npt.NDArray[np.intp]) -> int:
    """Return how many dense float64 values take the memory of the longest of some rows."""
    return 2 * int(np.diff(X.indptr)[rows].max(initial=0)) + 1  # type: ignore[union-attr]  # of CSR rows, as the caller saw


def _rows(difference: Rows) -> Rows:
    """Return the difference of dense and sparse rows, a matrix to NumPy's eyes, as an array."""
    return np.asarray(difference) if isinstance(difference, np.ndarray) else difference


_augmented_rows = ThreadBuffer()


class _Centred(_Products):
    def __init__(self, landmarks: Array, scale: float | Array, near: float) -> None:
        super().__init__(landmarks, scale, near)
        self.centre: Array | None = None
        m, d = landmarks.shape
        # A product whose right side lies by columns is the quicker one, as long as the landmarks are narrow.
        turned = d <= _NARROW
        augmented: Array = np.empty((d + 2, m), landmarks.dtype).T if turned else np.empty((m, d + 2), landmarks.dtype)
        self.norms = self._augmented(landmarks, augmented)
        if not _around_zero(augmented[:, :-2], self.norms):
            # Any common point would do: one in their own precision leaves rows of float32 what they are.
            self.centre = landmarks.mean(axis=0, dtype=np.float64).astype(landmarks.dtype)
            self.norms = self._augmented(landmarks, augmented)
        augmented[:, :-2] *= 2
        augmented[:, -2] = -self.norms
        augmented[:, -1] = 1.0
        self.right: Array = augmented.T

    def _augmented(self, rows: Array, out: Array) -> Array:
        """Fill all but two columns with ``(x - c) / scale`` of each row, and return its squared norm."""
        centred = out[:, :-2]
        if self.centre is None:
            np.multiply(rows, self.factors, out=centred)
        else:
            np.subtract(rows, self.centre, out=centred)
            centred *= self.factors
        return squared_norms(centred)

    def __call__(self, Z: Array, out: Array | None = None) -> Array:
        with _augmented_rows.borrow(Z.shape[0], Z.shape[1] + 2, Z.dtype) as left:
            norms = self._augmented(Z, left)
            left[:, -2] = 1.0
            left[:, -1] = -norms
            block = np.matmul(left, self.right, out=out)
        return self.mended(block, Z, norms)


def _around_zero(rows: Array, norms: Array) -> bool:
    """Whether the squared norms of rows would be no smaller, to speak of, if the rows were centred."""
    centre = rows.mean(axis=0, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is centred
        return bool(centre @ centre <= _AROUND_ZERO * (norms.mean() - centre @ centre))


class _Sparse(_Products):
    @cached_property
    def scaled(self) -> Rows:
        return scale_columns(self.landmarks, self.factors)

    @cached_property
    def products(self) -> Evaluator:
        return prepare_inner_products(self.scaled)

    @cached_property
    def norms(self) -> Array:  # type: ignore[override]  # computed when sparse rows come, if ever
        return squared_norms(self.scaled)

    def __call__(self, Z: Rows, out: Array | None = None) -> Array:
        scaled = scale_columns(Z, self.factors)
        norms = squared_norms(scaled)
        block = self.products(scaled)
        block *= 2
        block -= norms.astype(block.dtype)[:, np.newaxis]
        block -= self.norms.astype(block.dtype)
        return self.mended(block, Z, norms)


def _recompute_near(block: Array, left: Array, right: Array, limits: tuple[float, float], squares: _Pairs) -> None:
    """Replace, in place, near pairs by minus their squares.

    Near is what is within a share of the squared norms of both sides, and of wide rows what is within a number.
    """
    near, least = limits
    # One pass finds the rows that have a near landmark at all.
    candidates = np.flatnonzero(block.max(axis=1) >= -np.maximum(near * (left + right.max()), least))
    for part in row_slices(len(candidates), _ROWS_AT_ONCE):
        rows = candidates[part]
        sums = left[rows, np.newaxis] + right
        i, j = np.nonzero((block[rows] >= -near * sums) | ((block[rows] >= -least) & (sums > _WIDE)))
        block[rows[i], j] = -squares(rows[i], j)
