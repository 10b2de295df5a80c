"""Plans of fits: they name the method that the fit takes, and what it needs in memory and on disk."""

import json

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.kernel_ridge import KernelRidge as Theirs

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.core import budget, cpus
from dkfm.core.display.quantities import format_seconds
from dkfm.errors import BudgetError, InvalidInputError, KernelError, NotSupportedError
from dkfm.estimators.fitting import pca
from dkfm.execution import memory
from dkfm.gram import build, product_costs
from dkfm.numerics import kernel_components, pivoted_cholesky

GAUSSIAN = kernels.Gaussian(2.0)


@pytest.fixture
def steps(monkeypatch):
    """Names of the numerical steps that a fit takes."""
    taken = []

    def watch(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: taken.append(name) or original(*a, **k))

    watch(kernel_components, "solve_components_by_eigh")
    watch(kernel_components, "solve_leading_components")
    watch(pivoted_cholesky, "factor_gram")
    watch(pivoted_cholesky, "factor_columns")
    watch(build, "build_gram")
    return taken


@pytest.mark.parametrize(
    ("estimator", "n", "method", "step"),
    [
        (dkfm.KernelPCA(2, kernel=GAUSSIAN), 1500, "2 eigenvectors by products", "solve_leading_components"),
        (
            dkfm.KernelPCA(2, kernel=GAUSSIAN),
            100,
            "2 eigenvectors with the Gram matrix in memory",
            "solve_components_by_eigh",
        ),
        (dkfm.KernelPCA(0.9, kernel=GAUSSIAN), 1500, "all eigenvectors", "solve_components_by_eigh"),
        (
            dkfm.KernelPCA(2, kernel=GAUSSIAN, eigen_solver="dense"),
            1500,
            "2 eigenvectors with the Gram matrix in memory",
            "solve_components_by_eigh",
        ),
        (dkfm.ExactFeatureMap(GAUSSIAN, basis="cholesky", build="gram"), 300, "pivots with the Gram", "factor_gram"),
        (
            dkfm.ExactFeatureMap(GAUSSIAN, basis="cholesky", build="columns"),
            300,
            "300 pivots column by column",
            "factor_columns",
        ),
        (
            dkfm.ExactFeatureMap(GAUSSIAN, landmarks="random_pivots", n_landmarks=20),
            300,
            "20 pivots column by column",
            "factor_columns",
        ),
    ],
)
def test_the_method_of_the_plan_is_that_of_the_fit(estimator, n, method, step, steps, rng):
    X = rng.normal(size=(n, 3))
    plan = dkfm.plan_fit(estimator, X)
    assert method in plan.method
    assert steps == []
    estimator.fit(X)
    assert step in steps
    assert (plan.rows, plan.columns, plan.disk_bytes, plan.place, plan.task_bytes) == (n, 3, 0, "", 0)
    assert plan.landmarks >= len(estimator.model_.landmarks)
    assert plan.model_bytes >= estimator.model_.nbytes - 8 * 10 * n


def test_any_form_of_rows_has_the_same_plan(rng, tmp_path):
    X, pca_ = rng.normal(size=(300, 3)), dkfm.KernelPCA(2, kernel=GAUSSIAN)
    np.save(tmp_path / "x.npy", X)
    plans = [
        dkfm.plan_fit(pca_, rows)
        for rows in [X, (300, 3), tmp_path / "x.npy", da.from_array(X, chunks=(100, 3)), X.tolist()]
    ]
    assert {(plan.rows, plan.columns, plan.method, plan.seconds) for plan in plans} == {
        (300, 3, plans[0].method, plans[0].seconds)
    }
    with pytest.raises(InvalidInputError, match="two dimensions of known lengths"):
        dkfm.plan_fit(pca_, X[0])
    with pytest.raises(InvalidInputError, match="takes one of dkfm's ExactFeatureMap"):
        dkfm.plan_fit(GAUSSIAN, X)
    with pytest.raises(InvalidInputError, match="is not known before it is computed"):
        dkfm.plan_fit(pca_, dd.from_pandas(pd.DataFrame(X), npartitions=2))
    with pytest.raises(KernelError, match="near it: gaussian"):
        dkfm.plan_fit(dkfm.ExactFeatureMap("gausian"), X)


