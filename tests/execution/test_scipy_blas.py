"""A task loads SciPy's BLAS only if it may call it, and BLAS has one thread in every task that is inside the limit."""

import os
import subprocess
import sys

import numpy as np
import pytest

from dkfm import kernels
from dkfm.numerics import links
from dkfm.numerics import skinny_and_triangular_matmul as matmul
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import prepare_scorer

LIMITS = """
import sys
from threadpoolctl import threadpool_info
import numpy
from dkfm.execution.blas_threads import single_blas_thread

def count():
    return sorted(info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas")

before = count()
with single_blas_thread(uses_scipy=False):
    assert "scipy.linalg" not in sys.modules
    assert set(count()) == {1}
    with single_blas_thread(uses_scipy=True):  # another task, of a model that calls SciPy
        assert "scipy.linalg" in sys.modules
        assert len(count()) > len(before) and set(count()) == {1}
    assert set(count()) == {1}
assert set(before) == set(count())
with single_blas_thread(uses_scipy=False):  # what is loaded is limited
    assert set(count()) == {1}
assert set(before) == set(count())
"""


def user_kernel(X, Y):
    return X @ Y.T


@pytest.mark.slow
def test_limits_of_tasks_with_and_without_scipy_reach_all_libraries_and_are_lifted():
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", LIMITS], env={**os.environ, **threads}, check=True)


@pytest.mark.parametrize("link", [links.IDENTITY, links.ARGMAX, links.SOFTMAX])
@pytest.mark.parametrize("kernel", [kernels.Gaussian(2.0), kernels.Matern(0.7), kernels.Laplacian(1.0)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_scores_of_dense_weights_call_no_routine_of_scipys_blas(monkeypatch, rng, kernel, link, dtype):
    def refuse(*arguments):
        raise AssertionError("SciPy's BLAS is called")

    monkeypatch.setattr(matmul, "_load_blas", refuse)
    monkeypatch.setattr("scipy.linalg.get_blas_funcs", refuse)
    X, W = (rng.normal(size=shape).astype(dtype) for shape in ((9, 4), (9, 3)))
    scorer = prepare_scorer(Model(kernel, X, {"scores": Head(W, link=link), "back": Head(W, None, np.ones(3, dtype))}))
    assert not scorer.may_call_scipy_blas
    scorer.score_heads(["scores", "back"], X)


def test_triangular_weights_and_functions_of_the_user_may_call_scipys_blas(rng):
    X = rng.normal(size=(4, 2))
    triangle = Model(kernels.Linear(), X, {"features": Head(np.triu(rng.normal(size=(4, 4))), triangular=True)})
    assert prepare_scorer(triangle).may_call_scipy_blas
    assert prepare_scorer(Model(kernels.Function(user_kernel), X, {"scores": Head(X)})).may_call_scipy_blas
