"""Kernels of the inner product <x, y> or of the angle between x and y."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, as_float64, is_sparse, normalize_rows, squared_norms
from dkfm.errors import KernelError
from dkfm.kernels.base import Definiteness, Kernel, PreparedKernel
from dkfm.kernels.pairwise.block_operations import Evaluator, find_pairs, make_mixed_precision_evaluator, map_rows
from dkfm.kernels.pairwise.distance_effects import FLOAT32_LIMIT
from dkfm.kernels.pairwise.inner_products import prepare_inner_products
from dkfm.kernels.pairwise.squared_distances import FLOAT32_ERROR, prepare_negative_squared_distances
from dkfm.kernels.parameters import (
    Scale,
    coerce_exponent,
    coerce_to_float,
    coerce_to_non_negative_float,
    coerce_to_positive_float,
)


@dataclass(frozen=True)
class Linear(PreparedKernel):
    """The linear kernel, ``<x, y>``; kernel PCA with it is PCA.

    Positive semi-definite. Takes sparse rows.

    Examples
    --------
    >>> from dkfm.kernels import Linear
    >>> Linear()([[1.0, 2.0]], [[3.0, 4.0]])
    array([[11.]])
    """

    supports_float32 = supports_sparse = supports_out = True
    float32_error_share = FLOAT32_ERROR

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Return a function that computes the inner products with the landmarks."""
        return prepare_inner_products(landmarks)

    def diagonal(self, X: Rows) -> Array:
        """Return the squared norm of each row."""
        return squared_norms(X)


class _DotProduct(PreparedKernel):
    """Base class of functions of ``scale <x, y> + offset``."""

    scale: Scale
    offset: float
    supports_sparse = supports_out = True

    def _coerce_scale(self) -> None:
        if self.scale is not None:
            coerce_to_positive_float(self, "scale")

    @abstractmethod
    def _map_values(self, scaled_products: Array) -> Array:
        """Return the kernel values of scaled and shifted inner products; it may overwrite them."""

    def resolve(self, X: Rows) -> Kernel:
        """Fill in the scale, if it is None."""
        return replace(self, scale=self._numeric_scale(X.shape[1]))  # type: ignore[type-var]  # every subclass is a dataclass

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare the inner products with the landmarks."""
        inner_products = prepare_inner_products(landmarks)
        return lambda Z, out=None, /: self._map_inner_products(inner_products(Z, out), Z.shape[1])

    def diagonal(self, X: Rows) -> Array:
        """Return the kernel values of the squared norms."""
        return self._map_inner_products(squared_norms(X), X.shape[1])

    def _map_inner_products(self, inner: Array, d: int) -> Array:
        """Return the kernel values of inner products of rows with d columns, overwriting them."""
        scale = self._numeric_scale(d)

        def map_part(part: Array) -> Array:
            part *= scale
            if self.offset:
                part += self.offset
            return self._map_values(part)

        return map_rows(inner, map_part)

    def _numeric_scale(self, d: int) -> float:
        return 1 / d if self.scale is None else float(self.scale)  # type: ignore[arg-type]  # checked


@dataclass(frozen=True)
class Polynomial(_DotProduct):  # numpydoc ignore=PR02
    """The polynomial kernel, ``(scale <x, y> + offset)^degree``.

    Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    degree : int, >= 1
        Exponent. Fractional exponents raise an error, because the power need not be positive semi-definite.
    scale : float, > 0, or None
        Factor of the inner product, ``gamma`` in scikit-learn; None means 1 / d for d columns, as in scikit-learn.
    offset : float, >= 0
        Constant that is added, ``coef0`` in scikit-learn.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions": k1 (eq. 27), for
    pixels in [0, 1], is ``Polynomial(9, scale=1/784)``; k2, for pixels in [-1, 1], is
    ``Polynomial(9, scale=1/1568, offset=0.5).warp(Affine(2, -1))``.

    Examples
    --------
    >>> from dkfm.kernels import Polynomial
    >>> Polynomial(2, offset=1.0)([[1.0, 2.0]], [[3.0, 4.0]])
    array([[144.]])
    """

    degree: int = 3
    scale: Scale = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        coerce_exponent(self, "degree")
        self._coerce_scale()
        coerce_to_non_negative_float(
            self, "offset", ": a negative constant is not a kernel, nor is a power of such a sum"
        )

    @property
    def supports_float32(self) -> bool:
        """Whether the degree is small enough, because a power multiplies the relative error of an inner product."""
        return fits_error_share(self.float32_error_share)

    @property
    def float32_error_share(self) -> float:
        """The error share of an inner product, multiplied by the degree."""
        return self.degree * FLOAT32_ERROR

    def _map_values(self, scaled_products: Array) -> Array:
        return compute_power_overwriting_base(scaled_products, self.degree)


@dataclass(frozen=True)
class Cosine(PreparedKernel):
    """The cosine of the angle between two rows, ``<x, y> / (|x| |y|)``.

    It is 0 if x or y is 0, also on the diagonal. Positive semi-definite. Takes sparse rows.

    Examples
    --------
    >>> from dkfm.kernels import Cosine
    >>> Cosine()([[3.0, 4.0], [0.0, 0.0]])
    array([[1., 0.],
           [0., 0.]])
    """

    supports_float32 = supports_sparse = supports_out = True
    float32_error_share = FLOAT32_ERROR
    landmark_copies = 1

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Normalize the landmarks once."""
        inner_products = prepare_inner_products(normalize_rows(landmarks)[0])
        return lambda Z, out=None, /: inner_products(normalize_rows(Z)[0], out)

    def diagonal(self, X: Rows) -> Array:
        """Return 1 for each row, but 0 for a row of zeros."""
        return (normalize_rows(X)[1] > 0).astype(np.float64)


