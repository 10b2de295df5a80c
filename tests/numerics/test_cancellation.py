"""What a mean hides: certificates, and the warning of them, hold against rows that were centred before."""

from dataclasses import replace

import numpy as np
import pytest

from dkfm import ExactFeatureMap, KernelFisher, KernelPCA, fold
from dkfm.errors import CertificateError, DkfmWarning, InvalidInputError
from dkfm.kernels import Gaussian, Linear, Polynomial
from dkfm.numerics.certificates import certificate, components
from dkfm.numerics.scorer import prepare_scorer
from dkfm.numerics.supervised import fisher
from dkfm.numerics.supervised.classes import Classes

BASES = ("symmetric", "spectral", "cholesky")


@pytest.fixture
def rows(rng):
    return rng.normal(size=(120, 3)) * [3, 1.7, 0.8]


@pytest.fixture
def classes(rng):
    y = rng.integers(0, 3, 120)
    X = rng.normal(size=(120, 5))
    X[:, :3] += 1.5 * np.eye(3)[y]
    return X, y


def true_scores(X):
    """The variances and the scores of principal components of rows, centred exactly before anything is multiplied."""
    X = X - X[0]
    X = X - X.mean(axis=0)
    U, s, _ = np.linalg.svd(X, full_matrices=False)
    return s**2, U * s


def true_error(pca, X):
    mu, scores = true_scores(X)
    found = np.zeros_like(scores)
    own = pca.transform(X)
    found[:, : own.shape[1]] = own
    found *= np.where((found * scores).sum(axis=0) < 0, -1, 1)
    values = np.pad(pca.eigenvalues_, (0, len(mu) - len(pca.eigenvalues_)))
    of_values = np.abs(values - mu).max() / mu[0]
    return of_values, np.abs(found - scores).max() / np.sqrt(mu[0] / len(X))


@pytest.mark.parametrize(("basis", "given"), [*((basis, True) for basis in BASES), ("spectral", False)])
@pytest.mark.filterwarnings("ignore::dkfm.errors.DkfmWarning")
def test_components_of_a_map_are_certified_no_better_than_they_are(basis, given, rows):
    for shift in (1e3, 1e5, 1e6, 1e7, 1e8):
        X = rows + shift
        pca = KernelPCA.from_map(ExactFeatureMap(Linear(), basis=basis).fit(X), 3, X if given else None)
        of_values, of_scores = true_error(pca, X)
        assert of_values <= 4 * pca.certificate_.error, shift
        assert min(of_scores, 1) <= 40 * pca.certificate_.error, shift


@pytest.mark.parametrize("basis", BASES)
def test_components_that_are_lost_warn_with_the_number(basis, rows):
    X = rows + 1e8
    phi = ExactFeatureMap(Linear(), basis=basis).fit(X)
    with pytest.warns(DkfmWarning, match=r"certificate of these scores is \d.*1e-06 is expected; .*centre the columns"):
        pca = KernelPCA.from_map(phi, 3, X)
    assert pca.certificate_.error > 0.1
    assert pca.verify().certificate.error > 0.1


def test_components_of_a_gram_matrix_that_rounding_hides_warn(rows):
    with pytest.warns(DkfmWarning, match="centre the columns of X"):
        pca = KernelPCA(3, kernel=Linear()).fit(rows + 1e7)
    assert true_error(pca, rows + 1e7)[1] <= 4 * pca.certificate_.error


def test_components_of_rows_that_are_centred_before_are_certified(rows):
    phi = ExactFeatureMap(Linear()).fit(rows)
    for pca in (KernelPCA.from_map(phi, 3), KernelPCA.from_map(phi, 3, rows), KernelPCA(3).fit(rows)):
        assert pca.certificate_.error < 1e-13


@pytest.mark.parametrize("shift", [1e4, 1e6])
@pytest.mark.parametrize("kernel", [Linear(), Gaussian(2e4)])
@pytest.mark.filterwarnings("ignore::dkfm.errors.DkfmWarning")
def test_components_that_are_what_centring_left_are_not_counted(kernel, shift, rng):
    X = rng.normal(size=(300, 3)) + shift
    assert len(KernelPCA(kernel=kernel).fit(X).eigenvalues_) == 3
    few = KernelPCA(6, kernel=kernel, remove_zero_eig=False, eigen_solver="arpack").fit(X)
    assert (few.eigenvalues_ > 0).tolist() == [True] * 3 + [False] * 3
    assert len(KernelPCA.from_map(ExactFeatureMap(kernel, basis="spectral").fit(X)).eigenvalues_) == 3


