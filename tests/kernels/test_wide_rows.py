"""Rows of very different lengths: values of a Gaussian, the bounds that rest on them, and no refusal of them."""

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist

from dkfm import ExactFeatureMap
from dkfm.core.rows import as_rows
from dkfm.kernels import Gaussian, RationalQuadratic


def mixed(seed: int, n: int = 60, d: int = 6) -> np.ndarray:
    """Rows whose lengths span six orders of magnitude."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) * 10 ** rng.uniform(-3, 3, size=(n, 1))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_values_of_wide_rows_keep_their_digits(seed: int, sparse: bool) -> None:
    X, Z = mixed(seed), mixed(seed + 100)
    shared = as_rows(csr_array(X)) if sparse else X
    rows = as_rows(csr_array(Z)) if sparse else Z
    squares = cdist(Z, X, "sqeuclidean")
    assert np.abs(Gaussian(1.0)(rows, shared) - np.exp(-squares / 2)).max() <= 2e-14
    assert np.abs(RationalQuadratic(2.0, 1.0)(rows, shared) - (1 + squares / 4) ** -2.0).max() <= 1e-11


def test_values_of_distant_clusters_keep_their_digits(rng: np.random.Generator) -> None:
    """Within a cluster, distances are too long to be those of near rows, and so short that their error counts."""
    X, Z = (np.concatenate([sign * 100 + 0.5 * rng.normal(size=(50, 20)) for sign in (-1, 1)]) for _ in range(2))
    squares = cdist(Z, X, "sqeuclidean")
    assert squares.min() > 1e-6 * 2 * squares.max()
    # The error of a product is some 8 eps 4e5, 1e-10 of a squared distance.
    assert np.abs(Gaussian(2.0)(Z, X) - np.exp(-squares / 8)).max() <= 1e-15


@pytest.mark.costly
@pytest.mark.parametrize("basis", ["cholesky", "spectral"])
def test_bounds_hold_for_rows_of_mixed_lengths(basis: str) -> None:
    for seed in range(12):
        X, Z = mixed(seed, 40, 5), mixed(seed + 1000, 20, 5)
        phi = ExactFeatureMap(Gaussian(1.6), basis=basis, progress=False).fit(X)
        truth = np.exp(-cdist(Z, X, "sqeuclidean") / (2 * 1.6**2))
        assert np.abs(phi.transform(Z) @ phi.transform(X).T - truth).max() <= phi.error_bound_


@pytest.mark.slow
def test_some_landmarks_of_rows_of_mixed_lengths_are_no_indefinite_kernel() -> None:
    for seed in range(25):
        X = mixed(seed, 12)
        assert ExactFeatureMap(Gaussian(1.7), basis="cholesky", landmarks=[3, 5, 7, 9], progress=False).fit(X).rank_
