"""The triangular root of a factor in tiles: right, of the same bits wherever it is computed, resumed, measured."""

import shutil
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfm import kernels
from dkfm.core import budget
from dkfm.errors import BudgetError, DamagedStoreError, InvalidInputError, NotSupportedError, StoreExistsError
from dkfm.estimators.stored.feature_map import sample_scorer_and_kernel_rows
from dkfm.execution import memory
from dkfm.gram.linear_systems import tiled_cholesky, tiled_inverse_factor
from dkfm.gram.linear_systems.tiled_cholesky import open_tiled_factor, solve_from_right
from dkfm.gram.linear_systems.tiled_inverse_factor import RootTask, compute_root_columns, compute_tiled_root
from dkfm.gram.training_data import as_training_data
from dkfm.kernels import Gaussian
from dkfm.storage import streamed_weights, zarr_store
from helpers.harness import left
from helpers.threads import use_threads

EPS = np.finfo(float).eps
MIXED = Gaussian(1.0) + 0.5 * kernels.Polynomial(2)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of seven columns of 250 rows, three of which are a panel."""
    monkeypatch.setattr(streamed_weights, "CHUNK_BYTES", 7 * 250 * 8)
    monkeypatch.setattr(tiled_inverse_factor, "PANEL_COLUMNS", 21)


def compute(kernel, X, workspace, tile_rows=60):
    root, residuals = compute_tiled_root(as_training_data(kernel, X), tile_rows, workspace)
    return root, residuals, read(root.weights)


def read(weights):
    return weights[slice(None), slice(0, weights.shape[1])]


@given(n=st.integers(1, 40), tile_rows=st.integers(7, 50), kernel=st.sampled_from([Gaussian(0.7), MIXED]))
@settings(max_examples=12)
def test_the_root_is_the_inverse_of_the_factor_of_the_matrix(n, tile_rows, kernel, tmp_path_factory):
    X = np.random.default_rng(n).normal(size=(n, 3))
    root, residuals, W = compute(kernel, X, tmp_path_factory.mktemp("root"), tile_rows)
    L = np.linalg.cholesky(kernel(X))
    truth = np.linalg.inv(L).T
    bound = 8 * n * EPS * np.linalg.cond(L)
    np.testing.assert_allclose(W, truth, rtol=0, atol=bound * np.abs(truth).max())
    assert (np.tril(W, -1) == 0).all()
    shares = np.square(L / np.linalg.norm(L, axis=1)[:, np.newaxis])
    np.testing.assert_allclose(root.values, shares.diagonal(), rtol=bound)
    explained = np.hstack([np.zeros((n, 1)), np.cumsum(shares, axis=1)])
    np.testing.assert_allclose(residuals.largest_by_rank, (1 - explained).max(axis=0), rtol=0, atol=100 * EPS)
    assert abs(residuals.lowest) <= 100 * EPS


@pytest.mark.slow
def test_a_root_has_the_same_bits_on_threads_and_on_a_cluster(
    rng, small_chunks, threaded_client, tmp_path, monkeypatch
):
    X = rng.normal(size=(250, 3))
    on_cluster = compute(MIXED, X, tmp_path / "cluster")[2]
    use_threads(monkeypatch, tiled_cholesky)
    np.testing.assert_array_equal(compute(MIXED, X, tmp_path / "threads")[2], on_cluster)


def test_a_killed_root_goes_on_with_the_missing_chunks_and_mends_one_that_is_damaged(
    rng, small_chunks, tmp_path, monkeypatch
):
    X, real, count = rng.normal(size=(250, 3)), zarr_store.write_chunk, iter(range(1000))

    def write_some(array, index, values):
        if array.name == "root" and next(count) == 17:
            raise MemoryError
        return real(array, index, values)

    with monkeypatch.context() as patch:
        patch.setattr(zarr_store, "write_chunk", write_some)
        with pytest.raises(MemoryError):
            compute(MIXED, X, tmp_path)
    there = {path: path.stat().st_ino for path in tmp_path.glob("root-*/*/c/0/*")}
    assert 17 <= len(there) < 36
    damaged = max(there, key=lambda path: int(path.name))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    resumed = compute(MIXED, X, tmp_path)[2]
    assert [path for path, inode in there.items() if path.stat().st_ino != inode] == [damaged]
    np.testing.assert_array_equal(resumed, compute(MIXED, X, tmp_path / "undisturbed")[2])
    inodes = {path: path.stat().st_ino for path in tmp_path.glob("root-*/*/c/0/*")}
    compute(MIXED, X, tmp_path)
    assert inodes == {path: path.stat().st_ino for path in tmp_path.glob("root-*/*/c/0/*")}


@pytest.mark.slow
def test_columns_of_two_factors_are_not_mixed(rng, small_chunks, tmp_path, monkeypatch):
    X, kernel = rng.normal(size=(250, 10)), Gaussian(1.0)
    X[1::2] = X[::2] + 1e-6  # so that the roots of two factors differ by far more than rounding
    truth, residuals = compute_tiled_root(as_training_data(kernel, X), 64, tmp_path)
    before = read(truth.weights)
    (factor,), (root,) = tmp_path.glob("factor-*"), tmp_path.glob("root-*")
    monkeypatch.setattr(tiled_inverse_factor, "open_tiled_factor", None)
    shutil.rmtree(factor)  # a finished root needs it no longer
    again, found = compute_tiled_root(as_training_data(kernel, X), 17, tmp_path)
    np.testing.assert_array_equal(read(again.weights), before)
    np.testing.assert_array_equal(again.values, truth.values)
    np.testing.assert_array_equal(found.largest_by_rank, residuals.largest_by_rank)
    assert (found.lowest, found.noise) == (residuals.lowest, residuals.noise)
    monkeypatch.undo()
    monkeypatch.setattr(streamed_weights, "CHUNK_BYTES", 7 * 250 * 8)
    monkeypatch.setattr(tiled_inverse_factor, "PANEL_COLUMNS", 21)
    for chunk in root.glob("*/c/0/*[02468]"):
        chunk.unlink()
    mended, _ = compute_tiled_root(as_training_data(kernel, X), 17, tmp_path)
    undisturbed, _ = compute_tiled_root(as_training_data(kernel, X), 17, tmp_path / "undisturbed")
    np.testing.assert_array_equal(read(mended.weights), read(undisturbed.weights))
    assert np.abs(read(mended.weights) - before).max() > 1e-8 * np.abs(before).max()
    with pytest.raises(DamagedStoreError, match="was replaced"):
        read(truth.weights)


def test_a_chunk_that_is_lost_or_a_root_that_was_replaced_is_named_when_it_is_read(rng, tmp_path):
    X = rng.normal(size=(40, 3))
    root = compute(MIXED, X, tmp_path)[0]
    (chunk,) = tmp_path.glob("root-*/*/c/0/0")
    content = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises(DamagedStoreError, match=r"part of the weights .* is gone"):
        read(root.weights)
    chunk.write_bytes(content)
    read(root.weights)
    (marker,) = tmp_path.glob("root-*/_COMPLETE")
    zarr_store.write_completion_marker(marker.parent, {"digest": "another"})
    with pytest.raises(DamagedStoreError, match="was replaced while it was in use"):
        read(root.weights)


def test_something_else_in_the_place_of_a_root_is_left_untouched(rng, tmp_path):
    X = rng.normal(size=(40, 3))
    compute(MIXED, X, tmp_path)
    (store,) = tmp_path.glob("root-*")
    for path in sorted(store.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (store / "mine").write_text("mine")
    with pytest.raises(StoreExistsError, match="is not the root of this factor; it was left untouched"):
        compute(MIXED, X, tmp_path)
    assert left(store) == ["mine"]


def test_what_has_no_root_in_tiles_is_refused(rng, tmp_path):
    X = rng.normal(size=(40, 3))
    with pytest.raises(InvalidInputError, match="a precomputed kernel has none"):
        compute_tiled_root(as_training_data(kernels.Precomputed(), Gaussian(1.0)(X)), None, tmp_path)
    with pytest.raises(NotSupportedError, match="is code"):
        compute(kernels.Function(lambda X, Y: X @ Y.T), X, tmp_path)
    assert left(tmp_path) == []


def test_too_small_a_disk_or_memory_is_refused_with_both_numbers_before_the_factor(rng, tmp_path, monkeypatch):
    X = rng.normal(size=(300, 3))
    with monkeypatch.context() as patch:
        patch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
        with pytest.raises(BudgetError, match=r"The root, with its factor, at .* needs 1 MB .* and 1 MB"):
            compute(MIXED, X, tmp_path)
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 10**5)
    with pytest.raises(BudgetError, match="A task of the root of 300 rows needs"):
        compute(MIXED, X, tmp_path)
    assert left(tmp_path) == []


@pytest.mark.slow
def test_a_task_takes_the_memory_that_its_budget_says(rng, tmp_path):
    X = rng.normal(size=(1500, 10))
    compute(MIXED, X, tmp_path, 200)
    with open_tiled_factor(MIXED, X, 0.0, 1 / np.sqrt(MIXED.diag(X)), tile_rows=200, workspace=tmp_path) as factor:
        (root,) = tmp_path.glob("root-*")
        for path in root.glob("*/c/0/*"):
            path.unlink()
        chunk, width = tiled_inverse_factor.choose_chunk_and_task_columns(1500)
        assert chunk == width
        columns = slice(3 * width, 4 * width)
        tracemalloc.start()
        compute_root_columns(RootTask(factor, root, None, None), columns)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert 2 / 3 * tiled_inverse_factor.task_bytes(1500, 200) < peak <= tiled_inverse_factor.task_bytes(1500, 200)


@pytest.mark.parametrize("block", [7, 128])
def test_a_solution_from_the_right_is_that_of_the_dense_inverse(rng, block, monkeypatch):
    monkeypatch.setattr(tiled_cholesky, "_BLOCK_COLUMNS", block)
    L, A = np.tril(rng.normal(size=(150, 150))) / 20 + np.eye(150), rng.normal(size=(30, 150))
    for transposed, inverse in ((True, np.linalg.inv(L).T), (False, np.linalg.inv(L))):
        solved = A.copy()
        solve_from_right(solved, L, transposed=transposed)
        np.testing.assert_allclose(solved, A @ inverse, rtol=0, atol=1e-11)


def test_a_certificate_has_no_more_rows_than_its_budget_says(rng):
    X = rng.normal(size=(2000, 300))
    assert len(sample_scorer_and_kernel_rows(as_training_data(MIXED, X), MIXED.diag(X))[0]) <= budget._CERTIFIED_ROWS
