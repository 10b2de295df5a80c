"""Systems that a factor in tiles solves: as LAPACK does, refined, with the diagonal of the inverse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfm.gram.linear_systems import tiled_direct_solver, tiled_solves
from dkfm.gram.linear_systems.tiled_cholesky import open_tiled_factor
from dkfm.gram.linear_systems.tiled_direct_solver import SystemOptions, solve_system
from dkfm.kernels import Gaussian
from helpers.threads import use_threads


@given(n=st.integers(1, 40), columns=st.integers(1, 4), tile_rows=st.integers(9, 50))
@settings(max_examples=12, deadline=None)
def test_solutions_and_the_diagonal_of_the_inverse_are_those_of_the_dense_matrix(n, columns, tile_rows):
    rng = np.random.default_rng(n)
    X, B = rng.normal(size=(n, 3)), rng.normal(size=(n, columns))
    A = Gaussian(1.5)(X) + 0.01 * np.eye(n)
    with open_tiled_factor(Gaussian(1.5), X, 0.01, tile_rows=tile_rows) as store:
        found, diagonal = tiled_solves.solve(store, B), tiled_solves.compute_inverse_diagonal(store)
    inverse = np.linalg.inv(A)
    bound = 1e-14 * n * np.linalg.cond(A)
    np.testing.assert_allclose(found, inverse @ B, rtol=0, atol=bound * np.abs(inverse @ B).max())
    np.testing.assert_allclose(diagonal, inverse.diagonal(), rtol=bound)


@pytest.mark.slow
def test_panels_of_columns_and_clusters_give_the_same_inverse_diagonal(rng, monkeypatch, threaded_client, tmp_path):
    X = rng.normal(size=(200, 3))
    with open_tiled_factor(Gaussian(1.0), X, 0.1, tile_rows=60, workspace=tmp_path) as store:
        on_cluster = tiled_solves.compute_inverse_diagonal(store)
        use_threads(monkeypatch)
        np.testing.assert_array_equal(tiled_solves.compute_inverse_diagonal(store), on_cluster)
        monkeypatch.setattr(tiled_solves, "PANEL_COLUMNS", 13)
        np.testing.assert_allclose(tiled_solves.compute_inverse_diagonal(store), on_cluster, rtol=1e-11)


@pytest.mark.costly
@pytest.mark.parametrize("weighted", [False, True])
def test_a_solution_is_refined_until_its_residual_is_rounding(rng, weighted, monkeypatch):
    X, B = rng.normal(size=(300, 3)), rng.normal(size=(300, 2))
    weights = rng.uniform(0.1, 5, 300) if weighted else np.ones(300)
    roots = np.sqrt(weights)
    A = roots[:, None] * Gaussian(3.0)(X) * roots + 0.1 * np.eye(300)
    solves = []
    real = tiled_solves.solve

    def solve_inexactly(store, right):
        solves.append(1)
        return real(store, right) * (1 + 1e-6 * rng.normal(size=right.shape))

    monkeypatch.setattr(tiled_direct_solver.tiled_solves, "solve", solve_inexactly)
    found = solve_system(Gaussian(3.0), X, 0.1, weights, B, SystemOptions(tile_rows=100))
    residuals = np.linalg.norm(A @ found.values - B, axis=0) / np.linalg.norm(B, axis=0)
    assert residuals.max() < 1e-12  # unrefined, it is about 1e-4
    np.testing.assert_allclose(found.residuals, residuals, rtol=0.5, atol=1e-13)
    assert 2 <= len(solves) <= 4


def test_right_sides_of_zero_have_solutions_of_zero(rng):
    X = rng.normal(size=(50, 3))
    found = solve_system(Gaussian(1.0), X, 1.0, np.ones(50), np.zeros((50, 2)), SystemOptions(tile_rows=20))
    assert (found.values == 0).all()
    assert (found.residuals == 0).all()
