"""Fit feature maps: their models, error bounds and certificates."""

import warnings
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from scipy.linalg import solve_triangular

from dkfm.core.rows import Array, Rows
from dkfm.errors import DkfmWarning, KernelError, NotSupportedError
from dkfm.estimators.fitting.landmarks import ChosenLandmarks, MapOptions, factor_landmarks
from dkfm.estimators.fitting.training_data import PrecomputedGram, TrainingData, TrainingRows
from dkfm.numerics import links, pivoted_cholesky, roots, training_statistics
from dkfm.numerics.certificates import certificate
from dkfm.numerics.certificates.certificate import Certificate, Verification, sample_evenly
from dkfm.numerics.model import Head, Model
from dkfm.numerics.roots import Root, is_indefinite
from dkfm.numerics.scorer import Scorer, prepare_scorer
from dkfm.sources.base import Source
from dkfm.sources.memory import MemorySource

_MEAN_TOLERANCE = 1e-3
"""Largest rounding error of the float32 mean of a column, relative to the largest distance from the mean."""


@dataclass(frozen=True, eq=False)
class FittedMap:
    """The parts of a fitted map from which components and discriminants in its features are fitted."""

    model: Model
    """Model of the map."""
    eigenvalues: Array | None
    """Eigenvalues of the Gram matrix of the landmarks, descending; None in the Cholesky basis. Shape (r,)."""
    error_bounds: Array
    """Error bounds for 0, 1, .. r features. Shape (r + 1,)."""
    holds_training_rows: bool
    """Whether the landmarks are all training rows, in the same order."""


def fit_map(
    data: TrainingData, weights: Array | None, chosen: ChosenLandmarks, options: MapOptions
) -> tuple[Model, dict[str, object]]:
    """Return the model of a feature map, and the fitted values by name.

    Parameters
    ----------
    data : TrainingData
        All training rows.
    weights : ndarray of shape (N,), optional
        Weights of the training rows in the mean of the features; without weights the features are not centred.
    chosen : ChosenLandmarks
        Landmarks of the map.
    options : MapOptions
        Parameters of the map.
    """
    landmarks, root, remaining = factor_landmarks(chosen, options)
    diagonal, dtype = data.diagonal(), np.dtype(options.dtype)
    max_similarity, lowest = float(diagonal.max()), _lowest_dropped(root) if options.basis == "cholesky" else 0.0
    all_rows = _uses_all(landmarks, data)
    # Residuals and means over all training rows are computed in float64.
    scorer = _make_root_scorer(data, landmarks, root)
    if remaining is None:
        remaining, lowest = training_statistics.compute_residual_extremes(scorer, data.iter_row_tiles(), diagonal)
    if options.on_indefinite != "clip" and not all_rows:
        _require_psd_residuals(scorer, data, lowest, root)
    bounds, rank = roots.bound_errors_by_rank(remaining, root.values, max_similarity, dtype), len(root.values)
    if dtype == np.float32:
        rank = roots.rank_in_float32(root, _sample_kernel_values(data, landmarks), landmarks.diagonal())
    if options.on_indefinite == "clip":
        negative = is_indefinite(_lowest_dropped(root), float(root.values.max(initial=0.0)), len(root.weights))
        if negative or lowest < -roots.EIGENVECTOR_ERROR_SHARE * max_similarity:
            bounds = np.full(len(bounds), np.inf)
    if options.tol is not None:
        rank = roots.find_rank_within(bounds[: rank + 1], options.tol)
        _warn_of_tolerance(float(bounds[rank]), options.tol)
    if rank < len(root.values):
        root = root.truncate(rank)
        landmarks = landmarks.subset(np.arange(len(root.weights))) if root.triangular else landmarks
        scorer = _make_root_scorer(data, landmarks, root)
    mean = None if weights is None else training_statistics.mean_kernel_values(scorer, data.iter_row_tiles(), weights)
    with np.errstate(over="ignore"):  # values that float32 cannot hold raise below
        model = _make_model(scorer.model, root, mean, options.basis, dtype)
    del scorer
    fitted = {**_root_arrays(root, options.basis), "error_bounds": bounds[: rank + 1], "max_similarity": max_similarity}
    fitted |= {} if mean is None else {"mean": mean}
    indices = landmarks.original_row_indices
    if indices is not None and not (landmarks is data and indices[-1] == len(diagonal) - 1):
        fitted["landmark_indices"] = indices
    certificates = _certify(prepare_scorer(model), data, landmarks, mean)
    if not np.isfinite(certificates["certificate"].error):
        raise KernelError(f"{options.dtype} does not hold the values of {data.kernel!r} on these rows.")
    factor = 1.0 if mean is None else _compute_cancellation_factor(prepare_scorer(model), landmarks, max_similarity)
    accepted_error = _compute_accepted_error(options, float(bounds[rank]), max_similarity, landmarks)
    _warn_of_rounding(certificates["certificate"], dtype, factor, accepted_error)
    return model, {**fitted, **certificates}


