"""Measured exactness: what a model returns, held against what it promises.

Both sides go through the model itself, so damaged weights, landmarks or offsets show.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
import numpy.typing as npt

from dkfm import links, sweep
from dkfm.apply import Scorer
from dkfm.errors import CertificateError, InvalidInputError, UnsupportedStoreError
from dkfm.kernels.blocks import checked_block
from dkfm.kernels.rows import Array, Rows
from dkfm.model import Head

__all__ = [
    "Certificate",
    "Verification",
    "of_axes",
    "of_combinations",
    "of_components",
    "of_discriminants",
    "of_map",
    "spread",
]

_SAMPLE = 512


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
        Of the error between two of the points: the largest residual as a share of the largest k(z, z).
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


def of_map(
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
    model = score.model
    points, Z = X if points is None else points, X if Z is None else Z[spread(Z.shape[0])]
    if Z.shape[1] != model.columns:
        raise InvalidInputError(f"The points have {Z.shape[1]} columns and the model was fitted with {model.columns}.")
    centre = 0.0 if mean is None else score.image("features", mean[np.newaxis]).astype(np.float64)
    expected = checked_block(model.kernel, Z, points).T
    left = score("features", X) + centre
    right = left if Z is X else score("features", Z) + centre
    if model.kernel.of_numbers:  # only training rows have a k(z, z) that is known
        sizes = expected.diagonal(), expected.diagonal()
    else:
        sizes = model.kernel.self_similarities(X), model.kernel.self_similarities(Z)
    combined = sweep.combination(score, tiles, float(sizes[0].max()))
    if len(combined):
        some = spread(len(combined))
        expected = np.column_stack([expected, combined[some]])
        right = np.concatenate([right, score.image("features", combined[np.newaxis])])
        sizes = sizes[0], np.append(sizes[1], sizes[0].max())
    return _compare(left.astype(np.float64) @ right.astype(np.float64).T, expected, *sizes)


def of_components(
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
    """
    if not len(eigenvalues):
        return Certificate(0.0, 0.0, 0)
    some, head = spread(len(eigenvalues)), score.model.head("scores")
    sampled, mu = _some_scores(score, some), eigenvalues[some]
    weights = np.ones(score.model.landmarks.shape[0]) if sample_weight is None else sample_weight
    constant = 0.0 if head.offset is None else np.sqrt(eigenvalues[0] / weights.sum())
    # One more component that does not vary: the means show as plainly as the products.
    mu = np.append(mu, 0.0 if head.offset is None else eigenvalues[0])
    products, start = np.zeros((len(mu), len(mu))), 0
    for tile in tiles:
        S = sampled("scores", tile).astype(np.float64)
        S = np.pad(S, ((0, 0), (0, 1)), constant_values=constant)
        products += (weights[start : start + len(S)] * S.T) @ S
        start += len(S)
    return _compare(products, np.diag(mu), mu, mu)


def of_axes(score: Scorer, eigenvalues: Array, tiles: Iterable[Rows]) -> Certificate:
    """Compare ``b'Kb`` with 1, and ``b'Km`` with the offset, each as large as the eigenvalues: of any landmarks.

    Parameters
    ----------
    score, eigenvalues
        As `of_components` takes them.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    """
    if not len(eigenvalues):
        return Certificate(0.0, 0.0, 0)
    some, head = spread(len(eigenvalues)), score.model.head("scores")
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
    scale = np.outer(np.append(sizes, sizes[0]), sizes)
    return _compare(products * scale, expected * scale, np.append(mu, mu[0]), mu)


