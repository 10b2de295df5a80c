"""Compile sums over columns with Numba, which the extra "fast" installs.

Numba's cache contains code, so it must be in a folder that only this user can write. Without such a folder, each
process compiles again, which takes about a second for each sum.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"
# numba compiles these functions for the types they are called with.

import threading
from collections.abc import Callable
from functools import cache
from math import log, log1p
from pathlib import Path

import numba
import numpy as np

from dkfm.core.rows import Array
from dkfm.kernels.pairwise import llvm_compiler  # noqa: F401  # it fills a table of llvmlite's before numba does

_COLUMNS_AT_ONCE = 1024
"""Columns that many accumulators add up in the precision of the rows before that sum is added in float64."""

_LANDMARKS_AT_ONCE = 64
"""Landmarks that stay in the processor cache while all rows are compared with them."""

_NARROW = 128
"""Largest number of columns for which the loop over landmarks is vectorized, and not the loop over columns."""

_NARROW_LANDMARKS = 192
"""Landmarks in a pass of the loop for narrow rows; the fastest number of 96 to 256 in both precisions."""

_FLAGS = {"reassoc", "nsz", "contract"}
"""Flags of LLVM that allow a sum to be vectorized; NaN and infinity keep their meaning."""

_config_lock = threading.Lock()
"""Lock of the process-wide setting from which Numba reads its cache folder."""


@cache
def compile_sum(name: str, folder: Path | None) -> Callable[[Array, Array, Array], None]:
    """Return a function that fills a block (n, m) with a sum over the columns of rows (n, d) and (m, d).

    "absolute": ``|x - y|``; "minimum": ``min(x, y)``; "chi_squared": ``(x - y)^2 / (x + y)``; "mixture":
    ``-x log(x / (x + y)) - y log(y / (x + y))``, with 0 log 0 = 0/0 = 0. The sum of a pair does not depend on other
    rows. `folder` is the cache for compiled code; with None nothing is cached.
    """
    function: Callable[[Array, Array, Array], None]
    with _config_lock:
        previous = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = previous if folder is None else str(folder)
        try:
            compile_function = numba.njit(fastmath=_FLAGS, error_model="numpy", nogil=True, cache=folder is not None)
            function = compile_function(_SUMS[name])
        finally:
            numba.config.CACHE_DIR = previous
    return function


@numba.njit(fastmath=_FLAGS)
def _sum_absolute_four_landmarks(x, y0, y1, y2, y3, zero):
    a, b, c, d = zero, zero, zero, zero
    for k in range(x.size):
        a += abs(x[k] - y0[k])
        b += abs(x[k] - y1[k])
        c += abs(x[k] - y2[k])
        d += abs(x[k] - y3[k])
    return a, b, c, d


@numba.njit(fastmath=_FLAGS - {"reassoc"})
def _sum_absolute_of_few_columns(X, Y, block):
    """Add up column by column over many landmarks at once, because a sum of few terms does not fill a vector register.

    Vectors hold sums, not terms, so the terms are added in the same order for every row.
    """
    n, columns = X.shape
    # Each step takes two columns, and four rows for each landmark that is loaded. An odd number of columns is padded
    # with zeros on both sides; beyond the last row, that row is repeated.
    transposed = np.zeros((columns + 1, _NARROW_LANDMARKS), X.dtype)
    rows, total = np.zeros((4, columns + 1), X.dtype), np.zeros((4, _NARROW_LANDMARKS), X.dtype)
    for start in range(0, Y.shape[0], _NARROW_LANDMARKS):
        stop = min(start + _NARROW_LANDMARKS, Y.shape[0])
        for j in range(start, stop):
            for k in range(columns):
                transposed[k, j - start] = Y[j, k]
        for i in range(0, n, 4):
            for r in range(4):  # numba takes seconds to compile assignments of slices
                for k in range(columns):
                    rows[r, k] = X[min(i + r, n - 1), k]
                for j in range(_NARROW_LANDMARKS):
                    total[r, j] = 0
            for k in range(0, columns, 2):
                a, b, c, d = rows[0, k], rows[1, k], rows[2, k], rows[3, k]
                p, q, s, t = rows[0, k + 1], rows[1, k + 1], rows[2, k + 1], rows[3, k + 1]
                for j in range(_NARROW_LANDMARKS):
                    x, y = transposed[k, j], transposed[k + 1, j]
                    total[0, j] += abs(a - x) + abs(p - y)
                    total[1, j] += abs(b - x) + abs(q - y)
                    total[2, j] += abs(c - x) + abs(s - y)
                    total[3, j] += abs(d - x) + abs(t - y)
            for r in range(min(4, n - i)):
                for j in range(start, stop):
                    block[i + r, j] = total[r, j - start]


def _sum_absolute(X, Y, block):
    if X.shape[1] <= _NARROW:
        _sum_absolute_of_few_columns(X, Y, block)
        return
    zero, last = X.dtype.type(0), Y.shape[0] - 1
    for start in range(0, Y.shape[0], _LANDMARKS_AT_ONCE):
        for i in range(X.shape[0]):
            for j in range(start, min(start + _LANDMARKS_AT_ONCE, Y.shape[0]), 4):
                # Beyond the last landmark, that landmark is repeated.
                j1, j2, j3 = min(j + 1, last), min(j + 2, last), min(j + 3, last)
                p, q, r, s = 0.0, 0.0, 0.0, 0.0
                for k in range(0, X.shape[1], _COLUMNS_AT_ONCE):
                    e = k + _COLUMNS_AT_ONCE
                    a, b, c, d = _sum_absolute_four_landmarks(
                        X[i, k:e], Y[j, k:e], Y[j1, k:e], Y[j2, k:e], Y[j3, k:e], zero
                    )
                    p, q, r, s = p + a, q + b, r + c, s + d
                block[i, j], block[i, j1], block[i, j2], block[i, j3] = p, q, r, s


def _sum_minima(X, Y, block):
    for i in range(X.shape[0]):
        for j in range(Y.shape[0]):
            total = 0.0
            for k in range(X.shape[1]):
                total += min(X[i, k], Y[j, k])
            block[i, j] = total


@numba.njit(fastmath=False, error_model="numpy")  # by default the flags would be those of the caller
def _chi_squared_term(x, y):
    """Return one term, without fast-math, which would compute the square before the quotient; it may underflow."""
    difference, total = x - y, x + y
    return difference * (difference / total) if total > 0 else total


def _sum_chi_squared(X, Y, block):
    for i in range(X.shape[0]):
        for j in range(Y.shape[0]):
            total = 0.0
            for k in range(X.shape[1]):
                total += _chi_squared_term(X[i, k], Y[j, k])
            block[i, j] = total


_SMALLEST_RATIO = 1e-290
"""Ratio of two numbers below which it may have lost digits."""

_LOG_2 = log(2.0)

_ONE = 1023 << 52
_SQRT_HALF = int(np.float64(0.5**0.5).view(np.int64))
"""The bits of 1.0 and of sqrt(1/2)."""

_LARGEST_FRACTION = 2**0.5 - 1
"""Largest t whose log(1 + t) is computed as such; for larger t it is log(2) + log(1 + (t - 1) / 2)."""


@numba.njit(fastmath=_FLAGS)
def _twice_atanh(w):
    """Return 2 atanh(w) for ``|w| <= 0.18``, by its power series; the first term left out is below rounding."""
    z = w * w
    series = 1 / 23
    for k in (21, 19, 17, 15, 13, 11, 9, 7, 5, 3):
        series = series * z + 1 / k
    return 2 * (w + w * (z * series))


@numba.njit(fastmath=_FLAGS, error_model="numpy")
def _mixture_entropy(x, y):
    """Return a term for numbers whose ratio is 0 or at least `_SMALLEST_RATIO`.

    With s <= l and t = s / l it is ``(l + s) log(1 + t) - s log(t)``, a sum without cancellation. Both logarithms are
    double inverse hyperbolic tangents, without a branch, so that the loop over columns is vectorized.
    """
    smaller, larger = np.float64(min(x, y)), np.float64(max(x, y))
    t = smaller / max(larger, _SMALLEST_RATIO)
    is_large = t > _LARGEST_FRACTION
    log_of_sum = _twice_atanh((t - 1 if is_large else t) / (t + (3.0 if is_large else 2.0)))
    log_of_sum += _LOG_2 if is_large else 0.0
    # t = mantissa * 2^exponent, with a mantissa from sqrt(1/2) to sqrt(2).
    bits = np.float64(max(t, _SMALLEST_RATIO)).view(np.int64)
    exponent = ((bits + (_ONE - _SQRT_HALF)) >> 52) - 1023
    mantissa = np.int64(bits - (exponent << 52)).view(np.float64)
    log_of_ratio = np.float64(np.int32(exponent)) * _LOG_2 + _twice_atanh((mantissa - 1) / (mantissa + 1))
    return (larger + smaller) * log_of_sum - smaller * log_of_ratio


@numba.njit(fastmath=_FLAGS, error_model="numpy")
def _rare_mixture_entropy(x, y):
    """Return a term for any numbers."""
    smaller, larger = np.float64(min(x, y)), np.float64(max(x, y))
    ratio = smaller / larger if smaller > 0 else 0.0
    if ratio >= _SMALLEST_RATIO:
        return (larger + smaller) * log1p(ratio) - smaller * log(ratio)
    return smaller * (1 + log(larger) - log(smaller)) if smaller > 0 else 0.0


@numba.njit(fastmath=_FLAGS, error_model="numpy")
def _compute_row_extrema(X):
    """Return the smallest positive number and the largest number of each non-negative row."""
    smallest, largest = np.full(X.shape[0], np.inf), np.zeros(X.shape[0])
    for i in range(X.shape[0]):
        for k in range(X.shape[1]):
            value = np.float64(X[i, k])
            smallest[i] = min(smallest[i], value if value > 0 else np.inf)
            largest[i] = max(largest[i], value)
    return smallest, largest


def _sum_mixture_entropies(X, Y, block):
    (a, b), (c, d) = _compute_row_extrema(X), _compute_row_extrema(Y)
    for i in range(X.shape[0]):
        for j in range(Y.shape[0]):
            total = 0.0
            if min(a[i], c[j]) < _SMALLEST_RATIO * max(b[i], d[j], 1.0):
                for k in range(X.shape[1]):
                    total += _rare_mixture_entropy(X[i, k], Y[j, k])
            else:
                for k in range(X.shape[1]):
                    total += _mixture_entropy(X[i, k], Y[j, k])
            block[i, j] = total


_SUMS = {
    "absolute": _sum_absolute,
    "chi_squared": _sum_chi_squared,
    "minimum": _sum_minima,
    "mixture": _sum_mixture_entropies,
}
