"""Plan the fits that solve linear systems: discriminants and regressions, in memory or by a factor in tiles on disk."""

from typing import Any

import numpy as np

from dkfm.core import budget, cpus
from dkfm.core.chunking import count_tiles
from dkfm.estimators.fitting import discriminants
from dkfm.estimators.fitting.ridge import RidgeOptions
from dkfm.estimators.fitting.solvers import has_gram_memory
from dkfm.estimators.planning.gram_plans import PlannedRows, name_place, plan_gram, shrink_model
from dkfm.estimators.planning.plan_report import FitPlan
from dkfm.execution import memory
from dkfm.gram import build, matrix_free, roads
from dkfm.gram.linear_systems import iterative_solver, tile_store
from dkfm.numerics.supervised import ridge

_TYPICAL_PRODUCTS = 30
"""Number of products of conjugate gradients, which only a fit finds."""

_TYPICAL_CLASSES = 10
"""Number of classes of a plan, which does not look at labels."""


def plan_discriminants(estimator: Any, rows: PlannedRows) -> FitPlan:
    """Return the plan of discriminants."""
    decomposes = discriminants.decomposes_gram(estimator._discriminant_options(), rows.kernel)
    plan = _plan_systems(estimator, rows, decomposes, _TYPICAL_CLASSES + 1, 1)
    return shrink_model(plan, estimator.n_components or _TYPICAL_CLASSES)


def plan_ridge(estimator: Any, rows: PlannedRows) -> FitPlan:
    """Return the plan of a regression on one target, or on as many as there are penalties."""
    options = estimator._get_options(RidgeOptions)
    columns = 1 if isinstance(estimator.alpha, str) else int(np.size(estimator.alpha))
    penalties = options.penalties(columns)
    by_eigenvalues = penalties is None or ridge.needs_eigenvalues(penalties, np.ones(rows.n), options.on_indefinite)
    factors = (1 if penalties is None else len(np.unique(penalties))) * (1 + bool(options.leave_one_out))
    return shrink_model(_plan_systems(estimator, rows, by_eigenvalues, columns, factors), columns)


def _plan_systems(estimator: Any, rows: PlannedRows, by_eigenvalues: bool, columns: int, factors: int) -> FitPlan:
    """Return the plan of systems with some right sides, and of that many factors or inverses of factors."""
    serves = not by_eigenvalues and not rows.kernel.is_precomputed
    has_memory = has_gram_memory(rows.n, rows.d, rows.kernel)
    if serves and (estimator.solver in ("tiled", "cg") or (estimator.solver == "auto" and not has_memory)):
        return _plan_without_gram(estimator, rows, columns, factors)
    squares = budget.EIGENVECTOR_SQUARES if by_eigenvalues else 1
    seconds = budget.eigendecomposition_seconds(rows.n) if by_eigenvalues else factors * budget.cholesky_seconds(rows.n)
    what = "all eigenvectors" if by_eigenvalues else "a Cholesky factor"
    peak = 0 if by_eigenvalues else rows.fit_bytes(budget.EIGENVECTOR_SQUARES)
    return plan_gram(estimator, rows, what, squares, seconds, peak=peak if peak <= memory.available_memory() else 0)


def _plan_without_gram(estimator: Any, rows: PlannedRows, columns: int, factors: int) -> FitPlan:
    """Return the plan of systems without a Gram matrix in memory; of "auto", that of the slower way."""
    n, d, kernel, place = rows.n, rows.d, rows.kernel, name_place(estimator)
    product = iterative_solver.product_seconds(kernel, n, d, columns, rows.threads)
    other = 2 * n * n * roads.value_seconds(kernel, d) / cpus.COUNT  # the certificate
    tried = max(0, iterative_solver.count_products(kernel, n, d, columns, rows.threads))
    roads_taken, seconds, disk, each = [], other, 0, 0
    if estimator.solver != "tiled" and not getattr(estimator, "leave_one_out", False):
        roads_taken.append("conjugate gradients")
        seconds += iterative_solver.preconditioner_seconds(n, d)
        seconds += product * (_TYPICAL_PRODUCTS if estimator.solver == "cg" else min(tried, _TYPICAL_PRODUCTS))
    if estimator.solver != "cg":
        tile_rows = min(n, build.checked_tile_rows(estimator.tile_rows))
        roads_taken.append("a Cholesky factor in tiles on disk")
        each = budget.factor_task_bytes(tile_rows, d, kernel.peak_blocks, kernel.landmark_copies)
        tiles = tile_store.count_lower_tiles(count_tiles(n, tile_rows))
        seconds += factors * (budget.factor_seconds(n, rows.threads) + tiles * budget.CHUNK_SECONDS / rows.threads)
        seconds += 2 * product
        disk = tile_store.disk_bytes(n, tile_rows) + 8 * n * (d + 1) * rows.is_cluster
    piece = matrix_free.choose_tile_rows(n, d, columns)
    each = max(each, budget.product_task_bytes(piece, d, columns, kernel.peak_blocks, kernel.landmark_copies))
    need = budget.tiled_system_bytes(n, d, columns, 0 if rows.is_cluster else rows.threads * each)
    if "conjugate gradients" in roads_taken:
        need += iterative_solver.preconditioner_bytes(n)
    return FitPlan(
        rows=n,
        columns=d,
        landmarks=n,
        road=f"systems by {', or '.join(roads_taken)}",
        memory_bytes=need,
        have_bytes=memory.available_memory(),
        peak_bytes=need,
        disk_bytes=disk,
        place=place if disk else "",
        task_bytes=each if rows.is_cluster else 0,
        model_bytes=8 * n * (d + n),
        seconds=seconds,
    )