def _certify(scorer: Scorer, data: TrainingData, landmarks: TrainingData, mean: Array | None) -> dict[str, Certificate]:
    measured = on_training = certify_fit(scorer, landmarks, mean)
    if not _uses_all(landmarks, data):
        on_training = certificate.certify_map(scorer, *_sample_rows_and_landmarks(data), mean=mean)
    return {"certificate": measured, "training_certificate": on_training}


def _uses_all(landmarks: TrainingData, data: TrainingData) -> bool:
    """Return whether the landmarks are all training rows, in any order."""
    are_rows = landmarks is data or landmarks.original_row_indices is not None
    return are_rows and landmarks.rows_as_landmarks.shape[0] == data.rows_as_landmarks.shape[0]


def is_clipped_kernel(error_bounds: Array) -> bool:
    """Return whether the kernel was clipped: its negative part was dropped, so the error bounds are infinite."""
    return bool(np.isinf(error_bounds).any())


def _lowest_dropped(root: Root) -> float:
    return float(root.dropped.min(initial=0.0))


def _make_root_scorer(data: TrainingData, landmarks: TrainingData, root: Root) -> Scorer:
    head = Head(root.weights, triangular=root.triangular)
    return prepare_scorer(Model(data.kernel, landmarks.rows_as_landmarks, {"features": head}))


def _sample_kernel_values(data: TrainingData, landmarks: TrainingData) -> Array:
    """Return the kernel values (s, m) of a sample of the training rows with the m landmarks."""
    return data.kernel.make_evaluator(landmarks.rows_as_landmarks)(_sample_rows_and_landmarks(data)[0])


def _compute_accepted_error(options: MapOptions, bound: float, max_similarity: float, landmarks: TrainingData) -> float:
    """Return the error that the user accepts with `tol` or `rcond`, or by clipping (which has its own warning), else 0.

    The bound is in units of ``sqrt(max_similarity k(z, z))``; a certificate is relative to the largest value compared.
    """
    if options.tol is None and options.rcond is None and not np.isinf(bound):
        return 0.0
    max_compared = float(landmarks.diagonal()[sample_evenly(landmarks.rows_as_landmarks.shape[0])].max())
    return bound * float(np.sqrt(max_similarity / max_compared)) if max_compared > 0 else bound


def _compute_cancellation_factor(scorer: Scorer, landmarks: TrainingData, max_similarity: float) -> float:
    """Return the ratio of the largest k(x, x) to the largest squared length of sampled centred features, at least 1."""
    features = scorer("features", _sample_rows_and_landmarks(landmarks)[0]).astype(np.float64)
    max_square = float(np.square(features).sum(axis=1).max())
    return max(1.0, max_similarity / max(max_square, roots.EPS * max_similarity)) if max_similarity > 0 else 1.0


def _warn_of_rounding(
    map_certificate: Certificate, dtype: np.dtype[np.floating], cancellation_factor: float, accepted_error: float
) -> None:
    """Warn if rounding is too large a part of the features, which centring may have made small."""
    error, message = map_certificate.error * cancellation_factor, f"The certificate of this map is {map_certificate}"
    remedy = "choose another kernel, or scale the columns of X"
    if cancellation_factor > 1:
        message += f", {error:.1e} of the largest after the mean was taken away"
        remedy = "centre the columns of X, or choose another kernel"
    if dtype == np.float32:
        remedy = 'float32 does not hold these features: fit with dtype="float64"'
    certificate.warn_if_error_is_large(error, dtype, message, remedy, accepted_error)


