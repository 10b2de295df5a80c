"""A factor in tiles: right, of the same bits wherever it is computed, resumed tile by tile, refused with reasons."""

import tempfile
import tracemalloc
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import lapack
from scipy.sparse import csr_array

from dkfm import kernels
from dkfm.core import budget
from dkfm.errors import BudgetError, DamagedStoreError, KernelError, NotPSDError, StoreExistsError
from dkfm.execution import memory
from dkfm.gram.linear_systems import tile_store, tiled_cholesky
from dkfm.gram.linear_systems.tiled_cholesky import FactorTask, TileOrder, factor_tile, open_tiled_factor
from dkfm.kernels import Gaussian
from dkfm.sources.memory import MemorySource
from helpers.harness import left
from helpers.threads import use_threads

EPS = np.finfo(float).eps


def read_factor(store):
    L = np.zeros((store.n, store.n))
    for i in range(store.blocks):
        for j in range(i + 1):
            with store.read_tile_to_buffer((i, j)) as tile:
                L[store.rows(i), store.rows(j)] = tile
    return L


def factor(kernel, X, alpha, weights=None, **options):
    roots = None if weights is None else np.sqrt(weights)
    with open_tiled_factor(kernel, X, alpha, roots, **options) as store:
        return read_factor(store)


@given(
    n=st.integers(1, 40),
    tile_rows=st.integers(7, 50),  # smaller ones are many files
    weighted=st.booleans(),
    kernel=st.sampled_from([Gaussian(1.5), kernels.Laplacian(2.0), kernels.Polynomial(3)]),
)
@settings(max_examples=20, deadline=None)
def test_the_factor_times_its_transpose_is_the_matrix(n, tile_rows, weighted, kernel):
    rng = np.random.default_rng(n)
    X, weights = rng.normal(size=(n, 3)), rng.uniform(0.1, 5, n) if weighted else None
    L = factor(kernel, X, 1e-3, weights, tile_rows=tile_rows)
    roots = np.sqrt(np.ones(n) if weights is None else weights)
    A = roots[:, None] * kernel(X) * roots + 1e-3 * np.eye(n)
    assert (np.triu(L, 1) == 0).all()
    # Each entry is wrong by n eps of the geometric mean of its diagonal entries (Demmel).
    scales = np.sqrt(np.outer(A.diagonal(), A.diagonal()))
    assert (np.abs(L @ L.T - A) / scales).max() <= 4 * (n + 8) * EPS


@pytest.mark.slow
def test_tiles_have_the_same_bits_on_threads_on_a_cluster_and_of_sparse_rows(
    rng, threaded_client, tmp_path, monkeypatch
):
    X, weights = rng.normal(size=(300, 4)), rng.uniform(1, 2, 300)
    on_cluster = factor(Gaussian(2.0), X, 0.1, weights, tile_rows=70, workspace=tmp_path)
    use_threads(monkeypatch, tiled_cholesky)
    on_threads = factor(Gaussian(2.0), X, 0.1, weights, tile_rows=70)
    np.testing.assert_array_equal(on_cluster, on_threads)
    sparse = factor(Gaussian(2.0), csr_array(X), 0.1, weights, tile_rows=70)
    np.testing.assert_allclose(sparse, on_threads, rtol=0, atol=1e-13)


def test_blocks_of_columns_do_not_change_a_factor_beyond_rounding(rng, monkeypatch):
    X = rng.normal(size=(200, 3))
    whole = factor(Gaussian(1.0), X, 0.01, tile_rows=100)
    monkeypatch.setattr(tiled_cholesky, "_BLOCK_COLUMNS", 7)
    np.testing.assert_allclose(factor(Gaussian(1.0), X, 0.01, tile_rows=100), whole, rtol=0, atol=1e-12)


@given(blocks=st.integers(1, 6), choices=st.lists(st.integers(0, 10**6), min_size=21, max_size=21))
def test_each_tile_starts_after_those_it_reads_in_whatever_order_tasks_end(blocks, choices):
    order, running, done, numbers = TileOrder(blocks), deque(), set(), iter(choices)
    for pair in order:
        if pair is None:
            assert running, "nothing runs, and the next tile waits"
            running.rotate(next(numbers))
            order.finish(finished := running.popleft())
            done.add(finished)
            continue
        i, j = pair
        assert all((i, k) in done and (j, k) in done for k in range(j))
        assert i == j or (j, j) in done
        running.append(pair)
    assert len(done | set(running)) == tile_store.count_lower_tiles(blocks)


