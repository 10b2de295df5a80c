"""Validate rows given by a user, and treat dense and sparse rows alike."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dkfm.core.display.quantities import format_names
from dkfm.errors import InvalidInputError, InvalidTypeError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Array: TypeAlias = npt.NDArray[np.floating]
if TYPE_CHECKING:
    Sparse: TypeAlias = csr_array[np.floating, tuple[int, int]]
else:
    Sparse: TypeAlias = Any  # SciPy's sparse part takes a quarter of a second to import, and dense rows need none of it
Rows: TypeAlias = Array | Sparse


_MAX_EXACT_INTEGER = 2**53
"""Size up to which every integer is a float64."""


def as_rows(X: object, name: str = "X") -> Rows:
    """Return `X` as finite rows (n, d), float32 or float64, dense or CSR.

    Parameters
    ----------
    X : array-like or scipy.sparse array or matrix of shape (n, d)
        Booleans, integers, floats, or objects that are such numbers; all but float32 become float64.
    name : str
        Name of X in error messages.

    Returns
    -------
    ndarray or csr_array of shape (n, d)
        `X` itself, or a view of it, if it is valid already.

    Raises
    ------
    InvalidInputError
        X is not two-dimensional, has no row or no column, has a complex or text dtype, has a value that is not a
        finite number, or integers above 2^53 in size in an array, a sparse array or a column of a pandas frame.
    """
    rows = as_rows_allow_nonfinite(X, name)
    require_finite(rows, name, columns=column_labels(X))
    return rows


def column_labels(X: object) -> list[Any] | None:
    """Return what a data frame calls its columns; None for an array."""
    # Arrow calls them `column_names`; a column of a pandas data frame may have that name.
    labels = X.column_names if hasattr(type(X), "column_names") else getattr(X, "columns", None)  # type: ignore[attr-defined]  # as its type says
    return None if labels is None or isinstance(labels, int) else list(labels)


def require_rows_container(X: object) -> None:
    """Raise an InvalidInputError if X is no rows yet: a Dataset of xarray, a LazyFrame, a group of Zarr, a Bag."""
    kind = type(X)  # a column of a pandas data frame is an attribute of X, and not of its type
    if hasattr(kind, "data_vars") and hasattr(kind, "coords"):
        raise InvalidInputError('A Dataset of xarray holds several variables; select one, as in dataset["name"].')
    if hasattr(kind, "collect") and hasattr(kind, "collect_schema"):
        raise InvalidInputError("A LazyFrame of polars is a query and holds no rows yet; call its collect() first.")
    if hasattr(kind, "group_keys") and hasattr(kind, "create_array"):
        raise InvalidInputError('A group of Zarr holds several arrays; select one, as in group["name"].')
    if hasattr(kind, "__dask_graph__") and not hasattr(kind, "shape"):
        raise InvalidInputError(
            "Of dask's collections only arrays and data frames hold rows; call the compute() of another one first."
        )


def require_no_path(X: object, name: str = "X") -> None:
    """Raise an InvalidInputError if X is a path, or another text, where rows in memory are needed."""
    if isinstance(X, str | os.PathLike):
        raise InvalidInputError(
            f"{name} must hold rows in memory here, and is {os.fspath(X)!r:.100}; if that is a path, read the file "
            "first. `batch_score` scores files."
        )


def _require_frame_without_times(X: object, name: str) -> None:
    """Raise an InvalidInputError if a polars data frame has dates or times, which it would return as numbers."""
    schema = getattr(X, "schema", None) if hasattr(type(X), "get_columns") else None
    for column, dtype in schema.items() if isinstance(schema, Mapping) else ():
        if dtype.is_temporal():
            raise InvalidInputError(f"{name} must hold real numbers, and its column {column!r:.100} has {dtype}.")


def require_no_times(X: object, name: str) -> None:
    """Raise an InvalidInputError if X has dates or times, which a conversion may take as numbers."""
    _require_frame_without_times(X, name)
    values = np.asarray(X)
    kinds = {values.dtype.type} if values.dtype != object else set(map(type, values.flat))
    times = np.datetime64, np.timedelta64, date, timedelta  # a datetime is a date
    if any(issubclass(kind, times) for kind in kinds):
        raise InvalidInputError(f"{name} must hold real numbers, and has dates or times.")


def as_rows_allow_nonfinite(X: object, name: str) -> Rows:
    """Return `X` as `as_rows` does, without the check for finite values."""
    require_rows_container(X)
    require_no_path(X, name)
    if not isinstance(X, np.ndarray) and _issparse(X):
        return _as_csr(X, name)
    require_unmasked(X, name)
    _require_frame_without_times(X, name)
    try:
        rows = np.asarray(X)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name} must hold real numbers in rows and columns: {error}") from None
    if rows.dtype.kind not in "iu":
        _require_exact_integer_columns(X)
    if rows.dtype == object and hasattr(X, "to_numpy") and hasattr(X, "isna"):
        rows = X.to_numpy(dtype=object, na_value=np.nan)  # pd.NA is no float
    if rows.dtype == object:
        objects, rows = rows, _objects_to_float64(rows, name, column_labels(X) or [])
        require_no_times(objects, name)  # NumPy converts its own dates
    require_real_matrix(rows.shape, rows.dtype, name)
    return rows if rows.dtype == np.float32 else as_float64(rows)


def _require_exact_integer_columns(X: object) -> None:
    """Raise an InvalidInputError if a pandas data frame of mixed types has integers that float64 rounds."""
    dtypes = getattr(X, "dtypes", None)
    for column, dtype in dtypes.items() if hasattr(dtypes, "items") else ():  # type: ignore[union-attr]  # a pandas Series
        if isinstance(dtype, np.dtype) and dtype.kind in "iu":
            require_exact_integers(np.asarray(X[column]))  # type: ignore[index]  # a frame


def _issparse(X: object) -> bool:
    from scipy.sparse import issparse

    return bool(issparse(X))


def require_unmasked(X: object, name: str) -> None:
    """Raise an InvalidInputError if X is a masked array with a masked value."""
    masked = sys.modules.get("numpy.ma")  # to import it takes longer than a small job
    if masked is not None and isinstance(X, masked.MaskedArray) and masked.is_masked(X):
        raise InvalidInputError(f"{name} has masked values, which are no numbers; fill or drop them.")


def _objects_to_float64(objects: npt.NDArray[np.object_], name: str, columns: Sequence[object]) -> Array:
    """Return an array of Python objects as float64; an error names the first column that is not, if it has a name."""
    try:
        return objects.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        kind = InvalidTypeError if isinstance(error, TypeError) else InvalidInputError
        if objects.ndim != 2 or len(columns) != objects.shape[1]:
            raise kind(f"{name} must hold real numbers: {error}.") from None
    for column, values in zip(columns, objects.T, strict=True):
        try:
            values.astype(np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise kind(f"{name} must hold real numbers, and its column {column!r:.100} does not: {error}.") from None
    raise AssertionError("a column that is no number makes the array one that is none")


def _as_csr(X: object, name: str) -> Sparse:
    from scipy.sparse import csr_array

    dtype = cast("np.dtype[np.generic]", X.dtype)  # type: ignore[attr-defined]  # every sparse array has one
    require_real_matrix(X.shape, dtype, name)  # type: ignore[attr-defined]  # and the other
    for part in ("indices", "indptr"):
        index_dtype = getattr(getattr(X, part, None), "dtype", np.dtype(np.int64))
        if index_dtype.kind not in "iu" or index_dtype == np.uint64:
            raise InvalidInputError(
                f"{name} is no sound sparse array: its {part} are {index_dtype} and must be integers."
            )
    if dtype.kind in "iu" and getattr(X, "format", "") in ("lil", "dok"):  # they have no array of values
        X = X.tocsr()  # type: ignore[attr-defined]  # a sparse array
    require_exact_integers(getattr(X, "data", np.empty(0)))
    try:
        _check_sparse_format(X)
        rows = csr_array(X, dtype=dtype if dtype in (np.float32, np.float64) else np.float64)  # type: ignore[call-overload]  # sparse, as the caller saw
        _check_sparse_format(rows)
        if not rows.has_canonical_format:
            rows = rows.copy()  # adding up duplicates in place would change the user's array
            rows.sum_duplicates()
    except (ValueError, IndexError) as error:
        raise InvalidInputError(f"{name} is no sound sparse array: {error}.") from None
    return cast("Sparse", rows)


def _check_sparse_format(X: Any) -> None:
    """Raise a ValueError if the arrays of sparse rows are inconsistent: SciPy would read out of bounds."""
    if X.format in ("csr", "csc", "bsr", "coo"):
        same = type(X)(X)  # shares the arrays; the check may shorten its own references
        if X.format != "coo":  # COO is checked by its constructor
            same.check_format(full_check=True)


def build_csr_rows(
    data: Array, indices: npt.NDArray[np.integer], indptr: npt.NDArray[np.integer], columns: int
) -> Sparse:
    """Return CSR rows from their three arrays."""
    from scipy.sparse import csr_array

    return cast("Sparse", csr_array((data, indices, indptr), shape=(len(indptr) - 1, columns)))


def is_sparse(rows: Rows) -> bool:
    """Return whether rows are CSR."""
    return not isinstance(rows, np.ndarray)


def has_only_equal_rows(rows: Rows) -> bool:
    """Return whether all rows are equal."""
    if isinstance(rows, np.ndarray):
        return bool((rows == rows[:1]).all())
    n, stored = rows.shape[0], np.diff(rows.indptr)
    if (stored != stored[0]).any():
        return False
    return all(bool((part.reshape(n, -1) == part[: stored[0]]).all()) for part in (rows.indices, rows.data))


def as_float64(rows: Rows) -> Rows:
    """Return rows as float64, which is exact; rows that are float64 are returned as they are."""
    if rows.dtype == np.float64:
        return rows
    require_exact_integers(rows if isinstance(rows, np.ndarray) else rows.data)
    return rows.astype(np.float64)


def require_exact_integers(values: npt.NDArray[np.generic]) -> None:
    """Raise an InvalidInputError if values are integers so large that float64 rounds them."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8 or not values.size:
        return
    if max(int(values.max()), -int(values.min())) > _MAX_EXACT_INTEGER:
        raise InvalidInputError(
            "Rows hold integers above 2^53 in size, and float64 rounds them: leave out a column of ids, subtract an "
            "offset, or convert the rows to float64 if the difference does not matter."
        )


