"""Compute kernel principal components from a Gram matrix, from products with one, or from a feature map.

The problem matrix is ``S K S'``, with ``S = D^(1/2) (I - 1 w' / sum w)`` and D the diagonal matrix of the weights w of
the rows. If all weights are 1, it is HKH; a row of weight 2 counts as two rows. Without centring, it is
``D^(1/2) K D^(1/2)``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.numerics.eigensolvers import lanczos
from dkfm.numerics.eigensolvers.dense import eigh_leading_vectors_in_place
from dkfm.numerics.roots import EPS, Root, choose_signs, find_psd_cutoff, inverse_root, row_lengths
from dkfm.numerics.weighting import Weighting, center_and_weigh_gram_in_place, require_finite_means

FORMULATIONS = ("combined", "primal", "dual")

MIN_WEIGHT_SHARE = 1e-6
"""Share of the largest weight; rows of smaller weight have entries of eigenvectors that are mostly rounding error."""

_DOUBLE: np.dtype[np.floating] = np.dtype(np.float64)
_CUTS = {_DOUBLE: 1e-12, np.dtype(np.float32): 2e-7}
"""Share of the largest eigenvalue up to which eigenvalues count as zero, by the dtype of scores, as in scikit-learn."""

_CENTRING_ROUNDING = 4 * EPS
"""Eigenvalues up to this share of the squared length of the mean, times the sum of the weights, may be rounding errors.

The largest such rounding error that was measured had a share of 1.7 eps, for 60 to 1,000 rows at distances from 0 of up
to 1e8 times their width.
"""

_CENTRED_GRAM = "The centred Gram matrix of this kernel"
_GRAM = "The Gram matrix of this kernel"

Multiply = Callable[[Array], Array]


@dataclass(frozen=True)
class ComponentOptions:
    """Number and dtype of the components to compute."""

    n_components: int | float | None = None
    """Number of components, or a share of the variance to explain if it is below 1; None is all that are not zero."""
    dtype: np.dtype[np.floating] = _DOUBLE
    """Dtype of the scores."""
    on_indefinite: str = "raise"
    """Action if an eigenvalue is more negative than rounding explains: "raise", "clip", or "auto". "auto" means "raise"
    if the requested components exist only for a positive semi-definite matrix, and "clip" otherwise."""


@dataclass(frozen=True, eq=False)
class Components:
    """Kernel principal components: ``scores = k(Z, X) weights - offset``."""

    eigenvalues: Array
    """Eigenvalues mu of the problem matrix, descending: the variance of each component times the sum of the weights.
    Shape (q,)."""
    weights: Array
    """Coefficients b, with mean 0 if centred; zero for a component whose mu is zero. Shape (N, q)."""
    offset: Array
    """``e'K b``, with e the weights of the rows divided by their sum; 0 if not centred. Shape (q,)."""
    training_mean_coefficients: Array
    """Coefficients e of the mean of the training rows; 0 if not centred. Shape (N,)."""
    squared_norm_of_mean: float
    """Squared length of the mean of the training rows, ``e'Ke``."""
    eigenvalue_sum: float
    """Sum of all eigenvalues, or of the positive ones if a negative part is dropped; NaN if it is unknown."""

    def truncate(self, q: int) -> "Components":
        """Return the first q components."""
        return replace(self, eigenvalues=self.eigenvalues[:q], weights=self.weights[:, :q], offset=self.offset[:q])


