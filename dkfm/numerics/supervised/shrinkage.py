"""Choose the shrinkage of Fisher discriminants by stratified cross-validation.

Discriminants are a ridge regression of the class indicators, and the predictions of a ridge regression for left-out
rows have a closed form. So one decomposition of the Gram matrix of all rows is used for all folds and shrinkages,
unless a negative part must be dropped, or the rows of one fold have nearly the whole sum of squared lengths k(x, x).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, Self

import numpy as np
from scipy.linalg import LinAlgError, cho_solve

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.kernels.pairwise.block_operations import mirror_lower
from dkfm.numerics.supervised import fisher
from dkfm.numerics.supervised.classes import Classes, Codes, Indices, within_class_scatter_trace
from dkfm.numerics.supervised.spectral_gram import SpectralGram, decompose_gram
from dkfm.numerics.weighting import Weighting

SHRINKAGE_GRID: tuple[float, ...] = tuple(10.0 ** (step / 2) for step in range(-12, 5))
"""Candidate shrinkages: 1e-6 to 100, two for each power of ten."""

_FOLDS = 5
"""Number of folds of the cross-validation."""

_MIN_REST = 1e-2
"""Share of the squared lengths that the rows outside each fold need for one decomposition to be as exact as five."""

_SHARED_SQUARES, _THREAD_SQUARES = 0.35, 0.25
"""Number of (N, N) arrays that `choose_shrinkage` needs besides the decomposition, and further ones for each thread."""

_PRODUCT_COLUMNS = 512
"""Number of columns that are scaled and multiplied together."""


def predict_choice_seconds(n: int) -> float:
    """Predict the seconds of `choose_shrinkage` for N rows, at 4.6e10 multiplications per second.

    >>> round(predict_choice_seconds(4000), 1)
    4.7
    """
    return len(SHRINKAGE_GRID) * n**3 / _FOLDS / 4.6e10


def count_threads(n: int, room: int, most: int) -> int:
    """Return the number of threads, up to `most`, of `choose_shrinkage` in `room` bytes besides the decomposition.

    >>> [count_threads(1000, squares * 8 * 1000**2, 16) for squares in (1, 2, 3, 5)]
    [2, 6, 10, 16]
    """
    return max(1, min(most, int((room / (8 * n * n) - _SHARED_SQUARES) / _THREAD_SQUARES)))


def choose_shrinkage(spectral: SpectralGram, classes: Classes, threads: int = 1) -> float:
    """Return the shrinkage of `SHRINKAGE_GRID` with the largest weight of correct predictions; the largest of ties.

    The rows of each class are assigned in turn to five folds, and each fold is predicted from the other four. The row
    of a class of one row is in no fold, and is always a training row.

    Parameters
    ----------
    spectral : SpectralGram
        Decomposed Gram matrix of the N rows, positive semi-definite.
    classes : Classes
        Classes and weights of the N rows.
    threads : int, default=1
        Number of shrinkages that are tried at the same time. More than one is useful if BLAS has one thread.

    Raises
    ------
    InvalidInputError
        No shrinkage predicts any row correctly.
    """
    return _choose_by_weights(weigh_correct_predictions(spectral, classes, threads))


def weigh_correct_predictions(spectral: SpectralGram, classes: Classes, threads: int = 1) -> Array:
    """Return the weight of the correctly predicted rows for each shrinkage; see `choose_shrinkage`."""
    regression = _Regression.from_eigenvectors(spectral, classes)
    return _weigh_correct_in_folds((_LeftOutRows(regression, test) for test in _split_rows(classes)), threads)


def choose_shrinkage_by_folds(K: Array, classes: Classes, on_indefinite: str) -> float:
    """Return the shrinkage as `choose_shrinkage` does, from a decomposition of each fold.

    A kernel that is not positive semi-definite needs this: without its negative part, the Gram matrix of some rows is
    not a block of the Gram matrix of all rows, so no closed form exists.

    Parameters
    ----------
    K : ndarray of shape (N, N)
        Gram matrix. Only the lower triangle is read; the upper one is filled.
    classes : Classes
        Classes and weights of the N rows.
    on_indefinite : {"raise", "clip"}
        As in `fisher.solve_discriminants`.
    """
    mirror_lower(K)
    folds = (_DecomposedFold.from_gram(K, classes, test, on_indefinite) for test in _split_rows(classes))
    return _choose_by_weights(_weigh_correct_in_folds(folds, 1))


def has_dominant_fold(diagonal: Array, classes: Classes) -> bool:
    """Return whether the rows of one fold are so long that rounding errors relative to them spoil the other rows.

    A decomposition of all rows would then lose digits that a decomposition without this fold keeps. `diagonal` (N,)
    holds the squared lengths ``k(x, x)``.
    """
    squares = classes.weights * np.abs(diagonal)
    return any(np.delete(squares, test).sum() < _MIN_REST * squares.sum() for test in _split_rows(classes))


class _Fold(Protocol):
    """Left-out rows, and a ridge regression of the class indicators Y of the training rows."""

    @property
    def training_classes(self) -> Classes:
        """Classes of the training rows."""

    @property
    def test_classes(self) -> Classes:
        """Classes of the left-out rows."""

    def within_class_scatter_trace(self) -> float:
        """Return the trace of the scatter within the classes, N tr(S_w), of the training rows."""

    def predict_indicators(self, ridge: float) -> tuple[Array, Array]:
        """Return the predictions (m, C) of the left-out rows, and ``ridge Y'RY`` (C, C) of the training rows."""


