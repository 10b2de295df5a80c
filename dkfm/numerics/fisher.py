"""Fisher discriminants in the feature space of a kernel: of a Gram matrix, and of a feature map.

With S_w the covariance within the classes and m_c their means, a discriminant is a direction u in the span of
``(S_w + lambda)^(-1) (m_c - m)``; ``lambda`` is a number of the feature space, so all bases of it have the same u.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, NotPSDError
from dkfm.numerics import links
from dkfm.numerics.model import Head
from dkfm.numerics.pca import Weighting, center_gram
from dkfm.numerics.roots import EPS, NOISE, eigh_in_place, fix_signs, require_psd

Codes = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.intp]

_APART = 1e-10
"""Share of a direction's variance that lies between the classes: what is below comes from rounding."""

_WITHIN = 1e-12
"""Share of it that lies within them: below it the matrix that is inverted is singular to rounding."""

_HELD = 1e-6
"""Share of the ridge that rounding may be where a Cholesky factor is taken: as much is then its error."""

_WHAT = "The centred Gram matrix of this kernel"


@dataclass(frozen=True, eq=False)
class Classes:
    """Which of C classes each training row is of (N,), with the weights w (N,) of the rows.

    Attributes
    ----------
    priors : ndarray of shape (C,), optional
        Probabilities of the classes; by default their shares of the weights.
    """

    codes: Codes
    weights: Array
    count: int
    priors: Array | None = None

    @cached_property
    def sizes(self) -> Array:
        """Sum of the weights of each class, (C,)."""
        sizes: Array = np.bincount(self.codes, self.weights, self.count).astype(np.float64)
        return sizes

    @cached_property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.weights.sum())

    @property
    def shares(self) -> Array:
        """Share of each class in the weights, (C,)."""
        return self.sizes / self.total

    @property
    def chances(self) -> Array:
        """The priors, or the shares, (C,)."""
        return self.shares if self.priors is None else self.priors

    def indicators(self) -> Array:
        """Return the weight of a row in the column of its class, (N, C), else 0."""
        found = np.zeros((len(self.codes), self.count))
        found[np.arange(len(self.codes)), self.codes] = self.weights
        return found

    def centred(self) -> Array:
        """Return ``D^(1/2) (Y - 1 shares')`` (N, C) of the classes' indicators Y."""
        roots = np.sqrt(self.weights)[:, np.newaxis]
        return self.indicators() / roots - roots * self.shares

    def subset(self, numbers: Numbers) -> "Classes":
        """Return those of some rows."""
        return replace(self, codes=self.codes[numbers], weights=self.weights[numbers])


@dataclass(frozen=True, eq=False)
class Discriminants:
    """Discriminants of C classes: ``scores = k(Z, X) weights - offset``.

    Attributes
    ----------
    weights : ndarray of shape (N, q)
        b, of each direction ``u = sum_n b_n phi(x_n)``, with ``u_i' (S_w + lambda) u_j = 1`` for i = j, else 0.
    offset : ndarray of shape (q,)
        What makes the mean of the training scores 0.
    ratios : ndarray of shape (q,)
        Variance between the classes, which the priors weigh, along each direction; descending.
    means : ndarray of shape (C, q)
        Scores of the class means.
    ridge : float
        ``lambda``.
    squares : ndarray of shape (q, q), optional
        u'u, of the discriminants of a map.
    """

    weights: Array
    offset: Array
    ratios: Array
    means: Array
    ridge: float
    squares: Array | None = None


