"""The largest eigenvalues of a symmetric matrix that is only multiplied with: block Lanczos.

Every block is made orthogonal to all before it, twice; where too many are held, it goes on from the best of them. All
of it is NumPy's: threads of a second BLAS would wait, busily, on the same cores.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dkfm.core.rows import Array

Multiply = Callable[[Array], Array]
"""From a block (n, p) to the product of the matrix and the block."""

_EPS = float(np.finfo(np.float64).eps)
_REACHED = 4 * _EPS
"""Of the largest eigenvalue: a residual that rounding leaves."""

_LEAST, _MORE = 16, 12
"""Columns of a block: at least, for a product with many takes hardly longer than one with a few; and how many more than
eigenvectors, of which no fewer may be asked at once: those of a repeated eigenvalue look the same to every product.
"""

_HELD = 640, 4
"""Columns held at a time, beside four times the eigenvectors asked for; and blocks, at least."""

_FIRST_LOOK, _LOOK = 6, 1.2
"""Products at the first look at what is there, and how many times as many there are at each next one."""

_WELL = 1e-5
"""Of a block's condition: its Gram matrix then still has the digits that a second pass needs."""


_ROWS, _FEW = 1000, 20
"""Of a matrix, at least; and of which one eigenvector, or fewer, is asked for."""

MAX_PRODUCTS = 200
"""Products after which all eigenvectors are as soon found."""


@dataclass(frozen=True, eq=False)
class EigenPairs:
    """Eigenvalues and eigenvectors that were found.

    Attributes
    ----------
    values : ndarray of shape (q,)
        Descending.
    vectors : ndarray of shape (n, q)
        Of unit length, orthogonal.
    residuals : ndarray of shape (q,)
        ``|A v - value v|``.
    lowest : float
        The lowest value that was seen, which the lowest eigenvalue is at most.
    products : int
        How many blocks were multiplied.
    converged : bool
    """

    values: Array
    vectors: Array
    residuals: Array
    lowest: float
    products: int
    converged: bool


def block_columns(n: int, q: int) -> int:
    """Return the columns of a block that is to find q eigenvectors.

    >>> block_columns(4000, 20), block_columns(4000, 1), block_columns(4000, 100)
    (32, 16, 112)
    """
    return min(n, max(_LEAST, q + _MORE))


def is_faster_than_dense(n: int, q: int) -> bool:
    """Whether q eigenvectors are sooner found so than all.

    >>> is_faster_than_dense(4000, 20), is_faster_than_dense(4000, 500), is_faster_than_dense(300, 2)
    (True, False, False)
    """
    return n >= _ROWS and _FEW * q <= n


def held_columns(n: int, q: int) -> int:
    """Return how many columns are held at a time: with another block still less than n.

    >>> held_columns(4000, 20), held_columns(10**6, 200), held_columns(400, 20)
    (720, 1648, 352)
    """
    p, (columns, blocks) = block_columns(n, q), _HELD
    return min((n // p - 1) * p, 4 * q + max(columns, blocks * p))


class _Space:
    """An orthonormal basis, and the matrix as it sees it."""

    def __init__(self, n: int, capacity: int) -> None:
        self.basis = np.empty((n, capacity), order="F")
        self.seen = np.zeros((capacity, capacity))
        self.count = 0

    def add(self, block: Array, multiply: Multiply) -> tuple[Array, Array]:
        """Take a block in; return the next one, and the triangle that leads to it."""
        first, last = self.count, self.count + block.shape[1]
        self.basis[:, first:last] = block
        self.count = last
        beyond, found = self._apart(multiply(block))
        block, triangle = _orthonormal(beyond)
        block, again = self._apart(block)
        found += again @ triangle
        block, correction = _orthonormal(block)
        self.seen[:last, first:last] = found
        self.seen[first:last, :first] = found[:first].T
        return block, correction @ triangle

    def _apart(self, block: Array) -> tuple[Array, Array]:
        """Return what of a block is orthogonal to the basis, and its products with the basis."""
        basis = self.basis[:, : self.count]
        products = basis.T @ block
        return block - basis @ products, products

    def ritz(self) -> tuple[Array, Array]:
        """Return the eigenvalues that are seen, ascending, and their vectors in the basis."""
        seen = self.seen[: self.count, : self.count]
        values, vectors = np.linalg.eigh((seen + seen.T) / 2)
        return values, vectors

    def restart(self, values: Array, vectors: Array) -> None:
        """Keep some of the eigenvectors that are seen, and nothing else."""
        kept = len(values)
        self.basis[:, :kept] = self.basis[:, : self.count] @ vectors
        self.seen[:] = 0.0
        self.seen[:kept, :kept] = np.diag(values)
        self.count = kept


def _orthonormal(block: Array) -> tuple[Array, Array]:
    """Return Q and R with ``Q R`` a block (n, p); Q is orthonormal up to the square of the block's condition."""
    gram = block.T @ block
    try:
        lower = np.linalg.cholesky(gram)
    except np.linalg.LinAlgError:
        lower = np.zeros_like(gram)
    sizes = np.diagonal(lower)
    if sizes.min() <= _WELL * sizes.max():
        Q, R = np.linalg.qr(block)
        return Q, R
    return block @ np.linalg.inv(lower).T, lower.T


def largest_eigenpairs(
    multiply: Multiply,
    start: Array,
    q: int,
    tol: float = 0.0,
    most: int = 1000,
    noise: float = 0.0,
    held: int | None = None,
) -> EigenPairs:
    """Return the q largest eigenvalues of a symmetric matrix (n, n), and their eigenvectors.

    Parameters
    ----------
    multiply : callable
    start : ndarray of shape (n, p)
        The first block, of full rank; every later one has p columns too, and p is less than n / 2.
    q : int
        At most p.
    tol : float
        Of a residual as a share of its eigenvalue; at best the rounding unit of the largest one.
    most : int
        Products after which what there is is returned.
    noise : float
        What rounding adds to a product with a vector of length 1: no residual need be smaller.
    held : int, optional
        Columns of the basis, at least 2 (q + p); `held_columns` by default.

    Notes
    -----
    Golub and Van Loan, "Matrix Computations", 10.3.6; Wu and Simon, "Thick-restart Lanczos method" (2000).
    """
    n, p = start.shape
    capacity = held_columns(n, q) if held is None else held
    space = _Space(n, capacity)
    block, _ = np.linalg.qr(start)
    lowest, look = np.inf, _FIRST_LOOK
    for products in range(1, most + 1):
        block, triangle = space.add(block, multiply)
        full = space.count + p > capacity
        ended = np.abs(triangle).max() <= _EPS * np.abs(space.seen).max()  # all of a low rank is there
        if products < min(look, most) and not full and not ended:
            continue
        look = max(products + 1, int(_LOOK * products))
        values, vectors = space.ritz()
        lowest = min(lowest, float(values[0]))
        # The next block is orthogonal to all that is seen.
        residuals = np.linalg.norm(triangle @ vectors[space.count - p :], axis=0)
        best = slice(space.count - min(q, space.count), None)
        reached = max(noise, _REACHED * max(abs(lowest), abs(float(values[-1]))))
        allowed = np.maximum(tol * np.abs(values[best]), reached)
        converged = space.count >= q and bool((residuals[best] <= allowed).all())
        if converged or products == most:
            found = space.basis[:, : space.count] @ vectors[:, best][:, ::-1]
            return EigenPairs(values[best][::-1], found, residuals[best][::-1], lowest, products, converged)
        if full:
            kept = slice(space.count - max(q + p, capacity // 2), None)
            space.restart(values[kept], vectors[:, kept])
    raise AssertionError("the last product returns")
