"""Bound the error of a feature map, relative to the scale ``sqrt(k(x, x) k(z, z))`` of each pair.

For a training row x and any z, ``|<phi(x), phi(z)> - k(x, z)| <= E sqrt(k(x, x) k(z, z))``. The fit computes one E for
all pairs: the sum of a truncation error and of rounding errors. ``docs/explanation/mathematics.md`` has the proof.
"""

from dataclasses import dataclass

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.numerics.model import StoredWeights, iter_weight_panels
from dkfm.numerics.roots import EPS, ROUNDING_SHARE, Root, replace_zero_lengths

DECOMPOSITION_ROUNDING = 16 * EPS
"""Largest error of ``V L V'``, relative to the largest eigenvalue; 2 to 13 eps were measured for 60 to 900 rows."""

MIN_KERNEL_ROUNDING = 8 * EPS
"""Smallest assumed rounding error of a kernel value, in units of ``sqrt(k(x, x) k(z, z))``.

It is also that of a product with the weights, and of an entry of the product ``R R'`` of a Cholesky factor. For the
latter, about one eps was measured for 60 to 900 pivots.
"""

_EPS32 = float(np.finfo(np.float32).eps)

_ROWS_IN_CACHE = 32
"""Number of rows of weights that are read at a time, so that temporaries stay in the cache."""

_PROBES = 16
"""Number of random vectors that estimate a length; the estimate is below half the length once in 10^4 cases."""


@dataclass(frozen=True, eq=False)
class Residuals:
    """Relative residuals of training rows x, ``(k(x, x) - |phi(x)|^2) / k(x, x)``."""

    largest_by_rank: Array
    """Largest computed residual of a row after 0, 1, .. r features. Shape (r + 1,)."""
    lowest: float = 0.0
    """Smallest residual of a row after all features; it is negative only by rounding, or for an indefinite kernel. For
    a root of K itself, it is relative to the largest k(x, x)."""
    coefficient_norm: float | Array = 1.0
    """Largest ``|D c| / sqrt k(x, x)``, with c the coefficients of a row x for the landmarks: one number for all
    features, or an array (r + 1,) for the first 0, 1, .. r features."""
    noise: float = 8 * EPS
    """Rounding error of the residuals, besides that of the features from which they were computed."""
    excess: float | None = None
    """Largest relative excess of ``|phi(x)|^2`` over k(x, x); by default minus `lowest`."""
    limits: Array | float = np.inf
    """Upper limits of the residuals that hold independently of the computed ones: the next eigenvalues plus their
    error; 0 if none is left. Shape (r + 1,)."""


