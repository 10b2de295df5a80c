"""Fit kernel ridge regressions, and certify them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from sklearn.utils.validation import check_array

from dkfm.core import budget
from dkfm.core.argument_checks import require_flags
from dkfm.core.frames import is_dask_collection
from dkfm.core.rows import Array, require_no_times, require_unmasked
from dkfm.errors import InvalidInputError, NotSupportedError, extract_reason
from dkfm.estimators.fitting import out_of_core_rows
from dkfm.estimators.fitting.class_labels import require_no_name
from dkfm.estimators.fitting.feature_maps import FittedMap, cast_model
from dkfm.estimators.fitting.fit_certificates import warn_of_rounding
from dkfm.estimators.fitting.solver_choice import choose_solver
from dkfm.estimators.stored.class_labels import Labels
from dkfm.estimators.stored.ridge import StoredRidge
from dkfm.execution import progress
from dkfm.execution.scoring_threads import open_certificate_scorer
from dkfm.execution.stage_log import log_stage
from dkfm.gram import training_data
from dkfm.gram.linear_systems.solver import SystemSolver
from dkfm.gram.linear_systems.tiled_direct_solver import SystemOptions
from dkfm.gram.training_data import Indices, TrainingData
from dkfm.kernels.base import Kernel
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.certificates.ridge import PredictionErrors
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import prepare_scorer
from dkfm.numerics.supervised import ridge
from dkfm.numerics.supervised.ridge import RidgeSolution, Targets

if TYPE_CHECKING:
    import dask.array as da

_REMEDY = "beside alpha, rounding is large: use a larger alpha"
"""Remedy if the certificate of a given alpha is too large."""

_CG_REMEDY = f'{_REMEDY}, or a smaller tol of solver="cg"'
"""Remedy if conjugate gradients were used."""

_PATH_REMEDY = "beside alpha, rounding is large: give alphas= of larger penalties, or bring the columns to one scale"
"""Remedy if alpha was selected from a path."""

_PATH_LENGTH = 20
"""Default number of penalties from which alpha="loo" selects."""

_LOWEST_SHARE = 1e-9
"""Smallest default penalty, relative to the mean weighted k(x, x)."""

_ABOVE_ROUNDING = 16.0
"""Smallest default penalty, relative to the rounding of the Gram matrix."""

_SMALLEST_PENALTY = 1e-300
"""Smallest penalty in any case, because coefficients grow like its inverse."""


@dataclass(frozen=True)
class RidgeOptions:
    """The parameters of `KernelRidge` of the same names."""

    alpha: object
    alphas: object
    leave_one_out: bool
    solver: str
    tol: float
    on_indefinite: str
    tile_rows: int | None
    workspace: str | Path | None
    progress: bool

    def resolve_penalties(self, count: int) -> Array | None:
        """Check the parameters; return the penalty of each of `count` targets, or None if the fit chooses it."""
        require_flags(leave_one_out=self.leave_one_out)
        if isinstance(self.tol, bool) or not isinstance(self.tol, int | float | np.number) or not 0 < self.tol < 1:
            raise InvalidInputError(f"tol must be a number between 0 and 1, and is {self.tol!r}.")
        if self.leave_one_out and self.solver == "cg":
            raise InvalidInputError('solver="cg" has no inverse, which leave_one_out needs; use "tiled".')
        if isinstance(self.alpha, str) and self.alpha == "loo":
            return None
        if self.alphas is not None:
            raise InvalidInputError('alphas are what alpha="loo" chooses from, and alpha is a number.')
        penalties = _as_penalties(self.alpha, 'alpha must be a number >= 0, one for each target, or "loo"')
        if penalties.size not in (1, count):
            targets = f"{count} target{'s' * (count > 1)}"
            raise InvalidInputError(f"alpha has {penalties.size} penalties, and y has {targets}.")
        return np.broadcast_to(penalties, (count,)).copy()

    def make_alpha_grid(self, diagonal: Array) -> Array:
        """Return the penalties to choose from, (m,), given the weighted k(x, x) (N,)."""
        if self.alphas is None:
            mean, rounding = float(np.abs(diagonal).mean()) or 1.0, ridge.estimate_rounding(diagonal)
            lowest, highest = max(_LOWEST_SHARE * mean, _ABOVE_ROUNDING * rounding), len(diagonal) * mean
            if lowest < _SMALLEST_PENALTY:
                raise InvalidInputError(
                    f"Penalties from {lowest:.1e} on are too small to solve with; scale the kernel or the rows up."
                )
            return np.geomspace(lowest, max(highest, 100 * lowest), _PATH_LENGTH)
        path = _as_penalties(self.alphas, "alphas must be numbers > 0")
        if not (path > 0).all():
            raise InvalidInputError(f"alphas must be numbers > 0, and are {self.alphas!r}.")
        return path


def _as_penalties(values: object, expected: str) -> Array:
    try:
        penalties = np.atleast_1d(np.asarray(values, np.float64))
    except (TypeError, ValueError):
        penalties = np.empty(0)
    is_bool = np.asarray(values).dtype.kind == "b"
    if is_bool or penalties.ndim != 1 or not penalties.size or not (penalties >= 0).all() or np.isinf(penalties).any():
        raise InvalidInputError(f"{expected}, and is {values!r:.100}.")
    return penalties


def check_weights(sample_weight: object, n: int) -> Array | None:
    """Return the weights (n,) of rows, which may be given as one number; None if there are none."""
    if isinstance(sample_weight, int | float | np.number) and not isinstance(sample_weight, bool):
        sample_weight = np.full(n, sample_weight)
    return None if sample_weight is None else training_data.check_sample_weight(sample_weight, n)


@dataclass(frozen=True, eq=False)
class GivenTargets:
    """Targets and weights of all rows that were passed to a fit."""

    values: Array
    """Targets. Shape (N, q)."""
    is_vector: bool
    """Whether the targets were a vector, or there are two classes."""
    weights: Array | None
    """Weights of the rows. Shape (N,)."""
    classes: Labels | None = None
    """Class labels of a classifier. Shape (C,)."""
    names: list[str] | None = None
    """Names of the targets, of a data frame or a series. Length q."""

    def describe(self) -> dict[str, object]:
        """Return what a store keeps of the targets beside their values."""
        return {"is_vector": self.is_vector, **({} if self.names is None else {"target_names": self.names})}

    def drop_zero_weights(self, all_rows: TrainingData, kernel: Kernel | None = None) -> tuple[TrainingData, Targets]:
        """Return the rows of positive weight, with `kernel` resolved on them, and their targets."""
        rows, weights = training_data.drop_zero_weights(all_rows, self.weights, kernel)
        kept = self.values if rows is all_rows else self.values[cast("Indices", rows.original_row_indices)]
        return rows, Targets(kept, weights)

    def fitted_alpha_to_json(self, alphas: Array, given: object) -> object:
        """Return the penalties of a fit as JSON has them: a list if there is one for each target, else a number."""
        is_list = bool(np.ndim(cast("Array", given)))
        if isinstance(given, str):
            is_list = not self.is_vector and self.classes is None
        return alphas.tolist() if is_list else float(alphas[0])

    def complete_fitted_values(self, fitted: dict[str, object], targets: Targets | None) -> dict[str, object]:
        """Return fitted values with the classes, the weights of the targets of a fit, and predictions in shape."""
        left_out, errors = (cast("Array | None", fitted.get(name)) for name in ("loo_predictions", "loo_errors"))
        if left_out is not None and self.is_vector:
            fitted = {**fitted, "loo_predictions": left_out[:, 0]}
        if errors is not None and (self.is_vector or self.classes is not None):
            fitted = {**fitted, "loo_errors": errors[:, 0]}
        if self.weights is not None and targets is not None:
            fitted = {**fitted, "sample_weight": targets.weights}
        return fitted if self.classes is None else {**fitted, "classes": self.classes}


def read_targets(y: object, sample_weight: object, n: int, name: str) -> GivenTargets:
    """Check the targets and weights of n training rows.

    Parameters
    ----------
    y : array-like, or dask array, series or data frame, of shape (n,) or (n, q)
        Targets; a dask collection is computed.
    sample_weight : float or array-like of shape (n,), optional
        Weights of the rows.
    n : int
        Number of training rows.
    name : str
        Name of the estimator, for error messages.
    """
    if y is None:
        raise InvalidInputError(f"{name} requires y to be passed, but the target y is None; it takes a number a row.")
    require_unmasked(y, "y")
    require_no_name(y)
    try:
        computed = cast("da.Array", y).compute() if is_dask_collection(y) else y
        require_no_times(computed, "y")
        targets = check_array(computed, ensure_2d=False, dtype=np.float64, input_name="y", ensure_all_finite=False)
    except InvalidInputError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"y must be numbers, (N,) or (N, q): {extract_reason(error)}.") from None
    if targets.ndim not in (1, 2) or not targets.size:
        raise InvalidInputError(f"y must be numbers, (N,) or (N, q), and its shape is {targets.shape}.")
    finite = np.isfinite(targets.reshape(len(targets), -1)).all(axis=1)
    if not finite.all():
        raise InvalidInputError(f"y must be numbers, and row {int(finite.argmin())} contains NaN or infinity.")
    if len(targets) != n:
        raise InvalidInputError(f"y has {len(targets)} targets and X has {n} rows; each row has one.")
    weights = check_weights(sample_weight, n)
    return GivenTargets(targets.reshape(n, -1), targets.ndim == 1, weights, names=_find_target_names(y))


def _find_target_names(y: object) -> list[str] | None:
    """Return the names of the columns of a data frame, or of a series; None if there are none."""
    given: object = [getattr(y, "name", None)] if hasattr(y, "to_frame") else getattr(y, "columns", None)
    columns = list(given) if isinstance(given, Iterable) else []
    names = [name for name in columns if isinstance(name, str) and name and "\0" not in name]
    return names if names and len(set(names)) == len(columns) else None


def fit_ridge(
    data: TrainingData,
    targets: Targets,
    options: RidgeOptions,
    dtype: np.dtype[np.floating],
    stored: type[StoredRidge],
    per_target: bool,
) -> tuple[Model, dict[str, object], Array]:
    """Return the model of a regression, the fitted values by name, and the penalties (q,).

    `per_target` says whether "loo" chooses a penalty for each target.
    """
    penalties, diagonal = options.resolve_penalties(targets.n_columns), targets.weights * data.diagonal()
    path = None if penalties is not None else options.make_alpha_grid(diagonal)
    reason = 'alpha="loo" needs eigenvalues'
    if penalties is not None:
        reason = ridge.why_eigenvalues(penalties, diagonal, options.on_indefinite)
    solver = choose_solver(data, options.solver, reason, "KernelRidge")
    scaled, scale = _scale_targets(targets)
    if solver != "dense":
        solution = _solve_without_gram(data, scaled, options, cast("Array", penalties), solver)
    else:
        solution = _solve_in_memory(data, scaled, options, penalties, path, per_target, bool(reason))
    exact = _make_model(Model(data.kernel, data.indexable_rows, {}), solution.coefficients * scale, stored)
    model = cast_model(exact, dtype)
    remedy = _PATH_REMEDY if path is not None else _CG_REMEDY if solver == "cg" else _REMEDY
    fitted = _certify_and_collect_fitted(model, exact, data, solution, scale, stored, remedy=remedy)
    if path is not None:
        with np.errstate(over="ignore", under="ignore"):
            fitted |= {"alphas": path, "loo_errors": cast("Array", solution.path_errors) * scale * scale}
    return model, fitted, solution.alphas


def _solve_in_memory(
    data: TrainingData,
    targets: Targets,
    options: RidgeOptions,
    penalties: Array | None,
    path: Array | None,
    per_target: bool,
    decomposes: bool,
) -> RidgeSolution:
    """Solve from the Gram matrix in memory, which is freed at the end."""
    n, policy = len(targets.weights), options.on_indefinite
    K = data.compute_gram(options.tile_rows, options.workspace, options.progress)
    seconds = budget.eigendecomposition_seconds(n) if decomposes else budget.cholesky_seconds(n)
    log_stage("root", f"regression from {n:,} x {n:,} kernel values in this process", seconds=seconds, rows=n)
    with progress.show_elapsed_bar(seconds if decomposes else 0.0, options.progress):
        if penalties is None:
            return ridge.solve_ridge_path(K, targets, cast("Array", path), per_target=per_target, on_indefinite=policy)
        leaves_out = bool(options.leave_one_out)
        return ridge.solve_ridge(K, targets, penalties, leave_one_out=leaves_out, on_indefinite=policy)


def _solve_without_gram(
    data: TrainingData, targets: Targets, options: RidgeOptions, penalties: Array, method: str
) -> RidgeSolution:
    """Solve without a Gram matrix in memory, on the current Dask client or on threads of this process."""
    system = SystemOptions(options.tile_rows, options.workspace, options.progress, options.tol)
    solver = SystemSolver(data.kernel, data.indexable_rows, targets.weights, method, system)

    def solve(alpha: float, right: Array) -> tuple[Array, Array | None]:
        found = solver.solve(alpha, right, inverse_diagonal=bool(options.leave_one_out))
        return found.values, found.inverse_diagonal

    return ridge.solve_each_penalty(targets, penalties, solve)


def require_uncentred(centered: object) -> None:
    """Raise a NotSupportedError if the features of a map are centred."""
    if centered:
        raise NotSupportedError("Regressions have no intercept for centred features; give a map with centered=False.")


def fit_in_map(
    feature_map: FittedMap,
    options: RidgeOptions,
    targets: Targets,
    data: TrainingData,
    landmarks: TrainingData,
    stored: type[StoredRidge],
) -> tuple[Model, dict[str, object], Array]:
    """Return the model of a regression in the features of a map, fitted values and penalties (`from_map`)."""
    penalties = options.resolve_penalties(targets.n_columns)
    if penalties is None or options.leave_one_out:
        raise InvalidInputError("Rows are left out with a Gram matrix, which fit has; give from_map a number as alpha.")
    points, root = feature_map.model.original_landmarks, feature_map.root
    scaled, scale = _scale_targets(targets)
    sums, second = out_of_core_rows.compute_feature_moments(
        points, root, data, scaled, feature_map.workspace, feature_map.progress
    )
    coefficients, rounding = ridge.solve_ridge_of_map(second, sums.T, penalties, feature_map.hidden_share)
    features = Model(data.kernel, points, {"features": Head(root.weights, triangular=root.triangular)})
    scorer, weights = prepare_scorer(features), root.weights @ coefficients
    predicted = np.concatenate([scorer("features", tile) @ coefficients for tile in landmarks.iter_row_tiles()])
    exact = _make_model(features, weights * scale, stored)
    model = cast_model(exact, feature_map.model.dtype)
    solution = RidgeSolution(penalties, weights, predicted, scaled.max_abs_values)
    return model, _certify_and_collect_fitted(model, exact, landmarks, solution, scale, stored, rounding), penalties


def _scale_targets(targets: Targets) -> tuple[Targets, Array]:
    """Return targets divided by powers of 2, so that their squares are in range, and the powers (q,)."""
    sizes = targets.max_abs_values
    scale = 2.0 ** np.floor(np.log2(np.where(sizes > 0, sizes, 1.0)))
    return Targets(targets.values / scale, targets.weights), scale


def _make_model(base: Model, coefficients: Array, stored: type[StoredRidge]) -> Model:
    heads = {name: Head(coefficients, link=link) for name, link in stored.head_links.items()}
    return Model(base.kernel, base.landmarks, heads)


def _certify_and_collect_fitted(
    model: Model,
    exact: Model,
    landmarks: TrainingData,
    solution: RidgeSolution,
    scale: Array,
    stored: type[StoredRidge],
    rounding: float = 0.0,
    remedy: str = _REMEDY,
) -> dict[str, object]:
    """Return the fitted values of a solution by name, with a certificate, which has at least the error `rounding`.

    `exact` is the model in float64. The targets of the solution were divided by `scale`; `remedy` is named if the
    certificate is too large.
    """
    values, scales = solution.fitted_values * scale, solution.max_abs_targets * scale

    def measure(measured_model: Model) -> PredictionErrors:
        with open_certificate_scorer(measured_model, stored.output_head_name, len(values)) as scorer:
            return stored.measure_predictions(scorer, landmarks, values)

    errors = measure(model)
    # Norms are those of the float64 solution. Errors are not relative to norms that they make larger.
    of_solution = errors if model.dtype == np.float64 else measure(exact)
    norms = solution.bound_norms(of_solution.largest / scale) * scale
    smaller_norms = solution.bound_norms(np.zeros(len(scale))) * scale
    measured = errors.to_certificate(scales, smaller_norms).combine(Certificate(rounding, rounding, 0))
    warn_of_rounding(measured, model, remedy)
    fitted: dict[str, object] = {"fitted_values": values, "target_scales": scales, "norms": norms}
    if solution.left_out is not None:
        fitted["loo_predictions"] = solution.left_out * scale
    return {**fitted, "certificate": measured}


def weigh_classes(
    codes: Indices, classes: Labels, class_weight: Mapping[object, float] | str | None, weights: Array
) -> Array:
    """Return the weights (N,) of rows times the weights of their classes; "balanced" is inverse to sums of weights."""
    from sklearn.utils import compute_class_weight

    if isinstance(class_weight, str) and class_weight == "balanced":
        sums = np.bincount(codes, weights, len(classes))
        factors = weights.sum() / (len(classes) * np.where(sums > 0, sums, 1.0))
    else:
        try:
            factors = compute_class_weight(class_weight, classes=classes, y=classes[codes])
        except ValueError as error:
            given = f"; it has {[*class_weight]!r:.100}" if isinstance(class_weight, Mapping) else ""
            raise InvalidInputError(f"class_weight: {extract_reason(error)}{given}.") from None
    weighed: Array = weights * factors[codes]
    return weighed
