"""Convert class labels to JSON values and back, without pickle."""

import numpy as np
import numpy.typing as npt

from dkfm.errors import InvalidTypeError, UnsupportedStoreError
from dkfm.storage.model_store import Record

Labels = npt.NDArray[np.generic]

_JSON_TYPES = {"b": bool, "i": int, "u": int, "f": float, "U": str, "O": str}
"""Python type of a label in JSON, by the kind of its NumPy dtype."""


def require_storable(labels: Labels) -> Labels:
    """Return the labels; raise an InvalidTypeError if a store cannot hold labels of their dtype."""
    kind = labels.dtype.kind
    too_wide = kind == "f" and labels.dtype.itemsize > np.dtype(np.float64).itemsize
    if kind not in _JSON_TYPES or too_wide or (kind == "O" and not all(isinstance(value, str) for value in labels)):
        known = "labels are whole numbers, bools or words, all of one kind"
        raise InvalidTypeError(f"Unknown label type: {labels.dtype}; {known}.")
    return labels


def classes_to_json(classes: Labels) -> dict[str, object]:
    """Return the classes and their dtype as JSON values."""
    is_text = classes.dtype.kind in "UO"
    return {"classes": classes.tolist(), "classes_dtype": classes.dtype.kind if is_text else classes.dtype.name}


def classes_from_record(record: Record) -> Labels:
    """Return the classes (C,) of a record, in the dtype that the record states."""
    values = record.classes
    try:
        dtype = np.dtype(str(record.fitted.get("classes_dtype")))
        if not values or _JSON_TYPES[dtype.kind] is not type(values[0]):
            raise UnsupportedStoreError("The classes of this model are not of the type that it states.")
        classes = np.array(values, dtype if dtype.kind != "U" else None)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise UnsupportedStoreError("The classes of this model are not what dkfm writes.") from None
    if not np.array_equal(classes.astype(object), np.array(values, object)):
        raise UnsupportedStoreError("The classes of this model are not of the type that it states.")
    return classes
