"""Kernels of histograms: rows of non-negative numbers, which usually add up to 1."""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import ClassVar

import numpy as np

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.kernels.base import Definiteness, PreparedKernel
from dkfm.kernels.pairwise import columnwise_sums
from dkfm.kernels.pairwise.block_operations import PreparedBlock, exp_without_subnormals_in_place
from dkfm.kernels.parameters import coerce_to_positive_float


class _HistogramKernel(PreparedKernel):
    """Base class of functions of a sum over the columns; they raise an error for negative numbers."""

    supports_float32 = supports_out = True
    _sum_name: ClassVar[str]
    """Name of the sum over the columns."""
    _sum_columns: ClassVar[Callable[[Array, Array, Array | None], Array]]
    """Function that returns the sums of all pairs."""

    def _map_sums(self, sums: Array) -> Array:
        """Return the kernel values of sums over the columns; it may overwrite them."""
        return sums

    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Check the landmarks once."""
        right, sum_columns = self._require_non_negative(landmarks), type(self)._sum_columns
        return lambda Z, out=None, /: self._map_sums(sum_columns(self._require_non_negative(Z), right, out))

    def diagonal(self, X: Array) -> Array:
        """Return the sum of each row."""
        total: Array = self._require_non_negative(X).sum(axis=1)
        return total

    def estimate_extra_value_seconds(self, d: int) -> float:
        """Estimate the seconds of the sum over the columns."""
        return columnwise_sums.estimate_column_seconds(self._sum_name) * d

    def lacks_extra_fast(self) -> bool:
        """Return whether the sum over the columns is not compiled."""
        return columnwise_sums.lacks_numba()

    def _require_non_negative(self, rows: Array) -> Array:
        """Return the rows; raise an InvalidInputError if they hold a negative number."""
        if rows.min() < 0:
            i, j = np.unravel_index(int(rows.argmin()), rows.shape)
            raise InvalidInputError(
                f"{self!r} is a kernel of histograms, which have no negative numbers, and row {i} has {rows[i, j]} in "
                f"column {j}."
            )
        return rows


@dataclass(frozen=True)
class ChiSquared(_HistogramKernel):  # numpydoc ignore=PR02
    """The chi-squared kernel of histograms, ``exp(-gamma sum_j (x_j - y_j)^2 / (x_j + y_j))``, with 0/0 = 0.

    Positive semi-definite.

    Parameters
    ----------
    gamma : float, > 0
        Factor of the distance in the exponent.

    Notes
    -----
    Zhang, Marszalek, Lazebnik and Schmid, "Local features and kernels for classification of texture and object
    categories" (2007).

    Examples
    --------
    >>> from dkfm.kernels import ChiSquared
    >>> ChiSquared()([[0.5, 0.5]], [[1.0, 0.0]]).round(4)
    array([[0.5134]])
    """

    gamma: float = 1.0
    _sum_name = "chi_squared"
    _sum_columns = columnwise_sums.sum_chi_squared_terms

    def __post_init__(self) -> None:
        coerce_to_positive_float(self, "gamma")

    def _map_sums(self, sums: Array) -> Array:
        sums *= -self.gamma
        return exp_without_subnormals_in_place(sums)

    def diagonal(self, X: Array) -> Array:
        """Return ones."""
        return np.ones(len(self._require_non_negative(X)))


@dataclass(frozen=True)
class AdditiveChiSquared(_HistogramKernel):
    """The additive chi-squared kernel of histograms, ``-sum_j (x_j - y_j)^2 / (x_j + y_j)``, with 0/0 = 0.

    Conditionally positive semi-definite: use it in kernel PCA, or as ``Exp(k)``, which is `ChiSquared`.

    Examples
    --------
    >>> from dkfm.kernels import AdditiveChiSquared
    >>> AdditiveChiSquared()([[0.5, 0.5]], [[1.0, 0.0]]).round(4)
    array([[-0.6667]])
    """

    definiteness = Definiteness.CONDITIONAL
    _sum_name = "chi_squared"
    _sum_columns = columnwise_sums.sum_chi_squared_terms

    def _map_sums(self, sums: Array) -> Array:
        return np.negative(sums, out=sums)

    def diagonal(self, X: Array) -> Array:
        """Return zeros."""
        return np.zeros(len(self._require_non_negative(X)))


@dataclass(frozen=True)
class HistogramIntersection(_HistogramKernel):
    """The histogram intersection kernel, ``sum_j min(x_j, y_j)``.

    Positive semi-definite.

    Notes
    -----
    Swain and Ballard, "Color indexing" (1991); Barla, Odone and Verri, "Histogram intersection kernel for image
    classification" (2003).

    Examples
    --------
    >>> from dkfm.kernels import HistogramIntersection
    >>> HistogramIntersection()([[0.5, 0.5]], [[1.0, 0.0]])
    array([[0.5]])
    """

    _sum_name = "minimum"
    _sum_columns = columnwise_sums.sum_minima


@dataclass(frozen=True)
class JensenShannon(_HistogramKernel):
    """The Jensen-Shannon kernel, ``sum_j (x_j log2((x_j + y_j) / x_j) + y_j log2((x_j + y_j) / y_j)) / 2``.

    For histograms that add up to 1, it is 1 minus the Jensen-Shannon divergence in bits. Positive semi-definite.

    Notes
    -----
    Vedaldi and Zisserman, "Efficient additive kernels via explicit feature maps" (2012), table 1.

    Examples
    --------
    >>> from dkfm.kernels import JensenShannon
    >>> JensenShannon()([[0.5, 0.5]], [[1.0, 0.0]]).round(4)
    array([[0.6887]])
    """

    _sum_name = "mixture"
    _sum_columns = columnwise_sums.sum_mixture_entropies

    def _map_sums(self, sums: Array) -> Array:
        sums /= 2 * log(2)
        return sums
