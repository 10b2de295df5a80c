"""`ExactFeatureMap`: any kernel as an explicit, exact, finite-dimensional feature map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from dkfm import apply, spectrum
from dkfm.certificate import Certificate, of_map
from dkfm.estimators.base import KernelEstimator
from dkfm.kernels.base import Kernel
from dkfm.kernels.rows import Array
from dkfm.model import Model

if TYPE_CHECKING:
    import dask.array as da

__all__ = ["ExactFeatureMap"]


class ExactFeatureMap(KernelEstimator):
    """The map ``phi(z) = K^(-1/2) [k(x_1, z) .. k(x_N, z)]``, with ``<phi(x_n), phi(z)> = k(x_n, z)`` for every z.

    Parameters
    ----------
    kernel : Kernel
        Of `dkfm.kernels`.
    basis : {"symmetric", "spectral"}
        "symmetric": N features, one per training point; "spectral": as many as the rank. The inner products are equal.
    rcond : float, optional
        Eigenvalues up to ``rcond * lambda_max`` are taken for zero; ``4 eps`` by default.
    on_indefinite : {"raise", "clip"}
        What to do with a kernel that is not positive semi-definite: refuse it, or drop its negative part and warn.
    tile_rows : int, optional
        Rows and columns of a Gram tile; 2,048 by default. One tile is computed in this process, without a store.
    workspace : path, optional
        Where the Gram matrix (and a large model, for dask arrays) is kept; by default a temporary directory.

    Attributes
    ----------
    model_ : Model
        The fitted kernel, landmarks and heads.
    kernel_ : Kernel
    eigenvalues_ : ndarray of shape (rank_,)
        Those kept, descending.
    dropped_ : ndarray of shape (N - rank_,)
        The eigenvalues taken for zero.
    rank_, n_negative_ : int
    condition_ : float
        Largest over smallest kept eigenvalue.
    certificate_ : Certificate
        Exactness as measured on pairs of training points; `verify` measures it on others.
    n_features_in_ : int

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError
        From `fit`: the rows, the kernel, or the memory of this process will not do.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", Theorem 1 and
    eq. (4). For two points that are both new it is exact up to `residual`.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import ExactFeatureMap
    >>> from dkfm.kernels import Gaussian
    >>> rng = np.random.default_rng(0)
    >>> X, Z = rng.normal(size=(100, 5)), rng.normal(size=(7, 5))
    >>> phi = ExactFeatureMap(Gaussian(2.0)).fit(X)
    >>> bool(np.allclose(phi.transform(X) @ phi.transform(Z).T, Gaussian(2.0)(X, Z), rtol=0, atol=1e-12))
    True
    """

    eigenvalues_: Array
    dropped_: Array
    _output: ClassVar[str] = "features"
    _stored: ClassVar[tuple[str, ...]] = ("basis", "rcond", "on_indefinite")
    _arrays: ClassVar[tuple[str, ...]] = ("eigenvalues", "dropped")

    def __init__(
        self,
        kernel: Kernel,
        *,
        basis: str = "symmetric",
        rcond: float | None = None,
        on_indefinite: str = "raise",
        tile_rows: int | None = None,
        workspace: str | Path | None = None,
    ) -> None:
        self.kernel = kernel
        self.basis = basis
        self.rcond = rcond
        self.on_indefinite = on_indefinite
        self.tile_rows = tile_rows
        self.workspace = workspace

    def fit(self, X: object, y: object = None) -> Self:
        """Fit the map to training rows X (N, d); y is ignored.

        The Gram matrix is computed on the current Dask client, or on threads of this process; its root here, once.
        """
        spectrum.require_parameters(self.basis, self.rcond)
        kernel, landmarks = self._begin(X)
        held = [self._gram(kernel, landmarks)]  # popped, so that nothing here keeps N^2 values alive
        found = spectrum.factor(held.pop(), self.rcond, self.on_indefinite)
        model = Model(kernel, landmarks, spectrum.heads(found, self.basis))
        return self._finish(X, model, eigenvalues=found.eigenvalues, dropped=found.dropped)

    @property
    def rank_(self) -> int:
        """Numerical rank of the Gram matrix."""
        return len(self.eigenvalues_)

    @property
    def n_negative_(self) -> int:
        """How many eigenvalues came out negative."""
        return int((self.dropped_ < 0).sum())

    @property
    def condition_(self) -> float:
        """Largest over smallest kept eigenvalue; 1 where none is kept."""
        return spectrum.condition(self.eigenvalues_)

    def residual(self, X: object) -> Array | da.Array:
        """Return ``k(z, z) - |phi(z)|^2``, clipped at 0: the squared distance from the span of the training points.

        For two new points, ``|<phi(z), phi(w)> - k(z, w)| <= sqrt(residual(z) residual(w))``.

        Parameters
        ----------
        X : array-like or dask array of shape (n, d)

        Returns
        -------
        ndarray or lazy dask array of shape (n,)
        """
        return self._score("residual", X)[:, 0]

    def _measure(self, scorer: apply.Scorer, arrays: dict[str, Array], Z: Array | None) -> Certificate:
        return of_map(scorer, Z)

    def _bound(self) -> float:
        # |k(x, z) - <phi(x), phi(z)>|^2 is at most the part of x beyond the kept eigenvectors, times k(z, z).
        dropped = np.abs(self.dropped_).max(initial=4 * np.finfo(np.float64).eps * self.eigenvalues_.max(initial=0.0))
        largest = self.kernel_.diag(self.model_.landmarks).max()
        negative = self.on_indefinite == "clip" and self.n_negative_ > 0
        return np.inf if negative or largest <= 0 else float(4 * np.sqrt(dropped / largest))
