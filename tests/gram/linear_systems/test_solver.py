"""Which method solves a system: conjugate gradients where they are faster, else a factor; both the same."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from dkfm.errors import BudgetError, ConvergenceError, DamagedStoreError, NotPSDError
from dkfm.execution import memory
from dkfm.gram.linear_systems import iterative_solver, solver, tiled_direct_solver
from dkfm.gram.linear_systems.iterative_solver import IterativeSolver, count_pivots, preconditioner_bytes
from dkfm.gram.linear_systems.solver import SystemSolver
from dkfm.gram.linear_systems.tiled_direct_solver import SystemOptions
from dkfm.kernels import Function, Gaussian

KERNEL = Gaussian(2.0)
OPTIONS = SystemOptions(tile_rows=100)


@pytest.fixture
def system(rng):
    X, B, weights = rng.normal(size=(300, 3)), rng.normal(size=(300, 2)), rng.uniform(0.5, 2, 300)
    roots = np.sqrt(weights)
    return X, weights, B, roots[:, None] * KERNEL(X) * roots + 0.1 * np.eye(300)


@pytest.mark.costly
@pytest.mark.parametrize("method", ["auto", "tiled", "cg"])
@pytest.mark.parametrize("as_rows", [np.asarray, csr_array])
def test_each_method_solves_the_system(system, method, as_rows):
    X, weights, B, A = system
    found = SystemSolver(KERNEL, as_rows(X), weights, method, OPTIONS).solve(0.1, B)
    residuals = np.linalg.norm(A @ found.values - B, axis=0) / np.linalg.norm(B, axis=0)
    assert residuals.max() <= 1e-10
    np.testing.assert_allclose(found.residuals, residuals, rtol=0.1, atol=1e-12)


@pytest.mark.slow
def test_auto_takes_gradients_that_converge_and_a_factor_where_they_do_not(system, monkeypatch):
    X, weights, B, A = system
    monkeypatch.setattr(iterative_solver, "count_affordable_products", lambda *given: 100)
    with monkeypatch.context() as patch:
        patch.setattr(tiled_direct_solver, "solve_system", None)
        found = SystemSolver(KERNEL, X, weights, "auto", OPTIONS).solve(0.1, B)
        np.testing.assert_allclose(A @ found.values, B, atol=1e-8)
    monkeypatch.setattr(iterative_solver, "count_pivots", lambda n: 1)
    monkeypatch.setattr(iterative_solver, "count_affordable_products", lambda *given: 16)
    hard = SystemSolver(KERNEL, X, weights, "auto", OPTIONS).solve(1e-3, B)
    assert hard.residuals.max() <= 1e-10  # of the factor; gradients stop far above


@pytest.mark.costly
@pytest.mark.parametrize("reason", ["few products", "no memory", "inverse"])
def test_auto_does_not_try_gradients_without_time_or_memory_or_for_an_inverse(system, monkeypatch, reason):
    X, weights, B, A = system
    monkeypatch.setattr(
        iterative_solver, "count_affordable_products", lambda *given: 15 if reason == "few products" else 1000
    )
    monkeypatch.setattr(solver, "IterativeSolver", None)
    if reason == "no memory":
        monkeypatch.setattr(iterative_solver, "preconditioner_bytes", lambda n: 10**15)
    found = SystemSolver(KERNEL, X, weights, "auto", OPTIONS).solve(0.1, B, inverse_diagonal=reason == "inverse")
    if reason == "inverse":
        np.testing.assert_allclose(found.inverse_diagonal, np.linalg.inv(A).diagonal(), rtol=1e-9)


@pytest.mark.parametrize("pair", [(0, 0), (2, 0), (2, 2)])
@pytest.mark.parametrize("changed", ["alpha", "a row"])
def test_a_tile_of_another_factor_is_found(system, tmp_path, pair, changed):
    X, weights, B, _ = system
    other, alpha = X.copy(), 0.1
    if changed == "alpha":
        alpha *= 1 + 1e-6
    else:
        other[pair[1] * 100] += 1e-6

    def solve(X, alpha, folder):
        options = SystemOptions(tile_rows=100, workspace=tmp_path / folder)
        return SystemSolver(KERNEL, X, weights, "tiled", options).solve(alpha, B)

    truth = solve(X, 0.1, "mine").values
    np.testing.assert_array_equal(solve(X, 0.1, "mine").values, truth)  # from the kept factor
    solve(other, alpha, "theirs")
    mine, theirs = (next((tmp_path / name).glob("factor-*")) for name in ("mine", "theirs"))
    name = f"factor/c/{pair[0]}/{pair[1]}"
    (mine / name).write_bytes((theirs / name).read_bytes())
    with pytest.raises(DamagedStoreError, match=r"factor-.* does not hold the factor of this matrix; delete it"):
        solve(X, 0.1, "mine")


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 10.0])
def test_a_kept_factor_of_any_scale_and_condition_is_that_of_its_matrix(rng, tmp_path, scale, alpha):
    X, weights = rng.normal(size=(200, 2)) + 1e3, rng.uniform(1e-6, 1.0, 200) ** 3
    options = SystemOptions(tile_rows=64, workspace=tmp_path)
    found = SystemSolver(scale * Gaussian(5.0), X, weights, "tiled", options).solve(
        scale * alpha, rng.normal(size=(200, 2))
    )
    assert np.isfinite(found.values).all()


def test_gradients_that_do_not_converge_or_fit_say_so(system, monkeypatch):
    X, weights, B, _ = system
    monkeypatch.setattr(solver, "_MAX_PRODUCTS", 40)
    with pytest.raises(ConvergenceError, match=r"stopped at a residual of .*, above tol = 1e-16"):
        SystemSolver(KERNEL, X, weights, "cg", SystemOptions(tol=1e-16)).solve(1e-6, B)
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 1000)
    with pytest.raises(BudgetError, match=r"The preconditioner of N = 300 training rows needs"):
        SystemSolver(KERNEL, X, weights, "cg", OPTIONS).solve(0.1, B)


@pytest.mark.slow
def test_an_indefinite_matrix_is_found_by_both(rng, monkeypatch):
    monkeypatch.setattr(solver, "_MAX_PRODUCTS", 40)
    X, B = rng.normal(size=(200, 3)), rng.normal(size=(200, 1))
    kernel = Function(lambda X, Y: X @ Y.T - 3.0 * np.outer(X[:, 0], Y[:, 0]))
    with pytest.raises(ConvergenceError):
        SystemSolver(kernel, X, np.ones(200), "cg", OPTIONS).solve(1.0, B)
    with pytest.raises(NotPSDError):
        SystemSolver(kernel, X, np.ones(200), "auto", OPTIONS).solve(1.0, B)


@pytest.mark.slow
def test_pivots_leave_few_products(rng):
    X, B = rng.normal(size=(1000, 2)), rng.normal(size=(1000, 1))
    found, converged = IterativeSolver(KERNEL, X, np.ones(1000), OPTIONS).solve(1e-3, B, 1e-10, 20)
    assert converged
    assert found.residuals.max() <= 1e-10


@pytest.mark.slow
def test_the_features_take_the_memory_that_is_predicted(rng):
    import tracemalloc

    X = rng.normal(size=(4000, 8))
    IterativeSolver(KERNEL, X[:200], np.ones(200), OPTIONS)
    tracemalloc.start()
    IterativeSolver(KERNEL, X, np.ones(4000), OPTIONS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count_pivots(4000) == 500
    assert 2 / 3 * preconditioner_bytes(4000) < peak <= preconditioner_bytes(4000)
