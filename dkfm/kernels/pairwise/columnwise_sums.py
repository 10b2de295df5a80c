"""Sum absolute differences, minima, chi-squared terms and entropies over columns, which no matrix product can compute.

With the extra "fast" the sums are compiled. Without it, SciPy or NumPy compute them more slowly, with the same results
up to rounding.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array

_ROWS_AT_ONCE = 64
_cache_folder: Path | None = None
_VALUES_AT_ONCE = 2**14
"""Terms in memory at a time, so that temporaries stay in the processor cache."""
_COLUMN_SECONDS = {
    "absolute": (0.15e-9, 0.6e-9),
    "minimum": (0.3e-9, 1.5e-9),
    "chi_squared": (0.8e-9, 1.6e-9),
    "mixture": (3e-9, 12e-9),
}
"""Approximate seconds of a term of each sum: compiled, and without the extra "fast"."""


def estimate_column_seconds(name: str) -> float:
    """Estimate the seconds of one thread for a term of a sum, "absolute", "minimum", "chi_squared" or "mixture"."""
    return _COLUMN_SECONDS[name][lacks_numba()]


def lacks_numba() -> bool:
    """Return whether sums are not compiled, because numba, of the extra "fast", is not installed."""
    return not _has_numba()


def set_compile_cache(folder: Path) -> None:
    """Set the cache folder for code that is compiled from now on; only this user may have write access to it."""
    global _cache_folder  # noqa: PLW0603  # a process has one cache folder
    _cache_folder = folder


def sum_absolute_differences(X: Array, Y: Array, out: Array | None = None) -> Array:
    """Return ``sum_j |x_j - y_j|`` of all pairs, (n, m), in the precision of the rows, and in `out` if it fits."""

    def fallback(rows: Array) -> Array:
        from scipy.spatial.distance import cdist

        return cdist(rows, Y, "cityblock")

    return _fill_block("absolute", X, Y, fallback, out)


def sum_minima(X: Array, Y: Array, out: Array | None = None) -> Array:
    """Return ``sum_j min(x_j, y_j)`` of all pairs, (n, m), in `out` if it fits."""
    return _fill_block("minimum", X, Y, lambda rows: _sum_by_rows(np.minimum, rows, Y), out)


def sum_chi_squared_terms(X: Array, Y: Array, out: Array | None = None) -> Array:
    """Return ``sum_j (x_j - y_j)^2 / (x_j + y_j)``, with 0/0 = 0, of all pairs of non-negative rows, (n, m).

    They are in `out` if it fits.
    """

    def terms(x: Array, y: Array) -> Array:
        difference, values = x - y, x + y
        if values.min() > 0:  # a division without a mask is vectorized
            np.divide(difference, values, out=values)
        else:
            np.divide(difference, values, out=values, where=values > 0)
        values *= difference
        return values

    return _fill_block("chi_squared", X, Y, lambda rows: _sum_by_rows(terms, rows, Y), out)


def sum_mixture_entropies(X: Array, Y: Array, out: Array | None = None) -> Array:
    """Return ``-sum_j (x_j log(x_j / (x_j + y_j)) + y_j log(y_j / (x_j + y_j)))`` of all pairs, with 0 log 0 = 0.

    They are in `out` if it fits.
    """

    def terms(x: Array, y: Array) -> Array:
        # With s <= l, a term is (l + s) log(1 + s / l) - s log(s / l), a sum without cancellation.
        smaller, larger = np.minimum(x, y), np.maximum(x, y)
        ratios = np.divide(smaller, larger, out=np.zeros_like(larger), where=larger > 0)
        # A ratio below 1e-290 may have lost digits; the first summand is then s.
        tiny = ratios < 1e-290
        values: Array = np.where(tiny, smaller, (larger + smaller) * np.log1p(ratios))
        values -= smaller * np.log(np.where(tiny, 1.0, ratios))
        tiny &= smaller > 0
        if tiny.any():
            values[tiny] += smaller[tiny] * (np.log(larger[tiny]) - np.log(smaller[tiny]))
        return values

    return _fill_block("mixture", X, Y, lambda rows: _sum_by_rows(terms, rows, Y), out)


def _fill_block(name: str, X: Array, Y: Array, fallback: Callable[[Array], Array], out: Array | None = None) -> Array:
    block = np.empty((len(X), len(Y)), X.dtype) if out is None or out.dtype != X.dtype else out
    if _has_numba():
        from dkfm.kernels.pairwise.columnwise_numba import compile_sum

        compile_sum(name, _cache_folder)(_as_read_only_contiguous(X), _as_read_only_contiguous(Y), block)
        return block
    for part in row_slices(len(X), _ROWS_AT_ONCE):
        block[part] = fallback(X[part])
    return block


def _as_read_only_contiguous(rows: Array) -> Array:
    """Return rows in one read-only layout, because numba compiles again for each other layout."""
    view = np.ascontiguousarray(rows).view()
    view.flags.writeable = False
    return view


def _sum_by_rows(terms: Callable[[Array, Array], Array], X: Array, Y: Array) -> Array:
    sums, rows = np.empty((len(X), len(Y))), X.astype(np.float64, copy=False)
    for part in row_slices(len(Y), max(1, _VALUES_AT_ONCE // Y.shape[1])):
        others = Y[part].astype(np.float64, copy=False)
        for i, x in enumerate(rows):
            sums[i, part] = terms(x, others).sum(axis=1)
    return sums


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None
