"""Compute pivoted Cholesky factors, which are rank-revealing and nested, and bound the error of their feature map.

The factored matrix is ``A = D^-1 K D^-1``, with diagonal entries of 1 (0 for rows that are the zero vector). Pivots are
chosen until no diagonal entry of ``A - L L'`` exceeds a threshold, which bounds the residual of every training row
relative to its k(x, x). If the Gram matrix is in memory, LAPACK factors it. Otherwise the factor grows column by
column, and only the columns of the pivots are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import NotPSDError
from dkfm.numerics.map_error_bounds import Residuals, estimate_largest_norm, make_probes
from dkfm.numerics.roots import (
    EIGENVECTOR_ERROR_SHARE,
    EPS,
    ROUNDING_SHARE,
    Root,
    condition_number,
    replace_zero_lengths,
    row_lengths,
    scale_gram_in_place,
)

_TOL_SHARE = 0.9
"""Share of a tolerance that is left to dropped residuals; the rest is reserved for rounding."""

_COEFFICIENT_ROUNDING = 1500 * EPS
"""Part of a squared tolerance that is reserved for the rounding of coefficients, ``8 eps B^2`` with B about 13."""

RESIDUAL_ROUNDING = 8 * EPS
"""Rounding error of a residual that is computed from the factor, relative to k(x, x)."""

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
    residual_summary: Residuals
    """Diagonal entries of ``A - L L'``, and coefficients of all rows for the pivots."""


def pivot_threshold(tol: float | None) -> float:
    """Return the threshold that a diagonal entry of A must exceed to be a pivot.

    It is the larger of ``64 eps`` and of ``tol^2`` reduced by the part of the error bound that rounding takes. A
    threshold of ``4 eps`` would be too small: 500 points given twice then had a rank of 590 and negative residuals.
    """
    return max(ROUNDING_SHARE, 0.0 if tol is None else (_TOL_SHARE * tol) ** 2 - _COEFFICIENT_ROUNDING)


def choose_largest(residuals: Array) -> int:
    """Return the number of the row that is farthest from the span of the pivots."""
    return int(residuals.argmax())


def make_random_chooser(rng: np.random.RandomState) -> ChoosePivot:
    """Return a function that draws a row with probability proportional to its residual (randomly pivoted Cholesky)."""

    def choose(residuals: Array) -> int:
        totals = np.cumsum(np.maximum(residuals, 0.0))
        return min(len(totals) - 1, int(np.searchsorted(totals, rng.uniform(high=totals[-1]), side="right")))

    return choose


def factor_gram(K: Array, tol: float | None = None, limit: int | None = None) -> Pivots:
    """Factor a Gram matrix that is in memory.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Gram matrix, overwritten; only the lower triangle is read.
    tol : float, optional
        Stop when all diagonal entries of the scaled matrix are at most ``tol^2``. The smallest threshold, and the
        default, is ``64 eps``.
    limit : int, optional
        Largest number of pivots.

    Notes
    -----
    LAPACK ``dpstrf`` subtracts from the diagonal step by step, so accumulated rounding can be mistaken for a pivot.
    Therefore each pivot is computed again as ``A_pp - |R_p|^2``, and the first one below the threshold ends the factor.
    """
    lengths, threshold = row_lengths(K.diagonal()), pivot_threshold(tol)
    scale_gram_in_place(K, lengths)
    diagonal = K.diagonal().copy()
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
    residuals, rest = diagonal[order[rank:]], factor[rank:, :rank]
    for rows in row_slices(len(residuals), BLOCK_COLUMNS):
        residuals[rows] -= _sum_squares(rest[rows])
    remaining = np.append(values[:rank], residuals.max(initial=0.0))
    return _make_pivots(order[:rank], R[:rank, :rank], values[:rank], lengths, residuals, remaining, rest.dot)


