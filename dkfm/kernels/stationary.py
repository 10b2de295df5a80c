"""Kernels of the Euclidean distance between two rows whose columns are divided by a length scale.

All take a number as length scale, one for each column, or "median": the median distance between the training rows.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from math import lgamma, log
from typing import ClassVar, Self

import numpy as np

from dkfm.core.rows import Array, Rows, as_float64, as_rows
from dkfm.errors import KernelError
from dkfm.kernels.base import Definiteness, PreparedKernel
from dkfm.kernels.pairwise.blocks import Evaluator, map_rows
from dkfm.kernels.pairwise.euclidean import prepare_negative_squared_distances
from dkfm.kernels.parameters import MEDIAN, Scale, column_scales, median_distance, require_positive, require_scale


class DistanceKernel(PreparedKernel):
    """A kernel of some distance, in the unit of a length scale, which may be taken from the training rows."""

    scale_name: ClassVar[str] = "length_scale"
    landmark_copies = 1
    translation_invariant = True

    @classmethod
    def median(cls, X: object) -> Self:
        """Return the kernel whose length scale is the median of the nonzero distances between rows of X (n, d).

        Of more than 1,000 rows a seeded sample is taken: the same rows give the same kernel.

        Examples
        --------
        >>> from dkfm.kernels import Gaussian
        >>> Gaussian.median([[0.0], [3.0]])
        Gaussian(sigma=3.0)
        """
        return cls(**{cls.scale_name: MEDIAN}).resolve(as_rows(X))

    def resolve(self, X: Rows) -> Self:
        """Fill in the length scale, and check it against the columns."""
        scale = getattr(self, self.scale_name)
        if scale == MEDIAN:
            scale = median_distance(self._distances, self._taken(as_float64(X)))
        elif scale is None:
            scale = self._lengths(X.shape[1])
        else:
            self._lengths(X.shape[1])
        return replace(self, **{self.scale_name: scale})  # type: ignore[type-var]  # every subclass is a dataclass

    @abstractmethod
    def _distances(self, X: Array) -> Array:
        """Return the distances (n, n) between rows X, whose median is a length scale."""

    def _lengths(self, d: int) -> float | Array:
        """Return what d columns are divided by."""
        return column_scales(self, self.scale_name, d)


class Stationary(DistanceKernel):
    """A function of the Euclidean distance; a subclass says which (`_profile`), and in what unit (`_unit`)."""

    supports_sparse = supports_out = True
    _unit: float = 1.0
    """The length scale times this is what distances are measured in."""
    _near: float = 0.0
    """The least share of the norms below which distances are taken from differences."""

    @abstractmethod
    def _profile(self, negative_squares: Array) -> Array:
        """Return the kernel's values, overwriting minus the squared distances."""

    def _distances(self, X: Rows) -> Array:
        return np.sqrt(-prepare_negative_squared_distances(X, 1.0)(X))

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Centre and augment the landmarks once."""
        unit = self._unit * self._lengths(landmarks.shape[1])
        squares = prepare_negative_squared_distances(landmarks, unit, self._near)
        return lambda Z, out=None, /: self._profile(squares(Z, out))

    def diagonal(self, X: Rows) -> Array:
        """Return the kernel of no distance."""
        return self._profile(np.zeros(X.shape[0]))


@dataclass(frozen=True)
class Gaussian(Stationary):
    """The Gaussian kernel, ``exp(-|x - y|^2 / (2 sigma^2))``.

    Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    sigma : float > 0, one for each column, "median", or None
        The bandwidth, in the units of the columns. scikit-learn's ``gamma`` is ``1 / (2 sigma^2)``; None is its default
        of 1 / d for d columns.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", eq. (1).
    The error of the exponent is at most ``8 eps (|x-c|^2 + |y-c|^2) / (2 sigma^2)``, c the mean of the landmarks (0 for
    sparse rows); equal rows give exactly 1.

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
    _unit = float(np.sqrt(2))

    def __post_init__(self) -> None:
        require_scale(self, "sigma", MEDIAN, None)

    def _lengths(self, d: int) -> float | Array:
        return float(np.sqrt(d / 2)) if self.sigma is None else super()._lengths(d)

    def _profile(self, negative_squares: Array) -> Array:
        return np.exp(negative_squares, out=negative_squares)


@dataclass(frozen=True)
class Exponential(Stationary):
    """The exponential kernel, ``exp(-|x - y| / length_scale)`` of the Euclidean distance; Matern's with nu = 1/2.

    Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    length_scale : float > 0, one for each column, or "median"

    Examples
    --------
    >>> from dkfm.kernels import Exponential
    >>> Exponential(2.0)([[0.0, 0.0]], [[3.0, 4.0]]).round(4)
    array([[0.0821]])
    """

    length_scale: Scale = 1.0
    _near = 1e-3  # a root makes more of the error of a short distance

    def __post_init__(self) -> None:
        require_scale(self, "length_scale", MEDIAN)

    def _profile(self, negative_squares: Array) -> Array:
        roots = np.negative(negative_squares, out=negative_squares)
        np.sqrt(roots, out=roots)
        np.negative(roots, out=roots)
        return np.exp(roots, out=roots)


