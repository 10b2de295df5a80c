"""A root of the pseudo-inverse of a Gram matrix: what a feature map is made of, in any basis and precision.

Every W with ``K W W' K = K`` gives the same inner products of ``k_z' W``. The columns of both kinds that are made here
are nested: the first r of them are the map of rank r.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dkfm import links
from dkfm.errors import InvalidInputError
from dkfm.kernels.rows import Array
from dkfm.model import Head
from dkfm.tiling import row_slices

__all__ = [
    "BASES",
    "Root",
    "cast",
    "condition",
    "error_bounds",
    "heads",
    "parts_of_eigenvectors",
    "rank_within",
    "require_parameters",
    "residual_head",
    "single_rank",
]

BASES = ("symmetric", "spectral", "cholesky")

EPS = float(np.finfo(np.float64).eps)
NOISE = 64 * EPS
"""Of the largest eigenvalue or diagonal entry: what rounding, of a kernel's values and of LAPACK, makes of nothing."""

LEAST_BOUND, LEAST_BOUND_32 = 1e-12, 1e-4
"""What an error bound is at least, in float64 and in float32."""

UNEXPLAINED = 1e-4
"""Of the largest value: the last eigenvectors may be wrong by this between two points that they are not of."""

DOUBLE: np.dtype[np.floating] = np.dtype(np.float64)

_EPS32 = float(np.finfo(np.float32).eps)

_WELL_CONDITIONED = 2000.0
"""An explicit K^(-1/2) costs ``eps sqrt(condition)``; up to here that is below 1e-14, above it is kept as factors."""


@dataclass(frozen=True, eq=False)
class Root:
    """W, column by column in descending order of what each column explains.

    Attributes
    ----------
    weights : ndarray of shape (N, r)
        ``V L^(-1/2)`` of the eigenvectors, or, upper triangular, ``R'^(-1)`` with ``R R' = K`` of the pivots.
    values : ndarray of shape (r,)
        The eigenvalues L, or the pivots: what the diagonal of K still had when each was taken.
    dropped : ndarray
        What was taken for zero: eigenvalues, or what the diagonal still has of rows that are no pivots.
    triangular : bool
        Whether it is of pivots.
    """

    weights: Array
    values: Array
    dropped: Array
    triangular: bool = False

    def first(self, r: int) -> "Root":
        """Return the root of rank r: the first r columns, and of pivots the first r rows."""
        weights = self.weights[: r if self.triangular else None, :r]
        dropped = np.concatenate([self.values[r:], self.dropped])
        return Root(np.ascontiguousarray(weights), self.values[:r], dropped, self.triangular)


def single_rank(root: Root, values: Array, diagonal: Array) -> int:
    """Return how many columns float32 can carry: until what rounding adds to a feature outweighs the feature.

    Rounding each of the values ``k(x, x_n)`` by eps adds ``eps^2 sum_n W_nj^2 k(x, x_n)^2`` to the square of feature j.
    Of eigenvectors these are all above some ``eps lambda_max / sqrt(N)``, of pivots above ``eps max diag``; a fixed cut
    is some digits too high for one kernel and too low for another.

    Parameters
    ----------
    root : Root
    values : ndarray of shape (s, N)
        Kernel values of some training rows with the landmarks.
    diagonal : ndarray of shape (N,)
        k(x, x) of the landmarks.
    """
    # No landmark need be among these rows: it adds at least itself.
    squares = np.maximum(np.square(values).mean(axis=0), np.square(diagonal) / len(diagonal))
    noise = _EPS32**2 * (squares @ np.square(root.weights))
    features = np.maximum(np.square(values @ root.weights).mean(axis=0), root.values / len(diagonal))
    return max(min(1, len(features)), int(np.append(noise > features, True).argmax()))


def require_parameters(basis: str, rcond: float | None, tol: float | None) -> None:
    """Raise unless the basis is known, and rcond and tol are shares."""
    if basis not in BASES:
        raise InvalidInputError(f"basis must be one of {', '.join(BASES)}, and is {basis!r}.")
    for name, share in (("rcond", rcond), ("tol", tol)):
        if share is not None and not (isinstance(share, int | float | np.number) and 0 <= share < 1):
            raise InvalidInputError(f"{name} must be in [0, 1), and is {share!r}.")
    if rcond is not None and basis == "cholesky":
        raise InvalidInputError("rcond is of eigenvalues, and the cholesky basis has pivots; use tol.")


def condition(values: Array) -> float:
    """Largest over smallest of what was kept (r,); 1 where nothing is."""
    return float(values.max() / values.min()) if len(values) else 1.0


