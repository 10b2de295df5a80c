"""Stationary kernels: functions of the Euclidean distance between rows whose columns are divided by a length scale.

The length scale is a number, one for each column, or "median": the median distance between the training rows.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Self

import numpy as np

from dkfm.core.rows import Array, Rows, as_float64, as_rows
from dkfm.errors import KernelError
from dkfm.kernels.base import Definiteness, PreparedKernel
from dkfm.kernels.pairwise.block_operations import Evaluator, exp_in_place, log1p_in_place, map_rows
from dkfm.kernels.pairwise.matern_values import evaluate_matern
from dkfm.kernels.pairwise.radial_forms import RadialForm
from dkfm.kernels.pairwise.squared_distances import prepare_negative_squared_distances
from dkfm.kernels.parameters import (
    MEDIAN,
    Scale,
    coerce_scale,
    coerce_to_positive_float,
    get_numeric_scale,
    median_distance,
)


class DistanceKernel(PreparedKernel):
    """Base class of kernels of a distance divided by a length scale; a fit may set the length scale."""

    scale_name: ClassVar[str] = "length_scale"
    """Name of the field that holds the length scale."""
    landmark_copies = 1
    translation_invariant = True

    @classmethod
    def median(cls, X: object) -> Self:
        """Return the kernel whose length scale is the median of the nonzero distances between the rows of X (n, d).

        If X has more than 1,000 rows, a sample with a fixed seed is used, so that the same rows give the same kernel.

        Examples
        --------
        >>> from dkfm.kernels import Gaussian
        >>> Gaussian.median([[0.0], [3.0]])
        Gaussian(sigma=3.0)
        """
        return cls(**{cls.scale_name: MEDIAN}).resolve(as_rows(X))

    def resolve(self, X: Rows) -> Self:
        """Fill in the length scale, or check that it matches the columns of X."""
        scale = getattr(self, self.scale_name)
        if scale == MEDIAN:
            scale = median_distance(self._pairwise_distances, self._convert_rows(as_float64(X)))
        elif scale is None:
            scale = self._get_numeric_scale(X.shape[1])
        else:
            self._get_numeric_scale(X.shape[1])
        return replace(self, **{self.scale_name: scale})  # type: ignore[type-var]  # every subclass is a dataclass

    @abstractmethod
    def _pairwise_distances(self, X: Array) -> Array:
        """Return the distances (n, n) between the rows of X, without a length scale."""

    def _get_numeric_scale(self, d: int) -> float | Array:
        """Return the divisors of d columns: a number, or an array (d,)."""
        return get_numeric_scale(self, self.scale_name, d)


class EuclideanDistanceKernel(DistanceKernel):
    """Base class of functions of the Euclidean distance; a subclass defines them by `_map_values`."""

    supports_sparse = supports_out = has_no_subnormals = True
    _length_scale_factor: float = 1.0
    """Factor of the length scale; columns are divided by the product."""
    _relative_near_threshold: float = 0.0
    """Smallest share of the squared norms below which squared distances are recomputed from differences."""

    @abstractmethod
    def _map_values(self, negative_squares: Array) -> Array:
        """Return the kernel values of negative squared distances; it may overwrite them."""

    def _map_sensitivity_values(self, negative_squares: Array) -> Array:
        """Return values that are as sensitive to errors of squared distances as the kernel values are."""
        return self._map_values(negative_squares)

    def _pairwise_distances(self, X: Rows) -> Array:
        return np.sqrt(-prepare_negative_squared_distances(X, 1.0)(X))

    def prepare(self, landmarks: Rows, dtype: np.dtype[np.floating] | None = None) -> Evaluator:
        """Prepare the squared distances to the landmarks; their precision is by default that of the landmarks."""
        unit = self._length_scale_factor * self._get_numeric_scale(landmarks.shape[1])
        negative_squared_distances = prepare_negative_squared_distances(
            landmarks,
            unit,
            self._relative_near_threshold,
            ((self._map_sensitivity_values, 1.0),),
            dtype,
            self._map_values,
        )
        return lambda Z, out=None, /: self._map_values(negative_squared_distances(Z, out))

    def radial_form(self, d: int) -> RadialForm | None:
        """Return the kernel as a function of the squared distance, if all columns have one length scale."""
        scale = self._get_numeric_scale(d)
        if not isinstance(scale, float):
            return None
        unit, effects = self._length_scale_factor * scale, ((self._map_sensitivity_values, 1.0),)
        return RadialForm(unit, self._relative_near_threshold, self._map_values, self._keeps_float32(), effects)

    def diagonal(self, X: Rows) -> Array:
        """Return the kernel value of distance 0 for each row."""
        return self._map_values(np.zeros(X.shape[0]))


@dataclass(frozen=True)
class Gaussian(EuclideanDistanceKernel):  # numpydoc ignore=PR02
    """The Gaussian kernel, ``exp(-|x - y|^2 / (2 sigma^2))``.

    Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    sigma : float > 0, one for each column, "median", or None
        Bandwidth, in the units of the columns. scikit-learn's ``gamma`` is ``1 / (2 sigma^2)``; None means its default
        gamma of 1 / d for d columns.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", eq. (1).
    The error of the exponent is at most ``8 eps (|x-c|^2 + |y-c|^2) / (2 sigma^2)``, with c the mean of the landmarks
    (0 for sparse rows). Equal rows give exactly 1.

    Examples
    --------
    >>> from dkfm.kernels import Gaussian
    >>> Gaussian(1.0)([[0.0], [1.0]]).round(4)
    array([[1.    , 0.6065],
           [0.6065, 1.    ]])
    """

    sigma: Scale = 1.0
    scale_name = "sigma"
    supports_float32 = True
    _length_scale_factor = float(np.sqrt(2))

    def __post_init__(self) -> None:
        coerce_scale(self, "sigma", MEDIAN, None)

    def _get_numeric_scale(self, d: int) -> float | Array:
        return float(np.sqrt(d / 2)) if self.sigma is None else super()._get_numeric_scale(d)

    def _map_values(self, negative_squares: Array) -> Array:
        return exp_in_place(negative_squares)


@dataclass(frozen=True)
class Exponential(EuclideanDistanceKernel):  # numpydoc ignore=PR02
    """The exponential kernel, ``exp(-|x - y| / length_scale)``.

    The Matern kernel with nu = 1/2. Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    length_scale : float > 0, one for each column, or "median"
        Length scale, in the units of the columns.

    Examples
    --------
    >>> from dkfm.kernels import Exponential
    >>> Exponential(2.0)([[0.0, 0.0]], [[3.0, 4.0]]).round(4)
    array([[0.0821]])
    """

    length_scale: Scale = 1.0
    supports_float32 = True
    _relative_near_threshold = 1e-3  # the square root magnifies the errors of short distances

    def __post_init__(self) -> None:
        coerce_scale(self, "length_scale", MEDIAN)

    def _map_values(self, negative_squares: Array) -> Array:
        roots = np.negative(negative_squares, out=negative_squares)
        np.sqrt(roots, out=roots)
        np.negative(roots, out=roots)
        return exp_in_place(roots)


@dataclass(frozen=True)
class RationalQuadratic(EuclideanDistanceKernel):  # numpydoc ignore=PR02
    """The rational quadratic kernel, ``(1 + |x - y|^2 / (2 alpha length_scale^2))^(-alpha)``.

    A mixture of Gaussian kernels of different widths. Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    alpha : float, > 0
        Shape of the mixture; for large alpha the kernel tends to the Gaussian.
    length_scale : float > 0, one for each column, or "median"
        Length scale, in the units of the columns.

    Examples
    --------
    >>> from dkfm.kernels import RationalQuadratic
    >>> RationalQuadratic(1.0, 1.0)([[0.0]], [[2.0]]).round(4)
    array([[0.3333]])
    """

    alpha: float = 1.0
    length_scale: Scale = 1.0
    supports_float32 = True
    _length_scale_factor = float(np.sqrt(2))

    def __post_init__(self) -> None:
        coerce_to_positive_float(self, "alpha")
        coerce_scale(self, "length_scale", MEDIAN)

    def _map_values(self, negative_squares: Array) -> Array:
        ratios = np.divide(negative_squares, -self.alpha, out=negative_squares)
        if self.alpha == 1.0:
            ratios += 1.0
            return np.reciprocal(ratios, out=ratios)
        # -alpha log(1 + s / alpha) is accurate for large alpha too, where the kernel tends to the Gaussian.
        exponents = log1p_in_place(ratios)
        exponents *= -self.alpha
        return exp_in_place(exponents)


@dataclass(frozen=True)
class NegativeSquaredDistance(EuclideanDistanceKernel):  # numpydoc ignore=PR02
    """The negative squared distance, ``-|x - y|^2 / length_scale^2``.

    Conditionally positive semi-definite: use it in kernel PCA, or as ``Exp(k)``. For length scale 1, half of its
    centred Gram matrix is the centred Gram matrix of the linear kernel, so kernel PCA is classical scaling. Takes
    sparse rows.

    Parameters
    ----------
    length_scale : float > 0, one for each column, or "median"
        Length scale, in the units of the columns.

    Examples
    --------
    >>> from dkfm.kernels import NegativeSquaredDistance
    >>> NegativeSquaredDistance()([[0.0, 0.0]], [[3.0, 4.0]])
    array([[-25.]])
    """

    length_scale: Scale = 1.0
    definiteness = Definiteness.CONDITIONAL

    def __post_init__(self) -> None:
        coerce_scale(self, "length_scale", MEDIAN)

    def _map_values(self, negative_squares: Array) -> Array:
        return negative_squares

    def radial_form(self, d: int) -> None:
        """Return None: the value at distance 0 is 0, so it does not determine how exact the distances must be."""

    def _map_sensitivity_values(self, negative_squares: Array) -> Array:
        return np.exp(negative_squares)  # as in Exp(k); the kernel itself is equally sensitive at all distances


_MAX_NU = 100.0
"""Largest smoothness nu."""

_MAX_DEGREE = 10
"""Largest degree for which the polynomial form is evaluated instead of the Bessel function."""

_MAX_DISTANCE = 1e3
"""Cap on scaled distances in polynomials. Beyond it the kernel is 0 in any precision, and powers overflow float32."""


@dataclass(frozen=True)
class Matern(EuclideanDistanceKernel):  # numpydoc ignore=PR02
    """The Matern kernel, ``2^(1-nu) / Gamma(nu) a^nu K_nu(a)`` with ``a = sqrt(2 nu) |x - y| / length_scale``.

    K_nu is the modified Bessel function of the second kind. For nu = p + 1/2 with an integer p, the kernel is a
    polynomial of degree p times ``exp(-a)``: ``exp(-a)`` for nu = 1/2, ``(1 + a) exp(-a)`` for 3/2, and ``(1 + a +
    a^2/3) exp(-a)`` for 5/2. This form is used up to nu = 21/2. Integers and larger half-integers use a recurrence.
    Both take a fraction of the time of the Bessel function. Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    nu : float, > 0, at most 100
        Smoothness: features have k continuous derivatives for each integer k < nu. For larger nu use `Gaussian`, the
        limit.
    length_scale : float > 0, one for each column, or "median"
        Length scale, in the units of the columns.

    Notes
    -----
    Rasmussen and Williams, "Gaussian processes for machine learning" (2006), eqs. (4.14) and (4.16). The Bessel form of
    any other nu is computed in logarithms, with a relative error of about 1e-13.

    Examples
    --------
    >>> from dkfm.kernels import Matern
    >>> Matern(1.5, 2.0)([[0.0]], [[2.0]]).round(4)
    array([[0.4834]])
    """

    nu: float = 1.5
    length_scale: Scale = 1.0

    def __post_init__(self) -> None:
        coerce_to_positive_float(self, "nu")
        if self.nu > _MAX_NU:
            raise KernelError(f"Matern needs nu <= 100, and got {self.nu}; beyond, Gaussian is its limit.")
        coerce_scale(self, "length_scale", MEDIAN)

    @property
    def supports_float32(self) -> bool:
        """Whether nu is 1/2, 3/2, .. or 21/2; kernels with other nu are computed in float64."""
        return _polynomial_coefficients(self.nu) is not None

    @property
    def _length_scale_factor(self) -> float:  # type: ignore[override]  # it depends on nu
        return float(1 / np.sqrt(2 * self.nu))

    @property
    def _relative_near_threshold(self) -> float:  # type: ignore[override]  # it depends on nu
        # For nu <= 1 the kernel falls like a root of the squared distance, which magnifies the error of the latter.
        return 0.0 if self.nu > 1 else 1e-3

    def estimate_extra_value_seconds(self, d: int) -> float:
        """Estimate the seconds of the Bessel function, or of the Bessel functions from which a recurrence starts."""
        if _polynomial_coefficients(self.nu) is not None:
            return 0.0
        return 1e-7 if (2 * self.nu).is_integer() else 3e-7

    def _map_values(self, negative_squares: Array) -> Array:
        return map_rows(negative_squares, self._map_part)

    def _map_part(self, negative_squares: Array) -> Array:
        """Return the kernel values of some rows of the block, overwriting them."""
        a = np.sqrt(np.negative(negative_squares, out=negative_squares), out=negative_squares)
        coefficients = _polynomial_coefficients(self.nu)
        if coefficients is None:
            return evaluate_matern(a, self.nu)
        np.minimum(a, _MAX_DISTANCE, out=a)
        if len(coefficients) == 1:
            return _exp_negative(a)
        values: Array = a * coefficients[-1]
        for coefficient in coefficients[-2:0:-1]:
            values += coefficient
            values *= a
        values += coefficients[0]
        values *= _exp_negative(a)
        return values


@cache
def _polynomial_coefficients(nu: float) -> list[float] | None:
    """Return the coefficients of the powers of a, in ascending order; None if the Bessel function is needed."""
    degree = int(nu)
    if nu != degree + 0.5 or degree > _MAX_DEGREE:
        return None
    coefficients = [1.0]
    for j in range(degree):
        coefficients.append(coefficients[-1] * 2 * (degree - j) / ((j + 1) * (2 * degree - j)))
    return coefficients


def _exp_negative(a: Array) -> Array:
    """Return exp(-a), overwriting a."""
    return exp_in_place(np.negative(a, out=a))