def bound_errors_by_rank(
    residuals: Residuals, root: Root, lengths: Array, kernel_rounding: float, map_rounding: float
) -> Array:
    """Bound the error of pairs with a training row, for each number of kept features.

    Parameters
    ----------
    residuals : Residuals
        Residuals of the training rows.
    root : Root
        Root of the landmarks.
    lengths : ndarray of shape (N,)
        `roots.row_lengths` of the landmarks.
    kernel_rounding, map_rounding : float
        Largest rounding errors eta of a kernel value, in units of ``sqrt(k(x, x) k(z, z))``: in the Gram matrix, and
        in the map, which may be in float32.

    Returns
    -------
    ndarray of shape (r + 1,)
        Bounds E after 0, 1, .. r features, by Theorem 4 of ``docs/explanation/mathematics.md``.

    Notes
    -----
    In the notation of the theorem, `own_eta` is eta', `frobenius` f, `norm` w, `stretch` g, `moved` gamma w B, and
    `limits` l. `measured` is E_1, whose first term is the root of `shares`, and `limited` is E_2.
    """
    if not lengths.any():  # every row is the zero vector
        return np.zeros(len(residuals.largest_by_rank))
    eta = max(kernel_rounding, MIN_KERNEL_ROUNDING)
    own_eta = max(map_rounding, eta)
    squares = np.cumsum(np.append(0.0, _sum_scaled_squares(root, lengths)))
    frobenius = np.sqrt(squares)
    norm, zeros = frobenius, np.zeros(len(frobenius))  # for pivots, the last pivot does not give |R^-1|
    gamma, moved, stretch = 0.0, zeros, zeros
    if not root.triangular:
        ratio, unit = root.get_scale_ratio_range(lengths)
        top = float(root.values.max(initial=0.0))
        error, smallest = DECOMPOSITION_ROUNDING * top, np.minimum.accumulate(np.append(top or 1.0, root.values))
        gamma, moved, stretch = error * unit * unit, error * unit / np.sqrt(smallest), error / smallest
        norm = np.minimum(frobenius, 1 / (ratio * np.sqrt(smallest)))
    B = _bound_coefficients(residuals, squares, norm)
    stretch, moved = stretch + eta * norm * frobenius, moved * B
    shares = np.maximum(residuals.largest_by_rank, 0.0) + residuals.noise + 3 * eta * B + (gamma + eta) * B * B
    measured = np.sqrt(np.minimum(shares, 1.0)) + (1.5 * own_eta * frobenius + moved) * np.sqrt(1 + stretch)
    # Eigenvalues of A move by the norm of its rounding errors: eta sqrt(N) if their standard deviation is eta / 2.
    limits = zeros + residuals.limits
    limits = np.where(limits > 0, limits + eta * np.sqrt(len(lengths)), 0.0)
    with np.errstate(divide="ignore"):
        inverse = np.where(stretch < 1, 1 / np.sqrt(np.maximum(1 - stretch, 0.0)), np.inf)
    limited = np.sqrt(limits) + ((own_eta + eta * B) * frobenius + moved) * inverse
    bounds: Array = np.minimum(measured, limited) + own_eta * B
    return bounds


def _bound_coefficients(residuals: Residuals, squares: Array, norm: Array) -> Array:
    """Bound the norm of the coefficients after 0, 1, .. r features; it is known after r, and is larger before.

    `squares` (r + 1,) are the squared Frobenius norms of ``D W``, and `norm` (r + 1,) are bounds of its 2-norms.
    """
    known = np.asarray(residuals.coefficient_norm)
    if known.ndim:
        return known
    longer = -residuals.lowest if residuals.excess is None else residuals.excess
    excess = min(residuals.noise + max(longer, 0.0), 1e300)  # it may overflow for rows of very different scales
    left_out = np.sqrt(np.maximum(residuals.largest_by_rank, 0.0) + excess) * np.sqrt(squares[-1] - squares)
    bounds: Array = np.maximum(np.minimum(known + left_out, norm * np.sqrt(1 + excess)), 1.0)
    return bounds


def _sum_scaled_squares(root: Root, lengths: Array) -> Array:
    """Return the squared norms of the columns of ``D W``, (r,)."""
    squares = np.zeros(len(root.values))
    if isinstance(root.weights, StoredWeights):
        for columns, panel in iter_weight_panels(root.weights, len(squares), root.triangular):
            squares[columns] = np.square(panel * lengths[: len(panel), np.newaxis]).sum(axis=0)
        return squares
    for rows in row_slices(len(lengths), _ROWS_IN_CACHE):
        columns = slice(rows.start if root.triangular else 0, None)
        block = root.weights[rows, columns] * lengths[rows, np.newaxis]
        squares[columns] += np.einsum("nj,nj->j", block, block)
    return squares


