"""Bound the rank of centred Gram matrices of kernels whose feature space has a finite dimension."""

from math import comb, inf, isfinite, lgamma, log, prod
from typing import NamedTuple, cast

import numpy as np

from dkfm.core.rows import Rows
from dkfm.kernels.algebra import Constant, Product, Scaled, Sum
from dkfm.kernels.base import Definiteness, Kernel
from dkfm.kernels.dot_product import Cosine, Linear, Polynomial
from dkfm.kernels.functions_of_kernels import Power
from dkfm.kernels.serialization import is_code_free
from dkfm.kernels.stationary import NegativeSquaredDistance
from dkfm.kernels.transformed import AffineMap, Columns, Warped

_MAX_RANK = 1e15
"""Ranks above this count as infinite; no Gram matrix is as large."""

_MAX_RANKED_COLUMNS = 64
"""Largest number of columns of which those that depend on others are found."""


class RankBound(NamedTuple):
    """Upper bounds of the rank of the centred Gram matrix of some rows."""

    of_kernel: float = inf
    """Number of functions whose linear combinations, together with a constant, include every k(., y); infinity if none
    is known."""
    of_rows: float = inf
    """Number of different rows, less one."""


UNBOUNDED = RankBound()
"""Bounds of a matrix of which nothing is known."""


def bound_rank(kernel: Kernel, X: Rows) -> RankBound:
    """Return upper bounds of the rank of the centred Gram matrix of rows X (N, d).

    That of the kernel may be too large for sums, products and dependent columns. It is infinite for kernels with
    functions or classes of the user.

    >>> from dkfm.kernels import Gaussian, Linear, Polynomial
    >>> X = np.random.default_rng(0).normal(size=(50, 3))
    >>> bound_rank(Polynomial(2, offset=1.0), X), bound_rank(Gaussian(1.0), X)
    (RankBound(of_kernel=9, of_rows=49), RankBound(of_kernel=inf, of_rows=49))
    """
    different = _count_different_rows(X) - 1
    if not is_code_free(kernel) or _bound(kernel, 1, 1) == inf:
        return RankBound(of_rows=different)
    return RankBound(_bound(kernel, X.shape[1], _count_independent_columns(X)), different)


def _count_different_rows(X: Rows) -> int:
    """Return the number of rows that differ; of sparse rows, the number of rows."""
    return len({hash(row.tobytes()) for row in X}) if isinstance(X, np.ndarray) else int(X.shape[0])


def _count_independent_columns(X: Rows) -> int:
    """Return an upper bound of the dimension of the smallest affine space that contains the rows."""
    if not isinstance(X, np.ndarray):
        return int(X.shape[1])
    varying = np.flatnonzero(X.max(axis=0) > X.min(axis=0))
    if not 0 < len(varying) <= _MAX_RANKED_COLUMNS:
        return len(varying)
    differences = X[:, varying] - X[0, varying]
    return int(np.linalg.matrix_rank(differences / np.abs(differences).max(axis=0)))


def _bound(kernel: Kernel, d: int, independent: int) -> float:
    """Return the bound for rows of d columns in an affine space of `independent` dimensions."""
    rank: float = inf
    match kernel:
        case Linear() | NegativeSquaredDistance():  # the centred matrix of -|x - y|^2 is that of 2 x'y
            rank = independent
        case Cosine():
            rank = d
        case Polynomial():
            rank = _count_monomials(independent, kernel.degree) - 1
            if not kernel.offset and d:
                rank = min(rank, _count_monomials(d - 1, kernel.degree))
        case Constant():
            rank = 0
        case Scaled() | Warped(h=AffineMap()):
            rank = _bound(kernel.kernel, d, independent)
        case Columns():
            count = len(cast("tuple[int, ...]", kernel.columns))
            rank = _bound(kernel.kernel, count, min(count, independent))
        case Sum():
            rank = sum(_bound(term, d, independent) for term in kernel.terms)
        case Product() if kernel.definiteness is Definiteness.PSD:
            rank = prod(float(_bound(factor, d, independent)) + 1 for factor in kernel.factors) - 1
        case Power() if kernel.definiteness is Definiteness.PSD:
            rank = _count_monomials(_bound(kernel.kernel, d, independent), kernel.exponent) - 1
    return rank


def _count_monomials(variables: float, degree: int) -> float:
    """Return the number of monomials up to a degree."""
    if not isfinite(variables):
        return inf
    if lgamma(variables + degree + 1) - lgamma(variables + 1) - lgamma(degree + 1) > log(_MAX_RANK):
        return inf
    return comb(int(variables) + degree, degree)
