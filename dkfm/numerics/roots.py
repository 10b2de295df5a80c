"""Compute an inverse square root of a Gram matrix, which defines a feature map in any basis and precision.

Every W with ``K W W' K = K`` gives the same inner products of the features ``k_z' W``. The columns of the spectral and
of the Cholesky root are nested: the first r columns define the map of rank r.

Rounding errors are relative to the largest entry of the decomposed matrix. To preserve the digits of rows with small
``k(x, x)``, K is first scaled to a unit diagonal, ``A = D^-1 K D^-1`` with ``D = diag(sqrt k(x_n, x_n))``. A root W_A
of A gives the root ``W = D^-1 W_A`` of K. The error is then of order ``eps`` times the condition number of A (Demmel,
"On floating point errors in Cholesky", 1989).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, NotPSDError, warn_caller
from dkfm.numerics import links
from dkfm.numerics.eigensolvers.dense import add_spare_row, eigh_without_spare_row
from dkfm.numerics.model import Head, iter_weight_panels

BASES = ("symmetric", "spectral", "cholesky")
"""Names of the bases of a feature map; features have the same inner products in each."""

EPS = float(np.finfo(np.float64).eps)
"""Rounding unit of float64."""

ROUNDING_SHARE = 64 * EPS
"""Share of the largest eigenvalue or diagonal entry below which values may be rounding errors of kernel or LAPACK."""

EIGENVECTOR_ERROR_SHARE = 1e-4
"""Error of pairs of other points that the last eigenvectors may cause, relative to the largest value."""

_WELL_CONDITIONED = 2000.0
"""Condition number up to which ``K^(-1/2)`` is formed; its error, ``eps sqrt(condition)``, is then below 1e-14."""

_MAX_ROTATED_CONDITION = 1e8
"""Condition number of the scaled matrix up to which a rotation of its root loses fewer digits than K itself."""

_EQUAL_SCALES = 1e-2
"""Ratio of the smallest to the largest row length above which scaling would gain less than four digits of k."""


@dataclass(frozen=True, eq=False)
class Root:
    """A root W of the pseudo-inverse of a Gram matrix, ``K W W' K = K``; leading columns explain the most of K."""

    weights: Array
    """W, from the scaled matrix ``A = D^-1 K D^-1``: ``D^-1 V L^(-1/2)`` with the eigenvectors V and eigenvalues L of
    A, or ``D^-1 R'^(-1)`` with R the Cholesky factor of A restricted to the pivots. Shape (N, r)."""
    values: Array
    """The eigenvalues, or the diagonal entry of each pivot when it was chosen. Shape (r,)."""
    dropped_values: Array
    """Values that were treated as zero: the other eigenvalues, or the residuals of the rows that are not pivots."""
    scales: Array
    """Diagonal of D: ``sqrt k(x_n, x_n)``, or ones if K itself was decomposed. Rows of W are 0 where it is 0. Shape
    (N,)."""
    triangular: bool = False
    """Whether the root is one of pivots, so that W is upper triangular."""
    rotation: Array | None = None
    """Matrix O with orthonormal rows for which ``W O = K^(-1/2)``; None if ``K^(-1/2)`` is not formed. Shape (r, N)."""

    def truncate(self, r: int) -> "Root":
        """Return the root of rank r: the first r columns, and for pivots only the first r rows of these."""
        rows = r if self.triangular else len(self.weights)
        dropped = np.concatenate([self.values[r:], self.dropped_values])
        weights = np.ascontiguousarray(self.weights[:rows, :r])
        rotation = None if self.rotation is None else self.rotation[:r]
        return Root(weights, self.values[:r], dropped, self.scales[:rows], self.triangular, rotation)

    def landmark_features(self) -> Array:
        """Return ``K W``, the features of the landmarks, (N, r), without kernel values."""
        if self.triangular:
            from scipy.linalg import solve_triangular

            return solve_triangular(self.weights, np.eye(len(self.weights)), trans="T", lower=False)
        # Multiply by D twice, because D^2 may overflow or underflow where the product does not.
        lengths = self.scales[:, np.newaxis]
        features = lengths * self.weights
        features *= lengths
        features *= self.values
        return features

    def is_scaled(self, lengths: Array) -> bool:
        """Return whether the root is one of the matrix scaled by these lengths (N,), up to a common factor."""
        smallest, largest = self.get_scale_ratio_range(lengths)
        return largest <= 2 * smallest

    def get_scale_ratio_range(self, lengths: Array) -> tuple[float, float]:
        """Return the smallest and the largest ``scale / length`` of rows of the given positive lengths, (N,)."""
        positive = lengths > 0
        ratios = self.scales[positive] / lengths[positive]
        return (float(ratios.min()), float(ratios.max())) if len(ratios) else (1.0, 1.0)


