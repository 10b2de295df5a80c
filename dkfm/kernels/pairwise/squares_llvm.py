"""Compile sums of squared differences of rows with few columns; this needs the extra "fast".

The sums are bitwise equal to SciPy's if SciPy's compiler rounds each operation, and take a third of the time.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial

import numpy as np
from llvmlite import ir

from dkfm.core.rows import Array
from dkfm.kernels.pairwise.llvm_compiler import COUNT, compile_function, open_loop

_LANES = 16
"""Distances that are computed at a time: two or four vectors, whose instructions overlap."""

_LANDMARKS_AT_ONCE = 256
"""Landmarks that stay in the innermost processor cache while all rows are compared with them."""

_DOUBLE, _INDEX = ir.DoubleType(), ir.IntType(32)
_DOUBLES = ir.VectorType(_DOUBLE, _LANES)


class CompiledSquares:
    """Fill blocks (n, m) with ``sum_j w_j (z_j - x_j)^2``, or with w times the sum if there is one weight.

    Parameters
    ----------
    landmarks : ndarray of shape (m, d)
        The rows x.
    weights : ndarray of float64 and shape (), (1,) or (d,)
        Weights of any sign.
    """

    def __init__(self, landmarks: Array, weights: Array) -> None:
        self._columns = np.ascontiguousarray(landmarks.T, np.float64)
        self._weights = np.ascontiguousarray(weights).reshape(-1)
        self._addresses = self._columns.ctypes.data, self._weights.ctypes.data

    def __reduce__(self) -> tuple[type, tuple[Array, Array]]:
        """Return the arguments of a copy, because addresses are valid only in this process and for these arrays."""
        return type(self), (self._columns.T, self._weights)

    def __call__(self, Z: Array, out: Array) -> None:
        """Fill a block of float32 or float64 from rows Z (n, d); it is computed in float64.

        Raises
        ------
        ValueError
            The rows have other columns, or the block has another shape or is read-only.
        """
        rows, (d, m) = np.ascontiguousarray(Z, np.float64), self._columns.shape
        if rows.shape[1] != d or out.shape != (len(rows), m) or not out.flags.writeable:
            raise ValueError(f"Rows of {d} columns fill a writable block of {m}; got {rows.shape} and {out.shape}.")
        block = out if out.strides[1] == out.itemsize else np.empty_like(out, order="C")
        fill = _compile(d, block.itemsize == 4, len(self._weights) > 1)
        fill(rows.ctypes.data, *self._addresses, block.ctypes.data, len(rows), m, block.strides[0] // block.itemsize)
        if block is not out:
            out[...] = block


@cache
def _compile(d: int, single: bool, weighted: bool) -> Callable[..., None]:
    """Return the function for d columns."""
    types = (ctypes.c_void_p,) * 4 + (ctypes.c_int64,) * 3
    return compile_function(partial(_build_module, d, single, weighted), "squares", types, processor="")


def _build_module(d: int, single: bool, weighted: bool) -> ir.Module:
    """Write a function of rows, landmarks, weights, the block, n, m, and the distance of two rows of the block."""
    kind = ir.FloatType() if single else _DOUBLE
    module = ir.Module()
    pointers = [_DOUBLE.as_pointer()] * 3 + [kind.as_pointer()]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*pointers, *[COUNT] * 3]), "squares")
    rows, columns, weights, out, n, m, stride = function.args
    build = ir.IRBuilder(function.append_basic_block("entry"))
    lanes, at_once = ir.Constant(COUNT, _LANES), ir.Constant(COUNT, _LANDMARKS_AT_ONCE)
    factors = [_load(build, weights, ir.Constant(COUNT, k)) for k in range(d if weighted else 1)]
    wide_factors = [_splat(build, factor) for factor in factors]
    parts = build.sdiv(build.add(m, ir.Constant(COUNT, _LANDMARKS_AT_ONCE - 1)), at_once)
    with open_loop(build, parts) as part:
        first = build.mul(part, at_once)
        left = build.sub(m, first)
        width = build.select(build.icmp_signed("<", left, at_once), left, at_once)
        vectors, numbers = build.sdiv(width, lanes), build.srem(width, lanes)
        first_number = build.add(first, build.mul(vectors, lanes))
        with open_loop(build, n) as i:
            z = [_load(build, rows, _compute_index(build, i, d, k)) for k in range(d)]
            wide_z = [_splat(build, coordinate) for coordinate in z]
            row = build.gep(out, [build.mul(i, stride)])
            places = [build.gep(columns, [build.mul(ir.Constant(COUNT, k), m)]) for k in range(d)]
            with open_loop(build, vectors) as number:
                j = build.add(first, build.mul(number, lanes))
                x = [_load(build, place, j, _DOUBLES) for place in places]
                _store(build, _sum_squares(build, wide_z, x, wide_factors), row, j, ir.VectorType(kind, _LANES))
            with open_loop(build, numbers) as number:
                j = build.add(first_number, number)
                x = [_load(build, place, j) for place in places]
                _store(build, _sum_squares(build, z, x, factors), row, j, kind)
    build.ret_void()
    return module


def _sum_squares(build: ir.IRBuilder, z: list[ir.Value], x: list[ir.Value], factors: list[ir.Value]) -> ir.Value:
    """Return the weighted sum, of numbers or of vectors, each operation rounded on its own."""
    total = None
    for k, (a, b) in enumerate(zip(z, x, strict=True)):
        difference = build.fsub(a, b)
        scaled = difference if len(factors) == 1 else build.fmul(difference, factors[k])
        term = build.fmul(scaled, difference)
        total = term if total is None else build.fadd(total, term)
    return build.fmul(total, factors[0]) if len(factors) == 1 else total


def _load(build: ir.IRBuilder, pointer: ir.Value, index: ir.Value, kind: ir.Type = _DOUBLE) -> ir.Value:
    """Return the number at an index, or the vector from there on."""
    return build.load(build.bitcast(build.gep(pointer, [index]), kind.as_pointer()), align=8)


def _store(build: ir.IRBuilder, value: ir.Value, row: ir.Value, index: ir.Value, kind: ir.Type) -> None:
    """Round a number or a vector, and store it at an index of a row."""
    place = build.bitcast(build.gep(row, [index]), kind.as_pointer())
    build.store(value if value.type == kind else build.fptrunc(value, kind), place, align=4)


def _compute_index(build: ir.IRBuilder, a: ir.Value, b: int, c: int) -> ir.Value:
    """Return ``a b + c``."""
    return build.add(build.mul(a, ir.Constant(COUNT, b)), ir.Constant(COUNT, c))


def _splat(build: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return a vector whose numbers are all the value."""
    undefined = ir.Constant(_DOUBLES, ir.Undefined)
    first = build.insert_element(undefined, value, ir.Constant(_INDEX, 0))
    return build.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INDEX, _LANES), [0] * _LANES))
