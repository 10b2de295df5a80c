"""Certify the training rows of a feature map, and warn if it is less exact than its bound or than is expected."""

import numpy as np

from dkfm.core.rows import Array
from dkfm.estimators.stored.feature_map import sample_rows_and_landmarks
from dkfm.gram.training_data import TrainingData
from dkfm.numerics import roots
from dkfm.numerics.certificates import certificate
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.map_error_bounds import Residuals
from dkfm.numerics.scorer import Scorer


def certify_training_rows(scorer: Scorer, rows: TrainingData, mean: Array | None) -> Certificate:
    """Certify pairs of at most 512 training rows, evenly spread among the given ones."""
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow raises in `fit_map`
        return certificate.certify_map(scorer, *sample_rows_and_landmarks(rows), mean=mean)


def certify_residuals(residuals: Residuals, rank: int, n_rows: int, is_sample: bool) -> Certificate:
    """Return the certificate of rows with themselves: the largest share of k(x, x) that the features leave of a row."""
    share = max(float(residuals.largest[rank]), -residuals.lowest)
    return Certificate(0.0, share, n_rows, n_rows if is_sample else None)


def warn_of_map_errors(
    measured: Certificate,
    on_training: Certificate,
    bound: float | None,
    dtype: np.dtype[np.floating],
    accepts_bound: bool,
    chosen_landmarks: bool,
) -> None:
    """Warn if a certificate of a map exceeds the bound of its error, or 1e-6 (1e-2 in float32).

    Parameters
    ----------
    measured, on_training : Certificate
        Certificates of the landmarks, and of the training rows.
    bound : float or None
        Error bound of pairs with a training row; None if it is not known.
    dtype : dtype
        Dtype of the map.
    accepts_bound : bool
        Whether the parameters of the fit accept errors up to the bound: with `tol`, `rcond`, or by clipping.
    chosen_landmarks : bool
        Whether the landmarks were chosen, so that errors of the other training rows up to the bound are accepted.

    Warns
    -----
    DkfmWarning
        A certificate exceeds a limit, in units of each pair's own scale.
    """
    remedy = 'fit with basis="cholesky", choose another kernel, or scale the columns of X'
    if dtype == np.float32:
        remedy = 'float32 does not hold these features: fit with dtype="float64", or with basis="cholesky"'
    largest = np.inf if bound is None else bound
    limit = largest if accepts_bound else min(largest, certificate.LIMITS[dtype.name])
    stated = "not known" if bound is None else f"{bound:.1e}"
    finding = f"The certificate of this map is {measured}, its error bound {stated}"
    certificate.warn_if_error_is_large(measured.relative_error, dtype, finding, remedy, limit)
    if measured.relative_error <= limit:
        finding = f"The certificate of the training rows is {on_training}, the error bound of the map {stated}"
        certificate.warn_if_error_is_large(
            on_training.relative_error, dtype, finding, remedy, largest if chosen_landmarks else limit
        )


def warn_of_centring(
    scorer: Scorer, measured: Certificate, landmarks: TrainingData, max_similarity: float, dtype: np.dtype[np.floating]
) -> None:
    """Warn if the mean that centring subtracts is so long that rounding is a large part of what is left."""
    features = scorer("features", sample_rows_and_landmarks(landmarks)[0]).astype(np.float64)
    max_square = float(np.square(features).sum(axis=1).max())
    factor = max(1.0, max_similarity / max(max_square, roots.EPS * max_similarity)) if max_similarity > 0 else 1.0
    if factor > 1:
        message = f"The certificate of this map is {measured}, {measured.error * factor:.1e} of the largest"
        remedy = "centre the columns of X, or choose another kernel"
        message += " after the mean was taken away"
        certificate.warn_if_error_is_large(measured.error * factor, dtype, message, remedy)
