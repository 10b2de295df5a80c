"""Sums over columns that no matrix product gives: of absolute differences, minima, chi-squared terms, entropies.

With the extra "fast" they are compiled; without it they are SciPy's or NumPy's, slower and the same to rounding.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array

_ROWS_AT_ONCE = 64
_folder: Path | None = None
_VALUES_AT_ONCE = 2**16


def set_compile_cache(folder: Path) -> None:
    """Keep what is compiled from now on in a folder that only this user writes."""
    global _folder  # noqa: PLW0603  # one place a process is what a cache has
    _folder = folder


def absolute_differences(X: Array, Y: Array, out: Array | None = None) -> Array:
    """Return ``sum_j |x_j - y_j|`` of all pairs, (n, m), in the precision of the rows, in the memory given if any."""

    def plain(rows: Array) -> Array:
        from scipy.spatial.distance import cdist

        return cdist(rows, Y, "cityblock")

    return _sums("absolute", X, Y, plain, out)


def minima(X: Array, Y: Array) -> Array:
    """Return ``sum_j min(x_j, y_j)`` of all pairs."""
    return _sums("minimum", X, Y, lambda rows: _by_rows(np.minimum, rows, Y))


def chi_squared_terms(X: Array, Y: Array) -> Array:
    """Return ``sum_j (x_j - y_j)^2 / (x_j + y_j)``, with 0/0 = 0, of all pairs of non-negative rows."""

    def terms(x: Array, y: Array) -> Array:
        gap, both = x - y, x + y
        np.divide(gap, both, out=both, where=both > 0)
        both *= gap
        return both

    return _sums("chi_squared", X, Y, lambda rows: _by_rows(terms, rows, Y))


def mixture_entropies(X: Array, Y: Array) -> Array:
    """Return ``-sum_j x_j log(x_j / (x_j + y_j)) + y_j log(y_j / (x_j + y_j))``, with 0 log 0 = 0, of all pairs."""

    def terms(x: Array, y: Array) -> Array:
        # With s <= l: (l + s) log(1 + s / l) - s log(s / l), of which nothing cancels.
        small, large = np.minimum(x, y), np.maximum(x, y)
        shares = np.divide(small, large, out=np.zeros_like(large), where=large > 0)
        # Below 1e-290 a share may have lost digits, and the first term is s.
        tiny = shares < 1e-290
        found: Array = np.where(tiny, small, (large + small) * np.log1p(shares))
        found -= small * np.log(np.where(tiny, 1.0, shares))
        tiny &= small > 0
        if tiny.any():
            found[tiny] += small[tiny] * (np.log(large[tiny]) - np.log(small[tiny]))
        return found

    return _sums("mixture", X, Y, lambda rows: _by_rows(terms, rows, Y))


def _sums(name: str, X: Array, Y: Array, plain: Callable[[Array], Array], out: Array | None = None) -> Array:
    block = np.empty((len(X), len(Y)), X.dtype) if out is None or out.dtype != X.dtype else out
    if _has_numba():
        from dkfm.kernels.pairwise.columnwise_numba import compile_sum

        compile_sum(name, _folder)(_read_only(X), _read_only(Y), block)
        return block
    for part in row_slices(len(X), _ROWS_AT_ONCE):
        block[part] = plain(X[part])
    return block


def _read_only(rows: Array) -> Array:
    """Return rows in one layout that is not written to: numba compiles anew for every other."""
    view = np.ascontiguousarray(rows).view()
    view.flags.writeable = False
    return view


def _by_rows(terms: Callable[[Array, Array], Array], X: Array, Y: Array) -> Array:
    sums = np.empty((len(X), len(Y)))
    for i, x in enumerate(X.astype(np.float64)):
        for part in row_slices(len(Y), max(1, _VALUES_AT_ONCE // Y.shape[1])):
            sums[i, part] = terms(x, Y[part].astype(np.float64)).sum(axis=1)
    return sums


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None
