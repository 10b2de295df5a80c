"""`KernelPCA` in scikit-learn's place, and what it has more: weights, shares of variance, solvers, ways back."""

from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from sklearn.datasets import load_digits, make_circles
from sklearn.decomposition import PCA
from sklearn.decomposition import KernelPCA as Peer
from sklearn.linear_model import LogisticRegression, Perceptron
from sklearn.metrics.pairwise import additive_chi2_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline

import contracts
import dkfm
from dkfm import KernelPCA, kernels
from dkfm.errors import (
    DkfmWarning,
    InvalidInputError,
    KernelError,
    NotPSDError,
)
from helpers.kernel_pca_cases import up_to_sign

PARAMETERS = [
    {"n_components": 4},
    {"n_components": 4, "kernel": "rbf"},
    {"n_components": 4, "kernel": "rbf", "gamma": 0.3},
    {"n_components": 4, "kernel": "poly", "degree": 2, "gamma": 0.2, "coef0": 2},
    {"n_components": 4, "kernel": "cosine"},
    {"kernel": "rbf", "gamma": 0.05},
    {"n_components": 3, "kernel": "rbf", "eigen_solver": "arpack", "random_state": 0},
    {"n_components": 3, "kernel": "rbf", "eigen_solver": "randomized", "random_state": 0, "iterated_power": 40},
    {"n_components": 90, "kernel": "linear", "remove_zero_eig": True},
    {"n_components": 90, "kernel": "linear"},
]


@pytest.mark.parametrize("weighted", [False, True])
def test_shares_of_variance_in_a_map_of_some_landmarks_are_those_of_its_features(weighted, rng):
    X, weights = rng.normal(size=(60, 2)), np.arange(60) % 3 + 1.0 if weighted else None
    X[30:, 0] += 20
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), landmarks=X[:5]).fit(X)  # of the first cluster alone
    repeated = np.repeat(phi.transform(X), 1 if weights is None else weights.astype(int), axis=0)
    truth = PCA().fit(repeated)
    found = KernelPCA.from_map(phi, None, X, sample_weight=weights)
    np.testing.assert_allclose(found.total_variance_, repeated.var(axis=0).sum(), rtol=1e-12)
    np.testing.assert_allclose(found.explained_variance_ratio_, truth.explained_variance_ratio_, rtol=1e-9)
    for share in (0.5, 0.99):
        reached = np.cumsum(truth.explained_variance_ratio_) >= share
        assert len(KernelPCA.from_map(phi, share, X, sample_weight=weights).eigenvalues_) == reached.argmax() + 1


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_what_is_fitted_is_what_scikit_learn_fits(parameters, rng):
    X, Z = rng.normal(size=(120, 5)) * [5, 3, 2, 1, 0.5], rng.normal(size=(30, 5))
    peer = Peer(**parameters, copy_X=True, n_jobs=None).fit(X)
    ours = KernelPCA(**parameters, copy_X=True, n_jobs=None).fit(X)
    largest = peer.eigenvalues_[0]
    np.testing.assert_allclose(ours.eigenvalues_, peer.eigenvalues_, rtol=0, atol=1e-12 * largest)
    wide = peer.eigenvalues_ >= 1e-6 * largest  # the others are noise on both sides
    scale = np.sqrt(largest)
    assert up_to_sign(ours.transform(Z)[:, wide], peer.transform(Z)[:, wide]) <= 1e-9 * scale
    assert up_to_sign(ours.fit_transform(X)[:, wide], peer.fit_transform(X)[:, wide]) <= 1e-9 * scale
    assert up_to_sign(ours.eigenvectors_[:, wide], peer.eigenvectors_[:, wide]) <= 1e-7
    assert ours.gamma_ == peer.gamma_
    assert list(ours.get_feature_names_out())[:2] == list(peer.get_feature_names_out())[:2]
    np.testing.assert_array_equal(ours.X_fit_, peer.X_fit_)


def test_every_parameter_of_scikit_learns_is_there_with_its_default():
    peer, ours = Peer().get_params(), KernelPCA().get_params()
    assert {name: ours[name] for name in peer} == peer


