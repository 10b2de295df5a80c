"""Decompose a centred Gram matrix for discriminants with any ridge, and separate its eigenvalues from rounding."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.numerics.eigensolvers.dense import eigh_in_place
from dkfm.numerics.roots import EPS, find_psd_cutoff
from dkfm.numerics.supervised.classes import Classes, Indices, within_class_scatter_trace
from dkfm.numerics.supervised.kernel_rank import UNBOUNDED, RankBound
from dkfm.numerics.weighting import Weighting, center_and_weigh_gram_in_place

Mask = npt.NDArray[np.bool_]

MATRIX = "The centred Gram matrix of this kernel"
"""Name of the matrix in messages."""

_CUT = 16.0
"""Eigenvalues up to this factor times their rounding error count as rounding."""

_ONE_SIDED = 4.0
"""Ratio of the largest to the most negative eigenvalue counted as rounding above which some are not rounding."""

_BLOCK_ROWS = 256
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, eq=False)
class SpectralGram:
    """Eigenpairs of a centred Gram matrix above rounding, and coordinates of Y: they give ``R Y`` for any ridge."""

    values: Array
    """Eigenvalues above rounding, ascending; after `include_small_values`, also those that matter with a ridge. Shape
    (r,)."""
    all_vectors: Array
    """Eigenvectors of all N eigenvalues: first ``D^(1/2) 1``, of eigenvalue 0, until `include_small_values`, and those
    of `values` last. Shape (N, N)."""
    coordinates: Array
    """Coordinates of Y in the eigenvectors, ``vectors' Y``. Shape (r, C)."""
    gram_row_means: Array
    """Means of the rows of the Gram matrix. Shape (N,)."""
    noise: Array
    """Rounding error of each of the N eigenvalues. Shape (N,)."""
    omitted_values: Array
    """The other eigenvalues, which are rounding errors or belong to a negative part. Shape (N - r,)."""
    omitted_coordinates: Array
    """Coordinates of Y in their eigenvectors. Shape (N - r, C)."""
    n_hidden: float
    """Largest number of eigenvalues that may be hidden by rounding; 0 if those above it are as many as the kernel can
    have."""
    has_finite_rank: bool
    """Whether the kernel can have fewer eigenvalues than rows."""

    @property
    def vectors(self) -> Array:
        """Eigenvectors of the eigenvalues above rounding, (N, r)."""
        return self.all_vectors[:, len(self.all_vectors) - len(self.values) :]

    def within_class_scatter_trace(self, classes: Classes) -> float:
        """Return ``N tr(S_w)``; raise an error if it is not above rounding."""
        shares = self.coordinates / np.sqrt(classes.class_weight_sums)  # their squares stay in range
        between = (shares**2 * self.values[:, np.newaxis]).sum(axis=0)
        return within_class_scatter_trace(float(self.values.sum()), between)

    def solve_coordinates(self, ridge: float) -> Array:
        """Return the coordinates of ``R Y`` in the eigenvectors, (r, C)."""
        scaled: Array = self.coordinates / (self.values + ridge)[:, np.newaxis]
        return scaled

    def solve_ridge_coefficients(self, ridge: float) -> Array:
        """Return ``R Y`` (N, C), without the part that is orthogonal to the eigenvectors."""
        return self.vectors @ self.solve_coordinates(ridge)

    def indicator_residual_products(self, ridge: float) -> Array:
        """Return ``ridge Y'RY`` (C, C); the ridge may be 0."""
        explained = ridge * (self.coordinates.T @ self.solve_coordinates(ridge))
        residual: Array = explained + self.omitted_coordinates.T @ self.omitted_coordinates
        return residual

    def include_small_values(self, ridge: float) -> "SpectralGram":
        """Return a decomposition that also keeps the eigenvalues whose rounding error is small beside a ridge.

        Dropping a small eigenvalue causes an error of its square root at new rows, which may be far larger than its
        rounding error. None is added if the kernel can have no more. If it has a finite rank, most are rounding errors
        of 0, which change coefficients more than a small eigenvalue does: none is added unless they are one-sided.
        The vectors are reordered in place, so this object must not be used afterwards.
        """
        is_included = self._find_small_noise(ridge) & ~self._is_negative & self._may_be_hidden
        order = np.concatenate([np.flatnonzero(~is_included), np.flatnonzero(is_included)])
        _reorder_columns(self.all_vectors[:, : len(order)], order)
        return SpectralGram(
            np.concatenate([np.maximum(self.omitted_values[is_included], 0.0), self.values]),
            self.all_vectors,
            np.concatenate([self.omitted_coordinates[is_included], self.coordinates]),
            self.gram_row_means,
            np.concatenate([self.noise[order], self.noise[len(order) :]]),
            self.omitted_values[~is_included],
            self.omitted_coordinates[~is_included],
            self.n_hidden,
            self.has_finite_rank,
        )

    def estimate_errors(self, ridge: float, combinations: Array) -> tuple[float, float]:
        """Estimate the errors that rounding causes in directions ``R Y A``; they are 0 without a ridge.

        Let c be the coordinates of ``R Y A``, with `combinations` A (C, q). A rounding error E of the matrix changes c
        by ``R E c``. An eigenvalue that is hidden by rounding is not larger than it, and changes scores as much.

        Returns
        -------
        of_scores : float
            Relative error of the training scores; see `estimate_score_error`.
        of_functions : float
            Relative norm of the change of a function: at most ``|E c| / (2 sqrt(ridge))``, and more if an eigenvalue
            that matters is hidden.
        """
        if ridge == 0:  # eigenvalues hidden by rounding are 0 by definition
            return 0.0, 0.0
        first = len(self.omitted_values)
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow counts as infinite
            values, coordinates, noise = self._divide_by_ridge(ridge, combinations)
            solved, lengths = coordinates / (values + 1), np.sqrt(values)  # lengths of functions of coordinates 1
            if not self.n_hidden:
                mixed, sizes = self._mix_omitted_coordinates(noise, coordinates), np.abs(solved[first:])
                changes = mixed / (values[first:] + 1) + noise[first:] * sizes
                function_changes = changes / lengths[first:]
                lost = ((2 * mixed + noise[first:] * sizes) * sizes).sum(axis=0)
            else:
                errors = noise / 2
                is_small = self._find_small_noise(ridge)[:, np.newaxis]
                errors[:first] = np.where(is_small, errors[:first], lengths[:first])
                noise[:first] = np.maximum(noise, values)[:first]
                errors[:first][self._is_negative], noise[:first][self._is_negative] = 0.0, 0.0
                function_changes, changes = errors * solved, noise * solved
                lost = (changes * solved).sum(axis=0)
            of_functions = _find_largest_share(function_changes, (lengths * solved)[first:])
            solved[:first] = coordinates[:first]  # residuals now: the functions of these coordinates are 0
            return estimate_score_error(coordinates, solved, changes, lost), of_functions

    def _divide_by_ridge(self, ridge: float, combinations: Array) -> tuple[Array, Array, Array]:
        """Return all eigenvalues (N, 1), at least 0, the coordinates of ``Y A`` (N, q), and the noise (N, 1).

        Eigenvalues and noise are divided by the ridge.
        """
        values = np.maximum(np.concatenate([self.omitted_values, self.values]) / ridge, 0.0)
        coordinates = np.concatenate([self.omitted_coordinates, self.coordinates]) @ combinations
        return values[:, np.newaxis], coordinates, (self.noise / ridge)[:, np.newaxis]

    def _mix_omitted_coordinates(self, noise: Array, coordinates: Array) -> Array:
        """Return the coordinates (r, q) that rounding of the eigenvectors above it takes from the omitted ones."""
        first = len(self.omitted_values)
        omitted = np.linalg.norm(np.sqrt(noise[:first]) * coordinates[:first], axis=0)
        mixed: Array = np.sqrt(noise[first:] / len(noise)) * omitted
        return mixed

    @property
    def _is_negative(self) -> Mask:
        """Mask (N - r,) of the dropped eigenvalues that belong to a negative part."""
        negative: Mask = self.omitted_values < -_CUT * self.noise[: len(self.omitted_values)]
        return negative

    @property
    def _may_be_hidden(self) -> Mask:
        """Mask (N - r,) of the dropped eigenvalues that may be rounding errors of others than 0."""
        first = len(self.omitted_values)
        if self.has_finite_rank:
            sizes = self.omitted_values / np.maximum(self.noise[:first], _TINY)
            if sizes.max() <= _ONE_SIDED * -sizes.min():
                return np.zeros(first, bool)
        return np.arange(first) >= first - self.n_hidden

    def _find_small_noise(self, ridge: float) -> Mask:
        """Return a mask (N - r,) of the dropped eigenvalues whose rounding error is small beside a ridge."""
        small: Mask = _CUT * self.noise[: len(self.omitted_values)] <= ridge
        return small


