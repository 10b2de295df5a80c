"""What every estimator of dkfm shares: validation, scoring of arrays and dask arrays, stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar, cast

import numpy as np
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted, validate_data

from dkfm.core.frames import column_names, require_unique_names
from dkfm.core.rows import Array, Rows
from dkfm.errors import InvalidInputError, reason
from dkfm.estimators.fitting.training_data import TrainingData, TrainingRows, as_training_data, load_lazy_frame
from dkfm.estimators.serving import ScoringMixin
from dkfm.estimators.transformer import ModelTransformerMixin
from dkfm.kernels import KernelSpec
from dkfm.kernels.base import Kernel
from dkfm.kernels.custom import Precomputed
from dkfm.numerics.certificates.certificate import Certificate, Verification
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer, prepare_scorer
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    from sklearn.utils import Tags

T = TypeVar("T")

_PRECISIONS = ("float64", "float32")


def check_dtype(dtype: object) -> np.dtype[np.floating]:
    """Return what an estimator is to score in, however it is given, or raise."""
    try:
        found: np.dtype[np.floating] = np.dtype(dtype)  # type: ignore[call-overload]  # what is none is refused
    except TypeError:
        found = np.dtype(np.float16)
    if found.name not in _PRECISIONS:
        raise InvalidInputError(f"dtype must be one of {', '.join(_PRECISIONS)}, and is {dtype!r}.")
    return found


class KernelEstimator(ModelTransformerMixin):
    """Base of the estimators: a kernel, training rows, and a model fitted to them."""

    kernel: KernelSpec
    kernel_params: Mapping[str, object] | None
    tile_rows: int | None
    on_indefinite: str
    progress: bool
    certificate_: Certificate
    _fitted_as: dict[str, object]
    """The parameters that a store keeps, as they were at fit."""

    _policies: ClassVar[tuple[str, ...]] = ("raise", "clip")
    """What `on_indefinite` may be."""
    _stored: ClassVar[tuple[str, ...]]
    """Constructor parameters that a store keeps, beside the kernel."""
    _arrays: ClassVar[tuple[str, ...]]
    """Fitted arrays that a store keeps, beside the model's; without their last underscore."""
    _optional: ClassVar[tuple[str, ...]] = ()
    """More of them, which not every fit has."""
    _certificates: ClassVar[tuple[str, ...]] = ("certificate",)
    """Fitted certificates, of which the first is there after every fit."""
    _numbers: ClassVar[tuple[str, ...]] = ()
    """Fitted numbers."""

    def _options(self, kind: type[T]) -> T:
        """Return the parameters that a dataclass of options has fields for."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})  # type: ignore[arg-type]  # a dataclass

    def _begin(self, X: object, kernel: Kernel, *, copy: bool = True) -> TrainingData:
        """Check everything that can be checked before the first tile; return what the fit is given."""
        if self.on_indefinite not in self._policies:
            known = ", ".join(self._policies)
            raise InvalidInputError(f"on_indefinite must be one of {known}, and is {self.on_indefinite!r}.")
        given = as_training_data(kernel, X, copy=copy)
        require_unique_names(column_names(X) or (), "X has")
        try:
            validate_data(clone(self), X, reset=True, skip_check_array=True)
        except TypeError as error:  # names of columns that scikit-learn does not take
            raise InvalidInputError(str(error)) from None
        except ValueError as error:
            raise InvalidInputError(f"X has columns that cannot be told apart: {reason(error)}.") from None
        return given

    def _finish(
        self, X: object, model: Model, fitted: Mapping[str, object], resolved: Mapping[str, object] | None = None
    ) -> Self:
        """Set everything that was fitted, at once: a fit that fails leaves the estimator as it was.

        `resolved` has the values of parameters that the fit has found for them.
        """
        validate_data(self, X, reset=True, skip_check_array=True)
        self._set(model, fitted, {name: _plain(getattr(self, name)) for name in self._stored} | dict(resolved or {}))
        return self

    def _finish_from_map(
        self, feature_map: ScoringMixin, model: Model, fitted: Mapping[str, object], resolved: Mapping[str, object]
    ) -> Self:
        """Set everything that was fitted in the features of a map; `resolved` as in `_finish`."""
        self._set(model, fitted, {name: getattr(self, name) for name in self._stored} | dict(resolved))
        self._take_column_names(feature_map)
        return self

    def _set(self, model: Model, fitted: Mapping[str, object], parameters: Mapping[str, object]) -> None:
        for name in (*self._arrays, *self._optional, *self._certificates, *self._numbers):
            self.__dict__.pop(f"{name}_", None)  # of a fit before
        for name, value in fitted.items():
            setattr(self, f"{name}_", value)
        self._fitted_as = dict(parameters)
        self._serve(model)

    def get_params(self, deep: bool = True) -> dict[str, object]:
        """Return the parameters, and those of the kernel as ``kernel__<name>``: a grid search may go over them."""
        params: dict[str, object] = super().get_params(deep=deep)
        if deep and isinstance(self.kernel, Kernel) and is_dataclass(self.kernel):
            params |= {f"kernel__{field.name}": getattr(self.kernel, field.name) for field in fields(self.kernel)}
        return params

    def set_params(self, **params: object) -> Self:
        """Set parameters, those of the kernel too."""
        values = {name.removeprefix("kernel__"): params[name] for name in params if name.startswith("kernel__")}
        kernel = params.get("kernel", self.kernel)
        if values and isinstance(kernel, Kernel) and is_dataclass(kernel):
            known = {field.name for field in fields(kernel)}
            if not known.issuperset(values):
                raise InvalidInputError(f"{kernel!r} has the parameters {sorted(known)}, and not {sorted(values)}.")
            params = {name: value for name, value in params.items() if not name.startswith("kernel__")}
            params["kernel"] = replace(kernel, **values)
        elif values and not hasattr(kernel, "set_params"):
            raise InvalidInputError(f"{kernel!r} is no kernel with parameters, such as {sorted(values)}.")
        return cast("Self", super().set_params(**params))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        # Cross-validation then takes the same columns of a Gram matrix as rows.
        tags.input_tags.pairwise = self.kernel == "precomputed" or isinstance(self.kernel, Precomputed)
        return tags

    def verify(self, X: object = None) -> Verification:
        """Measure the certificate anew, and of a feature map what it makes of new points.

        Parameters
        ----------
        X : array-like of shape (m, d), optional
            For a feature map, new points, to pair with the landmarks and with each other. For a precomputed kernel the
            Gram matrix that it was fitted to, which no model keeps.

        Returns
        -------
        Verification

        Raises
        ------
        CertificateError
            The certificate is more than ten times worse than at fit: weights, landmarks or kernel are not what they
            were. Or new points are mapped worse than the rank of the map, or their residuals, explain.
        """
        check_is_fitted(self, "model_")
        model, scorer = self.model_, prepare_scorer(self.model_)
        if model.kernel.is_precomputed and X is None:
            raise InvalidInputError("A model of a precomputed kernel keeps no Gram matrix; give it to verify.")
        if model.kernel.is_precomputed:
            numbers = cast("Array", model.landmarks)[:, 0].astype(np.intp)
            landmarks = as_training_data(model.kernel, X).subset(numbers)
        else:
            landmarks = TrainingRows(model.kernel, model.points, 0)
        measured = self._measure(scorer, landmarks, self._fitted_arrays())
        measured.require(self.certificate_)
        if X is None or model.kernel.is_precomputed:
            return Verification(measured)
        return self._measure_points(scorer, measured, self._rows(load_lazy_frame(X)))

    def _measure(self, scorer: Scorer, landmarks: TrainingData, fitted: Mapping[str, object]) -> Certificate:
        """Return the certificate of a model with fitted arrays, which need not be this estimator's yet."""
        raise AssertionError("every estimator measures itself")

    def _measure_points(self, scorer: Scorer, measured: Certificate, Z: Rows) -> Verification:
        """Return the verification with new points."""
        raise InvalidInputError(
            f"A {type(self).__name__} is measured on its training rows alone; give no other points."
        )

    def _seen(self, X: object) -> object:
        """Return rows in memory, if there are any, once their columns are called as those that fit saw."""
        if X is not None:
            X = load_lazy_frame(X)
            self._require_seen(X)
        return X

    def _record(self) -> Record:
        fitted: dict[str, object] = {
            "certificates": {n: asdict(vars(self)[f"{n}_"]) for n in self._certificates if f"{n}_" in vars(self)},
            "numbers": {name: float(vars(self)[f"{name}_"]) for name in self._numbers},
            "feature_names": [str(name) for name in getattr(self, "feature_names_in_", [])],
        }
        return Record(type(self).__name__, self._fitted_as, fitted, self._fitted_arrays(), self.model_)

    def _fitted_arrays(self) -> dict[str, Array]:
        names = [*self._arrays, *(name for name in self._optional if f"{name}_" in vars(self))]
        return {name: vars(self)[f"{name}_"] for name in names}

    @classmethod
    def _from_record(cls, record: Record) -> KernelEstimator:
        """Bring a fitted estimator back from what `_record` made."""
        estimator = cls(kernel=record.model.kernel, **{name: record.parameters[name] for name in cls._stored})
        record.model.head(cls._output)
        stored = cast("dict[str, object]", record.fitted["certificates"])
        certificates = {name: Certificate.of(stored[name]) for name in cls._certificates if name in stored}
        certificates["certificate"]  # every model has it
        arrays = {name: record.arrays[name] for name in cls._arrays}
        arrays |= {name: record.arrays[name] for name in cls._optional if name in record.arrays}
        given = cast("dict[str, float]", record.fitted["numbers"])
        numbers = {name: float(given[name]) for name in cls._numbers}
        estimator._set(record.model, {**arrays, **certificates, **numbers}, record.parameters)
        estimator.n_features_in_ = record.model.columns
        names = record.fitted["feature_names"]
        if names:
            estimator.feature_names_in_ = np.asarray(names, dtype=object)
        return estimator


def _plain(value: object) -> object:
    """Return a NumPy scalar or dtype as the number or name that JSON knows."""
    if isinstance(value, type | np.dtype):
        return np.dtype(value).name
    return value.item() if isinstance(value, np.generic) else value
