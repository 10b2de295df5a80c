"""Define `KernelPCA`, principal component analysis in the feature space of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast, overload

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dkfm.core.argument_checks import require_flags
from dkfm.core.rows import Array, as_rows
from dkfm.errors import InvalidInputError
from dkfm.estimators.base import choose_dtype
from dkfm.estimators.feature_map import ExactFeatureMap
from dkfm.estimators.fitting import fit_certificates, out_of_core_rows, pca
from dkfm.estimators.fitting.feature_maps import require_fitted_map
from dkfm.estimators.fitting.parameter_types import ComponentPolicy, DType, EigenSolver, Formulation
from dkfm.estimators.inverse_transform import InverseTransformMixin
from dkfm.estimators.standardization import make_standardizing_kernel
from dkfm.estimators.stored.base import StoredEstimator
from dkfm.estimators.stored.components import StoredComponents
from dkfm.execution.blas_threads import single_blas_thread_for_fit, single_blas_thread_in_worker
from dkfm.gram import training_data
from dkfm.gram.fit_checkpoints import keep_states_until_end
from dkfm.kernels import Kernel, KernelSpec
from dkfm.numerics.kernel_components import MIN_WEIGHT_SHARE, ComponentOptions
from dkfm.numerics.weighting import Weighting

if TYPE_CHECKING:
    import dask.array as da
    from sklearn.utils import Tags


class KernelPCA(InverseTransformMixin):
    """Kernel principal component analysis (kernel PCA).

    It has the parameters of scikit-learn's `KernelPCA` and more. Scores are ``k(Z, X) b - e'K b``, e = 1 / N.

    Parameters
    ----------
    n_components : int or float, default=None
        Number of components. A float below 1 is the smallest share of the variance to explain, and needs all
        eigenvectors. None keeps all components with an eigenvalue above 1e-12 of the largest.
    kernel : str, callable, Kernel or Gaussian process kernel of scikit-learn, default="linear"
        Kernel, as for `ExactFeatureMap`; "linear" is PCA. Only the centred Gram matrix must be positive semi-definite.
    gamma : float, default=None
        Coefficient of the named kernels that have one; None is 1 / d.
    degree : float, default=3
        Degree of the polynomial kernel.
    coef0 : float, default=1
        Constant term of the named kernels that have one.
    kernel_params : mapping, default=None
        Keyword arguments of a callable, or parameters of a named kernel, for which scikit-learn ignores them.
    alpha : float, default=1.0
        Ridge penalty of `inverse_transform`.
    fit_inverse_transform : bool, default=False
        Whether to fit `inverse_transform`, which needs a second N x N matrix.
    eigen_solver : {"auto", "dense", "arpack", "randomized"}, default="auto"
        "dense" is LAPACK's eigendecomposition. "arpack" is block Lanczos. "randomized" is Lanczos that stops after
        `iterated_power` products beyond the first. Above about N / 8 components, both fall back to "dense". "auto" is
        Lanczos for N >= 1,400 and at most N / 40 components, or if memory is too small for "dense". The Gram matrix of
        Lanczos is in memory up to N = 4,096; above, in memory, on disk or recomputed, by the lowest predicted time.
    tol : float, default=0
        Convergence tolerance of Lanczos: largest residual, relative to its eigenvalue. 0 is the limit set by rounding.
    max_iter : int, default=None
        Largest number of products with the Gram matrix; None is 1,000 for "arpack", max(200, N / 40) for "auto".
    iterated_power : int or "auto", default="auto"
        Products of "randomized" after the first. "auto" is 7, or 4 for at least N / 10 components.
    remove_zero_eig : bool, default=False
        Whether to remove components with a zero eigenvalue, which an integer `n_components` would keep.
    random_state : int, RandomState or None, default=None
        Seed of the block with which Lanczos starts; None starts with the same block each time.
    copy_X : bool, default=True
        Whether the model copies the training rows. Without a copy, X must not be changed after `fit`.
    n_jobs : int, default=None
        Ignored: the Gram matrix is computed on the current Dask client, or on all cores.
    centered : bool, default=True
        Whether to subtract the mean of the training features.
    formulation : {"combined", "primal", "dual"}, default="combined"
        Eigenproblem: "combined" and "dual" decompose ``H K H``, "primal" the covariance of the explicit map, which
        takes two cubic steps and a positive semi-definite K. With on_indefinite="clip" it decomposes ``H K H`` too.
    on_indefinite : {"auto", "raise", "clip"}, default="auto"
        Action if an eigenvalue is more negative than rounding explains: raise an error, or drop ("clip") the negative
        ones and warn. "auto" is "clip" if `n_components` is an integer up to the number of positive eigenvalues, whose
        components the negative ones do not affect, and "raise" otherwise.
    dtype : {"float64", "float32"} or NumPy dtype, default=None
        Precision of the scores; None is that of the training rows. Components are always computed in float64. float32
        halves the cost, keeps components with an eigenvalue above 2e-7 of the largest, as scikit-learn does, and has an
        error of about 1e-6 of the largest score; more, with a warning, for inner-product kernels of rows far from 0.
    tile_rows : int, default=None
        Rows and columns of a tile of the Gram matrix; None is 2,048. A matrix of one tile is not stored.
    workspace : path, default=None
        Folder for the Gram matrix, the state of a killed fit, and large models for dask arrays; None: a temporary one.
    progress : bool, default=True
        Whether to show Gram tiles done and predicted times of work over 2 seconds, in a notebook or terminal (stderr).

    Attributes
    ----------
    eigenvalues_ : ndarray of shape (q,)
        Eigenvalues of the centred Gram matrix, in descending order.
    eigenvectors_ : ndarray of shape (N, q)
        Eigenvectors of unit length. After `fit`, the first training score near the largest magnitude is positive.
    explained_variance_, explained_variance_ratio_ : ndarray of shape (q,)
        Variance of each score, and its share of `total_variance_`.
    total_variance_ : float
        Variance of the training features; after `from_map`, of the features of the map. If negative eigenvalues are
        dropped, the sum of all positive ones over `total_weight_`; NaN after Lanczos, which does not find all of them.
    total_weight_ : float
        Sum of the sample weights; N without weights.
    model_ : Model
        Fitted kernel, landmarks and heads.
    kernel_ : Kernel
        Fitted kernel, with all parameters resolved.
    gamma_ : float
        `gamma`, or 1 / d if it is None.
    X_fit_ : ndarray or csr_array of shape (N, d)
        Training rows; not available for a precomputed kernel.
    dual_coef_, X_transformed_fit_ : ndarray of shape (N, d) and (N, q)
        Coefficients of `inverse_transform`, and scores of the training rows; only if fit_inverse_transform=True.
    mean_, scale_ : ndarray of shape (d,)
        Mean and standard deviation of each column, after `fit` with standardize=True.
    sample_weight_ : ndarray of shape (N,)
        Positive weights of the training rows, after `fit` with weights.
    certificate_ : Certificate
        Error of the Gram matrix of the training scores against the eigenvalues; a dropped negative part is ignored.
    n_features_in_, feature_names_in_ : int, ndarray of shape (d,)
        Number of columns d of the training rows, and their names if the fit had names that are all strings.

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError, ConvergenceError
        Raised by `fit`: invalid rows or kernel, too little memory, or no convergence within `max_iter` products.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, section 3, eqs. (8)-(25): the primal, dual and combined solutions have the same weights.
    Components equal those of scikit-learn up to sign.

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
    _output_head_name: ClassVar[str] = StoredComponents.output_head_name
    _indefinite_policies: ClassVar[tuple[str, ...]] = ("auto", "raise", "clip")
    _stored_estimator_class: ClassVar[type[StoredEstimator]] = StoredComponents

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
        eigen_solver: EigenSolver = "auto",
        tol: float = 0,
        max_iter: int | None = None,
        iterated_power: int | Literal["auto"] = "auto",
        remove_zero_eig: bool = False,
        random_state: object = None,
        copy_X: bool = True,  # scikit-learn's name
        n_jobs: int | None = None,
        centered: bool = True,
        formulation: Formulation = "combined",
        on_indefinite: ComponentPolicy = "auto",
        dtype: DType | None = None,
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
        """Fit the components to training rows X.

        The current Dask client, or threads of this process, compute the Gram matrix; this process its eigenvectors.

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask collection, path, URL or zarr.Array of shape (N, d)
            Training rows, which are read into memory; for a precomputed kernel, the Gram matrix (N, N).
        y : object, default=None
            Ignored.
        sample_weight : array-like of shape (N,), default=None
            Non-negative weights. A row of weight w counts as w equal rows, but once in a median width; 0 leaves it out.
        standardize : bool, default=False
            Whether the model scales columns to mean 0 and variance 1; `transform` and `dkfm score` take unscaled rows.
        """
        require_flags(standardize=standardize)
        given = self.kernel, self.gamma, self.degree, self.coef0, self.kernel_params
        kernel, gamma = pca.resolve_kernel_and_gamma(*given)
        if out_of_core_rows.is_stored_or_lazy(X, kernel, streams=False):
            return self._fit_stored_rows(X, False, y, sample_weight, standardize)
        options, X = self._component_options(X, kernel), training_data.compute_lazy_frame(X)
        kernel, columns = make_standardizing_kernel(kernel, X, sample_weight) if standardize else (kernel, {})
        rows = self._check_data(X, kernel, copy=bool(self.copy_X))
        rows, weights = training_data.drop_zero_weights(rows, sample_weight, kernel)
        weighting = Weighting(weights, bool(self.centered))
        self._log_fit(rows)
        if self.fit_inverse_transform:
            self._require_invertible(rows)
        with keep_states_until_end(), single_blas_thread_for_fit(len(weights)):
            result = pca.fit_components(rows, options, weighting, self._get_options(pca.SolverOptions))
            if self.remove_zero_eig:
                result = result.truncate(int((result.eigenvalues > 0).sum()))
            eigenvalues, tiles, shown = result.eigenvalues, rows.iter_row_tiles(), self.progress
            model = pca.make_components_model(rows.kernel, rows.indexable_rows, result, self.centered, options.dtype)
            measured = fit_certificates.certify_components(model, eigenvalues, tiles, weights, self.workspace, shown)
            fitted = {**columns, **pca.collect_fitted(result, weighting.total), "certificate": measured}
            fitted["gamma"] = 1 / model.n_features_in if gamma is None else float(gamma)
            fitted |= {} if sample_weight is None else {"sample_weight": weights}
            if self.fit_inverse_transform:
                scores = eigenvalues * result.weights / weights[:, np.newaxis]
                fitted |= self._fit_inverse(rows, scores, weights)
        return self._set_fitted(X, model, fitted, {"dtype": options.dtype.name})

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
        """Fit the components in the features of a fitted map, without another N x N matrix or root.

        Parameters
        ----------
        feature_map : ExactFeatureMap
            Fitted feature map.
        n_components : int or float, default=None
            Number of components or share of the variance, as in the constructor.
        X : array-like, scipy.sparse array, dask collection, path, URL or zarr.Array of shape (n, d), default=None
            Training rows. Their features are computed in tiles; tasks compute those of stored rows and of a dask
            collection. X may be None only if all training rows are landmarks of a symmetric or spectral map.
        sample_weight : array-like of shape (n,), default=None
            Non-negative weights of X.
        centered : bool, default=True
            Whether to subtract the mean of the training features.

        Returns
        -------
        KernelPCA
            Fitted estimator with the kernel, landmarks and precision of the map.

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
        require_fitted_map(feature_map)
        fitted_map = feature_map._fitted_map()
        dtype = cast("DType", fitted_map.model.dtype.name)
        estimator = cls(n_components, kernel=feature_map.kernel_, centered=centered, dtype=dtype)
        options = ComponentOptions(pca.check_n_components(n_components), fitted_map.model.dtype)
        with feature_map._open_rows(X) as rows, single_blas_thread_in_worker():
            model, fitted, whole = pca.fit_in_map(fitted_map, options, bool(centered), rows, sample_weight)
        fitted["gamma"] = 1 / model.n_features_in
        return estimator._set_fitted_from_map(feature_map, model, fitted, whole=whole)

    def _component_options(self, X: object, kernel: Kernel) -> ComponentOptions:
        """Check the parameters; return the options of the components."""
        flags = "centered", "fit_inverse_transform", "remove_zero_eig", "copy_X"
        require_flags(**{name: getattr(self, name) for name in flags})
        if self.fit_inverse_transform and kernel.is_precomputed:
            raise InvalidInputError("Cannot fit_inverse_transform with a precomputed kernel, which has no points.")
        self._get_options(pca.SolverOptions).validate()
        n_components, dtype = pca.check_n_components(self.n_components), choose_dtype(self.dtype, X)
        return ComponentOptions(n_components, dtype, self.on_indefinite)

    def _transform_training_rows(self, X: object) -> Array:
        # Eigenvectors save a second kernel product, but lack rows of weight 0, and round for rows of small weight.
        weights = vars(self).get("sample_weight_")
        if weights is not None:
            too_light = weights.min() < MIN_WEIGHT_SHARE * weights.max()
            if too_light or len(weights) != as_rows(X).shape[0]:
                return super()._transform_training_rows(X)
        divisors = 1.0 if weights is None else weights[:, np.newaxis]
        return np.asarray(self._component_weights * self.eigenvalues_ / divisors, self.model_.dtype)

    @property
    def _component_weights(self) -> Array:
        head = self.model_.head("scores")
        return head.weights[:, : head.n_columns]

    @property
    def eigenvectors_(self) -> Array:
        """Eigenvectors of the centred Gram matrix, of shape (N, q)."""
        check_is_fitted(self, "model_")
        if (whole := self._params_at_fit.get("whole")) is False:
            raise AttributeError("Components of a map have weights of its landmarks, and no eigenvectors of all rows.")
        roots, weights = np.sqrt(self.eigenvalues_), vars(self).get("sample_weight_", np.ones(1))
        vectors: Array = self._component_weights * roots / np.sqrt(weights)[:, np.newaxis]
        if whole:  # the weights of a map may also have a part in the null space of the Gram matrix
            np.divide(self._get_scorer()("scores", self.model_.original_landmarks), roots, out=vectors, where=roots > 0)
        return vectors

    @property
    def explained_variance_(self) -> Array:
        """Variance of each score, of shape (q,)."""
        check_is_fitted(self, "model_")
        return self.eigenvalues_ / self.total_weight_

    @property
    def explained_variance_ratio_(self) -> Array:
        """Shares of `total_variance_`, of shape (q,): 1 in sum for all components; NaN, with a warning, if unknown."""
        check_is_fitted(self, "model_")
        return pca.variance_ratios(self.explained_variance_, self.total_variance_)

    @property
    def X_fit_(self) -> object:  # noqa: N802  # scikit-learn's name
        """Training rows, of shape (N, d)."""
        check_is_fitted(self, "model_")
        if self.kernel_.is_precomputed:
            raise AttributeError("A model of a precomputed kernel keeps no Gram matrix.")
        return self.model_.original_landmarks

    @overload
    def reconstruction_error(self, X: da.Array, diag: object = None) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def reconstruction_error(self, X: object, diag: object = None) -> Array: ...

    def reconstruction_error(self, X: object, diag: object = None) -> Array | da.Array:
        """Return the squared distance of rows, in feature space, from the span of the components through the mean.

        It is ``k(z, z) - 2 e'k_z + e'Ke`` minus the sum of squared scores, clipped at 0; without centring, ``k(z, z)``
        minus that sum. It is not a distance if a negative part was dropped. Large values indicate novel rows: Hoffmann,
        "Kernel PCA for novelty detection" (2007).

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (n, d)
            Rows.
        diag : array-like or dask array of shape (n,), default=None
            Values k(z, z) of the rows; required for a precomputed kernel, and only for one.

        Returns
        -------
        ndarray, or lazy dask array or series, of shape (n,)
            Squared distances.

        Examples
        --------
        >>> import numpy as np
        >>> from dkfm import KernelPCA
        >>> X = np.random.default_rng(0).normal(size=(100, 2))
        >>> pca = KernelPCA(20, kernel="rbf", gamma=0.1).fit(X)
        >>> bool(pca.reconstruction_error([[0.0, 0.0]])[0] < 1e-3 < pca.reconstruction_error([[9.0, 9.0]])[0])
        True
        """
        return self._score_with_diagonal("reconstruction_error", X, diag)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = not self.fit_inverse_transform
        tags.transformer_tags.preserves_dtype = ["float64", "float32"] if self.dtype is None else [str(self.dtype)]
        return tags
