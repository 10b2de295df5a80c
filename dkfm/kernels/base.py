"""The abstract base class of all kernels, with its input checks and operators.

A kernel knows nothing of Dask, Zarr or scikit-learn. It returns every block as a new array that the caller may
overwrite: float32 if both sets of rows are float32, else float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np

from dkfm.core.display import html_cards
from dkfm.core.frames import as_row_pair
from dkfm.core.rows import Array, Rows, as_float64, as_rows, is_sparse
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels.pairwise.block_operations import (
    FLOAT32_RANGE,
    Evaluator,
    PreparedBlock,
    float64_blocks,
    is_far_above_subnormals,
    mirror_lower,
    set_subnormals_to_0,
)
from dkfm.kernels.pairwise.radial_forms import RadialForm

_DIAGONAL_ROWS = 64
"""Rows of the small blocks from whose diagonals `Kernel.diagonal` is taken by default."""

_NUMBER = int | float | np.integer | np.floating

_COMBINATIONS: dict[str, Callable[..., Kernel]] = {}
"""Classes that the operators of `Kernel` return, by name; `register_operator_class` fills it."""

_KernelType = TypeVar("_KernelType", bound="type[Kernel]")


class Definiteness(StrEnum):
    """What is known of the Gram matrices K of a kernel, ordered from the strongest property to the weakest."""

    PSD = "positive semi-definite"
    CONDITIONAL = "conditionally positive semi-definite"
    """HKH is positive semi-definite, with H the centring matrix; this suffices for kernel PCA and for ``Exp``."""
    INDEFINITE = "indefinite"

    @classmethod
    def weakest(cls, *values: Definiteness) -> Definiteness:
        """Return the weakest of several properties, which a sum of such kernels has."""
        return max(values, key=list(cls).index)

    def of_power_series(self) -> Definiteness:
        """Return the definiteness of a power series of such a kernel with non-negative coefficients."""
        return self if self is Definiteness.PSD else Definiteness.INDEFINITE


def register_operator_class(cls: _KernelType) -> _KernelType:
    """Register a class of composed kernels for the operators of `Kernel`; a class decorator."""
    _COMBINATIONS[cls.__name__] = cls
    return cls


class Kernel(ABC):
    """Kernel function ``k(x, y)``: an immutable value that is compared, hashed, pickled and printed by its parameters.

    A subclass is a frozen dataclass with one required method, `block`. It may override six more: `prepare` (does the
    work that blocks with the same landmarks share), `resolve` (takes parameters from the training rows), `diagonal` (if
    a formula is cheaper than small blocks), `radial_form` (if the kernel is a function of the squared distance, so that
    sums and products compute distances once), `estimate_extra_value_seconds` (if values take long) and
    `lacks_extra_fast` (if the extra "fast" compiles its sums over columns). Attributes state its mathematical
    properties (`definiteness`, `translation_invariant`), what its methods support (`supports_float32` with
    `float32_error_share`, `supports_sparse`, `supports_out`, `has_no_subnormals`, `is_precomputed`), and the memory
    that they take (`peak_blocks`, `landmark_copies`).

    ``k1 + k2``, ``k1 * k2``, ``a * k``, ``k + a`` (a >= 0), ``k ** n`` (n a positive integer), ``k.warp(h)`` and
    ``k.on(columns)`` are kernels again.

    Examples
    --------
    >>> from dkfm import kernels
    >>> k = kernels.Gaussian(5.0) + 0.5 * kernels.Polynomial(3)
    >>> k([[0.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]).round(3)
    array([[1.5 , 1.48]])
    """

    __array_ufunc__ = None  # NumPy scalars defer to the operators of the kernel
    has_no_subnormals: ClassVar[bool] = False
    """Whether the kernel returns 0 instead of subnormal numbers."""

    @abstractmethod
    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y), a new (n, m) array, for finite rows X (n, d) and Y (m, d); all three have the same dtype.

        X and Y are dense and float64, unless `supports_float32` or `supports_sparse` is true.
        """

    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Return a function that computes ``block(Z, landmarks)``; precompute what does not depend on the rows Z."""
        return partial(_call_block, self, landmarks)

    def radial_form(self, d: int) -> RadialForm | None:
        """Return the kernel of d columns as a function of the squared distance; None if it is no such function."""
        return None

    def get_valid_radial_form(self, d: int) -> RadialForm | None:
        """Return the `radial_form`; None if a subclass overrides the blocks of the class that defines it."""
        classes = type(self).__mro__
        form, *hooks = (
            next(i for i, cls in enumerate(classes) if name in vars(cls))
            for name in ("radial_form", "prepare", "block")
        )
        return self.radial_form(d) if form <= min(hooks) else None

    def resolve(self, X: Rows) -> Kernel:
        """Return the kernel with all parameters that depend on the training rows X filled in."""
        return self

    @property
    def definiteness(self) -> Definiteness:
        """Whether the Gram matrices are positive semi-definite, conditionally so, or neither."""
        return Definiteness.PSD

    @property
    def supports_float32(self) -> bool:
        """Whether `block` also takes float32 rows; if not, it gets float64 rows, and its result is rounded."""
        return False

    @property
    def float32_error_share(self) -> float:
        """Largest error of k(x, y) for float32 rows, relative to ``sqrt(k(x, x) k(y, y))``; infinity if unbounded.

        Powers and series of the kernel are computed in float32 if the error that they magnify stays below a limit.
        """
        return float("inf")

    @property
    def supports_sparse(self) -> bool:
        """Whether `block` also takes CSR rows; if not, sparse rows raise an error."""
        return False

    @property
    def supports_out(self) -> bool:
        """Whether the function that `prepare` returns takes a second argument: an array for the block, or None."""
        return False

    @property
    def translation_invariant(self) -> bool:
        """Whether k(x + c, y + c) = k(x, y), so that rows may be shifted before they are scored in float32."""
        return False

    @property
    def is_precomputed(self) -> bool:
        """Whether rows hold kernel values and landmarks are column numbers."""
        return False

    @property
    def peak_blocks(self) -> int:
        """Number of arrays as large as a block that exist while one is computed; for the memory budget."""
        return 1

    @property
    def landmark_copies(self) -> int:
        """Number of arrays as large as the landmarks that `prepare` keeps; for the memory budget."""
        return 0

    def estimate_extra_value_seconds(self, d: int) -> float:
        """Estimate the seconds of one thread for a value of rows with d columns, beyond a matrix product and an exp.

        The estimate determines the rows of a scoring task, and the predictions of plans and logs. The default is the
        sum over `iter_parts`.
        """
        return sum((part.estimate_extra_value_seconds(d) for part in self.iter_parts()), start=0.0)

    def lacks_extra_fast(self) -> bool:
        """Return whether values would take less time if the extra "fast" were installed."""
        return any(part.lacks_extra_fast() for part in self.iter_parts())

    def iter_parts(self) -> Iterator[Kernel]:
        """Yield the kernels among the fields, and among the elements of fields that are tuples."""
        for value in getattr(self, "__dict__", {}).values():
            yield from (k for k in (value if isinstance(value, tuple) else (value,)) if isinstance(k, Kernel))

    def diagonal(self, X: Array) -> Array:
        """Return k(x, x) of each checked row, (n,); the default computes small blocks."""
        parts = [X[a : a + _DIAGONAL_ROWS] for a in range(0, X.shape[0], _DIAGONAL_ROWS)]
        return np.concatenate([np.diagonal(self.block(part, part)) for part in parts])

    def make_evaluator(self, landmarks: Rows) -> Evaluator:
        """Return a function that computes k(Z, landmarks) for rows Z of any dtype; callers use this method.

        The function converts the rows and calls the function that `prepare` returns, which subclasses override.
        """
        converted = self._convert_rows(landmarks)
        prepared = self.prepare(converted)
        may_vanish = self._may_vanish(converted, landmarks.dtype)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            if Z.dtype != landmarks.dtype:
                return self.make_evaluator(as_float64(landmarks))(as_float64(Z))
            values = compute(Z, out)
            if may_vanish:
                set_subnormals_to_0(values)
            return values

        def compute(Z: Rows, out: Array | None) -> Array:
            rows = converted if Z is landmarks else self._convert_rows(Z)
            if not self.supports_out:
                return prepared(rows).astype(Z.dtype, copy=False)
            if out is not None and out.dtype != Z.dtype:
                out = None
            if rows.dtype == Z.dtype:
                return prepared(rows, out).astype(Z.dtype, copy=False)
            n, m = Z.shape[0], landmarks.shape[0]
            rounded: Array = np.empty((n, m), Z.dtype) if out is None else out
            with float64_blocks.borrow(n, m, rows.dtype) as wide:
                rounded[...] = prepared(rows, wide)
            return rounded

        return block

    def _may_vanish(self, converted: Rows, dtype: np.dtype[np.floating]) -> bool:
        """Return whether a block of this dtype may have subnormal values, which are slow and negligible beside k(x, x).

        They are negligible only if k(x, x) is the same for all x. A kernel with `has_no_subnormals` returns none of
        them, unless its rows were converted.
        """
        if not self.translation_invariant or (self.has_no_subnormals and converted.dtype == dtype):
            return False
        return is_far_above_subnormals(float(self.evaluate_diagonal(converted[:1])[0]), dtype)

    def _convert_rows(self, rows: Rows) -> Array:
        """Return rows in a dtype that the kernel takes; raise for sparse rows if it takes only dense rows."""
        if is_sparse(rows) and not self.supports_sparse:
            raise InvalidInputError(f"{self!r} takes dense rows, and these are sparse; X.toarray() makes them dense.")
        return rows if self._keeps_float32() else as_float64(rows)  # type: ignore[return-value]  # sparse only if supports_sparse

    def _keeps_float32(self) -> bool:
        """Return whether float32 rows need not be converted: neither the kernel nor its parameters need float64."""
        return self.supports_float32 and all(map(fits_float32, getattr(self, "__dict__", {}).values()))

    def __call__(self, X: object, Y: object = None) -> Array:
        """Evaluate the kernel on all pairs.

        Parameters
        ----------
        X : array-like or scipy.sparse array of shape (n, d)
            Rows of the block.
        Y : array-like or scipy.sparse array of shape (m, d), optional
            Columns of the block; by default X, which gives an exactly symmetric block.

        Returns
        -------
        ndarray of shape (n, m)
            The values k(x, y); float32 if X and Y are float32, else float64.

        Raises
        ------
        InvalidInputError
            X or Y is not a matrix of finite numbers, their numbers of columns differ, or they are data frames with
            different columns.
        KernelError
            A value of the block is not finite.
        """
        return evaluate_block(self, *as_row_pair(X, Y))

    def diag(self, X: object) -> Array:
        """Return the self-similarities k(x, x), shape (n,), of the rows of X (n, d)."""
        return self.evaluate_diagonal(as_rows(X))

    def evaluate_diagonal(self, rows: Rows) -> Array:
        """Return k(x, x) of checked rows of any dtype, (n,): convert the rows and call `diagonal`."""
        return self.diagonal(self._convert_rows(rows)).astype(rows.dtype, copy=False)

    def _repr_html_(self) -> str:
        """Return an HTML card for a notebook: the expression and properties of the kernel."""
        facts = {"definiteness": str(self.definiteness), "rows": "dense or sparse" if self.supports_sparse else "dense"}
        return html_cards.html_card(f"Kernel {type(self).__name__}", repr(self), facts)

    def warp(self, h: Callable[[Array], object]) -> Kernel:
        """Return the kernel ``k(h(x), h(y))``; h, an `Affine` or your function, maps rows (n, d) to rows (n, d')."""
        return _COMBINATIONS["Warped"](self, h)

    def on(self, columns: int | Sequence[int]) -> Kernel:
        """Return the kernel restricted to some columns, given by number."""
        return _COMBINATIONS["Columns"](self, columns)

    def __add__(self, other: object) -> Kernel:
        term = _as_kernel(other)
        return NotImplemented if term is None else _COMBINATIONS["Sum"]((self, term))

    def __radd__(self, other: object) -> Kernel:
        if isinstance(other, int | float) and other == 0:
            return self  # the built-in sum() starts with 0
        term = _as_kernel(other)
        return NotImplemented if term is None else _COMBINATIONS["Sum"]((term, self))

    def __mul__(self, other: object) -> Kernel:
        if isinstance(other, _NUMBER):
            return _COMBINATIONS["Scaled"](other, self)
        return _COMBINATIONS["Product"]((self, other)) if isinstance(other, Kernel) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> Kernel:
        return self * (1 / other) if isinstance(other, _NUMBER) and other else NotImplemented

    def __pow__(self, exponent: int) -> Kernel:
        return _COMBINATIONS["Power"](self, exponent)


class PreparedKernel(Kernel):
    """Base class of kernels that implement `prepare` instead of `block`."""

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return self.prepare(Y)(X)

    @abstractmethod
    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Return a function that computes k(Z, landmarks) for rows Z."""


def _call_block(kernel: Kernel, landmarks: Array, Z: Array) -> Array:
    """Return ``kernel.block(Z, landmarks)``; landmarks are the first argument, so that `partial` can bind them."""
    return kernel.block(Z, landmarks)


def _as_kernel(value: object) -> Kernel | None:
    if isinstance(value, Kernel):
        return value
    return _COMBINATIONS["Constant"](value) if isinstance(value, _NUMBER) else None


def evaluate_block(kernel: Kernel, X: Rows, Y: Rows, row_offsets: tuple[int, int] = (0, 0)) -> Array:
    """Return k(X, Y), exactly symmetric if X is Y; raise a KernelError if a value is not finite.

    `row_offsets` holds the offsets of X and of Y in the data set, for the row numbers in the message.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # values that overflow raise an error below
        block = kernel.make_evaluator(Y)(X)
        if X is Y:
            mirror_lower(block)
        finite = np.isfinite(block)
    if not finite.all():
        i, j = np.unravel_index(int(np.argmin(finite)), block.shape)
        rows = f"rows {row_offsets[0] + i} and {row_offsets[1] + j}"
        raise KernelError(f"{kernel!r} returned {block[i, j]} for {rows}: leave them out, or scale the columns.")
    return block


def fits_float32(parameter: object) -> bool:
    """Return whether a kernel parameter, or each number of a tuple, is safe in float32."""
    if isinstance(parameter, tuple):
        return all(map(fits_float32, parameter))
    smallest, largest = FLOAT32_RANGE
    return not isinstance(parameter, float) or parameter == 0 or smallest <= abs(parameter) <= largest
