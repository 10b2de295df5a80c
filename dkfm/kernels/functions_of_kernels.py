"""Functions of a kernel's values that are kernels: power series, exponential and normalized kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from dkfm.core.rows import Array, Rows, normalize_rows
from dkfm.errors import KernelError, format_value
from dkfm.kernels.algebra import ElementwiseKernel, Wrapper
from dkfm.kernels.base import Definiteness, Kernel
from dkfm.kernels.pairwise.block_operations import Evaluator, exp_in_place, map_rows
from dkfm.kernels.parameters import as_float_or_nan

_MAX_TERMS = 1024
"""Most coefficients of a power series: each kernel value takes one step for each."""

_MIN_NORMAL = float(np.finfo(np.float64).tiny)
"""Smallest float64 with full precision."""


@dataclass(frozen=True)
class PowerSeries(ElementwiseKernel):  # numpydoc ignore=PR02
    """A power series of a kernel with coefficients >= 0, ``a_0 + a_1 k + a_2 k^2 + ..``.

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
    supports_float32 = False

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
        """That of the kernel if it is positive semi-definite or the series is linear, else indefinite."""
        if len(self.coefficients) <= 2:
            return self.kernel.definiteness
        return self.kernel.definiteness.of_power_series()

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
class Exp(ElementwiseKernel):
    """The exponential of a kernel, ``exp(k(x, y))``.

    Positive semi-definite if the kernel is at least conditionally so (Schoenberg).

    Examples
    --------
    >>> from dkfm.kernels import Exp, NegativeSquaredDistance
    >>> Exp(0.5 * NegativeSquaredDistance())([[0.0], [1.0]]).round(4)
    array([[1.    , 0.6065],
           [0.6065, 1.    ]])
    """

    kernel: Kernel
    supports_float32 = False

    @property
    def definiteness(self) -> Definiteness:
        """Positive semi-definite, unless the kernel is indefinite."""
        indefinite = self.kernel.definiteness is Definiteness.INDEFINITE
        return Definiteness.INDEFINITE if indefinite else Definiteness.PSD

    def _map_values(self, values: Array) -> Array:
        return exp_in_place(values)


@dataclass(frozen=True)
class Normalized(Wrapper):
    """The normalized kernel, ``k(x, y) / sqrt(k(x, x) k(y, y))``, with 0/0 = 0.

    All points other than 0 have length 1 in feature space. Positive semi-definite, as the kernel must be.

    Examples
    --------
    >>> from dkfm.kernels import Linear, Normalized
    >>> Normalized(Linear())([[3.0, 4.0]], [[0.0, 2.0], [0.0, 0.0]])
    array([[0.8, 0. ]])
    """

    kernel: Kernel
    supports_float32 = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel.definiteness is not Definiteness.PSD:
            raise KernelError(
                "Normalized needs a positive semi-definite kernel, whose k(x, x) are squared lengths, and "
                f"{self.kernel!r} is {self.kernel.definiteness}."
            )

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare the inner kernel, and the inverse lengths of the landmarks."""
        prepared, right = self.kernel.make_evaluator(landmarks), self._inverse_lengths(landmarks)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            values = prepared(Z, out)
            values *= self._inverse_lengths(Z)[:, np.newaxis]
            values *= right
            return values

        return block

    def resolve(self, X: Rows) -> Kernel:
        """Resolve the inner kernel."""
        return replace(self, kernel=self.kernel.resolve(X))

    def diagonal(self, X: Rows) -> Array:
        """Return 1 for each row, but 0 where k(x, x) = 0."""
        return (self._inverse_lengths(X) > 0).astype(np.float64)

    def _inverse_lengths(self, rows: Rows) -> Array:
        """Return 1 / sqrt(k(x, x)) of each row, (n,), and 0 where k(x, x) = 0."""
        squares = self.kernel.evaluate_diagonal(rows)
        if squares.min() < 0:
            raise KernelError(f"{self!r} needs k(x, x) >= 0, and it is {squares.min()} for row {squares.argmin()}.")
        self._require_no_underflow(rows, squares)
        return np.divide(1, np.sqrt(squares), out=np.zeros_like(squares), where=squares > 0)

    def _require_no_underflow(self, rows: Rows, squares: Array) -> None:
        """Raise a KernelError if k(x, x), in `squares`, is subnormal, or is 0 only because the row x is too short."""
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
