"""The checks of kernels' parameters: one sentence each, raised when the kernel is made."""

from collections.abc import Sequence
from math import isfinite, nan

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel
from dkfm.kernels.rows import Array

__all__ = [
    "MEDIAN",
    "Scale",
    "lengths",
    "require_exponent",
    "require_kernels",
    "require_non_negative",
    "require_number",
    "require_positive",
    "require_scale",
]

MEDIAN = "median"
"""Of the distances between training rows, taken at fit."""

Scale = float | tuple[float, ...] | str | None
"""A number, one for each column, "median", or None for what scikit-learn takes by default."""

_SMALLEST, _LARGEST = 1e-150, 1e150


def require_number(kernel: Kernel, name: str) -> float:
    """Return a parameter as a finite float, or raise a KernelError; a frozen dataclass calls it once."""
    value = getattr(kernel, name)
    number = _as_number(value)
    if not isfinite(number):
        raise KernelError(f"{type(kernel).__name__} needs a finite number as {name}, and got {value!r:.50}.")
    object.__setattr__(kernel, name, number)
    return number


def _as_number(value: object) -> float:
    """Return a number as a float, NaN for what is none."""
    try:
        return float(value) if isinstance(value, int | float | np.number) and not isinstance(value, bool) else nan
    except (OverflowError, TypeError):
        return nan


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
    value = getattr(kernel, name)
    if value is None or isinstance(value, str):
        if value not in words:
            known = "".join(f", or {word!r}" for word in words if word is not None)
            raise KernelError(f"{type(kernel).__name__} needs a finite number as {name}{known}, and got {value!r:.50}.")
        return
    if isinstance(value, Sequence | np.ndarray):
        numbers = tuple(_as_number(part) for part in value)
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


def lengths(kernel: Kernel, name: str, d: int) -> float | Array:
    """Return a length scale as what d columns are divided by, a number or (d,); raise where it does not fit them."""
    scale = getattr(kernel, name)
    if scale == MEDIAN:
        raise KernelError(f"{kernel!r} takes its {name} from the training rows: fit it, or use resolve(X).")
    if not isinstance(scale, tuple):
        return float(scale)
    if len(scale) != d:
        raise KernelError(f"{type(kernel).__name__} has {len(scale)} numbers as {name} and the rows have {d} columns.")
    return np.array(scale)


def require_exponent(kernel: Kernel, name: str) -> None:
    """Raise a KernelError unless a parameter is a positive integer."""
    value = getattr(kernel, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise KernelError(
            f"{type(kernel).__name__} needs a positive integer as {name}, and got {value!r}: "
            "a product of kernels is a kernel, a fractional power need not be."
        )
    object.__setattr__(kernel, name, int(value))


def require_kernels(kernel: Kernel, parts: object) -> None:
    """Raise a KernelError unless parts are a tuple of kernels, and at least one."""
    if not isinstance(parts, tuple) or not parts:
        raise KernelError(f"{type(kernel).__name__} is made of a tuple of kernels, and got {parts!r}.")
    for part in parts:
        if not isinstance(part, Kernel):
            raise KernelError(f"{type(kernel).__name__} is made of kernels, and got {part!r}.")
        if part.of_numbers:
            raise KernelError(f"{part!r} has no points, and {type(kernel).__name__} needs them; combine Gram matrices.")
