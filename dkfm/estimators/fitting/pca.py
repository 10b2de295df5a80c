"""Fit kernel principal components: choose the solver, and keep the Gram matrix in memory or in its store."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from sklearn.utils import check_random_state

from dkfm.core import budget
from dkfm.core.chunking import require_count
from dkfm.core.rows import Array, Rows
from dkfm.errors import ConvergenceError, InvalidInputError, KernelError, warn_caller
from dkfm.estimators.fitting import eigenproblem_setup, out_of_core_rows
from dkfm.estimators.fitting.feature_maps import FittedMap, cast_model
from dkfm.estimators.fitting.fit_certificates import COMPONENT_LIMITS, warn_of_rounding
from dkfm.execution import memory, progress
from dkfm.execution.stage_log import log_stage
from dkfm.gram import fit_checkpoints
from dkfm.gram.fit_checkpoints import NO_CHECKPOINT, LanczosCheckpoint
from dkfm.gram.product_costs import ProductCost, ProductMethod
from dkfm.gram.training_data import TrainingData, TrainingRows, drop_zero_weights, take_landmarks
from dkfm.kernels import KernelSpec, as_kernel
from dkfm.kernels.base import Kernel
from dkfm.kernels.kernel_specs import SCIKIT_LEARN_PARAMETERS, filter_parameters, is_scikit_learn_name
from dkfm.numerics import kernel_components, links
from dkfm.numerics.certificates.components import certify_components, certify_principal_axes
from dkfm.numerics.eigensolvers import lanczos
from dkfm.numerics.kernel_components import ComponentOptions, Components, Moments
from dkfm.numerics.model import Head, Model
from dkfm.numerics.roots import Root
from dkfm.numerics.scorer import prepare_scorer
from dkfm.numerics.supervised.classes import Classes
from dkfm.numerics.training_statistics import EqualRows, WeightedRows
from dkfm.numerics.weighting import Weighting
from dkfm.sources.base import digest_rows
from dkfm.sources.memory import MemorySource

SOLVERS = ("auto", "dense", "arpack", "randomized")

_PRIMAL_SQUARES = 7
"""Number of (N, N) arrays of formulation="primal", which decomposes two matrices."""

_MAX_ARPACK_PRODUCTS = 1000
"""Default maximum number of products with the Gram matrix for eigen_solver="arpack"."""

_FEW_POWERS = 7
"""scikit-learn's iterated_power="auto" for fewer than a tenth of all components."""

_MANY_POWERS = 4
"""scikit-learn's iterated_power="auto" for a tenth of all components or more."""

_FEW_ROWS_PER_COMPONENT = 40
"""Rows per component above which eigenvectors take little memory compared with the Gram matrix."""

_DEFAULT_DEGREE, _DEFAULT_COEF0 = 3, 1
"""Defaults of `degree=` and `coef0=`."""


@dataclass(frozen=True)
class SolverOptions:
    """The parameters of `KernelPCA` of the same names."""

    eigen_solver: str
    tol: float
    max_iter: int | None
    iterated_power: int | str
    random_state: object
    formulation: str
    tile_rows: int | None
    workspace: str | Path | None
    progress: bool

    def validate(self) -> None:
        """Raise an InvalidInputError unless all parameters are valid."""
        if self.eigen_solver not in SOLVERS:
            raise InvalidInputError(f"eigen_solver must be one of {', '.join(SOLVERS)}, and is {self.eigen_solver!r}.")
        if self.formulation not in kernel_components.FORMULATIONS:
            choices = ", ".join(kernel_components.FORMULATIONS)
            raise InvalidInputError(f"formulation must be one of {choices}, and is {self.formulation!r}.")
        if self.formulation == "primal" and self.eigen_solver not in ("auto", "dense"):
            raise InvalidInputError('formulation="primal" has a root of the Gram matrix; use eigen_solver="dense".')
        if isinstance(self.tol, bool) or not isinstance(self.tol, int | float | np.number) or not self.tol >= 0:
            raise InvalidInputError(f"tol must be a number >= 0, and is {self.tol!r}.")
        if self.max_iter is not None:
            require_count(self.max_iter, "max_iter")
        try:
            check_random_state(self.random_state)
        except ValueError as error:
            raise InvalidInputError(f"random_state: {error}.") from None
        if self.iterated_power != "auto" and (self.iterated_power != 0 or isinstance(self.iterated_power, bool)):
            require_count(self.iterated_power, "iterated_power")

    def compute_max_products(self, q: int, n: int) -> int:
        """Return the maximum number of products with the Gram matrix, for q components of n rows."""
        if self.eigen_solver == "randomized":
            auto = _FEW_POWERS if q < 0.1 * n else _MANY_POWERS
            return 1 + (auto if self.iterated_power == "auto" else int(self.iterated_power))
        if self.max_iter is not None:
            return int(self.max_iter)
        return lanczos.choose_max_products(n) if self.eigen_solver == "auto" else _MAX_ARPACK_PRODUCTS