def test_callables_get_their_parameters(rng):
    X = rng.normal(size=(20, 3))

    def kernel(x, y, power, shift=0.0):
        return (x @ y + shift) ** power

    with pytest.warns(DkfmWarning, match="every pair"):
        ours = KernelPCA(3, kernel=kernel, kernel_params={"power": 2, "shift": 1.0}).fit_transform(X)
    peer = Peer(3, kernel=kernel, kernel_params={"power": 2, "shift": 1.0}).fit_transform(X)
    assert up_to_sign(ours, peer) <= 1e-10 * np.abs(peer).max()


def test_float32_rows_have_float32_scores(rng):
    X = rng.normal(size=(60, 3)).astype(np.float32)
    ours, peer = KernelPCA(2, kernel="rbf").fit(X), Peer(2, kernel="rbf").fit(X)
    assert ours.transform(X).dtype == ours.fit_transform(X).dtype == peer.transform(X).dtype == np.float32
    assert up_to_sign(ours.transform(X), peer.transform(X)) < 1e-4
    assert KernelPCA(2, kernel="rbf", dtype="float64").fit(X).transform(X).dtype == np.float64
    assert KernelPCA(2, kernel="rbf").fit(X.astype(np.float64)).transform(X).dtype == np.float64


def test_sparse_rows_and_a_gram_matrix_of_ones_own(rng):
    X = rng.poisson(0.3, size=(80, 12)).astype(float)
    dense = KernelPCA(3, kernel="rbf").fit(X)
    np.testing.assert_allclose(KernelPCA(3, kernel="rbf").fit_transform(csr_array(X)), dense.transform(X), atol=1e-12)
    K = dense.kernel_(X)
    given_gram = KernelPCA(3, kernel="precomputed").fit(K)
    np.testing.assert_allclose(given_gram.transform(K), dense.transform(X), atol=1e-12)
    with pytest.raises(AttributeError, match="no Gram matrix"):
        attrgetter("X_fit_")(given_gram)


def test_only_the_centred_gram_matrix_must_be_psd(rng):
    X = rng.uniform(0.1, 1.0, size=(70, 6))
    for K in (-((X[:, None] - X[None]) ** 2).sum(-1) / 2, additive_chi2_kernel(X)):
        ours, peer = KernelPCA(kernel="precomputed").fit(K), Peer(kernel="precomputed").fit(K)
        q = min(len(ours.eigenvalues_), len(peer.eigenvalues_))
        largest = peer.eigenvalues_[0]
        np.testing.assert_allclose(ours.eigenvalues_[:q], peer.eigenvalues_[:q], rtol=0, atol=1e-10 * largest)


def test_linear_data_far_from_zero_has_eigenvalues_no_worse_than_scikit_learns(rng):
    X = rng.normal(size=(150, 4)) + 1e4
    exact = X.astype(np.longdouble)
    exact -= exact.mean(axis=0)
    truth = np.linalg.svd(exact.astype(np.float64), compute_uv=False) ** 2
    ours = np.abs(KernelPCA(4).fit(X).eigenvalues_ - truth)
    theirs = np.abs(Peer(4).fit(X).eigenvalues_ - truth)
    assert ours.max() <= theirs.max()


