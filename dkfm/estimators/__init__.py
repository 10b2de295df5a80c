"""Provide the scikit-learn estimators: their parameters, validation and fitted attributes.

Each module is imported when one of its names is first used, because scikit-learn takes seconds to import.
"""

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dkfm.estimators.stored.opening import build_from_store
from dkfm.files.location import locate
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    from dkfm.estimators.base import KernelEstimator
    from dkfm.estimators.feature_map import ExactFeatureMap
    from dkfm.estimators.folded_model import Folded, FoldedTransformer
    from dkfm.estimators.folding import fold
    from dkfm.estimators.kernel_fisher import KernelFisher
    from dkfm.estimators.kernel_pca import KernelPCA
    from dkfm.estimators.kernel_ridge import KernelRidge
    from dkfm.estimators.kernel_ridge_classifier import KernelRidgeClassifier
    from dkfm.estimators.mixins.scoring import ScoringMixin

__all__ = [
    "ExactFeatureMap",
    "Folded",
    "FoldedTransformer",
    "KernelEstimator",
    "KernelFisher",
    "KernelPCA",
    "KernelRidge",
    "KernelRidgeClassifier",
    "ScoringMixin",
    "fold",
    "load",
]

_DEFINING_MODULES = {
    "ExactFeatureMap": "feature_map",
    "Folded": "folded_model",
    "FoldedTransformer": "folded_model",
    "KernelEstimator": "base",
    "KernelFisher": "kernel_fisher",
    "KernelPCA": "kernel_pca",
    "KernelRidge": "kernel_ridge",
    "KernelRidgeClassifier": "kernel_ridge_classifier",
    "ScoringMixin": "mixins.scoring",
    "fold": "folding",
}

_REGISTRY = tuple(name for name in _DEFINING_MODULES if name not in ("KernelEstimator", "ScoringMixin", "fold"))
"""Names of the estimator classes that a store may hold."""


def __getattr__(name: str) -> object:
    if name in _DEFINING_MODULES:
        return getattr(import_module(f"{__name__}.{_DEFINING_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(path: str | Path, *, trusted: Collection[str] = ()) -> "KernelEstimator | Folded":
    """Load a fitted estimator that `save` wrote, without running code of the store.

    The estimator has the parameters that describe its model. Parameters of the fit, such as `landmarks`, `alphas` or
    `workspace`, are not stored: create a new estimator to fit again. Its kernel has the widths that the fit found, so a
    cross-validation of a loaded estimator uses widths of all rows of that fit.

    Parameters
    ----------
    path : str or Path
        Path of the store, or a URL of fsspec such as ``s3://bucket/model``.
    trusted : collection of str, default=()
        Names ``module:function`` of your functions that may be imported and run as the kernel of the estimator.

    Returns
    -------
    ExactFeatureMap, KernelPCA, KernelFisher, KernelRidge, KernelRidgeClassifier or Folded
        Fitted estimator.

    Raises
    ------
    IncompleteStoreError
        The store has no completion marker.
    DamagedStoreError
        The bytes of the store have changed.
    UnsupportedStoreError
        The store is newer than this version, or not a model of dkfm.
    UntrustedError
        The kernel is a function that is not trusted, or whose source has changed.

    Examples
    --------
    >>> import dkfm, numpy as np, tempfile
    >>> X = np.random.default_rng(0).normal(size=(50, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dkfm.KernelPCA(2, kernel=dkfm.kernels.Gaussian(2.0)).fit(X).save(folder + "/model")
    ...     dkfm.load(folder + "/model").eigenvalues_.shape
    (2,)
    """
    estimator = build_from_store(path, trusted, _build_estimator)
    estimator._saved_location = str(locate(path))
    return estimator


def _build_estimator(record: Record) -> "KernelEstimator | Folded":
    if record.estimator not in _REGISTRY:
        raise KeyError(record.estimator)
    return cast("type[KernelEstimator | Folded]", __getattr__(record.estimator))._from_record(record)
