"""Define `KernelRidge`, ridge regression in the feature space of a kernel, and the base class of its classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast, overload

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from dkfm.core.argument_checks import require_flags
from dkfm.core.rows import Array, as_rows
from dkfm.errors import InvalidInputError
from dkfm.estimators.base import KernelEstimator, choose_dtype
from dkfm.estimators.feature_map import ExactFeatureMap
from dkfm.estimators.fitting import out_of_core_rows, ridge
from dkfm.estimators.fitting.class_labels import Predictions, flatten_column
from dkfm.estimators.fitting.feature_maps import require_fitted_map
from dkfm.estimators.fitting.parameter_types import DType, IndefinitePolicy, Solver
from dkfm.estimators.fitting.pca import resolve_kernel_and_gamma
from dkfm.estimators.fitting.ridge import GivenTargets
from dkfm.estimators.standardization import make_standardizing_kernel
from dkfm.estimators.stored.ridge import StoredRidge
from dkfm.execution.blas_threads import single_blas_thread_for_fit, single_blas_thread_in_worker
from dkfm.gram import training_data
from dkfm.gram.streamed_rows import SourceRows
from dkfm.kernels import KernelSpec

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    from sklearn.utils import Tags


class RidgeEstimator(KernelEstimator, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base class of the estimators that solve a kernel ridge regression."""

    alpha: float | Array | Literal["loo"]
    gamma: float | None
    degree: float
    coef0: float
    dtype: DType | None
    fitted_values_: Array
    norms_: Array
    _stored_estimator_class: ClassVar[type[StoredRidge]]

    def _read_targets(self, y: object, sample_weight: object, n: int) -> GivenTargets:
        """Check the targets and sample weights of a fit of n rows."""
        raise AssertionError("subclasses implement this")

    def fit(self, X: object, y: object = None, sample_weight: object = None, standardize: bool = False) -> Self:
        """Fit the regression to training rows X with targets y.

        The Gram matrix, or its factor in tiles, is computed on the current Dask client, or on threads of this process.

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask collection, path, URL or zarr.Array of shape (N, d)
            Training rows, which are read into memory; for a precomputed kernel, the Gram matrix (N, N).
        y : array-like of shape (N,) or (N, q)
            Targets, or the class labels (N,) of a classifier.
        sample_weight : float or array-like of shape (N,), default=None
            Non-negative weights. A row of weight w counts as w equal rows, but once in a median width; 0 leaves it out.
        standardize : bool, default=False
            Whether the model scales columns to mean 0 and variance 1; `predict` and `dkfm score` take unscaled rows.
        """
        require_flags(standardize=standardize)
        kernel, _ = resolve_kernel_and_gamma(self.kernel, self.gamma, self.degree, self.coef0, self.kernel_params)
        if out_of_core_rows.is_stored_or_lazy(X, kernel, streams=False):
            return self._fit_stored_rows(X, False, y, sample_weight, standardize)
        dtype, X = choose_dtype(self.dtype, X), training_data.compute_lazy_frame(X)
        if standardize:
            kernel, _ = make_standardizing_kernel(kernel, X, sample_weight)
        all_rows = self._check_data(X, kernel)
        given = self._read_targets(y, sample_weight, all_rows.indexable_rows.shape[0])
        data, targets = given.drop_zero_weights(all_rows, kernel)
        self._log_fit(data)
        with single_blas_thread_for_fit(len(targets.weights)):
            options = self._get_options(ridge.RidgeOptions)
            model, fitted, alphas = ridge.fit_ridge(
                data, targets, options, dtype, self._stored_estimator_class, given.classes is None
            )
        fitted_alpha = given.fitted_alpha_to_json(alphas, self.alpha)
        resolved = {"alpha": _alpha_to_json(self.alpha), "fitted_alpha": fitted_alpha, **given.describe()}
        return self._set_fitted(
            X, model, given.complete_fitted_values(fitted, targets), {"dtype": dtype.name, **resolved}
        )

    @classmethod
    def from_map(
        cls,
        feature_map: ExactFeatureMap,
        y: object,
        X: object,
        *,
        alpha: float | Array = 1,
        sample_weight: object = None,
    ) -> Self:
        """Fit the regression in the features of a fitted map, without a Gram matrix.

        Parameters
        ----------
        feature_map : ExactFeatureMap
            Fitted feature map.
        y : array-like of shape (n,) or (n, q)
            Targets, or the class labels (n,) of a classifier.
        X : array-like, scipy.sparse array, dask collection, path, URL or zarr.Array of shape (n, d)
            Training rows. Their features are computed in tiles; tasks compute those of stored rows and of a dask
            collection.
        alpha : float or array-like of shape (q,), default=1
            Penalty, as in the constructor, except "loo", which needs the Gram matrix of `fit`.
        sample_weight : float or array-like of shape (n,), default=None
            Non-negative weights of X.

        Returns
        -------
        KernelRidge or KernelRidgeClassifier
            Fitted estimator with the kernel, landmarks and precision of the map.

        Examples
        --------
        >>> import numpy as np
        >>> from dkfm import ExactFeatureMap, KernelRidge
        >>> from dkfm.kernels import Gaussian
        >>> X = np.random.default_rng(0).normal(size=(300, 2))
        >>> phi = ExactFeatureMap(Gaussian(2.0), basis="cholesky").fit(X)
        >>> ridge = KernelRidge.from_map(phi, np.sin(X[:, 0]), X, alpha=1e-6)
        >>> bool(ridge.score(X, np.sin(X[:, 0])) > 0.999)
        True
        """
        require_fitted_map(feature_map)
        fitted_map = feature_map._fitted_map()
        ridge.require_uncentred(feature_map._params_at_fit["centered"])
        estimator = cls(alpha, kernel=feature_map.kernel_, dtype=cast("DType", fitted_map.model.dtype.name))
        with feature_map._open_rows(X) as rows, single_blas_thread_in_worker():
            if rows is None:
                raise InvalidInputError("from_map needs X, the training rows of y.")
            count = rows.shape[0] if isinstance(rows, SourceRows) else as_rows(rows).shape[0]
            given = estimator._read_targets(y, sample_weight, count)
            all_rows = out_of_core_rows.as_data(fitted_map.model.kernel, rows)
            data, targets = given.drop_zero_weights(all_rows)
            options = estimator._get_options(ridge.RidgeOptions)
            landmarks = training_data.take_landmarks(fitted_map.model, all_rows)
            model, fitted, alphas = ridge.fit_in_map(
                fitted_map, options, targets, data, landmarks, estimator._stored_estimator_class
            )
        fitted_alpha = given.fitted_alpha_to_json(alphas, alpha)
        resolved = {"alpha": _alpha_to_json(alpha), "fitted_alpha": fitted_alpha, **given.describe()}
        return estimator._set_fitted_from_map(
            feature_map, model, given.complete_fitted_values(fitted, None), **resolved
        )

    @property
    def alpha_(self) -> float | Array:
        """Penalty of the fit: one number, or one number for each target (q,)."""
        check_is_fitted(self, "model_")
        alpha = self._params_at_fit["fitted_alpha"]
        return np.array(alpha) if isinstance(alpha, list) else cast("float", alpha)

    @property
    def dual_coef_(self) -> Array:
        """Coefficients of the training rows, or of the landmarks of a map: (N,), or (N, q) for targets (N, q)."""
        check_is_fitted(self, "model_")
        weights = self.model_.head(self._stored_estimator_class.output_head_name).weights
        return weights[:, 0] if self._params_at_fit["is_vector"] else weights

    @property
    def X_fit_(self) -> object:  # noqa: N802  # scikit-learn's name
        """Training rows, of shape (N, d), or the landmarks of a map."""
        check_is_fitted(self, "model_")
        if self.kernel_.is_precomputed:
            raise AttributeError("A model of a precomputed kernel keeps no Gram matrix.")
        return self.model_.original_landmarks


