"""Memory of fits in the features of a map: arrays of N x N values, as NumPy counts them."""

import tracemalloc

import pytest
from sklearn.base import clone

import dkfm
from dkfm.kernels import Gaussian


@pytest.mark.parametrize("basis", ["spectral", "symmetric"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("estimator", [dkfm.KernelPCA, dkfm.KernelFisher])
def test_a_fit_in_a_map_of_all_rows_holds_one_matrix(rng, estimator, dtype, basis):
    n = 1500
    X = rng.normal(size=(n, 5))
    given = dkfm.ExactFeatureMap(Gaussian(0.2), basis=basis, dtype=dtype, progress=False)
    small, phi = clone(given).fit(X[:50]), given.fit(X)

    def fit_in(feature_map, rows):
        if estimator is dkfm.KernelFisher:
            estimator.from_map(feature_map, rows[:, 0] > 0)
        else:
            estimator.from_map(feature_map, n_components=5)

    fit_in(small, X[:50])  # what it imports counts, too
    tracemalloc.start()
    try:
        fit_in(phi, X)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    converted = dtype == "float32"  # the weights of the map, to float64
    assert 8 * n**2 < taken < (1.25 + converted) * 8 * n**2