def row_lengths(diagonal: Array) -> Array:
    """Return ``sqrt |k(x, x)|``, the lengths of rows in feature space, (N,), from their k(x, x)."""
    return np.sqrt(np.abs(diagonal))


def replace_zero_lengths(lengths: Array) -> Array:
    """Return lengths (N,) with zeros replaced by the largest length, or by 1, so that rows can be divided by them."""
    largest = float(lengths.max(initial=0.0))
    return np.where(lengths > 0, lengths, largest if largest > 0 else 1.0)


def scale_gram_in_place(K: Array, lengths: Array) -> None:
    """Replace the lower triangle of K by that of ``D^-1 K D^-1``; the diagonal becomes exactly 1, 0 or -1.

    `lengths` (N,) are those of `row_lengths`. A row of length 0 is divided by the largest length instead. If it has
    nonzero entries, K is not positive semi-definite, and the scaled matrix has a negative eigenvalue.
    """
    divisors = replace_zero_lengths(lengths)
    if (divisors == 1.0).all():
        return
    signs = np.sign(K.diagonal())
    for columns in row_slices(len(K), 256):
        # Divide twice, because the product of two lengths may overflow.
        block = K[columns.start :, columns]
        block /= divisors[columns.start :, np.newaxis]
        block /= divisors[columns]
    K[np.diag_indices(len(K))] = signs


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
    symmetric: ``K^(-1/2) k_z`` (Ghiasi-Shirazi and Qaraei, eq. 4), N columns; spectral: ``L^(-1/2) V' D^-1 k_z``, r
    columns; cholesky: ``R^(-1) D^-1 k_z``, r columns. All have the same inner products. Centred features are the
    paper's psi, ``phi(z) - M`` with M the mean of the features (eqs. 8 and 9). The symmetric root is formed explicitly
    if it loses no digits and takes no more work than its factors. Residuals are those of uncentred features, and never
    use the explicit root.
    """
    W, n, residual = root.weights, root.weights.shape[0], make_residual_head(root)
    if basis == "symmetric" and root.rotation is not None:
        W = W @ root.rotation
        return {"features": Head(W, None if mean is None else mean @ W), "residual": residual}
    offset = None if mean is None else _multiply_by_weights(mean, W, root.triangular)
    if basis != "symmetric":
        return {"features": Head(W, offset, triangular=root.triangular), "residual": residual}
    if 2 * W.shape[1] <= n or condition_number(root.values) > _WELL_CONDITIONED:
        return {"features": Head(W, offset, np.sqrt(root.values)), "residual": residual}
    half = W * root.values**0.25
    explicit = half @ half.T
    return {"features": Head(explicit, None if mean is None else mean @ explicit), "residual": residual}


def _multiply_by_weights(values: Array, W: Array, triangular: bool) -> Array:
    """Return the product (r,) of values (N,) and weights, which may be in a store."""
    product = np.zeros(W.shape[1])
    for columns, panel in iter_weight_panels(W, W.shape[1], triangular):
        product[columns] = values[: len(panel)] @ panel
    return product


def make_residual_head(root: Root) -> Head:
    """Return the head of residuals.

    The length of an eigenvector in the metric of K is 1 up to an error of ``eps lambda_max / lambda``, which is a
    quarter for ``lambda = 4 eps lambda_max``. For a point far from the others, this gave residuals of -6e-10.
    Eigenvectors with eigenvalues below ``64 eps`` times the scale are therefore left out, and a residual grows by at
    most the part that they explain. The scale is the largest eigenvalue, or for a clipped kernel the magnitude of the
    most negative one if that is larger.
    """
    values = root.values
    scale = max(float(values.max(initial=0.0)), -float(root.dropped_values.min(initial=0.0)))
    accurate = None if root.triangular else int((values > ROUNDING_SHARE * scale).sum())
    return Head(root.weights, link=links.RESIDUAL, triangular=root.triangular, n_leading_columns=accurate)


def cast_heads(heads: Mapping[str, Head], dtype: np.dtype[np.floating]) -> dict[str, Head]:
    """Return heads cast to another dtype; arrays that heads share stay shared."""
    arrays = {id(a): a for h in heads.values() for a in (h.weights, h.offset, h.sqrt_eigenvalues) if a is not None}
    cast = {key: array if array.dtype == dtype else array.astype(dtype) for key, array in arrays.items()}
    return {
        name: replace(
            h,
            weights=cast[id(h.weights)],
            offset=cast.get(id(h.offset)),
            sqrt_eigenvalues=cast.get(id(h.sqrt_eigenvalues)),
        )
        for name, h in heads.items()
    }


_NOTE_FOR_FIT = "the certificate compares the fit with the positive part, not with the kernel"
_NOTE_FOR_MAP = "`certificate_` says how far the features are from the kernel"


def is_indefinite(lowest: float, scale: float, n: int) -> bool:
    """Return whether the smallest of n eigenvalues of a matrix of a scale is more negative than rounding explains."""
    return lowest < -max(1000, n) * EPS * scale


def find_psd_cutoff(
    lowest: float, highest: float, scale: float, n: int, on_indefinite: str, what: str, note: str = _NOTE_FOR_FIT
) -> float:
    """Check that a matrix is positive semi-definite, or that its negative part may be dropped.

    Parameters
    ----------
    lowest, highest : float
        Smallest and largest eigenvalue.
    scale : float
        Scale of rounding errors: the largest eigenvalue, or more if the matrix is a difference of larger matrices.
    n : int
        Number of eigenvalues.
    on_indefinite : {"raise", "clip"}
        Whether to raise an error or to drop the negative part.
    what, note : str
        Name of the matrix in messages, and the clause of the warning about the certificate.

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
    matrix = f"{what[0].lower()}{what[1:]} is not positive semi-definite"
    eigenvalues = f"lambda_min = {lowest:.6g}, lambda_max = {highest:.6g}"
    finding = f"There are significant negative eigenvalues, so {matrix}: {eigenvalues}"  # scikit-learn's words
    if on_indefinite != "clip":
        remedy = 'drop its negative part with on_indefinite="clip" (--on-indefinite clip)'
        raise NotPSDError(f"{finding}; choose another kernel, or {remedy}.")
    warn_caller(f"{finding}; its negative part is dropped, and {note}.")
    return 4 * EPS * max(scale, -lowest)


