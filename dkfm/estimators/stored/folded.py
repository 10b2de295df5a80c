"""Check and measure stored linear models of features."""

from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from dkfm.core.rows import Rows
from dkfm.errors import CertificateError, NotSupportedError, UnsupportedStoreError
from dkfm.estimators.stored.class_labels import Labels, classes_from_record
from dkfm.numerics import links
from dkfm.numerics.certificates import reference_scores
from dkfm.numerics.certificates.certificate import sample_evenly
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer, prepare_compact_scorer
from dkfm.storage.model_store import Record

DECISION, PREDICT, PROBABILITIES, TRANSFORM = "decision_function", "predict", "predict_proba", "transform"

_ALLOWED_LINKS: dict[str, dict[str, set[str]]] = {
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
"""Allowed outputs of each kind of model, and the links that each may have. The first output is required."""


@dataclass(frozen=True)
class FoldVerification:
    """Result of `Folded.verify`: largest difference from the formula relative to the allowed one, and rows used."""

    worst: float
    rows: int

    def to_dict(self) -> dict[str, object]:
        """Return the two numbers."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.rows} landmarks differ from the formula by at most {self.worst:.1g} of what rounding allows"


@dataclass(frozen=True, eq=False)
class StoredFold:
    """A `Folded` or `FoldedTransformer` as its store holds it."""

    model: Model
    kind: str
    """Kind of the original model. One of "classifier", "regressor", "outlier_detector", "transformer"."""
    model_name: str
    """Class name of the original model."""
    classes: Labels | None
    """Class labels of a model that predicts classes, of shape (C,)."""
    rounding: float | None
    """Largest difference from the outputs of the original model, relative to each output's spread."""
    feature_names: list[str] | None
    """Column names of the training rows."""

    @property
    def estimator(self) -> str:
        """Name of the class that it is loaded as."""
        return "FoldedTransformer" if TRANSFORM in self.model.heads else "Folded"

    @classmethod
    def from_record(cls, record: Record, has_transform: bool) -> Self:
        """Return the model of a record; raise unless its outputs are what dkfm writes, `transform` if there is one."""
        fitted, heads = record.fitted, record.model.heads
        kind, name, rounding = fitted["kind"], fitted["model"], fitted["rounding"]
        expected = _ALLOWED_LINKS.get(str(kind), {})
        valid = isinstance(name, str) and set(heads) <= set(expected) and next(iter(expected), TRANSFORM) in heads
        if not valid or any(head.link not in expected[output] for output, head in heads.items()):
            raise UnsupportedStoreError("A folded model does not have the outputs of one.")
        if (TRANSFORM in heads) != has_transform or not _is_consistent(record):
            raise UnsupportedStoreError("The outputs of a folded model do not fit each other.")
        classes = classes_from_record(record) if predicts_classes(str(kind)) else None
        known = rounding if isinstance(rounding, float) else None
        return cls(record.model, str(kind), str(name), classes, known, record.feature_names)

    def verify(self, X: object = None) -> FoldVerification:
        """Compare the outputs for landmarks with the formula; X is ignored."""
        return verify_fold(self.model, prepare_compact_scorer(self.model))


def predicts_classes(kind: str) -> bool:
    """Return whether models of a kind predict codes of classes."""
    return kind in ("classifier", "outlier_detector")


def sample_landmarks(model: Model) -> Rows:
    """Return the landmarks, at most 512, on which a folded model is measured."""
    return model.original_landmarks[sample_evenly(model.landmarks.shape[0])]


def verify_fold(model: Model, scorer: Scorer) -> FoldVerification:
    """Compare the outputs of a model for its landmarks, which a scorer of it computes, with their formula.

    Raises
    ------
    CertificateError
        The outputs differ by more than rounding allows.
    """
    if model.kernel.is_precomputed:
        raise NotSupportedError("A folded model of a precomputed kernel has no points to measure it on.")
    points = sample_landmarks(model)
    ratios, reference = [0.0], reference_scores.ReferenceScorer(model).compute(model.heads, points)
    for name, computed in scorer.score_heads(list(model.heads), points).items():
        expected, allowed = reference[name]
        difference = np.abs(computed - expected)
        ratios.append(float(np.divide(difference, allowed, out=difference, where=difference != 0).max()))
    worst = float(np.max(ratios))  # NaN counts as largest
    if not worst <= 1:
        raise CertificateError(f"Outputs of this model differ by {worst:.1e} of what rounding allows.")
    return FoldVerification(worst, points.shape[0])


def _is_consistent(record: Record) -> bool:
    """Return whether class outputs have the same number of columns, and there is a probability for each class."""
    heads = record.model.heads
    class_columns = {heads[name].n_columns for name in (PREDICT, DECISION) if name in heads and record.classes}
    probability_columns = {heads[PROBABILITIES].width} if PROBABILITIES in heads else set()
    return len(class_columns) <= 1 and probability_columns <= {len(record.classes)}
