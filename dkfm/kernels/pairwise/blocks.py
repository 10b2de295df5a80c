"""What is done to whole blocks of kernel values: the checks that each passes, functions without large temporaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows

_VALUES_AT_ONCE = 2**15

PreparedBlock = Callable[..., Array]
"""Rows Z (n, d), such as the kernel's hooks take, in, the block k(Z, landmarks) (n, m) out."""


class Evaluator(Protocol):
    """Any rows Z (n, d) in, the block k(Z, landmarks) (n, m) out: in the memory given, if the kernel can."""

    def __call__(self, Z: Rows, out: Array | None = None, /) -> Array:
        """Return the block; what was given as `out` is lost."""


def map_rows(values: Array, function: Callable[[Array], Array]) -> Array:
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