def factor_columns(
    diagonal: Array,
    column: Callable[[int], Array],
    tol: float | None = None,
    limit: int | None = None,
    choose: ChoosePivot = choose_largest,
    should_continue: Callable[[int, Array], bool] = lambda count, remaining: True,
) -> Pivots | None:
    """Factor a Gram matrix from the columns of its pivots only, with N r values in memory and 2 N r^2 operations.

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
        after 0, 1, .. pivots. It returns whether to continue, and may raise.

    Returns
    -------
    Pivots or None
        None if `should_continue` returned False.
    """
    n, threshold, lengths = len(diagonal), pivot_threshold(tol), row_lengths(diagonal)
    divisors, diagonal, limit = replace_zero_lengths(lengths), np.sign(diagonal), limit or n
    blocks: list[Array] = []
    numbers: list[int] = []
    rejected: list[int] = []
    values: list[float] = []
    residuals, remaining = diagonal.copy(), [float(diagonal.max())]
    while len(numbers) < limit:
        filled = _trim_blocks(blocks, len(numbers))
        if residuals.max() <= threshold:
            # Step-by-step subtraction accumulates rounding, so compute the residuals again.
            residuals = _compute_residuals(diagonal, filled, numbers)
            residuals[rejected] = 0.0
            if residuals.max() <= threshold:
                break
        pivot = choose(residuals)
        parts = [block[:, pivot] for block in filled]
        value = float(diagonal[pivot] - sum(part @ part for part in parts))
        if value <= threshold:
            rejected.append(pivot)  # permanently, because two ways to sum the same squares may differ
            residuals[pivot] = 0.0
            continue
        row_in_block = len(numbers) % BLOCK_COLUMNS
        if row_in_block == 0:
            if not should_continue(len(numbers), np.array(remaining)):
                return None
            blocks.append(np.empty((min(BLOCK_COLUMNS, limit - len(numbers)), n)))
        column_of_factor = column(pivot)
        column_of_factor /= divisors
        column_of_factor /= divisors[pivot]
        for part, block in zip(parts, filled, strict=True):
            column_of_factor -= part @ block
        column_of_factor /= np.sqrt(value)
        column_of_factor[numbers] = 0.0  # earlier pivots have residual 0 in exact arithmetic
        column_of_factor[pivot] = np.sqrt(value)
        blocks[-1][row_in_block] = column_of_factor
        residuals -= np.square(column_of_factor, out=column_of_factor)
        numbers.append(pivot)
        residuals[numbers + rejected] = 0.0
        values.append(value)
        remaining.append(float(residuals.max()))
    filled = _trim_blocks(blocks, len(numbers))
    residuals = _compute_residuals(diagonal, filled, numbers)
    return _make_pivots_of_columns(filled, numbers, np.array(values), lengths, residuals, np.array(remaining))


def _trim_blocks(blocks: list[Array], rank: int) -> list[Array]:
    """Return the blocks of rows of the transposed factor up to row `rank`; later rows are not set."""
    return [block[: rank - i * BLOCK_COLUMNS] for i, block in enumerate(blocks)]


def _make_pivots_of_columns(
    blocks: list[Array], numbers: list[int], values: Array, lengths: Array, residuals: Array, remaining: Array
) -> Pivots:
    """Return the pivots with their root, from blocks of rows of the transposed factor (r, N).

    `residuals` (N,) are those of all rows, including pivots; the other arguments are those of `_make_pivots`.
    """
    pivots = np.array(numbers, dtype=np.intp)
    residuals = np.delete(residuals, pivots)
    remaining[-1] = float(residuals.max(initial=0.0))
    parts = list(row_slices(len(pivots), BLOCK_COLUMNS))
    R = np.zeros((len(pivots), len(pivots)), order="F")
    for part, block in zip(parts, blocks, strict=True):
        R[:, part] = block[:, pivots].T

    def project(G: Array) -> Array:
        product = np.zeros((len(lengths), G.shape[1]))
        for part, block in zip(parts, blocks, strict=True):
            product += block.T @ G[part]
        return product

    return _make_pivots(pivots, R, values, lengths, residuals, remaining, project)


