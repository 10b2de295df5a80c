"""Compute sums and maxima over all training rows, a tile at a time, in float64."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np

from dkfm.core.chunking import choose_tile_rows, row_slices
from dkfm.core.rows import Array, Rows
from dkfm.errors import KernelError
from dkfm.kernels.pairwise.block_operations import mirror_lower
from dkfm.numerics.map_error_bounds import Residuals, estimate_largest_norm, make_probes
from dkfm.numerics.roots import Root, replace_zero_lengths, row_lengths
from dkfm.numerics.scorer import Scorer
from dkfm.numerics.skinny_and_triangular_matmul import add_lower_products


class WeightedRows(Protocol):
    """Weights of training rows, and the columns a of weighted sums ``sum w a phi`` of their features."""

    @property
    def weights(self) -> Array:
        """Weights (N,)."""

    @property
    def n_columns(self) -> int:
        """Number of columns c."""

    def weighted_columns(self) -> Array:
        """Return the columns (N, c), multiplied by the weights."""

    def subset(self, row_indices: slice, /) -> Self:
        """Return the weights and columns of some rows."""


@dataclass(frozen=True)
class EqualRows:
    """Rows of weight 1 with one column of ones, which is not stored."""

    n: int
    n_columns: ClassVar[int] = 1

    @property
    def weights(self) -> Array:
        """Ones (n,)."""
        return np.ones(self.n)

    def weighted_columns(self) -> Array:
        """Return ones (n, 1)."""
        return np.ones((self.n, 1))

    def subset(self, row_indices: slice) -> "EqualRows":
        """Return some of the rows."""
        return EqualRows(row_indices.stop - row_indices.start)


def measure_largest_residuals(
    score: Scorer, tiles: Iterable[Rows], diagonal: Array, root: Root, lengths: Array
) -> Residuals:
    """Return the largest residuals of training rows after 0, 1, .. r features of a root, and the norm of coefficients.

    Parameters
    ----------
    score : Scorer
        A prepared model with the head "features" of the root, whose columns are nested.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows.
    diagonal : ndarray of shape (N,)
        k(x, x) of the training rows.
    root : Root
        Root of the m landmarks.
    lengths : ndarray of shape (m,)
        `row_lengths` of the landmarks.
    """
    divisors = replace_zero_lengths(row_lengths(diagonal))
    # Rounding errors of the root are relative to the largest length, in the units of the root.
    units = np.ones(len(diagonal)) if root.is_scaled(lengths) else np.square(divisors / divisors.max())
    largest, lowest, excess, norm = np.zeros(score.model.head("features").width + 1), 0.0, 0.0, 1.0
    probes = root.weights.T @ (lengths[:, np.newaxis] * make_probes(len(lengths)))
    for positions, rows in _iter_subtiles(score, tiles):
        features = score.apply_weights("features", score.kernel_values(rows)).astype(np.float64, copy=False)
        features /= divisors[positions, np.newaxis]
        norm = max(norm, estimate_largest_norm(features @ probes))
        explained = np.cumsum(np.square(features, out=features), axis=1, out=features)
        all_left = np.sign(diagonal[positions])
        shares = np.subtract(all_left[:, np.newaxis], explained, out=explained)
        largest[0] = max(largest[0], all_left.max(initial=0.0))
        np.maximum(largest[1:], shares.max(axis=0, initial=0.0), out=largest[1:])
        last = shares[:, -1] if shares.shape[1] else all_left
        lowest = min(lowest, float((last * units[positions]).min(initial=0.0)))
        excess = max(excess, -float(last.min(initial=0.0)))
    if not np.isfinite([*largest, norm]).all():
        raise KernelError(f"{score.model.kernel!r} overflows between a training row and a landmark.")
    return Residuals(largest, lowest, norm, excess=excess)


def mean_kernel_values(score: Scorer, tiles: Iterable[Rows], weights: Array) -> Array:
    """Return the weighted mean of ``k(x, landmarks)`` over the training rows x, (N,)."""
    evaluate = score.model.kernel.make_evaluator(score.model.original_landmarks)
    total, largest, shares = np.zeros(score.model.landmarks.shape[0]), weights.max(), 0.0
    for positions, rows in _iter_subtiles(score, tiles):
        part = weights[positions] / largest
        total += part @ evaluate(rows)
        shares += float(part.sum())
    total /= shares
    return total


def add_features_and_products(
    score: Scorer,
    tiles: Iterable[Rows],
    columns: Array,
    weights: Array,
    first: Array,
    second: Array,
    add_products: Callable[[Array, Array], None] = add_lower_products,
) -> None:
    """Add two sums of the features phi of some rows to arrays.

    Parameters
    ----------
    score : Scorer
        A prepared model with a head "features" of r columns.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        The rows.
    columns : ndarray of shape (N, c)
        Columns a of ``sum a phi``.
    weights : ndarray of shape (N,)
        Non-negative weights w of ``sum w phi phi'``.
    first : ndarray of shape (c, r)
        Array to which ``sum a phi`` is added.
    second : ndarray of shape (r, r)
        Array to which ``sum w phi phi'`` is added, in the lower triangle, which is copied to the upper one.
        C-contiguous.
    add_products : callable
        Function that adds ``F'F`` of features F (n, r) to an array (r, r), or to its lower triangle.
    """
    roots = None if (weights == 1).all() else np.sqrt(weights)[:, np.newaxis]
    for positions, rows in _iter_subtiles(score, tiles):
        features = score.apply_weights("features", score.kernel_values(rows))
        first += columns[positions].T @ features
        if roots is not None:
            features *= roots[positions]
        add_products(features, second)
    mirror_lower(second)


def kernel_values_of_random_combinations(score: Scorer, tiles: Iterable[Rows], diagonal: Array) -> Array:
    """Return the kernel values (2, N) of the landmarks with two fixed combinations of them, each of length 1.

    The coefficients of the first combination are random signs from a fixed seed. Those of the second are also divided
    by the lengths of the landmarks, so that each landmark contributes equally. `tiles` are the tiles of the landmarks,
    and `diagonal` (N,) their k(x, x). The result is empty if there are no tiles.
    """
    evaluate = score.model.kernel.make_evaluator(score.model.original_landmarks)
    lengths = replace_zero_lengths(row_lengths(diagonal))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (2, len(diagonal)))
    signs[0] /= lengths.max()
    signs[1] /= lengths
    parts = [signs[:, positions] @ evaluate(rows) for positions, rows in _iter_subtiles(score, tiles)]
    if not parts:
        return np.zeros((0, len(diagonal)))
    values: Array = np.sum(parts, axis=0)
    norms = np.sqrt(np.maximum(np.einsum("ij,ij->i", signs, values), 0.0))
    unit: Array = np.divide(values, norms[:, np.newaxis], out=np.zeros_like(values), where=norms[:, np.newaxis] > 0)
    return unit


def _iter_subtiles(score: Scorer, tiles: Iterable[Rows]) -> Iterator[tuple[slice, Rows]]:
    """Yield tiles small enough for the tile loop, each with its slice of all rows."""
    start = 0
    for rows in tiles:
        for tile in row_slices(rows.shape[0], choose_tile_rows(score.model.landmarks.shape[0])):
            yield slice(start + tile.start, start + tile.stop), rows[tile]
        start += rows.shape[0]
