"""Kernel principal components of a Gram matrix: the centred problem ``H K H b = mu b``."""

from dataclasses import dataclass

import numpy as np

from dkfm.kernels.blocks import mirror_lower
from dkfm.kernels.rows import Array
from dkfm.spectrum import eigh_lower, fix_signs, require_psd
from dkfm.tiling import row_slices

__all__ = ["Components", "centre", "components"]

_DOUBLE: np.dtype[np.floating] = np.dtype(np.float64)
_CUTS = {_DOUBLE: 1e-12, np.dtype(np.float32): 2e-7}
"""Eigenvalues up to this share of the largest are zero, in what scores: scikit-learn's rule."""


@dataclass(frozen=True, eq=False)
class Components:
    """Kernel principal components: ``scores = k(Z, X) weights - offset``.

    Attributes
    ----------
    eigenvalues : ndarray of shape (q,)
        mu, of the centred Gram matrix, descending; N times the variance along each component.
    weights : ndarray of shape (N, q)
        b, with mean 0 and ``b'b = 1 / mu``; zero where mu is zero.
    offset : ndarray of shape (q,)
        ``e'K b``.
    """

    eigenvalues: Array
    weights: Array
    offset: Array


def centre(K: Array) -> Array:
    """Centre a Gram matrix in place, ``K <- H K H``, from its lower triangle; return the row means of K, (N,)."""
    mirror_lower(K)
    means: Array = K.mean(axis=0)
    total = means.mean()
    for columns in row_slices(len(K), 256):
        K[:, columns] -= means[:, np.newaxis]
        K[:, columns] -= means[columns] - total
    return means


def components(
    K: Array,
    n_components: int | None = None,
    on_indefinite: str = "raise",
    dtype: np.dtype[np.floating] = _DOUBLE,
) -> Components:
    """Solve kernel PCA for a Gram matrix.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Overwritten; only the lower triangle is read.
    n_components : int, optional
        How many; by default all with an eigenvalue above zero.
    on_indefinite : {"raise", "clip"}
        What to do where H K H has an eigenvalue more negative than rounding explains.
    dtype : dtype
        What the components will score in; they are computed in float64.

    Raises
    ------
    NotPSDError
        HKH is not positive semi-definite. K itself need not be.

    Notes
    -----
    Paper, eqs. (12)-(25); the three solutions there have these weights. Re-centring b is what makes them exact:
    eigenvectors of HKH are orthogonal to the constant only to rounding, which the mean of K amplifies.
    """
    n = len(K)
    means = centre(K)
    # Centring rounds like the mean it takes away, which can be far larger than what it leaves.
    scale = n * abs(float(means.mean()))
    values, vectors = eigh_lower(K)
    del K
    lowest, highest = float(values[0]), float(values[-1])
    require_psd(lowest, highest, max(highest, scale), n, on_indefinite, "The centred Gram matrix of this kernel")
    positive = int((values > _CUTS[dtype] * highest).sum()) if highest > 0 else 0
    q = positive if n_components is None else min(n_components, n)
    kept = min(q, positive)
    mu = np.zeros(q)
    mu[:kept] = values[n - kept :][::-1]
    b = np.zeros((n, q))
    b[:, :kept] = vectors[:, n - kept :][:, ::-1]
    b -= b.mean(axis=0)
    lengths = np.sqrt(np.einsum("ij,ij->j", b[:, :kept], b[:, :kept]))
    b[:, :kept] *= fix_signs(b[:, :kept]) / (lengths * np.sqrt(mu[:kept]))
    return Components(mu, b, means @ b)
