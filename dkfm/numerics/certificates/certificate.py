"""Certify models: compare what a model returns with the kernel values or eigenvalues that define it.

Both sides are computed with the model itself, so that damaged weights, landmarks or offsets show.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, Rows
from dkfm.errors import CertificateError, DkfmWarning, InvalidInputError, UnsupportedStoreError
from dkfm.kernels.base import evaluate_block
from dkfm.numerics import training_statistics
from dkfm.numerics.model import Head
from dkfm.numerics.roots import EPS
from dkfm.numerics.scorer import Scorer

MAX_SAMPLED_ROWS = 512

_LIMITS = {"float64": 1e-6, "float32": 1e-2}
"""Largest error, relative to the largest value, without a warning at the fit, by the dtype of the model."""

_DROPPED_SHARE = 4 * EPS
"""Share of the squared length of the mean below which a map drops eigenvalues, and their variance with them."""


@dataclass(frozen=True)
class Certificate:
    """Measured errors of a model; both are 0 in exact arithmetic.

    Attributes
    ----------
    error : float
        Largest ``|err|`` as a share of the largest ``|k|``: not an absolute error.
    relative_error : float
        Largest ``|err| / sqrt(k(x, x) k(z, z))``: pairs of small self-similarity count as much as large ones.
    pairs : int
        Number of pairs that were compared.
    """

    error: float
    relative_error: float
    pairs: int

    @classmethod
    def from_dict(cls, stored: object) -> "Certificate":
        """Return the certificate in a stored dictionary; raise an error if it is invalid."""
        if not isinstance(stored, dict) or set(stored) != {"error", "relative_error", "pairs"}:
            raise UnsupportedStoreError("The certificate of this model is not what dkfm writes.")
        error, relative, pairs = stored["error"], stored["relative_error"], stored["pairs"]
        if not isinstance(error, float) or not isinstance(relative, float) or type(pairs) is not int or isnan(error):
            raise UnsupportedStoreError("The certificate of this model is not what dkfm writes.")
        return cls(error, relative, pairs)

    def combine(self, other: "Certificate") -> "Certificate":
        """Return the larger errors of two certificates, with the pairs of both; NaN counts as the largest."""
        error, relative = np.maximum([self.error, self.relative_error], [other.error, other.relative_error])
        return Certificate(float(error), float(relative), self.pairs + other.pairs)

    def require_not_worse_than(self, fitted: "Certificate") -> None:
        """Raise a CertificateError if this new measurement exceeds that of the fit by more than machines differ."""
        same = self.error <= 10 * fitted.error + 1e-14 and self.relative_error <= 10 * fitted.relative_error + 1e-14
        if not same:  # a NaN is not
            raise CertificateError(f"The model measures {self}, and measured {fitted} when it was fitted.")

    def require_error_at_most(self, bound: float) -> None:
        """Raise a CertificateError if `error` exceeds the bound that the numerical rank explains."""
        if not self.error <= bound:
            raise CertificateError(f"The model measures {self} on these points, and its rank explains {bound:.1e}.")

    def __str__(self) -> str:
        relative = f"{self.relative_error:.1e} of each pair's own scale"
        return f"{self.error:.1e} of the largest, {relative}, {self.pairs:,} pairs"


@dataclass(frozen=True, repr=False)
class Verification:
    """Errors of a model that are measured again after the fit.

    Attributes
    ----------
    certificate : Certificate
        Errors for the rows that every model keeps: the landmarks of a map, or the training rows of components.
    against : Certificate, optional
        Errors of pairs of a landmark and a given point.
    between : Certificate, optional
        Errors of pairs of two given points; both may be new.
    residuals : ndarray of shape (m,), optional
        ``k(z, z) - |phi(z)|^2`` of at most 512 of the given points, clipped at 0.
    bound : float, optional
        Bound of `between.error`: the largest residual over the largest k(z, z); infinite if the kernel was clipped.
    """

    certificate: Certificate
    against: Certificate | None = None
    between: Certificate | None = None
    residuals: Array | None = None
    bound: float | None = None

    def __str__(self) -> str:
        if self.residuals is None:
            return f"certificate {self.certificate}"
        median, largest = float(np.median(self.residuals)), float(self.residuals.max())
        return (
            f"certificate {self.certificate}\nwith the landmarks: {self.against}\nwith each other: {self.between}, and "
            f"at most {self.bound:.1e} by their residuals\nresiduals: {median:.1e} in the middle, {largest:.1e} at most"
        )

    __repr__ = __str__


def warn_if_error_is_large(
    error: float, dtype: np.dtype[np.floating], finding: str, remedy: str, accepted_error: float = 0.0
) -> None:
    """Warn if the error of a fitted model exceeds 1e-6 of the largest value, or 1e-2 in float32.

    Parameters
    ----------
    error : float
        `Certificate.error`; `relative_error` is large for small components and small k(x, x) even in correct models.
    dtype : dtype
        Dtype of the model.
    finding, remedy : str
        Parts of the warning: the finding with the number, and the remedy.
    accepted_error : float
        Larger error that the parameters of the fit accept.

    Warns
    -----
    DkfmWarning
        The error exceeds the limit.
    """
    limit = max(_LIMITS[dtype.name], accepted_error)
    if not error <= limit:  # a NaN is not
        warnings.warn(f"{finding}, and at most {limit:.0e} is expected; {remedy}.", DkfmWarning, stacklevel=4)


def certify_map(
    scorer: Scorer,
    X: Rows,
    kernel_rows: Rows | None = None,
    Z: Rows | None = None,
    tiles: Iterable[Rows] = (),
    mean: Array | None = None,
) -> Certificate:
    """Compare ``<phi(x), phi(z)>`` with ``k(x, z)``.

    Parameters
    ----------
    scorer : Scorer
        A prepared model with a head "features".
    X : ndarray or csr_array of shape (s, d)
        Rows x.
    kernel_rows : ndarray or csr_array of shape (s, d), optional
        The same rows as the kernel compares them: for a precomputed kernel the numbers of their columns. By default X.
    Z : ndarray or csr_array of shape (m, d), optional
        Points z, of which at most 512 are used, evenly spread; by default X.
    tiles : iterable of ndarray or csr_array, optional
        Tiles of all landmarks, if X are some of them. The rows are then also paired with one fixed combination of all
        landmarks with random signs, so that the certificate depends on all weights.
    mean : ndarray of shape (N,), optional
        Mean that the features are centred with, as in `roots.make_map_heads`; its image is added back to the features.

    Returns
    -------
    Certificate
        Errors of features in the model's dtype, whose products are computed in float64.
    """
    return compare_blocks(*_compute_both_blocks(scorer, X, X if kernel_rows is None else kernel_rows, Z, tiles, mean))


def compute_relative_map_errors(score: Scorer, X: Rows, Z: Rows | None = None, mean: Array | None = None) -> Array:
    """Return ``|<phi(x), phi(z)> - k(x, z)| / sqrt(k(x, x) k(z, z))`` for all pairs, (s, m), of X and sampled Z."""
    found, expected, *diagonals = _compute_both_blocks(score, X, X, Z, (), mean)
    return _scale_errors(np.abs(found - expected), *diagonals)


def _compute_both_blocks(
    score: Scorer, X: Rows, points: Rows, Z: Rows | None, tiles: Iterable[Rows], mean: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Return the products of features, the kernel values, and the k(x, x) and k(z, z) of both sides."""
    model, d = score.model, score.model.n_features_in
    Z = X if Z is None else Z[sample_evenly(Z.shape[0])]
    if Z.shape[1] != d:
        raise InvalidInputError(f"The points have {Z.shape[1]} columns and the model was fitted with {d}.")
    centre = 0.0 if mean is None else score.apply_weights("features", mean[np.newaxis]).astype(np.float64)
    expected = evaluate_block(model.kernel, Z, points).T
    left = score("features", X) + centre
    right = left if Z is X else score("features", Z) + centre
    if model.kernel.is_precomputed:  # k(z, z) is known only for training rows
        diagonals = expected.diagonal(), expected.diagonal()
    else:
        diagonals = model.kernel.evaluate_diagonal(X), model.kernel.evaluate_diagonal(Z)
    combined = training_statistics.kernel_values_of_random_combination(score, tiles, float(diagonals[0].max()))
    if len(combined):
        sampled = sample_evenly(len(combined))
        expected = np.column_stack([expected, combined[sampled]])
        right = np.concatenate([right, score.apply_weights("features", combined[np.newaxis])])
        diagonals = diagonals[0], np.append(diagonals[1], diagonals[0].max())
    return left.astype(np.float64) @ right.astype(np.float64).T, expected, *diagonals


