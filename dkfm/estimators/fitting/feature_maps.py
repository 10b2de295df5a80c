"""Fit feature maps: their models, error bounds and certificates."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dkfm.core import cpus
from dkfm.core.chunking import require_count
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, KernelError, NotSupportedError, warn_caller
from dkfm.estimators.fitting import fit_certificates
from dkfm.estimators.fitting.landmarks import ChosenLandmarks, MapOptions, factor_landmarks, uses_all_rows
from dkfm.estimators.stored.feature_map import certify_map, sample_scorer_and_kernel_rows
from dkfm.estimators.stored.map_records import eigenvalues_or_pivots_name
from dkfm.execution.stage_log import log_stage
from dkfm.files.row_values import iter_blocks
from dkfm.gram.training_data import PrecomputedGram, TrainingData, TrainingRows
from dkfm.kernels.base import Kernel
from dkfm.numerics import pivoted_cholesky, roots, training_statistics
from dkfm.numerics.certificates import certificate, kernel_rounding
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.map_error_bounds import Residuals, bound_errors_by_rank, find_rank_within, rank_in_float32
from dkfm.numerics.model import Head, Model
from dkfm.numerics.roots import Root, is_indefinite, replace_zero_lengths, row_lengths
from dkfm.numerics.scorer import Scorer, prepare_scorer
from dkfm.sources.base import Source
from dkfm.sources.memory import MemorySource

_MEAN_TOLERANCE = 1e-3
"""Largest rounding error of the float32 mean of a column, relative to the largest distance from the mean."""

_HIDDEN_SHARE = 256 * roots.EPS
"""Largest mean share of k(x, x) that counts as lost to rounding; more is left out by choice of a tolerance or rank."""


@dataclass(frozen=True, eq=False)
class FittedMap:
    """The parts of a fitted map from which components and discriminants in its features are fitted."""

    model: Model
    """Model of the map."""
    eigenvalues: Array | None
    """Eigenvalues of the scaled Gram matrix of the landmarks, descending; None in the Cholesky basis. Shape (r,)."""
    scales: Array
    """Scales of the landmarks, as in `Root`. Shape (N,)."""
    dropped: Array
    """Eigenvalues that were dropped, or relative residuals of rows that are no pivots. Shape (n_dropped,)."""
    error_bounds: Array | None
    """Error bounds for 0, 1, .. r features; None if they are not known. Shape (r + 1,)."""
    holds_training_rows: bool
    """Whether the landmarks are all training rows, in the same order."""
    workspace: str | Path | None
    """Folder for files that a cluster's workers read."""
    progress: bool
    """Whether to show progress bars."""

    @property
    def root(self) -> Root:
        """Root of the landmarks, whose weights W are those of the features, in float64."""
        head = self.model.head("residual")
        require_loaded_weights(self.model, "A fit in the features of a map")
        W = head.weights.astype(np.float64, copy=False)
        values = np.ones(W.shape[1]) if self.eigenvalues is None else self.eigenvalues
        return Root(W, values, np.zeros(0), self.scales, head.triangular)

    @property
    def hidden_share(self) -> float:
        """Mean share of the squared lengths k(x, x) that the map lost to rounding.

        It is 0 if it is not above the rounding of a length, or if the map leaves out more by choice.
        """
        count = len(self.dropped) + self.model.head("residual").weights.shape[1]
        share = float(self.dropped.sum()) / max(count, 1)
        return share if roots.EPS < share <= _HIDDEN_SHARE else 0.0


def require_fitted_map(feature_map: object) -> None:
    """Raise an InvalidInputError if an object is no ExactFeatureMap, and a NotFittedError if it is not fitted."""
    if isinstance(feature_map, type) or not hasattr(feature_map, "_fitted_map"):
        raise InvalidInputError(
            f"feature_map must be an ExactFeatureMap, as dkfm.load reads it, and is {feature_map!r:.100}."
        )
    check_is_fitted(feature_map, "model_")


def require_loaded_weights(model: Model, what: str) -> None:
    """Raise a NotSupportedError if the weights of a map stay in a store, although `what` needs them in memory."""
    if model.n_stored_head_elements:
        raise NotSupportedError(
            f'{what} needs the weights in memory, and build="tiled" leaves them on disk: save the map, and load it.'
        )


