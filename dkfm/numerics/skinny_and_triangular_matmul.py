"""Multiply wide blocks with narrow or triangular matrices, or with their own transposes.

BLAS packs a large left operand before it multiplies. For a right operand of few columns, packing takes longer than the
multiplication. OpenBLAS does not pack small matrices, so such a product is computed as a sum of small products.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from dkfm.core.chunking import count_tiles, row_slices
from dkfm.core.rows import Array
from dkfm.core.scratch_buffers import ThreadBuffer

_MAX_COLUMNS = 40
"""Largest number of columns of a right operand for which packing costs more than it saves."""

_SMALL_PRODUCT = 10**6
"""Number of multiplications up to which OpenBLAS treats a product as small."""

_PART_ROWS = 128
"""Rows of the left operand of a small product."""

_PART_COLUMNS = 256
"""Largest number of columns of the left operand of a small product."""

_TRANSPOSED_COLUMNS = 48
"""Columns of a transposed left operand in a small product."""


# A buffer is reused, because Dask workers return freed memory to the system at once, and page faults are slow.
_product_buffer = ThreadBuffer()


def skinny_matmul(values: Array, W: Array, out: Array) -> None:
    """Write ``values @ W`` to `out`, (n, q), for values (n, m) and W (m, q)."""
    m, q = W.shape
    parts = count_partial_products(m, q)
    if parts == 1:
        np.matmul(values, W, out=out)
        return
    length = m // parts
    rest = slice(parts * length, m)
    right = W[: rest.start].reshape(parts, length, q)
    dtype = np.result_type(values, W)
    with _product_buffer.borrow(parts, min(len(values), _PART_ROWS) * q, dtype) as buffer:
        for rows in row_slices(len(values), _PART_ROWS):
            left = values[rows, : rest.start].reshape(-1, parts, length).transpose(1, 0, 2)
            n = left.shape[1]
            products = np.matmul(left, right, out=buffer[:, : n * q].reshape(parts, n, q))
            np.add.reduce(products, axis=0, out=out[rows])
    if rest.start < m:
        out += values[:, rest] @ W[rest]


def skinny_matmul_of_transpose(values: Array, U: Array, out: Array) -> None:
    """Write ``values' @ U`` to `out`, (m, q), for values (n, m) and U (n, q).

    >>> out = np.empty((2, 1))
    >>> skinny_matmul_of_transpose(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0], [10.0]]), out)
    >>> out.ravel()
    array([31., 42.])
    """
    (n, m), q, width = values.shape, U.shape[1], _TRANSPOSED_COLUMNS
    parts = m // width if q <= _MAX_COLUMNS and width * n * q <= _SMALL_PRODUCT else 0
    rest = parts * width
    if parts:
        left = values[:, :rest].reshape(n, parts, width).transpose(1, 2, 0)
        np.matmul(left, U, out=out[:rest].reshape(parts, width, q))
    if rest < m:
        np.matmul(values[:, rest:].T, U, out=out[rest:])


def count_partial_products(m: int, q: int) -> int:
    """Return the number of small products that `skinny_matmul` sums for W (m, q); 1 if a single BLAS call is as fast.

    >>> count_partial_products(4000, 20), count_partial_products(4000, 200)
    (16, 1)
    """
    if not 0 < q <= _MAX_COLUMNS or m < 2 * _PART_COLUMNS:
        return 1
    return count_tiles(m, min(_PART_COLUMNS, _SMALL_PRODUCT // (_PART_ROWS * q)))


def count_partial_product_values(m: int, q: int) -> int:
    """Return the number of values of the small products that `skinny_matmul` holds before it sums them."""
    parts = count_partial_products(m, q)
    return parts * _PART_ROWS * q if parts > 1 else 0


_BLAS_TYPES = {np.dtype(np.float64): ("d", ctypes.c_double), np.dtype(np.float32): ("s", ctypes.c_float)}
"""Letter of the BLAS routine, and type of its scalars, of each dtype."""


def triangular_matmul_in_place(values: Array, W: Array) -> None:
    """Replace C-contiguous values (n, r) by ``values W`` for an upper triangular W (r, r), with half the operations.

    >>> values = np.array([[1.0, 1.0]])
    >>> triangular_matmul_in_place(values, np.array([[2.0, 3.0], [0.0, 4.0]]))
    >>> values
    array([[2., 7.]])
    """
    W = np.ascontiguousarray(W)
    n, r = values.shape
    ready = values.flags.c_contiguous and values.flags.writeable
    if values.dtype not in _BLAS_TYPES or W.dtype != values.dtype or W.shape != (r, r) or not ready:
        raise AssertionError("Values and weights are of one dtype, and the values can be written in the order of C.")
    if r == 0:
        return
    letter, scalar = _BLAS_TYPES[values.dtype]
    rows, columns = ctypes.byref(ctypes.c_int(r)), ctypes.byref(ctypes.c_int(n))
    # In Fortran order, W is the lower triangular matrix W', and the rows of the values are columns.
    _load_blas(f"{letter}trmm", 4, 7)(
        *(b"L", b"L", b"N", b"N"),
        *(rows, columns, ctypes.byref(scalar(1.0))),
        *(W.ctypes.data, rows, values.ctypes.data, rows),
    )


def add_lower_products(values: Array, out: Array) -> None:
    """Add ``values' values`` of values (n, r) to the lower triangle of `out` (r, r); both are C-contiguous float64.

    SciPy's own wrapper would hold the GIL, and NumPy's product would allocate a second matrix.

    >>> out = np.zeros((2, 2))
    >>> add_lower_products(np.array([[1.0, 2.0], [3.0, 4.0]]), out)
    >>> out
    array([[10.,  0.],
           [14., 20.]])
    """
    n, r = values.shape
    ready = values.flags.c_contiguous and out.flags.c_contiguous and out.flags.writeable
    if values.dtype != np.float64 or out.dtype != np.float64 or out.shape != (r, r) or not ready:
        raise AssertionError("Values and sums are float64 in the order of C, and the sums can be written.")
    if n == 0 or r == 0:
        return
    rows, columns, one = ctypes.byref(ctypes.c_int(r)), ctypes.byref(ctypes.c_int(n)), ctypes.byref(ctypes.c_double(1))
    # In Fortran order, the rows of the values are columns, and the lower triangle is the upper one.
    _load_blas("dsyrk", 2, 8)(b"U", b"N", rows, columns, one, values.ctypes.data, rows, one, out.ctypes.data, rows)


@cache
def _load_blas(name: str, letters: int, pointers: int) -> Callable[..., None]:
    """Return a BLAS routine that SciPy exports; it takes `letters` pointers to characters, and `pointers` to values."""
    from scipy.linalg import cython_blas

    exported: dict[str, object] = dict(cython_blas.__pyx_capi__)
    capsule = exported[name]
    get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address = get_pointer(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, get_name(capsule))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_char_p] * letters, *[ctypes.c_void_p] * pointers)(address)
