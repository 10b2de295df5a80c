"""Choose the shrinkage of Fisher discriminants by stratified cross-validation."""

from contextlib import suppress

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.kernels.pairwise.block_functions import mirror_lower
from dkfm.numerics import fisher
from dkfm.numerics.fisher import Classes, Codes
from dkfm.numerics.kernel_components import Weighting, center_gram_in_place

SHRINKAGE_GRID: tuple[float, ...] = tuple(10.0 ** (step / 2) for step in range(-12, 5))
"""Values that a shrinkage is chosen from: 1e-6 to 100, two for each power of ten."""

_FOLDS = 5
"""Number of folds of the cross-validation."""


def choose_shrinkage(K: Array, classes: Classes, on_indefinite: str = "raise") -> float:
    """Return the shrinkage of `SHRINKAGE_GRID` that predicts the largest weight of rows; of several, the largest.

    The rows of each class are dealt in order to five folds, and each fold is predicted from the other four. The row of
    a class of one row is in no fold, and is always trained on.

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
    folds, correct = _assign_folds(classes), np.zeros(len(SHRINKAGE_GRID))
    for fold in range(folds.max() + 1):
        correct += _correct_weight_of_fold(K, classes, folds == fold, on_indefinite)
    if not correct.any():
        raise InvalidInputError('shrinkage="auto" finds no row that the others predict right; give it a number.')
    return SHRINKAGE_GRID[int(np.flatnonzero(correct >= correct.max() * (1 - 1e-12))[-1])]


def _correct_weight_of_fold(K: Array, classes: Classes, in_fold: npt.NDArray[np.bool_], on_indefinite: str) -> Array:
    """Return the weight of the correctly predicted rows of one fold, for each shrinkage of `SHRINKAGE_GRID`."""
    test, train = np.flatnonzero(in_fold), np.flatnonzero(~in_fold)
    training = classes.subset(train)
    weighting, Y = Weighting(training.weights), training.weighted_centred_indicators()
    G = np.array(K[np.ix_(train, train)], order="F")
    means = center_gram_in_place(G, weighting)
    spectral = fisher.decompose(G, Y, on_indefinite, means, weighting)
    expected, weights, correct = classes.codes[test], classes.weights[test], np.zeros(len(SHRINKAGE_GRID))
    try:
        spread = spectral.within_class_scatter_trace(training)
    except InvalidInputError:
        return correct  # the training rows do not vary within their classes
    V = weighting.apply_centring_transpose(spectral.vectors)
    coordinates = K[np.ix_(test, train)] @ V - means @ V
    for number, shrinkage in enumerate(SHRINKAGE_GRID):
        ridge = shrinkage * spread / training.total
        with suppress(InvalidInputError):  # a shrinkage that is too small for these rows scores 0
            directions = fisher.solve_directions(spectral.indicator_residual_products(ridge) / training.total, training)
            T, constants = fisher.decision_functions(directions.means, training.class_probabilities)
            decisions = coordinates @ (spectral.solve_coordinates(ridge) @ directions.combinations) @ T - constants
            codes = decisions.argmax(axis=1) if training.count > 2 else decisions[:, 0] > 0
            correct[number] = weights[codes == expected].sum()
    return correct


def _assign_folds(classes: Classes) -> Codes:
    """Return the fold of each row, (N,); -1 for a row that is alone in its class."""
    folds, start = np.full(len(classes.codes), -1, np.int64), 0
    for code in range(classes.count):
        rows = np.flatnonzero(classes.codes == code)
        if len(rows) > 1:
            folds[rows] = (start + np.arange(len(rows))) % _FOLDS
            start += len(rows)
    return folds
