"""What is too small for float64, or cancels: landmarks that leave nothing, normalised kernels, entropies, weights."""

import mpmath
import numpy as np
import pytest

from dkfm import ExactFeatureMap, KernelFisher, KernelPCA
from dkfm.errors import InvalidInputError, KernelError, NotPSDError
from dkfm.kernels import AdditiveChiSquared, Function, Gaussian, JensenShannon, Linear, Normalized, Polynomial
from dkfm.kernels.pairwise import columnwise_sums


@pytest.mark.parametrize("kernel", [Gaussian(1.0), Polynomial(3)])
def test_landmarks_on_tight_clusters_are_no_sign_of_an_indefinite_kernel(kernel):
    for seed in range(2):
        rng = np.random.default_rng(seed)
        for spread in (1e-6, 1e-8):
            X = np.repeat(rng.normal(size=(20, 3)), 10, axis=0) + spread * rng.normal(size=(200, 3))
            for basis in ("cholesky", "spectral"):
                phi = ExactFeatureMap(kernel, basis=basis, landmarks="uniform", n_landmarks=10, random_state=seed)
                assert phi.fit(X).certificate_.error < 1e-12


@pytest.mark.parametrize("basis", ["cholesky", "spectral"])
def test_landmarks_still_show_an_indefinite_kernel(basis, rng):
    X = np.repeat(rng.normal(size=(20, 3)), 5, axis=0) + 1e-8 * rng.normal(size=(100, 3))
    indefinite = Function(lambda X, Y: X[:, :2] @ Y[:, :2].T - 0.1 * X[:, 2:] @ Y[:, 2:].T)
    with pytest.raises(NotPSDError):
        ExactFeatureMap(indefinite, basis=basis, landmarks="uniform", n_landmarks=8, random_state=0).fit(X)


@pytest.mark.parametrize("size", [1e-170, 1e-160])
def test_a_row_whose_self_similarity_underflows_is_not_normalised_to_0(size):
    X = np.array([[1.0, 2.0], [3 * size, 4 * size]])
    for call in (lambda: Normalized(Linear())(X), lambda: Normalized(Linear()).diag(X)):
        with pytest.raises(KernelError, match=r"row 1 is .*smaller than float64 holds; multiply the rows"):
            call()


def test_rows_that_a_kernel_takes_for_0_are_normalised_to_0():
    X = np.array([[0.0, 0.0], [0.0, 1e-3], [2.0, 1.0]])
    found = Normalized(Linear().on(0))(X)
    np.testing.assert_array_equal(found, [[0, 0, 0], [0, 0, 0], [0, 0, 1]])
    found = Normalized(Polynomial(9))(np.array([[1e-15, 0.0], [3.0, 4.0]]))
    np.testing.assert_allclose(found, [[1, 0.6**9], [0.6**9, 1]], rtol=1e-13)


SHARES = [1e-200, 1e-30, 1e-16, 1e-8, 0.0, 0.3, 0.41, 0.42, 0.5, 0.7, 0.71, 1.0 - 1e-16, 1.0, 1.0 + 1e-9, 3.0, 1e8]


@pytest.mark.costly
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("values", [SHARES, [5e-324, 1e-300, *SHARES, 1e200]], ids=["common", "with rare ones"])
def test_entropies_have_all_their_digits_whatever_the_shares(compiled, values, monkeypatch):
    if compiled:
        pytest.importorskip("numba")
    monkeypatch.setattr(columnwise_sums, "_has_numba", lambda: compiled)
    X = np.array(values)[:, np.newaxis]
    found = JensenShannon()(X, X[::-1].copy())[:, ::-1]
    with mpmath.workdps(700):
        for i, x in enumerate(map(mpmath.mpf, values)):
            for j, y in enumerate(map(mpmath.mpf, values)):
                true = (x * mpmath.log((x + y) / x, 2) + y * mpmath.log((x + y) / y, 2)) / 2 if x * y else 0
                assert abs(found[i, j] - true) <= 5e-16 * true + 1e-323, (x, y)
    assert JensenShannon()([[0.0]], [[0.0], [2.0]]).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("d", [3, 64])
