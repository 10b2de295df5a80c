"""Decompose a symmetric matrix in memory with LAPACK: all eigenpairs, or all eigenvalues and the leading eigenvectors.

SciPy is imported in the functions that call it, because scoring with a model does not need it.
"""

import numpy as np
from numpy.linalg import LinAlgError

from dkfm.core.rows import Array
from dkfm.kernels.pairwise.block_operations import mirror_lower

_MIN_ROWS_PER_EIGENVECTOR = 6
"""With fewer rows per requested eigenvector, computing all eigenpairs takes hardly longer."""


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
    LAPACK ``dsyevd`` needs a workspace of 2 N^2 values. The paper's kernel k1 with each row given twice shows why the
    lower triangle is used: with the upper triangle the error was ``7 eps lambda_max``, above the threshold of the rank;
    with the lower triangle it is below ``2 eps lambda_max``. ``dsyevr`` lost two to three digits on clustered
    eigenvalues.
    """
    from scipy.linalg import eigh

    values, vectors = eigh(K, lower=True, overwrite_a=True, check_finite=False, driver="evd")
    return values, vectors


def add_spare_row(K: Array) -> Array:
    """Return a copy of a symmetric matrix with one more row and column, for `eigh_without_spare_row`.

    Parameters
    ----------
    K : ndarray of shape (N, N)
        Matrix, N >= 1, of which only the lower triangle is read.

    Returns
    -------
    ndarray of shape (N + 1, N + 1), Fortran-contiguous
        Lower triangle of the matrix. The second row and column are spare: they are 0 except on the diagonal, where the
        value is minus the largest diagonal entry of K, far from the eigenvalues of a positive semi-definite K.
    """
    n = len(K)
    bordered = np.empty((n + 1, n + 1), order="F")
    bordered[0, 0], bordered[2:, 0], bordered[2:, 2:] = K[0, 0], K[1:, 0], K[1:, 1:]
    bordered[1, 0], bordered[2:, 1] = 0.0, 0.0
    bordered[1, 1] = -np.abs(K.diagonal()).max()
    return bordered


def eigh_without_spare_row(bordered: Array) -> tuple[Array, Array]:
    """Decompose the matrix K from the result of `add_spare_row`, (N + 1, N + 1), which is overwritten.

    Returns
    -------
    eigenvalues : ndarray of shape (N,)
        Ascending.
    vectors : ndarray of shape (N, N)
        Eigenvectors in columns, in the memory of the bordered matrix.

    Notes
    -----
    The first reflector of LAPACK's reduction to tridiagonal form maps the first column x to a multiple of a unit vector
    e. The rounding error of the update with it is a multiple of ``v v'`` with ``v = x / |x| +- e``. If x lies along a
    dominant eigenvector, half of this error, up to a few ``eps lambda_max``, is in the diagonal entry of e. Without a
    spare row, that is the second row of the matrix, whose error was ten times that of any other row (for the kernel k2
    of the paper and 1,500 images: 1.4e-13 and 2e-14). Later reflectors of a matrix with several dominant eigenvectors,
    or whose first row is orthogonal to the others, still leave such errors in the next rows.

    If a negative eigenvalue of K equals that of the spare row (minus the largest diagonal entry), the eigenvectors of
    both mix, and are not orthonormal after the spare row is removed. Eigenvectors of other eigenvalues are.
    """
    values, vectors = eigh_in_place(bordered)
    spare = int(np.abs(vectors[1]).argmax())
    vectors[:, 1 : spare + 1] = vectors[:, :spare]
    vectors[1] = vectors[0]
    return np.delete(values, spare), vectors[1:, 1:]


def eigh_leading_vectors_in_place(K: Array, q: int) -> tuple[Array, Array]:
    """Compute all eigenvalues of a symmetric matrix, and the eigenvectors of the q largest, from its lower triangle.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Matrix, overwritten; only the lower triangle is read.
    q : int
        Number of eigenvectors, from 1 to N.

    Returns
    -------
    eigenvalues : ndarray of shape (N,)
        Ascending.
    vectors : ndarray of shape (N, p)
        Orthonormal eigenvectors of the p largest eigenvalues, in columns in ascending order; p is at least q.

    Notes
    -----
    If q is much smaller than N, the eigenvectors are computed from the tridiagonal form by relatively robust
    representations (LAPACK ``dstemr``). For clustered eigenvalues their inner products are up to 1e-12. One
    Rayleigh-Ritz step with K makes them orthonormal to rounding. SciPy's wrapper of ``dstemr`` fills an array of N^2
    values for any q.
    """
    from scipy.linalg import blas, eigh_tridiagonal, lapack, qr

    n = len(K)
    if n < 3 or _MIN_ROWS_PER_EIGENVECTOR * q > n:
        return eigh_in_place(K)
    mirror_lower(K)  # the reduction overwrites the lower triangle
    diagonal = K.diagonal().copy()
    reduced, d, e, tau, _ = lapack.dsytrd(K, lower=1, lwork=_WORK_COLUMNS * n, overwrite_a=1)
    values = eigh_tridiagonal(d, e, eigvals_only=True, lapack_driver="sterf", check_finite=False)
    vectors = _apply_reflectors(reduced, tau, _find_tridiagonal_eigenvectors(d, e, q))
    Q = qr(vectors, mode="economic", overwrite_a=True, check_finite=False)[0]
    np.fill_diagonal(reduced, diagonal)
    ritz_values, rotation = eigh_in_place(np.asfortranarray(Q.T @ blas.dsymm(1.0, reduced, Q, lower=0)))
    values[n - q :] = ritz_values
    return np.maximum.accumulate(values), Q @ rotation


_WORK_COLUMNS = 64
"""Columns of LAPACK's workspace: its largest block size."""


def _find_tridiagonal_eigenvectors(d: Array, e: Array, q: int) -> Array:
    """Return the eigenvectors (n, q) of the q largest eigenvalues of a symmetric tridiagonal matrix."""
    from scipy.linalg import eigh_tridiagonal

    for driver in ("stemr", "stebz"):  # the slower second driver also handles clusters on which the first fails
        try:
            vectors: Array = eigh_tridiagonal(
                d, e, select="i", select_range=(len(d) - q, len(d) - 1), lapack_driver=driver, check_finite=False
            )[1]
        except LinAlgError:
            continue
        if np.isfinite(vectors).all():
            return np.array(vectors, order="F")  # a copy, because they may be a view of an array of N^2 values
    raise LinAlgError("The eigenvectors of a tridiagonal matrix did not converge.")


def _apply_reflectors(reduced: Array, tau: Array, vectors: Array) -> Array:
    """Return the eigenvectors of a matrix from those of its tridiagonal form, by the reflectors of the reduction."""
    from scipy.linalg import lapack

    n, q = vectors.shape
    # Columns that begin in the second row. Each ends with an entry of the next column, which is not read.
    columns = reduced.ravel(order="F")[1 : 1 + n * (n - 1)].reshape(n, n - 1, order="F")
    product = lapack.dormqr("L", "N", columns, tau, vectors[1:], lwork=_WORK_COLUMNS * q)[0]
    return np.concatenate([vectors[:1], product])
