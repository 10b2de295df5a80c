"""Kernel principal components: of a Gram matrix, of what only multiplies with one, and of a feature map.

The matrix of the problem is ``S K S'``, with ``S = D^(1/2) (I - 1 w' / sum w)`` and D the diagonal matrix of the rows'
weights w: HKH where these are 1, and a row of weight 2 is the row twice. Uncentred it is ``D^(1/2) K D^(1/2)``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.kernels.pairwise.blocks import mirror_lower
from dkfm.numerics import lanczos, links
from dkfm.numerics.model import Head
from dkfm.numerics.roots import eigh_in_place, fix_signs, inverse_root, require_psd

FORMULATIONS = ("combined", "primal", "dual")

LIGHTEST_WEIGHT = 1e-6
"""Of the largest weight: what eigenvectors have of a row of less is mostly rounding."""

_DOUBLE: np.dtype[np.floating] = np.dtype(np.float64)
_CUTS = {_DOUBLE: 1e-12, np.dtype(np.float32): 2e-7}
"""Eigenvalues up to this share of the largest are zero, in what scores: scikit-learn's rule."""

_WHAT = "The centred Gram matrix of this kernel", "The Gram matrix of this kernel"

Multiply = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Weighting:
    """Weights w (N,) of the training rows, positive, and whether their mean is taken from the features."""

    weights: Array
    centered: bool = True

    @cached_property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.weights.sum())

    @property
    def shares(self) -> Array:
        """``w / sum w``: the mean of the training rows."""
        return self.weights / self.total

    @cached_property
    def roots(self) -> Array:
        """Square roots of the weights."""
        return np.sqrt(self.weights)

    def inner(self, C: Array) -> Array:
        """Return S'C, (N, p)."""
        scaled = self.roots[:, np.newaxis] * C
        return scaled - np.outer(self.shares, scaled.sum(axis=0)) if self.centered else scaled

    def outer(self, P: Array) -> Array:
        """Return SP, (N, p)."""
        return self.roots[:, np.newaxis] * (P - self.shares @ P if self.centered else P)


@dataclass(frozen=True)
class ComponentOptions:
    """Which components are asked for.

    Attributes
    ----------
    count : int or float, optional
        How many, or, below 1, the share of the variance that they explain at least; by default all above zero.
    dtype : dtype
        What they will score in.
    on_indefinite : {"auto", "raise", "clip"}
        What to do where the matrix has an eigenvalue more negative than rounding explains; "auto" is "raise" where
        components are asked for that only a positive semi-definite matrix has, and "clip" where not.
    """

    count: int | float | None = None
    dtype: np.dtype[np.floating] = _DOUBLE
    on_indefinite: str = "raise"


@dataclass(frozen=True, eq=False)
class Components:
    """Kernel principal components: ``scores = k(Z, X) weights - offset``.

    Attributes
    ----------
    eigenvalues : ndarray of shape (q,)
        mu, of the matrix of the problem, descending; the sum of the weights times the variance along each component.
    weights : ndarray of shape (N, q)
        b, with mean 0 where centred; zero where mu is zero.
    offset : ndarray of shape (q,)
        ``e'K b`` with e the shares of the rows; 0 where not centred.
    mean : ndarray of shape (N,)
        What the mean of the training rows is made of: e; 0 where not centred.
    square : float
        The squared length of that mean, ``e'Ke``.
    total : float
        Sum of all eigenvalues; of the positive ones where a negative part is dropped, NaN where that is not known.
    """

    eigenvalues: Array
    weights: Array
    offset: Array
    mean: Array
    square: float
    total: float

    def first(self, q: int) -> "Components":
        """Return the first q of them."""
        return replace(self, eigenvalues=self.eigenvalues[:q], weights=self.weights[:, :q], offset=self.offset[:q])


