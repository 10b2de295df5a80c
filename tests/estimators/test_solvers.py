"""Regressions and discriminants without a Gram matrix in memory: those in memory, planned, and refused with reasons."""

import numpy as np
import pytest
from sklearn.base import clone

import dkfm
from dkfm.core import cpus
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.estimators.fitting import solver_choice
from dkfm.estimators.planning import linear_system_plans
from dkfm.execution import memory
from dkfm.gram import build, product_costs
from dkfm.kernels import Function, Gaussian, NegativeSquaredDistance

WORDS = {"kernel": "rbf", "gamma": 0.3, "tile_rows": 60}
METHODS = ["auto", "tiled", "cg"]


@pytest.fixture
def X(rng):
    return rng.normal(size=(250, 3))


@pytest.fixture
def without_memory(monkeypatch):
    """No room for a Gram matrix."""
    for module in (solver_choice, linear_system_plans):
        monkeypatch.setattr(module, "has_gram_memory", lambda *given: False)
    monkeypatch.setattr(build, "compute_driver_gram", None)


@pytest.fixture
def machine(monkeypatch):
    """Two cores, which take 2 ns for a kernel value and 0.05 ns for a multiplication, and 40 GB of free memory."""
    monkeypatch.setattr(cpus, "COUNT", 2)
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 40 * 10**9)
    monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: 2e-9)
    monkeypatch.setattr(product_costs, "multiplication_seconds", lambda: 5e-11)


@pytest.mark.costly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_regression_is_the_one_in_memory(X, rng, method, weighted, request):
    Y, weights = rng.normal(size=(250, 2)), rng.uniform(0.1, 3, 250) if weighted else None
    left_out = method == "tiled"
    expected = dkfm.KernelRidge([0.1, 1.0], leave_one_out=left_out, **WORDS).fit(X, Y, sample_weight=weights)
    request.getfixturevalue("without_memory")
    found = dkfm.KernelRidge([0.1, 1.0], leave_one_out=left_out, solver=method, **WORDS)
    found.fit(X, Y, sample_weight=weights)
    np.testing.assert_allclose(found.predict(X), expected.predict(X), rtol=0, atol=1e-8)
    if left_out:
        np.testing.assert_allclose(found.loo_predictions_, expected.loo_predictions_, rtol=0, atol=1e-10)
    assert found.certificate_.error < 1e-9


@pytest.mark.costly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_discriminants_are_those_in_memory(X, rng, method, weighted, request):
    y, weights = np.digitize(X[:, 0], [-0.5, 0.5]), rng.uniform(0.1, 3, 250) if weighted else None
    expected = dkfm.KernelFisher(priors=[0.2, 0.3, 0.5], **WORDS).fit(X, y, sample_weight=weights)
    request.getfixturevalue("without_memory")
    found = dkfm.KernelFisher(priors=[0.2, 0.3, 0.5], solver=method, **WORDS).fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(found.transform(X), expected.transform(X), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.ratios_, expected.ratios_, rtol=1e-8)
    assert found.ridge_ == pytest.approx(expected.ridge_, rel=1e-12)
    assert found.certificate_.error < 1e-8


@pytest.mark.slow
def test_a_classifier_takes_tiles_on_a_cluster(X, threaded_client, without_memory, tmp_path):
    labels = np.arange(250) % 3
    found = dkfm.KernelRidgeClassifier(1e-6, solver="tiled", workspace=tmp_path / "work", **WORDS).fit(X, labels)
    assert found.score(X, labels) > 0.9
    assert [path.name.split("-")[0] for path in (tmp_path / "work").iterdir()] == ["factor"]


@pytest.mark.parametrize("estimator", [dkfm.KernelRidge(1.0, **WORDS), dkfm.KernelFisher(**WORDS)])
def test_the_plan_says_which_way_is_taken(X, estimator, request):
    assert dkfm.plan_fit(estimator, X).method == "a Cholesky factor with the Gram matrix in memory"
    request.getfixturevalue("without_memory")
    plan = dkfm.plan_fit(estimator, X)
    assert plan.method == "systems by conjugate gradients, or a Cholesky factor in tiles on disk"
    tiled, gradients = (dkfm.plan_fit(estimator.set_params(solver=solver), X) for solver in ("tiled", "cg"))
    assert tiled.method == "systems by a Cholesky factor in tiles on disk"
    assert gradients.method.startswith(
        "systems by conjugate gradients, if some 30 products are enough (a small penalty"
    )
    assert gradients.disk_bytes == 0
    assert plan.seconds >= max(tiled.seconds, 0) > 0
    assert plan.disk_bytes == tiled.disk_bytes == 8 * 60 * 60 * 15
    estimator.set_params(solver="auto")


