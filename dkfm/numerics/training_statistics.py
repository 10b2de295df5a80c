"""Compute sums and maxima over all training rows, a tile at a time, in float64."""

from collections.abc import Iterable, Iterator

import numpy as np

from dkfm.core.chunking import choose_tile_rows, row_slices
from dkfm.core.rows import Array, Rows
from dkfm.errors import KernelError
from dkfm.numerics.kernel_components import Moments
from dkfm.numerics.scorer import Scorer


def compute_residual_extremes(score: Scorer, tiles: Iterable[Rows], diagonal: Array) -> tuple[Array, float]:
    """Return the largest residual of the training rows after 0, 1, .. r features, (r + 1,), and the smallest residual.

    A residual is ``k(x, x) - |phi(x)|^2``. The model has a head "features" whose columns are nested; `tiles` are all
    training rows, and `diagonal` (N,) has their k(x, x).
    """
    largest = np.full(score.model.head("features").width + 1, -np.inf)
    largest[0], lowest = diagonal.max(), float(diagonal.min())
    for positions, rows in _split_tiles(score, tiles):
        features = score.apply_weights("features", score.kernel_values(rows)).astype(np.float64)
        residuals = diagonal[positions, np.newaxis] - np.cumsum(np.square(features, out=features), axis=1, out=features)
        np.maximum(largest[1:], residuals.max(axis=0), out=largest[1:])
        lowest = min(lowest, float(residuals.min(initial=lowest)))
    if not np.isfinite(largest).all():
        raise KernelError(f"{score.model.kernel!r} overflows between a training row and a landmark.")
    return largest, lowest


def mean_kernel_values(score: Scorer, tiles: Iterable[Rows], weights: Array) -> Array:
    """Return the weighted mean of ``k(x, landmarks)`` over the training rows x, (N,)."""
    evaluate = score.model.kernel.make_evaluator(score.model.original_landmarks)
    total, shares = np.zeros(score.model.landmarks.shape[0]), weights / weights.max()
    for positions, rows in _split_tiles(score, tiles):
        total += shares[positions] @ evaluate(rows)
    total /= shares.sum()
    return total


def feature_moments(score: Scorer, tiles: Iterable[Rows], diagonal: Array, weights: Array) -> Moments:
    """Return the moments of the features of all training rows, from their k(x, x), (N,), and their weights, (N,)."""
    (first,), second = sum_features_and_products(score, tiles, weights[:, np.newaxis])
    total = float(weights.sum())
    return Moments(second, first / total, total, float(weights @ diagonal), len(weights))


def sum_features_and_products(score: Scorer, tiles: Iterable[Rows], weights: Array) -> tuple[Array, Array]:
    """Return two weighted sums of the features phi of all training rows.

    These are ``sum w phi`` (C, r) for each column of weights (N, C), and ``sum w phi phi'`` (r, r) with the sum of each
    row's weights as w. The model has a head "features".
    """
    r = score.model.head("features").width
    second, first = np.zeros((r, r)), np.zeros((weights.shape[1], r))
    for positions, rows in _split_tiles(score, tiles):
        features = score.apply_weights("features", score.kernel_values(rows))
        second += (features * weights[positions].sum(axis=1, keepdims=True)).T @ features
        first += weights[positions].T @ features
    return first, second


def kernel_values_of_random_combination(score: Scorer, tiles: Iterable[Rows], squared_norm: float) -> Array:
    """Return the kernel values (N,) of the landmarks with a fixed combination of them of squared length `squared_norm`.

    The coefficients of the combination have random signs from a fixed seed. `tiles` are the tiles of the landmarks; the
    result is empty if there are none.
    """
    evaluate = score.model.kernel.make_evaluator(score.model.original_landmarks)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], score.model.landmarks.shape[0])
    parts = [signs[positions] @ evaluate(rows) for positions, rows in _split_tiles(score, tiles)]
    if not parts:
        return np.zeros(0)
    values: Array = np.sum(parts, axis=0)
    squared_length = float(signs @ values)
    return values * np.sqrt(squared_norm / squared_length) if squared_length > 0 else values * 0.0


def _split_tiles(score: Scorer, tiles: Iterable[Rows]) -> Iterator[tuple[slice, Rows]]:
    """Yield tiles small enough for the tile loop, each with its slice of all rows."""
    start = 0
    for rows in tiles:
        for tile in row_slices(rows.shape[0], choose_tile_rows(score.model.landmarks.shape[0])):
            yield slice(start + tile.start, start + tile.stop), rows[tile]
        start += rows.shape[0]
