"""Hold the labels that Parquet files have in place of the codes of classes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dkfm.numerics import links
from dkfm.storage.model_store import MAX_LABEL_CHARACTERS

if TYPE_CHECKING:
    import pyarrow as pa

Label = str | int | float
"""Type of a class label."""


def is_parquet_text(label: Label) -> bool:
    """Return whether Parquet can hold a label, as a value or in the name of a column."""
    if not isinstance(label, str):
        return True
    try:
        return b"\0" not in label.encode() and len(label) <= MAX_LABEL_CHARACTERS
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def make_label_array(classes: Sequence[Label]) -> "pa.Array":
    """Return ascending labels of classes (C,) as text, integers, floats or booleans.

    Examples
    --------
    >>> make_label_array(["red", "white"]).type
    DataType(string)
    """
    import pyarrow as pa

    is_unsigned = isinstance(classes[-1], int) and classes[-1] >= 2**63
    return pa.array(classes, pa.uint64() if is_unsigned else None)


def labels_to_codes(column: "pa.Array | pa.ChunkedArray", labels: "pa.Array") -> npt.NDArray[np.int64]:
    """Return the codes of a column of labels (n,), with -1 for null; raise a ValueError for any other value."""
    import pyarrow.compute as pc

    codes = pc.index_in(column, value_set=labels)
    if codes.null_count != column.null_count:
        raise ValueError("The column has a label that is no class of the model.")
    filled: npt.NDArray[np.int64] = np.asarray(codes.fill_null(links.NO_CODE)).astype(np.int64)
    return filled
