"""Define `KernelFisher`, Fisher discriminants in the feature space of a kernel, and their classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast, overload

import numpy as np
from scipy.special import log_expit, log_softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from dkfm.core.argument_checks import require_flags
from dkfm.core.chunking import require_count
from dkfm.core.rows import Array, as_rows
from dkfm.errors import InvalidInputError
from dkfm.estimators.base import KernelTransformer, choose_dtype
from dkfm.estimators.feature_map import ExactFeatureMap
from dkfm.estimators.fitting import class_labels, discriminants, out_of_core_rows
from dkfm.estimators.fitting.class_labels import Predictions, codes_to_labels, flatten_column
from dkfm.estimators.fitting.discriminants import DiscriminantOptions
from dkfm.estimators.fitting.feature_maps import require_fitted_map
from dkfm.estimators.fitting.parameter_types import DType, IndefinitePolicy, Solver
from dkfm.estimators.fitting.pca import resolve_kernel_and_gamma
from dkfm.estimators.standardization import make_standardizing_kernel
from dkfm.estimators.stored.base import StoredEstimator
from dkfm.estimators.stored.class_labels import Labels
from dkfm.estimators.stored.discriminants import StoredDiscriminants
from dkfm.execution.blas_threads import single_blas_thread_for_fit, single_blas_thread_in_worker
from dkfm.execution.lazy_scoring import set_dashboard_name
from dkfm.gram import training_data
from dkfm.gram.streamed_rows import SourceRows
from dkfm.gram.training_data import Indices
from dkfm.kernels import KernelSpec

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import numpy.typing as npt
    from sklearn.utils import Tags


class KernelFisher(ClassifierMixin, KernelTransformer):  # type: ignore[misc]  # scikit-learn has no types
    """Kernel Fisher discriminant analysis, for dimensionality reduction and classification.

    This is linear discriminant analysis in the feature space of a kernel. A discriminant u maximizes the variance
    between the classes, ``u' S_b u``, relative to that within them, ``u' (S_w + lambda) u``. `transform` projects rows
    on the discriminants, and `predict` classifies by them; each is one product ``k(Z, X) W - b``.

    Parameters
    ----------
    n_components : int, default=None
        Number of discriminants that `transform` returns, at most C - 1 for C classes. None is all that separate the
        classes. Predictions always use all of them.
    kernel : Kernel, str, callable or Gaussian process kernel of scikit-learn, default="linear"
        Kernel, as for `KernelPCA`.
    gamma : float, default=None
        Coefficient of the named kernels that have one; None is 1 / d.
    degree : float, default=3
        Degree of the polynomial kernel.
    coef0 : float, default=1
        Constant term of the named kernels that have one.
    kernel_params : mapping, default=None
        Keyword arguments of a callable, or further parameters of a named kernel.
    shrinkage : float or "auto", default=1e-3
        Regularization ``lambda = shrinkage tr(S_w) / N`` for N training rows, independent of the basis of the feature
        space. Without it, N points in N dimensions have discriminants for any labels. "auto" selects a value from 1e-6
        to 100 by deterministic five-fold cross-validation. It decomposes the Gram matrix once. Each fold needs its own
        decomposition if on_indefinite="clip" and the kernel may be indefinite, or if the rows of one fold have 99 % of
        the sum of all k(x, x).
    priors : array-like of shape (C,), default=None
        Probabilities of the classes; None is their frequencies in the training rows.
    solver : {"auto", "dense", "tiled", "cg"}, default="auto"
        How the systems are solved, as for `KernelRidge`; "cg" stops at a residual of 1e-10.
    on_indefinite : {"raise", "clip"}, default="raise"
        Action if the centred Gram matrix is not positive semi-definite: raise, or drop its negative part and warn.
    dtype : {"float64", "float32"} or NumPy dtype, default=None
        Precision of the fitted model; None is that of the training rows. The fit itself is in float64.
    tile_rows : int, default=None
        Rows and columns of a tile of the Gram matrix; None is 2,048. A matrix of one tile is not stored.
    workspace : path, default=None
        Folder for the Gram matrix or its factor, and for a large model that tasks on dask arrays read; None is a
        temporary directory.
    progress : bool, default=True
        Whether to show the Gram tiles done, for work of more than 2 seconds, in a notebook or a terminal (on stderr).

    Attributes
    ----------
    classes_ : ndarray of shape (C,)
        Class labels, in ascending order.
    priors_ : ndarray of shape (C,)
        Probabilities of the classes.
    shrinkage_ : float
        Shrinkage as given, or as selected by "auto".
    ridge_ : float
        Regularization ``lambda``.
    ratios_ : ndarray of shape (q,)
        Variance between the classes along each discriminant, relative to the variance within them plus `ridge_`, in
        descending order.
    means_ : ndarray of shape (C, q)
        Scores of the class means. The score of largest magnitude is positive for each discriminant.
    explained_variance_ratio_ : ndarray of shape (n_components,)
        Share of each discriminant in the sum of `ratios_`.
    model_ : Model
        Fitted kernel, landmarks and heads.
    kernel_ : Kernel
        Fitted kernel, with all parameters resolved.
    certificate_ : Certificate
        Measured error of the scores and decisions of the training rows: their covariance within the classes and their
        class means, compared with the exact values. After `fit`, at least an estimate of the effect of rounding. After
        `from_map` in float32, also that of the outputs of a sample of landmarks, compared with those in float64.
    verified_certificate_ : Certificate
        The certificate without the estimate and the sample; `verify` measures it again. Models of earlier versions do
        not have it.
    sample_weight_ : ndarray of shape (N,)
        Positive weights of the training rows, after `fit` with weights.
    codes_ : ndarray of shape (N,)
        Class of each training row, as its position in `classes_`, after `fit`; `verify` needs them.
    squares_, mean_ : ndarray of shape (q, q) and (n_landmarks,)
        Inner products of the discriminants, and coefficients of the landmarks in the mean of the training features,
        after `from_map`; `verify` needs them.
    n_features_in_, feature_names_in_ : int, ndarray of shape (d,)
        Number of columns d of the training rows, and their names if the fit had names that are all strings.

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError
        Raised by `fit`: invalid rows, labels or kernel, too little memory in this process, or a shrinkage too small for
        a singular covariance within the classes.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, section 4 (figures 3 and 4); Mika et al., "Fisher discriminant analysis with kernels"
    (1999). Predictions are those of linear discriminant analysis on the explicit features with the covariance
    ``S_w + lambda``. scikit-learn's `LinearDiscriminantAnalysis` shrinks towards ``tr(S_w) / r`` for r features, which
    depends on the basis; with solver="eigen" it shrinks the covariance between the classes as well.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from dkfm import KernelFisher
    >>> X, y = load_digits(return_X_y=True)
    >>> fda = KernelFisher(kernel="rbf", gamma=1e-3).fit(X[:600], y[:600])
    >>> fda.transform(X[600:]).shape, bool(fda.score(X[600:], y[600:]) > 0.95)
    ((1197, 9), True)
    """

    classes_: Labels
    priors_: Array
    ratios_: Array
    means_: Array
    shrinkage_: float
    ridge_: float
    _output_head_name: ClassVar[str] = StoredDiscriminants.output_head_name
    _stored_estimator_class: ClassVar[type[StoredEstimator]] = StoredDiscriminants

    def __init__(
        self,
        n_components: int | None = None,
        *,
        kernel: KernelSpec = "linear",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        kernel_params: Mapping[str, object] | None = None,
        shrinkage: float | Literal["auto"] = 1e-3,
        priors: object = None,
        solver: Solver = "auto",
        on_indefinite: IndefinitePolicy = "raise",
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
        self.shrinkage = shrinkage
        self.priors = priors
        self.solver = solver
        self.on_indefinite = on_indefinite
        self.dtype = dtype
        self.tile_rows = tile_rows
        self.workspace = workspace
        self.progress = progress

    def fit(self, X: object, y: object, sample_weight: object = None, standardize: bool = False) -> Self:
        """Fit the discriminants to training rows X with labels y.

        The Gram matrix is computed on the current Dask client, or on threads of this process; its factor in this
        process, unless the solver is "tiled" or "cg".

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask collection, path, URL or zarr.Array of shape (N, d)
            Training rows, which are read into memory; for a precomputed kernel, the Gram matrix (N, N).
        y : array-like of shape (N,)
            Class labels: integers, bools or strings.
        sample_weight : array-like of shape (N,), default=None
            Non-negative weights. A row of weight w counts as w equal rows, which shrinkage="auto" keeps in one fold,
            and once in the median of a width. Rows of weight 0 are left out.
        standardize : bool, default=False
            Whether the model scales columns to mean 0 and variance 1; `predict` and `dkfm score` take unscaled rows.
        """
        require_flags(standardize=standardize)
        kernel, _ = resolve_kernel_and_gamma(self.kernel, self.gamma, self.degree, self.coef0, self.kernel_params)
        if out_of_core_rows.is_stored_or_lazy(X, kernel, streams=False):
            return self._fit_stored_rows(X, False, y, sample_weight, standardize)
        dtype, options = choose_dtype(self.dtype, X), self._discriminant_options()
        X = training_data.compute_lazy_frame(X)
        if standardize:
            kernel, _ = make_standardizing_kernel(kernel, X, sample_weight)
        all_rows = self._check_data(X, kernel)
        y = class_labels.check_label_array(y, all_rows.indexable_rows.shape[0], type(self).__name__)
        rows, weights = training_data.drop_zero_weights(all_rows, sample_weight, kernel)
        labels = y if rows is all_rows else y[cast("Indices", rows.original_row_indices)]
        classes, codes = np.unique(labels, return_inverse=True)
        row_classes = options.make_classes(codes, weights, classes)
        self._log_fit(rows)
        with single_blas_thread_for_fit(len(weights)):
            model, fitted = discriminants.fit_discriminants(rows, row_classes, options, dtype)
        fitted |= {"classes": classes} | ({} if sample_weight is None else {"sample_weight": weights})
        return self._set_fitted(X, model, fitted, {"dtype": dtype.name, "priors": self._list_priors()})

    @classmethod
    def from_map(
        cls,
        feature_map: ExactFeatureMap,
        y: object,
        X: object = None,
        *,
        n_components: int | None = None,
        shrinkage: float = 1e-3,
        priors: object = None,
        sample_weight: object = None,
    ) -> Self:
        """Fit the discriminants in the features of a fitted map, without another N x N matrix.

        Parameters
        ----------
        feature_map : ExactFeatureMap
            Fitted feature map.
        y : array-like of shape (n,)
            Class labels of the training rows.
        X : array-like, scipy.sparse array, dask collection, path, URL or zarr.Array of shape (n, d), default=None
            Training rows. Their features are computed in tiles; tasks compute those of stored rows and of a dask
            collection. X may be None only if all training rows are landmarks of a symmetric or spectral map.
        n_components : int, default=None
            Number of discriminants, as in the constructor.
        shrinkage : float, default=1e-3
            Shrinkage, as in the constructor, except "auto", which needs the Gram matrix of `fit`. If it is 0, all
            features must vary within the classes by more than rounding.
        priors : array-like of shape (C,), default=None
            Probabilities of the classes; None is their frequencies in the training rows.
        sample_weight : array-like of shape (n,), default=None
            Non-negative weights of X.

        Returns
        -------
        KernelFisher
            Fitted estimator with the kernel, landmarks and precision of the map.

        Examples
        --------
        >>> import numpy as np
        >>> from dkfm import ExactFeatureMap, KernelFisher
        >>> from dkfm.kernels import Gaussian
        >>> X = np.random.default_rng(0).normal(size=(300, 2))
        >>> phi = ExactFeatureMap(Gaussian(2.0), basis="cholesky").fit(X)
        >>> fda = KernelFisher.from_map(phi, np.hypot(*X.T) < 1, X)
        >>> bool(fda.score(X, np.hypot(*X.T) < 1) > 0.95)
        True
        """
        require_fitted_map(feature_map)
        dtype = cast("DType", feature_map.model_.dtype.name)
        estimator = cls(n_components, kernel=feature_map.kernel_, shrinkage=shrinkage, priors=priors, dtype=dtype)
        fitted_map, options = feature_map._fitted_map(), estimator._discriminant_options()
        with feature_map._open_rows(X) as rows, single_blas_thread_in_worker():
            given = feature_map.model_.landmarks if rows is None else rows
            count = given.shape[0] if isinstance(given, SourceRows) else as_rows(given).shape[0]
            y = class_labels.check_label_array(y, count, cls.__name__)
            model, fitted = discriminants.fit_in_map(fitted_map, options, y, rows, sample_weight)
        return estimator._set_fitted_from_map(feature_map, model, fitted, priors=estimator._list_priors())

    def _discriminant_options(self) -> DiscriminantOptions:
        """Check the parameters; return the options of the discriminants."""
        count = None if self.n_components is None else require_count(self.n_components, "n_components")
        shrinkage = discriminants.check_shrinkage(self.shrinkage)
        return replace(self._get_options(DiscriminantOptions), n_components=count, shrinkage=shrinkage)

    def _list_priors(self) -> list[float] | None:
        return None if self.priors is None else np.asarray(self.priors, np.float64).tolist()

    @property
    def explained_variance_ratio_(self) -> Array:
        """Share of each discriminant in the sum of `ratios_`, of shape (n_components,)."""
        check_is_fitted(self, "model_")
        shares: Array = self.ratios_ / self.ratios_.sum()
        return shares[: self._n_features_out]

    @overload
    def decision_function(self, X: da.Array) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def decision_function(self, X: dd.DataFrame) -> dd.DataFrame | dd.Series: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def decision_function(self, X: object) -> Array: ...

    def decision_function(self, X: object) -> Predictions:
        """Return the decision values of rows X.

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask array or dask data frame of shape (n, d)
            Rows.

        Returns
        -------
        ndarray, or lazy dask array, data frame or series, of shape (n, C), or (n,) for two classes
            Log-probabilities of the classes, up to a constant in each row; for two classes, the log-probability of the
            second class minus that of the first.
        """
        return flatten_column(self._compute_output("decision_function", X))

    @overload
    def predict(self, X: da.Array) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def predict(self, X: dd.DataFrame) -> dd.DataFrame | dd.Series: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def predict(self, X: object) -> npt.NDArray[np.generic]: ...

    def predict(self, X: object) -> Predictions:
        """Return the label (n,) of the largest decision value of each row of X, lazily for dask collections."""
        return codes_to_labels(self._compute_output("predict", X), self.classes_)

    @overload
    def predict_proba(self, X: da.Array) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def predict_proba(self, X: dd.DataFrame) -> dd.DataFrame | dd.Series: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def predict_proba(self, X: object) -> Array: ...

    def predict_proba(self, X: object) -> Predictions:
        """Return the probabilities (n, C) of the classes for rows X; lazily for dask collections.

        They are those of linear discriminant analysis, too near 0 and 1 for new rows if the feature space has many
        dimensions; `sklearn.calibration.CalibratedClassifierCV` calibrates them.
        """
        return self._compute_output("predict_proba", X)

    def predict_log_proba(self, X: object) -> Predictions:
        """Return the log-probabilities (n, C) of the classes, without underflow, lazily for dask arrays."""
        decision = self._compute_output("decision_function", X)
        if isinstance(decision, np.ndarray):
            return _log_probabilities(decision)
        if hasattr(decision, "columns"):
            raise InvalidInputError("Of data frames there is predict_proba; give arrays to predict_log_proba.")
        import dask.array as da

        chunks, meta = (decision.chunks[0], (len(self.classes_),)), np.empty((0, 0), decision.dtype)
        log_probabilities: da.Array = da.map_blocks(_log_probabilities, decision, chunks=chunks, meta=meta)
        return log_probabilities

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"] if self.dtype is None else [str(self.dtype)]
        return tags


@set_dashboard_name("dkfm-chances")
def _log_probabilities(decision: Array) -> Array:
    if decision.shape[1] == 1:
        logarithms: Array = log_expit(np.hstack([-decision, decision]))
    else:
        logarithms = log_softmax(decision, axis=1)
    return logarithms
