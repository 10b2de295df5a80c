"""Measured exactness: what a model returns, held against what it promises.

Both sides go through the model itself, so damaged weights, landmarks or offsets show.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

import numpy as np
import numpy.typing as npt

from dkfm.apply import Scorer
from dkfm.errors import CertificateError, InvalidInputError, UnsupportedStoreError
from dkfm.kernels.blocks import checked_block
from dkfm.kernels.rows import Array, Rows
from dkfm.model import Head, Model

__all__ = ["Certificate", "of_components", "of_map", "spread"]

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


def of_map(score: Scorer, X: Rows, Z: Rows | None = None) -> Certificate:
    """Compare ``<phi(x), phi(z)>`` with ``k(x, z)``.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "features".
    X : ndarray or csr_array of shape (s, d)
        The training rows whose numbers are ``spread(N)``, as the model scores them.
    Z : ndarray or csr_array of shape (m, d), optional
        Points to pair with them; by default X again. At most 512 are taken, evenly spread.

    Returns
    -------
    Certificate
    """
    model = score.model
    landmarks = model.landmarks[spread(model.landmarks.shape[0])]
    Z = X if Z is None else Z[spread(Z.shape[0])]
    if Z.shape[1] != model.columns:
        raise InvalidInputError(f"The points have {Z.shape[1]} columns and the model was fitted with {model.columns}.")
    expected = checked_block(model.kernel, Z, landmarks).T
    found = score("features", X) @ score("features", Z).T
    if model.kernel.of_numbers:  # only training rows have a k(z, z) that is known
        return _compare(found, expected, expected.diagonal(), expected.diagonal())
    return _compare(found, expected, model.kernel.self_similarities(X), model.kernel.self_similarities(Z))


def of_components(score: Scorer, eigenvalues: Array, tiles: Iterable[Rows]) -> Certificate:
    """Compare the Gram matrix of the training scores, ``S'S``, with ``diag(mu)``, and their means with 0.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "scores".
    eigenvalues : ndarray of shape (q,)
        mu. The pairs are pairs of components, at most 512 of them, evenly spread, over all training rows.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows, as the model scores them.
    """
    if not len(eigenvalues):
        return Certificate(0.0, 0.0, 0)
    head, some = score.model.head("scores"), spread(len(eigenvalues))
    offset = None if head.offset is None else head.offset[some]
    sampled = Model(score.model.kernel, score.model.landmarks, {"scores": Head(head.weights[:, some], offset)})
    # One more component that does not vary: the means show as plainly as the products.
    mu = np.append(eigenvalues[some], eigenvalues[0])
    constant, products = np.sqrt(eigenvalues[0] / sampled.landmarks.shape[0]), np.zeros((len(mu), len(mu)))
    for tile in tiles:
        S = np.pad(Scorer(sampled, score.block)("scores", tile), ((0, 0), (0, 1)), constant_values=constant)
        products += S.T @ S
    return _compare(products, np.diag(mu), mu, mu)


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