def test_the_plan_of_a_fit_in_the_features_of_a_map(rng, tmp_path, client):
    X = rng.normal(size=(500, 3))
    np.save(tmp_path / "x.npy", X)
    phi = dkfm.ExactFeatureMap(GAUSSIAN, basis="cholesky", tol=1e-2, workspace=tmp_path).fit(X)
    here = dkfm.plan_fit(dkfm.KernelPCA(2), X, feature_map=phi)
    assert (here.rows, here.columns, here.landmarks, here.disk_bytes, here.task_bytes) == (500, 3, phi.rank_, 0, 0)
    assert here.model_bytes == 8 * phi.rank_ * (3 + 2)
    for rows in ((10**9, 3), tmp_path / "x.npy"):
        many = dkfm.plan_fit(dkfm.KernelPCA(2), rows, feature_map=phi, client=client)
        assert many.memory_bytes < 10**8  # nothing grows with the rows
        assert (many.place, many.disk_bytes) == (str(tmp_path), 8 * phi.rank_ * (3 + phi.rank_))
        assert many.task_bytes > 0
    for q in (dkfm.KernelPCA(np.int64(2)), dkfm.KernelPCA(400)):
        width = int(q.n_components)
        assert dkfm.plan_fit(q, X, feature_map=phi).model_bytes == 8 * phi.rank_ * (3 + width)
    with_labels = dkfm.plan_fit(dkfm.KernelFisher(), (10**9, 3), feature_map=phi)
    assert with_labels.memory_bytes > 8 * 10**9
    assert with_labels.seconds > 1e5 * here.seconds
    lazy = dkfm.plan_fit(dkfm.KernelRidge(), da.from_array(X), feature_map=phi)
    assert lazy.disk_bytes == 8 * 500 * 3 + many.disk_bytes
    for estimator, rows, feature_map, message in [
        (dkfm.ExactFeatureMap(GAUSSIAN), X, phi, "ExactFeatureMap is not fitted in the features of a map"),
        (Theirs(), X, None, "plan_fit takes one of dkfm's ExactFeatureMap, .* and got KernelRidge"),
        (dkfm.KernelPCA(2), X[:, :2], phi, "X has 2 columns and the map was fitted with 3"),
        (dkfm.KernelPCA(2), X, "map", "feature_map must be an ExactFeatureMap"),
        (dkfm.KernelPCA(0), X, phi, "n_components must be a positive integer"),
        (dkfm.KernelPCA(2), (0, 3), phi, "two positive integers"),
        (dkfm.KernelFisher(shrinkage="auto"), X, phi, "needs a Gram matrix"),
        (dkfm.KernelRidge("loo"), X, phi, "with a Gram matrix"),
        (dkfm.KernelRidge(), X, clone(phi).set_params(centered=True).fit(X), "centered=False"),
    ]:
        with pytest.raises((InvalidInputError, NotSupportedError), match=message):
            dkfm.plan_fit(estimator, rows, feature_map=feature_map)
    with pytest.raises(NotFittedError):
        dkfm.plan_fit(dkfm.KernelPCA(2), X, feature_map=dkfm.ExactFeatureMap(GAUSSIAN))


def test_a_gram_matrix_on_disk_has_its_size_and_place(tmp_path, rng, steps):
    X = rng.normal(size=(150, 3))
    phi = dkfm.ExactFeatureMap(GAUSSIAN, tile_rows=64, workspace=tmp_path / "w")
    plan = dkfm.plan_fit(phi, X)
    assert plan.place == str(tmp_path / "w")
    assert not (tmp_path / "w").exists()
    phi.fit(X)
    assert "build_gram" in steps
    written = sum(file.stat().st_size for file in (tmp_path / "w").rglob("*") if file.is_file())
    assert 0.8 * written < plan.disk_bytes < 1.2 * written
    assert dkfm.plan_fit(phi.set_params(workspace=None), X).disk_bytes == 0


def test_files_of_tiles_take_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cpus, "COUNT", 2)

    def seconds(tile_rows):
        phi = dkfm.ExactFeatureMap(GAUSSIAN, tile_rows=tile_rows, workspace=tmp_path)
        return dkfm.plan_fit(phi, (2000, 3)).seconds

    in_memory = dkfm.plan_fit(dkfm.ExactFeatureMap(GAUSSIAN), (2000, 3)).seconds
    assert seconds(16) > seconds(100) > in_memory


