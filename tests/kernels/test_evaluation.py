"""Kernels: the laws for every class and for random expressions, the oracles, and what is refused."""

import json

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse import random as random_rows
from scipy.spatial.distance import cdist

from dkfm import kernels
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels import serialization
from dkfm.kernels.pairwise import columnwise_sums
from dkfm.kernels.pairwise.block_operations import mirror_lower
from helpers import oracles
from helpers.kernel_cases import HISTOGRAMS, SIGNED


def test_a_map_may_keep_what_it_returned(rng):
    buffer = np.empty((9, 2))

    def h(X):
        return np.sqrt(X, out=buffer[: len(X)])

    X, Y = rng.uniform(size=(5, 2)), rng.uniform(size=(9, 2))
    np.testing.assert_allclose(kernels.Linear().warp(h)(X, Y), np.sqrt(X) @ np.sqrt(Y).T, rtol=1e-12)


def test_a_map_of_another_width_for_other_rows_is_refused():
    with pytest.raises(InvalidInputError, match="made rows of 1 columns, and made 2 of the landmarks"):
        kernels.Linear().warp(lambda X: X[:, : len(X)])(np.ones((1, 3)), np.ones((2, 3)))


def test_an_asymmetric_function_of_float32_rows_is_refused_too(rng):
    A = np.triu(np.ones((3, 3)))
    with pytest.raises(KernelError, match="not symmetric in rows"):
        kernels.Function(lambda X, Y: X @ A @ Y.T)(rng.normal(size=(30, 3)).astype(np.float32))


def test_a_function_may_return_truth_values():
    k = kernels.Function(lambda X, Y: X == Y.T)
    np.testing.assert_array_equal(k(np.array([[1.0], [2.0], [1.0]])), [[1, 0, 1], [0, 1, 0], [1, 0, 1]])


def test_numbers_are_taken_from_numpy_and_zeros_have_no_sign():
    assert kernels.Gaussian(np.array(2.0)) == kernels.Gaussian(np.float32(2.0)) == kernels.Gaussian(2)
    assert kernels.from_sklearn("rbf", gamma=np.float32(0.5)) == kernels.Gaussian(1.0)
    assert json.dumps(serialization.to_config(kernels.Constant(-0.0))) == json.dumps(
        serialization.to_config(kernels.Constant(0.0))
    )
    assert serialization.to_config(kernels.Precomputed(np.int64(3)))["columns"] == 3
    assert kernels.Linear() / 4 == 0.25 * kernels.Linear()
    assert kernels.Product((kernels.Linear() * kernels.Gaussian(), kernels.Cosine())).factors[2] == kernels.Cosine()


def test_columns_of_a_data_frame_are_parameters():
    pd = pytest.importorskip("pandas", reason="the extra dataframe brings it")
    scales, means = pd.Series([1.0, 2.0], index=["a", "b"]), pd.Series([5, 6])
    assert kernels.Gaussian(scales) == kernels.Gaussian((1.0, 2.0))
    for masked in (np.ma.array([1.0, 2.0], mask=[0, 1]), np.ma.masked_all(2)):
        with pytest.raises(KernelError, match="needs finite numbers"):
            kernels.Gaussian(masked)
    assert kernels.Standardize(means, scales) == kernels.Standardize((5.0, 6.0), (1.0, 2.0))


def test_masked_values_are_refused():
    with pytest.raises(InvalidInputError, match="masked values"):
        kernels.Linear()(np.ma.masked_greater(np.ones((2, 2)), 0.5))
    assert kernels.Linear()(np.ma.ones((1, 1))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*SIGNED, *HISTOGRAMS], ids=repr)
def test_what_is_prepared_takes_the_memory_that_the_kernel_says(kernel, rng):
    import tracemalloc

    X = rng.uniform(size=(3000, 40))
    kernel(X[:2])
    tracemalloc.start()
    kept = kernel.make_evaluator(X)
    held = tracemalloc.get_traced_memory()[0] / (3000 * 42 * 8)
    tracemalloc.stop()
    assert kept is not None
    assert held <= kernel.landmark_copies + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.05, 0.3])
def test_a_sparse_block_takes_the_memory_that_the_kernel_says(density, rng):
    import tracemalloc

    X, Y = (random_rows(n, 300, density, "csr", random_state=rng) for n in (1000, 2000))
    for kernel in (kernels.Gaussian(5.0), kernels.Linear(), kernels.Polynomial()):
        block = kernel.make_evaluator(Y)
        block(X[:1])
        tracemalloc.start()
        block(X)
        peak = tracemalloc.get_traced_memory()[1] / (1000 * 2000 * 8)
        tracemalloc.stop()
        assert peak <= kernel.peak_blocks + 0.3


