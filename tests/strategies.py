"""Hypothesis strategies: rows, kernels, expressions of kernels."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dkfm import kernels

positive = st.floats(0.1, 10)


few_columns = st.integers(1, 8)


def rows(min_rows=1, max_rows=30, columns=few_columns):
    """Rows (n, d) on a coarse grid, so that duplicates and constant columns are common."""
    return columns.flatmap(
        lambda d: hnp.arrays(
            np.float64,
            st.tuples(st.integers(min_rows, max_rows), st.just(d)),
            elements=st.integers(-8, 8).map(lambda i: i / 4),
        )
    )


base_kernels = st.one_of(
    st.builds(kernels.Gaussian, positive),
    st.builds(kernels.Laplacian, positive),
    st.builds(kernels.Linear),
    st.builds(kernels.Polynomial, st.integers(1, 4), positive, st.floats(0, 2)),
    st.builds(kernels.Constant, st.floats(0, 3)),
)

expressions = st.recursive(
    base_kernels,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda w, k: w * k, st.floats(0, 3), inner),
        st.builds(lambda k, n: k**n, inner, st.integers(1, 3)),
    ),
    max_leaves=4,
)
