"""Standardize the columns of training rows to mean 0 and variance 1, as a part of the kernel."""

from collections.abc import Iterator, Sequence

import numpy as np
from sklearn.preprocessing import StandardScaler

from dkfm.core import chunking
from dkfm.core.display.quantities import format_names
from dkfm.core.rows import Array, Rows, as_float64, as_rows
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.gram.streamed_rows import SourceRows
from dkfm.gram.training_data import check_sample_weight
from dkfm.kernels import ArcCosine, Constant, Cosine, Kernel, Linear, Outer, Polynomial, Sigmoid, Standardize
from dkfm.kernels.stationary import DistanceKernel
from dkfm.kernels.transformed import Columns, Warped
from dkfm.sources.base import read_finite

_SMALL_SHARE = 0.01
"""Share of the largest standard deviation of a column below which a message says that others are small."""

_ALIKE = DistanceKernel, Linear, Polynomial, Sigmoid, Cosine, ArcCosine, Constant
"""Kernels of rows whose columns may be standardized; those of histograms take no negative numbers."""

_MIN_VARIANCE = float(np.finfo(np.float64).tiny / np.finfo(np.float64).eps)
"""Smallest variance whose square keeps all digits."""


def make_standardizing_kernel(
    kernel: Kernel, X: object, sample_weight: object = None
) -> tuple[Kernel, dict[str, Array]]:
    """Return the kernel of rows standardized to mean 0 and variance 1, and the mean and scale of each column."""
    if kernel.is_precomputed:
        raise InvalidInputError("A precomputed kernel has no rows to standardize.")
    scaler = fit_scaler(X, sample_weight)
    mean, scale = scaler.mean_, scaler.scale_
    return kernel.warp(Standardize(tuple(mean), tuple(scale))), {"mean": mean, "scale": scale}


def fit_scaler(X: object, sample_weight: object = None) -> StandardScaler:
    """Return scikit-learn's scaler of rows (n, d) to mean 0 and variance 1; those of a source are read in parts.

    A number for `sample_weight` is a weight that all rows have.
    """
    scaler = StandardScaler()  # it detects columns that are constant up to rounding
    lowest, highest = np.inf, -np.inf
    for rows, weights in _iter_counted_rows(X, sample_weight):
        if not isinstance(rows, np.ndarray):
            raise NotSupportedError("Sparse rows are not standardized: centred they would be dense.")
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows raises below
            scaler.partial_fit(as_float64(rows), sample_weight=weights)
        lowest, highest = np.minimum(lowest, rows.min(axis=0)), np.maximum(highest, rows.max(axis=0))
    if not np.isfinite(scaler.var_).all():
        column = int(np.isfinite(scaler.var_).argmin())
        raise InvalidInputError(f"Column {column} has numbers whose variance overflows, so it cannot be standardized.")
    underflows = (highest > lowest) & (scaler.var_ < _MIN_VARIANCE)
    if underflows.any():
        column = int(underflows.argmax())
        raise InvalidInputError(f"Column {column} has numbers whose variance underflows, so it cannot be standardized.")
    return scaler


def describe_unlike_scales(X: Rows, names: Sequence[str] | None = None) -> str | None:
    """Return a sentence if some columns, which may have names, vary far less than others; None for sparse rows."""
    if not isinstance(X, np.ndarray):
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # of squares that overflow nothing is said
        deviations, varies = X.std(axis=0), X.min(axis=0) < X.max(axis=0)
        largest = float(deviations[varies].max(initial=0.0))
        small = np.flatnonzero(varies & (deviations < _SMALL_SHARE * largest))
    if not len(small) or not np.isfinite(deviations[varies]).all():
        return None
    named = "" if names is None else f" ({format_names([names[column] for column in small.tolist()])})"
    return (
        f"{len(small):,} of {varies.sum():,} columns that vary{named} have a standard deviation below a hundredth of "
        f"the largest, {largest:.2g}, so they hardly count in distances and inner products. If units differ, "
        "standardize them (standardize=True, --standardize)."
    )


def treats_columns_alike(kernel: Kernel) -> bool:
    """Return whether a kernel of distances or inner products takes all columns, and has one scale for all of them."""
    if parts := list(kernel.iter_parts()):
        return not isinstance(kernel, Warped | Columns | Outer) and all(map(treats_columns_alike, parts))
    has_scales = any(isinstance(value, tuple) for value in vars(kernel).values())
    return isinstance(kernel, _ALIKE) and not has_scales


def _iter_counted_rows(X: object, sample_weight: object) -> Iterator[tuple[Rows, Array | None]]:
    """Yield the rows of nonzero weight, in parts, with their weights, which are None if all are equal."""
    given = X if isinstance(X, SourceRows) else as_rows(X)
    is_weighted = sample_weight is not None and not isinstance(sample_weight, int | float | np.number)
    weights = check_sample_weight(sample_weight, given.shape[0]) if is_weighted else None
    for part, rows in _iter_parts(given):
        if weights is None or weights[part].all():
            yield rows, None if weights is None else weights[part]
        elif len(counted := np.flatnonzero(weights[part])):
            yield rows[counted], weights[part][counted]


def _iter_parts(X: SourceRows | Rows) -> Iterator[tuple[slice, Rows]]:
    """Yield slices and their rows; the rows of a source are read in parts."""
    if not isinstance(X, SourceRows):
        yield slice(None), X
        return
    for part in chunking.row_slices(X.shape[0], chunking.choose_tile_rows(X.source.float64s_per_row)):
        yield part, read_finite(X.source, part)