def _warn_of_tolerance(bound: float, tol: float) -> None:
    if bound > tol:
        message = f"No rank of this map is within tol = {tol:.3g}: its error bound is {bound:.3g}."
        warnings.warn(message, DkfmWarning, stacklevel=4)


def truncate_map(
    model: Model, arrays: dict[str, Array], r: int, dtype: np.dtype[np.floating], basis: str
) -> tuple[Model, dict[str, object]]:
    """Truncate a map to rank r; return its model and its fitted values, from the `arrays` of the larger map.

    Raises
    ------
    NotSupportedError
        A precomputed kernel was clipped: the Gram matrix, which the certificate needs, was not kept.
    """
    if model.kernel.is_precomputed and is_clipped_kernel(arrays["error_bounds"]):
        raise NotSupportedError(
            "A map of a clipped precomputed kernel cannot be truncated: the certificate needs the whole Gram matrix, "
            "and the map does not keep the part that was dropped; fit again with rcond=."
        )
    head = model.head("residual")
    full = Root(head.weights, arrays[root_values_name(basis)], arrays["dropped"], head.triangular)
    root = full.truncate(r)
    count = len(root.weights)
    fitted = {**arrays, **_root_arrays(root, basis), "error_bounds": arrays["error_bounds"][: r + 1]}
    fitted |= {name: arrays[name][:count] for name in ("mean", "landmark_indices") if name in arrays}
    mean = cast("Array | None", fitted.get("mean"))
    points = model.original_landmarks[:count]
    truncated = _make_model(Model(model.kernel, points, {}), root, mean, basis, dtype)
    landmarks: TrainingData = TrainingRows(model.kernel, points, 0)
    if model.kernel.is_precomputed:
        indices = cast("Array", points)[:, 0].astype(np.intp)
        landmarks = PrecomputedGram(model.kernel, _reconstruct_gram(model, full), indices)
    return truncated, {**fitted, "certificate": certify_fit(prepare_scorer(truncated), landmarks, mean)}


def _reconstruct_gram(model: Model, root: Root) -> Source:
    """Return the Gram matrix (N, N) of a precomputed kernel, computed from its root; 0 except between landmarks."""
    W = root.weights.astype(np.float64)
    # K = R R' with W = R'^(-1), or K = V L V' with W = V L^(-1/2).
    factor = solve_triangular(W, np.eye(len(W))).T if root.triangular else W * root.values
    indices = cast("Array", model.landmarks)[:, 0].astype(np.intp)
    K = np.zeros((model.n_features_in, model.n_features_in))
    K[np.ix_(indices, indices)] = factor @ factor.T
    return MemorySource(K, "The Gram matrix")


def _root_arrays(root: Root, basis: str) -> dict[str, object]:
    return {"dropped": root.dropped, root_values_name(basis): root.values}


def root_values_name(basis: str) -> str:
    """Return the name under which the values of a root are fitted."""
    return "pivots" if basis == "cholesky" else "eigenvalues"


def _make_model(template: Model, root: Root, mean: Array | None, basis: str, dtype: np.dtype[np.floating]) -> Model:
    """Return the model of a root in the precision `dtype`, with the kernel and the landmarks of another model."""
    heads = roots.make_map_heads(root, basis, mean)
    return cast_model(Model(template.kernel, template.original_landmarks, heads), dtype)


def cast_model(model: Model, dtype: np.dtype[np.floating]) -> Model:
    """Cast a float64 model to another precision; shift its landmarks if the kernel permits and they round less so."""
    kernel, points, heads = model.kernel, model.original_landmarks, roots.cast_heads(model.heads, dtype)
    unshifted = Model(kernel, points.astype(dtype, copy=False), heads)
    if dtype == np.float64 or not kernel.translation_invariant or not isinstance(points, np.ndarray):
        return unshifted
    shift = _choose_landmark_shift(points)
    shifted = Model(kernel, (points - shift).astype(dtype), heads, shift)
    # Rows passed in float32 are exact without a shift; rows far from 0 round less if their mean is 0.
    return min(unshifted, shifted, key=lambda model: float(np.abs(np.asarray(model.original_landmarks) - points).max()))


