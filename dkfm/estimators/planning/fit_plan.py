"""Plan a fit before it starts: its method, its memory, the files that it writes, and its time."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dkfm.core import budget, cpus
from dkfm.core.chunking import count_tiles
from dkfm.core.frames import convert_container, is_dask_array, is_dask_collection
from dkfm.errors import InvalidInputError
from dkfm.estimators.fitting import eigenproblem_setup, landmarks, pca, ridge
from dkfm.estimators.fitting.feature_maps import require_fitted_map
from dkfm.estimators.fitting.out_of_core_rows import can_stream_rows, is_stored_or_lazy
from dkfm.estimators.planning.gram_plans import (
    PlannedRows,
    plan_fit_with_gram,
    replace_model_bytes,
    resolve_gram_folder,
)
from dkfm.estimators.planning.linear_system_plans import plan_discriminants, plan_ridge, plan_tiled_map
from dkfm.estimators.planning.map_fit_plans import plan_fit_in_map
from dkfm.estimators.planning.plan_report import FitPlan
from dkfm.execution import memory
from dkfm.execution.clusters.current_client import find_client
from dkfm.execution.executors import open_executor
from dkfm.files.row_values import count_memory_and_disk_bytes
from dkfm.gram import product_costs
from dkfm.gram.row_passes import choose_tile_rows
from dkfm.gram.streamed_rows import is_stored
from dkfm.gram.training_data import TrainingData, as_training_data
from dkfm.kernels import KernelSpec, as_kernel
from dkfm.kernels.base import Kernel
from dkfm.numerics import pivoted_cholesky
from dkfm.numerics.model import predict_row_seconds
from dkfm.sources.base import read_evenly_spaced_rows
from dkfm.sources.opening import open_source

if TYPE_CHECKING:
    from distributed import Client


_PASS_SECONDS = 0.1
"""Seconds of a round that do not grow with the rows: its candidates are compared with each other."""

_TILE_SECONDS = 1e-3
"""Fixed seconds of a task of a pass, independent of its number of rows."""

_PILOT_SECONDS = 0.25
"""Seconds that a fit of components takes to count the products that a sample of the rows needs."""

_RANK_ROWS = 4096
"""Rows of the sample from whose rank that of all rows is estimated."""


def plan_fit(
    estimator: object,
    X: object,
    *,
    client: "Client | None" = None,
    columns: list[str] | None = None,
    id_column: str | None = None,
    feature_map: Any = None,
) -> FitPlan:
    """Return the plan of a fit; compute and write nothing.

    Parameters
    ----------
    estimator : ExactFeatureMap, KernelPCA, KernelFisher, KernelRidge or KernelRidgeClassifier
        Estimator that is not fitted yet.
    X : path, URL, array-like, dask array, or tuple of two int
        Training rows, or their shape (N, d). Only the shape and at most some 4,096 rows are read.
    client : distributed.Client, optional
        Client of a cluster; by default Dask's current client, else threads of this process.
    columns : list of str, optional
        Names of the columns of a table, as in `batch_score`.
    id_column : str, optional
        Column of a table with ids, which is not a feature.
    feature_map : ExactFeatureMap, optional
        Fitted map; the plan is for a fit in its features and with its kernel, by `from_map`.

    Returns
    -------
    FitPlan
        Memory, disk and time.

    Raises
    ------
    InvalidInputError
        The estimator is of another class, X has no shape (N, d), or the map was fitted to other columns.
    BudgetError
        The fit decomposes a matrix of more rows than LAPACK takes, however much memory there is.
    sklearn.exceptions.NotFittedError
        The map is not fitted.

    Examples
    --------
    >>> import dkfm
    >>> plan = dkfm.plan_fit(dkfm.KernelPCA(20), (4000, 50))
    >>> plan.method
    '20 eigenvectors by products with the Gram matrix in memory'
    >>> plan.memory_bytes < dkfm.plan_fit(dkfm.KernelPCA(), (4000, 50)).memory_bytes
    True
    """
    ours = [base for base in type(estimator).__mro__ if base.__module__.startswith("dkfm.")]
    name = next((base.__name__ for base in ours if base.__name__ in _PLANNERS), None)
    if name is None:
        raise InvalidInputError(f"plan_fit takes one of dkfm's {', '.join(_PLANNERS)}, and got {estimator!r:.100}.")
    fitted_names = getattr(feature_map, "feature_names_in_", None) if is_stored(X) else None
    n, width, d = _read_rows_columns_and_values_per_row(X, columns, id_column, fitted_names)
    if feature_map is not None:
        _require_matching_map(feature_map, width, is_regression=name.startswith("KernelRidge"))
    kernel = _resolve_kernel(estimator) if feature_map is None else feature_map.kernel_
    found = find_client(client)
    with open_executor(found) as executor:
        values = 1 if kernel.is_precomputed else d  # the model of a precomputed kernel keeps indices
        sample = partial(_read_sample, X, kernel, columns, id_column)
        is_streamed = _reads_tiles(estimator, X, kernel, feature_map)
        rows = PlannedRows(n, values, kernel, executor.threads, found is not None, is_streamed, sample)
    if feature_map is None:
        plan = replace(_PLANNERS[name](estimator, rows), columns=d)
    else:
        plan = plan_fit_in_map(name, estimator, feature_map._fitted_map(), rows)
    if is_streamed and is_dask_collection(convert_container(X)):  # the fit writes its blocks to disk
        plan = replace(plan, disk_bytes=plan.disk_bytes + 8 * n * d, place=tempfile.gettempdir())
    return plan


def _require_matching_map(feature_map: Any, n_columns: int, *, is_regression: bool) -> None:
    """Raise unless an object is a map that was fitted to `n_columns` and, for a regression, is not centred."""
    require_fitted_map(feature_map)
    if is_regression:
        ridge.require_uncentred(feature_map._params_at_fit["centered"])
    if n_columns != feature_map.n_features_in_:
        raise InvalidInputError(f"X has {n_columns} columns and the map was fitted with {feature_map.n_features_in_}.")


def _reads_tiles(estimator: Any, X: object, kernel: Kernel, feature_map: object) -> bool:
    """Return whether the fit reads the rows tile by tile; in a map, rows given by a shape count as stored."""
    if feature_map is not None:
        return isinstance(X, tuple) or is_stored_or_lazy(X, kernel, streams=True)
    streams = can_stream_rows(estimator, kernel)
    return streams and (estimator.build == "rounds" or is_stored_or_lazy(X, kernel, streams))


def _read_rows_columns_and_values_per_row(
    X: object, columns: list[str] | None, id_column: str | None, fitted_names: Sequence[str] | None
) -> tuple[int, int, int]:
    """Return the numbers of rows and columns, and the mean number of stored values of a row."""
    if isinstance(X, tuple) and all(isinstance(length, int) for length in X):
        if len(X) != 2 or min(X) < 1:
            raise InvalidInputError(f"The shape of training rows is (N, d), two positive integers, and got {X}.")
        return X[0], X[1], X[1]
    data = convert_container(X)
    if is_dask_collection(data) and not is_dask_array(data):
        raise InvalidInputError("How many rows a dask data frame has is not known before it is computed; give (N, d).")
    shape = getattr(data, "shape", None)
    if shape is None or hasattr(data, "columns") or hasattr(data, "tocsr"):
        source = open_source(X, columns=columns, id_column=id_column, fitted_columns=fitted_names)
        return *source.shape, source.float64s_per_row
    if len(shape) != 2 or any(math.isnan(length) or length < 1 for length in shape):
        raise InvalidInputError(f"X must have two dimensions of known lengths, and its shape is {tuple(shape)}.")
    return int(shape[0]), int(shape[1]), int(shape[1])


def _read_sample(
    X: object, kernel: Kernel, columns: list[str] | None, id_column: str | None, rows: int
) -> TrainingData | None:
    """Return some of the rows; None for a shape, a Gram matrix, or a dask collection, which is not computed."""
    if isinstance(X, tuple) or kernel.is_precomputed or is_dask_collection(convert_container(X)):
        return None
    source = open_source(X, columns=columns, id_column=id_column)
    return as_training_data(kernel, read_evenly_spaced_rows(source, rows))


def _resolve_kernel(estimator: Any) -> Kernel:
    spec: KernelSpec = estimator.kernel
    if hasattr(estimator, "gamma"):
        return pca.resolve_kernel_and_gamma(
            spec, estimator.gamma, estimator.degree, estimator.coef0, estimator.kernel_params
        )[0]
    return as_kernel(spec, estimator.kernel_params)


def _plan_map(estimator: Any, rows: PlannedRows) -> FitPlan:
    """Return the plan of a map: of the pivots of all rows, of the eigenvectors of the landmarks, or of both in turn."""
    if estimator.build == "tiled":
        options = estimator._get_options(landmarks.MapOptions)
        replace(options, dtype=getattr(estimator.dtype, "__name__", estimator.dtype)).require_valid(estimator.landmarks)
        return plan_tiled_map(estimator, rows)
    count = _count_landmarks(estimator, rows.n)
    in_rounds = rows.is_streamed and (estimator.landmarks is None or estimator.build == "rounds")
    chosen = replace(rows, n=count, is_streamed=in_rounds)  # landmarks of stored rows are in memory
    selects_pivots = isinstance(estimator.landmarks, str) and estimator.landmarks in ("pivots", "random_pivots")
    visited = landmarks.SAMPLED_ROWS if estimator.certify == "sample" else rows.n
    if estimator.basis != "cholesky":
        if not selects_pivots or estimator.n_landmarks is not None:  # else `count` is an upper bound of their number
            memory.require_lapack_order(count)
        plan = _plan_eigenvectors(estimator, chosen, rows.n)
        plan = _combine_consecutive_plans(_plan_pivots(estimator, rows, count), plan) if selects_pivots else plan
    else:
        plan = _plan_pivots(estimator, rows if selects_pivots else chosen, count)
        visited = 0 if selects_pivots else visited
    visited = 0 if estimator.landmarks is None else visited
    seconds = plan.seconds + visited * predict_row_seconds(rows.kernel, count, rows.d, count) / cpus.COUNT
    return replace(plan, rows=rows.n, landmarks=min(count, plan.landmarks), seconds=seconds)


def _plan_eigenvectors(estimator: Any, chosen: PlannedRows, n: int) -> FitPlan:
    """Return the plan of the eigenvectors of the landmarks' Gram matrix, beside n training rows."""
    may_rotate = estimator.basis == "symmetric" and estimator.on_indefinite != "clip"
    peak = chosen.estimate_fit_bytes(budget.ROTATION_SQUARES)
    peak = peak if may_rotate and peak <= memory.clear_caches_and_measure_memory() else 0
    seconds = budget.eigendecomposition_seconds(chosen.n)
    plan = plan_fit_with_gram(estimator, chosen, "eigenvectors", budget.EIGENVECTOR_SQUARES, seconds, peak=peak)
    beside = 8 * (n - chosen.n) * (chosen.d + 3)
    return replace(plan, memory_bytes=plan.memory_bytes + beside, peak_bytes=plan.peak_bytes + beside)