@dataclass(frozen=True)
class Sigmoid(_DotProduct):  # numpydoc ignore=PR02
    """The sigmoid "kernel", ``tanh(scale <x, y> + offset)``, which is not positive semi-definite for any parameters.

    A fit raises an error, unless the Gram matrix of the training rows happens to be positive semi-definite, or
    ``on_indefinite="clip"`` drops its negative part. Takes sparse rows.

    Parameters
    ----------
    scale : float, > 0, or None
        Factor of the inner product, ``gamma`` in scikit-learn; None means 1 / d for d columns, as in scikit-learn.
    offset : float
        Constant that is added, ``coef0`` in scikit-learn.

    Examples
    --------
    >>> from dkfm.kernels import Sigmoid
    >>> Sigmoid(0.5, 1.0)([[1.0]], [[2.0]]).round(4)
    array([[0.964]])
    """

    scale: Scale = 1.0
    offset: float = 0.0
    definiteness = Definiteness.INDEFINITE
    supports_float32 = True

    def __post_init__(self) -> None:
        self._coerce_scale()
        coerce_to_float(self, "offset")

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare the inner products with the landmarks; rows too long for float32 are computed in float64."""
        prepare = super().prepare
        if landmarks.dtype == np.float64:
            return prepare(landmarks)
        longest = self._numeric_scale(landmarks.shape[1]) * float(np.sqrt(squared_norms(landmarks).max()))
        return make_mixed_precision_evaluator(
            prepare(landmarks),
            lambda: prepare(as_float64(landmarks)),
            lambda Z: FLOAT32_ERROR * longest * np.sqrt(squared_norms(Z)) <= FLOAT32_LIMIT,
            landmarks.shape[0],
        )

    def _map_values(self, scaled_products: Array) -> Array:
        return np.tanh(scaled_products, out=scaled_products)


def fits_error_share(share: float) -> bool:
    """Return whether a relative error is small enough for float32; a feature map doubles it."""
    return 2 * share <= FLOAT32_LIMIT


def compute_power_overwriting_base(base: Array, exponent: int) -> Array:
    """Return a positive integer power by repeated squaring; overwrite `base`, and allocate at most one such array."""
    result: Array | None = None
    while True:
        if exponent & 1:
            if result is None:
                result = base.copy() if exponent > 1 else base
            else:
                np.multiply(result, base, out=result)
        exponent >>= 1
        if not exponent:
            assert result is not None  # noqa: S101  # the highest bit is set; the type checker cannot know
            return result
        np.multiply(base, base, out=base)


_NEAR_THRESHOLDS = {np.dtype(np.float64): 1e-3, np.dtype(np.float32): 1e-2}
"""Relative squared distance of unit rows below which the distance is recomputed from differences of rows.

