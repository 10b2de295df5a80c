"""`KernelPCA` in scikit-learn's place, and what it has more: weights, shares of variance, solvers, ways back."""

from operator import attrgetter

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.decomposition import KernelPCA as Peer
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dkfm
from dkfm import KernelPCA, kernels
from dkfm.errors import (
    BudgetError,
    ConvergenceError,
    DkfmWarning,
    InvalidInputError,
    NotSupportedError,
)
from dkfm.execution import memory
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.numerics import kernel_components
from helpers import oracles
from helpers.kernel_pca_cases import up_to_sign


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


@pytest.mark.costly
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
    back = peer.inverse_transform(peer.transform(X[:5]))
    assert np.abs(ours.inverse_transform(scores) - back).max() <= 1e-9 * np.abs(X).max()
    weights, loose = rng.integers(1, 4, 60), KernelPCA(2, kernel="rbf", fit_inverse_transform=True, alpha=0.1)
    repeated = clone(loose).fit(np.repeat(X, weights, axis=0), standardize=True)
    weighted = loose.fit(X, sample_weight=weights, standardize=True)
    back = repeated.inverse_transform(scores)
    assert np.abs(weighted.inverse_transform(scores) - back).max() <= 1e-8 * np.abs(X).max()
    with pytest.raises(NotSupportedError, match="Sparse"):
        KernelPCA(2).fit(csr_array(X), standardize=True)


@pytest.mark.parametrize("scales", [(100.0, 1.0, 0.01), 10.0])
def test_rows_of_a_kernel_warped_by_a_scaling_have_a_way_back(rng, scales, tmp_path):
    X = rng.normal(size=(60, 3)) * scales + [5, 0, -3]
    scaling = kernels.Standardize((5.0, 0.0, -3.0), scales)
    plain = KernelPCA(2, kernel=kernels.Gaussian(2.0), fit_inverse_transform=True).fit(scaling(X))
    ours = clone(plain).set_params(kernel=plain.kernel.warp(scaling)).fit(X)
    ours.save(tmp_path / "pca")
    loaded, scores = dkfm.load(tmp_path / "pca"), ours.transform(X[:5])
    back = plain.inverse_transform(plain.transform(scaling(X[:5]))) * scaling.scale + scaling.mean
    for pca in (ours, loaded, clone(loaded).fit(X)):
        assert np.abs(pca.inverse_transform(scores) - back).max() <= 1e-9 * np.abs(X).max()
    scaled_twice = clone(ours).fit(X, standardize=True)
    assert scaled_twice.inverse_transform(scores).shape == (5, 3)


def require_same(found, truth, X, Z, tolerance=1e-10):
    wide = truth.eigenvalues_ >= 1e-6 * truth.eigenvalues_[0]
    scale = np.sqrt(truth.eigenvalues_[0])
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=0, atol=1e-12 * truth.eigenvalues_[0])
    for rows in (X, Z):
        assert up_to_sign(found.transform(rows)[:, wide], truth.transform(rows)[:, wide]) <= tolerance * scale


@pytest.mark.costly
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

    used = []
    solve, leading = kernel_components.solve_components_by_eigh, kernel_components.solve_leading_components
    monkeypatch.setattr(kernel_components, "solve_components_by_eigh", lambda *a: used.append("dense") or solve(*a))
    monkeypatch.setattr(kernel_components, "solve_leading_components", lambda *a: used.append("lanczos") or leading(*a))
    X = rng.normal(size=(1400, 3))
    for q, expected in ((35, "lanczos"), (36, "dense"), (None, "dense"), (0.5, "dense")):
        KernelPCA(q, kernel="rbf").fit(X)
        assert used.pop() == expected
    KernelPCA(5, kernel="rbf").fit(X[:1399])
    assert used.pop() == "dense"
    KernelPCA(5, kernel="rbf", eigen_solver="arpack").fit(X[:500])
    assert used.pop() == "lanczos"


def test_products_that_do_not_suffice_are_told(rng):
    X = rng.normal(size=(400, 30))
    with pytest.raises(ConvergenceError, match=r"After 3 products .* raise max_iter"):
        KernelPCA(5, kernel="rbf", eigen_solver="arpack", max_iter=3).fit(X)
    KernelPCA(5, kernel="rbf", eigen_solver="randomized").fit(X)
    assert KernelPCA(60, kernel="rbf", eigen_solver="randomized", iterated_power=0).fit(X).eigenvalues_.shape == (60,)


@pytest.mark.costly
@pytest.mark.parametrize("q", [3, 20])
def test_a_gram_matrix_that_does_not_fit_into_memory_stays_in_its_store(q, rng, monkeypatch, tmp_path):
    X, Z = rng.normal(size=(1400, 5)), rng.normal(size=(20, 5))
    truth = KernelPCA(q, kernel="rbf").fit(X)
    from dkfm.core import budget
    from dkfm.numerics.eigensolvers import lanczos

    held = budget.lanczos_bytes(1400, 5, lanczos.choose_basis_columns(1400, q), lanczos.choose_block_columns(1400, q))
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: held - 5_000_000)
    found = KernelPCA(q, kernel="rbf", tile_rows=300, workspace=tmp_path / "w").fit(X)
    require_same(found, truth, X, Z, 1e-9)
    assert len(list((tmp_path / "w").glob("gram-*.zarr"))) == 1
    K = truth.kernel_(X)
    given_gram = KernelPCA(q, kernel="precomputed").fit(K)
    require_same(given_gram, OfGram(K, q), K, K[:20], 1e-9)
    K[0] += 1e-3
    with pytest.raises(InvalidInputError, match="not symmetric"):
        KernelPCA(q, kernel="precomputed").fit(K)
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 10**6)
    with pytest.raises(BudgetError, match="Lanczos with N = 1400"):
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


@pytest.mark.costly
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("basis", ["symmetric", "spectral", "cholesky"])
@pytest.mark.parametrize("q", [3, None, 0.9])
def test_components_of_a_map_are_those_of_a_fit(basis, q, centered, rng, tmp_path):
    X, Z = rng.normal(size=(150, 2)), rng.normal(size=(20, 2))
    k = kernels.Gaussian(2.0)
    phi = dkfm.ExactFeatureMap(k, basis=basis).fit(X)
    truth = KernelPCA(q, kernel=k, centered=centered).fit(X)
    with single_blas_thread():  # another number of threads rounds otherwise, and so the certificate of rounding
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
    with single_blas_thread():
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
    axes = EXAMPLE.T @ pca._component_weights * signs
    np.testing.assert_allclose(axes, LOADINGS, rtol=0, atol=0.5001e-4)
    three = KernelPCA(3).fit(EXAMPLE)
    rebuilt = EXAMPLE.mean(axis=0) + three.transform(EXAMPLE) @ (EXAMPLE.T @ three._component_weights).T
    np.testing.assert_array_equal(np.round(rebuilt, 1), REBUILT)
    assert round(float(np.sqrt(three.reconstruction_error(EXAMPLE).sum())), 4) == 1.2074
    np.testing.assert_allclose(PCA().fit(EXAMPLE).explained_variance_[:4] * 4, pca.eigenvalues_, rtol=1e-12)
