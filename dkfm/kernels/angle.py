"""Kernels of the angle between two rows, which the cosine alone does not hold to its digits."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dkfm.errors import KernelError
from dkfm.kernels.base import PreparedKernel
from dkfm.kernels.blocks import Evaluator
from dkfm.kernels.distances import negative_squared_distances
from dkfm.kernels.rows import Array, Rows, is_sparse, squared_norms, unit_rows
from dkfm.tiling import row_slices

__all__ = ["ArcCosine"]

_NEAR = 1e-3
"""An angle is the root of a squared distance: below this one is taken from differences, or from sums."""

_ROWS = 64
_PAIRS = 1024


@dataclass(frozen=True)
class ArcCosine(PreparedKernel):
    """The arc-cosine kernel of order n, ``|x|^n |y|^n J_n(theta) / pi``, with theta the angle between x and y.

    ``J_0 = pi - theta``, ``J_1 = sin theta + (pi - theta) cos theta``,
    ``J_2 = 3 sin theta cos theta + (pi - theta) (1 + 2 cos^2 theta)``. A row of zeros is at right angles to every row,
    itself too. Positive semi-definite. Takes sparse rows.

    Parameters
    ----------
    order : {0, 1, 2}

    Notes
    -----
    Cho and Saul, "Kernel methods for deep learning" (2009), eqs. (3)-(6): a layer of infinitely many units that are
    steps (0), rectified linear (1) or rectified quadratic (2). The angle is computed from distances of unit rows, so
    equal rows give exactly ``|x|^2n J_n(0) / pi``.

    Examples
    --------
    >>> from dkfm.kernels import ArcCosine
    >>> ArcCosine(1)([[1.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]).round(4)
    array([[1.    , 0.6366]])
    """

    order: int = 1
    sparse = fills = True
    copies = 2

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or not isinstance(self.order, int | np.integer) or not 0 <= self.order <= 2:
            raise KernelError(f"ArcCosine needs an order of 0, 1 or 2, and got {self.order!r:.50}.")
        object.__setattr__(self, "order", int(self.order))

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Bring the landmarks to unit length once."""
        units, lengths = unit_rows(landmarks)
        distances = negative_squared_distances(units, 1.0, _NEAR)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            z_units, z_lengths = unit_rows(Z)
            values = distances(z_units, out)
            for rows in row_slices(len(values), _ROWS):
                angles = _angles(values[rows], z_units[rows], units)
                angles[z_lengths[rows] == 0] = np.pi / 2
                angles[:, lengths == 0] = np.pi / 2
                values[rows] = self._profile(angles)
            values *= (z_lengths**self.order)[:, np.newaxis]
            values *= lengths**self.order
            return values

        return block

    def diagonal(self, X: Rows) -> Array:
        """Return |x|^2n J_n(0) / pi, or half of 1 where x is 0 and n too."""
        if self.order == 0:
            return np.where(unit_rows(X)[1] > 0, 1.0, 0.5)
        return (1.0 if self.order == 1 else 3.0) * squared_norms(X) ** self.order

    def _profile(self, angles: Array) -> Array:
        """Return J_n(theta) / pi, overwriting the angles."""
        rest = np.pi - angles
        if self.order > 0:
            cosines, sines = np.cos(angles), np.sin(angles, out=angles)
            if self.order == 1:
                rest *= cosines
                rest += sines
            else:
                sines *= 3
                sines *= cosines
                np.square(cosines, out=cosines)
                cosines *= 2
                cosines += 1
                rest *= cosines
                rest += sines
        rest /= np.pi
        return rest


def _angles(negative_squares: Array, U: Rows, V: Rows) -> Array:
    """Return the angles (n, m) between unit rows, overwriting minus their squared distances."""
    angles = np.negative(negative_squares, out=negative_squares)
    i, j = np.nonzero(angles > 4 - 4 * _NEAR)
    np.sqrt(angles, out=angles)
    angles *= 0.5
    np.minimum(angles, 1.0, out=angles)
    np.arcsin(angles, out=angles)
    angles *= 2
    for few in row_slices(len(i), _PAIRS):  # nearly opposite
        angles[i[few], j[few]] = np.pi - 2 * np.arcsin(0.5 * np.sqrt(squared_norms(_sums(U, V, i[few], j[few]))))
    return angles


def _sums(U: Rows, V: Rows, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp]) -> Rows:
    total = U[i] + V[j]
    return total if is_sparse(total) else np.asarray(total)
