"""Kernels of the inner product <x, y>, and of the angle between x and y."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, is_sparse, normalize_rows, squared_norms
from dkfm.errors import KernelError
from dkfm.kernels.base import Definiteness, Kernel, PreparedKernel
from dkfm.kernels.pairwise.blocks import Evaluator, map_rows
from dkfm.kernels.pairwise.euclidean import FLOAT32_ERROR, FLOAT32_LIMIT, prepare_negative_squared_distances
from dkfm.kernels.pairwise.inner_products import prepare_inner_products
from dkfm.kernels.parameters import Scale, require_exponent, require_non_negative, require_number, require_positive


@dataclass(frozen=True)
class Linear(PreparedKernel):
    """The linear kernel, ``<x, y>``: kernel PCA with it is PCA.

    Positive semi-definite. Takes sparse rows.

    Examples
    --------
    >>> from dkfm.kernels import Linear
    >>> Linear()([[1.0, 2.0]], [[3.0, 4.0]])
    array([[11.]])
    """

    supports_float32 = supports_sparse = supports_out = True

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Return the products with the landmarks."""
        return prepare_inner_products(landmarks)

    def diagonal(self, X: Rows) -> Array:
        """Return |x|^2."""
        return squared_norms(X)


class _Sloped(PreparedKernel):
    """A function of ``scale <x, y> + offset``."""

    scale: Scale
    offset: float
    supports_sparse = supports_out = True

    def _require_scale(self) -> None:
        if self.scale is not None:
            require_positive(self, "scale")

    @abstractmethod
    def _profile(self, inner: Array) -> Array:
        """Return the function of scaled and shifted products, which it overwrites."""

    def resolve(self, X: Rows) -> Kernel:
        """Fill in the scale."""
        return replace(self, scale=self._slope(X))  # type: ignore[type-var]  # every subclass is a dataclass

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare the products with the landmarks."""
        of_landmarks = prepare_inner_products(landmarks)
        return lambda Z, out=None, /: self._of_products(of_landmarks(Z, out), Z)

    def diagonal(self, X: Rows) -> Array:
        """Return the function of |x|^2."""
        return self._of_products(squared_norms(X), X)

    def _of_products(self, inner: Array, X: Rows) -> Array:
        slope = self._slope(X)

        def profile(part: Array) -> Array:
            part *= slope
            part += self.offset
            return self._profile(part)

        return map_rows(inner, profile)

    def _slope(self, X: Rows) -> float:
        return 1 / X.shape[1] if self.scale is None else float(self.scale)  # type: ignore[arg-type]  # a number, as checked


@dataclass(frozen=True)
class Polynomial(_Sloped):
    """The polynomial kernel, ``(scale <x, y> + offset)^degree``.

    Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    degree : int, >= 1
        A fractional power of a kernel need not be a kernel, so it is refused.
    scale : float, > 0, or None
        scikit-learn calls it ``gamma``; None is 1 / d for d columns, as there.
    offset : float, >= 0
        scikit-learn calls it ``coef0``.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions": k1 (eq. 27) on
    pixels in [0, 1] is ``Polynomial(9, scale=1/784)``, and k2, on pixels in [-1, 1],
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
        require_exponent(self, "degree")
        self._require_scale()
        require_non_negative(self, "offset", ": a negative constant is not a kernel, nor is a power of such a sum")

    @property
    def supports_float32(self) -> bool:
        """A power multiplies the error of a product."""
        return float32_power(self.degree)

    def _profile(self, inner: Array) -> Array:
        return integer_power(inner, self.degree)


