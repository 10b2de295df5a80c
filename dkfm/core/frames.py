"""Read the column names of data frames and labelled arrays, and compare them.

pandas, polars, pyarrow and xarray are recognised by their attributes, and never imported.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from dkfm.core.display.quantities import format_names
from dkfm.core.rows import Rows, as_rows, column_labels, require_rows_container
from dkfm.errors import InvalidInputError, find_similar_names


def convert_container(X: object) -> object:
    """Return the array of an xarray DataArray, or an Arrow record batch as a table; any other X as it is.

    A DataArray holds a NumPy array or a dask array. scikit-learn reads the column names of a table, not of a batch.

    Raises
    ------
    InvalidInputError
        X is an xarray Dataset, or a polars LazyFrame.
    """
    require_rows_container(X)
    if hasattr(X, "dims") and hasattr(X, "coords") and hasattr(X, "data"):
        return X.data
    if hasattr(X, "column_names") and hasattr(X, "__arrow_c_array__") and hasattr(X, "schema"):
        return X.schema.empty_table().from_batches([X])
    return X


def is_dask_collection(X: object) -> bool:
    """Return whether X is a dask array or data frame; dask is not imported for the answer."""
    return hasattr(X, "__dask_graph__")


def is_dask_array(X: object) -> bool:
    """Return whether X is a dask array, and no dask data frame or xarray dataset."""
    return is_dask_collection(X) and hasattr(X, "rechunk")


def column_names(X: object, name: str = "X") -> tuple[str, ...] | None:
    """Return the column names of a data frame; None for an array, and for a frame whose columns are numbered.

    Raises
    ------
    InvalidInputError
        Some column names are strings and others are not.
    """
    if not hasattr(X, "shape"):
        return None
    names = column_labels(X)
    if names is None:
        return None
    texts = sum(isinstance(column, str) for column in names)
    if 0 < texts < len(names):
        raise InvalidInputError(f"{name} has columns of which only some are called by text; rename the others.")
    return tuple(map(str, names)) if texts else None


def has_range_columns(frame: object) -> bool:
    """Return whether the columns of a data frame are numbered 0, 1, .. in order; True for anything without columns."""
    labels = getattr(frame, "columns", None)
    return labels is None or isinstance(labels, int) or list(labels) == list(range(len(labels)))


def select_columns(frame: object, columns: Sequence[str]) -> object:
    """Return columns of a data frame by name, in the given order."""
    if hasattr(frame, "iloc"):  # pandas
        return frame[list(columns)]  # type: ignore[index]  # a data frame
    return frame.select(list(columns))  # type: ignore[attr-defined]  # polars and Arrow


def require_same_columns(X: object, Y: object, what: str, other: str) -> None:
    """Raise an InvalidInputError if X holds no rows, or X and Y both have column names that differ, or their order."""
    require_rows_container(X)
    require_same_names(column_names(X, what), column_names(Y, other), what, other)


def require_same_names(first: Sequence[str] | None, second: Sequence[str] | None, what: str, other: str) -> None:
    """Raise an InvalidInputError if two inputs both have column names, and the names or their order differ."""
    if first is None or second is None or list(first) == list(second):
        return
    place = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if place is None:
        difference = f"{other} has {len(second)} columns and {what} has {len(first)}"
    else:
        difference = f"column {place} of {other} is {second[place]!r:.100}, and of {what} {first[place]!r:.100}"
    raise InvalidInputError(f"{difference}; give both the same columns in the same order.")


def as_row_pair(X: object, Y: object) -> tuple[Rows, Rows]:
    """Return X and Y as rows of equal width; X twice if Y is None."""
    x = as_rows(X)
    y = x if Y is None or Y is X else as_rows(Y, "Y")
    if x.shape[1] != y.shape[1]:
        raise InvalidInputError(f"X has {x.shape[1]} columns and Y has {y.shape[1]}; a kernel compares equals.")
    if y is not x:
        require_same_columns(X, Y, "X", "Y")
    return x, y


def validate_columns_argument(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the column names that a user asks for, each once; None if the user asks for none."""
    if columns is None:
        return None
    is_list = isinstance(columns, Iterable) and not isinstance(columns, str)
    names = tuple(columns) if is_list else ()
    if not is_list or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(f"columns must be a list of names, and is {columns!r:.100}.")
    require_unique_names(names, "columns names")
    return names


def require_unique_names(names: Sequence[str], where: str) -> None:
    """Raise an InvalidInputError if a name is repeated."""
    if len(set(names)) < len(names):
        twice = sorted(name for name, times in Counter(names).items() if times > 1)
        raise InvalidInputError(f"{where} {format_names(twice)} more than once; every column needs a name of its own.")


def describe_known_names(absent: Sequence[str], known: Sequence[str]) -> str:
    """Return, for a message, the known column names that the absent ones were probably meant for, or the first known.

    >>> describe_known_names(["Target"], ["a", "b", "target"])
    "near it: 'target'"
    >>> describe_known_names([5], ["a", 7])  # a frame may call its columns by anything
    "it has columns 'a', 7"
    """
    if not known:
        return "it has no columns"
    texts = [name for name in known if isinstance(name, str)]
    similar = (find_similar_names(wrong, texts) for wrong in absent if isinstance(wrong, str))
    near = list(dict.fromkeys(name for names in similar for name in names))
    return f"near it: {', '.join(f'{name!r:.100}' for name in near)}" if near else f"it has {format_names(known)}"
