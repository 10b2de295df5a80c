"""Products of wide blocks and narrow matrices, which is what projecting on a few components is.

BLAS copies a large left side into an order of its own before it multiplies, which for a few columns takes longer than
multiplying. OpenBLAS leaves small matrices where they are; so the product is a sum of small ones.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from dkfm.core.chunking import count_tiles, row_slices
from dkfm.core.rows import Array

_MOST_COLUMNS = 40
"""From here on copying costs less than it saves."""

_SMALL = 10**6
"""Multiplications that OpenBLAS takes for a small product."""

_ROWS, _LENGTH = 128, 256
"""Of the left sides of small products."""


def skinny_matmul(values: Array, W: Array, out: Array) -> None:
    """Fill `out` with ``values @ W``.

    Parameters
    ----------
    values : ndarray of shape (n, m)
    W : ndarray of shape (m, q)
    out : ndarray of shape (n, q)
    """
    m, q = W.shape
    parts = count_partial_products(m, q)
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


def count_partial_products(m: int, q: int) -> int:
    """Return of how many small products one with weights (m, q) is the sum; 1 where BLAS does as well.

    >>> count_partial_products(4000, 20), count_partial_products(4000, 200)
    (16, 1)
    """
    if not 0 < q <= _MOST_COLUMNS or m < 2 * _LENGTH:
        return 1
    return count_tiles(m, min(_LENGTH, _SMALL // (_ROWS * q)))


def partial_product_values(m: int, q: int) -> int:
    """Return how many values are there before they are summed."""
    parts = count_partial_products(m, q)
    return parts * _ROWS * q if parts > 1 else 0


_KINDS = {np.dtype(np.float64): ("d", ctypes.c_double), np.dtype(np.float32): ("s", ctypes.c_float)}


def triangular_matmul(values: Array, W: Array) -> None:
    """Replace values (n, r), C-contiguous, by ``values W``, where W (r, r) is upper triangular: half the work.

    >>> values = np.array([[1.0, 1.0]])
    >>> triangular_matmul(values, np.array([[2.0, 3.0], [0.0, 4.0]]))
    >>> values
    array([[2., 7.]])
    """
    W = np.ascontiguousarray(W)
    n, r = values.shape
    ready = values.flags.c_contiguous and values.flags.writeable
    if values.dtype not in _KINDS or W.dtype != values.dtype or W.shape != (r, r) or not ready:
        raise AssertionError("Values and weights are of one dtype, and the values can be written in the order of C.")
    if r == 0:
        return
    kind, numbers = _KINDS[values.dtype]
    rows, columns = ctypes.byref(ctypes.c_int(r)), ctypes.byref(ctypes.c_int(n))
    # In LAPACK's order W' is lower triangular, and the values are a matrix of columns.
    _trmm(kind)(
        *(b"L", b"L", b"N", b"N"),
        *(rows, columns, ctypes.byref(numbers(1.0))),
        *(W.ctypes.data, rows, values.ctypes.data, rows),
    )


@cache
def _trmm(kind: str) -> Callable[..., None]:
    from scipy.linalg import cython_blas

    exported: dict[str, object] = dict(cython_blas.__pyx_capi__)
    capsule = exported[f"{kind}trmm"]
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address = address_of(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, name_of(capsule))
    letters, pointers = [ctypes.c_char_p] * 4, [ctypes.c_void_p] * 7
    return ctypes.CFUNCTYPE(None, *letters, *pointers)(address)
