"""Functions of a kernel's values that are kernels: powers, power series, exponential and normalized kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, Rows, as_float64, normalize_rows
from dkfm.errors import KernelError, format_value
from dkfm.kernels.algebra import (
    ElementwiseKernel,
    Product,
    Scaled,
    Sum,
    TwoPrecisionKernel,
    Wrapper,
    parenthesize,
)
from dkfm.kernels.base import Definiteness, Kernel, register_operator_class
from dkfm.kernels.dot_product import compute_power_overwriting_base, fits_error_share
from dkfm.kernels.pairwise.block_operations import (
    Evaluator,
    are_products_in_float32_range,
    exp_in_place,
    make_mixed_precision_evaluator,
    map_rows,
)
from dkfm.kernels.pairwise.distance_effects import FLOAT32_LIMIT
from dkfm.kernels.parameters import as_float_or_nan, coerce_exponent

_MAX_TERMS = 1024
"""Largest number of coefficients of a power series; each kernel value takes one step per coefficient."""

_MIN_NORMAL = float(np.finfo(np.float64).tiny)
"""Smallest float64 with full precision."""


class MagnifyingKernel(ElementwiseKernel):
    """Base class of elementwise functions that magnify errors; float32 rows use float32 only where it is exact enough.

    A subclass has a `float32_error_share`, or overrides `supports_float32` and `_fits_float32`.
    """

    may_need_float64 = True

    @property
    def supports_float32(self) -> bool:
        """Whether errors of the inner kernel are known, and small enough after magnification."""
        return fits_error_share(self.float32_error_share)

    def _prepare_float32_rows(self, landmarks: Rows) -> Evaluator:
        """Prepare the inner kernel in both precisions."""
        return prepare_in_both_precisions(self, landmarks, self._prepare_in_one_precision, self._fits_float32)

    def _fits_float32(self, diagonal: Array, largest: float) -> npt.NDArray[np.bool_]:
        """Return for which rows float32 suffices, from their inner k(x, x), (n,), and the largest of the landmarks."""
        return np.ones(len(diagonal), np.bool_)


def prepare_in_both_precisions(
    kernel: Wrapper,
    landmarks: Rows,
    prepare: Callable[[Rows], Evaluator],
    fits_float32: Callable[[Array, float], npt.NDArray[np.bool_]] | None = None,
) -> Evaluator:
    """Return a function that computes rows in float32 if the inner kernel's values fit float32, else in float64.

    Parameters
    ----------
    kernel : Wrapper
        The kernel.
    landmarks : ndarray or csr_array of shape (m, d)
        The landmarks, in float32.
    prepare : callable
        Prepares landmarks of either precision.
    fits_float32 : callable, optional
        Further condition: a function from the inner k(x, x) of rows, (n,), and the largest inner k(x, x) of the
        landmarks, to a mask of the rows for which float32 suffices.
    """
    diagonal = kernel.kernel.evaluate_diagonal(as_float64(landmarks))
    holds_landmarks = bool(are_products_in_float32_range(diagonal).all())

    def fits(Z: Rows) -> npt.NDArray[np.bool_]:
        own = kernel.kernel.evaluate_diagonal(as_float64(Z))
        in_range = are_products_in_float32_range(own) & holds_landmarks
        return in_range if fits_float32 is None else in_range & fits_float32(own, float(diagonal.max()))

    return make_mixed_precision_evaluator(
        prepare(landmarks), lambda: prepare(as_float64(landmarks)), fits, landmarks.shape[0]
    )


@register_operator_class
@dataclass(frozen=True)
class Power(MagnifyingKernel):  # numpydoc ignore=PR02
    """A positive integer power of a kernel, as made by ``k ** 3``; positive semi-definite if the kernel is.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    exponent : int
        Exponent of the kernel's values, at least 1.
    """

    kernel: Kernel
    exponent: int

    def __post_init__(self) -> None:
        super().__post_init__()
        coerce_exponent(self, "exponent")

    @property
    def definiteness(self) -> Definiteness:
        """Definiteness of the inner kernel if it is positive semi-definite or the exponent is 1, else indefinite."""
        return self.kernel.definiteness if self.exponent == 1 else self.kernel.definiteness.of_power_series()

    @property
    def float32_error_share(self) -> float:
        """The error share of the inner kernel, multiplied by the exponent."""
        return self.exponent * self.kernel.float32_error_share

    def _map_values(self, values: Array) -> Array:
        return map_rows(values, lambda part: compute_power_overwriting_base(part, self.exponent))

    def __repr__(self) -> str:
        return f"{parenthesize(self.kernel, Sum, Product, Scaled, Power)} ** {self.exponent}"


@dataclass(frozen=True)
class PowerSeries(MagnifyingKernel):  # numpydoc ignore=PR02
    """A finite power series of a kernel, ``a_0 + a_1 k + a_2 k^2 + ..``, with coefficients >= 0.

    Positive semi-definite if the kernel is.

    Parameters
    ----------
    kernel : Kernel
        Kernel whose values are the variable of the series.
    coefficients : sequence of float, >= 0
        At most 1024 coefficients, ``a_0, a_1, ..``.

    Examples
    --------
    >>> from dkfm.kernels import Linear, PowerSeries
    >>> PowerSeries(Linear(), (1.0, 0.0, 2.0))([[3.0]])
    array([[163.]])
    """

    kernel: Kernel
    coefficients: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        values = self.coefficients
        if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes) or not np.size(values):
            raise KernelError(f"PowerSeries needs a sequence of coefficients, and got {format_value(values, 50)}.")
        if len(values) > _MAX_TERMS:
            raise KernelError(f"PowerSeries takes at most {_MAX_TERMS} coefficients, and got {len(values)}.")
        numbers = tuple(as_float_or_nan(a) for a in values)
        if not all(isfinite(a) for a in numbers):
            raise KernelError(f"PowerSeries needs finite numbers as coefficients, and got {format_value(values, 50)}.")
        if min(numbers) < 0:
            raise KernelError(
                f"PowerSeries needs coefficients >= 0, and got {min(numbers)}: "
                "a negative multiple of a kernel is not positive semi-definite."
            )
        object.__setattr__(self, "coefficients", numbers)

    @property
    def definiteness(self) -> Definiteness:
        """Definiteness of the inner kernel if it is positive semi-definite or the series is linear, else indefinite."""
        if len(self.coefficients) <= 2:
            return self.kernel.definiteness
        return self.kernel.definiteness.of_power_series()

    @property
    def float32_error_share(self) -> float:
        """The error share of the inner kernel, multiplied by the largest exponent."""
        return (len(self.coefficients) - 1) * self.kernel.float32_error_share

    def _map_values(self, values: Array) -> Array:
        return map_rows(values, self._evaluate_series)

    def _evaluate_series(self, values: Array) -> Array:
        """Return the series of kernel values by Horner's method."""
        total = np.full_like(values, self.coefficients[-1])
        for a in self.coefficients[-2::-1]:
            total *= values
            total += a
        return total