@pytest.mark.parametrize("estimator", [dkfm.KernelRidge(1.0, kernel="rbf"), dkfm.KernelFisher(kernel="rbf")])
def test_a_plan_of_many_rows_names_conjugate_gradients_if_they_save_time(estimator, machine, monkeypatch):
    shape = (25_000, 10)
    plan, by_gradients = (dkfm.plan_fit(clone(estimator).set_params(solver=s), shape) for s in ("auto", "cg"))
    (other,) = plan.alternatives
    assert other.method == f'with solver="cg", {by_gradients.method}'
    assert other.memory_bytes == by_gradients.memory_bytes < plan.memory_bytes
    assert other.model_bytes == by_gradients.model_bytes == plan.model_bytes
    assert other.seconds == by_gradients.seconds < plan.seconds
    assert 'or      with solver="cg", systems by ' in str(plan)
    assert dkfm.plan_fit(clone(estimator).set_params(solver="dense"), shape).alternatives == ()
    monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: 1e-7)
    assert dkfm.plan_fit(estimator, shape).alternatives == ()


@pytest.mark.parametrize(
    ("estimator", "classes"),
    [
        (dkfm.KernelRidge(1.0, kernel="rbf"), 0),
        (dkfm.KernelRidge("loo", kernel="rbf"), 0),
        (dkfm.KernelRidge(1.0, kernel="rbf", leave_one_out=True), 0),
        (dkfm.KernelRidgeClassifier(1.0, kernel="rbf"), 10),
        (dkfm.KernelFisher(kernel="rbf"), 10),
        (dkfm.KernelFisher(2, kernel="rbf"), 10),
        (dkfm.KernelPCA(2, kernel="rbf", eigen_solver="arpack"), 0),
        (dkfm.KernelPCA(40, kernel="rbf", eigen_solver="dense"), 0),
    ],
    ids=repr,
)
def test_the_model_of_a_plan_is_as_large_as_the_saved_one(estimator, classes, rng, tmp_path):
    X = rng.normal(size=(1000, 10))
    y = np.arange(1000) % classes if classes else X[:, 0]
    clone(estimator).fit(X, y).save(tmp_path / "m")
    values = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and "c" in path.parts)
    # A column is 8,000 bytes. Eigenvalues, offsets and checksums are not planned.
    assert 0 <= values - dkfm.plan_fit(estimator, X).model_bytes < 2000


def never_called(X, Y):
    raise AssertionError("a plan called the user's kernel")


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"alpha": "loo"}, (25_000, 10)),
        ({"leave_one_out": True}, (25_000, 10)),
        ({"alpha": 1e-4}, (25_000, 10)),
        ({"kernel": NegativeSquaredDistance()}, (25_000, 10)),
        ({"kernel": Function(never_called)}, (25_000, 10)),
        ({}, (4000, 10)),
        ({}, (25_000, 1000)),
    ],
)
def test_a_plan_names_no_way_that_does_not_serve(options, shape, machine, monkeypatch):
    monkeypatch.setattr(product_costs, "value_seconds", None)
    assert dkfm.plan_fit(dkfm.KernelRidge(1.0, kernel="rbf").set_params(**options), shape).alternatives == ()


def test_a_penalty_is_small_beside_the_values_of_the_kernel(rng, machine):
    X = rng.normal(size=(25_000, 2))
    for scale, count in ((1.0, 1), (1e4, 0)):
        plan = dkfm.plan_fit(dkfm.KernelRidge(1.0, kernel=scale * Gaussian(0.3)), X)
        assert len(plan.alternatives) == count
    assert dkfm.plan_fit(dkfm.KernelRidge(1.0, kernel=Function(never_called)), X).alternatives == ()


def test_a_plan_of_many_penalties_counts_their_factors():
    few, many = (dkfm.plan_fit(dkfm.KernelRidge(alpha, kernel="rbf"), (3000, 5)) for alpha in (1.0, [1.0, 2.0, 3.0]))
    assert many.seconds > few.seconds
    by_eigenvalues = dkfm.plan_fit(dkfm.KernelRidgeClassifier("loo", kernel="rbf"), (3000, 5))
    assert by_eigenvalues.method == "all eigenvectors with the Gram matrix in memory"
    assert by_eigenvalues.memory_bytes > few.memory_bytes