def fit_map(
    data: TrainingData, weights: Array | None, chosen: ChosenLandmarks, options: MapOptions
) -> tuple[Model, dict[str, object]]:
    """Return the model of a feature map, and the fitted values by name.

    If only a sample of rows is certified, the fitted values have neither error bounds nor the largest k(x, x), because
    these hold for all rows.

    Parameters
    ----------
    data : TrainingData
        All training rows.
    weights : ndarray of shape (N,), optional
        Weights of the training rows in the mean of the features; without weights the features are not centred.
    chosen : ChosenLandmarks
        Landmarks of the map, and the rows to certify.
    options : MapOptions
        Parameters of the map.
    """
    landmarks, root, residuals = factor_landmarks(chosen, options)
    is_sample = chosen.certified_rows is not None
    visited = data if chosen.certified_rows is None else chosen.certified_rows
    diagonal, dtype, all_rows = visited.diagonal(), np.dtype(options.dtype), uses_all_rows(landmarks, data)
    lengths = row_lengths(diagonal if landmarks is data else landmarks.diagonal())
    # Residuals and means over training rows are computed in float64.
    scorer = _make_root_scorer(data, landmarks, root)
    if residuals is None:
        residuals = _measure_residuals(scorer, visited, diagonal, root, lengths)
    if options.on_indefinite != "clip" and not all_rows:
        _require_psd_residuals(scorer, visited, residuals.lowest, root, lengths, data.indexable_rows.shape[0])
    _warn_of_underflow(diagonal, len(root.values), data.kernel)
    known_diagonal = None if is_sample else diagonal
    bounds, rank = _bound_errors_and_rank(scorer, data, known_diagonal, root, residuals, lengths, options)
    if rank < len(root.values):
        root = root.truncate(rank)
        landmarks = landmarks.subset(np.arange(len(root.weights))) if root.triangular else landmarks
        scorer = _make_root_scorer(data, landmarks, root)
    mean = None if weights is None else training_statistics.mean_kernel_values(scorer, data.iter_row_tiles(), weights)
    model = _make_model(scorer.model, root, mean, options.basis, dtype)
    del scorer
    max_similarity = float(diagonal.max())
    fitted = _root_arrays(root, options.basis) | ({} if mean is None else {"mean": mean})
    fitted |= {} if bounds is None else {"error_bounds": bounds, "max_similarity": max_similarity}
    indices = landmarks.original_row_indices
    if indices is not None and not (landmarks is data and indices[-1] == len(diagonal) - 1):
        fitted["landmark_indices"] = indices
    scorer = prepare_scorer(model)
    of_residuals = fit_certificates.certify_residuals(residuals, rank, len(diagonal), is_sample)
    measured, on_training = _certify(scorer, landmarks, None if all_rows else visited, mean, of_residuals)
    bound = None if bounds is None else float(bounds[-1])
    accepts_bound = options.tol is not None or options.rcond is not None or bound == np.inf
    fit_certificates.warn_of_map_errors(
        measured, on_training, bound, dtype, options.basis, accepts_bound, not chosen.all_rows
    )
    if mean is not None:
        fit_certificates.warn_of_centring(scorer, measured, landmarks, max_similarity, dtype)
    return model, {**fitted, "certificate": measured, "training_certificate": on_training}


def _certify(
    scorer: Scorer, landmarks: TrainingData, others: TrainingData | None, mean: Array | None, of_residuals: Certificate
) -> tuple[Certificate, Certificate]:
    """Return the certificates of the landmarks and of the training rows; they are equal if all rows are landmarks.

    `others` are the training rows to certify if the landmarks are not all training rows.
    """
    measured = certify_map(scorer, landmarks, mean)
    if not np.isfinite(measured.error):
        raise KernelError(certificate.describe_overflow(scorer.model.dtype, scorer.model.kernel))
    if others is None:
        measured = measured.combine(of_residuals)
        return measured, measured
    return measured, fit_certificates.certify_sampled_row_pairs(scorer, others, mean).combine(of_residuals)


def _warn_of_underflow(diagonal: Array, rank: int, kernel: Kernel) -> None:
    """Warn if values k(x, x) of training rows have lost digits by underflow, which no error bound counts, or are 0."""
    smallest = float(np.finfo(np.float64).tiny)
    underflowed = sum(int(((block > 0) & (block < smallest)).sum()) for _, block in iter_blocks(diagonal))
    if underflowed:
        rows = f"{underflowed:,} of {len(diagonal):,} rows"
        finding = f"k(x, x) of {rows} is below {smallest:.0e} and has lost digits by underflow"
    elif not rank:
        finding = f"k(x, x) of {kernel!r} is 0 on these rows, so the map has no features"
    else:
        return
    warn_caller(f"{finding}; scale the rows or the kernel up.")


def _measure_residuals(scorer: Scorer, rows: TrainingData, diagonal: Array, root: Root, lengths: Array) -> Residuals:
    """Compute the residuals of training rows, whose k(x, x) are the `diagonal` (m,), and log how many they are.

    `lengths` (N,) are those of the landmarks.
    """
    model, (n, r) = scorer.model, root.weights.shape
    seconds = len(diagonal) * model.predict_row_seconds(rows.float64s_per_row, r) / cpus.COUNT
    text = f"residuals of {len(diagonal):,} training rows from {n:,} landmarks in this process"
    log_stage("certificate", text, seconds=seconds, rows=len(diagonal), landmarks=n)
    return training_statistics.measure_largest_residuals(scorer, rows.iter_row_tiles(), diagonal, root, lengths)