@dataclass(frozen=True)
class Exp(MagnifyingKernel):
    """The exponential of a kernel, ``exp(k(x, y))``.

    Positive semi-definite if the inner kernel is positive semi-definite, also if only conditionally (Schoenberg).

    Examples
    --------
    >>> from dkfm.kernels import Exp, NegativeSquaredDistance
    >>> Exp(0.5 * NegativeSquaredDistance())([[0.0], [1.0]]).round(4)
    array([[1.    , 0.6065],
           [0.6065, 1.    ]])
    """

    kernel: Kernel

    @property
    def supports_float32(self) -> bool:
        """Whether errors of the inner kernel are known; rows whose k(x, x) is too large are computed in float64."""
        return isfinite(self.kernel.float32_error_share)

    def _fits_float32(self, diagonal: Array, largest: float) -> npt.NDArray[np.bool_]:
        errors = self.kernel.float32_error_share * np.sqrt(diagonal) * np.sqrt(largest)
        return np.asarray(2 * errors <= FLOAT32_LIMIT)

    @property
    def definiteness(self) -> Definiteness:
        """Positive semi-definite, unless the kernel is indefinite."""
        indefinite = self.kernel.definiteness is Definiteness.INDEFINITE
        return Definiteness.INDEFINITE if indefinite else Definiteness.PSD

    def _map_values(self, values: Array) -> Array:
        return exp_in_place(values)


