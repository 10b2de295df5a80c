"""Solve ``(S K S + alpha) c = b`` without a Gram matrix in memory, by the method that is predicted to be faster."""

from functools import cached_property

from dkfm.core import budget
from dkfm.core.rows import Array, Rows, estimate_float64s_per_row
from dkfm.errors import ConvergenceError
from dkfm.execution import memory
from dkfm.execution.executors import open_executor
from dkfm.execution.stage_log import log_stage
from dkfm.gram.linear_systems import iterative_solver, tiled_direct_solver
from dkfm.gram.linear_systems.iterative_solver import IterativeSolver
from dkfm.gram.linear_systems.tiled_direct_solver import SystemOptions, SystemSolution
from dkfm.kernels.base import Kernel

_MAX_PRODUCTS = 1000
"""Largest number of products of conjugate gradients if the user asked for this method."""

_MIN_PRODUCTS = 16
"""If fewer products fit into the time of a factor, conjugate gradients are not tried."""


class SystemSolver:
    """Linear systems of a kernel, rows and weights.

    Parameters
    ----------
    kernel : Kernel
        Kernel with all parameters resolved.
    X : ndarray or csr_array of shape (N, d)
        Training rows.
    weights : ndarray of shape (N,)
        Weights of the rows.
    method : {"auto", "tiled", "cg"}
        "tiled" is a factor in tiles on disk, "cg" is conjugate gradients. "auto" tries "cg", and falls back to "tiled"
        when "cg" would take longer.
    options : SystemOptions
        How the systems are solved.
    """

    def __init__(self, kernel: Kernel, X: Rows, weights: Array, method: str, options: SystemOptions) -> None:
        self._kernel, self._rows, self._weights = kernel, X, weights
        self._method, self._options = method, options

    def solve(self, alpha: float, right: Array, *, inverse_diagonal: bool = False) -> SystemSolution:
        """Solve systems with right sides (N, q); with `inverse_diagonal`, also compute the diagonal of the inverse.

        Raises
        ------
        NotPSDError
            The factor breaks down: the matrix is not positive definite.
        ConvergenceError
            Conjugate gradients, if requested, do not reach the tolerance.
        BudgetError
            A tile does not fit in memory, or the factor does not fit on the disk.
        """
        products = 0 if inverse_diagonal else self._choose_max_products(right.shape[1])
        if products:
            found, converged = self._iterative.solve(alpha, right, self._options.tol, products)
            if converged:
                return found
            worst = float(found.residuals.max())
            if self._method == "cg":
                raise ConvergenceError(
                    f"With alpha = {alpha:.3g} conjugate gradients stopped at a residual of {worst:.1e}, above tol = "
                    f'{self._options.tol:.0e}; use solver="tiled", a larger alpha, or a larger tol.'
                )
            log_stage("solve", f"a factor is faster than more products: the residual is {worst:.1e}", rows=len(right))
        return tiled_direct_solver.solve_system(
            self._kernel,
            self._rows,
            alpha,
            self._weights,
            right,
            self._options,
            inverse_diagonal=inverse_diagonal,
        )

    def _choose_max_products(self, columns: int) -> int:
        """Return the largest number of products of conjugate gradients; 0 if they are not tried."""
        if self._method != "auto":
            return _MAX_PRODUCTS if self._method == "cg" else 0
        n, d = self._rows.shape[0], estimate_float64s_per_row(self._rows)
        if iterative_solver.preconditioner_bytes(n) > memory.clear_caches_and_measure_memory():
            return 0
        with open_executor(None) as executor:
            products = iterative_solver.count_affordable_products(self._kernel, n, d, columns, executor.threads)
        return products if products >= _MIN_PRODUCTS else 0

    @cached_property
    def _iterative(self) -> IterativeSolver:
        n = self._rows.shape[0]
        need, have = iterative_solver.preconditioner_bytes(n), memory.clear_caches_and_measure_memory()
        budget.require_fits(need, have, f"The preconditioner of N = {n} training rows", 'use solver="tiled"')
        return IterativeSolver(self._kernel, self._rows, self._weights, self._options)
