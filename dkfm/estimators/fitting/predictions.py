"""What predictors return, of arrays, dask arrays and dask data frames: labels for codes, one column as a vector."""

from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dkfm.estimators.fitting.class_labels import Labels
from dkfm.execution.lazy_arrays import dashboard_name

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd

Outcome: TypeAlias = "npt.NDArray[np.generic] | da.Array | dd.DataFrame | dd.Series"

_TASKS = "dkfm-labels"
"""What the dashboard calls the tasks that find labels."""


def flatten_column(found: Outcome) -> Outcome:
    """Return an outcome of one column (n, 1) as a vector (n,), of a data frame as a series; a wider one as it is."""
    if found.shape[1] != 1:
        return found
    column: Outcome = cast("dd.DataFrame", found).iloc[:, 0] if hasattr(found, "columns") else found[:, 0]
    return column


def codes_to_labels(found: Outcome, classes: Labels) -> Outcome:
    """Return the labels (n,) of codes (n, 1) of classes (C,)."""
    codes = flatten_column(found)
    if hasattr(codes, "map_partitions"):
        series = cast("dd.Series", codes)
        meta = (series.name, classes.dtype)
        labels: dd.Series = series.map_partitions(_series_of, classes, meta=meta, token=_TASKS)
        return labels
    if hasattr(codes, "map_blocks"):
        lazily: da.Array = codes.map_blocks(_labels_of, classes, dtype=classes.dtype, meta=classes[:0])  # type: ignore[arg-type]  # dask has half of its types
        return lazily
    return _labels_of(codes, classes)


@dashboard_name(_TASKS)
def _labels_of(codes: Labels, classes: Labels) -> Labels:
    return classes[codes.astype(np.intp)]


def _series_of(codes: "pd.Series", classes: Labels) -> "pd.Series":
    import pandas as pd

    return pd.Series(_labels_of(codes.to_numpy(), classes), index=codes.index, name=codes.name)
