"""Compute inner products of all pairs of rows, dense or CSR, without converting sparse rows to dense ones."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows, Sparse, build_csr_rows
from dkfm.kernels.pairwise.block_operations import Evaluator

_ROWS_BY_SPARSE = 64
"""Number of sparse rows that are multiplied by sparse rows at a time; the sparse product may store all indices."""

_ROWS_BY_DENSE = 1024
"""Sparse rows multiplied by dense ones at a time."""

_MAX_FLOAT32_TERMS = 512
"""Stored values of a row above which products of sparse float32 rows are accumulated in float64, because SciPy adds the
terms one after another, so that the error grows with their number."""

_DENSE_ROWS = 64
"""Dense rows transposed and multiplied by sparse ones at a time."""


def prepare_inner_products(Y: Rows) -> Evaluator:
    """Return a function from rows X (n, d) to <x, y> of all pairs, (n, m), in `out` if X and Y are dense.

    Temporaries hold only some rows of the block, and no array has length d if both sides are sparse.
    """
    if isinstance(Y, np.ndarray):
        dense = Y
        return lambda X, out=None, /: (
            np.matmul(X, dense.T, out=out) if isinstance(X, np.ndarray) else _multiply_sparse_by_dense(X, dense)
        )
    used, columns = np.unique(Y.indices, return_inverse=True)
    # Any, because the overload of @ that mypy picks for two sparse arrays differs from run to run.
    right: Any = _convert_to_sum_precision(build_csr_rows(Y.data, columns, Y.indptr, max(1, len(used)))).T.tocsr()

    def multiply(X: Rows, out: Array | None = None, /) -> Array:
        if isinstance(X, np.ndarray):
            return _multiply_sparse_by_dense(Y, X).T
        values = np.empty((X.shape[0], Y.shape[0]), np.result_type(X.dtype, Y.dtype))
        for part in row_slices(X.shape[0], _ROWS_BY_SPARSE):
            values[part] = (_convert_to_sum_precision(_select_columns(X[part], used)) @ right).toarray()
        return values

    return multiply


def _multiply_sparse_by_dense(X: Sparse, Y: Array) -> Array:
    """Return the inner products ``X Y'`` (n, m) of CSR and dense rows, some rows of each at a time."""
    block = np.empty((X.shape[0], len(Y)), np.result_type(X.dtype, Y.dtype))
    for columns in row_slices(len(Y), _DENSE_ROWS):
        right = np.ascontiguousarray(Y[columns].T)
        for part in row_slices(X.shape[0], _ROWS_BY_DENSE):
            block[part, columns] = _convert_to_sum_precision(X[part]) @ right
    return block


def _convert_to_sum_precision(X: Sparse) -> Sparse:
    """Return CSR rows in the precision in which their products are added up."""
    is_long = np.diff(X.indptr).max(initial=0) > _MAX_FLOAT32_TERMS
    return X.astype(np.float64) if is_long and X.dtype == np.float32 else X


def _select_columns(X: Sparse, used: npt.NDArray[np.integer]) -> Sparse:
    """Return CSR rows with only the columns `used`, which are sorted; column ``used[i]`` becomes column i."""
    columns = np.minimum(np.searchsorted(used, X.indices), max(0, len(used) - 1))
    selected = used[columns] == X.indices if len(used) else np.zeros(len(columns), np.bool_)
    ends = np.concatenate([[0], np.cumsum(selected)])[X.indptr]
    return build_csr_rows(X.data[selected], columns[selected], ends, max(1, len(used)))
