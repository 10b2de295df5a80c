"""Hold the classes and weights of training rows, and compute the scatter within the classes."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, KernelError

Codes = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

_SMALLEST = 1e-303
"""Smallest sum of variances; below it, variances of some directions lose digits."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of the training rows."""

    codes: Codes
    """Class of each row, 0 to C - 1. Shape (N,)."""
    weights: Array
    """Weight w of each row. Shape (N,)."""
    n_columns: int
    """Number of classes C."""
    priors: Array | None = None
    """Prior probabilities that the user gave; None means `class_weight_shares`, see `effective_priors`. Shape (C,)."""

    @cached_property
    def class_weight_sums(self) -> Array:
        """Sum of the weights of each class, (C,)."""
        sizes: Array = np.bincount(self.codes, self.weights, self.n_columns).astype(np.float64)
        return sizes

    @cached_property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.weights.sum())

    @property
    def class_weight_shares(self) -> Array:
        """Sum of the weights of each class, divided by the sum of all weights, (C,)."""
        return self.class_weight_sums / self.total

    @property
    def effective_priors(self) -> Array:
        """Prior probabilities of the classes, (C,); if none are given, their shares of the weights."""
        return self.class_weight_shares if self.priors is None else self.priors

    def weighted_columns(self) -> Array:
        """Return an array (N, C) with the weight of each row in the column of its class, and 0 elsewhere."""
        indicators = np.zeros((len(self.codes), self.n_columns))
        indicators[np.arange(len(self.codes)), self.codes] = self.weights
        return indicators

    def sqrt_weighted_centred_indicators(self) -> Array:
        """Return the weighted, centred class indicators ``D^(1/2) (Y - 1 shares')``, (N, C)."""
        roots = np.sqrt(self.weights)[:, np.newaxis]
        return self.weighted_columns() / roots - roots * self.class_weight_shares

    def subset(self, row_indices: Indices | slice) -> "Classes":
        """Return the classes of some rows."""
        return replace(self, codes=self.codes[row_indices], weights=self.weights[row_indices])


def within_class_scatter_trace(total: float, between: Array) -> float:
    """Return the trace of the scatter within the classes; raise an error if it is not above rounding."""
    if not np.isfinite(total + between.sum()):
        raise KernelError("The kernel values of the training rows have sums above 1e308; scale the kernel down.")
    within = total - float(between.sum())
    if not within > 1e-13 * total:
        raise InvalidInputError(
            "The training rows do not vary within their classes, for the kernel tells the rows of a class apart by "
            f"{max(within, 0.0):.1e} where all rows vary by {max(total, 0.0):.1e}; discriminants need classes of "
            "several rows, and a kernel that tells them apart: centre the columns of X where they are far from 0."
        )
    if total < _SMALLEST:
        raise KernelError(
            f"The variances of the features of the training rows sum up to {total:.1e}, too little to solve with in "
            "float64; scale the kernel or the rows up."
        )
    return within