def _combine_consecutive_plans(first: FitPlan, second: FitPlan) -> FitPlan:
    """Return the plan of two stages, one after the other."""
    return replace(
        second,
        method=f"{first.method}, then {second.method}",
        memory_bytes=max(first.memory_bytes, second.memory_bytes),
        peak_bytes=max(first.peak_bytes, second.peak_bytes),
        disk_bytes=max(first.disk_bytes, second.disk_bytes),
        place=first.place or second.place,
        task_bytes=max(first.task_bytes, second.task_bytes),
        seconds=first.seconds + second.seconds,
    )


def _count_landmarks(estimator: Any, n: int) -> int:
    """Return the largest number of landmarks that the parameters of a feature map allow."""
    if estimator.n_landmarks is not None:
        return min(n, int(estimator.n_landmarks))
    if estimator.landmarks is None or isinstance(estimator.landmarks, str):
        return n
    return int(getattr(estimator.landmarks, "shape", (len(estimator.landmarks),))[0])


def _plan_pivots(estimator: Any, rows: PlannedRows, count: int) -> FitPlan:
    """Return the plan of pivots; columns are planned until the Gram matrix is faster, so both are upper bounds."""
    n, d = rows.n, rows.d
    if rows.is_streamed:
        return _plan_rounds(estimator, rows, count)
    by_gram = budget.gram_and_pivots_seconds(n, 0, count)
    plan = plan_fit_with_gram(estimator, rows, "pivots", budget.PIVOT_SQUARES, by_gram)
    need = budget.columnwise_pivots_bytes(n, d, count, rows.kernel.landmark_copies)
    seconds = budget.columnwise_pivots_seconds(n, d, count, rows.kernel.estimate_extra_value_seconds(d))
    columns = replace(
        plan,
        method=f"up to {count:,} pivots column by column, without a Gram matrix",
        memory_bytes=need,
        peak_bytes=need,
        disk_bytes=0,
        place="",
        task_bytes=0,
        seconds=seconds,
    )
    if rows.kernel.is_precomputed or estimator.build == "gram":
        return plan
    is_columns = estimator.build == "columns" or estimator.landmarks == "random_pivots"
    return columns if is_columns or seconds < plan.seconds else plan


