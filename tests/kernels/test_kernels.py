"""Kernels: the laws for every class and for random expressions, the oracles, and what is refused."""

from dataclasses import fields
from functools import partial

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist, jensenshannon
from sklearn.gaussian_process import kernels as process
from sklearn.metrics.pairwise import additive_chi2_kernel, chi2_kernel, cosine_similarity, rbf_kernel

import contracts
from dkfm import kernels
from dkfm.errors import KernelError
from dkfm.kernels import serialization
from dkfm.kernels.pairwise.squared_distances import prepare_negative_squared_distances
from dkfm.kernels.stationary import DistanceKernel
from helpers import oracles, strategies
from helpers.kernel_cases import HISTOGRAMS, SIGNED

ARD = [
    kernels.Gaussian,
    kernels.Laplacian,
    kernels.Exponential,
    lambda scale: kernels.Matern(0.3, scale),
    lambda scale: kernels.Matern(2.5, scale),
    lambda scale: kernels.RationalQuadratic(1.5, scale),
    kernels.NegativeSquaredDistance,
    lambda scale: kernels.Periodic(tuple(2 * s for s in scale), scale),
]


@pytest.mark.costly
@pytest.mark.parametrize("kernel", SIGNED + HISTOGRAMS, ids=repr)
@pytest.mark.parametrize("d", [3, *(pytest.param(d, marks=pytest.mark.slow) for d in (1, 9))])
def test_every_class_obeys_the_laws(kernel, d, rng):
    X, Y = rng.normal(size=(40, d)), rng.normal(size=(11, d))
    if kernel in HISTOGRAMS:
        X, Y = np.abs(X), np.abs(Y)
    contracts.check_kernel(kernel, np.vstack([X, X[:5], 0 * X[:1]]), Y)


def test_every_class_is_among_those_that_obey_the_laws():
    made = {type(part) for kernel in SIGNED + HISTOGRAMS for part in [kernel, *getattr(kernel, "parts", ())]}
    ours = {value for value in vars(kernels).values() if isinstance(value, type) and issubclass(value, kernels.Kernel)}
    given = {kernels.Kernel, kernels.Function, kernels.Pairwise, kernels.Outer, kernels.Precomputed}
    assert ours - given == made


@pytest.mark.costly
@pytest.mark.parametrize("make", ARD)
@pytest.mark.parametrize("d", [2, 7])
def test_a_length_scale_of_each_column_is_that_of_divided_columns(make, d, rng):
    scale = tuple(rng.uniform(0.5, 3, d))
    X, Y = rng.normal(size=(30, d)), rng.normal(size=(8, d))
    kernel, ones = make(scale), make((1.0,) * d)
    contracts.check_kernel(kernel, X, Y)
    if not isinstance(kernel, kernels.Periodic):
        np.testing.assert_allclose(kernel(X, Y), ones(X / scale, Y / scale), rtol=1e-12, atol=1e-13)
    far = 1e6  # the centre is taken away before the division
    near = kernel((X + far) - far, (Y + far) - far)
    np.testing.assert_allclose(kernel(X + far, Y + far), near, rtol=1e-12, atol=1e-14)
    with pytest.raises(KernelError, match=rf"{d} numbers as .* have {d + 1} columns"):
        kernel(np.ones((2, d + 1)))


@given(strategies.expressions, st.data())
def test_random_expressions_obey_the_laws(kernel, data):
    d = data.draw(st.integers(1, 7))
    X = data.draw(strategies.rows(1, 8, st.just(d)))
    contracts.check_kernel(kernel, X, data.draw(strategies.rows(1, 5, st.just(d))))


@pytest.mark.slow
@given(strategies.histogram_expressions, st.data())
def test_random_expressions_of_histograms_obey_the_laws(kernel, data):
    d = data.draw(st.integers(1, 7))
    X = np.abs(data.draw(strategies.rows(1, 8, st.just(d))))
    contracts.check_kernel(kernel, X, np.abs(data.draw(strategies.rows(1, 5, st.just(d)))))


