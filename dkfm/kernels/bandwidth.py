"""The median heuristic: a length scale taken from the distances between training rows."""

from collections.abc import Callable

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.rows import Array

__all__ = ["median_of"]

_SAMPLE = 1000


def median_of(distances: Callable[[Array], Array], X: Array) -> float:
    """Return the median of the nonzero distances between rows of X (n, d), or of a seeded sample of 1,000 of them.

    Parameters
    ----------
    distances : callable
        From rows (n, d) to the distances (n, n) between all of them, exactly 0 where rows are equal.
    X : ndarray or csr_array of shape (n, d)
    """
    n = X.shape[0]
    if n > _SAMPLE:
        X = X[np.sort(np.random.default_rng(0).choice(n, _SAMPLE, replace=False))]
    found = distances(X)[np.tril_indices(X.shape[0], -1)]
    found = found[found > 0]
    if not len(found):
        raise KernelError(f"The median distance needs two rows that differ, and these {n} do not.")
    return float(np.median(found))
