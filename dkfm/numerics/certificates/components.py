"""Certify kernel principal components: their scores of the training rows, or the axes in the features of a map."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, Rows, has_only_equal_rows
from dkfm.numerics.certificates.certificate import MAX_SAMPLED_ROWS, Certificate, certify_block, sample_evenly
from dkfm.numerics.model import Head
from dkfm.numerics.roots import EPS
from dkfm.numerics.scorer import Scorer

_COMPARED = "components"
"""Value of `Certificate.compared` for components."""

_DROPPED_SHARE = 8 * EPS
"""Share of the squared length of the mean below which a map drops eigenvalues, and their variance with them."""


@dataclass(frozen=True, eq=False)
class ScoreProducts:
    """Weighted products of combinations of scores and of a constant column, whose products are the sums of scores."""

    combinations: Array
    """Combinations of the q components. Shape (q, p)."""
    constant_column_value: float
    """Value of the constant column; 0 if the components are not centred."""

    def sum_tile_products(self, score: Scorer, tiles: Iterable[Rows], weights: Array) -> Array:
        """Return the sum of the products (p + 1, p + 1) over all rows of the tiles, which have `weights` (n,)."""
        sampled, size = _make_combination_scorer(score, self.combinations), self.combinations.shape[1] + 1
        products, start = np.zeros((size, size)), 0
        for tile in tiles:
            S = sampled("scores", tile).astype(np.float64)
            S = np.pad(S, ((0, 0), (0, 1)), constant_values=self.constant_column_value)
            products += (weights[start : start + len(S)] * S.T) @ S
            start += len(S)
        return products


def certify_components(
    score: Scorer,
    eigenvalues: Array,
    tiles: Iterable[Rows],
    sample_weight: Array | None = None,
    sum_products: Callable[[ScoreProducts, Array], Array] | None = None,
) -> Certificate:
    """Compare the weighted Gram matrix of the training scores, ``S'DS``, with ``diag(mu)``, and their means with 0.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "scores", which has an offset if the components are centred.
    eigenvalues : ndarray of shape (q,)
        Eigenvalues mu. Pairs of at most 512 components, evenly spread, are compared over all training rows. If there
        are more, a sum of all components with random signs is compared too.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows, as the model scores them.
    sample_weight : ndarray of shape (N,), optional
        Diagonal of D; by default 1.
    sum_products : callable, optional
        Function that returns the sum of the products of all training rows, given their weights (N,); by default they
        are computed here.

    Returns
    -------
    Certificate
        Errors, including those that centring can hide (see `_certify_centring_rounding`); 0 if all rows are equal.
    """
    if not score.model.kernel.is_precomputed:
        tiles = list(tiles)  # rows in memory; rows of a float32 model may become equal only by rounding
        if len(tiles) == 1 and has_only_equal_rows(tiles[0]):
            return Certificate(0.0, 0.0, 0, compared=_COMPARED)
    weights = np.ones(score.model.landmarks.shape[0]) if sample_weight is None else sample_weight
    hidden = _certify_centring_rounding(score, eigenvalues, float(weights.sum()))
    if not len(eigenvalues):
        return hidden
    C = _choose_combinations(eigenvalues)
    if sum_products is None:
        rows = tiles

        def sum_products(products: ScoreProducts, weights: Array) -> Array:
            return products.sum_tile_products(score, rows, weights)

    centered = score.model.head("scores").offset is not None
    constant = float(np.sqrt(eigenvalues[0] / weights.sum())) if centered else 0.0
    expected = np.pad((eigenvalues * C.T) @ C, (0, 1))
    expected[-1, -1] = eigenvalues[0] if centered else 0.0
    products = sum_products(ScoreProducts(C, constant), weights)
    sizes = np.sqrt(expected.diagonal())
    return certify_block(products, expected, sizes, sizes).combine(hidden)


def certify_principal_axes(
    score: Scorer, eigenvalues: Array, tiles: Iterable[Rows], total_weight: float
) -> Certificate:
    """Compare ``B'KB`` with I and ``B'Km`` with the offsets; B and m are landmark weights of axes and mean.

    Parameters
    ----------
    score, eigenvalues
        As in `certify_components`.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    total_weight : float
        Sum of the weights of the training rows. Offset errors are relative to the standard deviation of a score,
        ``sqrt(mu / total_weight)``.

    Returns
    -------
    Certificate
        Errors, including those that centring can hide (see `_certify_centring_rounding`).
    """
    hidden = _certify_centring_rounding(score, eigenvalues, total_weight)
    if not len(eigenvalues):
        return hidden
    C, head = _choose_combinations(eigenvalues), score.model.head("scores")
    sampled, sizes = _make_combination_scorer(score, C), np.sqrt(eigenvalues)
    W = head.weights[:, : len(eigenvalues)].astype(np.float64)
    offset = np.zeros(len(sizes)) if head.offset is None else head.offset.astype(np.float64)
    mean = np.zeros((len(W), 1)) if head.offset is None else head.weights[:, -1:].astype(np.float64) / 2
    left, products, start = np.hstack([W, mean]), np.zeros((len(sizes) + 1, C.shape[1])), 0
    for tile in tiles:
        S = sampled("scores", tile).astype(np.float64) + offset @ C
        products += left[start : start + len(S)].T @ S
        start += len(S)
    expected, unit = np.vstack([(sizes > 0)[:, np.newaxis] * C, offset @ C]), np.sqrt(eigenvalues[0] * total_weight)
    column_sizes = np.append(sizes, sizes[0])[_choose_combination_indices(len(sizes))]
    error = (products - expected) * np.append(sizes, 0.0)[:, np.newaxis] * column_sizes
    error[-1] = np.where(column_sizes > 0, (products - expected)[-1] * unit, 0.0)
    return certify_block(error, np.zeros_like(error), np.append(sizes, sizes[0]), column_sizes).combine(hidden)


def _certify_centring_rounding(score: Scorer, eigenvalues: Array, total_weight: float) -> Certificate:
    """Compare the rounding error of the mean, which centring adds to every axis, with the largest eigenvalue.

    This error is ``4 eps`` times the squared length of the mean; a map drops eigenvalues below it. If no eigenvalue is
    above it, the certificate is 1.
    """
    head = score.model.heads.get("reconstruction_error")
    if head is None or head.offset is None:
        return Certificate(0.0, 0.0, 0, compared=_COMPARED)
    rounding = _DROPPED_SHARE * total_weight * abs(float(head.offset[-1]))
    largest = max(rounding, float(eigenvalues.max(initial=0.0)))
    share = rounding / largest if largest > 0 else 0.0
    return Certificate(share, share, 0, compared=_COMPARED)


def _choose_combinations(eigenvalues: Array) -> Array:
    """Return combinations (q, p) of components: at most 512 single components and, if q is larger, a sum of all.

    In the sum, each component has a random sign and counts in proportion to the size of its scores.
    """
    columns = _choose_combination_indices(len(eigenvalues))
    C: Array = (np.arange(len(eigenvalues))[:, np.newaxis] == columns).astype(np.float64)
    if len(eigenvalues) > MAX_SAMPLED_ROWS:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], len(eigenvalues))
        C[:, -1] = signs * np.sqrt(eigenvalues / float(eigenvalues.sum()))
    return C


def _choose_combination_indices(q: int) -> npt.NDArray[np.intp]:
    """Return at most 512 indices of q components; if q is larger, also q, which stands for the sum of all."""
    return sample_evenly(q) if q <= MAX_SAMPLED_ROWS else np.append(sample_evenly(q), q)


def _make_combination_scorer(score: Scorer, combinations: Array) -> Scorer:
    """Return a scorer of combinations (q, p) of the components."""
    head = score.model.head("scores")
    combine, dtype = combinations.astype(head.weights.dtype), head.weights.dtype
    offset = None if head.offset is None else (head.offset @ combinations).astype(dtype)
    heads = {"scores": Head(np.ascontiguousarray(head.weights[:, : len(combine)] @ combine), offset)}
    return replace(score, model=replace(score.model, heads=heads))
