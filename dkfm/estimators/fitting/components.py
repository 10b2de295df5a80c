"""How the components of training rows are found: which solver, and where the Gram matrix is meanwhile."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import cast

import numpy as np
from dask.system import CPU_COUNT
from sklearn.utils import check_random_state

from dkfm.core import budget
from dkfm.core.chunking import require_count
from dkfm.core.rows import Array, Rows
from dkfm.errors import ConvergenceError, DkfmWarning, InvalidInputError, KernelError
from dkfm.estimators.fitting.feature_maps import FittedMap, cast_model, is_clipped
from dkfm.estimators.fitting.training_data import (
    TILE_VALUES,
    PrecomputedGram,
    TrainingData,
    TrainingRows,
    apply_weights,
    as_training_data,
)
from dkfm.execution import memory, progress
from dkfm.gram import build
from dkfm.kernels import KernelSpec, as_kernel
from dkfm.kernels.base import Kernel
from dkfm.kernels.sklearn_names import given_parameters
from dkfm.numerics import lanczos, pca, training_reductions
from dkfm.numerics.certificates import certificate
from dkfm.numerics.model import Head, Model
from dkfm.numerics.pca import ComponentOptions, Components, Moments, Problem, Weighting
from dkfm.numerics.scorer import prepare_scorer

SOLVERS = ("auto", "dense", "arpack", "randomized")

_MOST_ASKED = 1000
"""Products, where Lanczos was asked for."""

_POWERS = 7, 4
"""Of scikit-learn's randomized solver, for few components and for more than a tenth of all."""

_SYMMETRY = 1e-8
"""Of a product of two vectors: more than rounding does."""


@dataclass(frozen=True)
class SolverOptions:
    """The parameters of `KernelPCA` of these names."""

    eigen_solver: str
    tol: float
    max_iter: int | None
    iterated_power: int | str
    random_state: object
    formulation: str
    tile_rows: int | None
    workspace: str | Path | None
    progress: bool

    def require(self) -> None:
        """Raise unless all of them are what they can be."""
        if self.eigen_solver not in SOLVERS:
            raise InvalidInputError(f"eigen_solver must be one of {', '.join(SOLVERS)}, and is {self.eigen_solver!r}.")
        if self.formulation not in pca.FORMULATIONS:
            forms = ", ".join(pca.FORMULATIONS)
            raise InvalidInputError(f"formulation must be one of {forms}, and is {self.formulation!r}.")
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

    def products(self, q: int, n: int) -> int:
        """Return how many products with the Gram matrix are made at most."""
        if self.eigen_solver == "randomized":
            few, many = _POWERS
            auto = few if q < 0.1 * n else many
            return 1 + (auto if self.iterated_power == "auto" else int(self.iterated_power))
        if self.max_iter is not None:
            return int(self.max_iter)
        return lanczos.MAX_PRODUCTS if self.eigen_solver == "auto" else _MOST_ASKED


def check_n_components(n_components: object) -> int | float | None:
    """Return what `n_components` means: a number, a share of the variance, or all."""
    if isinstance(n_components, float | np.floating) and 0 < n_components < 1:
        return float(n_components)
    if isinstance(n_components, float | np.floating):
        raise InvalidInputError(
            f"n_components must be a positive integer, or a share of variance below 1, and is {n_components!r}."
        )
    return None if n_components is None else require_count(n_components, "n_components")


def resolve_kernel(
    kernel: KernelSpec,
    gamma: float | None,
    degree: float,
    coef0: float,
    kernel_params: Mapping[str, object] | None,
) -> tuple[Kernel, float | None]:
    """Return the kernel that the parameters of `KernelPCA` of these names mean, and gamma as given there or there."""
    if gamma is not None and isinstance(kernel, Kernel):
        raise KernelError(f"gamma belongs to the name of a kernel, and kernel is {kernel!r}.")
    more = kernel_params if isinstance(kernel, str) and isinstance(kernel_params, Mapping) else {}
    if gamma is not None and "gamma" in more:
        raise KernelError("gamma is given twice, by itself and in kernel_params.")
    gamma = cast("float | None", more.get("gamma", gamma))
    parameters = given_parameters(kernel, gamma=gamma, degree=degree, coef0=coef0)
    return as_kernel(kernel, {**parameters, **more} if isinstance(kernel, str) else kernel_params), gamma


