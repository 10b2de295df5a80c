"""The triangular product is right, and lets other threads of Python run."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.numerics.skinny_and_triangular_matmul import triangular_matmul_in_place


@given(n=st.integers(0, 9), r=st.integers(1, 9), dtype=st.sampled_from([np.float64, np.float32]), sliced=st.booleans())
def test_the_product_is_that_of_numpy(n, r, dtype, sliced):
    rng = np.random.default_rng([n, r])
    values, W = rng.normal(size=(n + 3, r)).astype(dtype), np.triu(rng.normal(size=(r, 2 * r))).astype(dtype)
    W, rows = W[:, :r] if sliced else np.ascontiguousarray(W[:, :r]), values[2 : n + 2]
    expected, bound = rows @ W, np.abs(rows) @ np.abs(W)
    before = values.copy()
    triangular_matmul_in_place(rows, W)
    assert (np.abs(rows - expected) <= 64 * np.finfo(dtype).eps * bound).all()
    np.testing.assert_array_equal(values[[0, 1, -1]], before[[0, 1, -1]])


def test_what_blas_would_misread_is_never_handed_to_it():
    W = np.eye(3)
    for values in (np.ones((2, 3), np.float32), np.ones((2, 4)), np.ones((3, 2)).T, np.ones((2, 6))[:, ::2]):
        with pytest.raises(AssertionError):
            triangular_matmul_in_place(values, W)


@pytest.mark.slow
def test_python_goes_on_while_a_product_is_computed():
    values, W = np.ones((3000, 1500)), np.triu(np.ones((1500, 1500)))
    worker = threading.Thread(target=triangular_matmul_in_place, args=(values, W))
    start = last = time.perf_counter()
    longest = 0.0
    worker.start()
    while worker.is_alive():
        time.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < (last - start) / 2, "the other thread waited for most of it"
