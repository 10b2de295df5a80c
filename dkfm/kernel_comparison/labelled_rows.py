"""Load the labelled training rows and test rows of a comparison into memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dkfm.core import budget
from dkfm.core.chunking import require_count, row_slices
from dkfm.core.frames import column_names, describe_known_names, is_dask_collection
from dkfm.core.rows import Rows, as_float64, as_rows, require_finite, stack_rows
from dkfm.errors import BudgetError, InvalidInputError, extract_reason
from dkfm.estimators.fitting.class_labels import check_label_array
from dkfm.estimators.standardization import fit_scaler
from dkfm.execution import memory
from dkfm.gram.training_data import compute_lazy_frame
from dkfm.kernel_comparison.result import LabelArray
from dkfm.plotting.data import concatenate_labels, read_matrix_shape, require_length, sample_row_numbers
from dkfm.sources.base import NamedColumns, Source, read_finite
from dkfm.sources.opening import open_source

MAX_TEST_ROWS = 10_000
"""Largest number of test rows that are measured; a larger set is sampled."""

MAX_SAMPLE_ROWS = 2000
"""Largest number of rows for a silhouette or a plot."""

_TEST_SIZE = 0.25
_READ_ROWS = 10_000
"""Number of rows that are read at a time to extract a sample."""


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Training rows (n, d) and test rows (m, d) with their labels.

    `sampled_train_indices` and `plotted_test_indices` are the numbers of at most 2,000 rows each, which silhouettes and
    plots use. `train_origin_clause` and `test_origin_clause` describe how the training rows and the test rows were
    chosen.
    """

    train: Rows
    train_labels: LabelArray
    test: Rows
    test_labels: LabelArray
    sampled_train_indices: npt.NDArray[np.intp]
    plotted_test_indices: npt.NDArray[np.intp]
    train_origin_clause: str
    test_origin_clause: str


def load_labelled_rows(
    X: object,
    y: object,
    test: object,
    test_labels: object,
    columns: Sequence[str] | None,
    sample: int | None,
    seed: int,
) -> LabelledRows:
    """Return training and test rows in memory, with their labels; sample X with a seed if a sample size is given."""
    if sample is not None:
        require_count(sample, "sample")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise InvalidInputError(f"random_state must be an integer from 0 to 2^32 - 1, and is {seed!r:.50}.")
    if test is not None and test_labels is None and isinstance(y, str):
        test_labels = y
    if (test is None) != (test_labels is None):
        raise InvalidInputError("Test rows and their labels belong together; give both or none.")
    source, y = _open_with_labels(X, "X", y, columns)
    names = list(source.columns) if isinstance(source, NamedColumns) else None
    n = source.shape[0]
    numbers = None if sample is None else sample_row_numbers(n, sample, seed)
    # Check the memory of the fit before any row is read.
    kept_rows = n if numbers is None else len(numbers)
    kept_rows -= int(_TEST_SIZE * kept_rows) if test is None else 0
    _require_memory(kept_rows, getattr(source, "float64s_per_row", source.shape[1]))
    train = _read_rows(source, "X", numbers)
    labels, drawn, whole = check_label_array(y, n, "The comparison"), "", "all"
    if numbers is not None:
        labels = labels[numbers]
        drawn, whole = f", of a sample of {len(numbers):,} of {n:,} rows drawn with the seed {seed}", "the sample"
    if test is None:
        kept, rest = _split_row_indices(labels, seed)
        train, others, labels, other_labels = train[kept], train[rest], labels[kept], labels[rest]
        held_out = f", a quarter of {whole}, which were held out at random with the seed {seed}"
    else:
        others, other_labels, held_out = _load_test_rows(test, test_labels, train.shape[1], names, seed)
    concatenate_labels(labels, other_labels, "Labels and test labels")
    if not np.isin(other_labels, labels).any():
        raise InvalidInputError("None of the test labels is a label of the training rows.")
    if not 2 <= len(np.unique(labels)) < len(labels):
        raise InvalidInputError(
            f"Kernels are compared by classes, at least two and with several rows, and {len(labels):,} training rows "
            f"have {len(np.unique(labels)):,} of them."
        )
    samples = _sample_indices(len(labels), seed), _sample_indices(len(other_labels), seed)
    return LabelledRows(train, labels, others, other_labels, *samples, drawn, held_out)


def _require_memory(n: int, d: int) -> None:
    """Raise a BudgetError unless this process can fit a map to n rows of d values."""
    if not memory.has_factorization_memory(n, d):
        most = budget.largest_n_within(memory.clear_caches_and_measure_memory(), d)
        raise BudgetError(
            f"A comparison fits maps to all {n:,} training rows, and this process has room for {most:,}; compare on "
            "a sample of the rows (sample=, --sample)."
        )


def standardize_columns(rows: LabelledRows) -> LabelledRows:
    """Return the rows with columns of mean 0 and variance 1 over the training rows."""
    scaler = fit_scaler(rows.train)
    train, test = scaler.transform(rows.train), scaler.transform(rows.test)
    clause = f"{rows.test_origin_clause}; columns are scaled to mean 0 and variance 1 over the training rows"
    return replace(rows, train=train, test=test, test_origin_clause=clause)