@dataclass(frozen=True)
class Normalized(TwoPrecisionKernel, Wrapper):
    """The normalized kernel, ``k(x, y) / sqrt(k(x, x) k(y, y))``, with 0/0 = 0.

    All points with k(x, x) > 0 have length 1 in feature space. The inner kernel must be positive semi-definite; the
    normalized kernel is too.

    Examples
    --------
    >>> from dkfm.kernels import Linear, Normalized
    >>> Normalized(Linear())([[3.0, 4.0]], [[0.0, 2.0], [0.0, 0.0]])
    array([[0.8, 0. ]])
    """

    kernel: Kernel
    may_need_float64 = True

    @property
    def supports_float32(self) -> bool:
        """Whether errors of the inner kernel are known and small enough."""
        return fits_error_share(self.float32_error_share)

    @property
    def float32_error_share(self) -> float:
        """The error share of the inner kernel."""
        return self.kernel.float32_error_share

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel.definiteness is not Definiteness.PSD:
            raise KernelError(
                "Normalized needs a positive semi-definite kernel, whose k(x, x) are squared lengths, and "
                f"{self.kernel!r} is {self.kernel.definiteness}."
            )

    def _prepare_float32_rows(self, landmarks: Rows) -> Evaluator:
        """Prepare the landmarks in both precisions."""
        return prepare_in_both_precisions(self, landmarks, self._prepare_in_one_precision)

    def _prepare_in_one_precision(self, landmarks: Rows) -> Evaluator:
        """Prepare the inner kernel, and the inverse lengths of the landmarks."""
        prepared, right = self.kernel.make_evaluator(landmarks), self._inverse_lengths(landmarks)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            values = prepared(Z, out)
            with np.errstate(over="ignore", invalid="ignore"):  # rows that overflow float32 are computed again
                values *= self._inverse_lengths(Z)[:, np.newaxis].astype(values.dtype)
                values *= right.astype(values.dtype)
            return values

        return block

    def diagonal(self, X: Rows) -> Array:
        """Return 1 for each row, but 0 where k(x, x) = 0."""
        return (self._inverse_lengths(X) > 0).astype(np.float64)

    def _inverse_lengths(self, rows: Rows) -> Array:
        """Return 1 / sqrt(k(x, x)) of each row, (n,), in float64, and 0 where k(x, x) = 0."""
        rows = as_float64(rows)
        squares = self.kernel.evaluate_diagonal(rows)
        if squares.min() < 0:
            raise KernelError(f"{self!r} needs k(x, x) >= 0, and it is {squares.min()} for row {squares.argmin()}.")
        self._require_no_underflow(rows, squares)
        return np.divide(1, np.sqrt(squares), out=np.zeros_like(squares), where=squares > 0)

    def _require_no_underflow(self, rows: Rows, squares: Array) -> None:
        """Raise a KernelError if k(x, x), in `squares`, is subnormal, or has underflowed to 0."""
        small = np.flatnonzero(squares < _MIN_NORMAL)
        if not len(small):
            return
        unit_rows, lengths = normalize_rows(rows[small])
        underflowed = (squares[small] > 0) | ((lengths < 1) & (self.kernel.evaluate_diagonal(unit_rows) > 0))
        if underflowed.any():
            row = int(small[underflowed.argmax()])
            raise KernelError(
                f"{self!r} divides by sqrt(k(x, x)), and that of row {row} is {squares[row]:.1e}, smaller than float64 "
                "holds; multiply the rows by a number."
            )