def solve_components_by_eigh(
    K: Array, options: ComponentOptions, weighting: Weighting | None = None, formulation: str = "combined"
) -> Components:
    """Solve kernel PCA by a dense eigendecomposition.

    Parameters
    ----------
    K : ndarray of shape (N, N), Fortran-contiguous
        Gram matrix, overwritten; only the lower triangle is read.
    options : ComponentOptions
        Components to compute.
    weighting : Weighting, optional
        Weights of the rows; by default 1, with centred features.
    formulation : {"combined", "primal", "dual"}
        Eigenproblem: "combined" and "dual" decompose ``H K H``; "primal" decomposes the covariance of the explicit map,
        which needs a positive semi-definite K. With on_indefinite="clip", ``H K H`` is always decomposed, because the
        other result would differ.

    Raises
    ------
    NotPSDError
        The problem matrix is not positive semi-definite; for "primal", K is not.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, eqs. (12)-(25), with ``mu = N lambda``. The dual solution a and the primal solution u
    satisfy ``b = H a = H u / mu``. Eigenvectors of HKH are orthogonal to the constant vector only up to rounding, which
    the mean of K amplifies; b is therefore centred again.
    """
    weighting = weighting or Weighting(np.ones(len(K)))
    if formulation == "primal" and options.on_indefinite != "clip":
        return _solve_primal(K, options, weighting)
    means = center_and_weigh_gram_in_place(K, weighting)
    total = float(np.trace(K))
    q = options.n_components if isinstance(options.n_components, int) else len(K)
    values, vectors = eigh_leading_vectors_in_place(K, q)
    del K
    dropped = _find_problem_psd_cutoff(values, means, options, weighting)
    if dropped:
        total = float(np.maximum(values, 0.0).sum())  # the dropped negative part has no variance
    values, vectors = values[::-1], vectors[:, ::-1]
    rounding = max(dropped, _CENTRING_ROUNDING * weighting.compute_trace_of_mean(means))
    q = _choose_count(values, total, options, rounding)
    kept = _count_positive(values[:q], options.dtype, rounding)
    return _make_components(values[:q], vectors[:, :q], means, total, weighting, kept)


@dataclass(frozen=True, eq=False)
class EigenProblem:
    """The problem matrix, available only through products."""

    multiply: Multiply
    """Function that returns the product of the problem matrix and C (N, p)."""
    means: Array
    """Means of the rows of K. Shape (N,)."""
    eigenvalue_sum: float
    """Sum of all eigenvalues."""
    noise: float = 0.0
    """Rounding error of a product with a vector of length 1."""


def make_dense_problem(K: Array, weighting: Weighting) -> EigenProblem:
    """Return the problem of a Fortran-contiguous Gram matrix (N, N), which is overwritten from its lower triangle."""
    means = center_and_weigh_gram_in_place(K, weighting)
    # K.T has C order, so multiplying it from the left takes four fifths of the time of K @ C.
    return EigenProblem(lambda C: (C.T @ K.T).T, means, float(np.trace(K)))


def make_product_problem(
    multiply: Multiply, diagonal: Array, weighting: Weighting, means: Array | None = None
) -> EigenProblem:
    """Return the problem of a Gram matrix from products with it and its diagonal (N,); the matrix is not changed.

    The means (N,) of its rows cost another product, unless they are given.
    """
    if means is None:
        means = multiply(weighting.shares[:, np.newaxis])[:, 0]
    require_finite_means(means)
    total = float(weighting.weights @ diagonal)
    size = weighting.total * abs(float(means @ weighting.shares))
    if weighting.centered:
        total -= weighting.total * float(means @ weighting.shares)
    # The rounding errors of a sum of N products, and of the mean that is subtracted, are random.
    noise = EPS * size / np.sqrt(len(means))
    center, center_transpose = weighting.apply_weighted_centring, weighting.apply_weighted_centring_adjoint
    return EigenProblem(lambda C: center(multiply(center_transpose(C))), means, total, noise)


def solve_leading_components(
    problem: EigenProblem,
    start: Array,
    options: ComponentOptions,
    weighting: Weighting,
    tol: float = 0.0,
    max_products: int = 1000,
    basis_columns: int | None = None,
    step_log: lanczos.StepLog | None = None,
) -> tuple[Components, lanczos.EigenPairs]:
    """Solve kernel PCA for its first components by Lanczos, from products with the problem matrix.

    Parameters
    ----------
    problem : EigenProblem
        Problem matrix.
    start : ndarray of shape (N, p)
        Random first block.
    options : ComponentOptions
        Components to compute; `n_components` is an integer.
    weighting : Weighting
        Weights of the rows.
    tol, max_products, basis_columns, step_log
        As in `lanczos.largest_eigenpairs`.

    Returns
    -------
    components : Components
        Kernel principal components.
    pairs : EigenPairs
        Eigenpairs of the problem matrix, with their residuals.
    """
    q = int(options.n_components or 0)
    limits = (tol, max_products, problem.noise, basis_columns)
    pairs = lanczos.largest_eigenpairs(problem.multiply, start, q, *limits, step_log)
    # The lowest eigenvalue is at most the mean of the eigenvalues that were not computed.
    rest = (problem.eigenvalue_sum - float(pairs.values.sum())) / max(1, len(problem.means) - len(pairs.values))
    ends = np.array([min(pairs.lowest_ritz_value, rest), pairs.values[0]])
    dropped = _find_problem_psd_cutoff(ends, problem.means, options, weighting)
    total = float("nan") if dropped else problem.eigenvalue_sum
    rounding = max(dropped, _CENTRING_ROUNDING * weighting.compute_trace_of_mean(problem.means))
    kept = _count_positive(pairs.values, options.dtype, rounding)
    return _make_components(pairs.values, pairs.vectors, problem.means, total, weighting, kept), pairs


