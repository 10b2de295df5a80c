"""Plan fits in the features of a fitted map: one pass over the rows, then a problem as large as the rank."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dkfm.core import budget, cpus
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.estimators.fitting import pca
from dkfm.estimators.fitting.feature_maps import FittedMap
from dkfm.estimators.fitting.out_of_core_rows import count_moment_columns, estimate_moment_bytes
from dkfm.estimators.fitting.ridge import RidgeOptions
from dkfm.estimators.planning.gram_plans import PlannedRows, resolve_gram_folder
from dkfm.estimators.planning.linear_system_plans import TYPICAL_CLASSES
from dkfm.estimators.planning.plan_report import FitPlan
from dkfm.execution import memory
from dkfm.numerics.eigensolvers import lanczos
from dkfm.numerics.model import predict_row_seconds

_VALUES_PER_LABEL = 6
"""Values for each row that this process holds of labels: codes, weights, and what finds the classes."""


def plan_fit_in_map(name: str, estimator: Any, feature_map: FittedMap, rows: PlannedRows) -> FitPlan:
    """Return the plan of `from_map` for some rows; `name` is that of the estimator's class in dkfm.

    Raises
    ------
    InvalidInputError
        The estimator has no `from_map`.
    NotSupportedError
        The estimator would choose a shrinkage or a penalty with a Gram matrix, or the map does not serve it.
    """
    model, d = feature_map.model, rows.d
    head = model.head("residual")
    m, r = model.landmarks.shape[0], head.n_columns
    problem, have = _choose_problem(name, estimator, rows.n, r), memory.clear_caches_and_measure_memory()
    fixed, each = estimate_moment_bytes(d, m, r, problem.columns, rows.kernel)
    by_workers = rows.is_streamed and rows.is_cluster
    threads = 0 if by_workers else max(1, min(cpus.COUNT, (have - fixed) // each))
    solution = 8 * (m * r + problem.squares * r * r + 3 * m * problem.width)
    need, peak = (
        8 * problem.values_per_row * rows.n + max(fixed + count * each, solution) + budget.PROCESS_BYTES
        for count in (min(1, threads), threads)
    )
    shared = 8 * m * (d + r) if by_workers else 0
    pass_seconds = rows.n * predict_row_seconds(rows.kernel, m, d, count_moment_columns(r, head.triangular))
    return FitPlan(
        rows=rows.n,
        columns=d,
        landmarks=m,
        method=f"sums of {r:,} features of all rows, in one pass",
        memory_bytes=need,
        available_bytes=have,
        peak_bytes=peak,
        disk_bytes=shared,
        place=resolve_gram_folder(feature_map) if shared else "",
        task_bytes=each + 8 * m * r if by_workers else 0,
        model_bytes=model.dtype.itemsize * m * (d + problem.width),
        seconds=pass_seconds / (threads or rows.threads) + problem.seconds,
    )


@dataclass(frozen=True)
class _Problem:
    """What is solved with the sums."""

    columns: int
    """Number of columns that weigh the rows."""
    values_per_row: int
    """Values that this process holds for each row."""
    width: int
    """Number of columns of the weights."""
    squares: int
    """Number of (r, r) arrays, with that of the sums."""
    seconds: float


def _choose_problem(name: str, estimator: Any, n: int, r: int) -> _Problem:
    if name == "KernelPCA":
        q = pca.check_n_components(estimator.n_components)
        if not isinstance(q, int):
            return _Problem(1, 0, r, 1 + budget.EIGENVECTOR_SQUARES, budget.eigendecomposition_seconds(r))
        if lanczos.is_faster_than_dense(r, q):
            return _Problem(1, 0, q, 1, 0.0)
        few = budget.FEW_EIGENVECTOR_SQUARES  # components beyond the rank are 0, and there are as many as asked for
        return _Problem(1, 0, min(n, q), 1 + few, budget.eigendecomposition_seconds(r, few))
    if name == "KernelFisher":
        options = estimator._discriminant_options()
        if options.shrinkage is None:
            raise NotSupportedError('shrinkage="auto" needs a Gram matrix, and a map has none; give a number.')
        q = options.n_components or TYPICAL_CLASSES
        return _Problem(TYPICAL_CLASSES, _VALUES_PER_LABEL, q, 1, budget.cholesky_seconds(r))
    if not hasattr(estimator, "from_map"):
        raise InvalidInputError(f"{name} is not fitted in the features of a map.")
    targets = max(1, int(np.size(estimator.alpha)))
    ridge_options = estimator._get_options(RidgeOptions)
    if ridge_options.resolve_penalties(targets) is None or ridge_options.leave_one_out:
        raise NotSupportedError("Rows are left out with a Gram matrix, and a map has none; give a number as alpha.")
    squares, seconds = 1 + budget.EIGENVECTOR_SQUARES, budget.eigendecomposition_seconds(r)
    return _Problem(targets, _VALUES_PER_LABEL, targets, squares, seconds)
