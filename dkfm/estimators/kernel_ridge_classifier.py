"""Define `KernelRidgeClassifier`, which classifies by a kernel ridge regression of class codes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, overload

import numpy as np
from sklearn.base import ClassifierMixin

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.estimators.fitting import class_labels, ridge
from dkfm.estimators.fitting.class_labels import Predictions, codes_to_labels, flatten_column
from dkfm.estimators.fitting.parameter_types import DType, IndefinitePolicy, Solver
from dkfm.estimators.fitting.ridge import GivenTargets
from dkfm.estimators.kernel_ridge import RidgeEstimator
from dkfm.estimators.stored.class_labels import Labels
from dkfm.estimators.stored.ridge import StoredRidge, StoredRidgeClassifier
from dkfm.kernels import KernelSpec

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import numpy.typing as npt
    from sklearn.utils import Tags


class KernelRidgeClassifier(ClassifierMixin, RidgeEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Classifier by kernel ridge regression.

    Each class has a regression on a target of 1 for its rows and -1 for all others. The class with the largest
    prediction is predicted. Two classes share one regression, whose sign decides. scikit-learn's `RidgeClassifier` has
    the same rule, but also an intercept.

    Parameters
    ----------
    alpha : float or "loo", default=1
        Penalty, as for `KernelRidge`; "loo" chooses the one of `alphas` that predicts left-out targets best.
    kernel : Kernel, str, callable or Gaussian process kernel of scikit-learn, default="linear"
        Kernel, as for `KernelPCA`.
    gamma : float, default=None
        Coefficient of the named kernels that have one; None is 1 / d.
    degree : float, default=3
        Degree of the polynomial kernel.
    coef0 : float, default=1
        Constant term of the named kernels that have one.
    kernel_params : mapping, default=None
        Keyword arguments of a callable, or parameters of a named kernel.
    class_weight : mapping or "balanced", default=None
        Factor of the sample weights of each class. "balanced" is inversely proportional to the number of its rows.
    alphas : array-like of shape (m,), default=None
        Penalties that alpha="loo" chooses from, as for `KernelRidge`.
    leave_one_out : bool, default=False
        Whether to predict each training row by the regressions on all others.
    solver : {"auto", "dense", "tiled", "cg"}, default="auto"
        How the systems are solved, as for `KernelRidge`.
    tol : float, default=1e-10
        Residual at which "cg" stops.
    on_indefinite : {"raise", "clip"}, default="raise"
        Action if ``K + alpha`` is not positive definite, as for `KernelRidge`.
    dtype : {"float64", "float32"} or NumPy dtype, default=None
        Precision of the fitted model; None is that of the training rows. The fit itself is in float64.
    tile_rows : int, default=None
        Rows and columns of a tile of the Gram matrix; None is 2,048.
    workspace : path, default=None
        Folder for the Gram matrix or its factor, and for a large model that tasks on dask arrays read; None is a
        temporary directory.
    progress : bool, default=True
        Whether to show the Gram tiles done, for work of more than 2 seconds, in a notebook or a terminal (on stderr).

    Attributes
    ----------
    classes_ : ndarray of shape (C,)
        Class labels, in ascending order.
    loo_predictions_ : ndarray of shape (N,) or (N, C)
        Decision values of each training row by the regressions on all others; only with leave_one_out=True or
        alpha="loo".
    dual_coef_ : ndarray of shape (N,) or (N, C)
        Coefficients of the training rows.
    alpha_, alphas_, loo_errors_, fitted_values_, norms_, target_scales_, model_, kernel_, certificate_ : object
        As for `KernelRidge`.
    sample_weight_ : ndarray of shape (N,)
        Positive weights of the training rows, including the factors of `class_weight`, after `fit` with weights.
    n_features_in_, feature_names_in_ : int, ndarray of shape (d,)
        Number of columns d of the training rows, and their names if the fit had names that are all strings.

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError
        Raised by `fit`: invalid rows, labels or kernel, or too little memory in this process.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from dkfm import KernelRidgeClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> model = KernelRidgeClassifier(0.1, kernel="rbf", gamma=1e-3).fit(X[:600], y[:600])
    >>> bool(model.score(X[600:], y[600:]) > 0.95)
    True
    """

    classes_: Labels
    _stored_estimator_class: ClassVar[type[StoredRidge]] = StoredRidgeClassifier

    def __init__(
        self,
        alpha: float | Literal["loo"] = 1,
        *,
        kernel: KernelSpec = "linear",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        kernel_params: Mapping[str, object] | None = None,
        class_weight: Mapping[object, float] | Literal["balanced"] | None = None,
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
        self.class_weight = class_weight
        self.alphas = alphas
        self.leave_one_out = leave_one_out
        self.solver = solver
        self.tol = tol
        self.on_indefinite = on_indefinite
        self.dtype = dtype
        self.tile_rows = tile_rows
        self.workspace = workspace
        self.progress = progress

    def _read_targets(self, y: object, sample_weight: object, n: int) -> GivenTargets:
        labels, weights = (
            class_labels.check_label_array(y, n, type(self).__name__),
            ridge.check_weights(sample_weight, n),
        )
        classes = np.unique(labels if weights is None else labels[weights > 0])
        codes = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)  # other rows have weight 0
        if len(classes) < 2:
            raise InvalidInputError(f"y has {len(classes)} class, {classes.tolist()[0]!r}, and a classifier needs two.")
        targets = np.where(codes[:, np.newaxis] == np.arange(len(classes)), 1.0, -1.0)
        if self.class_weight is not None:
            weights = ridge.weigh_classes(codes, classes, self.class_weight, np.ones(n) if weights is None else weights)
        is_binary = len(classes) == 2
        return GivenTargets(targets[:, 1:] if is_binary else targets, is_binary, weights, classes)

    @overload
    def decision_function(self, X: da.Array) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def decision_function(self, X: dd.DataFrame) -> dd.DataFrame | dd.Series: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def decision_function(self, X: object) -> Array: ...

    def decision_function(self, X: object) -> Predictions:
        """Return the predictions, (n, C) or (n,) for two classes, of rows X (n, d), lazily for dask collections."""
        return flatten_column(self._compute_output("decision_function", X))

    @overload
    def predict(self, X: da.Array) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def predict(self, X: dd.DataFrame) -> dd.DataFrame | dd.Series: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def predict(self, X: object) -> npt.NDArray[np.generic]: ...

    def predict(self, X: object) -> Predictions:
        """Return the class label (n,) with the largest prediction for each row of X, lazily for dask collections."""
        return codes_to_labels(self._compute_output("predict", X), self.classes_)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = True
        return tags
