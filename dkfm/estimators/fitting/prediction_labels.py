"""Convert predictions in arrays, dask arrays and dask data frames: codes to labels, a single column to a vector."""

from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dkfm.estimators.fitting.class_labels import Labels
from dkfm.execution.lazy_arrays import set_dashboard_name

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd

Predictions: TypeAlias = "npt.NDArray[np.generic] | da.Array | dd.DataFrame | dd.Series"

_TASK_NAME = "dkfm-labels"
"""Name on the dashboard of the tasks that convert codes to labels."""


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
        labels: dd.Series = series.map_partitions(_convert_series, classes, meta=meta, token=_TASK_NAME)
        return labels
    if hasattr(codes, "map_blocks"):
        array: da.Array = codes.map_blocks(_convert_array, classes, dtype=classes.dtype, meta=classes[:0])  # type: ignore[arg-type]  # dask's annotations are incomplete
        return array
    return _convert_array(codes, classes)


@set_dashboard_name(_TASK_NAME)
def _convert_array(codes: Labels, classes: Labels) -> Labels:
    return classes[codes.astype(np.intp)]


def _convert_series(codes: "pd.Series", classes: Labels) -> "pd.Series":
    import pandas as pd

    return pd.Series(_convert_array(codes.to_numpy(), classes), index=codes.index, name=codes.name)
