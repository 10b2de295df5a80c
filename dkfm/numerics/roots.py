"""Compute a root of the pseudo-inverse of a Gram matrix, which defines a feature map in any basis and precision.

Every W with ``K W W' K = K`` gives the same inner products of the features ``k_z' W``. The columns of the spectral and
of the Cholesky root are nested: the first r of them define the map of rank r.
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
ROUNDING_SHARE = 64 * EPS
"""Share of the largest eigenvalue or diagonal entry below which values may be rounding, of the kernel or of LAPACK."""

MIN_ERROR_BOUND = 1e-12
"""Smallest error bound in float64."""

MIN_ERROR_BOUND_FLOAT32 = 1e-4
"""Smallest error bound in float32."""

EIGENVECTOR_ERROR_SHARE = 1e-4
"""Error, as a share of the largest value, that the last eigenvectors may make between two other points."""

DOUBLE: np.dtype[np.floating] = np.dtype(np.float64)

_EPS32 = float(np.finfo(np.float32).eps)

_WELL_CONDITIONED = 2000.0
"""Condition number up to which ``K^(-1/2)`` is explicit: its error, ``eps sqrt(condition)``, is then below 1e-14."""


@dataclass(frozen=True, eq=False)
class Root:
    """A root W, whose columns are in descending order of what each explains."""

    weights: Array
    """W: ``V L^(-1/2)`` of the eigenvectors V and eigenvalues L, or the upper triangular ``R'^(-1)`` of the pivots,
    with ``R R' = K``. Shape (N, r)."""
    values: Array
    """The eigenvalues, or the pivots: the diagonal entry that each had when it was chosen. Shape (r,)."""
    dropped: Array
    """Values that were treated as zero: the other eigenvalues, or the residuals of the rows that are no pivots."""
    triangular: bool = False
    """Whether the root is that of pivots."""

    def truncate(self, r: int) -> "Root":
        """Return the root of rank r: the first r columns, and for pivots also only the first r rows."""
        weights = self.weights[: r if self.triangular else None, :r]
        dropped = np.concatenate([self.values[r:], self.dropped])
        return Root(np.ascontiguousarray(weights), self.values[:r], dropped, self.triangular)


def rank_in_float32(root: Root, values: Array, diagonal: Array) -> int:
    """Return the number of columns before the first feature that is smaller than its rounding error in float32.

    `values` are kernel values (s, N) of some training rows with the landmarks, and `diagonal` is k(x, x) of the
    landmarks, (N,). Rounding ``k(x, x_n)`` by eps adds ``eps^2 sum_n W_nj^2 k(x, x_n)^2`` to the square of feature j.
    The columns that remain have eigenvalues above about ``eps lambda_max / sqrt(N)``, or pivots above ``eps max diag``.
    A fixed threshold would be some digits too high for one kernel and too low for another.
    """
    # These rows may include no landmark, so each landmark counts with at least its own k(x, x).
    squares = np.maximum(np.square(values).mean(axis=0), np.square(diagonal) / len(diagonal))
    noise = _EPS32**2 * (squares @ np.square(root.weights))
    features = np.maximum(np.square(values @ root.weights).mean(axis=0), root.values / len(diagonal))
    return max(min(1, len(features)), int(np.append(noise > features, True).argmax()))


def require_parameters(basis: str, rcond: float | None, tol: float | None) -> None:
    """Raise an error unless the basis is known, and rcond and tol are in [0, 1)."""
    if basis not in BASES:
        raise InvalidInputError(f"basis must be one of {', '.join(BASES)}, and is {basis!r}.")
    for name, share in (("rcond", rcond), ("tol", tol)):
        if share is not None and not (isinstance(share, int | float | np.number) and 0 <= share < 1):
            raise InvalidInputError(f"{name} must be in [0, 1), and is {share!r}.")
    if rcond is not None and basis == "cholesky":
        raise InvalidInputError("rcond is of eigenvalues, and the cholesky basis has pivots; use tol.")


