"""`ExactFeatureMap`: any kernel as an explicit, exact, finite-dimensional feature map."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dkfm import apply, spectrum
from dkfm.certificate import Certificate, of_map, spread
from dkfm.errors import InvalidInputError
from dkfm.estimators.base import KernelEstimator
from dkfm.estimators.training import Training
from dkfm.kernels import Definiteness, KernelSpec
from dkfm.kernels.base import Kernel
from dkfm.kernels.rows import Array, Rows

if TYPE_CHECKING:
    import dask.array as da

__all__ = ["ExactFeatureMap"]


class ExactFeatureMap(KernelEstimator):
    """The map ``phi(z) = K^(-1/2) [k(x_1, z) .. k(x_N, z)]``, with ``<phi(x_n), phi(z)> = k(x_n, z)`` for every z.

    Parameters
    ----------
    kernel : Kernel, name or Gaussian process kernel of scikit-learn's, or callable
        Of `dkfm.kernels`; or what `kernels.from_sklearn` translates; or "precomputed", for which `fit` takes the Gram
        matrix (as array, dask array or Zarr array) and `transform` the values k(z, x); or a function of two rows,
        which is slow (`kernels.Function` is of blocks).
    kernel_params : mapping, optional
        Parameters of a name.
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
        kernel: KernelSpec,
        *,
        kernel_params: Mapping[str, object] | None = None,
        basis: str = "symmetric",
        rcond: float | None = None,
        on_indefinite: str = "raise",
        tile_rows: int | None = None,
        workspace: str | Path | None = None,
    ) -> None:
        self.kernel = kernel
        self.kernel_params = kernel_params
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
        given = self._begin(X)
        held = [given.gram(self.tile_rows, self.workspace)]  # popped, so that nothing here keeps N^2 values alive
        found = spectrum.factor(held.pop(), self.rcond, self.on_indefinite, _gram_of(given.kernel))
        heads = spectrum.heads(found, self.basis)
        return self._finish(X, given, heads, eigenvalues=found.eigenvalues, dropped=found.dropped)

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

    def residual(self, X: object, diag: object = None) -> Array | da.Array:
        """Return ``k(z, z) - |phi(z)|^2``, clipped at 0: the squared distance from the span of the training points.

        For two new points, ``|<phi(z), phi(w)> - k(z, w)| <= sqrt(residual(z) residual(w))``.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask array of shape (n, d)
        diag : array-like or dask array of shape (n,), optional
            k(z, z), for a precomputed kernel, which does not know it; others do.

        Returns
        -------
        ndarray or lazy dask array of shape (n,)
        """
        check_is_fitted(self, "model_")
        if self.kernel_.of_numbers != (diag is not None):
            raise InvalidInputError(
                "residual needs k(z, z) as diag, for a precomputed kernel does not know it."
                if diag is None
                else f"{self.kernel_!r} computes k(z, z) itself; diag belongs to a precomputed kernel."
            )
        return self._score("residual", X, diag)[:, 0]

    def _measure(self, scorer: apply.Scorer, arrays: dict[str, Array], given: Training, Z: Rows | None) -> Certificate:
        return of_map(scorer, given.some(spread(given.landmarks.shape[0])), Z)

    def _bound(self) -> float:
        # |k(x, z) - <phi(x), phi(z)>|^2 is at most the part of x beyond the kept eigenvectors, times k(z, z).
        dropped = np.abs(self.dropped_).max(initial=4 * np.finfo(np.float64).eps * self.eigenvalues_.max(initial=0.0))
        largest = self.kernel_.diag(self.model_.landmarks).max()
        negative = self.on_indefinite == "clip" and self.n_negative_ > 0
        return np.inf if negative or largest <= 0 else float(4 * np.sqrt(dropped / largest))


def _gram_of(kernel: Kernel) -> str:
    """Say what is decomposed, and of a kernel that is not known to have a root what has one."""
    if kernel.definiteness is Definiteness.CONDITIONAL:
        return f"The Gram matrix of {kernel!r} (only conditionally so: KernelPCA takes it, and Exp(k) has a map)"
    return f"The Gram matrix of {kernel!r}"
