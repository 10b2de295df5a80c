"""Compute pivoted Cholesky factors: rank-revealing, nested, with an error bound before any point is mapped.

Pivots are chosen until no diagonal entry of ``K - L L'`` exceeds a threshold, which bounds the residual of every
training point. If the Gram matrix is in memory, LAPACK factors it. Otherwise the factor grows column by column, and
only the columns of the pivots are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import NotPSDError
from dkfm.numerics.roots import EIGENVECTOR_ERROR_SHARE, EPS, MIN_ERROR_BOUND, ROUNDING_SHARE, Root, condition_number

BLOCK_COLUMNS = 256
"""Number of columns by which the memory of a factor grows."""

Indices = npt.NDArray[np.intp]
ChoosePivot = Callable[[Array], int]
"""Function of the residuals of all rows, (N,), that returns the number of the next pivot."""


@dataclass(frozen=True, eq=False)
class Pivots:
    """Pivots in the order of their choice, and the root of their Gram matrix."""

    row_indices: Indices
    """Numbers of the rows that are pivots. Shape (r,)."""
    root: Root
    """Triangular root of the Gram matrix of the pivots."""
    largest_residuals: Array
    """Largest diagonal entry of ``K - L L'`` after 0, 1, .. r pivots. Shape (r + 1,)."""


def pivot_threshold(diagonal: Array, tol: float | None) -> float:
    """Return the threshold that a diagonal entry must exceed to be a pivot.

    It is the larger of ``64 eps`` and ``tol^2``, times the largest entry. `tol` is first reduced by the rounding that
    the error bound adds. With ``4 eps``, 500 points that were given twice had a rank of 590 and negative residuals.
    """
    share = 0.0 if tol is None else max(0.0, tol - 2 * MIN_ERROR_BOUND) ** 2
    return max(ROUNDING_SHARE, share) * float(diagonal.max())


def choose_largest(residuals: Array) -> int:
    """Return the number of the row that is farthest from the span of the pivots."""
    return int(residuals.argmax())


def factor_gram(K: Array, tol: float | None = None, limit: int | None = None) -> Pivots:
    """Factor a Gram matrix that is in memory.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Gram matrix, overwritten; only the lower triangle is read.
    tol : float, optional
        Stop when all diagonal entries are at most ``tol^2`` of the largest entry of K. The smallest threshold, and the
        default, is ``64 eps``.
    limit : int, optional
        Largest number of pivots.

    Notes
    -----
    LAPACK ``dpstrf`` subtracts from the diagonal step by step, so that accumulated rounding can pass for a pivot.
    Therefore each pivot is computed again as ``K_pp - |R_p|^2``, and the first below the threshold ends the factor.
    """
    diagonal = K.diagonal().copy()
    threshold = pivot_threshold(diagonal, tol)
    factor, order, rank, _ = lapack.dpstrf(K, tol=threshold, lower=1, overwrite_a=1)
    del K
    order = order.astype(np.intp) - 1
    rank = min(rank, limit or rank)
    R = factor[:rank, :rank].copy(order="F")
    for j in range(rank):
        R[: j + 1, j] = 0.0
    values = diagonal[order[:rank]] - _sum_squares(R)
    R[np.diag_indices(rank)] = factor.diagonal()[:rank]
    rank = int(np.append(values <= threshold, True).argmax())
    residuals = diagonal[order[rank:]]
    for rows in row_slices(len(residuals), BLOCK_COLUMNS):
        residuals[rows] -= _sum_squares(factor[rank:][rows, :rank])
    return _make_pivots(order[:rank], R[:rank, :rank], values[:rank], residuals)