def condition_number(values: Array) -> float:
    """Return the largest of a root's values (r,) divided by the smallest; 1 if there are none."""
    return float(values.max() / values.min()) if len(values) else 1.0


def bound_errors_by_rank(
    largest_residuals: Array, values: Array, max_diagonal: float, dtype: np.dtype[np.floating] = DOUBLE
) -> Array:
    """Bound the error of pairs with a training point, for each number of columns that are kept.

    Parameters
    ----------
    largest_residuals : ndarray of shape (r + 1,)
        Largest ``k(x, x) - |phi(x)|^2`` of a training point x after 0, 1, .. r columns, or an upper bound of it.
    values : ndarray of shape (r,)
        `Root.values`.
    max_diagonal : float
        Largest k(x, x) of a training point.
    dtype : dtype
        Dtype in which the map computes.

    Returns
    -------
    ndarray of shape (r + 1,)
        Bounds E with ``|<phi(x), phi(z)> - k(x, z)| <= E sqrt(c k(z, z))`` for a training point x and every z, where c
        is `max_diagonal`, because the part of x that is not kept is at most ``E sqrt(c)`` long. They include rounding.
        In float64, an eigenvector or pivot is exact to ``eps top / value`` and a feature of x is at most
        ``sqrt(value)``, which adds ``eps top / sqrt(value)``, and at least 1e-12. In float32, 1e-4 is added.
    """
    if max_diagonal <= 0:
        return np.zeros(len(largest_residuals))
    bounds = np.sqrt(np.clip(np.minimum.accumulate(largest_residuals) / max_diagonal, 0.0, 1.0))
    if dtype == np.float32:
        bounds += MIN_ERROR_BOUND_FLOAT32
        return bounds
    top = float(values.max(initial=0.0))
    smallest = np.minimum.accumulate(np.concatenate([[max(top, max_diagonal)], values]))
    bounds += np.maximum(MIN_ERROR_BOUND, 4 * EPS * max(top, max_diagonal) / np.sqrt(smallest * max_diagonal))
    return bounds


def bound_residuals_by_rank(root: Root, diagonal: Array) -> Array:
    """Bound the largest ``k(x, x) - |phi(x)|^2`` of the landmarks x after 0, 1, .. r eigenvectors, (r + 1,).

    It is at most the next eigenvalue. It is also computed from the features of the landmarks, ``L^(1/2) V'``.
    """
    bounds: Array = np.append(root.values, np.abs(root.dropped).max(initial=0.0))
    residuals = np.full(len(bounds), -np.inf)
    residuals[0] = diagonal.max()
    for rows in row_slices(len(diagonal), 256):
        explained = np.cumsum(np.square(root.weights[rows] * root.values), axis=1)
        np.maximum(residuals[1:], (diagonal[rows, np.newaxis] - explained).max(axis=0), out=residuals[1:])
    np.minimum(bounds, np.maximum(residuals, 0.0) + ROUNDING_SHARE * max(float(diagonal.max()), 0.0), out=bounds)
    return bounds


def find_rank_within(bounds: Array, tol: float) -> int:
    """Return the smallest number of columns whose error bound is at most tol; all columns if there is none."""
    within = bounds <= tol
    return int(within.argmax()) if within.any() else len(bounds) - 1


