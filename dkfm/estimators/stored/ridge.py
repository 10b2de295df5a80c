"""Check and measure stored kernel ridge regressions."""

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from dkfm.core.rows import Array
from dkfm.errors import UnsupportedStoreError
from dkfm.estimators.stored.base import StoredEstimator, StoredNames
from dkfm.gram.training_data import TrainingData
from dkfm.numerics import links
from dkfm.numerics.certificates import ridge
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.certificates.ridge import PredictionErrors
from dkfm.numerics.scorer import Scorer
from dkfm.storage.model_store import Record


@dataclass(frozen=True, eq=False)
class StoredRidge(StoredEstimator):
    """A fitted `KernelRidge` as its store holds it."""

    output_head_name: ClassVar[str] = "predict"
    names: ClassVar[StoredNames] = StoredNames(
        parameters=("alpha", "leave_one_out", "on_indefinite", "dtype"),
        required_arrays=("fitted_values", "target_scales", "norms"),
        optional_arrays=("sample_weight", "alphas", "loo_predictions", "loo_errors"),
    )
    head_links: ClassVar[dict[str, str]] = {"predict": links.IDENTITY}
    """Link of each head."""

    @classmethod
    def _convert_and_check_record(cls, record: Record) -> Record:
        arrays, (n, q) = record.extra_arrays, record.model.head(cls.output_head_name).weights.shape
        m = arrays.get("alphas", np.empty(0)).shape[0]
        shapes = {"fitted_values": (n, q), "target_scales": (q,), "norms": (q,), "sample_weight": (n,)}
        is_vector = record.parameters["is_vector"]
        shapes |= {"loo_predictions": (n,) if is_vector else (n, q)}
        if "loo_errors" in arrays and arrays["loo_errors"].shape not in ((m,), (m, q)):
            raise UnsupportedStoreError("The penalties of a path do not fit their errors.")
        if any(arrays[name].shape != shape for name, shape in shapes.items() if name in arrays):
            raise UnsupportedStoreError("The fitted arrays of a regression do not fit its model.")
        heads = record.model.heads
        if (
            any(head.n_columns != q for head in heads.values())
            or {name: head.link for name, head in heads.items()} != cls.head_links
        ):
            raise UnsupportedStoreError("The outputs of a regression are not what dkfm writes.")
        fitted_alpha = record.parameters["fitted_alpha"]
        alphas = fitted_alpha if isinstance(fitted_alpha, list) else [fitted_alpha] * q
        are_numbers = all(type(alpha) is float and 0 <= alpha < np.inf for alpha in alphas)
        if len(record.target_names) not in (0, q):
            raise UnsupportedStoreError("The names of targets do not fit a regression.")
        if len(alphas) != q or not are_numbers or type(is_vector) is not bool or (is_vector and q > 1):
            raise UnsupportedStoreError("The penalties of a regression are not what dkfm writes.")
        return record

    @property
    def left_out_rmse(self) -> Array | None:
        """Root mean squared errors of left-out rows, (q,), or (1,) of a classifier; None if none chose the penalty."""
        errors = self.values.get("loo_errors")
        return None if errors is None else np.sqrt(np.atleast_2d(np.transpose(cast("Array", errors))).min(axis=1))

    def describe_penalty(self) -> dict[str, object]:
        """Return the penalties, and the errors of left-out rows if these selected them, as JSON values."""
        facts = {"alpha": self.parameters["fitted_alpha"]}
        return facts if self.left_out_rmse is None else facts | {"left_out_rmse": self.left_out_rmse.tolist()}

    def _certify(self, scorer: Scorer, landmarks: TrainingData) -> Certificate:
        values, scales, norms = (cast("Array", self.values[name]) for name in self.names.required_arrays)
        return self.measure_predictions(scorer, landmarks, values).to_certificate(scales, norms)

    @classmethod
    def measure_predictions(cls, scorer: Scorer, landmarks: TrainingData, fitted_values: Array) -> PredictionErrors:
        """Compare the predictions of a model for its landmarks with those of the fit, (N, q)."""
        tiles, diagonal = landmarks.iter_row_tiles(), landmarks.diagonal()
        return ridge.measure_predictions(scorer, cls.output_head_name, tiles, diagonal, fitted_values)


@dataclass(frozen=True, eq=False)
class StoredRidgeClassifier(StoredRidge):
    """A fitted `KernelRidgeClassifier` as its store holds it."""

    output_head_name: ClassVar[str] = "decision_function"
    has_classes: ClassVar[bool] = True
    names: ClassVar[StoredNames] = replace(
        StoredRidge.names, parameters=(*StoredRidge.names.parameters, "class_weight")
    )
    head_links: ClassVar[dict[str, str]] = {"predict": links.ARGMAX, "decision_function": links.IDENTITY}
