"""Measured exactness: what a model returns, held against what it promises.

Both sides go through the model itself, so damaged weights, landmarks or offsets show.
"""

from dataclasses import dataclass

import numpy as np

from dkfm.apply import Scorer
from dkfm.errors import CertificateError, InvalidInputError, UnsupportedStoreError
from dkfm.kernels.rows import Array

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
        return cls(float(stored["error"]), float(stored["relative_error"]), int(stored["pairs"]))

    def require(self, fitted: "Certificate") -> None:
        """Raise a CertificateError where this, measured anew, is worse than rounding differs between machines."""
        if self.error > 10 * fitted.error + 1e-14 or self.relative_error > 10 * fitted.relative_error + 1e-14:
            raise CertificateError(f"The model measures {self}, and measured {fitted} when it was fitted.")

    def __str__(self) -> str:
        return f"{self.error:.1e} of max |k|, {self.relative_error:.1e} of sqrt(k(x,x) k(z,z)), {self.pairs:,} pairs"


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
    """Compare the Gram matrix of the training scores, ``S'S``, with ``diag(mu)``.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "scores".
    eigenvalues : ndarray of shape (q,)
        mu. The pairs are pairs of components, over all training rows.
    """
    S = score("scores", score.model.landmarks)
    return _compare(S.T @ S, np.diag(eigenvalues), eigenvalues, eigenvalues)


def _sample(X: Array) -> Array:
    return X[np.linspace(0, len(X) - 1, min(len(X), _SAMPLE)).astype(np.intp)]


def _compare(found: Array, expected: Array, left: Array, right: Array) -> Certificate:
    if found.size == 0:
        return Certificate(0.0, 0.0, 0)
    error = np.abs(found - expected)
    largest = max(float(np.abs(expected).max()), float(left.max()), float(right.max()))
    scale = np.sqrt(np.outer(left, right))
    # 0 / 0 is an exact zero; anything else over 0 is an infinite error.
    relative = np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)
    return Certificate(_ratio(float(error.max()), largest), float(relative.max()), found.size)


def _ratio(error: float, scale: float) -> float:
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))
