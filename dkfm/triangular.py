"""Products with triangular weights, on as many threads as want them.

BLAS has them as ``trmm``, which SciPy's wrapper calls with Python's lock held: two threads would take turns. So it is
called by the address that SciPy exports for Cython.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from dkfm.kernels.rows import Array

__all__ = ["multiply_by_upper"]

_KINDS = {np.dtype(np.float64): ("d", ctypes.c_double), np.dtype(np.float32): ("s", ctypes.c_float)}


def multiply_by_upper(values: Array, W: Array) -> None:
    """Replace values (n, r), C-contiguous, by ``values W``, where W (r, r) is upper triangular: half the work.

    >>> values = np.array([[1.0, 1.0]])
    >>> multiply_by_upper(values, np.array([[2.0, 3.0], [0.0, 4.0]]))
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
