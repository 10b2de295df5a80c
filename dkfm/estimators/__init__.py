"""scikit-learn estimators: parameters, validation and fitted attributes; the numerics are below."""

from collections.abc import Collection
from pathlib import Path

from dkfm.errors import StoreError, UnsupportedStoreError, reason
from dkfm.estimators.base import KernelEstimator
from dkfm.estimators.feature_map import ExactFeatureMap
from dkfm.estimators.fold import fold
from dkfm.estimators.folded_model import Folded, FoldedTransformer
from dkfm.estimators.kernel_fisher import KernelFisher
from dkfm.estimators.kernel_pca import KernelPCA
from dkfm.estimators.serving import ScoringMixin
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
    kind.__name__: kind for kind in (ExactFeatureMap, KernelFisher, KernelPCA, Folded, FoldedTransformer)
}


def load(path: str | Path, *, trusted: Collection[str] = ()) -> KernelEstimator | Folded:
    """Load a fitted estimator that `save` wrote; a stranger's store is data, never code.

    Parameters
    ----------
    path : str or Path
        Or a URL of fsspec's, such as ``s3://bucket/model``.
    trusted : collection of str
        Functions of yours, as ``module:function``, that may be imported and run as its kernel.

    Returns
    -------
    ExactFeatureMap, KernelPCA, KernelFisher or Folded

    Raises
    ------
    IncompleteStoreError
        No completion marker.
    DamagedStoreError
        A byte changed.
    UnsupportedStoreError
        Newer, or not a model of dkfm's.
    UntrustedError
        Its kernel is a function that is not trusted, or whose source is not what it was.

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
        estimator._lies_at = str(locate(path))
        return estimator
    except StoreError:
        raise
    except Exception as error:  # whatever a constructor makes of a stranger's values
        said = f"{type(error).__name__}: {reason(error)}"
        raise UnsupportedStoreError(f"{path} is not an estimator that dkfm can read: {said}.") from error
