"""Products without a Gram matrix: right, of the same bits wherever they are computed, in little memory."""

import subprocess
import sys
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from dkfm import kernels
from dkfm.core import budget
from dkfm.errors import BudgetError, KernelError, UnfitWorkerError
from dkfm.execution import executors
from dkfm.execution.executors import ThreadExecutor
from dkfm.gram import matrix_free, shared_arrays
from dkfm.gram.matrix_free import MatrixFreeGram, open_matrix_free
from dkfm.gram.shared_arrays import SharedArrays
from dkfm.sources.memory import MemorySource
from helpers.harness import left

KERNELS = [
    kernels.Gaussian(1.5),
    kernels.Laplacian(2.0),
    kernels.Polynomial(3) + 0.5 * kernels.Linear(),
    kernels.NegativeSquaredDistance(),
    kernels.Function(lambda X, Y: np.cos(X.sum(axis=1)[:, None] - Y.sum(axis=1))),
]


def product_on_threads(kernel, X, V, tile_rows, threads):
    executor = ThreadExecutor(threads)
    try:
        return MatrixFreeGram(kernel, MemorySource(X), executor, tile_rows, SharedArrays()) @ V
    finally:
        executor.cancel()


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@given(n=st.integers(1, 40), d=st.integers(1, 7), columns=st.integers(1, 5), tile_rows=st.integers(1, 50))
@settings(max_examples=8)
def test_products_are_those_of_the_dense_matrix(kernel, n, d, columns, tile_rows):
    rng = np.random.default_rng(n)
    X, V = rng.normal(size=(n, d)), rng.normal(size=(n, columns))
    K = kernel(X)
    found = product_on_threads(kernel, X, V, tile_rows, 2)
    # A product of n values has a rounding error of n eps of the sum of their magnitudes.
    np.testing.assert_allclose(found, K @ V, rtol=0, atol=1e-14 * (1 + n) * (np.abs(K) @ np.abs(V)).max())


def test_pieces_smaller_than_a_tile_make_the_same_product(rng, monkeypatch):
    monkeypatch.setattr(matrix_free, "PIECE_ROWS", 7)
    monkeypatch.setattr(matrix_free, "PIECE_COLUMNS", 11)
    monkeypatch.setattr(matrix_free, "_DIAGONAL_ROWS", 15)
    monkeypatch.setattr(matrix_free, "_DIAGONAL_COLUMNS", 5)
    X, V = rng.normal(size=(100, 6)), rng.normal(size=(100, 3))
    for rows in (X, csr_array(X)):
        found = product_on_threads(kernels.Gaussian(2.0), rows, V, 40, 2)
        np.testing.assert_allclose(found, kernels.Gaussian(2.0)(X) @ V, rtol=0, atol=1e-12)


def test_any_number_of_threads_has_the_same_bits(rng):
    X, V = rng.normal(size=(2300, 6)), rng.normal(size=(2300, 32))  # tiles are wide enough for products of parts
    truth = product_on_threads(kernels.Gaussian(2.0), X, V, 700, 1)
    np.testing.assert_allclose(truth, kernels.Gaussian(2.0)(X) @ V, rtol=0, atol=1e-12)
    for threads in (2, 3, 5, 5, 5):
        np.testing.assert_array_equal(product_on_threads(kernels.Gaussian(2.0), X, V, 700, threads), truth)


def test_workers_give_the_bits_of_threads_and_leave_nothing(rng, tmp_path, client):
    V = rng.normal(size=(500, 4))
    for X in (rng.normal(size=(500, 6)), csr_array(rng.normal(size=(500, 6)) * (rng.uniform(size=(500, 6)) < 0.4))):
        with open_matrix_free(kernels.Gaussian(2.0), X, 4, tile_rows=120, workspace=tmp_path) as gram:
            found = [gram @ V, gram @ V]
            assert len(list(gram.shared.folder.iterdir())) == 3  # the rows, the probe, and the record of the folder
        np.testing.assert_array_equal(found[0], product_on_threads(kernels.Gaussian(2.0), X, V, 120, 2))
        np.testing.assert_array_equal(found[0], found[1])
    assert left(tmp_path) == []


def test_workers_that_do_not_see_the_rows_are_named(rng, tmp_path, client, monkeypatch):
    monkeypatch.setattr(shared_arrays.worker_checks, "local_versions", lambda **_: {"numpy": "0.1"})
    with (
        pytest.raises(UnfitWorkerError, match=r"numpy"),
        open_matrix_free(kernels.Gaussian(2.0), rng.normal(size=(9, 2)), 4, workspace=tmp_path),
    ):
        pass
    assert left(tmp_path) == []


