"""Score rows in memory and dask collections with a fitted model, and save it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from sklearn.utils.validation import check_is_fitted, validate_data

from dkfm.core.argument_checks import require_flags
from dkfm.core.display.quantities import format_names
from dkfm.core.frames import column_names, convert_container, is_dask_array, is_dask_collection
from dkfm.core.rows import Array, Rows
from dkfm.errors import InvalidInputError
from dkfm.estimators.mixins.notebook_display import HtmlDisplayMixin
from dkfm.estimators.stored.base import as_rows_of_model
from dkfm.execution import lazy_scoring
from dkfm.execution.scoring_threads import choose_scoring_threads
from dkfm.files.location import locate
from dkfm.kernels.base import Kernel
from dkfm.numerics.links import name_class_columns
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer, compute_finite_scores, prepare_compact_scorer
from dkfm.storage import remote_stores
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd


class ScoringMixin(HtmlDisplayMixin):
    """Add scoring and saving to an estimator with a fitted model."""

    workspace: str | Path | None
    n_features_in_: int
    _model_cache: _ModelCache

    @property
    def kernel_(self) -> Kernel:
        """Fitted kernel, with all parameters resolved."""
        return self.model_.kernel

    def _set_model(self, model: Model) -> None:
        """Set the model that the estimator scores with."""
        self.model_ = model
        self._saved_location = None
        self._model_cache = _ModelCache(model)

    def _copy_feature_names_in(self, other: ScoringMixin) -> None:
        """Copy the number and names of columns of the fit of another estimator."""
        copied = ("n_features_in_", "feature_names_in_")
        self.__dict__.update({name: value for name, value in vars(other).items() if name in copied})

    def _to_record(self) -> Record:
        """Return the record that a store keeps of the estimator."""
        raise AssertionError("subclasses implement this")

    def _output_names(self, output: str) -> list[str]:
        """Return the names of the columns of an output."""
        width, labels = self.model_.head(output).width, np.asarray(getattr(self, "classes_", ())).tolist()
        if names := name_class_columns(output, width, labels):
            return [f"{output}_{name}" for name in names]
        return [output] if width == 1 else [f"{output}{i}" for i in range(width)]

    def _score_with_diagonal(self, output: str, X: object, diag: object) -> Array | da.Array:
        """Return an output of one value for each row, (n,), that needs k(z, z)."""
        check_is_fitted(self, "model_")
        if self.kernel_.is_precomputed != (diag is not None):
            raise InvalidInputError(
                f"{output} needs k(z, z) as diag, for a precomputed kernel does not know it."
                if diag is None
                else f"{self.kernel_!r} computes k(z, z) itself; diag belongs to a precomputed kernel."
            )
        X = convert_container(X)
        if not is_dask_collection(X):
            return self._score_in_memory(output, X, diag)[:, 0]
        scores = self._score_lazily(output, X, diag)
        column: da.Array = scores[output] if hasattr(scores, "columns") else scores[:, 0]
        return column

    def _score_lazily(self, output: str, X: object, diagonal: object = None) -> da.Array | dd.DataFrame:
        check_is_fitted(self, "model_")
        if is_dask_array(X):
            array = cast("da.Array", X)
            scores = lazy_scoring.score_array(self._get_graph_model(), self.model_, output, array, diagonal)
            self._require_fitted_columns(X)
            return scores
        rows = self._select_frame_columns(X)
        if diagonal is not None:
            raise InvalidInputError("A data frame has no place for diag; give dask arrays of both.")
        names = self._output_names(output)
        return lazy_scoring.score_frame(self._get_graph_model(), self.model_, output, rows, names)

    def _select_frame_columns(self, X: object) -> dd.DataFrame:
        """Return the columns of a dask data frame that the fit named; all columns if the fit had no names."""
        if not hasattr(X, "map_partitions") or getattr(X, "ndim", 0) != 2:
            raise InvalidInputError(
                "Of dask's collections arrays and data frames are transformed, and this is neither."
            )
        frame, names = cast("dd.DataFrame", X), getattr(self, "feature_names_in_", None)
        missing = [] if names is None else [name for name in names if name not in frame.columns]
        if missing:
            raise InvalidInputError(f"The data frame lacks {format_names(missing)}, which fit saw.")
        if names is None:
            self._require_fitted_columns(frame._meta)
        else:
            frame = frame[list(names)]
        return frame

    def _compute_output(self, output: str, X: object) -> Array | da.Array | dd.DataFrame:
        """Return an output (n, width) for rows X (n, d), lazily for dask collections."""
        X = convert_container(X)
        return self._score_lazily(output, X) if is_dask_collection(X) else self._score_in_memory(output, X)

    def _check_rows(self, X: object, name: str = "X") -> Rows:
        """Return rows in memory as float64; raise unless the number and names of columns are those of the fit."""
        X = convert_container(X)
        has_names = column_names(X) is not None and hasattr(self, "feature_names_in_")
        if has_names:  # first, so that an error names the missing or extra columns
            self._require_fitted_columns(X)
        rows = as_rows_of_model(X, self.model_, type(self).__name__, name)
        if not has_names:
            self._require_fitted_columns(X)
        return rows

    def _require_fitted_columns(self, X: object) -> None:
        """Raise unless columns have the names of the fit, in order; warn if only one of fit and rows has names."""
        try:
            validate_data(self, convert_container(X), reset=False, skip_check_array=True)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(str(error).rstrip()) from None

    def _score_in_memory(self, output: str, X: object, diagonal: object = None) -> Array:
        check_is_fitted(self, "model_")
        rows = self._check_rows(X)
        checked = None if diagonal is None else _check_diagonal(diagonal, rows.shape[0])
        with choose_scoring_threads(self._get_scorer(), output, rows.shape[0]) as scorer:
            return compute_finite_scores(scorer, output, rows, "X", diagonal=checked)

    def _get_scorer(self) -> Scorer:
        return self._current_cache().scorer

    def _get_graph_model(self) -> lazy_scoring.EmbeddedModel | lazy_scoring.TemporaryModelStore:
        cache = self._current_cache()
        if cache.graph_model is None:
            cache.graph_model = lazy_scoring.model_for_graph(self._to_record(), self.workspace)
        return cache.graph_model

    def _current_cache(self) -> _ModelCache:
        if self._model_cache.model is not self.model_:
            self._model_cache = _ModelCache(self.model_)
        return self._model_cache

    def __getstate__(self) -> dict[str, object]:
        # The cache belongs to this process; a copy creates its own.
        state: dict[str, object] = super().__getstate__()
        return {key: value for key, value in state.items() if key != "_model_cache"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if "model_" in state:
            self._model_cache = _ModelCache(self.model_)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the fitted estimator to a Zarr store, without pickle; `dkfm.load` reads it.

        Parameters
        ----------
        path : str or Path
            Path, or a URL of fsspec such as ``s3://bucket/model``, that does not exist or is empty.
        overwrite : bool, default=False
            Whether to replace an existing model of dkfm. Anything else is never replaced.

        Raises
        ------
        StoreExistsError
            Something exists at the path; it is left untouched.
        KernelError
            The kernel is a user class, or a function that another process cannot import.
        """
        check_is_fitted(self, "model_")
        require_flags(overwrite=overwrite)
        remote_stores.save_model(path, self._to_record(), overwrite=overwrite)
        self._saved_location = str(locate(path))


class _ModelCache:
    """Cache of this process for the prepared scorer of a fitted model, and for the model's form in dask graphs."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.graph_model: lazy_scoring.EmbeddedModel | lazy_scoring.TemporaryModelStore | None = None

    @cached_property
    def scorer(self) -> Scorer:
        return prepare_compact_scorer(self.model)


def _check_diagonal(values: object, n: int) -> Array:
    """Return k(z, z) as float64 values (n,); raise unless they are n real numbers."""
    diagonal = np.asarray(values)
    if diagonal.shape != (n,) or diagonal.dtype.kind not in "biuf":
        raise InvalidInputError(f"diag must hold k(z, z), of shape {(n,)}, and its shape is {diagonal.shape}.")
    return diagonal.astype(np.float64)