def certify_components(
    score: Scorer, eigenvalues: Array, tiles: Iterable[Rows], sample_weight: Array | None = None
) -> Certificate:
    """Compare the weighted Gram matrix of the training scores, ``S'DS``, with ``diag(mu)``, and their means with 0.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "scores", which has an offset if the components are centred.
    eigenvalues : ndarray of shape (q,)
        mu. The pairs are those of at most 512 components, evenly spread, over all training rows.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows, as the model scores them.
    sample_weight : ndarray of shape (N,), optional
        Diagonal of D; by default 1.

    Returns
    -------
    Certificate
        Errors, including those that centring can hide, see `_certify_centring_rounding`; 0 if all rows are equal.
    """
    if _is_one_point(score.model.landmarks):
        return Certificate(0.0, 0.0, 0)
    weights = np.ones(score.model.landmarks.shape[0]) if sample_weight is None else sample_weight
    hidden = _certify_centring_rounding(score, eigenvalues, float(weights.sum()))
    if not len(eigenvalues):
        return hidden
    selected, head = sample_evenly(len(eigenvalues)), score.model.head("scores")
    sampled, mu = _make_component_scorer(score, selected), eigenvalues[selected]
    constant = 0.0 if head.offset is None else np.sqrt(eigenvalues[0] / weights.sum())
    # A further constant component makes the means part of the products.
    mu = np.append(mu, 0.0 if head.offset is None else eigenvalues[0])
    products, start = np.zeros((len(mu), len(mu))), 0
    for tile in tiles:
        S = sampled("scores", tile).astype(np.float64)
        S = np.pad(S, ((0, 0), (0, 1)), constant_values=constant)
        products += (weights[start : start + len(S)] * S.T) @ S
        start += len(S)
    return compare_blocks(products, np.diag(mu), mu, mu).combine(hidden)


