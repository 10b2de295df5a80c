"""Threads that score rows in memory."""

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from dkfm import ExactFeatureMap, KernelPCA, kernels
from dkfm.core import cpus
from dkfm.errors import KernelError
from dkfm.execution import scoring_threads
from dkfm.numerics import scorer

CALLS = []


def linear(X, Y):
    """Return inner products; note the thread."""
    CALLS.append(threading.current_thread().name)
    return X @ Y.T


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Score on four threads, in tiles of eight rows."""
    monkeypatch.setattr(cpus, "COUNT", 4)
    monkeypatch.setattr(scorer, "choose_tile_rows", lambda *_: 8)


@pytest.fixture
def watch(monkeypatch):
    """Return a list of the threads that evaluate kernel values, with the number of threads of their BLAS."""
    seen, evaluate = [], scorer.Scorer.kernel_values

    def watched(self, Z, out=None):
        blas = {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}
        seen.append((threading.current_thread().name.rpartition("_")[0], max(blas)))
        return evaluate(self, Z, out)

    monkeypatch.setattr(scorer.Scorer, "kernel_values", watched)
    return seen


@pytest.mark.costly
@pytest.mark.parametrize("basis", ["symmetric", "spectral", "cholesky"])
def test_threads_change_no_bit(basis, rng, monkeypatch, watch):
    fitted = ExactFeatureMap(kernels.Gaussian(2.0), basis=basis).fit(rng.normal(size=(30, 3)))
    rows = rng.normal(size=(200, 3))
    watch.clear()
    found = fitted.transform(rows)
    assert set(watch) == {("dkfm-tiles", 1)}
    assert len(watch) == 25
    monkeypatch.setattr(cpus, "COUNT", 10_000)
    np.testing.assert_array_equal(found, fitted.transform(rows))
    assert watch[-1] == ("", 1)


def test_only_large_products_of_few_tiles_have_all_threads_of_blas(rng, monkeypatch, watch):
    fitted = KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(30, 3)))
    with threadpool_limits(2, user_api="blas"):
        watch.clear()
        fitted.transform(rng.normal(size=(55, 3)))
        assert set(watch) == {("", 1)}
        monkeypatch.setattr(scoring_threads, "_MAX_SINGLE_THREAD_MULTIPLICATIONS", 55 * 30 * (3 + 2) - 1)
        watch.clear()
        fitted.transform(rng.normal(size=(55, 3)))
        assert set(watch) == {("", 2)}


def test_a_users_kernel_is_called_by_the_thread_of_the_user(rng):
    fitted = KernelPCA(2, kernel=kernels.Function(linear)).fit(rng.normal(size=(30, 3)))
    CALLS.clear()
    fitted.transform(rng.normal(size=(200, 3)))
    assert len(CALLS) == 25
    assert set(CALLS) == {threading.current_thread().name}


def test_a_row_that_overflows_is_named_on_threads_too(rng):
    fitted = KernelPCA(2, kernel=kernels.Polynomial(3)).fit(rng.normal(size=(30, 3)))
    rows = rng.normal(size=(200, 3))
    rows[150] = 1e200
    with pytest.raises(KernelError, match="Row 150 of X overflows"):
        fitted.transform(rows)


def test_after_an_error_no_thread_begins_another_tile(rng, monkeypatch):
    fitted = KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(30, 3)))
    started, all_started, drained = [], threading.Barrier(4), threading.Event()

    def drain(tiles, maxlen):
        assert list(tiles)
        drained.set()

    def fail_once(self, Z, out=None):
        started.append(None)
        if len(started) > 4:
            return out
        if all_started.wait() == 0:
            raise MemoryError
        drained.wait(10)
        return out

    monkeypatch.setattr(scorer, "deque", drain)
    monkeypatch.setattr(scorer.Scorer, "kernel_values", fail_once)
    with pytest.raises(MemoryError):
        fitted.transform(rng.normal(size=(2_000, 3)))
    assert len(started) == 4
