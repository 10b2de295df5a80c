"""Weight the rows of a Gram matrix, and centre their features.

The matrix becomes ``S K S'``, with ``S = D^(1/2) (I - 1 w' / sum w)`` and D the diagonal matrix of the weights w.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import KernelError
from dkfm.kernels.pairwise.block_operations import mirror_lower


@dataclass(frozen=True, eq=False)
class Weighting:
    """Positive weights w (N,) of the training rows, and whether the features are centred."""

    weights: Array
    centered: bool = True

    @cached_property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.weights.sum())

    @property
    def shares(self) -> Array:
        """``w / sum w``, the coefficients of the mean of the training rows."""
        return self.weights / self.total

    @cached_property
    def roots(self) -> Array:
        """Square roots of the weights."""
        return np.sqrt(self.weights)

    def compute_trace_of_mean(self, means: Array) -> float:
        """Return ``sum w |m|^2`` with m the mean of the features; 0 without centring. `means` (N,) are K e."""
        return self.total * abs(float(means @ self.shares)) if self.centered else 0.0

    def apply_weighted_centring_adjoint(self, C: Array) -> Array:
        """Return ``S'C`` (N, p) of C (N, p)."""
        scaled = self.roots[:, np.newaxis] * C
        return scaled - np.outer(self.shares, scaled.sum(axis=0)) if self.centered else scaled

    def apply_weighted_centring(self, P: Array) -> Array:
        """Return ``S P`` (N, p) of P (N, p)."""
        return self.roots[:, np.newaxis] * (P - self.shares @ P if self.centered else P)


def center_and_weigh_gram_in_place(K: Array, weighting: Weighting) -> Array:
    """Replace K by ``S K S'``, in place and from its lower triangle; return the means of the rows of K, (N,)."""
    mirror_lower(K)
    equal = bool((weighting.weights == weighting.weights[0]).all())
    with np.errstate(over="ignore", invalid="ignore"):  # NumPy's sums are more accurate than products
        means: Array = K.mean(axis=0) if equal else K @ weighting.shares
    require_finite_means(means)
    if weighting.centered:
        total = means.mean() if equal else means @ weighting.shares
        for columns in row_slices(len(K), 256):
            K[:, columns] -= means[:, np.newaxis]
            K[:, columns] -= means[columns] - total
    if not equal or weighting.weights[0] != 1:
        for columns in row_slices(len(K), 256):
            K[:, columns] *= np.outer(weighting.roots, weighting.roots[columns])
    return means


def require_finite_means(means: Array) -> None:
    """Raise a KernelError if the means of the rows of a Gram matrix overflow."""
    if not np.isfinite(means).all():
        raise KernelError("The kernel values of the training rows have sums above 1e308; scale the kernel down.")
