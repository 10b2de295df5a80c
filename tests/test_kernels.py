"""Kernels: the laws for every class and for random expressions, the oracles, and what is refused."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics.pairwise import laplacian_kernel, polynomial_kernel, rbf_kernel

import laws
import oracles
import strategies
from dkfm import kernels
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels import config

CLASSES = [
    kernels.Gaussian(1.5),
    kernels.Laplacian(2.0),
    kernels.Linear(),
    kernels.Polynomial(3, scale=0.5, offset=1.0),
    kernels.Constant(2.0),
    kernels.Gaussian(2.0) + kernels.Linear(),
    kernels.Gaussian(2.0) * kernels.Polynomial(2),
    0.5 * kernels.Laplacian(1.0),
    (kernels.Linear() + 1.0) ** 3,
]


@pytest.mark.parametrize("kernel", CLASSES, ids=repr)
@pytest.mark.parametrize("d", [1, 3, 9])
def test_every_class_obeys_the_laws(kernel, d, rng):
    X = rng.normal(size=(40, d))
    laws.kernel_laws(kernel, np.vstack([X, X[:5]]), rng.normal(size=(11, d)))


@given(strategies.expressions, st.data())
def test_random_expressions_obey_the_laws(kernel, data):
    d = data.draw(st.integers(1, 7))
    X = data.draw(strategies.rows(1, 8, st.just(d)))
    laws.kernel_laws(kernel, X, data.draw(strategies.rows(1, 5, st.just(d))))


@pytest.mark.parametrize("d", [2, 30])
def test_kernels_equal_their_formulas_and_scikit_learn(d, rng):
    X, Y = rng.normal(size=(50, d)), rng.normal(size=(20, d))
    same = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15)
    same(kernels.Gaussian(3.0)(X, Y), oracles.gaussian(X, Y, 3.0))
    same(kernels.Gaussian(3.0)(X, Y), rbf_kernel(X, Y, gamma=1 / 18))
    same(kernels.Laplacian(3.0)(X, Y), oracles.laplacian(X, Y, 3.0))
    same(kernels.Laplacian(3.0)(X, Y), laplacian_kernel(X, Y, gamma=1 / 3))
    found = kernels.Polynomial(5, 0.25, 2.0)(X, Y)
    np.testing.assert_allclose(found, oracles.polynomial(X, Y, 5, 0.25, 2.0), rtol=1e-10)  # near a root of the base
    np.testing.assert_allclose(found, polynomial_kernel(X, Y, degree=5, gamma=0.25, coef0=2.0), rtol=1e-10)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("d", [3, 20])
def test_gaussian_keeps_its_digits_far_from_the_origin(offset, d, rng):
    X = offset + rng.normal(size=(200, d))
    Y = np.vstack([offset + rng.normal(size=(50, d)), X[:10], X[:10] * (1 + 1e-15)])
    g = 1 / (2 * 1.3**2)
    norms = ((X - Y.mean(0)) ** 2).sum(1)[:, None] + ((Y - Y.mean(0)) ** 2).sum(1)
    error = np.abs(np.log(kernels.Gaussian(1.3)(X, Y)) - np.log(oracles.gaussian(X, Y, 1.3)))
    assert (error <= 8 * laws.EPS * (g * norms + 1)).all()


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kernels.Gaussian(0.0), "sigma > 0"),
        (lambda: kernels.Gaussian(-1), "sigma > 0"),
        (lambda: kernels.Gaussian(float("nan")), "finite number"),
        (lambda: kernels.Gaussian("wide"), "finite number"),
        (lambda: kernels.Gaussian(True), "finite number"),
        (lambda: kernels.Gaussian(10**400), "finite number"),
        (lambda: kernels.Gaussian(1e200), "whose square"),
        (lambda: kernels.Gaussian(1e-170), "whose square"),
        (lambda: kernels.Laplacian(0), "sigma > 0"),
        (lambda: kernels.Polynomial(2.5), "positive integer"),
        (lambda: kernels.Polynomial(0), "positive integer"),
        (lambda: kernels.Polynomial(2, offset=-1), "offset >= 0"),
        (lambda: kernels.Polynomial(2, scale=0), "scale > 0"),
        (lambda: -1.0 * kernels.Linear(), "not positive semi-definite"),
        (lambda: kernels.Linear() + -2, "not positive semi-definite"),
        (lambda: kernels.Linear() ** 0.5, "positive integer"),
        (lambda: kernels.Sum(()), "tuple of kernels"),
        (lambda: kernels.Product((1,)), "made of kernels"),
        (lambda: kernels.Function(3), "callable"),
    ],
)
def test_what_would_not_be_a_kernel_is_refused(make, words):
    with pytest.raises(KernelError, match=words):
        make()


@pytest.mark.parametrize(
    ("X", "words"),
    [
        (np.ones(3), "two dimensions"),
        (np.ones((0, 3)), "at least one row"),
        (np.ones((3, 0)), "at least one row"),
        (np.array([[1j]]), "real numbers"),
        (np.array([[object()]]), "real numbers"),
        (np.array([["a"]]), "real numbers"),
        ([[1.0], [2.0, 3.0]], "rows and columns"),
        (np.array([[1.0], [np.nan]]), "row 1 contains NaN"),
        (np.array([[1.0], [2.0], [np.inf]]), "row 2 contains infinity"),
    ],
)
def test_rows_that_are_not_rows_are_refused(X, words):
    with pytest.raises(InvalidInputError, match=words):
        kernels.Linear()(X)


def test_two_widths_are_refused_with_both():
    with pytest.raises(InvalidInputError, match="3 columns and Y has 2"):
        kernels.Linear()(np.ones((1, 3)), np.ones((1, 2)))


def test_large_finite_rows_pass_though_their_sum_overflows():
    assert kernels.Laplacian(1e308)(np.full((2, 2), 8e307)).shape == (2, 2)


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.float16, np.bool_])
def test_integers_and_short_floats_are_widened_exactly(dtype, rng):
    X = rng.integers(0, 2, size=(5, 3)).astype(dtype)
    np.testing.assert_array_equal(kernels.Gaussian()(X), kernels.Gaussian()(X.astype(np.float64)))


def test_a_function_is_checked_for_shape_dtype_and_nan():
    X = np.ones((3, 2))
    with pytest.raises(KernelError, match=r"shape \(3, 3\).*returned shape \(3,\)"):
        kernels.Function(lambda X, Y: np.ones(3))(X)
    with pytest.raises(KernelError, match="real numbers"):
        kernels.Function(lambda X, Y: np.ones((3, 3), complex))(X)
    with pytest.raises(KernelError, match="returned nan for rows 0 and 0"):
        kernels.Function(lambda X, Y: np.full((3, 3), np.nan))(X)


def test_a_function_may_keep_and_freeze_what_it_returns():
    kept = np.ones((3, 3))
    kept.flags.writeable = False
    k = 2 * kernels.Function(lambda X, Y: kept)
    assert (k(np.zeros((3, 1))) == 2).all()
    assert (kept == 1).all()


def test_a_function_that_is_not_symmetric_is_refused_with_two_rows(rng):
    A = np.triu(np.ones((3, 3)))
    with pytest.raises(KernelError, match="not symmetric in rows"):
        kernels.Function(lambda X, Y: X @ A @ Y.T)(rng.normal(size=(300, 3)))


def test_a_function_cannot_change_the_rows(rng):
    with pytest.raises(ValueError, match="read-only"):
        kernels.Function(lambda X, Y: np.multiply(X, 2, out=X) @ Y.T)(rng.normal(size=(5, 3)))


def test_a_function_without_a_name_cannot_be_written_to_a_store():
    with pytest.raises(KernelError, match="no other process can import it"):
        config.to_config(1.0 + kernels.Function(lambda X, Y: X @ Y.T))


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"name": "gausian"}, "near it: gaussian"),
        ({"name": ["gaussian"]}, "no kernel named"),
        ({"name": "gaussian", "sigma": -1}, "sigma > 0"),
        ({"name": "gaussian", "width": 1}, "and not width"),
        ({"name": "sum"}, "needs terms"),
        ({"name": "sum", "terms": []}, "tuple of kernels"),
        ({"name": "power", "kernel": 3, "exponent": 2}, "made of kernels"),
        ({}, "with a 'name'"),
        ("gaussian", "with a 'name'"),
    ],
)
def test_a_stored_kernel_that_is_not_one_is_refused(stored, words):
    with pytest.raises(KernelError, match=words):
        config.from_config(stored)


def test_a_stored_kernel_nested_beyond_reason_is_refused():
    stored = {"name": "linear"}
    for _ in range(100):
        stored = {"name": "power", "kernel": stored, "exponent": 1}
    with pytest.raises(KernelError, match="32 deep"):
        config.from_config(stored)
