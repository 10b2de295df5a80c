"""Define the immutable model that scores rows: a kernel, its landmarks, and named heads, which compute outputs.

Every linear function of the features is affine in ``k(z, X)``, so a head computes ``k(Z, X) W - b`` and applies a link.
Unless it has `StoredWeights`, a model does not refer to a store: it can be pickled and copied, and stays valid if its
store is removed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np

from dkfm.core import budget
from dkfm.core.background_io import prefetch
from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, as_float64
from dkfm.errors import InvalidInputError
from dkfm.kernels.algebra import needs_float64_block
from dkfm.kernels.base import Kernel
from dkfm.kernels.custom import Precomputed
from dkfm.numerics import links


@runtime_checkable
class StoredWeights(Protocol):
    """Weights W (N, r) that stay in a store and are read by blocks of columns.

    They support the attributes and the indexing of arrays that a head uses.
    """

    shape: tuple[int, int]
    dtype: np.dtype[np.floating]
    panel_columns: int
    """Number of columns that are read at a time."""

    def __getitem__(self, slices: tuple[slice, slice], /) -> Array:
        """Read a slice of the rows and a slice of the columns."""


def predict_row_seconds(kernel: Kernel, n: int, d: int, width: int, itemsize: int = 8) -> float:
    """Predict the seconds of one thread to score one row of d columns: n kernel values and a product with weights."""
    value_seconds = budget.VALUE_SECONDS + kernel.estimate_extra_value_seconds(d)
    return budget.score_row_seconds(n, d, width, itemsize, value_seconds)


def iter_weight_panels(weights: Array, column_stop: int, triangular: bool) -> Iterator[tuple[slice, Array]]:
    """Yield pairs of a slice of the columns before `column_stop`, and the weights (rows, columns) in it.

    Weights on disk are read a few columns at a time. For triangular weights, rows that are zero are left out.
    """
    if not isinstance(weights, StoredWeights):
        return iter([(slice(0, column_stop), weights[:, :column_stop])] if column_stop else [])
    parts = list(row_slices(column_stop, weights.panel_columns))
    reads = [partial(weights.__getitem__, (slice(part.stop if triangular else None), part)) for part in parts]
    return zip(parts, prefetch(reads), strict=True)


@dataclass(frozen=True, eq=False)
class Head:
    """One output of a model: ``link(k(Z, X) W - b)``."""

    weights: Array
    """W. Shape (N, r)."""
    offset: Array | None = None
    """b; zero by default. Shape (r,)."""
    sqrt_eigenvalues: Array | None = None
    """s, for a symmetric root that is kept as factors. With ``W = V L^(-1/2)`` and ``s = L^(1/2)`` the output is
    ``((k(Z, X) W) s) W'``. It equals ``K^(-1/2) k(X, z)``, without the rounding errors of an explicit ``K^(-1/2)``.
    Shape (r,)."""
    link: str = links.IDENTITY
    """Name of the link, from `dkfm.numerics.links`."""
    triangular: bool = False
    """Whether W is square and upper triangular, so that a triangular product can be used."""
    n_leading_columns: int | None = None
    """Number of leading columns of W that are used; all by default."""

    @property
    def n_columns(self) -> int:
        """Number of columns of W that are used."""
        r = int(self.weights.shape[1])
        return r if self.n_leading_columns is None else min(r, self.n_leading_columns)

    @property
    def width(self) -> int:
        """Number of columns of the output."""
        columns = self.n_columns if self.sqrt_eigenvalues is None else int(self.weights.shape[0])
        return links.output_width(self.link, columns)

    @property
    def output_dtype(self) -> np.dtype[np.generic]:
        """Dtype of the output: int64 for codes of classes, otherwise that of the weights."""
        return links.result_dtype(self.link, self.weights.dtype)


@dataclass(frozen=True, eq=False)
class Model:
    """A kernel, its landmarks, and heads by name."""

    kernel: Kernel
    """Kernel function k."""
    landmarks: Rows
    """Rows X that a scored row is compared with. Their dtype, float64 or float32, is that of the heads and of all
    computations. Shape (N, d)."""
    heads: Mapping[str, Head]
    """Outputs by name."""
    shift: Array | None = None
    """Vector that is subtracted from each row before the row is rounded to float32. It is already subtracted from
    `landmarks`. Shape (d,)."""

    def head(self, name: str) -> Head:
        """Return a head by name; if there is no such head, raise an error that lists all heads."""
        if not isinstance(name, str) or name not in self.heads:
            hint = " Give several as a list." if "," in name else ""
            raise InvalidInputError(f"This model has no output {name!r}; it has {', '.join(self.heads)}.{hint}")
        return self.heads[name]

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """Dtype of the computations."""
        return self.landmarks.dtype

    @property
    def original_landmarks(self) -> Rows:
        """Landmarks in float64, with the shift added back."""
        return as_float64(self.landmarks) if self.shift is None else self.landmarks + self.shift

    def prepare_rows(self, Z: Rows) -> Rows:
        """Return rows shifted and cast like the landmarks, as the kernel compares them."""
        if self.shift is not None:
            cast = self._exact_shift_in_model_dtype
            Z = Z - (self.shift if cast is None or Z.dtype != self.dtype else cast)
        return Z if Z.dtype == self.dtype else Z.astype(self.dtype)

    @cached_property
    def _exact_shift_in_model_dtype(self) -> Array | None:
        """`shift` in the model's dtype; None if the conversion would change a value.

        If it is subtracted from rows of the model's dtype, they are rounded once; with the float64 `shift`, twice.
        """
        with np.errstate(over="ignore"):
            narrow: Array = np.asarray(self.shift, self.dtype)
        return narrow if np.array_equal(narrow, np.asarray(self.shift)) else None

    def predict_row_seconds(self, d: int, width: int) -> float:
        """Predict the seconds of one thread to score one row of d columns, or as many non-zeros, to `width` columns."""
        return predict_row_seconds(self.kernel, self.landmarks.shape[0], d, width, self.dtype.itemsize)

    @property
    def landmark_copies(self) -> int:
        """Number of arrays as large as the landmarks that the prepared kernel keeps, including float64 copies."""
        copies = self.kernel.landmark_copies
        may_need_float64 = self.dtype == np.float32 and needs_float64_block(self.kernel)
        return copies + 2 * (1 + copies) if may_need_float64 else copies

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in memory; arrays that heads share are counted once."""
        X = self.landmarks
        landmark_bytes = X.nbytes if isinstance(X, np.ndarray) else X.data.nbytes + X.indices.nbytes + X.indptr.nbytes
        return landmark_bytes + self.dtype.itemsize * (self.n_head_elements - self.n_stored_head_elements)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all arrays, including those that stay in a store."""
        return self.nbytes + self.dtype.itemsize * self.n_stored_head_elements

    @property
    def n_head_elements(self) -> int:
        """Number of values of all head arrays; arrays that heads share are counted once."""
        return sum(prod(array.shape) for array in self._unique_head_arrays())

    @property
    def n_stored_head_elements(self) -> int:
        """Number of values of the head arrays that stay in a store."""
        return sum(prod(array.shape) for array in self._unique_head_arrays() if isinstance(array, StoredWeights))

    def _unique_head_arrays(self) -> Iterable[Array]:
        arrays = (a for h in self.heads.values() for a in (h.weights, h.offset, h.sqrt_eigenvalues) if a is not None)
        return {id(array): array for array in arrays}.values()

    @property
    def n_features_in(self) -> int:
        """Number of columns of the rows that the model scores.

        It equals that of the landmarks, except for a precomputed kernel, whose landmarks are numbers of columns.
        """
        if isinstance(self.kernel, Precomputed) and self.kernel.columns is not None:
            return self.kernel.columns
        return int(self.landmarks.shape[1])
