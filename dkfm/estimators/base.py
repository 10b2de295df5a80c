"""What every estimator of dkfm shares: validation, scoring of arrays and dask arrays, stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.utils.validation import check_is_fitted, validate_data

from dkfm import apply, lazy, preflight, store
from dkfm.certificate import Certificate
from dkfm.errors import InvalidInputError
from dkfm.estimators.training import Points, Training, training
from dkfm.kernels import KernelSpec, as_kernel
from dkfm.kernels.base import Kernel
from dkfm.kernels.precomputed import Precomputed
from dkfm.kernels.rows import Array, Rows, as_diagonal, as_rows, double
from dkfm.model import Head, Model
from dkfm.record import Record, save_record

if TYPE_CHECKING:
    import dask.array as da

__all__ = ["KernelEstimator"]


class KernelEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of the estimators: a kernel, training rows, and a model fitted to them."""

    kernel: KernelSpec
    kernel_params: Mapping[str, object] | None
    workspace: str | Path | None
    tile_rows: int | None
    on_indefinite: str
    model_: Model
    certificate_: Certificate
    n_features_in_: int

    _output: ClassVar[str]
    _stored: ClassVar[tuple[str, ...]]
    """Constructor parameters that a store keeps, beside the kernel."""
    _arrays: ClassVar[tuple[str, ...]]
    """Fitted arrays that a store keeps, beside the model's; without their last underscore."""

    def _begin(self, X: object) -> Training:
        """Check everything that can be checked before the first tile; return what the fit is given."""
        if self.on_indefinite not in ("raise", "clip"):
            raise InvalidInputError(f'on_indefinite must be "raise" or "clip", and is {self.on_indefinite!r}.')
        given = training(as_kernel(self.kernel, self.kernel_params), X)
        try:
            validate_data(clone(self), X, reset=True, skip_check_array=True)
        except TypeError as error:  # names of columns that scikit-learn does not take
            raise InvalidInputError(str(error)) from None
        preflight.require_driver(given.landmarks.shape[0], given.width, given.kernel.blocks, given.kernel.copies)
        return given

    def _finish(self, X: object, given: Training, heads: Mapping[str, Head], **arrays: Array) -> Self:
        """Set everything that was fitted, at once: a fit that fails leaves the estimator as it was."""
        model = Model(given.kernel, given.landmarks, heads)
        certificate = self._measure(apply.prepare(model), arrays, given, None)
        validate_data(self, X, reset=True, skip_check_array=True)
        self.model_, self.certificate_ = model, certificate
        for name in self._arrays:
            setattr(self, f"{name}_", arrays[name])
        return self

    @property
    def kernel_(self) -> Kernel:
        """The kernel as fitted, every parameter resolved."""
        return self.model_.kernel

    @property
    def _n_features_out(self) -> int:
        return self.model_.head(self._output).width

    def transform(self, X: object) -> Array | da.Array:
        """Return the output of the fitted model for rows X.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask array of shape (n, d)
            For a precomputed kernel the values k(z, x) of each row z, (n, N).

        Returns
        -------
        ndarray, or lazy dask array with the row chunks of X, of shape (n, width), float64

        Raises
        ------
        InvalidInputError
            Rows that are not finite real numbers, or another number of columns than in fit.
        """
        return self._score(self._output, X)

    def _score(self, output: str, X: object, diagonal: object = None) -> Array | da.Array:
        check_is_fitted(self, "model_")
        if hasattr(X, "__dask_graph__") and hasattr(X, "map_blocks"):
            return lazy.transform(self._carried(), self.model_, output, X, diagonal)  # type: ignore[arg-type]  # dask has no types
        if hasattr(X, "__dask_graph__"):
            raise InvalidInputError("Of the dask collections a dask array is transformed; see its to_dask_array().")
        rows = double(as_rows(X))
        expected = self.model_.columns
        if rows.shape[1] != expected:
            raise InvalidInputError(
                f"X has {rows.shape[1]} features, but {type(self).__name__} is expecting {expected} features as input."
            )
        validate_data(self, X, reset=False, skip_check_array=True)
        known = None if diagonal is None else as_diagonal(diagonal, rows.shape[0])
        return apply.finite_scores(self._scorer(), output, rows, "X", diagonal=known)

    def _scorer(self) -> apply.Scorer:
        model, scorer = getattr(self, "_prepared", (None, None))
        if scorer is None or model is not self.model_:
            scorer = apply.prepare(self.model_)
            self._prepared = (self.model_, scorer)
        return scorer

    def _carried(self) -> lazy.Carried | lazy.Spilled:
        model, carried = getattr(self, "_carried_model", (None, None))
        if carried is None or model is not self.model_:
            carried = lazy.carry(self._record(), self.workspace)
            self._carried_model = (self.model_, carried)
        return carried

    def __getstate__(self) -> dict[str, object]:
        # What a graph refers to, and what was prepared, belong to this process; a copy makes its own.
        state: dict[str, object] = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("_carried_model", "_prepared")}

    def __sklearn_tags__(self) -> object:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        # Cross-validation then takes the same columns of a Gram matrix as rows.
        tags.input_tags.pairwise = self.kernel == "precomputed" or isinstance(self.kernel, Precomputed)
        return tags

    def verify(self, X: object = None) -> Certificate:
        """Measure the certificate anew.

        Parameters
        ----------
        X : array-like of shape (m, d), optional
            For a feature map, new points to pair with the training points, measured beside the certificate. They are
            as exact as what the rank dropped allows, ``sqrt(lambda_dropped / max k)``, and mostly far better. For a
            precomputed kernel the Gram matrix that it was fitted to, which no model keeps.

        Returns
        -------
        Certificate
            Of pairs of training points, or of training and new points where these are given.

        Raises
        ------
        CertificateError
            It is more than ten times worse than at fit: weights, landmarks or kernel are not what they were.
        """
        check_is_fitted(self, "model_")
        arrays = {name: getattr(self, f"{name}_") for name in self._arrays}
        scorer = apply.prepare(self.model_)
        model, given_gram = self.model_, self.model_.kernel.of_numbers
        if given_gram and X is None:
            raise InvalidInputError("A model of a precomputed kernel keeps no Gram matrix; give it to verify.")
        given = training(model.kernel, X) if given_gram else Points(model.kernel, model.landmarks, 0)
        measured = self._measure(scorer, arrays, given, None)
        measured.require(self.certificate_)
        if X is None or given_gram:
            return measured
        found = self._measure(scorer, arrays, given, double(as_rows(X)))
        found.require_below(self._bound())
        return found

    def _bound(self) -> float:
        """Return what the certificate of new points may be."""
        raise AssertionError("every estimator that is measured on new points knows")

    def _measure(self, scorer: apply.Scorer, arrays: dict[str, Array], given: Training, Z: Rows | None) -> Certificate:
        raise AssertionError("every estimator measures itself")

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the fitted estimator to a Zarr store, without pickle; `dkfm.load` reads it.

        Parameters
        ----------
        path : str or Path
            Must not exist, or be empty.
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
        save_record(store.local_path(path).absolute(), self._record(), overwrite=overwrite)

    def _record(self) -> Record:
        fitted: dict[str, object] = {
            "certificate": asdict(self.certificate_),
            "feature_names": [str(name) for name in getattr(self, "feature_names_in_", [])],
        }
        parameters = {name: _plain(getattr(self, name)) for name in self._stored}
        arrays = {name: getattr(self, f"{name}_") for name in self._arrays}
        return Record(type(self).__name__, parameters, fitted, arrays, self.model_)

    @classmethod
    def _from_record(cls, record: Record) -> KernelEstimator:
        """Bring a fitted estimator back from what `_record` made."""
        estimator = cls(kernel=record.model.kernel, **{name: record.parameters[name] for name in cls._stored})
        record.model.head(cls._output)
        estimator.model_ = record.model
        estimator.n_features_in_ = record.model.columns
        estimator.certificate_ = Certificate.of(record.fitted["certificate"])
        names = record.fitted["feature_names"]
        if names:
            estimator.feature_names_in_ = np.asarray(names, dtype=object)
        for name in cls._arrays:
            setattr(estimator, f"{name}_", record.arrays[name])
        return estimator


def _plain(value: object) -> object:
    """Return a NumPy scalar as the Python number that JSON knows."""
    return value.item() if isinstance(value, np.generic) else value
