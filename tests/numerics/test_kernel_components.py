"""Kernel PCA of a Gram matrix against scikit-learn, the paper's primal solution and the dense formula."""

import numpy as np
import pytest
from scipy.linalg import null_space
from sklearn.decomposition import PCA
from sklearn.decomposition import KernelPCA as Peer

from dkfm import kernels
from dkfm.errors import NotPSDError
from dkfm.numerics import kernel_components, weighting
from helpers import oracles


def solve(kernel, X, q=None):
    return kernel_components.solve_components_by_eigh(
        np.asfortranarray(kernel(X)), kernel_components.ComponentOptions(q)
    )


def scores(kernel, X, Z, q):
    found = solve(kernel, X, q)
    return kernel(Z, X) @ found.weights - found.offset


def up_to_sign(found, truth):
    signs = np.sign(np.einsum("ij,ij->j", found, truth))
    return np.abs(found * signs - truth).max()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kernel", "peer"),
    [
        (kernels.Gaussian(2.0), {"kernel": "rbf", "gamma": 1 / 8}),
        (kernels.Polynomial(3, scale=1 / 64, offset=1.0), {"kernel": "poly", "gamma": 1 / 64, "degree": 3}),
    ],
)
def test_scores_on_the_digits_equal_scikit_learns_to_ten_digits(digits, kernel, peer):
    X, Z = digits[0][:1000], digits[0][1000:]
    found = scores(kernel, X, Z, 20)
    truth = Peer(20, eigen_solver="dense", **peer).fit(X).transform(Z)
    assert up_to_sign(found, truth) < 1e-10


def test_the_linear_kernel_is_pca(rng):
    X, Z = rng.normal(size=(100, 5)) * [5, 4, 3, 2, 1] + 50, rng.normal(size=(30, 5)) + 50
    assert up_to_sign(scores(kernels.Linear(), X, Z, 5), PCA(5).fit(X).transform(Z)) < 1e-10


def test_scores_equal_the_papers_primal_solution(rng):
    X, Z = rng.normal(size=(60, 2)), rng.normal(size=(20, 2))
    truth = oracles.primal_scores(oracles.gaussian(X, X, 0.3), oracles.gaussian(X, Z, 0.3), 6)
    assert up_to_sign(scores(kernels.Gaussian(0.3), X, Z, 6), truth) < 1e-10


def test_centring_is_h_k_h_from_the_lower_triangle(rng):
    K = np.asfortranarray(kernels.Gaussian(1.0)(rng.normal(size=(700, 3))))
    truth, means = oracles.centred(K), K.mean(axis=0)
    K[np.triu_indices(700, 1)] = np.nan
    found = weighting.center_and_weigh_gram_in_place(K, weighting.Weighting(np.ones(700)))
    np.testing.assert_allclose(found, means, rtol=1e-13)
    np.testing.assert_allclose(K, truth, atol=1e-13)


def test_weights_are_centred_and_scaled(rng):
    found = solve(kernels.Gaussian(1.0), rng.normal(size=(80, 3)), 10)
    np.testing.assert_allclose(found.weights.sum(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose((found.weights**2).sum(axis=0) * found.eigenvalues, 1, rtol=1e-12)


def test_weights_are_centred_to_the_last_bits_where_the_mean_would_amplify_what_is_left(rng):
    found = solve(kernels.Gaussian(10.0), rng.normal(size=(300, 3)), 20)
    # Eigenvectors as LAPACK returns them miss this by six digits.
    assert (np.abs(found.weights.sum(axis=0)) <= 1e-14 * np.abs(found.weights).sum(axis=0)).all()


def test_a_slightly_indefinite_matrix_is_refused():
    Q = null_space(np.ones((1, 50)))
    K = Q @ np.diag(np.append(np.linspace(1, 2, 48), -1e-8)) @ Q.T
    with pytest.raises(NotPSDError):
        kernel_components.solve_components_by_eigh(np.asfortranarray(K), kernel_components.ComponentOptions())


def test_rows_that_do_not_vary_have_no_components():
    assert solve(kernels.Gaussian(1.0), np.ones((6, 2))).weights.shape == (6, 0)
    found = solve(kernels.Gaussian(1.0), np.ones((6, 2)), 2)
    assert (found.weights == 0).all()
    assert (found.eigenvalues == 0).all()


def test_only_the_centred_matrix_must_be_psd(rng):
    X = rng.normal(size=(40, 3))
    negative = kernels.Function(lambda X, Y: -((X[:, None] - Y[None]) ** 2).sum(-1) / 2)
    found = solve(negative, X, 3)
    np.testing.assert_allclose(found.eigenvalues, 39 * PCA(3).fit(X).explained_variance_, rtol=1e-10)
    with pytest.raises(NotPSDError, match="centred Gram matrix"):
        solve(kernels.Function(lambda X, Y: np.tanh(2 * X @ Y.T - 1)), X)


def test_a_matrix_dominated_by_its_mean_is_not_called_indefinite(rng):
    found = solve(kernels.Gaussian(1e4), rng.normal(size=(200, 3)), 3)
    assert (found.eigenvalues > 0).all()