def solve_discriminants(
    K: Array, classes: Classes, shrinkage: float, *, by_eigenvalues: bool | None = None, on_indefinite: str = "raise"
) -> Discriminants:
    """Find the discriminants of a Gram matrix.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Overwritten; only the lower triangle is read.
    classes : Classes
    shrinkage : float
        ``lambda = shrinkage tr(S_w) / N``, N the sum of the weights.
    by_eigenvalues : bool, optional
        Whether the matrix is decomposed, which shows that a kernel is not positive semi-definite, and leaves out what
        rounding makes of nothing. Without it one Cholesky factor is enough, unless the ridge is nothing beside
        rounding, which is refused. By default it is where rounding is more than a millionth of the ridge.
    on_indefinite : {"raise", "clip"}
        What to do with a negative part.

    Raises
    ------
    InvalidInputError
        S_w + lambda is singular.
    NotPSDError

    Notes
    -----
    With ``G = S K S'`` as `dkfm.numerics.pca` has it, Y the centred indicators of the classes and F their shares,
    ``R = (G + N lambda)^(-1)`` and ``E = lambda Y'RY`` (what a ridge regression of Y leaves), ``E a = theta F a`` has
    all: ``u = S'R Y a / sqrt(theta (1 - theta))``, the ratio is ``(1 - theta) / theta`` and the class means score
    ``a sqrt(ratio)``.
    Nothing is subtracted that is almost equal, and no root of K is needed. Hastie, Buja and Tibshirani, "Penalized
    discriminant analysis" (1995), for the regression.
    """
    weighting, Y = Weighting(classes.weights), classes.centred()
    means = center_gram(K, weighting)
    ridge = rounding = 0.0
    if not by_eigenvalues:
        ridge, rounding = _ridge(K, Y, classes, shrinkage), _rounding(K, means, weighting)
        by_eigenvalues = by_eigenvalues is None and rounding > _HELD * ridge
    if by_eigenvalues:
        spectral = decompose(K, Y, on_indefinite, means, weighting)
        ridge = shrinkage * spectral.within(classes) / classes.total  # N lambda
        C, left = spectral.combination(ridge), spectral.residual(ridge) / classes.total
    else:
        C = _by_cholesky(K, Y, ridge, rounding)
        left = ridge / classes.total * (Y.T @ C)
    found = directions_of_residual(left, classes)
    b = weighting.inner(C @ found.combinations)
    return Discriminants(b, means @ b, found.ratios, found.means, ridge / classes.total)


def solve_discriminants_of_map(
    W: Array, second: Array, sums: Array, classes: Classes, shrinkage: float
) -> Discriminants:
    """Find the discriminants in the feature space of an explicit map ``k(z, landmarks) W``.

    Parameters
    ----------
    W : ndarray of shape (n, r)
    second : ndarray of shape (r, r)
        ``sum w phi phi'`` of the training rows.
    sums : ndarray of shape (C, r)
        ``sum w phi`` of each class.
    classes : Classes
        Of the training rows.
    shrinkage : float
    """
    means, shares = sums / classes.sizes[:, np.newaxis], classes.shares
    middle = shares @ means
    centred = means - middle
    within = np.asfortranarray(second / classes.total)
    within -= (means * shares[:, np.newaxis]).T @ means
    between = shares * np.square(centred).sum(axis=1)
    ridge = shrinkage * _spread_within(float(np.trace(within) + between.sum()), between) / classes.total
    within.flat[:: len(within) + 1] += ridge
    try:
        V = cho_solve(cho_factor(within, lower=True, overwrite_a=True, check_finite=False), centred.T)
    except LinAlgError:
        raise _singular(0.0) from None
    # The variance between, over that within, of what the class means span.
    roots = np.sqrt(shares)
    ratios, g = (part[..., ::-1] for part in _eigh_beside(roots, (centred @ V) * np.outer(roots, roots)))
    kept = ratios > _APART
    ratios, A = ratios[kept], g[:, kept] / roots[:, np.newaxis]
    if len(ratios) and 1 / (1 + ratios[0]) <= _WITHIN:
        raise _singular(1 / (1 + float(ratios[0])))
    found = _turned(A * shares[:, np.newaxis] / np.sqrt(ratios), A * np.sqrt(ratios), ratios, classes)
    U = V @ found.combinations
    return Discriminants(W @ U, middle @ U, found.ratios, found.means, ridge, U.T @ U)