def test_components_of_more_rows_than_memory_holds_are_planned_without_a_matrix(monkeypatch, tmp_path):
    n, q = 40_000, 20
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 4 * 10**9)
    monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: 2e-9)
    plan = dkfm.plan_fit(dkfm.KernelPCA(q, kernel=GAUSSIAN), (n, 50))
    assert plan.method == "20 eigenvectors by products with the Gram matrix computed anew each time"
    assert (plan.disk_bytes, plan.place) == (0, "")
    assert plan.memory_bytes <= 10**9
    assert plan.seconds > dkfm.plan_fit(dkfm.KernelPCA(q, kernel=GAUSSIAN), (n // 2, 50)).seconds
    stored, dense = plan.alternatives
    assert "on disk" in stored.method
    assert stored.disk_bytes > 8 * n * n
    assert "in memory" in dense.method
    assert dense.memory_bytes > 8 * n * n
    assert f"on disk: about {format_seconds(stored.seconds)}, " in str(plan)
    assert json.loads(plan.to_json())["alternatives"][0]["disk_bytes"] == stored.disk_bytes
    kept = dkfm.plan_fit(dkfm.KernelPCA(q, kernel=GAUSSIAN, workspace=tmp_path), (n, 50))
    assert kept.method == "20 eigenvectors by products with the Gram matrix on disk"
    assert kept.place == str(tmp_path)
    with pytest.raises(BudgetError, match="A fit of 30,000 rows needs"):
        dkfm.plan_fit(dkfm.KernelPCA(kernel=GAUSSIAN), (30_000, 50)).require()


def test_a_plan_of_rows_counts_the_products_of_some_of_them(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(cpus, "COUNT", 2)
    monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: 1e-10)  # the products count
    easy, hard = rng.normal(size=(9000, 2)), rng.normal(size=(9000, 60))
    np.save(tmp_path / "x.npy", hard)
    pca_ = dkfm.KernelPCA(5, kernel=kernels.Gaussian(6.0))
    assert dkfm.plan_fit(pca_, hard).seconds > 1.2 * dkfm.plan_fit(pca_, (9000, 60)).seconds
    assert dkfm.plan_fit(pca_, easy).seconds < dkfm.plan_fit(pca_, (9000, 2)).seconds
    assert "products" in dkfm.plan_fit(pca_, tmp_path / "x.npy").method


def test_a_plan_of_predictions_of_left_out_rows_adds_the_inverse_of_the_factor_and_no_kernel_values(monkeypatch):
    monkeypatch.setattr(product_costs, "multiplication_seconds", lambda: 5e-11)

    def added(value):
        monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: value)
        one, other = (dkfm.KernelRidge(kernel=GAUSSIAN, solver="tiled", leave_one_out=left) for left in (False, True))
        return dkfm.plan_fit(other, (50_000, 10)).seconds - dkfm.plan_fit(one, (50_000, 10)).seconds

    for value in (1e-9, 1e-6):
        assert added(value) == pytest.approx(product_costs.factor_seconds(50_000, cpus.COUNT))


@pytest.mark.parametrize(("shrinkage", "squares"), [(1e-3, 1), ("auto", budget.EIGENVECTOR_SQUARES)])
def test_discriminants_need_a_square_or_those_of_eigenvectors(shrinkage, squares):
    plan = dkfm.plan_fit(dkfm.KernelFisher(kernel=GAUSSIAN, shrinkage=shrinkage), (5000, 10))
    assert plan.memory_bytes == budget.fit_bytes(5000, 10, GAUSSIAN.peak_blocks, GAUSSIAN.landmark_copies, squares)


@pytest.mark.parametrize(
    "estimator",
    [
        dkfm.ExactFeatureMap(GAUSSIAN),
        dkfm.ExactFeatureMap(GAUSSIAN, landmarks="uniform", n_landmarks=40_000),
        dkfm.KernelPCA(kernel=GAUSSIAN),
        dkfm.KernelPCA(5, kernel=GAUSSIAN, eigen_solver="dense"),
        dkfm.KernelFisher(kernel=GAUSSIAN, shrinkage="auto"),
        dkfm.KernelRidge("loo", kernel=GAUSSIAN),
    ],
    ids=repr,
)
def test_a_plan_refuses_eigenvectors_that_lapack_does_not_compute_as_the_fit_does(estimator):
    X = np.zeros((40_000, 1))
    with pytest.raises(BudgetError, match=r"N = 40000 training rows is beyond LAPACK's 32765") as planned:
        dkfm.plan_fit(estimator, X)
    with pytest.raises(BudgetError) as fitted:
        clone(estimator).fit(*((X, np.arange(40_000) % 2) if hasattr(estimator, "predict") else (X,)))
    assert str(planned.value) == str(fitted.value)


def test_pivots_of_many_rows_may_be_few_enough_for_eigenvectors():
    X = (np.arange(40_000) % 3)[:, np.newaxis].astype(float)
    phi = dkfm.ExactFeatureMap(GAUSSIAN, landmarks="pivots")
    assert "then eigenvectors" in dkfm.plan_fit(phi, X).method
    assert phi.fit(X).rank_ == 3


def test_a_numpy_integer_is_a_number_of_components():
    plans = [dkfm.plan_fit(dkfm.KernelPCA(q, kernel=GAUSSIAN), (40_000, 3)) for q in (5, np.int64(5))]
    assert plans[0].method == plans[1].method
    assert plans[0].model_bytes == plans[1].model_bytes


def test_on_a_cluster_a_matrix_of_several_tiles_is_on_disk_and_tasks_have_a_size(client):
    plan = dkfm.plan_fit(dkfm.KernelPCA(kernel=GAUSSIAN), (5000, 10), client=client)
    assert plan.disk_bytes > 8 * 5000**2
    assert plan.task_bytes == budget.gram_task_bytes(2048, 10, GAUSSIAN.peak_blocks, GAUSSIAN.landmark_copies)
    assert "on a worker" in str(plan)


def test_a_precomputed_matrix_is_not_computed_again(rng):
    K = GAUSSIAN(rng.normal(size=(300, 3)))
    plan, own = dkfm.plan_fit(dkfm.KernelPCA(kernel="precomputed"), K), dkfm.plan_fit(dkfm.KernelPCA(), (300, 1))
    assert (plan.rows, plan.columns, plan.memory_bytes) == (300, 300, own.memory_bytes)
    assert plan.seconds < own.seconds


def test_the_plan_and_the_fit_ask_the_same_functions(monkeypatch, rng):
    monkeypatch.setattr(pca, "uses_lanczos", lambda n, q, solver, fits: True)
    assert "by products" in dkfm.plan_fit(dkfm.KernelPCA(2, kernel=GAUSSIAN), (100, 3)).method


@pytest.fixture
def run(tmp_path, rng, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", rng.normal(size=(120, 3)))
    return lambda line: CliRunner().invoke(main, ["fit", "rows.npy", "model", *line.split()])


def test_the_command_prints_the_plan_and_writes_nothing(run, tmp_path):
    shown = run("--kernel gaussian --components 2 --dry-run")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        "rows",
        "method",
        "memory",
        "disk",
        "model",
        "time",
    ]
    plan = json.loads(run("--kernel gaussian:sigma=2 --components 2 --dry-run --json -q").stdout)
    assert plan == json.loads(dkfm.plan_fit(dkfm.KernelPCA(2, kernel=GAUSSIAN), (120, 3)).to_json()) | {
        "available_bytes": plan["available_bytes"]
    }
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_a_plan_that_does_not_fit_ends_with_1_after_it_was_printed(run, monkeypatch):
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 1000)
    ended = run("--kernel gaussian --dry-run")
    assert ended.exit_code == 1
    assert "BudgetError: A fit of 120 rows needs" in ended.stderr
    assert "method" in ended.stdout
    failure = json.loads(run("--kernel gaussian --dry-run --json").stdout)
    assert failure["error"] == "BudgetError"


