"""What counts as rows: the one check that every array of the user's passes."""

import numpy as np
import numpy.typing as npt

from dkfm.errors import InvalidInputError

__all__ = ["Array", "as_array", "as_rows", "require_finite", "require_two_dimensions", "squared_norms"]

Array = npt.NDArray[np.float64]


def as_rows(X: object, name: str = "X") -> Array:
    """Return `X` as an (n, d) float64 array of finite numbers, or say in one sentence why it is not rows.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Booleans, integers and floats; float32 is widened, which is exact.
    name : str
        What the message calls it.

    Returns
    -------
    ndarray of shape (n, d), float64
        `X` itself where it is one already.

    Raises
    ------
    InvalidInputError
        Not two-dimensional, no row or no column, object, complex or text dtype, or a value that is not finite.
    """
    rows = as_array(X, name)
    require_finite(rows, name)
    return rows


def as_array(X: object, name: str) -> Array:
    """Return `X` as `as_rows` does, without the look at every value."""
    try:
        rows = np.asarray(X)
    except ValueError as error:
        raise InvalidInputError(f"{name} must hold real numbers in rows and columns: {error}") from None
    require_two_dimensions(rows.shape, rows.dtype, name)
    return np.asarray(rows, dtype=np.float64)


def require_two_dimensions(shape: tuple[int, ...], dtype: np.dtype[np.generic], name: str) -> None:
    """Raise unless shape and dtype are those of rows of real numbers."""
    if dtype.kind not in "biuf":
        raise InvalidInputError(f"{name} must hold real numbers, and its dtype is {dtype}.")
    if len(shape) != 2:
        raise InvalidInputError(
            f"{name} must have two dimensions (rows, columns), and its shape is {shape}; "
            "Reshape your data: one row is X.reshape(1, -1), one column X.reshape(-1, 1)."
        )
    if 0 in shape:
        raise InvalidInputError(f"{name} needs at least one row and one column, and its shape is {shape}.")


def require_finite(rows: Array, name: str, first_row: int = 0) -> None:
    """Raise with the number of the first row that holds NaN or infinity; rows count from `first_row`."""
    # The sum is one cheap pass without a temporary; it overflows only where a closer look is due anyway.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(rows.sum()):
            return
    bad = ~np.isfinite(rows).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        what = "NaN" if np.isnan(rows[row]).any() else "infinity"
        raise InvalidInputError(
            f"{name} must be finite, and row {first_row + row} contains {what} "
            f"({int(bad.sum())} such rows among the {len(rows)} looked at)."
        )


def squared_norms(X: Array) -> Array:
    """Return |x|^2 of each row, (n,)."""
    norms: Array = np.einsum("ij,ij->i", X, X)
    return norms
