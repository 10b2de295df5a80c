"""Labelled rows of two sides, those that are fitted and those that are held out, in memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dkfm.comparison.result import ClassificationMarks
from dkfm.core.chunking import row_slices
from dkfm.core.frames import is_dask_collection
from dkfm.core.rows import Rows, as_float64, as_rows, stack_rows
from dkfm.errors import InvalidInputError, reason
from dkfm.estimators.fitting.class_labels import check_labels
from dkfm.estimators.fitting.training_data import load_lazy_frame
from dkfm.execution import memory
from dkfm.plotting.data import concatenate_labels, require_length, require_matrix, sample_numbers
from dkfm.sources.base import Named, read_finite
from dkfm.sources.opening import open_source

TEST_ROWS = 10_000
"""So many test rows are measured at most."""

SAMPLE = 2000
"""So many rows a silhouette and a picture are made of, at most."""

_HELD_OUT = 0.25
_PIECE = 10_000
"""Rows that are read at once where some of many are taken."""


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Rows and their labels, both sides; which of them a silhouette and pictures take."""

    train: Rows
    labels: ClassificationMarks
    test: Rows
    test_labels: ClassificationMarks
    some: npt.NDArray[np.intp]
    some_of_test: npt.NDArray[np.intp]
    held_out: str


def load_labelled_rows(X: object, y: object, test: object, test_labels: object, seed: int) -> LabelledRows:
    """Return training and test rows in memory, with their labels."""
    if (test is None) != (test_labels is None):
        raise InvalidInputError("Test rows and their labels belong together; give both or none.")
    given = _opened(X, "X")
    names = list(given.columns) if isinstance(given, Named) else None
    n = given.shape[0]
    # What cannot be fitted is refused before it is read.
    memory.require_driver_memory(n if test is not None else n - int(_HELD_OUT * n), getattr(given, "row_values", 1))
    train = _read(given, "X", None)
    labels = check_labels(y, train.shape[0], "The comparison")
    if test is None:
        first, rest = _split(labels, seed)
        train, others, labels, marks = train[first], train[rest], labels[first], labels[rest]
        held_out = f", a quarter of all, which were held out at random with the seed {seed}"
    else:
        others, marks, held_out = _held_out(test, test_labels, train.shape[1], names, seed)
    concatenate_labels(labels, marks, "Labels and test labels")
    if not 2 <= len(np.unique(labels)) < len(labels):
        raise InvalidInputError(
            f"Kernels are compared by classes, at least two and with several rows, and {len(labels):,} training rows "
            f"have {len(np.unique(labels)):,} different labels."
        )
    return LabelledRows(train, labels, others, marks, _some(len(labels), seed), _some(len(marks), seed), held_out)


def _held_out(
    test: object, test_labels: object, columns: int, names: list[str] | None, seed: int
) -> tuple[Rows, ClassificationMarks, str]:
    """Return the test rows that are measured, and their labels, and which they are."""
    source = _opened(test, "test", names)
    n, d = (int(size) for size in source.shape)
    if d != columns:
        raise InvalidInputError(f"The test rows have {d} columns, and the training rows have {columns}.")
    require_length(test_labels, n, "test_labels")
    marks, numbers = check_labels(test_labels, n, "The comparison"), sample_numbers(n, TEST_ROWS, seed)
    if numbers is None:
        return _read(source, "test", None), marks, ""
    return _read(source, "test", numbers), marks[numbers], f", taken of {n:,} at random with the seed {seed}"


def _opened(data: object, name: str, names: list[str] | None = None) -> Any:
    """Return what has a shape and rows: a dask array as it is, anything else as a source, of columns by name."""
    data = load_lazy_frame(data)
    if is_dask_collection(data):
        require_matrix(data, name)
        return data
    return data if hasattr(data, "read") else open_source(data, name, fitted=names)


def _read(data: object, name: str, numbers: npt.NDArray[np.intp] | None) -> Rows:
    """Return all rows in memory, or some."""
    source = _opened(data, name)
    if not hasattr(source, "read"):
        return as_float64(as_rows(np.asarray(source if numbers is None else source[numbers]), name))
    n = source.shape[0]
    if numbers is None:
        return as_float64(read_finite(source, slice(0, n)))
    parts = []
    for part in row_slices(n, _PIECE):
        own = numbers[(numbers >= part.start) & (numbers < part.stop)]
        if len(own):
            parts.append(as_float64(read_finite(source, part)[own - part.start]))
    return stack_rows(parts)


def _some(n: int, seed: int) -> npt.NDArray[np.intp]:
    numbers = sample_numbers(n, SAMPLE, seed)
    return np.arange(n) if numbers is None else numbers


def _split(labels: ClassificationMarks, seed: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the numbers of the rows that are fitted, and of those that are held out, both ascending."""
    from sklearn.model_selection import train_test_split

    try:
        first, rest = train_test_split(np.arange(len(labels)), test_size=_HELD_OUT, stratify=labels, random_state=seed)
    except ValueError as error:
        raise InvalidInputError(f"A quarter of the rows cannot be held out: {reason(error)}; give test rows.") from None
    return np.sort(first), np.sort(rest)
