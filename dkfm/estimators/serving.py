"""What serves a fitted model: arrays and dask arrays through any of its outputs, and into a store."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from sklearn.utils.validation import check_is_fitted, validate_data

from dkfm.core.frames import is_dask_array, is_dask_collection, unwrap
from dkfm.core.rows import Array, Rows, as_float64, as_rows
from dkfm.errors import InvalidInputError
from dkfm.estimators.notebook_display import HtmlDisplayMixin
from dkfm.execution import lazy_arrays
from dkfm.execution.blas_threads import limit_blas_threads_in_worker
from dkfm.files.location import locate
from dkfm.kernels.base import Kernel
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer, compute_finite_scores, prepare_compact_scorer
from dkfm.storage import model_transfer
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd


class ScoringMixin(HtmlDisplayMixin):
    """An estimator with a model, which it scores with and saves."""

    workspace: str | Path | None
    n_features_in_: int
    _serving: _Served

    @property
    def kernel_(self) -> Kernel:
        """The kernel as fitted, every parameter resolved."""
        return self.model_.kernel

    def _serve(self, model: Model) -> None:
        """Score with this model from now on."""
        self.model_ = model
        self._lies_at = None
        self._serving = _Served(model)

    def _take_column_names(self, other: ScoringMixin) -> None:
        """Take over the number and the names of the columns that another estimator was fitted to."""
        seen = ("n_features_in_", "feature_names_in_")
        self.__dict__.update({name: value for name, value in vars(other).items() if name in seen})

    def _record(self) -> Record:
        """Return what a store keeps of it."""
        raise AssertionError("every estimator keeps something")

    def _columns_of(self, output: str) -> list[str]:
        """Return the names of the columns of an output."""
        width = self.model_.head(output).width
        return [output] if width == 1 else [f"{output}{i}" for i in range(width)]

    def _of_similarity(self, output: str, X: object, diag: object) -> Array | da.Array:
        """Return an output that needs k(z, z), one number a row."""
        check_is_fitted(self, "model_")
        if self.kernel_.is_precomputed != (diag is not None):
            raise InvalidInputError(
                f"{output} needs k(z, z) as diag, for a precomputed kernel does not know it."
                if diag is None
                else f"{self.kernel_!r} computes k(z, z) itself; diag belongs to a precomputed kernel."
            )
        X = unwrap(X)
        if not is_dask_collection(X):
            return self._score(output, X, diag)[:, 0]
        found = self._lazily(output, X, diag)
        lazily: da.Array = found[output] if hasattr(found, "columns") else found[:, 0]
        return lazily

    def _lazily(self, output: str, X: object, diagonal: object = None) -> da.Array | dd.DataFrame:
        check_is_fitted(self, "model_")
        if is_dask_array(X):
            return lazy_arrays.transform_array(self._carried(), self.model_, output, cast("da.Array", X), diagonal)
        rows = self._of_frame(X)
        if diagonal is not None:
            raise InvalidInputError("A data frame has no place for diag; give dask arrays of both.")
        return lazy_arrays.transform_frame(self._carried(), self.model_, output, rows, self._columns_of(output))

    def _of_frame(self, X: object) -> dd.DataFrame:
        """Return the columns of a dask data frame that fit saw, by name; all where it saw no names."""
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
        return frame if names is None else frame[list(names)]

    def _of(self, output: str, X: object) -> Array | da.Array | dd.DataFrame:
        """Return any output of rows X (n, d) as (n, width), of dask collections lazily."""
        X = unwrap(X)
        return self._lazily(output, X) if is_dask_collection(X) else self._score(output, X)

    def _rows(self, X: object, name: str = "X") -> Rows:
        """Return rows in memory as float64, once their columns are those that fit saw, in number and by name."""
        X = unwrap(X)
        rows, expected = as_float64(as_rows(X, name)), self.model_.columns
        if rows.shape[1] != expected:
            raise InvalidInputError(
                f"{name} has {rows.shape[1]} features, but {type(self).__name__} is expecting {expected} features as "
                "input."
            )
        self._require_seen(X)
        return rows

    def _require_seen(self, X: object) -> None:
        """Raise where columns are not called as those that fit saw, in order; warn where one side has no names."""
        try:
            validate_data(self, unwrap(X), reset=False, skip_check_array=True)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(str(error)) from None

    def _score(self, output: str, X: object, diagonal: object = None) -> Array:
        check_is_fitted(self, "model_")
        rows = self._rows(X)
        known = None if diagonal is None else _as_diagonal(diagonal, rows.shape[0])
        with limit_blas_threads_in_worker():
            return compute_finite_scores(self._scorer(), output, rows, "X", diagonal=known)

    def _scorer(self) -> Scorer:
        return self._served().scorer

    def _carried(self) -> lazy_arrays.EmbeddedModel | lazy_arrays.StoredModel:
        served = self._served()
        if served.carried is None:
            served.carried = lazy_arrays.model_for_graph(self._record(), self.workspace)
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
        model_transfer.save_model(path, self._record(), overwrite=overwrite)
        self._lies_at = str(locate(path))


class _Served:
    """What serves a fitted model in this process: prepared landmarks, and what a graph carries, when first needed."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.carried: lazy_arrays.EmbeddedModel | lazy_arrays.StoredModel | None = None

    @cached_property
    def scorer(self) -> Scorer:
        return prepare_compact_scorer(self.model)


def _as_diagonal(values: object, n: int) -> Array:
    """Return k(z, z) of n rows as (n,) finite float64 numbers, or say why they are not."""
    diagonal = np.asarray(values)
    if diagonal.shape != (n,) or diagonal.dtype.kind not in "biuf":
        raise InvalidInputError(f"diag must hold k(z, z), of shape {(n,)}, and its shape is {diagonal.shape}.")
    if not np.isfinite(diagonal).all():
        raise InvalidInputError(f"diag must be finite, and k(z, z) of row {np.isfinite(diagonal).argmin()} is not.")
    return diagonal.astype(np.float64)
