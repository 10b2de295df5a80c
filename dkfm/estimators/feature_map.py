"""`ExactFeatureMap`: any kernel as an explicit, exact, finite-dimensional feature map."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dkfm.core.chunking import require_count
from dkfm.core.frames import is_dask_array, is_dask_collection, require_same_columns, unwrap
from dkfm.core.rows import Array, Rows
from dkfm.errors import InvalidInputError, UnsupportedStoreError
from dkfm.estimators.base import KernelEstimator, check_dtype
from dkfm.estimators.fitting import feature_maps, landmarks
from dkfm.estimators.fitting.landmarks import BUILDS, MapOptions
from dkfm.estimators.fitting.training_data import TrainingData, apply_weights, load_lazy_frame
from dkfm.execution import lazy_arrays
from dkfm.execution.blas_threads import limit_blas_threads_in_worker
from dkfm.kernels import KernelSpec, as_kernel
from dkfm.numerics import roots
from dkfm.numerics.certificates.certificate import Certificate, Verification
from dkfm.numerics.scorer import Scorer, kernel_distances
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    import dask.array as da


class ExactFeatureMap(KernelEstimator):
    """The map ``phi(z) = K^(-1/2) [k(x_1, z) .. k(x_N, z)]``, with ``<phi(x_n), phi(z)> = k(x_n, z)`` for every z.

    Parameters
    ----------
    kernel : Kernel, name or Gaussian process kernel of scikit-learn's, or callable
        Of `dkfm.kernels`; or what `kernels.from_sklearn` translates; or "precomputed", for which `fit` takes the Gram
        matrix (as array, dask array or Zarr array) and `transform` the values k(z, x); or a function of two rows,
        which is slow (`kernels.Function` is of blocks).
    kernel_params : mapping, optional
        Parameters of a name.
    basis : {"symmetric", "spectral", "cholesky"}
        "symmetric": N features, one per landmark; "spectral": as many as the rank, uncorrelated; "cholesky": as many as
        the rank, one per pivot, fastest to fit and to map. The inner products are equal.
    centered : bool
        Take the mean of the training points' features from all features: the paper's psi.
    landmarks : array-like or {"uniform", "kmeans", "pivots", "random_pivots"}, optional
        What the map is built on, and exact for: numbers of training rows (n,), points (n, d), or a selector, which
        takes `n_landmarks` of the training rows; by default all. "uniform": at random; "kmeans": not rows but the
        centres of scikit-learn's KMeans; "pivots": each the row that those before explain least; "random_pivots": at
        random, with a chance that grows with what is not explained, which suits data with outliers.
    n_landmarks : int, optional
        For a selector. "pivots" takes as many as the rank without it.
    tol : float, optional
        The error bound that is good enough: keep the least rank that has it. By default what rounding allows.
    rcond : float, optional
        Eigenvalues up to ``rcond * lambda_max`` are taken for zero; ``4 eps`` by default. Not of the cholesky basis.
    build : {"auto", "gram", "columns"}
        Whether pivots are found in the Gram matrix, or one column at a time without it, which takes far more rows where
        the rank is low; by default what is predicted to cost less.
    on_indefinite : {"raise", "clip"}
        What to do with a kernel that is not positive semi-definite: refuse it, or drop its negative part and warn. All
        positive eigenvalues above rounding, ``4 eps max |lambda|``, are kept then, and `verify` judges no new points.
    dtype : {"float64", "float32"}, or NumPy's
        What the fitted map computes in, with the rank that it can carry. The fit itself is in float64.
    random_state : int, RandomState or None
        Of the selectors that choose at random.
    tile_rows : int, optional
        Rows and columns of a Gram tile; 2,048 by default. One tile is computed in this process, without a store.
    workspace : path, optional
        Where the Gram matrix (and a large model, for dask arrays) is kept; by default a temporary directory.
    progress : bool
        Whether to show, in a notebook or on standard error where that is a terminal, the tiles of the Gram matrix as
        they come and the time that its root is predicted to take; nothing of what takes less than two seconds.

    Attributes
    ----------
    model_ : Model
        The fitted kernel, landmarks and heads.
    kernel_ : Kernel
    eigenvalues_ : ndarray of shape (rank_,)
        Those kept, descending. Not in the cholesky basis.
    pivots_ : ndarray of shape (rank_,)
        In the cholesky basis: ``k(x, x) - |phi(x)|^2`` of each landmark when it was chosen.
    dropped_ : ndarray
        The eigenvalues taken for zero, descending; in the cholesky basis what the full factor leaves of
        ``k(x, x) - |phi(x)|^2`` of the rows that are no pivots. Before them what `truncate`, `tol` or float32 cut off.
    rank_, n_negative_ : int
        How many were kept, and how many of those dropped came out negative.
    condition_ : float
        Largest over smallest of what was kept.
    error_bounds_ : ndarray of shape (rank_ + 1,)
        By the number of features kept: E with ``|<phi(x), phi(z)> - k(x, z)| <= E sqrt(k(z, z) max_n k(x_n, x_n))`` for
        every training point x and every z, rounding included. `truncate` reads them. Infinite where a kernel was
        clipped.
    error_bound_ : float
        The last of them.
    certificate_ : Certificate
        Exactness as measured on pairs of landmarks; `verify` measures it again, and on other points. Of a clipped
        kernel it is how far the features are from the kernel as it was given, negative part and all.
    training_certificate_ : Certificate
        As measured on pairs of training points; where these are all landmarks it is `certificate_`. Not after
        `truncate`.
    max_similarity_ : float
        The largest k(x, x) of a training point.
    landmark_indices_ : ndarray of shape (n_landmarks,)
        Which training rows the landmarks are, where they are some.
    mean_ : ndarray of shape (n_landmarks,)
        If centered, the mean of k(x, landmarks) over the training points.
    n_features_in_ : int

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError
        From `fit`: the rows, the kernel, or the memory of this process will not do.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", Theorem 1 and
    eq. (4); centred, eq. (9). For two points that are both new it is exact up to `residual`. With landmarks it is a
    Nystroem map (Williams and Seeger 2001), whose error is `error_bound_`; "random_pivots" are those of Chen, Epperly,
    Tropp and Webber, "Randomly pivoted Cholesky" (2023).

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import ExactFeatureMap
    >>> from dkfm.kernels import Gaussian
    >>> rng = np.random.default_rng(0)
    >>> X, Z = rng.normal(size=(100, 5)), rng.normal(size=(7, 5))
    >>> phi = ExactFeatureMap(Gaussian(2.0)).fit(X)
    >>> bool(np.allclose(phi.transform(X) @ phi.transform(Z).T, Gaussian(2.0)(X, Z), rtol=0, atol=1e-12))
    True
    """

    dropped_: Array
    error_bounds_: Array
    max_similarity_: float
    _output: ClassVar[str] = "features"
    _stored: ClassVar[tuple[str, ...]] = ("basis", "centered", "tol", "rcond", "on_indefinite", "dtype")
    _arrays: ClassVar[tuple[str, ...]] = ("dropped", "error_bounds")
    _optional: ClassVar[tuple[str, ...]] = ("eigenvalues", "pivots", "mean", "landmark_indices")
    _certificates: ClassVar[tuple[str, ...]] = ("certificate", "training_certificate")
    _numbers: ClassVar[tuple[str, ...]] = ("max_similarity",)

    def __init__(
        self,
        kernel: KernelSpec,
        *,
        kernel_params: Mapping[str, object] | None = None,
        basis: str = "symmetric",
        centered: bool = False,
        landmarks: object = None,
        n_landmarks: int | None = None,
        tol: float | None = None,
        rcond: float | None = None,
        build: str = "auto",
        on_indefinite: str = "raise",
        dtype: str = "float64",
        random_state: object = None,
        tile_rows: int | None = None,
        workspace: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        self.kernel = kernel
        self.kernel_params = kernel_params
        self.basis = basis
        self.centered = centered
        self.landmarks = landmarks
        self.n_landmarks = n_landmarks
        self.tol = tol
        self.rcond = rcond
        self.build = build
        self.on_indefinite = on_indefinite
        self.dtype = dtype
        self.random_state = random_state
        self.tile_rows = tile_rows
        self.workspace = workspace
        self.progress = progress

    def fit(self, X: object, y: object = None, sample_weight: object = None) -> Self:
        """Fit the map to training rows X (N, d).

        The Gram matrix is computed on the current Dask client, or on threads of this process; its root here, once.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (N, d)
        y : object
            Ignored.
        sample_weight : array-like of shape (N,), optional
            Non-negative: weights of the rows in the mean of a centered map. A row of weight 0 is left out; so the inner
            products are those of a fit to rows that are repeated that often.
        """
        self._require_parameters()
        X = load_lazy_frame(X)
        require_same_columns(self.landmarks, X, "landmarks", "X")
        given, weights = apply_weights(self._begin(X, as_kernel(self.kernel, self.kernel_params)), sample_weight)
        settings = replace(self._options(MapOptions), dtype=check_dtype(self.dtype).name)
        with limit_blas_threads_in_worker():
            chosen = landmarks.choose_landmarks(given, self.landmarks, self.n_landmarks, self.random_state, settings)
            model, fitted = feature_maps.fit_map(given, weights if self.centered else None, chosen, settings)
        return self._finish(X, model, fitted)

    def _require_parameters(self) -> None:
        roots.require_parameters(self.basis, self.rcond, self.tol)
        if not isinstance(self.centered, bool | np.bool_):
            raise InvalidInputError(f"centered must be True or False, and is {self.centered!r}.")
        check_dtype(self.dtype)
        if self.build not in BUILDS:
            raise InvalidInputError(f"build must be one of {', '.join(BUILDS)}, and is {self.build!r}.")
        if self.basis == "cholesky" and self.on_indefinite == "clip":
            raise InvalidInputError(
                'on_indefinite="clip" drops eigenvalues, and the cholesky basis has pivots; use basis="spectral".'
            )

    @property
    def _values(self) -> Array:
        check_is_fitted(self, "model_")
        values: Array = vars(self)[f"{feature_maps.values_name(str(self._fitted_as['basis']))}_"]
        return values

    @property
    def rank_(self) -> int:
        """Numerical rank: how many features the map needs."""
        return len(self._values)

    @property
    def n_negative_(self) -> int:
        """How many of those dropped came out negative."""
        check_is_fitted(self, "model_")
        return int((self.dropped_ < 0).sum())

    @property
    def condition_(self) -> float:
        """Largest over smallest of what was kept; 1 where nothing is."""
        return roots.condition_number(self._values)

    @property
    def error_bound_(self) -> float:
        """Bound of the error of pairs with a training point; see `error_bounds_`."""
        check_is_fitted(self, "model_")
        return float(self.error_bounds_[-1])

    def truncate(self, rank: int | None = None, *, tol: float | None = None) -> Self:
        """Return the map of a lower rank, without another fit: the first features, and of pivots the first landmarks.

        Parameters
        ----------
        rank : int, optional
        tol : float, optional
            Instead of a rank: the least one whose error bound is at most this; all, where none is.

        Returns
        -------
        ExactFeatureMap
            Fitted, with the error bound that it costs in `error_bound_`. Of the symmetric basis all N features stay.

        Raises
        ------
        InvalidInputError
            A rank that the map does not have; or a precomputed kernel that was clipped, whose negative part no map has.

        Examples
        --------
        >>> import numpy as np
        >>> from dkfm import ExactFeatureMap
        >>> from dkfm.kernels import Gaussian
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> short = ExactFeatureMap(Gaussian(3.0), basis="cholesky").fit(X).truncate(tol=1e-3)
        >>> short.rank_, short.error_bound_ < 1e-3
        (28, True)
        """
        check_is_fitted(self, "model_")
        if (rank is None) == (tol is None):
            raise InvalidInputError("truncate takes a rank or a tol, one of them.")
        roots.require_parameters("spectral", None, tol)
        r = roots.rank_within(self.error_bounds_, cast("float", tol)) if rank is None else require_count(rank, "rank")
        if r > self.rank_:
            raise InvalidInputError(f"The rank of this map is {self.rank_}, and {r} is more.")
        basis = str(self._fitted_as["basis"])
        model, fitted = feature_maps.truncate_map(self.model_, self._fitted_arrays(), r, self.model_.dtype, basis)
        made = copy.copy(self)
        made._set(model, {**fitted, "max_similarity": self.max_similarity_}, self._fitted_as)
        return made

    def residual(self, X: object, diag: object = None) -> Array | da.Array:
        """Return ``k(z, z) - |phi(z)|^2``, clipped at 0: the squared distance from the span of the landmarks.

        For two new points, ``|<phi(z), phi(w)> - k(z, w)| <= sqrt(residual(z) residual(w))``, plus rounding: some 1e-8
        of the largest kernel value, and more for points far outside the training data where the basis is not cholesky.
        Of a clipped kernel it is no distance, and bounds nothing.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (n, d)
        diag : array-like or dask array of shape (n,), optional
            k(z, z), for a precomputed kernel, which does not know it; others do.

        Returns
        -------
        ndarray, or lazy dask array or series, of shape (n,)
        """
        return self._of_similarity("residual", X, diag)

    def distance(self, X: object, Y: object = None) -> Array | da.Array:
        """Return the distances ``|phi(x) - phi(y)|`` in the feature space of the kernel, of all pairs of rows.

        They are ``sqrt(k(x, x) + k(y, y) - 2 k(x, y))``, in float64. Features are as far apart where both rows are in
        the span of the landmarks, and less where not. The error is at most some ``sqrt(eps k)``: of rows that are
        almost equal half of the digits are left.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (n, d)
        Y : array-like or scipy.sparse array of shape (m, d), optional
            In memory; by default X.

        Returns
        -------
        ndarray, or lazy dask array with the row chunks of X, of shape (n, m)

        Notes
        -----
        Ghiasi-Shirazi and Qaraei, eq. (26).

        Examples
        --------
        >>> from dkfm import ExactFeatureMap
        >>> from dkfm.kernels import Linear
        >>> ExactFeatureMap(Linear()).fit([[1.0, 0.0], [0.0, 1.0]]).distance([[0.0, 0.0]], [[3.0, 4.0]])
        array([[5.]])
        """
        check_is_fitted(self, "model_")
        if self.kernel_.is_precomputed:
            raise InvalidInputError("A precomputed kernel has no points to compare, so it knows no distances.")
        X = unwrap(X)
        if is_dask_collection(X):
            lazily = cast("da.Array", X) if is_dask_array(X) else self._of_frame(X).to_dask_array()
            return lazy_arrays.lazy_distances(
                self.kernel_, lazily, self._rows(load_lazy_frame(lazily if Y is None else Y), "Y")
            )
        rows = self._rows(X)
        return kernel_distances(self.kernel_, rows, rows if Y is None else self._rows(load_lazy_frame(Y), "Y"))

    def _fitted_map(self) -> feature_maps.FittedMap:
        """Return what components and discriminants in the features of this map take from it."""
        fitted = vars(self)
        whole = "landmark_indices_" not in fitted and fitted.get("training_certificate_") == self.certificate_
        return feature_maps.FittedMap(self.model_, fitted.get("eigenvalues_"), self.error_bounds_, whole)

    def _measure(self, scorer: Scorer, landmarks: TrainingData, fitted: Mapping[str, object]) -> Certificate:
        return feature_maps.certify_fit(scorer, landmarks, cast("Array | None", fitted.get("mean")))

    def _measure_points(self, scorer: Scorer, measured: Certificate, Z: Rows) -> Verification:
        mean = vars(self).get("mean_")
        return feature_maps.verify_points(scorer, measured, Z, mean, self.error_bound_, self.max_similarity_)

    @classmethod
    def _from_record(cls, record: Record) -> KernelEstimator:
        head, arrays = record.model.head("residual"), record.arrays
        n, r = head.weights.shape
        wanted = {feature_maps.values_name(str(record.parameters["basis"])): (r,), "error_bounds": (r + 1,)}
        wanted |= {"mean": (n,)} if record.parameters["centered"] else {}
        if any(arrays[name].shape != shape for name, shape in wanted.items()) or arrays["dropped"].ndim != 1:
            raise UnsupportedStoreError("The fitted arrays of a feature map do not fit its model.")
        if record.parameters["dtype"] != str(record.model.dtype):
            raise UnsupportedStoreError("A feature map is not of the precision of its model.")
        return super()._from_record(record)
