"""Compute kernel Fisher discriminants from a Gram matrix or from a feature map.

With S_w the covariance within the classes and m_c the class means, a discriminant is a direction u in the span of
``(S_w + lambda)^(-1) (m_c - m)``. The ridge ``lambda`` belongs to the feature space, so u is the same in every basis.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.linalg import LinAlgError

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, NotPSDError
from dkfm.numerics import links
from dkfm.numerics.model import Head
from dkfm.numerics.roots import EPS, ROUNDING_SHARE, choose_signs
from dkfm.numerics.supervised.classes import Classes, within_class_scatter_trace
from dkfm.numerics.supervised.kernel_rank import UNBOUNDED, RankBound
from dkfm.numerics.supervised.spectral_gram import (
    MATRIX,
    SpectralGram,
    decompose_centred,
    estimate_rounding,
    estimate_score_error,
)
from dkfm.numerics.weighting import Weighting, center_and_weigh_gram_in_place

_MIN_BETWEEN = 1e-10
"""Share of the variance of a direction below which its variance between the classes is rounding error."""

_MIN_WITHIN = 1e-12
"""Share of the variance of a direction below which its variance within the classes is numerically zero."""

_MAX_ROUNDING = 1e-6
"""Largest rounding, as a share of the ridge, for which a Cholesky factor is used; it is about the relative error."""


@dataclass(frozen=True, eq=False)
class Discriminants:
    """Discriminants of C classes: ``scores = k(Z, X) weights - offset``."""

    weights: Array
    """Coefficients b of each direction ``u = sum_n b_n phi(x_n)``; ``u_i' (S_w + lambda) u_j`` is 1 if i = j, else 0.
    Shape (N, q)."""
    offset: Array
    """Offset that makes the mean of the training scores 0. Shape (q,)."""
    between_class_variances: Array
    """Variance between the classes along each direction, weighted by the priors; descending. Shape (q,)."""
    means: Array
    """Scores of the class means. Shape (C, q)."""
    ridge: float
    """Ridge ``lambda``."""
    direction_inner_products: Array | None = None
    """Inner products u'u of the discriminants of a map. Shape (q, q)."""
    rounding: float = 0.0
    """Estimate, at most 1, of the relative error of the scores that rounding of the kernel values causes."""


def solve_discriminants(
    K: Array,
    classes: Classes,
    shrinkage: float,
    *,
    by_eigenvalues: bool | None = None,
    on_indefinite: str = "raise",
    rank_bound: RankBound = UNBOUNDED,
) -> Discriminants:
    """Find the discriminants of a Gram matrix.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Gram matrix, overwritten; only the lower triangle is read.
    classes : Classes
        Classes of the rows.
    shrinkage : float
        Shrinkage, with ``lambda = shrinkage tr(S_w) / N`` and N the sum of the weights.
    by_eigenvalues : bool, optional
        Whether to decompose the matrix, which detects a kernel that is not positive semi-definite and drops eigenvalues
        that are rounding errors. Otherwise a Cholesky factor is computed, which needs a ridge above rounding. By
        default, the matrix is decomposed if rounding exceeds a millionth of the ridge.
    on_indefinite : {"raise", "clip"}
        Whether to raise an error or to drop the negative part.
    rank_bound : RankBound, optional
        Upper bounds of the rank of the centred matrix.

    Raises
    ------
    InvalidInputError
        ``S_w + lambda`` is singular.
    NotPSDError
        The kernel is not positive semi-definite.

    Notes
    -----
    Let ``G = S K S'`` as in `kernel_components`, Y be the centred indicators of the classes, F the diagonal matrix of
    their shares of the weights, ``R = (G + N lambda)^(-1)``, and ``E = lambda Y'RY``, the residual of a ridge
    regression of Y. The eigenproblem ``E a = theta F a`` gives ``u = S'R Y a / sqrt(theta (1 - theta))``, the ratio
    ``(1 - theta) / theta``, and the scores ``a sqrt(ratio)`` of the class means. No nearly equal numbers are
    subtracted, and no root of K is needed. The regression is that of Hastie, Buja and Tibshirani, "Penalized
    discriminant analysis" (1995).
    """
    weighting, Y = Weighting(classes.weights), classes.sqrt_weighted_centred_indicators()
    means = center_and_weigh_gram_in_place(K, weighting)
    ridge = rounding = 0.0
    if not by_eigenvalues:
        ridge = _compute_gram_ridge(K, Y, classes, shrinkage)
        rounding = estimate_rounding(float(np.trace(K)), means, weighting)
        by_eigenvalues = by_eigenvalues is None and rounding > _MAX_ROUNDING * ridge
    if by_eigenvalues:
        spectral = decompose_centred(K, Y, on_indefinite, means, weighting, rank_bound)
        return solve_from_eigenvectors(spectral, classes, shrinkage)
    return solve_from_coefficients(_solve_by_cholesky(K, Y, ridge, rounding), Y, means, classes, ridge, rounding)


