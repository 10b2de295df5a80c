"""All eigenvalues and the largest's vectors are those of a full decomposition, to rounding."""

import numpy as np
import pytest
from scipy import linalg
from scipy.linalg import LinAlgError, eigh

from dkfm import kernels
from dkfm.numerics.eigensolvers import dense

EPS = np.finfo(np.float64).eps


def matrices(rng, n):
    """Yield symmetric matrices whose eigenvalues lie apart, are repeated, cluster, span all scales, or are 0."""
    X = rng.normal(size=(n, 4))
    yield "full rank", kernels.Gaussian(0.5)(X)
    yield "close together", kernels.Gaussian(5.0)(rng.normal(size=(n, 20)))
    yield "low rank", X @ X.T
    yield "every row twice", kernels.Polynomial(9, scale=0.05)(np.repeat(X[: n // 2 + 1], 2, axis=0)[:n])
    yield "indefinite", kernels.Sigmoid(1.0, -1.0)(X)
    yield "ones", np.ones((n, n))
    yield "identity", np.eye(n)
    yield "zeros", np.zeros((n, n))
    yield "tiny", 1e-300 * kernels.Gaussian(1.0)(X)
    Q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    values = 1 + 1e-14 * rng.normal(size=n)
    yield "one cluster", (Q * values) @ Q.T
    yield "many scales", (Q * np.geomspace(1e-30, 1, n)) @ Q.T


@pytest.mark.parametrize(("n", "q"), [(1, 1), (2, 1), (3, 1), (40, 1), (40, 6), (40, 7), (40, 40), (300, 50), (300, 1)])
def test_values_and_vectors_are_those_of_a_full_decomposition(n, q, rng):
    for name, B in matrices(rng, n):
        A = (B + B.T) / 2
        lower = np.asfortranarray(np.where(np.tri(n, dtype=bool), A, np.nan))  # only the lower triangle is read
        values, vectors = dense.eigh_leading_vectors_in_place(lower, q)
        scale = np.abs(A).sum(axis=1).max()
        limit = 16 * EPS * scale * np.sqrt(n)  # of the cluster, whose vectors mix; the others are below a third of it
        np.testing.assert_allclose(values, eigh(A, eigvals_only=True), rtol=0, atol=limit, err_msg=name)
        p = vectors.shape[1]
        assert q <= p
        assert np.abs(A @ vectors - vectors * values[n - p :]).max() <= limit, name
        assert np.abs(vectors.T @ vectors - np.eye(p)).max() <= 30 * EPS, name


@pytest.mark.parametrize("n", [1, 2, 3, 40, 300])
def test_a_spare_row_changes_no_eigenpair(n, rng):
    for name, B in matrices(rng, n):
        A = (B + B.T) / 2
        lower = np.where(np.tri(n, dtype=bool), A, np.nan)  # only the lower triangle is read
        values, vectors = dense.eigh_without_spare_row(dense.add_spare_row(lower))
        limit = 16 * EPS * np.abs(A).sum(axis=1).max() * np.sqrt(n)
        assert vectors.shape == (n, n)
        np.testing.assert_allclose(values, eigh(A, eigvals_only=True), rtol=0, atol=limit, err_msg=name)
        assert np.abs(A @ vectors - vectors * values).max() <= limit, name
        assert np.abs(vectors.T @ vectors - np.eye(n)).max() <= 30 * EPS, name


def test_with_a_spare_row_and_one_dominant_eigenvalue_the_second_row_is_as_exact_as_most():
    shares = []
    for seed in range(9):
        A = 0.5 + 0.5 * kernels.Gaussian(1.0)(np.random.default_rng(seed).normal(size=(400, 20)))
        values, vectors = dense.eigh_without_spare_row(dense.add_spare_row(A))
        errors = np.abs(((vectors * values) @ vectors.T - A).diagonal())
        shares.append(errors[1] / np.median(errors))
    assert np.median(shares) <= 8  # 1 to 2 with a spare row, 30 to 40 without


def test_few_vectors_take_the_short_way(rng, monkeypatch):
    monkeypatch.setattr(dense, "_apply_reflectors", lambda *given: pytest.fail("the short way"))
    A = np.asfortranarray(kernels.Gaussian(1.0)(rng.normal(size=(60, 3))))
    dense.eigh_leading_vectors_in_place(A.copy(order="F"), 11)
    with pytest.raises(pytest.fail.Exception, match="short way"):
        dense.eigh_leading_vectors_in_place(A, 10)


@pytest.mark.parametrize("fails", ["raises", "is not finite"])
def test_where_one_driver_fails_the_other_one_is_asked(fails, rng, monkeypatch):
    asked, solve = [], linalg.eigh_tridiagonal

    def broken(d, e, *, lapack_driver, **options):
        asked.append(lapack_driver)
        if lapack_driver == "stemr" and fails == "raises":
            raise LinAlgError("no representation")
        found = solve(d, e, lapack_driver=lapack_driver, **options)
        return (found[0], found[1] * np.nan) if lapack_driver == "stemr" else found

    monkeypatch.setattr(linalg, "eigh_tridiagonal", broken)
    A = kernels.Gaussian(1.0)(rng.normal(size=(60, 3)))
    values, vectors = dense.eigh_leading_vectors_in_place(np.asfortranarray(A), 5)
    assert asked == ["sterf", "stemr", "stebz"]
    np.testing.assert_allclose(A @ vectors, vectors * values[-5:], atol=1e-13)
