"""What every estimator of dkfm shares: validation, scoring of arrays and dask arrays, stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.utils.validation import check_is_fitted, validate_data

from dkfm import apply, lazy, transfer
from dkfm.certificate import Certificate, Verification
from dkfm.errors import InvalidInputError
from dkfm.estimators.shown import Shown
from dkfm.estimators.training import Points, Training, training
from dkfm.kernels import KernelSpec
from dkfm.kernels.base import Kernel
from dkfm.kernels.precomputed import Precomputed
from dkfm.kernels.rows import Array, Rows, as_diagonal, as_rows, double
from dkfm.model import Model
from dkfm.places import root_of
from dkfm.record import Record
from dkfm.workers import threads_of_a_task

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    from sklearn.utils import Tags

__all__ = ["KernelEstimator", "precision"]

_PRECISIONS = ("float64", "float32")


def precision(dtype: object) -> np.dtype[np.floating]:
    """Return what an estimator is to score in, however it is given, or raise."""
    try:
        found: np.dtype[np.floating] = np.dtype(dtype)  # type: ignore[call-overload]  # what is none is refused
    except TypeError:
        found = np.dtype(np.float16)
    if found.name not in _PRECISIONS:
        raise InvalidInputError(f"dtype must be one of {', '.join(_PRECISIONS)}, and is {dtype!r}.")
    return found


class _Transformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Shown):  # type: ignore[misc]  # scikit-learn has no types
    """Of arrays in memory: what it returns is what `set_output` asks for."""

    def transform(self, X: object) -> Array:
        return self._score(self._output, X)  # type: ignore[no-any-return]  # of the subclass

    def fit_transform(self, X: object, y: object = None) -> Array:
        return self._of_training(X)  # type: ignore[no-any-return]  # of the subclass


class KernelEstimator(_Transformer, auto_wrap_output_keys=None):  # type: ignore[call-arg]  # lazy results stay lazy: `set_output` wraps those of _Transformer
    """Base of the estimators: a kernel, training rows, and a model fitted to them."""

    kernel: KernelSpec
    kernel_params: Mapping[str, object] | None
    workspace: str | Path | None
    tile_rows: int | None
    on_indefinite: str
    progress: bool
    model_: Model
    certificate_: Certificate
    n_features_in_: int
    _serving: _Served
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

    def _begin(self, X: object, kernel: Kernel, *, copy: bool = True) -> Training:
        """Check everything that can be checked before the first tile; return what the fit is given."""
        if self.on_indefinite not in self._policies:
            known = ", ".join(self._policies)
            raise InvalidInputError(f"on_indefinite must be one of {known}, and is {self.on_indefinite!r}.")
        given = training(kernel, X, copy=copy)
        try:
            validate_data(clone(self), X, reset=True, skip_check_array=True)
        except TypeError as error:  # names of columns that scikit-learn does not take
            raise InvalidInputError(str(error)) from None
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

    def _set(self, model: Model, fitted: Mapping[str, object], parameters: Mapping[str, object]) -> None:
        for name in (*self._arrays, *self._optional, *self._certificates, *self._numbers):
            self.__dict__.pop(f"{name}_", None)  # of a fit before
        for name, value in fitted.items():
            setattr(self, f"{name}_", value)
        self.model_ = model
        self._lies_at = None
        self._fitted_as = dict(parameters)
        self._serving = _Served(model)

    @property
    def kernel_(self) -> Kernel:
        """The kernel as fitted, every parameter resolved."""
        return self.model_.kernel

    @property
    def _n_features_out(self) -> int:
        return self.model_.head(self._output).width

    def transform(self, X: object) -> Array | da.Array | dd.DataFrame:  # type: ignore[override]  # lazy results too
        """Return the output of the fitted model for rows X.

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask array or dask data frame of shape (n, d)
            For a precomputed kernel the values k(z, x) of each row z, (n, N). The columns of a dask data frame are
            taken by the names that `fit` saw, if it saw any.

        Returns
        -------
        ndarray of shape (n, width), in the precision of the model
            Or what `set_output` asks for. Lazily, of a dask array a dask array with its row chunks, and of a dask data
            frame one with its index; these are what they are whatever `set_output` asks for.

        Raises
        ------
        InvalidInputError
            Rows that are not finite real numbers, or another number of columns than in fit.
        """
        return self._lazily(self._output, X) if hasattr(X, "__dask_graph__") else super().transform(X)

    def fit_transform(self, X: object, y: object = None, **fit_params: object) -> Array | da.Array | dd.DataFrame:  # type: ignore[override]  # lazy results too
        """Fit, and return the output for the training rows: see `fit` and `transform`."""
        self.fit(X, y, **fit_params)
        return self.transform(X) if hasattr(X, "__dask_graph__") else super().fit_transform(X)

    def _of_training(self, X: object) -> Array:
        """Return the output for the rows of the fit."""
        return self._score(self._output, X)

    def _of_similarity(self, output: str, X: object, diag: object) -> Array | da.Array:
        """Return an output that needs k(z, z), one number a row."""
        check_is_fitted(self, "model_")
        if self.kernel_.of_numbers != (diag is not None):
            raise InvalidInputError(
                f"{output} needs k(z, z) as diag, for a precomputed kernel does not know it."
                if diag is None
                else f"{self.kernel_!r} computes k(z, z) itself; diag belongs to a precomputed kernel."
            )
        if not hasattr(X, "__dask_graph__"):
            return self._score(output, X, diag)[:, 0]
        found = self._lazily(output, X, diag)
        lazily: da.Array = found[output] if hasattr(found, "columns") else found[:, 0]
        return lazily

    def _lazily(self, output: str, X: object, diagonal: object = None) -> da.Array | dd.DataFrame:
        check_is_fitted(self, "model_")
        if hasattr(X, "map_blocks"):
            return lazy.transform(self._carried(), self.model_, output, cast("da.Array", X), diagonal)
        if not hasattr(X, "map_partitions") or getattr(X, "ndim", 0) != 2:
            raise InvalidInputError(
                "Of dask's collections arrays and data frames are transformed, and this is neither."
            )
        frame, names = cast("dd.DataFrame", X), getattr(self, "feature_names_in_", None)
        missing = [] if names is None else [name for name in names if name not in frame.columns]
        if missing:
            raise InvalidInputError(
                f"The data frame lacks {missing[0]!r}, which fit saw ({len(missing)} such columns)."
            )
        if names is None and len(frame.columns) != self.model_.columns:
            raise InvalidInputError(
                f"The data frame has {len(frame.columns)} columns and the model was fitted with {self.model_.columns}."
            )
        columns = list(self.get_feature_names_out()) if output == self._output else [output]
        if diagonal is not None:
            raise InvalidInputError("A data frame has no place for diag; give dask arrays of both.")
        rows = frame if names is None else frame[list(names)]
        return lazy.transform_frame(self._carried(), self.model_, output, rows, columns)

    def _score(self, output: str, X: object, diagonal: object = None) -> Array:
        check_is_fitted(self, "model_")
        rows = double(as_rows(X))
        expected = self.model_.columns
        if rows.shape[1] != expected:
            raise InvalidInputError(
                f"X has {rows.shape[1]} features, but {type(self).__name__} is expecting {expected} features as input."
            )
        validate_data(self, X, reset=False, skip_check_array=True)
        known = None if diagonal is None else as_diagonal(diagonal, rows.shape[0])
        with threads_of_a_task():
            return apply.finite_scores(self._scorer(), output, rows, "X", diagonal=known)

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

    def _scorer(self) -> apply.Scorer:
        return self._served().scorer

    def _carried(self) -> lazy.Carried | lazy.Spilled:
        served = self._served()
        if served.carried is None:
            served.carried = lazy.carry(self._record(), self.workspace)
        return served.carried

    def _served(self) -> _Served:
        if self._serving.model is not self.model_:
            self._serving = _Served(self.model_)
        return self._serving

    def __getstate__(self) -> dict[str, object]:
        # What serves this process is not for another; a copy makes its own.
        state: dict[str, object] = super().__getstate__()
        return {key: value for key, value in state.items() if key != "_serving"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if "model_" in state:
            self._serving = _Served(self.model_)

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
        model, scorer = self.model_, apply.prepare(self.model_)
        if model.kernel.of_numbers and X is None:
            raise InvalidInputError("A model of a precomputed kernel keeps no Gram matrix; give it to verify.")
        if model.kernel.of_numbers:
            numbers = cast("Array", model.landmarks)[:, 0].astype(np.intp)
            landmarks = training(model.kernel, X).subset(numbers)
        else:
            landmarks = Points(model.kernel, model.points, 0)
        measured = self._measure(scorer, landmarks, self._fitted_arrays())
        measured.require(self.certificate_)
        if X is None or model.kernel.of_numbers:
            return Verification(measured)
        return self._measure_points(scorer, measured, double(as_rows(X)))

    def _measure(self, scorer: apply.Scorer, landmarks: Training, fitted: Mapping[str, object]) -> Certificate:
        """Return the certificate of a model with fitted arrays, which need not be this estimator's yet."""
        raise AssertionError("every estimator measures itself")

    def _measure_points(self, scorer: apply.Scorer, measured: Certificate, Z: Rows) -> Verification:
        """Return the verification with new points."""
        raise InvalidInputError("Components are measured on their training rows alone; give no other points.")

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the fitted estimator to a Zarr store, without pickle; `dkfm.load` reads it.

        Parameters
        ----------
        path : str or Path
            Or a URL of fsspec's, such as ``s3://bucket/model``. Must not exist, or be empty.
        overwrite : bool
            Whether a model of dkfm's that is there is replaced; nothing else ever is.

        Raises
        ------
        StoreExistsError
            Something is there; it is left untouched.
        KernelError
            The kernel is a class of yours, or a function that no other process could import.
        """
        check_is_fitted(self, "model_")
        transfer.save(path, self._record(), overwrite=overwrite)
        self._lies_at = str(root_of(path))

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


class _Served:
    """What serves a fitted model in this process: prepared landmarks, and what a graph carries, when first needed."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.carried: lazy.Carried | lazy.Spilled | None = None

    @cached_property
    def scorer(self) -> apply.Scorer:
        return apply.serve(self.model)


def _plain(value: object) -> object:
    """Return a NumPy scalar or dtype as the number or name that JSON knows."""
    if isinstance(value, type | np.dtype):
        return np.dtype(value).name
    return value.item() if isinstance(value, np.generic) else value
