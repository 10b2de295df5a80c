"""Kernels made of kernels: sums, products, powers, non-negative multiples; and kernels made of functions.

Sums and products are flat: ``a + b + c`` is one Sum of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel, Prepared, require_number
from dkfm.kernels.dot import integer_power, require_exponent
from dkfm.kernels.rows import Array
from dkfm.tiling import row_slices

__all__ = ["Constant", "Function", "Power", "Product", "Scaled", "Sum"]


def _require_weight(kernel: Kernel, name: str) -> None:
    if require_number(kernel, name) < 0:
        raise KernelError(
            f"{type(kernel).__name__} needs {name} >= 0, and got {getattr(kernel, name)}: "
            "a negative multiple of a kernel is not positive semi-definite."
        )


def _require_kernels(kernel: Kernel, parts: object) -> None:
    if not isinstance(parts, tuple) or not parts:
        raise KernelError(f"{type(kernel).__name__} is made of a tuple of kernels, and got {parts!r}.")
    for part in parts:
        if not isinstance(part, Kernel):
            raise KernelError(f"{type(kernel).__name__} is made of kernels, and got {part!r}.")


@dataclass(frozen=True)
class Constant(Kernel):
    """The constant kernel, ``k(x, y) = value >= 0``; ``k + 1.0`` makes one.

    Examples
    --------
    >>> from dkfm.kernels import Linear
    >>> (Linear() + 1.0)([[2.0]], [[3.0]])
    array([[7.]])
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        _require_weight(self, "value")

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return np.full((len(X), len(Y)), self.value)

    def diagonal(self, X: Array) -> Array:
        """Return the constant."""
        return np.full(len(X), self.value)


@dataclass(frozen=True)
class Sum(Kernel):
    """The sum of kernels; ``k1 + k2`` makes one."""

    terms: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        _require_kernels(self, self.terms)

    @property
    def blocks(self) -> int:
        """The sum so far, beside what the next term takes."""
        return 1 + max(k.blocks for k in self.terms)

    @property
    def copies(self) -> int:
        """Those of all terms."""
        return sum(k.copies for k in self.terms)

    @classmethod
    def of(cls, *kernels: Kernel) -> Sum:
        """Return the flat sum."""
        return cls(tuple(t for k in kernels for t in (k.terms if isinstance(k, Sum) else (k,))))

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return _accumulate(np.add, (k.block(X, Y) for k in self.terms))

    def prepare(self, landmarks: Array) -> Prepared:
        """Prepare every term."""
        prepared = [k.prepare(landmarks) for k in self.terms]
        return lambda Z: _accumulate(np.add, (p(Z) for p in prepared))

    def resolve(self, X: Array) -> Kernel:
        """Resolve every term."""
        return replace(self, terms=tuple(k.resolve(X) for k in self.terms))

    def diagonal(self, X: Array) -> Array:
        """Return the sum of the terms' diagonals."""
        return _accumulate(np.add, (k.diagonal(X) for k in self.terms))

    def __repr__(self) -> str:
        return " + ".join(repr(k) for k in self.terms)


@dataclass(frozen=True)
class Product(Kernel):
    """The pointwise product of kernels; ``k1 * k2`` makes one."""

    factors: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        _require_kernels(self, self.factors)

    @property
    def blocks(self) -> int:
        """The product so far, beside what the next factor takes."""
        return 1 + max(k.blocks for k in self.factors)

    @property
    def copies(self) -> int:
        """Those of all factors."""
        return sum(k.copies for k in self.factors)

    @classmethod
    def of(cls, *kernels: Kernel) -> Product:
        """Return the flat product."""
        return cls(tuple(f for k in kernels for f in (k.factors if isinstance(k, Product) else (k,))))

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return _accumulate(np.multiply, (k.block(X, Y) for k in self.factors))

    def prepare(self, landmarks: Array) -> Prepared:
        """Prepare every factor."""
        prepared = [k.prepare(landmarks) for k in self.factors]
        return lambda Z: _accumulate(np.multiply, (p(Z) for p in prepared))

    def resolve(self, X: Array) -> Kernel:
        """Resolve every factor."""
        return replace(self, factors=tuple(k.resolve(X) for k in self.factors))

    def diagonal(self, X: Array) -> Array:
        """Return the product of the factors' diagonals."""
        return _accumulate(np.multiply, (k.diagonal(X) for k in self.factors))

    def __repr__(self) -> str:
        return " * ".join(_bracketed(k, Sum, Scaled) for k in self.factors)