def estimate_score_error(targets: Array, residuals: Array, changes: Array, lost: Array) -> float:
    """Estimate the relative error of the training scores of directions: regressions whose lengths their residuals set.

    Parameters
    ----------
    targets, residuals : ndarray of shape (N, q)
        What the regressions fit, and what they leave; the scores are the difference, divided by
        ``sqrt(theta (1 - theta))`` with theta the share of the residual.
    changes : ndarray of shape (m, q)
        Changes of the differences.
    lost : ndarray of shape (q,)
        Changes of the products of targets and residuals, which are theta but for a factor.
    """
    scores = targets - residuals
    left, explained = (np.maximum((targets * part).sum(axis=0), 0.0) for part in (residuals, scores))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # an overflow counts as infinite
        shares = np.where(lost > 0, lost / left * (1 + left / explained), 0.0)
    return max(_find_largest_share(changes, scores), float(np.nan_to_num(shares, nan=np.inf).max(initial=0.0)))


def _find_largest_share(changes: Array, values: Array) -> float:
    """Return the largest norm of a column of changes (m, q), as a share of that of values (p, q), unless that is 0."""
    norms = np.linalg.norm(values, axis=0)
    shares = np.linalg.norm(changes, axis=0)[norms != 0] / norms[norms != 0]
    return float(np.nan_to_num(shares, nan=np.inf).max(initial=0.0))


