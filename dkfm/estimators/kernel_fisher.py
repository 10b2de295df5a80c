"""`KernelFisher`: Fisher discriminants in the feature space of a kernel, and the classifier that they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast

import numpy as np
from scipy.special import log_expit, log_softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from dkfm.core.chunking import require_count
from dkfm.core.rows import Array, as_rows
from dkfm.errors import InvalidInputError, UnsupportedStoreError
from dkfm.estimators.base import KernelEstimator, check_dtype
from dkfm.estimators.feature_map import ExactFeatureMap
from dkfm.estimators.fitting import class_labels, components, discriminants
from dkfm.estimators.fitting.class_labels import Labels
from dkfm.estimators.fitting.discriminants import DiscriminantOptions
from dkfm.estimators.fitting.predictions import Outcome, codes_to_labels, flatten_column
from dkfm.estimators.fitting.training_data import Numbers, TrainingData, apply_weights, is_float32, load_lazy_frame
from dkfm.execution.blas_threads import limit_blas_threads_in_worker
from dkfm.execution.lazy_arrays import dashboard_name
from dkfm.kernels import KernelSpec
from dkfm.numerics import links
from dkfm.numerics.scorer import Scorer
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    import dask.array as da
    from sklearn.utils import Tags

    from dkfm.numerics.certificates.certificate import Certificate

_LINKS = {"scores": links.IDENTITY, "decision_function": links.IDENTITY, "predict": links.ARGMAX}


class KernelFisher(ClassifierMixin, KernelEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Fisher's discriminants of classes in the feature space of a kernel; linear discriminant analysis there.

    A discriminant u has the largest ratio of the variance between the classes, ``u' S_b u``, to that within them,
    ``u' (S_w + lambda) u``. `transform` projects on the discriminants, and `predict` classifies by them; both are one
    product ``k(Z, X) W - b`` a row.

    Parameters
    ----------
    n_components : int, optional
        How many discriminants `transform` gives, at most C - 1 for C classes; by default all that tell classes apart.
        Predictions have all.
    kernel : Kernel, name or Gaussian process kernel of scikit-learn's, or callable
        As `KernelPCA` takes it; "linear" by default.
    gamma, degree, coef0 : float
        Of the kernels that are named and have them; a gamma of None is 1 / d.
    kernel_params : mapping, optional
        Of a callable its keyword arguments; more parameters of a name.
    shrinkage : float or "auto"
        ``lambda = shrinkage tr(S_w) / N`` for N training rows: a number of the feature space, the same in every basis
        of it. Without it N points in N dimensions have discriminants for any labels whatever. "auto" chooses among 1e-6
        to 100 by predictions of a fifth of the training rows from the others, without chance.
    priors : array-like of shape (C,), optional
        Probabilities of the classes; by default how often they are.
    on_indefinite : {"raise", "clip"}
        What to do with a kernel whose centred Gram matrix is not positive semi-definite: refuse it, or drop the
        negative part and warn.
    dtype : {"float64", "float32"}, or NumPy's, optional
        What the fitted model computes in, by default what the training rows are in; the fit itself is in float64.
    tile_rows : int, optional
        Rows and columns of a Gram tile; 2,048 by default. One tile is computed in this process, without a store.
    workspace : path, optional
        Where the Gram matrix (and a large model, for dask arrays) is kept; by default a temporary directory.
    progress : bool
        Whether to show, in a notebook or on standard error where that is a terminal, the tiles of the Gram matrix as
        they come; nothing of what takes less than two seconds.

    Attributes
    ----------
    classes_ : ndarray of shape (C,)
        The labels, ascending.
    priors_ : ndarray of shape (C,)
    shrinkage_, ridge_ : float
        As given or chosen, and the ``lambda`` that it came to.
    ratios_ : ndarray of shape (q,)
        Variance between the classes along each discriminant, as a ratio to that within them and the ridge; descending.
    means_ : ndarray of shape (C, q)
        Scores of the class means. The one of largest magnitude of a discriminant is positive.
    explained_variance_ratio_ : ndarray
        Share of each in the sum of the ratios.
    model_ : Model
    kernel_ : Kernel
    certificate_ : Certificate
        What the training rows score, measured against what discriminants are: their covariance within the classes and
        their class means; of the decisions too.
    sample_weight_ : ndarray of shape (N,)
        After `fit` with weights, those that are not 0.
    n_features_in_ : int

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError
        From `fit`: the rows, the labels, the kernel, or the memory of this process will not do; or the covariance
        within the classes is singular, and the shrinkage too small.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, section 4 (figures 3 and 4); Mika et al., "Fisher discriminant analysis with kernels"
    (1999). Predictions are those of linear discriminant analysis with the covariance ``S_w + lambda`` on the explicit
    features. scikit-learn's `LinearDiscriminantAnalysis` shrinks towards ``tr(S_w) / r`` in r features, which is
    another number in every basis, and with solver="eigen" the covariance between the classes too.

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
    _output: ClassVar[str] = "scores"
    _stored: ClassVar[tuple[str, ...]] = ("n_components", "shrinkage", "priors", "on_indefinite", "dtype")
    _arrays: ClassVar[tuple[str, ...]] = ("priors", "ratios", "means")
    _optional: ClassVar[tuple[str, ...]] = ("codes", "sample_weight", "squares", "mean")
    _numbers: ClassVar[tuple[str, ...]] = ("shrinkage", "ridge")

    def __init__(
        self,
        n_components: int | None = None,
        *,
        kernel: KernelSpec = "linear",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        kernel_params: Mapping[str, object] | None = None,
        shrinkage: float | str = 1e-3,
        priors: object = None,
        on_indefinite: str = "raise",
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
        self.shrinkage = shrinkage
        self.priors = priors
        self.on_indefinite = on_indefinite
        self.dtype = dtype
        self.tile_rows = tile_rows
        self.workspace = workspace
        self.progress = progress

    def fit(self, X: object, y: object, sample_weight: object = None) -> Self:
        """Fit the discriminants to training rows X (N, d) with labels y (N,).

        The Gram matrix is computed on the current Dask client, or on threads of this process; its factor here.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (N, d)
            For a precomputed kernel the Gram matrix, (N, N).
        y : array-like of shape (N,)
            Whole numbers, bools or words.
        sample_weight : array-like of shape (N,), optional
            Non-negative; the fit is that to rows that are repeated so often, but for shrinkage="auto", which leaves
            them together. A row of weight 0 is left out.
        """
        kernel, _ = components.resolve_kernel(self.kernel, self.gamma, self.degree, self.coef0, self.kernel_params)
        dtype = check_dtype(("float32" if is_float32(X) else "float64") if self.dtype is None else self.dtype)
        asked, X = self._asked(), load_lazy_frame(X)
        every = self._begin(X, kernel)
        y = class_labels.check_labels(y, every.landmarks.shape[0], type(self).__name__)
        given, weights = apply_weights(every, sample_weight)
        kept = y if given is every else y[cast("Numbers", given.numbers)]
        classes, codes = np.unique(kept, return_inverse=True)
        of_rows = asked.classes(codes, weights, classes)
        with limit_blas_threads_in_worker():
            model, fitted = discriminants.fit_discriminants(given, of_rows, asked, dtype)
        fitted |= {"classes": classes} | ({} if sample_weight is None else {"sample_weight": weights})
        return self._finish(X, model, fitted, {"dtype": dtype.name, "priors": self._plain_priors()})

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
        """Return the discriminants of training rows in the features of a fitted map: no second N x N matrix.

        Parameters
        ----------
        feature_map : ExactFeatureMap
        y : array-like of shape (n,)
            Labels of the training rows.
        X : array-like or scipy.sparse array of shape (n, d), optional
            The training rows, of which some tiles of features are there at a time. By default the landmarks of a map
            in the symmetric or spectral basis that was fitted to no others.
        n_components, shrinkage, priors
            As in the constructor; "auto" needs a Gram matrix, which `fit` has. A shrinkage of 0 needs features that all
            vary within the classes, beyond rounding.
        sample_weight : array-like of shape (n,), optional
            Of X.

        Returns
        -------
        KernelFisher
            Fitted, with the kernel, landmarks and precision of the map.

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
        if not isinstance(feature_map, ExactFeatureMap):
            raise InvalidInputError(f"feature_map must be an ExactFeatureMap, and is {feature_map!r:.100}.")
        check_is_fitted(feature_map, "model_")
        X = feature_map._seen(X)
        dtype = feature_map.model_.dtype
        made = cls(n_components, kernel=feature_map.kernel_, shrinkage=shrinkage, priors=priors, dtype=dtype.name)
        rows = feature_map.model_.landmarks if X is None else as_rows(X)
        y = class_labels.check_labels(y, rows.shape[0], cls.__name__)
        with limit_blas_threads_in_worker():
            model, fitted = discriminants.fit_in_map(feature_map._fitted_map(), made._asked(), y, X, sample_weight)
        return made._finish_from_map(feature_map, model, fitted, {"priors": made._plain_priors()})

    def _asked(self) -> DiscriminantOptions:
        """Return what is asked for, once all parameters are what they can be."""
        count = None if self.n_components is None else require_count(self.n_components, "n_components")
        shrinkage = self.shrinkage
        number = isinstance(shrinkage, int | float | np.number) and not isinstance(shrinkage, bool)
        if shrinkage != "auto" and not (number and 0 <= cast("float", shrinkage) < np.inf):
            raise InvalidInputError(f'shrinkage must be a finite number >= 0, or "auto", and is {shrinkage!r}.')
        return DiscriminantOptions(
            count,
            None if shrinkage == "auto" else float(cast("float", shrinkage)),
            self.priors,
            self.on_indefinite,
            self.tile_rows,
            self.workspace,
            self.progress,
        )

    def _plain_priors(self) -> list[float] | None:
        return None if self.priors is None else np.asarray(self.priors, np.float64).tolist()

    @property
    def explained_variance_ratio_(self) -> Array:
        """Share of each discriminant in the variance between the classes, as a ratio to that within them."""
        check_is_fitted(self, "model_")
        shares: Array = self.ratios_ / self.ratios_.sum()
        return shares[: self._n_features_out]

    def decision_function(self, X: object) -> Outcome:
        """Return the logarithm of what each class has of rows X, up to what all have: (n, C), of two classes (n,).

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask array or dask data frame of shape (n, d)

        Returns
        -------
        ndarray, or lazily a dask array, data frame or series
            Of two classes that of the second less that of the first.
        """
        return flatten_column(self._of("decision_function", X))

    def predict(self, X: object) -> Outcome:
        """Return the label of each row X, (n,): that of the largest decision; of dask collections lazily."""
        return codes_to_labels(self._of("predict", X), self.classes_)

    def predict_proba(self, X: object) -> Outcome:
        """Return the probability of each class for rows X, (n, C); of dask collections lazily."""
        return self._of("predict_proba", X)

    def predict_log_proba(self, X: object) -> Outcome:
        """Return the logarithms of the probabilities, (n, C), also of those too small for a number."""
        found = self._of("decision_function", X)
        if isinstance(found, np.ndarray):
            return _log_chances(found)
        if hasattr(found, "columns"):
            raise InvalidInputError("Of data frames there is predict_proba; give arrays to predict_log_proba.")
        import dask.array as da

        chunks, meta = (found.chunks[0], (len(self.classes_),)), np.empty((0, 0), found.dtype)
        lazily: da.Array = da.map_blocks(_log_chances, found, chunks=chunks, meta=meta)
        return lazily

    def _measure(self, scorer: Scorer, landmarks: TrainingData, fitted: Mapping[str, object]) -> Certificate:
        return discriminants.certify_fit(scorer, landmarks, fitted, self.ridge_)

    def _record(self) -> Record:
        record = super()._record()
        return Record(
            record.estimator,
            record.parameters,
            {**record.fitted, **class_labels.classes_to_json(self.classes_)},
            record.arrays,
            record.model,
        )

    @classmethod
    def _from_record(cls, record: Record) -> KernelEstimator:
        arrays, n = record.arrays, record.model.landmarks.shape[0]
        count, q = arrays["means"].shape
        shapes = {"priors": (count,), "ratios": (q,), "codes": (n,), "sample_weight": (n,), "squares": (q, q)}
        shapes |= {"mean": (n,)}
        if any(arrays[name].shape != shape for name, shape in shapes.items() if name in arrays):
            raise UnsupportedStoreError("The fitted arrays of discriminants do not fit their model.")
        codes = arrays.get("codes", np.arange(count))
        if codes.dtype.kind != "i" or not np.array_equal(np.unique(codes), np.arange(count)):
            raise UnsupportedStoreError("The classes of the training rows are not those of their model.")
        outputs = {"scores": q, "decision_function": 1 if count == 2 else count, "predict_proba": count, "predict": 1}
        widths = {name: record.model.head(name).width for name in outputs}
        found = {name: record.model.head(name).link for name in outputs}
        if found.pop("predict_proba") not in (links.SIGMOID, links.SOFTMAX) or found != _LINKS:
            raise UnsupportedStoreError("The outputs of discriminants are not what dkfm writes.")
        if widths["scores"] > q or any(widths[name] != width for name, width in outputs.items() if name != "scores"):
            raise UnsupportedStoreError("The outputs of discriminants do not fit each other.")
        estimator = cast("KernelFisher", super()._from_record(record))
        estimator.classes_ = class_labels.classes_from_json(record)
        return estimator

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"] if self.dtype is None else [str(self.dtype)]
        return tags


@dashboard_name("dkfm-chances")
def _log_chances(decision: Array) -> Array:
    if decision.shape[1] == 1:
        found: Array = log_expit(np.hstack([-decision, decision]))
    else:
        found = log_softmax(decision, axis=1)
    return found
