"""The tile loop: rows through a model.

Rows are taken a tile at a time, so that no temporary grows with their number. Two tilings of the same rows differ by at
most ``64 eps (sum |k| |W| + |b|)``; the same tiling on the same threads gives the same bits.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from dkfm import links
from dkfm.errors import KernelError
from dkfm.kernels.base import Evaluator
from dkfm.kernels.rows import Array, Rows
from dkfm.model import Model
from dkfm.tiling import row_slices

__all__ = ["Scorer", "finite_scores", "prepare", "tile_rows"]

_TILE_VALUES = 2**20
"""A kernel block of 8 MB stays near the processor."""


def tile_rows(n: int) -> int:
    """Return the rows of a tile against n landmarks: 256 to 1,024.

    >>> tile_rows(100), tile_rows(2048), tile_rows(10**6)
    (1024, 512, 256)
    """
    return min(1024, max(256, _TILE_VALUES // n))


@dataclass(frozen=True)
class Scorer:
    """A model with its landmarks prepared; immutable, shared by the threads of a process."""

    model: Model
    block: Evaluator

    def __call__(self, name: str, Z: Rows, rows: int | None = None, diagonal: Array | None = None) -> Array:
        """Return the output of one head for checked rows.

        Parameters
        ----------
        name : str
            The head.
        Z : ndarray or csr_array of shape (n, d), float64, finite
        rows : int, optional
            Rows of a tile; by default `tile_rows` of the number of landmarks.
        diagonal : ndarray of shape (n,), optional
            k(z, z), where the kernel does not know it.

        Returns
        -------
        ndarray of shape (n, width), float64
            Not finite in a row that overflows the kernel.
        """
        head = self.model.head(name)
        link = links.by_name(head.link)
        out = np.empty((Z.shape[0], head.width))
        with np.errstate(over="ignore", invalid="ignore"):  # `finite_scores` tells
            for tile in row_slices(Z.shape[0], rows or tile_rows(self.model.landmarks.shape[0])):
                product = self.block(Z[tile]) @ head.weights
                if head.offset is not None:
                    product -= head.offset
                if head.rotation is not None:
                    product *= head.rotation
                    product = product @ head.weights.T
                out[tile] = link(product, partial(self._diagonal, Z, tile, diagonal))
        return out

    def _diagonal(self, Z: Rows, tile: slice, known: Array | None) -> Array:
        return self.model.kernel.self_similarities(Z[tile]) if known is None else known[tile]


def prepare(model: Model) -> Scorer:
    """Prepare the landmarks once for any number of rows."""
    return Scorer(model, model.kernel.against(model.landmarks))


def finite_scores(
    score: Scorer, name: str, Z: Rows, what: str, first_row: int = 0, diagonal: Array | None = None
) -> Array:
    """Return the output of one head, or raise with the number of the first row that overflows the kernel."""
    scores = score(name, Z, diagonal=diagonal)
    finite = np.isfinite(scores)
    if not finite.all():
        row = first_row + int(np.logical_and.reduce(finite, axis=1).argmin())
        raise KernelError(f"Row {row} of {what} overflows {score.model.kernel!r}: its {name} are not finite.")
    return scores
