"""Map scores back to rows, by scikit-learn's ridge regression or by a fixed-point iteration."""

from __future__ import annotations

from typing import cast

import numpy as np
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from dkfm.core.chunking import require_count
from dkfm.core.frames import column_names
from dkfm.core.rows import Array, as_float64, as_rows
from dkfm.errors import InvalidInputError, KernelError, NotSupportedError, warn_caller
from dkfm.estimators.base import KernelTransformer
from dkfm.estimators.columns_between_models import require_column_order
from dkfm.estimators.fitting import preimages
from dkfm.execution import memory
from dkfm.execution.blas_threads import single_blas_thread_in_worker
from dkfm.gram.training_data import TrainingData
from dkfm.kernels.base import Kernel
from dkfm.kernels.transformed import Standardize, Warped
from dkfm.numerics import scorer
from dkfm.numerics.model import Head, Model


class InverseTransformMixin(KernelTransformer):
    """Add `inverse_transform` and `preimage` to an estimator of components."""

    alpha: float
    dual_coef_: Array
    X_transformed_fit_: Array

    def inverse_transform(self, X: object) -> Array:
        """Return the rows (n, d) of scores X (n, q), by kernel ridge regression of the training rows on their scores.

        Raises
        ------
        NotFittedError
            The estimator was fitted with fit_inverse_transform=False.

        Notes
        -----
        Bakir, Weston and Schoelkopf, "Learning to find pre-images" (2004). The regression uses the kernel of the fit,
        and has no intercept. If the kernel is warped by `Standardize`, as a fit with standardize=True warps it, then
        the standardized values of the rows are predicted and scaled back.
        """
        check_is_fitted(self, "model_")
        if not hasattr(self, "dual_coef_"):
            raise NotFittedError("The inverse transform is not available: fit with fit_inverse_transform=True.")
        kernel, scalings = _split_standardization(self.kernel_)
        model = Model(kernel, self.X_transformed_fit_, {"points": Head(self.dual_coef_)})
        scores = self._check_scores(X)
        with single_blas_thread_in_worker():
            rows = scorer.compute_finite_scores(scorer.prepare_compact_scorer(model), "points", scores, "X")
        for scaling in reversed(scalings):
            rows = rows * np.asarray(scaling.scale) + np.asarray(scaling.mean)
        return rows.astype(self.model_.dtype, copy=False)

    def preimage(self, X: object, init: object = None, *, tol: float = 1e-6, max_iter: int = 1000) -> Array:
        """Return the rows (n, d) whose features are nearest to those of scores X, by Mika's fixed-point iteration.

        It supports Gaussian kernels, with or without standardized rows.

        Parameters
        ----------
        X : array-like of shape (n, q)
            Scores.
        init : array-like of shape (n, d), default=None
            Start of the iteration, such as the noisy rows to denoise. None starts at the training rows with the nearest
            scores.
        tol : float, default=1e-6
            Convergence tolerance: length of a step relative to the spread of the training rows.
        max_iter : int, default=1000
            Largest number of steps.

        Warns
        -----
        DkfmWarning
            The iteration did not converge for some rows, or could not move them. Their last values are returned.

        Notes
        -----
        Mika et al., "Kernel PCA and de-noising in feature spaces" (1999), eq. (10).

        Examples
        --------
        >>> import numpy as np
        >>> from dkfm import KernelPCA
        >>> X = np.random.default_rng(0).normal(size=(100, 2))
        >>> pca = KernelPCA(kernel="rbf").fit(X)
        >>> bool(np.allclose(pca.preimage(pca.transform(X[:5])), X[:5], atol=1e-5))
        True
        """
        check_is_fitted(self, "model_")
        require_count(max_iter, "max_iter")
        if not tol >= 0:
            raise InvalidInputError(f"tol must be a number >= 0, and is {tol!r}.")
        points, scores = self.model_.original_landmarks, self._check_scores(X)
        if not preimages.has_fixed_point_iteration(self.kernel_) or not isinstance(points, np.ndarray):
            raise NotSupportedError(f"The fixed point is of Gaussian kernels of dense rows; this is {self.kernel_!r}.")
        start = self._nearest_training_rows(scores) if init is None else as_float64(as_rows(init, "init"))
        if start.shape != (len(scores), points.shape[1]) or not isinstance(start, np.ndarray):
            raise InvalidInputError(f"init must be of shape {(len(scores), points.shape[1])}, and is {start.shape}.")
        if init is not None:
            self._require_fitted_columns(init)
        head = self.model_.head("scores")
        weights = head.weights[:, : head.n_columns].astype(np.float64)
        mean = np.zeros(len(points)) if head.offset is None else head.weights[:, -1].astype(np.float64) / 2
        with single_blas_thread_in_worker():
            found, converged = preimages.find_fixed_point_preimages(
                self.kernel_, points, preimages.ComponentSpan(weights, mean), scores, start, tol, max_iter
            )
        if not converged.all():
            warn_caller(f"{int((~converged).sum())} of {len(scores)} pre-images have not settled.")
        return found.astype(self.model_.dtype, copy=False)

    def _check_scores(self, X: object) -> Array:
        scores, q = as_float64(as_rows(X)), self._n_features_out
        require_column_order(column_names(X), list(self.get_feature_names_out()), "The scores")
        if not isinstance(scores, np.ndarray) or scores.shape[1] != q:
            raise InvalidInputError(f"Scores must be dense, with {q} columns, and these have {scores.shape[1]}.")
        return scores

    def _nearest_training_rows(self, scores: Array) -> Array:
        """Return, for each row of scores, the training row with the nearest scores."""
        points = self.model_.original_landmarks
        with single_blas_thread_in_worker():
            training_scores = scorer.compute_finite_scores(
                self._get_scorer(), "scores", points, "The training rows"
            ).astype(np.float64)
        return cast("Array", points)[preimages.find_nearest_scores(scores, training_scores)]

    def _require_invertible(self, rows: TrainingData) -> None:
        """Raise before the fit if `inverse_transform` cannot be fitted to the training rows."""
        alpha = self.alpha
        if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 <= alpha < np.inf:
            raise InvalidInputError(f"alpha must be a finite number >= 0, and is {alpha!r}.")
        if not isinstance(rows.indexable_rows, np.ndarray):
            raise NotSupportedError("The inverse transform is of dense rows, and these are sparse.")
        try:
            _split_standardization(rows.kernel)[0](np.ones((1, rows.indexable_rows.shape[1] + 1)))
        except KernelError:
            raise NotSupportedError(
                f"{rows.kernel!r} takes rows of {rows.indexable_rows.shape[1]} columns, and not their scores: it "
                "has no inverse transform."
            ) from None

    def _fit_inverse(self, rows: TrainingData, scores: Array, weights: Array) -> dict[str, object]:
        """Return the fitted attributes of `inverse_transform`, from the scores of the training rows."""
        if not scores.shape[1]:
            raise InvalidInputError("The training rows do not vary: there is no way back from no scores.")
        n, (kernel, scalings) = len(scores), _split_standardization(rows.kernel)
        memory.require_factorization_memory(
            n, rows.float64s_per_row, kernel.peak_blocks, kernel.landmark_copies, 1, "inverse_transform"
        )
        X = cast("Array", rows.indexable_rows)
        for scaling in scalings:
            X = cast("Array", scaling(X))
        return {
            "X_transformed_fit": scores,
            "dual_coef": preimages.solve_ridge_regression(kernel, scores, X, self.alpha / weights),
        }


def _split_standardization(kernel: Kernel) -> tuple[Kernel, list[Standardize]]:
    """Return the kernel without the scaling of columns, which does not apply to scores, and the maps that scale."""
    scalings = []
    while isinstance(kernel, Warped) and isinstance(kernel.h, Standardize):
        scalings.append(kernel.h)
        kernel = kernel.kernel
    return kernel, scalings