@pytest.mark.costly
@pytest.mark.parametrize("of_a_map", [False, True])
def test_the_certificate_sees_each_of_many_components(of_a_map, rng):
    X = rng.normal(size=(700, 4))
    fitted = KernelPCA(kernel=Gaussian(0.5)).fit(X)
    if of_a_map:
        fitted = KernelPCA.from_map(ExactFeatureMap(Gaussian(0.5), basis="spectral").fit(X), X=X)
    unsampled = np.setdiff1d(np.arange(len(fitted.eigenvalues_)), certificate.sample_evenly(len(fitted.eigenvalues_)))
    assert len(unsampled) > 100
    head = fitted.model_.heads["scores"]
    for j in (unsampled[0], unsampled[-1]):
        weights = head.weights.copy()
        weights[:, j] *= 1.01
        heads = {**fitted.model_.heads, "scores": replace(head, weights=weights)}
        scorer = prepare_scorer(replace(fitted.model_, heads=heads))
        if of_a_map:
            damaged = components.certify_principal_axes(scorer, fitted.eigenvalues_, [X], 700.0)
        else:
            damaged = components.certify_components(scorer, fitted.eigenvalues_, [X])
        assert damaged.error > 1e4 * fitted.certificate_.error, j


def test_columns_far_from_0_are_standardized_without_a_loss_of_digits(rng):
    X = rng.normal(size=(60, 3))
    far = X * [1, 2, 3] + 1e9
    plain = (far - far.mean(axis=0)) / far.std(axis=0)
    found = KernelPCA(3, kernel=Gaussian(2.0)).fit(far, standardize=True)
    truth = KernelPCA(3, kernel=Gaussian(2.0)).fit(plain)
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=1e-12)
    np.testing.assert_allclose(found.transform(far), truth.transform(plain), rtol=0, atol=1e-12)


def test_a_centred_map_whose_mean_hides_the_rest_warns(rows):
    with pytest.warns(DkfmWarning, match="after the mean was taken away.*centre the columns of X"):
        ExactFeatureMap(Linear(), centered=True).fit(rows + 1e7)
    ExactFeatureMap(Linear(), centered=True).fit(rows)


@pytest.mark.parametrize("shift", [1e3, 1e5])
@pytest.mark.filterwarnings("ignore::dkfm.errors.DkfmWarning")
def test_discriminants_far_from_0_decide_as_those_of_centred_rows(shift, classes, rng):
    X, y = classes
    new = rng.normal(size=(500, 5))
    plain = KernelFisher(kernel=Linear()).fit(X, y).decision_function(new)
    fitted = KernelFisher(kernel=Linear()).fit(X + shift, y)
    error = np.abs(fitted.decision_function(new + shift) - plain).max() / np.ptp(plain)
    assert error < 1e-9 * (shift / 1e3) ** 2


def test_discriminants_that_rounding_spoils_warn_and_are_not_refused_as_indefinite(classes, rng):
    X, y = classes
    new = rng.normal(size=(2000, 5))
    plain = KernelFisher(kernel=Linear()).fit(X, y).predict(new)
    with pytest.warns(DkfmWarning, match=r"certificate of these scores is .*centre the columns of X"):
        fitted = KernelFisher(kernel=Linear()).fit(X + 3e6, y)
    assert np.mean(fitted.predict(new + 3e6) != plain) < 0.005


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.filterwarnings("ignore::dkfm.errors.DkfmWarning")
def test_discriminants_of_a_map_are_certified_no_better_than_they_are(given, classes, rng):
    X, y = classes
    new = rng.normal(size=(500, 5))
    for shift in (1e4, 1e6, 1e7):
        phi = ExactFeatureMap(Linear(), basis="spectral").fit(X + shift)
        fitted = KernelFisher.from_map(phi, y, X + shift if given else None)
        plain = KernelFisher.from_map(ExactFeatureMap(Linear(), basis="spectral").fit(X), y).decision_function(new)
        error = np.abs(fitted.decision_function(new + shift) - plain).max() / np.ptp(plain)
        assert min(error, 1) <= 4 * fitted.certificate_.error, shift