def _choose_landmark_shift(points: Array) -> Array:
    """Return the mean (d,) in float64, rounded to float32 in columns whose width is large beside that rounding."""
    mean: Array = points.mean(axis=0)
    with np.errstate(over="ignore"):
        rounded = mean.astype(np.float32).astype(np.float64)
    accurate = np.abs(rounded - mean) <= _MEAN_TOLERANCE * np.abs(points - mean).max(axis=0)
    return np.where(accurate, rounded, mean)


def certify_fit(scorer: Scorer, landmarks: TrainingData, mean: Array | None) -> Certificate:
    """Certify pairs of landmarks: return the worse certificate of the features and of the residuals' features."""
    rows, points = _sample_rows_and_landmarks(landmarks)
    model = scorer.model
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow raises in `fit_map`
        measured = certificate.certify_map(scorer, rows, points, tiles=landmarks.iter_row_tiles(), mean=mean)
        residual_head = model.heads["residual"]
        if not np.array_equal(residual_head.weights, model.heads["features"].weights):
            heads = {"features": replace(residual_head, link=links.IDENTITY)}
            residual_scorer = Scorer(Model(model.kernel, model.landmarks, heads, model.shift), scorer.evaluator)
            other = certificate.certify_map(residual_scorer, rows, points, tiles=landmarks.iter_row_tiles())
            measured = measured.combine(other)
    return measured


def verify_points(
    scorer: Scorer, landmark_certificate: Certificate, Z: Rows, mean: Array | None, bound: float, max_similarity: float
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
    bound : float
        Error bound of pairs with a training point, in units of ``sqrt(max_similarity k(z, z))``. If it is infinite, as
        for a clipped kernel, the errors are measured but not compared with it.
    max_similarity : float
        Largest k(x, x) of a training point.

    Raises
    ------
    CertificateError
        The errors are larger than the bounds.
    """
    model, sample = scorer.model, Z[sample_evenly(Z.shape[0])]
    landmarks = model.original_landmarks[sample_evenly(model.landmarks.shape[0])]
    max_landmark, max_new = (float(model.kernel.evaluate_diagonal(rows).max()) for rows in (landmarks, sample))
    against = certificate.certify_map(scorer, landmarks, Z=sample, mean=mean)
    between = certificate.certify_map(scorer, sample, mean=mean)
    residuals = scorer("residual", sample)[:, 0]
    if np.isinf(bound):  # residuals of a clipped kernel are no bounds either
        return Verification(landmark_certificate, against, between, residuals, np.inf)
    # A certificate is relative to the largest value compared.
    max_compared = max(max_landmark, max_new)
    against.require_error_at_most(bound * np.sqrt(max_new * max_similarity) / max_compared if max_compared > 0 else 0.0)
    pair_bound = float(residuals.max()) / max_new if max_new > 0 else 0.0
    rounding = 1e-8 if model.heads["residual"].triangular else roots.EIGENVECTOR_ERROR_SHARE
    map_bound = bound * np.sqrt(max_similarity / max_new) if max_new > 0 else 0.0
    between.require_error_at_most(pair_bound + max(rounding, map_bound))
    return Verification(landmark_certificate, against, between, residuals, pair_bound)


def _sample_rows_and_landmarks(rows: TrainingData) -> tuple[Rows, Rows]:
    """Return a sample of the rows, as the model scores them and as the kernel compares them."""
    numbers = sample_evenly(rows.rows_as_landmarks.shape[0])
    return rows.take_rows(numbers), rows.rows_as_landmarks[numbers]


def _require_psd_residuals(scorer: Scorer, data: TrainingData, lowest: float, root: Root) -> None:
    rows, points = _sample_rows_and_landmarks(data)
    values = data.kernel.make_evaluator(points)(rows)
    features = scorer.apply_weights("features", scorer.kernel_values(rows))
    what = f"The Gram matrix of {data.kernel!r}"
    pivoted_cholesky.require_psd_residual(values, features, lowest, root, data.rows_as_landmarks.shape[0], what)
