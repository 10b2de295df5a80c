"""Compile a vectorized exponential of float64 for processors on which NumPy has none, with the extra "fast"."""

import ctypes
from collections.abc import Callable
from functools import partial, reduce
from math import factorial, inf, log

import numpy as np
from llvmlite import ir
from numpy.polynomial.chebyshev import cheb2poly, poly2cheb

from dkfm.core.rows import Array
from dkfm.kernels.pairwise.llvm_compiler import COUNT, compile_function, open_loop

_PROCESSOR = "x86-64-v3"
"""Processors with AVX2 and FMA; all of them run the same code, and so compute the same bits."""

_LANES = 16
"""Numbers in a pass of the loop: four vectors, whose instructions overlap."""

_MASK = ir.IntType(_LANES)
_INTEGERS, _DOUBLES = ir.VectorType(COUNT, _LANES), ir.VectorType(ir.DoubleType(), _LANES)

_LOG_2 = log(2.0)
_REST_OF_LOG_2 = 2.3190468138462996e-17
"""log(2) is the sum of both, to 32 digits."""

_DEGREE = 10
"""Degree of the polynomial of (exp(r) - 1 - r) / r^2 for ``|r| <= log(2) / 2``; its error changes the exponential by
less than 0.01 of the last bit."""

_ROUND = 1.5 * 2.0**52
"""The sum of this and a number below 2^51 is rounded to an integer, which stands in its last bits."""

_SMALLEST_NORMAL = -708.3964185322641
_LARGEST_FINITE = 709.782712893384
"""The smallest number whose exponential is at least 2^-1022, and the largest whose exponential is finite."""

_LARGEST_ZERO = -746.0
"""A number whose exponential, and that of all smaller ones, is 0."""


def compile_exponential() -> Callable[[Array], None]:
    """Return a function that overwrites a float64 array with its exponentials, without the GIL.

    They are within 0.75 units in the last place, or 0.875 where they are denormal, and do not depend on other values.
    Those that float64 cannot hold are infinite, without a warning.
    """
    types = ctypes.c_void_p, ctypes.c_int64
    return partial(_exponentiate_in_place, compile_function(_build_module, "exponentials", types, _PROCESSOR))


def _exponentiate_in_place(function: Callable[[int, int], None], values: Array) -> None:
    """Call the function on whole vectors; the last one is padded in a copy."""
    if not values.flags.writeable:
        raise ValueError("The values are read-only.")
    contiguous = np.ascontiguousarray(values)
    flat = contiguous.reshape(-1)
    vectors, rest = divmod(flat.size, _LANES)
    function(flat.ctypes.data, vectors)
    if rest:
        last = np.zeros(_LANES)
        last[:rest] = flat[-rest:]
        function(last.ctypes.data, 1)
        flat[-rest:] = last[:rest]
    if contiguous is not values:
        values[...] = contiguous


def _build_module() -> ir.Module:
    """Write a function of a pointer and a number of vectors: a loop, with a branch for vectors with a rare number."""
    module = ir.Module()
    signature = ir.FunctionType(ir.VoidType(), [_DOUBLES.as_pointer(), COUNT])
    function = ir.Function(module, signature, "exponentials")
    vectors, count = function.args
    build = ir.IRBuilder(function.append_basic_block("entry"))
    with open_loop(build, count) as i:
        place = build.gep(vectors, [i])
        x = build.load(place, align=8)
        y, k, common_result = _build_common_case(build, x)
        is_common = build.and_(
            build.fcmp_ordered(">=", x, _splat_double(_SMALLEST_NORMAL)),
            build.fcmp_ordered("<=", x, _splat_double(_LARGEST_FINITE)),
        )
        all_lanes = ir.Constant(_MASK, 2**_LANES - 1)
        has_rare = build.icmp_unsigned("!=", build.bitcast(is_common, _MASK), all_lanes)
        common = build.block
        with build.if_then(has_rare, likely=False):
            rare_result, rare = _build_rare_case(build, x, y, k, common_result), build.block
        result = build.phi(_DOUBLES)
        result.add_incoming(common_result, common)
        result.add_incoming(rare_result, rare)
        build.store(result, place, align=8)
    build.ret_void()
    return module