def error_bounds(remaining: Array, values: Array, largest: float, dtype: np.dtype[np.floating] = DOUBLE) -> Array:
    """Bound the error of pairs with a training point, by the number of columns that are kept.

    Parameters
    ----------
    remaining : ndarray of shape (r + 1,)
        After 0, 1, .. r columns, the largest ``k(x, x) - |phi(x)|^2`` of a training point x, or a bound of it.
    values : ndarray of shape (r,)
        Those of the root.
    largest : float
        The largest k(x, x) of a training point.
    dtype : dtype
        What the map computes in.

    Returns
    -------
    ndarray of shape (r + 1,)
        E, with ``|<phi(x), phi(z)> - k(x, z)| <= E sqrt(largest k(z, z))`` for a training point x and every z: the part
        of x that is not kept is no longer than ``E sqrt(largest)``. To this comes what rounding may add: in float64 an
        eigenvector or pivot is exact to ``eps top / value``, and a feature of x no longer than ``sqrt(value)``, which
        makes ``eps top / sqrt(value)``; and 1e-12, or 1e-4 in float32.
    """
    if largest <= 0:
        return np.zeros(len(remaining))
    parts = np.sqrt(np.clip(np.minimum.accumulate(remaining) / largest, 0.0, 1.0))
    if dtype == np.float32:
        parts += LEAST_BOUND_32
        return parts
    top = float(values.max(initial=0.0))
    least = np.minimum.accumulate(np.concatenate([[max(top, largest)], values]))
    parts += np.maximum(LEAST_BOUND, 4 * EPS * max(top, largest) / np.sqrt(least * largest))
    return parts


def parts_of_eigenvectors(root: Root, diagonal: Array) -> Array:
    """Bound, after 0, 1, .. r eigenvectors, the largest ``k(x, x) - |phi(x)|^2`` of the points they are of, (r + 1,).

    It is at most the next eigenvalue; and the features of these points are known, ``L^(1/2) V'``.
    """
    after: Array = np.append(root.values, np.abs(root.dropped).max(initial=0.0))
    parts = np.full(len(after), -np.inf)
    parts[0] = diagonal.max()
    for rows in row_slices(len(diagonal), 256):
        known = np.cumsum(np.square(root.weights[rows] * root.values), axis=1)
        np.maximum(parts[1:], (diagonal[rows, np.newaxis] - known).max(axis=0), out=parts[1:])
    np.minimum(after, np.maximum(parts, 0.0) + NOISE * max(float(diagonal.max()), 0.0), out=after)
    return after


def rank_within(bounds: Array, tol: float) -> int:
    """Return how many columns keep the error bound within tol; all where no number does."""
    within = bounds <= tol
    return int(within.argmax()) if within.any() else len(bounds) - 1


def heads(root: Root, basis: str, mean: Array | None = None) -> dict[str, Head]:
    """Return the heads "features" and "residual" of a map in the basis asked for.

    Parameters
    ----------
    root : Root
        Triangular for the cholesky basis, of eigenvectors for the others.
    basis : str
    mean : ndarray of shape (N,), optional
        The mean of ``k(x, landmarks)`` over the training points x; the features are centred with it.

    Notes
    -----
    symmetric: ``K^(-1/2) k_z`` (Ghiasi-Shirazi and Qaraei, eq. 4), N columns; spectral: ``L^(-1/2) V' k_z``, r
    columns; cholesky: ``R^(-1) k_z``, r columns. All have the same inner products. Centred, they are the paper's psi,
    ``phi(z) - M`` with M the mean of the features (eqs. 8 and 9). The symmetric root is explicit where that costs no
    digits and no more work than its factors. Residuals are of the uncentred features, and never of that root.
    """
    W, n, residual = root.weights, len(root.weights), residual_head(root)
    offset = None if mean is None else mean @ W
    if basis != "symmetric":
        return {"features": Head(W, offset, triangular=root.triangular), "residual": residual}
    if 2 * W.shape[1] <= n or condition(root.values) > _WELL_CONDITIONED:
        return {"features": Head(W, offset, np.sqrt(root.values)), "residual": residual}
    half = W * root.values**0.25
    explicit = half @ half.T
    return {"features": Head(explicit, None if mean is None else mean @ explicit), "residual": residual}


def residual_head(root: Root) -> Head:
    """Return the head of residuals.

    An eigenvector of an eigenvalue lambda has the length 1 in the metric of K up to ``eps lambda_max / lambda``, a
    quarter at 4 eps: of a point far from the others that made residuals of -6e-10. Those below 64 eps are left out, and
    a residual is larger by what they explain, at most. The scale of a clipped kernel may be its most negative one.
    """
    values = root.values
    scale = max(float(values.max(initial=0.0)), -float(root.dropped.min(initial=0.0)))
    sound = None if root.triangular else int((values > NOISE * scale).sum())
    return Head(root.weights, link=links.RESIDUAL, triangular=root.triangular, first=sound)


def cast(heads: Mapping[str, Head], dtype: np.dtype[np.floating]) -> dict[str, Head]:
    """Return heads in another precision; arrays that they share stay shared."""
    arrays = {id(a): a for h in heads.values() for a in (h.weights, h.offset, h.rotation) if a is not None}
    made = {key: array.astype(dtype, copy=False) for key, array in arrays.items()}
    return {
        name: replace(h, weights=made[id(h.weights)], offset=made.get(id(h.offset)), rotation=made.get(id(h.rotation)))
        for name, h in heads.items()
    }