def fit_components(
    given: TrainingData, wanted: ComponentOptions, weighting: Weighting, solver: SolverOptions
) -> Components:
    """Find the components of training rows, by all eigenvectors of the Gram matrix or by the first ones alone.

    Raises
    ------
    NotPSDError, KernelError, BudgetError
    ConvergenceError
        The first ones were not found in `max_iter` products.
    """
    n, q, kernel = given.landmarks.shape[0], wanted.count, given.kernel
    dense = budget.fit_bytes(n, given.width, kernel.peak_blocks, kernel.landmark_copies)
    fits = n <= budget.LARGEST_DENSE_N and dense <= memory.available_memory()
    if isinstance(q, int) and _by_lanczos(n, q, solver, fits):
        try:
            return _leading(given, replace(wanted, count=min(q, n)), weighting, solver)
        except ConvergenceError:
            if solver.eigen_solver != "auto" or not fits:
                raise
    memory.require_driver_memory(n, given.width, kernel.peak_blocks, kernel.landmark_copies)
    # Popped, so that nothing here keeps N^2 values alive.
    held = [given.gram(solver.tile_rows, solver.workspace, solver.progress)]
    with progress.call_bar("dkfm-root", budget.eigendecomposition_seconds(n), solver.progress):
        return pca.solve_components(held.pop(), wanted, weighting, solver.formulation)


