"""Kernels that are products of functions of one column: Laplacian and periodic."""

from dataclasses import dataclass

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel, PreparedKernel
from dkfm.kernels.pairwise import columnwise_sums
from dkfm.kernels.pairwise.block_operations import (
    PreparedBlock,
    exp_without_subnormals_in_place,
    has_llvm,
    make_float64_evaluator,
)
from dkfm.kernels.parameters import MEDIAN, Scale, coerce_scale, get_numeric_scale
from dkfm.kernels.stationary import DistanceKernel, Gaussian


@dataclass(frozen=True)
class Laplacian(DistanceKernel):  # numpydoc ignore=PR02
    """The Laplacian kernel, ``exp(-|x - y|_1 / sigma)``, with ``|x - y|_1`` the sum of absolute differences.

    Positive semi-definite. It cannot be computed by a matrix product; the extra "fast" (Numba) makes it several times
    faster.

    Parameters
    ----------
    sigma : float > 0, one for each column, "median", or None
        Length scale, in the units of the columns. scikit-learn's ``gamma`` is ``1 / sigma``; None means its default
        gamma of 1 / d for d columns. With one sigma for each column, the distance is the sum of
        ``|x_j - y_j| / sigma_j``.

    Examples
    --------
    >>> from dkfm.kernels import Laplacian
    >>> Laplacian(2.0)([[0.0, 0.0]], [[1.0, 1.0]]).round(4)
    array([[0.3679]])
    """

    sigma: Scale = 1.0
    scale_name = "sigma"
    supports_float32 = supports_out = True

    def __post_init__(self) -> None:
        coerce_scale(self, "sigma", MEDIAN, None, is_squared=False)

    def _get_numeric_scale(self, d: int) -> float | Array:
        return float(d) if self.sigma is None else super()._get_numeric_scale(d)

    def _pairwise_distances(self, X: Array) -> Array:
        return columnwise_sums.sum_absolute_differences(X, X)

    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Divide the landmarks once, in float64, if each column has a length scale of its own."""
        scale = self._get_numeric_scale(landmarks.shape[1])
        if isinstance(scale, float):
            return lambda Z, out=None, /: _exp_scaled(
                columnwise_sums.sum_absolute_differences(Z, landmarks, out), scale
            )
        centre = landmarks.mean(axis=0, dtype=np.float64)

        def scale_rows(rows: Array) -> Array:
            scaled: Array = (rows - centre) / scale
            return scaled

        right = scale_rows(landmarks)
        return lambda Z, out=None, /: _exp_scaled(
            columnwise_sums.sum_absolute_differences(scale_rows(Z), right, out), 1.0
        )

    def estimate_extra_value_seconds(self, d: int) -> float:
        """Estimate the seconds of the sum over the columns."""
        return columnwise_sums.estimate_column_seconds("absolute") * d

    def lacks_extra_fast(self) -> bool:
        """Return whether the sum over the columns is not compiled."""
        return columnwise_sums.lacks_numba()

    def diagonal(self, X: Array) -> Array:
        """Return ones."""
        return np.ones(len(X))


def _exp_scaled(distances: Array, scale: float) -> Array:
    """Return exp(-distances / scale), overwriting the distances."""
    if np.isfinite(1 / scale):
        distances *= -1 / scale  # faster than a division, which takes half as long as the exponential
    else:
        distances /= -scale
    return exp_without_subnormals_in_place(distances)


_COLUMNS_OF_FLOAT64 = 3, 4
"""Numbers of columns for which float64 is faster if distances are computed by matrix products.

On so few circles, many points are so near that float32 computes their distances twice.
"""


@dataclass(frozen=True)
class Periodic(PreparedKernel):  # numpydoc ignore=PR02
    """The periodic kernel, ``exp(-2 sum_j sin^2(pi (x_j - y_j) / period_j) / length_scale_j^2)``.

    Positive semi-definite, because the squared sines are summed over the columns. scikit-learn's ``ExpSineSquared``
    takes the sine of the norm of x - y instead, which is indefinite for two or more columns.

    Parameters
    ----------
    period : float > 0, or one for each column
        Period, in the units of the columns.
    length_scale : float > 0, or one for each column
        Length scale of the sines; it has no unit.

    Notes
    -----
    MacKay, "Introduction to Gaussian processes" (1998). Each column is mapped to a circle, and the Gaussian kernel of
    the points on the circles is computed. The error of a point is about ``eps |x - c| / period``, with c the first
    landmark, and at most eps, because remainders modulo the period are exact.

    Examples
    --------
    >>> from dkfm.kernels import Periodic
    >>> Periodic(period=2.0)([[0.5]], [[2.5], [1.5]]).round(4)
    array([[1.    , 0.1353]])
    """

    period: Scale = 1.0
    length_scale: Scale = 1.0
    supports_float32 = supports_out = True
    landmark_copies = 4
    translation_invariant = True

    def __post_init__(self) -> None:
        coerce_scale(self, "period")
        coerce_scale(self, "length_scale")

    def resolve(self, X: Rows) -> Kernel:
        """Check that the numbers of periods and length scales match the columns of X; return the kernel unchanged."""
        self._get_period_and_scale(X.shape[1])
        return self

    def _get_period_and_scale(self, d: int) -> tuple[float | Array, float | Array]:
        """Return the period and the length scale of d columns, each a number or an array (d,)."""
        if d > 1 and isinstance(self.length_scale, tuple) and len(self.length_scale) == 1:  # as from_sklearn makes it
            raise KernelError(
                f"Periodic has 1 number as length_scale and the rows have {d} columns; scikit-learn's ExpSineSquared "
                "takes their Euclidean distance, which is indefinite, so give Periodic(period, length_scale) with a "
                "number as length_scale."
            )
        return get_numeric_scale(self, "period", d), get_numeric_scale(self, "length_scale", d)

    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Map the landmarks to the circles once, always in float64."""
        d = landmarks.shape[1]
        period, scale = self._get_period_and_scale(d)
        centre = np.fmod(landmarks[0].astype(np.float64), period)
        gaussian = Gaussian(scale if isinstance(scale, float) else tuple(np.tile(scale, 2)))

        def map_to_circles(rows: Array) -> Array:
            remainders = np.fmod(rows.astype(np.float64, copy=False), period) - centre
            remainders -= period * np.rint(remainders / period)
            angles = 2 * np.pi * (remainders / period)
            return np.hstack([np.cos(angles), np.sin(angles)])

        if landmarks.dtype == np.float32 and d in _COLUMNS_OF_FLOAT64 and not has_llvm():
            in_float64 = gaussian.prepare(map_to_circles(landmarks))
            return make_float64_evaluator(lambda Z, out=None, /: in_float64(map_to_circles(Z), out), len(landmarks))
        prepared = gaussian.prepare(map_to_circles(landmarks), landmarks.dtype)
        return lambda Z, out=None, /: prepared(map_to_circles(Z), out)

    def diagonal(self, X: Array) -> Array:
        """Return ones."""
        return np.ones(X.shape[0])
