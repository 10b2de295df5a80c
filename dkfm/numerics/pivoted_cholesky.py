"""Pivoted Cholesky factors: rank-revealing, nested, and with a bound of the error before any point is mapped.

Pivots are taken until no diagonal entry of ``K - L L'`` is above the stop: then no training point has a longer part
that the pivots do not explain. Where the Gram matrix is at hand LAPACK takes them; where it is not, they are taken
column by column, and only their columns are ever computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import NotPSDError
from dkfm.numerics.roots import EPS, LEAST_BOUND, NOISE, UNEXPLAINED, Root, condition_number

BLOCK_COLUMNS = 256
"""By how many the factor grows at a time."""

Numbers = npt.NDArray[np.intp]
Choose = Callable[[Array], int]
"""What the diagonal still has (N,) -> the next pivot."""


@dataclass(frozen=True, eq=False)
class Pivots:
    """The rows that are pivots, in order, and the root of their Gram matrix.

    Attributes
    ----------
    numbers : ndarray of shape (r,)
        Which rows.
    root : Root
        Triangular, of these rows alone.
    remaining : ndarray of shape (r + 1,)
        The largest entry that the diagonal still has after 0, 1, .. r pivots.
    """

    numbers: Numbers
    root: Root
    remaining: Array


def pivot_threshold(diagonal: Array, tol: float | None) -> float:
    """Return what a diagonal entry (N,) must exceed to be a pivot: 64 eps, or tol squared, of the largest.

    At 4 eps, 500 points twice had a rank of 590 and negative residuals. Of tol a little is left to the rounding that
    the error bound counts in.
    """
    share = 0.0 if tol is None else max(0.0, tol - 2 * LEAST_BOUND) ** 2
    return max(NOISE, share) * float(diagonal.max())


def choose_largest(left: Array) -> int:
    """Choose the row that is farthest from the span of the pivots."""
    return int(left.argmax())


def factor_gram(K: Array, tol: float | None = None, limit: int | None = None) -> Pivots:
    """Factor a Gram matrix that is at hand.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Overwritten; only the lower triangle is read.
    tol : float, optional
        Stop where the diagonal is at most ``tol^2`` of its largest entry; ``64 eps`` by default and at least.
    limit : int, optional
        How many pivots at most.

    Notes
    -----
    LAPACK ``dpstrf``. It subtracts from the diagonal step by step, and what is left of nothing can pass for a pivot: so
    each is computed again as ``K_pp - |R_p|^2``, and the first that is below the stop ends the factor.
    """
    diagonal = K.diagonal().copy()
    stop = pivot_threshold(diagonal, tol)
    factor, order, rank, _ = lapack.dpstrf(K, tol=stop, lower=1, overwrite_a=1)
    del K
    order = order.astype(np.intp) - 1
    rank = min(rank, limit or rank)
    R = factor[:rank, :rank].copy(order="F")
    for j in range(rank):
        R[: j + 1, j] = 0.0
    values = diagonal[order[:rank]] - _squares(R)
    R[np.diag_indices(rank)] = factor.diagonal()[:rank]
    rank = int(np.append(values <= stop, True).argmax())
    left = diagonal[order[rank:]]
    for rows in row_slices(len(left), BLOCK_COLUMNS):
        left[rows] -= _squares(factor[rank:][rows, :rank])
    return _pivots(order[:rank], R[:rank, :rank], values[:rank], left)


def factor_columns(
    diagonal: Array,
    column: Callable[[int], Array],
    tol: float | None = None,
    limit: int | None = None,
    choose: Choose = choose_largest,
    go_on: Callable[[int, Array], bool] = lambda taken, remaining: True,
) -> Pivots | None:
    """Factor a Gram matrix of which only the columns of the pivots are computed: N r values in memory, 2 N r^2 work.

    Parameters
    ----------
    diagonal : ndarray of shape (N,)
        k(x, x) of every row.
    column : callable
        The number of a row -> its kernel values with all rows, (N,), a fresh array.
    tol, limit : optional
        As in `factor_gram`.
    choose : callable
        What picks the next pivot; by default the largest, which is what `factor_gram` takes.
    go_on : callable
        Asked before every 256 columns, with the number of pivots so far and what remained after each; it may raise.

    Returns
    -------
    Pivots, or None where `go_on` said no.
    """
    n, stop = len(diagonal), pivot_threshold(diagonal, tol)
    blocks: list[Array] = []
    numbers: list[int] = []
    rejected: list[int] = []
    values: list[float] = []
    left, remaining = diagonal.copy(), [float(diagonal.max())]
    while len(numbers) < (limit or n):
        if left.max() <= stop:
            # What was subtracted step by step has rounded: see what is left in truth.
            left = _left(diagonal, blocks, numbers)
            left[rejected] = 0.0
            if left.max() <= stop:
                break
        pivot = choose(left)
        row = [block[: len(numbers) - i * BLOCK_COLUMNS, pivot] for i, block in enumerate(blocks)]
        value = float(diagonal[pivot] - sum(part @ part for part in row))
        if value <= stop:
            rejected.append(pivot)  # for good: two ways to add up the same squares need not agree
            left[pivot] = 0.0
            continue
        place = len(numbers) % BLOCK_COLUMNS
        if place == 0:
            if not go_on(len(numbers), np.array(remaining)):
                return None
            blocks.append(np.empty((min(BLOCK_COLUMNS, (limit or n) - len(numbers)), n)))
        new = column(pivot)
        for part, block in zip(row, blocks, strict=False):
            new -= part @ block[: len(part)]
        new /= np.sqrt(value)
        new[numbers] = 0.0  # exactly so: they are explained
        new[pivot] = np.sqrt(value)
        blocks[-1][place] = new
        left -= np.square(new, out=new)
        numbers.append(pivot)
        left[numbers + rejected] = 0.0
        values.append(value)
        remaining.append(float(left.max()))
    taken = np.array(numbers, dtype=np.intp)
    left = np.delete(_left(diagonal, blocks, numbers), taken)
    R = np.zeros((len(taken), len(taken)), order="F")
    for i, block in enumerate(blocks):
        columns = R[:, i * BLOCK_COLUMNS : (i + 1) * BLOCK_COLUMNS]
        columns[...] = block[: columns.shape[1], taken].T
    return _pivots(taken, R, np.array(values), left, np.array(remaining[:-1]))


def require_psd_residual(K: Array, features: Array, lowest: float, found: Root, n: int, what: str) -> None:
    """Raise where what features leave of a Gram matrix cannot be what they leave of a positive semi-definite one.

    Parameters
    ----------
    K, features : ndarray of shape (s, s) and (s, r)
        Of some of the N training rows.
    lowest : float
        The least ``k(x, x) - |phi(x)|^2`` of all of them.
    found : Root
        What the features are of; a feature rounds by some ``eps sqrt(condition)``.
    n : int
        N.
    what : str
        What the message calls it.

    Raises
    ------
    NotPSDError
        A row is shorter than its features, or two rows are more alike than what is left of each allows.
    """
    left = K - features @ features.T
    share = (max(1000, n) + 64 + 8 * condition_number(found.values) ** 0.5) * EPS if found.triangular else UNEXPLAINED
    # Each feature is exact to some ``eps top / value`` of itself.
    top = float(found.values.max(initial=0.0))
    rounding = share * float(np.abs(K).max()) + 16 * EPS * top * (np.square(features) @ (1 / found.values))
    # Of a row that the features explain in full, what is left of it is rounding, and not 0.
    own = np.sqrt(np.maximum(left.diagonal(), 0.0) + rounding)
    beyond = np.abs(left) - np.outer(own, own)
    i, j = np.unravel_index(int(beyond.argmax()), beyond.shape)
    if beyond[i, j] <= 0 and -lowest <= rounding.max():
        return
    found_so = f"{what} is not positive semi-definite: beyond {features.shape[1]} features"
    how = f"two rows still have a similarity of {left[i, j]:.6g}, with themselves {left[i, i]:.6g} and {left[j, j]:.6g}"
    if i == j or -lowest > beyond[i, j]:
        how = f"a row still has a similarity of {min(lowest, left[i, i]):.6g} with itself"
    remedy = 'choose another kernel, or drop its negative part with basis="spectral" and on_indefinite="clip"'
    raise NotPSDError(f"{found_so} {how}; {remedy}.")


def _left(diagonal: Array, blocks: list[Array], numbers: list[int]) -> Array:
    left = diagonal.copy()
    for i, block in enumerate(blocks):
        left -= np.einsum(
            "ij,ij->j", block[: len(numbers) - i * BLOCK_COLUMNS], block[: len(numbers) - i * BLOCK_COLUMNS]
        )
    left[numbers] = 0.0
    return left


def _squares(rows: Array) -> Array:
    squares: Array = np.einsum("ij,ij->i", rows, rows)
    return squares


def _pivots(numbers: Numbers, R: Array, values: Array, left: Array, remaining: Array | None = None) -> Pivots:
    """Return the pivots with the root ``R'^(-1)``; `left` is what the diagonal has of all other rows."""
    inverse, _ = lapack.dtrtri(R, lower=1, overwrite_c=1) if len(R) else (R, 0)
    dropped = np.sort(left)[::-1]
    after = np.append(values if remaining is None else remaining, dropped.max(initial=0.0))
    return Pivots(numbers, Root(inverse.T, values, dropped, triangular=True), after)