def decompose_gram(K: Array, classes: Classes, on_indefinite: str, rank_bound: RankBound = UNBOUNDED) -> SpectralGram:
    """Centre and decompose a Gram matrix, which is overwritten; only the lower triangle is read."""
    weighting = Weighting(classes.weights)
    means = center_and_weigh_gram_in_place(K, weighting)
    Y = classes.sqrt_weighted_centred_indicators()
    return decompose_centred(K, Y, on_indefinite, means, weighting, rank_bound)


def decompose_centred(
    G: Array, Y: Array, on_indefinite: str, means: Array, weighting: Weighting, rank_bound: RankBound = UNBOUNDED
) -> SpectralGram:
    """Decompose a centred Gram matrix, which is overwritten; the means of the rows of K set the scale of rounding.

    `rank_bound` has upper bounds of its rank.
    """
    values, vectors = eigh_in_place(G)
    null = _separate_eigenvector(values, vectors, weighting.roots)
    lowest, highest = float(values.min()), float(values.max())
    trace_of_mean = weighting.compute_trace_of_mean(means)
    clipped = find_psd_cutoff(lowest, highest, max(highest, trace_of_mean), len(G), on_indefinite, MATRIX)
    noise = _estimate_noise(vectors, max(highest, 0.0), trace_of_mean, weighting.shares)
    is_kept = values > np.maximum(_CUT * noise, 4 * EPS * highest)
    if clipped:
        is_kept &= values > clipped
    else:  # a negative eigenvalue shows the size of rounding errors
        most = float((-values / np.maximum(noise, _TINY)).max())
        is_kept &= values > 2 * most * noise
    is_kept[null] = False
    is_other = np.arange(len(values)) != null
    order = np.concatenate([[null], np.flatnonzero(~is_kept & is_other), np.flatnonzero(is_kept)])
    _reorder_columns(vectors, order)
    values, noise, coordinates = values[order], noise[order], vectors.T @ Y
    first = len(values) - int(is_kept.sum())
    return SpectralGram(
        values[first:],
        vectors,
        coordinates[first:],
        means,
        noise,
        values[:first],
        coordinates[:first],
        max(0.0, min(rank_bound) - (len(values) - first)),
        rank_bound.of_kernel < rank_bound.of_rows,
    )


def _separate_eigenvector(values: Array, vectors: Array, known: Array) -> int:
    """Rotate eigenvectors (N, N) so that one is along a known one (N,), in place; return its index.

    Rounding mixes vectors whose eigenvalues (N,) are close. These become the Rayleigh quotients of the rotated vectors.
    """
    from scipy.linalg import blas

    reflector = (known / np.linalg.norm(known)) @ vectors
    index = int(np.abs(reflector).argmax())
    reflector[index] += np.copysign(1.0, reflector[index])
    scale, squares = 2 / (reflector @ reflector), reflector**2
    blas.dger(-scale, vectors @ reflector, reflector, a=vectors, overwrite_a=1)
    values += scale * squares * (scale * (squares @ values) - 2 * values)
    return index


def _reorder_columns(vectors: Array, order: Indices) -> None:
    if (np.diff(order) != 1).any():
        for rows in row_slices(len(vectors), _BLOCK_ROWS):
            vectors[rows] = vectors[rows][:, order]


def _estimate_noise(vectors: Array, highest: float, trace_of_mean: float, shares: Array) -> Array:
    """Return the rounding errors of the eigenvalues of a centred Gram matrix, (N,).

    The rounding error of a value of K is multiplied by the square roots of the weights of both rows. The error of an
    eigenvector u is proportional to ``sum s u^2``, with s the shares of the rows in the weights, so that a row of large
    weight does not hide the eigenvalues of other rows.
    """
    n = len(vectors)
    row_shares = np.einsum("i,ij,ij->j", shares, vectors, vectors)
    noise: Array = EPS / np.sqrt(n) * np.maximum(highest, n * trace_of_mean * row_shares)
    return noise


def estimate_rounding(trace: float, means: Array, weighting: Weighting) -> float:
    """Return the rounding error of the eigenvalues of a centred Gram matrix, if the errors of its values are random."""
    return EPS * max(trace, weighting.compute_trace_of_mean(means)) / float(np.sqrt(len(means)))
