"""Define the base class of the estimators: validation, fitted attributes, certificates and storage."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import numpy as np
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted, validate_data

from dkfm.core.frames import column_names, require_same_names, require_unique_names
from dkfm.errors import InvalidInputError, extract_reason, shorten
from dkfm.estimators.fitting import out_of_core_rows
from dkfm.estimators.mixins.scoring import ScoringMixin
from dkfm.estimators.mixins.transformer import ModelTransformerMixin
from dkfm.estimators.stored.base import StoredEstimator
from dkfm.estimators.stored.class_labels import classes_to_json
from dkfm.execution.stage_log import log_stage
from dkfm.gram.streamed_rows import SourceRows, StreamedRows
from dkfm.gram.training_data import TrainingData, as_training_data, compute_lazy_frame, is_float32
from dkfm.kernels import KernelSpec
from dkfm.kernels.base import Kernel
from dkfm.kernels.custom import Precomputed
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.certificates.verification import Verification
from dkfm.numerics.model import Model
from dkfm.sources.base import NamedColumns
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    from sklearn.utils import Tags

T = TypeVar("T")

_PRECISIONS = ("float64", "float32")


def check_dtype(dtype: object) -> np.dtype[np.floating]:
    """Return the dtype of a `dtype` parameter; raise unless it is float64 or float32."""
    try:
        parsed: np.dtype[np.floating] = np.dtype(dtype)  # type: ignore[call-overload]  # any object may come
    except TypeError:
        parsed = np.dtype(np.float16)  # raises below
    if parsed.name not in _PRECISIONS:
        raise InvalidInputError(f"dtype must be one of {', '.join(_PRECISIONS)}, and is {dtype!r}.")
    return parsed


def choose_dtype(dtype: object, X: object) -> np.dtype[np.floating]:
    """Return the dtype of a `dtype` parameter, which is that of the training rows X if it is None."""
    return check_dtype(("float32" if is_float32(X) else "float64") if dtype is None else dtype)


class KernelEstimator(ScoringMixin):
    """Base class of the estimators that fit a model of a kernel to training rows."""

    kernel: KernelSpec
    kernel_params: Mapping[str, object] | None
    tile_rows: int | None
    on_indefinite: str
    progress: bool
    certificate_: Certificate
    _params_at_fit: dict[str, object]
    """Values, at the time of the fit, of the parameters that a store keeps."""

    _indefinite_policies: ClassVar[tuple[str, ...]] = ("raise", "clip")
    """Valid values of `on_indefinite`."""
    _stored_estimator_class: ClassVar[type[StoredEstimator]]
    """Class of what a store holds of the estimator."""

    def _get_options(self, options_class: type[T]) -> T:
        """Return the parameters of the same names as the fields of a dataclass, as an instance of it."""
        return options_class(**{field.name: getattr(self, field.name) for field in fields(options_class)})  # type: ignore[arg-type]  # a dataclass

    def _check_data(self, X: object, kernel: Kernel, *, copy: bool = True) -> TrainingData:
        """Check everything that needs no kernel values; return the training data."""
        if self.on_indefinite not in self._indefinite_policies:
            known = ", ".join(self._indefinite_policies)
            raise InvalidInputError(f"on_indefinite must be one of {known}, and is {self.on_indefinite!r}.")
        training_data: TrainingData
        if isinstance(X, SourceRows):
            training_data = StreamedRows.from_source(kernel, X)
        else:
            training_data = as_training_data(kernel, X, copy=copy)
        require_unique_names(column_names(X) or (), "X has")
        try:
            validate_data(clone(self), X, reset=True, skip_check_array=True)
        except TypeError as error:  # scikit-learn refuses the column names
            raise InvalidInputError(str(error)) from None
        except ValueError as error:
            raise InvalidInputError(f"X has columns that cannot be told apart: {extract_reason(error)}.") from None
        return training_data

    def _log_fit(self, data: TrainingData) -> None:
        """Log that a fit starts, and its size."""
        n, name = data.indexable_rows.shape[0], type(self).__name__
        log_stage("fit", f"{name} of {n:,} rows with {shorten(repr(data.kernel))}", rows=n, estimator=name)

    def _set_fitted(
        self, X: object, model: Model, fitted: Mapping[str, object], resolved_params: Mapping[str, object] | None = None
    ) -> Self:
        """Set all fitted attributes at once, so that a fit that fails leaves the estimator unchanged.

        `resolved_params` holds the values that the fit has determined for parameters.
        """
        validate_data(self, X, reset=True, skip_check_array=True)
        self._replace_fitted(model, fitted, self._list_stored_parameters() | dict(resolved_params or {}))
        return self

    def _set_fitted_from_map(
        self, feature_map: ScoringMixin, model: Model, fitted: Mapping[str, object], **resolved_params: object
    ) -> Self:
        """Set all attributes of a fit in the features of a map; `resolved_params` as in `_set_fitted`."""
        self._replace_fitted(model, fitted, self._list_stored_parameters() | resolved_params)
        self._copy_feature_names_in(feature_map)
        return self

    def _list_stored_parameters(self) -> dict[str, object]:
        """Return the values of the parameters that a store keeps, for JSON."""
        return {name: _to_json_value(getattr(self, name)) for name in self._stored_estimator_class.names.parameters}

    def _replace_fitted(self, model: Model, fitted: Mapping[str, object], fitted_params: Mapping[str, object]) -> None:
        for name in self._stored_estimator_class.names.fitted:
            self.__dict__.pop(f"{name}_", None)  # left by an earlier fit
        for name, value in fitted.items():
            setattr(self, f"{name}_", value)
        self._params_at_fit = dict(fitted_params)
        self._set_model(model)

    def _fit_stored_rows(self, X: object, streams: bool, *arguments: object) -> Self:
        """Fit to stored or lazy rows; leave the estimator unchanged if they change meanwhile."""
        fitted = copy.copy(self)  # it shares the random state of this estimator, which advances
        with out_of_core_rows.open_stored_rows(X, streams) as (rows, names):
            fitted.fit(rows, *arguments)
            if names is not None:
                fitted.feature_names_in_ = np.asarray(names, dtype=object)
        self.__dict__ = fitted.__dict__
        return self

    def get_params(self, deep: bool = True) -> dict[str, object]:
        """Return the parameters; those of the kernel are named ``kernel__<name>``, for example for a grid search."""
        params: dict[str, object] = super().get_params(deep=deep)
        return params | (_list_parameters("kernel", self.kernel) if deep else {})

    def set_params(self, **params: object) -> Self:
        """Set parameters, including parameters ``kernel__<name>`` of the kernel."""
        values = {name.removeprefix("kernel__"): params[name] for name in params if name.startswith("kernel__")}
        kernel = params.get("kernel", self.kernel)
        if values and isinstance(kernel, Kernel) and is_dataclass(kernel):
            params = {name: value for name, value in params.items() if not name.startswith("kernel__")}
            params["kernel"] = _replace_parameters(kernel, values)
        elif values and not hasattr(kernel, "set_params"):
            raise InvalidInputError(
                f"{kernel!r} is no kernel with parameters, such as {sorted(values)}; give a kernel, as "
                "kernels.Gaussian(1.0), and not its name."
            )
        return cast("Self", super().set_params(**params))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        # With this tag, cross-validation selects the same columns as rows of a Gram matrix.
        tags.input_tags.pairwise = self.kernel == "precomputed" or isinstance(self.kernel, Precomputed)
        return tags

    def verify(self, X: object = None) -> Verification:
        """Measure the certificate again and, for a feature map, its error on new points.

        Parameters
        ----------
        X : array-like of shape (m, d), default=None
            New points for a feature map, paired with the landmarks and with each other. For a precomputed kernel, X is
            required and is the Gram matrix of the fit, which the model does not keep.

        Returns
        -------
        Verification
            Measured errors.

        Raises
        ------
        CertificateError
            The certificate is more than ten times worse than at the fit, because weights, landmarks or kernel have
            changed; or the error on new points is larger than the rank of the map or their residuals explain.
        """
        check_is_fitted(self, "model_")
        return self._to_stored().verify(X, self._check_rows)

    def _to_stored(self) -> StoredEstimator:
        """Return what a store holds of the estimator."""
        stored_class = self._stored_estimator_class
        values = self._get_fitted(stored_class.names.fitted)
        return stored_class(type(self).__name__, self._params_at_fit, values, self.model_)

    @contextmanager
    def _open_rows(self, X: object) -> Iterator[object]:
        """Yield the checked rows of another fit, if any: stored rows as a source, others in memory."""
        with ExitStack() as stack:
            if out_of_core_rows.is_stored_or_lazy(X, self.model_.kernel, streams=True):
                names = getattr(self, "feature_names_in_", None)
                opened = out_of_core_rows.open_stored_rows(X, True, None if names is None else list(names))
                X = stack.enter_context(opened)[0]
            X = compute_lazy_frame(X)
            if isinstance(X, SourceRows):
                if X.shape[1] != self.n_features_in_:
                    columns = self.n_features_in_
                    raise InvalidInputError(f"X has {X.shape[1]} columns and the map was fitted with {columns}.")
                named = X.source.columns if isinstance(X.source, NamedColumns) else None
                require_same_names(getattr(self, "feature_names_in_", None), named, "the map", "X")
            elif X is not None:
                self._require_fitted_columns(X)
            yield X

    def _to_record(self) -> Record:
        names = self._stored_estimator_class.names
        fitted: dict[str, object] = {
            "certificates": {name: value.to_dict() for name, value in self._get_fitted(names.certificates).items()},
            "numbers": {name: float(value) for name, value in self._get_fitted(names.numbers).items()},
            "feature_names": [str(name) for name in getattr(self, "feature_names_in_", [])],
        }
        if "classes_" in vars(self):
            fitted |= classes_to_json(vars(self)["classes_"])
        return Record(type(self).__name__, self._params_at_fit, fitted, self._get_fitted(names.arrays), self.model_)

    def _get_fitted(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return those fitted attributes that this fit has, by their names without the last underscore."""
        return {name: vars(self)[f"{name}_"] for name in names if f"{name}_" in vars(self)}

    @classmethod
    def _from_record(cls, record: Record) -> KernelEstimator:
        """Restore a fitted estimator from the record that `_to_record` returned."""
        stored = cls._stored_estimator_class.from_record(record)
        parameters = {name: stored.parameters[name] for name in stored.names.parameters}
        estimator = cls(kernel=stored.model.kernel, **parameters)
        estimator._replace_fitted(stored.model, stored.values, stored.parameters)
        estimator.n_features_in_ = stored.model.n_features_in
        if stored.feature_names:
            estimator.feature_names_in_ = np.asarray(stored.feature_names, dtype=object)
        return estimator


