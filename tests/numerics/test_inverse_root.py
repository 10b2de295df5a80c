"""The inverse root: rank, policy for kernels that are not PSD, exactness."""

import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm import kernels
from dkfm.core import budget
from dkfm.errors import DkfmWarning, NotPSDError
from dkfm.numerics import roots, scorer
from dkfm.numerics.certificates.certificate import certify_map, sample_evenly
from dkfm.numerics.eigensolvers import dense
from dkfm.numerics.kernel_components import ComponentOptions, solve_components_by_eigh
from dkfm.numerics.model import Model
from helpers import oracles
from helpers.recorded import drop_resource_warnings


def gram(kernel, X):
    return np.asfortranarray(kernel(X))


def test_eigh_works_in_place_from_the_lower_triangle(rng):
    A = rng.normal(size=(60, 60))
    K = np.asfortranarray(A + A.T)
    truth = np.linalg.eigvalsh(K)
    K[np.triu_indices(60, 1)] = np.nan
    values, vectors = dense.eigh_in_place(K)
    np.testing.assert_allclose(values, truth, atol=1e-12)
    assert np.shares_memory(vectors, K)


@pytest.mark.parametrize("solve", [roots.inverse_root, partial(solve_components_by_eigh, options=ComponentOptions(5))])
def test_the_matrix_is_freed_before_lapack_takes_its_workspace(solve, rng):
    n, X = 600, rng.normal(size=(600, 3))
    solve(gram(kernels.Gaussian(0.2), X[:50]))  # imports
    tracemalloc.start()
    try:
        holder = [gram(kernels.Gaussian(0.2), X)]
        tracemalloc.reset_peak()
        solve(holder.pop())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * n * n * (budget.EIGENVECTOR_SQUARES + 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["symmetric", "spectral"])
def test_k1_on_mnist_is_exact_to_thirteen_digits(mnist_247, basis):
    k = kernels.Polynomial(9, scale=1 / 784)
    found = roots.inverse_root(gram(k, mnist_247))
    certificate = certify_map(
        scorer.prepare_scorer(Model(k, mnist_247, roots.make_map_heads(found, basis))),
        mnist_247[sample_evenly(len(mnist_247))],
    )
    assert len(found.values) == 1500
    assert certificate.error < 1e-13
    assert certificate.relative_error < 1e-8  # values span ten orders of magnitude


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["symmetric", "spectral"])
def test_k1_on_doubled_mnist_has_half_the_rank(mnist_247, basis):
    k, X = kernels.Polynomial(9, scale=1 / 784), np.repeat(mnist_247, 2, axis=0)
    found = roots.inverse_root(gram(k, X))
    certificate = certify_map(
        scorer.prepare_scorer(Model(k, X, roots.make_map_heads(found, basis))), X[sample_evenly(len(X))]
    )
    assert len(found.values) == 1500
    assert certificate.error < 1e-12


@pytest.mark.parametrize(
    ("kernel", "X", "rank"),
    [
        (kernels.Linear(), np.random.default_rng(0).normal(size=(80, 6)), 6),
        (kernels.Gaussian(0.5), np.repeat(np.random.default_rng(0).normal(size=(40, 3)), 3, axis=0), 40),
        (kernels.Polynomial(2), np.random.default_rng(0).normal(size=(80, 3)), 6),
        (kernels.Constant(3.0), np.zeros((5, 1)), 1),
        (kernels.Linear(), np.zeros((5, 2)), 0),
        (1e-10 * kernels.Gaussian(0.5), np.random.default_rng(0).normal(size=(50, 3)), 50),
    ],
)
def test_the_rank_is_exact_where_it_is_known(kernel, X, rank):
    found = roots.inverse_root(gram(kernel, X))
    assert len(found.values) == rank
    assert len(found.dropped_values) == len(X) - rank
    for basis in ["symmetric", "spectral"]:
        certificate = certify_map(
            scorer.prepare_scorer(Model(kernel, X, roots.make_map_heads(found, basis))), X[sample_evenly(len(X))]
        )
        assert certificate.error < 1e-13


