"""Kernels of the difference x - y."""

from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel, Prepared, require_positive
from dkfm.kernels.distances import negative_squared_distances
from dkfm.kernels.rows import Array

__all__ = ["Gaussian", "Laplacian"]


@dataclass(frozen=True)
class Gaussian(Kernel):
    """The Gaussian kernel, ``exp(-|x - y|^2 / (2 sigma^2))``.

    Parameters
    ----------
    sigma : float, > 0
        The bandwidth, in the units of the columns. scikit-learn's ``gamma`` is ``1 / (2 sigma^2)``.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", eq. (1).
    The error of the exponent is at most ``8 eps (|x-c|^2 + |y-c|^2) / (2 sigma^2)``, c the mean of the landmarks;
    equal rows give exactly 1.

    Examples
    --------
    >>> from dkfm.kernels import Gaussian
    >>> Gaussian(1.0)([[0.0], [1.0]]).round(4)
    array([[1.    , 0.6065],
           [0.6065, 1.    ]])
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "sigma")
        if not 1e-150 < self.sigma < 1e150:
            raise KernelError(f"Gaussian needs a sigma whose square is a number, and got {self.sigma}.")

    @property
    def copies(self) -> int:
        """One, centred and augmented."""
        return 1

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return self.prepare(Y)(X)

    def prepare(self, landmarks: Array) -> Prepared:
        """Centre and augment the landmarks once."""
        exponents = negative_squared_distances(landmarks, 0.5 / self.sigma**2)

        def block(Z: Array) -> Array:
            exponent = exponents(Z)
            return np.exp(exponent, out=exponent)

        return block

    def diagonal(self, X: Array) -> Array:
        """Return ones."""
        return np.ones(len(X))


@dataclass(frozen=True)
class Laplacian(Kernel):
    """The Laplacian kernel, ``exp(-|x - y|_1 / sigma)``, with the sum of absolute differences.

    Parameters
    ----------
    sigma : float, > 0
        The length scale, in the units of the columns. scikit-learn's ``gamma`` is ``1 / sigma``.

    Examples
    --------
    >>> from dkfm.kernels import Laplacian
    >>> Laplacian(2.0)([[0.0, 0.0]], [[1.0, 1.0]]).round(4)
    array([[0.3679]])
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "sigma")

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        exponent = cdist(X, Y, "cityblock")
        exponent /= -self.sigma
        return np.exp(exponent, out=exponent)

    def diagonal(self, X: Array) -> Array:
        """Return ones."""
        return np.ones(len(X))
