"""Check and measure stored principal components."""

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from dkfm.core.rows import Array
from dkfm.errors import UnsupportedStoreError
from dkfm.estimators.stored.base import StoredEstimator, StoredNames
from dkfm.gram.training_data import TrainingData
from dkfm.numerics.certificates import components
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.scorer import Scorer
from dkfm.storage.model_store import Record


@dataclass(frozen=True, eq=False)
class StoredComponents(StoredEstimator):
    """A fitted `KernelPCA` as its store holds it."""

    output_head_name: ClassVar[str] = "scores"
    names: ClassVar[StoredNames] = StoredNames(
        parameters=("n_components", "fit_inverse_transform", "alpha", "centered", "dtype"),
        required_arrays=("eigenvalues",),
        optional_arrays=("sample_weight", "dual_coef", "X_transformed_fit", "mean", "scale"),
        required_numbers=("total_variance", "total_weight", "gamma"),
    )

    @classmethod
    def _convert_and_check_record(cls, record: Record) -> Record:
        arrays, (n, _) = record.extra_arrays, record.model.head("scores").weights.shape
        q, d = record.model.head("scores").n_columns, record.model.n_features_in
        shapes = {"eigenvalues": (q,), "sample_weight": (n,), "dual_coef": (n, d), "X_transformed_fit": (n, q)}
        shapes |= {"mean": (d,), "scale": (d,)}
        if any(arrays[name].shape != shape for name, shape in shapes.items() if name in arrays):
            raise UnsupportedStoreError("The fitted arrays of components do not fit their model.")
        if not (arrays.get("sample_weight", np.ones(1)) > 0).all():
            raise UnsupportedStoreError("The weights of the training rows are not all positive.")
        numbers = cast("dict[str, float]", record.fitted["numbers"])
        if not numbers["total_weight"] > 0:
            raise UnsupportedStoreError("The weight of components is not positive.")
        return record

    @property
    def explained_share(self) -> float:
        """Share of the variance that all components explain; NaN if the variance is unknown or a rounding error."""
        total, weight = (cast("float", self.values[name]) for name in ("total_variance", "total_weight"))
        if total < 0:  # of equal rows
            return float("nan")
        return float(np.sum(cast("Array", self.values["eigenvalues"]))) / weight / total if total else 0.0

    def _certify(self, scorer: Scorer, landmarks: TrainingData) -> Certificate:
        eigenvalues, tiles = cast("Array", self.values["eigenvalues"]), landmarks.iter_row_tiles()
        if not self.parameters.get("whole", True):
            total_weight = cast("float", self.values["total_weight"])
            return components.certify_principal_axes(scorer, eigenvalues, tiles, total_weight)
        weights = cast("Array | None", self.values.get("sample_weight"))
        return components.certify_components(scorer, eigenvalues, tiles, weights)
