"""`KernelPCA`: principal components in the feature space of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self, cast

import numpy as np

from dkfm import apply, budget, pca, preflight, progress
from dkfm.certificate import Certificate, of_components
from dkfm.estimators.base import KernelEstimator, precision
from dkfm.estimators.mapping import in_precision
from dkfm.estimators.training import Training, in_memory
from dkfm.kernels import KernelSpec
from dkfm.kernels.dot import Linear
from dkfm.kernels.rows import Array
from dkfm.model import Head, Model
from dkfm.tiling import require_count
from dkfm.workers import threads_of_a_task

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
    dtype : {"float64", "float32"}, or NumPy's
        What scores are computed in; the components are found in float64. float32 keeps those with an eigenvalue above
        2e-7 of the largest, as scikit-learn does, costs about half, and errs by some 1e-6 of the largest score.
    tile_rows : int, optional
        Rows and columns of a Gram tile; 2,048 by default. One tile is computed in this process, without a store.
    workspace : path, optional
        Where the Gram matrix (and a large model, for dask arrays) is kept; by default a temporary directory.
    progress : bool
        Whether to show, in a notebook or on standard error where that is a terminal, the tiles of the Gram matrix as
        they come and the time that its root is predicted to take; nothing of what takes less than two seconds.

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
    _stored: ClassVar[tuple[str, ...]] = ("n_components", "on_indefinite", "dtype")
    _arrays: ClassVar[tuple[str, ...]] = ("eigenvalues",)

    def __init__(
        self,
        n_components: int | None = None,
        *,
        kernel: KernelSpec = Linear(),  # noqa: B008  # a frozen value
        kernel_params: Mapping[str, object] | None = None,
        on_indefinite: str = "raise",
        dtype: str = "float64",
        tile_rows: int | None = None,
        workspace: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.kernel_params = kernel_params
        self.on_indefinite = on_indefinite
        self.dtype = dtype
        self.tile_rows = tile_rows
        self.workspace = workspace
        self.progress = progress

    def fit(self, X: object, y: object = None) -> Self:
        """Fit the components to training rows X (N, d); y is ignored.

        The Gram matrix is computed on the current Dask client, or on threads of this process; its eigenvectors here.
        """
        q = None if self.n_components is None else require_count(self.n_components, "n_components")
        dtype, X = precision(self.dtype), in_memory(X)
        given = self._begin(X)
        n, kernel = given.landmarks.shape[0], given.kernel
        preflight.require_driver(n, given.width, kernel.blocks, kernel.copies)
        with threads_of_a_task():
            # Popped, so that nothing here keeps N^2 values alive.
            held = [given.gram(self.tile_rows, self.workspace, self.progress)]
            with progress.of_call("dkfm-root", budget.root_seconds(n), self.progress):
                found = pca.components(held.pop(), q, self.on_indefinite, dtype)
            model = in_precision(Model(kernel, given.landmarks, {"scores": Head(found.weights, found.offset)}), dtype)
            fitted = {"eigenvalues": found.eigenvalues}
            certificate = self._measure(apply.prepare(model), given, fitted)
        return self._finish(X, model, {**fitted, "certificate": certificate})

    def fit_transform(self, X: object, y: object = None) -> Array:
        """Fit, and return the scores of the training rows, (N, q), from the eigenvectors: no second kernel product."""
        self.fit(X)
        scores: Array = self.eigenvectors_ * np.sqrt(self.eigenvalues_)
        return scores.astype(self.model_.dtype, copy=False)

    @property
    def eigenvectors_(self) -> Array:
        """Eigenvectors of the centred Gram matrix, (N, q)."""
        return self.model_.heads["scores"].weights * np.sqrt(self.eigenvalues_)

    def _measure(self, scorer: apply.Scorer, landmarks: Training, fitted: Mapping[str, object]) -> Certificate:
        return of_components(scorer, cast("Array", fitted["eigenvalues"]), landmarks.tiles())