def _load_test_rows(
    test: object, test_labels: object, columns: int, names: list[str] | None, seed: int
) -> tuple[Rows, LabelArray, str]:
    """Return the test rows to measure, their labels, and the clause on their origin."""
    source, test_labels = _open_with_labels(test, "test", test_labels, fitted_columns=names)
    n, d = (int(size) for size in source.shape)
    if d != columns:
        raise InvalidInputError(f"The test rows have {d} columns, and the training rows have {columns}.")
    require_length(test_labels, n, "test_labels")
    labels, numbers = check_label_array(test_labels, n, "The comparison"), sample_row_numbers(n, MAX_TEST_ROWS, seed)
    if numbers is None:
        return _read_rows(source, "test", None), labels, ""
    return _read_rows(source, "test", numbers), labels[numbers], f", taken of {n:,} at random with the seed {seed}"


def _open_with_labels(
    data: object,
    name: str,
    labels: object,
    columns: Sequence[str] | None = None,
    fitted_columns: Sequence[str] | None = None,
) -> tuple[Any, object]:
    """Return a dask array unchanged, or a source of rows, and the labels of the rows.

    Labels may be the name of a column. `columns` is as for `open_source`; by default all columns but the labels.
    """
    if isinstance(labels, str) and labels in (columns or ()):
        raise InvalidInputError(
            f"The column {labels!r:.50} has the labels, so it is no feature; leave it out of columns."
        )
    data = compute_lazy_frame(data)
    is_opened = is_dask_collection(data) or hasattr(data, "read_overhead_bytes")  # a source, and no open file
    if is_opened and columns is not None:
        raise InvalidInputError(f"columns names columns of a table or a data frame, and {name} is none.")
    if is_dask_collection(data):
        read_matrix_shape(data, name)
        return data, _require_no_column(labels, name)
    names = None if is_opened else column_names(data, name)
    if isinstance(labels, str) and names is not None:
        if labels not in names:
            known = describe_known_names([labels], names)
            raise InvalidInputError(f"{name} has no column {labels!r:.50} of labels; {known}.")
        others = fitted_columns or [column for column in names if column != labels]
        return open_source(data, name, columns=columns, fitted_columns=others), data[labels]  # type: ignore[index]  # a data frame
    source = data
    if not is_opened:
        excluded = [labels] if isinstance(labels, str) else []
        source = open_source(data, name, columns=columns, fitted_columns=fitted_columns, excluded_columns=excluded)
    if isinstance(labels, str) and isinstance(source, NamedColumns):
        from dkfm.sources.label_column import read_label_column
        from dkfm.sources.parquet import ParquetSource

        if isinstance(source, ParquetSource):
            return source, read_label_column(source, labels)
    return source, _require_no_column(labels, name)


def _require_no_column(labels: object, name: str) -> object:
    if isinstance(labels, str):
        raise InvalidInputError(f"The labels {labels!r:.50} name a column, and {name} has no names of columns.")
    return labels


def _read_rows(source: Any, name: str, numbers: npt.NDArray[np.intp] | None) -> Rows:
    """Return the numbered rows, or all rows if `numbers` is None, in memory as float64."""
    if not hasattr(source, "read"):
        return as_float64(as_rows(np.asarray(source if numbers is None else source[numbers]), name))
    n = source.shape[0]
    if numbers is None:
        return as_float64(read_finite(source, slice(0, n)))
    parts = []
    for piece in row_slices(n, _READ_ROWS):
        selected = numbers[(numbers >= piece.start) & (numbers < piece.stop)]
        if len(selected):
            parts.append(as_float64(_read_finite_rows(source, piece, selected)))
    return stack_rows(parts)


def _read_finite_rows(source: Source, piece: slice, numbers: npt.NDArray[np.intp]) -> Rows:
    """Return the numbered rows of a piece of a source; raise an InvalidInputError if one of them is not finite."""
    rows: Rows = source.read(piece)[numbers - piece.start]
    columns = source.columns if isinstance(source, NamedColumns) else None
    require_finite(rows, source.name, lambda row: source.locate_row(int(numbers[row])), columns)
    return rows


def _sample_indices(n: int, seed: int) -> npt.NDArray[np.intp]:
    numbers = sample_row_numbers(n, MAX_SAMPLE_ROWS, seed)
    return np.arange(n) if numbers is None else numbers


def _split_row_indices(labels: LabelArray, seed: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the ascending numbers of the training rows and of the test rows, stratified by label."""
    from sklearn.model_selection import train_test_split

    classes, counts = np.unique(labels, return_counts=True)
    if singles := int((counts == 1).sum()):
        are_targets = classes.dtype.kind in "iuf" and 2 * singles > len(classes)
        single = classes[counts.argmin()]
        raise InvalidInputError(
            f"A quarter of the rows cannot be held out, because the class {single!s:.50} has only one row ({singles:,} "
            f"of {len(classes):,} such classes): give test rows, or more rows of each class"
            + ('; for a regression, use KernelRidge(alpha="loo"), or dkfm fit --method ridge.' if are_targets else ".")
        )
    try:
        kept, rest = train_test_split(np.arange(len(labels)), test_size=_TEST_SIZE, stratify=labels, random_state=seed)
    except ValueError as error:
        reason = extract_reason(error)
        raise InvalidInputError(
            f"A quarter of the rows cannot be held out: {reason}; give test rows, or more rows of each class."
        ) from None
    return np.sort(kept), np.sort(rest)
