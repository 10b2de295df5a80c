"""Plan the fits that solve linear systems: discriminants and regressions, in memory or by a factor in tiles on disk."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.base import is_classifier

from dkfm.core import budget, cpus
from dkfm.core.chunking import count_tiles
from dkfm.estimators.fitting import discriminants
from dkfm.estimators.fitting.ridge import RidgeOptions
from dkfm.estimators.fitting.solver_choice import has_gram_memory, require_supported_solver
from dkfm.estimators.planning.gram_plans import (
    PlannedRows,
    plan_fit_with_gram,
    replace_model_bytes,
    resolve_gram_folder,
)
from dkfm.estimators.planning.plan_report import FitPlan
from dkfm.execution import memory
from dkfm.gram import build, matrix_free, product_costs
from dkfm.gram.linear_systems import iterative_solver, tile_store, tiled_inverse_factor, tiled_solves
from dkfm.kernels.base import Definiteness
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics.supervised import ridge, shrinkage

_TYPICAL_PRODUCTS = 30
"""Assumed number of products of conjugate gradients; only a fit determines it."""

_MIN_ALTERNATIVE_ROWS = 5000
"""Smallest number of rows for which a plan names alternatives; with fewer, none saves more than a second."""

_ROWS_PER_COLUMN = 50
"""Rows for each column, below which products take longer than a Cholesky factor."""

_MIN_PENALTY = 1e-3
"""Smallest penalty, relative to the mean k(x, x), for which a plan names conjugate gradients; smaller ones are slow."""

_SCALE_ROWS = 64
"""Rows of the sample whose mean k(x, x) a penalty is compared with."""

_CERTIFIED_PRODUCTS = 2000
"""Approximate number of products of a row of kernel values with weights in the certificate of a map."""

TYPICAL_CLASSES = 10
"""Assumed number of classes of a plan, which does not read labels."""


def plan_discriminants(estimator: Any, rows: PlannedRows) -> FitPlan:
    """Return the plan of discriminants."""
    options = estimator._discriminant_options()
    decomposes = discriminants.is_eigendecomposition_needed(options, rows.kernel)
    reason = discriminants.why_gram(options, rows.kernel)
    systems = _Systems(
        in_memory_reason=reason,
        by_eigenvalues=decomposes,
        columns=TYPICAL_CLASSES + 1,
        n_matrices=1,
        needs_inverse_diagonal=False,
        least_penalty=options.shrinkage or 0.0,
        is_penalty_relative=True,
    )
    plan = _plan_systems(estimator, rows, systems)
    choice_seconds = shrinkage.predict_choice_seconds(rows.n) if options.shrinkage is None else 0.0
    plan = replace(plan, seconds=plan.seconds + choice_seconds)
    # Columns: one discriminant less than classes, decision values of all classes, and the class of each row.
    return replace_model_bytes(plan, 2 * TYPICAL_CLASSES)


def plan_ridge(estimator: Any, rows: PlannedRows) -> FitPlan:
    """Return the plan of a regression on one target, or on as many as there are penalties; or of a classifier."""
    options = estimator._get_options(RidgeOptions)
    columns = 1 if isinstance(estimator.alpha, str) else int(np.size(estimator.alpha))
    penalties = options.resolve_penalties(columns)
    reason = 'alpha="loo" needs eigenvalues'
    if penalties is not None:
        reason = ridge.why_eigenvalues(penalties, np.ones(rows.n), options.on_indefinite)
    factors = 1 if penalties is None else len(np.unique(penalties))
    least = 0.0 if penalties is None else float(penalties.min())
    leaves_out, targets = bool(options.leave_one_out), TYPICAL_CLASSES if is_classifier(estimator) else columns
    systems = _Systems(
        in_memory_reason=reason,
        by_eigenvalues=bool(reason),
        columns=targets,
        n_matrices=factors,
        needs_inverse_diagonal=leaves_out,
        least_penalty=least,
        is_penalty_relative=False,
    )
    kept = 3 if leaves_out or penalties is None else 2  # weights, fitted values, and predictions of rows left out
    return replace_model_bytes(_plan_systems(estimator, rows, systems), kept * targets)


@dataclass(frozen=True)
class _Systems:
    """Linear systems of a fit."""

    in_memory_reason: str
    """Why the Gram matrix must be in memory; empty if it need not."""
    by_eigenvalues: bool
    """Whether an eigendecomposition solves them."""
    columns: int
    """Number of right sides."""
    n_matrices: int
    """Number of matrices, one for each penalty."""
    needs_inverse_diagonal: bool
    """Whether the diagonal of the inverse is needed."""
    least_penalty: float
    """Smallest penalty."""
    is_penalty_relative: bool
    """Whether penalties are shares of the mean k(x, x)."""


def _estimate_mean_diagonal(rows: PlannedRows) -> float:
    """Return the mean k(x, x) of a sample of the rows; 1 if only their number is known."""
    sample = rows.read_sample(_SCALE_ROWS)
    return 1.0 if sample is None else float(np.mean(sample.kernel.evaluate_diagonal(sample.indexable_rows)))


def _plan_systems(estimator: Any, rows: PlannedRows, systems: _Systems) -> FitPlan:
    by_eigenvalues = systems.by_eigenvalues
    reason = systems.in_memory_reason or ("a precomputed kernel has no rows" if rows.kernel.is_precomputed else "")
    require_supported_solver(estimator.solver, reason)
    has_memory = has_gram_memory(rows.n, rows.d, rows.kernel)
    if not reason and (estimator.solver in ("tiled", "cg") or (estimator.solver == "auto" and not has_memory)):
        return _plan_without_gram(estimator, rows, systems, estimator.solver)
    if by_eigenvalues:
        memory.require_lapack_order(rows.n, "KernelFisher" if systems.is_penalty_relative else "KernelRidge")
    factors = systems.n_matrices * (1 + systems.needs_inverse_diagonal)
    squares = budget.EIGENVECTOR_SQUARES if by_eigenvalues else 1
    seconds = budget.eigendecomposition_seconds(rows.n) if by_eigenvalues else factors * budget.cholesky_seconds(rows.n)
    what = "all eigenvectors" if by_eigenvalues else "a Cholesky factor"
    peak = 0 if by_eigenvalues else rows.estimate_fit_bytes(budget.EIGENVECTOR_SQUARES)
    peak = peak if peak <= memory.clear_caches_and_measure_memory() else 0
    plan = plan_fit_with_gram(estimator, rows, what, squares, seconds, peak=peak)
    if reason or estimator.solver != "auto" or not _may_save_time_by_products(rows, systems):
        return plan
    other = _plan_without_gram(estimator, rows, systems, "cg")
    other = replace(other, method=f'with solver="cg", {other.method}')
    saves = other.seconds < plan.seconds and other.memory_bytes < plan.memory_bytes
    return replace(plan, alternatives=(other,)) if saves else plan


def _may_save_time_by_products(rows: PlannedRows, systems: _Systems) -> bool:
    """Return whether conjugate gradients may take less time than a factor in memory; call no user functions."""
    is_wide = rows.d * _ROWS_PER_COLUMN > rows.n
    is_known = rows.kernel.definiteness is Definiteness.PSD and is_code_free(rows.kernel)
    if rows.n < _MIN_ALTERNATIVE_ROWS or is_wide or systems.needs_inverse_diagonal or not is_known:
        return False
    scale = 1.0 if systems.is_penalty_relative else _estimate_mean_diagonal(rows)
    return systems.least_penalty >= _MIN_PENALTY * scale


@dataclass(frozen=True)
class _FactorPlan:
    """Predicted cost of a factor in tiles on disk."""

    tile_rows: int
    task_bytes: int
    disk_bytes: int
    seconds: float


def _plan_factor(estimator: Any, rows: PlannedRows) -> _FactorPlan:
    n, kernel = rows.n, rows.kernel
    tile_rows = min(n, build.checked_tile_rows(estimator.tile_rows))
    each = budget.factor_task_bytes(tile_rows, rows.d, kernel.peak_blocks, kernel.landmark_copies)
    tiles = tile_store.count_lower_tiles(count_tiles(n, tile_rows))
    seconds = product_costs.factor_seconds(n, rows.threads, product_costs.value_seconds(kernel, rows.d))
    seconds += tiles * budget.FILE_SECONDS / rows.threads
    return _FactorPlan(tile_rows, each, tile_store.disk_bytes(n, tile_rows), seconds)


def plan_tiled_map(estimator: Any, rows: PlannedRows) -> FitPlan:
    """Return the plan of a map of all rows whose weights stay on disk: a factor in tiles, and its triangular root."""
    tiled_inverse_factor.require_supported_kernel(rows.kernel)
    n, d, kernel, factor = rows.n, rows.d, rows.kernel, _plan_factor(estimator, rows)
    each = max(factor.task_bytes, tiled_inverse_factor.task_bytes(n, factor.tile_rows))
    tasks = tiled_inverse_factor.residual_bytes(factor.tile_rows) if rows.is_cluster else rows.threads * each
    need = budget.tiled_map_bytes(n, d, tasks, kernel.peak_blocks, kernel.landmark_copies)
    chunks = count_tiles(n, tiled_inverse_factor.choose_chunk_and_task_columns(n)[0])
    root_seconds = tiled_inverse_factor.root_seconds(n, rows.threads) + chunks * budget.FILE_SECONDS / rows.threads
    product_seconds = _CERTIFIED_PRODUCTS * budget.PRODUCT_SECONDS / cpus.COUNT
    certificate = n * n * (product_costs.value_seconds(kernel, d) + product_seconds)
    return FitPlan(
        rows=n,
        columns=d,
        landmarks=n,
        method="a Cholesky factor in tiles on disk, and weights that stay there",
        memory_bytes=need,
        available_bytes=memory.clear_caches_and_measure_memory(),
        peak_bytes=need,
        disk_bytes=factor.disk_bytes + tiled_inverse_factor.disk_bytes(n) + 8 * n * (d + 1) * rows.is_cluster,
        place=resolve_gram_folder(estimator),
        task_bytes=each if rows.is_cluster else 0,
        model_bytes=8 * n * (d + n),
        seconds=factor.seconds + root_seconds + certificate,
    )


def _plan_without_gram(estimator: Any, rows: PlannedRows, systems: _Systems, solver: str) -> FitPlan:
    """Return the plan of systems without a Gram matrix in memory; for "auto", that of the slower method."""
    n, d, kernel, columns = rows.n, rows.d, rows.kernel, systems.columns
    product = iterative_solver.product_seconds(kernel, n, d, columns, rows.threads)
    seconds = 2 * n * n * product_costs.value_seconds(kernel, d) / cpus.COUNT  # the certificate
    tried = iterative_solver.count_affordable_products(kernel, n, d, columns, rows.threads)
    ways, disk, each = [], 0, 0
    if solver != "tiled" and not systems.needs_inverse_diagonal:
        ways.append("conjugate gradients")
        seconds += iterative_solver.preconditioner_seconds(kernel, n, d)
        products = _TYPICAL_PRODUCTS if solver == "cg" else min(tried, _TYPICAL_PRODUCTS)
        seconds += systems.n_matrices * product * products
    if solver != "cg":
        factor = _plan_factor(estimator, rows)
        ways.append("a Cholesky factor in tiles on disk")
        each = factor.task_bytes
        seconds += systems.n_matrices * (factor.seconds + 2 * product)
        kept = systems.n_matrices if estimator.workspace is not None else 1
        disk = kept * factor.disk_bytes + 8 * n * (d + 1) * rows.is_cluster
        if systems.needs_inverse_diagonal:
            seconds += systems.n_matrices * product_costs.factor_seconds(n, rows.threads)
            columns_of_inverse = min(factor.tile_rows, tiled_solves.PANEL_COLUMNS)
            each = max(each, budget.inverse_task_bytes(n, factor.tile_rows, columns_of_inverse))
    piece = matrix_free.choose_tile_rows(n, d, columns)
    each = max(each, budget.matrix_free_task_bytes(piece, d, columns, kernel.peak_blocks, kernel.landmark_copies))
    tasks = 0 if rows.is_cluster else rows.threads * each
    need = budget.tiled_system_bytes(n, d, columns, tasks, kernel.peak_blocks, kernel.landmark_copies)
    if "conjugate gradients" in ways:
        need += iterative_solver.preconditioner_bytes(n)
    enough = f", if some {_TYPICAL_PRODUCTS} products are enough (a small penalty takes many more)"
    return FitPlan(
        rows=n,
        columns=d,
        landmarks=n,
        method=f"systems by {', or '.join(ways)}{enough if solver == 'cg' else ''}",
        memory_bytes=need,
        available_bytes=memory.clear_caches_and_measure_memory(),
        peak_bytes=need,
        disk_bytes=disk,
        place=resolve_gram_folder(estimator) if disk else "",
        task_bytes=each if rows.is_cluster else 0,
        model_bytes=8 * n * (d + n),
        seconds=seconds,
    )