def _by_lanczos(n: int, q: int, solver: SolverOptions, fits: bool) -> bool:
    possible = 2 * (q + lanczos.block_columns(n, q)) <= min(n // 2, lanczos.held_columns(n, q))
    if solver.eigen_solver == "dense" or solver.formulation == "primal" or not possible:
        return False
    return solver.eigen_solver != "auto" or not fits or lanczos.is_faster_than_dense(n, q)


def _leading(given: TrainingData, wanted: ComponentOptions, weighting: Weighting, solver: SolverOptions) -> Components:
    n, q = given.landmarks.shape[0], int(wanted.count or 0)
    # What it begins with only rounds the outcome: without a wish it is always the same.
    rng = check_random_state(0 if solver.random_state is None else solver.random_state)
    start = rng.normal(size=(n, lanczos.block_columns(n, q)))
    most = solver.products(q, n)
    with (
        _problem(given, q, weighting, solver) as problem,
        progress.step_bar("dkfm-root", None, "product", solver.progress) as bar,
    ):

        def counted(V: Array) -> Array:
            bar.update()
            return problem.multiply(V)

        shown = replace(problem, multiply=counted)
        found, pairs = pca.solve_leading_components(shown, start, wanted, weighting, float(solver.tol), most)
    if not pairs.converged and solver.eigen_solver != "randomized":
        raise ConvergenceError(
            f"After {pairs.products} products with the Gram matrix {q} components have residuals up to "
            f'{pairs.residuals.max():.1e}; raise max_iter or tol, or use eigen_solver="dense".'
        )
    return found


@contextmanager
def _problem(given: TrainingData, q: int, weighting: Weighting, solver: SolverOptions) -> Iterator[Problem]:
    """Lend the problem, its Gram matrix in memory where it fits, else in its store."""
    n, d, kernel, have = given.landmarks.shape[0], given.width, given.kernel, memory.available_memory()
    held, columns = lanczos.held_columns(n, q), lanczos.block_columns(n, q)
    if budget.lanczos_bytes(n, d, held, columns, kernel.peak_blocks, kernel.landmark_copies) <= have:
        yield pca.dense_problem(given.gram(solver.tile_rows, solver.workspace, solver.progress), weighting)
        return
    whose = isinstance(given, PrecomputedGram)
    tile_rows, threads = (min(n, isqrt(TILE_VALUES)), 1) if whose else (solver.tile_rows or build.TILE_ROWS, CPU_COUNT)
    need = budget.lanczos_stored_bytes(n, d, held, columns, min(n, tile_rows), threads, kernel.landmark_copies)
    budget.require_fits(need, have, f"Lanczos with N = {n} training rows", "fit fewer rows or components")
    if isinstance(given, PrecomputedGram):
        _require_symmetric(given)
        yield pca.product_problem(partial(_by_rows, given), given.diagonal(), weighting)
    else:
        with build.open_stored_gram(
            kernel,
            given.landmarks,
            tile_rows=solver.tile_rows,
            workspace=solver.workspace,
            progress=solver.progress,
        ) as stored:
            yield pca.product_problem(stored.__matmul__, given.diagonal(), weighting)


def _require_symmetric(given: PrecomputedGram) -> None:
    """Raise unless ``u'Kv`` is ``v'Ku`` for two random vectors: one more reading of the matrix."""
    V = np.random.default_rng(0).normal(size=(len(given.numbers), 2))
    found = V.T @ _by_rows(given, V)
    if abs(found[0, 1] - found[1, 0]) > _SYMMETRY * np.abs(found).max():
        raise InvalidInputError("The Gram matrix is not symmetric.")


def _by_rows(given: PrecomputedGram, V: Array) -> Array:
    product, start = np.empty((len(given.numbers), V.shape[1])), 0
    whole = len(given.numbers) == given.source.shape[1]
    for tile in given.tiles():
        product[start : start + len(tile)] = (tile if whole else tile[:, given.numbers]) @ V
        start += len(tile)
    return product


def components_model(
    kernel: Kernel, landmarks: Rows, found: Components, centered: bool, dtype: np.dtype[np.floating]
) -> Model:
    """Return the model of components."""
    return cast_model(Model(kernel, landmarks, pca.component_heads(found, centered)), dtype)


def warn_of_rounding(measured: certificate.Certificate, dtype: np.dtype[np.floating]) -> None:
    """Warn where rounding is too large a part of the scores of the training rows."""
    remedy = "the mean of the features hides their variance: centre the columns of X, or choose another kernel"
    if dtype == np.float32:
        remedy = 'float32 does not hold these scores: fit with dtype="float64"'
    certificate.warn_above(measured.error, dtype, f"The certificate of these scores is {measured}", remedy)


def fitted_statistics(found: Components, weight: float) -> dict[str, object]:
    """Return what a fit keeps of components of rows that weigh so much together."""
    return {"eigenvalues": found.eigenvalues, "total_variance": found.total / weight, "total_weight": weight}


def variance_ratios(variances: Array, total: float) -> Array:
    """Return the shares of variances (q,) in a total: 0 of nothing, and NaN, with a warning, of what is not known."""
    if np.isnan(total):
        message = (
            "The shares of variance are NaN, for the first eigenvalues of a kernel that is not positive semi-definite "
            'do not tell the sum of all positive ones; fit with eigen_solver="dense" for them.'
        )
        warnings.warn(message, DkfmWarning, stacklevel=3)
    return np.zeros(len(variances)) if total <= 0 else variances / total


def fit_in_map(
    feature_map: FittedMap, wanted: ComponentOptions, centered: bool, X: object, sample_weight: object
) -> tuple[Model, dict[str, object], bool]:
    """Return the model of the components in the features of a map, what is fitted, and whether of landmarks alone.

    See `KernelPCA.from_map`.
    """
    model, head = feature_map.model, feature_map.model.head("residual")
    W = head.weights.astype(np.float64)
    score = prepare_scorer(Model(model.kernel, model.points, {"features": Head(W, triangular=head.triangular)}))
    own = X is None
    landmarks: TrainingData = TrainingRows(model.kernel, model.points, 0)
    if own:
        moments = landmark_moments(feature_map, W, sample_weight)
    else:
        every = as_training_data(model.kernel, X, copy=False)
        given, weights = apply_weights(every, sample_weight)
        moments = training_reductions.feature_moments(score, given.tiles(), given.diagonal(), weights)
        if is_clipped(feature_map.error_bounds):
            moments = replace(moments, similarity=float(np.trace(moments.second)))
        if model.kernel.is_precomputed:
            landmarks = every.subset(np.asarray(model.points)[:, 0].astype(np.intp))
    found = pca.solve_components_of_map(W, moments, wanted, centered)
    made = components_model(model.kernel, model.points, found, centered, model.dtype)
    scorer = prepare_scorer(made)
    if own:
        measured = certificate.certify_components(scorer, found.eigenvalues, landmarks.tiles())
    else:
        measured = certificate.certify_axes(scorer, found.eigenvalues, landmarks.tiles(), moments.weight)
    warn_of_rounding(measured, model.dtype)
    return made, {**fitted_statistics(found, moments.weight), "certificate": measured}, own


def landmark_moments(feature_map: FittedMap, W: Array, sample_weight: object) -> Moments:
    """Return the moments of the landmarks, where these are all training rows."""
    values, kernel, points = feature_map.eigenvalues, feature_map.model.kernel, feature_map.model.points
    if not feature_map.holds_training_rows or values is None or kernel.is_precomputed or sample_weight is not None:
        raise InvalidInputError(
            "X, the training rows, is needed: this map does not keep them (it has fewer landmarks, or pivots, or a "
            "precomputed kernel), or they are to have weights."
        )
    diagonal = values if is_clipped(feature_map.error_bounds) else kernel.evaluate_diagonal(points)
    similarity = float(diagonal.sum())
    return Moments(values, W.mean(axis=0) * values, float(len(W)), similarity, len(W))