@pytest.mark.slow
def test_a_narrow_gaussian_in_one_dimension_is_positive_semi_definite_to_rounding(rng):
    K = kernels.Gaussian(0.02)(rng.uniform(size=(1500, 1)))
    values = np.linalg.eigvalsh(K)
    assert values[0] >= -20 * np.finfo(np.float64).eps * values[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*SIGNED, *HISTOGRAMS], ids=repr)
def test_a_block_takes_the_memory_that_the_kernel_says(kernel, rng):
    import tracemalloc

    # So many rows that what does not grow with them, near pairs of 64 rows at a time, is little beside the block.
    X, Y = rng.uniform(size=(2800, 10)), rng.uniform(size=(900, 10))
    kernel(X[:2], Y[:2])  # what is compiled or imported once is not a block's
    block = kernel.make_evaluator(Y)
    for out in (None, np.empty((2800, 900))) if kernel.supports_out else (None,):
        tracemalloc.start()
        values = block(X, out)
        peak = tracemalloc.get_traced_memory()[1] / (2800 * 900 * 8)
        tracemalloc.stop()
        assert peak <= kernel.peak_blocks + 0.25 - (out is not None)
        assert values is out or out is None


@pytest.mark.parametrize("d", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "scales"), [("float64", (1e-120, 1e-99, 1e120)), ("float32", (1e-25, 1e13, 1e25))])
def test_values_of_few_columns_do_not_depend_on_the_unit(d, dtype, scales, rng):
    X, Y = rng.normal(size=(30, d)).astype(dtype), rng.normal(size=(40, d)).astype(dtype)
    Y[:5] = X[:5]
    expected = np.exp(-cdist(X.astype(np.float64), Y.astype(np.float64), "sqeuclidean") / 2)
    for unit in (1.0, *scales):
        found = kernels.Gaussian(unit)(X * np.asarray(unit, dtype), Y * np.asarray(unit, dtype))
        np.testing.assert_allclose(found, expected, rtol=0, atol=4 * np.finfo(dtype).eps)
        assert (np.diag(found)[:5] == 1).all()