def require_real_matrix(shape: tuple[int, ...], dtype: np.dtype[np.generic], name: str) -> None:
    """Raise an InvalidInputError unless shape and dtype are those of rows of real numbers."""
    if dtype.kind == "c":
        raise InvalidInputError(f"Complex data not supported: {name} must hold real numbers, and its dtype is {dtype}.")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InvalidInputError(f"{name} must hold real numbers of at most 64 bits, and its dtype is {dtype}.")
    if len(shape) != 2:
        raise InvalidInputError(
            f"{name} must have two dimensions (rows, columns), and its shape is {shape}; "
            "Reshape your data: one row is X.reshape(1, -1), one column X.reshape(-1, 1)."
        )
    if 0 in shape:
        what = "feature(s)" if shape[1] == 0 else "sample(s)"
        raise InvalidInputError(
            f"{name} needs at least one row and one column: 0 {what} (shape={shape}) while a minimum of 1 is required."
        )


def require_finite(
    rows: Rows,
    name: str,
    locate_row: Callable[[int], tuple[str, int]] | None = None,
    columns: Sequence[object] | None = None,
) -> None:
    """Raise an InvalidInputError with the number of the first row that is not finite, and its column.

    For rows of several files, `locate_row` returns the name of the file of a row, and its number there. `columns` are
    names.
    """
    values = rows if isinstance(rows, np.ndarray) else rows.data
    # A finite sum proves that all values are finite, in one pass without a temporary array.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = ~np.isfinite(values)
    if not bad.any():
        return
    where = np.unique(np.nonzero(bad)[0] if isinstance(rows, np.ndarray) else _coo_row_indices(rows)[bad])
    row = int(where[0])
    found = rows[row] if isinstance(rows, np.ndarray) else rows[[row]].data
    is_nan = np.isnan(found)
    what = "NaN" if is_nan.any() else "infinity"
    if isinstance(rows, np.ndarray):
        names = range(rows.shape[1]) if columns is None else columns
        what += f" in column {names[int(np.argmax(is_nan if is_nan.any() else bad[row]))]!r:.100}"
    name, row = (name, row) if locate_row is None else locate_row(row)
    count = f"{len(where):,} of {rows.shape[0]:,} rows that were checked together"
    if isinstance(rows, np.ndarray) and len(numbers := find_nonfinite_columns(rows)) > 1:
        count += f", in {format_names([names[number] for number in numbers])}"
    raise InvalidInputError(f"{name} must be finite, and row {row} contains {what} ({count}); fill or drop such rows.")