def center_gram(K: Array, weighting: Weighting | None = None) -> Array:
    """Make of a Gram matrix, in place and from its lower triangle, ``S K S'``; return the means of K's rows, (N,)."""
    given = weighting or Weighting(np.ones(len(K)))
    mirror_lower(K)
    equal = bool((given.weights == given.weights[0]).all())
    # NumPy's sums are the more exact ones.
    means: Array = K.mean(axis=0) if equal else K @ given.shares
    if given.centered:
        total = means.mean() if equal else means @ given.shares
        for columns in row_slices(len(K), 256):
            K[:, columns] -= means[:, np.newaxis]
            K[:, columns] -= means[columns] - total
    if not equal or given.weights[0] != 1:
        for columns in row_slices(len(K), 256):
            K[:, columns] *= np.outer(given.roots, given.roots[columns])
    return means


def solve_components(
    K: Array, wanted: ComponentOptions, weighting: Weighting | None = None, formulation: str = "combined"
) -> Components:
    """Solve kernel PCA for a Gram matrix, by all of its eigenvectors.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Overwritten; only the lower triangle is read.
    wanted : Wanted
    weighting : Weighting, optional
        By default every row has the weight 1, and the features are centred.
    formulation : {"combined", "primal", "dual"}
        The eigenproblem of ``H K H``, which is the combined and the dual one, or that of the covariance of the explicit
        map, which needs a positive semi-definite K; with "clip" that of ``H K H`` too, for a clipped K has another one.

    Raises
    ------
    NotPSDError
        The matrix of the problem is not positive semi-definite. K itself need not be, but for "primal".

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, eqs. (12)-(25), with ``mu = N lambda``: the dual's a and the primal's u are those with
    ``b = H a = H u / mu``. Re-centring b is what makes them exact: eigenvectors of HKH are orthogonal to the constant
    only to rounding, which the mean of K amplifies.
    """
    given = weighting or Weighting(np.ones(len(K)))
    if formulation == "primal" and wanted.on_indefinite != "clip":
        return _primal(K, wanted, given)
    n, means = len(K), center_gram(K, given)
    total = float(np.trace(K))
    values, vectors = eigh_in_place(K)
    del K
    rounding = _rounding(values, means, wanted, given)
    if rounding:
        total = float(np.maximum(values, 0.0).sum())  # what is dropped has no variance
    q = _count(values[::-1], total, wanted, rounding)
    return _of_pairs(values[n - q :][::-1], vectors[:, n - q :][:, ::-1], means, total, wanted, given, rounding)


@dataclass(frozen=True, eq=False)
class Problem:
    """The matrix of the problem where it is only multiplied with.

    Attributes
    ----------
    multiply : callable
        From C (N, p) to its product with the matrix.
    means : ndarray of shape (N,)
        The means of K's rows.
    total : float
        Sum of all eigenvalues.
    noise : float
        What rounding adds to a product with a vector of length 1.
    """

    multiply: Multiply
    means: Array
    total: float
    noise: float = 0.0


def dense_problem(K: Array, weighting: Weighting) -> Problem:
    """Make a Gram matrix (N, N), Fortran-contiguous and filled below its diagonal, the matrix of the problem."""
    means = center_gram(K, weighting)
    # Of the symmetric matrix in C order from the left: four fifths of the time that K V takes.
    return Problem(lambda C: (C.T @ K.T).T, means, float(np.trace(K)))


def product_problem(multiply: Multiply, diagonal: Array, weighting: Weighting) -> Problem:
    """Return the problem of a Gram matrix that stays as it is, from its products and its diagonal (N,)."""
    means = multiply(weighting.shares[:, np.newaxis])[:, 0]
    total, size = float(weighting.weights @ diagonal), weighting.total * abs(float(means @ weighting.shares))
    if weighting.centered:
        total -= weighting.total * float(means @ weighting.shares)
    # A sum of N products rounds at random, like the mean that is taken from it.
    noise = float(np.finfo(np.float64).eps) * size / np.sqrt(len(means))
    return Problem(lambda C: weighting.outer(multiply(weighting.inner(C))), means, total, noise)


