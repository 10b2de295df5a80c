"""Validate NumPy and Dask arrays before they are plotted, and draw a seeded sample of many rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from dkfm.core.frames import is_dask_collection
from dkfm.core.rows import Array, require_unmasked
from dkfm.errors import InvalidInputError, extract_reason
from dkfm.estimators.fitting.class_labels import require_no_missing_labels

if TYPE_CHECKING:
    import dask.array as da

MAX_PLOT_ROWS = 5000
"""Largest number of rows that are drawn."""

Values: TypeAlias = Union[npt.ArrayLike, "da.Array"]
Labels: TypeAlias = Union[npt.ArrayLike, "da.Array"]

_GRID_POINTS = 160
_MARGIN = 0.1


def sample_for_plot(
    values: Values, name: str, labels: Labels | None, ndim: int = 2
) -> tuple[Array, npt.NDArray[np.generic] | None, str]:
    """Return the rows to draw (m, q) or (m,), their labels (m,) if any, and a note for the plot if they are a sample.

    More than 5,000 rows are sampled at random with a fixed seed, and keep their order. `name` names the values in error
    messages, and `ndim` is the number of dimensions that they must have, 1 or 2.

    Raises
    ------
    InvalidInputError
        The shapes do not match, a sampled value is not a finite real number, or a sampled label is missing.
    """
    n = read_matrix_shape(values, name)[0] if ndim == 2 else _read_vector_length(values, name)
    if labels is not None:
        require_length(labels, n, "labels")
    numbers = sample_row_numbers(n, MAX_PLOT_ROWS)
    arrays = _load_rows([values] if labels is None else [values, labels], numbers)
    rows, row_labels = _convert_to_finite_float64(arrays[0], name), None
    if labels is not None:
        require_no_missing_labels(arrays[1], "labels", numbers)
        row_labels = require_sortable(arrays[1])
    return rows, row_labels, "" if numbers is None else f"{len(numbers):,} of {n:,} rows, drawn at random"


def sample_row_numbers(n: int, most: int, seed: int = 0) -> npt.NDArray[np.intp] | None:
    """Return the ascending numbers of `most` of n rows, drawn with a seed; None if n is at most `most`.

    >>> sample_row_numbers(10, 3).tolist(), sample_row_numbers(3, 3)
    ([5, 6, 9], None)
    """
    return None if n <= most else np.sort(np.random.default_rng(seed).choice(n, most, replace=False))


def _load_rows(arrays: list[Values], numbers: npt.NDArray[np.intp] | None) -> list[npt.NDArray[np.generic]]:
    """Return the numbered rows of each array, or all, in memory; compute shared tasks of dask arrays only once."""
    loaded: list[Any] = [array if is_dask_collection(array) else np.asarray(array) for array in arrays]
    loaded = loaded if numbers is None else [array[numbers] for array in loaded]
    if any(is_dask_collection(array) for array in loaded):
        from dask.base import compute

        loaded = list(compute(*loaded))
    for array in loaded:
        require_unmasked(array, "An array to be drawn")  # only a computed dask array shows its mask
    return [np.asarray(array) for array in loaded]


def read_matrix_shape(values: object, name: str) -> tuple[int, int]:
    """Return the shape (n, q) of an array; raise if it has no rows, no columns or not two dimensions."""
    shape = _read_dense_shape(values, name)
    if len(shape) != 2 or 0 in shape:
        raise InvalidInputError(f"{name} must have rows and columns, and its shape is {shape}.")
    return shape


def require_finite_vector(values: Values, name: str, least: int = 1) -> Array:
    """Return values (n,) as float64; raise unless they are finite and at least `least` in number."""
    if _read_vector_length(values, name) < least:
        raise InvalidInputError(f"{name} must have a value, and is empty.")
    return _convert_to_finite_float64(_load_rows([values], None)[0], name)


def _read_vector_length(values: object, name: str) -> int:
    shape = _read_dense_shape(values, name)
    if len(shape) != 1:
        raise InvalidInputError(f"{name} must have one dimension, and its shape is {shape}.")
    return shape[0]


def require_length(labels: object, n: int, name: str) -> None:
    """Raise unless there is a label for each of n rows."""
    if (count := _read_vector_length(labels, name)) != n:
        raise InvalidInputError(f"{name} must have a label for each of {n:,} rows, and has {count:,}.")


def _read_dense_shape(values: object, name: str) -> tuple[int, ...]:
    """Return the shape of a dense array; raise if it is sparse, masked, of unknown length, or not an array."""
    require_unmasked(values, name)
    if hasattr(values, "tocsr"):
        raise InvalidInputError(f"{name} must be a dense array to be drawn, and is sparse.")
    shape: tuple[float, ...] | None = getattr(values, "shape", None)
    if is_dask_collection(values) and (not hasattr(values, "chunks") or any(np.isnan(size) for size in shape or ())):
        raise InvalidInputError(
            f"{name} must be a dask array of known length; for a data frame, pass .to_dask_array(lengths=True)."
        )
    if shape is not None:
        return tuple(int(size) for size in shape)
    try:
        return np.asarray(values).shape
    except ValueError as error:
        raise InvalidInputError(f"{name} must be an array: {extract_reason(error)}.") from None


def _convert_to_finite_float64(values: npt.NDArray[np.generic], name: str) -> Array:
    try:
        numbers = values.astype(np.float64) if values.dtype.kind in "biufO" else None
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None:
        raise InvalidInputError(f"{name} must hold real numbers, and its dtype is {values.dtype}.")
    if not np.isfinite(numbers).all():
        row = int(np.argmin(np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1)))
        raise InvalidInputError(f"{name} must be finite to be drawn, and row {row} of those drawn is not.")
    return numbers


def require_sortable(labels: npt.NDArray[np.generic], name: str = "labels") -> npt.NDArray[np.generic]:
    """Return labels; raise if their types cannot be compared with each other."""
    try:
        np.unique(labels)
    except TypeError:
        raise InvalidInputError(f"{name} must be of one kind, such as numbers or strings, and some differ.") from None
    return labels


def concatenate_labels(
    first: npt.NDArray[np.generic], second: npt.NDArray[np.generic], name: str
) -> npt.NDArray[np.generic]:
    """Concatenate two arrays of labels; raise if only one is numeric, because NumPy would turn numbers into strings."""
    if (first.dtype.kind in "biuf") != (second.dtype.kind in "biuf"):
        raise InvalidInputError(
            f"{name} must be of one kind, and they are of the dtypes {first.dtype} and {second.dtype}."
        )
    return require_sortable(np.concatenate([first, second]))


def iter_label_masks(
    labels: npt.NDArray[np.generic] | None, n: int
) -> Iterator[tuple[str | None, npt.NDArray[np.bool_]]]:
    """Yield each label as text with the mask (n,) of its rows; without labels, None with all rows."""
    if labels is None:
        yield None, np.ones(n, bool)
        return
    for value in np.unique(labels):
        yield escape_label(value), labels == value


def escape_label(label: object) -> str:
    r"""Return a label as text that Matplotlib draws verbatim and shows in the legend.

    >>> print(escape_label("$x$"), escape_label("_hidden"))
    \$x\$  _hidden
    """
    text = str(label).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def compute_plot_corners(rows: Array) -> tuple[Array, Array]:
    """Return the lower and upper corner (2,) of the bounding box of rows (n, 2), with a margin of a tenth."""
    if rows.shape[1] != 2:
        raise InvalidInputError(f"A plane has two columns, and X has {rows.shape[1]}; choose two, or draw components.")
    low, high = rows.min(axis=0), rows.max(axis=0)
    margin = np.where(high > low, _MARGIN * (high - low), 1.0)
    return low - margin, high + margin


def plane_grid(corners: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Return the 160 coordinates along each axis, and the points (160 * 160, 2) of their grid."""
    horizontal, vertical = (np.linspace(low, high, _GRID_POINTS) for low, high in zip(*corners, strict=True))
    points = np.stack(np.meshgrid(horizontal, vertical), axis=-1).reshape(-1, 2)
    return horizontal, vertical, points