TRUTHS = [
    (kernels.Gaussian(3.0), lambda X, Y: oracles.gaussian(X, Y, 3.0)),
    (kernels.Gaussian(3.0), lambda X, Y: rbf_kernel(X, Y, gamma=1 / 18)),
    (kernels.Laplacian(3.0), lambda X, Y: oracles.laplacian(X, Y, 3.0)),
    (kernels.Exponential(2.0), lambda X, Y: np.exp(-cdist(X, Y) / 2)),
    (kernels.Matern(0.5, 2.0), lambda X, Y: np.exp(-cdist(X, Y) / 2)),
    (kernels.Matern(1.5, 2.0), process.Matern(2.0, nu=1.5)),
    (kernels.Matern(2.5, (1.0, 2.0)), process.Matern([1.0, 2.0], nu=2.5)),
    (kernels.Matern(0.7, 2.0), process.Matern(2.0, nu=0.7)),
    (kernels.Matern(4.2, 2.0), process.Matern(2.0, nu=4.2)),
    (kernels.Matern(3.5, 2.0), process.Matern(2.0, nu=3.5)),
    (kernels.Matern(10.5, 2.0), process.Matern(2.0, nu=10.5)),
    (kernels.Matern(11.5, 2.0), process.Matern(2.0, nu=11.5)),
    (kernels.RationalQuadratic(0.7, 2.0), process.RationalQuadratic(2.0, 0.7)),
    (kernels.Periodic(2.0, 1.5), lambda X, Y: oracles.periodic(X, Y, 2.0, 1.5)),
    (kernels.NegativeSquaredDistance(2.0), lambda X, Y: -cdist(X, Y, "sqeuclidean") / 4),
    (kernels.Linear(), lambda X, Y: X @ Y.T),
    (kernels.Constant(2.0), lambda X, Y: np.full((len(X), len(Y)), 2.0)),
    (kernels.Polynomial(5, 0.25, 2.0), lambda X, Y: oracles.polynomial(X, Y, 5, 0.25, 2.0)),
    (kernels.Cosine(), cosine_similarity),
    (kernels.ArcCosine(0), lambda X, Y: oracles.arc_cosine(X, Y, 0)),
    (kernels.ArcCosine(1), lambda X, Y: oracles.arc_cosine(X, Y, 1)),
    (kernels.ArcCosine(2), lambda X, Y: oracles.arc_cosine(X, Y, 2)),
    (kernels.Sigmoid(0.5, -0.2), lambda X, Y: np.tanh(0.5 * X @ Y.T - 0.2)),
    (kernels.Linear() ** 2 + 3 * kernels.Linear(), lambda X, Y: (X @ Y.T) ** 2 + 3 * X @ Y.T),
    (kernels.PowerSeries(kernels.Linear(), (1.0, 0.0, 2.0)), lambda X, Y: 1 + 2 * (X @ Y.T) ** 2),
    (kernels.Exp(kernels.Linear()), lambda X, Y: np.exp(X @ Y.T)),
    (kernels.Normalized(kernels.Linear()), cosine_similarity),
    (kernels.Linear().warp(np.sin), lambda X, Y: np.sin(X) @ np.sin(Y).T),
    (kernels.Outer(lambda X: X[:, 0]), lambda X, Y: np.multiply.outer(X[:, 0], Y[:, 0])),
    (kernels.Linear().on(1), lambda X, Y: np.multiply.outer(X[:, 1], Y[:, 1])),
    (kernels.Pairwise(lambda x, y: x @ y), lambda X, Y: X @ Y.T),
]


HISTOGRAM_TRUTHS = [
    (kernels.ChiSquared(0.5), partial(chi2_kernel, gamma=0.5)),
    (kernels.AdditiveChiSquared(), additive_chi2_kernel),
    (kernels.HistogramIntersection(), lambda X, Y: np.minimum(X[:, None], Y).sum(-1)),
    (kernels.JensenShannon(), lambda X, Y: 1 - cdist(X, Y, lambda x, y: jensenshannon(x, y, base=2)) ** 2),
]


def test_every_kernel_that_has_a_name_has_a_truth_and_a_case_of_the_laws():
    named = set(serialization._NUMERIC.values()) - {kernels.Precomputed}  # whose values are given
    assert named - {type(kernel) for kernel, _ in TRUTHS + HISTOGRAM_TRUTHS} == set()
    assert named - {type(kernel) for kernel in SIGNED + HISTOGRAMS} == set()


def test_every_kernel_of_a_distance_has_a_scale_that_may_be_the_median_and_one_for_each_column():
    scaled = {kernel for kernel in serialization._NUMERIC.values() if issubclass(kernel, DistanceKernel)}
    for kernel in scaled:
        assert kernel.scale_name in [field.name for field in fields(kernel)]
    # A scale only multiplies the values of this one.
    assert scaled - set(serialization._MEDIANS) == {kernels.NegativeSquaredDistance}
    assert scaled - {type(make((1.0,))) for make in ARD} == set()


def _name(value):
    """Name a case, the same in every process: without an address."""
    return repr(value).partition(" at 0x")[0][:40]


