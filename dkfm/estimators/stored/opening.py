"""Open a stored estimator to measure it, without scikit-learn."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from dkfm.core.trusted_functions import validate_trusted_argument
from dkfm.errors import StoreError, UnsupportedStoreError, extract_reason
from dkfm.estimators.stored.base import StoredEstimator
from dkfm.estimators.stored.components import StoredComponents
from dkfm.estimators.stored.discriminants import StoredDiscriminants
from dkfm.estimators.stored.feature_map import StoredMap
from dkfm.estimators.stored.folded import StoredFold
from dkfm.estimators.stored.ridge import StoredRidge, StoredRidgeClassifier
from dkfm.storage import remote_stores
from dkfm.storage.model_store import Record

T = TypeVar("T")

_CLASSES: dict[str, type[StoredEstimator]] = {
    "ExactFeatureMap": StoredMap,
    "KernelFisher": StoredDiscriminants,
    "KernelPCA": StoredComponents,
    "KernelRidge": StoredRidge,
    "KernelRidgeClassifier": StoredRidgeClassifier,
}

_HAVE_TRANSFORM = {"Folded": False, "FoldedTransformer": True}
"""Whether each class of folded models has a method `transform`."""


def open_stored(path: str | Path, trusted: Collection[str] = ()) -> StoredEstimator | StoredFold:
    """Open a stored estimator; see `dkfm.load` for the parameters and the errors."""
    return build_from_store(path, trusted, _from_record)


def build_from_store(path: str | Path, trusted: Collection[str], build: Callable[[Record], T]) -> T:
    """Read the record of a stored estimator, and return what `build` makes of it.

    Raises
    ------
    UnsupportedStoreError
        `build` raises an error: the record is not what dkfm writes.
    """
    record = remote_stores.load_model(path, trusted=validate_trusted_argument(trusted))
    try:
        return build(record)
    except StoreError:
        raise
    except Exception as error:  # a constructor may raise anything for values of an unknown store
        cause = f"{type(error).__name__}: {extract_reason(error)}"
        raise UnsupportedStoreError(f"{path} is not an estimator that dkfm can read: {cause}.") from error


def _from_record(record: Record) -> StoredEstimator | StoredFold:
    if record.estimator in _HAVE_TRANSFORM:
        return StoredFold.from_record(record, _HAVE_TRANSFORM[record.estimator])
    return _CLASSES[record.estimator].from_record(record)
