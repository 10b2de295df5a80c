"""The Matern kernel of any smoothness."""

from dataclasses import dataclass
from math import lgamma, log

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.blocks import by_rows
from dkfm.kernels.parameters import MEDIAN, Scale, require_positive, require_scale
from dkfm.kernels.rows import Array
from dkfm.kernels.stationary import Stationary

__all__ = ["Matern"]

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
        return by_rows(negative_squares, self._of_squares)

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
