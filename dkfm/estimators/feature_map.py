"""Define `ExactFeatureMap`, an explicit, exact, finite-dimensional feature map of any kernel."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast, overload

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dkfm.core.argument_checks import require_flags
from dkfm.core.frames import convert_container, is_dask_array, is_dask_collection, require_same_columns
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.estimators.base import KernelTransformer, check_dtype
from dkfm.estimators.fitting import feature_maps, landmarks, out_of_core_rows
from dkfm.estimators.fitting.landmarks import MapOptions
from dkfm.estimators.fitting.parameter_types import Basis, Build, Certify, DType, IndefinitePolicy, Landmarks
from dkfm.estimators.standardization import make_standardizing_kernel
from dkfm.estimators.stored.base import StoredEstimator
from dkfm.estimators.stored.feature_map import StoredMap
from dkfm.estimators.stored.map_records import eigenvalues_or_pivots_name
from dkfm.execution import lazy_scoring
from dkfm.execution.blas_threads import single_blas_thread_for_fit
from dkfm.gram.fit_checkpoints import keep_states_until_end
from dkfm.gram.training_data import compute_lazy_frame, drop_zero_weights
from dkfm.kernels import KernelSpec, as_kernel
from dkfm.numerics import roots
from dkfm.numerics.scorer import kernel_distances

if TYPE_CHECKING:
    import dask.array as da


class ExactFeatureMap(KernelTransformer):
    """Exact, explicit, finite-dimensional feature map of a kernel.

    The map ``phi(z) = K^(-1/2) [k(x_1, z) .. k(x_N, z)]`` satisfies ``<phi(x_n), phi(z)> = k(x_n, z)`` for every row z,
    up to rounding. The spectral and the cholesky basis use a root of the scaled Gram matrix ``A = D^(-1) K D^(-1)``
    with ``D = diag(sqrt k(x_n, x_n))``, so the rounding error of a pair is relative to ``sqrt(k(x, x) k(z, z))``. The
    symmetric basis uses a root of A or of K; see `basis`.

    Parameters
    ----------
    kernel : Kernel, str, callable or Gaussian process kernel of scikit-learn
        Kernel of `dkfm.kernels`, a name of dkfm or scikit-learn, or an object that `kernels.from_sklearn` translates.
        With "precomputed", `fit` takes the Gram matrix (array, dask array or Zarr array) and `transform` the values
        k(z, x). A callable takes two rows and is slow; `kernels.Function` takes a function of blocks.
    kernel_params : mapping, default=None
        Parameters of a named kernel, or keyword arguments of a callable.
    basis : {"symmetric", "spectral", "cholesky"}, default="symmetric"
        Basis of the features; inner products are the same in each. "symmetric" has one feature per landmark. It uses
        the root of A if k(x, x) spans more than a factor of 1e4 and the condition number of A is at most 1e8, else the
        root of K. "spectral" has as many features as the rank; they are orthogonal over X if all k(x, x) are equal.
        "cholesky" has one feature per pivot, as many as the rank, and is the fastest to fit and to map.
    centered : bool, default=False
        Whether to subtract the mean of the training features (the paper's psi).
    landmarks : array-like or {"uniform", "kmeans", "pivots", "random_pivots"}, default=None
        Landmarks, for which the map is exact: indices of training rows (n,), points (n, d), or a selector of
        `n_landmarks` landmarks; None is all training rows. "uniform" draws rows at random. "kmeans" takes the cluster
        centres of scikit-learn's KMeans. "pivots" selects in each step the row with the largest relative residual: the
        share of its k(x, x) that earlier pivots leave. "random_pivots" draws rows in proportion to these residuals.
    n_landmarks : int, default=None
        Number of landmarks that a selector chooses. It is required, except for "pivots", where None is the rank.
    certify : {"all", "sample"}, default="all"
        Training rows at which the error bound and the certificate are measured. "all" maps every row, which costs
        O(N n_landmarks^2): nine tenths of the fit for 500 landmarks of 100,000 rows. "sample" maps 1,024 rows, drawn
        with `random_state`; the features are the same. There is then no `error_bounds_`, `error_bound_` or
        `max_similarity_`, `truncate` takes no `tol`, and ``tol`` and ``on_indefinite="clip"`` are refused. A kernel
        that is indefinite, or not finite, on other rows may go unnoticed. "sample" equals "all" for at most 1,024 rows,
        and where a fit visits all rows anyway: all are landmarks, or pivots are selected in the cholesky basis.
    tol : float, default=None
        Acceptable error bound: the map keeps the smallest rank that meets it. None is the limit set by rounding.
    rcond : float, default=None
        Eigenvalues of A up to ``rcond * lambda_max`` count as zero; None is ``4 eps``. Not for the cholesky basis.
    build : {"auto", "gram", "columns", "rounds", "tiled"}, default="auto"
        How to find pivots. "gram" uses the Gram matrix. "columns" computes only columns of it, for many rows of low
        rank. "rounds" passes over tiles of rows, on threads or on a cluster, and holds neither. "auto" is "rounds" for
        stored rows and where nothing else fits in memory, else the faster of the two others by prediction. "tiled" is
        for rows of full rank beyond memory: its factor is in tiles on disk, every row is a pivot, and the map reads its
        weights from `workspace`.
    on_indefinite : {"raise", "clip"}, default="raise"
        Action for a kernel that is not positive semi-definite: raise an error, or drop its negative part and warn. A
        clipped map keeps all eigenvalues above rounding, ``4 eps max |lambda|``; `verify` does not judge new points.
    dtype : {"float64", "float32"} or NumPy dtype, default="float64"
        Precision of the fitted map, which limits its rank. The fit itself is in float64.
    random_state : int, RandomState or None, default=None
        Seed of the selectors that draw at random, and of the rows of `certify="sample"`.
    tile_rows : int, default=None
        Rows and columns of a tile of the Gram matrix; None is 2,048. A matrix of one tile is not stored.
    workspace : path, default=None
        Folder for the Gram matrix, for the state of rounds of pivots, from which a killed fit resumes, and for a large
        model that tasks on dask arrays read. None is a temporary directory, which is removed.
    progress : bool, default=True
        Whether to show the Gram tiles done and the predicted time of the root, if that is more than 2 seconds.

    Attributes
    ----------
    model_ : Model
        Fitted kernel, landmarks and heads.
    kernel_ : Kernel
        Fitted kernel, with all parameters resolved.
    eigenvalues_ : ndarray of shape (rank,)
        Kept eigenvalues of A (or K), in descending order; not in the cholesky basis.
    pivots_ : ndarray of shape (rank,)
        Relative residual of each pivot before it was selected; only in the cholesky basis.
    scales_ : ndarray of shape (n_landmarks,)
        Diagonal of D; ones if the root is that of K, as for a clipped kernel.
    dropped_ : ndarray of shape (n_dropped,)
        Eigenvalues that count as zero, or relative residuals of rows that are not pivots, in descending order; after
        rounds, the 1,048,576 largest. Values removed by `truncate`, `tol` or float32 come first.
    rank_ : int
        Number of kept eigenvalues or pivots.
    n_negative_ : int
        Number of negative values in `dropped_`.
    condition_ : float
        Ratio of the largest to the smallest kept eigenvalue or pivot.
    error_bounds_ : ndarray of shape (rank + 1,)
        Error bounds E by number of features kept, from 0 to `rank_`; `truncate` uses them. They satisfy
        ``|<phi(x), phi(z)> - k(x, z)| <= E sqrt(k(x, x) k(z, z))`` for every training row x and every row z, rounding
        included, if no value underflows; for a centred map, before the mean is subtracted. Infinite for a clipped
        kernel. Not available if the rows were sampled.
    error_bound_ : float
        Error bound of this map, the last of `error_bounds_`. Not available if the rows were sampled.
    certificate_ : Certificate
        Measured error on pairs of landmarks, and the residual of each if all training rows are landmarks; for a clipped
        kernel, against the original one. `relative_error` is measured before the mean is subtracted.
    training_certificate_ : Certificate
        Measured error on pairs of training rows, and the residual of each. Not available after `truncate`. If the rows
        were sampled, it covers the sample, whose size is `sampled_rows`.
    max_similarity_ : float
        Largest k(x, x) of a training row. Not available if the rows were sampled.
    landmark_indices_ : ndarray of shape (n_landmarks,)
        Indices of the landmarks among the training rows, if they are a selection of these.
    mean_ : ndarray of shape (n_landmarks,)
        Mean of k(x, landmarks) over the training rows, if centered=True.
    n_features_in_, feature_names_in_ : int, ndarray of shape (d,)
        Number of columns d of the training rows, and their names if the fit had names that are all strings.

    Raises
    ------
    InvalidInputError, NotPSDError, KernelError, BudgetError
        Raised by `fit`: invalid rows or kernel, or too little memory.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", Theorem 1 and
    eq. (4); eq. (9) for centred features. For two new points, `residual` bounds the error. A map with landmarks is a
    Nystroem map (Williams and Seeger 2001). "random_pivots" is the method of Chen, Epperly, Tropp and Webber, "Randomly
    pivoted Cholesky" (2022).

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
    scales_: Array
    max_similarity_: float
    _output_head_name: ClassVar[str] = StoredMap.output_head_name
    _stored_estimator_class: ClassVar[type[StoredEstimator]] = StoredMap

    def __init__(
        self,
        kernel: KernelSpec,
        *,
        kernel_params: Mapping[str, object] | None = None,
        basis: Basis = "symmetric",
        centered: bool = False,
        landmarks: Landmarks | None = None,
        n_landmarks: int | None = None,
        certify: Certify = "all",
        tol: float | None = None,
        rcond: float | None = None,
        build: Build = "auto",
        on_indefinite: IndefinitePolicy = "raise",
        dtype: DType = "float64",
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
        self.certify = certify
        self.tol = tol
        self.rcond = rcond
        self.build = build
        self.on_indefinite = on_indefinite
        self.dtype = dtype
        self.random_state = random_state
        self.tile_rows = tile_rows
        self.workspace = workspace
        self.progress = progress

    def fit(self, X: object, y: object = None, sample_weight: object = None, standardize: bool = False) -> Self:
        """Fit the map to training rows X.

        The Gram matrix is computed on the current Dask client, or on threads of this process; its root in this process.

        Parameters
        ----------
        X : array-like, scipy.sparse array, dask collection, path, URL or zarr.Array of shape (N, d)
            Training rows; for a precomputed kernel, the Gram matrix (N, N). With basis="cholesky" or `landmarks=`, rows
            at a path or URL, or in a Zarr array, are read tile by tile, and tasks compute the blocks of a dask
            collection and write them to a temporary folder. Otherwise all rows are read into memory.
        y : object, default=None
            Ignored.
        sample_weight : array-like of shape (N,), default=None
            Non-negative weights of the rows in the mean of a centred map. Rows of weight 0 are left out, and refused if
            rows are read tile by tile. Inner products are those of a fit in which a row of weight w occurs w times.
        standardize : bool, default=False
            Whether the model scales columns to mean 0 and variance 1; `transform` and `dkfm score` take unscaled rows.
        """
        require_flags(centered=self.centered, standardize=standardize)
        options = replace(self._get_options(MapOptions), dtype=check_dtype(self.dtype).name)
        options.require_valid(self.landmarks)
        kernel = as_kernel(self.kernel, self.kernel_params)
        streams = out_of_core_rows.can_stream_rows(self, kernel)
        if out_of_core_rows.is_stored_or_lazy(X, kernel, streams):
            return self._fit_stored_rows(X, streams, y, sample_weight, standardize)
        X = compute_lazy_frame(X)
        kernel = make_standardizing_kernel(kernel, X, sample_weight)[0] if standardize else kernel
        require_same_columns(self.landmarks, X, "landmarks", "X")
        # Selected landmarks are copied when they are selected.
        rows = self._check_data(X, kernel, copy=self.landmarks is None)
        weights: Array = np.broadcast_to(1.0, rows.indexable_rows.shape[0])  # a view, without memory for N values
        if sample_weight is not None:
            rows, weights = drop_zero_weights(rows, sample_weight, kernel)
        self._log_fit(rows)
        product_rows = landmarks.count_largest_matrix_rows(len(weights), self.n_landmarks, self.certify)
        with keep_states_until_end(), single_blas_thread_for_fit(product_rows):
            chosen = landmarks.choose_landmarks(rows, self.landmarks, self.n_landmarks, self.random_state, options)
            model, fitted = feature_maps.fit_map(rows, weights if self.centered else None, chosen, options)
        return self._set_fitted(X, model, fitted)

    @property
    def _eigenvalues_or_pivots(self) -> Array:
        check_is_fitted(self, "model_")
        return cast("Array", vars(self)[f"{eigenvalues_or_pivots_name(str(self._params_at_fit['basis']))}_"])

    @property
    def rank_(self) -> int:
        """Numerical rank: the number of features that the map needs."""
        return len(self._eigenvalues_or_pivots)

    @property
    def n_negative_(self) -> int:
        """Number of negative values in `dropped_`."""
        check_is_fitted(self, "model_")
        return int((self.dropped_ < 0).sum())

    @property
    def condition_(self) -> float:
        """Ratio of the largest to the smallest kept eigenvalue or pivot; 1 if none is kept."""
        return roots.condition_number(self._eigenvalues_or_pivots)

    @property
    def error_bound_(self) -> float:
        """Bound of ``|<phi(x), phi(z)> - k(x, z)| / sqrt(k(x, x) k(z, z))`` for a training row x and any row z."""
        check_is_fitted(self, "model_")
        if "error_bounds_" not in vars(self):
            raise AttributeError('This map knows no error bound: certify="sample" visited some of the training rows.')
        return float(self.error_bounds_[-1])

    def truncate(self, rank: int | None = None, *, tol: float | None = None) -> Self:
        """Return a map of lower rank, without another fit.

        It keeps the leading features and, in the cholesky basis, their landmarks. A symmetric map keeps N features.

        Parameters
        ----------
        rank : int, default=None
            Rank of the new map, at most `rank_`. Give either `rank` or `tol`.
        tol : float, default=None
            Largest error bound: selects the smallest rank that meets it, or the full rank if none does.

        Returns
        -------
        ExactFeatureMap
            Fitted map, whose `error_bound_` includes the truncation.

        Raises
        ------
        InvalidInputError
            The rank is too large; `tol` is given, but the map has no error bounds; or a precomputed kernel was
            clipped, whose negative part the map does not keep.

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
        r = feature_maps.choose_truncated_rank(rank, tol, vars(self).get("error_bounds_"), self.rank_)
        names, basis = self._stored_estimator_class.names, str(self._params_at_fit["basis"])
        model, fitted = feature_maps.truncate_map_model(self.model_, self._get_fitted(names.arrays), r, basis)
        truncated = copy.copy(self)
        truncated._replace_fitted(model, fitted | self._get_fitted(names.numbers), self._params_at_fit)
        return truncated

    @overload
    def residual(self, X: da.Array, diag: object = None) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def residual(self, X: object, diag: object = None) -> Array: ...

    def residual(self, X: object, diag: object = None) -> Array | da.Array:
        """Return the squared distances of rows, in feature space, from the span of the landmarks.

        They are ``k(z, z) - |phi(z)|^2``, clipped at 0, over features that are not mostly rounding. They bound the
        error for two new points: ``|<phi(z), phi(w)> - k(z, w)| <= sqrt(residual(z) residual(w))``, plus rounding,
        which is at most about ``16 eps condition_`` of ``sqrt(k(z, z) k(w, w))``. Training rows have smaller residuals
        than similar new rows. For a clipped kernel, residuals are neither distances nor bounds.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (n, d)
            Rows.
        diag : array-like or dask array of shape (n,), default=None
            Values k(z, z) of the rows; required for a precomputed kernel, and only for one.

        Returns
        -------
        ndarray, or lazy dask array or series, of shape (n,)
            Squared distances.
        """
        return self._score_with_diagonal("residual", X, diag)

    @overload
    def distance(self, X: da.Array, Y: object = None) -> da.Array: ...  # type: ignore[overload-overlap]  # object includes it
    @overload
    def distance(self, X: object, Y: object = None) -> Array: ...

    def distance(self, X: object, Y: object = None) -> Array | da.Array:
        """Return the distances of all pairs of rows in the feature space of the kernel.

        They are ``sqrt(k(x, x) + k(y, y) - 2 k(x, y))``, in float64 (Ghiasi-Shirazi and Qaraei, eq. 26). The distance
        ``|phi(x) - phi(y)|`` of features is the same if both rows are in the span of the landmarks, and smaller
        otherwise. The error is at most about ``sqrt(eps k)``: distances of almost equal rows lose half of their digits.

        Parameters
        ----------
        X : array-like, scipy.sparse array or dask collection of shape (n, d)
            Rows.
        Y : array-like or scipy.sparse array of shape (m, d), default=None
            Rows to compare with, in memory; None is X.

        Returns
        -------
        ndarray, or lazy dask array with the row chunks of X, of shape (n, m)
            Distances.

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
        X = convert_container(X)
        if is_dask_collection(X):
            lazy_rows = cast("da.Array", X) if is_dask_array(X) else self._select_frame_columns(X).to_dask_array()
            return lazy_scoring.lazy_distances(
                self.kernel_, lazy_rows, self._check_rows(compute_lazy_frame(lazy_rows if Y is None else Y), "Y")
            )
        rows = self._check_rows(X)
        return kernel_distances(self.kernel_, rows, rows if Y is None else self._check_rows(compute_lazy_frame(Y), "Y"))

    def _fitted_map(self) -> feature_maps.FittedMap:
        """Return what a fit of components, discriminants or a regression in the features of this map needs."""
        fitted = vars(self)
        holds_all = "landmark_indices_" not in fitted and fitted.get("training_certificate_") == self.certificate_
        bounds, eigenvalues = fitted.get("error_bounds_"), fitted.get("eigenvalues_")
        return feature_maps.FittedMap(
            self.model_, eigenvalues, self.scales_, self.dropped_, bounds, holds_all, self.workspace, self.progress
        )
