"""Define `Folded` and `FoldedTransformer`, the linear models that `fold` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeVar, cast

import numpy as np
from sklearn.utils.metaestimators import available_if

from dkfm.estimators.fitting.class_labels import Predictions, codes_to_labels, flatten_column
from dkfm.estimators.mixins.scoring import ScoringMixin
from dkfm.estimators.mixins.transformer import ModelTransformerMixin
from dkfm.estimators.stored.class_labels import Labels, classes_to_json
from dkfm.estimators.stored.folded import (
    DECISION,
    PREDICT,
    PROBABILITIES,
    TRANSFORM,
    FoldVerification,
    StoredFold,
    predicts_classes,
    verify_fold,
)
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    from sklearn.utils import Tags

_Method = TypeVar("_Method", bound="Callable[..., object]")


def _available_if_output(name: str) -> Callable[[_Method], _Method]:
    """Return a decorator that makes a method available only if the model has the output."""

    def has_output(folded: Folded) -> bool:
        if name not in folded.model_.heads:
            raise AttributeError(f"{folded.model_name_} has no {name}.")
        return True

    return cast("Callable[[_Method], _Method]", available_if(has_output))


class Folded(ScoringMixin):
    """Linear model of features, computed as one product with kernel values.

    `fold` creates it, already fitted. Of the methods of this class, it has those that the original model has. `fit`
    does nothing, and `clone` returns the model itself.

    Attributes
    ----------
    model_ : Model
        Kernel, landmarks and heads.
    kernel_ : Kernel
        Kernel, with all parameters resolved.
    classes_ : ndarray of shape (C,)
        Class labels of a classifier.
    rounding_ : float
        Largest difference between folded and unfolded outputs of the landmarks, relative to the spread of an output;
        not available for a precomputed kernel.
    model_name_, kind_ : str
        Class name of the original model, and its kind: "classifier", "regressor", "outlier_detector" or "transformer".
    n_features_in_, feature_names_in_ : int, ndarray of shape (d,)
        Number of columns d of a row, and their names if the map was fitted with names that are all strings.
    """

    classes_: Labels
    rounding_: float
    model_name_: str
    kind_: str
    workspace = None

    def fit(self, X: object, y: object = None) -> Self:
        """Do nothing: the model is already fitted."""
        return self

    @_available_if_output(PREDICT)
    def predict(self, X: object) -> Predictions:
        """Return the label or value of each row of X (n, d), lazily for dask arrays and data frames.

        The shape is (n,), or (n, q) for q > 1 targets.
        """
        output = self._compute_output(PREDICT, X)
        return codes_to_labels(output, self.classes_) if self._has_classes else flatten_column(output)

    @_available_if_output(DECISION)
    def decision_function(self, X: object) -> Predictions:
        """Return the decision values of rows X, (n, C), or (n,) for two classes."""
        return flatten_column(self._compute_output(DECISION, X))

    @_available_if_output(PROBABILITIES)
    def predict_proba(self, X: object) -> Predictions:
        """Return the probabilities (n, C) of the classes for rows X."""
        return self._compute_output(PROBABILITIES, X)

    @_available_if_output(PREDICT)
    def score(self, X: object, y: object, sample_weight: object = None) -> float:
        """Return the accuracy of a classifier, or R^2 of a regressor, on rows X with targets y."""
        from sklearn.metrics import accuracy_score, r2_score

        metric = accuracy_score if self._has_classes else r2_score
        return float(metric(y, self.predict(X), sample_weight=sample_weight))

    @property
    def _has_classes(self) -> bool:
        return predicts_classes(self.kind_)

    def verify(self, X: object = None) -> FoldVerification:
        """Compare the outputs for landmarks with the formula ``link(k(Z, X) W - b)``; X is ignored.

        The original linear model is not used; `rounding_` is the comparison with it.

        Raises
        ------
        CertificateError
            The outputs differ by more than rounding allows.
        """
        return verify_fold(self.model_, self._get_scorer())

    def _to_record(self) -> Record:
        fitted: dict[str, object] = {
            "model": self.model_name_,
            "kind": self.kind_,
            "feature_names": [str(name) for name in getattr(self, "feature_names_in_", [])],
            "rounding": vars(self).get("rounding_"),
        }
        if self._has_classes:
            fitted |= classes_to_json(self.classes_)
        return Record(type(self).__name__, {}, fitted, {}, self.model_)

    @classmethod
    def _from_record(cls, record: Record) -> Folded:
        stored = StoredFold.from_record(record, has_transform=issubclass(cls, ModelTransformerMixin))
        folded = cls()
        folded._set_model(stored.model)
        folded.kind_, folded.model_name_ = stored.kind, stored.model_name
        if stored.classes is not None:
            folded.classes_ = stored.classes
        if stored.rounding is not None:
            folded.rounding_ = stored.rounding
        folded.n_features_in_ = stored.model.n_features_in
        if stored.feature_names:
            folded.feature_names_in_ = np.asarray(stored.feature_names, dtype=object)
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
    """Folded model with a `transform` method; its attributes are those of `Folded`."""

    _output_head_name = TRANSFORM
