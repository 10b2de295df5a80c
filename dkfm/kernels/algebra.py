"""Kernels composed of other kernels: constants, sums, products and multiples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, Rows, as_float64
from dkfm.kernels.base import Definiteness, Kernel, PreparedKernel, register_operator_class
from dkfm.kernels.pairwise.block_operations import (
    Evaluator,
    are_products_in_float32_range,
    make_float64_evaluator,
    make_mixed_precision_evaluator,
)
from dkfm.kernels.pairwise.distance_effects import FLOAT32_LIMIT
from dkfm.kernels.pairwise.radial_forms import RadialForm, combine_radial_forms
from dkfm.kernels.parameters import coerce_to_non_negative_float, require_kernels


class TwoPrecisionKernel(PreparedKernel):
    """Base class of composed kernels that may compute some float32 rows in float64."""

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare landmarks in their precision, or float32 landmarks in both precisions."""
        if landmarks.dtype == np.float32:
            return self._prepare_float32_rows(landmarks)
        return self._prepare_in_one_precision(landmarks)

    @abstractmethod
    def _prepare_in_one_precision(self, landmarks: Rows) -> Evaluator:
        """Prepare landmarks in their precision."""

    def _prepare_float32_rows(self, landmarks: Rows) -> Evaluator:
        """Prepare float32 landmarks; overridden where some rows need float64."""
        return self._prepare_in_one_precision(landmarks)


class Wrapper(PreparedKernel):
    """Base class of kernels made of one inner kernel; they have its properties unless they override them."""

    kernel: Kernel
    may_need_float64: ClassVar[bool] = False
    """Whether some float32 rows may be computed in float64; for the memory budget."""

    def __post_init__(self) -> None:
        require_kernels(self, (self.kernel,))

    @property
    def definiteness(self) -> Definiteness:
        """Definiteness of the inner kernel."""
        return self.kernel.definiteness

    @property
    def supports_float32(self) -> bool:
        """True, because `make_evaluator` of the inner kernel accepts and returns float32 in any case."""
        return True

    @property
    def supports_out(self) -> bool:
        """Whether the inner kernel can write its block into `out`."""
        return self.kernel.supports_out

    @property
    def supports_sparse(self) -> bool:
        """Whether the inner kernel takes sparse rows."""
        return self.kernel.supports_sparse

    @property
    def translation_invariant(self) -> bool:
        """Whether the inner kernel is translation invariant."""
        return self.kernel.translation_invariant

    @property
    def peak_blocks(self) -> int:
        """Number of blocks that the inner kernel needs."""
        return self.kernel.peak_blocks

    @property
    def landmark_copies(self) -> int:
        """Number of copies that the inner kernel keeps."""
        return self.kernel.landmark_copies

    def resolve(self, X: Rows) -> Kernel:
        """Resolve the inner kernel."""
        return replace(self, kernel=self.kernel.resolve(X))  # type: ignore[type-var]  # every subclass is a dataclass


class ElementwiseKernel(TwoPrecisionKernel, Wrapper):
    """Base class of kernels that are an elementwise function of another kernel's values, computed in place."""

    @abstractmethod
    def _map_values(self, values: Array) -> Array:
        """Return the function of kernel values; it may overwrite them."""

    def _prepare_in_one_precision(self, landmarks: Rows) -> Evaluator:
        prepared = self.kernel.make_evaluator(landmarks)
        return lambda Z, out=None, /: self._map_values(prepared(Z, out))

    def radial_form(self, d: int) -> RadialForm | None:
        """Return the function of the inner kernel's radial form; None if the inner kernel has none."""
        inner = self.kernel.get_valid_radial_form(d)
        if inner is None:
            return None
        return replace(
            inner,
            map_values=lambda values: self._map_values(inner.map_values(values)),
            supports_float32=inner.supports_float32 and self._keeps_float32(),
        )

    def diagonal(self, X: Rows) -> Array:
        """Return the function of the inner kernel's diagonal."""
        return self._map_values(self.kernel.evaluate_diagonal(X))


def parenthesize(kernel: Kernel, *looser: type[Kernel]) -> str:
    """Return the repr of a kernel, in parentheses if its class is one of `looser`, which bind less tightly."""
    return f"({kernel!r})" if isinstance(kernel, looser) else repr(kernel)


def needs_float64_block(kernel: Kernel) -> bool:
    """Return whether a block of float32 rows is rounded from a float64 block; for the memory budget."""
    if isinstance(kernel, Sum):
        return any(map(needs_float64_block, kernel.parts))
    if isinstance(kernel, Product) or not kernel.supports_float32:
        return True
    return isinstance(kernel, Wrapper) and (kernel.may_need_float64 or needs_float64_block(kernel.kernel))


_LEAST_SHARE = 1 / 4
"""Smallest share of the float32 error limit that inner products must leave for functions of the distance.

With a smaller share, these would compute many pairs in float64. Inner products of rows of equal numbers have larger
errors.
"""

