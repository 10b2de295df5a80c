"""Compute kernel Fisher discriminants from products and linear systems with a Gram matrix that is not in memory."""

from collections.abc import Callable

import numpy as np

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError
from dkfm.numerics.roots import EPS
from dkfm.numerics.supervised import fisher
from dkfm.numerics.supervised.classes import Classes, within_class_scatter_trace
from dkfm.numerics.supervised.fisher import Discriminants
from dkfm.numerics.supervised.spectral_gram import estimate_rounding
from dkfm.numerics.weighting import Weighting

_MAX_ROUNDING = 1e-6
"""Largest rounding of the uncentred matrix, as a share of the ridge; it is about the relative error of the solution."""


def solve_discriminants_by_systems(
    multiply: Callable[[Array], Array],
    solve: Callable[[float, Array], Array],
    diagonal: Array,
    classes: Classes,
    shrinkage: float,
) -> Discriminants:
    """Find the discriminants of a Gram matrix K; see `fisher.solve_discriminants`.

    Parameters
    ----------
    multiply : callable
        Function of V (N, p) that returns ``K V``.
    solve : callable
        Function of a ridge and right sides B (N, p) that returns ``A^(-1) B`` for ``A = D^(1/2) K D^(1/2) + ridge``,
        with D the weights.
    diagonal : ndarray of shape (N,)
        Diagonal of K.
    classes, shrinkage
        As in `fisher.solve_discriminants`.

    Notes
    -----
    Let u be the unit vector along ``D^(1/2) 1``, and ``P = 1 - u u'``. The centred matrix is ``G = P (A - ridge) P``.
    For Y orthogonal to u, ``(G + ridge)^(-1) Y = A^(-1) Y - A^(-1) u (u'A^(-1) Y) / (u'A^(-1) u)``.
    """
    weighting, Y = Weighting(classes.weights), classes.sqrt_weighted_centred_indicators()
    product = multiply(np.column_stack([weighting.roots[:, np.newaxis] * Y, weighting.shares]))
    means = product[:, -1]
    trace = float(classes.weights @ diagonal) - classes.total * float(means @ weighting.shares)
    between = np.einsum("ij,ij->j", Y, weighting.apply_weighted_centring(product[:, :-1])) / classes.class_weight_sums
    ridge = shrinkage * (within_class_scatter_trace(trace, between) / classes.total)
    fisher.require_ridge_above_rounding(ridge, estimate_rounding(trace, means, weighting), trace)
    rounding = EPS * max(trace, weighting.compute_trace_of_mean(means))
    if rounding > _MAX_ROUNDING * ridge:
        raise InvalidInputError(
            f"A ridge of {ridge:.1e} is hardly above rounding beside the square of the mean of the features, "
            f"{weighting.compute_trace_of_mean(means):.1e}; centre the columns of X, raise shrinkage, or use "
            'solver="dense", which centres first.'
        )
    u = weighting.roots / np.sqrt(classes.total)
    solved = solve(ridge, np.column_stack([Y, u]))
    C, along = solved[:, :-1], solved[:, -1]
    C -= np.outer(along, (u @ C) / (u @ along))
    return fisher.solve_from_coefficients(C, Y, means, classes, ridge, rounding)