class KernelRidge(RegressorMixin, RidgeEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Kernel ridge regression.

    A replacement for scikit-learn's `KernelRidge` with the same parameters and more. Predictions are ``k(Z, X) c`` with
    ``(K + alpha) c = y``.

    Parameters
    ----------
    alpha : float, array-like of shape (q,) or "loo", default=1
        Penalty of the squared norm of the function, not negative; an array has one for each target. "loo" chooses, for
        each target, the one of `alphas` that predicts left-out rows best. If the penalty is negligible beside rounding,
        as 0 is, eigenvalues that are mostly rounding error are dropped, with a warning: the minimum-norm solution.
    kernel : Kernel, str, callable or Gaussian process kernel of scikit-learn, default="linear"
        Kernel, as for `KernelPCA`.
    gamma : float, default=None
        Coefficient of the named kernels that have one; None is 1 / d.
    degree : float, default=3
        Degree of the polynomial kernel.
    coef0 : float, default=1
        Constant term of the named kernels that have one.
    kernel_params : mapping, default=None
        Keyword arguments of a callable, or parameters of a named kernel, for which scikit-learn ignores them.
    alphas : array-like of shape (m,), default=None
        Penalties that alpha="loo" chooses from, with one eigendecomposition; None is 20 values from 1e-9 to N times the
        mean k(x, x).
    leave_one_out : bool, default=False
        Whether to predict each training row by the regression on all others, without refitting; alpha="loo" always
        does. Not available with solver="cg".
    solver : {"auto", "dense", "tiled", "cg"}, default="auto"
        "dense" factors the Gram matrix in memory. "tiled" factors it in tiles on disk and refines the solution. "cg" is
        conjugate gradients, which computes the kernel values for each product and never keeps them. The last two run on
        the current Dask client or on threads, without an N x N matrix in memory. "auto" is "dense" if memory is large
        enough, else "cg", unless it is predicted to take longer than "tiled".
    tol : float, default=1e-10
        Relative residual ``|(K + alpha) c - y| / |y|`` at which "cg" stops, with rows multiplied by the square roots of
        their weights. The other solvers solve to rounding.
    on_indefinite : {"raise", "clip"}, default="raise"
        Action if ``K + alpha`` is not positive definite: raise, or drop the negative part of the Gram matrix and warn.
    dtype : {"float64", "float32"} or NumPy dtype, default=None
        Precision of the fitted model; None is that of the training rows. The fit itself is in float64.
    tile_rows : int, default=None
        Rows and columns of a tile of the Gram matrix, or of its factor; None is 2,048.
    workspace : path, default=None
        Folder for the Gram matrix or its factor, which stay there, and for a large model that tasks on dask arrays
        read. A killed fit resumes from what is there. None is a temporary directory.
    progress : bool, default=True
        Whether to show the Gram tiles done, for work of more than 2 seconds, in a notebook or a terminal (on stderr).

    Attributes
    ----------
    dual_coef_ : ndarray of shape (N,) or (N, q)
        Coefficients c of the training rows.
    X_fit_ : ndarray or csr_array of shape (N, d)
        Training rows; not available for a precomputed kernel.
    target_names_ : list of str, or None
        Names of the targets if they were a data frame or a series; several predictions have columns ``predict_name``.
    alpha_ : float or ndarray of shape (q,)
        Penalty as given, or as chosen by "loo". It has shape (q,) if `alpha` is an array or "loo" had targets (N, q).
    alphas_ : ndarray of shape (m,)
        Penalties that "loo" chose from. If `alpha_` is the smallest or largest, a value beyond may predict better.
    loo_errors_ : ndarray of shape (m,) or (m, q)
        Weighted mean squared error of left-out rows for each of `alphas_`, and for each target if these are (N, q).
    loo_predictions_ : ndarray of shape (N,) or (N, q)
        Prediction of each training row of positive weight by the regression on all others; only with
        leave_one_out=True or alpha="loo".
    fitted_values_ : ndarray of shape (N, q)
        Predictions of the rows of the model, ``y - alpha c / w``, up to rounding of the targets.
    norms_ : ndarray of shape (q,)
        Norm of each regression function f in the feature space, rounded up. For a positive semi-definite kernel,
        ``|f(z)| <= sqrt(k(z, z)) |f|``.
    target_scales_ : ndarray of shape (q,)
        Largest absolute value of each target; the certificate's `error` is relative to it.
    model_ : Model
        Fitted kernel, landmarks and heads.
    kernel_ : Kernel
        Fitted kernel, with all parameters resolved.
    certificate_ : Certificate
        Measured difference between the model's predictions of the training rows and ``y - alpha c / w``.
    sample_weight_ : ndarray of shape (N,)
        Positive weights of the training rows, after `fit` with weights.
    n_features_in_, feature_names_in_ : int, ndarray of shape (d,)
        Number of columns d of the training rows, and their names if the fit had names that are all strings.

    Raises
    ------
    InvalidInputError, NotPSDError, NotSupportedError, KernelError, BudgetError, ConvergenceError
        Raised by `fit`: invalid rows, targets or kernel, an unsuitable solver, no convergence, or too little memory.

    Notes
    -----
    Saunders, Gammerman and Vovk, "Ridge regression learning algorithm in dual variables" (1998). The closed form of
    left-out predictions is that of Golub, Heath and Wahba, "Generalized cross-validation" (1979), eq. (1.3).

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import KernelRidge
    >>> X = np.random.default_rng(0).normal(size=(300, 2))
    >>> y = np.sin(X[:, 0]) + X[:, 1] ** 2
    >>> model = KernelRidge("loo", kernel="rbf", gamma=0.5).fit(X[:200], y[:200])
    >>> model.predict(X[200:]).shape, bool(model.score(X[200:], y[200:]) > 0.99)
    ((100,), True)
    """

    _stored_estimator_class: ClassVar[type[StoredRidge]] = StoredRidge

    def __init__(
        self,
        alpha: float | Array | Literal["loo"] = 1,
        *,
        kernel: KernelSpec = "linear",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        kernel_params: Mapping[str, object] | None = None,
        alphas: object = None,
        leave_one_out: bool = False,
        solver: Solver = "auto",
        tol: float = 1e-10,
        on_indefinite: IndefinitePolicy = "raise",
        dtype: DType | None = None,
        tile_rows: int | None = None,
        workspace: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        self.alpha = alpha
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.kernel_params = kernel_params
        self.alphas = alphas
        self.leave_one_out = leave_one_out
        self.solver = solver
        self.tol = tol
        self.on_indefinite = on_indefinite
        self.dtype = dtype
        self.tile_rows = tile_rows
        self.workspace = workspace
        self.progress = progress

    @overload
    def predict(self, X: da.Array) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def predict(self, X: dd.DataFrame) -> dd.DataFrame | dd.Series: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def predict(self, X: object) -> Array: ...

    def predict(self, X: object) -> Predictions:
        """Return the predictions of rows X (n, d), lazily for dask collections.

        The shape is (n,), or (n, q) if the targets of the fit were (N, q).
        """
        output = self._compute_output("predict", X)
        return flatten_column(output) if self._params_at_fit["is_vector"] else output

    @property
    def target_names_(self) -> list[str] | None:
        """Names of the targets, if they had any; a batch job uses them as the names of columns."""
        check_is_fitted(self, "model_")
        return cast("list[str] | None", self._params_at_fit.get("target_names"))

    @target_names_.setter
    def target_names_(self, names: Sequence[str]) -> None:
        self._params_at_fit = {**self._params_at_fit, "target_names": list(names)}

    def _output_names(self, output: str) -> list[str]:
        names = self.target_names_
        return [f"{output}_{name}" for name in names] if names and len(names) > 1 else super()._output_names(output)

    def _read_targets(self, y: object, sample_weight: object, n: int) -> GivenTargets:
        return ridge.read_targets(y, sample_weight, n, type(self).__name__)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _alpha_to_json(alpha: object) -> object:
    return alpha if isinstance(alpha, str) else np.asarray(alpha).tolist()
