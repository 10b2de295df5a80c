"""What is done to whole blocks of kernel values: the checks that each passes, functions without large temporaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.rows import Array, Rows
from dkfm.tiling import row_slices

if TYPE_CHECKING:
    from dkfm.kernels.base import Kernel

__all__ = ["by_rows", "checked_block", "fits_single", "mirror_lower"]

_VALUES_AT_ONCE = 2**15

_SINGLE_RANGE = 1e-30, 1e30
"""Parameters of a kernel beyond it do not go through float32."""


def checked_block(kernel: Kernel, X: Rows, Y: Rows, first: tuple[int, int] = (0, 0)) -> Array:
    """Return k(X, Y), symmetric to the last bit where X is Y, once every value is finite.

    `first` holds the numbers of the first row of X and of Y in the whole, for the message.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        block = kernel.against(Y)(X)
        if X is Y:
            mirror_lower(block)
        finite = np.isfinite(block)
    if not finite.all():
        i, j = np.unravel_index(int(np.argmin(finite)), block.shape)
        raise KernelError(f"{kernel!r} returned {block[i, j]} for rows {first[0] + i} and {first[1] + j}.")
    return block


def by_rows(values: Array, function: Callable[[Array], Array]) -> Array:
    """Replace the rows of a block, some at a time, by a function of them, whose temporaries stay near the processor."""
    width = values.shape[1] if values.ndim == 2 else 1
    for part in row_slices(len(values), max(1, _VALUES_AT_ONCE // width)):
        values[part] = function(values[part])
    return values


def mirror_lower(K: Array) -> None:
    """Copy the lower triangle of a square matrix onto its upper one, in place, by tiles."""
    step = 512
    for a in range(0, len(K), step):
        corner = K[a : a + step, a : a + step]
        upper = np.triu_indices(len(corner), 1)
        corner[upper] = corner.T[upper]
        for b in range(0, a, step):
            K[b : b + step, a : a + step] = K[a : a + step, b : b + step].T


def fits_single(parameter: object) -> bool:
    """Whether a parameter of a kernel, or all numbers of a tuple, go through float32."""
    if isinstance(parameter, tuple):
        return all(map(fits_single, parameter))
    smallest, largest = _SINGLE_RANGE
    return not isinstance(parameter, float) or parameter == 0 or smallest <= abs(parameter) <= largest
