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
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Perceptron
from sklearn.metrics.pairwise import additive_chi2_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import dkfm
import laws
import oracles
from dkfm import KernelPCA, kernels
from dkfm.errors import (
    BudgetError,
    ConvergenceError,
    DkfmWarning,
    InvalidInputError,
    KernelError,
    NotPSDError,
    NotSupportedError,
)
from dkfm.execution import memory


def up_to_sign(found, truth):
    signs = np.where(np.einsum("ij,ij->j", found, truth) < 0, -1.0, 1.0)
    return np.abs(found * signs - truth).max()


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


# What scikit-learn's users run.


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


# What it has more.


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
    laws.store_laws(pca.fit(X, sample_weight=weights, standardize=True), X, tmp_path / "pca")
    laws.scoring_laws(pca, X)
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


@pytest.mark.parametrize("solver", ["auto", "arpack"])
def test_a_gram_matrix_of_almost_equal_values_converges(solver, rng):
    X = rng.normal(size=(1000, 100))
    found = KernelPCA(5, kernel="rbf", gamma=1e-6, eigen_solver=solver, max_iter=60).fit(X)
    truth = KernelPCA(5, kernel="rbf", gamma=1e-6, eigen_solver="dense").fit(X)
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=1e-10)


@pytest.mark.parametrize("solver", ["auto", "arpack", "randomized"])
def test_an_eigenvalue_is_found_as_often_as_it_is_there(solver):
    K = np.diag(np.append(np.ones(60), np.zeros(1140)))
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


def test_components_of_a_precomputed_map_take_weights(rng):
    X, k = rng.normal(size=(60, 2)), kernels.Gaussian(1.0)
    K, weights = k(X), np.repeat([0.0, 1.0], 30)
    phi = dkfm.ExactFeatureMap("precomputed", basis="cholesky").fit(K)
    found = KernelPCA.from_map(phi, 3, K, sample_weight=weights)
    assert found.certificate_.error < 1e-9
    np.testing.assert_allclose(found.eigenvalues_, KernelPCA(3, kernel=k).fit(X[30:]).eigenvalues_, rtol=1e-8)


def test_what_has_no_way_back_is_told_before_the_work(rng):
    X = rng.normal(size=(30, 3))
    with pytest.raises(NotSupportedError, match="not their scores"):
        KernelPCA(2, kernel=kernels.Gaussian((1.0, 2.0, 3.0)), fit_inverse_transform=True).fit(X)
    with pytest.raises(InvalidInputError, match="do not vary"):
        KernelPCA(kernel="rbf", fit_inverse_transform=True).fit(np.ones((5, 2)))


def test_a_share_of_variance_takes_the_fewest_components_that_explain_it(rng):
    X = rng.normal(size=(80, 4))
    every = KernelPCA(kernel="rbf").fit(X)
    shares = np.cumsum(every.explained_variance_ratio_)
    for share in (0.1, 0.5, 0.9, 0.999):
        q = len(KernelPCA(share, kernel="rbf").fit(X).eigenvalues_)
        assert shares[q - 1] >= share
        assert q == 1 or shares[q - 2] < share


def test_uncentred_components_are_of_the_gram_matrix_itself(rng):
    X, Z = rng.normal(size=(50, 3)), rng.normal(size=(9, 3))
    k = kernels.Gaussian(1.5)
    pca = KernelPCA(5, kernel=k, centered=False).fit(X)
    values, vectors = np.linalg.eigh(k(X))
    np.testing.assert_allclose(pca.eigenvalues_, values[:-6:-1], rtol=1e-12)
    truth = k(Z, X) @ vectors[:, :-6:-1] / np.sqrt(values[:-6:-1])
    assert up_to_sign(pca.transform(Z), truth) < 1e-12
    np.testing.assert_allclose(pca.reconstruction_error(Z), 1 - (truth**2).sum(axis=1), atol=1e-12)


