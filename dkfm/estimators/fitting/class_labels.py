"""Check class labels, and convert predicted codes to labels."""

import os
from math import isfinite
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from dkfm.core.frames import is_dask_collection
from dkfm.core.rows import require_unmasked
from dkfm.errors import InvalidInputError, InvalidTypeError, extract_reason
from dkfm.estimators.stored.class_labels import Labels, require_storable
from dkfm.execution.lazy_scoring import set_dashboard_name

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd

Predictions: TypeAlias = "npt.NDArray[np.generic] | da.Array | dd.DataFrame | dd.Series"

_TASK_NAME = "dkfm-labels"
"""Name on the dashboard of the tasks that convert codes to labels."""


def check_label_array(y: object, n: int, name: str) -> Labels:
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
    require_unmasked(y, "y")
    require_no_name(y)
    if isinstance(y, list | tuple) and len({isinstance(label, str) for label in y if not _is_missing(label)}) > 1:
        raise InvalidTypeError("Unknown label type: y mixes words and others, and labels are of one kind.")
    try:
        computed = cast("da.Array", y).compute() if is_dask_collection(y) else y
        labels = column_or_1d(_convert_nullable_integers(computed), warn=True)
    except TypeError as error:
        raise InvalidTypeError(f"y must be a label a row: {extract_reason(error)}.") from None
    except ValueError as error:
        raise InvalidInputError(f"y must be a label a row: {extract_reason(error)}.") from None
    require_no_missing_labels(cast("Labels", labels), "y")
    require_storable(cast("Labels", labels))
    try:
        check_classification_targets(labels)
    except ValueError as error:
        reason = extract_reason(error).split(". ")[0]
        raise InvalidInputError(f"y must be a label a row: {reason}; numbers are targets, of KernelRidge.") from None
    if len(labels) != n:
        raise InvalidInputError(f"y has {len(labels)} labels and X has {n} rows; each row has one.")
    return cast("Labels", labels)


def require_no_name(y: object) -> None:
    """Raise an InvalidInputError if labels or targets are the name of a column or a path."""
    if isinstance(y, str | os.PathLike):
        raise InvalidInputError(
            f"y is an array with a value for each row, and not a name or a path, {str(y)!r:.100}; dkfm fit takes names "
            "of columns and paths."
        )


def require_no_missing_labels(labels: Labels, name: str, rows: npt.NDArray[np.intp] | None = None) -> None:
    """Raise an InvalidInputError that names the first row whose label is None, NaN or infinite.

    `rows` (n,) are the numbers of the labels among the rows of the user; by default 0, 1, ..
    """
    missing = np.zeros(len(labels), np.bool_)
    if labels.dtype.kind == "f":
        missing = ~np.isfinite(labels)
    elif labels.dtype.kind in "mM":
        missing = np.isnat(labels)
    elif labels.dtype == object:
        missing[:] = [_is_missing(label) for label in labels]
    if missing.any():
        row = int(missing.argmax() if rows is None else rows[missing.argmax()])
        raise InvalidInputError(
            f"{name} must be a label a row, and is None, NaN or infinite in row {row} ({missing.sum():,} of "
            f"{len(labels):,} rows); leave such rows out."
        )


def _is_missing(label: object) -> bool:
    is_missing_float = isinstance(label, float) and not isfinite(label)
    return label is None or is_missing_float or type(label).__name__ in ("NAType", "NaTType")  # of pandas


def _convert_nullable_integers(y: object) -> object:
    """Convert nullable integers or booleans to NumPy's, because scikit-learn would convert them to floats."""
    dtype = getattr(getattr(y, "dtype", None), "numpy_dtype", None)
    if dtype is None or dtype.kind not in "biu" or cast("pd.Series", y).isna().any():
        return y
    return cast("pd.Series", y).to_numpy(dtype)


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
        import pandas as pd

        series = cast("dd.Series", codes)
        meta = pd.Series(classes[:0], name=series.name)  # it has the dtype of the partitions, also for text
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