def _find_problem_psd_cutoff(values: Array, means: Array, options: ComponentOptions, weighting: Weighting) -> float:
    """Return the threshold of `find_psd_cutoff` for ascending eigenvalues of the problem matrix."""
    lowest, highest, what = float(values[0]), float(values[-1]), _CENTRED_GRAM if weighting.centered else _GRAM
    # Centring adds the rounding errors of the subtracted mean, which can be far larger than the result.
    scale = max(highest, weighting.compute_trace_of_mean(means))
    policy = options.on_indefinite
    if policy == "auto":
        exist = isinstance(q := options.n_components, int) and q <= (values > _CUTS[options.dtype] * highest).sum()
        policy = "clip" if exist or len(values) < len(means) else "raise"
    return find_psd_cutoff(lowest, highest, scale, len(means), policy, what)


def _choose_count(values: Array, total: float, options: ComponentOptions, rounding: float) -> int:
    """Return the number of descending eigenvalues that the options request."""
    if isinstance(options.n_components, int):
        return min(options.n_components, len(values))
    positive = _count_positive(values, options.dtype, rounding)
    if options.n_components is None:
        return positive
    explained = np.cumsum(values[:positive]) >= options.n_components * total * (1 - 1e-12)  # allows for rounding
    return int(explained.argmax()) + 1 if explained.any() else positive


def _count_positive(values: Array, dtype: np.dtype[np.floating], rounding: float) -> int:
    highest = float(values[0]) if len(values) else 0.0
    return int((values > max(_CUTS[dtype] * highest, rounding)).sum()) if highest > 0 else 0


def _make_components(
    values: Array, vectors: Array, means: Array, total: float, weighting: Weighting, kept: int
) -> Components:
    """Return the components of descending eigenpairs; all but the first `kept` eigenvalues count as zero."""
    mu, b = np.zeros(len(values)), np.zeros((len(means), len(values)))
    mu[:kept] = values[:kept]
    b[:, :kept] = vectors[:, :kept]
    if weighting.centered:
        middle = weighting.roots @ b / weighting.total
        for rows in row_slices(len(b), 256):
            b[rows] -= np.outer(weighting.roots[rows], middle)
    lengths = np.sqrt(np.einsum("ij,ij->j", b[:, :kept], b[:, :kept]))
    b *= weighting.roots[:, np.newaxis]
    # The signs are chosen by the training scores, so that a row of weight 2 and a repeated row give the same signs.
    signs = choose_signs(b[:, :kept], np.maximum(weighting.weights, MIN_WEIGHT_SHARE * weighting.weights.max()))
    b[:, :kept] *= signs / (lengths * np.sqrt(mu[:kept]))
    if not weighting.centered:
        return Components(mu, b, np.zeros(len(mu)), np.zeros(len(means)), 0.0, total)
    return Components(mu, b, means @ b, weighting.shares, float(means @ weighting.shares), total)


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of the features phi of weighted rows."""

    second_moment: Array
    """``sum w phi phi'``, or its diagonal if it is a diagonal matrix. Shape (r, r)."""
    mean: Array
    """Weighted mean of the features. Shape (r,)."""
    weight: float
    """Sum of the weights."""
    rows: int
    """Number of rows."""