@pytest.mark.parametrize("kernel", [kernels.Gaussian(1.5), kernels.Linear(), kernels.Polynomial(2)])
def test_the_reconstruction_error_is_the_distance_from_the_span(kernel, rng, tmp_path):
    import dask.array as da

    X, Z = rng.normal(size=(40, 3)), rng.normal(size=(11, 3)) * 2
    pca = KernelPCA(2, kernel=kernel).fit(X)

    def centred(A, B):
        return kernel(A, B) - kernel(A, X).mean(1)[:, None] - kernel(X, B).mean(0) + kernel(X).mean()

    truth = np.diag(centred(Z, Z)) - (pca.transform(Z) ** 2).sum(axis=1)
    scale = np.abs(np.diag(kernel(Z))).max()
    np.testing.assert_allclose(pca.reconstruction_error(Z), truth, atol=1e-12 * scale)
    lazy = pca.reconstruction_error(da.from_array(Z, chunks=(4, 3)))
    np.testing.assert_allclose(lazy.compute(), truth, atol=1e-12 * scale)
    whole = KernelPCA(kernel=kernel).fit(X)
    assert whole.reconstruction_error(X).max() <= 1e-10 * scale
    pca.save(tmp_path / "pca")
    dkfm.batch_score(tmp_path / "pca", Z, tmp_path / "errors", output="reconstruction_error", progress=False)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "errors").compute()[:, 0], truth, atol=1e-12 * scale)
    given_gram = KernelPCA(2, kernel="precomputed").fit(kernel(X))
    found = given_gram.reconstruction_error(kernel(Z, X), diag=kernel.diag(Z))
    np.testing.assert_allclose(found, truth, atol=1e-12 * scale)
    with pytest.raises(InvalidInputError, match=r"needs k\(z, z\)"):
        given_gram.reconstruction_error(kernel(Z, X))


def test_standardized_rows_are_part_of_the_model(rng, tmp_path):
    X, Z = rng.normal(size=(60, 3)) * [100, 1, 0.01] + [5, 0, -3], rng.normal(size=(9, 3))
    X[:, 1] = 7.0
    ours = KernelPCA(2, kernel="rbf", fit_inverse_transform=True).fit(X, standardize=True)
    peer = make_pipeline(StandardScaler(), Peer(2, kernel="rbf", fit_inverse_transform=True)).fit(X)
    assert up_to_sign(ours.transform(Z), peer.transform(Z)) <= 1e-10
    np.testing.assert_allclose(ours.mean_, X.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(ours.scale_, np.where(X.std(axis=0) > 1e-10, X.std(axis=0), 1.0))
    ours.save(tmp_path / "pca")
    loaded = dkfm.load(tmp_path / "pca")
    np.testing.assert_array_equal(loaded.transform(Z), ours.transform(Z))
    scores = ours.transform(X[:5])
    np.testing.assert_array_equal(loaded.inverse_transform(scores), ours.inverse_transform(scores))
    S = StandardScaler().fit(X).transform(X)
    inner = KernelPCA(2, kernel="rbf", fit_inverse_transform=True).fit(S)
    back = inner.inverse_transform(inner.transform(S[:5])) @ np.diag(ours.scale_)
    # The ridge has no intercept, in both spaces, so that only its linear part can be compared.
    assert back.shape == ours.inverse_transform(scores).shape
    with pytest.raises(NotSupportedError, match="Sparse"):
        KernelPCA(2).fit(csr_array(X), standardize=True)


# Solvers and formulations.


def require_same(found, truth, X, Z, tolerance=1e-10):
    wide = truth.eigenvalues_ >= 1e-6 * truth.eigenvalues_[0]
    scale = np.sqrt(truth.eigenvalues_[0])
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=0, atol=1e-12 * truth.eigenvalues_[0])
    for rows in (X, Z):
        assert up_to_sign(found.transform(rows)[:, wide], truth.transform(rows)[:, wide]) <= tolerance * scale


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kernel", [kernels.Gaussian(2.0), kernels.Polynomial(3), kernels.Laplacian(2.0)])
def test_all_formulations_and_solvers_agree(kernel, weighted, centered, rng):
    X, Z = rng.normal(size=(300, 3)) * [3, 2, 1], rng.normal(size=(40, 3))
    weights = rng.uniform(0.5, 2.0, 300) if weighted else None
    truth = KernelPCA(8, kernel=kernel, centered=centered).fit(X, sample_weight=weights)
    for options in ({"formulation": "primal"}, {"formulation": "dual"}, {"eigen_solver": "arpack"}):
        found = KernelPCA(8, kernel=kernel, centered=centered, **options).fit(X, sample_weight=weights)
        require_same(found, truth, X, Z)
        np.testing.assert_allclose(found.total_variance_, truth.total_variance_, rtol=1e-12)
        errors = found.reconstruction_error(Z), truth.reconstruction_error(Z)
        np.testing.assert_allclose(*errors, rtol=0, atol=1e-9 * kernel.diag(Z).max())


