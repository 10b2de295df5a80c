"""Read fitted linear models of scikit-learn as matrices, offsets and links, without importing scikit-learn.

A model is recognized by the names of its classes, and read from its fitted attributes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import NotSupportedError
from dkfm.estimators.stored.folded import DECISION, PREDICT, PROBABILITIES, TRANSFORM
from dkfm.numerics import links
from dkfm.numerics.model import Head

_ADVICE = "it can still run on what transform returns"


@dataclass(frozen=True, eq=False)
class AffineStep:
    """Affine map ``F weights - offset`` (n, q) of features F (n, r); weights (r, q) or their diagonal (r,), float64."""

    weights: Array
    offset: Array

    def then(self, after: "AffineStep") -> "AffineStep":
        """Return the map that applies this one and then another."""
        if after.weights.ndim == 1:
            return AffineStep(self.weights * after.weights, self.offset * after.weights + after.offset)
        matrix = self.weights[:, np.newaxis] * after.weights if self.weights.ndim == 1 else self.weights @ after.weights
        return AffineStep(matrix, self.offset @ after.weights + after.offset)

    @property
    def dense_weights(self) -> Array:
        """The weights as a full matrix (r, q), also if only their diagonal is stored."""
        return np.diag(self.weights) if self.weights.ndim == 1 else self.weights


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Outputs of a fitted linear model."""

    estimator_type: str
    """Kind of estimator. One of "classifier", "regressor", "outlier_detector", "transformer"."""
    affine_outputs: Mapping[str, tuple[AffineStep, str]]
    """Affine map and link of each output, by name; the first output is the main one."""
    classes: npt.NDArray[np.generic] | None = None
    """Labels that the codes of "predict" stand for. Shape (C,)."""


def read_linear_model(model: object) -> LinearModel:
    """Read a fitted linear model, or a pipeline of affine steps that ends with one.

    Raises
    ------
    NotSupportedError
        The outputs are not affine in the features, or not known to be.
    """
    if "Pipeline" in _list_sklearn_base_names(model):
        return _read_pipeline(model)
    readers = (reader for name, reader in _READERS.items() if name in _list_sklearn_base_names(model))
    reader = next(readers, None)
    if reader is None:
        raise NotSupportedError(
            f"{type(model).__name__} is not a model whose outputs are known to be affine in the features, and cannot "
            f"be folded; {_ADVICE}."
        )
    linear_model = reader(model)
    width = next(iter(linear_model.affine_outputs.values()))[0].weights.shape[0]
    expected = getattr(model, "n_features_in_", width)
    if width != expected:
        raise NotSupportedError(f"{type(model).__name__} has {width} coefficients for {expected} features.")
    return linear_model


def compose_head_with_affine(head: Head, affine: AffineStep) -> tuple[Array, Array]:
    """Return W (N, q) and b (q,), in float64, of a head followed by an affine map: ``k(Z, X) W - b``."""
    W = np.asarray(head.weights[:, : head.n_columns], np.float64)
    b = np.zeros(W.shape[1]) if head.offset is None else np.asarray(head.offset, np.float64)
    matrix = affine.dense_weights
    if head.sqrt_eigenvalues is not None:  # ((k W - b) s) W'
        matrix = np.asarray(head.sqrt_eigenvalues, np.float64)[:, np.newaxis] * (W.T @ matrix)
    return W @ matrix, b @ matrix + affine.offset


def _list_sklearn_base_names(model: object) -> list[str]:
    """Return the names of the scikit-learn classes of a model, in the order of its bases."""
    return [base.__name__ for base in type(model).__mro__ if base.__module__.partition(".")[0] == "sklearn"]


def _coef_to_weights(values: object) -> Array:
    """Return coefficients (q, r) as a dense array (r, q)."""
    dense = values.toarray() if hasattr(values, "toarray") else values
    return np.atleast_2d(np.asarray(dense, np.float64)).T


def _expand_offset(values: object, width: int) -> Array:
    return np.broadcast_to(np.ravel(np.asarray(values, np.float64)), (width,)).copy()


def _read_coef_and_intercept(model: Any) -> AffineStep:  # Any: a scikit-learn model, here and below
    weights = _coef_to_weights(model.coef_)
    return AffineStep(weights, -_expand_offset(model.intercept_, weights.shape[1]))


def _read_classifier(model: Any, probability_link: str | None = None) -> LinearModel:
    classes = np.asarray(model.classes_)
    decision = _read_coef_and_intercept(model)
    if classes.ndim == 1 and len(classes) < 2:
        raise NotSupportedError(f"{type(model).__name__} knows one class alone, and decides nothing; {_ADVICE}.")
    if classes.ndim != 1 or links.count_classes(decision.weights.shape[1]) != len(classes):
        raise NotSupportedError(f"{type(model).__name__} of several labels a row cannot be folded; {_ADVICE}.")
    outputs = {PREDICT: (decision, links.ARGMAX), DECISION: (decision, links.IDENTITY)}
    if probability_link is not None:
        outputs[PROBABILITIES] = (decision, probability_link)
    return LinearModel("classifier", outputs, classes)


