"""Check the parameters of kernels when they are created; each error message is one sentence."""

from collections.abc import Callable, Sequence
from math import isfinite, nan

import numpy as np

from dkfm.core.rows import Array
from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel

MEDIAN = "median"
"""Value of a length scale that a fit replaces by the median distance between training rows."""

Scale = float | tuple[float, ...] | str | None
"""Length scale: a number, one for each column, "median", or None for scikit-learn's default."""

_MIN_SCALE = 1e-150
"""Length scales must be larger than this, so that their squares do not underflow."""

_MAX_SCALE = 1e150
"""Length scales must be smaller than this, so that their squares do not overflow."""

_EXPONENT_LIMIT = 2**31
"""Exponents must be smaller than this."""

_MAX_SAMPLE = 1000
"""Largest number of rows from whose distances the median is computed."""


def coerce_to_float(kernel: Kernel, name: str) -> float:
    """Replace a parameter of a kernel by a float and return it; raise a KernelError unless it is a finite number."""
    value = unwrap_array(getattr(kernel, name))
    number = as_float_or_nan(value)
    if not isfinite(number):
        raise KernelError(f"{type(kernel).__name__} needs a finite number as {name}, and got {value!r:.50}.")
    object.__setattr__(kernel, name, number)
    return number


def as_float_or_nan(value: object) -> float:
    """Return a real number as a float, and NaN for anything else."""
    try:
        real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        return float(value) + 0.0 if real else nan  # type: ignore[arg-type]  # adding 0.0 turns -0.0 into 0.0
    except (OverflowError, TypeError):
        return nan


def unwrap_array(value: object) -> object:
    """Return the number in an array without dimensions, a column of a data frame as an array, and others unchanged."""
    if hasattr(type(value), "to_numpy"):
        value = value.to_numpy()  # type: ignore[attr-defined]  # as its type says
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def coerce_to_positive_float(kernel: Kernel, name: str) -> None:
    """Replace a parameter by a float; raise a KernelError unless it is a finite number > 0."""
    if coerce_to_float(kernel, name) <= 0:
        raise KernelError(f"{type(kernel).__name__} needs {name} > 0, and got {getattr(kernel, name)}.")


def coerce_to_non_negative_float(kernel: Kernel, name: str, reason: str = "") -> None:
    """Replace a parameter by a float; raise a KernelError, which ends with `reason`, unless it is finite and >= 0."""
    if coerce_to_float(kernel, name) < 0:
        raise KernelError(f"{type(kernel).__name__} needs {name} >= 0, and got {getattr(kernel, name)}{reason}.")


def coerce_scale(kernel: Kernel, name: str, *words: str | None, is_squared: bool = True) -> None:
    """Raise a KernelError unless a parameter is a positive number, one for each column, or one of the `words`.

    The numbers are converted to floats. If `is_squared`, their squares must neither overflow nor underflow.
    """
    value = unwrap_array(getattr(kernel, name))
    if value is None or isinstance(value, str | bytes):
        if value not in words:
            known = "".join(f", or {word!r}" for word in words if word is not None)
            raise KernelError(
                f"{type(kernel).__name__} needs a finite number as {name}, or one for each column{known}, and got "
                f"{value!r:.50}."
            )
        return
    if isinstance(value, Sequence | np.ndarray):
        numbers = tuple(as_float_or_nan(part) for part in value)
        object.__setattr__(kernel, name, numbers)
        if not numbers or not all(isfinite(number) for number in numbers):
            raise KernelError(f"{type(kernel).__name__} needs finite numbers as {name}, and got {value!r:.50}.")
        smallest, largest = min(numbers), max(numbers)
    else:
        smallest = largest = coerce_to_float(kernel, name)
    if smallest <= 0:
        raise KernelError(f"{type(kernel).__name__} needs {name} > 0, and got {getattr(kernel, name)}.")
    if is_squared and not _MIN_SCALE < smallest <= largest < _MAX_SCALE:
        raise KernelError(f"{type(kernel).__name__} needs a {name} whose square is a number, and got {value!r:.50}.")


def get_numeric_scale(kernel: Kernel, name: str, d: int) -> float | Array:
    """Return the length scale of d columns, a number or an array (d,); raise if it has another number of columns."""
    scale = getattr(kernel, name)
    if scale == MEDIAN:
        raise KernelError(f"{kernel!r} takes its {name} from the training rows: fit it, or use resolve(X).")
    if not isinstance(scale, tuple):
        return float(scale)
    if len(scale) != d:
        numbers = "1 number" if len(scale) == 1 else f"{len(scale)} numbers"
        raise KernelError(f"{type(kernel).__name__} has {numbers} as {name} and the rows have {d} columns.")
    return np.array(scale)


def coerce_exponent(kernel: Kernel, name: str) -> None:
    """Replace a parameter by an int; raise a KernelError unless it is a positive integer."""
    value = unwrap_array(getattr(kernel, name))
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value < _EXPONENT_LIMIT:
        fractional = isinstance(value, float) and not value.is_integer()
        reason = ": a product of kernels is a kernel, a fractional power need not be" if fractional else ""
        raise KernelError(f"{type(kernel).__name__} needs a positive integer as {name}, and got {value!r:.50}{reason}.")
    object.__setattr__(kernel, name, int(value))


def require_kernels(kernel: Kernel, parts: object, least: int = 1) -> None:
    """Raise a KernelError unless parts are a tuple of at least `least` kernels, none of them precomputed."""
    if not isinstance(parts, tuple) or len(parts) < least:
        raise KernelError(f"{type(kernel).__name__} is made of a tuple of kernels, and got {parts!r:.100}.")
    for part in parts:
        if not isinstance(part, Kernel):
            raise KernelError(f"{type(kernel).__name__} is made of kernels, and got {part!r}.")
        if part.is_precomputed:
            raise KernelError(f"{part!r} has no points, and {type(kernel).__name__} needs them; combine Gram matrices.")


def median_distance(distances: Callable[[Array], Array], X: Array) -> float:
    """Return the median of the nonzero distances between the rows of X, or of a seeded sample of 1,000 rows.

    Parameters
    ----------
    distances : callable
        Function that takes rows (n, d) and returns all distances (n, n), exactly 0 between equal rows.
    X : ndarray or csr_array of shape (n, d)
        Training rows.
    """
    n = X.shape[0]
    if n > _MAX_SAMPLE:
        X = X[np.sort(np.random.default_rng(0).choice(n, _MAX_SAMPLE, replace=False))]
    values = distances(X)[np.tril_indices(X.shape[0], -1)]
    values = values[values > 0]
    if not len(values):
        raise KernelError(f"The median distance needs two rows that differ, and these {n} do not.")
    return float(np.median(values))
