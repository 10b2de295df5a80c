"""Pivots in rounds of rows in memory: as requested, or where neither columns nor the Gram matrix fit."""

import numpy as np
import pytest
from distributed import Client
from scipy.sparse import csr_array

from dkfm import ExactFeatureMap, kernels
from dkfm.errors import InvalidInputError
from dkfm.estimators.fitting import landmarks
from dkfm.execution import memory
from dkfm.gram import row_passes
from helpers.harness import left

K = kernels.Gaussian(2.0)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(row_passes, "PASS_TILE_ROWS", 100)


def fit(X, **options):
    return ExactFeatureMap(K, basis="cholesky", tol=1e-3, **options).fit(X)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"landmarks": "random_pivots", "n_landmarks": 250, "random_state": 1}])
def test_rounds_of_an_array_are_those_of_its_file(rng, tmp_path, options):
    X = rng.normal(size=(700, 3))
    np.save(tmp_path / "x.npy", X)
    truth, found = fit(tmp_path / "x.npy", build="rounds", **options), fit(X, build="rounds", **options)
    np.testing.assert_array_equal(found.landmark_indices_, truth.landmark_indices_)
    np.testing.assert_array_equal(found.transform(X), truth.transform(X))
    assert found.error_bound_ <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [True, False])
def test_rounds_of_an_array_run_on_a_cluster(rng, processes, tmp_path, sparse):
    X = rng.normal(size=(700, 3))
    X = csr_array(X * (X > 0)) if sparse else X
    truth = fit(X, build="rounds")
    with Client(processes):
        found = fit(X, build="rounds", workspace=tmp_path / "w")
    np.testing.assert_array_equal(found.model_.head("features").weights, truth.model_.head("features").weights)
    assert left(tmp_path / "w") == []


@pytest.mark.costly
@pytest.mark.parametrize("options", [{}, {"landmarks": "random_pivots", "n_landmarks": 300, "random_state": 1}])
def test_columns_that_do_not_fit_go_over_to_rounds(rng, monkeypatch, options):
    X, rounds = rng.normal(size=(700, 3)), []
    monkeypatch.setattr(landmarks.budget, "columnwise_pivots_bytes", lambda n, d, r, copies: 10**15 if r > 40 else 0)
    monkeypatch.setattr(landmarks.budget, "gram_and_pivots_seconds", lambda *_: 1e9)
    monkeypatch.setattr(landmarks.pivoted_cholesky, "BLOCK_COLUMNS", 40)
    has_memory = memory.has_factorization_memory
    monkeypatch.setattr(memory, "has_factorization_memory", lambda n, *given: n != 700 and has_memory(n, *given))
    find = landmarks.out_of_core_rows.find_pivots
    monkeypatch.setattr(landmarks.out_of_core_rows, "find_pivots", lambda *a, **o: rounds.append(1) or find(*a, **o))
    found = fit(X, **options)
    assert rounds == [1]
    errors = np.abs(found.transform(X) @ found.transform(X).T - K(X))
    assert errors.max() <= found.error_bound_ <= 1e-3
    with pytest.raises(MemoryError):
        fit(X, build="columns", **options)


def test_a_precomputed_matrix_has_no_rounds():
    with pytest.raises(InvalidInputError, match='build="rounds" needs points'):
        ExactFeatureMap("precomputed", basis="cholesky", build="rounds").fit(np.eye(5))
