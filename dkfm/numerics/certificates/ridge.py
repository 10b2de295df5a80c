"""Certify kernel ridge regressions: compare the predictions of a model for its landmarks with those of its fit."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.numerics import links
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.roots import row_lengths
from dkfm.numerics.scorer import Scorer


@dataclass(frozen=True, eq=False)
class PredictionErrors:
    """Largest errors of the predictions of landmarks."""

    largest: Array
    """Largest error for each target. Shape (q,)."""
    largest_of_unit_rows: Array
    """Largest error for each target, with the error of each row divided by ``sqrt(k(x, x))``. Shape (q,)."""
    count: int
    """Number of predictions."""

    def to_certificate(self, scales: Array, norms: Array) -> Certificate:
        """Return a certificate with relative errors.

        Parameters
        ----------
        scales : ndarray of shape (q,)
            Largest absolute value of each target, to which `Certificate.error` is relative.
        norms : ndarray of shape (q,)
            Norm of each regression function f. `Certificate.relative_error` is relative to ``sqrt(k(x, x)) |f|``, which
            no prediction exceeds.
        """
        shares = _divide(self.largest, scales).max(), _divide(self.largest_of_unit_rows, norms).max()
        return Certificate(float(shares[0]), float(shares[1]), self.count, compared="predictions")


def measure_predictions(
    score: Scorer, name: str, tiles: Iterable[Rows], diagonal: Array, fitted: Array
) -> PredictionErrors:
    """Compare the predictions for the landmarks with ``y - alpha c / w``, which follows from the linear system.

    Parameters
    ----------
    score : Scorer
        A prepared model.
    name : str
        Name of the head of the regression; its link is not applied.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    diagonal : ndarray of shape (N,)
        k(x, x) of the landmarks.
    fitted : ndarray of shape (N, q)
        Expected predictions.
    """
    linear = replace(score.model.head(name), link=links.IDENTITY)
    scored = replace(score, model=replace(score.model, heads={name: linear}))
    lengths, start = row_lengths(np.abs(diagonal))[:, np.newaxis], 0
    largest = of_units = np.zeros(fitted.shape[1])
    for tile in tiles:
        found = scored(name, tile).astype(np.float64)
        rows = slice(start, start + len(found))
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite count as infinite errors
            errors = np.abs(found - fitted[rows])
        largest = np.maximum(largest, errors.max(axis=0))
        of_units = np.maximum(of_units, _divide(errors, lengths[rows]).max(axis=0))
        start = rows.stop
    return PredictionErrors(largest, of_units, fitted.size)


def _divide(errors: Array, scales: Array) -> Array:
    """Return errors relative to their scales; 0 where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        shares: Array = np.where(errors == 0, 0.0, errors / scales)
    return shares
