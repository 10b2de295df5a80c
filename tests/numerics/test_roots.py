"""Roots: bounds, nested ranks, the rank that float32 carries, heads that share their arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm import kernels
from dkfm.errors import InvalidInputError
from dkfm.numerics import roots


def fitted(kernel, X):
    return roots.inverse_root(np.asfortranarray(kernel(X)))


@given(st.lists(st.floats(1e-12, 1e6), min_size=1, max_size=30), st.floats(1e-3, 1e6))
def test_bounds_are_what_remains_and_what_rounding_may_add(values, largest):
    values = np.sort(values)[::-1]
    remaining = np.append(values, 0.0)
    bounds = roots.bound_errors_by_rank(remaining, values, largest)
    parts = np.sqrt(np.minimum(remaining / largest, 1))
    top = max(values[0], largest)
    rounding = 4 * roots.EPS * top / np.sqrt(np.append(top, values) * largest)
    np.testing.assert_allclose(bounds, parts + np.maximum(1e-12, rounding), rtol=1e-9)
    for tol in (0.0, 1e-3, 1.0):
        r = roots.find_rank_within(bounds, tol)
        assert bounds[r] <= tol or (r == len(bounds) - 1 and (bounds > tol).all())
        assert (bounds[:r] > tol).all()
    np.testing.assert_allclose(
        roots.bound_errors_by_rank(remaining, values, largest, np.dtype(np.float32)), parts + 1e-4
    )
    assert not roots.bound_errors_by_rank(remaining, values, 0.0).any()


@given(st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 10.0]))
def test_what_eigenvectors_leave_of_their_points_is_bounded_by_what_is_known_of_them(seed, sigma):
    X = np.random.default_rng(seed).normal(size=(40, 2))
    k = kernels.Gaussian(sigma)
    found = fitted(k, X)
    bounds = roots.bound_residuals_by_rank(found, k.diag(X))
    features = k(X) @ found.weights
    for r in (0, len(found.values) // 2, len(found.values)):
        truth = (1 - np.square(features[:, :r]).sum(axis=1)).max()
        assert truth <= bounds[r] + 1e-12
        assert bounds[r] <= max(truth, 0) + 1e-12
        assert bounds[r] <= np.append(found.values, np.abs(found.dropped).max(initial=0))[r]


def test_the_first_columns_are_the_root_of_that_rank(rng):
    found = fitted(kernels.Gaussian(1.0), rng.normal(size=(50, 2)))
    short = found.truncate(7)
    np.testing.assert_array_equal(short.weights, found.weights[:, :7])
    np.testing.assert_array_equal(short.dropped, [*found.values[7:], *found.dropped])
    assert short.weights.flags.c_contiguous


def test_float32_carries_all_of_a_sound_root_and_little_of_a_wide_one(rng):
    X = rng.normal(size=(400, 2))
    for sigma, least, most in ((0.02, 400, 400), (3.0, 20, 45)):
        k = kernels.Gaussian(sigma)
        assert least <= roots.rank_in_float32(fitted(k, X), k(X[::3], X), k.diag(X)) <= most
    nothing = fitted(kernels.Linear(), np.zeros((4, 1)))
    assert roots.rank_in_float32(nothing, np.zeros((4, 4)), np.zeros(4)) == 0


def test_a_landmark_that_is_not_among_the_sampled_rows_counts(rng):
    X = np.arange(300.0)[:, None]  # of a kernel so narrow that no row knows another
    k = kernels.Gaussian(1e-3)
    assert roots.rank_in_float32(fitted(k, X), k(X[:5], X), k.diag(X)) == 300


def test_heads_share_their_arrays_in_any_precision(rng):
    found = fitted(kernels.Gaussian(3.0), rng.normal(size=(60, 2)))
    for dtype in (np.float64, np.float32):
        heads = roots.cast_heads(roots.make_map_heads(found, "spectral"), np.dtype(dtype))
        assert heads["features"].weights is heads["residual"].weights
        assert heads["features"].weights.dtype == dtype
    same = roots.make_map_heads(found, "spectral")
    assert roots.cast_heads(same, np.dtype(np.float64))["features"].weights is same["features"].weights


def test_residuals_leave_out_what_rounding_made_of_the_last_eigenvectors(rng):
    found = fitted(kernels.Gaussian(3.0), rng.normal(size=(300, 2)))
    head = roots.make_map_heads(found, "symmetric")["residual"]
    assert 0 < head.n_leading_columns < len(found.values)
    assert (
        found.values[head.n_leading_columns - 1]
        > 64 * roots.EPS * found.values[0]
        >= found.values[head.n_leading_columns]
    )
    assert roots.make_map_heads(found, "symmetric")["features"].n_leading_columns is None


@pytest.mark.parametrize(
    ("basis", "rcond", "tol", "words"),
    [("polar", None, None, "basis must"), ("spectral", 2.0, None, "rcond must"), ("cholesky", None, "x", "tol must")],
)
def test_unknown_parameters_are_refused(basis, rcond, tol, words):
    with pytest.raises(InvalidInputError, match=words):
        roots.require_parameters(basis, rcond, tol)