def zero_nonfinite_rows(rows: Rows) -> tuple[npt.NDArray[np.bool_], Rows]:
    """Return a mask (n,) of the finite rows, and the rows with all others replaced by zeros."""
    if isinstance(rows, np.ndarray):
        finite: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(rows), axis=1)
        return finite, np.where(finite[:, np.newaxis], rows, 0.0)
    row = _coo_row_indices(rows)
    finite = np.bincount(row[~np.isfinite(rows.data)], minlength=rows.shape[0]) == 0
    return finite, _with_data(rows, np.where(finite[row], rows.data, 0.0))


def find_nonfinite_columns(rows: Rows) -> npt.NDArray[np.intp]:
    """Return the ascending numbers of the columns that contain NaN or infinity."""
    if isinstance(rows, np.ndarray):
        return np.flatnonzero(~np.logical_and.reduce(np.isfinite(rows), axis=0))
    return np.unique(rows.indices[~np.isfinite(rows.data)]).astype(np.intp)


def estimate_float64s_per_row(rows: Rows) -> int:
    """Return the average memory of a row in dense float64 values, rounded up."""
    if isinstance(rows, np.ndarray):
        return int(rows.shape[1])
    return -(-2 * rows.nnz // rows.shape[0]) + 1


def stack_rows(parts: list[Rows]) -> Rows:
    """Concatenate rows that are all dense, or all sparse."""
    dense = [part for part in parts if isinstance(part, np.ndarray)]
    if dense:
        return np.concatenate(dense)
    from scipy.sparse import csr_array, vstack

    return cast("Sparse", csr_array(vstack(parts, format="csr")))  # type: ignore[call-overload]  # sparse, all of them


def squared_norms(X: Rows) -> Array:
    """Return the squared norms |x|^2 of the rows, (n,), accumulated in float64."""
    if isinstance(X, np.ndarray):
        norms: Array = np.einsum("ij,ij->i", X, X, dtype=np.float64)
        return norms
    return _row_sums(X, np.square(X.data, dtype=np.float64))


def _row_sums(X: Sparse, values: Array) -> Array:
    """Return the sums (n,) over each row of values that correspond to the stored ones."""
    return np.bincount(_coo_row_indices(X), values, X.shape[0]).astype(np.float64, copy=False)


def _coo_row_indices(X: Sparse) -> npt.NDArray[np.intp]:
    """Return the row number of each stored value."""
    return np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))