@pytest.mark.slow
def test_without_numba_the_sums_are_the_same(rng, monkeypatch):
    X, Y = rng.dirichlet(np.ones(300), size=70), rng.dirichlet(np.ones(300), size=90)
    X[0] = Y[0] = 0.0
    chosen = [kernels.Laplacian(1.0), kernels.ChiSquared(), kernels.HistogramIntersection(), kernels.JensenShannon()]
    for k in chosen:
        fast, fast32 = k(X, Y), k(X.astype(np.float32), Y.astype(np.float32))
        with monkeypatch.context() as patched:
            patched.setattr(columnwise_sums, "_has_numba", lambda: False)
            np.testing.assert_allclose(k(X, Y), fast, rtol=1e-13, atol=1e-15)
            np.testing.assert_allclose(k(X.astype(np.float32), Y.astype(np.float32)), fast32, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("d", [1, 7, 50, 1500])
def test_a_sum_of_absolute_differences_does_not_depend_on_its_tile(d, rng):
    X, Y = rng.normal(size=(37, d)), rng.normal(size=(271, d))
    whole = kernels.Laplacian(float(d))(X, Y)
    np.testing.assert_allclose(whole, np.exp(-cdist(X, Y, "cityblock") / d), rtol=1e-12)
    for rows, columns in ((slice(3, 9), slice(1, 2)), (slice(0, 37), slice(2, 271)), (slice(36, 37), slice(60, 66))):
        np.testing.assert_array_equal(kernels.Laplacian(float(d))(X[rows], Y[columns]), whole[rows, columns])


def test_the_median_heuristic_is_the_median_of_the_nonzero_distances(rng):
    X = np.repeat(rng.normal(size=(60, 3)), 3, axis=0)
    distances = cdist(X, X)[np.tril_indices(len(X), -1)]
    assert kernels.Gaussian.median(X).sigma == pytest.approx(np.median(distances[distances > 0]), rel=1e-12)
    assert kernels.Gaussian("median").resolve(X) == kernels.Gaussian.median(X)
    assert kernels.Gaussian.median(csr_array(X)).sigma == pytest.approx(kernels.Gaussian.median(X).sigma, rel=1e-12)
    city = cdist(X, X, "cityblock")[np.tril_indices(len(X), -1)]
    assert kernels.Laplacian.median(X).sigma == pytest.approx(np.median(city[city > 0]), rel=1e-12)
    composed = (0.5 * kernels.Gaussian("median") + kernels.Matern(1.5, "median").on((0, 1))).resolve(X)
    assert composed.terms[0].kernel == kernels.Gaussian.median(X)
    assert composed.terms[1].kernel.length_scale == kernels.Exponential.median(X[:, :2]).length_scale


def test_the_median_of_many_rows_is_of_the_same_thousand(rng):
    X = rng.normal(size=(5000, 2))
    assert kernels.Gaussian.median(X) == kernels.Gaussian.median(X.copy())
    whole = np.median(cdist(X[:2000], X[2000:4000]))
    assert kernels.Gaussian.median(X).sigma == pytest.approx(whole, rel=0.05)


def test_an_unresolved_median_and_rows_that_do_not_differ_are_refused():
    with pytest.raises(KernelError, match="from the training rows: fit it"):
        kernels.Gaussian("median")(np.ones((2, 2)))
    with pytest.raises(KernelError, match="two rows that differ"):
        kernels.Gaussian.median(np.ones((5, 2)))


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("d", [3, 20])
def test_gaussian_keeps_its_digits_far_from_the_origin(offset, d, rng):
    X = offset + rng.normal(size=(200, d))
    Y = np.vstack([offset + rng.normal(size=(50, d)), X[:10], X[:10] * (1 + 1e-15)])
    g = 1 / (2 * 1.3**2)
    norms = ((X - Y.mean(0)) ** 2).sum(1)[:, None] + ((Y - Y.mean(0)) ** 2).sum(1)
    error = np.abs(np.log(kernels.Gaussian(1.3)(X, Y)) - np.log(oracles.gaussian(X, Y, 1.3)))
    assert (error <= 8 * np.finfo(np.float64).eps * (g * norms + 1)).all()


@pytest.mark.parametrize("d", [2, 8])
def test_equal_rows_give_exactly_one_in_any_tile(d, rng):
    X = 100 + rng.normal(size=(300, d))
    K = kernels.Gaussian(0.01)
    assert (np.diag(K(X)) == 1).all()
    assert (np.diag(K.block(X[40:60], X[40:60].copy())) == 1).all()
    assert K.block(X[:1], X[:1])[0, 0] == 1


@pytest.mark.parametrize("gap", [1e-4, 1e-6, 1e-9])
def test_near_rows_are_recomputed_from_differences(rng, gap):
    X = rng.normal(size=(100, 10))
    Y = X + gap * rng.normal(size=X.shape)
    truth = ((X - Y) ** 2).sum(1)
    found = -np.log(np.diag(kernels.Gaussian(10 * gap)(X, Y))) * 2 * (10 * gap) ** 2
    np.testing.assert_allclose(found, truth, rtol=1e-10)


def test_many_near_landmarks_are_recomputed_in_parts(rng):
    X = np.repeat(rng.normal(size=(2, 6)), 700, axis=0)
    assert np.unique(kernels.Gaussian(1e-3)(X)).tolist() == [0.0, 1.0]


def test_sums_and_products_are_flat_and_sum_works():
    a, b, c = kernels.Gaussian(1.0), kernels.Linear(), kernels.Laplacian(2.0)
    assert (a + b + c).terms == (a, b, c) == (a + (b + c)).terms
    assert (a * b * c).factors == (a, b, c)
    assert sum([a, b, c]) == a + b + c
    assert np.float64(2.0) * a == 2 * a
    assert a + 1 == a + kernels.Constant(1.0)


def test_the_papers_k1_is_one_line(mnist_247):
    X = mnist_247[:20]
    truth = (X @ X.T / 784) ** 9
    np.testing.assert_allclose(kernels.Polynomial(9, scale=1 / 784)(X), truth, rtol=1e-13)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_the_lower_triangle_is_mirrored_bit_for_bit(n, order, rng):
    K = np.array(rng.choice([0.0, -0.0, np.nan, np.inf, 1.5], (n, n)), order=order)
    expected = np.where(np.tri(n, dtype=bool), K, K.T)
    mirror_lower(K)
    np.testing.assert_array_equal(K.view(np.int64), np.ascontiguousarray(expected).view(np.int64))
