"""What is drawn: arrays of NumPy's or Dask's, checked for shape, and of many rows a seeded sample."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from dkfm.core.frames import is_dask_collection
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError

if TYPE_CHECKING:
    import dask.array as da

SAMPLE = 5000
"""So many rows are drawn at most."""

Values: TypeAlias = Union[npt.ArrayLike, "da.Array"]
Labels: TypeAlias = Union[npt.ArrayLike, "da.Array"]

_GRID = 160
_MARGIN = 0.1


def sample_for_plot(
    values: Values, name: str, labels: Labels | None, most: int = SAMPLE, shape: int = 2
) -> tuple[Array, npt.NDArray[np.generic] | None, str]:
    """Return the rows that are drawn, their labels, and a note for the picture where they are a sample.

    Parameters
    ----------
    values : array-like or dask array of shape (n, q), or (n,) where `shape` is 1
    name : str
        What messages call them.
    labels : array-like or dask array of shape (n,), optional
    most : int
        So many rows are taken, at random with a fixed seed, in order.

    Returns
    -------
    rows : ndarray of float64
    labels : ndarray or None
    note : str

    Raises
    ------
    InvalidInputError
        Shapes that do not fit, or values that are not finite real numbers.
    """
    n = require_matrix(values, name)[0] if shape == 2 else _length(values, name)
    if labels is not None:
        require_length(labels, n, "labels")
    both = _computed([values] if labels is None else [values, labels], sample_numbers(n, most))
    rows, marks = _finite(both[0], name), None if labels is None else _marks(both[1])
    return rows, marks, f"{most:,} of {n:,} rows, drawn at random" if n > most else ""


def sample_numbers(n: int, most: int, seed: int = 0) -> npt.NDArray[np.intp] | None:
    """Return the numbers of some of n rows, at random with a seed, ascending; None where they are all.

    >>> sample_numbers(10, 3).tolist(), sample_numbers(3, 3)
    ([5, 6, 9], None)
    """
    return None if n <= most else np.sort(np.random.default_rng(seed).choice(n, most, replace=False))


def _computed(arrays: list[Values], numbers: npt.NDArray[np.intp] | None) -> list[npt.NDArray[np.generic]]:
    """Return some rows of arrays in memory; of dask arrays together, so that what they share is computed once."""
    taken: list[Any] = [array if is_dask_collection(array) else np.asarray(array) for array in arrays]
    taken = taken if numbers is None else [array[numbers] for array in taken]
    if any(is_dask_collection(array) for array in taken):
        from dask.base import compute

        taken = list(compute(*taken))
    return [np.asarray(array) for array in taken]


def require_matrix(values: object, name: str) -> tuple[int, int]:
    """Return the shape (n, q) of an array, or raise where it has another."""
    shape = _shape(values, name)
    if len(shape) != 2 or 0 in shape:
        raise InvalidInputError(f"{name} must have rows and columns, and its shape is {shape}.")
    return shape


def require_column_values(values: Values, name: str, least: int = 1) -> Array:
    """Return finite numbers (n,), or raise where they are not."""
    if _length(values, name) < least:
        raise InvalidInputError(f"{name} must have a value, and is empty.")
    return _finite(_computed([values], None)[0], name)


def _length(values: object, name: str) -> int:
    shape = _shape(values, name)
    if len(shape) != 1:
        raise InvalidInputError(f"{name} must have one dimension, and its shape is {shape}.")
    return shape[0]


def require_length(labels: object, n: int, name: str) -> None:
    """Raise unless there is a label for each of n rows."""
    if (count := _length(labels, name)) != n:
        raise InvalidInputError(f"{name} must have a label for each of {n:,} rows, and has {count:,}.")


def _shape(values: object, name: str) -> tuple[int, ...]:
    if hasattr(values, "tocsr"):
        raise InvalidInputError(f"{name} must be a dense array to be drawn, and is sparse.")
    shape: tuple[float, ...] | None = getattr(values, "shape", None)
    if is_dask_collection(values) and (not hasattr(values, "chunks") or any(np.isnan(size) for size in shape or ())):
        raise InvalidInputError(
            f"{name} must be a dask array that knows its length; of a data frame, .to_dask_array(lengths=True) is one."
        )
    if shape is not None:
        return tuple(int(size) for size in shape)
    try:
        return np.asarray(values).shape
    except ValueError as error:
        raise InvalidInputError(f"{name} must be an array: {error}.") from None


def _finite(values: npt.NDArray[np.generic], name: str) -> Array:
    try:
        numbers = values.astype(np.float64) if values.dtype.kind in "biufO" else None
    except (TypeError, ValueError):
        numbers = None
    if numbers is None:
        raise InvalidInputError(f"{name} must hold real numbers, and its dtype is {values.dtype}.")
    if not np.isfinite(numbers).all():
        where = int(np.argmin(np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1)))
        raise InvalidInputError(f"{name} must be finite to be drawn, and row {where} of those drawn is not.")
    return numbers


def _marks(labels: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    try:
        np.unique(labels)
    except TypeError:
        raise InvalidInputError("labels must be of one kind, such as numbers or strings, and some differ.") from None
    return labels


def concatenate_labels(
    one: npt.NDArray[np.generic], other: npt.NDArray[np.generic], name: str
) -> npt.NDArray[np.generic]:
    """Return labels and labels, one after the other; NumPy would make strings of numbers beside strings."""
    if (one.dtype.kind in "biuf") != (other.dtype.kind in "biuf"):
        raise InvalidInputError(
            f"{name} must be of one kind, and they are of the dtypes {one.dtype} and {other.dtype}."
        )
    return _marks(np.concatenate([one, other]))


def group_by_label(
    labels: npt.NDArray[np.generic] | None, n: int
) -> Iterator[tuple[str | None, npt.NDArray[np.bool_]]]:
    """Yield each label as a word, and which of n rows have it; all rows where there are no labels."""
    if labels is None:
        yield None, np.ones(n, bool)
        return
    for value in np.unique(labels):
        yield plain_label(value), labels == value


def plain_label(label: object) -> str:
    r"""Return a label as Matplotlib draws it as it is: no mathematics between dollars, and in the legend in any case.

    >>> print(plain_label("$x$"), plain_label("_hidden"))
    \$x\$  _hidden
    """
    text = str(label).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def plane_corners(rows: Array) -> tuple[Array, Array]:
    """Return the corners of what rows (n, 2) span, and a tenth more."""
    if rows.shape[1] != 2:
        raise InvalidInputError(f"A plane has two columns, and X has {rows.shape[1]}; choose two, or draw components.")
    low, high = rows.min(axis=0), rows.max(axis=0)
    margin = np.where(high > low, _MARGIN * (high - low), 1.0)
    return low - margin, high + margin


def plane_grid(corners: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Return places along both columns, and the points (160 * 160, 2) of the plane that they make."""
    horizontal, vertical = (np.linspace(low, high, _GRID) for low, high in zip(*corners, strict=True))
    points = np.stack(np.meshgrid(horizontal, vertical), axis=-1).reshape(-1, 2)
    return horizontal, vertical, points
