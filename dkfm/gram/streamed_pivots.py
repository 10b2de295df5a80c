"""Find pivots among rows that are never in memory together: round by round, by passes of tasks over their source.

A round draws candidates, in proportion to the residuals of all rows, with the largest ones; chooses pivots among them,
the largest residual first, down to a share of the largest; and subtracts from every residual what the new pivots
explain, from ``k(x, P)`` and the new columns of ``L^-T`` alone, so that all rounds together cost one product with the
whole of it. When no residual exceeds the threshold, a last pass computes all residuals anew from all features.

Chen, Epperly, Tropp and Webber, "Randomly pivoted Cholesky" (2022); Epperly, Tropp and Webber, "Embrace rejection"
(2024), whose blocks of proposals these rounds are, with the rejected ones judged by their exact residuals.
"""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.intp]

_CANDIDATES = 2048
"""Rows that a round chooses pivots among."""

_LARGEST = 512
"""Candidates that are the rows of the largest residuals; the others are drawn."""

_ROUND_SHARE = 0.1
"""Share of the largest residual down to which a round accepts pivots."""

_TILE_ROWS = 16_384
"""Rows of a task."""

_PIECE_VALUES = 2**18
"""Kernel values that a task holds at a time: two megabytes, which stay in the processor's cache."""

_BLOCK_ROWS = 2**20
"""Residuals that the driver looks at together."""
