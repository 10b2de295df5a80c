"""Regressions and discriminants without a Gram matrix in memory: those in memory, planned, and refused with reasons."""

import numpy as np
import pytest

import dkfm
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.estimators.fitting import solvers
from dkfm.estimators.planning import system_plans
from dkfm.execution import memory
from dkfm.gram import build
from dkfm.kernels import Gaussian

WORDS = {"kernel": "rbf", "gamma": 0.3, "tile_rows": 60}
METHODS = ["auto", "tiled", "cg"]


@pytest.fixture
def X(rng):
    return rng.normal(size=(250, 3))


@pytest.fixture
def without_memory(monkeypatch):
    """No room for a Gram matrix."""
    for module in (solvers, system_plans):
        monkeypatch.setattr(module, "has_gram_memory", lambda *given: False)
    monkeypatch.setattr(build, "compute_driver_gram", None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_regression_is_the_one_in_memory(X, rng, method, weighted, request):
    Y, weights = rng.normal(size=(250, 2)), rng.uniform(0.1, 3, 250) if weighted else None
    left_out = method != "cg"
    expected = dkfm.KernelRidge([0.1, 1.0], leave_one_out=left_out, **WORDS).fit(X, Y, sample_weight=weights)
    request.getfixturevalue("without_memory")
    found = dkfm.KernelRidge([0.1, 1.0], leave_one_out=left_out, solver=method, **WORDS)
    found.fit(X, Y, sample_weight=weights)
    np.testing.assert_allclose(found.predict(X), expected.predict(X), rtol=0, atol=1e-8)
    if left_out:
        np.testing.assert_allclose(found.loo_predictions_, expected.loo_predictions_, rtol=0, atol=1e-10)
    assert found.certificate_.error < 1e-9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weighted", [False, True])
def test_discriminants_are_those_in_memory(X, rng, method, weighted, request):
    y, weights = np.digitize(X[:, 0], [-0.5, 0.5]), rng.uniform(0.1, 3, 250) if weighted else None
    expected = dkfm.KernelFisher(priors=[0.2, 0.3, 0.5], **WORDS).fit(X, y, sample_weight=weights)
    request.getfixturevalue("without_memory")
    found = dkfm.KernelFisher(priors=[0.2, 0.3, 0.5], solver=method, **WORDS).fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(found.transform(X), expected.transform(X), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.ratios_, expected.ratios_, rtol=1e-8)
    assert found.ridge_ == pytest.approx(expected.ridge_, rel=1e-12)
    assert found.certificate_.error < 1e-8


def test_a_classifier_takes_tiles_on_a_cluster(X, threaded_client, without_memory, tmp_path):
    labels = np.arange(250) % 3
    found = dkfm.KernelRidgeClassifier(1e-6, solver="tiled", workspace=tmp_path / "work", **WORDS).fit(X, labels)
    assert found.score(X, labels) > 0.9
    assert [path.name.split("-")[0] for path in (tmp_path / "work").iterdir()] == ["factor"]


@pytest.mark.parametrize("estimator", [dkfm.KernelRidge(1.0, **WORDS), dkfm.KernelFisher(**WORDS)])
def test_the_plan_says_which_way_is_taken(X, estimator, request):
    assert dkfm.plan_fit(estimator, X).road == "a Cholesky factor with the Gram matrix in memory"
    request.getfixturevalue("without_memory")
    plan = dkfm.plan_fit(estimator, X)
    assert plan.road == "systems by conjugate gradients, or a Cholesky factor in tiles on disk"
    tiled, gradients = (dkfm.plan_fit(estimator.set_params(solver=solver), X) for solver in ("tiled", "cg"))
    assert tiled.road == "systems by a Cholesky factor in tiles on disk"
    assert (gradients.road, gradients.disk_bytes) == ("systems by conjugate gradients", 0)
    assert plan.seconds >= max(tiled.seconds, 0) > 0
    assert plan.disk_bytes == tiled.disk_bytes == 8 * 60 * 60 * 15
    estimator.set_params(solver="auto")


def test_a_plan_of_many_penalties_counts_their_factors():
    few, many = (dkfm.plan_fit(dkfm.KernelRidge(alpha, kernel="rbf"), (3000, 5)) for alpha in (1.0, [1.0, 2.0, 3.0]))
    assert many.seconds > few.seconds
    by_eigenvalues = dkfm.plan_fit(dkfm.KernelRidgeClassifier("loo", kernel="rbf"), (3000, 5))
    assert by_eigenvalues.road == "all eigenvectors with the Gram matrix in memory"
    assert by_eigenvalues.memory_bytes > few.memory_bytes


def test_tiles_that_do_not_serve_are_refused(X):
    y, K = X[:, 0], Gaussian(1.0)(X)
    for solver in ("tiled", "cg"):
        for parameters in ({"alpha": "loo"}, {"alpha": 1e-15}, {"on_indefinite": "clip"}):
            with pytest.raises(NotSupportedError, match=f'solver="{solver}" is for the Gram matrix of rows'):
                dkfm.KernelRidge(**parameters, kernel=Gaussian(1.0), solver=solver).fit(X, y)
        with pytest.raises(NotSupportedError, match="does not serve for a precomputed kernel"):
            dkfm.KernelRidge(kernel="precomputed", solver=solver).fit(K, y)
        with pytest.raises(NotSupportedError, match="eigenvalues"):
            dkfm.KernelFisher(kernel=Gaussian(1.0), shrinkage="auto", solver=solver).fit(X, y > 0)


@pytest.mark.parametrize(("parameter", "value"), [("solver", "svd"), ("tol", 0), ("tol", 1), ("tol", "small")])
def test_wrong_parameters_are_refused(X, parameter, value):
    with pytest.raises(InvalidInputError, match=f"{parameter} must be"):
        dkfm.KernelRidge(kernel=Gaussian(1.0), **{parameter: value}).fit(X, X[:, 0])


def test_memory_decides_between_a_matrix_and_none(X, monkeypatch):
    from dkfm.estimators.fitting import solvers

    rows = solvers.TrainingRows(Gaussian(1.0), X, 3)
    assert solvers.choose_solver(rows, "auto", False, "KernelRidge") == "dense"
    monkeypatch.setattr(memory, "available_memory", lambda: 10**6)
    assert solvers.choose_solver(rows, "auto", False, "KernelRidge") == "auto"
