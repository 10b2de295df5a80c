"""Check class labels, convert classes to JSON values and back, without pickle, and predicted codes to labels."""

from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from dkfm.core.frames import is_dask_collection
from dkfm.errors import InvalidInputError, InvalidTypeError, UnsupportedStoreError, extract_reason
from dkfm.execution.lazy_scoring import set_dashboard_name
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd

Labels = npt.NDArray[np.generic]
Predictions: TypeAlias = "npt.NDArray[np.generic] | da.Array | dd.DataFrame | dd.Series"

_JSON_TYPES = {"b": bool, "i": int, "u": int, "f": float, "U": str, "O": str}
"""Python type of a label in JSON, by the kind of its NumPy dtype."""

_TASK_NAME = "dkfm-labels"
"""Name on the dashboard of the tasks that convert codes to labels."""


def check_labels(y: object, n: int, name: str) -> Labels:
    """Check the class labels of n training rows, and return them as an array (n,).

    Parameters
    ----------
    y : array-like, or dask array or series, of shape (n,)
        Class label of each row; a dask collection is computed.
    n : int
        Number of training rows.
    name : str
        Name of the estimator, for error messages.
    """
    if y is None:
        raise InvalidInputError(f"{name} requires y to be passed, but the target y is None; it takes a label a row.")
    try:
        labels = column_or_1d(cast("da.Array", y).compute() if is_dask_collection(y) else y, warn=True)
        assert_all_finite(labels, input_name="y")
    except TypeError as error:
        raise InvalidTypeError(f"y must be a label a row: {extract_reason(error)}.") from None
    except ValueError as error:
        raise InvalidInputError(f"y must be a label a row: {extract_reason(error)}.") from None
    require_storable(cast("Labels", labels))
    try:
        check_classification_targets(labels)
    except ValueError as error:
        raise InvalidInputError(f"y must be a label a row: {extract_reason(error)}.") from None
    if len(labels) != n:
        raise InvalidInputError(f"y has {len(labels)} labels and X has {n} rows; each row has one.")
    return cast("Labels", labels)


def require_storable(labels: Labels) -> Labels:
    """Return the labels; raise an InvalidTypeError if a store cannot hold labels of their dtype."""
    kind = labels.dtype.kind
    too_wide = kind == "f" and labels.dtype.itemsize > np.dtype(np.float64).itemsize
    if kind not in _JSON_TYPES or too_wide or (kind == "O" and not all(isinstance(value, str) for value in labels)):
        raise InvalidTypeError(f"Unknown label type: {labels.dtype}; labels are whole numbers, bools or words.")
    return labels


def classes_to_json(classes: Labels) -> dict[str, object]:
    """Return the classes and their dtype as JSON values."""
    is_text = classes.dtype.kind in "UO"
    return {"classes": classes.tolist(), "classes_dtype": classes.dtype.kind if is_text else classes.dtype.name}


def classes_from_json(record: Record) -> Labels:
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


def flatten_column(outcome: Predictions) -> Predictions:
    """Return a single column (n, 1) as a vector (n,) or a series, and several columns (n, q) unchanged."""
    if outcome.shape[1] != 1:
        return outcome
    column: Predictions = cast("dd.DataFrame", outcome).iloc[:, 0] if hasattr(outcome, "columns") else outcome[:, 0]
    return column


def codes_to_labels(outcome: Predictions, classes: Labels) -> Predictions:
    """Return the labels (n,) of class codes (n, 1), which are indices into `classes` (C,)."""
    codes = flatten_column(outcome)
    if hasattr(codes, "map_partitions"):
        series = cast("dd.Series", codes)
        meta = (series.name, classes.dtype)
        labels: dd.Series = series.map_partitions(_codes_to_label_series, classes, meta=meta, token=_TASK_NAME)
        return labels
    if hasattr(codes, "map_blocks"):
        array: da.Array = codes.map_blocks(_codes_to_label_array, classes, dtype=classes.dtype, meta=classes[:0])  # type: ignore[arg-type]  # dask's annotations are incomplete
        return array
    return _codes_to_label_array(codes, classes)


@set_dashboard_name(_TASK_NAME)
def _codes_to_label_array(codes: Labels, classes: Labels) -> Labels:
    return classes[codes.astype(np.intp)]


def _codes_to_label_series(codes: "pd.Series", classes: Labels) -> "pd.Series":
    import pandas as pd

    return pd.Series(_codes_to_label_array(codes.to_numpy(), classes), index=codes.index, name=codes.name)
