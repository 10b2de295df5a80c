"""Kernel values below the normal numbers of their dtype are 0: arithmetic on them takes a hundred times as long."""

import numpy as np
import pytest
import scipy.sparse as sp

from dkfm import kernels as k
from dkfm.kernels.pairwise.distance_effects import find_vanishing_square

KERNELS = {
    "Gaussian": k.Gaussian(1.0),
    "Gaussian of each column": k.Gaussian((1.0,) * 8),
    "Exponential": k.Exponential(0.1),
    "Matern 5/2": k.Matern(2.5, 0.2),
    "Matern 3": k.Matern(3.0, 0.2),
    "Matern 0.7": k.Matern(0.7, 0.2),
    "RationalQuadratic": k.RationalQuadratic(90.0, 0.5),
    "product": k.Gaussian(1.5) * k.Gaussian(1.4),
    "sum": k.Gaussian(1.0) + k.Gaussian(0.9),
    "warped": k.Gaussian(2.0).warp(k.Affine(2.0)),
    "Laplacian": k.Laplacian(0.2),
    "Exp": k.Exp(0.5 * k.NegativeSquaredDistance()),  # in float64 as NumPy has it
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
    assert values.max() > 0.1
    assert (name == "Exp" and dtype == np.float64) or ((values == 0) | (values >= tiny * (1 - 1e-3))).all()
    truth = kernel(Z.astype(np.float64), X.astype(np.float64))  # in float64 its values of 1e-300 and less may be 0
    assert (truth[values == 0] <= 1.01 * tiny).all()
    far = (values > 0) & (values < 1e-5)
    assert far.any()
    np.testing.assert_allclose(values[far], truth[far], rtol=1e-3 if dtype == np.float32 else 1e-10)


@pytest.mark.parametrize("d", [1, 3, 30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_same_values_vanish_in_any_tile(d, dtype):
    Z, X = make_pairs(dtype, d)
    block = k.Gaussian(1.0).make_evaluator(X)
    whole = block(Z)
    assert 0 < np.count_nonzero(whole) < whole.size
    for part in (slice(0, 70), slice(300, 301), slice(590, 600)):
        np.testing.assert_array_equal(block(Z[part]) == 0, whole[part] == 0)


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


@pytest.mark.parametrize(("dtype", "weight"), [(np.float32, 1e-30), (np.float64, 1e-290)])
def test_values_beside_which_small_numbers_count_do_not_vanish(dtype, weight):
    Z, X = make_pairs(dtype)
    kernel = weight * k.Gaussian(1.0)
    truth = weight * np.exp(-((Z[:, np.newaxis].astype(float) - X.astype(float)) ** 2).sum(axis=2) / 2)
    values = kernel(Z, X)
    small = (truth < np.finfo(dtype).tiny) & (truth > 1e-3 * np.finfo(dtype).tiny)
    assert small.any()
    np.testing.assert_allclose(values[small], truth[small], rtol=0.02)
