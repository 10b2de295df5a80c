"""Find the largest eigenvalues of a symmetric matrix from products with it, by thick-restart block Lanczos.

Each block is orthogonalized twice against all earlier blocks. When the basis is full, the iteration restarts from its
best Ritz vectors. Only NumPy is used: the threads of a second BLAS would busy-wait on the same cores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import frexp
from typing import Protocol

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array

Multiply = Callable[[Array], Array]
"""Function that returns the product of the matrix and a block (n, p)."""

_EPS = float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)
"""Smallest normal number; its product with `_RESIDUAL_SHARE` is not 0."""

_SMALLEST_SQUARED = 2.0**-400
"""Blocks are scaled before they are squared if their largest entry is below this, or above its inverse."""

_RESIDUAL_SHARE = 4 * _EPS
"""Residuals up to this share of the largest eigenvalue are attributed to rounding."""

_MIN_BLOCK_COLUMNS = 16
"""Smallest number of columns of a block; a product with fewer columns takes hardly less time."""

# A block has a column for each requested eigenvector, so that it finds all eigenvectors of a repeated eigenvalue.
_EXTRA_COLUMNS = 12
"""Columns of a block beyond the number of requested eigenvectors."""

_BASIS_COLUMNS = 640
"""Smallest number of columns of the basis, besides four for each requested eigenvector."""

_BASIS_BLOCKS = 4
"""Smallest number of blocks of the basis, besides four columns for each requested eigenvector."""

_FIRST_TEST = 6
"""Number of products before the first convergence test."""

_TEST_GROWTH = 1.5
"""Largest factor by which the number of products grows from one convergence test to the next."""

_FORETOLD_SHARE = 0.7
"""Share of the predicted remaining products after which to test again, because convergence accelerates."""

_TEST_SHARE = 1 / 16
"""Share of the multiplications of a product up to which a convergence test is cheap enough to follow each product."""

_MIN_DIAGONAL_RATIO = 1e-5
"""Smallest diagonal ratio of a block's Cholesky factor for which two passes of Cholesky QR are accurate."""

_RESTART_ROWS = 4096
"""Rows of the basis that a restart replaces at a time."""

_MIN_ROWS = 1400
"""With fewer rows, a dense eigendecomposition is faster."""

_MIN_ROWS_PER_EIGENVECTOR = 40
"""With fewer rows for each requested eigenvector, a dense eigendecomposition is faster."""

_MIN_MAX_PRODUCTS, _ROWS_PER_PRODUCT = 200, 40
"""Products that are always tried, and rows per further product: N / 40 products take as long as a dense solver."""


@dataclass(frozen=True, eq=False)
class EigenPairs:
    """Eigenpairs of a symmetric matrix A (n, n)."""

    values: Array
    """Eigenvalues, descending. Shape (q,)."""
    vectors: Array
    """Orthonormal eigenvectors, in columns. Shape (n, q)."""
    residuals: Array
    """``|A v - value v|`` of each pair. Shape (q,)."""
    lowest_ritz_value: float
    """Smallest Ritz value of all convergence tests: an upper bound of the smallest eigenvalue."""
    n_products: int
    """Number of blocks that were multiplied."""
    converged: bool
    """Whether all q residuals are small enough."""


@dataclass(frozen=True, eq=False)
class LanczosState:
    """State of the iteration between two products."""

    basis: Array
    """Orthonormal basis of the Krylov space. Shape (n, c)."""
    projected: Array
    """Projection of the matrix on the basis. Shape (c, c)."""
    block: Array
    """Block that is multiplied next, orthogonal to the basis. Shape (n, p)."""
    n_products: int
    """Number of products so far."""
    next_test: int
    """Number of products before the next convergence test."""
    lowest: float
    """Smallest Ritz value so far."""


class StepLog(Protocol):
    """Log that keeps the state of an iteration, from which it can resume."""

    def load(self, basis: Array) -> LanczosState | None:
        """Return the last saved state, or None; write its basis to the first columns of `basis` (n, c)."""

    def save(self, state: LanczosState, first_new: int) -> None:
        """Save a state; the columns of its basis before `first_new` are those of the previously saved state."""


def choose_block_columns(n: int, q: int) -> int:
    """Return the number of columns of a block for finding q eigenvectors of a matrix (n, n).

    >>> choose_block_columns(4000, 20), choose_block_columns(4000, 1), choose_block_columns(4000, 100)
    (32, 16, 112)
    """
    return min(n, max(_MIN_BLOCK_COLUMNS, q + _EXTRA_COLUMNS))


