"""Types of functions that return blocks of kernel values, and functions that change a block in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows

_VALUES_AT_ONCE = 2**15
"""Values of a block that are mapped at a time, so that temporaries stay in the processor cache."""

_LARGEST_ZERO_EXPONENT = -745.14
"""A number whose exponential, and that of all smaller ones, is 0 in float64."""

_SAMPLE_STEP = 61
"""Distance in columns of the values of which the smallest decides how exponentials are computed."""

PreparedBlock = Callable[..., Array]
"""A function from rows Z (n, d), in the form that the kernel's hooks take, to the block k(Z, landmarks) (n, m)."""


class Evaluator(Protocol):
    """A function from any rows Z (n, d) to the block k(Z, landmarks) (n, m), in `out` if the kernel supports that."""

    def __call__(self, Z: Rows, out: Array | None = None, /) -> Array:
        """Return the block; the content of `out` is overwritten."""


def map_rows(values: Array, function: Callable[[Array], Array]) -> Array:
    """Apply a function to the rows of a block in place, some at a time; return the block."""
    width = values.shape[1] if values.ndim == 2 else 1
    for part in row_slices(len(values), max(1, _VALUES_AT_ONCE // width)):
        values[part] = function(values[part])
    return values


def exp_in_place(values: Array) -> Array:
    """Overwrite a block, or a vector, with its exponentials, bit for bit those of `numpy.exp`, and return it.

    Where the result is 0, `numpy.exp` takes up to ten times as long; parts in which a sample shows such values are
    computed without them.
    """
    width = values.shape[1] if values.ndim == 2 else 1
    for rows in row_slices(len(values), max(1, _VALUES_AT_ONCE // max(1, width))):
        part = values[rows]
        if part.dtype != np.float64 or part[..., ::_SAMPLE_STEP].min(initial=0.0) >= _LARGEST_ZERO_EXPONENT:
            np.exp(part, out=part)
            continue
        vanishes = part < _LARGEST_ZERO_EXPONENT
        np.copyto(part, 0.0, where=vanishes)
        np.exp(part, out=part)
        np.copyto(part, 0.0, where=vanishes)
    return values


def mirror_lower(K: Array) -> None:
    """Copy the lower triangle of a square matrix onto its upper triangle, in place, tile by tile."""
    step = 512
    for a in range(0, len(K), step):
        corner = K[a : a + step, a : a + step]
        upper = np.triu_indices(len(corner), 1)
        corner[upper] = corner.T[upper]
        for b in range(0, a, step):
            K[b : b + step, a : a + step] = K[a : a + step, b : b + step].T
