"""Hypothesis strategies: rows, kernels, expressions of kernels."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dkfm import kernels

positive = st.floats(0.1, 10)
weights = st.just(0.0) | st.floats(1e-3, 3)
"""Nothing between: a normalised kernel whose values are next to underflow has no digits."""


few_columns = st.integers(1, 8)


def rows(min_rows=1, max_rows=30, columns=few_columns):
    """Rows (n, d) on a coarse grid, so that duplicates, zeros and constant columns are common."""
    return columns.flatmap(
        lambda d: hnp.arrays(
            np.float64,
            st.tuples(st.integers(min_rows, max_rows), st.just(d)),
            elements=st.integers(-8, 8).map(lambda i: i / 4),
        )
    )


bounded_kernels = st.one_of(
    st.builds(kernels.Gaussian, positive),
    st.builds(kernels.Laplacian, positive),
    st.builds(kernels.Exponential, positive),
    st.builds(kernels.Matern, st.sampled_from([0.3, 0.5, 1.0, 1.5, 2.2, 2.5, 4.5, 7.0, 10.5, 40.0]), positive),
    st.builds(kernels.RationalQuadratic, positive, positive),
    st.builds(kernels.Periodic, positive, st.floats(0.5, 5)),
    st.builds(kernels.Cosine),
    st.builds(kernels.ArcCosine, st.just(0)),
    st.builds(kernels.Constant, weights),
)
"""With values up to 3, for the exponential."""

base_kernels = st.one_of(
    bounded_kernels,
    st.builds(kernels.Linear),
    st.builds(kernels.Polynomial, st.integers(1, 4), positive | st.none(), st.floats(0, 2)),
    st.builds(kernels.ArcCosine, st.integers(0, 2)),
    st.builds(kernels.NegativeSquaredDistance, positive),
    st.builds(kernels.Sigmoid, positive, st.floats(-1, 1)),
)

histogram_kernels = st.one_of(
    st.builds(kernels.ChiSquared, positive),
    st.builds(kernels.AdditiveChiSquared),
    st.builds(kernels.HistogramIntersection),
    st.builds(kernels.JensenShannon),
)


def combined(base):
    """Random expressions in the algebra of kernels."""
    return st.recursive(
        base,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a + b, inner, inner),
            st.builds(lambda a, b: a * b, inner, inner),
            st.builds(lambda w, k: w * k, weights, inner),
            st.builds(lambda k, n: k**n, inner, st.integers(1, 3)),
            st.builds(kernels.PowerSeries, inner, st.lists(weights, min_size=1, max_size=4).map(tuple)),
            st.builds(kernels.Normalized, inner.filter(lambda k: k.definiteness is kernels.Definiteness.PSD)),
            st.builds(kernels.Exp, bounded_kernels),
            st.builds(lambda k, a, b: k.warp(kernels.Affine(a, b)), inner, st.floats(0.5, 2), st.sampled_from([0, 1])),
            st.builds(lambda k: k.on(0), inner),
        ),
        max_leaves=4,
    )


expressions = combined(base_kernels)
histogram_expressions = combined(st.one_of(base_kernels, histogram_kernels))
"""For rows without negative numbers."""
