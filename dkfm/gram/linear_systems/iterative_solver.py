"""Solve ``(S K S + alpha) c = b`` by conjugate gradients with matrix-free products, preconditioned by pivots.

The preconditioner is ``P = S F F' S + alpha``, with F the features of all rows from r pivots. Its inverse is applied in
N r operations. The preconditioned matrix has eigenvalues from 1 to ``1 + |S (K - F F') S| / alpha``, so few products
are needed if alpha is not much smaller than the residual of the pivots. Frangella, Tropp and Udell, "Randomized Nyström
preconditioning" (2023).
"""

from collections.abc import Callable

import numpy as np
from scipy.linalg import qr

from dkfm.core import budget, chunking
from dkfm.core.rows import Array, Rows, estimate_float64s_per_row
from dkfm.execution import progress
from dkfm.execution.executors import open_executor
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.gram import product_costs
from dkfm.gram.linear_systems.tiled_direct_solver import SystemOptions, SystemSolution
from dkfm.gram.matrix_free import open_matrix_free
from dkfm.gram.shared_arrays import open_shared_arrays
from dkfm.gram.streamed_pivots import PivotSearch, find_streamed_pivots
from dkfm.kernels.base import Kernel
from dkfm.numerics.conjugate_gradients import GradientSolution, solve_by_conjugate_gradients
from dkfm.numerics.pivoted_cholesky import Pivots, pivot_threshold

_MAX_PIVOTS = 1024
_FACTOR_VALUES = 2**26
"""Largest number of values of the features of all rows: half a gigabyte."""

_MIN_PIVOTS = 64
_PIECE_ROWS = 2048
_OTHER_BYTES = 2**25
"""Memory of BLAS and of threads besides arrays, in bytes."""

Precondition = Callable[[Array], Array]


def count_pivots(n: int) -> int:
    """Return the largest number of pivots of the preconditioner of N rows.

    >>> [count_pivots(n) for n in (1000, 40_000, 10**6)]
    [125, 1024, 67]
    """
    return max(1, min(n // 8, _MAX_PIVOTS, max(_MIN_PIVOTS, _FACTOR_VALUES // n)))


def count_affordable_products(kernel: Kernel, n: int, d: int, columns: int, threads: int) -> int:
    """Return the number of products that, together with finding the pivots, take as long as a tiled factor."""
    factor_seconds = product_costs.factor_seconds(n, threads, product_costs.value_seconds(kernel, d))
    spare = factor_seconds - preconditioner_seconds(kernel, n, d)
    return max(0, int(spare / product_seconds(kernel, n, d, columns, threads)))


def product_seconds(kernel: Kernel, n: int, d: int, columns: int, threads: int) -> float:
    """Predict the seconds of a product with some columns."""
    value = product_costs.value_seconds(kernel, d) + 2 * columns * budget.PRODUCT_SECONDS
    return product_costs.SHARED_SECONDS * n * n / 2 * value / threads


def preconditioner_seconds(kernel: Kernel, n: int, d: int) -> float:
    """Predict the seconds to find the pivots, and the singular vectors of the features of all rows."""
    r = count_pivots(n)
    return 0.5 + n * r * (2 * product_costs.value_seconds(kernel, d) + 6 * r * budget.PRODUCT_SECONDS)


def preconditioner_bytes(n: int) -> int:
    """Return the bytes of the features of all rows, which are decomposed in place."""
    r = count_pivots(n)
    candidates = budget.ROUND_CANDIDATES * (3 * budget.ROUND_CANDIDATES + 2 * r)
    return 8 * (max(n * (r + 16) + max(_PIECE_ROWS * 5 * r // 2, 6 * r * r), candidates + 4 * r * r)) + _OTHER_BYTES


class IterativeSolver:
    """Linear systems of a kernel, rows and weights, for any alpha; the pivots are found only once.

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
        self._vectors, self._squares = _decompose_features(kernel, X, self._roots, options)

    def solve(self, alpha: float, right: Array, tol: float, max_products: int) -> tuple[SystemSolution, bool]:
        """Solve systems with right sides (N, q); return the solution, and whether its residuals are at most `tol`."""
        roots, options, columns = self._roots, self._options, right.shape[1]
        with (
            open_matrix_free(self._kernel, self._rows, columns, workspace=options.workspace) as gram,
            progress.step_bar("dkfm-solve", None, "product", options.progress) as bar,
        ):

            def multiply(V: Array) -> Array:
                bar.update()
                return roots * (gram @ (roots * V)) + alpha * V

            found = solve_by_conjugate_gradients(
                multiply,
                self._make_preconditioner(alpha),
                right,
                tol,
                max_products,
                lambda residual: bar.set_postfix_str(f"residual {residual:.1e} of {tol:.1e}", refresh=False),
            )
        _log(found, len(right))
        return SystemSolution(found.values, found.relative_residuals, None), found.converged

    def _make_preconditioner(self, alpha: float) -> Precondition:
        """Return the function that multiplies by alpha times the inverse of ``S F F' S + alpha``."""
        vectors, shares = self._vectors, (self._squares / (self._squares + alpha))[:, np.newaxis]

        def precondition(V: Array) -> Array:
            reduced: Array = V - vectors @ (shares * (vectors.T @ V))
            return reduced

        return precondition


def _decompose_features(kernel: Kernel, X: Rows, roots: Array, options: SystemOptions) -> tuple[Array, Array]:
    """Return the left singular vectors (N, r) and squared singular values (r,) of the weighted features of all rows."""
    n, pivots = X.shape[0], _find_pivots(kernel, X, options)
    r = len(pivots.row_indices)
    log_stage("root", f"{n:,} x {r:,} features of these pivots, decomposed in this process", rows=n)
    evaluate, features = kernel.make_evaluator(X[pivots.row_indices]), np.empty((n, r), order="F")
    for piece in chunking.row_slices(n, _PIECE_ROWS):
        features[piece] = roots[piece] * (evaluate(X[piece]) @ pivots.root.weights)
    Q, R = qr(features, mode="economic", overwrite_a=True, check_finite=False)
    left, values, _ = np.linalg.svd(R)
    for piece in chunking.row_slices(n, _PIECE_ROWS):
        Q[piece] = Q[piece] @ left
    return Q, np.square(values)


def _find_pivots(kernel: Kernel, X: Rows, options: SystemOptions) -> Pivots:
    """Find random pivots in rounds, on the current Dask client or on threads of this process."""
    n, d, limit = X.shape[0], estimate_float64s_per_row(X), count_pivots(X.shape[0])
    each = budget.pivot_task_bytes(d, limit, kernel.peak_blocks, kernel.landmark_copies)
    with (
        open_executor(None) as executor,
        open_shared_arrays(executor, each, 8 * n * d, "The training rows", options.workspace) as shared,
        shared.share(X) as rows,
    ):
        text = f"up to {limit:,} pivots of {n:,} rows for conjugate gradients, on {describe_place(executor)}"
        log_stage("root", text, seconds=preconditioner_seconds(kernel, n, d), rows=n)
        search = PivotSearch(pivot_threshold(None), limit, True, np.random.RandomState(0), options.progress)
        return find_streamed_pivots(kernel, rows, search, executor, shared)


def _log(found: GradientSolution, n: int) -> None:
    worst = float(found.relative_residuals.max(initial=0.0))
    text = f"{found.n_products} products of conjugate gradients, residual {worst:.1e} of the right side"
    log_stage("solve", text, rows=n, products=found.n_products, residual=worst)