def scale_columns(X: Rows, factors: float | Array) -> Rows:
    """Return X with its columns multiplied by one factor, or by a factor each (d,), in the precision of X."""
    if isinstance(X, np.ndarray):
        return (X * factors).astype(X.dtype, copy=False)
    by_value = factors if isinstance(factors, float) else factors[X.indices]
    return _with_data(X, X.data * by_value)


def normalize_rows(X: Rows) -> tuple[Rows, Array]:
    """Return the rows ``x / |x|``, zero for a zero row, and their norms |x| (n,), without overflow."""
    if isinstance(X, np.ndarray):
        largest = np.abs(X).max(axis=1)
        units = X / np.where(largest > 0, largest, 1)[:, np.newaxis]
        lengths = np.sqrt(squared_norms(units))
        units /= np.where(largest > 0, lengths, 1)[:, np.newaxis]
        return units.astype(X.dtype, copy=False), lengths * largest
    row, largest = _coo_row_indices(X), np.zeros(X.shape[0])
    np.maximum.at(largest, row, np.abs(X.data))
    values = X.data / np.where(largest > 0, largest, 1)[row]
    lengths = np.sqrt(_row_sums(X, np.square(values)))
    values /= np.where(largest > 0, lengths, 1)[row]
    return _with_data(X, values), lengths * largest


def _with_data(X: Sparse, data: Array) -> Sparse:
    return build_csr_rows(data.astype(X.dtype, copy=False), X.indices, X.indptr, X.shape[1])