def discriminant_heads(found: Discriminants, classes: Classes, count: int | None) -> dict[str, Head]:
    """Return the heads of discriminants: "scores", of which `count` are asked for, and what decides by all of them."""
    offset, (T, constants) = found.offset, decision_functions(found.means, classes.chances)
    decided = Head(found.weights @ T, offset @ T + constants)
    chances = links.SIGMOID if classes.count == 2 else links.SOFTMAX
    return {
        "scores": Head(found.weights, offset if count is None else offset[:count], first=count),
        "decision_function": decided,
        "predict": replace(decided, link=links.ARGMAX),
        "predict_proba": replace(decided, link=chances),
    }


def decision_functions(means: Array, priors: Array) -> tuple[Array, Array]:
    """Return the combinations (q, C) of scores that decide, and what is subtracted from them (C,).

    The decision for a class is ``log prior - |s - m_c|^2 / 2`` of scores s and the scores m_c of its mean, less the
    ``-|s|^2 / 2`` that all classes have: linear discriminant analysis with the covariance ``S_w + lambda``. Two classes
    have one decision, the second's less the first's.
    """
    T, constants = means.T, np.einsum("ij,ij->i", means, means) / 2 - np.log(priors)
    if len(priors) == 2:
        T, constants = T[:, 1:] - T[:, :1], constants[1:] - constants[:1]
    return T, constants


def _spread_within(total: float, between: Array) -> float:
    within = total - float(between.sum())
    if not within > 1e-13 * total:
        raise InvalidInputError(
            "The training rows do not vary within their classes, for the kernel tells the rows of a class apart by "
            f"{max(within, 0.0):.1e} where all rows vary by {max(total, 0.0):.1e}; discriminants need classes of "
            "several rows, and a kernel that tells them apart: centre the columns of X where they are far from 0."
        )
    return within


@dataclass(frozen=True, eq=False)
class SpectralGram:
    """A centred Gram matrix by its eigenvectors above rounding, and the indicators in these: ``R Y`` of any ridge."""

    values: Array
    vectors: Array
    image: Array
    beyond: Array
    """Y'Y of the part of Y that no eigenvector has."""

    def within(self, classes: Classes) -> float:
        """Return ``N tr(S_w)``, once it is seen to be above rounding."""
        between = (self.image**2 * self.values[:, np.newaxis]).sum(axis=0) / classes.sizes
        return _spread_within(float(self.values.sum()), between)

    def scaled(self, ridge: float) -> Array:
        """Return R Y in the eigenvectors, (r, C)."""
        scaled: Array = self.image / (self.values + ridge)[:, np.newaxis]
        return scaled

    def combination(self, ridge: float) -> Array:
        """Return R Y (N, C), without what no feature has."""
        return self.vectors @ self.scaled(ridge)

    def residual(self, ridge: float) -> Array:
        """Return ``ridge Y'RY`` (C, C), for a ridge of 0 too."""
        return ridge * (self.image.T @ self.scaled(ridge)) + self.beyond


def decompose(G: Array, Y: Array, on_indefinite: str, means: Array, weighting: Weighting) -> SpectralGram:
    """Decompose a centred Gram matrix, which is overwritten, with the means of K's rows for the scale of rounding."""
    values, vectors = eigh_in_place(G)
    lowest, highest = float(values[0]), float(values[-1])
    scale = max(highest, weighting.total * abs(float(means @ weighting.shares)))
    clipped = require_psd(lowest, highest, scale, len(G), on_indefinite, _WHAT)
    rounding = 16 * EPS * scale / float(np.sqrt(len(values)))
    cut = max(4 * EPS * highest, rounding, clipped or 2 * abs(min(lowest, 0.0)))
    kept = int((values > cut).sum())
    values, vectors = values[len(values) - kept :], vectors[:, len(values) - kept :]
    image = vectors.T @ Y
    rest = Y - vectors @ image
    return SpectralGram(values, vectors, image, rest.T @ rest)