def _bound_errors_and_rank(
    scorer: Scorer,
    data: TrainingData,
    diagonal: Array | None,
    root: Root,
    residuals: Residuals,
    lengths: Array,
    options: MapOptions,
) -> tuple[Array | None, int]:
    """Return the error bounds after 0, 1, .. r features, and the rank r, limited by the dtype and by `tol`.

    The bounds are None if `diagonal` is None, because the residuals are then those of a sample of rows.
    """
    dtype, rank = np.dtype(options.dtype), len(root.values)
    if diagonal is None and dtype != np.float32:
        return None, rank
    own_diagonal = data.diagonal() if diagonal is None and not data.kernel.is_precomputed else diagonal
    rows, points = sample_scorer_and_kernel_rows(data, own_diagonal)
    if dtype == np.float32:
        own: Array = np.ones(rows.shape[0])
        if not data.kernel.is_precomputed:
            own = row_lengths(data.kernel.evaluate_diagonal(points))
        rank = rank_in_float32(root, scorer.kernel_values(rows), own, lengths)
    if diagonal is None:
        return None, rank
    gram_rounding = map_rounding = kernel_rounding.measure_in_float64(data.kernel, points)
    if dtype == np.float32:
        cast = prepare_scorer(cast_model(replace(scorer.model, heads={}), dtype))
        map_rounding = kernel_rounding.measure_in_float32(cast, scorer, rows, lengths)
    bounds = bound_errors_by_rank(residuals, root, lengths, gram_rounding, map_rounding)
    if options.on_indefinite == "clip":
        lowest, highest = float(root.dropped_values.min(initial=0.0)), float(root.values.max(initial=0.0))
        negative = is_indefinite(lowest, highest, len(root.weights))
        has_values_of_zero_rows = not lengths.any() and scorer.kernel_values(rows).any()
        if negative or has_values_of_zero_rows or residuals.lowest < -roots.EIGENVECTOR_ERROR_SHARE:
            bounds = np.full(len(bounds), np.inf)
    bounds = bounds[: rank + 1]
    if options.tol is not None:
        rank, least = find_rank_within(bounds, options.tol), float(bounds.min())
        if least > options.tol:
            warn_caller(f"No rank of this map is within tol = {options.tol:.3g}: the least error bound is {least:.3g}.")
    return bounds[: rank + 1], rank


def was_clipped(error_bounds: Array | None) -> bool:
    """Return whether the kernel was clipped: its negative part was dropped, so the error bounds are infinite.

    A map without bounds was not clipped, because `certify="sample"` does not support it.
    """
    return error_bounds is not None and bool(np.isinf(error_bounds).any())


def _make_root_scorer(data: TrainingData, landmarks: TrainingData, root: Root) -> Scorer:
    head = Head(root.weights, triangular=root.triangular)
    return prepare_scorer(Model(data.kernel, landmarks.indexable_rows, {"features": head}))


def choose_truncated_rank(rank: int | None, tol: float | None, error_bounds: Array | None, n_features: int) -> int:
    """Return the rank of a truncated map from a rank or a largest error bound `tol`, one of which is given."""
    if (rank is None) == (tol is None):
        raise InvalidInputError("truncate takes a rank or a tol, one of them.")
    roots.require_parameters("spectral", None, tol)
    if tol is not None and error_bounds is None:
        raise NotSupportedError('truncate(tol=) needs error bounds: fit with certify="all", or give a rank.')
    r = require_count(rank, "rank") if tol is None else find_rank_within(cast("Array", error_bounds), tol)
    if r > n_features:
        raise InvalidInputError(f"The rank of this map is {n_features}, and {r} is more.")
    return r


