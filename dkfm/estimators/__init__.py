"""Provide the scikit-learn estimators: their parameters, validation and fitted attributes."""

from collections.abc import Collection
from pathlib import Path

from dkfm.errors import StoreError, UnsupportedStoreError, extract_reason
from dkfm.estimators.base import KernelEstimator
from dkfm.estimators.feature_map import ExactFeatureMap
from dkfm.estimators.fold import fold
from dkfm.estimators.folded_model import Folded, FoldedTransformer
from dkfm.estimators.kernel_fisher import KernelFisher
from dkfm.estimators.kernel_pca import KernelPCA
from dkfm.estimators.scoring_mixin import ScoringMixin
from dkfm.files.location import locate
from dkfm.kernels.serialization import check_trusted
from dkfm.storage import model_transfer

__all__ = [
    "ExactFeatureMap",
    "Folded",
    "FoldedTransformer",
    "KernelEstimator",
    "KernelFisher",
    "KernelPCA",
    "ScoringMixin",
    "fold",
    "load",
]

_REGISTRY: dict[str, type[KernelEstimator | Folded]] = {
    estimator.__name__: estimator for estimator in (ExactFeatureMap, KernelFisher, KernelPCA, Folded, FoldedTransformer)
}


def load(path: str | Path, *, trusted: Collection[str] = ()) -> KernelEstimator | Folded:
    """Load a fitted estimator that `save` wrote, without running code of the store.

    Parameters
    ----------
    path : str or Path
        Path of the store, or a URL of fsspec such as ``s3://bucket/model``.
    trusted : collection of str, default=()
        Your functions, as ``module:function``, that may be imported and run as the kernel of the estimator.

    Returns
    -------
    ExactFeatureMap, KernelPCA, KernelFisher or Folded
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
    record = model_transfer.load_model(path, trusted=check_trusted(trusted))
    try:
        estimator = _REGISTRY[record.estimator]._from_record(record)
        estimator._saved_at = str(locate(path))
        return estimator
    except StoreError:
        raise
    except Exception as error:  # a constructor may raise anything for values of an unknown store
        cause = f"{type(error).__name__}: {extract_reason(error)}"
        raise UnsupportedStoreError(f"{path} is not an estimator that dkfm can read: {cause}.") from error
