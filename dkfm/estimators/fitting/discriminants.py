"""How the discriminants of training rows are found, and what is measured of them."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from dkfm.core import budget
from dkfm.core.rows import Array
from dkfm.errors import DkfmWarning, InvalidInputError, NotSupportedError
from dkfm.estimators.fitting.class_labels import Labels
from dkfm.estimators.fitting.components import landmark_moments, warn_of_rounding
from dkfm.estimators.fitting.feature_maps import FittedMap, cast_model
from dkfm.estimators.fitting.training_data import Numbers, TrainingData, TrainingRows, apply_weights, as_training_data
from dkfm.execution import memory, progress
from dkfm.kernels import Definiteness, serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics import fisher, shrinkage, training_reductions
from dkfm.numerics.certificates import discriminants
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.fisher import Classes, Discriminants
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import Scorer, prepare_scorer

_SUM = 1e-6
"""What the sum of priors may be off."""


@dataclass(frozen=True)
class DiscriminantOptions:
    """The parameters of `KernelFisher` of these names; a shrinkage of None is to be chosen."""

    n_components: int | None
    shrinkage: float | None
    priors: object
    on_indefinite: str
    tile_rows: int | None
    workspace: str | Path | None
    progress: bool

    def classes(self, codes: Numbers, weights: Array, labels: Labels) -> Classes:
        """Return the classes of the training rows, once they can be told apart, and the priors are theirs."""
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
        if priors.shape != (count,) or not (priors > 0).all() or not abs(priors.sum() - 1) <= _SUM:
            raise InvalidInputError(
                f"priors must be a positive number for each of the {count} classes, with a sum of 1, and are "
                f"{self.priors!r}."
            )
        return Classes(codes.astype(np.int64), weights, count, priors / priors.sum())


def fit_discriminants(
    given: TrainingData, classes: Classes, asked: DiscriminantOptions, dtype: np.dtype[np.floating]
) -> tuple[Model, dict[str, object]]:
    """Return the model of the discriminants of training rows, and what is fitted beside it, by name."""
    kernel, n = given.kernel, given.landmarks.shape[0]
    small = asked.shrinkage is not None and asked.shrinkage < shrinkage.GRID[0]
    by_eigenvalues = small or asked.on_indefinite == "clip" or not _is_known(kernel)
    decomposed = by_eigenvalues or asked.shrinkage is None
    _require_memory(n, given.width, kernel, budget.EIGENVECTOR_SQUARES if decomposed else 1)
    room = decomposed or memory.has_driver_memory(n, given.width, kernel.peak_blocks, kernel.landmark_copies)
    K = given.gram(asked.tile_rows, asked.workspace, asked.progress)
    with progress.call_bar("dkfm-root", budget.eigendecomposition_seconds(n) if decomposed else 0.0, asked.progress):
        used = (
            shrinkage.choose_shrinkage(K, classes, asked.on_indefinite) if asked.shrinkage is None else asked.shrinkage
        )
        how = by_eigenvalues or (None if room else False)
        found = fisher.solve_discriminants(K, classes, used, by_eigenvalues=how, on_indefinite=asked.on_indefinite)
    del K
    model = cast_model(
        Model(kernel, given.landmarks, fisher.discriminant_heads(found, classes, asked.n_components)), dtype
    )
    values = {**_values(found, classes, used), "codes": classes.codes}
    weights = {"sample_weight": classes.weights}
    measure = certify_fit(prepare_scorer(model), given, {**values, **weights}, found.ridge)
    warn_of_rounding(measure, dtype)
    return model, {**values, "certificate": measure}


def fit_in_map(
    feature_map: FittedMap, asked: DiscriminantOptions, y: Labels, X: object, sample_weight: object
) -> tuple[Model, dict[str, object]]:
    """Return the model of the discriminants in the features of a map, and what is fitted; see `from_map`."""
    if asked.shrinkage is None:
        raise NotSupportedError('shrinkage="auto" needs a Gram matrix, which fit has; give from_map a number.')
    model, head = feature_map.model, feature_map.model.head("residual")
    W = head.weights.astype(np.float64)
    score = prepare_scorer(Model(model.kernel, model.points, {"features": Head(W, triangular=head.triangular)}))
    landmarks: TrainingData = TrainingRows(model.kernel, model.points, 0)
    if X is None:
        moments = landmark_moments(feature_map, W, sample_weight)
        labels, codes = np.unique(y, return_inverse=True)
        classes = asked.classes(codes, np.ones(len(y)), labels)
        sums: Array = classes.indicators().T @ (W * moments.second)
        second: Array = np.diag(moments.second)
    else:
        every = as_training_data(model.kernel, X, copy=False)
        given, weights = apply_weights(every, sample_weight)
        labels, codes = np.unique(y if given is every else y[cast("Numbers", given.numbers)], return_inverse=True)
        classes = asked.classes(codes, weights, labels)
        sums, second = training_reductions.feature_sums(score, given.tiles(), classes.indicators())
        if model.kernel.is_precomputed:
            landmarks = every.subset(np.asarray(model.points)[:, 0].astype(np.intp))
    found = fisher.solve_discriminants_of_map(W, second, sums, classes, asked.shrinkage)
    made = cast_model(
        Model(model.kernel, model.points, fisher.discriminant_heads(found, classes, asked.n_components)), model.dtype
    )
    middle = sums.sum(axis=0) / classes.total
    values = {**_values(found, classes, asked.shrinkage), "squares": found.squares, "mean": W @ middle}
    measure = certify_fit(prepare_scorer(made), landmarks, values, found.ridge)
    warn_of_rounding(measure, model.dtype)
    return made, {**values, "classes": labels, "certificate": measure}


def certify_fit(scorer: Scorer, landmarks: TrainingData, fitted: Mapping[str, object], ridge: float) -> Certificate:
    """Return the certificate of discriminants, and of the decisions, with what is fitted beside the model."""
    means, priors = cast("Array", fitted["means"]), cast("Array", fitted["priors"])
    count = scorer.model.head("scores").columns
    turn, constants = fisher.decision_functions(means, priors)
    worst, longest = Certificate(0.0, 0.0, 0), 1 / ridge if ridge > 0 else 0.0
    if len(turn) and "squares" in fitted:
        longest = float(cast("Array", fitted["squares"]).diagonal().max())
    for name, T, b in (
        ("scores", np.eye(len(turn))[:, :count], np.zeros(count)),
        ("decision_function", turn, constants),
    ):
        if "codes" in fitted:
            codes = cast("Numbers", fitted["codes"])
            weights = cast("Array", fitted.get("sample_weight", np.ones(len(codes))))
            rows = Classes(codes.astype(np.int64), weights, len(priors)).indicators()
            expected = T.T @ T, means @ T - b
            found = discriminants.certify_discriminants(scorer, name, landmarks.tiles(), rows, expected, ridge)
        else:
            products = T.T @ cast("Array", fitted["squares"]) @ T
            mean = cast("Array", fitted["mean"])
            found = discriminants.certify_combinations(scorer, name, landmarks.tiles(), products, mean, b, longest)
        worst = worst.worse(found)
    return worst


def _values(found: Discriminants, classes: Classes, used: float) -> dict[str, object]:
    if not len(found.ratios):
        message = f"Beside a ridge of {found.ridge:.1e} the classes have one mean: the priors alone decide."
        warnings.warn(message, DkfmWarning, stacklevel=4)
    return {
        "priors": classes.chances,
        "ratios": found.ratios,
        "means": found.means,
        "shrinkage": used,
        "ridge": found.ridge,
    }


def _is_known(kernel: Kernel) -> bool:
    """Whether the kernel is one of dkfm's own, and (conditionally) positive semi-definite."""
    return (
        serialization.is_code_free(kernel)
        and not kernel.is_precomputed
        and kernel.definiteness is not Definiteness.INDEFINITE
    )


def _require_memory(n: int, d: int, kernel: Kernel, squares: int) -> None:
    """Raise a BudgetError unless this process can hold the Gram matrix, and so many of its size."""
    if squares == budget.EIGENVECTOR_SQUARES:
        memory.require_driver_memory(n, d, kernel.peak_blocks, kernel.landmark_copies)
        return
    need, have = budget.fit_bytes(n, d, kernel.peak_blocks, kernel.landmark_copies, squares), memory.available_memory()
    remedy = "fit fewer rows, or the features of a map on fewer landmarks with KernelFisher.from_map"
    budget.require_fits(need, have, f"The Gram matrix of N = {n} training rows", remedy)
