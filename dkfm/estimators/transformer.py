"""What makes a model a transformer of scikit-learn's, of arrays in memory and of dask collections."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin

from dkfm.core.frames import is_dask_collection, unwrap
from dkfm.core.rows import Array
from dkfm.estimators.serving import ScoringMixin

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd


class _Transformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Of arrays in memory: what it returns is what `set_output` asks for."""

    _output: ClassVar[str]
    """The head of `transform`."""

    def transform(self, X: object) -> Array:
        return self._score(self._output, X)  # type: ignore[no-any-return]  # of the subclass

    def fit_transform(self, X: object, y: object = None) -> Array:
        return self._of_training(X)  # type: ignore[no-any-return]  # of the subclass


class ModelTransformerMixin(ScoringMixin, _Transformer, auto_wrap_output_keys=None):  # type: ignore[call-arg]  # lazy results stay lazy: `set_output` wraps those of _Transformer
    """An estimator whose model transforms."""

    @property
    def _n_features_out(self) -> int:
        return self.model_.head(self._output).width

    def transform(self, X: object) -> Array | da.Array | dd.DataFrame:  # type: ignore[override]  # lazy results too
        """Return the output of the fitted model for rows X.

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask array or dask data frame of shape (n, d)
            For a precomputed kernel the values k(z, x) of each row z, (n, N). The columns of a dask data frame are
            taken by the names that `fit` saw, if it saw any; those of a frame in memory must have these names, in the
            same order. A DataArray of xarray's counts as the NumPy or dask array that it holds.

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
        X = unwrap(X)
        return self._lazily(self._output, X) if is_dask_collection(X) else super().transform(X)

    def fit_transform(self, X: object, y: object = None, **fit_params: object) -> Array | da.Array | dd.DataFrame:  # type: ignore[override]  # lazy results too
        """Fit, and return the output for the training rows: see `fit` and `transform`."""
        X = unwrap(X)
        self.fit(X, y, **fit_params)
        return self.transform(X) if is_dask_collection(X) else super().fit_transform(X)

    def _columns_of(self, output: str) -> list[str]:
        return list(self.get_feature_names_out()) if output == self._output else super()._columns_of(output)

    def _of_training(self, X: object) -> Array:
        """Return the output for the rows of the fit."""
        return self._score(self._output, X)
