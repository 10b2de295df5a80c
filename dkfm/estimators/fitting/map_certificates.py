"""Certify fitted feature maps, and warn if they are less exact than their bound or than is expected."""

from dataclasses import replace

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.estimators.fitting.training_data import TrainingData
from dkfm.numerics import links, roots
from dkfm.numerics.certificates import certificate, kernel_rounding
from dkfm.numerics.certificates.certificate import Certificate, sample_evenly
from dkfm.numerics.certificates.verification import Verification
from dkfm.numerics.map_error_bounds import Residuals
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer


def certify_fit(scorer: Scorer, landmarks: TrainingData, mean: Array | None) -> Certificate:
    """Certify pairs of landmarks: return the worse certificate of the features and of the residuals' features."""
    rows, points = sample_rows_and_landmarks(landmarks)
    model, diagonal = scorer.model, landmarks.diagonal()
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow raises in `fit_map`
        measured = certificate.certify_map(
            scorer, rows, points, tiles=landmarks.iter_row_tiles(), diagonal=diagonal, mean=mean
        )
        residual_head = model.heads["residual"]
        if not np.array_equal(residual_head.weights, model.heads["features"].weights):
            heads = {"features": replace(residual_head, link=links.IDENTITY)}
            residual_scorer = Scorer(Model(model.kernel, model.landmarks, heads, model.shift), scorer.evaluator)
            other = certificate.certify_map(
                residual_scorer, rows, points, tiles=landmarks.iter_row_tiles(), diagonal=diagonal
            )
            measured = measured.combine(other)
    return measured


def certify_training_rows(scorer: Scorer, rows: TrainingData, mean: Array | None) -> Certificate:
    """Certify pairs of at most 512 training rows, evenly spread among the given ones."""
    with np.errstate(over="ignore", invalid="ignore"):  # as in `certify_fit`
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


def verify_points(
    scorer: Scorer, landmark_certificate: Certificate, Z: Rows, mean: Array | None, bound: float | None
) -> Verification:
    """Verify a map on new points.

    Parameters
    ----------
    landmark_certificate : Certificate
        Certificate of the landmarks.
    Z : ndarray or csr_array of shape (m, d)
        New points; at most 512 of them are used, evenly spread.
    mean : ndarray of shape (N,), optional
        Mean kernel values of a centred map.
    bound : float or None
        Error bound of pairs with a training point, of each pair's own scale. If it is infinite, as for a clipped
        kernel, or None, not known, the errors are measured but not compared with it.

    Raises
    ------
    CertificateError
        The errors are larger than the bounds.
    """
    model, sample = scorer.model, Z[sample_evenly(Z.shape[0])]
    landmarks = model.original_landmarks[sample_evenly(model.landmarks.shape[0])]
    max_new = float(model.kernel.evaluate_diagonal(sample).max())
    against = certificate.certify_map(scorer, landmarks, Z=sample, mean=mean)
    between = certificate.certify_map(scorer, sample, mean=mean)
    residuals = scorer("residual", sample)[:, 0]
    if bound is None:
        return Verification(landmark_certificate, against, between, residuals)
    if np.isinf(bound):  # residuals of a clipped kernel are no bounds either
        return Verification(landmark_certificate, against, between, residuals, np.inf)
    against.require_own_scale_error_at_most(bound)
    pair_bound = float(residuals.max()) / max_new if max_new > 0 else 0.0
    rounding = 1e-8 if model.heads["residual"].triangular else roots.EIGENVECTOR_ERROR_SHARE
    between.require_error_at_most(pair_bound + max(rounding, bound))
    return Verification(landmark_certificate, against, between, residuals, pair_bound)


def sample_rows_and_landmarks(rows: TrainingData, diagonal: Array | None = None) -> tuple[Rows, Rows]:
    """Return a sample of the rows, as the model scores them and as the kernel compares them.

    With `diagonal` (N,), their k(x, x), the sample also has the rows that round most.
    """
    numbers = sample_evenly(rows.rows_as_landmarks.shape[0])
    if diagonal is not None and not rows.kernel.is_precomputed:
        numbers = np.union1d(numbers, kernel_rounding.find_extreme_rows(rows.rows_as_landmarks, diagonal))
    return rows.take_rows(numbers), rows.rows_as_landmarks[numbers]