def test_tiles_that_do_not_serve_are_refused(X):
    y, K = X[:, 0], Gaussian(1.0)(X)
    for solver in ("tiled", "cg"):
        for parameters, reason in (
            ({"alpha": "loo"}, 'alpha="loo" needs eigenvalues'),
            ({"alpha": 1e-15}, r"alpha = 1.0e-15 is not above rounding"),
            ({"on_indefinite": "clip"}, 'on_indefinite="clip" drops eigenvalues'),
        ):
            with pytest.raises(
                NotSupportedError, match=f'solver="{solver}" has no Gram matrix in memory, and {reason}'
            ):
                dkfm.KernelRidge(**parameters, kernel=Gaussian(1.0), solver=solver).fit(X, y)
            if "alpha" not in parameters or parameters["alpha"] == "loo":
                with pytest.raises(NotSupportedError, match=reason):
                    dkfm.plan_fit(dkfm.KernelRidge(**parameters, kernel=Gaussian(1.0), solver=solver), X)
        with pytest.raises(NotSupportedError, match="a precomputed kernel has no rows"):
            dkfm.KernelRidge(kernel="precomputed", solver=solver).fit(K, y)
        for kernel, shrinkage in ((Gaussian(1.0), "auto"), (NegativeSquaredDistance(), 1e-3)):
            with pytest.raises(NotSupportedError, match=r"eigenvalues|only after centring"):
                dkfm.KernelFisher(kernel=kernel, shrinkage=shrinkage, solver=solver).fit(X, y > 0)
    with pytest.raises(InvalidInputError, match='solver="cg" has no inverse'):
        dkfm.KernelRidge(kernel=Gaussian(1.0), solver="cg", leave_one_out=True).fit(X, y)


def test_discriminants_far_from_the_origin_are_refused_where_systems_would_lose_them(X, rng):
    y = X[:, 0] > 0
    near = dkfm.KernelFisher(solver="tiled", shrinkage=1e-2).fit(X + 10, y)
    np.testing.assert_allclose(
        near.transform(X + 10), dkfm.KernelFisher(shrinkage=1e-2).fit(X + 10, y).transform(X + 10), atol=1e-5
    )
    with pytest.raises(InvalidInputError, match="hardly above rounding beside the square of the mean"):
        dkfm.KernelFisher(solver="tiled", shrinkage=1e-2).fit(X + 1e5, y)


@pytest.mark.costly
@pytest.mark.parametrize("factor", [1.01, 4.0, 64.0])
def test_near_rounding_tiles_are_as_exact_as_the_matrix_in_memory(rng, factor):
    X = rng.normal(size=(600, 3))
    alpha, certificates = factor * 4 * np.finfo(float).eps * 600, []
    for solver in ("dense", "tiled"):
        model = dkfm.KernelRidge(alpha, kernel=Gaussian(3.0), solver=solver, tile_rows=150).fit(X, np.sin(X[:, 0]))
        certificates.append(model.certificate_.error)
    assert certificates[1] <= 10 * certificates[0]


def test_the_plan_counts_the_inverse_and_the_factor_of_each_penalty(tmp_path, machine):
    def plan(alpha=1.0, **options):
        return dkfm.plan_fit(dkfm.KernelRidge(alpha, kernel="rbf", solver="tiled", **options), (100_000, 50))

    assert plan(leave_one_out=True).memory_bytes > plan().memory_bytes
    assert plan(leave_one_out=True).seconds > 1.5 * plan().seconds
    assert plan([1.0, 2.0]).disk_bytes == plan().disk_bytes
    assert plan([1.0, 2.0], workspace=tmp_path).disk_bytes == 2 * plan(workspace=tmp_path).disk_bytes


@pytest.mark.parametrize(("parameter", "value"), [("solver", "svd"), ("tol", 0), ("tol", 1), ("tol", "small")])
def test_wrong_parameters_are_refused(X, parameter, value):
    with pytest.raises(InvalidInputError, match=f"{parameter} must be"):
        dkfm.KernelRidge(kernel=Gaussian(1.0), **{parameter: value}).fit(X, X[:, 0])


def test_memory_decides_between_a_matrix_and_none(X, monkeypatch):

    rows = solver_choice.TrainingRows(Gaussian(1.0), X, 3)
    assert solver_choice.choose_solver(rows, "auto", "", "KernelRidge") == "dense"
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 10**6)
    assert solver_choice.choose_solver(rows, "auto", "", "KernelRidge") == "auto"