def factor_columns(
    diagonal: Array,
    column: Callable[[int], Array],
    tol: float | None = None,
    limit: int | None = None,
    choose: ChoosePivot = choose_largest,
    should_continue: Callable[[int, Array], bool] = lambda count, remaining: True,
) -> Pivots | None:
    """Factor a Gram matrix from the columns of its pivots alone: N r values in memory, 2 N r^2 operations.

    Parameters
    ----------
    diagonal : ndarray of shape (N,)
        k(x, x) of every row.
    column : callable
        Function of a row's number that returns its kernel values with all rows, (N,), in a new array.
    tol, limit : optional
        As in `factor_gram`.
    choose : callable
        Function that chooses the next pivot; by default the row of the largest residual, as in `factor_gram`.
    should_continue : callable
        Function that is called before every 256 columns, with the number of pivots so far and the largest residual
        after 0, 1, .. pivots. It returns whether to go on, and may raise.

    Returns
    -------
    Pivots or None
        None if `should_continue` returned False.
    """
    n, threshold = len(diagonal), pivot_threshold(diagonal, tol)
    blocks: list[Array] = []
    numbers: list[int] = []
    rejected: list[int] = []
    values: list[float] = []
    residuals, remaining = diagonal.copy(), [float(diagonal.max())]
    while len(numbers) < (limit or n):
        if residuals.max() <= threshold:
            # Step-by-step subtraction accumulates rounding, so compute the residuals again.
            residuals = _compute_residuals(diagonal, blocks, numbers)
            residuals[rejected] = 0.0
            if residuals.max() <= threshold:
                break
        pivot = choose(residuals)
        parts = [block[: len(numbers) - i * BLOCK_COLUMNS, pivot] for i, block in enumerate(blocks)]
        value = float(diagonal[pivot] - sum(part @ part for part in parts))
        if value <= threshold:
            rejected.append(pivot)  # permanently: two ways to sum the same squares may disagree
            residuals[pivot] = 0.0
            continue
        row_in_block = len(numbers) % BLOCK_COLUMNS
        if row_in_block == 0:
            if not should_continue(len(numbers), np.array(remaining)):
                return None
            blocks.append(np.empty((min(BLOCK_COLUMNS, (limit or n) - len(numbers)), n)))
        column_of_factor = column(pivot)
        for part, block in zip(parts, blocks, strict=False):
            column_of_factor -= part @ block[: len(part)]
        column_of_factor /= np.sqrt(value)
        column_of_factor[numbers] = 0.0  # exact: earlier pivots have no residual
        column_of_factor[pivot] = np.sqrt(value)
        blocks[-1][row_in_block] = column_of_factor
        residuals -= np.square(column_of_factor, out=column_of_factor)
        numbers.append(pivot)
        residuals[numbers + rejected] = 0.0
        values.append(value)
        remaining.append(float(residuals.max()))
    pivots = np.array(numbers, dtype=np.intp)
    residuals = np.delete(_compute_residuals(diagonal, blocks, numbers), pivots)
    R = np.zeros((len(pivots), len(pivots)), order="F")
    for i, block in enumerate(blocks):
        columns = R[:, i * BLOCK_COLUMNS : (i + 1) * BLOCK_COLUMNS]
        columns[...] = block[: columns.shape[1], pivots].T
    return _make_pivots(pivots, R, np.array(values), residuals, np.array(remaining[:-1]))


def require_psd_residual(K: Array, features: Array, lowest_residual: float, root: Root, n_rows: int, what: str) -> None:
    """Raise if the residual ``K - features features'`` of a Gram matrix cannot be positive semi-definite.

    Parameters
    ----------
    K : ndarray of shape (s, s)
        Kernel values of some of the N training rows.
    features : ndarray of shape (s, r)
        Features of the same rows.
    lowest_residual : float
        Smallest ``k(x, x) - |phi(x)|^2`` of all N training rows.
    root : Root
        Root that the features were computed with; a feature has a rounding error of about ``eps sqrt(condition)``.
    n_rows : int
        N.
    what : str
        Name of the Gram matrix in the message.

    Raises
    ------
    NotPSDError
        The features of a row are longer than the row, or the residuals of two rows are more similar than their lengths
        allow.
    """
    rest = K - features @ features.T
    share = (
        (max(1000, n_rows) + 64 + 8 * condition_number(root.values) ** 0.5) * EPS
        if root.triangular
        else EIGENVECTOR_ERROR_SHARE
    )
    # The relative error of a feature is about ``eps top / value``.
    top = float(root.values.max(initial=0.0))
    rounding = share * float(np.abs(K).max()) + 16 * EPS * top * (np.square(features) @ (1 / root.values))
    # The residual of a row that the features explain in full is rounding instead of 0.
    lengths = np.sqrt(np.maximum(rest.diagonal(), 0.0) + rounding)
    excess = np.abs(rest) - np.outer(lengths, lengths)
    i, j = np.unravel_index(int(excess.argmax()), excess.shape)
    if excess[i, j] <= 0 and -lowest_residual <= rounding.max():
        return
    finding = f"{what} is not positive semi-definite: beyond {features.shape[1]} features"
    why = f"two rows still have a similarity of {rest[i, j]:.6g}, with themselves {rest[i, i]:.6g} and {rest[j, j]:.6g}"
    if i == j or -lowest_residual > excess[i, j]:
        why = f"a row still has a similarity of {min(lowest_residual, rest[i, i]):.6g} with itself"
    remedy = 'choose another kernel, or drop its negative part with basis="spectral" and on_indefinite="clip"'
    raise NotPSDError(f"{finding} {why}; {remedy}.")


def _compute_residuals(diagonal: Array, blocks: list[Array], numbers: list[int]) -> Array:
    """Return the residuals of all rows, (N,), from the whole factor; those of the pivots are 0."""
    residuals = diagonal.copy()
    for i, block in enumerate(blocks):
        residuals -= np.einsum(
            "ij,ij->j", block[: len(numbers) - i * BLOCK_COLUMNS], block[: len(numbers) - i * BLOCK_COLUMNS]
        )
    residuals[numbers] = 0.0
    return residuals


def _sum_squares(rows: Array) -> Array:
    """Return the sum of squares of each row."""
    squares: Array = np.einsum("ij,ij->i", rows, rows)
    return squares


def _make_pivots(numbers: Indices, R: Array, values: Array, residuals: Array, remaining: Array | None = None) -> Pivots:
    """Return the pivots with the root ``R'^(-1)``; `residuals` are those of all other rows."""
    inverse, _ = lapack.dtrtri(R, lower=1, overwrite_c=1) if len(R) else (R, 0)
    dropped = np.sort(residuals)[::-1]
    after = np.append(values if remaining is None else remaining, dropped.max(initial=0.0))
    return Pivots(numbers, Root(inverse.T, values, dropped, triangular=True), after)
