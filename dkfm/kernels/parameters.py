"""The checks of kernels' parameters: one sentence each, raised when the kernel is made."""

from collections.abc import Callable, Sequence
from math import isfinite, nan

import numpy as np

from dkfm.core.rows import Array
from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel

MEDIAN = "median"
"""Of the distances between training rows, taken at fit."""

Scale = float | tuple[float, ...] | str | None
"""A number, one for each column, "median", or None for what scikit-learn takes by default."""

_SMALLEST, _LARGEST = 1e-150, 1e150
_LARGEST_EXPONENT = 2**31


def require_number(kernel: Kernel, name: str) -> float:
    """Return a parameter as a finite float, or raise a KernelError; a frozen dataclass calls it once."""
    value = as_scalar(getattr(kernel, name))
    number = as_number(value)
    if not isfinite(number):
        raise KernelError(f"{type(kernel).__name__} needs a finite number as {name}, and got {value!r:.50}.")
    object.__setattr__(kernel, name, number)
    return number


def as_number(value: object) -> float:
    """Return a number as a float, NaN for what is none."""
    try:
        real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        return float(value) + 0.0 if real else nan  # type: ignore[arg-type]  # of -0.0 it makes 0.0, which it equals
    except (OverflowError, TypeError):
        return nan


def as_scalar(value: object) -> object:
    """Return an array of no dimension as the number that it holds."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def require_positive(kernel: Kernel, name: str) -> None:
    """Raise a KernelError unless a parameter is a finite number above zero."""
    if require_number(kernel, name) <= 0:
        raise KernelError(f"{type(kernel).__name__} needs {name} > 0, and got {getattr(kernel, name)}.")


def require_non_negative(kernel: Kernel, name: str, reason: str = "") -> None:
    """Raise a KernelError, with a reason, unless a parameter is a finite number of at least zero."""
    if require_number(kernel, name) < 0:
        raise KernelError(f"{type(kernel).__name__} needs {name} >= 0, and got {getattr(kernel, name)}{reason}.")


def require_scale(kernel: Kernel, name: str, *words: str | None, squared: bool = True) -> None:
    """Raise a KernelError unless a parameter is a positive number, one for each column, or one of some words.

    Its square must be a number too, where it is `squared`.
    """
    value = as_scalar(getattr(kernel, name))
    if value is None or isinstance(value, str | bytes):
        if value not in words:
            known = "".join(f", or {word!r}" for word in words if word is not None)
            raise KernelError(
                f"{type(kernel).__name__} needs a finite number as {name}, or one for each column{known}, and got "
                f"{value!r:.50}."
            )
        return
    if isinstance(value, Sequence | np.ndarray):
        numbers = tuple(as_number(part) for part in value)
        object.__setattr__(kernel, name, numbers)
        if not numbers or not all(isfinite(number) for number in numbers):
            raise KernelError(f"{type(kernel).__name__} needs finite numbers as {name}, and got {value!r:.50}.")
        smallest, largest = min(numbers), max(numbers)
    else:
        smallest = largest = require_number(kernel, name)
    if smallest <= 0:
        raise KernelError(f"{type(kernel).__name__} needs {name} > 0, and got {getattr(kernel, name)}.")
    if squared and not _SMALLEST < smallest <= largest < _LARGEST:
        raise KernelError(f"{type(kernel).__name__} needs a {name} whose square is a number, and got {value!r:.50}.")


def column_scales(kernel: Kernel, name: str, d: int) -> float | Array:
    """Return a length scale as what d columns are divided by, a number or (d,); raise where it does not fit them."""
    scale = getattr(kernel, name)
    if scale == MEDIAN:
        raise KernelError(f"{kernel!r} takes its {name} from the training rows: fit it, or use resolve(X).")
    if not isinstance(scale, tuple):
        return float(scale)
    if len(scale) != d:
        numbers = "1 number" if len(scale) == 1 else f"{len(scale)} numbers"
        raise KernelError(f"{type(kernel).__name__} has {numbers} as {name} and the rows have {d} columns.")
    return np.array(scale)


def require_exponent(kernel: Kernel, name: str) -> None:
    """Raise a KernelError unless a parameter is a positive integer."""
    value = as_scalar(getattr(kernel, name))
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value < _LARGEST_EXPONENT:
        fractional = isinstance(value, float) and not value.is_integer()
        reason = ": a product of kernels is a kernel, a fractional power need not be" if fractional else ""
        raise KernelError(f"{type(kernel).__name__} needs a positive integer as {name}, and got {value!r:.50}{reason}.")
    object.__setattr__(kernel, name, int(value))


def require_kernels(kernel: Kernel, parts: object, least: int = 1) -> None:
    """Raise a KernelError unless parts are a tuple of some kernels that compare points."""
    if not isinstance(parts, tuple) or len(parts) < least:
        raise KernelError(f"{type(kernel).__name__} is made of a tuple of kernels, and got {parts!r:.100}.")
    for part in parts:
        if not isinstance(part, Kernel):
            raise KernelError(f"{type(kernel).__name__} is made of kernels, and got {part!r}.")
        if part.is_precomputed:
            raise KernelError(f"{part!r} has no points, and {type(kernel).__name__} needs them; combine Gram matrices.")


_SAMPLE = 1000


def median_distance(distances: Callable[[Array], Array], X: Array) -> float:
    """Return the median of the nonzero distances between rows of X (n, d), or of a seeded sample of 1,000 of them.

    Parameters
    ----------
    distances : callable
        From rows (n, d) to the distances (n, n) between all of them, exactly 0 where rows are equal.
    X : ndarray or csr_array of shape (n, d)
    """
    n = X.shape[0]
    if n > _SAMPLE:
        X = X[np.sort(np.random.default_rng(0).choice(n, _SAMPLE, replace=False))]
    found = distances(X)[np.tril_indices(X.shape[0], -1)]
    found = found[found > 0]
    if not len(found):
        raise KernelError(f"The median distance needs two rows that differ, and these {n} do not.")
    return float(np.median(found))
