"""The kernel: a frozen value with one required method, `block`; checks and operators live here.

A kernel knows nothing of Dask, Zarr or scikit-learn. Every block that leaves one is a fresh float64 array that the
caller may overwrite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from math import isfinite, nan

import numpy as np

from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels.rows import Array, as_rows

__all__ = ["Kernel", "Prepared", "checked_block", "mirror_lower", "require_number", "require_positive"]

Prepared = Callable[[Array], Array]
"""Rows Z (n, d) in, the block k(Z, landmarks) (n, m) out."""

_DIAGONAL_ROWS = 64


class Kernel(ABC):
    """A kernel function ``k(x, y)``, as a value: compared, hashed, pickled and printed by what it is.

    A subclass is a frozen dataclass with one required method, `block`, and at most three more: `prepare` (work done
    once for many blocks against the same landmarks), `resolve` (parameters taken from the training rows) and
    `diagonal` (where a formula is cheaper than small blocks). `blocks` and `copies` tell the memory budget what these
    hold, where it is more than the block.

    ``k1 + k2``, ``k1 * k2``, ``a * k``, ``k + a`` (a >= 0) and ``k ** n`` (n a positive integer) are kernels again.

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
        """Return k(X, Y), a fresh (n, m) float64 array, for finite float64 rows X (n, d) and Y (m, d)."""

    def prepare(self, landmarks: Array) -> Prepared:
        """Return a function from rows Z to ``block(Z, landmarks)``; what can be done once is done here."""
        return partial(_block_against, self, landmarks)

    def resolve(self, X: Array) -> Kernel:
        """Return the kernel with every parameter that depends on the training rows X filled in."""
        return self

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
        parts = [X[a : a + _DIAGONAL_ROWS] for a in range(0, len(X), _DIAGONAL_ROWS)]
        return np.concatenate([np.diagonal(self.block(part, part)) for part in parts])

    def __call__(self, X: object, Y: object = None) -> Array:
        """Evaluate the kernel on all pairs.

        Parameters
        ----------
        X : array-like of shape (n, d)
        Y : array-like of shape (m, d), optional
            Without it, k(X, X), symmetric to the last bit.

        Returns
        -------
        ndarray of shape (n, m), float64

        Raises
        ------
        InvalidInputError
            Rows that are not rows, or two different numbers of columns.
        KernelError
            A block with a value that is not finite.
        """
        x = as_rows(X)
        y = x if Y is None or Y is X else as_rows(Y, "Y")
        if x.shape[1] != y.shape[1]:
            raise InvalidInputError(f"X has {x.shape[1]} columns and Y has {y.shape[1]}; a kernel compares equals.")
        return checked_block(self, x, y)

    def diag(self, X: object) -> Array:
        """Return the self-similarities k(x, x), shape (n,), of the rows of X (n, d)."""
        return self.diagonal(as_rows(X))

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

        if isinstance(other, int | float | np.number):
            return Scaled(float(other), self)
        return Product.of(self, other) if isinstance(other, Kernel) else NotImplemented

    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> Kernel:
        from dkfm.kernels.compose import Power

        return Power(self, exponent)


def _block_against(kernel: Kernel, landmarks: Array, Z: Array) -> Array:
    return kernel.block(Z, landmarks)


def _as_kernel(value: object) -> Kernel | None:
    from dkfm.kernels.compose import Constant

    if isinstance(value, Kernel):
        return value
    return Constant(float(value)) if isinstance(value, int | float | np.number) else None


def checked_block(kernel: Kernel, X: Array, Y: Array, first: tuple[int, int] = (0, 0)) -> Array:
    """Return ``kernel.block(X, Y)``, symmetric to the last bit where X is Y, once every value is finite.

    `first` holds the numbers of the first row of X and of Y in the whole, for the message.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        block = kernel.block(X, Y)
    if X is Y:
        mirror_lower(block)
    if not np.isfinite(block).all():
        i, j = np.unravel_index(int(np.argmin(np.isfinite(block))), block.shape)
        raise KernelError(f"{kernel!r} returned {block[i, j]} for rows {first[0] + i} and {first[1] + j}.")
    return block


def mirror_lower(K: Array) -> None:
    """Copy the lower triangle of a square matrix onto its upper one, in place, by tiles."""
    step = 512
    for a in range(0, len(K), step):
        corner = K[a : a + step, a : a + step]
        upper = np.triu_indices(len(corner), 1)
        corner[upper] = corner.T[upper]
        for b in range(0, a, step):
            K[b : b + step, a : a + step] = K[a : a + step, b : b + step].T


def require_number(kernel: Kernel, name: str) -> float:
    """Return a parameter as a finite float, or raise a KernelError; a frozen dataclass calls it once."""
    value = getattr(kernel, name)
    try:
        number = float(value) if isinstance(value, int | float | np.number) and not isinstance(value, bool) else nan
    except (OverflowError, TypeError):
        number = nan
    if not isfinite(number):
        raise KernelError(f"{type(kernel).__name__} needs a finite number as {name}, and got {value!r:.50}.")
    object.__setattr__(kernel, name, number)
    return number


def require_positive(kernel: Kernel, name: str) -> None:
    """Raise a KernelError unless a parameter is a finite number above zero."""
    if require_number(kernel, name) <= 0:
        raise KernelError(f"{type(kernel).__name__} needs {name} > 0, and got {getattr(kernel, name)}.")