_PART_SECONDS = 4e-9
"""Approximate seconds of one thread for a value of each part of a sum or product after the first."""

_NEGATIVE_REASON = ": a negative multiple of a kernel is not positive semi-definite"


@register_operator_class
@dataclass(frozen=True)
class Constant(Kernel):
    """The constant kernel, ``k(x, y) = value >= 0``, as made by ``k + 1.0``.

    Positive semi-definite. Takes sparse rows.

    Examples
    --------
    >>> from dkfm.kernels import Linear
    >>> (Linear() + 1.0)([[2.0]], [[3.0]])
    array([[7.]])
    """

    value: float = 1.0
    supports_float32 = supports_sparse = translation_invariant = True
    float32_error_share = float(np.finfo(np.float32).eps)

    def __post_init__(self) -> None:
        coerce_to_non_negative_float(self, "value", _NEGATIVE_REASON)

    def block(self, X: Rows, Y: Rows) -> Array:
        """Return k(X, Y)."""
        return np.full((X.shape[0], Y.shape[0]), self.value, X.dtype)

    def diagonal(self, X: Rows) -> Array:
        """Return the constant for each row."""
        return np.full(X.shape[0], self.value)


class _Reduction(TwoPrecisionKernel):
    """Base class of kernels combined by one elementwise operation; nested combinations are flattened to one level."""

    _operation: ClassVar[np.ufunc]

    @property
    def parts(self) -> tuple[Kernel, ...]:
        """The combined kernels; they are the only field of a subclass."""
        (parts,) = vars(self).values()
        return parts  # type: ignore[no-any-return]  # __post_init__ checks it

    def __post_init__(self) -> None:
        require_kernels(self, self.parts, 2)
        flat = tuple(part for k in self.parts for part in (k.parts if isinstance(k, type(self)) else (k,)))
        (field,) = vars(self)
        object.__setattr__(self, field, flat)

    @property
    def supports_out(self) -> bool:
        """Whether the first part can write its block into `out`, in which the other blocks are then accumulated."""
        return self.parts[0].supports_out

    @property
    def supports_sparse(self) -> bool:
        """Whether all parts take sparse rows."""
        return all(k.supports_sparse for k in self.parts)

    @property
    def translation_invariant(self) -> bool:
        """Whether all parts are translation invariant."""
        return all(k.translation_invariant for k in self.parts)

    @property
    def peak_blocks(self) -> int:
        """Number of blocks: the accumulated block, and those that the largest part needs."""
        return 1 + max(k.peak_blocks for k in self.parts)

    @property
    def landmark_copies(self) -> int:
        """Number of copies that all parts keep together."""
        return sum(k.landmark_copies for k in self.parts)

    def radial_form(self, d: int) -> RadialForm | None:
        """Combine the radial forms of the parts, if all have one."""
        forms = [k.get_valid_radial_form(d) for k in self.parts]
        return None if None in forms else combine_radial_forms(self._operation, [form for form in forms if form])

    def _prepare_in_one_precision(self, landmarks: Rows) -> Evaluator:
        """Prepare each part; functions of the distance come first, and share the computation of the distances."""
        forms, others = self._split_radial_parts(landmarks)
        form = combine_radial_forms(self._operation, list(forms.values())) if forms else None
        return self._prepare_parts(landmarks, form, others)

    def _prepare_parts(self, landmarks: Rows, form: RadialForm | None, others: list[Kernel]) -> Evaluator:
        """Prepare the common radial form of some parts, which is evaluated first, and the other parts."""
        evaluators = [k.make_evaluator(landmarks) for k in others]
        if form is not None:
            evaluators.insert(0, form.prepare(landmarks))
        first, *rest = evaluators
        return lambda Z, out=None, /: self._reduce(chain([first(Z, out)], (p(Z) for p in rest)))

    def _split_radial_parts(self, rows: Rows, least: int = 2) -> tuple[dict[int, RadialForm], list[Kernel]]:
        """Return the radial forms of the parts that can share distances, by part number, and the other parts.

        Fewer than `least` such parts share nothing, and count as other parts.
        """
        found = {number: k.get_valid_radial_form(rows.shape[1]) for number, k in enumerate(self.parts)}
        forms = {
            number: form
            for number, form in found.items()
            if form is not None and (rows.dtype == np.float64 or form.supports_float32)
        }
        if len(forms) < least:
            return {}, list(self.parts)
        return forms, [k for number, k in enumerate(self.parts) if number not in forms]

    def estimate_extra_value_seconds(self, d: int) -> float:
        """Estimate the seconds of all parts, and of the passes over the values of all but the first."""
        return super().estimate_extra_value_seconds(d) + _PART_SECONDS * (len(self.parts) - 1)

    def resolve(self, X: Rows) -> Kernel:
        """Resolve each part."""
        return type(self)(tuple(k.resolve(X) for k in self.parts))  # type: ignore[call-arg]  # the only field

    def diagonal(self, X: Rows) -> Array:
        """Combine the diagonals of the parts, in the order of the block."""
        forms, others = self._split_radial_parts(X)
        return self._reduce(k.evaluate_diagonal(X) for k in [*(self.parts[number] for number in forms), *others])

    def _reduce(self, values: Iterator[Array]) -> Array:
        """Accumulate arrays in the first one as the iterator yields them, so that only two exist at a time."""
        total = next(values)
        for value in values:
            self._operation(total, value, out=total)
            del value  # free it before the iterator computes the next one
        return total