class SlowGaussian(kernels.Gaussian):
    """A Gaussian whose values are said to take a millisecond each."""

    def estimate_extra_value_seconds(self, d):
        return 1e-3


@pytest.mark.parametrize(
    ("estimator", "values"),
    [
        (
            dkfm.ExactFeatureMap(GAUSSIAN, basis="cholesky", landmarks="pivots", n_landmarks=50, build="columns"),
            400 * 50,
        ),
        (
            dkfm.ExactFeatureMap(GAUSSIAN, landmarks="uniform", n_landmarks=50),
            (50 * 50 / 2 + 50 * 50 + 400 * 50) / 2,
        ),
        (dkfm.KernelPCA(3, eigen_solver="dense"), 400 * 400 / 2 + 400 * 400 / 2),
        (dkfm.KernelPCA(3, eigen_solver="randomized"), 400 * 400 / 2),
        (dkfm.KernelPCA(3), 400 * 50 / 2),
    ],
    ids=["columns", "residuals of all rows", "a Gram matrix and a certificate", "certificate", "a pass through a map"],
)
def test_plans_count_the_seconds_of_slow_kernels(estimator, values, rng, request, monkeypatch):
    monkeypatch.setattr(cpus, "COUNT", 2)
    X, plans = rng.normal(size=(400, 3)), []
    for kernel in (kernels.Gaussian(2.0), SlowGaussian(2.0)):
        if request.node.callspec.id == "a pass through a map":
            phi = dkfm.ExactFeatureMap(kernel, basis="cholesky").fit(X[:50])
            plans.append(dkfm.plan_fit(estimator, X, feature_map=phi))
        else:
            plans.append(dkfm.plan_fit(clone(estimator).set_params(kernel=kernel), X))
    simple, slow = plans
    assert slow.method == simple.method
    assert slow.seconds - simple.seconds == pytest.approx(1e-3 * values, rel=0.1)