def solve_components_of_map(W: Array, moments: Moments, options: ComponentOptions, centered: bool = True) -> Components:
    """Solve kernel PCA in the feature space of an explicit map ``k(z, landmarks) W``.

    Parameters
    ----------
    W : ndarray of shape (N, r)
        Weights of the map.
    moments : Moments
        Moments of the features of the training rows.
    options : ComponentOptions
        Components to compute.
    centered : bool
        Whether the features are centred.

    Notes
    -----
    It solves ``C v = mu v``, with C the second moments minus ``sum w`` times the products of the mean (paper, eq. 12;
    in the spectral basis ``L - u u'``). Lanczos finds a few components; it is fast if the second moments are diagonal.
    """
    mu, V, total = _solve_moments(moments, options, centered)
    mean, kept = moments.mean if centered else np.zeros_like(moments.mean), int((mu > 0).sum())
    b = W @ V
    signs = np.append(choose_signs(b[:, :kept]), np.ones(len(mu) - kept))
    return Components(mu, b * signs, mean @ V * signs, W @ mean, float(mean @ mean), total)


def _solve_moments(moments: Moments, options: ComponentOptions, centered: bool) -> tuple[Array, Array, float]:
    """Return eigenvalues (q,) and eigenvectors (r, q) of the covariance of features, and its trace."""
    r = len(moments.mean)
    mean = moments.mean if centered else np.zeros(r)
    diagonal = moments.second_moment.ndim == 1
    squares = moments.second_moment.sum() if diagonal else np.trace(moments.second_moment)
    total = float(squares) - moments.weight * float(mean @ mean)
    wanted, found = options.n_components if isinstance(options.n_components, int) else None, None
    if wanted is not None and lanczos.is_faster_than_dense(r, wanted):

        def multiply(V: Array) -> Array:
            product = moments.second_moment[:, np.newaxis] * V if diagonal else moments.second_moment @ V
            return product - moments.weight * np.outer(mean, mean @ V)

        start = np.random.default_rng(0).normal(size=(r, lanczos.choose_block_columns(r, wanted)))
        limit = lanczos.choose_max_products(r)
        found = lanczos.largest_eigenpairs(multiply, start, wanted, max_products=limit)
    if found is not None and found.converged:
        values, V = found.values, found.vectors
    else:
        C = np.asfortranarray(np.diag(moments.second_moment) if diagonal else moments.second_moment)
        C -= moments.weight * np.outer(mean, mean)
        ascending, vectors = eigh_leading_vectors_in_place(C, min(wanted or r, r))
        values, V = ascending[::-1], vectors[:, ::-1]
    rounding = _CENTRING_ROUNDING * moments.weight * float(mean @ mean)
    q = _choose_count(values, total, options, rounding) if wanted is None else min(wanted, moments.rows)
    kept = min(q, _count_positive(values, options.dtype, rounding))
    return np.append(values[:kept], np.zeros(q - kept)), np.pad(V[:, :kept], ((0, 0), (0, q - kept))), total


def compute_moments_of_landmarks(root: Root, weights: Array) -> tuple[Moments, Array]:
    """Return the moments of the features of the landmarks, with weights (N,), and these features (N, r)."""
    F, total, unit = root.landmark_features(), float(weights.sum()), bool((weights == 1).all())
    equal = unit and bool((root.scales == root.scales[0]).all()) and not root.triangular
    second = root.values * root.scales[0] ** 2 if equal else (F if unit else F * weights[:, np.newaxis]).T @ F
    return Moments(second, weights @ F / total, total, len(F)), F


def _solve_primal(K: Array, options: ComponentOptions, weighting: Weighting) -> Components:
    root = inverse_root(K, scales=row_lengths(np.diagonal(K)))
    del K
    moments, F = compute_moments_of_landmarks(root, weighting.weights)
    del root
    mu, V, total = _solve_moments(moments, options, weighting.centered)
    means, kept = F @ moments.mean, int((mu > 0).sum())
    # Training scores are eigenvectors; root.weights @ V may also have a part in the null space of the Gram matrix.
    F -= moments.mean * weighting.centered
    vectors = F @ V
    del F, V
    vectors *= weighting.roots[:, np.newaxis]
    vectors[:, :kept] = np.linalg.qr(vectors[:, :kept])[0]
    return _make_components(mu, vectors, means, total, weighting, kept)
