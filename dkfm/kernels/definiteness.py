"""What is known of a kernel's Gram matrices before there is one, and what becomes of it when kernels are combined."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Definiteness"]


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
