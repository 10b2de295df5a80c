"""Pivots in rounds over a source: residuals that hold for every row, and the same bits wherever they are computed."""

import subprocess
import sys

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

import dkfm
from dkfm import kernels
from dkfm.errors import InvalidInputError, KernelError
from dkfm.execution.executors import ThreadExecutor, open_executor
from dkfm.files import row_values
from dkfm.gram import row_passes, streamed_pivots
from dkfm.gram.shared_arrays import SharedArrays, open_shared_arrays
from dkfm.gram.streamed_pivots import PivotSearch, find_streamed_pivots
from dkfm.numerics.growing_cholesky import GrowingFactor
from dkfm.numerics.pivoted_cholesky import factor_gram, pivot_threshold
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source

SCALED = kernels.Polynomial(4, scale=1 / 10)  # k(x, x) of many magnitudes


def find(kernel, X, tol=None, limit=None, *, is_random=False, threads=2):
    source = X if hasattr(X, "read") else MemorySource(X)
    executor = ThreadExecutor(threads)
    search = PivotSearch(pivot_threshold(tol), limit or source.shape[0], is_random, np.random.RandomState(0))
    try:
        return find_streamed_pivots(kernel, source, search, executor, SharedArrays())
    finally:
        executor.cancel()


def true_residuals(kernel, X, found):
    """Shares of k(x, x) that the features leave, by dense formulas."""
    X = X.toarray() if hasattr(X, "toarray") else X
    features = kernel(X, X[found.row_indices]) @ found.root.weights
    diagonal = kernel.diag(X)
    return (diagonal - (features**2).sum(axis=1)) / np.where(diagonal > 0, diagonal, 1)


@pytest.fixture
def small_rounds(monkeypatch):
    """Rounds of a few candidates, and tiles of a few rows."""
    monkeypatch.setattr(streamed_pivots, "ROUND_CANDIDATES", 16)
    monkeypatch.setattr(streamed_pivots, "_LARGEST", 4)
    monkeypatch.setattr(row_values, "BLOCK_ROWS", 50)
    monkeypatch.setattr(row_passes, "PASS_TILE_ROWS", 37)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(1, 120),
    st.integers(1, 4),
    st.sampled_from([1e-1, 1e-3, 1e-6]),
    st.booleans(),
    st.sampled_from([kernels.Gaussian(1.0), kernels.Laplacian(2.0), SCALED]),
)
def test_the_residual_of_every_row_is_within_the_bound(n, d, tol, is_random, kernel):
    X = np.random.default_rng(n).normal(size=(n, d))
    found = find(kernel, X, tol, is_random=is_random)
    residuals = true_residuals(kernel, X, found)
    # Features have the rounding of the root: eps times its condition, which is at most 1 / tol.
    assert residuals.max() <= found.residual_summary.largest_by_rank[-1] + 1e-14 / tol
    assert found.residual_summary.largest_by_rank[-1] <= tol**2
    assert residuals.min() >= -1e-14 / tol
    assert len(np.unique(found.row_indices)) == len(found.row_indices)


@pytest.mark.costly
@pytest.mark.parametrize("is_random", [False, True])
def test_many_small_rounds_find_the_same_span(is_random, small_rounds, rng):
    X = rng.normal(size=(400, 2))
    found = find(kernels.Gaussian(1.0), X, 1e-4, is_random=is_random)
    assert true_residuals(kernels.Gaussian(1.0), X, found).max() <= 1.01e-8
    assert (np.diff(found.residual_summary.largest_by_rank) <= 0).all()
    truth = factor_gram(np.asfortranarray(kernels.Gaussian(1.0)(X)), 1e-4)
    assert len(found.row_indices) <= (1.35 if is_random else 1.15) * len(truth.row_indices)


@pytest.mark.slow
def test_the_rank_is_within_five_percent_of_pivots_in_memory(rng):
    X = rng.normal(size=(6000, 3))
    found = find(kernels.Gaussian(2.0), X, 1e-4)
    truth = dkfm.ExactFeatureMap(kernels.Gaussian(2.0), basis="cholesky", tol=1e-4).fit(X)
    assert len(found.row_indices) <= 1.05 * truth.rank_


@pytest.mark.slow
def test_pivots_down_to_rounding_do_not_pass_for_more_than_there_are(rng):
    X = np.repeat(rng.normal(size=(500, 2)), 2, axis=0)  # as a second time, so that half of all residuals are rounding
    found = find(kernels.Gaussian(1.0), X)
    assert len(found.row_indices) < 260
    assert true_residuals(kernels.Gaussian(1.0), X, found).min() > -1e-12


