"""`KernelPCA`: principal components in the feature space of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from dkfm import apply, pca
from dkfm.certificate import Certificate, of_components
from dkfm.errors import InvalidInputError
from dkfm.estimators.base import KernelEstimator
from dkfm.estimators.training import Training
from dkfm.kernels import KernelSpec
from dkfm.kernels.dot import Linear
from dkfm.kernels.rows import Array, Rows
from dkfm.model import Head
from dkfm.tiling import require_count

__all__ = ["KernelPCA"]


class KernelPCA(KernelEstimator):
    """Kernel principal component analysis: ``scores = k(Z, X) b - e'K b``, one product a row.

    Parameters
    ----------
    n_components : int, optional
        How many components; by default all with an eigenvalue above 1e-12 of the largest.
    kernel : Kernel, name or Gaussian process kernel of scikit-learn's, or callable
        As `ExactFeatureMap` takes it; linear by default, which is PCA. Only the centred Gram matrix must be positive
        semi-definite.
    kernel_params : mapping, optional
        Parameters of a name.
    on_indefinite : {"raise", "clip"}
        What to do where it is not.
    tile_rows : int, optional
        Rows and columns of a Gram tile; 2,048 by default. One tile is computed in this process, without a store.
    workspace : path, optional
        Where the Gram matrix (and a large model, for dask arrays) is kept; by default a temporary directory.

    Attributes
    ----------
    eigenvalues_ : ndarray of shape (q,)
        Of the centred Gram matrix, descending; divided by N they are variances.
    eigenvectors_ : ndarray of shape (N, q)
        Of unit length. The first entry near the largest magnitude is positive.
    model_ : Model
    kernel_ : Kernel
    certificate_ : Certificate
        The Gram matrix of the training scores, measured against the eigenvalues.
    n_features_in_ : int

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError
        From `fit`: the rows, the kernel, or the memory of this process will not do.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, section 3, eqs. (8)-(25): the primal, the dual and the combined solution have these
    weights. Components equal scikit-learn's up to sign.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import KernelPCA
    >>> from dkfm.kernels import Gaussian
    >>> X = np.random.default_rng(0).normal(size=(100, 5))
    >>> KernelPCA(2, kernel=Gaussian(3.0)).fit(X).transform(X).shape
    (100, 2)
    """

    eigenvalues_: Array
    _output: ClassVar[str] = "scores"
    _stored: ClassVar[tuple[str, ...]] = ("n_components", "on_indefinite")
    _arrays: ClassVar[tuple[str, ...]] = ("eigenvalues",)

    def __init__(
        self,
        n_components: int | None = None,
        *,
        kernel: KernelSpec = Linear(),  # noqa: B008  # a frozen value
        kernel_params: Mapping[str, object] | None = None,
        on_indefinite: str = "raise",
        tile_rows: int | None = None,
        workspace: str | Path | None = None,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.kernel_params = kernel_params
        self.on_indefinite = on_indefinite
        self.tile_rows = tile_rows
        self.workspace = workspace

    def fit(self, X: object, y: object = None) -> Self:
        """Fit the components to training rows X (N, d); y is ignored.

        The Gram matrix is computed on the current Dask client, or on threads of this process; its eigenvectors here.
        """
        q = None if self.n_components is None else require_count(self.n_components, "n_components")
        given = self._begin(X)
        held = [given.gram(self.tile_rows, self.workspace)]  # popped, so that nothing here keeps N^2 values alive
        found = pca.components(held.pop(), q, self.on_indefinite)
        return self._finish(X, given, {"scores": Head(found.weights, found.offset)}, eigenvalues=found.eigenvalues)

    def fit_transform(self, X: object, y: object = None) -> Array:
        """Fit, and return the scores of the training rows, (N, q), from the eigenvectors: no second kernel product."""
        self.fit(X)
        return self.eigenvectors_ * np.sqrt(self.eigenvalues_)

    @property
    def eigenvectors_(self) -> Array:
        """Eigenvectors of the centred Gram matrix, (N, q)."""
        return self.model_.heads["scores"].weights * np.sqrt(self.eigenvalues_)

    def _measure(self, scorer: apply.Scorer, arrays: dict[str, Array], given: Training, Z: Rows | None) -> Certificate:
        if Z is not None:
            raise InvalidInputError("Components are measured on their training rows alone; give no other points.")
        return of_components(scorer, arrays["eigenvalues"], given.tiles())