def _plan_rounds(estimator: Any, rows: PlannedRows, count: int) -> FitPlan:
    """Return the plan of pivots in rounds over stored rows; their number is estimated from a sample of the rows."""
    n, d, kernel, sample = rows.n, rows.d, rows.kernel, rows.read_sample(_RANK_ROWS)
    threshold = pivoted_cholesky.pivot_threshold(estimator.tol)
    if sample is not None:
        count = min(count, _forecast_rank(sample, n, estimator.tol))
    passes = math.log10(1 / threshold) + 2
    values = passes / 2 * count * product_costs.value_seconds(kernel, d)  # seconds of all passes for each row
    tile_seconds = passes * count_tiles(n, choose_tile_rows(n, d)) * _TILE_SECONDS
    seconds = (n * (2 * values + 3 * count * count * budget.PRODUCT_SECONDS) + tile_seconds) / rows.threads
    seconds += passes * _PASS_SECONDS
    task = budget.pivot_task_bytes(d, count, kernel.peak_blocks, kernel.landmark_copies)
    in_memory, on_disk = count_memory_and_disk_bytes(n)
    need = in_memory + budget.streamed_pivots_bytes(n, d, count, 0 if rows.is_cluster else rows.threads * task)
    return FitPlan(
        rows=n,
        columns=d,
        landmarks=count,
        method=f"some {count:,} pivots in rounds over the rows",
        memory_bytes=need,
        available_bytes=memory.clear_caches_and_measure_memory(),
        peak_bytes=need,
        disk_bytes=on_disk,
        place=tempfile.gettempdir() if on_disk else "",
        task_bytes=task if rows.is_cluster else 0,
        model_bytes=8 * count * (d + count),
        seconds=seconds,
        is_forecast=sample is not None,
    )


