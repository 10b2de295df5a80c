"""Fits to rows where they are stored: the maps of the same rows in memory, tile by tile, and nothing if they change."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client
from sklearn.base import clone

import dkfm
from dkfm import ExactFeatureMap, KernelFisher, KernelPCA, kernels
from dkfm.cli.app import main
from dkfm.core import cpus
from dkfm.errors import BudgetError, InvalidInputError, NotSupportedError
from dkfm.estimators.fitting import out_of_core_rows
from dkfm.execution import executors, memory
from dkfm.gram import row_passes, streamed_rows
from helpers.harness import left

K = kernels.Gaussian(2.0)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(row_passes, "PASS_TILE_ROWS", 100)
    monkeypatch.setattr(streamed_rows, "_TILE_VALUES", 200)


@pytest.fixture
def stored(tmp_path, rng):
    """Rows, and how they are stored."""
    X = rng.normal(size=(700, 3))
    np.save(tmp_path / "x.npy", X)
    array = zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(90, 3))
    pd.DataFrame(X, columns=["a", "b", "c"]).to_parquet(tmp_path / "x.parquet")
    return X, [tmp_path / "x.npy", str(tmp_path / "x.zarr"), array, tmp_path / "x.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tol": 1e-3}, {"centered": True}, {"landmarks": "pivots", "n_landmarks": 40}])
def test_any_form_gives_a_map_as_exact_as_that_of_memory(options, stored, rng):
    X, forms = stored
    Z, truth = rng.normal(size=(50, 3)), ExactFeatureMap(K, basis="cholesky", **options).fit(X)
    found = [ExactFeatureMap(K, basis="cholesky", **options).fit(form) for form in forms]
    for phi, form in zip(found, forms, strict=True):
        rows = phi_frame(X) if str(form).endswith(".parquet") else X
        points = phi_frame(Z) if str(form).endswith(".parquet") else Z
        assert phi.rank_ <= 1.15 * truth.rank_
        assert phi.error_bound_ <= max(options.get("tol", 0.0), 2 * truth.error_bound_)
        if "centered" not in options:
            errors = np.abs(phi.transform(rows) @ phi.transform(points).T - K(X, Z))
            assert errors.max() <= phi.error_bound_
        np.testing.assert_array_equal(phi.transform(points), found[0].transform(Z))
        assert phi.certificate_.relative_error < 1e-12
        np.testing.assert_array_equal(phi.model_.original_landmarks, X[phi.landmark_indices_])
    assert list(found[-1].feature_names_in_) == ["a", "b", "c"]
    assert not hasattr(found[0], "feature_names_in_")


@pytest.mark.slow
def test_uniform_landmarks_are_those_of_memory(stored):
    X, forms = stored
    options = {"landmarks": "uniform", "n_landmarks": 30, "random_state": 3}
    for basis in ("symmetric", "cholesky"):
        truth, found = (ExactFeatureMap(K, basis=basis, **options).fit(rows) for rows in (X, forms[1]))
        np.testing.assert_array_equal(found.landmark_indices_, truth.landmark_indices_)
        np.testing.assert_allclose(found.error_bound_, truth.error_bound_, rtol=1e-9)


@pytest.mark.slow
def test_a_basis_of_all_rows_reads_them_into_memory(stored):
    X, forms = stored
    truth, found = (ExactFeatureMap(K).fit(rows) for rows in (X, forms[0]))
    np.testing.assert_array_equal(found.transform(X[:9]), truth.transform(X[:9]))


@pytest.mark.slow
def test_weights_and_the_kernels_width_are_of_the_stored_rows(stored, rng):
    X, forms = stored
    weights = rng.uniform(size=700)
    options = {"kernel": "gaussian", "basis": "cholesky", "centered": True, "tol": 1e-3}
    truth, found = (ExactFeatureMap(**options).fit(rows, sample_weight=weights) for rows in (X, forms[1]))
    assert found.kernel_.sigma == pytest.approx(truth.kernel_.sigma, rel=1e-12)
    np.testing.assert_allclose(weights @ found.transform(X), 0, atol=1e-9)
    weights[3] = 0.0
    with pytest.raises(NotSupportedError, match="weight 0"):
        ExactFeatureMap(**options).fit(forms[1], sample_weight=weights)


@pytest.mark.slow
def test_the_fitted_map_is_saved_and_scores(stored, tmp_path):
    X, forms = stored
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-3).fit(forms[3])
    phi.save(tmp_path / "model")
    dkfm.batch_score(tmp_path / "model", forms[3], tmp_path / "scores", progress=False)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "scores").compute(), phi.transform(phi_frame(X)), atol=1e-12)
    assert dkfm.load(tmp_path / "model").verify() is not None


def phi_frame(X):
    return pd.DataFrame(X, columns=["a", "b", "c"])


def test_a_factor_larger_than_memory_is_refused_with_the_bound_so_far(stored, monkeypatch):
    free = chain([10**9], repeat(300_000))  # the second look is that after the first round
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: next(free))
    with pytest.raises(BudgetError, match=r"after \d+ pivots the error bound is"):
        ExactFeatureMap(K, basis="cholesky").fit(stored[1][0])


def test_a_search_larger_than_memory_is_refused_before_it_begins(stored, monkeypatch):
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 300_000)
    with pytest.raises(BudgetError, match="The search for pivots of N = 700 rows"):
        ExactFeatureMap(K, basis="cholesky").fit(stored[1][0])


@pytest.mark.slow
def test_on_a_cluster_the_map_has_the_bits_of_threads(stored, processes, tmp_path):
    options = {"basis": "cholesky", "tol": 1e-3, "workspace": tmp_path / "w"}
    truth = ExactFeatureMap(K, **options).fit(stored[1][1])
    with Client(processes):
        found = ExactFeatureMap(K, **options).fit(stored[1][1])
    np.testing.assert_array_equal(found.model_.head("features").weights, truth.model_.head("features").weights)
    assert left(tmp_path / "w") == []


def test_a_plan_foretells_rounds(stored):
    X, forms = stored
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-2)
    plan, in_memory = dkfm.plan_fit(phi, forms[1]), dkfm.plan_fit(phi, X)
    assert "in rounds over the rows" in plan.method
    assert "estimated from a sample of the rows" in str(plan)
    assert "in rounds" not in in_memory.method
    assert "landmarks at most" in str(in_memory)
    rank = phi.fit(forms[1]).rank_
    assert rank <= plan.landmarks <= 1.1 * rank
    assert 0.1 < plan.seconds < 30
    assert "rounds" not in dkfm.plan_fit(ExactFeatureMap(K), forms[1]).method
    assert "in rounds" in dkfm.plan_fit(clone(phi).set_params(build="rounds"), X).method
    chosen = ExactFeatureMap(K, basis="cholesky", landmarks="uniform", n_landmarks=20)
    assert "rounds" not in dkfm.plan_fit(chosen, forms[1]).method  # landmarks that are chosen are in memory
    assert "in rounds" in dkfm.plan_fit(chosen.set_params(build="rounds"), forms[1]).method
    spooled = dkfm.plan_fit(phi, da.from_array(X, chunks=100))
    assert "in rounds" in spooled.method
    assert spooled.disk_bytes == X.nbytes


@pytest.mark.slow
def test_the_rank_of_many_rows_is_foretold_from_some_of_them(rng):
    X = rng.normal(size=(60_000, 3))
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-3, build="rounds")
    assert phi.fit(X).rank_ == pytest.approx(dkfm.plan_fit(phi, X).landmarks, rel=0.35)


def test_the_command_fits_tile_by_tile(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = []
    monkeypatch.setattr(streamed_rows.StreamedRows, "_load", read.append)
    line = "fit x.parquet model --method features --kernel gaussian --param sigma=2 --basis cholesky --tol 1e-3"
    ended = CliRunner().invoke(main, [*line.split(), "--columns", "c,a"])
    assert (ended.exit_code, ended.exception) == (0, None)
    assert list(dkfm.load("model").feature_names_in_) == ["c", "a"]
    assert read == []


@pytest.mark.slow
def test_another_fit_to_a_path_leaves_nothing_of_the_one_before(stored):
    X, forms = stored
    phi = ExactFeatureMap(K, basis="cholesky", centered=True, tol=1e-3).fit(forms[3])
    phi.set_params(landmarks="uniform", n_landmarks=20, certify="sample", tol=None, centered=False, random_state=0)
    truth = ExactFeatureMap(**phi.get_params(deep=False)).fit(X)
    phi.fit(forms[0])
    assert set(vars(phi)) == set(vars(truth))
    assert not hasattr(phi, "mean_")
    np.testing.assert_array_equal(phi.transform(X), truth.transform(X))


@pytest.mark.slow
def test_a_random_state_goes_on_from_fit_to_fit(stored):
    X, forms = stored
    drawn = []
    for rows in (X, forms[0]):
        phi = ExactFeatureMap(K, landmarks="uniform", n_landmarks=9, random_state=np.random.RandomState(0))
        drawn.append([phi.fit(rows).landmark_indices_ for _ in range(2)])
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0][0] != drawn[0][1]).any()


@pytest.mark.costly
@pytest.mark.parametrize("basis", ["symmetric", "cholesky"])
def test_landmarks_are_given_by_number_or_as_points(stored, basis):
    X, forms = stored
    numbers = np.arange(5, 60)
    for landmarks in (numbers, X[:30] + 0.1):
        truth, found = (ExactFeatureMap(K, basis=basis, landmarks=landmarks).fit(rows) for rows in (X, forms[1]))
        np.testing.assert_allclose(found.transform(X), truth.transform(X), atol=1e-9)
        np.testing.assert_allclose(found.error_bound_, truth.error_bound_, rtol=1e-9)
    with pytest.raises(InvalidInputError, match="from 0 to 699"):
        ExactFeatureMap(K, landmarks=[3, 700]).fit(forms[1])


@pytest.mark.slow
@pytest.mark.parametrize("form", range(4))
@pytest.mark.parametrize("centered", [True, False])
def test_components_of_a_map_are_those_of_rows_in_memory(stored, form, centered, rng):
    X, forms = stored
    phi, weights = ExactFeatureMap(K, basis="cholesky").fit(forms[form]), rng.uniform(1, 2, 700)
    truth, found = (
        KernelPCA.from_map(phi, 4, rows, sample_weight=weights, centered=centered)
        for rows in (phi_frame(X) if form == 3 else X, forms[form])
    )
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=1e-12)
    np.testing.assert_allclose(found.total_variance_, truth.total_variance_, rtol=1e-12)
    points = phi_frame(X) if form == 3 else X
    np.testing.assert_allclose(found.transform(points), truth.transform(points), atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("form", range(4))
def test_discriminants_of_a_map_are_those_of_rows_in_memory(stored, form):
    X, forms = stored
    y = np.array(["a", "b", "c"])[np.digitize(X[:, 0], [-0.5, 0.5])]
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-3).fit(forms[form])
    points = phi_frame(X) if form == 3 else X
    truth, found = (KernelFisher.from_map(phi, y, rows) for rows in (points, forms[form]))
    np.testing.assert_allclose(found.ratios_, truth.ratios_, rtol=1e-9)
    assert (found.predict(points) == truth.predict(points)).all()


@pytest.mark.slow
def test_sums_of_features_are_the_same_bits_on_a_cluster_and_columns_are_checked(stored, processes, tmp_path):
    forms = stored[1]
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-3, workspace=tmp_path / "w").fit(forms[1])
    truth = KernelPCA.from_map(phi, 4, forms[1])
    with Client(processes):
        found = KernelPCA.from_map(phi, 4, forms[1])
    np.testing.assert_array_equal(found.model_.head("scores").weights, truth.model_.head("scores").weights)
    assert left(tmp_path / "w") == []
    np.save(tmp_path / "wide.npy", np.ones((9, 4)))
    with pytest.raises(InvalidInputError, match="X has 4 columns and the map was fitted with 3"):
        KernelPCA.from_map(phi, 4, tmp_path / "wide.npy")


@pytest.mark.slow
def test_components_and_discriminants_of_a_path_are_those_of_its_rows(stored):
    X, forms = stored
    y = (X[:, 0] > 0).astype(int)
    for form in forms:
        rows = phi_frame(X) if form is forms[3] else X
        truth, found = (KernelPCA(3, kernel=K).fit(given) for given in (rows, form))
        np.testing.assert_array_equal(found.transform(rows), truth.transform(rows))
        assert set(vars(found)) == set(vars(truth))
        truth, found = (KernelFisher(kernel=K).fit(given, y) for given in (rows, form))
        np.testing.assert_array_equal(found.transform(rows), truth.transform(rows))


def test_a_float32_file_gives_components_of_float32(stored, tmp_path):
    X, _ = stored
    np.save(tmp_path / "narrow.npy", X.astype(np.float32))
    pca = KernelPCA(3, kernel=K).fit(tmp_path / "narrow.npy")
    assert pca.model_.dtype == np.float32


@pytest.mark.costly
@pytest.mark.parametrize("collection", ["array", "frame"])
def test_dask_collections_are_computed_by_tasks_and_never_gathered(stored, collection, monkeypatch):
    X, _ = stored
    lazy = da.from_array(X, chunks=(100, 2)) if collection == "array" else dd.from_pandas(phi_frame(X), npartitions=5)
    read = []
    monkeypatch.setattr(streamed_rows.StreamedRows, "_load", read.append)
    truth = ExactFeatureMap(K, basis="cholesky", tol=1e-3).fit(stored[1][0])
    found = ExactFeatureMap(K, basis="cholesky", tol=1e-3).fit(lazy)
    points = X if collection == "array" else phi_frame(X)
    np.testing.assert_array_equal(found.transform(points), truth.transform(X))
    assert hasattr(found, "feature_names_in_") is (collection == "frame")
    pca = KernelPCA.from_map(found, 3, lazy)
    np.testing.assert_array_equal(pca.transform(points), KernelPCA.from_map(truth, 3, stored[1][0]).transform(X))
    assert read == []


@pytest.mark.slow
def test_a_gram_matrix_in_a_file_is_no_rows(stored, tmp_path, monkeypatch):
    X, _ = stored
    monkeypatch.chdir(tmp_path)
    np.save("gram.npy", K(X))
    for line in ("--basis cholesky", "--landmarks pivots --n-landmarks 20", "--landmarks uniform --n-landmarks 20"):
        fit = f"fit gram.npy model --method features --kernel precomputed --overwrite {line}"
        ended = CliRunner().invoke(main, fit.split())
        assert (ended.exit_code, ended.exception) == (0, None), ended.output


def record_thread(X, Y):
    """A linear kernel that notes which thread computes it."""
    THREADS.add(threading.get_ident())
    return X @ Y.T


THREADS: set[int] = set()


@pytest.mark.parametrize("basis", ["cholesky", "spectral"])
def test_many_rows_in_memory_give_what_their_file_gives_on_any_number_of_threads(basis, tmp_path, rng, monkeypatch):
    X, y = rng.normal(size=(2100, 3)), rng.integers(3, size=2100)
    np.save(tmp_path / "x.npy", X)
    phi = ExactFeatureMap(K, basis=basis, landmarks="uniform", n_landmarks=60, random_state=0).fit(X)
    weights = rng.uniform(0.5, 2, size=2100)
    for given in (None, weights):
        truth = KernelPCA.from_map(phi, 4, tmp_path / "x.npy", sample_weight=given)
        for threads in (1, 3):
            monkeypatch.setattr(cpus, "COUNT", threads)
            found = KernelPCA.from_map(phi, 4, X, sample_weight=given)
            np.testing.assert_array_equal(found.transform(X[:9]), truth.transform(X[:9]))
        shares = np.ones(2100) / 2100 if given is None else given / given.sum()
        F = phi.transform(X)
        np.testing.assert_allclose(truth.total_variance_, (shares @ (F - shares @ F) ** 2).sum(), rtol=1e-10)
    labels = KernelFisher.from_map(phi, y, X).predict(X)
    np.testing.assert_array_equal(labels, KernelFisher.from_map(phi, y, tmp_path / "x.npy").predict(X))


def test_a_function_of_the_user_is_computed_in_the_callers_thread(rng):
    X = rng.normal(size=(2100, 3))
    phi = ExactFeatureMap(kernels.Function(record_thread), basis="cholesky").fit(X[:50])
    THREADS.clear()
    KernelPCA.from_map(phi, 2, X)
    assert {threading.get_ident()} == THREADS


def test_a_thread_of_the_callers_gets_the_same_bits_from_one_thread(rng, monkeypatch):
    X = rng.normal(size=(2100, 3))
    phi = ExactFeatureMap(K, basis="cholesky", landmarks="uniform", n_landmarks=20).fit(X)
    truth, used, original = KernelPCA.from_map(phi, 2, X), [], executors.ThreadExecutor
    monkeypatch.setattr(executors, "ThreadExecutor", lambda threads: used.append(threads) or original(threads))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(KernelPCA.from_map, phi, 2, X).result()
    assert used == [1]
    np.testing.assert_array_equal(found.transform(X), truth.transform(X))


def test_sums_take_fewer_threads_where_memory_is_short_and_are_refused_where_it_is_none(tmp_path, rng, monkeypatch):
    X = rng.normal(size=(2100, 3))
    np.save(tmp_path / "x.npy", X)
    phi = ExactFeatureMap(K, basis="cholesky", landmarks="uniform", n_landmarks=60, random_state=0).fit(X)
    truth, used, original = KernelPCA.from_map(phi, 4, X), [], executors.ThreadExecutor
    monkeypatch.setattr(executors, "ThreadExecutor", lambda threads: used.append(threads) or original(threads))
    monkeypatch.setattr(cpus, "COUNT", 8)
    fixed, each = out_of_core_rows.estimate_moment_bytes(3, 60, 60, 1, K)
    for have, threads in ((fixed + 100 * each, 8), (fixed + 3 * each, 3), (fixed + each, 1)):
        monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda have=have: have)
        for rows in (X, tmp_path / "x.npy"):
            found = KernelPCA.from_map(phi, 4, rows)
            np.testing.assert_array_equal(found.eigenvalues_, truth.eigenvalues_)
        assert used == [threads, threads]
        plan = dkfm.plan_fit(KernelPCA(4), (2100, 3), feature_map=phi)
        assert plan.peak_bytes - plan.memory_bytes == (threads - 1) * each
        used.clear()
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: fixed + each - 1)
    with pytest.raises(BudgetError, match="A pass that sums 60 features and their products needs"):
        KernelPCA.from_map(phi, 4, X)