@dataclass(frozen=True)
class Scaled(Kernel):
    """A non-negative multiple of a kernel; ``0.5 * k`` makes one."""

    weight: float
    kernel: Kernel

    def __post_init__(self) -> None:
        _require_weight(self, "weight")
        _require_kernels(self, (self.kernel,))

    @property
    def blocks(self) -> int:
        """Those of the kernel that is scaled."""
        return self.kernel.blocks

    @property
    def copies(self) -> int:
        """Those of the kernel that is scaled."""
        return self.kernel.copies

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return self._scale(self.kernel.block(X, Y))

    def prepare(self, landmarks: Array) -> Prepared:
        """Prepare the kernel that is scaled."""
        prepared = self.kernel.prepare(landmarks)
        return lambda Z: self._scale(prepared(Z))

    def resolve(self, X: Array) -> Kernel:
        """Resolve the kernel that is scaled."""
        return replace(self, kernel=self.kernel.resolve(X))

    def diagonal(self, X: Array) -> Array:
        """Return the scaled diagonal."""
        return self._scale(self.kernel.diagonal(X))

    def _scale(self, values: Array) -> Array:
        values *= self.weight
        return values

    def __repr__(self) -> str:
        return f"{self.weight!r} * {_bracketed(self.kernel, Sum, Product, Scaled)}"


@dataclass(frozen=True)
class Power(Kernel):
    """A positive integer power of a kernel; ``k ** 3`` makes one."""

    kernel: Kernel
    exponent: int

    def __post_init__(self) -> None:
        _require_kernels(self, (self.kernel,))
        require_exponent(self, "exponent")

    @property
    def blocks(self) -> int:
        """A power is taken by squaring, beside what it is taken of."""
        return max(2, self.kernel.blocks)

    @property
    def copies(self) -> int:
        """Those of the base."""
        return self.kernel.copies

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return integer_power(self.kernel.block(X, Y), self.exponent)

    def prepare(self, landmarks: Array) -> Prepared:
        """Prepare the base."""
        prepared = self.kernel.prepare(landmarks)
        return lambda Z: integer_power(prepared(Z), self.exponent)

    def resolve(self, X: Array) -> Kernel:
        """Resolve the base."""
        return replace(self, kernel=self.kernel.resolve(X))

    def diagonal(self, X: Array) -> Array:
        """Return the power of the diagonal."""
        return integer_power(self.kernel.diagonal(X), self.exponent)

    def __repr__(self) -> str:
        return f"{_bracketed(self.kernel, Sum, Product, Scaled, Power)} ** {self.exponent}"


@dataclass(frozen=True)
class Function(Kernel):
    """A kernel of your own: ``f(X, Y)`` returns the whole block.

    Parameters
    ----------
    function : callable
        From rows X (n, d) and Y (m, d), float64, read-only, to the block (n, m). It must be a pure function.

    Notes
    -----
    A model with such a kernel cannot be saved, and so not be used by `batch_score`, only by `transform`: dkfm never
    writes code into a store, nor runs code from one.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm.kernels import Function
    >>> Function(lambda X, Y: np.minimum(X, Y.T))([[1.0], [2.0]], [[3.0], [1.0]])
    array([[1., 1.],
           [2., 1.]])
    """

    function: Callable[[Array, Array], object]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise KernelError(f"Function needs a callable f(X, Y), and got {self.function!r}.")

    @property
    def blocks(self) -> int:
        """What the function returned, a temporary of its own, and the copy."""
        return 3

    def block(self, X: Array, Y: Array) -> Array:
        """Return f(X, Y), checked for shape, dtype and symmetry and copied: the function may keep what it returned."""
        values = np.asarray(self.function(_read_only(X), _read_only(Y)))
        if values.shape != (len(X), len(Y)):
            raise KernelError(
                f"{self!r} must return a block of shape {(len(X), len(Y))} for {len(X)} and {len(Y)} rows, "
                f"and returned shape {values.shape}."
            )
        if values.dtype.kind not in "biuf":
            raise KernelError(f"{self!r} must return real numbers, and returned dtype {values.dtype}.")
        if X is Y:
            self._require_symmetric(values)
        return np.array(values, dtype=np.float64)

    def _require_symmetric(self, values: np.ndarray) -> None:
        for rows in row_slices(len(values), 256):
            gap = np.abs(values[rows] - values[:, rows].T)
            if gap.max() > 1e-8 * np.abs(values[rows]).max():
                i, j = np.unravel_index(int(gap.argmax()), gap.shape)
                raise KernelError(f"{self!r} is not symmetric in rows {rows.start + i} and {j}, which every kernel is.")

    def __repr__(self) -> str:
        return f"Function({getattr(self.function, '__qualname__', repr(self.function))})"


def _accumulate(operation: np.ufunc, parts: Iterator[Array]) -> Array:
    """Fold the parts into the first one as they are made, so that two of them are alive at a time."""
    total = next(parts)
    for part in parts:
        operation(total, part, out=total)
    return total


def _read_only(rows: Array) -> Array:
    """Return a view that a function cannot change: the rows are the user's, and every tile's."""
    view = rows.view()
    view.flags.writeable = False
    return view


def _bracketed(kernel: Kernel, *looser: type[Kernel]) -> str:
    return f"({kernel!r})" if isinstance(kernel, looser) else repr(kernel)
