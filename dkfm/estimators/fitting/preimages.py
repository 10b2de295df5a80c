"""Points whose features are nearest to given ones: pre-images, of ridge regression and by a fixed point."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import LinAlgError, solve
from scipy.spatial.distance import cdist

from dkfm.core.chunking import choose_tile_rows, row_slices
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.kernels.base import Kernel
from dkfm.kernels.stationary import Gaussian
from dkfm.kernels.transformed import Affine, Warped

_VANISHED = 1e-12
"""Of the sum of the magnitudes: a smaller sum of weights is rounding."""


def ridge_coefficients(kernel: Kernel, scores: Array, X: Array, alpha: Array) -> Array:
    """Return the coefficients A (N, d) with which ``k(s, scores) A`` is nearest to the rows X that have these scores.

    Parameters
    ----------
    kernel : Kernel
        Of scores.
    scores : ndarray of shape (N, q)
    X : ndarray of shape (N, d)
    alpha : ndarray of shape (N,)
        The ridge: for a row of weight w, which is as good as w rows, a w-th of what it is for one.

    Notes
    -----
    Bakir, Weston and Schoelkopf, "Learning to find pre-images" (2004).
    """
    K = np.asfortranarray(kernel(scores))
    K.flat[:: len(K) + 1] += alpha
    try:
        found: Array = solve(K, X, assume_a="pos", overwrite_a=True, check_finite=False)
    except LinAlgError:
        raise InvalidInputError(
            f"{kernel!r} of the scores is not positive definite with alpha = {alpha.max():g}; raise alpha."
        ) from None
    return found


def nearest_scores(scores: Array, known: Array) -> npt.NDArray[np.intp]:
    """Return, for rows of scores (n, q), the numbers of the nearest of those known (N, q)."""
    tiles = row_slices(len(scores), choose_tile_rows(len(known)))
    return np.concatenate([cdist(scores[tile], known, "sqeuclidean").argmin(axis=1) for tile in tiles])


@dataclass(frozen=True, eq=False)
class ComponentSpan:
    """Of components, through the mean: the point of scores s is ``sum_i (s b' + e)_i phi(x_i)``.

    Attributes
    ----------
    weights : ndarray of shape (N, q)
        b.
    mean : ndarray of shape (N,)
        e; zero where the components are not centred.
    """

    weights: Array
    mean: Array


@dataclass(frozen=True, eq=False)
class PreimageResult:
    """Pre-images (n, d), and which of them no longer moved."""

    points: Array
    settled: npt.NDArray[np.bool_]


def has_fixed_point(kernel: Kernel) -> bool:
    """Whether it is a Gaussian, of whatever scales, or one of rows that are scaled and shifted."""
    return isinstance(kernel, Gaussian) or (
        isinstance(kernel, Warped) and isinstance(kernel.h, Affine) and isinstance(kernel.kernel, Gaussian)
    )


def fixed_point_preimages(
    kernel: Kernel, X: Array, span: ComponentSpan, scores: Array, start: Array, tol: float, most: int
) -> PreimageResult:
    """Return rows z whose features are nearest to the points of a span that have these scores.

    Parameters
    ----------
    kernel : Kernel
        See `has_fixed_point`.
    X : ndarray of shape (N, d)
    span : Span
    scores : ndarray of shape (n, q)
    start : ndarray of shape (n, d)
    tol : float
        A step that is shorter than this share of the spread of X ends it.
    most : int
        Steps.

    Notes
    -----
    ``z <- sum_i c_i k(z, x_i) x_i / sum_i c_i k(z, x_i)`` with ``c = scores b' + e``: Mika et al., "Kernel PCA and
    de-noising in feature spaces" (1999), eq. (10). Where the denominator vanishes z stays, unsettled.
    """
    values, points = kernel.make_evaluator(X), start.astype(np.float64)
    least = tol * float(np.sqrt(X.var(axis=0).sum()))
    settled = np.zeros(len(points), np.bool_)
    for tile in row_slices(len(points), choose_tile_rows(len(X))):
        moving, coefficients = np.arange(tile.start, tile.stop), scores[tile] @ span.weights.T + span.mean
        for _ in range(most):
            shares = values(points[moving]) * coefficients[moving - tile.start]
            sums = shares.sum(axis=1)
            going = np.abs(sums) > _VANISHED * np.abs(shares).sum(axis=1)
            moving, shares = moving[going], shares[going]
            steps = shares @ X / sums[going, np.newaxis] - points[moving]
            points[moving] += steps
            there = np.sqrt(np.einsum("ij,ij->i", steps, steps)) <= least
            settled[moving[there]] = True
            moving = moving[~there]
            if not len(moving):
                break
    return PreimageResult(points, settled)
