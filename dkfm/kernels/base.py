"""The kernel: a frozen value with one required method, `block`; checks and operators live here.

A kernel knows nothing of Dask, Zarr or scikit-learn. Every block that leaves one is a fresh array that the caller may
overwrite: float32 where both its rows are, else float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dkfm.errors import InvalidInputError
from dkfm.kernels.blocks import checked_block, fits_single
from dkfm.kernels.definiteness import Definiteness
from dkfm.kernels.frames import paired_rows
from dkfm.kernels.rows import Array, Rows, as_rows, double, is_sparse
from dkfm.kernels.shown import as_html

if TYPE_CHECKING:
    from dkfm.kernels.maps import RowMap

__all__ = ["Evaluator", "Kernel", "Prepared", "PreparedKernel"]

Prepared = Callable[..., Array]
"""Rows Z (n, d), such as the kernel's hooks take, in, the block k(Z, landmarks) (n, m) out."""

_DIAGONAL_ROWS = 64
_NUMBER = int | float | np.integer | np.floating


class Evaluator(Protocol):
    """Any rows Z (n, d) in, the block k(Z, landmarks) (n, m) out: in the memory given, if the kernel can."""

    def __call__(self, Z: Rows, out: Array | None = None, /) -> Array:
        """Return the block; what was given as `out` is lost."""


class Kernel(ABC):
    """A kernel function ``k(x, y)``, as a value: compared, hashed, pickled and printed by what it is.

    A subclass is a frozen dataclass with one required method, `block`, and at most three more: `prepare` (work done
    once for many blocks against the same landmarks), `resolve` (parameters taken from the training rows) and
    `diagonal` (where a formula is cheaper than small blocks). What it is, it says in attributes: `definiteness`
    and `translation_invariant`; `single`, `sparse` and `fills`, for what its methods take; `blocks` and `copies`, for
    the memory budget.

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
    _repr_html_ = as_html

    @abstractmethod
    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y), a fresh (n, m) array, for finite rows X (n, d) and Y (m, d) of one dtype, which it has.

        They are dense float64, unless `single` or `sparse` says otherwise.
        """

    def prepare(self, landmarks: Array) -> Prepared:
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
    def single(self) -> bool:
        """Whether `block` takes float32 rows too; else they are widened for it, and its block is rounded."""
        return False

    @property
    def sparse(self) -> bool:
        """Whether `block` takes CSR rows too; else they are refused."""
        return False

    @property
    def fills(self) -> bool:
        """Whether what `prepare` returns takes memory for its block as a second argument, or None."""
        return False

    @property
    def translation_invariant(self) -> bool:
        """Whether k(x + c, y + c) = k(x, y): what scores in float32 may then take an offset from its rows first."""
        return False

    @property
    def of_numbers(self) -> bool:
        """Whether rows are values of the kernel, and landmarks the numbers of their columns."""
        return False

    @property
    def blocks(self) -> int:
        """How many arrays of a block's size are alive at once while one is computed; for the memory budget."""
        return 1

    @property
    def copies(self) -> int:
        """How many arrays of the landmarks' size `prepare` keeps; for the memory budget."""
        return 0

    def diagonal(self, X: Array) -> Array:
        """Return k(x, x) of each row, (n,), for checked rows; by small blocks unless a subclass knows better."""
        parts = [X[a : a + _DIAGONAL_ROWS] for a in range(0, X.shape[0], _DIAGONAL_ROWS)]
        return np.concatenate([np.diagonal(self.block(part, part)) for part in parts])

    def against(self, landmarks: Rows) -> Evaluator:
        """Return the function from any rows Z to k(Z, landmarks): `prepare` for the rows that it takes.

        float32 rows of both sides give a float32 block. This is what evaluates a kernel; a kernel made of others calls
        it on them.
        """
        taken = self._taken(landmarks)
        prepared = self.prepare(taken)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            if Z.dtype != landmarks.dtype:
                return self.against(double(landmarks))(double(Z))
            rows = taken if Z is landmarks else self._taken(Z)
            fills = self.fills and out is not None and out.dtype == rows.dtype
            values = prepared(rows, out) if fills else prepared(rows)
            return values.astype(Z.dtype, copy=False)

        return block

    def _taken(self, rows: Rows) -> Array:
        """Return rows as the hooks take them; sparse rows only where `sparse` promises to take them."""
        if is_sparse(rows) and not self.sparse:
            raise InvalidInputError(f"{self!r} takes dense rows, and these are sparse; X.toarray() makes them dense.")
        single = self.single and all(map(fits_single, getattr(self, "__dict__", {}).values()))
        return rows if single else double(rows)  # type: ignore[return-value]  # sparse where that is promised

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
        return checked_block(self, *paired_rows(X, Y))

    def diag(self, X: object) -> Array:
        """Return the self-similarities k(x, x), shape (n,), of the rows of X (n, d)."""
        return self.self_similarities(as_rows(X))

    def self_similarities(self, rows: Rows) -> Array:
        """Return k(x, x), (n,), of any checked rows: `diagonal` for the rows that it takes."""
        return self.diagonal(self._taken(rows)).astype(rows.dtype, copy=False)

    def warp(self, h: RowMap) -> Kernel:
        """Return ``k(h(x), h(y))``: h takes rows (n, d) to rows (n, d'), and is an `Affine` or a function of yours."""
        from dkfm.kernels.maps import Warped

        return Warped(self, h)

    def on(self, columns: int | Sequence[int]) -> Kernel:
        """Return the kernel of some columns only, by number."""
        from dkfm.kernels.maps import Columns

        return Columns(self, columns)

    def __add__(self, other: object) -> Kernel:
        from dkfm.kernels.compose import Sum

        term = _as_kernel(other)
        return NotImplemented if term is None else Sum.of(self, term)

    def __radd__(self, other: object) -> Kernel:
        from dkfm.kernels.compose import Sum

        if isinstance(other, int | float) and other == 0:
            return self  # what the built-in sum() starts with
        term = _as_kernel(other)
        return NotImplemented if term is None else Sum.of(term, self)

    def __mul__(self, other: object) -> Kernel:
        from dkfm.kernels.compose import Product, Scaled

        if isinstance(other, _NUMBER):
            return Scaled(other, self)  # type: ignore[arg-type]  # made a float, or refused, there
        return Product.of(self, other) if isinstance(other, Kernel) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> Kernel:
        return self * (1 / other) if isinstance(other, _NUMBER) and other else NotImplemented

    def __pow__(self, exponent: int) -> Kernel:
        from dkfm.kernels.compose import Power

        return Power(self, exponent)


class PreparedKernel(Kernel):
    """A kernel whose required method is `prepare`."""

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return self.prepare(Y)(X)

    @abstractmethod
    def prepare(self, landmarks: Array) -> Prepared:
        """Return a function from rows Z to k(Z, landmarks)."""


def _block_against(kernel: Kernel, landmarks: Array, Z: Array) -> Array:
    return kernel.block(Z, landmarks)


def _as_kernel(value: object) -> Kernel | None:
    from dkfm.kernels.compose import Constant

    if isinstance(value, Kernel):
        return value
    return Constant(value) if isinstance(value, _NUMBER) else None  # type: ignore[arg-type]  # made a float there