def bound_landmark_residuals(root: Root, lengths: Array) -> Residuals:
    """Bound the residuals of landmarks after 0, 1, .. r eigenvectors; `lengths` (N,) are their `roots.row_lengths`.

    A residual is at most the next eigenvalue. It is also computed from the features ``K W`` of the landmarks.
    """
    least, unit = root.get_scale_ratio_range(lengths)
    top = float(root.values.max(initial=0.0))
    error = DECOMPOSITION_ROUNDING * top
    limits: Array = np.append(root.values, np.abs(root.dropped_values).max(initial=0.0)) + error
    limits = limits * unit * unit  # the square of a unit may overflow
    if not len(root.dropped_values):
        limits[-1] = 0.0
    factors = root.scales * (root.scales / replace_zero_lengths(lengths))
    largest, lowest, norm = np.zeros(len(limits)), 0.0, 1.0
    largest[0] = lengths.any()
    # A projection on eigenvectors of A does not lengthen coefficients. One on eigenvectors of K may, for small rows.
    probes = None if root.is_scaled(lengths) else root.weights.T @ (lengths[:, np.newaxis] * make_probes(len(lengths)))
    for rows in row_slices(len(lengths), _ROWS_IN_CACHE):
        shares = root.weights[rows] * root.values
        shares *= factors[rows, np.newaxis]
        if probes is not None:
            norm = max(norm, estimate_largest_norm(shares @ probes))
        np.cumsum(np.square(shares, out=shares), axis=1, out=shares)
        np.subtract(lengths[rows, np.newaxis] > 0, shares, out=shares)
        np.maximum(largest[1:], shares.max(axis=0), out=largest[1:])
        lowest = min(lowest, float(shares[:, -1:].min(initial=0.0)))
    noise = ROUNDING_SHARE * max(1.0, top * unit * unit)
    norms = norm if probes is not None else np.full(len(limits), unit / least)
    return Residuals(largest, lowest, norms, noise, limits=limits)


def rank_in_float32(root: Root, values: Array, row_lengths: Array, lengths: Array) -> int:
    """Return the number of columns before the first feature that is smaller than its rounding error in float32.

    `values` are the kernel values (s, N) of some training rows, of lengths `row_lengths` (s,), with the landmarks, of
    lengths `lengths` (N,). Rows are scaled by their own length if the root is scaled, else by the largest length.
    Rounding ``k(x, x_n)`` by eps adds ``eps^2 sum_n W_nj^2 k(x, x_n)^2`` to the square of feature j. The remaining
    columns have eigenvalues above about ``eps lambda_max / sqrt(N)``, or pivots above ``eps max diag``. A fixed
    threshold would be some digits too high for one kernel and too low for another.
    """
    rows, landmarks = replace_zero_lengths(row_lengths), replace_zero_lengths(lengths)
    if not root.is_scaled(lengths):
        rows, landmarks = np.full_like(rows, rows.max()), np.full_like(landmarks, landmarks.max())
    values = values / rows[:, np.newaxis]
    # The rows may include no landmark, so each landmark counts with at least its own k(x, x).
    squares = np.maximum(np.square(values).mean(axis=0), np.square(lengths * (lengths / landmarks)) / len(lengths))
    noise = _EPS32**2 * (squares @ np.square(root.weights))
    unit, _ = root.get_scale_ratio_range(lengths)
    features = np.maximum(np.square(values @ root.weights).mean(axis=0), root.values * unit * unit / len(lengths))
    return max(min(1, len(features)), int(np.append(noise > features, True).argmax()))


def make_probes(n: int) -> Array:
    """Return random signs (n, 16) from a fixed seed; their products with a vector estimate its length."""
    return np.random.default_rng(0).choice([-1.0, 1.0], (n, _PROBES))


def estimate_largest_norm(products: Array) -> float:
    """Estimate the largest length of n vectors from their products (n, 16) with the signs of `make_probes`."""
    return float(np.sqrt(np.square(products).mean(axis=1).max(initial=0.0)))


def find_rank_within(bounds: Array, tol: float) -> int:
    """Return the smallest number of columns whose error bound is at most tol; all columns if there is none."""
    within = bounds <= tol
    return int(within.argmax()) if within.any() else len(bounds) - 1
