"""Measured exactness: what a model returns, held against what it promises.

Both sides go through the model itself, so damaged weights, landmarks or offsets show.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, Rows
from dkfm.errors import CertificateError, DkfmWarning, InvalidInputError, UnsupportedStoreError
from dkfm.kernels.base import checked_block
from dkfm.numerics import training_reductions
from dkfm.numerics.model import Head
from dkfm.numerics.roots import EPS
from dkfm.numerics.scorer import Scorer

SAMPLE = 512

_LIMITS = {"float64": 1e-6, "float32": 1e-2}
"""What an error relative to the largest value may be at fit without a warning, by the precision of the model."""

_OF_MAP = 4 * EPS
"""Of the squared length of the mean: below it a map drops eigenvalues, and so the variance that they have."""


@dataclass(frozen=True)
class Certificate:
    """Two numbers that are 0 for exact arithmetic.

    Attributes
    ----------
    error : float
        The largest ``|err| / max |k|``.
    relative_error : float
        The largest ``|err| / sqrt(k(x, x) k(z, z))``: pairs of small self-similarity count as much as large ones.
    pairs : int
        How many pairs were compared.
    """

    error: float
    relative_error: float
    pairs: int

    @classmethod
    def of(cls, stored: object) -> "Certificate":
        """Return the certificate of a stored dictionary."""
        if not isinstance(stored, dict) or set(stored) != {"error", "relative_error", "pairs"}:
            raise UnsupportedStoreError("The certificate of this model is not what dkfm writes.")
        error, relative, pairs = stored["error"], stored["relative_error"], stored["pairs"]
        if not isinstance(error, float) or not isinstance(relative, float) or type(pairs) is not int or isnan(error):
            raise UnsupportedStoreError("The certificate of this model is not what dkfm writes.")
        return cls(error, relative, pairs)

    def worse(self, other: "Certificate") -> "Certificate":
        """Return the larger numbers of two, over the pairs of both; what is no number is worst."""
        error, relative = np.maximum([self.error, self.relative_error], [other.error, other.relative_error])
        return Certificate(float(error), float(relative), self.pairs + other.pairs)

    def require(self, fitted: "Certificate") -> None:
        """Raise a CertificateError where this, measured anew, is worse than rounding differs between machines."""
        same = self.error <= 10 * fitted.error + 1e-14 and self.relative_error <= 10 * fitted.relative_error + 1e-14
        if not same:  # a NaN is not
            raise CertificateError(f"The model measures {self}, and measured {fitted} when it was fitted.")

    def require_below(self, bound: float) -> None:
        """Raise a CertificateError where the first number is above what the numerical rank explains."""
        if not self.error <= bound:
            raise CertificateError(f"The model measures {self} on these points, and its rank explains {bound:.1e}.")

    def __str__(self) -> str:
        return (
            f"{self.error:.1e} of the largest, {self.relative_error:.1e} of each pair's own scale, {self.pairs:,} pairs"
        )


@dataclass(frozen=True, repr=False)
class Verification:
    """What a model measures anew.

    Attributes
    ----------
    certificate : Certificate
        Of what every model carries with it: a map's landmarks, or the training rows of components.
    against : Certificate, optional
        Of the landmarks paired with the points that were given.
    between : Certificate, optional
        Of these points paired with each other, which both may be new.
    residuals : ndarray of shape (m,), optional
        ``k(z, z) - |phi(z)|^2`` of the points, at most 512 of them, clipped at 0.
    bound : float, optional
        Of the error between two of the points: the largest residual as a share of the largest k(z, z). Infinite where
        the kernel was clipped.
    """

    certificate: Certificate
    against: Certificate | None = None
    between: Certificate | None = None
    residuals: Array | None = None
    bound: float | None = None

    def __str__(self) -> str:
        if self.residuals is None:
            return f"certificate {self.certificate}"
        median, most = float(np.median(self.residuals)), float(self.residuals.max())
        return (
            f"certificate {self.certificate}\nwith the landmarks: {self.against}\nwith each other: {self.between}, and "
            f"at most {self.bound:.1e} by their residuals\nresiduals: {median:.1e} in the middle, {most:.1e} at most"
        )

    __repr__ = __str__


def warn_above(error: float, dtype: np.dtype[np.floating], told: str, remedy: str, accepted: float = 0.0) -> None:
    """Warn where a fitted model errs by more than 1e-6 of the largest value, or 1e-2 in float32.

    Parameters
    ----------
    error : float
        Relative to the largest value: `Certificate.error`. Errors relative to each pair's own scale are not judged:
        those of the smallest components and of rows of small k(x, x) are large in models that are right.
    dtype : dtype
        Of the model.
    told, remedy : str
        The sentence up to its remedy, with the number; and the remedy.
    accepted : float
        A larger error that the parameters of the fit accept.

    Warns
    -----
    DkfmWarning
    """
    limit = max(_LIMITS[dtype.name], accepted)
    if not error <= limit:  # a NaN is not
        warnings.warn(f"{told}, and at most {limit:.0e} is expected; {remedy}.", DkfmWarning, stacklevel=4)


def certify_map(
    score: Scorer,
    X: Rows,
    points: Rows | None = None,
    Z: Rows | None = None,
    tiles: Iterable[Rows] = (),
    mean: Array | None = None,
) -> Certificate:
    """Compare ``<phi(x), phi(z)>`` with ``k(x, z)``.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "features".
    X : ndarray or csr_array of shape (s, d)
        Rows whose features are taken.
    points : ndarray or csr_array of shape (s, d), optional
        The same rows as a kernel compares them: of a precomputed kernel the numbers of their columns. By default X.
    Z : ndarray or csr_array of shape (m, d), optional
        Points to pair with them; by default X again. At most 512 are taken, evenly spread.
    tiles : iterable of ndarray or csr_array, optional
        All landmarks, in tiles, where X are some of them. The rows are then also paired with one fixed combination of
        all landmarks, with random signs: so every weight counts, and not those of the rows X alone.
    mean : ndarray of shape (N,), optional
        What the features are centred with, as `root.heads` takes it; what it maps to is added to them again.

    Returns
    -------
    Certificate
        Of features in the model's precision, multiplied in float64.
    """
    return compare_blocks(*_sides(score, X, X if points is None else points, Z, tiles, mean))


def relative_errors(score: Scorer, X: Rows, Z: Rows | None = None, mean: Array | None = None) -> Array:
    """Return the errors that `certify_map` takes the largest of, ``|err| / sqrt(k(x, x) k(z, z))``, of all pairs.

    Returns
    -------
    ndarray of shape (s, m)
    """
    found, expected, left, right = _sides(score, X, X, Z, (), mean)
    return _relative(np.abs(found - expected), left, right)


def _sides(
    score: Scorer, X: Rows, points: Rows, Z: Rows | None, tiles: Iterable[Rows], mean: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Return the products of features, the values of the kernel, and the self-similarities of both sides."""
    model = score.model
    Z = X if Z is None else Z[sample_evenly(Z.shape[0])]
    if Z.shape[1] != model.columns:
        raise InvalidInputError(f"The points have {Z.shape[1]} columns and the model was fitted with {model.columns}.")
    centre = 0.0 if mean is None else score.image("features", mean[np.newaxis]).astype(np.float64)
    expected = checked_block(model.kernel, Z, points).T
    left = score("features", X) + centre
    right = left if Z is X else score("features", Z) + centre
    if model.kernel.is_precomputed:  # only training rows have a k(z, z) that is known
        sizes = expected.diagonal(), expected.diagonal()
    else:
        sizes = model.kernel.evaluate_diagonal(X), model.kernel.evaluate_diagonal(Z)
    combined = training_reductions.fixed_combination(score, tiles, float(sizes[0].max()))
    if len(combined):
        some = sample_evenly(len(combined))
        expected = np.column_stack([expected, combined[some]])
        right = np.concatenate([right, score.image("features", combined[np.newaxis])])
        sizes = sizes[0], np.append(sizes[1], sizes[0].max())
    return left.astype(np.float64) @ right.astype(np.float64).T, expected, *sizes