@pytest.mark.parametrize(("kernel", "truth"), TRUTHS, ids=_name)
def test_kernels_equal_their_formulas_scikit_learn_and_scipy(kernel, truth, rng):
    X, Y = rng.normal(size=(50, 2)), rng.normal(size=(20, 2))
    expected = truth(X, Y)
    np.testing.assert_allclose(kernel(X, Y), expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize(("kernel", "truth"), HISTOGRAM_TRUTHS, ids=_name)
def test_kernels_of_histograms_equal_scikit_learns_and_scipys(kernel, truth, rng):
    X, Y = rng.dirichlet(np.ones(12), size=30), rng.dirichlet(np.ones(12), size=9)
    X[:5, 3] = Y[:5, 3] = 0.0
    X, Y = X / X.sum(1, keepdims=True), Y / Y.sum(1, keepdims=True)
    np.testing.assert_allclose(kernel(X, Y), truth(X, Y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nu", [0.05, 1.0, 2.0, 3.0, 19.5, 19.7, 60.0, 99.9, 100.0])
def test_matern_is_smooth_down_to_the_shortest_distances(nu):
    x = np.concatenate([[0.0], np.logspace(-300, 2, 2000)])[:, None]
    values = kernels.Matern(nu, 1.0)(x, np.zeros((1, 1)))[:, 0]
    assert values[0] == 1
    assert (np.diff(values) <= 1e-12).all(), "it falls"
    assert (np.abs(values) <= 1 + 1e-12).all()
    if nu > 20:  # its power series, where the Bessel function is beyond all numbers and just after
        a = 2 * nu * x[1:, 0] ** 2
        near = a < 0.01
        truth = 1 - a / (4 * (nu - 1)) + a**2 / (32 * (nu - 1) * (nu - 2))
        np.testing.assert_allclose(values[1:][near], truth[near], rtol=0, atol=1e-12)


@pytest.mark.parametrize("nu", [1.0, 2.0, 3.0, 7.0, 11.5, 40.0, 40.5, 100.0])
def test_matern_of_integers_and_half_integers_is_exact_to_rounding(nu):
    a = np.concatenate([np.geomspace(1e-6, 650, 60), [705.0, 720.0, 744.0, 760.0, 900.0]])
    values = kernels.Matern(nu, 1.0)(a[:, np.newaxis] / np.sqrt(2 * nu), np.zeros((1, 1)))[:, 0]
    with mpmath.workdps(40):
        order = mpmath.mpf(nu)
        exact = [2 ** (1 - order) / mpmath.gamma(order) * mpmath.mpf(x) ** nu * mpmath.besselk(nu, x) for x in a]
        errors = np.array([abs(float(value / truth - 1)) for value, truth in zip(values, exact, strict=True)])
    # The rounding of a counts a times over in exp(-a), and each step of the recurrence once.
    is_normal = np.array([truth > 1e-307 for truth in exact])
    assert (errors <= (8 + 2 * a + nu) * np.finfo(float).eps)[is_normal].all()
    assert kernels.Matern(nu, 1.0)([[0.0]], [[1e3]])[0, 0] == 0


@pytest.mark.parametrize("order", [0, 1, 2])
def test_arc_cosine_keeps_its_digits_where_rows_are_almost_parallel_or_opposite(order, rng):
    X = rng.normal(size=(40, 6))
    for gap in (1e-2, 3e-3, 1e-3, 1e-6, 1e-9):
        Y = X + gap * rng.normal(size=X.shape)
        for sign in (1, -1):
            found = np.diag(kernels.ArcCosine(order)(X, sign * Y))
            truth = np.diag(oracles.arc_cosine(X.astype(np.longdouble), sign * Y.astype(np.longdouble), order))
            norms = np.linalg.norm(X, axis=1) ** order * np.linalg.norm(Y, axis=1) ** order
            np.testing.assert_allclose(found, truth.astype(float), rtol=0, atol=4e-15 * norms.max())
    assert (np.diag(kernels.ArcCosine(0)(X, X.copy())) == 1).all()


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("d", [3, 20, 200])
@pytest.mark.parametrize("kernel", [*SIGNED, *HISTOGRAMS], ids=repr)
def test_float32_holds_five_digits_at_any_offset(kernel, d, offset, rng):
    X = (offset + np.abs(rng.normal(size=(60, d))) / np.sqrt(d)).astype(np.float32)
    Y = (offset + np.abs(rng.normal(size=(20, d))) / np.sqrt(d)).astype(np.float32)
    Y[:3] = X[:3]
    truth = kernel(X.astype(np.float64), Y.astype(np.float64))
    if np.abs(truth).max() > np.finfo(np.float32).max:
        with pytest.raises(KernelError, match="returned inf"):
            kernel(X, Y)
        return
    assert kernel(X, Y).dtype == np.float32
    assert np.abs(kernel(X, Y) - truth).max() <= 1e-5 * np.abs(truth).max()


def test_narrow_gaussians_in_float32_are_computed_in_float64(rng):
    X = rng.normal(size=(200, 30)).astype(np.float32)
    Y = (X + 0.01 * rng.normal(size=X.shape)).astype(np.float32)
    k = kernels.Gaussian(0.05)
    truth = k(X.astype(np.float64), Y.astype(np.float64))
    assert truth.max() > 0.1
    assert np.abs(k(X, Y) - truth).max() < 1e-5


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize(
    "make", [kernels.Gaussian, kernels.Exponential, kernels.Matern], ids=lambda make: make.__name__
)
def test_values_that_float32_does_not_hold_are_computed_in_float64(rng, make, noise):
    X = rng.normal(size=(300, 30)).astype(np.float32)
    Y = (X + noise * rng.normal(size=X.shape)).astype(np.float32)  # near, and yet much nearer than the centre
    k = make(**{make.scale_name: 0.3})
    truth = k(X.astype(np.float64), Y.astype(np.float64))
    assert np.diag(truth).min() > 1e-9
    # A tenth of what is promised: float32 with its errors of products alone is wrong by more at noise of 0.1.
    assert np.abs(k(X, Y) - truth).max() < 1e-6


def test_rows_whose_squared_norms_overflow_in_float32_are_computed_in_float64(rng):
    X = rng.normal(1.0, 0.1, (40, 12)).astype(np.float32)
    np.testing.assert_array_equal(kernels.Gaussian(1e-20)(X, X.copy()), np.eye(40))


@pytest.mark.parametrize("k", [kernels.Gaussian(), kernels.Exponential(), kernels.Sigmoid(1.0, -0.5), kernels.Linear()])
@pytest.mark.parametrize(("of_z", "of_x"), [(csr_array, csr_array), (csr_array, np.asarray), (np.asarray, csr_array)])
def test_sparse_rows_of_many_values_keep_their_digits_in_float32(k, of_z, of_x, rng):
    X, Z = (rng.uniform(0, 2, (5, 30_000)).astype(np.float32) / 200 for _ in range(2))
    truth = k(Z.astype(np.float64), X.astype(np.float64))
    assert np.abs(k(of_z(Z), of_x(X)) - truth).max() <= 5e-6


def test_float32_keeps_the_digits_of_short_distances(rng):
    X = 1 + rng.normal(size=(300, 30)).astype(np.float32)
    Y = (X + 0.03 * rng.normal(size=X.shape)).astype(np.float32)
    truth = ((X.astype(np.float64) - Y) ** 2).sum(1)
    found = -np.diag(prepare_negative_squared_distances(Y, 30.0)(X)) * 900
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, truth, rtol=1e-6)


def test_what_would_leave_float32_on_its_way_is_computed_in_float64(rng):
    X = rng.normal(size=(50, 4)).astype(np.float32)
    clusters = (X * 1e-3 + 1e4 * np.sign(X[:, :1])).astype(np.float32)
    circle = (np.round(np.abs(X)) / 3 + 1e-4 * X).astype(np.float32)
    for kernel, x in (
        (kernels.Gaussian(1.0).warp(kernels.Affine(1.0, 1e6)), X),
        (kernels.Gaussian(0.1).warp(kernels.Affine(0.1)), X + np.float32(1e4)),
        (kernels.Laplacian((0.3,) * 4), clusters),
        (kernels.Periodic(1.0, 1e-3), circle),
        (kernels.Laplacian(1e40), X * np.float32(1e37)),
        (kernels.Laplacian(1e-50), X),
        (kernels.Gaussian(1e-50), X),
        (kernels.Polynomial(1, scale=1e-46), X),
        (kernels.Polynomial(300, scale=0.01, offset=1.0), X),
        (kernels.Product((kernels.Linear(),) * 30).warp(kernels.Affine(0.5)), X),
    ):
        truth = kernel(x.astype(np.float64))
        assert np.abs(kernel(x) - truth).max() <= 1e-6 * np.abs(truth).max() + 1e-38, kernel


def test_roots_of_distances_keep_their_digits(rng):
    X = rng.normal(size=(200, 10))
    for gap in (1e-2, 3e-3, 1e-3, 1e-5):
        Y = X + gap * rng.normal(size=X.shape)
        distances = np.sqrt(((X.astype(np.longdouble) - Y) ** 2).sum(1)).astype(float)
        np.testing.assert_allclose(np.diag(kernels.Exponential()(X, Y)), np.exp(-distances), rtol=1e-13)
        on_a_line = np.stack([distances, np.zeros_like(distances)])[:, :, None]
        truth = np.diag(kernels.Matern(0.3)(*on_a_line))
        np.testing.assert_allclose(np.diag(kernels.Matern(0.3)(X, Y)), truth, rtol=1e-13)


def test_extreme_rows_have_their_values():
    one = np.ones((1, 1))
    assert kernels.Matern(1.0)(0 * one, 1.1e9 * one) == 0
    assert kernels.ArcCosine(0).diag(1e-200 * one) == kernels.ArcCosine(0)(1e-200 * one) == 1
    assert kernels.JensenShannon()(5e-324 * one, 0 * one) == 0
    assert kernels.Cosine()(1e-200 * one, 1e200 * one) == 1