def require_psd_residual(K: Array, features: Array, lowest_residual: float, root: Root, n_rows: int, what: str) -> None:
    """Raise if the residual ``K - features features'`` of a Gram matrix cannot be positive semi-definite.

    Parameters
    ----------
    K : ndarray of shape (s, s)
        Kernel values of some of the N training rows, divided by the lengths of both.
    features : ndarray of shape (s, r)
        Features of the same rows, divided by their lengths.
    lowest_residual : float
        Smallest ``(k(x, x) - |phi(x)|^2) / k(x, x)`` of the training rows that were visited.
    root : Root
        Root that the features were computed with; a feature has a rounding error of about ``eps sqrt(condition)``.
    n_rows : int
        N.
    what : str
        Name of the Gram matrix in the message.

    Raises
    ------
    NotPSDError
        The features of a row are longer than the row, or the residual of a pair of rows exceeds the product of their
        residual lengths.
    """
    rest = K - features @ features.T
    share = EIGENVECTOR_ERROR_SHARE
    if root.triangular:
        share = (max(1000, n_rows) + 64 + 8 * condition_number(root.values) ** 0.5) * EPS
    # The relative error of a feature is about ``eps top / value``.
    top = float(root.values.max(initial=0.0))
    rounding = share + 16 * EPS * top * (np.square(features) @ (1 / root.values))
    # The computed residual of a row in the span of the pivots is a rounding error instead of 0.
    lengths = np.sqrt(np.maximum(rest.diagonal(), 0.0) + rounding)
    excess = np.abs(rest) - np.outer(lengths, lengths)
    i, j = np.unravel_index(int(excess.argmax()), excess.shape)
    if excess[i, j] <= 0 and -lowest_residual <= rounding.max():
        return
    finding = f"{what} is not positive semi-definite: after {features.shape[1]} features"
    why = (
        f"k(x, z) - <phi(x), phi(z)> of two rows is {rest[i, j]:.6g} of their own scale, and k(x, x) - |phi(x)|^2 of "
        f"each is {rest[i, i]:.6g} and {rest[j, j]:.6g}"
    )
    if i == j or -lowest_residual > excess[i, j]:
        why = f"k(x, x) - |phi(x)|^2 of a row is {min(lowest_residual, rest[i, i]):.6g} of its k(x, x), and below 0"
    remedy = 'choose another kernel, or drop its negative part with basis="spectral" and on_indefinite="clip"'
    raise NotPSDError(f"{finding}, {why}; {remedy}.")


def _compute_residuals(diagonal: Array, blocks: list[Array], numbers: list[int]) -> Array:
    """Return the residuals of all rows, (N,), from the whole factor; those of the pivots are 0."""
    residuals = diagonal.copy()
    for block in blocks:
        residuals -= np.einsum("ij,ij->j", block, block)
    residuals[numbers] = 0.0
    return residuals


def _sum_squares(rows: Array) -> Array:
    """Return the sum of squares of each row."""
    squares: Array = np.einsum("ij,ij->i", rows, rows)
    return squares


def _make_pivots(
    numbers: Indices,
    R: Array,
    values: Array,
    lengths: Array,
    residuals: Array,
    remaining: Array,
    project: Callable[[Array], Array],
) -> Pivots:
    """Return the pivots with the root ``D^-1 R'^(-1)``.

    Parameters
    ----------
    numbers, R, values
        Numbers of the pivots (r,), the factor of their scaled Gram matrix (r, r), and their residuals (r,).
    lengths : ndarray of shape (N,)
        `row_lengths` of all rows.
    residuals : ndarray of shape (N - r,)
        Residuals of all other rows.
    remaining : ndarray of shape (r + 1,)
        Largest residual of any row after 0, 1, .. r pivots.
    project : callable
        Function that multiplies the features of the rows that are not pivots by a matrix (r, p).
    """
    inverse, _ = lapack.dtrtri(R, lower=1, overwrite_c=1) if len(R) else (R, 0)
    scales = lengths[numbers]
    norm = 1.0
    if len(R) and len(residuals):
        norm = max(1.0, estimate_largest_norm(np.asarray(project(inverse @ make_probes(len(R))))))
    # The residual of a row in the span of the pivots is a rounding error instead of 0; that of a pivot is 0.
    limits = np.append(np.full(len(values), np.inf), np.inf if len(residuals) else 0.0)
    shares = Residuals(
        np.maximum(remaining, 0.0), float(residuals.min(initial=0.0)), norm, RESIDUAL_ROUNDING, limits=limits
    )
    dropped = np.sort(residuals)[::-1]
    weights = inverse.T
    for rows in row_slices(len(scales), BLOCK_COLUMNS):
        weights[rows, rows.start :] /= scales[rows, np.newaxis]
    return Pivots(numbers, Root(weights, values, dropped, scales, triangular=True), shares)


def forecast_rank(largest_residuals: Array, threshold: float, n: int) -> int:
    """Forecast the rank, assuming that the residual continues to fall at its rate from r / 2 to r pivots.

    >>> forecast_rank(np.array([1.0, 1e-1, 1e-2]), 1e-6, 100)
    6
    """
    r = len(largest_residuals) - 1
    half = r // 2
    if r == 0 or largest_residuals[-1] <= threshold:
        return n if r == 0 else r
    fall = np.log(largest_residuals[half] / largest_residuals[-1]) / (r - half)
    return n if fall <= 0 else min(n, int(np.ceil(r + np.log(largest_residuals[-1] / threshold) / fall - 1e-9)))
