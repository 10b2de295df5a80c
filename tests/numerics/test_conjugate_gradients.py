"""Conjugate gradients: the solution of each system, the residual that it says, and when they give up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.numerics.conjugate_gradients import solve_by_conjugate_gradients


def matrix(rng, values):
    Q = np.linalg.qr(rng.normal(size=(len(values), len(values)))).Q
    return (Q * values) @ Q.T


def identity(V):
    return V


@given(n=st.integers(1, 30), columns=st.integers(1, 4), condition=st.sampled_from([1.0, 1e3, 1e6]))
def test_the_solutions_solve_their_systems_as_the_residuals_say(n, columns, condition):
    rng = np.random.default_rng(n)
    A, B = matrix(rng, np.geomspace(1, condition, n)), rng.normal(size=(n, columns))
    found = solve_by_conjugate_gradients(A.__matmul__, identity, B, 1e-8, 500)
    residuals = np.linalg.norm(A @ found.values - B, axis=0) / np.linalg.norm(B, axis=0)
    assert found.converged
    assert residuals.max() <= 1e-8
    np.testing.assert_allclose(found.relative_residuals, residuals, rtol=1e-3, atol=1e-14 * condition)


def test_an_inverse_as_preconditioner_needs_one_product_and_the_one_that_measures(rng):
    A, B = matrix(rng, np.geomspace(1e-3, 1e3, 40)), rng.normal(size=(40, 3))
    found = solve_by_conjugate_gradients(A.__matmul__, np.linalg.inv(A).__matmul__, B, 1e-6, 500)
    assert (found.n_products, found.converged) == (2, True)
    assert solve_by_conjugate_gradients(A.__matmul__, identity, B, 1e-6, 500).n_products > 40


def test_each_product_of_the_recurrence_reports_its_residual(rng):
    A, B, told = matrix(rng, np.geomspace(1, 1e3, 40)), rng.normal(size=(40, 2)), []
    found = solve_by_conjugate_gradients(A.__matmul__, identity, B, 1e-8, 500, told.append)
    assert len(told) == found.n_products - 1  # and one that measures
    assert told[-1] == pytest.approx(found.relative_residuals.max(), rel=1e-3)
    assert told[-1] <= 1e-8 < min(told[:-1])


def test_right_sides_of_zero_and_solved_ones_stay_as_they_are(rng):
    A = matrix(rng, np.geomspace(1, 100, 30))
    B = np.column_stack([np.zeros(30), A @ np.eye(30)[:, 0], rng.normal(size=30)])
    found = solve_by_conjugate_gradients(A.__matmul__, identity, B, 1e-12, 500)
    assert found.converged
    assert (found.values[:, 0] == 0).all()
    np.testing.assert_allclose(found.values[:, 1], np.eye(30)[:, 0], atol=1e-10)
    assert solve_by_conjugate_gradients(A.__matmul__, identity, np.zeros((30, 2)), 1e-12, 500).n_products == 0


def test_a_recurrence_that_drifts_starts_again_from_the_true_residual(rng):
    A, B = matrix(rng, np.geomspace(1, 1e3, 60)), rng.normal(size=(60, 1))
    found = solve_by_conjugate_gradients(
        lambda V: A @ V * (1 + 1e-7 * rng.normal(size=V.shape)), identity, B, 1e-6, 900
    )
    assert found.converged


@pytest.mark.parametrize("limit", [12, 40])
def test_more_products_than_allowed_are_never_taken_and_hopeless_ones_not_begun(rng, limit):
    A, B = matrix(rng, np.geomspace(1, 1e9, 400)), rng.normal(size=(400, 1))
    found = solve_by_conjugate_gradients(A.__matmul__, identity, B, 1e-10, limit)
    assert not found.converged
    assert found.n_products <= limit / 4 + 2


def test_an_indefinite_matrix_ends_without_a_solution(rng):
    A, B = matrix(rng, np.linspace(-1, 1, 40)), rng.normal(size=(40, 2))
    found = solve_by_conjugate_gradients(A.__matmul__, identity, B, 1e-10, 40)
    assert not found.converged
    assert np.isfinite(found.values).all()