def test_a_killed_factor_goes_on_with_the_missing_tiles(rng, tmp_path, monkeypatch):
    X, real, count = rng.normal(size=(250, 3)), tile_store.TileStore.write_tile, iter(range(100))

    def write_some(store, pair, values):
        if next(count) == 7:
            raise MemoryError
        real(store, pair, values)

    with monkeypatch.context() as patch:
        patch.setattr(tile_store.TileStore, "write_tile", write_some)
        with pytest.raises(MemoryError):
            factor(Gaussian(1.0), X, 0.1, tile_rows=50, workspace=tmp_path)
    there = {path: path.stat().st_ino for path in tmp_path.glob("*/factor/c/*/*")}
    assert len(there) >= 7
    damaged = min(there)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    resumed = factor(Gaussian(1.0), X, 0.1, tile_rows=120, workspace=tmp_path)  # it keeps the tiles that it has
    again = [path for path, inode in there.items() if path.stat().st_ino != inode]
    assert again == [damaged]
    np.testing.assert_array_equal(resumed, factor(Gaussian(1.0), X, 0.1, tile_rows=50))


@pytest.mark.slow
def test_a_finished_factor_is_found_again_and_another_is_not_taken_for_it(rng, tmp_path, monkeypatch):
    X = rng.normal(size=(100, 3))
    first = factor(Gaussian(1.0), X, 0.1, tile_rows=40, workspace=tmp_path)
    for other in ((Gaussian(1.1), X, 0.1), (Gaussian(1.0), X + 1e-9, 0.1), (Gaussian(1.0), X, 0.2)):
        factor(*other, tile_rows=40, workspace=tmp_path)
    factor(Gaussian(1.0), X, 0.1, np.full(100, 2.0), tile_rows=40, workspace=tmp_path)
    assert len(left(tmp_path)) == 5
    monkeypatch.setattr(tiled_cholesky, "_compute_values", None)
    np.testing.assert_array_equal(factor(Gaussian(1.0), X, 0.1, tile_rows=40, workspace=tmp_path), first)


def test_a_temporary_factor_is_removed_also_of_a_kernel_that_is_code(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    X = rng.normal(size=(60, 3))
    factor(Gaussian(1.0), X, 0.1, tile_rows=20)
    mine = kernels.Function(lambda X, Y: np.exp(-np.abs(X[:, :1] - Y[:, 0])))
    factor(mine, X, 0.1, tile_rows=20, workspace=tmp_path)
    assert left(tmp_path) == []


@pytest.mark.costly
@pytest.mark.parametrize("tile_rows", [3, 10, 60])
def test_the_row_is_named_at_which_the_matrix_is_not_positive_definite(rng, tile_rows):
    X = rng.normal(size=(60, 3))
    kernel = kernels.Function(lambda X, Y: X @ Y.T - 3.0 * np.outer(X[:, 0], Y[:, 0]))
    A = kernel(X) + 30 * np.eye(60)
    row = lapack.dpotrf(A, lower=1)[1] - 1
    assert row > 0
    with pytest.raises(NotPSDError, match=rf"with alpha = 30 its Cholesky factor breaks down at row {row};"):
        factor(kernel, X, 30.0, tile_rows=tile_rows)


def test_without_alpha_a_row_in_the_span_of_others_is_named(rng):
    X = rng.normal(size=(40, 3))
    factor(Gaussian(0.5), X, 0.0, tile_rows=16)
    X[33] = X[5]
    with pytest.raises(NotPSDError, match=r"Row 33 is, up to rounding, in the span of the rows before it"):
        factor(Gaussian(0.5), X, 0.0, tile_rows=16)


@pytest.mark.parametrize("tile_rows", [20, 64, 150])
@pytest.mark.parametrize(("columns", "sigma"), [(1, 0.3), (2, 1.0), (3, 5.0)])
def test_rounding_of_a_smooth_kernel_is_not_taken_for_a_negative_part(rng, columns, sigma, tile_rows):
    X = rng.normal(size=(150, columns))
    K = Gaussian(sigma)(X)
    assert lapack.dpotrf(K, lower=1)[1] > 0
    with pytest.raises(NotPSDError, match=r"Row \d+ is, up to rounding, in the span of the rows before it") as error:
        factor(Gaussian(sigma), X, 0.0, tile_rows=tile_rows)
    row = int(str(error.value).split()[1])
    nearest = np.linalg.lstsq(K[:row, :row], K[:row, row], rcond=EPS)[0]
    # The processor decides which row it is: rounding is divided by the roots of earlier pivots, of 1e-14 and more.
    assert K[row, row] - K[row, :row] @ nearest < 1e-8


def test_a_negative_part_is_named_as_one_without_alpha(rng):
    X = rng.normal(size=(60, 3))
    kernel = kernels.Function(lambda X, Y: Gaussian(0.3)(X, Y) - 0.1 * np.outer(X[:, 0], Y[:, 0]))
    with pytest.raises(NotPSDError, match="is not positive semi-definite: of k"):
        factor(kernel, X, 0.0, tile_rows=16)


def test_a_tile_that_numpy_cannot_factor_and_scipy_can_has_its_factor(rng, monkeypatch):
    X = rng.normal(size=(40, 3))
    expected = factor(Gaussian(0.5), X, 0.1, tile_rows=16)

    def refuse(A):
        raise np.linalg.LinAlgError("another LAPACK")

    monkeypatch.setattr(np.linalg, "cholesky", refuse)
    np.testing.assert_allclose(factor(Gaussian(0.5), X, 0.1, tile_rows=16), expected, atol=1e-14)


def test_a_value_that_is_not_finite_names_its_rows(rng):
    X = rng.normal(size=(40, 3))
    X[30] = 1e200
    with pytest.raises(KernelError, match="rows 30 and"):
        factor(kernels.Polynomial(3), X, 1.0, tile_rows=16)


def test_too_small_a_disk_or_memory_is_refused_with_both_numbers(rng, monkeypatch):
    X = rng.normal(size=(400, 3))
    with monkeypatch.context() as patch:
        patch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**5))
        with pytest.raises(BudgetError, match=r"needs 1 MB .* and 0 MB"):
            factor(Gaussian(1.0), X, 1.0, tile_rows=100)
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 10**5)
    monkeypatch.setattr(memory, "measure_free_memory", lambda: 10**5)
    with pytest.raises(BudgetError, match="A tile of 100 rows needs"):
        factor(Gaussian(1.0), X, 1.0, tile_rows=100)


