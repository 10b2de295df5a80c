"""Define the types of functions that return blocks of kernel values, and functions that change a block in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, as_float64
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.errors import MissingExtraError, extract_reason

_VALUES_AT_ONCE = 2**16
"""Number of values of a block that are mapped at a time, so that temporaries stay in the processor cache."""

_LARGEST_ZERO_EXPONENT = -745.14
"""Exponents up to this number have an exponential of 0 in float64."""

_VANISHING_EXPONENT = -1e30
"""Exponent whose exponential is 0, even after a square root; it does not overflow float32."""

_SAMPLE_STEP = 61
"""Step in columns of the sample of values whose minimum determines how exponentials are computed."""

_SAMPLE_ROW_STEP = 4
"""Step in rows of this sample."""

_FLOAT64_VALUES_AT_ONCE = 2**18
"""Values of a float32 block that are computed in float64 at a time."""

_LEAST_FLOAT64_ROWS = 32
"""Rows that are computed at a time even if they have more values."""

FLOAT32_RANGE = 1e-30, 1e30
"""Range of the absolute values of parameters, and of k(x, x), beyond which kernels compute in float64."""

_SMALLEST_SHARE_OF_ZEROS = 1 / 8
"""Share of zeros among exponentials above which skipping them saves time."""

_LARGEST_SHARE_OF_ASSIGNED = 1 / 64
"""Share of a block up to which assigning values one by one is faster than adding to all values."""

_ONLY_FLOAT32_IS_VECTORIZED = {"FMA3__AVX2", "AVX2", "X86_V3"}
"""Names, by version of NumPy, of its code of `numpy.exp` for processors with AVX2 and FMA but without AVX-512."""

float64_blocks = ThreadBuffer()
"""Buffer for float64 values that are rounded to float32."""

PreparedBlock = Callable[..., Array]
"""A function from rows Z (n, d), in the form that the kernel's hooks take, to the block k(Z, landmarks) (n, m)."""


class Evaluator(Protocol):
    """A function from any rows Z (n, d) to the block k(Z, landmarks) (n, m), in `out` if the kernel supports that."""

    def __call__(self, Z: Rows, out: Array | None = None, /) -> Array:
        """Return the block; the content of `out` is overwritten."""


def recompute_rows_in_float64(block: Array, Z: Rows, numbers: npt.NDArray[np.intp], evaluate: PreparedBlock) -> None:
    """Overwrite some rows of a block, given by number, with what a function returns for these rows Z in float64."""
    for part in row_slices(len(numbers), _choose_float64_rows(block.shape[1])):
        rows = numbers[part]
        with float64_blocks.borrow(len(rows), block.shape[1], np.dtype(np.float64)) as wide:
            block[rows] = evaluate(as_float64(Z[rows]), wide)