def certify_principal_axes(
    score: Scorer, eigenvalues: Array, tiles: Iterable[Rows], total_weight: float
) -> Certificate:
    """Compare ``B'KB`` with I and ``B'Km`` with the offsets; B and m are landmark weights of axes and mean.

    Parameters
    ----------
    score, eigenvalues
        As in `certify_components`.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    total_weight : float
        Sum of the training rows' weights. The unit of offset errors is a score's size, ``sqrt(mu / total_weight)``.

    Returns
    -------
    Certificate
        Errors, including those that centring can hide, see `_certify_centring_rounding`.
    """
    hidden = _certify_centring_rounding(score, eigenvalues, total_weight)
    if not len(eigenvalues):
        return hidden
    selected, head = sample_evenly(len(eigenvalues)), score.model.head("scores")
    sampled, mu = _make_component_scorer(score, selected), eigenvalues[selected]
    W = sampled.model.head("scores").weights.astype(np.float64)
    offset = np.zeros(len(selected)) if head.offset is None else head.offset[selected].astype(np.float64)
    mean = np.zeros((len(W), 1)) if head.offset is None else head.weights[:, -1:].astype(np.float64) / 2
    left, products, start = np.hstack([W, mean]), np.zeros((len(selected) + 1, len(selected))), 0
    for tile in tiles:
        S = sampled("scores", tile).astype(np.float64) + offset
        products += left[start : start + len(S)].T @ S
        start += len(S)
    expected, sizes = np.vstack([np.diag((mu > 0).astype(np.float64)), offset]), np.sqrt(mu)
    error = (products - expected) * np.outer(np.append(sizes, 0.0), sizes)
    error[-1] = np.where(mu > 0, (products - expected)[-1] * np.sqrt(mu[0] * total_weight), 0.0)
    return compare_blocks(error, np.zeros_like(error), np.append(mu, mu[0]), mu).combine(hidden)


def _certify_centring_rounding(score: Scorer, eigenvalues: Array, total_weight: float) -> Certificate:
    """Compare the rounding error of the mean, which centring adds to every axis, with the largest eigenvalue.

    This error is ``4 eps`` of the mean's squared length, which a map drops. If only it is left, the certificate is 1.
    """
    head = score.model.heads.get("reconstruction_error")
    if head is None or head.offset is None:
        return Certificate(0.0, 0.0, 0)
    rounding = _DROPPED_SHARE * total_weight * abs(float(head.offset[-1]))
    largest = max(rounding, float(eigenvalues.max(initial=0.0)))
    share = rounding / largest if largest > 0 else 0.0
    return Certificate(share, share, 0)


def _is_one_point(rows: Rows) -> bool:
    """Return whether all rows are equal, so that nothing varies and nothing is lost."""
    if isinstance(rows, np.ndarray):
        return bool((rows == rows[:1]).all())
    n, stored = rows.shape[0], np.diff(rows.indptr)
    if (stored != stored[0]).any():
        return False
    return all(bool((part.reshape(n, -1) == part[: stored[0]]).all()) for part in (rows.indices, rows.data))


def _make_component_scorer(score: Scorer, component_indices: npt.NDArray[np.intp]) -> Scorer:
    """Return a scorer of some of the components."""
    head = score.model.head("scores")
    offset = None if head.offset is None else head.offset[component_indices]
    heads = {"scores": Head(np.ascontiguousarray(head.weights[:, component_indices]), offset)}
    return Scorer(replace(score.model, heads=heads), score.evaluator)


def sample_evenly(n: int) -> npt.NDArray[np.intp]:
    """Return the numbers of at most 512 of n rows, evenly spread."""
    return np.linspace(0, n - 1, min(n, MAX_SAMPLED_ROWS)).astype(np.intp)


def compare_blocks(found: Array, expected: Array, left_diagonal: Array, right_diagonal: Array) -> Certificate:
    """Return the certificate of a block (s, m), with the k(x, x) of its rows, (s,), and of its columns, (m,)."""
    error = np.abs(found - expected)
    largest = max(float(np.abs(values).max()) for values in (expected, left_diagonal, right_diagonal))
    relative = float(_scale_errors(error, left_diagonal, right_diagonal).max())
    return Certificate(_ratio(float(error.max()), largest), relative, found.size)


def _scale_errors(error: Array, left_diagonal: Array, right_diagonal: Array) -> Array:
    scale = np.sqrt(np.abs(np.outer(left_diagonal, right_diagonal)))
    # 0 / 0 is an exact zero; anything else over 0 is an infinite error.
    return np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)


def _ratio(error: float, scale: float) -> float:
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))
