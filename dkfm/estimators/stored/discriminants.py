"""Check and measure stored Fisher discriminants."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.errors import UnsupportedStoreError
from dkfm.estimators.stored.base import StoredEstimator, StoredNames
from dkfm.gram.training_data import Indices, TrainingData
from dkfm.numerics import links
from dkfm.numerics.certificates import discriminants
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.scorer import Scorer
from dkfm.numerics.supervised import fisher
from dkfm.numerics.supervised.classes import Classes
from dkfm.storage.model_store import Record

_OUTPUT_LINKS = {"scores": links.IDENTITY, "decision_function": links.IDENTITY, "predict": links.ARGMAX}
"""Link of each head of a stored model, beside "predict_proba"."""


@dataclass(frozen=True, eq=False)
class StoredDiscriminants(StoredEstimator):
    """A fitted `KernelFisher` as its store holds it."""

    output_head_name: ClassVar[str] = "scores"
    has_classes: ClassVar[bool] = True
    names: ClassVar[StoredNames] = StoredNames(
        parameters=("n_components", "shrinkage", "priors", "on_indefinite", "dtype"),
        required_arrays=("priors", "ratios", "means"),
        optional_arrays=("codes", "sample_weight", "squares", "mean"),
        certificates=("certificate", "verified_certificate"),
        required_numbers=("shrinkage", "ridge"),
    )

    @classmethod
    def _convert_and_check_record(cls, record: Record) -> Record:
        arrays, n = record.extra_arrays, record.model.landmarks.shape[0]
        count, q = arrays["means"].shape
        shapes = {"priors": (count,), "ratios": (q,), "codes": (n,), "sample_weight": (n,), "squares": (q, q)}
        shapes |= {"mean": (n,)}
        if any(arrays[name].shape != shape for name, shape in shapes.items() if name in arrays):
            raise UnsupportedStoreError("The fitted arrays of discriminants do not fit their model.")
        if "codes" not in arrays and not {"squares", "mean"} <= arrays.keys():
            raise UnsupportedStoreError("Discriminants have neither the classes of their rows nor moments of features.")
        codes = arrays.get("codes", np.arange(count))
        if codes.dtype.kind != "i" or not np.array_equal(np.unique(codes), np.arange(count)):
            raise UnsupportedStoreError("The classes of the training rows are not those of their model.")
        outputs = {"scores": q, "decision_function": 1 if count == 2 else count, "predict_proba": count, "predict": 1}
        widths = {name: record.model.head(name).width for name in outputs}
        output_links = {name: record.model.head(name).link for name in outputs}
        if output_links.pop("predict_proba") not in (links.SIGMOID, links.SOFTMAX) or output_links != _OUTPUT_LINKS:
            raise UnsupportedStoreError("The outputs of discriminants are not what dkfm writes.")
        if widths["scores"] > q or any(widths[name] != width for name, width in outputs.items() if name != "scores"):
            raise UnsupportedStoreError("The outputs of discriminants do not fit each other.")
        return record

    def _get_fitted_certificate(self) -> Certificate:
        return cast("Certificate", self.values.get("verified_certificate") or self.values["certificate"])

    def _certify(self, scorer: Scorer, landmarks: TrainingData) -> Certificate:
        return certify_discriminants(scorer, landmarks, self.values, cast("float", self.values["ridge"]))


def certify_discriminants(
    scorer: Scorer, landmarks: TrainingData, fitted: Mapping[str, object], ridge: float
) -> Certificate:
    """Return the worse of the certificates of the discriminant scores and of the decision function.

    `fitted` holds "means" and "priors", and "codes" after a fit to a Gram matrix or "squares" and "mean" in a map.
    """
    if "codes" in fitted:
        codes = cast("Indices", fitted["codes"])
        weights = cast("Array", fitted.get("sample_weight", np.ones(len(codes))))
        indicators = Classes(codes.astype(np.int64), weights, len(cast("Array", fitted["priors"]))).weighted_columns()
        expected = _expect_outputs(scorer, fitted)
        return discriminants.certify_discriminants(scorer, landmarks.iter_row_tiles(), indicators, expected, ridge)
    squares, mean = cast("Array", fitted["squares"]), cast("Array", fitted["mean"])
    longest = 1 / ridge if ridge > 0 else 0.0
    if len(squares):
        longest = float(squares.diagonal().max())
    worst = Certificate(0.0, 0.0, 0)
    for name, (T, b) in _combine_discriminants(scorer, fitted).items():
        tiles, products = landmarks.iter_row_tiles(), T.T @ squares @ T
        measured = discriminants.certify_direction_products(scorer, name, tiles, products, mean, b, longest)
        worst = worst.combine(measured)
    return worst


def certify_cast(scorer: Scorer, exact: Scorer, rows: Rows, fitted: Mapping[str, object]) -> Certificate:
    """Return the certificate of outputs in lower precision, compared for some rows with those of the float64 model."""
    return discriminants.certify_cast(scorer, exact, rows, _expect_outputs(scorer, fitted))


def _expect_outputs(scorer: Scorer, fitted: Mapping[str, object]) -> dict[str, tuple[Array, Array]]:
    """Return, for scores and decisions, the expected T'T and class means; T are their combinations of discriminants."""
    means = cast("Array", fitted["means"])
    return {name: (T.T @ T, means @ T - b) for name, (T, b) in _combine_discriminants(scorer, fitted).items()}


def _combine_discriminants(scorer: Scorer, fitted: Mapping[str, object]) -> dict[str, tuple[Array, Array]]:
    """Return, for scores and decisions, their combinations T (q, p) of discriminants and their constants (p,)."""
    combinations, constants = fisher.decision_functions(cast("Array", fitted["means"]), cast("Array", fitted["priors"]))
    count = scorer.model.head("scores").n_columns
    return {
        "scores": (np.eye(len(combinations))[:, :count], np.zeros(count)),
        "decision_function": (combinations, constants),
    }