def truncate_map_model(model: Model, arrays: dict[str, Array], r: int, basis: str) -> tuple[Model, dict[str, object]]:
    """Truncate a map to rank r; return its model and its fitted values, from the `arrays` of the larger map.

    Raises
    ------
    NotSupportedError
        A precomputed kernel was clipped: the Gram matrix, which the certificate needs, was not kept.
    """
    if model.kernel.is_precomputed and was_clipped(arrays.get("error_bounds")):
        raise NotSupportedError(
            "A map of a clipped precomputed kernel cannot be truncated: the certificate needs the whole Gram matrix, "
            "and the map does not keep the part that was dropped; fit again with rcond=."
        )
    head = model.head("residual")
    require_loaded_weights(model, "A map of lower rank")
    full = Root(
        head.weights, arrays[eigenvalues_or_pivots_name(basis)], arrays["dropped"], arrays["scales"], head.triangular
    )
    features = model.head("features")
    if basis == "symmetric" and features.sqrt_eigenvalues is None and (full.scales != 1.0).any():
        full = replace(full, rotation=full.landmark_features().T @ features.weights)
    root = full.truncate(r)
    count = len(root.weights)
    fitted = {**arrays, **_root_arrays(root, basis)}
    lengths = {"error_bounds": r + 1} | dict.fromkeys(("mean", "landmark_indices", "scales"), count)
    fitted |= {name: arrays[name][:length] for name, length in lengths.items() if name in arrays}
    mean = cast("Array | None", fitted.get("mean"))
    points = model.original_landmarks[:count]
    truncated = _make_model(Model(model.kernel, points, {}), root, mean, basis, model.dtype)
    landmarks: TrainingData = TrainingRows(model.kernel, points, 0)
    if model.kernel.is_precomputed:
        indices = cast("Array", points)[:, 0].astype(np.intp)
        landmarks = PrecomputedGram(model.kernel, _reconstruct_gram(model, full), indices)
    return truncated, {**fitted, "certificate": certify_map(prepare_scorer(truncated), landmarks, mean)}


def _reconstruct_gram(model: Model, root: Root) -> Source:
    """Return the Gram matrix (N, N) of a precomputed kernel, computed from its root; 0 except between landmarks."""
    factor = replace(root, weights=root.weights.astype(np.float64)).landmark_features()
    indices = cast("Array", model.landmarks)[:, 0].astype(np.intp)
    K = np.zeros((model.n_features_in, model.n_features_in))
    K[np.ix_(indices, indices)] = factor @ factor.T
    return MemorySource(K, "The Gram matrix")


def _root_arrays(root: Root, basis: str) -> dict[str, object]:
    return {"dropped": root.dropped_values, eigenvalues_or_pivots_name(basis): root.values, "scales": root.scales}


def _make_model(template: Model, root: Root, mean: Array | None, basis: str, dtype: np.dtype[np.floating]) -> Model:
    """Return the model of a root in the precision `dtype`, with the kernel and the landmarks of another model."""
    heads = roots.make_map_heads(root, basis, mean)
    return cast_model(Model(template.kernel, template.original_landmarks, heads), dtype)


@np.errstate(over="ignore")
def cast_model(model: Model, dtype: np.dtype[np.floating]) -> Model:
    """Cast a float64 model to another precision; shift its landmarks if the kernel permits and rounding gets smaller.

    Values that overflow become infinite, and the certificate is then not finite.
    """
    kernel, points, heads = model.kernel, model.original_landmarks, roots.cast_heads(model.heads, dtype)
    unshifted = Model(kernel, points.astype(dtype, copy=False), heads)
    if dtype == np.float64 or not kernel.translation_invariant or not isinstance(points, np.ndarray):
        return unshifted
    shift = _choose_landmark_translation(points)
    shifted = Model(kernel, (points - shift).astype(dtype), heads, shift)
    # Rows passed in float32 are exact without a shift; rows far from 0 round less if their mean is 0.
    return min(unshifted, shifted, key=lambda model: float(np.abs(np.asarray(model.original_landmarks) - points).max()))


def _choose_landmark_translation(points: Array) -> Array:
    """Return the mean (d,) in float64, rounded to float32 in columns whose width is large beside that rounding."""
    mean: Array = points.mean(axis=0)
    with np.errstate(over="ignore"):
        rounded = mean.astype(np.float32).astype(np.float64)
    accurate = np.abs(rounded - mean) <= _MEAN_TOLERANCE * np.abs(points - mean).max(axis=0)
    return np.where(accurate, rounded, mean)


def _require_psd_residuals(
    scorer: Scorer, data: TrainingData, lowest: float, root: Root, lengths: Array, n_rows: int
) -> None:
    """Raise a NotPSDError if the residuals of visited rows show an indefinite kernel; `n_rows` counts all rows."""
    rows, points = sample_scorer_and_kernel_rows(data)
    values = data.kernel.make_evaluator(points)(rows)
    features = scorer.apply_weights("features", scorer.kernel_values(rows))
    what = f"The Gram matrix of {data.kernel!r}"
    own = replace_zero_lengths(row_lengths(values.diagonal()))
    if not values.diagonal().any():  # with k(x, x) = 0 for all rows, every other value must be 0
        own *= float(np.sqrt(np.abs(values).max())) or 1.0
    divisors = own if root.is_scaled(lengths) else np.full(len(own), own.max())
    values = values / divisors[:, np.newaxis] / divisors
    features = features / divisors[:, np.newaxis]
    pivoted_cholesky.require_psd_residual(values, features, lowest, root, n_rows, what)
