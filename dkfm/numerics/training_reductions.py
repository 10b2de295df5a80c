"""What is summed up or looked for over all training rows, a tile at a time, in float64."""

from collections.abc import Iterable, Iterator

import numpy as np

from dkfm.core.chunking import choose_tile_rows, row_slices
from dkfm.core.rows import Array, Rows
from dkfm.errors import KernelError
from dkfm.numerics.pca import Moments
from dkfm.numerics.scorer import Scorer


def largest_residuals(score: Scorer, tiles: Iterable[Rows], diagonal: Array) -> tuple[Array, float]:
    """Return, after 0, 1, .. r features, the largest ``k(x, x) - |phi(x)|^2`` of a row x, (r + 1,), and the least.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "features" that are nested.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows.
    diagonal : ndarray of shape (N,)
        Their k(x, x).
    """
    parts = np.full(score.model.head("features").width + 1, -np.inf)
    parts[0], lowest = diagonal.max(), float(diagonal.min())
    for place, rows in _tiles(score, tiles):
        features = score.image("features", score.values(rows)).astype(np.float64)
        left = diagonal[place, np.newaxis] - np.cumsum(np.square(features, out=features), axis=1, out=features)
        np.maximum(parts[1:], left.max(axis=0), out=parts[1:])
        lowest = min(lowest, float(left.min(initial=lowest)))
    if not np.isfinite(parts).all():
        raise KernelError(f"{score.model.kernel!r} overflows between a training row and a landmark.")
    return parts, lowest


def mean_kernel_values(score: Scorer, tiles: Iterable[Rows], weights: Array) -> Array:
    """Return the mean of ``k(x, landmarks)`` (N,) over training rows x, with a weight each."""
    block = score.model.kernel.make_evaluator(score.model.points)
    total, shares = np.zeros(score.model.landmarks.shape[0]), weights / weights.max()
    for place, rows in _tiles(score, tiles):
        total += shares[place] @ block(rows)
    total /= shares.sum()
    return total


def feature_moments(score: Scorer, tiles: Iterable[Rows], diagonal: Array, weights: Array) -> Moments:
    """Return the moments of the features of all training rows, with a weight each.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "features".
    tiles : iterable of ndarray or csr_array of shape (n, d)
    diagonal : ndarray of shape (N,)
        Their k(x, x).
    weights : ndarray of shape (N,)
    """
    (first,), second = feature_sums(score, tiles, weights[:, np.newaxis])
    total = float(weights.sum())
    return Moments(second, first / total, total, float(weights @ diagonal), len(weights))


def feature_sums(score: Scorer, tiles: Iterable[Rows], weights: Array) -> tuple[Array, Array]:
    """Return ``sum w phi`` (C, r) of the features of training rows for each of some weights, and ``sum w phi phi'``.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "features".
    tiles : iterable of ndarray or csr_array of shape (n, d)
    weights : ndarray of shape (N, C)
        The second sum, (r, r), is of all of a row's weights together.
    """
    r = score.model.head("features").width
    second, first = np.zeros((r, r)), np.zeros((weights.shape[1], r))
    for place, rows in _tiles(score, tiles):
        features = score.image("features", score.values(rows))
        second += (features * weights[place].sum(axis=1, keepdims=True)).T @ features
        first += weights[place].T @ features
    return first, second


def fixed_combination(score: Scorer, tiles: Iterable[Rows], size: float) -> Array:
    """Return the kernel values (N,) of the landmarks with a fixed combination of them, whose square length is `size`.

    The combination has random signs, and the landmarks come in tiles. Without tiles there are no values.
    """
    block = score.model.kernel.make_evaluator(score.model.points)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], score.model.landmarks.shape[0])
    parts = [signs[place] @ block(rows) for place, rows in _tiles(score, tiles)]
    if not parts:
        return np.zeros(0)
    values: Array = np.sum(parts, axis=0)
    square = float(signs @ values)
    return values * np.sqrt(size / square) if square > 0 else values * 0.0


def _tiles(score: Scorer, tiles: Iterable[Rows]) -> Iterator[tuple[slice, Rows]]:
    start = 0
    for rows in tiles:
        for tile in row_slices(rows.shape[0], choose_tile_rows(score.model.landmarks.shape[0])):
            yield slice(start + tile.start, start + tile.stop), rows[tile]
        start += rows.shape[0]
