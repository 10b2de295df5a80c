"""Functions of a kernel's values that are kernels: power series, exponential and normalized kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, as_float64, normalize_rows
from dkfm.errors import KernelError, format_value
from dkfm.kernels.algebra import ElementwiseKernel, Wrapper
from dkfm.kernels.base import Definiteness, Kernel
from dkfm.kernels.pairwise.block_functions import (
    Evaluator,
    are_in_float32_range,
    choose_precision,
    compute_in_float64,
    exp_in_place,
    map_rows,
)
from dkfm.kernels.pairwise.radial_forms import RadialForm
from dkfm.kernels.pairwise.squared_distances import FLOAT32_LIMIT
from dkfm.kernels.parameters import as_float_or_nan

_MAX_TERMS = 1024
"""Most coefficients of a power series: each kernel value takes one step for each."""

_VALUES_AT_ONCE = 2**15
"""Values of a block that are normalized at a time."""

_MIN_NORMAL = float(np.finfo(np.float64).tiny)
"""Smallest float64 with full precision."""


class _Series(ElementwiseKernel):
    """Base class of power series with coefficients >= 0, which magnify relative errors more the larger the values."""

    @abstractmethod
    def _relative_growth(self, g: Array) -> Array:
        """Return ``g f'(g) / f(g)`` of the series f for g >= 0: the factor of relative errors, which grows with g."""

    @property
    def supports_float32(self) -> bool:
        """Whether the kernel is positive semi-definite and has a float32 error."""
        return self.kernel.definiteness is Definiteness.PSD and self.kernel.float32_error <= FLOAT32_LIMIT

    @property
    def float32_error(self) -> float:
        """The limit, if the series computes in float32 at all."""
        return FLOAT32_LIMIT if self.supports_float32 else float("inf")

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare the inner kernel; rows whose errors the series magnifies too much are computed in float64.

        An error of ``e g``, with ``g = sqrt(k(x, x) k(y, y))``, becomes ``e g f'(g) / f(g)`` as a share of f(g), which
        is at most ``sqrt(f(k(x, x)) f(k(y, y)))``.
        """
        prepare, diagonal = super().prepare, self.kernel.evaluate_diagonal
        if landmarks.dtype == np.float64:
            return prepare(landmarks)
        landmark_squares = diagonal(as_float64(landmarks))
        longest, all_fit = np.sqrt(landmark_squares.max()), bool(are_in_float32_range(landmark_squares).all())

        def fits_float32(Z: Rows) -> npt.NDArray[np.bool_]:
            squares = diagonal(as_float64(Z))
            growth = self._relative_growth(np.sqrt(squares) * longest)
            return are_in_float32_range(squares) & (growth * self.kernel.float32_error <= FLOAT32_LIMIT) & all_fit

        return choose_precision(
            prepare(landmarks), lambda: prepare(as_float64(landmarks)), fits_float32, landmarks.shape[0]
        )

    def radial_form(self, d: int) -> RadialForm | None:
        """Return the series of the inner kernel's radial form; in float32 if it does not magnify the error at 0."""
        form, inner = super().radial_form(d), self.kernel.find_radial_form(d)
        if form is None or inner is None:
            return None
        growth = self._relative_growth(inner.map_values(np.zeros(1)))
        return replace(form, supports_float32=form.supports_float32 and bool(growth[0] <= 1))


@dataclass(frozen=True)
class PowerSeries(_Series):  # numpydoc ignore=PR02
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
        """Return the series of kernel values."""
        return _evaluate_polynomial(self.coefficients, values)

    def _relative_growth(self, g: Array) -> Array:
        slopes = [number * a for number, a in enumerate(self.coefficients)]
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows, NaN, is not small enough
            values, derivatives = (_evaluate_polynomial(numbers, g) for numbers in (self.coefficients, slopes))
            return np.divide(derivatives, values, out=np.zeros_like(g), where=values != 0)


def _evaluate_polynomial(coefficients: Sequence[float], values: Array) -> Array:
    """Return the sum of the coefficients times the powers of the values, from 0, by Horner's method."""
    *lower, highest = coefficients
    if not lower:
        return np.full_like(values, highest)
    total = values * values.dtype.type(highest)
    total += lower.pop()
    while lower:
        total *= values
        total += lower.pop()
    return total


@dataclass(frozen=True)
class Exp(_Series):
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

    @property
    def definiteness(self) -> Definiteness:
        """Positive semi-definite, unless the kernel is indefinite."""
        indefinite = self.kernel.definiteness is Definiteness.INDEFINITE
        return Definiteness.INDEFINITE if indefinite else Definiteness.PSD

    def _map_values(self, values: Array) -> Array:
        return exp_in_place(values)

    def _relative_growth(self, g: Array) -> Array:
        return g


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel.definiteness is not Definiteness.PSD:
            raise KernelError(
                "Normalized needs a positive semi-definite kernel, whose k(x, x) are squared lengths, and "
                f"{self.kernel!r} is {self.kernel.definiteness}."
            )

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare the inner kernel, and the inverse lengths of the landmarks, in float64.

        Rows whose k(x, x) is near the ends of the range of float32 are computed in float64.
        """
        right = self._inverse_lengths(as_float64(landmarks))
        if landmarks.dtype == np.float64:
            return self._prepare_block(landmarks, right)
        wide = partial(self._prepare_block, as_float64(landmarks), right)
        if not are_in_float32_range(np.square(right)).all():
            return compute_in_float64(wide(), len(right))
        return choose_precision(
            self._prepare_block(landmarks, right),
            wide,
            lambda Z: are_in_float32_range(np.square(self._inverse_lengths(as_float64(Z)))),
            len(right),
        )

    def _prepare_block(self, landmarks: Rows, inverse_lengths: Array) -> Evaluator:
        """Return a function that computes blocks in the precision of the landmarks."""
        prepared, right = self.kernel.make_evaluator(landmarks), inverse_lengths.astype(landmarks.dtype)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            values, left = prepared(Z, out), self._inverse_lengths(as_float64(Z)).astype(Z.dtype)[:, np.newaxis]
            for part in row_slices(len(values), max(1, _VALUES_AT_ONCE // len(right))):
                values[part] *= left[part]
                values[part] *= right
            return values

        return block

    @property
    def supports_float32(self) -> bool:
        """Whether the inner kernel has a float32 error, which is that of the normalized kernel, too."""
        return self.kernel.float32_error <= FLOAT32_LIMIT

    def resolve(self, X: Rows) -> Kernel:
        """Resolve the inner kernel."""
        return replace(self, kernel=self.kernel.resolve(X))

    def diagonal(self, X: Rows) -> Array:
        """Return 1 for each row, but 0 where k(x, x) = 0."""
        return (self._inverse_lengths(as_float64(X)) > 0).astype(np.float64)

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
