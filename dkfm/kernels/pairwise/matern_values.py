"""Compute values of the Matern kernel from scaled distances ``a = sqrt(2 nu) |x - y| / length_scale``, for any nu.

For ``M_nu(a) = 2^(1-nu) / Gamma(nu) a^nu K_nu(a)`` the recurrence of the Bessel functions (Abramowitz and Stegun,
9.6.26) is ``M_(nu+1) = M_nu + a^2 / (4 nu (nu - 1)) M_(nu-1)``: a sum of positive terms, which loses no digits.
"""

from math import lgamma, log

import numpy as np

from dkfm.core.rows import Array
from dkfm.kernels.pairwise.block_operations import exp_in_place

_MAX_DISTANCE = 1500.0
"""Cap on the scaled distances of the recurrence: the kernel is 0 there."""

_MAX_BESSEL_DISTANCE = 1e6
"""Cap on the scaled distances of Bessel functions: the kernel is 0 there, and SciPy computes them up to 1e9."""

_TINY_DISTANCE = 1e-9
"""Scaled distance below which the kernel is 1 to rounding for nu of 1 or more."""


def evaluate_matern(a: Array, nu: float) -> Array:
    """Return the kernel values of scaled distances, which are overwritten, for a number nu > 0 of at most 100."""
    if nu < 1 or not (2 * nu).is_integer():
        return _evaluate_bessel(a, nu)
    is_tiny = a < _TINY_DISTANCE
    np.clip(a, _TINY_DISTANCE, _MAX_DISTANCE, out=a)
    values = _evaluate_nu_1(a) if nu == 1 else _evaluate_by_recurrence(a, nu)
    values[is_tiny] = 1.0
    return values


def _evaluate_nu_1(a: Array) -> Array:
    from scipy.special import k1

    values: Array = a * k1(a)
    return values


def _evaluate_by_recurrence(a: Array, nu: float) -> Array:
    """Return the values for an integer nu, from K_0 and K_1, or a half-integer, from M_(1/2) and M_(3/2).

    Both are multiplied by ``exp(a)`` until the end.
    """
    squares = a * a
    before, values, order = _evaluate_first_orders(a, squares, nu)
    while order < nu:
        before *= squares
        before *= 1 / (4 * order * (order - 1))
        before += values
        before, values, order = values, before, order + 1
    a *= -0.5
    exp_in_place(a)
    values *= a  # twice, because exp(-a) may underflow where the kernel does not: values grow to 1e130
    values *= a
    return values


def _evaluate_first_orders(a: Array, squares: Array, nu: float) -> tuple[Array, Array, float]:
    """Return ``exp(a) M`` of two successive orders, and the second order."""
    if not nu.is_integer():
        return np.ones_like(a), 1 + a, 1.5
    from scipy.special import k0e, k1e

    first = a * k1e(a)
    return first, first + squares * k0e(a) / 2, 2.0


def _evaluate_bessel(a: Array, nu: float) -> Array:
    """Return the values of any nu by the Bessel function."""
    from scipy.special import kve

    np.minimum(a, _MAX_BESSEL_DISTANCE, out=a)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values: Array = kve(nu, a)
        np.log(values, out=values)
        values += nu * np.log(a) - a
        values += (1 - nu) * log(2) - lgamma(nu)
    # The Bessel function overflows for tiny a, and is infinite for a = 0.
    needs_series = ~np.isfinite(values) & (a < 1)
    np.exp(values, out=values)
    values[needs_series] = _evaluate_series(a[needs_series], nu)
    return values


def _evaluate_series(a: Array, nu: float) -> Array:
    """Return the first terms of the kernel's power series in a; for a this small, the others are below rounding."""
    total, term = np.ones_like(a), np.ones_like(a)
    for k in range(1, 5 if nu > 20 else 1):
        term = term * (-(a**2) / (4 * k * (nu - k)))
        total += term
    return total
