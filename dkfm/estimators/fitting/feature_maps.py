"""What a feature map fits: its model, its error bounds, and what is measured of it."""

import warnings
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from scipy.linalg import solve_triangular

from dkfm.core.rows import Array, Rows
from dkfm.errors import DkfmWarning, KernelError, NotSupportedError
from dkfm.estimators.fitting.landmarks import ChosenLandmarks, MapOptions, factor_landmarks
from dkfm.estimators.fitting.training_data import PrecomputedGram, TrainingData, TrainingRows
from dkfm.numerics import links, pivoted_cholesky, roots, training_reductions
from dkfm.numerics.certificates import certificate
from dkfm.numerics.certificates.certificate import Certificate, Verification, sample_evenly
from dkfm.numerics.model import Head, Model
from dkfm.numerics.roots import Root, is_indefinite
from dkfm.numerics.scorer import Scorer, prepare_scorer
from dkfm.sources.base import Source
from dkfm.sources.memory import MemorySource

_ROUNDING = 1e-3
"""Share of a column's width that its middle may be off."""


@dataclass(frozen=True, eq=False)
class FittedMap:
    """What components and discriminants in the features of a map take from the fitted map.

    Parameters
    ----------
    model : Model
    eigenvalues : ndarray of shape (r,), optional
        Of the Gram matrix of the landmarks, descending; a map in the Cholesky basis has none.
    error_bounds : ndarray of shape (r + 1,)
    holds_training_rows : bool
        Whether the landmarks are all training rows, in their order.
    """

    model: Model
    eigenvalues: Array | None
    error_bounds: Array
    holds_training_rows: bool


def fit_map(
    given: TrainingData, weights: Array | None, chosen: ChosenLandmarks, settings: MapOptions
) -> tuple[Model, dict[str, object]]:
    """Return the model of some landmarks, and what is fitted beside it, by name.

    Parameters
    ----------
    given : Training
        All training rows.
    weights : ndarray of shape (N,), optional
        Of the training rows in the mean that the features are centred with; without them they are not.
    chosen : Chosen
    settings : Settings
    """
    landmarks, found, remaining = factor_landmarks(chosen, settings)
    diagonal, dtype = given.diagonal(), np.dtype(settings.dtype)
    largest, lowest = float(diagonal.max()), _lowest(found) if settings.basis == "cholesky" else 0.0
    whole = _is_whole(landmarks, given)
    # What is measured over all training rows is measured in float64.
    score = _of_root(given, landmarks, found)
    if remaining is None:
        remaining, lowest = training_reductions.largest_residuals(score, given.tiles(), diagonal)
    if settings.on_indefinite != "clip" and not whole:
        _require_psd(score, given, lowest, found)
    bounds, kept = roots.error_bounds(remaining, found.values, largest, dtype), len(found.values)
    if dtype == np.float32:
        kept = roots.rank_in_float32(found, _values(given, landmarks), landmarks.diagonal())
    if settings.on_indefinite == "clip":
        negative = is_indefinite(_lowest(found), float(found.values.max(initial=0.0)), len(found.weights))
        bounds = np.full(len(bounds), np.inf) if negative or lowest < -roots.UNEXPLAINED * largest else bounds
    if settings.tol is not None:
        kept = roots.rank_within(bounds[: kept + 1], settings.tol)
        _warn_of_tolerance(float(bounds[kept]), settings.tol)
    if kept < len(found.values):
        found = found.first(kept)
        landmarks = landmarks.subset(np.arange(len(found.weights))) if found.triangular else landmarks
        score = _of_root(given, landmarks, found)
    mean = None if weights is None else training_reductions.mean_kernel_values(score, given.tiles(), weights)
    with np.errstate(over="ignore"):  # what float32 does not hold is refused below
        model = _model(score.model, found, mean, settings.basis, dtype)
    del score
    fitted = {**_arrays(found, settings.basis), "error_bounds": bounds[: kept + 1], "max_similarity": largest}
    fitted |= {} if mean is None else {"mean": mean}
    if landmarks.numbers is not None and not (landmarks is given and landmarks.numbers[-1] == len(diagonal) - 1):
        fitted["landmark_indices"] = landmarks.numbers
    certificates = _certificates(prepare_scorer(model), given, landmarks, mean)
    if not np.isfinite(certificates["certificate"].error):
        raise KernelError(f"{settings.dtype} does not hold the values of {given.kernel!r} on these rows.")
    shrunk = 1.0 if mean is None else _shrunk(prepare_scorer(model), landmarks, largest)
    accepted = _accepted(settings, float(bounds[kept]), largest, landmarks)
    _warn_of_rounding(certificates["certificate"], dtype, shrunk, accepted)
    return model, {**fitted, **certificates}


def _certificates(
    scorer: Scorer, given: TrainingData, landmarks: TrainingData, mean: Array | None
) -> dict[str, Certificate]:
    found = certify_fit(scorer, landmarks, mean)
    of_all = found if _is_whole(landmarks, given) else certificate.certify_map(scorer, *_sample(given), mean=mean)
    return {"certificate": found, "training_certificate": of_all}