def test_the_symmetric_map_is_the_dense_formula_in_both_of_its_forms(rng):
    Z = rng.normal(size=(20, 3))
    for sigma, explicit in ((0.2, True), (1.0, False)):
        X = rng.normal(size=(100, 3))
        k = kernels.Gaussian(sigma)
        heads = roots.make_map_heads(roots.inverse_root(gram(k, X)), "symmetric")
        assert (heads["features"].sqrt_eigenvalues is None) == explicit
        found = scorer.prepare_scorer(Model(k, X, heads))("features", Z)
        truth = oracles.symmetric_map(oracles.gaussian(X, X, sigma), oracles.gaussian(X, Z, sigma))
        np.testing.assert_allclose(found, truth, atol=1e-8)


def test_an_indefinite_kernel_is_refused_with_both_ends_of_its_spectrum(rng):
    sigmoid = kernels.Function(lambda X, Y: np.tanh(2 * X @ Y.T - 1))
    X = rng.normal(size=(50, 3))
    values = np.linalg.eigvalsh(sigmoid(X))
    with pytest.raises(NotPSDError) as caught:
        roots.inverse_root(gram(sigmoid, X))
    assert f"{values[0]:.4g}"[:5] in str(caught.value)
    assert f"{values[-1]:.4g}"[:5] in str(caught.value)


def test_clipping_drops_the_negative_part_and_warns(rng):
    sigmoid, X = kernels.Function(lambda X, Y: np.tanh(2 * X @ Y.T - 1)), rng.normal(size=(50, 3))
    with pytest.warns(DkfmWarning, match="lambda_min"):
        found = roots.inverse_root(gram(sigmoid, X), on_indefinite="clip")
    assert (found.dropped_values < 0).any()
    values = np.linalg.eigvalsh(sigmoid(X))[::-1]
    kept = values > 4 * np.finfo(float).eps * np.abs(values).max()
    np.testing.assert_allclose(found.values, values[kept], rtol=0, atol=1e-12 * values[0])


def test_rcond_replaces_the_relative_cut(rng):
    k, X = kernels.Gaussian(3.0), rng.normal(size=(60, 2))
    found = roots.inverse_root(gram(k, X), rcond=1e-3)
    assert found.values[-1] > 1e-3 * found.values[0] >= found.dropped_values[0]


def noisy(rng, level):
    """A Gram matrix of rank 5 and largest eigenvalue 1, with symmetric noise."""
    A, noise = np.linalg.qr(rng.normal(size=(60, 5)))[0], rng.normal(size=(60, 60))
    return np.asfortranarray(A @ np.diag([1, 0.5, 0.2, 0.1, 0.1]) @ A.T + level * (noise + noise.T))


def test_noise_that_rounding_does_not_explain_is_one_warning_with_the_numbers(rng):
    with pytest.warns(DkfmWarning, match=r"eigenvalue of -\S+, more than rounding .* \d+ eigenvalues up to") as caught:
        found = roots.inverse_root(noisy(rng, 5e-15))
    assert len(drop_resource_warnings(caught)) == 1
    assert len(found.values) == 5
    roots.inverse_root(noisy(rng, 1e-17))  # no warning, which would be an error here
    roots.inverse_root(noisy(rng, 5e-15), rcond=1e-3)


@given(st.integers(0, 2**32 - 1))
def test_signs_do_not_depend_on_the_last_bit(seed):
    rng = np.random.default_rng(seed)
    V = rng.normal(size=(9, 4))
    V[[2, 5]] = [[3.0], [-3.0]]  # two entries of the same magnitude: the first decides
    noise = 1 + 1e-12 * rng.normal(size=V.shape)
    np.testing.assert_array_equal(roots.choose_signs(V), roots.choose_signs(V * noise))
    np.testing.assert_array_equal(roots.choose_signs(-V), -roots.choose_signs(V))
