"""Define the stored form of a fitted estimator, which checks its record and can measure its certificate again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, cast

from dkfm.core.rows import Rows, as_float64, as_rows
from dkfm.errors import InvalidInputError
from dkfm.estimators.stored.class_labels import classes_from_record
from dkfm.execution.scoring_threads import open_certificate_scorer
from dkfm.gram.training_data import TrainingData, as_training_data, compute_lazy_frame, take_landmarks
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.certificates.verification import Verification
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer
from dkfm.storage.model_store import Record


@dataclass(frozen=True)
class StoredNames:
    """Names of the parameters and fitted values that a store keeps besides the model; without the final underscore."""

    parameters: tuple[str, ...]
    """Constructor parameters, except the kernel."""
    required_arrays: tuple[str, ...]
    """Fitted arrays that every fit has."""
    optional_arrays: tuple[str, ...] = ()
    """Fitted arrays that only some fits have."""
    certificates: tuple[str, ...] = ("certificate",)
    """Fitted certificates; every fit has the first."""
    required_numbers: tuple[str, ...] = ()
    """Fitted numbers that every fit has."""
    optional_numbers: tuple[str, ...] = ()
    """Fitted numbers that only some fits have."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of all fitted arrays."""
        return self.required_arrays + self.optional_arrays

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of all fitted numbers."""
        return self.required_numbers + self.optional_numbers

    @property
    def fitted(self) -> tuple[str, ...]:
        """Names of all fitted values."""
        return self.arrays + self.certificates + self.numbers


@dataclass(frozen=True, eq=False)
class StoredEstimator(ABC):
    """A fitted estimator without its scikit-learn class."""

    estimator: str
    """Name of the class."""
    parameters: Mapping[str, object]
    """Values, at the time of the fit, of the parameters that a store keeps."""
    values: Mapping[str, object]
    """Fitted arrays, certificates and numbers, by name."""
    model: Model
    feature_names: list[str] | None = None
    """Column names of the training rows."""

    output_head_name: ClassVar[str]
    """Name of the head that `transform` returns."""
    has_classes: ClassVar[bool] = False
    """Whether the fitted values have the class labels."""
    names: ClassVar[StoredNames]

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Return the estimator of a record; raise an error, of any class, if it is not what dkfm writes."""
        record, names = cls._convert_and_check_record(record), cls.names
        if missing := [name for name in names.parameters if name not in record.parameters]:
            raise KeyError(missing[0])
        record.model.head(cls.output_head_name)
        stored = cast("dict[str, object]", record.fitted["certificates"])
        certificates = {name: Certificate.from_dict(stored[name]) for name in names.certificates if name in stored}
        numbers = cast("dict[str, float]", record.fitted["numbers"])
        values: dict[str, object] = {**certificates}
        values |= {name: record.extra_arrays[name] for name in names.arrays if name in record.extra_arrays}
        values |= {name: float(numbers[name]) for name in names.numbers if name in numbers}
        for name in (*names.required_arrays, *names.required_numbers, "certificate"):
            values[name]  # raises if it is missing
        if cls.has_classes:
            values["classes"] = classes_from_record(record)
        record.fitted["feature_names"]  # raises if they are missing
        return cls(record.estimator, record.parameters, values, record.model, record.feature_names)

    @classmethod
    def _convert_and_check_record(cls, record: Record) -> Record:
        """Return the record, converted if an earlier version wrote it; raise if its arrays do not fit its model."""
        return record

    def verify(self, X: object = None, check_points: Callable[[object], Rows] | None = None) -> Verification:
        """Measure the certificate again and, for a feature map, its error on new points.

        Parameters
        ----------
        X : array-like of shape (m, d), default=None
            New points for a feature map; for a precomputed kernel the Gram matrix of the fit, which is required.
        check_points : callable, default=None
            Function that checks new points and returns them as rows; by default `check_points` of this estimator.

        Raises
        ------
        CertificateError
            The certificate is more than ten times worse than at the fit; or the error on new points is larger than the
            rank of the map or their residuals explain.
        """
        model, n = self.model, self.model.landmarks.shape[0]
        if model.kernel.is_precomputed and X is None:
            raise InvalidInputError("A model of a precomputed kernel keeps no Gram matrix; give it to verify.")
        landmarks = take_landmarks(model, as_training_data(model.kernel, X) if model.kernel.is_precomputed else None)
        with open_certificate_scorer(model, self.output_head_name, n) as scorer:
            measured = self._certify(scorer, landmarks)
            fitted = self._get_fitted_certificate()
            measured.require_not_worse_than(fitted, or_given="the Gram matrix" if model.kernel.is_precomputed else "")
            if X is None or model.kernel.is_precomputed:
                return Verification(measured)
            return self._verify_points(scorer, measured, (check_points or self.check_points)(compute_lazy_frame(X)))

    def _get_fitted_certificate(self) -> Certificate:
        """Return the certificate of the fit that `_certify` measures again."""
        return cast("Certificate", self.values["certificate"])

    @abstractmethod
    def _certify(self, scorer: Scorer, landmarks: TrainingData) -> Certificate:
        """Measure the certificate of the model."""

    def _verify_points(self, scorer: Scorer, landmark_certificate: Certificate, Z: Rows) -> Verification:
        """Measure the error of the model on new points Z."""
        raise InvalidInputError(
            f"A {self.estimator} is measured on its training rows alone; give no other points, or verify their scores."
        )

    def check_points(self, X: object) -> Rows:
        """Return rows in memory as float64; raise unless they have as many columns as the fit."""
        return as_rows_of_model(X, self.model, self.estimator)


def as_rows_of_model(X: object, model: Model, estimator: str, name: str = "X") -> Rows:
    """Return rows in memory as float64; raise unless they have as many columns as those that the model was fitted to.

    `estimator` and `name` are the names of the model and of the rows in the error message.
    """
    rows, d = as_float64(as_rows(X, name)), model.n_features_in
    if rows.shape[1] != d:
        raise InvalidInputError(
            f"{name} has {rows.shape[1]} features, but {estimator} is expecting {d} features as input."
        )
    return rows
