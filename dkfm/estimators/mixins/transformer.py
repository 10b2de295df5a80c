"""Make a model a scikit-learn transformer of arrays in memory and of dask collections."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, overload

from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin

from dkfm.core.frames import convert_container, is_dask_collection
from dkfm.core.rows import Array, require_no_path
from dkfm.estimators.mixins.scoring import ScoringMixin

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd


class _InMemoryTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Transform arrays in memory; scikit-learn wraps the results as `set_output` requests."""

    _output_head_name: ClassVar[str]
    """Name of the head that `transform` returns."""

    def transform(self, X: object) -> Array:
        return self._score_in_memory(self._output_head_name, X)  # type: ignore[no-any-return]  # of the subclass

    def fit_transform(self, X: object, y: object = None) -> Array:
        return self._transform_training_rows(X)  # type: ignore[no-any-return]  # of the subclass


class ModelTransformerMixin(ScoringMixin, _InMemoryTransformer, auto_wrap_output_keys=None):  # type: ignore[call-arg]  # lazy results stay lazy: `set_output` wraps those of _InMemoryTransformer
    """Add `transform` to an estimator with a fitted model."""

    @property
    def _n_features_out(self) -> int:
        return self.model_.head(self._output_head_name).width

    @overload
    def transform(self, X: da.Array) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def transform(self, X: dd.DataFrame) -> dd.DataFrame: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def transform(self, X: object) -> Array: ...

    def transform(self, X: object) -> Array | da.Array | dd.DataFrame:
        """Return the output of the fitted model for rows X.

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask array or dask data frame of shape (n, d)
            Rows; for a precomputed kernel, the values k(z, x) of shape (n, N). If the fit had column names, they select
            the columns of a dask data frame, and a data frame in memory must have them in the same order. An xarray
            DataArray counts as the NumPy or dask array that it holds.

        Returns
        -------
        ndarray of shape (n, width), or lazy dask array or data frame
            Output in the precision of the model, in the container that `set_output` requests. Regardless of
            `set_output`, a dask array gives a dask array with the same row chunks, and a dask data frame gives a dask
            data frame with the same index.

        Raises
        ------
        InvalidInputError
            Rows are not finite real numbers, or their number of columns differs from the fit.
        """
        X = convert_container(X)
        return self._score_lazily(self._output_head_name, X) if is_dask_collection(X) else super().transform(X)

    @overload
    def fit_transform(self, X: da.Array, y: object = None, **fit_params: object) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def fit_transform(self, X: dd.DataFrame, y: object = None, **fit_params: object) -> dd.DataFrame: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def fit_transform(self, X: object, y: object = None, **fit_params: object) -> Array: ...

    def fit_transform(self, X: object, y: object = None, **fit_params: object) -> Array | da.Array | dd.DataFrame:
        """Fit to rows X, and return the output for them; see `fit` and `transform`."""
        require_no_path(X)
        X = convert_container(X)
        self.fit(X, y, **fit_params)
        return self.transform(X) if is_dask_collection(X) else super().fit_transform(X)

    def _output_names(self, output: str) -> list[str]:
        return list(self.get_feature_names_out()) if output == self._output_head_name else super()._output_names(output)

    def _transform_training_rows(self, X: object) -> Array:
        """Return the output for the training rows."""
        return self._score_in_memory(self._output_head_name, X)
