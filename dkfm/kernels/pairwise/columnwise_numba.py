"""Sums over columns compiled by numba, the extra "fast".

numba's cache is code, so it belongs into a folder that only this user writes; without one every process compiles anew,
in about a second for each sum.
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

_COLUMNS = 1024
"""Columns added up in the rows' own precision, by many accumulators, before their sum goes to float64."""

_ROWS = 64
"""Landmarks that stay near the processor while rows pass."""

_FEW = 128
"""Columns up to which landmarks, and not columns, fill the processor's vectors."""

_TURNED = 192
"""Landmarks that do so then, of 96 to 256 the quickest of both precisions."""

_FLAGS = {"reassoc", "nsz", "contract"}
"""What lets a sum be vectorised; NaN and infinity keep their meaning."""

_settings = threading.Lock()
"""numba reads where it keeps things from a setting of the process."""


@cache
def compile_sum(name: str, folder: Path | None) -> Callable[[Array, Array, Array], None]:
    """Return a function that fills a block (n, m) with a sum over the columns of rows (n, d) and (m, d).

    "absolute": ``|x - y|``; "minimum": ``min(x, y)``; "chi_squared": ``(x - y)^2 / (x + y)``; "mixture":
    ``-x log(x / (x + y)) - y log(y / (x + y))``; terms of 0 are 0. A pair's sum does not depend on the rows beside it.
    `folder` keeps what is compiled.
    """
    function: Callable[[Array, Array, Array], None]
    with _settings:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = before if folder is None else str(folder)
        try:
            decorate = numba.njit(fastmath=_FLAGS, error_model="numpy", nogil=True, cache=folder is not None)
            function = decorate(_SUMS[name])
        finally:
            numba.config.CACHE_DIR = before
    return function


@numba.njit(fastmath=_FLAGS)
def _four(x, y0, y1, y2, y3, zero):
    a, b, c, d = zero, zero, zero, zero
    for k in range(x.size):
        a += abs(x[k] - y0[k])
        b += abs(x[k] - y1[k])
        c += abs(x[k] - y2[k])
        d += abs(x[k] - y3[k])
    return a, b, c, d


@numba.njit(fastmath=_FLAGS - {"reassoc"})
def _absolute_of_few(X, Y, block):
    """Add up column by column, over many landmarks at once: no sum of so few terms is long enough for a vector.

    Vectors hold sums, not terms, so that nothing need be added in another order, which might differ from row to row.
    """
    n, columns = X.shape
    # Two columns at a time, and four rows for each landmark that is loaded; beyond the last column there are zeros on
    # both sides, beyond the last row it is taken again.
    turned = np.zeros((columns + 1, _TURNED), X.dtype)
    rows, total = np.zeros((4, columns + 1), X.dtype), np.zeros((4, _TURNED), X.dtype)
    for start in range(0, Y.shape[0], _TURNED):
        stop = min(start + _TURNED, Y.shape[0])
        for j in range(start, stop):
            for k in range(columns):
                turned[k, j - start] = Y[j, k]
        for i in range(0, n, 4):
            for r in range(4):
                rows[r, :columns] = X[min(i + r, n - 1)]
            total[:] = 0
            for k in range(0, columns, 2):
                a, b, c, d = rows[0, k], rows[1, k], rows[2, k], rows[3, k]
                p, q, s, t = rows[0, k + 1], rows[1, k + 1], rows[2, k + 1], rows[3, k + 1]
                for j in range(_TURNED):
                    x, y = turned[k, j], turned[k + 1, j]
                    total[0, j] += abs(a - x) + abs(p - y)
                    total[1, j] += abs(b - x) + abs(q - y)
                    total[2, j] += abs(c - x) + abs(s - y)
                    total[3, j] += abs(d - x) + abs(t - y)
            for r in range(min(4, n - i)):
                for j in range(start, stop):
                    block[i + r, j] = total[r, j - start]


def _absolute(X, Y, block):
    if X.shape[1] <= _FEW:
        _absolute_of_few(X, Y, block)
        return
    zero, last = X.dtype.type(0), Y.shape[0] - 1
    for start in range(0, Y.shape[0], _ROWS):
        for i in range(X.shape[0]):
            for j in range(start, min(start + _ROWS, Y.shape[0]), 4):
                # Beyond the last landmark the last one is taken again.
                j1, j2, j3 = min(j + 1, last), min(j + 2, last), min(j + 3, last)
                p, q, r, s = 0.0, 0.0, 0.0, 0.0
                for k in range(0, X.shape[1], _COLUMNS):
                    e = k + _COLUMNS
                    a, b, c, d = _four(X[i, k:e], Y[j, k:e], Y[j1, k:e], Y[j2, k:e], Y[j3, k:e], zero)
                    p, q, r, s = p + a, q + b, r + c, s + d
                block[i, j], block[i, j1], block[i, j2], block[i, j3] = p, q, r, s


def _minimum(X, Y, block):
    for i in range(X.shape[0]):
        for j in range(Y.shape[0]):
            total = 0.0
            for k in range(X.shape[1]):
                total += min(X[i, k], Y[j, k])
            block[i, j] = total


def _chi_squared(X, Y, block):
    for i in range(X.shape[0]):
        for j in range(Y.shape[0]):
            total = 0.0
            for k in range(X.shape[1]):
                gap, both = X[i, k] - Y[j, k], X[i, k] + Y[j, k]
                total += gap * (gap / both) if both > 0 else both
            block[i, j] = total


def _mixture(X, Y, block):
    for i in range(X.shape[0]):
        for j in range(Y.shape[0]):
            total = 0.0
            for k in range(X.shape[1]):
                small, large = min(X[i, k], Y[j, k]), max(X[i, k], Y[j, k])
                share = small / large if small > 0 else 0.0
                if share >= 1e-290:  # below it a share may have lost digits
                    total += (large + small) * log1p(share) - small * log(share)
                elif small > 0:
                    total += small * (1 + log(large) - log(small))
            block[i, j] = total


_SUMS = {"absolute": _absolute, "chi_squared": _chi_squared, "minimum": _minimum, "mixture": _mixture}
