"""Compute pre-images, the rows whose features are nearest to given ones, by ridge regression or fixed point."""

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
from dkfm.kernels.transformed import AffineMap, Warped

_ZERO_SHARE = 1e-12
"""A sum of weights below this share of the sum of their magnitudes is rounding error."""


def solve_ridge_regression(kernel: Kernel, scores: Array, X: Array, alpha: Array) -> Array:
    """Return the coefficients A (N, d) of a kernel ridge regression of rows on their scores: ``k(s, scores) A``.

    Parameters
    ----------
    kernel : Kernel
        Kernel that compares scores.
    scores : ndarray of shape (N, q)
        Scores of the training rows.
    X : ndarray of shape (N, d)
        Training rows.
    alpha : ndarray of shape (N,)
        Ridge of each row; a row of weight w counts as w rows, so its ridge is divided by w.

    Notes
    -----
    Bakir, Weston and Schoelkopf, "Learning to find pre-images" (2004).
    """
    K = np.asfortranarray(kernel(scores))
    K.flat[:: len(K) + 1] += alpha
    try:
        coefficients: Array = solve(K, X, assume_a="pos", overwrite_a=True, check_finite=False)
    except LinAlgError:
        raise InvalidInputError(
            f"{kernel!r} of the scores is not positive definite with alpha = {alpha.max():g}; raise alpha."
        ) from None
    return coefficients


def find_nearest_scores(scores: Array, known: Array) -> npt.NDArray[np.intp]:
    """Return the indices (n,) of the known scores (N, q) that are nearest to each row of scores (n, q)."""
    tiles = row_slices(len(scores), choose_tile_rows(len(known)))
    return np.concatenate([cdist(scores[tile], known, "sqeuclidean").argmin(axis=1) for tile in tiles])


@dataclass(frozen=True, eq=False)
class ComponentSpan:
    """Affine span of components: scores s stand for ``sum_i (b s + e)_i phi(x_i)``, with weights b and e as below."""

    component_weights: Array
    """Weights b of the components. Shape (N, q)."""
    mean_weights: Array
    """Weights e of the mean; zero if the components are not centred. Shape (N,)."""


def has_fixed_point_iteration(kernel: Kernel) -> bool:
    """Return whether the kernel is a Gaussian with any scales, or a Gaussian of scaled and shifted rows."""
    return isinstance(kernel, Gaussian) or (
        isinstance(kernel, Warped) and isinstance(kernel.h, AffineMap) and isinstance(kernel.kernel, Gaussian)
    )


def find_fixed_point_preimages(
    kernel: Kernel, X: Array, span: ComponentSpan, scores: Array, start: Array, tol: float, max_iter: int
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return the rows z (n, d) whose features are nearest to the points of a span that have given scores.

    Also return, for each of them, whether the iteration converged, (n,).

    Parameters
    ----------
    kernel : Kernel
        A kernel for which `has_fixed_point_iteration` is true.
    X : ndarray of shape (N, d)
        Training rows.
    span : ComponentSpan
        Affine span of the components.
    scores : ndarray of shape (n, q)
        Scores of the points.
    start : ndarray of shape (n, d)
        Start of the iteration for each point.
    tol : float
        The iteration has converged when a step is at most this share of the spread of X.
    max_iter : int
        Maximum number of steps.

    Notes
    -----
    ``z <- sum_i c_i k(z, x_i) x_i / sum_i c_i k(z, x_i)`` with ``c = scores b' + e``: Mika et al., "Kernel PCA and
    de-noising in feature spaces" (1999), eq. (10). If the denominator vanishes, z stays and has not converged.
    """
    values, points, settled = kernel.make_evaluator(X), start.astype(np.float64), np.zeros(len(start), np.bool_)
    step_tolerance = tol * float(np.sqrt(X.var(axis=0).sum()))
    for tile in row_slices(len(points), choose_tile_rows(len(X))):
        moving = np.arange(tile.start, tile.stop)
        coefficients = scores[tile] @ span.component_weights.T + span.mean_weights
        for _ in range(max_iter):
            terms = values(points[moving]) * coefficients[moving - tile.start]
            sums = terms.sum(axis=1)
            nonzero = np.abs(sums) > _ZERO_SHARE * np.abs(terms).sum(axis=1)
            moving, terms = moving[nonzero], terms[nonzero]
            steps = terms @ X / sums[nonzero, np.newaxis] - points[moving]
            points[moving] += steps
            converged = np.sqrt(np.einsum("ij,ij->i", steps, steps)) <= step_tolerance
            settled[moving[converged]] = True
            moving = moving[~converged]
            if not len(moving):
                break
    return points, settled