def _choose_float64_rows(m: int) -> int:
    """Return how many rows of m values are computed in float64 at a time."""
    return max(_LEAST_FLOAT64_ROWS, _FLOAT64_VALUES_AT_ONCE // m)


def find_pairs(mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the rows and columns at which a block's mask is set, in a quarter of the time of `numpy.nonzero`."""
    rows, columns = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return rows, columns


def is_far_above_subnormals(value: float, dtype: np.dtype[np.floating]) -> bool:
    """Return whether numbers below the normal ones of a dtype are far less than the rounding of a value."""
    limits = np.finfo(dtype)
    return value * float(limits.eps) ** 2 > float(limits.tiny)


def set_subnormals_to_0(values: Array) -> None:
    """Overwrite the numbers of a block that are less than the normal ones of its dtype with 0.

    Arithmetic on such numbers takes up to a hundred times as long.
    """
    tiny = np.finfo(values.dtype).tiny
    for rows in _slices_in_cache(values):
        part = values[rows]
        if part.min(initial=1.0) < tiny:
            part *= np.abs(part) >= tiny


def make_float64_evaluator(evaluate: PreparedBlock, m: int, *, in_parts: bool = True) -> Evaluator:
    """Return a function from any rows to the float32 block (n, m) of one that computes in float64, in parts or not."""

    def block(Z: Rows, out: Array | None = None, /) -> Array:
        values: Array = np.empty((Z.shape[0], m), np.float32) if out is None else out
        for rows in row_slices(Z.shape[0], _choose_float64_rows(m) if in_parts else max(1, Z.shape[0])):
            with float64_blocks.borrow(len(values[rows]), m, np.dtype(np.float64)) as wide:
                values[rows] = evaluate(as_float64(Z[rows]), wide)
        return values

    return block


def are_products_in_float32_range(*diagonals: Array) -> npt.NDArray[np.bool_]:
    """Return for each row (n,) whether all products of its numbers k(x, x) are in the range or 0."""
    smallest, largest = FLOAT32_RANGE
    with np.errstate(over="ignore"):  # infinity is outside the range
        above = np.prod([np.maximum(numbers, 1) for numbers in diagonals], axis=0)
    below = np.prod([np.where(numbers > 0, np.minimum(numbers, 1), 1) for numbers in diagonals], axis=0)
    is_in_range: npt.NDArray[np.bool_] = (above <= largest) & (below >= smallest)
    return is_in_range


def make_mixed_precision_evaluator(
    in_float32: Evaluator,
    prepare_in_float64: Callable[[], PreparedBlock],
    fits_float32: Callable[[Rows], npt.NDArray[np.bool_]],
    m: int,
) -> Evaluator:
    """Return a function that computes each row in float32 if that is exact enough, and else in float64.

    Parameters
    ----------
    in_float32 : Evaluator
        Function of float32 rows.
    prepare_in_float64 : callable
        Returns the function of float64 rows; called when the first rows need it.
    fits_float32 : callable
        Function from rows to a mask (n,) of those for which float32 is exact enough.
    m : int
        Number of landmarks.
    """
    in_float64 = cache(prepare_in_float64)

    def block(Z: Rows, out: Array | None = None, /) -> Array:
        fits = fits_float32(Z)
        inexact = np.flatnonzero(~fits)
        if not len(inexact):
            return in_float32(Z, out)
        if len(inexact) == Z.shape[0]:
            return make_float64_evaluator(in_float64(), m)(Z, out)
        # A row that does not fit float32 is replaced by one that does, so that nothing overflows.
        rows = np.where(fits, np.arange(len(fits)), fits.argmax())
        values = in_float32(Z[rows], out)
        recompute_rows_in_float64(values, Z, inexact, in_float64())
        return values

    return block


def map_rows(values: Array, function: Callable[[Array], Array]) -> Array:
    """Apply a function to the rows of a block in place, some at a time; return the block."""
    for part in _slices_in_cache(values):
        values[part] = function(values[part])
    return values


def exp_in_place(values: Array) -> Array:
    """Overwrite a block, or a vector, with its exponentials and return it.

    They are bitwise equal to those of `numpy.exp`, with one exception: if the extra "fast" is installed and NumPy's
    float64 code is not vectorized for this processor, a compiled exponential is used. It is accurate within one unit in
    the last place, and issues no warnings.
    """
    if values.dtype == np.float64:
        find_exponential()(values)
    else:
        np.exp(values, out=values)
    return values


def log1p_in_place(values: Array) -> Array:
    """Overwrite a block, or a vector, of values t >= 0 with log(1 + t) and return it.

    Where NumPy's `log1p` is not vectorized for this processor, the corrected logarithm takes less than half the time.
    """
    if not _find_instruction_set("log1p", values.dtype).startswith("baseline"):
        return np.log1p(values, out=values)
    for rows in _slices_in_cache(values):
        _correct_logarithms(values[rows])
    return values


def _correct_logarithms(t: Array) -> None:
    """Overwrite values with log(1 + t), as log(u) of the rounded sum u, and the correction ``(t - (u - 1)) / u``.

    The two differences are exact, and what the correction neglects is less than the square of the unit roundoff.
    """
    infinite = None if t.max(initial=0) < np.inf else np.isinf(t)
    if infinite is not None:
        t[infinite] = 0  # the difference of two infinities is no correction
    u = t + 1
    t -= u - 1
    t /= u
    t += np.log(u, out=u)
    if infinite is not None:
        t[infinite] = np.inf


def exp_without_subnormals_in_place(values: Array) -> Array:
    """Overwrite a block with its exponentials, and with 0 where they are less than its normal numbers; return it."""
    lower_exponents_below(float(np.log(np.finfo(values.dtype).tiny)), values)
    return exp_in_place(values)


def lower_exponents_below(limit: float, values: Array) -> None:
    """Overwrite the exponents of a block that are below a limit with one whose exponential is 0."""
    vanishing = values.dtype.type(_VANISHING_EXPONENT)
    for rows in _slices_in_cache(values):
        part = values[rows]
        is_below = part < limit
        count = np.count_nonzero(is_below)
        if count == part.size:
            part[...] = vanishing
        elif count > part.size * _LARGEST_SHARE_OF_ASSIGNED:
            part += is_below * vanishing
        elif count:
            part[is_below] = vanishing


@cache
def has_llvm() -> bool:
    """Import llvmlite, of the extra "fast", and return whether it is installed."""
    if find_spec("llvmlite") is None:
        return False
    try:
        import_module("llvmlite.binding")
    except (ImportError, OSError) as error:
        message = f"llvmlite, of the extra fast, cannot be loaded: {extract_reason(error)}"
        raise MissingExtraError(f"{message}; install it again, or remove it.") from error
    return True


@cache
def _find_instruction_set(function: str, dtype: npt.DTypeLike) -> str:
    """Return NumPy's name of the processor instructions that its code of a function is for, such as "AVX2"."""
    from numpy.lib.introspect import opt_func_info

    loops = opt_func_info(func_name=f"^{function}$", signature=np.dtype(dtype).name).get(function, {}).values()
    return next((loop["current"] for loop in loops), "")


@cache
def find_exponential() -> Callable[[Array], None]:
    """Return the function of this process that overwrites float64 values with their exponentials.

    It depends only on the processor and on the installed packages, so workers on equal machines use the same function.
    """
    if _find_instruction_set("exp", np.float64) not in _ONLY_FLOAT32_IS_VECTORIZED or not has_llvm():
        return _exponentiate_with_numpy
    from dkfm.kernels.pairwise.exponential_llvm import compile_exponential

    exponentiate = compile_exponential()

    def exponentiate_parts(values: Array) -> None:
        for rows in _slices_in_cache(values):
            exponentiate(values[rows])

    return exponentiate_parts


def _exponentiate_with_numpy(values: Array) -> None:
    """Overwrite float64 values with those of `numpy.exp`, which takes up to ten times as long where the result is 0.

    If a sample has enough such values, only the others are computed.
    """
    if not _has_underflow_in_sample(values):
        np.exp(values, out=values)
        return
    for rows in _slices_in_cache(values):
        part = values[rows]
        if _has_underflow_in_sample(part):
            _exponentiate_nonzero(part)
        else:
            np.exp(part, out=part)


def _slices_in_cache(values: Array) -> Iterator[slice]:
    """Return the slices of the rows of a block, or of a vector, whose values are mapped at a time."""
    width = values.shape[1] if values.ndim == 2 else 1
    return row_slices(len(values), max(1, _VALUES_AT_ONCE // max(1, width)))


def _has_underflow_in_sample(values: Array) -> bool:
    """Return whether a sample of exponents has one whose exponential is 0."""
    rows = values[::_SAMPLE_ROW_STEP] if values.ndim == 2 else values
    return bool(rows[..., ::_SAMPLE_STEP].min(initial=0.0) < _LARGEST_ZERO_EXPONENT)


def _exponentiate_nonzero(part: Array) -> None:
    """Overwrite values with their exponentials, computing those that are 0 only if they are few."""
    vanishes = part < _LARGEST_ZERO_EXPONENT
    zeros = np.count_nonzero(vanishes)
    if zeros == part.size:
        part[...] = 0.0
    elif zeros < part.size * _SMALLEST_SHARE_OF_ZEROS:
        np.exp(part, out=part)
    else:
        # Bit mask: all bits are kept, or none where the result is 0.
        kept = vanishes.astype(np.int64)
        kept -= 1
        bits = part.view(np.int64)
        bits &= kept
        np.exp(part, out=part)
        bits &= kept


_MIRRORED_COLUMNS = 64
"""Columns whose lower part is copied to the rows above at a time: their cache lines stay in the processor's cache."""


def mirror_lower(K: Array) -> None:
    """Copy the lower triangle of a square matrix onto its upper triangle, in place, some columns at a time."""
    above = np.triu(np.ones((_MIRRORED_COLUMNS, _MIRRORED_COLUMNS), np.bool_), 1)
    for part in row_slices(len(K), _MIRRORED_COLUMNS):
        corner = K[part, part]
        corner[:] = np.where(above[: len(corner), : len(corner)], corner.T, corner)
        K[part, part.stop :] = K[part.stop :, part].T