def certify_components(
    score: Scorer, eigenvalues: Array, tiles: Iterable[Rows], sample_weight: Array | None = None
) -> Certificate:
    """Compare the weighted Gram matrix of the training scores, ``S'DS``, with ``diag(mu)``, and their means with 0.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "scores", which has an offset where the components are centred.
    eigenvalues : ndarray of shape (q,)
        mu. The pairs are pairs of components, at most 512 of them, evenly spread, over all training rows.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows, as the model scores them.
    sample_weight : ndarray of shape (N,), optional
        The diagonal of D.

    Returns
    -------
    Certificate
        Also of what the mean that was taken away can hide: see `_cancelled`. It is 0 where all rows are equal.
    """
    if _is_one_point(score.model.landmarks):
        return Certificate(0.0, 0.0, 0)
    weights = np.ones(score.model.landmarks.shape[0]) if sample_weight is None else sample_weight
    hidden = _cancelled(score, eigenvalues, float(weights.sum()))
    if not len(eigenvalues):
        return hidden
    some, head = sample_evenly(len(eigenvalues)), score.model.head("scores")
    sampled, mu = _some_scores(score, some), eigenvalues[some]
    constant = 0.0 if head.offset is None else np.sqrt(eigenvalues[0] / weights.sum())
    # One more component that does not vary: the means show as plainly as the products.
    mu = np.append(mu, 0.0 if head.offset is None else eigenvalues[0])
    products, start = np.zeros((len(mu), len(mu))), 0
    for tile in tiles:
        S = sampled("scores", tile).astype(np.float64)
        S = np.pad(S, ((0, 0), (0, 1)), constant_values=constant)
        products += (weights[start : start + len(S)] * S.T) @ S
        start += len(S)
    return compare_blocks(products, np.diag(mu), mu, mu).worse(hidden)


