"""Products with narrow weights: right for any sizes, and for the slices that the tile loop hands over."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.numerics.skinny_and_triangular_matmul import (
    count_partial_product_values,
    count_partial_products,
    skinny_matmul,
    skinny_matmul_of_transpose,
)


@given(
    n=st.integers(0, 300),
    m=st.sampled_from([1, 511, 512, 513, 777, 1024, 3777]),
    q=st.sampled_from([0, 1, 2, 7, 20, 39, 40, 41]),
    dtype=st.sampled_from([np.float64, np.float32]),
    sliced=st.booleans(),
)
def test_the_product_is_that_of_numpy(n, m, q, dtype, sliced):
    rng = np.random.default_rng([n, m, q])
    values, W = rng.normal(size=(n, m + 3)).astype(dtype), rng.normal(size=(m, q + 5)).astype(dtype)
    values, W = (values[:, :m], W[:, :q]) if sliced else map(np.ascontiguousarray, (values[:, :m], W[:, :q]))
    out = np.full((n, q), np.nan, dtype)
    skinny_matmul(values, W, out)
    expected, bound = values.astype(float) @ W.astype(float), np.abs(values).astype(float) @ np.abs(W).astype(float)
    assert (np.abs(out - expected) <= 64 * np.finfo(dtype).eps * bound).all()


@given(
    n=st.sampled_from([0, 1, 100, 256, 521, 2000]),
    m=st.sampled_from([0, 1, 47, 48, 333, 480]),
    q=st.sampled_from([0, 1, 20, 40, 41]),
    order=st.sampled_from("CF"),
    sliced=st.booleans(),
)
def test_the_product_with_a_transpose_is_that_of_numpy(n, m, q, order, sliced):
    rng = np.random.default_rng([n, m, q])
    values, U = np.asarray(rng.normal(size=(n, m + 3)), order=order)[:, :m], rng.normal(size=(n, q + 5))[:, :q]
    out = np.full((m, q + 2), np.nan)[:, :q] if sliced else np.full((m, q), np.nan)
    skinny_matmul_of_transpose(values, U, out)
    assert (np.abs(out - values.T @ U) <= 64 * np.finfo(float).eps * (np.abs(values).T @ np.abs(U))).all()


@pytest.mark.parametrize(("m", "q"), [(512, 1), (4000, 20), (10**5, 40), (3777, 7)])
def test_the_memory_of_parts_is_less_than_that_of_weights_and_a_tile(m, q):
    assert 2 <= count_partial_products(m, q) <= m // 128
    assert count_partial_product_values(m, q) <= m * q