def _is_whole(landmarks: TrainingData, given: TrainingData) -> bool:
    """Whether all training rows are landmarks, in whatever order."""
    own = landmarks is given or landmarks.numbers is not None
    return own and landmarks.landmarks.shape[0] == given.landmarks.shape[0]


def is_clipped(error_bounds: Array) -> bool:
    """Whether a map with these bounds has lost the negative part of its kernel, so that nothing bounds its errors."""
    return bool(np.isinf(error_bounds).any())


def _lowest(found: Root) -> float:
    return float(found.dropped.min(initial=0.0))


def _of_root(given: TrainingData, landmarks: TrainingData, found: Root) -> Scorer:
    head = Head(found.weights, triangular=found.triangular)
    return prepare_scorer(Model(given.kernel, landmarks.landmarks, {"features": head}))


def _values(given: TrainingData, landmarks: TrainingData) -> Array:
    """Return the kernel values of some training rows with the landmarks."""
    return given.kernel.make_evaluator(landmarks.landmarks)(_sample(given)[0])


def _accepted(settings: MapOptions, bound: float, largest: float, landmarks: TrainingData) -> float:
    """Return the error that was asked for by `tol` or `rcond`, or that a clipped kernel leaves, which has its warning.

    The bound is of ``sqrt(largest k(z, z))``, and a certificate is relative to the largest value that it compares.
    """
    if settings.tol is None and settings.rcond is None and not np.isinf(bound):
        return 0.0
    compared = float(landmarks.diagonal()[sample_evenly(landmarks.landmarks.shape[0])].max())
    return bound * float(np.sqrt(largest / compared)) if compared > 0 else bound


def _shrunk(scorer: Scorer, landmarks: TrainingData, largest: float) -> float:
    """Return how many times as large as the largest centred square length the largest k(x, x) is; 1 where it is 0."""
    square = float(np.square(scorer("features", _sample(landmarks)[0]).astype(np.float64)).sum(axis=1).max())
    return max(1.0, largest / max(square, roots.EPS * largest)) if largest > 0 else 1.0


def _warn_of_rounding(measured: Certificate, dtype: np.dtype[np.floating], shrunk: float, accepted: float) -> None:
    """Warn where rounding is too large a part of the features, which may have become small as they were centred."""
    told, remedy = f"The certificate of this map is {measured}", "choose another kernel, or scale the columns of X"
    if shrunk > 1:
        told += f", {measured.error * shrunk:.1e} of the largest after the mean was taken away"
        remedy = "centre the columns of X, or choose another kernel"
    if dtype == np.float32:
        remedy = 'float32 does not hold these features: fit with dtype="float64"'
    certificate.warn_above(measured.error * shrunk, dtype, told, remedy, accepted)


def _warn_of_tolerance(bound: float, tol: float) -> None:
    if bound > tol:
        message = f"No rank of this map is within tol = {tol:.3g}: its error bound is {bound:.3g}."
        warnings.warn(message, DkfmWarning, stacklevel=4)


def truncate_map(
    model: Model, arrays: dict[str, Array], r: int, dtype: np.dtype[np.floating], basis: str
) -> tuple[Model, dict[str, object]]:
    """Return the model of rank r of one of a higher rank, and what is fitted beside it, from what was for the other.

    Raises
    ------
    NotSupportedError
        A precomputed kernel was clipped: its Gram matrix, which the certificate is measured against, is lost.
    """
    if model.kernel.is_precomputed and is_clipped(arrays["error_bounds"]):
        raise NotSupportedError(
            "A map of a clipped precomputed kernel cannot be truncated, for what was dropped of the Gram matrix is not "
            "kept to measure it against; fit again with rcond=."
        )
    head = model.head("residual")
    whole = Root(head.weights, arrays[values_name(basis)], arrays["dropped"], head.triangular)
    found = whole.first(r)
    kept = len(found.weights)
    fitted = {**arrays, **_arrays(found, basis), "error_bounds": arrays["error_bounds"][: r + 1]}
    fitted |= {name: arrays[name][:kept] for name in ("mean", "landmark_indices") if name in arrays}
    mean = cast("Array | None", fitted.get("mean"))
    points = model.points[:kept]
    short = _model(Model(model.kernel, points, {}), found, mean, basis, dtype)
    landmarks: TrainingData = TrainingRows(model.kernel, points, 0)
    if model.kernel.is_precomputed:
        landmarks = PrecomputedGram(model.kernel, _explained(model, whole), cast("Array", points)[:, 0].astype(np.intp))
    return short, {**fitted, "certificate": certify_fit(prepare_scorer(short), landmarks, mean)}


def _explained(model: Model, found: Root) -> Source:
    """Return the Gram matrix (N, N) of a precomputed kernel as its root has it, zero where no landmark is."""
    W = found.weights.astype(np.float64)
    # K = R R' with W = R'^(-1), or K = V L V' with W = V L^(-1/2).
    factor_landmarks = solve_triangular(W, np.eye(len(W))).T if found.triangular else W * found.values
    numbers = cast("Array", model.landmarks)[:, 0].astype(np.intp)
    K = np.zeros((model.columns, model.columns))
    K[np.ix_(numbers, numbers)] = factor_landmarks @ factor_landmarks.T
    return MemorySource(K, "The Gram matrix")


