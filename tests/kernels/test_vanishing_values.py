"""Kernel values below the normal numbers of their dtype are 0: arithmetic on them takes a hundred times as long."""

import numpy as np
import pytest
import scipy.sparse as sp

from dkfm import kernels as k
from dkfm.kernels.pairwise.block_operations import set_subnormals_to_0
from dkfm.kernels.pairwise.distance_effects import find_vanishing_square

G = k.Gaussian(1.0)
KERNELS = {
    "Gaussian": G,
    "Gaussian of each column": k.Gaussian((1.0,) * 8),
    "Exponential": k.Exponential(0.1),
    "Matern 5/2": k.Matern(2.5, 0.2),
    "Matern 3": k.Matern(3.0, 0.2),
    "Matern 0.7": k.Matern(0.7, 0.2),
    "RationalQuadratic": k.RationalQuadratic(90.0, 0.5),
    "product": k.Gaussian(1.5) * k.Gaussian(1.4),
    "product of each column": k.Gaussian((1.5,) * 8) * k.Gaussian((1.4,) * 8),
    "sum": G + k.Gaussian(0.9),
    "steep sum": G**20 + G**20,
    "multiple": 0.5 * G,
    "small multiple": 1e-10 * G,
    "power": G**2,
    "series": k.PowerSeries(G, (0.0, 0.0, 1.0)),
    "warped": k.Gaussian(2.0).warp(k.Affine(2.0)),
    "Periodic": k.Periodic(1e3, 0.005).on(range(4)),
    "Laplacian": k.Laplacian(0.2),
    "Laplacian of each column": k.Laplacian((0.2,) * 8),
    "constant multiple": k.Constant(1.0) * k.Laplacian(0.2),
    "Exp": k.Exp(0.5 * k.NegativeSquaredDistance()),
    "ChiSquared": k.ChiSquared(3.0),
}


def make_pairs(dtype, d=8):
    """Return rows whose distances to the landmarks grow, so that values pass from normal numbers to 0."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 0.1, (40, d))
    largest = 40 if dtype == np.float32 else 120
    Z = rng.uniform(0, 1, (600, d)) * np.linspace(0, largest, 600)[:, np.newaxis] / np.sqrt(d)
    return Z.astype(dtype), X.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", KERNELS)
def test_values_are_normal_numbers_or_0(name, dtype):
    kernel, (Z, X), tiny = KERNELS[name], make_pairs(dtype), np.finfo(dtype).tiny
    values = kernel(Z, X)
    largest = values.max()
    assert largest > 0.1 * kernel.diag(X[:1])[0]
    assert ((values == 0) | (values >= tiny * (1 - 1e-3))).all()
    truth = kernel(Z.astype(np.float64), X.astype(np.float64))  # in float64 its values of 1e-300 and less may be 0
    assert (truth[values == 0] <= 2.02 * tiny).all()  # a sum of two terms
    far = (values > 0) & (values < 1e-5 * largest)
    assert far.any()
    np.testing.assert_allclose(values[far], truth[far], rtol=1e-3 if dtype == np.float32 else 1e-10)


@pytest.mark.parametrize("d", [1, 3, 30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_same_values_vanish_in_any_tile(sign, d, dtype):
    Z, X = make_pairs(dtype, d)
    block, tiny = G.make_evaluator(sign * X), np.finfo(dtype).tiny * (1 - 1e-3)
    whole = block(sign * Z)
    assert 0 < np.count_nonzero(whole) < whole.size
    assert ((whole == 0) | (whole >= tiny)).all()
    for start in range(0, 600, 7):
        part = slice(start, start + 7)
        np.testing.assert_array_equal(block(sign * Z[part]) == 0, whole[part] == 0)


@pytest.mark.parametrize("d", [1, 3, 6])
@pytest.mark.parametrize("side", [-1, 1])
def test_values_vanish_on_either_side_of_all_landmarks(side, d, rng):
    X, Z = 0.01 * rng.normal(size=(31, d)), np.zeros((1, d))
    X[0, 0], Z[0, 0] = np.sqrt(48) * np.array([side, -side])  # exp(-96); with 6 columns Z is computed in float64
    values = G(Z.astype(np.float32), X.astype(np.float32))
    assert values[0, 0] == 0
    np.testing.assert_allclose(values[0, 1:], np.exp(-24.0), rtol=0.8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_of_sparse_rows_are_normal_numbers_or_0(dtype):
    Z, X = make_pairs(dtype)
    values = k.Gaussian(1.0)(sp.csr_array(Z), sp.csr_array(X))
    assert 0 < np.count_nonzero(values) < values.size
    assert ((values == 0) | (values >= np.finfo(dtype).tiny * (1 - 1e-3))).all()


@pytest.mark.parametrize(("dtype", "expected"), [(np.float32, 126), (np.float64, 1022)])
def test_a_kernel_vanishes_where_it_is_the_smallest_normal_number(dtype, expected):
    found = find_vanishing_square(np.exp, np.dtype(dtype))
    np.testing.assert_allclose(found, expected * np.log(2), rtol=1e-7)
    assert find_vanishing_square(lambda s: 1 / (1 - s), np.dtype(dtype)) == np.inf, "it does not vanish"
    assert find_vanishing_square(lambda s: 0 * s, np.dtype(dtype)) == np.inf, "it is 0 everywhere"


@pytest.mark.parametrize(
    ("dtype", "kernel", "weight"),
    [
        (np.float32, 1e-30 * G, 1e-30),
        (np.float32, 5e-31 * G + 5e-31 * G, 1e-30),
        (np.float32, k.Constant(1e-30) * G**1, 1e-30),
        (np.float64, 1e-290 * G, 1e-290),
        (np.float64, 5e-291 * G + 5e-291 * G, 1e-290),
    ],
)
def test_values_that_count_beside_the_largest_do_not_vanish(dtype, kernel, weight):
    Z, X = make_pairs(dtype)
    truth = weight * np.exp(-((Z[:, np.newaxis].astype(float) - X.astype(float)) ** 2).sum(axis=2) / 2)
    values = kernel(Z, X)
    small = (truth < np.finfo(dtype).tiny) & (truth > 1e-3 * np.finfo(dtype).tiny)
    assert small.any()
    np.testing.assert_allclose(values[small], truth[small], rtol=0.02)


def test_negative_values_are_kept():
    values = np.array([[1.0, 0.0, -2.0, 1e-320, -1e-320, -np.inf]])
    set_subnormals_to_0(values)
    np.testing.assert_array_equal(values, [[1.0, 0.0, -2.0, 0.0, 0.0, -np.inf]])


@pytest.mark.parametrize("d", [5, 8, 10])
@pytest.mark.parametrize("sigma", [0.1, 0.3, 1.0])
def test_narrow_kernels_of_few_columns_are_exact_to_rounding_in_float32(sigma, d):
    rng = np.random.default_rng(d)
    X, Z = (rng.normal(size=(n, d)).astype(np.float32) for n in (400, 300))
    Z[:100] = X[:100] + sigma * rng.normal(size=(100, d)).astype(np.float32) / 3
    Z[:10], Z[10:20] = X[:10], 1e4 * Z[10:20]
    truth = k.Gaussian(sigma)(Z.astype(float), X.astype(float))
    assert np.abs(k.Gaussian(sigma)(Z, X) - truth).max() <= 2e-7