def check_n_components(n_components: object) -> int | float | None:
    """Check `n_components`; return a number, a share of the variance below 1, or None for all components."""
    if isinstance(n_components, float | np.floating) and 0 < n_components < 1:
        return float(n_components)
    if isinstance(n_components, float | np.floating):
        raise InvalidInputError(
            f"n_components must be a positive integer, or a share of variance below 1, and is {n_components!r}."
        )
    return None if n_components is None else require_count(n_components, "n_components")


def resolve_kernel_and_gamma(
    kernel: KernelSpec, gamma: float | None, degree: float, coef0: float, kernel_params: Mapping[str, object] | None
) -> tuple[Kernel, float | None]:
    """Return the kernel that these parameters of `KernelPCA` specify, and gamma, which may be in `kernel_params`."""
    if gamma is not None and isinstance(kernel, Kernel):
        raise KernelError(f"gamma belongs to the name of a kernel, and kernel is {kernel!r}.")
    if gamma is not None and isinstance(kernel, str) and not is_scikit_learn_name(kernel):
        remedy = (
            f'with {kernel!r}, a name of dkfm\'s, write kernel_params={{"gamma": {gamma!r}}} if it has that parameter'
        )
        raise KernelError(f"gamma belongs to scikit-learn's names; {remedy}.")
    extra = kernel_params if isinstance(kernel, str) and isinstance(kernel_params, Mapping) else {}
    if gamma is not None and "gamma" in extra:
        raise KernelError("gamma is given twice, by itself and in kernel_params.")
    gamma = cast("float | None", extra.get("gamma", gamma))
    parameters = filter_parameters(kernel, gamma=gamma, degree=degree, coef0=coef0)
    if set(extra).difference(SCIKIT_LEARN_PARAMETERS):  # names of dkfm, so scikit-learn's defaults do not apply
        given = {"degree": degree} if degree != _DEFAULT_DEGREE else {}
        given |= {"coef0": coef0} if coef0 != _DEFAULT_COEF0 else {}
        parameters = filter_parameters(kernel, gamma=gamma, **given)
    return as_kernel(kernel, {**parameters, **extra} if isinstance(kernel, str) else kernel_params), gamma


def fit_components(
    data: TrainingData, options: ComponentOptions, weighting: Weighting, solver: SolverOptions
) -> Components:
    """Compute the components of training rows by block Lanczos or by a full eigendecomposition of the Gram matrix.

    With eigen_solver="auto", the eigendecomposition, if it fits in memory, is the fallback for Lanczos.

    Raises
    ------
    NotPSDError, KernelError
        The centred Gram matrix is not positive semi-definite, or a kernel value is not finite.
    BudgetError
        The computation does not fit in memory.
    ConvergenceError
        Lanczos did not converge within `max_iter` products.
    """
    n, q, kernel = data.indexable_rows.shape[0], options.n_components, data.kernel
    squares = count_dense_squares(n, q, solver)
    dense_fits = has_dense_memory(n, data.float64s_per_row, kernel, squares)
    if isinstance(q, int) and uses_lanczos(n, q, solver, dense_fits):
        try:
            return _fit_by_lanczos(data, replace(options, n_components=min(q, n)), weighting, solver)
        except ConvergenceError:
            if solver.eigen_solver != "auto" or not dense_fits:
                raise
    sizes = n, data.float64s_per_row, kernel.peak_blocks, kernel.landmark_copies, squares
    memory.require_factorization_memory(*sizes, "KernelPCA")
    # `pop` drops the last reference in this frame, so that the solver can free the N^2 values.
    gram_holder = [data.compute_gram(solver.tile_rows, solver.workspace, solver.progress)]
    seconds = budget.eigendecomposition_seconds(n, squares)
    log_stage("root", f"eigenvectors of {n:,} x {n:,} kernel values in this process", seconds=seconds, rows=n)
    with progress.show_elapsed_bar(seconds, solver.progress):
        return kernel_components.solve_components_by_eigh(gram_holder.pop(), options, weighting, solver.formulation)