def solve_leading_components(
    problem: Problem, start: Array, wanted: ComponentOptions, weighting: Weighting, tol: float = 0.0, most: int = 1000
) -> tuple[Components, lanczos.EigenPairs]:
    """Solve kernel PCA for its first components, from products with the matrix of the problem alone.

    Parameters
    ----------
    problem : Problem
    start : ndarray of shape (N, p)
        Random: what Lanczos begins with.
    wanted : Wanted
        With a number of components.
    weighting : Weighting
    tol, most
        Of `lanczos.largest`.

    Returns
    -------
    Components
    Pairs
        With what was reached.
    """
    pairs = lanczos.largest_eigenpairs(problem.multiply, start, int(wanted.count or 0), tol, most, problem.noise)
    # The lowest eigenvalue is at most the mean of those that were not found.
    rest = (problem.total - float(pairs.values.sum())) / max(1, len(problem.means) - len(pairs.values))
    ends = np.array([min(pairs.lowest, rest), pairs.values[0]])
    rounding = _rounding(ends, problem.means, wanted, weighting)
    total = float("nan") if rounding else problem.total
    return _of_pairs(pairs.values, pairs.vectors, problem.means, total, wanted, weighting, rounding), pairs


def _rounding(values: Array, means: Array, wanted: ComponentOptions, given: Weighting) -> float:
    """Return what `require_psd` does of eigenvalues, ascending, of the matrix of the problem."""
    lowest, highest = float(values[0]), float(values[-1])
    # Centring rounds like the mean it takes away, which can be far larger than what it leaves.
    scale = max(highest, given.total * abs(float(means @ given.shares)) if given.centered else 0.0)
    policy = wanted.on_indefinite
    if policy == "auto":
        some = isinstance(wanted.count, int) and wanted.count <= int((values > _CUTS[wanted.dtype] * highest).sum())
        policy = "clip" if some or len(values) < len(means) else "raise"
    return require_psd(lowest, highest, scale, len(means), policy, _WHAT[0 if given.centered else 1])


def _count(values: Array, total: float, wanted: ComponentOptions, rounding: float = 0.0) -> int:
    """Return how many of the eigenvalues, descending, are asked for."""
    if isinstance(wanted.count, int):
        return min(wanted.count, len(values))
    positive = _positive(values, wanted.dtype, rounding)
    if wanted.count is None:
        return positive
    explained = np.cumsum(values[:positive]) >= wanted.count * total * (1 - 1e-12)  # of all of it, for 1 - rounding
    return int(explained.argmax()) + 1 if explained.any() else positive


def _positive(values: Array, dtype: np.dtype[np.floating], rounding: float = 0.0) -> int:
    highest = float(values[0]) if len(values) else 0.0
    return int((values > max(_CUTS[dtype] * highest, rounding)).sum()) if highest > 0 else 0