def test_rows_of_zero_and_of_all_scales(rng, small_rounds):
    X = rng.normal(size=(300, 3)) * np.geomspace(1e-3, 1, 300)[:, None]
    X[[5, 250]] = 0.0
    found = find(SCALED, X, 1e-5)
    assert np.abs(true_residuals(SCALED, X, found)).max() <= 1.01e-10
    assert not set(found.row_indices) & {5, 250}
    nothing = find(kernels.Linear(), np.zeros((40, 2)))
    assert len(nothing.row_indices) == 0


@pytest.mark.slow
def test_any_number_of_threads_and_any_form_of_rows_have_the_same_bits(tmp_path, rng, small_rounds, client):
    X = rng.normal(size=(300, 3))
    np.save(tmp_path / "x.npy", X)
    zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(41, 3))
    truth = find(kernels.Gaussian(1.0), X, 1e-3)
    others = [find(kernels.Gaussian(1.0), X, 1e-3, threads=threads) for threads in (1, 3)]
    others += [find(kernels.Gaussian(1.0), open_source(tmp_path / name), 1e-3) for name in ("x.npy", "x.zarr")]
    source = open_source(tmp_path / "x.zarr")
    search = PivotSearch(pivot_threshold(1e-3), 300, False, np.random.RandomState(0))
    with (
        open_executor(client) as executor,
        open_shared_arrays(executor, 10**7, 0, "The pivots", tmp_path / "w", source) as shared,
    ):
        others.append(find_streamed_pivots(kernels.Gaussian(1.0), source, search, executor, shared))
        assert len(list(shared.folder.iterdir())) == 2  # the probe, and the record of the folder
    for other in others:
        np.testing.assert_array_equal(other.row_indices, truth.row_indices)
        np.testing.assert_array_equal(other.root.weights, truth.root.weights)
    assert list((tmp_path / "w").iterdir()) == []


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("limit", [None, 21])
def test_residuals_in_a_file_have_the_same_bits(is_random, limit, small_rounds, rng, monkeypatch):
    X = rng.normal(size=(300, 2))
    truth = find(kernels.Gaussian(1.0), X, 1e-3, limit, is_random=is_random)
    monkeypatch.setattr(row_values, "_MAX_MEMORY_BYTES", 0)
    found = find(kernels.Gaussian(1.0), X, 1e-3, limit, is_random=is_random)
    np.testing.assert_array_equal(found.row_indices, truth.row_indices)
    np.testing.assert_array_equal(found.root.weights, truth.root.weights)
    np.testing.assert_array_equal(found.residual_summary.largest_by_rank, truth.residual_summary.largest_by_rank)
    residuals = np.delete(true_residuals(kernels.Gaussian(1.0), X, found), found.row_indices)
    for dropped in (truth.root.dropped_values, found.root.dropped_values):
        np.testing.assert_allclose(dropped, np.sort(residuals)[::-1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("kept", [1, 3, 50, 299, 300])
def test_the_largest_dropped_residuals_are_kept(kept, small_rounds, rng, monkeypatch):
    X = rng.normal(size=(300, 2))
    everything = find(kernels.Gaussian(1.0), X, 1e-2).root.dropped_values
    monkeypatch.setattr(streamed_pivots, "MAX_DROPPED", kept)
    np.testing.assert_array_equal(find(kernels.Gaussian(1.0), X, 1e-2).root.dropped_values, everything[:kept])
    few = np.array([[0.0], [5.0], [9.0]])  # all are pivots
    assert len(find(kernels.Gaussian(1.0), few).root.dropped_values) == 0


@pytest.mark.parametrize("is_random", [False, True])
def test_candidates_are_rows_above_the_threshold_whatever_their_block(is_random, small_rounds):
    residuals = np.full(300, 1e-9)
    residuals[[55, *range(240, 300)]] = 0.5
    residuals[271] = 1.0
    search = PivotSearch(1e-6, 300, is_random, np.random.RandomState(0))
    drawn = streamed_pivots._draw_candidates(residuals, search)
    assert len(drawn) > 8
    assert (residuals[drawn] > 1e-6).all()
    assert is_random or 271 in drawn  # the largest one


@pytest.mark.parametrize("count", [0, 1, 700, 4999, 5000, 6000])
def test_the_largest_values_are_sorted(count, rng, monkeypatch):
    monkeypatch.setattr(row_values, "BLOCK_ROWS", 700)
    values = rng.normal(size=5000)
    np.testing.assert_array_equal(streamed_pivots._sort_largest(values, count), np.sort(values)[::-1][:count])


def test_pivots_are_not_among_the_dropped_rows():
    factor, _ = GrowingFactor.empty().extend_by_largest(np.eye(2), np.zeros((2, 0)), np.ones(2), 0.5, 2)
    residuals = np.array([0.0, -0.5, 0.25, 0.0, -0.125])
    state = streamed_pivots._State(residuals, factor, np.array([0, 3]), np.zeros((2, 1)), np.ones(2), [1.0, 0.5, 0.25])
    np.testing.assert_array_equal(
        streamed_pivots._make_pivots(state, 1.0, -0.5).root.dropped_values, [0.25, -0.125, -0.5]
    )


def test_sparse_rows_have_the_pivots_of_dense_ones(rng):
    X = rng.normal(size=(200, 8)) * (rng.uniform(size=(200, 8)) < 0.4)
    found = find(kernels.Gaussian(2.0), csr_array(X), 1e-3)
    assert true_residuals(kernels.Gaussian(2.0), X, found).max() <= 1.01e-6


def test_what_is_not_finite_is_named(rng):
    X = rng.normal(size=(100, 2))
    X[63] = 1e200
    with pytest.raises(KernelError, match="for row 63 with itself"):
        find(kernels.Polynomial(3), X)
    X[63], X[7] = 50.0, -50.0
    with pytest.raises(KernelError, match=r"returned inf for rows (63 and 7|7 and 63)"):
        find(kernels.Function(infinite_far_away), X)
    rows = np.concatenate([np.repeat(X[7:8], 3000, axis=0), X[63:64]])
    with pytest.raises(KernelError, match=r"3000"):
        find(kernels.Function(infinite_far_away), rows, limit=1)
    X[63, 1] = np.nan
    with pytest.raises(InvalidInputError, match="63"):
        find(kernels.Gaussian(1.0), X)


def infinite_far_away(X, Y):
    """A Gaussian that is infinite for rows that are far apart."""
    squares = ((X[:, None] - Y) ** 2).sum(axis=2)
    return np.where(squares > 10_000, np.inf, np.exp(-squares))


def test_a_limit_is_kept_to(rng, small_rounds):
    X = rng.normal(size=(300, 2))
    for is_random in (False, True):
        found = find(kernels.Gaussian(1.0), X, limit=21, is_random=is_random)
        assert len(found.row_indices) == 21
        assert (
            true_residuals(kernels.Gaussian(1.0), X, found).max() <= found.residual_summary.largest_by_rank[-1] + 1e-12
        )


@pytest.mark.slow
def test_random_pivots_are_distributed_as_one_by_one(rng):
    """Of two pivots among four rows, against the exact probabilities of randomly pivoted Cholesky."""
    X, kernel = np.array([[0.0], [0.1], [1.0], [3.0]]), kernels.Gaussian(1.0)
    A, counts = kernel(X), np.zeros((4, 4))
    for _ in range(4000):
        proposals = rng.integers(4, size=30)
        _, chosen = GrowingFactor.empty().extend_by_rejection(
            A[np.ix_(proposals, proposals)],
            np.zeros((30, 0)),
            np.ones(30),
            1e-12,
            2,
            np.ones(30),
            rng.uniform(size=30),
        )
        counts[tuple(proposals[chosen])] += 1
    truth = np.zeros((4, 4))
    for first in range(4):
        rest = 1 - A[:, first] ** 2
        truth[first] = rest / rest.sum() / 4
    np.testing.assert_allclose(counts / 4000, truth, atol=0.02)


MEMORY = """
import sys, tracemalloc
import numpy as np
from dkfm import ExactFeatureMap, kernels
from dkfm.core import cpus
from dkfm.files import row_values
from dkfm.gram import streamed_pivots, streamed_rows

# The tiles that two threads hold at the same time are a matter of chance.
cpus.COUNT = 1
n, row_values._MAX_MEMORY_BYTES = int(sys.argv[1]), int(sys.argv[2])
row_values.BLOCK_ROWS, streamed_pivots.MAX_DROPPED = 2**16, 2**10
# Kernel values of many candidates, and large tiles, would hide the rest.
streamed_pivots.ROUND_CANDIDATES, streamed_pivots._LARGEST, streamed_rows._TILE_VALUES = 64, 16, 2**16
with open(sys.argv[3], "wb") as file:
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (n, 2)})
    for start in range(0, n, 100_000):
        file.write(np.random.default_rng(start).normal(size=(100_000, 2)).tobytes())
phi = ExactFeatureMap(kernels.Gaussian(9.0), basis="cholesky", n_landmarks=8, landmarks="pivots", centered=True)
tracemalloc.start()
phi.fit(sys.argv[3])
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.slow
def test_memory_grows_by_a_number_a_row_or_not_at_all(tmp_path):
    def measure(n, in_memory):
        command = [sys.executable, "-c", MEMORY, str(n), str(in_memory), str(tmp_path / "x.npy")]
        return int(subprocess.check_output(command, text=True))

    few, many, on_disk = measure(300_000, 2**40), measure(900_000, 2**40), measure(900_000, 0)
    # A number for each of 600,000 rows is 4.8 MB; the rest of the peak is a tile, and Python's own objects.
    assert 0.9 * 4.8e6 < many - few < 1.1 * 4.8e6
    assert on_disk < few
