"""A root of the pseudo-inverse of a Gram matrix: what a feature map is made of, in any basis and precision.

Every W with ``K W W' K = K`` gives the same inner products of ``k_z' W``. The columns of both kinds that are made here
are nested: the first r of them are the map of rank r.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import eigh

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import DkfmWarning, InvalidInputError, NotPSDError
from dkfm.numerics import links
from dkfm.numerics.model import Head

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


def rank_in_float32(root: Root, values: Array, diagonal: Array) -> int:
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


def condition_number(values: Array) -> float:
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


def remaining_after_eigenvectors(root: Root, diagonal: Array) -> Array:
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


def map_heads(root: Root, basis: str, mean: Array | None = None) -> dict[str, Head]:
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
    if 2 * W.shape[1] <= n or condition_number(root.values) > _WELL_CONDITIONED:
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


def cast_heads(heads: Mapping[str, Head], dtype: np.dtype[np.floating]) -> dict[str, Head]:
    """Return heads in another precision; arrays that they share stay shared."""
    arrays = {id(a): a for h in heads.values() for a in (h.weights, h.offset, h.rotation) if a is not None}
    made = {key: array.astype(dtype, copy=False) for key, array in arrays.items()}
    return {
        name: replace(h, weights=made[id(h.weights)], offset=made.get(id(h.offset)), rotation=made.get(id(h.rotation)))
        for name, h in heads.items()
    }


_OF_POSITIVE_PART = "the certificate is of what is fitted to its positive part"
_OF_KERNEL = "the certificate measures how far the features are from the kernel"


def eigh_in_place(K: Array) -> tuple[Array, Array]:
    """Decompose a symmetric matrix in place from its lower triangle.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Overwritten by the eigenvectors; only its lower triangle is read.

    Returns
    -------
    eigenvalues : ndarray of shape (N,), ascending
    vectors : ndarray of shape (N, N)
        In columns, in the memory of K.

    Notes
    -----
    LAPACK ``dsyevd``; it takes 2 N^2 values of workspace. From the upper triangle its noise on the paper's k1 with
    every row doubled was 7 eps lambda_max, above the cut of the rank; from the lower one it is below 2. ``dsyevr``
    lost two to three digits of exactness on clustered eigenvalues.
    """
    values, vectors = eigh(K, lower=True, overwrite_a=True, check_finite=False, driver="evd")
    return values, vectors


def is_indefinite(lowest: float, scale: float, n: int) -> bool:
    """Whether rounding cannot explain the lowest of n eigenvalues of a matrix of this scale."""
    return lowest < -max(1000, n) * EPS * scale


def require_psd(
    lowest: float,
    highest: float,
    scale: float,
    n: int,
    on_indefinite: str,
    what: str,
    certified: str = _OF_POSITIVE_PART,
) -> float:
    """Return 0, or, where a kernel is not PSD and "clip" drops its negative part, up to what eigenvalues are rounding.

    Parameters
    ----------
    lowest, highest : float
        Eigenvalues, of n.
    scale : float
        What the matrix was computed from: its largest eigenvalue, or more.
    n : int
    on_indefinite : {"raise", "clip"}
    what, certified : str
        What messages call the matrix, and what they say of the certificate.

    Raises
    ------
    NotPSDError
        Rounding cannot explain the lowest eigenvalue, and it is not to be dropped.
    """
    if not is_indefinite(lowest, scale, n):
        return 0.0
    found = f"{what} is not positive semi-definite: lambda_min = {lowest:.6g}, lambda_max = {highest:.6g}"
    if on_indefinite != "clip":
        remedy = 'drop its negative part with on_indefinite="clip" (--on-indefinite clip)'
        raise NotPSDError(f"{found}; choose another kernel, or {remedy}.")
    warnings.warn(f"{found}; its negative part is dropped, and {certified}.", DkfmWarning, stacklevel=4)
    return 4 * EPS * max(scale, -lowest)


def fix_signs(vectors: Array, over: Array | float = 1.0) -> Array:
    """Return the sign (+1 or -1) of each column that makes its first entry near the largest magnitude positive.

    That is of entries divided by `over`, which is positive, (N,).
    """
    signs = np.ones(vectors.shape[1])
    for j, column in enumerate(vectors.T):
        size = np.abs(column) / over
        # The first of the near-largest: the largest alone changes with the last bit.
        if column[int(np.argmax(size >= (1 - 1e-6) * size.max()))] < 0:
            signs[j] = -1.0
    return signs


def inverse_root(
    K: Array,
    rcond: float | None = None,
    on_indefinite: str = "raise",
    what: str = "The Gram matrix of this kernel",
) -> Root:
    """Decompose a Gram matrix and keep its numerical rank.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Overwritten; only the lower triangle is read.
    rcond : float, optional
        Keep eigenvalues above ``rcond * lambda_max`` instead of ``4 eps lambda_max``.
    on_indefinite : {"raise", "clip"}
        What to do where ``lambda_min < -max(1000, N) eps lambda_max``.
    what : str
        What the message calls K.

    Returns
    -------
    Root

    Raises
    ------
    NotPSDError
        A kernel that is not positive semi-definite; the message has both ends of the spectrum.
    """
    n = len(K)
    values, vectors = eigh_in_place(K)
    del K
    lowest, highest = float(values[0]), float(values[-1])
    rounding = require_psd(lowest, highest, highest, n, on_indefinite, what, _OF_KERNEL)
    asked = (4 * EPS if rcond is None else rcond) * highest
    cut = max(asked, rounding or 2 * abs(min(lowest, 0.0)))
    rank = int((values > cut).sum()) if highest > 0 else 0
    kept, dropped = values[n - rank :][::-1].copy(), values[: n - rank][::-1].copy()
    if not rounding:
        _warn_of_noise(dropped, max(asked, NOISE * highest), lowest, highest, what)
    vectors = vectors[:, n - rank :][:, ::-1]
    whitening = np.multiply(vectors, fix_signs(vectors) / np.sqrt(kept), order="C")
    return Root(whitening, kept, dropped)


def _warn_of_noise(dropped: Array, explained: float, lowest: float, highest: float, what: str) -> None:
    beyond = int((dropped > explained).sum())
    if beyond:
        warnings.warn(
            f"{what} has an eigenvalue of {lowest:.3g}, more than rounding explains, so {beyond} eigenvalues up to "
            f"{float(dropped[0]):.3g} were dropped with it; the largest is {highest:.3g}.",
            DkfmWarning,
            stacklevel=4,
        )