def of_discriminants(
    score: Scorer,
    name: str,
    tiles: Iterable[Rows],
    indicators: Array,
    expected: tuple[Array, Array],
    ridge: float,
) -> Certificate:
    """Compare the covariance within the classes, and the class means, of outputs for the training rows with T'T and M.

    Parameters
    ----------
    score : Scorer
    name : str
        Of a head of combinations T (q, p) of discriminants; its link is left out.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows, as the model scores them.
    indicators : ndarray of shape (N, C)
        The weight of a row in the column of its class, else 0.
    expected : ndarrays of shape (p, p), (C, p)
        T'T, which is the covariance and the ridge of the weights b, ``ridge b'Kb``, together; and M.
    ridge : float
    """
    head, (products, class_means), start = _plain(score, name), expected, 0
    offset, p = _offset(head), head.columns
    if not p:
        return Certificate(0.0, 0.0, 0)
    sums, second, squares = np.zeros_like(class_means), np.zeros((p, p)), np.zeros((p, p))
    scored = Scorer(replace(score.model, heads={name: head}), score.block)
    for tile in tiles:
        S = scored(name, tile).astype(np.float64)
        rows = slice(start, start + len(S))
        sums += indicators[rows].T @ S
        second += (S * indicators[rows].sum(axis=1, keepdims=True)).T @ S
        squares += head.weights[rows, :p].T @ (S + offset)
        start = rows.stop
    sizes = indicators.sum(axis=0)
    means = sums / sizes[:, np.newaxis]
    within = (second - (means * sizes[:, np.newaxis]).T @ means) / sizes.sum()
    lengths = np.square(class_means).max(axis=0) + products.diagonal()
    found = _compare(within + ridge * squares, products, lengths, lengths)
    unit = float(np.sqrt(lengths.max()))
    return found.worse(_compare(unit * means, unit * class_means, np.full(len(sizes), unit**2), lengths))


def of_combinations(
    score: Scorer, name: str, tiles: Iterable[Rows], products: Array, mean: Array, constants: Array
) -> Certificate:
    """Compare ``b'Kb`` of the weights b of a head with what it is, and ``b'Km`` with the offset: of any landmarks.

    Parameters
    ----------
    score, name
        As `of_discriminants` takes them.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    products : ndarray of shape (p, p)
    mean : ndarray of shape (N,)
        m, what the mean of the training rows is made of.
    constants : ndarray of shape (p,)
        What the offset has beside ``b'Km``.
    """
    head, start = _plain(score, name), 0
    offset, p = _offset(head), head.columns
    if not p:
        return Certificate(0.0, 0.0, 0)
    left, found = np.column_stack([head.weights[:, :p].astype(np.float64), mean]), np.zeros((p + 1, p))
    scored = Scorer(replace(score.model, heads={name: head}), score.block)
    for tile in tiles:
        S = scored(name, tile).astype(np.float64) + offset
        found += left[start : start + len(S)].T @ S
        start += len(S)
    of_mean = offset - constants
    lengths = products.diagonal() + of_mean**2
    unit = float(np.sqrt(lengths.max()))
    found[-1] *= unit
    return _compare(found, np.vstack([products, unit * of_mean]), np.append(lengths, unit**2), lengths)


def _plain(score: Scorer, name: str) -> Head:
    return replace(score.model.head(name), link=links.IDENTITY)


def _offset(head: Head) -> Array:
    return np.zeros(head.columns) if head.offset is None else head.offset.astype(np.float64)


def _some_scores(score: Scorer, some: npt.NDArray[np.intp]) -> Scorer:
    """Return the scorer of some of the components."""
    head = score.model.head("scores")
    offset = None if head.offset is None else head.offset[some]
    heads = {"scores": Head(np.ascontiguousarray(head.weights[:, some]), offset)}
    return Scorer(replace(score.model, heads=heads), score.block)


def spread(n: int) -> npt.NDArray[np.intp]:
    """Return the numbers of at most 512 of n rows, evenly spread: those that are measured."""
    return np.linspace(0, n - 1, min(n, _SAMPLE)).astype(np.intp)


def _compare(found: Array, expected: Array, left: Array, right: Array) -> Certificate:
    error = np.abs(found - expected)
    largest = max(float(np.abs(values).max()) for values in (expected, left, right))
    scale = np.sqrt(np.abs(np.outer(left, right)))
    # 0 / 0 is an exact zero; anything else over 0 is an infinite error.
    relative = np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)
    return Certificate(_ratio(float(error.max()), largest), float(relative.max()), found.size)


def _ratio(error: float, scale: float) -> float:
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))
