"""The kernel: a frozen value with one required method, `block`; checks and operators live here.

A kernel knows nothing of Dask, Zarr or scikit-learn. Every block that leaves one is a fresh array that the caller may
overwrite: float32 where both its rows are, else float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TypeVar

import numpy as np

from dkfm.core import notebook_display
from dkfm.core.frames import as_row_pair
from dkfm.core.rows import Array, Rows, as_float64, as_rows, is_sparse
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels.pairwise.blocks import Evaluator, PreparedBlock, mirror_lower

_DIAGONAL_ROWS = 64

_SINGLE_RANGE = 1e-30, 1e30
"""Parameters of a kernel beyond it do not go through float32."""

_NUMBER = int | float | np.integer | np.floating


_COMBINATIONS: dict[str, Callable[..., Kernel]] = {}
"""The classes that operators of a kernel return, by name; filled by `register_combination`."""

_KernelType = TypeVar("_KernelType", bound="type[Kernel]")


class Definiteness(StrEnum):
    """What is known of a kernel's Gram matrices K; the strongest first."""

    PSD = "positive semi-definite"
    CONDITIONAL = "conditionally positive semi-definite"
    """HKH is positive semi-definite for the centring H: enough for kernel PCA, and for ``Exp``."""
    INDEFINITE = "indefinite"

    @classmethod
    def weakest(cls, *found: Definiteness) -> Definiteness:
        """Return the weakest of some: what a sum of such kernels is."""
        return max(found, key=list(cls).index)

    def of_function(self) -> Definiteness:
        """Return what a power series with non-negative coefficients, or a quotient, of such a kernel is."""
        return self if self is Definiteness.PSD else Definiteness.INDEFINITE


def register_combination(kernel: _KernelType) -> _KernelType:
    """Register a class of kernels made of kernels, so that the operators of `Kernel` find it; a decorator."""
    _COMBINATIONS[kernel.__name__] = kernel
    return kernel