def _build_common_case(build: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return y and k with exp(x) = y 2^k, 1/sqrt(2) <= y <= sqrt(2), and their product where it is a normal number."""
    shifted = _multiply_add(build, x, _splat_double(1 / _LOG_2), _splat_double(_ROUND))
    k = build.fsub(shifted, _splat_double(_ROUND))
    # x - k log(2) = r + rest; the first difference is exact.
    longer = _multiply_add(build, k, _splat_double(-_LOG_2), x)
    r = _multiply_add(build, k, _splat_double(-_REST_OF_LOG_2), longer)
    rest = _multiply_add(build, k, _splat_double(-_REST_OF_LOG_2), build.fsub(longer, r))
    first, *others = map(_splat_double, reversed(_shorten_taylor_series()))
    series = reduce(lambda total, coefficient: _multiply_add(build, total, r, coefficient), others, first)
    # exp(r + rest) = 1 + r + (r^2 series + rest); what the rounding of 1 + r loses is added to the small summand.
    small = _multiply_add(build, build.fmul(r, r), series, rest)
    large = build.fadd(_splat_double(1.0), r)
    lost = build.fadd(build.fsub(_splat_double(1.0), large), r)
    y = build.fadd(large, build.fadd(lost, small))
    bits = build.add(build.bitcast(y, _INTEGERS), _shift_to_exponent(build, build.bitcast(shifted, _INTEGERS)))
    return y, k, build.bitcast(bits, _DOUBLES)


def _shorten_taylor_series() -> list[float]:
    """Return the coefficients of a polynomial, from those of the first terms of its series in Chebyshev polynomials."""
    powers = (log(2.0) / 2) ** np.arange(20.0)
    taylor = powers / [factorial(n + 2) for n in range(20)]
    shortened: list[float] = (cheb2poly(poly2cheb(taylor)[: _DEGREE + 1]) / powers[: _DEGREE + 1]).tolist()
    return shortened


def _build_rare_case(build: ir.IRBuilder, x: ir.Value, y: ir.Value, k: ir.Value, common_result: ir.Value) -> ir.Value:
    """Return the exponentials of any numbers; denormal ones without arithmetic on these, which is slow.

    A denormal number is a multiple of 2^-1074, and the multiple is its bits: the last bits of 2^52 + y 2^(k + 1074).
    """
    bounded = build.select(build.fcmp_ordered("<", k, _splat_double(-1022.0)), k, _splat_double(-1022.0))
    bounded = build.select(build.fcmp_ordered(">", bounded, _splat_double(-1080.0)), bounded, _splat_double(-1080.0))
    biased = build.fadd(bounded, _splat_double(_ROUND + 1074 + 1023))
    scale = build.bitcast(_shift_to_exponent(build, build.bitcast(biased, _INTEGERS)), _DOUBLES)
    multiple = build.bitcast(_multiply_add(build, y, scale, _splat_double(2.0**52)), _INTEGERS)
    denormal = build.bitcast(build.sub(multiple, build.bitcast(_splat_double(2.0**52), _INTEGERS)), _DOUBLES)
    result = build.select(build.fcmp_ordered("<", x, _splat_double(_SMALLEST_NORMAL)), denormal, common_result)
    result = build.select(build.fcmp_ordered("<=", x, _splat_double(_LARGEST_ZERO)), _splat_double(0.0), result)
    result = build.select(build.fcmp_ordered(">", x, _splat_double(_LARGEST_FINITE)), _splat_double(inf), result)
    return build.select(build.fcmp_unordered("uno", x, x), x, result)


def _multiply_add(build: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return ``a b + c``, rounded once."""
    signature = ir.FunctionType(_DOUBLES, [_DOUBLES] * 3)
    name = f"llvm.fma.v{_LANES}f64"
    function = build.module.globals.get(name) or ir.Function(build.module, signature, name)
    return build.call(function, [a, b, c])


def _shift_to_exponent(build: ir.IRBuilder, integers: ir.Value) -> ir.Value:
    """Return integers where a float64 has its exponent."""
    return build.shl(integers, ir.Constant(_INTEGERS, [52] * _LANES))


def _splat_double(value: float) -> ir.Constant:
    return ir.Constant(_DOUBLES, [value] * _LANES)
