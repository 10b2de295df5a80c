"""The checks that every whole block of kernel values passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.rows import Array, Rows

if TYPE_CHECKING:
    from dkfm.kernels.base import Kernel

__all__ = ["checked_block", "mirror_lower"]


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


def mirror_lower(K: Array) -> None:
    """Copy the lower triangle of a square matrix onto its upper one, in place, by tiles."""
    step = 512
    for a in range(0, len(K), step):
        corner = K[a : a + step, a : a + step]
        upper = np.triu_indices(len(corner), 1)
        corner[upper] = corner.T[upper]
        for b in range(0, a, step):
            K[b : b + step, a : a + step] = K[a : a + step, b : b + step].T