def is_faster_than_dense(n: int, q: int) -> bool:
    """Return whether Lanczos finds q eigenvectors sooner than a dense eigendecomposition does.

    >>> is_faster_than_dense(4000, 20), is_faster_than_dense(4000, 200), is_faster_than_dense(300, 2)
    (True, False, False)
    """
    return n >= _MIN_ROWS and _MIN_ROWS_PER_EIGENVECTOR * q <= n


def choose_max_products(n: int) -> int:
    """Return the number of products with a matrix (n, n) after which to fall back to a dense eigendecomposition.

    >>> choose_max_products(2000), choose_max_products(20_000)
    (200, 500)
    """
    return max(_MIN_MAX_PRODUCTS, n // _ROWS_PER_PRODUCT)


def choose_basis_columns(n: int, q: int) -> int:
    """Return the capacity of the basis in columns; the basis and one more block have at most n columns.

    >>> choose_basis_columns(4000, 20), choose_basis_columns(10**6, 200), choose_basis_columns(400, 20)
    (720, 1648, 352)
    """
    p = choose_block_columns(n, q)
    return min((n // p - 1) * p, 4 * q + max(_BASIS_COLUMNS, _BASIS_BLOCKS * p))


class _KrylovSpace:
    """An orthonormal basis of a Krylov space, and the projection of the matrix on it."""

    def __init__(self, n: int, capacity: int) -> None:
        self.basis = np.empty((n, capacity), order="F")
        self.projected = np.zeros((capacity, capacity))
        self.count = 0

    def resume(self, log: StepLog | None, start: Array, max_products: int) -> LanczosState:
        """Load the state of the log into this space, or start from the first block; return the state.

        A state of `max_products` or more products is ignored, because it is past the end of this iteration.
        """
        state = None if log is None else log.load(self.basis)
        if state is None or state.n_products >= max_products:
            state = self.make_state(np.linalg.qr(start)[0])
        self.count = len(state.projected)
        self.projected[: self.count, : self.count] = state.projected
        return state

    def run_block_step(self, block: Array, multiply: Multiply) -> tuple[Array, Array]:
        """Append a block to the basis; return Q and R, with ``Q R`` the part of its product orthogonal to the basis."""
        first, last = self.count, self.count + block.shape[1]
        self.basis[:, first:last] = block
        self.count = last
        remainder, projection = self._orthogonalize(multiply(block))
        block, triangle = _orthonormalize(remainder)
        block, correction = self._orthogonalize(block)
        projection += correction @ triangle
        block, second_triangle = _orthonormalize(block)
        self.projected[:last, first:last] = projection
        self.projected[first:last, :first] = projection[:first].T
        return block, second_triangle @ triangle

    def _orthogonalize(self, block: Array) -> tuple[Array, Array]:
        """Return the part of a block that is orthogonal to the basis, and the inner products of basis and block."""
        basis = self.basis[:, : self.count]
        products = basis.T @ block
        return block - basis @ products, products

    def compute_ritz_pairs(self) -> tuple[Array, Array]:
        """Return the Ritz values, ascending, and the coordinates of the Ritz vectors in the basis."""
        projected = self.projected[: self.count, : self.count]
        values, vectors = np.linalg.eigh((projected + projected.T) / 2)
        return values, vectors

    def make_state(
        self, block: Array, products: int = 0, next_test: int = _FIRST_TEST, lowest: float = np.inf
    ) -> LanczosState:
        """Return the state of the iteration."""
        basis, projected = self.basis[:, : self.count], self.projected[: self.count, : self.count]
        return LanczosState(basis, projected, block, products, next_test, lowest)

    def restart(self, values: Array, vectors: Array) -> None:
        """Replace the basis by some of the Ritz vectors."""
        kept = len(values)
        for rows in row_slices(len(self.basis), _RESTART_ROWS):  # in place, with a temporary array of a few rows
            self.basis[rows, :kept] = self.basis[rows, : self.count] @ vectors
        self.projected[:] = 0.0
        self.projected[:kept, :kept] = np.diag(values)
        self.count = kept


def _bring_squares_into_range(values: Array) -> tuple[Array, float]:
    """Return values divided by a power of two, and the power, which is 1 unless squares would overflow or underflow.

    >>> values, unit = _bring_squares_into_range(np.array([0.0, 3e-200]))
    >>> bool(1 <= values.max() < 2), float(values.max() * unit)
    (True, 3e-200)
    """
    largest = max(float(values.max()), -float(values.min()))
    if largest == 0 or _SMALLEST_SQUARED < largest < 1 / _SMALLEST_SQUARED or not np.isfinite(largest):
        return values, 1.0
    unit = 2.0 ** (frexp(largest)[1] - 1)
    return values / unit, unit


def _orthonormalize(block: Array) -> tuple[Array, Array]:
    """Return Q and R of a block (n, p) by Cholesky QR; Q is orthonormal up to eps times the squared condition."""
    block, unit = _bring_squares_into_range(block)
    gram = block.T @ block
    try:
        lower = np.linalg.cholesky(gram)
    except np.linalg.LinAlgError:
        lower = np.zeros_like(gram)
    diagonal = np.diagonal(lower)
    if diagonal.min() <= _MIN_DIAGONAL_RATIO * diagonal.max():
        Q, R = np.linalg.qr(block)
        return Q, unit * R
    return block @ np.linalg.inv(lower).T, unit * lower.T


def _choose_next_test(products: int, missing: float, total: float) -> int:
    """Return the number of products after which to test convergence again, from the rate of convergence so far.

    After `products` products, the residual is `missing` times its limit; before the first, it was about `total` times.

    >>> _choose_next_test(6, 1e8, 1e15), _choose_next_test(9, 1e6, 1e15), _choose_next_test(12, 2.0, 1e15)
    (9, 13, 13)
    """
    missing = max(missing, 1.0)
    left = products * np.log(missing) / np.log(max(total / missing, 1.1))
    return max(products + 1, int(min(products + _FORETOLD_SHARE * left, _TEST_GROWTH * products)))


def largest_eigenpairs(
    multiply: Multiply,
    start: Array,
    q: int,
    tol: float = 0.0,
    max_products: int = 1000,
    noise: float = 0.0,
    basis_columns: int | None = None,
    step_log: StepLog | None = None,
) -> EigenPairs:
    """Find the q largest eigenvalues of a symmetric matrix (n, n), and their eigenvectors.

    Parameters
    ----------
    multiply : callable
        Function that returns the product of the matrix and a block (n, p).
    start : ndarray of shape (n, p)
        First block, of full rank. All blocks have p columns, and p is less than n / 2.
    q : int
        Number of eigenpairs, at most p.
    tol : float
        Largest residual of a converged pair, as a share of its eigenvalue. Residuals of ``4 eps`` of the largest
        eigenvalue are always accepted.
    max_products : int
        Largest number of products; after them the current pairs are returned, converged or not.
    noise : float
        Rounding error of a product with a vector of length 1; residuals up to it are accepted.
    basis_columns : int, optional
        Capacity of the basis in columns, at least 2 (q + p); `choose_basis_columns` by default.
    step_log : StepLog, optional
        Log that keeps the state after each product; the iteration resumes from its state. By default nothing is kept.

    Notes
    -----
    Golub and Van Loan, "Matrix Computations", 10.3.6; Wu and Simon, "Thick-restart Lanczos method" (2000).
    """
    n, p = start.shape
    capacity = choose_basis_columns(n, q) if basis_columns is None else basis_columns
    space = _KrylovSpace(n, capacity)
    state = space.resume(step_log, start, max_products)
    block, next_test, lowest, logged = state.block, state.next_test, state.lowest, space.count
    done = state.n_products
    del state  # so that the block is freed when it is replaced
    for products in range(done + 1, max_products + 1):
        if step_log is not None and (products > done + 1 or not done):
            step_log.save(space.make_state(block, products - 1, next_test, lowest), logged)
            logged = space.count
        block, triangle = space.run_block_step(np.ascontiguousarray(block), multiply)
        full = space.count + p > capacity
        exhausted = np.abs(triangle).max() <= _EPS * np.abs(space.projected).max()  # the basis spans the range
        if products < min(next_test, max_products) and not full and not exhausted:
            continue
        values, vectors = space.compute_ritz_pairs()
        lowest = min(lowest, float(values[0]))
        # The next block is orthogonal to the basis, so the residuals A v - value v have these lengths.
        remainder, unit = _bring_squares_into_range(triangle @ vectors[space.count - p :])
        residuals = unit * np.linalg.norm(remainder, axis=0)
        best = slice(space.count - min(q, space.count), None)
        rounding = max(noise, _RESIDUAL_SHARE * max(abs(lowest), abs(float(values[-1])), _TINY))
        limits = np.maximum(tol * np.abs(values[best]), rounding)
        converged = space.count >= q and bool((residuals[best] <= limits).all())
        if converged or products == max_products:
            eigenvectors = space.basis[:, : space.count] @ vectors[:, best][:, ::-1]
            return EigenPairs(values[best][::-1], eigenvectors, residuals[best][::-1], lowest, products, converged)
        is_cheap = 10 * space.count**3 <= _TEST_SHARE * n * n * p
        next_test = products + 1
        if not is_cheap:
            next_test = _choose_next_test(products, float((residuals[best] / limits).max()), values[-1] / rounding)
        if full:
            kept = slice(space.count - max(q + p, capacity // 2), None)
            space.restart(values[kept], vectors[:, kept])
            logged = 0
    raise AssertionError("the last product returns")
