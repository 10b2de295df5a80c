"""A Gram matrix to its inverse root, once: eigenvalues, numerical rank, the policy for kernels that are not PSD.

The rank is relative, never absolute: an eigenvalue is kept above ``max(4 eps lambda_max, 2 |min(lambda_min, 0)|)``.
"""

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh

from dkfm import links
from dkfm.errors import DkfmWarning, InvalidInputError, NotPSDError
from dkfm.kernels.rows import Array
from dkfm.model import Head

__all__ = [
    "BASES",
    "Spectrum",
    "condition",
    "eigh_lower",
    "factor",
    "fix_signs",
    "heads",
    "require_parameters",
    "require_psd",
]

BASES = ("symmetric", "spectral")
_EPS = float(np.finfo(np.float64).eps)
_ROUNDED_ROOT = 1e-14
"""An explicit K^(-1/2) costs ``eps sqrt(lambda_max / lambda_min)``; above this the factored form is kept."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The kept and the dropped part of a Gram matrix ``K = V L V'``, in descending order.

    Attributes
    ----------
    eigenvalues : ndarray of shape (r,)
        The kept ones.
    whitening : ndarray of shape (N, r)
        ``V L^(-1/2)``.
    dropped : ndarray of shape (N - r,)
        The eigenvalues taken for zero.
    """

    eigenvalues: Array
    whitening: Array
    dropped: Array


def condition(eigenvalues: Array) -> float:
    """lambda_max / lambda_min of the kept eigenvalues (r,), descending; 1 where none is kept."""
    return float(eigenvalues[0] / eigenvalues[-1]) if len(eigenvalues) else 1.0


def require_parameters(basis: str, rcond: float | None) -> None:
    """Raise unless the basis is known and rcond is a share."""
    if basis not in BASES:
        raise InvalidInputError(f"basis must be one of {', '.join(BASES)}, and is {basis!r}.")
    if rcond is not None and not (isinstance(rcond, int | float | np.number) and 0 <= rcond < 1):
        raise InvalidInputError(f"rcond must be in [0, 1), and is {rcond!r}.")


def eigh_lower(K: Array) -> tuple[Array, Array]:
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


def require_psd(lowest: float, highest: float, scale: float, n: int, on_indefinite: str, what: str) -> None:
    """Raise, or warn under ``on_indefinite="clip"``, where rounding cannot explain the lowest eigenvalue."""
    if lowest >= -max(1000, n) * _EPS * scale:
        return
    found = f"{what} is not positive semi-definite: lambda_min = {lowest:.6g}, lambda_max = {highest:.6g}"
    if on_indefinite != "clip":
        remedy = 'drop its negative part with on_indefinite="clip" (--on-indefinite clip)'
        raise NotPSDError(f"{found}; choose another kernel, or {remedy}.")
    warnings.warn(f"{found}; its negative part is dropped, so the map is not exact.", DkfmWarning, stacklevel=4)


def fix_signs(vectors: Array) -> Array:
    """Return the sign (+1 or -1) of each column that makes its first entry near the largest magnitude positive."""
    signs = np.ones(vectors.shape[1])
    for j, column in enumerate(vectors.T):
        size = np.abs(column)
        # The first of the near-largest: the largest alone changes with the last bit.
        if column[int(np.argmax(size >= (1 - 1e-6) * size.max()))] < 0:
            signs[j] = -1.0
    return signs


def factor(
    K: Array, rcond: float | None = None, on_indefinite: str = "raise", what: str = "The Gram matrix of this kernel"
) -> Spectrum:
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
    Spectrum

    Raises
    ------
    NotPSDError
        A kernel that is not positive semi-definite; the message has both ends of the spectrum.
    """
    n = len(K)
    values, vectors = eigh_lower(K)
    del K
    lowest, highest = float(values[0]), float(values[-1])
    require_psd(lowest, highest, highest, n, on_indefinite, what)
    cut = max((4 * _EPS if rcond is None else rcond) * highest, 2 * abs(min(lowest, 0.0)))
    rank = int((values > cut).sum()) if highest > 0 else 0
    kept, dropped = values[n - rank :][::-1].copy(), values[: n - rank][::-1].copy()
    vectors = vectors[:, n - rank :][:, ::-1]
    whitening = np.multiply(vectors, fix_signs(vectors) / np.sqrt(kept), order="C")
    return Spectrum(kept, whitening, dropped)


def heads(spectrum: Spectrum, basis: str) -> dict[str, Head]:
    """Return the heads "features" and "residual" of a map in the basis asked for.

    Notes
    -----
    symmetric: ``K^(-1/2) k_z`` (paper, eq. 4), N columns; spectral: ``L^(-1/2) V' k_z``, r columns. Both have the same
    inner products. The symmetric root is kept explicit where that costs no digits and no more work than its factors.
    """
    W, n = spectrum.whitening, len(spectrum.whitening)
    residual = Head(W, link=links.RESIDUAL)
    if basis == "spectral":
        return {"features": Head(W), "residual": residual}
    explicit = 2 * W.shape[1] > n and _EPS * condition(spectrum.eigenvalues) ** 0.5 <= _ROUNDED_ROOT
    if not explicit:
        return {"features": Head(W, rotation=np.sqrt(spectrum.eigenvalues)), "residual": residual}
    half = W * spectrum.eigenvalues**0.25
    root = half @ half.T
    return {"features": Head(root), "residual": Head(root, link=links.RESIDUAL)}