def certify_axes(score: Scorer, eigenvalues: Array, tiles: Iterable[Rows], total_weight: float) -> Certificate:
    """Compare ``b'Kb`` with 1, and ``b'Km`` with the offset, each as large as the eigenvalues: of any landmarks.

    Parameters
    ----------
    score, eigenvalues
        As `certify_components` takes them.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    total_weight : float
        Sum of the weights of the training rows: an offset is measured beside the scores, ``sqrt(mu / total_weight)``.

    Returns
    -------
    Certificate
        Also of what the mean that was taken away can hide: see `_cancelled`.
    """
    hidden = _cancelled(score, eigenvalues, total_weight)
    if not len(eigenvalues):
        return hidden
    some, head = sample_evenly(len(eigenvalues)), score.model.head("scores")
    sampled, mu = _some_scores(score, some), eigenvalues[some]
    W = sampled.model.head("scores").weights.astype(np.float64)
    offset = np.zeros(len(some)) if head.offset is None else head.offset[some].astype(np.float64)
    mean = np.zeros((len(W), 1)) if head.offset is None else head.weights[:, -1:].astype(np.float64) / 2
    left, products, start = np.hstack([W, mean]), np.zeros((len(some) + 1, len(some))), 0
    for tile in tiles:
        S = sampled("scores", tile).astype(np.float64) + offset
        products += left[start : start + len(S)].T @ S
        start += len(S)
    expected, sizes = np.vstack([np.diag((mu > 0).astype(np.float64)), offset]), np.sqrt(mu)
    error = (products - expected) * np.outer(np.append(sizes, 0.0), sizes)
    error[-1] = np.where(mu > 0, (products - expected)[-1] * np.sqrt(mu[0] * total_weight), 0.0)
    return compare_blocks(error, np.zeros_like(error), np.append(mu, mu[0]), mu).worse(hidden)


def _cancelled(score: Scorer, eigenvalues: Array, total_weight: float) -> Certificate:
    """Hold the largest eigenvalue against the rounding of the mean that was taken away, which every axis has.

    That is ``4 eps`` of the mean's squared length, as large as what a map drops; where it is all that is left, the
    certificate is 1, also of axes that were not kept.
    """
    head = score.model.heads.get("reconstruction_error")
    if head is None or head.offset is None:
        return Certificate(0.0, 0.0, 0)
    rounding = _OF_MAP * total_weight * abs(float(head.offset[-1]))
    most = max(rounding, float(eigenvalues.max(initial=0.0)))
    share = rounding / most if most > 0 else 0.0
    return Certificate(share, share, 0)


def _is_one_point(rows: Rows) -> bool:
    """Whether all rows are equal, so that nothing varies and nothing is lost."""
    if isinstance(rows, np.ndarray):
        return bool((rows == rows[:1]).all())
    n, stored = rows.shape[0], np.diff(rows.indptr)
    if (stored != stored[0]).any():
        return False
    return all(bool((part.reshape(n, -1) == part[: stored[0]]).all()) for part in (rows.indices, rows.data))


def _some_scores(score: Scorer, some: npt.NDArray[np.intp]) -> Scorer:
    """Return the scorer of some of the components."""
    head = score.model.head("scores")
    offset = None if head.offset is None else head.offset[some]
    heads = {"scores": Head(np.ascontiguousarray(head.weights[:, some]), offset)}
    return Scorer(replace(score.model, heads=heads), score.block)


def sample_evenly(n: int) -> npt.NDArray[np.intp]:
    """Return the numbers of at most 512 of n rows, evenly spread: those that are measured."""
    return np.linspace(0, n - 1, min(n, SAMPLE)).astype(np.intp)


def compare_blocks(found: Array, expected: Array, left: Array, right: Array) -> Certificate:
    """Return the certificate of a block (s, m) beside what it should be, of rows whose k(x, x) are (s,) and (m,)."""
    error = np.abs(found - expected)
    largest = max(float(np.abs(values).max()) for values in (expected, left, right))
    relative = float(_relative(error, left, right).max())
    return Certificate(_ratio(float(error.max()), largest), relative, found.size)


def _relative(error: Array, left: Array, right: Array) -> Array:
    scale = np.sqrt(np.abs(np.outer(left, right)))
    # 0 / 0 is an exact zero; anything else over 0 is an infinite error.
    return np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)


def _ratio(error: float, scale: float) -> float:
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))