def make_map_heads(root: Root, basis: str, mean: Array | None = None) -> dict[str, Head]:
    """Return the heads "features" and "residual" of a map in a basis.

    Parameters
    ----------
    root : Root
        Root of pivots for the cholesky basis, of eigenvectors for the others.
    basis : {"symmetric", "spectral", "cholesky"}
        Basis of the features.
    mean : ndarray of shape (N,), optional
        Mean of ``k(x, landmarks)`` over the training points x, which centres the features; uncentred by default.

    Notes
    -----
    symmetric: ``K^(-1/2) k_z`` (Ghiasi-Shirazi and Qaraei, eq. 4), N columns; spectral: ``L^(-1/2) V' k_z``, r
    columns; cholesky: ``R^(-1) k_z``, r columns. All have the same inner products. Centred, they are the paper's psi,
    ``phi(z) - M`` with M the mean of the features (eqs. 8 and 9). The symmetric root is explicit if that loses no
    digits and takes no more work than its factors. Residuals are those of uncentred features, and never use that root.
    """
    W, n, residual = root.weights, len(root.weights), make_residual_head(root)
    offset = None if mean is None else mean @ W
    if basis != "symmetric":
        return {"features": Head(W, offset, triangular=root.triangular), "residual": residual}
    if 2 * W.shape[1] <= n or condition_number(root.values) > _WELL_CONDITIONED:
        return {"features": Head(W, offset, np.sqrt(root.values)), "residual": residual}
    half = W * root.values**0.25
    explicit = half @ half.T
    return {"features": Head(explicit, None if mean is None else mean @ explicit), "residual": residual}


def make_residual_head(root: Root) -> Head:
    """Return the head of residuals.

    The length of an eigenvector in the metric of K is 1 up to ``eps lambda_max / lambda``, which is a quarter at
    ``4 eps lambda_max``: for a point far from the others, this gave residuals of -6e-10. Eigenvectors below ``64 eps``
    of the scale are therefore left out, and a residual grows by at most what they explain. The scale is the largest
    eigenvalue, or, for a clipped kernel, the size of the most negative one if that is larger.
    """
    values = root.values
    scale = max(float(values.max(initial=0.0)), -float(root.dropped.min(initial=0.0)))
    accurate = None if root.triangular else int((values > ROUNDING_SHARE * scale).sum())
    return Head(root.weights, link=links.RESIDUAL, triangular=root.triangular, n_leading_columns=accurate)


def cast_heads(heads: Mapping[str, Head], dtype: np.dtype[np.floating]) -> dict[str, Head]:
    """Return heads cast to another dtype; arrays that heads share stay shared."""
    arrays = {id(a): a for h in heads.values() for a in (h.weights, h.offset, h.sqrt_eigenvalues) if a is not None}
    cast = {key: array.astype(dtype, copy=False) for key, array in arrays.items()}
    return {
        name: replace(
            h,
            weights=cast[id(h.weights)],
            offset=cast.get(id(h.offset)),
            sqrt_eigenvalues=cast.get(id(h.sqrt_eigenvalues)),
        )
        for name, h in heads.items()
    }


_NOTE_FOR_FIT = "the certificate is of what is fitted to its positive part"
_NOTE_FOR_MAP = "the certificate measures how far the features are from the kernel"


def eigh_in_place(K: Array) -> tuple[Array, Array]:
    """Decompose a symmetric matrix in place from its lower triangle.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Matrix, overwritten by the eigenvectors; only the lower triangle is read.

    Returns
    -------
    eigenvalues : ndarray of shape (N,)
        Ascending.
    vectors : ndarray of shape (N, N)
        Eigenvectors in columns, in the memory of K.

    Notes
    -----
    LAPACK ``dsyevd`` needs a workspace of 2 N^2 values. With the upper triangle, its error for the paper's kernel k1
    and each row given twice was ``7 eps lambda_max``, above the threshold of the rank; with the lower triangle it is
    below ``2 eps lambda_max``. ``dsyevr`` lost two to three digits on clustered eigenvalues.
    """
    values, vectors = eigh(K, lower=True, overwrite_a=True, check_finite=False, driver="evd")
    return values, vectors


def is_indefinite(lowest: float, scale: float, n: int) -> bool:
    """Return whether the lowest of n eigenvalues of a matrix of this scale is more negative than rounding explains."""
    return lowest < -max(1000, n) * EPS * scale


