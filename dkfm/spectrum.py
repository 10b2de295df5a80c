"""A Gram matrix to its inverse root, once: eigenvalues, numerical rank, the policy for kernels that are not PSD.

The rank is relative, never absolute: an eigenvalue is kept above ``max(4 eps lambda_max, 2 |min(lambda_min, 0)|)``,
for the most negative one shows what rounding makes of nothing. Where a kernel is not PSD it shows the kernel, and an
eigenvalue is kept above ``4 eps max |lambda|``.
"""

import warnings

import numpy as np
from scipy.linalg import eigh

from dkfm.errors import DkfmWarning, NotPSDError
from dkfm.kernels.rows import Array
from dkfm.root import EPS, NOISE, Root

__all__ = ["eigh_lower", "factor", "fix_signs", "is_indefinite", "require_psd"]

_OF_POSITIVE_PART = "the certificate is of what is fitted to its positive part"
_OF_KERNEL = "the certificate measures how far the features are from the kernel"


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


def factor(
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
    values, vectors = eigh_lower(K)
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
