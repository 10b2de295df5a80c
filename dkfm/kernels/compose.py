"""Kernels made of kernels: sums, products, powers, non-negative multiples.

Sums and products are flat: ``a + b + c`` is one Sum of three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel, Prepared, require_number
from dkfm.kernels.dot import integer_power, require_exponent
from dkfm.kernels.rows import Array

__all__ = ["Constant", "Power", "Product", "Scaled", "Sum"]


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


class _Folded(Kernel):
    """Kernels under one pointwise operation; flat: a sum of sums is one sum."""

    operation: ClassVar[np.ufunc]

    @property
    def parts(self) -> tuple[Kernel, ...]:
        """The kernels: the only field of a subclass."""
        (parts,) = vars(self).values()
        return parts  # type: ignore[no-any-return]  # checked when it was made

    def __post_init__(self) -> None:
        _require_kernels(self, self.parts)

    @classmethod
    def of(cls, *kernels: Kernel) -> Self:
        """Return the flat kernel of some, flat themselves or not."""
        return cls(tuple(part for k in kernels for part in (k.parts if isinstance(k, cls) else (k,))))  # type: ignore[call-arg]  # the only field

    @property
    def blocks(self) -> int:
        """What is folded so far, beside what the next part takes."""
        return 1 + max(k.blocks for k in self.parts)

    @property
    def copies(self) -> int:
        """Those of all parts."""
        return sum(k.copies for k in self.parts)

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return self._fold(k.block(X, Y) for k in self.parts)

    def prepare(self, landmarks: Array) -> Prepared:
        """Prepare every part."""
        prepared = [k.prepare(landmarks) for k in self.parts]
        return lambda Z: self._fold(p(Z) for p in prepared)

    def resolve(self, X: Array) -> Kernel:
        """Resolve every part."""
        return type(self).of(*(k.resolve(X) for k in self.parts))

    def diagonal(self, X: Array) -> Array:
        """Fold the diagonals of the parts."""
        return self._fold(k.diagonal(X) for k in self.parts)

    def _fold(self, values: Iterator[Array]) -> Array:
        """Fold values into the first as they are made, so that two of them are alive at a time."""
        total = next(values)
        for value in values:
            self.operation(total, value, out=total)
        return total


@dataclass(frozen=True)
class Sum(_Folded):
    """The sum of kernels; ``k1 + k2`` makes one."""

    terms: tuple[Kernel, ...]
    operation: ClassVar[np.ufunc] = np.add

    def __repr__(self) -> str:
        return " + ".join(repr(k) for k in self.terms)


@dataclass(frozen=True)
class Product(_Folded):
    """The pointwise product of kernels; ``k1 * k2`` makes one."""

    factors: tuple[Kernel, ...]
    operation: ClassVar[np.ufunc] = np.multiply

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


def _bracketed(kernel: Kernel, *looser: type[Kernel]) -> str:
    return f"({kernel!r})" if isinstance(kernel, looser) else repr(kernel)