def test_the_classical_solution_is_the_same(rng):
    X, Z = rng.normal(size=(80, 2)), rng.normal(size=(20, 2))
    k = kernels.Gaussian(1.0)
    truth = oracles.classical_scores(k(X), k(X, Z), 6)
    assert up_to_sign(KernelPCA(6, kernel=k).fit(X).transform(Z), truth) <= 1e-10


@pytest.mark.slow
def test_lanczos_takes_few_components_of_many_rows(rng, monkeypatch):
    from dkfm.estimators.fitting import components

    used = []
    solve, leading = components.pca.solve_components, components.pca.solve_leading_components
    monkeypatch.setattr(components.pca, "solve_components", lambda *a: used.append("dense") or solve(*a))
    monkeypatch.setattr(components.pca, "solve_leading_components", lambda *a: used.append("lanczos") or leading(*a))
    X = rng.normal(size=(1000, 3))
    for q, expected in ((5, "lanczos"), (51, "dense"), (None, "dense"), (0.5, "dense")):
        KernelPCA(q, kernel="rbf").fit(X)
        assert used.pop() == expected
    KernelPCA(5, kernel="rbf").fit(X[:999])
    assert used.pop() == "dense"
    KernelPCA(5, kernel="rbf", eigen_solver="arpack").fit(X[:500])
    assert used.pop() == "lanczos"


def test_products_that_do_not_suffice_are_told(rng):
    X = rng.normal(size=(400, 30))
    with pytest.raises(ConvergenceError, match=r"After 3 products .* raise max_iter"):
        KernelPCA(5, kernel="rbf", eigen_solver="arpack", max_iter=3).fit(X)
    KernelPCA(5, kernel="rbf", eigen_solver="randomized").fit(X)
    assert KernelPCA(60, kernel="rbf", eigen_solver="randomized", iterated_power=0).fit(X).eigenvalues_.shape == (60,)


@pytest.mark.slow
@pytest.mark.parametrize("q", [3, 20])
def test_a_gram_matrix_that_does_not_fit_into_memory_stays_in_its_store(q, rng, monkeypatch, tmp_path):
    X, Z = rng.normal(size=(1200, 5)), rng.normal(size=(20, 5))
    truth = KernelPCA(q, kernel="rbf").fit(X)
    from dkfm.core import budget
    from dkfm.numerics import lanczos

    held = budget.lanczos_bytes(1200, 5, lanczos.held_columns(1200, q), lanczos.block_columns(1200, q))
    monkeypatch.setattr(memory, "available_memory", lambda: held - 5_000_000)
    found = KernelPCA(q, kernel="rbf", tile_rows=300, workspace=tmp_path / "w").fit(X)
    require_same(found, truth, X, Z, 1e-9)
    assert len(list((tmp_path / "w").glob("gram-*.zarr"))) == 1
    K = truth.kernel_(X)
    given_gram = KernelPCA(q, kernel="precomputed").fit(K)
    require_same(given_gram, OfGram(K, q), K, K[:20], 1e-9)
    K[0] += 1e-3
    with pytest.raises(InvalidInputError, match="not symmetric"):
        KernelPCA(q, kernel="precomputed").fit(K)
    monkeypatch.setattr(memory, "available_memory", lambda: 10**6)
    with pytest.raises(BudgetError, match="Lanczos with N = 1200"):
        KernelPCA(q, kernel="rbf").fit(X)


class OfGram:
    """Components of a Gram matrix, dense, in a few lines."""

    def __init__(self, K, q):
        self.means = K.mean(axis=0)
        values, vectors = np.linalg.eigh(oracles.centred(K))
        self.eigenvalues_ = values[::-1][:q]
        self.b = vectors[:, ::-1][:, :q] / np.sqrt(self.eigenvalues_)
        self.b -= self.b.mean(axis=0)

    def transform(self, rows):
        return rows @ self.b - self.means @ self.b


