"""Fit kernel Fisher discriminants, and certify them."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from dkfm.core import budget, cpus
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, NotSupportedError, warn_caller
from dkfm.estimators.fitting import out_of_core_rows
from dkfm.estimators.fitting.feature_maps import FittedMap, cast_model
from dkfm.estimators.fitting.fit_certificates import MEAN_REMEDY, warn_of_rounding
from dkfm.estimators.fitting.pca import compute_landmark_moments
from dkfm.estimators.fitting.solver_choice import choose_solver
from dkfm.estimators.stored.class_labels import Labels
from dkfm.estimators.stored.discriminants import certify_cast, certify_discriminants
from dkfm.estimators.stored.feature_map import sample_scorer_and_kernel_rows
from dkfm.execution import memory, progress
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import is_inside_worker
from dkfm.execution.scoring_threads import open_certificate_scorer
from dkfm.execution.stage_log import log_stage
from dkfm.gram import training_data
from dkfm.gram.linear_systems.solver import SystemSolver
from dkfm.gram.linear_systems.tiled_direct_solver import SystemOptions
from dkfm.gram.matrix_free import open_matrix_free
from dkfm.gram.training_data import Indices, TrainingData
from dkfm.kernels import Definiteness, serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics.certificates.certificate import LIMITS, Certificate
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import prepare_scorer
from dkfm.numerics.supervised import fisher, shrinkage, spectral_gram
from dkfm.numerics.supervised.classes import Classes
from dkfm.numerics.supervised.fisher import Discriminants
from dkfm.numerics.supervised.fisher_by_systems import solve_discriminants_by_systems
from dkfm.numerics.supervised.kernel_rank import RankBound, bound_rank

_RIDGE_REMEDY = (
    "the ridge is little beside the rounding of kernel values: raise shrinkage, centre the columns of X, or give rows "
    "weights of more equal size"
)
"""Remedy in messages about large rounding errors."""

_ROUNDING_LIMITS = {"float64": 1e-5, "float32": 1e-2}
"""Largest estimate of rounding without a warning, by the dtype of the model; it is mostly ten times the error."""

_PRIORS_TOLERANCE = 1e-6
"""Largest difference allowed between the sum of the priors and 1."""


@dataclass(frozen=True)
class DiscriminantOptions:
    """The parameters of `KernelFisher` of the same names; `shrinkage` is None if the fit selects it."""

    n_components: int | None
    shrinkage: float | None
    priors: object
    solver: str
    on_indefinite: str
    tile_rows: int | None
    workspace: str | Path | None
    progress: bool

    def make_classes(self, codes: Indices, weights: Array, labels: Labels) -> Classes:
        """Return the classes of the training rows; raise unless there are two or more, and the parameters fit them."""
        count = len(labels)
        if count < 2:
            raise InvalidInputError(f"y has {count} class, {labels.tolist()[0]!r}, and discriminants need two or more.")
        if self.n_components is not None and self.n_components > count - 1:
            raise InvalidInputError(
                f"n_components must be at most {count - 1}, one less than the classes, and is {self.n_components}."
            )
        if self.priors is None:
            return Classes(codes.astype(np.int64), weights, count)
        try:
            priors = np.asarray(self.priors, np.float64)
        except (TypeError, ValueError):
            priors = np.empty(0)
        if priors.shape != (count,) or not (priors > 0).all() or not abs(priors.sum() - 1) <= _PRIORS_TOLERANCE:
            raise InvalidInputError(
                f"priors must be a positive number for each of the {count} classes, with a sum of 1, and are "
                f"{self.priors!r}."
            )
        return Classes(codes.astype(np.int64), weights, count, priors / priors.sum())


def check_shrinkage(shrinkage: object) -> float | None:
    """Return a shrinkage, or None for "auto"; raise an InvalidInputError for anything else."""
    if isinstance(shrinkage, str) and shrinkage == "auto":
        return None
    is_number = isinstance(shrinkage, int | float | np.number) and not isinstance(shrinkage, bool)
    if not (is_number and 0 <= cast("float", shrinkage) <= sys.float_info.max):
        raise InvalidInputError(f'shrinkage must be a finite number >= 0, or "auto", and is {shrinkage!r}.')
    return float(cast("float", shrinkage))


def fit_discriminants(
    data: TrainingData, classes: Classes, options: DiscriminantOptions, dtype: np.dtype[np.floating]
) -> tuple[Model, dict[str, object]]:
    """Return the model of the discriminants of training rows, and the fitted values by name."""
    decomposes = is_eigendecomposition_needed(options, data.kernel)
    reason = why_gram(options, data.kernel)
    solver = choose_solver(data, options.solver, reason, "KernelFisher", decomposes=decomposes)
    if solver == "dense":
        chosen, result = _solve_in_memory(data, classes, options, decomposes)
    else:
        chosen, result = cast("float", options.shrinkage), _solve_without_gram(data, classes, options, solver)
    heads = fisher.make_discriminant_heads(result, classes, options.n_components)
    model = cast_model(Model(data.kernel, data.indexable_rows, heads), dtype)
    values = {**_collect_fitted(result, classes, chosen), "codes": classes.codes}
    weights = {"sample_weight": classes.weights}
    with open_certificate_scorer(model, "scores", len(classes.weights)) as scorer:
        measured = certify_discriminants(scorer, data, {**values, **weights}, result.ridge)
    remedy = _RIDGE_REMEDY if result.rounding > measured.error else MEAN_REMEDY
    certified = measured.combine(Certificate(result.rounding, result.rounding, 0))
    is_large = measured.error > LIMITS[model.dtype.name]
    warn_of_rounding(certified, model, remedy, LIMITS if is_large else _ROUNDING_LIMITS)
    return model, {**values, "certificate": certified, "verified_certificate": measured}


def _solve_without_gram(
    data: TrainingData, classes: Classes, options: DiscriminantOptions, method: str
) -> Discriminants:
    """Solve without a Gram matrix in memory, on the current Dask client or on threads of this process."""
    kernel, X = data.kernel, data.indexable_rows
    system = SystemOptions(options.tile_rows, options.workspace, options.progress)
    solver = SystemSolver(kernel, X, classes.weights, method, system)
    with open_matrix_free(
        kernel, X, classes.n_columns + 1, workspace=options.workspace, progress=options.progress
    ) as gram:
        return solve_discriminants_by_systems(
            gram.__matmul__,
            lambda ridge, right: solver.solve(ridge, right).values,
            data.diagonal(),
            classes,
            cast("float", options.shrinkage),
        )


def _solve_in_memory(
    data: TrainingData, classes: Classes, options: DiscriminantOptions, decomposes: bool
) -> tuple[float, Discriminants]:
    """Return the shrinkage and the discriminants from the Gram matrix in memory."""
    kernel, n, d = data.kernel, data.indexable_rows.shape[0], data.float64s_per_row
    rank_bound = bound_rank(kernel, data.indexable_rows)
    clips = options.on_indefinite == "clip" and not _is_known_conditionally_psd(kernel)
    by_eigenvalues = _needs_eigenvalues(options, kernel)
    has_room = decomposes or memory.has_factorization_memory(n, d, kernel.peak_blocks, kernel.landmark_copies)
    K = data.compute_gram(options.tile_rows, options.workspace, options.progress)
    seconds = budget.eigendecomposition_seconds(n) if decomposes else budget.cholesky_seconds(n)
    log_stage("root", f"discriminants from {n:,} x {n:,} kernel values in this process", seconds=seconds, rows=n)
    with progress.show_elapsed_bar(seconds if decomposes else 0.0, options.progress):
        if options.shrinkage is None:
            return _choose_shrinkage_and_solve(K, classes, options.on_indefinite, by_eigenvalues, clips, rank_bound)
        spectral = by_eigenvalues or (None if has_room else False)
        return options.shrinkage, fisher.solve_discriminants(
            K,
            classes,
            options.shrinkage,
            by_eigenvalues=spectral,
            on_indefinite=options.on_indefinite,
            rank_bound=rank_bound,
        )


def why_gram(options: DiscriminantOptions, kernel: Kernel) -> str:
    """Return the reason why a fit needs the Gram matrix in memory; empty if it can solve linear systems instead."""
    if options.shrinkage is None:
        return 'shrinkage="auto" needs eigenvalues'
    if is_eigendecomposition_needed(options, kernel):
        return (
            'eigenvalues are needed for on_indefinite="clip", a small shrinkage, and kernels not known to be positive'
        )
    is_psd = kernel.definiteness is Definiteness.PSD
    return "" if is_psd else "this kernel is positive semi-definite only after centring"


def is_eigendecomposition_needed(options: DiscriminantOptions, kernel: Kernel) -> bool:
    """Return whether a fit computes all eigenvectors of the Gram matrix; else it computes a Cholesky factor."""
    return _needs_eigenvalues(options, kernel) or options.shrinkage is None


def _needs_eigenvalues(options: DiscriminantOptions, kernel: Kernel) -> bool:
    small_shrinkage = options.shrinkage is not None and options.shrinkage < shrinkage.SHRINKAGE_GRID[0]
    return small_shrinkage or options.on_indefinite == "clip" or not _is_known_conditionally_psd(kernel)


def _choose_shrinkage_and_solve(
    K: Array, classes: Classes, on_indefinite: str, by_eigenvalues: bool, clips: bool, rank_bound: RankBound
) -> tuple[float, Discriminants]:
    """Return the shrinkage that cross-validation selects, and the discriminants; K is overwritten.

    `clips` says whether a negative part of the Gram matrix may have to be dropped.
    """
    if clips or shrinkage.has_dominant_fold(K.diagonal(), classes):
        chosen = shrinkage.choose_shrinkage_by_folds(K, classes, on_indefinite)
        return chosen, fisher.solve_discriminants(
            K,
            classes,
            chosen,
            by_eigenvalues=by_eigenvalues or None,
            on_indefinite=on_indefinite,
            rank_bound=rank_bound,
        )
    spectral = spectral_gram.decompose_gram(K, classes, on_indefinite, rank_bound)
    with single_blas_thread():
        most = 1 if is_inside_worker() else cpus.COUNT
        threads = shrinkage.count_threads(len(classes.codes), memory.clear_caches_and_measure_memory(), most)
        chosen = shrinkage.choose_shrinkage(spectral, classes, threads)
    return chosen, fisher.solve_from_eigenvectors(spectral, classes, chosen)


def fit_in_map(
    feature_map: FittedMap, options: DiscriminantOptions, y: Labels, X: object, sample_weight: object
) -> tuple[Model, dict[str, object]]:
    """Return the model of discriminants in the features of a map, and the fitted values (`KernelFisher.from_map`)."""
    if options.shrinkage is None:
        raise NotSupportedError('shrinkage="auto" needs a Gram matrix, which fit has; give from_map a number.')
    model, root = feature_map.model, feature_map.root
    W = root.weights
    all_rows = None if X is None else out_of_core_rows.as_data(model.kernel, X)
    landmarks = training_data.take_landmarks(model, all_rows)
    if all_rows is None:
        moments, landmark_features = compute_landmark_moments(feature_map, root, sample_weight)
        labels, codes = np.unique(y, return_inverse=True)
        classes = options.make_classes(codes, np.ones(len(y)), labels)
        sums: Array = classes.weighted_columns().T @ landmark_features
        del landmark_features  # free it before another matrix of this size is allocated
        second = moments.second_moment if moments.second_moment.ndim == 2 else np.diag(moments.second_moment)
    else:
        data, weights = training_data.drop_zero_weights(all_rows, sample_weight)
        weighted = y if data is all_rows else y[cast("Indices", data.original_row_indices)]
        labels, codes = np.unique(weighted, return_inverse=True)
        classes = options.make_classes(codes, weights, labels)
        sums, second = out_of_core_rows.compute_feature_moments(
            model.original_landmarks, root, data, classes, feature_map.workspace, feature_map.progress
        )
    result = fisher.solve_discriminants_of_map(W, second, sums, classes, options.shrinkage)
    del second  # so that the buffers of the certificate take its place
    heads = fisher.make_discriminant_heads(result, classes, options.n_components)
    fitted_model = cast_model(Model(model.kernel, model.original_landmarks, heads), model.dtype)
    mean = sums.sum(axis=0) / classes.total
    values = {**_collect_fitted(result, classes, options.shrinkage), "squares": result.direction_inner_products}
    values["mean"] = W @ mean
    scorer = prepare_scorer(fitted_model)
    measured = values["verified_certificate"] = certify_discriminants(scorer, landmarks, values, result.ridge)
    if model.dtype == np.float32:  # squared lengths do not show how much of the outputs its rounding is
        exact = cast_model(Model(model.kernel, model.original_landmarks, heads), np.dtype(np.float64))
        rows = sample_scorer_and_kernel_rows(landmarks)[0]
        measured = measured.combine(certify_cast(scorer, prepare_scorer(exact), rows, values))
    warn_of_rounding(measured, fitted_model)
    return fitted_model, {**values, "classes": labels, "certificate": measured}


def _collect_fitted(result: Discriminants, classes: Classes, shrinkage_used: float) -> dict[str, object]:
    if not len(result.between_class_variances):
        message = f"Beside a ridge of {result.ridge:.1e} the classes have one mean: the priors alone decide."
        warn_caller(message)
    return {
        "priors": classes.effective_priors,
        "ratios": result.between_class_variances,
        "means": result.means,
        "shrinkage": shrinkage_used,
        "ridge": result.ridge,
    }


def _is_known_conditionally_psd(kernel: Kernel) -> bool:
    """Return whether the kernel is one of dkfm's own and known to be (conditionally) positive semi-definite."""
    return (
        serialization.is_code_free(kernel)
        and not kernel.is_precomputed
        and kernel.definiteness is not Definiteness.INDEFINITE
    )