@dataclass(frozen=True)
class Cosine(PreparedKernel):
    """The cosine of the angle between two rows, ``<x, y> / (|x| |y|)``; 0 where a row is 0, on the diagonal too.

    Positive semi-definite. Takes sparse rows.

    Examples
    --------
    >>> from dkfm.kernels import Cosine
    >>> Cosine()([[3.0, 4.0], [0.0, 0.0]])
    array([[1., 0.],
           [0., 0.]])
    """

    supports_float32 = supports_sparse = supports_out = True
    landmark_copies = 1

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Bring the landmarks to unit length once."""
        of_units = prepare_inner_products(normalize_rows(landmarks)[0])
        return lambda Z, out=None, /: of_units(normalize_rows(Z)[0], out)

    def diagonal(self, X: Rows) -> Array:
        """Return 1, or 0 where x is."""
        return (normalize_rows(X)[1] > 0).astype(np.float64)


@dataclass(frozen=True)
class Sigmoid(_Sloped):
    """The sigmoid "kernel", ``tanh(scale <x, y> + offset)``: not positive semi-definite for any parameters.

    A fit refuses it unless its Gram matrix of the training rows happens to be so, or its negative part may be dropped
    (``on_indefinite="clip"``). Takes sparse rows.

    Parameters
    ----------
    scale : float, > 0, or None
        scikit-learn calls it ``gamma``; None is 1 / d for d columns, as there.
    offset : float
        scikit-learn calls it ``coef0``.

    Examples
    --------
    >>> from dkfm.kernels import Sigmoid
    >>> Sigmoid(0.5, 1.0)([[1.0]], [[2.0]]).round(4)
    array([[0.964]])
    """

    scale: Scale = 1.0
    offset: float = 0.0
    definiteness = Definiteness.INDEFINITE

    def __post_init__(self) -> None:
        self._require_scale()
        require_number(self, "offset")

    def _profile(self, inner: Array) -> Array:
        return np.tanh(inner, out=inner)


def float32_power(exponent: int) -> bool:
    """Whether float32 holds a power of a product, whose error it multiplies, with what a map of it then doubles."""
    return 2 * exponent * FLOAT32_ERROR <= FLOAT32_LIMIT


def integer_power(base: Array, exponent: int) -> Array:
    """Raise `base` to a positive integer power by squaring, overwriting it: at most one temporary of its size."""
    result: Array | None = None
    while True:
        if exponent & 1:
            if result is None:
                result = base.copy() if exponent > 1 else base
            else:
                np.multiply(result, base, out=result)
        exponent >>= 1
        if not exponent:
            assert result is not None  # noqa: S101  # the highest bit is set; this tells the type checker
            return result
        np.multiply(base, base, out=base)


_NEAR = 1e-3
"""An angle is the root of a squared distance: below this one is taken from differences, or from sums."""

_ROWS = 64
_PAIRS = 1024


@dataclass(frozen=True)
class ArcCosine(PreparedKernel):
    """The arc-cosine kernel of order n, ``|x|^n |y|^n J_n(theta) / pi``, with theta the angle between x and y.

    ``J_0 = pi - theta``, ``J_1 = sin theta + (pi - theta) cos theta``,
    ``J_2 = 3 sin theta cos theta + (pi - theta) (1 + 2 cos^2 theta)``. A row of zeros is at right angles to every row,
    itself too. Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    order : {0, 1, 2}

    Notes
    -----
    Cho and Saul, "Kernel methods for deep learning" (2009), eqs. (3)-(6): a layer of infinitely many units that are
    steps (0), rectified linear (1) or rectified quadratic (2). The angle is computed from distances of unit rows, so
    equal rows give exactly ``|x|^2n J_n(0) / pi``.

    Examples
    --------
    >>> from dkfm.kernels import ArcCosine
    >>> ArcCosine(1)([[1.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]).round(4)
    array([[1.    , 0.6366]])
    """

    order: int = 1
    supports_sparse = supports_out = True
    landmark_copies = 2

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or not isinstance(self.order, int | np.integer) or not 0 <= self.order <= 2:
            raise KernelError(f"ArcCosine needs an order of 0, 1 or 2, and got {self.order!r:.50}.")
        object.__setattr__(self, "order", int(self.order))

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Bring the landmarks to unit length once."""
        units, lengths = normalize_rows(landmarks)
        distances = prepare_negative_squared_distances(units, 1.0, _NEAR)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            z_units, z_lengths = normalize_rows(Z)
            values = distances(z_units, out)
            for rows in row_slices(len(values), _ROWS):
                angles = _angles(values[rows], z_units[rows], units)
                angles[z_lengths[rows] == 0] = np.pi / 2
                angles[:, lengths == 0] = np.pi / 2
                values[rows] = self._profile(angles)
            values *= (z_lengths**self.order)[:, np.newaxis]
            values *= lengths**self.order
            return values

        return block

    def diagonal(self, X: Rows) -> Array:
        """Return |x|^2n J_n(0) / pi, or half of 1 where x is 0 and n too."""
        if self.order == 0:
            return np.where(normalize_rows(X)[1] > 0, 1.0, 0.5)
        return (1.0 if self.order == 1 else 3.0) * squared_norms(X) ** self.order

    def _profile(self, angles: Array) -> Array:
        """Return J_n(theta) / pi, overwriting the angles."""
        rest = np.pi - angles
        if self.order > 0:
            cosines, sines = np.cos(angles), np.sin(angles, out=angles)
            if self.order == 1:
                rest *= cosines
                rest += sines
            else:
                sines *= 3
                sines *= cosines
                np.square(cosines, out=cosines)
                cosines *= 2
                cosines += 1
                rest *= cosines
                rest += sines
        rest /= np.pi
        return rest


def _angles(negative_squares: Array, U: Rows, V: Rows) -> Array:
    """Return the angles (n, m) between unit rows, overwriting minus their squared distances."""
    angles = np.negative(negative_squares, out=negative_squares)
    i, j = np.nonzero(angles > 4 - 4 * _NEAR)
    np.sqrt(angles, out=angles)
    angles *= 0.5
    np.minimum(angles, 1.0, out=angles)
    np.arcsin(angles, out=angles)
    angles *= 2
    for few in row_slices(len(i), _PAIRS):  # nearly opposite
        angles[i[few], j[few]] = np.pi - 2 * np.arcsin(0.5 * np.sqrt(squared_norms(_sums(U, V, i[few], j[few]))))
    return angles


def _sums(U: Rows, V: Rows, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp]) -> Rows:
    total = U[i] + V[j]
    return total if is_sparse(total) else np.asarray(total)
