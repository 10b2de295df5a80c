"""Define a Cholesky factor of the scaled Gram matrix of pivots that grows by blocks of pivots.

Candidates for the next pivots are factored together, the largest residual first, in the orthogonal complement of the
earlier pivots. A pivot is accepted if its residual, computed as ``1 - |f|^2`` from all its features f, exceeds a
threshold. Subtracting step by step would accumulate rounding errors, which could be mistaken for a pivot.
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
    pivot_values: Array
    """Residual of each pivot when it was chosen, relative to its k(x, x). Shape (r,)."""

    @classmethod
    def empty(cls) -> "GrowingFactor":
        """Return the factor of no pivots."""
        return cls(np.zeros((0, 0)), np.zeros(0))

    def compute_features(self, scaled: Array) -> Array:
        """Return the features (n, r) of rows from their scaled kernel values (n, r) with the pivots."""
        if not len(self.pivot_values):
            return scaled
        features: Array = solve_triangular(self.lower, scaled.T, lower=True, check_finite=False).T
        return features

    def extend_by_largest(
        self, among: Array, with_pivots: Array, diagonal: Array, threshold: float, limit: int
    ) -> tuple["GrowingFactor", Indices]:
        """Choose pivots among candidates, the largest residual first; return the extended factor and their numbers.

        Parameters
        ----------
        among : ndarray of shape (c, c)
            Scaled kernel values of the candidates; overwritten.
        with_pivots : ndarray of shape (c, r)
            Scaled kernel values of the candidates with the pivots.
        diagonal : ndarray of shape (c,)
            Scaled k(x, x) of the candidates: 1, or 0 for a zero vector.
        threshold : float
            Residual that a pivot must exceed.
        limit : int
            Largest number of new pivots.
        """
        features, schur = self._compute_schur_complement(among, with_pivots, diagonal)
        residuals = schur.diagonal().copy()
        factor, order, rank, _ = lapack.dpstrf(schur, tol=threshold, lower=1, overwrite_a=1)
        chosen, rank = order.astype(np.intp) - 1, min(rank, limit)
        corner = np.tril(factor[:rank, :rank])
        values = residuals[chosen[:rank]] - (np.square(corner).sum(axis=1) - np.square(corner.diagonal()))
        rank = int(np.append(values <= threshold, True).argmax())
        return self._append(features[chosen[:rank]], corner[:rank, :rank], values[:rank]), chosen[:rank]

    def extend_by_rejection(
        self,
        among: Array,
        with_pivots: Array,
        diagonal: Array,
        threshold: float,
        limit: int,
        proposed: Array,
        uniform: Array,
    ) -> tuple["GrowingFactor", Indices]:
        """Choose pivots among proposals, in their order, by rejection; return the extended factor and their numbers.

        The proposals were drawn in proportion to the residuals of all rows; `proposed` (c,) are those of the proposals.
        Each proposal is accepted with a probability equal to its current residual divided by the proposed one, by a
        comparison with `uniform` (c,) in [0, 1). The pivots then have the same distribution as if each had been drawn
        after the earlier ones. The other parameters are those of `extend_by_largest`.
        """
        features, schur = self._compute_schur_complement(among, with_pivots, diagonal)
        columns: Array = np.zeros((len(schur), min(limit, len(schur))))
        values: list[float] = []
        chosen: list[int] = []
        for number in range(len(schur)):
            done = columns[number, : len(chosen)]
            value = float(schur[number, number] - done @ done)
            if value <= max(threshold, uniform[number] * proposed[number]) or number in chosen:
                continue
            column = (schur[:, number] - columns[:, : len(chosen)] @ done) / np.sqrt(value)
            column[chosen] = 0.0  # earlier pivots have residual 0 in exact arithmetic
            column[number] = np.sqrt(value)
            columns[:, len(chosen)] = column
            chosen.append(number)
            values.append(value)
            if len(chosen) == limit:
                break
        numbers = np.array(chosen, np.intp)
        return self._append(features[numbers], columns[numbers, : len(chosen)], np.array(values)), numbers

    def _compute_schur_complement(self, among: Array, with_pivots: Array, diagonal: Array) -> tuple[Array, Array]:
        """Return the features (c, r) of candidates, and the Schur complement (c, c) of their scaled Gram matrix."""
        features = self.compute_features(with_pivots)
        schur = np.asfortranarray(among)
        schur -= features @ features.T
        schur[np.diag_indices(len(schur))] = diagonal - np.einsum("ij,ij->i", features, features)
        return features, schur

    def _append(self, features: Array, corner: Array, values: Array) -> "GrowingFactor":
        """Return the factor extended by k rows: features (k, r) and a lower triangular corner (k, k)."""
        old, new = len(self.pivot_values), len(values)
        lower = np.zeros((old + new, old + new))
        lower[:old, :old], lower[old:, :old], lower[old:, old:] = self.lower, features, corner
        return GrowingFactor(lower, np.append(self.pivot_values, values))

    def compute_inverse_transpose_columns(self, first: int) -> Array:
        """Return the columns of ``L^-T`` from `first` on, (r, r - first); scaled values times ``L^-T`` are features."""
        unit = np.zeros((len(self.pivot_values), len(self.pivot_values) - first))
        unit[first:] = np.eye(len(self.pivot_values) - first)
        columns: Array = solve_triangular(self.lower, unit, lower=True, trans="T", check_finite=False)
        return columns