def _list_fields(kernel: object) -> list[str]:
    return [field.name for field in fields(kernel)] if isinstance(kernel, Kernel) and is_dataclass(kernel) else []


def _list_parameters(name: str, kernel: object) -> dict[str, object]:
    """Return the parameters of a kernel, and of kernels in it, by scikit-learn's nested names ``name__name``."""
    found: dict[str, object] = {}
    for field in _list_fields(kernel):
        value, nested = getattr(kernel, field), f"{name}__{field}"
        found |= {nested: value, **_list_parameters(nested, value)}
    return found


def _replace_parameters(kernel: Kernel, values: Mapping[str, object]) -> Kernel:
    """Return a kernel with new values of parameters ``name``, and of parameters ``name__name`` of kernels in it."""
    known, own = sorted(name.removeprefix("__") for name in _list_parameters("", kernel)), _list_fields(kernel)
    if unknown := sorted(set(values).difference(known)):
        has_parts = any(name.rpartition("__")[2] in ("terms", "factors") for name in known)
        hint = "; the parts of a sum or product have no names, so give whole kernels as kernel=" if has_parts else ""
        raise InvalidInputError(f"{kernel!r} has the parameters {known}, and not {unknown}{hint}.")
    direct = {name: value for name, value in values.items() if name in own}
    changed: Kernel = replace(kernel, **direct)  # type: ignore[type-var]  # a kernel with parameters is a dataclass
    for name in {name.partition("__")[0] for name in values if name not in own}:
        inner = {key.removeprefix(f"{name}__"): values[key] for key in values if key.startswith(f"{name}__")}
        part = _replace_parameters(getattr(changed, name), inner)
        changed = replace(changed, **{name: part})  # type: ignore[type-var]  # as above
    return changed


class KernelTransformer(ModelTransformerMixin, KernelEstimator):
    """Base class of the estimators that transform rows."""


def _to_json_value(value: object) -> object:
    """Convert a NumPy scalar to a Python number, and a dtype to its name, for JSON."""
    if isinstance(value, type | np.dtype):
        return np.dtype(value).name
    return value.item() if isinstance(value, np.generic) else value