class Kernel(ABC):
    """A kernel function ``k(x, y)``, as a value: compared, hashed, pickled and printed by what it is.

    A subclass is a frozen dataclass with one required method, `block`, and at most three more: `prepare` (work done
    once for many blocks against the same landmarks), `resolve` (parameters taken from the training rows) and
    `diagonal` (where a formula is cheaper than small blocks). Its attributes tell what it is (`definiteness`,
    `translation_invariant`), what its methods support (`supports_float32`, `supports_sparse`, `supports_out`), and what
    memory they take (`peak_blocks`, `landmark_copies`).

    ``k1 + k2``, ``k1 * k2``, ``a * k``, ``k + a`` (a >= 0), ``k ** n`` (n a positive integer), ``k.warp(h)`` and
    ``k.on(columns)`` are kernels again.

    Examples
    --------
    >>> from dkfm import kernels
    >>> k = kernels.Gaussian(5.0) + 0.5 * kernels.Polynomial(3)
    >>> k([[0.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]).round(3)
    array([[1.5 , 1.48]])
    """

    __array_ufunc__ = None  # a NumPy scalar leaves arithmetic to the kernel

    @abstractmethod
    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y), a fresh (n, m) array, for finite rows X (n, d) and Y (m, d) of one dtype, which it has.

        They are dense float64, unless `supports_float32` or `supports_sparse` says otherwise.
        """

    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Return a function from rows Z to ``block(Z, landmarks)``; what can be done once is done here."""
        return partial(_block_against, self, landmarks)

    def resolve(self, X: Rows) -> Kernel:
        """Return the kernel with every parameter that depends on the training rows X filled in."""
        return self

    @property
    def definiteness(self) -> Definiteness:
        """Whether its Gram matrices are positive semi-definite, conditionally so, or neither."""
        return Definiteness.PSD

    @property
    def supports_float32(self) -> bool:
        """Whether `block` takes float32 rows too; else they are widened for it, and its block is rounded."""
        return False

    @property
    def supports_sparse(self) -> bool:
        """Whether `block` takes CSR rows too; else they are refused."""
        return False

    @property
    def supports_out(self) -> bool:
        """Whether what `prepare` returns takes memory for its block as a second argument, or None."""
        return False

    @property
    def translation_invariant(self) -> bool:
        """Whether k(x + c, y + c) = k(x, y): what scores in float32 may then take an offset from its rows first."""
        return False

    @property
    def is_precomputed(self) -> bool:
        """Whether rows are values of the kernel, and landmarks the numbers of their columns."""
        return False

    @property
    def peak_blocks(self) -> int:
        """How many arrays of a block's size are alive at once while one is computed; for the memory budget."""
        return 1

    @property
    def landmark_copies(self) -> int:
        """How many arrays of the landmarks' size `prepare` keeps; for the memory budget."""
        return 0

    def diagonal(self, X: Array) -> Array:
        """Return k(x, x) of each row, (n,), for checked rows; by small blocks unless a subclass knows better."""
        parts = [X[a : a + _DIAGONAL_ROWS] for a in range(0, X.shape[0], _DIAGONAL_ROWS)]
        return np.concatenate([np.diagonal(self.block(part, part)) for part in parts])

    def make_evaluator(self, landmarks: Rows) -> Evaluator:
        """Return the function from any rows Z to k(Z, landmarks): `prepare` for the rows that it takes.

        float32 rows of both sides give a float32 block. This is what evaluates a kernel; a kernel made of others calls
        it on them.
        """
        taken = self._taken(landmarks)
        prepared = self.prepare(taken)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            if Z.dtype != landmarks.dtype:
                return self.make_evaluator(as_float64(landmarks))(as_float64(Z))
            rows = taken if Z is landmarks else self._taken(Z)
            fills = self.supports_out and out is not None and out.dtype == rows.dtype
            values = prepared(rows, out) if fills else prepared(rows)
            return values.astype(Z.dtype, copy=False)

        return block

    def _taken(self, rows: Rows) -> Array:
        """Return rows as the hooks take them; sparse rows only where `supports_sparse` promises to take them."""
        if is_sparse(rows) and not self.supports_sparse:
            raise InvalidInputError(f"{self!r} takes dense rows, and these are sparse; X.toarray() makes them dense.")
        single = self.supports_float32 and all(map(fits_float32, getattr(self, "__dict__", {}).values()))
        return rows if single else as_float64(rows)  # type: ignore[return-value]  # sparse where that is promised

    def __call__(self, X: object, Y: object = None) -> Array:
        """Evaluate the kernel on all pairs.

        Parameters
        ----------
        X : array-like or scipy.sparse array of shape (n, d)
        Y : array-like or scipy.sparse array of shape (m, d), optional
            Without it, k(X, X), symmetric to the last bit.

        Returns
        -------
        ndarray of shape (n, m)
            float32 where X and Y are, else float64.

        Raises
        ------
        InvalidInputError
            Rows that are not rows, two different numbers of columns, or data frames whose columns differ.
        KernelError
            A block with a value that is not finite.
        """
        return checked_block(self, *as_row_pair(X, Y))

    def diag(self, X: object) -> Array:
        """Return the self-similarities k(x, x), shape (n,), of the rows of X (n, d)."""
        return self.evaluate_diagonal(as_rows(X))

    def evaluate_diagonal(self, rows: Rows) -> Array:
        """Return k(x, x), (n,), of any checked rows: `diagonal` for the rows that it takes."""
        return self.diagonal(self._taken(rows)).astype(rows.dtype, copy=False)

    def _repr_html_(self) -> str:
        """Return the kernel in HTML for a notebook: its expression, and what is known of it."""
        facts = {"definiteness": str(self.definiteness), "rows": "dense or sparse" if self.supports_sparse else "dense"}
        return notebook_display.html_card(f"Kernel {type(self).__name__}", repr(self), facts)

    def warp(self, h: Callable[[Array], object]) -> Kernel:
        """Return ``k(h(x), h(y))``: h takes rows (n, d) to rows (n, d'), and is an `Affine` or a function of yours."""
        return _COMBINATIONS["Warped"](self, h)

    def on(self, columns: int | Sequence[int]) -> Kernel:
        """Return the kernel of some columns only, by number."""
        return _COMBINATIONS["Columns"](self, columns)

    def __add__(self, other: object) -> Kernel:
        term = _as_kernel(other)
        return NotImplemented if term is None else _COMBINATIONS["Sum"]((self, term))

    def __radd__(self, other: object) -> Kernel:
        if isinstance(other, int | float) and other == 0:
            return self  # what the built-in sum() starts with
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
    """A kernel whose required method is `prepare`."""

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return self.prepare(Y)(X)

    @abstractmethod
    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Return a function from rows Z to k(Z, landmarks)."""


def _block_against(kernel: Kernel, landmarks: Array, Z: Array) -> Array:
    return kernel.block(Z, landmarks)


def _as_kernel(value: object) -> Kernel | None:
    if isinstance(value, Kernel):
        return value
    return _COMBINATIONS["Constant"](value) if isinstance(value, _NUMBER) else None


def checked_block(kernel: Kernel, X: Rows, Y: Rows, first: tuple[int, int] = (0, 0)) -> Array:
    """Return k(X, Y), symmetric to the last bit where X is Y, once every value is finite.

    `first` holds the numbers of the first row of X and of Y in the whole, for the message.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        block = kernel.make_evaluator(Y)(X)
        if X is Y:
            mirror_lower(block)
        finite = np.isfinite(block)
    if not finite.all():
        i, j = np.unravel_index(int(np.argmin(finite)), block.shape)
        raise KernelError(f"{kernel!r} returned {block[i, j]} for rows {first[0] + i} and {first[1] + j}.")
    return block


def fits_float32(parameter: object) -> bool:
    """Whether a parameter of a kernel, or all numbers of a tuple, go through float32."""
    if isinstance(parameter, tuple):
        return all(map(fits_float32, parameter))
    smallest, largest = _SINGLE_RANGE
    return not isinstance(parameter, float) or parameter == 0 or smallest <= abs(parameter) <= largest
