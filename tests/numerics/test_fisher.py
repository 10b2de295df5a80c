"""Fisher discriminants, held against the dense generalised eigenproblem in explicit features."""

import numpy as np
import pytest
from scipy.linalg import eigh

from dkfm import kernels
from dkfm.errors import InvalidInputError, NotPSDError
from dkfm.numerics.supervised import fisher
from dkfm.numerics.supervised.classes import Classes

KERNELS = [kernels.Gaussian(1.0), kernels.Linear(), kernels.Polynomial(3, offset=1.0), kernels.Exponential(2.0)]


def dense(F, y, share, weights=None, priors=None):
    """S_b u = ratio (S_w + share tr(S_w) / N) u in features F: the ratios, u, and linear discriminant analysis."""
    w = np.ones(len(F)) if weights is None else weights
    labels = np.unique(y)
    f = np.array([w[y == c].sum() for c in labels]) / w.sum()
    M = np.array([w[y == c] @ F[y == c] / w[y == c].sum() for c in labels])
    R = F - M[np.searchsorted(labels, y)]
    S = (w[:, None] * R).T @ R / w.sum()
    S += share * np.trace(S) / w.sum() * np.eye(len(S))
    p = f if priors is None else priors
    B = (p[:, None] * (M - p @ M)).T @ (M - p @ M)
    ratios, U = eigh(B, S)
    P = np.linalg.solve(S, (M - f @ M).T)
    decide = (F - f @ M) @ P - np.diag((M - f @ M) @ P) / 2 + np.log(p)
    return ratios[::-1], (F - f @ M) @ U[:, ::-1], decide


def features(K):
    values, V = np.linalg.eigh(K)
    kept = values > 1e-13 * values[-1]
    return V[:, kept] * np.sqrt(values[kept]), V[:, kept] / np.sqrt(values[kept])


@pytest.fixture
def rows(rng):
    y = rng.integers(0, 4, 90)
    return rng.normal(size=(90, 3)) + np.eye(4)[y][:, :3], y


def outputs(K, found, classes):
    scores = K @ found.weights - found.offset
    T, constants = fisher.decision_functions(found.means, classes.effective_priors)
    return scores, scores @ T - constants