def _forecast_rank(sample: TrainingData, n: int, tol: float | None) -> int:
    """Estimate the rank of n rows: it grows at most as fast as from half of the sample to the whole sample."""
    rows = sample.indexable_rows.shape[0]
    parts = [sample.subset(np.arange(0, rows, step)) for step in (2, 1)]
    grams = (part.compute_gram(None, None) for part in parts)
    half, whole = (max(1, len(pivoted_cholesky.factor_gram(gram, tol).row_indices)) for gram in grams)
    return min(n, math.ceil(whole * (n / rows) ** math.log2(whole / half))) if whole > half else whole


def _plan_components(estimator: Any, rows: PlannedRows) -> FitPlan:
    n, d, q = rows.n, rows.d, pca.check_n_components(estimator.n_components)
    solver = estimator._get_options(pca.SolverOptions)
    kernel, free = rows.kernel, memory.clear_caches_and_measure_memory()
    squares = pca.count_dense_squares(n, q, solver)
    if not isinstance(q, int) or not pca.uses_lanczos(n, q, solver, pca.has_dense_memory(n, d, kernel, squares)):
        memory.require_lapack_order(n, "KernelPCA")
        what = f"{q} eigenvectors" if squares == budget.FEW_EIGENVECTOR_SQUARES else "all eigenvectors"
        seconds = budget.eigendecomposition_seconds(n, squares)
        plan = plan_fit_with_gram(estimator, rows, what, squares, seconds)
        return replace_model_bytes(plan, q + 1 if isinstance(q, int) else q)  # one column for the reconstruction error
    task = eigenproblem_setup.make_lanczos_problem(
        kernel, n, d, q, estimator.tile_rows, estimator.workspace, rows.threads, rows.is_cluster
    )
    if n > eigenproblem_setup.SMALL_ROWS and (sample := rows.read_sample(eigenproblem_setup.PILOT_ROWS)) is not None:
        task = replace(task, products=eigenproblem_setup.estimate_product_count(sample, n, q))
    costs = eigenproblem_setup.rank_product_costs(task, free)
    pilot_seconds = _PILOT_SECONDS if n > eigenproblem_setup.SMALL_ROWS else 0.0
    other_seconds = pilot_seconds + n * predict_row_seconds(kernel, n, d, q + 1) / cpus.COUNT
    plans = [
        FitPlan(
            rows=n,
            columns=d,
            landmarks=n,
            method=f"{q} eigenvectors by products with the Gram matrix {cost.method}",
            memory_bytes=cost.memory_bytes,
            available_bytes=free,
            peak_bytes=cost.memory_bytes,
            disk_bytes=cost.disk_bytes,
            place=resolve_gram_folder(estimator) if cost.disk_bytes else "",
            task_bytes=cost.task_bytes,
            model_bytes=8 * n * (d + q + 1),
            seconds=cost.seconds + other_seconds,
        )
        for cost in costs
    ]
    return replace(plans[0], alternatives=tuple(plans[1:]))


_PLANNERS = {
    "ExactFeatureMap": _plan_map,
    "KernelPCA": _plan_components,
    "KernelFisher": plan_discriminants,
    "KernelRidge": plan_ridge,
    "KernelRidgeClassifier": plan_ridge,
}
"""Functions that plan the fit of each estimator, by its name."""
