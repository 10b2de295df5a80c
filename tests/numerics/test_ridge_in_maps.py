"""What rounding does to regressions in the features of a map, against exact solutions."""

from fractions import Fraction

import numpy as np
import pytest

from dkfm import ExactFeatureMap, KernelRidge, KernelRidgeClassifier
from dkfm.errors import DkfmWarning
from dkfm.kernels import Gaussian, Linear
from helpers.extended_precision import solve_in_extended_precision


@pytest.mark.parametrize("basis", ["cholesky", "spectral"])
@pytest.mark.parametrize(("n", "alpha"), [(40, 4.4e-14), (400, 1e-12), (400, 1e-11)])
@pytest.mark.parametrize("estimator", [KernelRidge, KernelRidgeClassifier])
def test_a_direction_that_a_map_lost_to_rounding_is_in_the_certificate(estimator, n, alpha, basis):
    X, labels = np.repeat([0.0, 1.1e-7], n // 2)[:, np.newaxis], np.repeat([-1, 1], n // 2)
    phi = ExactFeatureMap(Gaussian(1.0), basis=basis).fit(X)
    with pytest.warns(DkfmWarning, match="use a larger alpha"):
        fitted = estimator.from_map(phi, labels, X, alpha=alpha)
    hidden = -np.expm1(-(1.1e-7**2) / 2) * n / 2
    found = fitted.predict(X) if estimator is KernelRidge else fitted.decision_function(X)
    error = np.abs(found - labels * hidden / (hidden + alpha)).max()
    assert error <= 100 * fitted.certificate_.error


@pytest.mark.parametrize("basis", ["symmetric", "spectral", "cholesky"])
@pytest.mark.parametrize("alpha", [1.0, 0.1, 1e-3])
def test_kernels_of_low_rank_lose_nothing_to_rounding(rng, alpha, basis):
    X = rng.integers(0, 256, (60, 20)).astype(float)
    fitted = KernelRidge.from_map(ExactFeatureMap(Linear(), basis=basis).fit(X), X[:, 0], X, alpha=alpha)
    assert fitted.certificate_.error < 1e-10


def test_features_left_out_by_choice_are_no_rounding(rng):
    X = rng.normal(size=(300, 3))
    for options in ({"tol": 1e-3}, {"landmarks": X[:20]}):
        phi = ExactFeatureMap(Gaussian(3.0), basis="cholesky", **options).fit(X)
        assert KernelRidge.from_map(phi, X[:, 0], X, alpha=1e-6).certificate_.error < 1e-7


@pytest.mark.parametrize("basis", ["cholesky", "spectral"])
@pytest.mark.filterwarnings("ignore:The certificate of these scores")  # every fit with an error above 1e-6 warns
def test_certificates_count_the_rounding_of_sums_over_rows_of_equal_weight(basis):
    to_fractions = np.vectorize(Fraction, otypes=[object])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        X, y = rng.normal(size=(40, 3)) * [1.0, 1e-5, 1e-6], rng.normal(size=40)
        phi = ExactFeatureMap(Linear(), basis=basis).fit(X)
        P, targets = to_fractions(X), to_fractions(y)
        for alpha in (1e-6, 1e-9, 1e-12):
            fitted = KernelRidge.from_map(phi, y, X, alpha=alpha)
            system = P.T @ P + Fraction(alpha) * np.eye(3, dtype=int)
            exact = (P @ solve_in_extended_precision(system, P.T @ targets)).astype(float)
            assert np.abs(fitted.predict(X) - exact).max() <= 10 * fitted.certificate_.error * np.abs(y).max()


@pytest.mark.parametrize("factor", [1e-165, 1e-300, 1e155, 1e200])
def test_targets_of_any_size_have_a_norm_and_a_certificate(rng, factor):
    X, y = rng.normal(size=(30, 2)), rng.normal(size=30)
    phi = ExactFeatureMap(Gaussian(1.0)).fit(X)
    one, scaled = (KernelRidge.from_map(phi, targets, X, alpha=0.1) for targets in (y, factor * y))
    np.testing.assert_allclose(scaled.predict(X), factor * one.predict(X), rtol=1e-12)
    np.testing.assert_allclose(scaled.norms_, factor * one.norms_, rtol=1e-12)
    assert scaled.certificate_.error < 1e-12
    assert scaled.certificate_.relative_error < 1e-12
    scaled.verify()