@register_operator_class
@dataclass(frozen=True)
class Sum(_Reduction):
    """The sum of kernels, as made by ``k1 + k2``; its definiteness is the weakest of those of the terms."""

    terms: tuple[Kernel, ...]
    _operation: ClassVar[np.ufunc] = np.add

    @property
    def definiteness(self) -> Definiteness:
        """The weakest definiteness of the terms."""
        return Definiteness.weakest(*(k.definiteness for k in self.terms))

    @property
    def supports_float32(self) -> bool:
        """Whether all terms are positive semi-definite, so that no cancellation magnifies float32 rounding."""
        return self.definiteness is Definiteness.PSD

    @property
    def float32_error_share(self) -> float:
        """The largest error share of a term, if all terms are positive semi-definite."""
        return max(k.float32_error_share for k in self.terms) if self.supports_float32 else float("inf")

    def __repr__(self) -> str:
        return " + ".join(repr(k) for k in self.terms)


@register_operator_class
@dataclass(frozen=True)
class Product(_Reduction):
    """The elementwise product of kernels, as made by ``k1 * k2``; positive semi-definite if all factors are."""

    factors: tuple[Kernel, ...]
    _operation: ClassVar[np.ufunc] = np.multiply

    @property
    def definiteness(self) -> Definiteness:
        """Positive semi-definite if all factors are, else indefinite."""
        psd = all(k.definiteness is Definiteness.PSD for k in self.factors)
        return Definiteness.PSD if psd else Definiteness.INDEFINITE

    @property
    def supports_float32(self) -> bool:
        """Whether all factors are positive semi-definite: float32 rows are computed in float64 where they need it."""
        return self.definiteness is Definiteness.PSD

    @property
    def float32_error_share(self) -> float:
        """The sum of the error shares of the factors, if all are positive semi-definite."""
        return sum(k.float32_error_share for k in self.factors) if self.supports_float32 else float("inf")

    def _prepare_float32_rows(self, landmarks: Rows) -> Evaluator:
        """Prepare the factors in float32, or in float64 if their combined errors or sizes may be too large.

        Functions of the distance get what the errors of inner products leave of the error limit. The less that is, the
        more pairs they compute in float64.
        """
        forms, others = self._split_radial_parts(landmarks, least=1)
        left = 1 - 2 * sum(k.float32_error_share for k in others) / FLOAT32_LIMIT
        if left < _LEAST_SHARE or not self._are_products_in_float32_range(landmarks).all():
            in_float64 = self._prepare_in_one_precision(as_float64(landmarks))
            return make_float64_evaluator(in_float64, landmarks.shape[0], in_parts=False)
        form: RadialForm | None = None
        if forms:
            form = combine_radial_forms(np.multiply, list(forms.values())).limit_error_share(left)
        return make_mixed_precision_evaluator(
            self._prepare_parts(landmarks, form, others),
            lambda: self._prepare_in_one_precision(as_float64(landmarks)),
            self._are_products_in_float32_range,
            landmarks.shape[0],
        )

    def _are_products_in_float32_range(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return for each row, (n,), whether float32 holds the products of the factors' k(x, x)."""
        wide = as_float64(rows)
        return are_products_in_float32_range(*(k.evaluate_diagonal(wide) for k in self.factors))

    def diagonal(self, X: Rows) -> Array:
        """Multiply the diagonals of the factors in float64."""
        return super().diagonal(as_float64(X))

    def __repr__(self) -> str:
        return " * ".join(parenthesize(k, Sum, Scaled) for k in self.factors)


@register_operator_class
@dataclass(frozen=True)
class Scaled(ElementwiseKernel):  # numpydoc ignore=PR02
    """A non-negative multiple of a kernel, as made by ``0.5 * k``; its definiteness is that of the kernel.

    Parameters
    ----------
    weight : float
        Factor of the kernel's values, not negative.
    kernel : Kernel
        The kernel.
    """

    weight: float
    kernel: Kernel

    def __post_init__(self) -> None:
        coerce_to_non_negative_float(self, "weight", _NEGATIVE_REASON)
        super().__post_init__()

    @property
    def float32_error_share(self) -> float:
        """The error share of the inner kernel."""
        return self.kernel.float32_error_share

    def _map_values(self, values: Array) -> Array:
        values *= self.weight
        return values

    def __repr__(self) -> str:
        return f"{self.weight!r} * {parenthesize(self.kernel, Sum, Product, Scaled)}"
