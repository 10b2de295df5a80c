"""Inner products of all pairs of rows, dense or CSR, without ever making sparse rows dense."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, Sparse, csr_rows
from dkfm.kernels.pairwise.blocks import Evaluator

_TILE = 64
"""Sparse rows that are multiplied at a time: their product may have an index beside every value."""

_MANY = 1024
"""Sparse rows that are multiplied by a few dense ones at a time."""

_FEW = 64
"""Dense rows that are transposed at a time beside sparse ones."""


def prepare_inner_products(Y: Rows) -> Evaluator:
    """Return a function from rows X (n, d) to <x, y> of all pairs, (n, m); dense ones into the memory given.

    Beside the block only some rows of it are ever there; nothing is densified, and nothing is as long as d where both
    sides are sparse.
    """
    if isinstance(Y, np.ndarray):
        dense = Y
        return lambda X, out=None, /: (
            np.matmul(X, dense.T, out=out) if isinstance(X, np.ndarray) else _sparse_by_dense(X, dense)
        )
    used, places = np.unique(Y.indices, return_inverse=True)
    # Any: which overload of @ the stubs give for two sparse sides differs from one run of mypy to the next.
    right: Any = csr_rows(Y.data, places, Y.indptr, max(1, len(used))).T.tocsr()

    def block(X: Rows, out: Array | None = None, /) -> Array:
        if isinstance(X, np.ndarray):
            return _sparse_by_dense(Y, X).T
        values = np.empty((X.shape[0], Y.shape[0]), np.result_type(X.dtype, Y.dtype))
        for part in row_slices(X.shape[0], _TILE):
            values[part] = (_renumbered(X[part], used) @ right).toarray()
        return values

    return block


def _sparse_by_dense(X: Sparse, Y: Array) -> Array:
    block = np.empty((X.shape[0], len(Y)), np.result_type(X.dtype, Y.dtype))
    for few in row_slices(len(Y), _FEW):
        right = np.ascontiguousarray(Y[few].T)
        for part in row_slices(X.shape[0], _MANY):
            block[part, few] = X[part] @ right
    return block


def _renumbered(X: Sparse, used: npt.NDArray[np.integer]) -> Sparse:
    """Return rows with the used columns alone, which are given ascending."""
    places = np.minimum(np.searchsorted(used, X.indices), max(0, len(used) - 1))
    kept = used[places] == X.indices if len(used) else np.zeros(len(places), np.bool_)
    ends = np.concatenate([[0], np.cumsum(kept)])[X.indptr]
    return csr_rows(X.data[kept], places[kept], ends, max(1, len(used)))