def test_workers_without_memory_for_a_tile_are_refused_before_a_file_is_written(rng, tmp_path, client, monkeypatch):
    monkeypatch.setattr(shared_arrays.memory, "task_budget", lambda *_, **__: 1000)
    with (
        pytest.raises(BudgetError, match="A tile needs"),
        open_matrix_free(kernels.Gaussian(2.0), rng.normal(size=(300, 2)), 4, workspace=tmp_path),
    ):
        pass
    assert left(tmp_path) == []


def test_values_that_are_not_finite_are_named(rng):
    X, V = rng.normal(size=(30, 2)), np.ones((30, 2))
    X[17] = 1e200
    with pytest.raises(KernelError, match=r"returned -?inf for rows (17 and \d+|\d+ and 17)"):
        product_on_threads(kernels.Polynomial(3), X, V, 10, 2)
    with pytest.raises(KernelError, match="Products with the values"):
        product_on_threads(kernels.Linear(), np.full((4, 1), 1e150), np.full((4, 1), 1e150), 2, 1)


def test_an_error_in_a_task_cancels_the_others(rng, monkeypatch):
    def multiply(*_):
        raise KernelError("no")

    monkeypatch.setattr(matrix_free, "multiply_tile", multiply)
    with pytest.raises(KernelError, match="no"), open_matrix_free(KERNELS[0], rng.normal(size=(50, 2)), 1) as gram:
        gram @ np.ones((50, 1))
    assert isinstance(gram.executor, executors.ThreadExecutor)


MEMORY = """
import numpy as np
from dkfm import kernels
from dkfm.core import budget, cpus
from dkfm.execution import memory
from dkfm.gram.matrix_free import choose_tile_rows, open_matrix_free

n, columns = 16_000, 16
X, V = np.random.default_rng(0).normal(size=(n, 8)), np.ones((n, columns))
with open_matrix_free(kernels.Gaussian(2.0), X[:300], columns) as gram:
    gram @ V[:300]
before = memory.peak_memory()
with open_matrix_free(kernels.Gaussian(2.0), X, columns) as gram:
    gram @ V
each = budget.matrix_free_task_bytes(choose_tile_rows(n, 8, columns), 8, columns, 2, 1)
print(memory.peak_memory() - before, cpus.COUNT * each + 3 * V.nbytes + 2**25)
"""


@pytest.mark.slow
def test_memory_is_that_of_the_tiles():
    taken, predicted = map(int, subprocess.check_output([sys.executable, "-c", MEMORY]).split())
    assert taken < predicted < 8 * 16_000**2 / 10


def test_temporary_folders_are_those_of_the_system_by_default(rng, client, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_matrix_free(KERNELS[0], rng.normal(size=(50, 2)), 1) as gram:
        assert gram.shared.folder.parent == tmp_path
        assert gram.rows.location.parent == tmp_path / gram.shared.folder.name
    assert left(tmp_path) == []


@pytest.mark.parametrize("kernel", [kernels.Gaussian(50.0), kernels.Matern(1.5, 50.0)], ids=repr)
def test_a_task_of_wide_rows_takes_the_memory_that_is_planned(kernel, rng):
    rows, d = 600, 2000
    X, V = rng.normal(size=(2 * rows, d)), rng.normal(size=(2 * rows, 1))
    matrix_free.multiply_tile(kernel, MemorySource(X[:20]), MemorySource(V[:20]), (1, 0), 10)
    with ThreadPoolExecutor(1) as fresh:  # this thread may have buffers from before
        tracemalloc.start()
        fresh.submit(matrix_free.multiply_tile, kernel, MemorySource(X), MemorySource(V), (1, 0), rows).result()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    read = 2 * rows * (d + 1) * 8  # a worker reads the rows from files
    assert peak + read <= budget.matrix_free_task_bytes(rows, d, 1, kernel.peak_blocks, kernel.landmark_copies) + 2**20


def test_rows_that_are_not_finite_are_looked_for_piece_by_piece(rng):
    X, V = rng.normal(size=(3000, 2)), rng.normal(size=(3000, 1))
    X[2999] = 1e200
    tracemalloc.start()
    with pytest.raises(KernelError, match="2999"):
        matrix_free.multiply_tile(kernels.Polynomial(3), MemorySource(X), MemorySource(V), (0, 0), 3000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 3000 * 3000 / 4
