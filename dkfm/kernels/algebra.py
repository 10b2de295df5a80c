"""What kernels made of one other kernel share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Self

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.kernels.base import Definiteness, Kernel, PreparedKernel, register_combination
from dkfm.kernels.dot_product import integer_power
from dkfm.kernels.pairwise.blocks import Evaluator, map_rows
from dkfm.kernels.parameters import require_exponent, require_kernels, require_non_negative


class Wrapper(PreparedKernel):
    """A kernel made of another, a field of every subclass; it is what that one is, unless it says otherwise."""

    kernel: Kernel

    def __post_init__(self) -> None:
        require_kernels(self, (self.kernel,))

    @property
    def definiteness(self) -> Definiteness:
        """That of the kernel."""
        return self.kernel.definiteness

    @property
    def supports_float32(self) -> bool:
        """Whatever the kernel does with float32 rows, it gives float32 values for them."""
        return True

    @property
    def supports_out(self) -> bool:
        """Where the kernel does."""
        return self.kernel.supports_out

    @property
    def supports_sparse(self) -> bool:
        """Where the kernel does."""
        return self.kernel.supports_sparse

    @property
    def translation_invariant(self) -> bool:
        """Where the kernel is."""
        return self.kernel.translation_invariant

    @property
    def peak_blocks(self) -> int:
        """Those of the kernel."""
        return self.kernel.peak_blocks

    @property
    def landmark_copies(self) -> int:
        """Those of the kernel."""
        return self.kernel.landmark_copies


class Pointwise(Wrapper):
    """A function of the values of a kernel, done in place."""

    @abstractmethod
    def _profile(self, values: Array) -> Array:
        """Return the function of values, which it may overwrite."""

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare the kernel."""
        prepared = self.kernel.make_evaluator(landmarks)
        return lambda Z, out=None, /: self._profile(prepared(Z, out))

    def resolve(self, X: Rows) -> Kernel:
        """Resolve the kernel."""
        return replace(self, kernel=self.kernel.resolve(X))  # type: ignore[type-var]  # every subclass is a dataclass

    def diagonal(self, X: Rows) -> Array:
        """Return the function of the diagonal."""
        return self._profile(self.kernel.evaluate_diagonal(X))


def parenthesize(kernel: Kernel, *looser: type[Kernel]) -> str:
    """Return the repr of a kernel, in brackets where it is of a class that binds less tightly."""
    return f"({kernel!r})" if isinstance(kernel, looser) else repr(kernel)


def computes_in_float64(kernel: Kernel) -> bool:
    """Whether some block of float32 rows is computed in float64 and rounded; for the memory budget."""
    if isinstance(kernel, _Folded):
        return any(map(computes_in_float64, kernel.parts))
    return not kernel.supports_float32 or (isinstance(kernel, Wrapper) and computes_in_float64(kernel.kernel))


_NEGATIVE = ": a negative multiple of a kernel is not positive semi-definite"


@register_combination
@dataclass(frozen=True)
class Constant(Kernel):
    """The constant kernel, ``k(x, y) = value >= 0``; ``k + 1.0`` makes one.

    Positive semi-definite. Takes sparse rows.

    Examples
    --------
    >>> from dkfm.kernels import Linear
    >>> (Linear() + 1.0)([[2.0]], [[3.0]])
    array([[7.]])
    """

    value: float = 1.0
    supports_float32 = supports_sparse = translation_invariant = True

    def __post_init__(self) -> None:
        require_non_negative(self, "value", _NEGATIVE)

    def block(self, X: Rows, Y: Rows) -> Array:
        """Return k(X, Y)."""
        return np.full((X.shape[0], Y.shape[0]), self.value, X.dtype)

    def diagonal(self, X: Rows) -> Array:
        """Return the constant."""
        return np.full(X.shape[0], self.value)


