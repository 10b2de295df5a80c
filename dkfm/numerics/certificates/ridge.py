"""Certify kernel ridge regressions: compare what a model predicts of its landmarks with what its fit says."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.numerics import links
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.roots import row_lengths
from dkfm.numerics.scorer import Scorer


def certify_ridge(
    score: Scorer, name: str, tiles: Iterable[Rows], diagonal: Array, fitted: Array, scales: Array, norms: Array
) -> Certificate:
    """Compare the predictions of the landmarks with ``y - alpha c / w``, which is what the linear system asks for.

    Parameters
    ----------
    score : Scorer
        A prepared model.
    name : str
        Name of the head of the regression; its link is left out.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    diagonal : ndarray of shape (N,)
        Their k(x, x).
    fitted : ndarray of shape (N, q)
        Expected predictions.
    scales : ndarray of shape (q,)
        Largest absolute value of each target, of which `Certificate.error` is a share.
    norms : ndarray of shape (q,)
        Norm of each regression function f. `Certificate.relative_error` is relative to ``sqrt(k(x, x)) |f|``, which no
        prediction exceeds.
    """
    linear = replace(score.model.head(name), link=links.IDENTITY)
    scored = replace(score, model=replace(score.model, heads={name: linear}))
    bounds = row_lengths(np.abs(diagonal))[:, np.newaxis] * norms
    worst, start = Certificate(0.0, 0.0, 0, compared="predictions"), 0
    for tile in tiles:
        found = scored(name, tile).astype(np.float64)
        rows = slice(start, start + len(found))
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite counts as an infinite error
            errors = np.abs(found - fitted[rows])
        shares = (
            _compute_max_relative_error(errors, np.broadcast_to(scales, errors.shape)),
            _compute_max_relative_error(errors, bounds[rows]),
        )
        worst = worst.combine(Certificate(*shares, errors.size))
        start = rows.stop
    return worst


def _compute_max_relative_error(errors: Array, scales: Array) -> float:
    """Return the largest error relative to its scale; 0 where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(errors == 0, 0.0, errors / scales)
    return float(np.max(shares, initial=0.0))