@dataclass(frozen=True)
class RationalQuadratic(Stationary):
    """The rational quadratic kernel, ``(1 + |x - y|^2 / (2 alpha length_scale^2))^(-alpha)``.

    A mixture of Gaussians of many widths. Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    alpha : float, > 0
    length_scale : float > 0, one for each column, or "median"

    Examples
    --------
    >>> from dkfm.kernels import RationalQuadratic
    >>> RationalQuadratic(1.0, 1.0)([[0.0]], [[2.0]]).round(4)
    array([[0.3333]])
    """

    alpha: float = 1.0
    length_scale: Scale = 1.0
    supports_float32 = True
    _unit = float(np.sqrt(2))

    def __post_init__(self) -> None:
        require_positive(self, "alpha")
        require_scale(self, "length_scale", MEDIAN)

    def _profile(self, negative_squares: Array) -> Array:
        # -alpha log(1 + s / alpha): exact for large alpha too, where it is a Gaussian.
        negative_squares /= -self.alpha
        np.log1p(negative_squares, out=negative_squares)
        negative_squares *= -self.alpha
        return np.exp(negative_squares, out=negative_squares)


@dataclass(frozen=True)
class NegativeSquaredDistance(Stationary):
    """The negative squared distance, ``-|x - y|^2 / length_scale^2``.

    Conditionally positive semi-definite: for kernel PCA, and as ``Exp(k)``. The centred Gram matrix of half of it is
    that of the linear kernel (classical scaling; with other distances, Isomap). Takes sparse rows.

    Parameters
    ----------
    length_scale : float > 0, one for each column, or "median"

    Examples
    --------
    >>> from dkfm.kernels import NegativeSquaredDistance
    >>> NegativeSquaredDistance()([[0.0, 0.0]], [[3.0, 4.0]])
    array([[-25.]])
    """

    length_scale: Scale = 1.0
    definiteness = Definiteness.CONDITIONAL

    def __post_init__(self) -> None:
        require_scale(self, "length_scale", MEDIAN)

    def _profile(self, negative_squares: Array) -> Array:
        return negative_squares


_SMOOTHEST = 100.0
_FAR = 1e6
"""From some hundreds on the kernel is 0 in any precision; from 1e9 on the Bessel function is not computed."""


@dataclass(frozen=True)
class Matern(Stationary):
    """The Matern kernel, ``2^(1-nu) / Gamma(nu) a^nu K_nu(a)`` with ``a = sqrt(2 nu) |x - y| / length_scale``.

    ``exp(-a)`` for nu = 1/2, ``(1 + a) exp(-a)`` for 3/2, ``(1 + a + a^2/3) exp(-a)`` for 5/2; for other nu K_nu is the
    modified Bessel function of the second kind. Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    nu : float, > 0, at most 100
        The smoothness: features have ``nu - 1/2`` derivatives, rounded up. Beyond, take its limit, the Gaussian.
    length_scale : float > 0, one for each column, or "median"

    Notes
    -----
    Rasmussen and Williams, "Gaussian processes for machine learning" (2006), eqs. (4.14) and (4.17). The Bessel form is
    computed in logarithms, with a relative error of some 1e-13.

    Examples
    --------
    >>> from dkfm.kernels import Matern
    >>> Matern(1.5, 2.0)([[0.0]], [[2.0]]).round(4)
    array([[0.4834]])
    """

    nu: float = 1.5
    length_scale: Scale = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "nu")
        if self.nu > _SMOOTHEST:
            raise KernelError(f"Matern needs nu <= 100, and got {self.nu}; beyond, Gaussian is its limit.")
        require_scale(self, "length_scale", MEDIAN)

    @property
    def _unit(self) -> float:  # type: ignore[override]  # it depends on nu
        return float(1 / np.sqrt(2 * self.nu))

    @property
    def _near(self) -> float:  # type: ignore[override]  # it depends on nu
        # Below 1 the kernel falls like a root of the squared distance, and makes more of its error.
        return 0.0 if self.nu > 1 else 1e-3

    def _profile(self, negative_squares: Array) -> Array:
        return map_rows(negative_squares, self._of_squares)

    def _of_squares(self, negative_squares: Array) -> Array:
        a = np.sqrt(np.negative(negative_squares, out=negative_squares), out=negative_squares)
        np.minimum(a, _FAR, out=a)
        if self.nu not in (0.5, 1.5, 2.5):
            return _bessel(a, self.nu)
        if self.nu == 0.5:
            return _falling(a)
        values = a + 1 if self.nu == 1.5 else a / 3
        if self.nu == 2.5:
            values += 1
            values *= a
            values += 1
        values *= _falling(a)
        return values


def _falling(a: Array) -> Array:
    """Return exp(-a), overwriting a."""
    return np.exp(np.negative(a, out=a), out=a)


def _bessel(a: Array, nu: float) -> Array:
    """Return the Matern kernel of scaled distances a, overwriting them."""
    from scipy.special import kve

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values: Array = kve(nu, a)
        np.log(values, out=values)
        values += nu * np.log(a) - a
        values += (1 - nu) * log(2) - lgamma(nu)
    # The Bessel function is beyond all numbers where a is next to nothing, and where a is 0.
    short = ~np.isfinite(values) & (a < 1)
    np.exp(values, out=values)
    values[short] = _series(a[short], nu)
    return values


def _series(a: Array, nu: float) -> Array:
    """Return the first terms of the power series; where they are needed, the others are below rounding."""
    total, term = np.ones_like(a), np.ones_like(a)
    for k in range(1, 5 if nu > 20 else 1):
        term = term * (-(a**2) / (4 * k * (nu - k)))
        total += term
    return total
