"""A Cholesky factor of the scaled Gram matrix of pivots that grows by blocks of them.

Candidates for the next pivots are factored together, the largest residual first, in the space that the pivots before
them leave. Pivots are accepted while their residual, computed as ``1 - |f|^2`` from all features f, exceeds a
threshold: subtracting step by step accumulates rounding, which could pass for a pivot.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack, solve_triangular

from dkfm.core.rows import Array

Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class GrowingFactor:
    """Factor ``A = L L'`` of the scaled Gram matrix of r pivots."""

    lower: Array
    """L, lower triangular. Shape (r, r)."""
    values: Array
    """Residual of each pivot when it was chosen, as a share of its k(x, x). Shape (r,)."""

    @classmethod
    def empty(cls) -> "GrowingFactor":
        """Return the factor of no pivots."""
        return cls(np.zeros((0, 0)), np.zeros(0))

    def compute_features(self, scaled: Array) -> Array:
        """Return the features (n, r) of rows from their scaled kernel values (n, r) with the pivots."""
        if not len(self.values):
            return scaled
        features: Array = solve_triangular(self.lower, scaled.T, lower=True, check_finite=False).T
        return features

    def extend(
        self, among: Array, with_pivots: Array, diagonal: Array, threshold: float, limit: int
    ) -> tuple["GrowingFactor", Indices]:
        """Choose pivots among candidates, the largest residual first; return the larger factor, and their numbers.

        Parameters
        ----------
        among : ndarray of shape (c, c)
            Scaled kernel values of the candidates; overwritten.
        with_pivots : ndarray of shape (c, r)
            Scaled kernel values of the candidates with the pivots.
        diagonal : ndarray of shape (c,)
            Scaled k(x, x) of the candidates: 1, or 0 for a zero vector.
        threshold : float
            Residual that a pivot exceeds.
        limit : int
            Largest number of new pivots.
        """
        features = self.compute_features(with_pivots)
        schur = np.asfortranarray(among)
        schur -= features @ features.T
        residuals = diagonal - np.einsum("ij,ij->i", features, features)
        schur[np.diag_indices(len(schur))] = residuals
        factor, order, rank, _ = lapack.dpstrf(schur, tol=threshold, lower=1, overwrite_a=1)
        order, rank = order.astype(np.intp) - 1, min(rank, limit)
        corner = np.tril(factor[:rank, :rank])
        values = residuals[order[:rank]] - (np.square(corner).sum(axis=1) - np.square(corner.diagonal()))
        rank = int(np.append(values <= threshold, True).argmax())
        chosen, old = order[:rank], len(self.values)
        lower = np.zeros((old + rank, old + rank))
        lower[:old, :old] = self.lower
        lower[old:, :old] = features[chosen]
        lower[old:, old:] = corner[:rank, :rank]
        return GrowingFactor(lower, np.append(self.values, values[:rank])), chosen

    def invert_columns(self, first: int) -> Array:
        """Return the columns from `first` on of ``L^-T``, (r, r - first): features are scaled values times ``L^-T``."""
        unit = np.zeros((len(self.values), len(self.values) - first))
        unit[first:] = np.eye(len(self.values) - first)
        columns: Array = solve_triangular(self.lower, unit, lower=True, trans="T", check_finite=False)
        return columns