@pytest.mark.parametrize("priors", [None, np.array([0.1, 0.2, 0.3, 0.4])], ids=["frequencies", "priors"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("by_eigenvalues", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_discriminants_are_those_of_the_dense_eigenproblem(kernel, by_eigenvalues, weighted, priors, rows, rng):
    X, y = rows
    weights = rng.integers(1, 4, 90).astype(float) if weighted else np.ones(90)
    K, classes = kernel(X, X), Classes(y, weights, 4, priors)
    ratios, scores, decisions = dense(features(K)[0], y, 0.01, weights, priors)
    found = fisher.solve_discriminants(np.asfortranarray(K), classes, 0.01, by_eigenvalues=by_eigenvalues)
    mine, decided = outputs(kernel(X, X), found, classes)
    np.testing.assert_allclose(found.between_class_variances, ratios[:3], rtol=1e-9)
    signs = np.sign((mine * scores[:, :3]).sum(axis=0))
    np.testing.assert_allclose(mine, scores[:, :3] * signs, atol=1e-8)
    np.testing.assert_allclose(decided, decisions, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_those_of_a_map_are_those_of_the_gram_matrix(kernel, rows, rng):
    X, y = rows
    K, classes = kernel(X, X), Classes(y, rng.uniform(0.5, 2, 90), 4)
    F, W = features(K)
    rotation = np.linalg.qr(rng.normal(size=(F.shape[1], F.shape[1]))).Q  # another basis of the same features
    F, W = F @ rotation, W @ rotation
    found = fisher.solve_discriminants_of_map(
        W, (F * classes.weights[:, None]).T @ F, classes.weighted_columns().T @ F, classes, 0.1
    )
    truth = fisher.solve_discriminants(np.asfortranarray(K), classes, 0.1)
    assert found.ridge == pytest.approx(truth.ridge, rel=1e-12)
    for mine, other in zip(outputs(kernel(X, X), found, classes), outputs(kernel(X, X), truth, classes), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-8)


def test_the_sign_is_that_of_the_class_mean_of_largest_magnitude(rows):
    X, y = rows
    found = fisher.solve_discriminants(np.asfortranarray(X @ X.T), Classes(y, np.ones(90), 4), 0.1)
    largest = np.abs(found.means).argmax(axis=0)
    assert (found.means[largest, np.arange(3)] > 0).all()


def test_classes_in_fewer_dimensions_than_their_number_have_as_many_discriminants(rng):
    y = np.repeat(np.arange(4), 20)
    x = rng.normal(size=(80, 1)) + y[:, None]
    for by_eigenvalues in (False, True):
        found = fisher.solve_discriminants(
            np.asfortranarray(x @ x.T), Classes(y, np.ones(80), 4), 1.0, by_eigenvalues=by_eigenvalues
        )
        assert found.between_class_variances.shape == (1,)


def test_classes_with_equal_means_have_no_discriminant_and_their_priors_decide():
    x = np.array([[-1.0], [1.0], [-2.0], [0.0], [2.0]])
    classes = Classes(np.array([0, 0, 1, 1, 1]), np.ones(5), 2)
    found = fisher.solve_discriminants(np.asfortranarray(x @ x.T), classes, 1.0)
    heads = fisher.make_discriminant_heads(found, classes, None)
    assert heads["scores"].width == 0
    assert heads["decision_function"].offset == pytest.approx(-np.log(1.5))


def test_without_a_ridge_more_features_than_rows_are_refused_with_the_number(rows):
    X, y = rows
    K = kernels.Gaussian(1.0)(X, X)
    with pytest.raises(InvalidInputError, match=r"singular: .* has \d.*e-\d\d of its variance .* raise shrinkage"):
        fisher.solve_discriminants(np.asfortranarray(K), Classes(y, np.ones(90), 4), 0.0, by_eigenvalues=True)


def test_without_a_ridge_few_features_have_plain_discriminants(rows):
    X, y = rows
    found = fisher.solve_discriminants(np.asfortranarray(X @ X.T), Classes(y, np.ones(90), 4), 0.0, by_eigenvalues=True)
    np.testing.assert_allclose(found.between_class_variances, dense(X, y, 0.0)[0], rtol=1e-9)


def test_a_ridge_that_rounding_hides_is_refused_by_the_factor(rows):
    X, y = rows
    with pytest.raises(InvalidInputError, match="nothing beside the rounding"):
        fisher.solve_discriminants(np.asfortranarray(X @ X.T), Classes(y, np.ones(90), 4), 1e-13, by_eigenvalues=False)


@pytest.mark.parametrize("by_eigenvalues", [False, True])
def test_rows_that_are_equal_within_their_classes_are_refused(by_eigenvalues):
    x = np.repeat([[1.0, 2.0], [3.0, -1.0]], 5, axis=0)
    with pytest.raises(InvalidInputError, match="do not vary within their classes"):
        fisher.solve_discriminants(
            np.asfortranarray(x @ x.T),
            Classes(np.repeat([0, 1], 5), np.ones(10), 2),
            1.0,
            by_eigenvalues=by_eigenvalues,
        )


def test_a_matrix_that_the_ridge_does_not_make_definite_is_refused(rng):
    K = rng.normal(size=(30, 30))
    classes = Classes(np.arange(30) % 3, np.ones(30), 3)
    K = K @ K.T - 20 * np.eye(30)
    for by_eigenvalues in (False, True):
        with pytest.raises(NotPSDError, match="on_indefinite"):
            fisher.solve_discriminants(np.asfortranarray(K), classes, 1e-3, by_eigenvalues=by_eigenvalues)
