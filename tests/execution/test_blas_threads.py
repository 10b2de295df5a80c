"""The number of BLAS threads inside fits."""

from contextlib import suppress

import numpy as np
import pytest
from threadpoolctl import OpenBLASController, threadpool_info, threadpool_limits

from dkfm import ExactFeatureMap, KernelFisher, KernelPCA, kernels
from dkfm.execution import blas_threads


class ThreadsSeen(kernels.Function):
    """A kernel that keeps the largest number of BLAS threads that it was called with."""

    def __init__(self):
        super().__init__(self._evaluate)
        self.threads = 0

    def _evaluate(self, X, Y):
        libraries = (info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas")
        self.threads = max(self.threads, *libraries)
        return X @ Y.T


@pytest.mark.parametrize("estimator", [ExactFeatureMap, KernelPCA, KernelFisher])
@pytest.mark.parametrize(("n", "threads"), [(60, 1), (61, 2)])
def test_a_fit_of_few_rows_has_one_blas_thread(estimator, n, threads, monkeypatch):
    monkeypatch.setattr(blas_threads, "_MAX_SINGLE_THREAD_ROWS", 60)
    kernel, rows = ThreadsSeen(), np.random.default_rng(0).normal(size=(n, 3))
    with threadpool_limits(2, user_api="blas"):
        estimator(kernel=kernel).fit(rows, np.arange(n) % 2)
        after = {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}
    assert kernel.threads == threads
    assert after == {2}


def blas_numbers():
    return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]


def test_an_interruption_as_a_limit_is_set_or_lifted_does_not_outlast_the_next_job(monkeypatch):
    set_number, libraries = OpenBLASController.set_num_threads, len(blas_numbers())
    for number in range(1, 2 * libraries + 1):
        calls = []

        def interrupted(library, count, number=number, calls=calls):
            set_number(library, count)
            calls.append(count)
            if len(calls) == number:
                raise KeyboardInterrupt

        with threadpool_limits(2, user_api="blas"):
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(OpenBLASController, "set_num_threads", interrupted)
                with blas_threads.single_blas_thread():
                    pass
            with blas_threads.single_blas_thread():
                assert set(blas_numbers()) == {1}
            assert set(blas_numbers()) == {2}
