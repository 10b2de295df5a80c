"""Roots: nested ranks, scaled matrices, rotations, heads that share their arrays."""

import numpy as np
import pytest

from dkfm import kernels
from dkfm.errors import InvalidInputError, NotPSDError
from dkfm.numerics import roots


def fitted(kernel, X):
    return roots.inverse_root(np.asfortranarray(kernel(X)))


def spread(rng, n=60, d=4, orders=6):
    """Rows whose lengths span some orders of magnitude."""
    return rng.normal(size=(n, d)) * np.logspace(-orders, 0, n)[:, np.newaxis]


@pytest.mark.parametrize("factor", [1e-150, 1.0, 1e150])
def test_a_scaled_root_is_the_root_of_each_row_to_its_own_scale(rng, factor):
    k = factor * kernels.Polynomial(2)
    K = k(spread(rng, 20, 6))
    lengths = roots.row_lengths(np.diagonal(K))
    found = roots.inverse_root(np.asfortranarray(K), scales=lengths)
    assert len(found.values) == 20
    A = K / lengths[:, np.newaxis] / lengths
    np.testing.assert_allclose(found.values, np.linalg.eigvalsh(A)[::-1], atol=64 * roots.EPS)
    features = K @ found.weights
    own = (features @ features.T - K) / lengths[:, np.newaxis] / lengths
    assert np.abs(own).max() < 1e-13
    np.testing.assert_allclose(
        found.landmark_features() / lengths[:, np.newaxis], features / lengths[:, np.newaxis], atol=1e-11
    )


def test_rows_of_no_length_have_no_weights_and_show_a_kernel_that_is_not_psd(rng):
    X = np.vstack([np.zeros(3), rng.normal(size=(5, 3)), np.zeros(3)])
    K = np.asfortranarray(kernels.Linear()(X))
    found = roots.inverse_root(K.copy(order="F"), scales=roots.row_lengths(np.diagonal(K)))
    assert len(found.values) == 3
    assert not found.weights[[0, 6]].any()
    K[0, 3] = K[3, 0] = 1e-3  # |k(x, z)| > sqrt(k(x, x) k(z, z))
    with pytest.raises(NotPSDError):
        roots.inverse_root(K, scales=roots.row_lengths(np.diagonal(K)))


def test_a_rotated_root_is_the_symmetric_root(rng):
    k = kernels.Polynomial(3, scale=0.1, offset=0.0)
    K = k(spread(rng, 12, 20, 1))
    lengths = roots.row_lengths(np.diagonal(K))
    assert roots.choose_rank_for_rotation(np.asfortranarray(K), lengths) == 12
    found = roots.add_rotation(roots.inverse_root(np.asfortranarray(K), scales=lengths))
    values, vectors = np.linalg.eigh(K)
    truth = vectors / np.sqrt(values) @ vectors.T
    np.testing.assert_allclose(found.weights @ found.rotation, truth, atol=1e-9 * np.abs(truth).max())
    short = found.truncate(5)
    np.testing.assert_allclose(short.rotation @ short.rotation.T, np.eye(5), atol=1e-14)


@pytest.mark.parametrize("rank", [2, 5, 20])
def test_a_rotation_serves_lost_rank_equal_rows_and_rows_of_no_length(rng, rank):
    X = spread(rng, 30, rank)
    X[0], X[7] = 0.0, X[20]
    K = kernels.Linear()(X)
    lengths = roots.row_lengths(np.diagonal(K))
    assert roots.choose_rank_for_rotation(np.asfortranarray(K), lengths) == rank
    found = roots.inverse_root(np.asfortranarray(K), scales=lengths)
    found = roots.add_rotation(found.truncate(rank))
    features = K @ found.weights @ found.rotation
    divisors = np.where(lengths > 0, lengths, 1.0)
    assert np.abs((features @ features.T - K) / divisors[:, np.newaxis] / divisors).max() < 1e-13
    _, vectors = np.linalg.eigh(K)  # K^(-1/2) K has the eigenvectors of K; the leading one is exact
    images = features @ found.rotation.T @ found.weights.T @ vectors[:, -1]
    np.testing.assert_allclose(images, vectors[:, -1], atol=1e-12)


def test_a_rotation_does_not_serve_equal_scales_or_an_ill_conditioned_scaled_matrix(rng):
    near = spread(rng, 30, 40)
    near[3] = near[20] * (1 + 1e-6 * rng.normal(size=40))
    for X in (rng.normal(size=(10, 20)), near):
        K = np.asfortranarray(kernels.Linear()(X))
        assert roots.choose_rank_for_rotation(K, roots.row_lengths(np.diagonal(K))) == 0


def test_the_first_columns_are_the_root_of_that_rank(rng):
    found = fitted(kernels.Gaussian(1.0), rng.normal(size=(50, 2)))
    short = found.truncate(7)
    np.testing.assert_array_equal(short.weights, found.weights[:, :7])
    np.testing.assert_array_equal(short.dropped_values, [*found.values[7:], *found.dropped_values])
    assert short.weights.flags.c_contiguous


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
