"""Bound the rank of centred Gram matrices of kernels whose feature space has a finite dimension."""

from math import comb, inf, isfinite, lgamma, log, prod
from typing import cast

from dkfm.kernels.algebra import Constant, Product, Scaled, Sum
from dkfm.kernels.base import Kernel
from dkfm.kernels.dot_product import Linear, Polynomial
from dkfm.kernels.functions_of_kernels import Power
from dkfm.kernels.serialization import is_code_free
from dkfm.kernels.transformed import AffineMap, Columns, Warped

_MAX_RANK = 1e15
"""Ranks above this count as infinite; no Gram matrix is as large."""


def bound_rank(kernel: Kernel, d: int) -> float:
    """Return an upper bound of the rank of the centred Gram matrix of rows with d columns; infinity if none is known.

    The bound counts functions whose linear combinations, together with a constant, include every k(., y). Kernels with
    functions or classes of the user have no bound.

    >>> from dkfm.kernels import Gaussian, Linear, Polynomial
    >>> bound_rank(Linear() + 1.0, 3), bound_rank(Polynomial(2, offset=1.0), 3), bound_rank(Gaussian(1.0), 3)
    (3, 9, inf)
    """
    return _bound(kernel, d) if is_code_free(kernel) else inf


def _bound(kernel: Kernel, d: int) -> float:
    rank: float = inf
    match kernel:
        case Linear():
            rank = d
        case Polynomial(offset=0.0):
            rank = _count_monomials(d - 1, kernel.degree)
        case Polynomial():
            rank = _count_monomials(d, kernel.degree) - 1
        case Constant():
            rank = 0
        case Scaled() | Warped(h=AffineMap()):
            rank = _bound(kernel.kernel, d)
        case Columns():
            rank = _bound(kernel.kernel, len(cast("tuple[int, ...]", kernel.columns)))
        case Sum():
            rank = sum(_bound(term, d) for term in kernel.terms)
        case Product():
            rank = prod(float(_bound(factor, d)) + 1 for factor in kernel.factors) - 1
        case Power():
            rank = _count_monomials(_bound(kernel.kernel, d), kernel.exponent) - 1
    return rank


def _count_monomials(variables: float, degree: int) -> float:
    """Return the number of monomials up to a degree."""
    if not isfinite(variables):
        return inf
    if lgamma(variables + degree + 1) - lgamma(variables + 1) - lgamma(degree + 1) > log(_MAX_RANK):
        return inf
    return comb(int(variables) + degree, degree)
