"""Which shrinkage of Fisher discriminants predicts best: part after part of the training rows, from the others."""

from contextlib import suppress

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.kernels.pairwise.blocks import mirror_lower
from dkfm.numerics import fisher
from dkfm.numerics.fisher import Classes, Codes
from dkfm.numerics.pca import Weighting, center_gram

GRID: tuple[float, ...] = tuple(10.0 ** (step / 2) for step in range(-12, 5))
"""What a shrinkage is chosen from: 1e-6 to 100, two to a power of ten."""

_PARTS = 5


def choose_shrinkage(K: Array, classes: Classes, on_indefinite: str = "raise") -> float:
    """Return the shrinkage of `GRID` whose predictions are right most often; of equals the largest.

    Every class is dealt out, in the order of its rows, to five parts, and each part is predicted from the other four; a
    class of one row is in no part.

    Parameters
    ----------
    K : ndarray of shape (N, N)
        Only the lower triangle is read; the upper one is filled.
    classes : Classes
    on_indefinite : {"raise", "clip"}
        As `fisher.solve` takes it.
    """
    mirror_lower(K)
    parts, right = _parts(classes), np.zeros(len(GRID))
    for part in range(parts.max() + 1):
        right += _right(K, classes, parts == part, on_indefinite)
    if not right.any():
        raise InvalidInputError('shrinkage="auto" finds no row that the others predict right; give it a number.')
    return GRID[int(np.flatnonzero(right >= right.max() * (1 - 1e-12))[-1])]


def _right(K: Array, classes: Classes, held: npt.NDArray[np.bool_], on_indefinite: str) -> Array:
    """Return, for each shrinkage, the weight of the rows left out that are predicted right from the others."""
    left_out, others = np.flatnonzero(held), np.flatnonzero(~held)
    known = classes.subset(others)
    weighting, Y = Weighting(known.weights), known.centred()
    G = np.array(K[np.ix_(others, others)], order="F")
    means = center_gram(G, weighting)
    spectral = fisher.decompose(G, Y, on_indefinite, means, weighting)
    truth, weights, right = classes.codes[left_out], classes.weights[left_out], np.zeros(len(GRID))
    try:
        spread = spectral.within(known)
    except InvalidInputError:
        return right  # the others do not vary within their classes
    V = weighting.inner(spectral.vectors)
    coordinates = K[np.ix_(left_out, others)] @ V - means @ V
    for number, shrinkage in enumerate(GRID):
        ridge = shrinkage * spread / known.total
        with suppress(InvalidInputError):  # where it is too small for these rows it is never right
            found = fisher.directions_of_residual(spectral.residual(ridge) / known.total, known)
            T, constants = fisher.decision_functions(found.means, known.chances)
            told = coordinates @ (spectral.scaled(ridge) @ found.combinations) @ T - constants
            codes = told.argmax(axis=1) if known.count > 2 else told[:, 0] > 0
            right[number] = weights[codes == truth].sum()
    return right


def _parts(classes: Classes) -> Codes:
    """Return the part of each row (N,), -1 of rows that are alone in their class."""
    parts, start = np.full(len(classes.codes), -1, np.int64), 0
    for code in range(classes.count):
        rows = np.flatnonzero(classes.codes == code)
        if len(rows) > 1:
            parts[rows] = (start + np.arange(len(rows))) % _PARTS
            start += len(rows)
    return parts
