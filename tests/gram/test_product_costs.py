"""Roads of products: the fastest that fits, and a store where the user wants one or where values are dear."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest

from dkfm import kernels
from dkfm.core import budget
from dkfm.gram import product_costs
from dkfm.gram.product_costs import LanczosProblem, ProductMethod

GB = 10**9
GAUSSIAN = kernels.Gaussian(7.0)


@pytest.fixture(autouse=True)
def value_seconds(monkeypatch):
    """Values of two nanoseconds, as on a machine of these years; this machine may be slower or faster."""
    measured = product_costs.value_seconds
    monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: 2e-9)
    return measured


def task(kernel=GAUSSIAN, n=60_000, d=50, *, keeps_store=False, is_cluster=False, disk_room=100 * GB):
    return LanczosProblem(kernel, n, d, 20, 10, None, 2, is_cluster, keeps_store, disk_room)


def first(work, available):
    return product_costs.compare_product_costs(work, available)[0]


def test_a_matrix_larger_than_memory_is_computed_anew_and_writes_nothing():
    cost = first(task(), 20 * GB)
    assert (cost.method, cost.disk_bytes) == (ProductMethod.MATRIX_FREE, 0)
    assert cost.memory_bytes < 1.5 * GB


def test_a_matrix_for_a_workspace_stays_in_its_store():
    cost = first(task(keeps_store=True), 20 * GB)
    assert cost.method is ProductMethod.STORED
    assert 28 * GB < cost.disk_bytes < 31 * GB


def test_a_matrix_larger_than_the_disk_is_computed_anew_though_a_workspace_asks_for_it(monkeypatch):
    monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: 1e-6)
    for keeps_store in (True, False):
        cost = first(task(keeps_store=keeps_store, disk_room=20 * GB), 20 * GB)
        assert cost.method is ProductMethod.MATRIX_FREE
        assert (cost.disk_bytes > 0) is keeps_store  # the state, so that the fit can go on
        assert cost.disk_bytes < GB


def test_values_that_cost_more_than_to_read_them_are_stored(monkeypatch):
    monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: 1e-6)
    assert first(task(), 20 * GB).method is ProductMethod.STORED


def test_the_method_of_the_least_memory_is_first_where_none_fits():
    costs = product_costs.compare_product_costs(task(), 10**6)
    assert costs[0].memory_bytes == min(cost.memory_bytes for cost in costs)


def test_a_cluster_needs_memory_for_tasks_on_its_workers():
    here, there = first(task(), 20 * GB), first(task(is_cluster=True), 20 * GB)
    assert here.task_bytes == 0
    assert there.task_bytes > 0
    assert there.memory_bytes < here.memory_bytes


def test_the_time_of_a_value_is_measured_for_any_kernel(value_seconds):
    def refuse(X, Y):
        raise ValueError("no")

    class Unhashable:
        __hash__ = None

        def __call__(self, X, Y):
            return X @ Y.T

    assert value_seconds(kernels.Function(refuse), 5) == budget.VALUE_SECONDS
    assert 0 < value_seconds(kernels.Function(Unhashable()), 5) < 1e-3
    slow = kernels.Pairwise(lambda x, y: float(x @ y))
    assert value_seconds(slow, 5) > 5 * value_seconds(kernels.Linear(), 5)
    assert 0 < value_seconds(kernels.ChiSquared(1.0), 5) < 1e-3


@pytest.mark.parametrize("call", [3e-4, 6e-3])
@pytest.mark.parametrize(("each", "blocks"), [(5e-9, 3), (2e-6, 2), (1e-4, 1)])
def test_what_a_call_takes_is_shared_by_the_values_of_a_whole_block(monkeypatch, value_seconds, call, each, blocks):
    sizes = []

    def time_block(kernel, X, Y):
        sizes.append(len(X) * len(Y))
        return call + each * sizes[-1]

    monkeypatch.setattr(product_costs, "_time_block", time_block)
    expected = each + call / (budget.PIECE_ROWS * budget.PIECE_COLUMNS)
    assert value_seconds(kernels.Gaussian(1 + call + each), 7) == pytest.approx(expected, rel=0.01)
    assert len(sizes) == 1 + blocks


def test_threads_that_ask_at_once_measure_products_once(monkeypatch):
    measured = []

    def measure(threads):
        measured.append(threads)
        return original(threads)

    original = product_costs._measure_multiplication_seconds
    monkeypatch.setattr(product_costs, "_measure_multiplication_seconds", lru_cache(measure))
    with ThreadPoolExecutor(4) as pool:
        times = set(pool.map(lambda _: product_costs.multiplication_seconds(), range(4)))
    assert (len(times), len(measured)) == (1, 1)


@pytest.mark.parametrize("kernel", [GAUSSIAN, kernels.Precomputed()])
def test_no_method_is_free(kernel):
    for cost in product_costs.compare_product_costs(task(kernel, 5000), 20 * GB):
        assert np.isfinite(cost.seconds)
        assert cost.seconds > 0