def count_dense_squares(n: int, q: int | float | None, solver: SolverOptions) -> int:
    """Return how many (N, N) arrays an eigendecomposition for q components needs."""
    if solver.formulation == "primal":
        return _PRIMAL_SQUARES
    few = isinstance(q, int) and n >= _FEW_ROWS_PER_COMPONENT * q
    return budget.FEW_EIGENVECTOR_SQUARES if few else budget.EIGENVECTOR_SQUARES


def has_dense_memory(n: int, d: int, kernel: Kernel, squares: int) -> bool:
    """Return whether an eigendecomposition with some (N, N) arrays fits in memory."""
    return memory.has_factorization_memory(n, d, kernel.peak_blocks, kernel.landmark_copies, squares)


def uses_lanczos(n: int, q: int, solver: SolverOptions, dense_fits: bool) -> bool:
    """Return whether to use Lanczos; `dense_fits` says whether an eigendecomposition fits in memory."""
    possible = 2 * (q + lanczos.choose_block_columns(n, q)) <= min(n // 2, lanczos.choose_basis_columns(n, q))
    if solver.eigen_solver == "dense" or solver.formulation == "primal" or not possible:
        return False
    return solver.eigen_solver != "auto" or not dense_fits or lanczos.is_faster_than_dense(n, q)


def _fit_by_lanczos(
    data: TrainingData, options: ComponentOptions, weighting: Weighting, solver: SolverOptions
) -> Components:
    n, q = data.indexable_rows.shape[0], int(options.n_components or 0)
    # The start only changes the rounding of the result, so a fixed seed is the default.
    rng = check_random_state(0 if solver.random_state is None else solver.random_state)
    limit = solver.compute_max_products(q, n)
    cost = eigenproblem_setup.choose_product_cost(data, q, solver.tile_rows, solver.workspace)
    what = f"{q:,} eigenvectors by at most {limit:,} products with {n:,} x {n:,} kernel values, {cost.method}"
    log_stage("root", what, seconds=cost.seconds, rows=n, components=q, products=limit)
    start = rng.normal(size=(n, lanczos.choose_block_columns(n, q)))
    with (
        _open_checkpoint(data, cost, start, options, weighting, solver) as checkpoint,
        eigenproblem_setup.open_eigenproblem(
            data, cost.method, q, weighting, solver.tile_rows, solver.workspace, solver.progress, checkpoint.means
        ) as problem,
        progress.step_bar("dkfm-root", None, "product", solver.progress) as bar,
    ):
        # The checkpoint is identified by the random block; the improved start may round differently on another machine.
        eigenproblem_setup.improve_start(start, data, cost.method, weighting, rng)
        checkpoint.means = problem.means

        def multiply_and_count(V: Array) -> Array:
            bar.update()
            return problem.multiply(V)

        counted = replace(problem, multiply=multiply_and_count)
        components, pairs = kernel_components.solve_leading_components(
            counted, start, options, weighting, float(solver.tol), limit, checkpoint.capacity, checkpoint
        )
        if not pairs.converged and solver.eigen_solver != "randomized":
            raise ConvergenceError(
                f"After {pairs.n_products} products with the Gram matrix {q} components have residuals up to "
                f'{pairs.residuals.max():.1e}; raise max_iter or tol, or use eigen_solver="dense".'
            )
    return components


@contextmanager
def _open_checkpoint(
    data: TrainingData,
    cost: ProductCost,
    start: Array,
    options: ComponentOptions,
    weighting: Weighting,
    solver: SolverOptions,
) -> Iterator[LanczosCheckpoint]:
    """Yield the checkpoint of Lanczos in the workspace, if there is one and the matrix is not in memory."""
    if solver.workspace is None or cost.method is ProductMethod.DENSE or not isinstance(data, TrainingRows):
        yield LanczosCheckpoint(NO_CHECKPOINT, cost.basis_columns)
        return
    parameters = {
        "road": cost.method,
        "tile_rows": solver.tile_rows,
        "count": options.n_components,
        "tol": float(solver.tol),
        "centered": weighting.centered,
        "weights": digest_rows(MemorySource(weighting.weights[:, np.newaxis])),
        "start": digest_rows(MemorySource(start)),
    }
    rows = MemorySource(data.indexable_rows)
    with fit_checkpoints.open_checkpoint(solver.workspace, "components", data.kernel, rows, parameters) as checkpoint:
        yield LanczosCheckpoint(checkpoint, cost.basis_columns)


def make_components_model(
    kernel: Kernel, landmarks: Rows, components: Components, centered: bool, dtype: np.dtype[np.floating]
) -> Model:
    """Return the model of components in the precision `dtype`; scores and reconstruction errors share their weights."""
    W, q = components.weights, components.weights.shape[1]
    scores, error = Head(W), Head(W, link=links.RESIDUAL)
    if centered:
        W = np.column_stack([W, 2 * components.training_mean_coefficients])
        offset = np.append(components.offset, components.squared_norm_of_mean)
        scores = Head(W, components.offset, n_leading_columns=q)
        error = Head(W, offset, link=links.CENTRED_RESIDUAL)
    return cast_model(Model(kernel, landmarks, {"scores": scores, "reconstruction_error": error}), dtype)


def collect_fitted(components: Components, total_weight: float) -> dict[str, object]:
    """Return the fitted values of components by name; `total_weight` is the sum of the sample weights."""
    return {
        "eigenvalues": components.eigenvalues,
        "total_variance": components.eigenvalue_sum / total_weight,
        "total_weight": total_weight,
    }


def variance_ratios(variances: Array, total: float) -> Array:
    """Return the ratios (q,) of variances to a total: 0 if the total is 0, and NaN with a warning if it is NaN."""
    if np.isnan(total):
        message = (
            "The shares of variance are NaN: the first eigenvalues of a kernel that is not positive semi-definite do "
            'not determine the sum of all positive ones; fit with eigen_solver="dense" for them.'
        )
        warn_caller(message)
    return np.zeros(len(variances)) if total <= 0 else variances / total


def fit_in_map(
    feature_map: FittedMap, options: ComponentOptions, centered: bool, X: object, sample_weight: object
) -> tuple[Model, dict[str, object], bool]:
    """Return the model of components in the features of a map, the fitted values by name, and whether X is None.

    Without X, the landmarks are the training rows. See `KernelPCA.from_map`.
    """
    model, root = feature_map.model, feature_map.root
    all_rows = None if X is None else out_of_core_rows.as_data(model.kernel, X)
    landmarks = take_landmarks(model, all_rows)
    if all_rows is None:
        moments = compute_landmark_moments(feature_map, root, sample_weight)[0]
    else:
        data, weighted, total = _weigh_rows(all_rows, sample_weight)
        (first,), second = out_of_core_rows.compute_feature_moments(
            model.original_landmarks, root, data, weighted, feature_map.workspace, feature_map.progress
        )
        moments = Moments(second, first / total, total, data.indexable_rows.shape[0])
    components = kernel_components.solve_components_of_map(root.weights, moments, options, centered)
    fitted_model = make_components_model(model.kernel, model.original_landmarks, components, centered, model.dtype)
    scorer, tiles = prepare_scorer(fitted_model), landmarks.iter_row_tiles()
    if all_rows is None:
        measured = certify_components(scorer, components.eigenvalues, tiles)
    else:
        measured = certify_principal_axes(scorer, components.eigenvalues, tiles, moments.weight)
    warn_of_rounding(measured, fitted_model, limits=COMPONENT_LIMITS)
    return fitted_model, {**collect_fitted(components, moments.weight), "certificate": measured}, all_rows is None


def _weigh_rows(all_rows: TrainingData, sample_weight: object) -> tuple[TrainingData, WeightedRows, float]:
    """Return the rows of positive weight, with their weights in one column, and the sum of these."""
    if sample_weight is None:
        n = all_rows.indexable_rows.shape[0]
        return all_rows, EqualRows(n), float(n)
    data, weights = drop_zero_weights(all_rows, sample_weight)
    return data, Classes(np.zeros(len(weights), np.int64), weights, 1), float(weights.sum())


def compute_landmark_moments(feature_map: FittedMap, root: Root, sample_weight: object) -> tuple[Moments, Array]:
    """Return the moments of the landmarks' features, and these features (N, r).

    Raises
    ------
    InvalidInputError
        The landmarks are not all training rows.
    """
    values, kernel, points = feature_map.eigenvalues, feature_map.model.kernel, feature_map.model.original_landmarks
    if not feature_map.holds_training_rows or values is None or kernel.is_precomputed or sample_weight is not None:
        raise InvalidInputError(
            "X, the training rows, is needed: this map does not keep them (it has fewer landmarks, or pivots, or a "
            "precomputed kernel), or they are to have weights."
        )
    return kernel_components.compute_moments_of_landmarks(root, np.ones(points.shape[0]))
