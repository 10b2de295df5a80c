"""Block Lanczos against LAPACK: clustered and repeated eigenvalues, low rank, restarts, one product at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfm.numerics.eigensolvers import lanczos

EPS = np.finfo(np.float64).eps


def with_spectrum(values, seed=0):
    Q = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(values), len(values))))[0]
    return (Q * values) @ Q.T


def largest(A, q, held=None, columns=None, **options):
    p = lanczos.choose_block_columns(len(A), q) if columns is None else columns
    start = np.random.default_rng(1).normal(size=(len(A), p))
    return lanczos.largest_eigenpairs(lambda V: A @ V, start, q, basis_columns=held, **options)


def require_pairs(found, A, q):
    truth = np.linalg.eigvalsh(A)[::-1]
    scale = np.abs(truth).max()
    # Every restart rounds what it keeps.
    np.testing.assert_allclose(found.values, truth[:q], rtol=0, atol=1e3 * EPS * scale)
    np.testing.assert_allclose(found.vectors.T @ found.vectors, np.eye(q), rtol=0, atol=1e-13)
    # What a product of n values rounds, in the columns of a basis.
    assert np.abs(A @ found.vectors - found.vectors * found.values).max() <= 1e3 * EPS * scale
    assert found.converged


SPECTRA = {
    "separated": 0.9 ** np.arange(400),
    "flat": np.linspace(1, 0.5, 400),
    "repeated": np.repeat([3.0, 2.0, 1.0, 0.5], 100),
    "of low rank": np.append(np.arange(1.0, 6.0), np.zeros(395)),
    "of both signs": np.linspace(-2, 1, 400),
    "of many sizes": 10.0 ** -np.linspace(0, 14, 400),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("q", [7, *(pytest.param(q, marks=pytest.mark.slow) for q in (1, 20))])
def test_pairs_are_those_of_lapack(name, q):
    A = with_spectrum(SPECTRA[name])
    found = largest(A, q)
    require_pairs(found, A, q)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["separated", "flat", "of low rank", "of both signs"])
def test_a_basis_that_is_full_goes_on_from_its_best(name):
    A = with_spectrum(SPECTRA[name])
    found = largest(A, 5, held=30, columns=8)
    require_pairs(found, A, 5)


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(3, 10))
@settings(max_examples=30, deadline=None)
def test_pairs_of_any_spectrum_and_block_are_those_of_lapack(seed, q, columns):
    rng = np.random.default_rng(seed)
    A = with_spectrum(rng.choice([0.0, 1.0, -1.0], 90) * rng.exponential(size=90) ** 3 + 1e-3, seed)
    require_pairs(largest(A, q, columns=columns, held=min(4 * (q + columns), 90 - columns)), A, q)


def test_the_lowest_value_that_was_seen_is_no_lower_than_the_lowest_there_is():
    A = with_spectrum(np.linspace(-2, 1, 400))
    found = largest(A, 3)
    assert -2 - 1e-12 <= found.lowest_ritz_value <= -1.9


def test_products_are_counted_and_end_where_they_are_told_to():
    A, calls = with_spectrum(SPECTRA["flat"]), []

    def multiply(V):
        calls.append(V.shape[1])
        return A @ V

    found = lanczos.largest_eigenpairs(multiply, np.random.default_rng(0).normal(size=(400, 10)), 3, max_products=4)
    assert not found.converged
    assert found.n_products == len(calls) == 4
    assert (found.residuals > 0).all()
    residuals = np.linalg.norm(A @ found.vectors - found.vectors * found.values, axis=0)
    np.testing.assert_allclose(found.residuals, residuals, rtol=1e-6)
    sooner = lanczos.largest_eigenpairs(multiply, np.random.default_rng(0).normal(size=(400, 10)), 3, tol=1e-2)
    assert sooner.converged
    assert sooner.n_products < largest(A, 3).n_products