# Ways back.


def test_without_a_fit_for_it_there_is_no_way_back(rng):
    X = rng.normal(size=(30, 2))
    with pytest.raises(NotFittedError, match="fit_inverse_transform"):
        KernelPCA(2).fit(X).inverse_transform(X)
    with pytest.raises(NotSupportedError, match="sparse"):
        KernelPCA(2, fit_inverse_transform=True).fit(csr_array(X))


@pytest.mark.parametrize("kernel", ["rbf", "poly", "linear", "cosine", "sigmoid"])
def test_ridge_pre_images_are_scikit_learns(kernel, rng):
    X, Z = rng.normal(size=(80, 4)), rng.normal(size=(10, 4))
    options = {"n_components": 3, "kernel": kernel, "fit_inverse_transform": True, "alpha": 2.0, "gamma": 0.01}
    if kernel == "sigmoid":
        with pytest.warns(DkfmWarning, match="negative part"):
            ours = KernelPCA(**options).fit(X)
    else:
        ours = KernelPCA(**options).fit(X)
    peer = Peer(**options).fit(X)
    signs = np.sign(np.einsum("ij,ij->j", ours.X_transformed_fit_, peer.X_transformed_fit_))
    scores = peer.transform(Z)
    found = ours.inverse_transform(scores * signs)
    np.testing.assert_allclose(found, peer.inverse_transform(scores), atol=1e-8 * np.abs(X).max())


def test_fixed_points_of_known_scores_are_the_rows_they_are_of(rng):
    X = rng.normal(size=(80, 2))
    Z = rng.normal(size=(20, 2)) / 2
    pca = KernelPCA(kernel="rbf").fit(X)
    np.testing.assert_allclose(pca.preimage(pca.transform(Z), tol=1e-10), Z, atol=1e-5)
    scaled = KernelPCA(kernel=kernels.Gaussian((1.0, 2.0))).fit(X)
    np.testing.assert_allclose(scaled.preimage(scaled.transform(Z), Z, tol=1e-10), Z, atol=1e-4)
    standardized = KernelPCA(kernel="rbf").fit(X * [100, 1], standardize=True)
    np.testing.assert_allclose(
        standardized.preimage(standardized.transform(Z * [100, 1]), tol=1e-10), Z * [100, 1], atol=1e-2
    )
    with pytest.raises(NotSupportedError, match="Gaussian"):
        KernelPCA(2).fit(X).preimage([[0.0, 0.0]])
    with pytest.warns(DkfmWarning, match="1 of 1 pre-images"):
        pca.preimage(pca.transform(Z[:1]), Z[:1] + 1, max_iter=1)


def test_fixed_points_denoise(rng):
    X = load_digits().data / 16
    train, test = X[:700], X[700:750]
    noisy = test + rng.normal(scale=0.25, size=test.shape)
    pca = KernelPCA(60, kernel="rbf", gamma=0.05).fit(train)
    cleaned = pca.preimage(pca.transform(noisy), noisy)
    assert ((cleaned - test) ** 2).mean() < 0.6 * ((noisy - test) ** 2).mean()


# Components of a map.


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("basis", ["symmetric", "spectral", "cholesky"])
@pytest.mark.parametrize("q", [3, None, 0.9])
def test_components_of_a_map_are_those_of_a_fit(basis, q, centered, rng, tmp_path):
    X, Z = rng.normal(size=(150, 2)), rng.normal(size=(20, 2))
    k = kernels.Gaussian(2.0)
    phi = dkfm.ExactFeatureMap(k, basis=basis).fit(X)
    truth = KernelPCA(q, kernel=k, centered=centered).fit(X)
    found = KernelPCA.from_map(phi, q, X if basis == "cholesky" else None, centered=centered)
    wide = int((truth.eigenvalues_ >= 1e-6 * truth.eigenvalues_[0]).sum())
    scale = np.sqrt(truth.eigenvalues_[0])
    np.testing.assert_allclose(found.eigenvalues_[:wide], truth.eigenvalues_[:wide], rtol=0, atol=1e-12 * scale**2)
    assert up_to_sign(found.transform(Z)[:, :wide], truth.transform(Z)[:, :wide]) <= 1e-8 * scale
    np.testing.assert_allclose(found.total_variance_, truth.total_variance_, rtol=1e-10)
    np.testing.assert_allclose(found.reconstruction_error(Z), truth.reconstruction_error(Z), atol=1e-8)
    # The map's own eigenvectors round too, by another factor with another LAPACK.
    assert found.certificate_.error <= 10 * truth.certificate_.error + 1e-13
    found.save(tmp_path / "pca")
    loaded = dkfm.load(tmp_path / "pca")
    np.testing.assert_array_equal(loaded.transform(Z), found.transform(Z))
    assert loaded.verify().certificate == found.certificate_