def _ridge(G: Array, Y: Array, classes: Classes, shrinkage: float) -> float:
    """Return N lambda, once the variance within the classes is seen to be above rounding."""
    between = np.einsum("ij,ij->j", Y, G @ Y) / classes.sizes
    return shrinkage * _spread_within(float(np.trace(G)), between) / classes.total


def _rounding(G: Array, means: Array, weighting: Weighting) -> float:
    """Return what rounding adds to the eigenvalues of a centred Gram matrix: that of N values at random."""
    scale = max(float(np.trace(G)), weighting.total * abs(float(means @ weighting.shares)))
    return EPS * scale / float(np.sqrt(len(G)))


def _by_cholesky(G: Array, Y: Array, ridge: float, rounding: float) -> Array:
    """Return ``(G + ridge)^(-1) Y`` (N, C); G is overwritten."""
    total = float(np.trace(G))
    if ridge <= max(NOISE * total, 4 * rounding):
        raise InvalidInputError(
            f"A ridge of {ridge:.1e} is nothing beside the rounding of kernel values whose variance is {total:.1e}; "
            "raise shrinkage, or centre the columns of X."
        )
    G.T.flat[:: len(G) + 1] += ridge
    try:
        factor = cho_factor(G, lower=True, overwrite_a=True, check_finite=False)
    except LinAlgError:
        raise NotPSDError(
            f"{_WHAT} has an eigenvalue below -{ridge:.6g}, which the ridge does not lift above 0; choose another "
            'kernel, or drop its negative part with on_indefinite="clip" (--on-indefinite clip).'
        ) from None
    found: Array = cho_solve(factor, Y, check_finite=False)
    return found


@dataclass(frozen=True, eq=False)
class _Found:
    """Directions as combinations (C, q) of one vector a class, with their ratios (q,) and class means (C, q)."""

    combinations: Array
    means: Array
    ratios: Array


def directions_of_residual(left: Array, classes: Classes) -> _Found:
    """Return the directions of E, (C, C): combinations of R Y."""
    roots = np.sqrt(classes.shares)
    theta, g = _eigh_beside(roots, left / np.outer(roots, roots))
    if theta[0] <= _WITHIN:
        raise _singular(float(theta[0]))
    kept = 1 - theta > _APART
    theta, A = theta[kept], g[:, kept] / roots[:, np.newaxis]
    ratios = (1 - theta) / theta
    return _turned(A / np.sqrt(theta * (1 - theta)), A * np.sqrt(ratios), ratios, classes)


def _eigh_beside(v: Array, M: Array) -> tuple[Array, Array]:
    """Return the eigenvalues of a symmetric matrix, ascending, and eigenvectors, on what is orthogonal to v (C,)."""
    Q = np.linalg.qr(v[:, np.newaxis], mode="complete").Q[:, 1:]
    values, vectors = eigh(Q.T @ ((M + M.T) / 2) @ Q)
    return values, Q @ vectors


def _turned(combinations: Array, means: Array, ratios: Array, classes: Classes) -> _Found:
    """Turn directions to those of the priors, with signs that every basis has: of the classes' mean scores."""
    if classes.priors is not None and len(ratios):
        moved = means - classes.priors @ means
        ascending, turn = eigh((moved * classes.priors[:, np.newaxis]).T @ moved)
        ratios, turn = ascending[::-1], turn[:, ::-1]
        combinations, means = combinations @ turn, means @ turn
    signs = fix_signs(means)
    return _Found(combinations * signs, means * signs, ratios)


def _singular(share: float) -> InvalidInputError:
    return InvalidInputError(
        f"The covariance within the classes is singular: a direction that tells the classes apart has {share:.1e} of "
        f"its variance within them, and at least {_WITHIN:.0e} is needed; raise shrinkage."
    )
