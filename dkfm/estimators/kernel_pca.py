"""`KernelPCA`: principal components in the feature space of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dkfm.core.rows import Array, as_rows
from dkfm.errors import InvalidInputError
from dkfm.estimators.base import check_dtype
from dkfm.estimators.feature_map import ExactFeatureMap
from dkfm.estimators.fitting import components
from dkfm.estimators.fitting.components import SolverOptions
from dkfm.estimators.fitting.training_data import (
    TrainingData,
    apply_weights,
    is_float32,
    load_lazy_frame,
    standardize_columns,
)
from dkfm.estimators.inverse_transform import InverseTransformMixin
from dkfm.execution.blas_threads import limit_blas_threads_in_worker
from dkfm.kernels import KernelSpec
from dkfm.kernels.base import Kernel
from dkfm.numerics import pca
from dkfm.numerics.certificates import certificate
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.pca import ComponentOptions, Weighting
from dkfm.numerics.scorer import Scorer, prepare_scorer

if TYPE_CHECKING:
    import dask.array as da
    from sklearn.utils import Tags


class KernelPCA(InverseTransformMixin):
    """Kernel principal component analysis: ``scores = k(Z, X) b - e'K b``, one product a row.

    Takes the place of scikit-learn's `KernelPCA`: the same parameters mean the same, and there are more.

    Parameters
    ----------
    n_components : int or float, optional
        How many components; or, below 1, the share of the variance that they explain at least, which takes all
        eigenvectors. By default all with an eigenvalue above 1e-12 of the largest.
    kernel : str, callable, Kernel or Gaussian process kernel of scikit-learn's
        As `ExactFeatureMap` takes it; "linear" by default, which is PCA. Only the centred Gram matrix must be positive
        semi-definite.
    gamma, degree, coef0 : float
        Of the kernels that are named and have them; a gamma of None is 1 / d.
    kernel_params : mapping, optional
        Of a callable its keyword arguments; parameters of a name too, where scikit-learn ignores them.
    alpha : float
        The ridge of `inverse_transform`.
    fit_inverse_transform : bool
        Whether to fit what `inverse_transform` needs: another N x N matrix.
    eigen_solver : {"auto", "dense", "arpack", "randomized"}
        "dense": all eigenvectors. "arpack": the first ones, unless they are many, by block Lanczos. "randomized": the
        same, with no more than `iterated_power` products after the first, converged or not. "auto": Lanczos for at most
        one component of 20 rows, of 1,000 rows or more, and where the memory of this process is too small for all
        eigenvectors; the Gram matrix stays in its store where it is too small for that.
    tol : float
        Of "arpack": what a residual may be as a share of its eigenvalue; at 0 what rounding allows.
    max_iter : int, optional
        Of "arpack": products with the Gram matrix.
    iterated_power : int or "auto"
        Of "randomized"; 7, or 4 for more than N / 10 components.
    remove_zero_eig : bool
        Leave out components with an eigenvalue of zero, which `n_components` would keep.
    random_state : int, RandomState or None
        Of the block that Lanczos begins with; by default always the same one.
    copy_X : bool
        Whether the model has rows of its own; without it they must not be changed.
    n_jobs : int, optional
        Without effect: the Gram matrix is computed on the current Dask client, or on all cores.
    centered : bool
        Whether the mean of the training features is taken from them.
    formulation : {"combined", "primal", "dual"}
        Which of the paper's eigenproblems is solved: that of ``H K H``, which the combined and the dual solution share,
        or the covariance of the explicit map, which has two cubic steps and needs a positive semi-definite K. "clip",
        of a kernel that may be none, drops eigenvalues of ``H K H`` in all three.
    on_indefinite : {"auto", "raise", "clip"}
        What to do where the matrix has an eigenvalue more negative than rounding explains. "clip": drop them, and warn.
        "auto" is "clip" for fewer components than have positive eigenvalues, which do not show it, and else "raise".
    dtype : {"float64", "float32"}, or NumPy's, optional
        What scores are computed in, by default what the training rows are in; the components are found in float64.
        float32 keeps those with an eigenvalue above 2e-7 of the largest, as scikit-learn does, costs about half, and
        errs by some 1e-6 of the largest score; by more, and with a warning, for kernels of products of rows far from 0.
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
        Of the centred Gram matrix, descending.
    eigenvectors_ : ndarray of shape (N, q)
        Of unit length. The first training score near the largest magnitude is positive.
    explained_variance_, explained_variance_ratio_ : ndarray of shape (q,)
        The variance of each score, and its share of the variance of the training features, all of it.
    total_variance_, total_weight_ : float
        That variance, and the sum of the weights, N without any. Where a negative part is dropped the variance is the
        sum of all positive eigenvalues over that of the weights; Lanczos does not find them all, and it is NaN.
    model_ : Model
    kernel_ : Kernel
    gamma_ : float
        ``gamma``, or 1 / d.
    X_fit_ : ndarray or csr_array of shape (N, d)
        The training rows; not of a precomputed kernel.
    dual_coef_, X_transformed_fit_ : ndarray of shape (N, d), (N, q)
        After `fit_inverse_transform`.
    mean_, scale_ : ndarray of shape (d,)
        After `fit` with `standardize_columns`.
    sample_weight_ : ndarray of shape (N,)
        After `fit` with weights.
    certificate_ : Certificate
        The Gram matrix of the training scores, measured against the eigenvalues; a negative part has neither.
    n_features_in_ : int

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError, ConvergenceError
        From `fit`: the rows, the kernel, the memory of this process, or `max_iter` will not do.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, section 3, eqs. (8)-(25): the primal, the dual and the combined solution have these
    weights. Components equal scikit-learn's up to sign.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import KernelPCA
    >>> X = np.random.default_rng(0).normal(size=(100, 5))
    >>> KernelPCA(2, kernel="rbf", gamma=0.1).fit(X).transform(X).shape
    (100, 2)
    """

    eigenvalues_: Array
    total_variance_: float
    total_weight_: float
    gamma_: float
    _output: ClassVar[str] = "scores"
    _policies: ClassVar[tuple[str, ...]] = ("auto", "raise", "clip")
    _stored: ClassVar[tuple[str, ...]] = ("n_components", "fit_inverse_transform", "alpha", "centered", "dtype")
    _arrays: ClassVar[tuple[str, ...]] = ("eigenvalues",)
    _optional: ClassVar[tuple[str, ...]] = ("sample_weight", "dual_coef", "X_transformed_fit", "mean", "scale")
    _numbers: ClassVar[tuple[str, ...]] = ("total_variance", "total_weight", "gamma")

    def __init__(
        self,
        n_components: int | float | None = None,
        *,
        kernel: KernelSpec = "linear",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        kernel_params: Mapping[str, object] | None = None,
        alpha: float = 1.0,
        fit_inverse_transform: bool = False,
        eigen_solver: str = "auto",
        tol: float = 0,
        max_iter: int | None = None,
        iterated_power: int | str = "auto",
        remove_zero_eig: bool = False,
        random_state: object = None,
        copy_X: bool = True,  # scikit-learn's name
        n_jobs: int | None = None,
        centered: bool = True,
        formulation: str = "combined",
        on_indefinite: str = "auto",
        dtype: str | None = None,
        tile_rows: int | None = None,
        workspace: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.kernel_params = kernel_params
        self.alpha = alpha
        self.fit_inverse_transform = fit_inverse_transform
        self.eigen_solver = eigen_solver
        self.tol = tol
        self.max_iter = max_iter
        self.iterated_power = iterated_power
        self.remove_zero_eig = remove_zero_eig
        self.random_state = random_state
        self.copy_X = copy_X
        self.n_jobs = n_jobs
        self.centered = centered
        self.formulation = formulation
        self.on_indefinite = on_indefinite
        self.dtype = dtype
        self.tile_rows = tile_rows
        self.workspace = workspace
        self.progress = progress

    def fit(self, X: object, y: object = None, sample_weight: object = None, standardize: bool = False) -> Self:
        """Fit the components to training rows X (N, d).

        The Gram matrix is computed on the current Dask client, or on threads of this process; its eigenvectors here.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (N, d)
            For a precomputed kernel the Gram matrix, (N, N).
        y : object
            Ignored.
        sample_weight : array-like of shape (N,), optional
            Non-negative; the fit is that to rows that are repeated so often. A row of weight 0 is left out.
        standardize : bool
            Whether columns are centred and divided by their standard deviation first. That is part of the kernel, and
            so of the model: `transform` and `dkfm score` take rows as they are.
        """
        kernel, gamma = components.resolve_kernel(self.kernel, self.gamma, self.degree, self.coef0, self.kernel_params)
        columns: dict[str, object] = {}
        wanted, X = self._wanted(X, kernel), load_lazy_frame(X)
        if standardize:
            kernel, columns = standardize_columns(kernel, X, sample_weight)
        given, weights = apply_weights(self._begin(X, kernel, copy=bool(self.copy_X)), sample_weight)
        weighting = Weighting(weights, bool(self.centered))
        if self.fit_inverse_transform:
            self._require_way_back(given, bool(columns))
        with limit_blas_threads_in_worker():
            found = components.fit_components(given, wanted, weighting, self._options(SolverOptions))
            if self.remove_zero_eig:
                found = found.first(int((found.eigenvalues > 0).sum()))
            model = components.components_model(given.kernel, given.landmarks, found, weighting.centered, wanted.dtype)
            measured = certificate.certify_components(prepare_scorer(model), found.eigenvalues, given.tiles(), weights)
            components.warn_of_rounding(measured, wanted.dtype)
            fitted = {**columns, **components.fitted_statistics(found, weighting.total), "certificate": measured}
            fitted["gamma"] = 1 / model.columns if gamma is None else float(gamma)
            fitted |= {} if sample_weight is None else {"sample_weight": weights}
            if self.fit_inverse_transform:
                scores = found.eigenvalues * found.weights / weights[:, np.newaxis]
                fitted |= self._inverse(given, scores, weights, bool(columns))
        return self._finish(X, model, fitted, {"dtype": wanted.dtype.name})

    @classmethod
    def from_map(
        cls,
        feature_map: ExactFeatureMap,
        n_components: int | float | None = None,
        X: object = None,
        *,
        sample_weight: object = None,
        centered: bool = True,
    ) -> Self:
        """Return the components of training rows in the features of a fitted map: no second N x N matrix, nor its root.

        Parameters
        ----------
        feature_map : ExactFeatureMap
        n_components : int or float, optional
            As in the constructor.
        X : array-like or scipy.sparse array of shape (n, d), optional
            The training rows, of which some tiles of features are there at a time. By default the landmarks of a map
            in the symmetric or spectral basis that was fitted to no others; a map with fewer landmarks than training
            rows, as that of pivots, does not keep these.
        sample_weight : array-like of shape (n,), optional
            Of X.
        centered : bool

        Returns
        -------
        KernelPCA
            Fitted, with the kernel, landmarks and precision of the map.

        Examples
        --------
        >>> import numpy as np
        >>> from dkfm import ExactFeatureMap, KernelPCA
        >>> from dkfm.kernels import Gaussian
        >>> X = np.random.default_rng(0).normal(size=(300, 2))
        >>> phi = ExactFeatureMap(Gaussian(2.0), basis="cholesky").fit(X)
        >>> KernelPCA.from_map(phi, 3, X).transform(X[:7]).shape
        (7, 3)
        """
        check_is_fitted(feature_map, "model_")
        X = feature_map._seen(X)
        kernel, dtype = feature_map.model_.kernel, feature_map.model_.dtype
        made = cls(n_components, kernel=kernel, centered=centered, dtype=dtype.name)
        wanted = ComponentOptions(components.check_n_components(n_components), dtype)
        with limit_blas_threads_in_worker():
            whole_map = feature_map._fitted_map()
            model, fitted, whole = components.fit_in_map(whole_map, wanted, bool(centered), X, sample_weight)
        fitted["gamma"] = 1 / model.columns
        return made._finish_from_map(feature_map, model, fitted, {"whole": whole})

    def _wanted(self, X: object, kernel: Kernel) -> ComponentOptions:
        """Return what is asked for, once all parameters are what they can be."""
        for name in ("centered", "fit_inverse_transform", "remove_zero_eig", "copy_X"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise InvalidInputError(f"{name} must be True or False, and is {getattr(self, name)!r}.")
        if self.fit_inverse_transform and kernel.is_precomputed:
            raise InvalidInputError("Cannot fit_inverse_transform with a precomputed kernel, which has no points.")
        self._options(SolverOptions).require()
        given = "float32" if self.dtype is None and is_float32(X) else "float64"
        count = components.check_n_components(self.n_components)
        return ComponentOptions(count, check_dtype(given if self.dtype is None else self.dtype), self.on_indefinite)

    def _of_training(self, X: object) -> Array:
        # From the eigenvectors: no second kernel product. A row without weight has none.
        weights = vars(self).get("sample_weight_")
        if weights is not None:
            # An eigenvector is exact to some eps of its length, and the part of a row is as small as the row's weight.
            too_light = weights.min() < pca.LIGHTEST_WEIGHT * weights.max()
            if too_light or len(weights) != as_rows(X).shape[0]:
                return super()._of_training(X)
        scores: Array = self._weights * self.eigenvalues_ / (1.0 if weights is None else weights[:, np.newaxis])
        return scores.astype(self.model_.dtype, copy=False)

    @property
    def _weights(self) -> Array:
        head = self.model_.head("scores")
        return head.weights[:, : head.columns]

    @property
    def eigenvectors_(self) -> Array:
        """Eigenvectors of the centred Gram matrix, (N, q)."""
        check_is_fitted(self, "model_")
        if not self._fitted_as.get("whole", True):
            raise AttributeError("Components of a map have weights of its landmarks, and no eigenvectors of all rows.")
        weights = vars(self).get("sample_weight_", np.ones(1))
        vectors: Array = self._weights * np.sqrt(self.eigenvalues_) / np.sqrt(weights)[:, np.newaxis]
        return vectors

    @property
    def explained_variance_(self) -> Array:
        """Variance of each score, (q,)."""
        check_is_fitted(self, "model_")
        return self.eigenvalues_ / self.total_weight_

    @property
    def explained_variance_ratio_(self) -> Array:
        """Share of `total_variance_`, (q,): of all components in sum 1; NaN, with a warning, where it is not known."""
        check_is_fitted(self, "model_")
        return components.variance_ratios(self.explained_variance_, self.total_variance_)

    @property
    def X_fit_(self) -> object:  # noqa: N802  # scikit-learn's name
        """The training rows, (N, d)."""
        check_is_fitted(self, "model_")
        if self.kernel_.is_precomputed:
            raise AttributeError("A model of a precomputed kernel keeps no Gram matrix.")
        return self.model_.points

    def reconstruction_error(self, X: object, diag: object = None) -> Array | da.Array:
        """Return the squared distance, in feature space, of rows from the components' span through the mean.

        ``k(z, z) - 2 e'k_z + e'Ke`` less the sum of squared scores, clipped at 0; uncentred ``k(z, z)`` less that sum.
        It tells novel rows from such as the training rows; where a negative part is dropped it is no distance.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (n, d)
        diag : array-like or dask array of shape (n,), optional
            k(z, z), for a precomputed kernel, which does not know it.

        Returns
        -------
        ndarray, or lazy dask array or series, of shape (n,)

        Notes
        -----
        Hoffmann, "Kernel PCA for novelty detection" (2007).

        Examples
        --------
        >>> import numpy as np
        >>> from dkfm import KernelPCA
        >>> X = np.random.default_rng(0).normal(size=(100, 2))
        >>> pca = KernelPCA(20, kernel="rbf", gamma=0.1).fit(X)
        >>> bool(pca.reconstruction_error([[0.0, 0.0]])[0] < 1e-3 < pca.reconstruction_error([[9.0, 9.0]])[0])
        True
        """
        return self._of_similarity("reconstruction_error", X, diag)

    def _measure(self, scorer: Scorer, landmarks: TrainingData, fitted: Mapping[str, object]) -> Certificate:
        values, weights = cast("Array", fitted["eigenvalues"]), cast("Array | None", fitted.get("sample_weight"))
        if not self._fitted_as.get("whole", True):
            return certificate.certify_axes(scorer, values, landmarks.tiles(), self.total_weight_)
        return certificate.certify_components(scorer, values, landmarks.tiles(), weights)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = not self.fit_inverse_transform
        tags.transformer_tags.preserves_dtype = ["float64", "float32"] if self.dtype is None else [str(self.dtype)]
        return tags