@pytest.mark.parametrize(
    ("dtype", "exponents"), [(np.float64, (-940, -600, 600, 1010)), (np.float32, (-90, -60, 60, 120))]
)
def test_chi_squared_sums_are_exact_whatever_the_size_of_the_numbers(dtype, exponents, d, compiled, monkeypatch, rng):
    if compiled:
        pytest.importorskip("numba")
    monkeypatch.setattr(columnwise_sums, "_has_numba", lambda: compiled)
    X, Y = (rng.dirichlet(np.full(d, 0.5), size=n).astype(dtype) for n in (7, 5))
    X[:, 0] = Y[:, 0] = 0.0
    x, y = X[:, np.newaxis, 1:].astype(np.float64), Y[np.newaxis, :, 1:].astype(np.float64)
    found, tolerance = AdditiveChiSquared()(X, Y), 20 * np.finfo(dtype).eps
    np.testing.assert_allclose(-found, ((x - y) ** 2 / (x + y)).sum(axis=2), rtol=tolerance)
    rows = [np.ldexp(X, exponent) for exponent in exponents]
    landmarks = [np.ldexp(Y, exponent) for exponent in exponents]
    with np.errstate(over="ignore"):  # between the largest rows and all landmarks
        together = AdditiveChiSquared().make_evaluator(np.vstack(landmarks))(np.vstack(rows))
    for i, exponent in enumerate(exponents):
        alone = AdditiveChiSquared()(rows[i], landmarks[i])
        np.testing.assert_array_equal(together[7 * i : 7 * i + 7, 5 * i : 5 * i + 5], alone)
        np.testing.assert_allclose(np.ldexp(alone, -exponent), found, rtol=tolerance)


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 1e308])
def test_weights_that_float64_cannot_multiply_are_refused(weight, rng):
    X, weights = rng.normal(size=(20, 2)), np.full(20, weight)
    for fit in (
        lambda: KernelPCA(2).fit(X, sample_weight=weights),
        lambda: KernelFisher().fit(X, np.arange(20) % 2, sample_weight=weights),
        lambda: ExactFeatureMap(Linear(), centered=True).fit(X, sample_weight=weights),
    ):
        with pytest.raises(InvalidInputError, match="largest weight of at least"):
            fit()


@pytest.mark.parametrize("weight", [1e-290, 1e-12, 1e12])
def test_weights_that_are_equal_do_not_change_components(weight, rng):
    X = rng.normal(size=(40, 3))
    weighted = KernelPCA(2, kernel=Gaussian(1.5)).fit(X, sample_weight=np.full(40, weight))
    plain = KernelPCA(2, kernel=Gaussian(1.5)).fit(X)
    np.testing.assert_allclose(weighted.transform(X), plain.transform(X), rtol=0, atol=1e-13)
    np.testing.assert_allclose(weighted.explained_variance_ratio_, plain.explained_variance_ratio_, rtol=1e-12)


@pytest.mark.parametrize("weight", [5e-324, 1e-200, 1e-20])
def test_rows_of_next_to_no_weight_are_scored_as_new_rows_are(weight, rng):
    X = rng.normal(size=(40, 3))
    weights = np.where(np.arange(40) < 4, weight, 1.0)
    without = KernelPCA(2, kernel=Gaussian(1.5)).fit(X[4:])
    pca = KernelPCA(2, kernel=Gaussian(1.5))
    of_training = pca.fit_transform(X, sample_weight=weights)
    np.testing.assert_allclose(of_training, pca.transform(X), rtol=0, atol=1e-13)
    np.testing.assert_allclose(np.abs(of_training), np.abs(without.transform(X)), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_rare_numbers_of_a_row_change_no_other_row(rng):
    pytest.importorskip("numba")
    X, Z = rng.dirichlet(np.ones(9), size=20), rng.dirichlet(np.ones(9), size=10)
    Z[-1, 0] = 1e-300
    block = JensenShannon().make_evaluator(X)
    np.testing.assert_array_equal(block(Z)[:9], block(Z[:9]))
