"""Squared Euclidean distances that stay exact for near points, as the exponent of a stationary kernel.

One GEMM of centred, augmented rows gives ``-g |x - y|^2``; its error is at most ``8 eps g (|x-c|^2 + |y-c|^2)`` with
``c`` the mean of the landmarks. Where the distance is so small that this would cost digits, it is computed again from
differences, so equal rows give exactly 0 in any tile.
"""

import numpy as np
from scipy.spatial.distance import cdist

from dkfm.kernels.base import Prepared
from dkfm.kernels.rows import Array, squared_norms
from dkfm.tiling import row_slices

__all__ = ["negative_squared_distances"]

_FEW_COLUMNS = 4
"""Up to here differences cost no more than a GEMM."""

_NEAR = 1e-6
"""Below this share of |x-c|^2 + |y-c|^2 a distance is computed again from differences."""

_NEAR_ROWS = 256
"""Landmarks whose differences are taken at a time: all of them may be near."""


def negative_squared_distances(landmarks: Array, g: float) -> Prepared:
    """Return a function from rows Z (n, d) to ``-g |z - x|^2`` (n, m), at most 0, for landmarks x (m, d)."""
    if landmarks.shape[1] <= _FEW_COLUMNS:

        def by_differences(Z: Array) -> Array:
            exponent: Array = cdist(Z, landmarks, "sqeuclidean")
            exponent *= -g
            return exponent

        return by_differences

    centre = landmarks.mean(axis=0)
    right, y_norms = _augmented(landmarks, centre, g)
    right[:, -2] = -g * y_norms
    right[:, -1] = 1.0

    def by_product(Z: Array) -> Array:
        left, x_norms = _augmented(Z, centre, g)
        left[:, -2] = 1.0
        left[:, -1] = -g * x_norms
        exponent: Array = left @ right.T
        _recompute_near(exponent, Z, landmarks, x_norms, y_norms, g)
        np.minimum(exponent, 0.0, out=exponent)
        return exponent

    return by_product


def _augmented(rows: Array, centre: Array, g: float) -> tuple[Array, Array]:
    """Return ``sqrt(2 g) (x - c)`` of each row with room for two more columns, and ``|x - c|^2``."""
    augmented = np.empty((len(rows), rows.shape[1] + 2))
    centred = augmented[:, :-2]
    np.subtract(rows, centre, out=centred)
    norms = squared_norms(centred)
    centred *= np.sqrt(2 * g)
    return augmented, norms


def _recompute_near(exponent: Array, X: Array, Y: Array, x_norms: Array, y_norms: Array, g: float) -> None:
    """Replace, in place, the exponents of near pairs by those of the differences of their rows as they came."""
    # One pass finds the few rows that have a near landmark at all.
    candidates = np.flatnonzero(exponent.max(axis=1) >= -g * _NEAR * (x_norms + y_norms.max()))
    for i in candidates:
        near = np.flatnonzero(exponent[i] >= -g * _NEAR * (x_norms[i] + y_norms))
        for part in row_slices(len(near), _NEAR_ROWS):
            exponent[i, near[part]] = -g * squared_norms(Y[near[part]] - X[i])
