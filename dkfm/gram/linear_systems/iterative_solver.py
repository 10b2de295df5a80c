"""Solve ``(S K S + alpha) c = b`` by conjugate gradients with matrix-free products, preconditioned by pivots.

The features F of all rows from r pivots make ``P = S F F' S + alpha``, whose inverse takes N r operations. The matrix
times that inverse has eigenvalues from 1 to ``1 + |S (K - F F') S| / alpha``: few products are needed where alpha is
not much smaller than what the pivots leave. Frangella, Tropp and Udell, "Randomized Nyström preconditioning" (2023).
"""

from collections.abc import Callable

import numpy as np
from scipy.linalg import qr

from dkfm.core import budget, chunking
from dkfm.core.rows import Array, Rows
from dkfm.execution.stage_log import log_stage
from dkfm.gram import roads
from dkfm.gram.linear_systems.direct_solver import SystemOptions, SystemSolution
from dkfm.gram.matrix_free import open_matrix_free
from dkfm.gram.training_data import TrainingRows
from dkfm.kernels.base import Kernel
from dkfm.numerics import pivoted_cholesky
from dkfm.numerics.conjugate_gradients import GradientSolution, solve_by_conjugate_gradients

_MAX_PIVOTS = 1024
_FACTOR_VALUES = 2**26
"""Largest number of values of the features of all rows: half a gigabyte."""

_MIN_PIVOTS = 64
_PIECE_ROWS = 2048
_SHARED_SECONDS = 1.25
"""Factor by which products take longer than their values and multiplications alone."""

Precondition = Callable[[Array], Array]


def count_pivots(n: int) -> int:
    """Return the largest number of pivots of the preconditioner of N rows.

    >>> [count_pivots(n) for n in (1000, 40_000, 10**6)]
    [125, 1024, 67]
    """
    return max(1, min(n // 8, _MAX_PIVOTS, max(_MIN_PIVOTS, _FACTOR_VALUES // n)))


def count_products(kernel: Kernel, n: int, d: int, columns: int, threads: int) -> int:
    """Return the number of products with some columns that, with the pivots, take as long as a factor in tiles."""
    spare = budget.factor_seconds(n, threads) - preconditioner_seconds(n, d)
    return max(0, int(spare / product_seconds(kernel, n, d, columns, threads)))


def product_seconds(kernel: Kernel, n: int, d: int, columns: int, threads: int) -> float:
    """Predict the seconds of a product with some columns."""
    value = roads.value_seconds(kernel, d) + 2 * columns * budget.PRODUCT_SECONDS
    return _SHARED_SECONDS * n * n / 2 * value / threads


def preconditioner_seconds(n: int, d: int) -> float:
    """Predict the seconds to find the pivots, and the singular vectors of the features of all rows."""
    r = count_pivots(n)
    return budget.pivot_columns_seconds(n, d, r) + 4 * n * r * r * budget.PRODUCT_SECONDS


def preconditioner_bytes(n: int) -> int:
    """Return the bytes of the features of all rows, which are decomposed in place."""
    r = count_pivots(n)
    return 8 * (n * (r + 16) + max(_PIECE_ROWS * 5 * r // 2, 6 * r * r))


class IterativeSolver:
    """Systems of a kernel, rows and weights, for any alpha; pivots are found once.

    Parameters
    ----------
    kernel : Kernel
        Kernel with all parameters resolved.
    X : ndarray or csr_array of shape (N, d)
        Training rows.
    weights : ndarray of shape (N,)
        Weights of the rows.
    options : SystemOptions
        How the products are computed.
    """

    def __init__(self, kernel: Kernel, X: Rows, weights: Array, options: SystemOptions) -> None:
        self._kernel, self._rows, self._options = kernel, X, options
        self._roots = np.sqrt(weights)[:, np.newaxis]
        self._vectors, self._squares = _decompose_features(kernel, X, self._roots)

    def solve(self, alpha: float, right: Array, tol: float, max_products: int) -> tuple[SystemSolution, bool]:
        """Solve systems with right sides (N, q); return the solution, and whether its residuals are at most `tol`."""
        roots, options, columns = self._roots, self._options, right.shape[1]
        with open_matrix_free(
            self._kernel, self._rows, columns, workspace=options.workspace, progress=options.progress
        ) as gram:
            found = solve_by_conjugate_gradients(
                lambda V: roots * (gram @ (roots * V)) + alpha * V,
                self._make_preconditioner(alpha),
                right,
                tol,
                max_products,
            )
        _log(found, len(right))
        return SystemSolution(found.values, found.residuals, None), found.converged

    def _make_preconditioner(self, alpha: float) -> Precondition:
        """Return the function that multiplies by alpha times the inverse of ``S F F' S + alpha``."""
        vectors, shares = self._vectors, (self._squares / (self._squares + alpha))[:, np.newaxis]

        def precondition(V: Array) -> Array:
            reduced: Array = V - vectors @ (shares * (vectors.T @ V))
            return reduced

        return precondition


def _decompose_features(kernel: Kernel, X: Rows, roots: Array) -> tuple[Array, Array]:
    """Return the left singular vectors (N, r) and squared singular values (r,) of the weighted features of all rows."""
    rows = TrainingRows(kernel, X, 0)
    rng = np.random.RandomState(0)

    def choose(residuals: Array) -> int:
        shares = np.maximum(residuals, 0.0)
        return int(rng.choice(len(shares), p=shares / shares.sum()))

    limit = count_pivots(X.shape[0])
    log_stage("root", f"up to {limit:,} pivots of {X.shape[0]:,} rows for conjugate gradients", rows=X.shape[0])
    pivots = pivoted_cholesky.factor_columns(rows.diagonal(), rows.make_column_evaluator(), None, limit, choose)
    if pivots is None:
        raise AssertionError("nothing stops the search for pivots")
    shape = X.shape[0], len(pivots.row_indices)
    evaluate, features = kernel.make_evaluator(X[pivots.row_indices]), np.empty(shape, order="F")
    for piece in chunking.row_slices(X.shape[0], _PIECE_ROWS):
        features[piece] = roots[piece] * (evaluate(X[piece]) @ pivots.root.weights)
    Q, R = qr(features, mode="economic", overwrite_a=True, check_finite=False)
    left, values, _ = np.linalg.svd(R)
    for piece in chunking.row_slices(X.shape[0], _PIECE_ROWS):
        Q[piece] = Q[piece] @ left
    return Q, np.square(values)


def _log(found: GradientSolution, n: int) -> None:
    worst = float(found.residuals.max(initial=0.0))
    text = f"{found.products} products of conjugate gradients, residual {worst:.1e} of the right side"
    log_stage("solve", text, rows=n, products=found.products, residual=worst)