def solve_from_eigenvectors(spectral: SpectralGram, classes: Classes, shrinkage: float) -> Discriminants:
    """Find the discriminants of a decomposed Gram matrix; see `solve_discriminants`."""
    ridge = shrinkage * (spectral.within_class_scatter_trace(classes) / classes.total)  # N lambda
    spectral = spectral.include_small_values(ridge)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows raises below
        residual = spectral.indicator_residual_products(ridge)
        C = spectral.solve_ridge_coefficients(ridge)
    directions = _solve_finite_directions(residual, classes, ridge)
    rounding, of_functions = spectral.estimate_errors(ridge, directions.combinations)
    if of_functions >= 1 or (classes.weights != classes.weights[0]).any():  # rows unlike most others may err more
        rounding = max(rounding, of_functions)
    return _make_discriminants(C, directions, spectral.gram_row_means, classes, ridge, rounding)


def solve_from_coefficients(
    C: Array, Y: Array, means: Array, classes: Classes, ridge: float, rounding: float
) -> Discriminants:
    """Find the discriminants from ``C = R Y`` (N, C) and the ridge ``N lambda``; see `solve_discriminants`.

    `rounding` is the rounding error of the eigenvalues of the centred Gram matrix, and `means` (N,) of the rows of K.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows raises below
        directions = _solve_finite_directions(ridge * (Y.T @ C), classes, ridge)
        targets, residuals = Y @ directions.combinations, (ridge * C) @ directions.combinations
        changes = rounding / ridge * residuals  # as long as E c, with E a rounding error of G and c = R Y A
        share = estimate_score_error(targets, residuals, changes, rounding / ridge * np.square(residuals).sum(axis=0))
    return _make_discriminants(C, directions, means, classes, ridge, share)


def _solve_finite_directions(residual: Array, classes: Classes, ridge: float) -> "_Directions":
    """Return the directions from ``ridge Y'RY`` (C, C) and the ridge ``N lambda``; raise if they overflow."""
    if not np.isfinite(residual).all():
        raise InvalidInputError(
            f"The coefficients of discriminants with a ridge of {ridge:.1e} overflow; scale the kernel or the rows up."
        )
    return solve_directions(residual / classes.total, classes)


def _make_discriminants(
    C: Array, directions: "_Directions", means: Array, classes: Classes, ridge: float, rounding: float
) -> Discriminants:
    with np.errstate(over="ignore", invalid="ignore"):  # the certificate reports values that overflow
        b = Weighting(classes.weights).apply_weighted_centring_adjoint(C @ directions.combinations)
    return Discriminants(
        b,
        means @ b,
        directions.between_class_variances,
        directions.means,
        ridge / classes.total,
        rounding=min(1.0, rounding),
    )


