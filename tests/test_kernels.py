"""Kernels: the laws for every class and for random expressions, the oracles, and what is refused."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse import random as random_rows
from scipy.spatial.distance import cdist, jensenshannon
from sklearn.gaussian_process import kernels as process
from sklearn.metrics.pairwise import additive_chi2_kernel, chi2_kernel, cosine_similarity, rbf_kernel

import laws
import oracles
import strategies
from dkfm import kernels
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels import serialization
from dkfm.kernels.pairwise import columnwise_sums
from dkfm.kernels.pairwise.euclidean import prepare_negative_squared_distances

SIGNED = [
    kernels.Gaussian(1.5),
    kernels.Gaussian(None),
    kernels.Laplacian(2.0),
    kernels.Laplacian(None),
    kernels.Exponential(1.3),
    kernels.Matern(0.5),
    kernels.Matern(1.5, 2.0),
    kernels.Matern(2.5),
    kernels.Matern(0.3),
    kernels.Matern(1.0),
    kernels.Matern(40.0),
    kernels.Matern(100.0, 5.0),
    kernels.RationalQuadratic(0.7, 2.0),
    kernels.Periodic(2.0, 1.5),
    kernels.NegativeSquaredDistance(2.0),
    kernels.Linear(),
    kernels.Polynomial(3, scale=0.5, offset=1.0),
    kernels.Polynomial(12, scale=None, offset=1.0),
    kernels.Cosine(),
    kernels.ArcCosine(0),
    kernels.ArcCosine(1),
    kernels.ArcCosine(2),
    kernels.Sigmoid(0.5, 0.1),
    kernels.Constant(2.0),
    kernels.Gaussian(2.0) + kernels.Linear(),
    kernels.Gaussian(2.0) * kernels.Polynomial(2),
    0.5 * kernels.Laplacian(1.0),
    (kernels.Linear() + 1.0) ** 3,
    kernels.PowerSeries(kernels.Gaussian(2.0), (1.0, 0.0, 2.0)),
    kernels.Exp(kernels.Cosine()),
    kernels.Exp(0.1 * kernels.NegativeSquaredDistance()),
    kernels.Normalized(kernels.Polynomial(3, offset=1.0)),
    kernels.Polynomial(9, scale=1 / 1568, offset=0.5).warp(kernels.Affine(2, -1)),
    kernels.Linear().warp(kernels.Affine(2.0)),
    kernels.Gaussian(2.0).on((0,)) * kernels.Linear().on(0),
]
HISTOGRAMS = [
    kernels.ChiSquared(0.5),
    kernels.AdditiveChiSquared(),
    kernels.HistogramIntersection(),
    kernels.JensenShannon(),
]
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


@pytest.mark.parametrize("kernel", SIGNED + HISTOGRAMS, ids=repr)
@pytest.mark.parametrize("d", [3, *(pytest.param(d, marks=pytest.mark.slow) for d in (1, 9))])
def test_every_class_obeys_the_laws(kernel, d, rng):
    X, Y = rng.normal(size=(40, d)), rng.normal(size=(11, d))
    if kernel in HISTOGRAMS:
        X, Y = np.abs(X), np.abs(Y)
    laws.kernel_laws(kernel, np.vstack([X, X[:5], 0 * X[:1]]), Y)


def test_every_class_is_among_those_that_obey_the_laws():
    made = {type(part) for kernel in SIGNED + HISTOGRAMS for part in [kernel, *getattr(kernel, "parts", ())]}
    ours = {value for value in vars(kernels).values() if isinstance(value, type) and issubclass(value, kernels.Kernel)}
    given = {kernels.Kernel, kernels.Function, kernels.Pairwise, kernels.Outer, kernels.Precomputed}
    assert ours - given == made


@pytest.mark.parametrize("make", ARD)
@pytest.mark.parametrize("d", [2, 7])
def test_a_length_scale_of_each_column_is_that_of_divided_columns(make, d, rng):
    scale = tuple(rng.uniform(0.5, 3, d))
    X, Y = rng.normal(size=(30, d)), rng.normal(size=(8, d))
    kernel, ones = make(scale), make((1.0,) * d)
    laws.kernel_laws(kernel, X, Y)
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
    laws.kernel_laws(kernel, X, data.draw(strategies.rows(1, 5, st.just(d))))


@given(strategies.histogram_expressions, st.data())
def test_random_expressions_of_histograms_obey_the_laws(kernel, data):
    d = data.draw(st.integers(1, 7))
    X = np.abs(data.draw(strategies.rows(1, 8, st.just(d))))
    laws.kernel_laws(kernel, X, np.abs(data.draw(strategies.rows(1, 5, st.just(d)))))


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
    (kernels.RationalQuadratic(0.7, 2.0), process.RationalQuadratic(2.0, 0.7)),
    (kernels.Periodic(2.0, 1.5), lambda X, Y: oracles.periodic(X, Y, 2.0, 1.5)),
    (kernels.NegativeSquaredDistance(2.0), lambda X, Y: -cdist(X, Y, "sqeuclidean") / 4),
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


def _name(value):
    """Name a case, the same in every process: without an address."""
    return repr(value).partition(" at 0x")[0][:40]


@pytest.mark.parametrize(("kernel", "truth"), TRUTHS, ids=_name)
def test_kernels_equal_their_formulas_scikit_learn_and_scipy(kernel, truth, rng):
    X, Y = rng.normal(size=(50, 2)), rng.normal(size=(20, 2))
    expected = truth(X, Y)
    np.testing.assert_allclose(kernel(X, Y), expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("kernel", "truth"),
    [
        (kernels.ChiSquared(0.5), partial(chi2_kernel, gamma=0.5)),
        (kernels.AdditiveChiSquared(), additive_chi2_kernel),
        (kernels.HistogramIntersection(), lambda X, Y: np.minimum(X[:, None], Y).sum(-1)),
        (kernels.JensenShannon(), lambda X, Y: 1 - cdist(X, Y, lambda x, y: jensenshannon(x, y, base=2)) ** 2),
    ],
    ids=_name,
)
def test_kernels_of_histograms_equal_scikit_learns_and_scipys(kernel, truth, rng):
    X, Y = rng.dirichlet(np.ones(12), size=30), rng.dirichlet(np.ones(12), size=9)
    X[:5, 3] = Y[:5, 3] = 0.0
    X, Y = X / X.sum(1, keepdims=True), Y / Y.sum(1, keepdims=True)
    np.testing.assert_allclose(kernel(X, Y), truth(X, Y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nu", [0.05, 3.0, 19.5, 60.0, 100.0])
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


def test_exponents_that_float32_does_not_hold_are_computed_in_float64(rng):
    X = rng.normal(size=(300, 30)).astype(np.float32)
    Y = (X + 0.2 * rng.normal(size=X.shape)).astype(np.float32)  # not near, and yet much nearer than the centre
    k = kernels.Gaussian(0.3)
    exponents = np.log(np.diag(k(X.astype(np.float64), Y.astype(np.float64))))
    assert (exponents > -20).all()
    assert np.abs(np.log(np.diag(k(X, Y)).astype(np.float64)) - exponents).max() < 1.1e-5


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
    assert serialization.kernel_digest(kernels.Constant(-0.0)) == serialization.kernel_digest(kernels.Constant(0.0))
    assert serialization.to_config(kernels.Precomputed(np.int64(3)))["columns"] == 3
    assert kernels.Linear() / 4 == 0.25 * kernels.Linear()
    assert kernels.Product((kernels.Linear() * kernels.Gaussian(), kernels.Cosine())).factors[2] == kernels.Cosine()


def test_masked_values_are_refused():
    with pytest.raises(InvalidInputError, match="masked values"):
        kernels.Linear()(np.ma.masked_greater(np.ones((2, 2)), 0.5))
    assert kernels.Linear()(np.ma.ones((1, 1))) == 1


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


def test_a_narrow_gaussian_in_one_dimension_is_positive_semi_definite_to_rounding(rng):
    K = kernels.Gaussian(0.02)(rng.uniform(size=(1500, 1)))
    values = np.linalg.eigvalsh(K)
    assert values[0] >= -20 * laws.EPS * values[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*SIGNED, *HISTOGRAMS], ids=repr)
def test_a_block_takes_the_memory_that_the_kernel_says(kernel, rng):
    import tracemalloc

    X, Y = rng.uniform(size=(700, 10)), rng.uniform(size=(900, 10))
    kernel(X[:2], Y[:2])  # what is compiled or imported once is not a block's
    block = kernel.make_evaluator(Y)
    tracemalloc.start()
    block(X)
    peak = tracemalloc.get_traced_memory()[1] / (700 * 900 * 8)
    tracemalloc.stop()
    assert peak <= kernel.peak_blocks + 0.25


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
        (lambda: kernels.Product((1, 2)), "made of kernels"),
        (lambda: kernels.Function(3), "needs a function"),
        (lambda: kernels.Pairwise("rbf"), "needs a function"),
        (lambda: kernels.Outer(None), "needs a function"),
        (lambda: kernels.Gaussian((1.0, -2.0)), "sigma > 0"),
        (lambda: kernels.Gaussian(()), "finite numbers as sigma"),
        (lambda: kernels.Gaussian(("a",)), "finite numbers as sigma"),
        (lambda: kernels.Gaussian((1.0, 1e200)), "whose square"),
        (lambda: kernels.Exponential(None), "finite number as length_scale, or one for each column, or 'median'"),
        (lambda: kernels.Matern(0.0), "nu > 0"),
        (lambda: kernels.Matern(101), "Gaussian is its limit"),
        (lambda: kernels.RationalQuadratic(alpha=0), "alpha > 0"),
        (lambda: kernels.Periodic(period="median"), "finite number as period"),
        (lambda: kernels.ArcCosine(3), "order of 0, 1 or 2"),
        (lambda: kernels.ArcCosine(True), "order of 0, 1 or 2"),
        (lambda: kernels.Sigmoid(-1.0), "scale > 0"),
        (lambda: kernels.ChiSquared(0), "gamma > 0"),
        (lambda: kernels.PowerSeries(kernels.Linear(), (1.0, -1.0)), "negative multiple of a kernel"),
        (lambda: kernels.PowerSeries(kernels.Linear(), ()), "sequence of coefficients"),
        (lambda: kernels.PowerSeries(kernels.Linear(), (np.inf,)), "finite numbers as coefficients"),
        (lambda: kernels.Exp(3), "made of kernels"),
        (lambda: kernels.Normalized(kernels.NegativeSquaredDistance()), "is conditionally positive semi-definite"),
        (lambda: kernels.Linear().warp(kernels.Gaussian()), "an Affine or a function of rows"),
        (lambda: kernels.Function(kernels.Gaussian()), "needs a function"),
        (lambda: kernels.Linear().on((1, 1)), "each column once"),
        (lambda: kernels.Gaussian(np.complex128(2 + 3j)), "finite number"),
        (lambda: kernels.Gaussian(b"ab"), "finite number"),
        (lambda: kernels.Affine(10**400), "finite numbers as scale"),
        (lambda: kernels.PowerSeries(kernels.Linear(), (10**400,)), "finite numbers as coefficients"),
        (lambda: 10**400 * kernels.Linear(), "finite number as weight"),
        (lambda: kernels.Linear() ** 10**400, "positive integer as exponent"),
        (lambda: kernels.Polynomial(2.0), "positive integer as degree, and got 2.0\\.$"),
        (lambda: kernels.ArcCosine(np.array([1, 2])), "order of 0, 1 or 2"),
        (lambda: kernels.Sum((kernels.Linear(),)), "tuple of kernels"),
        (lambda: kernels.Precomputed(5).resolve(np.ones((4, 4))), "another Gram matrix"),
        (lambda: kernels.Linear().warp(3), "an Affine or a function of rows"),
        (lambda: kernels.Affine("wide"), "finite numbers as scale"),
        (lambda: kernels.Affine(1.0, (0.0, np.nan)), "finite numbers as shift"),
        (lambda: kernels.Linear().on(()), "columns by their numbers"),
        (lambda: kernels.Linear().on(-1), "columns by their numbers"),
        (lambda: kernels.Linear().on((0, 1.5)), "columns by their numbers"),
        (lambda: kernels.Linear().on("ab"), "columns by their numbers"),
        (lambda: 2 * kernels.Precomputed(5), "has no points"),
        (lambda: kernels.Precomputed(0), "positive integer as columns"),
    ],
)
def test_what_would_not_be_a_kernel_is_refused(make, words):
    with pytest.raises(KernelError, match=words):
        make()


@pytest.mark.parametrize(
    ("kernel", "X", "words"),
    [
        (kernels.ChiSquared(), [[1.0, 2.0], [3.0, -0.5]], "row 1 has -0.5 in column 1"),
        (kernels.JensenShannon(), [[-1.0]], "no negative numbers"),
        (kernels.Linear().on(4), [[1.0, 2.0]], "takes column 4 and the rows have 2"),
        (
            kernels.Linear().warp(kernels.Affine((1.0, 2.0, 3.0))),
            [[1.0, 2.0]],
            "other columns than these rows",
        ),
        (kernels.Linear().warp(lambda X: X[:1]), [[1.0], [2.0]], "are 1, and must be as many as came, 2"),
        (kernels.Linear().warp(np.log), [[0.0]], "row 0 contains infinity"),
        (kernels.Outer(lambda X: X), [[1.0], [2.0]], r"shape \(2,\) for 2 rows, and returned \(2, 1\)"),
        (kernels.Pairwise(lambda x, y: x), [[1.0, 2.0]], "one number for two rows, and returned 2"),
        (kernels.Pairwise(lambda x, y: "a"), [[1.0, 2.0]], "real numbers"),
        (kernels.Pairwise(lambda x, y: x[:, 0]), [[1.0]], r"IndexError.*belongs in kernels\.Function"),
        (kernels.Function(lambda x, y: 1.0), [[1.0], [2.0]], r"shape \(\).*belongs in kernels\.Pairwise"),
        (kernels.Function(lambda X: X), [[1.0]], "raised TypeError"),
        (kernels.Function(lambda X, Y: [[1.0], [1.0, 2.0]]), [[1.0], [2.0]], "raised ValueError"),
        (kernels.Normalized(kernels.Function(lambda X, Y: -X @ Y.T)), [[1.0, 2.0]], r"k\(x, x\) >= 0"),
        (kernels.Exp(kernels.Linear()), [[100.0]], "returned inf for rows 0 and 0"),
        (kernels.Precomputed(3), [[1.0]], "no points to compare"),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_rows_that_a_kernel_does_not_take_are_refused(kernel, X, words):
    with pytest.raises((KernelError, InvalidInputError), match=words):
        kernel(np.array(X))


def test_definiteness_goes_through_the_algebra():
    psd, conditional, indefinite = kernels.Gaussian(), kernels.NegativeSquaredDistance(), kernels.Sigmoid()
    what = [kernels.Definiteness.PSD, kernels.Definiteness.CONDITIONAL, kernels.Definiteness.INDEFINITE]
    for kernel, index in [
        (psd + psd, 0),
        (psd + conditional, 1),
        (conditional + indefinite, 2),
        (3 * conditional, 1),
        (conditional + 1.0, 1),
        (psd * psd, 0),
        (psd * conditional, 2),
        (psd**3, 0),
        (conditional**3, 2),
        (conditional**1, 1),
        (kernels.PowerSeries(psd, (0.0, 1.0, 2.0)), 0),
        (kernels.PowerSeries(conditional, (0.0, 1.0)), 1),
        (kernels.PowerSeries(conditional, (0.0, 1.0, 2.0)), 2),
        (kernels.Exp(psd), 0),
        (kernels.Exp(conditional), 0),
        (kernels.Exp(indefinite), 2),
        (kernels.Normalized(psd), 0),
        (conditional.on(0), 1),
        (indefinite.warp(np.sin), 2),
    ]:
        assert kernel.definiteness is what[index], kernel


def test_a_repr_is_the_expression_that_builds_the_kernel():
    k = kernels.Gaussian((1.0, 2.0)).on((0, 3)) + 0.5 * (kernels.Linear() + 1.0).warp(kernels.Affine(2, -1)) ** 2
    assert repr(k) == (
        "Gaussian(sigma=(1.0, 2.0)).on((0, 3)) + 0.5 * "
        "(Linear() + Constant(value=1.0)).warp(Affine(scale=2.0, shift=-1.0)) ** 2"
    )
    assert eval(repr(k), vars(kernels)) == k


def test_the_papers_k2_is_one_line(mnist_247):
    k2 = kernels.Polynomial(9, scale=1 / 1568, offset=0.5).warp(kernels.Affine(2, -1))
    X = mnist_247[:20]
    truth = (0.5 * ((2 * X - 1) @ (2 * X - 1).T / 784) + 0.5) ** 9
    np.testing.assert_allclose(k2(X), truth, rtol=1e-13)


@pytest.mark.parametrize(
    ("X", "words"),
    [
        (np.ones(3), "two dimensions"),
        (np.ones((0, 3)), "at least one row"),
        (np.ones((3, 0)), "at least one row"),
        (np.array([[1j]]), "real numbers"),
        (np.array([[object()]]), "real numbers"),
        (np.array([["a"]]), "real numbers"),
        (np.ones((2, 2), np.longdouble), "at most 64 bits"),
        (csr_array([[1.0], [np.nan]]), "row 1 contains NaN"),
        (csr_array([[1j]]), "real numbers"),
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
        serialization.to_config(1.0 + kernels.Function(lambda X, Y: X @ Y.T))


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"name": "gausian"}, "near it: gaussian"),
        ({"name": ["gaussian"]}, "no kernel named"),
        ({"name": "gaussian", "sigma": -1}, "sigma > 0"),
        ({"name": "gaussian", "width": 1}, "parameters sigma, and got width"),
        ({"name": "sum"}, "needs terms"),
        ({"name": "sum", "terms": []}, "tuple of kernels"),
        ({"name": "power", "kernel": 3, "exponent": 2}, "made of kernels"),
        ({}, "with a 'name'"),
        ("gaussian", "with a 'name'"),
    ],
)
def test_a_stored_kernel_that_is_not_one_is_refused(stored, words):
    with pytest.raises(KernelError, match=words):
        serialization.from_config(stored)


def test_a_stored_kernel_nested_beyond_reason_is_refused():
    stored = {"name": "linear"}
    for _ in range(100):
        stored = {"name": "power", "kernel": stored, "exponent": 1}
    with pytest.raises(KernelError, match="32 deep"):
        serialization.from_config(stored)


def test_a_kernel_that_could_not_be_read_back_is_not_written():
    k = kernels.Linear()
    for _ in range(20):
        k = (0.5 * k + kernels.Gaussian()) ** 2
    with pytest.raises(KernelError, match="nested deeper than 32"):
        serialization.to_config(k)


def test_a_list_nested_beyond_reason_is_refused():
    columns = [0]
    for _ in range(5000):
        columns = [columns]
    with pytest.raises(KernelError, match="nested deeper than 32"):
        serialization.from_config({"name": "columns", "kernel": {"name": "linear"}, "columns": columns})


def test_compiling_in_threads_leaves_numbas_setting_as_it_was(tmp_path):
    numba = pytest.importorskip("numba")
    from concurrent.futures import ThreadPoolExecutor

    from dkfm.kernels.pairwise.columnwise_numba import compile_sum

    before = numba.config.CACHE_DIR
    for round_ in range(10):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name, r=round_: compile_sum(name, tmp_path / str(r)), ["absolute", "minimum"] * 2))
    assert before == numba.config.CACHE_DIR


@pytest.mark.parametrize("offset", [0.0, 1.0, 10.0])
def test_narrow_columns_far_from_zero_are_centred_beside_wide_ones_around_it(offset, rng):
    wide, narrow = 1e3 * rng.normal(size=(100, 5)), offset + 1e-3 * rng.normal(size=(200, 3))
    X = np.hstack([np.vstack([wide, -wide]), narrow])
    scale = np.array([1e3] * 5 + [1e-3] * 3)
    truth = np.exp(-cdist(X / scale, X / scale, "sqeuclidean") / 2)
    found = kernels.Gaussian(tuple(scale))(X)
    # What dividing rounds is there in both: half an ulp of offset / 1e-3 in each difference.
    np.testing.assert_allclose(found, truth, rtol=1e-12 + 1e-12 * offset, atol=0)