def _read_logistic(model: Any) -> LinearModel:
    """Read a logistic regression; those of older versions of scikit-learn have a parameter `multi_class`."""
    multi_class, binary = getattr(model, "multi_class", "auto"), len(model.classes_) == 2
    ovr = multi_class in ("ovr", "warn") or (multi_class != "multinomial" and (binary or model.solver == "liblinear"))
    base = _read_classifier(model, links.SIGMOID if ovr else links.SOFTMAX)
    if ovr or not binary:
        return base
    decision, _ = base.affine_outputs[DECISION]
    pair = AffineStep(np.hstack([-decision.weights, decision.weights]), np.hstack([-decision.offset, decision.offset]))
    return LinearModel(base.estimator_type, {**base.affine_outputs, PROBABILITIES: (pair, links.SOFTMAX)}, base.classes)


def _read_sgd_classifier(model: Any) -> LinearModel:
    probability_links = {"log_loss": links.SIGMOID, "modified_huber": links.MODIFIED_HUBER}
    return _read_classifier(model, probability_links.get(getattr(model, "loss", "")))


def _read_discriminant(model: Any) -> LinearModel:
    classifier = _read_classifier(model, links.SIGMOID if len(model.classes_) == 2 else links.SOFTMAX)
    if model.solver not in ("svd", "eigen"):
        return classifier
    scalings = np.asarray(model.scalings_, np.float64)[:, : model._max_components]
    mean = getattr(model, "xbar_", None) if model.solver == "svd" else None
    offset = np.zeros(scalings.shape[1]) if mean is None else np.asarray(mean, np.float64) @ scalings
    outputs = {**classifier.affine_outputs, TRANSFORM: (AffineStep(scalings, offset), links.IDENTITY)}
    return LinearModel(classifier.estimator_type, outputs, classifier.classes)


def _read_regressor(model: Any) -> LinearModel:
    return LinearModel("regressor", {PREDICT: (_read_coef_and_intercept(model), links.IDENTITY)})


def _read_one_class(model: Any) -> LinearModel:
    weights = _coef_to_weights(model.coef_)
    decision = AffineStep(weights, _expand_offset(model.offset_, weights.shape[1]))
    outputs = {PREDICT: (decision, links.NOT_NEGATIVE), DECISION: (decision, links.IDENTITY)}
    return LinearModel("outlier_detector", outputs, np.array([-1, 1], np.int32))


def _read_decomposition(model: Any) -> LinearModel:
    axes = _coef_to_weights(model.components_)
    mean = getattr(model, "mean_", None)
    if getattr(model, "whiten", False):
        scale = np.sqrt(np.asarray(model.explained_variance_))
        axes = axes / np.maximum(scale, np.finfo(scale.dtype).eps)
    offset = np.zeros(axes.shape[1]) if mean is None else np.asarray(mean, np.float64) @ axes
    return LinearModel("transformer", {TRANSFORM: (AffineStep(axes, offset), links.IDENTITY)})


def _read_scaler(model: Any) -> LinearModel:
    d = int(model.n_features_in_)
    scale = np.ones(d) if model.scale_ is None else np.asarray(model.scale_, np.float64)
    mean = np.zeros(d) if not model.with_mean or model.mean_ is None else np.asarray(model.mean_, np.float64)
    return LinearModel("transformer", {TRANSFORM: (AffineStep(1 / scale, mean / scale), links.IDENTITY)})


def _read_pls(model: Any) -> LinearModel:
    """Read partial least squares; the regression is the main output."""
    mean = np.asarray(model._x_mean, np.float64)
    rotations = np.asarray(model.x_rotations_, np.float64) / np.asarray(model._x_std, np.float64)[:, np.newaxis]
    weights = _coef_to_weights(model.coef_)
    predict = AffineStep(weights, mean @ weights - _expand_offset(model.intercept_, weights.shape[1]))
    transform = AffineStep(rotations, mean @ rotations)
    return LinearModel("regressor", {PREDICT: (predict, links.IDENTITY), TRANSFORM: (transform, links.IDENTITY)})


def _read_pipeline(model: Any) -> LinearModel:
    """Read the last step of a pipeline, composed with the affine maps of the steps before it."""
    *steps, last = [step for _, step in model.steps if step is not None and step != "passthrough"] or [None]
    if last is None:
        raise NotSupportedError(f"A Pipeline without steps cannot be folded; {_ADVICE}.")
    linear_model = read_linear_model(last)
    for step in reversed(steps):
        before = read_linear_model(step).affine_outputs.get(TRANSFORM)
        if before is None:
            raise NotSupportedError(f"{type(step).__name__} transforms nothing, and is no step of a Pipeline.")
        composed = {id(affine): before[0].then(affine) for affine, _ in linear_model.affine_outputs.values()}
        outputs = {name: (composed[id(affine)], link) for name, (affine, link) in linear_model.affine_outputs.items()}
        linear_model = LinearModel(linear_model.estimator_type, outputs, linear_model.classes)
    return linear_model


_READERS: dict[str, Callable[[Any], LinearModel]] = {
    "LogisticRegression": _read_logistic,
    "SGDClassifier": _read_sgd_classifier,
    "LinearDiscriminantAnalysis": _read_discriminant,
    "SGDOneClassSVM": _read_one_class,
    "SGDRegressor": _read_regressor,
    "StandardScaler": _read_scaler,
    "PCA": _read_decomposition,
    "IncrementalPCA": _read_decomposition,
    "TruncatedSVD": _read_decomposition,
    "_PLS": _read_pls,
    "LinearClassifierMixin": _read_classifier,
    "LinearModel": _read_regressor,
}
"""Readers by the name of a scikit-learn class or base class; the first match is used."""
