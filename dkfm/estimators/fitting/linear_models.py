"""A fitted linear model of scikit-learn's, read as what it is: matrices, offsets and links. scikit-learn stays unknown.

A model is recognised by the names of its classes, and read from its fitted attributes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import NotSupportedError
from dkfm.numerics import links
from dkfm.numerics.model import Head

DECISION, PREDICT, PROBABILITIES, TRANSFORM = "decision_function", "predict", "predict_proba", "transform"

_ADVICE = "it can still run on what transform returns"


@dataclass(frozen=True, eq=False)
class AffineStep:
    """Features F (n, r) to ``F weights - offset`` (n, q); weights (r, q), or the diagonal of them (r,), float64."""

    weights: Array
    offset: Array

    def then(self, after: "AffineStep") -> "AffineStep":
        """Return this map followed by another."""
        if after.weights.ndim == 1:
            return AffineStep(self.weights * after.weights, self.offset * after.weights + after.offset)
        both = self.weights[:, np.newaxis] * after.weights if self.weights.ndim == 1 else self.weights @ after.weights
        return AffineStep(both, self.offset @ after.weights + after.offset)

    @property
    def matrix(self) -> Array:
        """The weights (r, q)."""
        return np.diag(self.weights) if self.weights.ndim == 1 else self.weights


@dataclass(frozen=True, eq=False)
class LinearModel:
    """What a fitted linear model returns, output by output.

    Attributes
    ----------
    kind : {"classifier", "regressor", "outlier_detector", "transformer"}
    outputs : mapping of str to (Affine, str)
        The map, and the link behind it; the first output is what the model is for.
    classes : ndarray of shape (C,), optional
        What the codes of "predict" stand for.
    """

    kind: str
    outputs: Mapping[str, tuple[AffineStep, str]]
    classes: npt.NDArray[np.generic] | None = field(default=None)


def read_linear_model(model: object) -> LinearModel:
    """Read a fitted linear model, or a pipeline of affine steps that ends with one.

    Raises
    ------
    NotSupportedError
        What it returns is not affine in the features, or it is not known to be.
    """
    if "Pipeline" in _names(model):
        return _pipeline(model)
    readers = (reader for name, reader in _READERS.items() if name in _names(model))
    reader = next(readers, None)
    if reader is None:
        raise NotSupportedError(
            f"{type(model).__name__} is not a model whose outputs are known to be affine in the features, and cannot "
            f"be folded; {_ADVICE}."
        )
    found = reader(model)
    width = next(iter(found.outputs.values()))[0].weights.shape[0]
    expected = getattr(model, "n_features_in_", width)
    if width != expected:
        raise NotSupportedError(f"{type(model).__name__} has {width} coefficients for {expected} features.")
    return found


def compose_head(head: Head, affine: AffineStep) -> tuple[Array, Array]:
    """Return W (N, q) and b (q,) of a head that is followed by an affine map: ``k(Z, X) W - b``, in float64."""
    W = np.asarray(head.weights[:, : head.columns], np.float64)
    b = np.zeros(W.shape[1]) if head.offset is None else np.asarray(head.offset, np.float64)
    after = affine.matrix
    if head.rotation is not None:  # ((k W - b) s) W'
        after = np.asarray(head.rotation, np.float64)[:, np.newaxis] * (W.T @ after)
    return W @ after, b @ after + affine.offset


def sum_of_magnitudes(head: Head, affine: AffineStep, K: Array) -> Array:
    """Return ``sum |k| |W| |A| + |b|`` (n, q) of kernel values (n, N): what head and map, one by one, round by."""
    W = np.abs(np.asarray(head.weights[:, : head.columns], np.float64))
    sums = np.abs(K) @ W
    if head.offset is not None:
        sums += np.abs(head.offset)
    if head.rotation is not None:
        sums = (sums * np.abs(head.rotation)) @ W.T
    found: Array = sums @ np.abs(affine.matrix) + np.abs(affine.offset)
    return found


def _names(model: object) -> list[str]:
    """Return the names of a model's classes that are scikit-learn's, its own first."""
    return [base.__name__ for base in type(model).__mro__ if base.__module__.partition(".")[0] == "sklearn"]


def _columns(values: object) -> Array:
    """Return coefficients (q, r) as (r, q), dense."""
    dense = values.toarray() if hasattr(values, "toarray") else values
    return np.atleast_2d(np.asarray(dense, np.float64)).T


def _offset(values: object, width: int) -> Array:
    return np.broadcast_to(np.ravel(np.asarray(values, np.float64)), (width,)).copy()


def _decision(model: Any) -> AffineStep:  # a model of scikit-learn's, here and below
    weights = _columns(model.coef_)
    return AffineStep(weights, -_offset(model.intercept_, weights.shape[1]))


def _classifier(model: Any, chances: str | None = None, decision: AffineStep | None = None) -> LinearModel:
    classes = np.asarray(model.classes_)
    decision = _decision(model) if decision is None else decision
    if classes.ndim == 1 and len(classes) < 2:
        raise NotSupportedError(f"{type(model).__name__} knows one class alone, and decides nothing; {_ADVICE}.")
    if classes.ndim != 1 or links.count_classes(decision.weights.shape[1]) != len(classes):
        raise NotSupportedError(f"{type(model).__name__} of several labels a row cannot be folded; {_ADVICE}.")
    outputs = {PREDICT: (decision, links.ARGMAX), DECISION: (decision, links.IDENTITY)}
    if chances is not None:
        outputs[PROBABILITIES] = (decision, chances)
    return LinearModel("classifier", outputs, classes)


def _logistic(model: Any) -> LinearModel:
    """Read a logistic regression; what `multi_class` was, older versions of scikit-learn say."""
    meant, binary = getattr(model, "multi_class", "auto"), len(model.classes_) == 2
    apart = meant in ("ovr", "warn") or (meant != "multinomial" and (binary or model.solver == "liblinear"))
    found = _classifier(model, links.SIGMOID if apart else links.SOFTMAX)
    if apart or not binary:
        return found
    decision, _ = found.outputs[DECISION]
    both = AffineStep(np.hstack([-decision.weights, decision.weights]), np.hstack([-decision.offset, decision.offset]))
    return LinearModel(found.kind, {**found.outputs, PROBABILITIES: (both, links.SOFTMAX)}, found.classes)


def _stochastic(model: Any) -> LinearModel:
    chances = {"log_loss": links.SIGMOID, "modified_huber": links.MODIFIED_HUBER}
    return _classifier(model, chances.get(getattr(model, "loss", "")))


def _discriminant(model: Any) -> LinearModel:
    found = _classifier(model, links.SIGMOID if len(model.classes_) == 2 else links.SOFTMAX)
    if model.solver not in ("svd", "eigen"):
        return found
    scalings = np.asarray(model.scalings_, np.float64)[:, : model._max_components]
    mean = getattr(model, "xbar_", None) if model.solver == "svd" else None
    offset = np.zeros(scalings.shape[1]) if mean is None else np.asarray(mean, np.float64) @ scalings
    outputs = {**found.outputs, TRANSFORM: (AffineStep(scalings, offset), links.IDENTITY)}
    return LinearModel(found.kind, outputs, found.classes)


def _regressor(model: Any) -> LinearModel:
    return LinearModel("regressor", {PREDICT: (_decision(model), links.IDENTITY)})


def _one_class(model: Any) -> LinearModel:
    weights = _columns(model.coef_)
    decision = AffineStep(weights, _offset(model.offset_, weights.shape[1]))
    outputs = {PREDICT: (decision, links.NOT_NEGATIVE), DECISION: (decision, links.IDENTITY)}
    return LinearModel("outlier_detector", outputs, np.array([-1, 1], np.int32))


def _axes(model: Any) -> LinearModel:
    axes = _columns(model.components_)
    mean = getattr(model, "mean_", None)
    if getattr(model, "whiten", False):
        scale = np.sqrt(np.asarray(model.explained_variance_))
        axes = axes / np.maximum(scale, np.finfo(scale.dtype).eps)
    offset = np.zeros(axes.shape[1]) if mean is None else np.asarray(mean, np.float64) @ axes
    return LinearModel("transformer", {TRANSFORM: (AffineStep(axes, offset), links.IDENTITY)})


def _scaler(model: Any) -> LinearModel:
    d = int(model.n_features_in_)
    scale = np.ones(d) if model.scale_ is None else np.asarray(model.scale_, np.float64)
    mean = np.zeros(d) if not model.with_mean or model.mean_ is None else np.asarray(model.mean_, np.float64)
    return LinearModel("transformer", {TRANSFORM: (AffineStep(1 / scale, mean / scale), links.IDENTITY)})


def _latent(model: Any) -> LinearModel:
    """Read partial least squares: the regression first."""
    mean = np.asarray(model._x_mean, np.float64)
    rotations = np.asarray(model.x_rotations_, np.float64) / np.asarray(model._x_std, np.float64)[:, np.newaxis]
    weights = _columns(model.coef_)
    predict = AffineStep(weights, mean @ weights - _offset(model.intercept_, weights.shape[1]))
    transform = AffineStep(rotations, mean @ rotations)
    return LinearModel("regressor", {PREDICT: (predict, links.IDENTITY), TRANSFORM: (transform, links.IDENTITY)})


def _pipeline(model: Any) -> LinearModel:
    """Read the last step, behind the affine maps of those before it."""
    *steps, last = [step for _, step in model.steps if step is not None and step != "passthrough"] or [None]
    if last is None:
        raise NotSupportedError(f"A Pipeline without steps cannot be folded; {_ADVICE}.")
    found = read_linear_model(last)
    for step in reversed(steps):
        before = read_linear_model(step).outputs.get(TRANSFORM)
        if before is None:
            raise NotSupportedError(f"{type(step).__name__} transforms nothing, and is no step of a Pipeline.")
        made = {id(affine): before[0].then(affine) for affine, _ in found.outputs.values()}
        outputs = {name: (made[id(affine)], link) for name, (affine, link) in found.outputs.items()}
        found = LinearModel(found.kind, outputs, found.classes)
    return found


_READERS: dict[str, Callable[[Any], LinearModel]] = {
    "LogisticRegression": _logistic,
    "SGDClassifier": _stochastic,
    "LinearDiscriminantAnalysis": _discriminant,
    "SGDOneClassSVM": _one_class,
    "SGDRegressor": _regressor,
    "StandardScaler": _scaler,
    "PCA": _axes,
    "IncrementalPCA": _axes,
    "TruncatedSVD": _axes,
    "_PLS": _latent,
    "LinearClassifierMixin": _classifier,
    "LinearModel": _regressor,
}
"""By the name of a class of scikit-learn's, or one that it derives from; the first that fits."""
