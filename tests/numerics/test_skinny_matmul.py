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
    dtypes=st.tuples(*[st.sampled_from([np.float64, np.float32])] * 2),
    sliced=st.booleans(),
)
def test_the_product_is_that_of_numpy(n, m, q, dtypes, sliced):
    rng, dtype = np.random.default_rng([n, m, q]), np.result_type(*dtypes)
    values, W = rng.normal(size=(n, m + 3)).astype(dtypes[0]), rng.normal(size=(m, q + 5)).astype(dtypes[1])
    values, W = (values[:, :m], W[:, :q]) if sliced else map(np.ascontiguousarray, (values[:, :m], W[:, :q]))
    out = np.full((n, q), np.nan, dtype)
    skinny_matmul(values, W, out)
    expected, bound = values.astype(float) @ W.astype(float), np.abs(values).astype(float) @ np.abs(W).astype(float)
    assert (np.abs(out - expected) <= 64 * np.finfo(dtype).eps * bound).all()


@given(
    n=st.sampled_from([0, 1, 100, 256, 521, 2000]),
    m=st.sampled_from([0, 1, 47, 48, 333, 480]),
    q=st.sampled_from([0, 1, 20, 40, 41]),
    dtype=st.sampled_from([np.float64, np.float32]),
    order=st.sampled_from("CF"),
    sliced=st.booleans(),
)
def test_the_product_with_a_transpose_is_that_of_numpy(n, m, q, dtype, order, sliced):
    rng = np.random.default_rng([n, m, q])
    values = np.asarray(rng.normal(size=(n, m + 3)), dtype, order=order)[:, :m]
    U = rng.normal(size=(n, q + 5))[:, :q].astype(dtype)
    out = np.full((m, q + 2), np.nan, dtype)[:, :q] if sliced else np.full((m, q), np.nan, dtype)
    skinny_matmul_of_transpose(values, U, out)
    expected, bound = values.T.astype(float) @ U.astype(float), np.abs(values).T.astype(float) @ np.abs(U).astype(float)
    assert (np.abs(out - expected) <= 64 * np.finfo(dtype).eps * bound).all()


@pytest.mark.parametrize(("m", "q"), [(512, 1), (4000, 20), (10**5, 40), (3777, 7)])
def test_the_memory_of_parts_is_less_than_that_of_weights_and_a_tile(m, q):
    assert 2 <= count_partial_products(m, q) <= m // 128
    assert count_partial_product_values(m, q) <= m * q