def test_something_else_in_the_place_of_a_factor_is_left_untouched(rng, tmp_path):
    X = rng.normal(size=(40, 3))
    factor(Gaussian(1.0), X, 1.0, tile_rows=16, workspace=tmp_path)
    (store,) = left(tmp_path)
    import shutil

    shutil.rmtree(tmp_path / store)
    (tmp_path / store).mkdir()
    (tmp_path / store / "mine").write_text("mine")
    with pytest.raises(StoreExistsError, match="is not a factor of dkfm's; it was left untouched"):
        factor(Gaussian(1.0), X, 1.0, tile_rows=16, workspace=tmp_path)
    assert (tmp_path / store / "mine").read_text() == "mine"


def test_a_finished_factor_is_mended(rng, tmp_path):
    X = rng.normal(size=(100, 3))
    truth = factor(Gaussian(1.0), X, 0.1, tile_rows=40, workspace=tmp_path)
    tiles = sorted(tmp_path.glob("*/factor/c/*/*"))
    tiles[1].write_bytes(b"")
    tiles[2].unlink()
    np.testing.assert_array_equal(factor(Gaussian(1.0), X, 0.1, tile_rows=40, workspace=tmp_path), truth)


def test_nothing_stays_of_a_matrix_that_has_no_factor(rng, tmp_path):
    X = rng.normal(size=(60, 3))
    X[50] = X[5]
    with pytest.raises(NotPSDError):
        factor(Gaussian(0.5), X, 0.0, tile_rows=10, workspace=tmp_path)
    assert left(tmp_path) == []


def test_a_tile_that_is_lost_or_damaged_later_is_named(rng, tmp_path):
    X = rng.normal(size=(40, 3))
    with open_tiled_factor(Gaussian(1.0), X, 1.0, tile_rows=16, workspace=tmp_path) as store:
        (tile,) = tmp_path.glob("*/factor/c/2/1")
        tile.write_bytes(tile.read_bytes()[:-1] + b"x")
        with (
            pytest.raises(DamagedStoreError, match=r"Tile \(2, 1\) of .* cannot be read"),
            store.read_tile_to_buffer((2, 1)),
        ):
            pass
        tile.unlink()
        with pytest.raises(DamagedStoreError, match=r"Tile \(2, 1\)"), store.read_tile_to_buffer((2, 1)):
            pass


def test_a_task_takes_the_memory_that_its_budget_says(rng, tmp_path):
    X, kernel = rng.normal(size=(1200, 10)), Gaussian(3.0)
    with open_tiled_factor(kernel, X, 1.0, tile_rows=400, workspace=tmp_path) as store:
        task = FactorTask(kernel, MemorySource(X), None, 1.0, store, None)
    for path in tmp_path.glob("*/factor/c/2/1"):
        path.unlink()
    tracemalloc.start()
    factor_tile(task, (2, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    need = budget.factor_task_bytes(400, 10, kernel.peak_blocks, kernel.landmark_copies)
    assert 2 / 3 * need < peak <= need
