"""The frozen value that scores: one kernel, its landmarks, and named heads.

Everything linear in the features is affine in ``k(z, X)``, so a head is ``k(Z, X) W - b`` and a link. Nothing here
refers to a store: a model pickles, copies and outlives the place it came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dkfm import links
from dkfm.errors import InvalidInputError
from dkfm.kernels.base import Kernel
from dkfm.kernels.precomputed import Precomputed
from dkfm.kernels.rows import Array, Rows

__all__ = ["Head", "Model"]


@dataclass(frozen=True, eq=False)
class Head:
    """One output of a model: ``link(k(Z, X) W - b)``.

    Parameters
    ----------
    weights : ndarray of shape (N, r)
        W.
    offset : ndarray of shape (r,), optional
        b; nothing is subtracted without it.
    rotation : ndarray of shape (r,), optional
        s, for the symmetric root in factored form: with ``W = V L^(-1/2)`` and ``s = L^(1/2)`` the output is
        ``((k(Z, X) W) s) W'``, that is K^(-1/2) k(X, z) without the rounding of an explicit K^(-1/2).
    link : str
        The last step, a name of `dkfm.links`.
    """

    weights: Array
    offset: Array | None = None
    rotation: Array | None = None
    link: str = links.IDENTITY

    @property
    def width(self) -> int:
        """Columns of the output."""
        if links.is_scalar(self.link):
            return 1
        n, r = (int(length) for length in self.weights.shape)
        return r if self.rotation is None else n


@dataclass(frozen=True, eq=False)
class Model:
    """A kernel, its landmarks (N, d), dense or CSR, and heads by name."""

    kernel: Kernel
    landmarks: Rows
    heads: Mapping[str, Head]

    def head(self, name: str) -> Head:
        """Return a head by name, or say which there are."""
        if name not in self.heads:
            raise InvalidInputError(f"This model has no output {name!r}; it has {', '.join(self.heads)}.")
        return self.heads[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, each counted once."""
        X = self.landmarks
        held = X.nbytes if isinstance(X, np.ndarray) else X.data.nbytes + X.indices.nbytes + X.indptr.nbytes
        return held + 8 * self.head_values

    @property
    def head_values(self) -> int:
        """Values of the arrays of all heads, each counted once."""
        arrays = {id(a): a for h in self.heads.values() for a in (h.weights, h.offset, h.rotation) if a is not None}
        return sum(array.size for array in arrays.values())

    @property
    def columns(self) -> int:
        """Columns of the rows that it scores: those of the landmarks, unless these are column numbers themselves."""
        if isinstance(self.kernel, Precomputed) and self.kernel.columns is not None:
            return self.kernel.columns
        return int(self.landmarks.shape[1])
