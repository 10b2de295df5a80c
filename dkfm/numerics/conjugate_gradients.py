"""Solve symmetric positive definite systems by preconditioned conjugate gradients, several right sides at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dkfm.core.rows import Array

_MIN_SHARE = 0.25
"""Share of the largest number of products after which the rate of convergence predicts how many more are needed.

Before, residuals may stagnate or grow.
"""

_MAX_RESTARTS = 3
"""Largest number of restarts from a recomputed residual that differs from the residual of the recurrence."""


@dataclass(frozen=True, eq=False)
class GradientSolution:
    """Approximate solution of systems with a matrix A (N, N)."""

    values: Array
    """Approximations of ``A^(-1) b``. Shape (N, q)."""
    relative_residuals: Array
    """``|A x - b| / |b|`` of each right side, computed from the solution; 0 if b is 0. Shape (q,)."""
    n_products: int
    """Number of products with A."""
    converged: bool
    """Whether all residuals are at most the tolerance."""


def solve_by_conjugate_gradients(
    multiply: Callable[[Array], Array],
    precondition: Callable[[Array], Array],
    right: Array,
    tol: float,
    max_products: int,
    report: Callable[[float], None] = lambda residual: None,
) -> GradientSolution:
    """Solve ``A x = b`` for right sides b (N, q); each has its own recurrence, and they share the products.

    Parameters
    ----------
    multiply : callable
        Function of V (N, q) that returns ``A V``.
    precondition : callable
        Function of V (N, q) that returns ``M V``, with M an approximation of a multiple of ``A^(-1)``.
    right : ndarray of shape (N, q)
        Right sides.
    tol : float
        Largest residual, relative to the right side.
    max_products : int
        Largest number of products. After a quarter of them, the method stops as soon as its rate of convergence
        predicts that it needs more.
    report : callable
        Called after each product of the recurrence with its largest residual, relative to the right side.

    Notes
    -----
    Hestenes and Stiefel (1952). By rounding, the residual of the recurrence drifts from the true residual ``b - A x``.
    Therefore the true residual is computed when the recurrence ends, and decides on convergence. The method restarts
    from it as long as a restart halves it.
    """
    sizes = np.linalg.norm(right, axis=0)
    values, rest, products = np.zeros(right.shape), right.astype(np.float64), 0
    residuals = _divide(np.linalg.norm(rest, axis=0), sizes)
    for _ in range(_MAX_RESTARTS + 1):
        if residuals.max(initial=0.0) <= tol or products >= max_products:
            break
        step, used = _run_recurrence(multiply, precondition, rest, sizes, tol, max_products - products - 1, report)
        values += step
        rest = right - multiply(values)
        products += used + 1
        found = _divide(np.linalg.norm(rest, axis=0), sizes)
        is_slow = not found.max() < residuals.max() / 2
        residuals = found
        if is_slow:
            break
    return GradientSolution(values, residuals, products, bool(residuals.max(initial=0.0) <= tol))


def _run_recurrence(
    multiply: Callable[[Array], Array],
    precondition: Callable[[Array], Array],
    right: Array,
    sizes: Array,
    tol: float,
    limit: int,
    report: Callable[[float], None],
) -> tuple[Array, int]:
    """Run the recurrence; return its solution and the number of products."""
    values, rest = np.zeros(right.shape), right.copy()
    step = precondition(rest)
    directions, slopes = step.copy(), np.einsum("ij,ij->j", rest, step)
    first, used = float(_divide(np.linalg.norm(rest, axis=0), sizes).max()), 0
    while used < limit:
        product = multiply(directions)
        used += 1
        lengths = _divide(slopes, np.einsum("ij,ij->j", directions, product))
        values += lengths * directions
        rest -= lengths * product
        worst = float(_divide(np.linalg.norm(rest, axis=0), sizes).max())
        report(worst)
        if not worst > tol or (used >= _MIN_SHARE * limit and used + _forecast(first, worst, tol, used) > limit):
            break
        step = precondition(rest)
        following = np.einsum("ij,ij->j", rest, step)
        directions *= _divide(following, slopes)
        directions += step
        slopes = following
    return values, used


def _forecast(first: float, worst: float, tol: float, used: int) -> float:
    """Predict how many more products reach the tolerance, at the rate of convergence so far."""
    gained = np.log(first / worst) if worst > 0 else np.inf
    return float(np.log(worst / tol) * used / gained) if gained > 0 else np.inf


def _divide(numerators: Array, denominators: Array) -> Array:
    """Return quotients; 0 where the denominator is not positive, as for a right side that is solved exactly."""
    quotients: Array = np.divide(numerators, denominators, out=np.zeros_like(numerators), where=denominators > 0)
    return quotients
