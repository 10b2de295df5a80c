"""A folded linear model: what `fold` returns, and what comes back from a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar, cast

import numpy as np
from sklearn.utils.metaestimators import available_if

from dkfm.core.rows import Array, Rows
from dkfm.errors import CertificateError, NotSupportedError, UnsupportedStoreError
from dkfm.estimators.fitting import class_labels
from dkfm.estimators.fitting.class_labels import Labels
from dkfm.estimators.fitting.linear_models import DECISION, PREDICT, PROBABILITIES, TRANSFORM
from dkfm.estimators.fitting.predictions import Outcome, codes_to_labels, flatten_column
from dkfm.estimators.serving import ScoringMixin
from dkfm.estimators.transformer import ModelTransformerMixin
from dkfm.numerics import links
from dkfm.numerics.certificates import reference
from dkfm.numerics.certificates.certificate import sample_evenly
from dkfm.numerics.model import Model
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    from sklearn.utils import Tags

_LINKS: dict[str, dict[str, set[str]]] = {
    "classifier": {
        PREDICT: {links.ARGMAX},
        DECISION: {links.IDENTITY},
        PROBABILITIES: {links.SIGMOID, links.SOFTMAX, links.MODIFIED_HUBER},
        TRANSFORM: {links.IDENTITY},
    },
    "outlier_detector": {PREDICT: {links.NOT_NEGATIVE}, DECISION: {links.IDENTITY}},
    "regressor": {PREDICT: {links.IDENTITY}, TRANSFORM: {links.IDENTITY}},
    "transformer": {TRANSFORM: {links.IDENTITY}},
}
"""The outputs that each kind of model may have, the first of which it has, and the links behind them."""


def sample_landmarks(model: Model) -> Rows:
    """Return landmarks that a folded model is measured on, at most 512."""
    return model.points[sample_evenly(model.landmarks.shape[0])]


_Method = TypeVar("_Method", bound="Callable[..., object]")


def _where(name: str) -> Callable[[_Method], _Method]:
    """Return a decorator of what is a method only of a model with this output."""

    def has(folded: Folded) -> bool:
        if name not in folded.model_.heads:
            raise AttributeError(f"{folded.model_name_} has no {name}.")
        return True

    return cast("Callable[[_Method], _Method]", available_if(has))


class Folded(ScoringMixin):
    """A linear model of features as one product with kernel values; made by `fold`, already fitted.

    It has those of the methods below that the model has that was folded. `fit` does nothing, and `clone` returns it.

    Attributes
    ----------
    model_ : Model
    kernel_ : Kernel
    classes_ : ndarray of shape (C,)
        Of a classifier.
    rounding_ : float
        By how much folded and unfolded outputs of the landmarks differ, as a share of their spread; not of a
        precomputed kernel.
    model_name_, kind_ : str
        What was folded: the name of its class; "classifier", "regressor", "outlier_detector" or "transformer".
    n_features_in_ : int
    """

    classes_: Labels
    rounding_: float
    model_name_: str
    kind_: str
    workspace = None

    def fit(self, X: object, y: object = None) -> Self:
        """Do nothing: the model is fitted."""
        return self

    @_where(PREDICT)
    def predict(self, X: object) -> Outcome:
        """Return the label, or the value, of each row X (n, d): (n,), of several targets (n, q).

        Of dask arrays and data frames lazily.
        """
        found = self._of(PREDICT, X)
        return codes_to_labels(found, self.classes_) if self._labels else flatten_column(found)

    @_where(DECISION)
    def decision_function(self, X: object) -> Outcome:
        """Return what `predict` decides by, (n, C), of two classes (n,)."""
        return flatten_column(self._of(DECISION, X))

    @_where(PROBABILITIES)
    def predict_proba(self, X: object) -> Outcome:
        """Return the probability of each class for rows X, (n, C)."""
        return self._of(PROBABILITIES, X)

    @_where(PREDICT)
    def score(self, X: object, y: object, sample_weight: object = None) -> float:
        """Return the accuracy of a classifier, or R^2 of a regressor, on rows X with labels or values y."""
        from sklearn.metrics import accuracy_score, r2_score

        measure = accuracy_score if self._labels else r2_score
        return float(measure(y, self.predict(X), sample_weight=sample_weight))

    @property
    def _labels(self) -> bool:
        return self.kind_ in ("classifier", "outlier_detector")

    def verify(self, X: object = None) -> FoldVerification:
        """Hold the outputs of landmarks against the dense formula.

        Raises
        ------
        CertificateError
            They differ by more than rounding allows.
        """
        model = self.model_
        if model.kernel.is_precomputed:
            raise NotSupportedError("A folded model of a precomputed kernel has no points to measure it on.")
        points = sample_landmarks(model)
        shares = [0.0]
        for name, found in self._scorer().several(list(model.heads), points).items():
            expected, allowed = reference.reference_scores(model, name, points)
            difference = np.abs(found - expected)
            shares.append(float(np.divide(difference, allowed, out=difference, where=difference != 0).max()))
        worst = float(np.max(shares))  # a NaN is the largest
        if not worst <= 1:
            raise CertificateError(f"Outputs of this model differ by {worst:.1e} of what rounding allows.")
        return FoldVerification(worst, points.shape[0])

    def _record(self) -> Record:
        fitted: dict[str, object] = {
            "model": self.model_name_,
            "kind": self.kind_,
            "feature_names": [str(name) for name in getattr(self, "feature_names_in_", [])],
            "rounding": vars(self).get("rounding_"),
        }
        if self._labels:
            fitted |= class_labels.classes_to_json(self.classes_)
        return Record(type(self).__name__, {}, fitted, {}, self.model_)

    @classmethod
    def _from_record(cls, record: Record) -> Folded:
        fitted, heads = record.fitted, record.model.heads
        kind, name, rounding = fitted["kind"], fitted["model"], fitted["rounding"]
        expected = _LINKS.get(str(kind), {})
        sound = isinstance(name, str) and set(heads) <= set(expected) and next(iter(expected), TRANSFORM) in heads
        if not sound or any(head.link not in expected[output] for output, head in heads.items()):
            raise UnsupportedStoreError("A folded model does not have the outputs of one.")
        if (TRANSFORM in heads) != issubclass(cls, ModelTransformerMixin) or not _is_consistent(record):
            raise UnsupportedStoreError("The outputs of a folded model do not fit each other.")
        folded = cls()
        folded._serve(record.model)
        folded.kind_, folded.model_name_ = str(kind), str(name)
        if folded._labels:
            folded.classes_ = class_labels.classes_from_json(record)
        if isinstance(rounding, float):
            folded.rounding_ = rounding
        folded.n_features_in_ = record.model.columns
        if record.feature_names:
            folded.feature_names_in_ = np.asarray(record.feature_names, dtype=object)
        return folded

    def __sklearn_clone__(self) -> Self:
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Tags:
        from sklearn.utils import ClassifierTags, RegressorTags

        tags = super().__sklearn_tags__()
        tags.estimator_type, tags.input_tags.sparse, tags.requires_fit = self.kind_, True, False
        if self.kind_ == "classifier":
            tags.classifier_tags = ClassifierTags(multi_class=len(self.classes_) > 2)
        elif self.kind_ == "regressor":
            tags.regressor_tags = RegressorTags()
        return tags


class FoldedTransformer(Folded, ModelTransformerMixin):
    """A `Folded` that transforms."""

    _output = TRANSFORM

    def fit_transform(self, X: object, y: object = None, **fit_params: object) -> Array | da.Array | dd.DataFrame:  # type: ignore[override]  # lazy results too
        """Return the output for rows X: see `transform`."""
        return self.transform(X)


def _is_consistent(record: Record) -> bool:
    """Whether what decides has as many columns everywhere, and a chance for each class."""
    heads = record.model.heads
    decided = {heads[name].columns for name in (PREDICT, DECISION) if name in heads and record.classes}
    chances = {heads[PROBABILITIES].width} if PROBABILITIES in heads else set()
    return len(decided) <= 1 and chances <= {len(record.classes)}


@dataclass(frozen=True)
class FoldVerification:
    """What a folded model measures anew: the largest difference from the formula, as a share of what is allowed."""

    worst: float
    rows: int

    def __str__(self) -> str:
        return f"{self.rows} landmarks differ from the formula by at most {self.worst:.1g} of what rounding allows"