def solve_discriminants_of_map(
    W: Array, second_moment: Array, class_sums: Array, classes: Classes, shrinkage: float
) -> Discriminants:
    """Find the discriminants in the feature space of an explicit map ``k(z, landmarks) W``.

    Parameters
    ----------
    W : ndarray of shape (n, r)
        Weights of the map.
    second_moment : ndarray of shape (r, r)
        ``sum w phi phi'`` of the training rows, C-contiguous and symmetric; it is overwritten.
    class_sums : ndarray of shape (C, r)
        ``sum w phi`` of each class.
    classes : Classes
        Classes of the training rows.
    shrinkage : float
        As in `solve_discriminants`.
    """
    from scipy.linalg import blas, cho_factor, cho_solve

    means, shares = class_sums / classes.class_weight_sums[:, np.newaxis], classes.class_weight_shares
    centred = means - shares @ means
    within = np.divide(second_moment, classes.total, out=second_moment).T  # Fortran-contiguous
    if within.size:
        within = blas.dsyrk(-1, (means * np.sqrt(shares)[:, np.newaxis]).T, beta=1, c=within, lower=1, overwrite_c=1)
    between = shares * np.square(centred).sum(axis=1)
    ridge = shrinkage * (within_class_scatter_trace(float(np.trace(within) + between.sum()), between) / classes.total)
    within.flat[:: len(within) + 1] += ridge
    try:
        V = cho_solve(cho_factor(within, lower=True, overwrite_a=True, check_finite=False), centred.T)
    except LinAlgError:
        raise _make_singular_error(0.0) from None
    # Solve for the ratio of the variance between the classes to that within, in the span of the class means.
    roots = np.sqrt(shares)
    ratios, g = (part[..., ::-1] for part in _eigh_orthogonal_to(roots, (centred @ V) * np.outer(roots, roots)))
    kept = ratios > _MIN_BETWEEN
    ratios, A = ratios[kept], g[:, kept] / roots[:, np.newaxis]
    if len(ratios) and 1 / (1 + ratios[0]) <= _MIN_WITHIN:
        raise _make_singular_error(1 / (1 + float(ratios[0])))
    combinations = A * shares[:, np.newaxis] / np.sqrt(ratios)
    found = _diagonalize_prior_scatter(combinations, A * np.sqrt(ratios), ratios, classes)
    U = V @ found.combinations
    return Discriminants(W @ U, shares @ means @ U, found.between_class_variances, found.means, ridge, U.T @ U)


def make_discriminant_heads(found: Discriminants, classes: Classes, n_components: int | None) -> dict[str, Head]:
    """Return the heads of discriminants: "scores" has the first `n_components` of them, decisions use all."""
    offset, (T, constants) = found.offset, decision_functions(found.means, classes.effective_priors)
    decision = Head(found.weights @ T, offset @ T + constants)
    probability_link = links.SIGMOID if classes.n_columns == 2 else links.SOFTMAX
    return {
        "scores": Head(found.weights, offset[:n_components], n_leading_columns=n_components),
        "decision_function": decision,
        "predict": replace(decision, link=links.ARGMAX),
        "predict_proba": replace(decision, link=probability_link),
    }


def decision_functions(means: Array, priors: Array) -> tuple[Array, Array]:
    """Return the coefficients (q, C) and offsets (C,) of the decision functions of scores.

    The decision function of a class is ``log prior - |s - m_c|^2 / 2`` for scores s and the scores m_c of the class
    mean, without the term ``-|s|^2 / 2``, which is the same for all classes. This is linear discriminant analysis with
    the covariance ``S_w + lambda``. Two classes have one decision function: that of the second minus that of the first.
    """
    T, constants = means.T, np.einsum("ij,ij->i", means, means) / 2 - np.log(priors)
    if len(priors) == 2:
        T, constants = T[:, 1:] - T[:, :1], constants[1:] - constants[:1]
    return T, constants


def _compute_gram_ridge(G: Array, Y: Array, classes: Classes, shrinkage: float) -> float:
    """Return ``N lambda``, with lambda the `Discriminants.ridge`; raise if the variance within classes is rounding."""
    Y = Y / np.sqrt(classes.class_weight_sums)  # products with large or small weights stay in range
    between = np.einsum("ij,ij->j", Y, G @ Y)
    return shrinkage * (within_class_scatter_trace(float(np.trace(G)), between) / classes.total)


