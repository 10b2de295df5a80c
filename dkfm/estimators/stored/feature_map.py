"""Check and measure a stored feature map."""

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.estimators.stored.base import StoredEstimator, StoredNames
from dkfm.estimators.stored.map_records import convert_old, eigenvalues_or_pivots_name, require_consistent
from dkfm.gram.training_data import TrainingData
from dkfm.numerics import links, roots
from dkfm.numerics.certificates import certificate
from dkfm.numerics.certificates.certificate import Certificate, sample_evenly
from dkfm.numerics.certificates.verification import Verification
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer
from dkfm.storage.model_store import Record


@dataclass(frozen=True, eq=False)
class StoredMap(StoredEstimator):
    """A fitted `ExactFeatureMap` as its store holds it."""

    output_head_name: ClassVar[str] = "features"
    names: ClassVar[StoredNames] = StoredNames(
        parameters=("basis", "centered", "certify", "tol", "rcond", "on_indefinite", "dtype"),
        required_arrays=("dropped", "scales"),
        optional_arrays=("eigenvalues", "pivots", "mean", "landmark_indices", "error_bounds"),
        certificates=("certificate", "training_certificate"),
        optional_numbers=("max_similarity",),
    )

    @property
    def eigenvalues_or_pivots(self) -> Array:
        """Eigenvalues or pivots that the map keeps, of shape (rank,)."""
        return cast("Array", self.values[eigenvalues_or_pivots_name(str(self.parameters["basis"]))])

    @property
    def error_bound(self) -> float | None:
        """Error bound of pairs with a training row, of each pair's own scale; None if it is not known."""
        bounds = cast("Array | None", self.values.get("error_bounds"))
        return None if bounds is None else float(bounds[-1])

    @classmethod
    def _convert_and_check_record(cls, record: Record) -> Record:
        record = convert_old(record)
        require_consistent(record)
        return record

    def _certify(self, scorer: Scorer, landmarks: TrainingData) -> Certificate:
        return certify_map(scorer, landmarks, cast("Array | None", self.values.get("mean")))

    def _verify_points(self, scorer: Scorer, landmark_certificate: Certificate, Z: Rows) -> Verification:
        mean = cast("Array | None", self.values.get("mean"))
        rounding = roots.EIGENVECTOR_ERROR_SHARE
        if scorer.model.heads["residual"].triangular:
            rounding = max(1e-8, min(1.0, 16 * roots.EPS * roots.condition_number(self.eigenvalues_or_pivots)))
        return verify_points(scorer, landmark_certificate, Z, mean, self.error_bound, rounding)


def certify_map(scorer: Scorer, landmarks: TrainingData, mean: Array | None) -> Certificate:
    """Certify pairs of landmarks: return the worse certificate of the features and of the residuals' features."""
    rows, points = sample_scorer_and_kernel_rows(landmarks)
    model, diagonal = scorer.model, landmarks.diagonal()
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow raises in the fit
        measured = certificate.certify_map(
            scorer, rows, points, tiles=landmarks.iter_row_tiles(), diagonal=diagonal, mean=mean
        )
        residual_head, weights = model.heads["residual"], model.heads["features"].weights
        if residual_head.weights is not weights and not np.array_equal(residual_head.weights, weights):
            heads = {"features": replace(residual_head, link=links.IDENTITY)}
            residual_scorer = Scorer(Model(model.kernel, model.landmarks, heads, model.shift), scorer.evaluator)
            other = certificate.certify_map(
                residual_scorer, rows, points, tiles=landmarks.iter_row_tiles(), diagonal=diagonal
            )
            measured = measured.combine(other)
    return measured


def verify_points(
    scorer: Scorer,
    landmark_certificate: Certificate,
    Z: Rows,
    mean: Array | None,
    bound: float | None,
    rounding: float,
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
        Error bound of pairs with a training point, relative to each pair's own scale. The errors are not compared
        with a bound that is infinite, as that of a clipped kernel, or unknown (None).
    rounding : float
        Rounding error of pairs of new points, relative to the largest k(z, z), which their residuals do not show.

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
    against.require_relative_error_at_most(bound)
    pair_bound = float(residuals.max()) / max_new if max_new > 0 else 0.0
    between.require_error_at_most(pair_bound + max(rounding, bound))
    return Verification(landmark_certificate, against, between, residuals, pair_bound)


def sample_scorer_and_kernel_rows(rows: TrainingData, diagonal: Array | None = None) -> tuple[Rows, Rows]:
    """Return a sample of the rows, as the model scores them and as the kernel compares them.

    With `diagonal` (N,), their k(x, x), the sample also has the rows that round most.
    """
    numbers = sample_evenly(rows.indexable_rows.shape[0])
    if diagonal is not None:
        numbers = np.union1d(numbers, rows.find_rounding_probe_rows(diagonal))
    return rows.take_rows(numbers), rows.indexable_rows[numbers]