For nearly opposite rows it is recomputed from sums of rows. Otherwise the square root in the angle would magnify the
errors of inner products.
"""

_ROWS_AT_ONCE = 64
"""Number of rows of the block whose angles are computed at a time."""

_PAIRS_AT_ONCE = 1024
"""Number of nearly opposite pairs of rows that are added at a time."""

_FLOAT32_FACTORS = 1e-15, 1e15
"""Range of powers of lengths whose products neither overflow nor underflow in float32."""


@dataclass(frozen=True)
class ArcCosine(PreparedKernel):  # numpydoc ignore=PR02
    """The arc-cosine kernel of order n, ``|x|^n |y|^n J_n(theta) / pi``, with theta the angle between x and y.

    ``J_0 = pi - theta``, ``J_1 = sin theta + (pi - theta) cos theta``, and
    ``J_2 = 3 sin theta cos theta + (pi - theta) (1 + 2 cos^2 theta)``. A row of zeros counts as orthogonal to all
    rows, including itself. Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    order : {0, 1, 2}
        Order n.

    Notes
    -----
    Cho and Saul, "Kernel methods for deep learning" (2009), eqs. (3)-(6): the kernel of a layer of infinitely many
    units with a step (order 0), rectified linear (1) or rectified quadratic (2) activation. The angle is computed from
    the distance of the normalized rows, so that equal rows give exactly ``|x|^2n J_n(0) / pi``.

    Examples
    --------
    >>> from dkfm.kernels import ArcCosine
    >>> ArcCosine(1)([[1.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]).round(4)
    array([[1.    , 0.6366]])
    """

    order: int = 1
    supports_float32 = supports_sparse = supports_out = True
    landmark_copies = 2

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or not isinstance(self.order, int | np.integer) or not 0 <= self.order <= 2:
            raise KernelError(f"ArcCosine needs an order of 0, 1 or 2, and got {self.order!r:.50}.")
        object.__setattr__(self, "order", int(self.order))

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Normalize the landmarks once."""
        units, lengths = normalize_rows(landmarks)
        near = _NEAR_THRESHOLDS[units.dtype]
        negative_squares = prepare_negative_squared_distances(units, 1.0, near)
        factors = lengths**self.order

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            z_units, z_lengths = normalize_rows(Z)
            values = negative_squares(z_units, out)
            for rows in row_slices(len(values), _ROWS_AT_ONCE):
                self._map_values(values[rows], z_units[rows], units, near)
            if self.order == 0:
                values[z_lengths == 0] = 0.5
                values[:, lengths == 0] = 0.5
            else:
                _multiply_by_factors(values, z_lengths**self.order, factors)
            return values

        return block

    def diagonal(self, X: Rows) -> Array:
        """Return ``|x|^(2n) J_n(0) / pi`` for order n; for order 0 a row of zeros gives 1/2."""
        if self.order == 0:
            return np.where(normalize_rows(X)[1] > 0, 1.0, 0.5)
        return (1.0 if self.order == 1 else 3.0) * squared_norms(X) ** self.order

    def _map_values(self, negative_squares: Array, U: Rows, V: Rows, near: float) -> None:
        """Overwrite negative squared distances (n, m) of unit rows with J_n(theta) / pi.

        With ``h = sin(theta / 2)^2``, a quarter of the squared distance, ``cos theta = 1 - 2 h`` and ``sin theta = 2
        sqrt(h (1 - h))``. For nearly opposite rows ``1 - h`` is a quarter of the square of their sum.
        """
        h = np.multiply(negative_squares, -0.25, out=negative_squares)
        rows = np.flatnonzero(h.max(axis=1) > 1 - near)  # search few rows: the search takes longer than all other steps
        h[rows] = np.minimum(h[rows], 1)
        i, j = find_pairs(h[rows] > 1 - near)
        i = rows[i]
        opposite = _quarter_squared_sums(U, V, i, j)
        values = np.sqrt(h)
        np.arcsin(values, out=values)
        values *= -2 / np.pi
        values += 1
        values[i, j] = 2 / np.pi * np.arcsin(np.sqrt(opposite))  # (pi - theta) / pi
        if self.order > 0:
            sines = 1 - h
            sines *= h
            np.sqrt(sines, out=sines)
            sines[i, j] = np.sqrt(opposite * (1 - opposite))
            sines *= 2 / np.pi
            h *= -2
            h += 1
            cosines = h
            if self.order == 1:
                values *= cosines
            else:
                sines *= cosines
                sines *= 3
                np.square(cosines, out=cosines)
                cosines *= 2
                cosines += 1
                values *= cosines
            values += sines
        negative_squares[...] = values


def _multiply_by_factors(values: Array, row_factors: Array, landmark_factors: Array) -> None:
    """Multiply a block (n, m) in place by a factor of each row (n,) and of each landmark (m,)."""
    smallest, largest = _FLOAT32_FACTORS
    is_safe = all(((f >= smallest) & (f <= largest) | (f == 0)).all() for f in (row_factors, landmark_factors))
    dtype = values.dtype if is_safe else np.dtype(np.float64)
    columns = landmark_factors.astype(dtype)
    for rows in row_slices(len(values), _ROWS_AT_ONCE):
        values[rows] *= np.multiply.outer(row_factors[rows].astype(dtype), columns)


def _quarter_squared_sums(U: Rows, V: Rows, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp]) -> Array:
    """Return ``|u + v|^2 / 4`` (k,) of the rows U[i] and V[j]."""
    squares = np.empty(len(i))
    for pairs in row_slices(len(i), _PAIRS_AT_ONCE):
        squares[pairs] = squared_norms(_add_row_pairs(U, V, i[pairs], j[pairs])) / 4
    return squares


def _add_row_pairs(U: Rows, V: Rows, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp]) -> Rows:
    total = U[i] + V[j]
    return total if is_sparse(total) else np.asarray(total)