def test_components_of_a_map_of_few_landmarks_are_those_of_its_features(rng):
    X, weights = rng.normal(size=(200, 3)), rng.uniform(0.5, 2.0, 200)
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(2.0), basis="cholesky", landmarks="uniform", n_landmarks=30).fit(X)
    features = phi.transform(X)
    found = KernelPCA.from_map(phi, 5, X, sample_weight=weights)
    mean = np.average(features, axis=0, weights=weights)
    covariance = np.cov(features.T, aweights=weights, ddof=0)
    values, vectors = np.linalg.eigh(covariance)
    np.testing.assert_allclose(found.explained_variance_, values[:-6:-1], rtol=1e-10)
    assert up_to_sign(found.transform(X), (features - mean) @ vectors[:, :-6:-1]) <= 1e-10
    with pytest.raises(InvalidInputError, match="X, the training rows"):
        KernelPCA.from_map(phi, 5)
    with pytest.raises(AttributeError, match="landmarks"):
        attrgetter("eigenvectors_")(found)


# Linear PCA.

EXAMPLE = np.array([[5, 3, 6, 7, 6], [4, 5, 7, 1, 3], [5, 7, 6, 1, 0], [6, 10, 12, 12, 11], [9, 10, 12, 13, 9]], float)
LOADINGS = np.array(
    [
        [0.1888, -0.2020, -0.6366, 0.5495],
        [0.2755, -0.7886, 0.1472, -0.4502],
        [0.3606, -0.3464, 0.3128, 0.5836],
        [0.6979, 0.2522, -0.4422, -0.3707],
        [0.5209, 0.3922, 0.5288, 0.1316],
    ]
)
SCORES = np.array(
    [
        [-1.9469, 4.3453, -0.8756, -0.2039],
        [-6.9742, -0.0660, 1.4352, 0.7590],
        [-8.1577, -2.6752, -0.8063, -0.5704],
        [8.4282, -0.2330, 1.8282, -0.4996],
        [8.6507, -1.3711, -1.5815, 0.5149],
    ]
)
REBUILT = np.array(
    [
        [5.1, 2.9, 6.1, 6.9, 6.0],
        [3.6, 5.3, 6.6, 1.3, 2.9],
        [5.3, 6.7, 6.3, 0.8, 0.1],
        [6.3, 9.8, 12.3, 11.8, 11.1],
        [8.7, 10.2, 11.7, 13.2, 8.9],
    ]
)


def test_the_linear_kernel_gives_the_worked_example_of_pca_digit_for_digit():
    pca = KernelPCA().fit(EXAMPLE)
    np.testing.assert_array_equal(np.round(pca.eigenvalues_, 4), [264.8458, 27.9766, 9.3198, 1.4579])
    scores = pca.transform(EXAMPLE)
    signs = np.sign((scores * SCORES).sum(axis=0))
    np.testing.assert_allclose(scores * signs, SCORES, rtol=0, atol=0.5001e-4)
    axes = EXAMPLE.T @ pca._weights * signs
    np.testing.assert_allclose(axes, LOADINGS, rtol=0, atol=0.5001e-4)
    three = KernelPCA(3).fit(EXAMPLE)
    rebuilt = EXAMPLE.mean(axis=0) + three.transform(EXAMPLE) @ (EXAMPLE.T @ three._weights).T
    np.testing.assert_array_equal(np.round(rebuilt, 1), REBUILT)
    assert round(float(np.sqrt(three.reconstruction_error(EXAMPLE).sum())), 4) == 1.2074
    np.testing.assert_allclose(PCA().fit(EXAMPLE).explained_variance_[:4] * 4, pca.eigenvalues_, rtol=1e-12)
