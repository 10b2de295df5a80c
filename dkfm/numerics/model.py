"""The frozen value that scores: one kernel, its landmarks, and named heads.

Everything linear in the features is affine in ``k(z, X)``, so a head is ``k(Z, X) W - b`` and a link. Nothing here
refers to a store: a model pickles, copies and outlives the place it came from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np

from dkfm.core.rows import Array, Rows, as_float64
from dkfm.errors import InvalidInputError
from dkfm.kernels.base import Kernel
from dkfm.kernels.custom import Precomputed
from dkfm.numerics import links


@runtime_checkable
class StoredWeights(Protocol):
    """Weights W (N, r) that stay in a store: an array in all that a head needs of one, read by blocks of columns."""

    shape: tuple[int, int]
    dtype: np.dtype[np.floating]
    panel: int
    """Columns that are read together."""

    def __getitem__(self, places: tuple[slice, slice], /) -> Array:
        """Read some rows of some columns."""


@dataclass(frozen=True, eq=False)
class Head:
    """One output of a model: ``link(k(Z, X) W - b)``.

    Parameters
    ----------
    weights : ndarray or StoredWeights of shape (N, r)
        W.
    offset : ndarray of shape (r,), optional
        b; nothing is subtracted without it.
    rotation : ndarray of shape (r,), optional
        s, for the symmetric root in factored form: with ``W = V L^(-1/2)`` and ``s = L^(1/2)`` the output is
        ``((k(Z, X) W) s) W'``, that is K^(-1/2) k(X, z) without the rounding of an explicit K^(-1/2).
    link : str
        The last step, a name of `dkfm.numerics.links`.
    triangular : bool
        Whether W is square and upper triangular, and applied as such.
    first : int, optional
        How many columns of W are used, the first ones; all of them without it.
    """

    weights: Array
    offset: Array | None = None
    rotation: Array | None = None
    link: str = links.IDENTITY
    triangular: bool = False
    first: int | None = None

    @property
    def columns(self) -> int:
        """How many columns of W are used."""
        r = int(self.weights.shape[1])
        return r if self.first is None else min(r, self.first)

    @property
    def width(self) -> int:
        """Columns of the output."""
        return links.output_width(self.link, self.columns if self.rotation is None else int(self.weights.shape[0]))

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """What the output is of: int64 codes of classes, or what the weights are of."""
        return links.result_dtype(self.link, self.weights.dtype)


@dataclass(frozen=True, eq=False)
class Model:
    """A kernel, its landmarks (N, d), dense or CSR, and heads by name.

    It computes in the dtype of its landmarks, float64 or float32, which its heads share.

    Parameters
    ----------
    kernel : Kernel
    landmarks : ndarray or csr_array of shape (N, d)
    heads : mapping of str to Head
    shift : ndarray of shape (d,), optional
        What is taken from every row before it is rounded to float32, and was taken from the landmarks.
    """

    kernel: Kernel
    landmarks: Rows
    heads: Mapping[str, Head]
    shift: Array | None = None

    def head(self, name: str) -> Head:
        """Return a head by name, or say which there are."""
        if name not in self.heads:
            raise InvalidInputError(f"This model has no output {name!r}; it has {', '.join(self.heads)}.")
        return self.heads[name]

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """What it computes in."""
        return self.landmarks.dtype

    @property
    def points(self) -> Rows:
        """The landmarks in float64 and where they were."""
        return as_float64(self.landmarks) if self.shift is None else self.landmarks + self.shift

    def rows(self, Z: Rows) -> Rows:
        """Return rows as the kernel is to see them beside the landmarks."""
        if self.shift is not None:
            Z = Z - (self.shift if self._narrow_shift is None or Z.dtype != self.dtype else self._narrow_shift)
        return Z if Z.dtype == self.dtype else Z.astype(self.dtype)

    @cached_property
    def _narrow_shift(self) -> Array | None:
        """The shift in the model's dtype, if that holds it: rows of that dtype, moved by it, are rounded only once."""
        with np.errstate(over="ignore"):
            narrow: Array = np.asarray(self.shift, self.dtype)
        return narrow if np.array_equal(narrow, np.asarray(self.shift)) else None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in memory, each counted once."""
        X = self.landmarks
        held = X.nbytes if isinstance(X, np.ndarray) else X.data.nbytes + X.indices.nbytes + X.indptr.nbytes
        return held + self.dtype.itemsize * (self.head_values - self.stored_values)

    @property
    def head_values(self) -> int:
        """Values of the arrays of all heads, each counted once."""
        return sum(prod(array.shape) for array in self._of_heads())

    @property
    def stored_values(self) -> int:
        """Values of those that stay in a store."""
        return sum(prod(array.shape) for array in self._of_heads() if isinstance(array, StoredWeights))

    def _of_heads(self) -> Iterable[Array]:
        arrays = (a for h in self.heads.values() for a in (h.weights, h.offset, h.rotation) if a is not None)
        return {id(array): array for array in arrays}.values()

    @property
    def columns(self) -> int:
        """Columns of the rows that it scores: those of the landmarks, unless these are column numbers themselves."""
        if isinstance(self.kernel, Precomputed) and self.kernel.columns is not None:
            return self.kernel.columns
        return int(self.landmarks.shape[1])