def choose_signs(vectors: Array, row_scale: Array | float = 1.0) -> Array:
    """Return a sign (+1 or -1) for each column that makes its first entry of nearly the largest magnitude positive.

    Magnitudes are those of the entries divided by `row_scale`, which is positive, (N,).
    """
    signs = np.ones(vectors.shape[1])
    for j, column in enumerate(vectors.T):
        magnitudes = np.abs(column) / row_scale
        # Rounding may change which entry is the largest, but not which entry of nearly that size is the first.
        if column[int(np.argmax(magnitudes >= (1 - 1e-6) * magnitudes.max()))] < 0:
            signs[j] = -1.0
    return signs


def inverse_root(
    K: Array,
    rcond: float | None = None,
    on_indefinite: str = "raise",
    what: str = "The Gram matrix of this kernel",
    scales: Array | None = None,
) -> Root:
    """Return the spectral root ``W = V L^(-1/2)`` of a Gram matrix, from its eigenvalues above the cutoff.

    The symmetric root ``K^(-1/2) = W V'`` is W with a rotation; see `add_rotation`.

    Parameters
    ----------
    K : ndarray of shape (N, N)
        Gram matrix, overwritten if it is scaled; only the lower triangle is read.
    rcond : float, optional
        Keep eigenvalues above ``rcond * lambda_max`` instead of ``4 eps lambda_max``.
    on_indefinite : {"raise", "clip"}
        Whether to raise an error or to drop the negative part if ``lambda_min < -max(1000, N) eps lambda_max``.
    what : str
        Name of K in messages.
    scales : ndarray of shape (N,), optional
        `row_lengths` of K, if the scaled matrix is decomposed.

    Raises
    ------
    NotPSDError
        The kernel is not positive semi-definite; the message has the smallest and the largest eigenvalue.
    """
    n = len(K)
    if scales is not None:
        scale_gram_in_place(K, scales)
    bordered = add_spare_row(K)
    del K  # so that it can be freed before LAPACK allocates its workspace
    values, vectors = eigh_without_spare_row(bordered)
    del bordered
    lowest, highest = float(values[0]), float(values[-1])
    rounding = find_psd_cutoff(lowest, highest, highest, n, on_indefinite, what, _NOTE_FOR_MAP)
    requested_cut = (4 * EPS if rcond is None else rcond) * highest
    cut = max(requested_cut, rounding or 2 * abs(min(lowest, 0.0)))
    rank = int((values > cut).sum()) if highest > 0 else 0
    kept, dropped = values[n - rank :][::-1].copy(), values[: n - rank][::-1].copy()
    if not rounding:
        _warn_of_dropped_eigenvalues(dropped, max(requested_cut, ROUNDING_SHARE * highest), lowest, highest, what)
    vectors = vectors[:, n - rank :][:, ::-1]
    weights = np.multiply(vectors, choose_signs(vectors) / np.sqrt(kept), order="C")
    if scales is not None:
        weights /= replace_zero_lengths(scales)[:, np.newaxis]
        weights[scales == 0] = 0.0
    return Root(weights, kept, dropped, np.ones(n) if scales is None else scales)


