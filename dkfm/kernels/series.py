"""Functions of one kernel's values that are kernels again: power series, the exponential, the normalised kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from dkfm.core.rows import Array, Rows, normalize_rows
from dkfm.errors import KernelError, shown
from dkfm.kernels.algebra import Pointwise, Wrapper
from dkfm.kernels.base import Definiteness, Kernel
from dkfm.kernels.pairwise.blocks import Evaluator, map_rows
from dkfm.kernels.parameters import as_number

_MAX_TERMS = 1024
"""Of a power series: every value of the kernel takes a step for each."""

_SMALLEST = float(np.finfo(np.float64).tiny)
"""The smallest number with all its digits."""


@dataclass(frozen=True)
class PowerSeries(Pointwise):
    """A power series of a kernel with coefficients >= 0, ``a_0 + a_1 k + a_2 k^2 + ..``.

    Positive semi-definite where the kernel is.

    Parameters
    ----------
    kernel : Kernel
    coefficients : sequence of float, >= 0
        ``a_0, a_1, ..``, at most 1024.

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
        given = self.coefficients
        if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str | bytes) or not np.size(given):
            raise KernelError(f"PowerSeries needs a sequence of coefficients, and got {shown(given, 50)}.")
        if len(given) > _MAX_TERMS:
            raise KernelError(f"PowerSeries takes at most {_MAX_TERMS} coefficients, and got {len(given)}.")
        numbers = tuple(as_number(a) for a in given)
        if not all(isfinite(a) for a in numbers):
            raise KernelError(f"PowerSeries needs finite numbers as coefficients, and got {shown(given, 50)}.")
        if min(numbers) < 0:
            raise KernelError(
                f"PowerSeries needs coefficients >= 0, and got {min(numbers)}: "
                "a negative multiple of a kernel is not positive semi-definite."
            )
        object.__setattr__(self, "coefficients", numbers)

    @property
    def definiteness(self) -> Definiteness:
        """Nothing, unless the kernel is positive semi-definite or the series ends with its first power."""
        if len(self.coefficients) <= 2:
            return self.kernel.definiteness
        return self.kernel.definiteness.of_function()

    def _profile(self, values: Array) -> Array:
        return map_rows(values, self._sum)

    def _sum(self, values: Array) -> Array:
        total = np.full_like(values, self.coefficients[-1])
        for a in self.coefficients[-2::-1]:
            total *= values
            total += a
        return total


@dataclass(frozen=True)
class Exp(Pointwise):
    """The exponential of a kernel, ``exp(k(x, y))``.

    Positive semi-definite where the kernel is, or is conditionally so (Schoenberg).

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

    def _profile(self, values: Array) -> Array:
        return np.exp(values, out=values)


@dataclass(frozen=True)
class Normalized(Wrapper):
    """The normalised kernel, ``k(x, y) / sqrt(k(x, x) k(y, y))``, with 0/0 = 0: every point at length 1.

    Positive semi-definite, as the kernel must be.

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
        """Prepare the kernel, and the landmarks' lengths."""
        prepared, right = self.kernel.make_evaluator(landmarks), self._inverse_lengths(landmarks)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            values = prepared(Z, out)
            values *= self._inverse_lengths(Z)[:, np.newaxis]
            values *= right
            return values

        return block

    def resolve(self, X: Rows) -> Kernel:
        """Resolve the kernel."""
        return replace(self, kernel=self.kernel.resolve(X))

    def diagonal(self, X: Rows) -> Array:
        """Return 1, or 0 where k(x, x) is."""
        return (self._inverse_lengths(X) > 0).astype(np.float64)

    def _inverse_lengths(self, rows: Rows) -> Array:
        squares = self.kernel.evaluate_diagonal(rows)
        if squares.min() < 0:
            raise KernelError(f"{self!r} needs k(x, x) >= 0, and it is {squares.min()} for row {squares.argmin()}.")
        self._require_no_underflow(rows, squares)
        return np.divide(1, np.sqrt(squares), out=np.zeros_like(squares), where=squares > 0)

    def _require_no_underflow(self, rows: Rows, squares: Array) -> None:
        """Raise where k(x, x) has lost its digits: it is too small a number, or 0 but not for a multiple of the row."""
        small = np.flatnonzero(squares < _SMALLEST)
        if not len(small):
            return
        lengthened, lengths = normalize_rows(rows[small])
        lost = (squares[small] > 0) | ((lengths < 1) & (self.kernel.evaluate_diagonal(lengthened) > 0))
        if lost.any():
            row = int(small[lost.argmax()])
            raise KernelError(
                f"{self!r} divides by sqrt(k(x, x)), and that of row {row} is {squares[row]:.1e}, smaller than float64 "
                "holds; multiply the rows by a number."
            )