def _of_pairs(
    values: Array,
    vectors: Array,
    means: Array,
    total: float,
    wanted: ComponentOptions,
    given: Weighting,
    rounding: float,
) -> Components:
    """Return the components of eigenpairs of the matrix of the problem, descending; up to `rounding` they are zero."""
    kept = _positive(values, wanted.dtype, rounding)
    mu, b = np.zeros(len(values)), np.zeros((len(means), len(values)))
    mu[:kept] = values[:kept]
    b[:, :kept] = vectors[:, :kept]
    if given.centered:
        middle = given.roots @ b / given.total
        for rows in row_slices(len(b), 256):
            b[rows] -= np.outer(given.roots[rows], middle)
    lengths = np.sqrt(np.einsum("ij,ij->j", b[:, :kept], b[:, :kept]))
    b *= given.roots[:, np.newaxis]
    # Those of the training scores, which do not change where a row of weight 2 is there twice.
    signs = fix_signs(b[:, :kept], np.maximum(given.weights, LIGHTEST_WEIGHT * given.weights.max()))
    b[:, :kept] *= signs / (lengths * np.sqrt(mu[:kept]))
    if not given.centered:
        return Components(mu, b, np.zeros(len(mu)), np.zeros(len(means)), 0.0, total)
    return Components(mu, b, means @ b, given.shares, float(means @ given.shares), total)


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the features of weighted rows.

    Attributes
    ----------
    second : ndarray of shape (r, r), or (r,)
        ``sum w phi phi'``; its diagonal where it has nothing else.
    mean : ndarray of shape (r,)
    weight : float
        Sum of the weights.
    similarity : float
        ``sum w k(x, x)``; of a clipped kernel ``sum w |phi(x)|^2``, for what else it has is not known.
    rows : int
    """

    second: Array
    mean: Array
    weight: float
    similarity: float
    rows: int


def solve_components_of_map(W: Array, moments: Moments, wanted: ComponentOptions, centered: bool = True) -> Components:
    """Solve kernel PCA in the feature space of an explicit map ``k(z, landmarks) W``.

    Parameters
    ----------
    W : ndarray of shape (N, r)
    moments : Moments
        Of the training rows.
    wanted : Wanted
    centered : bool

    Notes
    -----
    ``C v = mu v`` with C the second moments less ``sum w`` times those of the mean (paper, eq. 12; in the spectral
    basis ``L - u u'``). For a few components C is only multiplied with, and where it is a diagonal less one product
    that takes next to no time.
    """
    r = len(moments.mean)
    mean = moments.mean if centered else np.zeros(r)
    diagonal = moments.second.ndim == 1
    total = moments.similarity - moments.weight * float(mean @ mean)
    found = None
    if isinstance(wanted.count, int) and lanczos.is_faster_than_dense(r, wanted.count):

        def multiply(V: Array) -> Array:
            product = moments.second[:, np.newaxis] * V if diagonal else moments.second @ V
            return product - moments.weight * np.outer(mean, mean @ V)

        start = np.random.default_rng(0).normal(size=(r, lanczos.block_columns(r, wanted.count)))
        found = lanczos.largest_eigenpairs(multiply, start, wanted.count, most=lanczos.MAX_PRODUCTS)
    if found is not None and found.converged:
        values, V = found.values, found.vectors
    else:
        C = np.asfortranarray(np.diag(moments.second) if diagonal else moments.second)
        C -= moments.weight * np.outer(mean, mean)
        ascending, vectors = eigh_in_place(C)
        values, V = ascending[::-1], vectors[:, ::-1]
    q = min(wanted.count, moments.rows) if isinstance(wanted.count, int) else _count(values, total, wanted)
    kept = min(q, _positive(values, wanted.dtype))
    mu, V = np.append(values[:kept], np.zeros(q - kept)), np.pad(V[:, :kept], ((0, 0), (0, q - kept)))
    b = W @ V
    signs = np.append(fix_signs(b[:, :kept]), np.ones(q - kept))
    return Components(mu, b * signs, mean @ V * signs, W @ mean, float(mean @ mean), total)


def _primal(K: Array, wanted: ComponentOptions, given: Weighting) -> Components:
    similarity = float(given.weights @ np.diagonal(K))
    root = inverse_root(K)
    del K
    F = root.weights * root.values
    mean = given.shares @ F
    second = root.values if bool((given.weights == 1).all()) else (F * given.weights[:, np.newaxis]).T @ F
    moments = Moments(second, mean, given.total, similarity, len(F))
    return solve_components_of_map(root.weights, moments, wanted, given.centered)


def component_heads(found: Components, centered: bool) -> dict[str, Head]:
    """Return the heads "scores" and "reconstruction_error" of components, which share their weights."""
    if not centered:
        scores = Head(found.weights)
        return {"scores": scores, "reconstruction_error": replace(scores, link=links.RESIDUAL)}
    q = found.weights.shape[1]
    W = np.column_stack([found.weights, 2 * found.mean])
    error = Head(W, np.append(found.offset, found.square), link=links.CENTRED_RESIDUAL)
    return {"scores": Head(W, found.offset, first=q), "reconstruction_error": error}