def choose_rank_for_rotation(K: Array, scales: Array) -> int:
    """Return the rank of a root of the scaled matrix that, rotated, is ``K^(-1/2)``; 0 to decompose K itself instead.

    The rotation is used if the rows differ in scale, so that decomposing K would lose digits of small rows, and if
    the pivots of the scaled matrix are either above ``N / 1e8`` or rounding errors, so that its condition number is at
    most about 1e8. K (N, N) is not changed; only its lower triangle is read. `scales` (N,) are its `row_lengths`.
    """
    from scipy.linalg import lapack

    if not replace_zero_lengths(scales).min() < _EQUAL_SCALES * scales.max():
        return 0
    A = K.copy(order="F")
    scale_gram_in_place(A, scales)
    R, _, rank, _ = lapack.dpstrf(A, tol=ROUNDING_SHARE, lower=1, overwrite_a=1)
    return int(rank) if np.square(R.diagonal()[:rank]).min(initial=1.0) * _MAX_ROTATED_CONDITION >= len(K) else 0


def add_rotation(root: Root) -> Root:
    """Return a root with the rotation that makes it ``K^(-1/2)``; if the rank is below N, of the pseudo-inverse.

    Let ``F = K W = P S Q'`` be a singular value decomposition. Then ``K = F F'``, and
    ``K^(-1/2) = P S^-1 P' = W (Q P')``. The orthogonal factor keeps errors relative to the scale of each pair.
    """
    from scipy.linalg import svd

    P, _, Qt = svd(root.landmark_features(), full_matrices=False, check_finite=False, overwrite_a=True)
    return replace(root, rotation=(P @ Qt).T)


def _warn_of_dropped_eigenvalues(dropped: Array, threshold: float, lowest: float, highest: float, what: str) -> None:
    """Warn if eigenvalues above the rounding threshold were dropped because the most negative one is as large."""
    n_above = int((dropped > threshold).sum())
    if n_above:
        warn_caller(
            f"{what} has an eigenvalue of {lowest:.3g}, more than rounding explains, so {n_above} eigenvalues up to "
            f"{float(dropped[0]):.3g} were dropped with it; the largest is {highest:.3g}."
        )