def _choose_by_weights(correct: Array) -> float:
    if not correct.any():
        raise InvalidInputError(
            'shrinkage="auto" finds no row that the others predict right; scale the columns, or give it a number.'
        )
    return SHRINKAGE_GRID[int(np.flatnonzero(correct >= correct.max() * (1 - 1e-12))[-1])]


def _weigh_correct_in_folds(folds: Iterator[_Fold], threads: int) -> Array:
    """Return the weight of the correctly predicted rows, for each shrinkage of `SHRINKAGE_GRID`."""
    correct = np.zeros(len(SHRINKAGE_GRID))
    for fold in folds:
        # Threads that have ended hold no reference to a fold, so each fold is freed before the next one is created.
        with (
            suppress(InvalidInputError),  # the training rows do not vary within their classes
            ThreadPoolExecutor(threads, thread_name_prefix="dkfm-shrinkage") as pool,
        ):
            spread = fold.within_class_scatter_trace()
            correct += list(pool.map(partial(_correct_weight, fold, spread), SHRINKAGE_GRID))
        del fold
    return correct


def _correct_weight(fold: _Fold, spread: float, shrinkage: float) -> float:
    """Return the weight of the correctly predicted left-out rows of a fold; 0 if the shrinkage is too small."""
    training, test = fold.training_classes, fold.test_classes
    try:
        predictions, residual = fold.predict_indicators(shrinkage * spread / training.total)
        directions = fisher.solve_directions(residual / training.total, training)
    except (InvalidInputError, LinAlgError):
        return 0.0
    T, constants = fisher.decision_functions(directions.means, training.effective_priors)
    decisions = predictions @ directions.combinations @ T - constants
    codes = decisions.argmax(axis=1) if training.n_columns > 2 else decisions[:, 0] > 0
    return float(test.weights[codes == test.codes].sum())


@dataclass(frozen=True, eq=False)
class _Regression:
    """Ridge regression of the class indicators of all rows, in an orthonormal basis.

    The basis spans the orthogonal complement of ``D^(1/2) 1``. It includes vectors of eigenvalue 0, because without
    them ``1 - hat`` would subtract nearly equal numbers.
    """

    classes: Classes
    values: Array
    """Eigenvalues above rounding. Shape (r,)."""
    basis: Array
    """Orthonormal vectors; the last r are the eigenvectors of `values`. Shape (N, N - 1)."""
    coordinates: Array
    """Coordinates of the centred class indicators. Shape (N - 1, C)."""
    weighted_squared_distances: Array
    """Weight of each row times its squared distance from the mean of all rows. Shape (N,)."""

    @classmethod
    def from_eigenvectors(cls, spectral: SpectralGram, classes: Classes) -> Self:
        lengths = np.einsum("ij,ij,j->i", spectral.vectors, spectral.vectors, spectral.values)
        coordinates = np.concatenate([spectral.omitted_coordinates[1:], spectral.coordinates])
        return cls(classes, spectral.values, spectral.all_vectors[:, 1:], coordinates, lengths)