def require_ridge_above_rounding(ridge: float, rounding: float, trace: float) -> None:
    """Raise an InvalidInputError if a ridge is negligible beside the rounding errors of a centred Gram matrix."""
    if ridge <= max(ROUNDING_SHARE * trace, 4 * rounding):
        raise InvalidInputError(
            f"A ridge of {ridge:.1e} is nothing beside the rounding of kernel values whose variance is {trace:.1e}; "
            "raise shrinkage, or centre the columns of X."
        )


def _solve_by_cholesky(G: Array, Y: Array, ridge: float, rounding: float) -> Array:
    """Return ``(G + ridge)^(-1) Y`` (N, C); G is overwritten."""
    from scipy.linalg import cho_factor, cho_solve

    require_ridge_above_rounding(ridge, rounding, float(np.trace(G)))
    G.T.flat[:: len(G) + 1] += ridge
    try:
        factor = cho_factor(G, lower=True, overwrite_a=True, check_finite=False)
    except LinAlgError:
        raise NotPSDError(
            f"{MATRIX} has an eigenvalue below -{ridge:.6g}, which the ridge does not lift above 0; choose another "
            'kernel, or drop its negative part with on_indefinite="clip" (--on-indefinite clip).'
        ) from None
    solution: Array = cho_solve(factor, Y, check_finite=False)
    return solution


@dataclass(frozen=True, eq=False)
class _Directions:
    """Directions as combinations (C, q) of one vector for each class, with their class means (C, q) and variances."""

    combinations: Array
    means: Array
    between_class_variances: Array


def solve_directions(residual_cross_products: Array, classes: Classes) -> _Directions:
    """Return the directions from the residual products E (C, C), as combinations of the columns of ``R Y``."""
    roots = np.sqrt(classes.class_weight_shares)
    theta, g = _eigh_orthogonal_to(roots, residual_cross_products / np.outer(roots, roots))
    if theta[0] <= _MIN_WITHIN:
        raise _make_singular_error(float(theta[0]))
    kept = 1 - theta > _MIN_BETWEEN
    theta, A = theta[kept], g[:, kept] / roots[:, np.newaxis]
    ratios = (1 - theta) / theta
    return _diagonalize_prior_scatter(A / np.sqrt(theta * (1 - theta)), A * np.sqrt(ratios), ratios, classes)


def _eigh_orthogonal_to(v: Array, M: Array) -> tuple[Array, Array]:
    """Return the ascending eigenvalues, and eigenvectors, of M (C, C) in the orthogonal complement of v (C,)."""
    from scipy.linalg import eigh

    Q = np.linalg.qr(v[:, np.newaxis], mode="complete").Q[:, 1:]
    values, vectors = eigh(Q.T @ ((M + M.T) / 2) @ Q)
    return values, Q @ vectors


def _diagonalize_prior_scatter(combinations: Array, means: Array, ratios: Array, classes: Classes) -> _Directions:
    """Rotate directions so that the prior-weighted scatter is diagonal; fix signs by the class means."""
    if classes.priors is not None and len(ratios):
        from scipy.linalg import eigh

        centred = means - classes.priors @ means
        ascending, rotation = eigh((centred * classes.priors[:, np.newaxis]).T @ centred)
        ratios, rotation = ascending[::-1], rotation[:, ::-1]
        combinations, means = combinations @ rotation, means @ rotation
    signs = choose_signs(means)
    return _Directions(combinations * signs, means * signs, ratios)


def _make_singular_error(share: float) -> InvalidInputError:
    return InvalidInputError(
        "The covariance within the classes is singular: a direction that tells the classes apart has "
        f"{max(share, EPS):.1e} of its variance within them, and at least {_MIN_WITHIN:.0e} is needed; raise shrinkage."
    )
