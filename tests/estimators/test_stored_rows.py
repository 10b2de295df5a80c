"""Fits to rows where they are stored: the maps of the same rows in memory, tile by tile, and nothing if they change."""

import numpy as np
import pandas as pd
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client
from sklearn.utils.validation import check_is_fitted

import dkfm
from dkfm import ExactFeatureMap, kernels
from dkfm.cli.app import main
from dkfm.errors import BudgetError, InvalidInputError, NotSupportedError
from dkfm.estimators.fitting import streamed
from dkfm.execution import memory
from dkfm.gram import row_passes, streamed_rows
from helpers.harness import left

K = kernels.Gaussian(2.0)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(row_passes, "_TILE_ROWS", 100)
    monkeypatch.setattr(streamed_rows, "_TILE_VALUES", 200)


@pytest.fixture
def stored(tmp_path, rng):
    """Rows, and how they are stored."""
    X = rng.normal(size=(700, 3))
    np.save(tmp_path / "x.npy", X)
    array = zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(90, 3))
    pd.DataFrame(X, columns=["a", "b", "c"]).to_parquet(tmp_path / "x.parquet")
    return X, [tmp_path / "x.npy", str(tmp_path / "x.zarr"), array, tmp_path / "x.parquet"]


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


def test_uniform_landmarks_are_those_of_memory(stored):
    X, forms = stored
    options = {"landmarks": "uniform", "n_landmarks": 30, "random_state": 3}
    for basis in ("symmetric", "cholesky"):
        truth, found = (ExactFeatureMap(K, basis=basis, **options).fit(rows) for rows in (X, forms[1]))
        np.testing.assert_array_equal(found.landmark_indices_, truth.landmark_indices_)
        np.testing.assert_allclose(found.error_bound_, truth.error_bound_, rtol=1e-9)


def test_a_basis_of_all_rows_reads_them_into_memory(stored):
    X, forms = stored
    truth, found = (ExactFeatureMap(K).fit(rows) for rows in (X, forms[0]))
    np.testing.assert_array_equal(found.transform(X[:9]), truth.transform(X[:9]))


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


def test_the_fitted_map_is_saved_and_scores(stored, tmp_path):
    X, forms = stored
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-3).fit(forms[3])
    phi.save(tmp_path / "model")
    dkfm.batch_score(tmp_path / "model", forms[3], tmp_path / "scores", progress=False)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "scores").compute(), phi.transform(phi_frame(X)), atol=1e-12)
    assert dkfm.load(tmp_path / "model").verify() is not None


def phi_frame(X):
    return pd.DataFrame(X, columns=["a", "b", "c"])


def test_rows_that_change_meanwhile_leave_the_estimator_as_it_was(stored, monkeypatch, tmp_path):
    X, forms = stored
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-3)
    find = streamed.find_streamed_pivots

    def change(*given):
        found = find(*given)
        np.save(tmp_path / "x.npy", X + 1)
        return found

    monkeypatch.setattr(streamed, "find_streamed_pivots", change)
    with pytest.raises(InvalidInputError, match=r"changed while it was read, .*; fit again"):
        phi.fit(forms[0])
    with pytest.raises(Exception, match="not fitted"):
        check_is_fitted(phi)


def test_a_factor_larger_than_memory_is_refused_with_the_bound_so_far(stored, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 300_000)
    with pytest.raises(BudgetError, match=r"after \d+ pivots the error bound is"):
        ExactFeatureMap(K, basis="cholesky").fit(stored[1][0])


def test_on_a_cluster_the_map_has_the_bits_of_threads(stored, processes, tmp_path):
    options = {"basis": "cholesky", "tol": 1e-3, "workspace": tmp_path / "w"}
    truth = ExactFeatureMap(K, **options).fit(stored[1][1])
    with Client(processes):
        found = ExactFeatureMap(K, **options).fit(stored[1][1])
    np.testing.assert_array_equal(found.model_.head("features").weights, truth.model_.head("features").weights)
    assert left(tmp_path / "w") == []


def test_a_plan_foretells_rounds_of_stored_rows(stored):
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-2)
    plan, in_memory = dkfm.plan_fit(phi, stored[1][1]), dkfm.plan_fit(phi, stored[0])
    assert "in rounds over the stored rows" in plan.road
    assert "in rounds" not in in_memory.road
    rank = phi.fit(stored[1][1]).rank_
    assert rank <= plan.landmarks <= 2 * rank + 2
    assert 0.1 < plan.seconds < 30
    assert "rounds" not in dkfm.plan_fit(ExactFeatureMap(K), stored[1][1]).road


def test_the_command_fits_tile_by_tile(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = []
    monkeypatch.setattr(streamed_rows.StreamedRows, "_load", read.append)
    line = "fit x.parquet model --method features --kernel gaussian --param sigma=2 --basis cholesky --tol 1e-3"
    ended = CliRunner().invoke(main, [*line.split(), "--columns", "c,a"])
    assert (ended.exit_code, ended.exception) == (0, None)
    assert list(dkfm.load("model").feature_names_in_) == ["c", "a"]
    assert read == []