def _arrays(found: Root, basis: str) -> dict[str, object]:
    return {"dropped": found.dropped, values_name(basis): found.values}


def values_name(basis: str) -> str:
    """Return what the values of a basis are called."""
    return "pivots" if basis == "cholesky" else "eigenvalues"


def _model(like: Model, found: Root, mean: Array | None, basis: str, dtype: np.dtype[np.floating]) -> Model:
    """Return the model of a root in a precision, with the kernel and the landmarks of another."""
    return cast_model(Model(like.kernel, like.points, roots.map_heads(found, basis, mean)), dtype)


def cast_model(model: Model, dtype: np.dtype[np.floating]) -> Model:
    """Return a float64 model in another precision, moved to where its landmarks lose least."""
    kernel, points, heads = model.kernel, model.points, roots.cast_heads(model.heads, dtype)
    plain = Model(kernel, points.astype(dtype, copy=False), heads)
    if dtype == np.float64 or not kernel.translation_invariant or not isinstance(points, np.ndarray):
        return plain
    shift = _middle(points)
    moved = Model(kernel, (points - shift).astype(dtype), heads, shift)
    # Rows that came in float32 are exact where they are; rows far from 0 lose less where their mean is 0.
    return min(plain, moved, key=lambda model: float(np.abs(np.asarray(model.points) - points).max()))


def _middle(points: Array) -> Array:
    """Return the mean of points, in float64, but as float32 has it in columns that are wide beside that rounding."""
    mean: Array = points.mean(axis=0)
    with np.errstate(over="ignore"):
        rounded = mean.astype(np.float32).astype(np.float64)
    close = np.abs(rounded - mean) <= _ROUNDING * np.abs(points - mean).max(axis=0)
    return np.where(close, rounded, mean)


def certify_fit(scorer: Scorer, landmarks: TrainingData, mean: Array | None) -> Certificate:
    """Return the certificate of pairs of landmarks: of the features, and of those that residuals are made of."""
    rows, points = _sample(landmarks)
    model = scorer.model
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        found = certificate.certify_map(scorer, rows, points, tiles=landmarks.tiles(), mean=mean)
        residual = model.heads["residual"]
        if not np.array_equal(residual.weights, model.heads["features"].weights):
            others = Model(
                model.kernel, model.landmarks, {"features": replace(residual, link=links.IDENTITY)}, model.shift
            )
            of_others = certificate.certify_map(Scorer(others, scorer.block), rows, points, tiles=landmarks.tiles())
            found = found.worse(of_others)
    return found


def verify_points(
    scorer: Scorer, measured: Certificate, Z: Rows, mean: Array | None, bound: float, largest: float
) -> Verification:
    """Return the verification of a map on new points, once they are within its bounds.

    Parameters
    ----------
    measured : Certificate
        Of its landmarks.
    Z : ndarray or csr_array of shape (m, d)
    mean : ndarray of shape (N,), optional
        Of a centred map.
    bound : float
        Of the error of pairs with a training point, in units of ``sqrt(largest k(z, z))``. Where it is infinite, as
        that of a clipped kernel, the errors are measured and not judged.
    largest : float
        The largest k(x, x) of a training point.

    Raises
    ------
    CertificateError
    """
    model, some = scorer.model, Z[sample_evenly(Z.shape[0])]
    landmarks = model.points[sample_evenly(model.landmarks.shape[0])]
    own = float(model.kernel.evaluate_diagonal(landmarks).max())
    most = float(model.kernel.evaluate_diagonal(some).max())
    against = certificate.certify_map(scorer, landmarks, Z=some, mean=mean)
    between = certificate.certify_map(scorer, some, mean=mean)
    residuals = scorer("residual", some)[:, 0]
    if np.isinf(bound):  # nor do residuals bound anything
        return Verification(measured, against, between, residuals, np.inf)
    # A certificate is a share of the largest value that was compared.
    compared = max(own, most)
    against.require_below(bound * np.sqrt(most * largest) / compared if compared > 0 else 0.0)
    of_two = float(residuals.max()) / most if most > 0 else 0.0
    rounding = 1e-8 if model.heads["residual"].triangular else roots.UNEXPLAINED
    between.require_below(of_two + max(rounding, bound * np.sqrt(largest / most) if most > 0 else 0.0))
    return Verification(measured, against, between, residuals, of_two)


def _sample(rows: TrainingData) -> tuple[Rows, Rows]:
    """Return rows to measure, as they are scored and as the kernel compares them."""
    some = sample_evenly(rows.landmarks.shape[0])
    return rows.some(some), rows.landmarks[some]


def _require_psd(score: Scorer, given: TrainingData, lowest: float, found: Root) -> None:
    rows, points = _sample(given)
    values = given.kernel.make_evaluator(points)(rows)
    features = score.image("features", score.values(rows))
    what = f"The Gram matrix of {given.kernel!r}"
    pivoted_cholesky.require_psd_residual(values, features, lowest, found, given.landmarks.shape[0], what)