class _Folded(PreparedKernel):
    """Kernels under one pointwise operation; flat: a sum of sums is one sum."""

    operation: ClassVar[np.ufunc]

    @property
    def parts(self) -> tuple[Kernel, ...]:
        """The kernels: the only field of a subclass."""
        (parts,) = vars(self).values()
        return parts  # type: ignore[no-any-return]  # checked when it was made

    def __post_init__(self) -> None:
        require_kernels(self, self.parts, 2)
        flat = tuple(part for k in self.parts for part in (k.parts if isinstance(k, type(self)) else (k,)))
        (field,) = vars(self)
        object.__setattr__(self, field, flat)

    @classmethod
    def of(cls, *kernels: Kernel) -> Self:
        """Return the kernel of some, flat themselves or not."""
        return cls(kernels)  # type: ignore[call-arg]  # the only field

    @property
    def supports_out(self) -> bool:
        """Where the first part does, into which the others are folded."""
        return self.parts[0].supports_out

    @property
    def supports_sparse(self) -> bool:
        """Where all parts do."""
        return all(k.supports_sparse for k in self.parts)

    @property
    def translation_invariant(self) -> bool:
        """Where all parts are."""
        return all(k.translation_invariant for k in self.parts)

    @property
    def peak_blocks(self) -> int:
        """What is folded so far, beside what the next part takes."""
        return 1 + max(k.peak_blocks for k in self.parts)

    @property
    def landmark_copies(self) -> int:
        """Those of all parts."""
        return sum(k.landmark_copies for k in self.parts)

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare every part."""
        first, *others = [k.make_evaluator(landmarks) for k in self.parts]
        return lambda Z, out=None, /: self._fold(chain([first(Z, out)], (p(Z) for p in others)))

    def resolve(self, X: Rows) -> Kernel:
        """Resolve every part."""
        return type(self).of(*(k.resolve(X) for k in self.parts))

    def diagonal(self, X: Rows) -> Array:
        """Fold the diagonals of the parts."""
        return self._fold(k.evaluate_diagonal(X) for k in self.parts)

    def _fold(self, values: Iterator[Array]) -> Array:
        """Fold values into the first as they are made, so that two of them are alive at a time."""
        total = next(values)
        for value in values:
            self.operation(total, value, out=total)
            del value  # before the next one is made
        return total


@register_combination
@dataclass(frozen=True)
class Sum(_Folded):
    """The sum of kernels; ``k1 + k2`` makes one. As definite as the least definite of them."""

    terms: tuple[Kernel, ...]
    operation: ClassVar[np.ufunc] = np.add

    @property
    def definiteness(self) -> Definiteness:
        """The weakest of the terms'."""
        return Definiteness.weakest(*(k.definiteness for k in self.terms))

    @property
    def supports_float32(self) -> bool:
        """Where no term takes from another, so that errors stay small beside the sum."""
        return self.definiteness is Definiteness.PSD

    def __repr__(self) -> str:
        return " + ".join(repr(k) for k in self.terms)


@register_combination
@dataclass(frozen=True)
class Product(_Folded):
    """The pointwise product of kernels; ``k1 * k2`` makes one. Positive semi-definite where all factors are."""

    factors: tuple[Kernel, ...]
    operation: ClassVar[np.ufunc] = np.multiply

    @property
    def definiteness(self) -> Definiteness:
        """Nothing, unless all factors are positive semi-definite."""
        psd = all(k.definiteness is Definiteness.PSD for k in self.factors)
        return Definiteness.PSD if psd else Definiteness.INDEFINITE

    def __repr__(self) -> str:
        return " * ".join(parenthesize(k, Sum, Scaled) for k in self.factors)


@register_combination
@dataclass(frozen=True)
class Scaled(Pointwise):
    """A non-negative multiple of a kernel; ``0.5 * k`` makes one. As definite as the kernel."""

    weight: float
    kernel: Kernel

    def __post_init__(self) -> None:
        require_non_negative(self, "weight", _NEGATIVE)
        super().__post_init__()

    def _profile(self, values: Array) -> Array:
        values *= self.weight
        return values

    def __repr__(self) -> str:
        return f"{self.weight!r} * {parenthesize(self.kernel, Sum, Product, Scaled)}"


@register_combination
@dataclass(frozen=True)
class Power(Pointwise):
    """A positive integer power of a kernel; ``k ** 3`` makes one. Positive semi-definite where the kernel is."""

    kernel: Kernel
    exponent: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_exponent(self, "exponent")

    @property
    def definiteness(self) -> Definiteness:
        """Nothing, unless the kernel is positive semi-definite or the power is its first."""
        return self.kernel.definiteness if self.exponent == 1 else self.kernel.definiteness.of_function()

    @property
    def supports_float32(self) -> bool:
        """No: a power multiplies the error of its base."""
        return False

    def _profile(self, values: Array) -> Array:
        return map_rows(values, lambda part: integer_power(part, self.exponent))

    def __repr__(self) -> str:
        return f"{parenthesize(self.kernel, Sum, Product, Scaled, Power)} ** {self.exponent}"