class _LeftOutRows:
    """A fold whose predictions follow from the regression of all rows.

    Let ``P = 1 - hat`` be the matrix of the residuals of all rows, mean included. For left-out rows T, the residual of
    their predictions is ``e = P_TT^(-1) (P Y)_T``. The regression of all rows with ``Y - e`` in place of ``Y`` in T has
    the coefficients, and the sum of squares, of the regression without T.
    """

    def __init__(self, regression: _Regression, test: Indices) -> None:
        classes = regression.classes
        self._regression = regression
        self.training_classes = classes.subset(np.delete(np.arange(len(classes.codes)), test))
        self.test_classes = classes.subset(test)
        self._basis = regression.basis[test]
        self._first = self._basis.shape[1] - len(regression.values)
        self._vectors, null_vectors = self._basis[:, self._first :], self._basis[:, : self._first]
        self._null_products = null_vectors @ null_vectors.T
        self._squared_lengths = float(np.delete(regression.weighted_squared_distances, test).sum())

    @cached_property
    def _training_sum(self) -> Array:
        """Sum of the training rows, in coordinates of the eigenvectors, (r,); the sum of all rows is 0."""
        total: Array = -(np.sqrt(self.test_classes.weights) @ self._vectors)
        return total

    def within_class_scatter_trace(self) -> float:
        values, training, test = self._regression.values, self.training_classes, self.test_classes
        left_out = self._vectors.T @ (test.weighted_columns() / np.sqrt(test.weights)[:, np.newaxis])
        sums = self._regression.coordinates[self._first :] - left_out
        total = self._squared_lengths - float(values @ self._training_sum**2) / training.total
        centred = sums - np.outer(self._training_sum, training.class_weight_shares)
        between = values @ centred**2 / training.class_weight_sums
        return within_class_scatter_trace(total, between)

    def predict_indicators(self, ridge: float) -> tuple[Array, Array]:
        values, coordinates = self._regression.values, self._regression.coordinates
        # Factor of each coordinate in the residuals.
        kept = np.concatenate([np.ones(self._first), ridge / (values + ridge)])[:, np.newaxis]
        P = self._null_products.copy()
        for columns in row_slices(len(values), _PRODUCT_COLUMNS):
            scaled = self._vectors[:, columns] * np.sqrt(kept[self._first :, 0][columns])
            P += scaled @ scaled.T
        factor = np.linalg.cholesky(P), True  # unlike SciPy's, it releases the GIL
        errors = cho_solve(factor, self._basis @ (kept * coordinates), overwrite_b=True, check_finite=False)
        corrected = coordinates - self._basis.T @ errors
        fitted = (values / (values + ridge))[:, np.newaxis] * corrected[self._first :]
        rows = self._vectors @ fitted / np.sqrt(self.test_classes.weights)[:, np.newaxis]
        return rows - self._training_sum @ fitted / self.training_classes.total, (kept * corrected).T @ corrected


@dataclass(frozen=True, eq=False)
class _DecomposedFold:
    """A fold whose training rows have their own decomposition."""

    training_classes: Classes
    test_classes: Classes
    spectral: SpectralGram
    test_coordinates: Array
    """Inner products of the left-out rows with the eigenvectors. Shape (m, r)."""

    @classmethod
    def from_gram(cls, K: Array, classes: Classes, test: Indices, on_indefinite: str) -> Self:
        train = np.delete(np.arange(len(K)), test)
        training = classes.subset(train)
        spectral = decompose_gram(np.array(K[np.ix_(train, train)], order="F"), training, on_indefinite)
        V = Weighting(training.weights).apply_weighted_centring_adjoint(spectral.vectors)
        return cls(training, classes.subset(test), spectral, K[np.ix_(test, train)] @ V - spectral.gram_row_means @ V)

    def within_class_scatter_trace(self) -> float:
        return self.spectral.within_class_scatter_trace(self.training_classes)

    def predict_indicators(self, ridge: float) -> tuple[Array, Array]:
        solved = self.test_coordinates @ self.spectral.solve_coordinates(ridge)
        return solved, self.spectral.indicator_residual_products(ridge)


def _split_rows(classes: Classes) -> list[Indices]:
    """Return the indices of the left-out rows of each fold."""
    folds = _assign_folds(classes)
    return [np.flatnonzero(folds == fold) for fold in range(folds.max() + 1)]


def _assign_folds(classes: Classes) -> Codes:
    """Return the fold of each row, (N,); -1 for a row that is the only one of its class."""
    folds, start = np.full(len(classes.codes), -1, np.int64), 0
    for code in range(classes.n_columns):
        rows = np.flatnonzero(classes.codes == code)
        if len(rows) > 1:
            folds[rows] = (start + np.arange(len(rows))) % _FOLDS
            start += len(rows)
    return folds
