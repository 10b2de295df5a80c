"""Solve kernel ridge regressions: by a Cholesky factor, or from an eigendecomposition for a path of penalties.

With weights w and ``S = diag(sqrt w)``, the coefficients are ``c = S A^(-1) S y`` with ``A = S K S + alpha``, and the
prediction for a row z is ``f(z) = k(z, X) c``. It minimizes ``sum_n w_n (y_n - f(x_n))^2 + alpha |f|^2``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, NotPSDError, NotSupportedError, warn_caller
from dkfm.kernels.pairwise.block_operations import mirror_lower
from dkfm.numerics.eigensolvers.dense import eigh_in_place
from dkfm.numerics.roots import EPS, find_psd_cutoff

_MAX_FACTORS = 16
"""Largest number of Cholesky factors, one for each penalty, that take less time than an eigendecomposition."""

_BLOCK_ROWS = 512
"""Rows of a block whose squares are summed."""

_MATRIX = "The Gram matrix of this kernel"


@dataclass(frozen=True, eq=False)
class Targets:
    """Targets of the training rows, and the weights of the rows."""

    values: Array
    """Targets y. Shape (N, q)."""
    weights: Array
    """Positive weights w. Shape (N,)."""

    @property
    def roots(self) -> Array:
        """Square roots of the weights, (N, 1)."""
        roots: Array = np.sqrt(self.weights)[:, np.newaxis]
        return roots

    @property
    def max_abs_values(self) -> Array:
        """Largest absolute value of each target, (q,)."""
        scales: Array = np.abs(self.values).max(axis=0)
        return scales

    @property
    def n_columns(self) -> int:
        """Number of targets q."""
        return int(self.values.shape[1])

    def weighted_columns(self) -> Array:
        """Return the targets times the weights, (N, q)."""
        return self.weights[:, np.newaxis] * self.values

    def subset(self, row_indices: slice) -> "Targets":
        """Return the targets of some rows."""
        return Targets(self.values[row_indices], self.weights[row_indices])

    def weigh_gram_in_place(self, K: Array) -> None:
        """Multiply a Gram matrix (N, N) by the square roots of the weights of its rows and columns."""
        if (self.weights != 1).any():
            roots = self.roots
            for columns in row_slices(len(K), _BLOCK_ROWS):
                K[:, columns] *= roots
                K[:, columns] *= roots[columns].T


@dataclass(frozen=True, eq=False)
class RidgeSolution:
    """Coefficients of a kernel ridge regression, and its predictions for the training rows."""

    alphas: Array
    """Penalty of each target. Shape (q,)."""
    coefficients: Array
    """Coefficients c of the training rows. Shape (N, q)."""
    fitted_values: Array
    """Predictions of the training rows. Shape (N, q)."""
    max_abs_targets: Array
    """Largest absolute value of each target. Shape (q,)."""
    left_out: Array | None = None
    """Prediction of each training row by the regression on all others; None if not requested. Shape (N, q)."""
    path_errors: Array | None = None
    """Weighted mean squared errors of left-out rows for each penalty of a path and each target, or over all targets.
    Shape (m, q) or (m, 1)."""

    def bound_norms(self, errors: Array) -> Array:
        """Return an upper bound of the norm ``sqrt(c'Kc)`` of each regression function, (q,).

        The norm is computed from the fitted values; `errors` (q,) are their largest differences from K c.
        """
        sizes, values = np.abs(self.coefficients), np.abs(self.fitted_values) + self.max_abs_targets
        squares = np.einsum("ij,ij->j", self.coefficients, self.fitted_values)
        rounding = 4 * EPS * np.einsum("ij,ij->j", sizes, values) + errors * sizes.sum(axis=0)
        norms: Array = np.sqrt(np.maximum(squares, 0.0) + rounding)
        return norms


def solve_ridge(
    K: Array, targets: Targets, alphas: Array, *, leave_one_out: bool = False, on_indefinite: str = "raise"
) -> RidgeSolution:
    """Solve a kernel ridge regression.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Gram matrix, overwritten; only the lower triangle is read.
    targets : Targets
        Targets and weights.
    alphas : ndarray of shape (q,)
        Penalty of each target, not negative.
    leave_one_out : bool
        Whether to predict each training row from the others: ``y_n - f_(-n)(x_n) = (A^(-1) S y)_n / (A^(-1))_nn`` over
        the square root of the weight.
    on_indefinite : {"raise", "clip"}
        Whether to raise an error if A is not positive definite, or to drop the negative part of the Gram matrix.

    Raises
    ------
    NotPSDError
        The Gram matrix has an eigenvalue below minus the penalty.
    InvalidInputError
        Leave-one-out predictions are requested with a penalty that is negligible beside rounding.

    Warns
    -----
    DkfmWarning
        The penalty is negligible beside rounding, and eigenvalues that are rounding errors were dropped: the solution
        is the minimum-norm least-squares solution.
    """
    targets.weigh_gram_in_place(K)
    lowest, rounding = float(alphas.min()), estimate_rounding(K.diagonal())
    if leave_one_out and lowest <= rounding:
        raise InvalidInputError(
            f"To leave rows out needs an alpha above the rounding of the kernel values, {rounding:.1e}, and it is "
            f"{lowest:.1e}."
        )
    if why_eigenvalues(alphas, K.diagonal(), on_indefinite):
        return _Decomposed.from_gram(K, targets, on_indefinite, lowest).solve(alphas, leave_one_out)
    return _solve_by_factors(K, targets, alphas, leave_one_out)


def solve_ridge_path(
    K: Array, targets: Targets, path: Array, *, per_target: bool, on_indefinite: str = "raise"
) -> RidgeSolution:
    """Solve a kernel ridge regression with the penalty of a path that predicts left-out rows best.

    One eigendecomposition is used for all penalties. The arguments are those of `solve_ridge`, the `path` (m,) of
    penalties, and `per_target`, which says whether each target has its own penalty. Of several penalties that predict
    equally well, the largest is taken.

    Raises
    ------
    InvalidInputError
        A penalty is negligible beside rounding.
    """
    targets.weigh_gram_in_place(K)
    lowest, rounding = float(path.min()), estimate_rounding(K.diagonal())
    if lowest <= rounding:
        raise InvalidInputError(
            f"alphas must be above the rounding of the kernel values, {rounding:.1e}, and the least is {lowest:.1e}."
        )
    decomposed = _Decomposed.from_gram(K, targets, on_indefinite, lowest)
    inverse_diagonals = decomposed.inverse_diagonals(path)
    errors = np.array([decomposed.compute_left_out_mse(*pair) for pair in zip(path, inverse_diagonals.T, strict=True)])
    if not per_target:
        errors = errors.mean(axis=1, keepdims=True)
    best = np.where(errors <= errors.min(axis=0) * (1 + 1e-12), path[:, np.newaxis], 0.0).max(axis=0)
    solution = decomposed.solve(np.broadcast_to(best, (targets.n_columns,)).copy(), leave_one_out=True)
    return replace(solution, path_errors=errors)


def solve_ridge_of_map(
    second_moment: Array, target_sums: Array, alphas: Array, hidden_share: float = 0.0
) -> tuple[Array, float]:
    """Return the coefficients (r, q) of ridge regressions in the features phi of a map, and their rounding.

    `second_moment` (r, r) is ``sum w phi phi'``, overwritten, and `target_sums` (r, q) are ``sum w phi y'``. The
    rounding is the relative change of the coefficients that errors of these sums may cause, and of the predictions by
    features that the map has lost to rounding, `hidden_share` of the mean squared length.

    Raises
    ------
    InvalidInputError
        A penalty is negligible beside rounding.
    """
    if not len(second_moment):  # the map has no features
        return np.zeros(target_sums.shape), 0.0
    values, vectors = eigh_in_place(np.asfortranarray((second_moment + second_moment.T) / 2))
    lowest, noise = float(alphas.min()), 4 * EPS * len(values) * float(values[-1])
    if lowest <= noise and values[0] <= noise:
        raise InvalidInputError(
            f"In the features of a map alpha must be above their rounding, {noise:.1e}, and it is {lowest:.1e}."
        )
    coordinates = vectors.T @ target_sums
    values = np.maximum(values, 0.0)
    coefficients: Array = vectors @ (coordinates / (values[:, np.newaxis] + alphas))
    hidden = hidden_share * float(values.sum())
    rounding = EPS * float(values[-1] / (values[0] + lowest)) + (hidden / (hidden + lowest) if hidden else 0.0)
    return coefficients, min(1.0, rounding)


def estimate_rounding(diagonal: Array) -> float:
    """Return the penalty below which the rounding of a Gram matrix with this diagonal dominates the solution."""
    return 4 * EPS * len(diagonal) * float(np.abs(diagonal).max(initial=0.0))


def why_eigenvalues(alphas: Array, diagonal: Array, on_indefinite: str) -> str:
    """Return the reason why a weighted Gram matrix must be decomposed; empty if a Cholesky factor suffices."""
    if on_indefinite == "clip":
        return 'on_indefinite="clip" drops eigenvalues'
    if len(np.unique(alphas)) > _MAX_FACTORS:
        return f"more than {_MAX_FACTORS} penalties take less time with eigenvalues"
    lowest, rounding = float(alphas.min()), estimate_rounding(diagonal)
    return f"alpha = {lowest:.1e} is not above rounding, {rounding:.1e}" if lowest <= rounding else ""


def predict_left_out(targets: Targets, scaled_coefficients: Array, inverse_diagonal: Array) -> Array:
    """Return the prediction (N, q) of each row by the regression on all others.

    Parameters
    ----------
    targets : Targets
        Targets and weights.
    scaled_coefficients : ndarray of shape (N, q)
        ``A^(-1) S y``.
    inverse_diagonal : ndarray of shape (N, 1) or (N, q)
        Diagonal of ``A^(-1)``, one column for all targets or one for the penalty of each.
    """
    predictions: Array = targets.values - scaled_coefficients / (inverse_diagonal * targets.roots)
    return predictions


Solve = Callable[[float, Array], tuple[Array, Array | None]]
"""Function of a penalty and right sides b that returns ``A^(-1) b``, and the diagonal of ``A^(-1)`` if it is needed."""


def solve_each_penalty(targets: Targets, alphas: Array, solve: Solve) -> RidgeSolution:
    """Return the solution of a regression, given a function that solves its systems for each penalty."""
    right, solved, left_out = targets.roots * targets.values, np.empty(targets.values.shape), None
    for alpha in np.unique(alphas):
        columns = alphas == alpha
        solved[:, columns], inverse_diagonal = solve(float(alpha), right[:, columns])
        if inverse_diagonal is not None:
            left_out = np.empty(solved.shape) if left_out is None else left_out
            part = Targets(targets.values[:, columns], targets.weights)
            left_out[:, columns] = predict_left_out(part, solved[:, columns], inverse_diagonal[:, np.newaxis])
    fitted = targets.values - alphas * solved / targets.roots
    return RidgeSolution(alphas, targets.roots * solved, fitted, targets.max_abs_values, left_out)


def _solve_by_factors(K: Array, targets: Targets, alphas: Array, leave_one_out: bool) -> RidgeSolution:
    """Solve by one Cholesky factor for each penalty; the upper triangle keeps the matrix for the next penalty."""
    from scipy.linalg import cho_solve, lapack

    diagonal, restored = K.diagonal().copy(), float(alphas.min())
    if len(np.unique(alphas)) > 1:
        mirror_lower(K)

    def solve(alpha: float, right: Array) -> tuple[Array, Array | None]:
        if alpha != restored:
            mirror_lower(K.T)
        np.fill_diagonal(K, diagonal + alpha)
        factor, failed = lapack.dpotrf(K, lower=1, clean=0, overwrite_a=1)
        if failed:
            raise make_indefinite_error(failed - 1, alpha)
        solution = cho_solve((factor, True), right, check_finite=False)
        return solution, _sum_squares_of_inverse(factor) if leave_one_out else None

    return solve_each_penalty(targets, alphas, solve)


def make_indefinite_error(row: int, alpha: float) -> NotPSDError:
    """Return the error of a matrix that is not positive definite with the penalty; the factor broke down at `row`."""
    return NotPSDError(
        f"{_MATRIX} is not positive semi-definite: with alpha = {alpha:.6g} its Cholesky factor breaks down at row "
        f'{row}; choose another kernel, a larger alpha, or drop the negative part with on_indefinite="clip" '
        "(--on-indefinite clip)."
    )


def _sum_squares_of_inverse(factor: Array) -> Array:
    """Return the diagonal (N,) of the inverse of a factored matrix; the factor is overwritten by its inverse."""
    from scipy.linalg import lapack

    inverse, _ = lapack.dtrtri(factor, lower=1, overwrite_c=1)
    sums = np.zeros(len(inverse))
    for rows in row_slices(len(inverse), _BLOCK_ROWS):
        left = inverse[rows, : rows.start]
        sums[: rows.start] += np.einsum("ij,ij->j", left, left)
        sums[rows] += np.square(np.tril(inverse[rows, rows])).sum(axis=0)
    return sums


@dataclass(frozen=True, eq=False)
class _Decomposed:
    """Eigendecomposition of a weighted Gram matrix, and the coordinates of the targets in its eigenvectors."""

    targets: Targets
    values: Array
    """Eigenvalues, ascending; 0 if dropped because they are negative, or rounding beside the penalty. Shape (N,)."""
    vectors: Array
    """Eigenvectors, in columns. Shape (N, N)."""
    coordinates: Array
    """``vectors' S y``. Shape (N, q)."""
    first_kept: int
    """Index of the first eigenvalue that predictions use; smaller ones are rounding errors, or dropped."""
    is_clipped: bool

    @classmethod
    def from_gram(cls, K: Array, targets: Targets, on_indefinite: str, alpha: float) -> "_Decomposed":
        """Decompose a weighted Gram matrix, which is overwritten; "raise" requires eigenvalues above -alpha."""
        rounding = estimate_rounding(K.diagonal())
        values, vectors = eigh_in_place(K)
        lowest, highest = float(values[0]), float(values[-1])
        clipped = 0.0
        if on_indefinite == "clip" or lowest <= -alpha:
            clipped = find_psd_cutoff(lowest, highest, highest, len(values), on_indefinite, _MATRIX)
        is_above_rounding = alpha > rounding and not clipped
        cut = -np.inf if is_above_rounding else max(4 * EPS * highest, clipped or 2 * abs(min(lowest, 0.0)))
        first = int((values <= cut).sum())
        coordinates = vectors.T @ (targets.roots * targets.values)
        if not clipped and first:
            warn_caller(
                f"alpha = {alpha:.1e} is nothing beside the rounding of kernel values, and {first} eigenvalues are "
                "rounding: the solution is the one of least norm without them."
            )
        floor = 0.0 if clipped or not is_above_rounding else -np.inf
        return cls(targets, np.maximum(values, floor), vectors, coordinates, first, bool(clipped))

    def solve(self, alphas: Array, leave_one_out: bool) -> RidgeSolution:
        """Return the solution for the penalty of each target."""
        targets, first = self.targets, self.first_kept
        factors = 1 / (self.values[first:, np.newaxis] + alphas)
        kept, coordinates = self.vectors[:, first:], self.coordinates[first:]
        coefficients = targets.roots * (kept @ (factors * coordinates))
        fitted = kept @ (self.values[first:, np.newaxis] * factors * coordinates) / targets.roots
        left_out = None
        if leave_one_out:
            self._require_unclipped()
            unique, columns = np.unique(alphas, return_inverse=True)
            inverse_diagonals = self.inverse_diagonals(unique)[:, columns]
            left_out = predict_left_out(targets, coefficients / targets.roots, inverse_diagonals)
        return RidgeSolution(alphas, coefficients, fitted, targets.max_abs_values, left_out)

    def inverse_diagonals(self, alphas: Array) -> Array:
        """Return the diagonals (N, m) of ``A^(-1)`` for m penalties."""
        factors, diagonals = 1 / (self.values[:, np.newaxis] + alphas), np.empty((len(self.values), len(alphas)))
        for rows in row_slices(len(diagonals), _BLOCK_ROWS):
            np.matmul(np.square(self.vectors[rows]), factors, out=diagonals[rows])
        return diagonals

    def compute_left_out_mse(self, alpha: float, inverse_diagonal: Array) -> Array:
        """Return the weighted mean squared errors (q,) of the predictions of left-out rows."""
        self._require_unclipped()
        scaled = self.vectors @ (self.coordinates / (self.values[:, np.newaxis] + alpha))
        errors = scaled / inverse_diagonal[:, np.newaxis]  # errors times the square roots of the weights
        means: Array = np.square(errors).sum(axis=0) / self.targets.weights.sum()
        return means

    def _require_unclipped(self) -> None:
        if self.is_clipped:
            raise NotSupportedError(
                "Without the negative part of the Gram matrix of all rows there is no closed form of the predictions "
                "of left-out rows; choose another kernel."
            )
