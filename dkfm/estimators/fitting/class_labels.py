"""Labels of classes: from what a user gives to codes, and into a store without pickle."""

from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from dkfm.core.frames import is_dask_collection
from dkfm.errors import InvalidInputError, InvalidTypeError, UnsupportedStoreError, reason
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    import dask.array as da

Labels = npt.NDArray[np.generic]

_KINDS = {"b": bool, "i": int, "u": int, "f": float, "U": str, "O": str}
"""Of NumPy's kinds of labels, what one is in JSON."""


def check_labels(y: object, n: int, name: str) -> Labels:
    """Return the labels (n,) of n training rows, or raise.

    Parameters
    ----------
    y : array-like, or dask array or series, of shape (n,)
    n : int
    name : str
        Of the estimator.
    """
    if y is None:
        raise InvalidInputError(f"{name} requires y to be passed, but the target y is None; it takes a label a row.")
    try:
        found = column_or_1d(cast("da.Array", y).compute() if is_dask_collection(y) else y, warn=True)
        assert_all_finite(found, input_name="y")
    except TypeError as error:
        raise InvalidTypeError(f"y must be a label a row: {reason(error)}.") from None
    except ValueError as error:
        raise InvalidInputError(f"y must be a label a row: {reason(error)}.") from None
    require_storable(cast("Labels", found))
    try:
        check_classification_targets(found)
    except ValueError as error:
        raise InvalidInputError(f"y must be a label a row: {reason(error)}.") from None
    if len(found) != n:
        raise InvalidInputError(f"y has {len(found)} labels and X has {n} rows; each row has one.")
    return cast("Labels", found)


def require_storable(found: Labels) -> Labels:
    """Return labels, or raise where a store has no place for them."""
    kind = found.dtype.kind
    wide = kind == "f" and found.dtype.itemsize > np.dtype(np.float64).itemsize
    if kind not in _KINDS or wide or (kind == "O" and not all(isinstance(value, str) for value in found)):
        raise InvalidTypeError(f"Unknown label type: {found.dtype}; labels are whole numbers, bools or words.")
    return found


def classes_to_json(classes: Labels) -> dict[str, object]:
    """Return what a store keeps of the classes, as plain JSON values."""
    words = classes.dtype.kind in "UO"
    return {"classes": classes.tolist(), "classes_dtype": classes.dtype.kind if words else classes.dtype.name}


def classes_from_json(record: Record) -> Labels:
    """Return the classes (C,) of a record in the dtype that it states, or raise."""
    values = record.classes
    try:
        kind = np.dtype(str(record.fitted.get("classes_dtype")))
        if not values or _KINDS[kind.kind] is not type(values[0]):
            raise UnsupportedStoreError("The classes of this model are not of the type that it states.")
        found = np.array(values, kind if kind.kind != "U" else None)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise UnsupportedStoreError("The classes of this model are not what dkfm writes.") from None
    if not np.array_equal(found.astype(object), np.array(values, object)):
        raise UnsupportedStoreError("The classes of this model are not of the type that it states.")
    return found