def check_psd(
    lowest: float, highest: float, scale: float, n: int, on_indefinite: str, what: str, note: str = _NOTE_FOR_FIT
) -> float:
    """Check that a matrix is positive semi-definite, or that its negative part may be dropped.

    Parameters
    ----------
    lowest, highest : float
        Smallest and largest eigenvalue.
    scale : float
        Scale of the rounding: the largest eigenvalue, or more if the matrix is a difference of larger ones.
    n : int
        Number of eigenvalues.
    on_indefinite : {"raise", "clip"}
        Whether to raise an error or to drop the negative part.
    what, note : str
        Name of the matrix in messages, and what the warning says of the certificate.

    Returns
    -------
    float
        0, or, if a negative part is dropped, the value up to which positive eigenvalues count as rounding.

    Raises
    ------
    NotPSDError
        The lowest eigenvalue is more negative than rounding explains, and `on_indefinite` is "raise".
    """
    if not is_indefinite(lowest, scale, n):
        return 0.0
    finding = f"{what} is not positive semi-definite: lambda_min = {lowest:.6g}, lambda_max = {highest:.6g}"
    if on_indefinite != "clip":
        remedy = 'drop its negative part with on_indefinite="clip" (--on-indefinite clip)'
        raise NotPSDError(f"{finding}; choose another kernel, or {remedy}.")
    warnings.warn(f"{finding}; its negative part is dropped, and {note}.", DkfmWarning, stacklevel=4)
    return 4 * EPS * max(scale, -lowest)


def choose_signs(vectors: Array, row_scale: Array | float = 1.0) -> Array:
    """Return a sign (+1 or -1) for each column that makes its first entry of nearly the largest magnitude positive.

    Magnitudes are those of the entries divided by `row_scale`, which is positive, (N,).
    """
    signs = np.ones(vectors.shape[1])
    for j, column in enumerate(vectors.T):
        magnitudes = np.abs(column) / row_scale
        # Rounding may change which entry is the largest, but not which is the first of nearly that size.
        if column[int(np.argmax(magnitudes >= (1 - 1e-6) * magnitudes.max()))] < 0:
            signs[j] = -1.0
    return signs


def inverse_root(
    K: Array, rcond: float | None = None, on_indefinite: str = "raise", what: str = "The Gram matrix of this kernel"
) -> Root:
    """Decompose a Gram matrix and keep its numerical rank.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Gram matrix, overwritten; only the lower triangle is read.
    rcond : float, optional
        Keep eigenvalues above ``rcond * lambda_max`` instead of ``4 eps lambda_max``.
    on_indefinite : {"raise", "clip"}
        Whether to raise an error or to drop the negative part if ``lambda_min < -max(1000, N) eps lambda_max``.
    what : str
        Name of K in messages.

    Raises
    ------
    NotPSDError
        The kernel is not positive semi-definite; the message has both ends of the spectrum.
    """
    n = len(K)
    values, vectors = eigh_in_place(K)
    del K
    lowest, highest = float(values[0]), float(values[-1])
    rounding = check_psd(lowest, highest, highest, n, on_indefinite, what, _NOTE_FOR_MAP)
    requested_cut = (4 * EPS if rcond is None else rcond) * highest
    cut = max(requested_cut, rounding or 2 * abs(min(lowest, 0.0)))
    rank = int((values > cut).sum()) if highest > 0 else 0
    kept, dropped = values[n - rank :][::-1].copy(), values[: n - rank][::-1].copy()
    if not rounding:
        _warn_of_dropped_eigenvalues(dropped, max(requested_cut, ROUNDING_SHARE * highest), lowest, highest, what)
    vectors = vectors[:, n - rank :][:, ::-1]
    weights = np.multiply(vectors, choose_signs(vectors) / np.sqrt(kept), order="C")
    return Root(weights, kept, dropped)


def _warn_of_dropped_eigenvalues(dropped: Array, rounding: float, lowest: float, highest: float, what: str) -> None:
    """Warn if eigenvalues above what rounding explains were dropped, because the lowest one is as negative."""
    n_above = int((dropped > rounding).sum())
    if n_above:
        warnings.warn(
            f"{what} has an eigenvalue of {lowest:.3g}, more than rounding explains, so {n_above} eigenvalues up to "
            f"{float(dropped[0]):.3g} were dropped with it; the largest is {highest:.3g}.",
            DkfmWarning,
            stacklevel=4,
        )