def test_discriminants_of_a_map_that_rounding_spoils_warn(classes):
    X, y = classes
    phi = ExactFeatureMap(Linear(), basis="spectral").fit(X + 1e7)
    with pytest.warns(DkfmWarning, match="certificate of these scores"):
        KernelFisher.from_map(phi, y)


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
def test_discriminants_of_a_float32_map_are_certified_no_better_than_they_are(basis, rng):
    y, certified = np.arange(50) % 2, []
    for shift in (0, 100, 4000):
        X = (rng.normal(size=(50, 2)) + 1.5 * y[:, np.newaxis] * [1, 0] + shift).astype(np.float32)
        phi = ExactFeatureMap(Linear(), basis=basis, dtype="float32").fit(X)
        truth = KernelFisher(kernel=Linear()).fit(X.astype(np.float64), y).decision_function(X.astype(np.float64))
        if shift < 4000:
            fda = KernelFisher.from_map(phi, y, X)
        else:
            with pytest.warns(DkfmWarning, match="float32 does not hold these scores"):
                fda = KernelFisher.from_map(phi, y, X)
        error = np.abs(fda.decision_function(X) - truth).max() / np.abs(truth).max()
        certified.append(fda.certificate_.error)
        assert error <= 10 * certified[-1]  # rows of the sample, and rounding of the map itself
        assert fda.verify().certificate.error <= 10 * fda.verified_certificate_.error <= 10 * certified[-1]
        heads = {name: replace(head, weights=1.01 * head.weights) for name, head in fda.model_.heads.items()}
        fda._set_model(replace(fda.model_, heads=heads))
        with pytest.raises(CertificateError):
            fda.verify()
    assert certified[0] < 1e-5


def test_a_ridge_above_rounding_is_factored_and_one_below_it_is_decomposed(classes, monkeypatch):
    X, y = classes
    of_rows = Classes(y, np.ones(len(y)), 3)
    asked = []
    decomposed = fisher.decompose_centred
    monkeypatch.setattr(fisher, "decompose_centred", lambda *given: asked.append(1) or decomposed(*given))
    fisher.solve_discriminants(np.asfortranarray(X @ X.T), of_rows, 1e-3)
    assert not asked
    fisher.solve_discriminants(np.asfortranarray((X + 1e4) @ (X + 1e4).T), of_rows, 1e-3)
    assert asked
    with pytest.raises(InvalidInputError, match=r"nothing beside the rounding.*centre the columns"):
        fisher.solve_discriminants(np.asfortranarray((X + 1e7) @ (X + 1e7).T), of_rows, 1e-3, by_eigenvalues=False)


def test_one_rule_judges_every_estimator(rows, classes, monkeypatch):
    X, y = classes
    judged = []

    def judge(error, dtype, finding, remedy, limit=1e-6):
        judged.append(error / limit)

    monkeypatch.setattr(certificate, "warn_if_error_is_large", judge)
    phi = ExactFeatureMap(Gaussian(2.0)).fit(X)
    ExactFeatureMap(Gaussian(2.0), landmarks="uniform", n_landmarks=20, random_state=0).fit(X)
    KernelPCA(2).fit(X)
    KernelPCA.from_map(phi, 2)
    KernelFisher().fit(X, y)
    KernelFisher.from_map(phi, y)
    from sklearn.linear_model import Ridge

    fold(phi, Ridge().fit(phi.transform(X), y))
    assert len(judged) == 9  # maps twice: their landmarks, and their training rows
    assert max(judged) < 1


def test_maps_within_what_they_promise_do_not_warn(rng):
    X = rng.normal(size=(100, 4)) * np.logspace(-3, 0, 100)[:, None]
    for basis in ("spectral", "cholesky"):
        ExactFeatureMap(1e-7 * Polynomial(4), basis=basis).fit(X)
        ExactFeatureMap(1e-7 * Polynomial(4), basis=basis, dtype="float32").fit(X)
    for basis in BASES:
        ExactFeatureMap(Gaussian(2.0), basis=basis, tol=1e-2).fit(X)
        ExactFeatureMap(Gaussian(2.0), basis=basis, dtype="float32").fit(X)
    ExactFeatureMap(Gaussian(2.0), basis="spectral", rcond=1e-3).fit(X)


def test_a_number_that_is_none_warns():
    with pytest.warns(DkfmWarning, match="told, and at most 1e-06 is expected; remedy"):
        certificate.warn_if_error_is_large(float("nan"), np.dtype(np.float64), "told", "remedy")
