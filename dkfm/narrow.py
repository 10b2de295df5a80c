"""Products of wide blocks and narrow matrices, which is what projecting on a few components is.

BLAS copies a large left side into an order of its own before it multiplies, which for a few columns takes longer than
multiplying. OpenBLAS leaves small matrices where they are; so the product is a sum of small ones.
"""

import numpy as np

from dkfm.kernels.rows import Array
from dkfm.tiling import count, row_slices

__all__ = ["multiply_by_narrow", "parts_of", "summed_values"]

_MOST_COLUMNS = 40
"""From here on copying costs less than it saves."""

_SMALL = 10**6
"""Multiplications that OpenBLAS takes for a small product."""

_ROWS, _LENGTH = 128, 256
"""Of the left sides of small products."""


def multiply_by_narrow(values: Array, W: Array, out: Array) -> None:
    """Fill `out` with ``values @ W``.

    Parameters
    ----------
    values : ndarray of shape (n, m)
    W : ndarray of shape (m, q)
    out : ndarray of shape (n, q)
    """
    m, q = W.shape
    parts = parts_of(m, q)
    if parts == 1:
        np.matmul(values, W, out=out)
        return
    length = m // parts
    rest = slice(parts * length, m)
    right = W[: rest.start].reshape(parts, length, q)
    for rows in row_slices(len(values), _ROWS):
        left = values[rows, : rest.start].reshape(-1, parts, length).transpose(1, 0, 2)
        np.add.reduce(np.matmul(left, right), axis=0, out=out[rows])
    if rest.start < m:
        out += values[:, rest] @ W[rest]


def parts_of(m: int, q: int) -> int:
    """Return of how many small products one with weights (m, q) is the sum; 1 where BLAS does as well.

    >>> parts_of(4000, 20), parts_of(4000, 200)
    (16, 1)
    """
    if not 0 < q <= _MOST_COLUMNS or m < 2 * _LENGTH:
        return 1
    return count(m, min(_LENGTH, _SMALL // (_ROWS * q)))


def summed_values(m: int, q: int) -> int:
    """Return how many values are there before they are summed."""
    parts = parts_of(m, q)
    return parts * _ROWS * q if parts > 1 else 0
