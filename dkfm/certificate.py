"""Measured exactness: what a model returns, held against what it promises.

Both sides go through the model itself, so damaged weights, landmarks or offsets show.
"""

from dataclasses import dataclass
from math import isnan

import numpy as np
import numpy.typing as npt

from dkfm.apply import Scorer
from dkfm.errors import CertificateError, InvalidInputError, UnsupportedStoreError
from dkfm.kernels.rows import Array
from dkfm.model import Head, Model

__all__ = ["Certificate", "of_components", "of_map"]

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


def of_map(score: Scorer, Z: Array | None = None) -> Certificate:
    """Compare ``<phi(x), phi(z)>`` with ``k(x, z)``.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "features".
    Z : ndarray of shape (m, d), optional
        Points to pair with the landmarks; by default landmarks again. At most 512 of each are taken, evenly spread.

    Returns
    -------
    Certificate
    """
    kernel = score.model.kernel
    X = _sample(score.model.landmarks)
    Z = X if Z is None else _sample(Z)
    if Z.shape[1] != X.shape[1]:
        raise InvalidInputError(f"The points have {Z.shape[1]} columns and the model was fitted with {X.shape[1]}.")
    expected = kernel(X, Z)
    found = score("features", X) @ score("features", Z).T
    return _compare(found, expected, kernel.diagonal(X), kernel.diagonal(Z))


def of_components(score: Scorer, eigenvalues: Array) -> Certificate:
    """Compare the Gram matrix of the training scores, ``S'S``, with ``diag(mu)``, and their means with 0.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "scores".
    eigenvalues : ndarray of shape (q,)
        mu. The pairs are pairs of components, at most 512 of them, evenly spread, over all training rows.
    """
    if not len(eigenvalues):
        return Certificate(0.0, 0.0, 0)
    head, some = score.model.head("scores"), _spread(len(eigenvalues))
    offset = None if head.offset is None else head.offset[some]
    sampled = Model(score.model.kernel, score.model.landmarks, {"scores": Head(head.weights[:, some], offset)})
    S = Scorer(sampled, score.block)("scores", sampled.landmarks)
    # One more component that does not vary: the means show as plainly as the products.
    mu = np.append(eigenvalues[some], eigenvalues[0])
    S = np.column_stack([S, np.full(len(S), np.sqrt(eigenvalues[0] / len(S)))])
    return _compare(S.T @ S, np.diag(mu), mu, mu)


def _spread(n: int) -> npt.NDArray[np.intp]:
    return np.linspace(0, n - 1, min(n, _SAMPLE)).astype(np.intp)


def _sample(X: Array) -> Array:
    return X[_spread(len(X))]


def _compare(found: Array, expected: Array, left: Array, right: Array) -> Certificate:
    error = np.abs(found - expected)
    largest = max(float(np.abs(values).max()) for values in (expected, left, right))
    scale = np.sqrt(np.abs(np.outer(left, right)))
    # 0 / 0 is an exact zero; anything else over 0 is an infinite error.
    relative = np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)
    return Certificate(_ratio(float(error.max()), largest), float(relative.max()), found.size)


def _ratio(error: float, scale: float) -> float:
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))