def test_an_indefinite_kernel_is_refused_where_all_components_are_asked_for_and_told_where_few(rng):
    X = rng.normal(size=(60, 3))
    sigmoid = {"kernel": "sigmoid", "gamma": 2.0, "coef0": -1}
    with pytest.raises(ValueError, match="negative"):
        Peer(**sigmoid).fit(X)
    with pytest.raises(NotPSDError, match="not positive semi-definite"):
        KernelPCA(**sigmoid).fit(X)
    with pytest.warns(DkfmWarning, match="negative part is dropped"):
        ours = KernelPCA(3, **sigmoid).fit(X)
    np.testing.assert_allclose(ours.eigenvalues_, Peer(3, **sigmoid).fit(X).eigenvalues_, rtol=1e-10)
    with pytest.raises(NotPSDError):
        KernelPCA(3, on_indefinite="raise", **sigmoid).fit(X)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"n_components": 0}, "n_components must be a positive integer"),
        ({"n_components": 1.5}, "n_components must be a positive integer"),
        ({"eigen_solver": "svd"}, "eigen_solver must be one of"),
        ({"formulation": "best"}, "formulation must be one of"),
        ({"formulation": "primal", "eigen_solver": "arpack"}, "root of the Gram matrix"),
        ({"tol": -1}, "tol must be a number >= 0"),
        ({"alpha": float("nan"), "fit_inverse_transform": True}, "alpha must be a finite number"),
        ({"gamma": 1.0, "kernel": "rbf", "kernel_params": {"gamma": 2.0}}, "gamma is given twice"),
        ({"max_iter": 0}, "max_iter must be a positive integer"),
        ({"iterated_power": -1}, "iterated_power must be a positive integer"),
        ({"centered": "yes"}, "centered must be True or False"),
        ({"kernel": "precomputed", "fit_inverse_transform": True}, "Cannot fit_inverse_transform with a precomputed"),
        ({"on_indefinite": "ignore"}, "on_indefinite must be one of auto, raise, clip"),
        ({"kernel": kernels.Gaussian(1.0), "gamma": 1.0}, "gamma belongs to the name"),
        ({"random_state": "now", "eigen_solver": "arpack", "n_components": 2}, "random_state"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(parameters, words, rng):
    with pytest.raises((InvalidInputError, KernelError), match=words):
        KernelPCA(**parameters).fit(rng.normal(size=(40, 2)))


@pytest.mark.slow
def test_the_example_of_the_docstring_runs():
    X, _ = load_digits(return_X_y=True)
    transformer = KernelPCA(n_components=7, kernel="linear")
    X_transformed = transformer.fit_transform(X)
    assert X_transformed.shape == (1797, 7)
    assert up_to_sign(X_transformed, Peer(n_components=7, kernel="linear").fit_transform(X)) <= 1e-9 * 1e3


def test_the_example_of_the_circles_runs():
    X, y = make_circles(n_samples=400, factor=0.3, noise=0.05, random_state=0)
    options = {"n_components": None, "kernel": "rbf", "gamma": 10, "fit_inverse_transform": True, "alpha": 0.1}
    ours, peer = KernelPCA(**options).fit(X), Peer(**options).fit(X)
    found, truth = ours.transform(X), peer.transform(X)
    assert LogisticRegression().fit(found[:, :2], y).score(found[:, :2], y) == 1.0
    np.testing.assert_allclose(ours.inverse_transform(found), peer.inverse_transform(truth), atol=1e-6)


def test_the_example_of_denoising_runs(rng):
    X = load_digits().data / 16
    train, test = X[:700], X[700:800]
    noisy = test + rng.normal(scale=0.25, size=test.shape)
    options = {"n_components": 100, "kernel": "rbf", "gamma": 1e-2, "fit_inverse_transform": True, "alpha": 5e-3}
    ours, peer = KernelPCA(**options).fit(train), Peer(**options).fit(train)
    cleaned = ours.inverse_transform(ours.transform(noisy))
    np.testing.assert_allclose(cleaned, peer.inverse_transform(peer.transform(noisy)), atol=1e-8)
    assert ((cleaned - test) ** 2).mean() < 0.6 * ((noisy - test) ** 2).mean()


@pytest.mark.slow
def test_a_grid_search_over_kernels_finds_what_scikit_learn_finds():
    X, y = make_circles(n_samples=120, factor=0.2, noise=0.1, random_state=0)
    grid = {"kpca__gamma": 2.0 ** np.arange(-2, 2), "kpca__kernel": ["rbf", "poly"]}
    searches = [
        GridSearchCV(Pipeline([("kpca", cls(n_components=2)), ("Perceptron", Perceptron(max_iter=5, tol=None))]), grid)
        for cls in (KernelPCA, Peer)
    ]
    ours, theirs = (search.fit(X, y) for search in searches)
    assert ours.best_params_["kpca__kernel"] == theirs.best_params_["kpca__kernel"] == "rbf"
    assert abs(ours.best_score_ - theirs.best_score_) < 0.02  # the signs of components are other ones


def test_output_is_what_set_output_asks_for(rng):
    import pandas as pd

    X = pd.DataFrame(rng.normal(size=(30, 3)), index=np.arange(30) + 5, columns=list("abc"))
    ours = KernelPCA(2, kernel="rbf").set_output(transform="pandas")
    frame = ours.fit_transform(X)
    assert list(frame.columns) == ["kernelpca0", "kernelpca1"]
    assert frame.index.equals(X.index)
    pd.testing.assert_frame_equal(frame, ours.transform(X), atol=1e-12)
    assert type(KernelPCA(2).fit_transform(X)) is np.ndarray


def test_a_lazy_fit_transform_stays_lazy(rng):
    import dask.array as da

    X = rng.normal(size=(40, 3))
    lazy = KernelPCA(2, kernel="rbf").fit_transform(da.from_array(X, chunks=(10, 3)))
    assert isinstance(lazy, da.Array)
    np.testing.assert_allclose(lazy.compute(), KernelPCA(2, kernel="rbf").fit_transform(X), atol=1e-12)


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from(["rbf", "linear", "poly"]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_weights_are_repeated_rows(seed, kernel, centered):
    rng = np.random.default_rng(seed)
    X, Z = rng.normal(size=(25, 3)), rng.normal(size=(10, 3))
    counts = rng.integers(0, 4, 25)
    counts[0] += counts.sum() == 0
    options = {"n_components": 3, "kernel": kernel, "gamma": 0.2, "centered": centered}
    weighted = KernelPCA(**options).fit(X, sample_weight=counts)
    repeated = KernelPCA(**options).fit(np.repeat(X, counts, axis=0))
    scale = repeated.eigenvalues_[0] + 1e-300
    np.testing.assert_allclose(weighted.eigenvalues_, repeated.eigenvalues_, rtol=0, atol=1e-12 * scale)
    np.testing.assert_allclose(weighted.total_variance_, repeated.total_variance_, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(weighted.explained_variance_, repeated.explained_variance_, atol=1e-10 * scale)
    apart = np.diff(np.append(repeated.eigenvalues_, 0)) < -1e-3 * scale
    found, truth = weighted.transform(Z)[:, apart], repeated.transform(Z)[:, apart]
    assert up_to_sign(found, truth) <= 1e-10 * max(1.0, np.sqrt(scale)) if apart.any() else True
    errors = weighted.reconstruction_error(Z), repeated.reconstruction_error(Z)
    if apart.all():
        np.testing.assert_allclose(*errors, rtol=0, atol=1e-10 * max(1.0, scale))
    np.testing.assert_allclose(weighted.fit_transform(X, sample_weight=counts), weighted.transform(X), atol=1e-9)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("weights", [None, np.arange(1.0, 61.0)])
@pytest.mark.parametrize("kernel", [kernels.Gaussian(1.0), kernels.Linear(), kernels.Laplacian(2.0)])
def test_all_components_explain_all_of_the_variance(kernel, weights, centered, rng):
    X = rng.normal(size=(60, 3)) + 5
    pca = KernelPCA(kernel=kernel, centered=centered).fit(X, sample_weight=weights)
    assert abs(pca.explained_variance_ratio_.sum() - 1) <= 1e-12
    w = np.ones(60) if weights is None else weights
    K = kernel(X)
    total = (w @ np.diag(K)) / w.sum() - (w @ K @ w / w.sum() ** 2 if centered else 0)
    np.testing.assert_allclose(pca.total_variance_, total, rtol=1e-10)
    scores = pca.transform(X)
    np.testing.assert_allclose(np.average(scores**2, axis=0, weights=w), pca.explained_variance_, atol=1e-10)


def test_what_is_saved_comes_back(rng, tmp_path):
    X, weights = rng.normal(size=(40, 3)), rng.uniform(0.5, 2.0, 40)
    pca = KernelPCA(3, kernel="rbf", gamma=0.3, fit_inverse_transform=True)
    contracts.check_store(pca.fit(X, sample_weight=weights, standardize=True), X, tmp_path / "pca")
    contracts.check_scoring(pca, X)
    loaded = dkfm.load(tmp_path / "pca")
    assert loaded.gamma_ == pca.gamma_ == 0.3
    for name in ("explained_variance_ratio_", "eigenvectors_", "total_weight_"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(pca, name))
    np.testing.assert_array_equal(loaded.reconstruction_error(X), pca.reconstruction_error(X))
    np.testing.assert_array_equal(loaded.inverse_transform(np.eye(3)), pca.inverse_transform(np.eye(3)))
    assert loaded.verify().certificate == pca.certificate_


def test_weights_count_on_the_way_back_too(rng):
    X, counts = rng.normal(size=(40, 3)), rng.integers(1, 4, 40)
    options = {"n_components": 3, "kernel": "rbf", "gamma": 0.2, "fit_inverse_transform": True}
    weighted = KernelPCA(**options).fit(X, sample_weight=counts)
    repeated = KernelPCA(**options).fit(np.repeat(X, counts, axis=0))
    scores = repeated.transform(X)
    signs = np.sign(np.einsum("ij,ij->j", weighted.transform(X), scores))
    np.testing.assert_allclose(
        weighted.inverse_transform(scores * signs), repeated.inverse_transform(scores), atol=1e-9
    )


def test_what_is_dropped_has_no_variance(rng):
    X = rng.normal(size=(60, 3))
    with pytest.warns(DkfmWarning, match="negative part"):
        clipped = KernelPCA(kernel="sigmoid", gamma=2.0, coef0=-1, on_indefinite="clip").fit(X)
    assert abs(clipped.explained_variance_ratio_.sum() - 1) <= 1e-12


def test_float32_that_does_not_hold_the_scores_is_told(rng):
    X = (rng.normal(size=(60, 3)) + 1e4).astype(np.float32)
    with pytest.warns(DkfmWarning, match="float32 does not hold these scores"):
        KernelPCA(2).fit(X)
    KernelPCA(2, dtype="float64").fit(X)


@pytest.mark.costly
@pytest.mark.parametrize("solver", ["auto", "arpack"])
def test_a_gram_matrix_of_almost_equal_values_converges(solver, rng):
    X = rng.normal(size=(1400, 100))
    found = KernelPCA(5, kernel="rbf", gamma=1e-6, eigen_solver=solver, max_iter=60).fit(X)
    truth = KernelPCA(5, kernel="rbf", gamma=1e-6, eigen_solver="dense").fit(X)
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=1e-10)


@pytest.mark.costly
@pytest.mark.parametrize("solver", ["auto", "arpack", "randomized"])
def test_an_eigenvalue_is_found_as_often_as_it_is_there(solver):
    K = np.diag(np.append(np.ones(60), np.zeros(2340)))
    found = KernelPCA(60, kernel="precomputed", centered=False, eigen_solver=solver, tol=1e-6).fit(K)
    np.testing.assert_allclose(found.eigenvalues_, 1.0, rtol=1e-12)


def test_all_ways_have_as_many_columns_as_are_asked_for(rng):
    X = rng.normal(size=(60, 3))
    widths = {KernelPCA(10, formulation=name).fit(X).transform(X).shape[1] for name in ("combined", "primal", "dual")}
    phi = dkfm.ExactFeatureMap("linear", basis="spectral").fit(X)
    assert widths | {KernelPCA.from_map(phi, 10).transform(X).shape[1]} == {10}


def test_a_constant_column_is_not_scaled(rng):
    X = np.column_stack([np.full(1000, 0.1), rng.normal(size=1000)])
    assert KernelPCA(1, kernel="rbf").fit(X, standardize=True).scale_[0] == 1.0
