"""Error bounds of each pair's own scale: what is dropped, what is rounded; the rank that float32 carries."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from dkfm import ExactFeatureMap, kernels
from dkfm.numerics import map_error_bounds, roots, training_statistics
from dkfm.numerics.certificates import kernel_rounding
from dkfm.numerics.map_error_bounds import Residuals
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import prepare_scorer

BASES = ["symmetric", "spectral", "cholesky"]


def fitted(kernel, X, scaled=True):
    K = np.asfortranarray(kernel(X))
    return roots.inverse_root(K, scales=roots.row_lengths(np.diagonal(K)) if scaled else None)


def lengths_of(kernel, X):
    return roots.row_lengths(kernel.diag(X))


@given(st.lists(st.floats(1e-12, 1.0), min_size=1, max_size=30), st.floats(0.0, 1e-9), st.floats(1.0, 1e3))
def test_bounds_are_what_remains_and_what_rounding_may_add(values, eta, norm):
    values = np.sort(values)[::-1]
    remaining, r = np.append(values, 0.0), len(values)
    root = roots.Root(np.diag(1 / np.sqrt(values)), values, np.zeros(0), np.ones(r))
    residuals = Residuals(remaining, 0.0, norm, 0.0, limits=remaining)
    found = map_error_bounds.bound_errors_by_rank(residuals, root, np.ones(r), eta, 10 * eta)
    weights, last = np.sqrt(np.cumsum(np.append(0.0, 1 / values))), np.append(values[0], values)
    own = max(10 * eta, 8 * roots.EPS)
    eta, gamma = max(eta, 8 * roots.EPS), 16 * roots.EPS * values[0]
    stretch = gamma / last + eta * np.minimum(weights, 1 / np.sqrt(last)) * weights
    beyond = np.sqrt(np.maximum(weights[-1] ** 2 - weights**2, 0.0))
    norm = np.maximum(np.minimum(norm + np.sqrt(remaining) * beyond, np.minimum(weights, 1 / np.sqrt(last))), 1.0)
    left = np.minimum(remaining + 3 * eta * norm + (gamma + eta) * norm**2, 1.0)
    moved = gamma * norm / np.sqrt(last)
    measured = np.sqrt(left) + (1.5 * own * weights + moved) * np.sqrt(1 + stretch)
    with np.errstate(all="ignore"):
        known = np.sqrt(np.append(values + eta * np.sqrt(r), 0.0))
        known += np.where(stretch < 1, ((own + eta * norm) * weights + moved) / np.sqrt(1 - stretch), np.inf)
    np.testing.assert_allclose(found, np.minimum(measured, known) + own * norm, rtol=1e-9)
    for tol in (0.0, 1e-3, 1.0):
        r = map_error_bounds.find_rank_within(found, tol)
        assert found[r] <= tol or (r == len(found) - 1 and (found > tol).all())
        assert (found[:r] > tol).all()
    assert not map_error_bounds.bound_errors_by_rank(Residuals(remaining), root, np.zeros(len(values)), eta, eta).any()


@given(st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 10.0]))
def test_what_eigenvectors_leave_of_their_points_is_bounded_by_what_is_known_of_them(seed, sigma):
    X = np.random.default_rng(seed).normal(size=(40, 2))
    k = kernels.Gaussian(sigma)
    found = fitted(k, X)
    left = map_error_bounds.bound_landmark_residuals(found, lengths_of(k, X))
    features = k(X) @ found.weights
    for r in (0, len(found.values) // 2, len(found.values)):
        truth = (1 - np.square(features[:, :r]).sum(axis=1)).max()
        limit = np.append(found.values, np.abs(found.dropped_values).max(initial=0))[r]
        bound = min(left.largest_by_rank[r] + left.noise, left.limits[r])
        assert truth <= bound + 1e-12
        assert bound <= max(truth, 0) + 1e-12
        assert 0 <= left.limits[r] - limit <= 20 * roots.EPS * found.values[0]


@pytest.mark.parametrize("basis", ["spectral", "cholesky"])
@pytest.mark.parametrize(
    "kernel",
    [kernels.Gaussian(6.0), kernels.Gaussian(1.0), kernels.Linear(), kernels.Polynomial(3), kernels.Matern(1.5, 2.0)],
)
def test_decompositions_are_as_exact_as_the_bound_takes_them_to_be(kernel, basis, rng):
    X = rng.normal(size=(250, 5))
    phi = ExactFeatureMap(kernel, basis=basis).fit(X)
    root, points = phi._fitted_map().root, phi.model_.original_landmarks
    lengths = lengths_of(kernel, points)
    W, A = root.weights * lengths[:, np.newaxis], kernel(points) / lengths[:, np.newaxis] / lengths
    W, A = W.astype(np.longdouble), A.astype(np.longdouble)
    change = (W.T @ (A @ W) - np.eye(W.shape[1])).astype(np.float64)  # -(D W)' G (D W)
    norms = np.linalg.norm(W.astype(np.float64), 2), np.linalg.norm(W.astype(np.float64))
    eta = map_error_bounds.MIN_KERNEL_ROUNDING
    stretch = eta * norms[0] * norms[1]
    if basis == "spectral":
        stretch += map_error_bounds.DECOMPOSITION_ROUNDING * root.values[0] / root.values[-1]
    assert np.linalg.norm(change, 2) <= stretch


def test_float32_carries_all_of_a_sound_root_and_little_of_a_wide_one(rng):
    X = rng.normal(size=(400, 2))
    for sigma, least, most in ((0.02, 400, 400), (3.0, 20, 45)):
        k = kernels.Gaussian(sigma)
        assert (
            least
            <= map_error_bounds.rank_in_float32(fitted(k, X), k(X[::3], X), np.ones(134), lengths_of(k, X))
            <= most
        )
    nothing = fitted(kernels.Linear(), np.zeros((4, 1)))
    assert map_error_bounds.rank_in_float32(nothing, np.zeros((4, 4)), np.zeros(4), np.zeros(4)) == 0


def test_a_landmark_that_is_not_among_the_sampled_rows_counts():
    X = np.arange(300.0)[:, None]  # of a kernel so narrow that no row knows another
    k = kernels.Gaussian(1e-3)
    assert map_error_bounds.rank_in_float32(fitted(k, X), k(X[:5], X), np.ones(5), lengths_of(k, X)) == 300


def test_random_signs_tell_the_longest_vector(rng):
    vectors = rng.normal(size=(1000, 30)) * np.logspace(-3, 2, 1000)[:, np.newaxis]
    found = map_error_bounds.estimate_largest_norm(vectors @ map_error_bounds.make_probes(30))
    assert 0.5 < found / np.linalg.norm(vectors, axis=1).max() < 2


def test_the_rounding_of_a_kernel_is_that_of_its_rows(rng):
    X = rng.normal(size=(50, 5))
    near, far = (kernel_rounding.measure_in_float64(kernels.Gaussian(1.0), rows) for rows in (X, X + 1e6))
    assert near < 2e-14
    assert 1e-10 < far < 1e-7
    equal = kernels.Function(_count_equal)
    assert kernel_rounding.measure_in_float64(equal, np.floor(X)) == map_error_bounds.MIN_KERNEL_ROUNDING


@pytest.mark.parametrize("form", [np.asarray, csr_array])
def test_the_rounding_of_rows_far_apart_is_that_of_points_near_them(rng, form):
    X = 1e5 * rng.normal(size=(20, 3))  # no two rows of which have a kernel value above 0
    k = kernels.Gaussian(0.3)
    found = kernel_rounding.measure_in_float64(k, form(X))
    Z = X + 0.2 * rng.normal(size=X.shape)
    differences = X.astype(np.longdouble)[:, np.newaxis] - Z
    truth = np.exp(-np.square(differences).sum(axis=2) / (2 * np.longdouble(0.3) ** 2))
    assert np.abs(k(X, Z) - truth).max() < found < 1e-8
    assert found > 1e-12


def test_a_function_that_takes_integers_alone_is_fitted(rng):
    X = rng.integers(0, 3, size=(40, 6)).astype(float)
    for kernel in (kernels.Function(_compare_codes), kernels.Function(_compare_codes).warp(np.abs)):
        for dtype, limit in (("float64", 1e-12), ("float32", 1e-4)):
            phi = ExactFeatureMap(kernel, basis="cholesky", dtype=dtype).fit(X)
            assert phi.certificate_.relative_error < limit


def _compare_codes(X, Y):
    if np.mod(X, 1).any() or np.mod(Y, 1).any():
        raise ValueError("codes are integers")
    return _count_equal(X, Y)


def _count_equal(X, Y):
    return (X[:, np.newaxis] == Y).mean(axis=2)


def rows_of(seed):
    """Rows of a seed: of equal lengths, of mixed lengths, or in two clusters far from 0; and new ones like them."""
    rng = np.random.default_rng(seed)
    n, d = rng.integers(5, 60), rng.integers(1, 8)
    X = rng.normal(size=(n + 40, d))
    shape = rng.integers(3)
    if shape == 1:
        X *= np.exp(rng.uniform(-6, 3, size=(n + 40, 1)))
    elif shape == 2:
        X += 10.0 ** rng.uniform(0, 4) * rng.choice([-1, 1], size=(n + 40, 1))
    return X[:n], X[n:]


KERNELS = [
    kernels.Gaussian("median"),
    kernels.Polynomial(5, scale=0.1),
    kernels.Linear(),
    kernels.RationalQuadratic(0.7, 1.0),
    kernels.Exponential(2.0),
    kernels.Gaussian(1.0) * kernels.Linear() + kernels.Polynomial(2),
    1e-200 * kernels.ArcCosine(1),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dkfm.errors.DkfmWarning")
@given(
    st.integers(0, 10**6), st.sampled_from(KERNELS), st.sampled_from(BASES), st.sampled_from([None, 1e-3, "uniform"])
)
@settings(max_examples=60)
def test_no_pair_of_a_training_row_breaks_the_bound(seed, kernel, basis, limit):
    X, Z = rows_of(seed)
    options = {"landmarks": "uniform", "n_landmarks": len(X) // 2 + 1, "random_state": 0} if limit == "uniform" else {}
    phi = ExactFeatureMap(kernel, basis=basis, tol=None if limit == "uniform" else limit, **options).fit(X)
    for points in (X, Z, 1e-3 * Z, 30 * Z):
        K, k = phi.kernel_(X, points), phi.kernel_
        error = np.abs(phi.transform(X) @ phi.transform(points).T - K)
        scale = lengths_of(k, X)[:, np.newaxis] * lengths_of(k, points)
        assert (error <= phi.error_bound_ * scale).all()


def test_values_that_no_bound_uses_are_not_asked_of_a_function_of_the_user(rng, monkeypatch):
    def refuse(*rows):
        raise AssertionError("points between rows")

    monkeypatch.setattr(kernel_rounding, "_make_points_between_rows", refuse)
    X = rng.normal(size=(20, 3))
    found = kernel_rounding.measure_in_float64(kernels.Function(lambda A, B: A @ B.T), X)
    assert found >= map_error_bounds.MIN_KERNEL_ROUNDING
    with pytest.raises(AssertionError, match="points between rows"):
        kernel_rounding.measure_in_float64(kernels.Linear(), X)


def test_an_eigenvalue_of_exactly_0_that_is_dropped_is_a_direction_that_is_left(rng):
    X = rng.normal(size=(1, 9)) + np.array([[0.0], [1e-9]])  # one row to the kernel, two to those who look closer
    phi = ExactFeatureMap(kernels.Gaussian(30.0)).fit(X)
    assert list(phi.dropped_) == [0.0]
    assert 1e-8 < phi.error_bound_ < 1e-6


@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_coefficients_of_fewer_features_are_bounded_by_those_of_all(seed, triangular):
    rng = np.random.default_rng(seed)
    X, k = rng.normal(size=(300, 2)), kernels.Gaussian(1.0)  # k(x, x) = 1, so that D is the identity
    landmarks = X[:20]
    W = fitted(k, landmarks).weights
    if triangular:
        W = np.linalg.inv(np.linalg.cholesky(k(landmarks))).T
    features = k(X, landmarks) @ W
    truth = np.linalg.norm(np.cumsum(features.T[:, np.newaxis] * W.T[:, :, np.newaxis], axis=0), axis=1).max(axis=1)
    squares = np.append(0.0, np.cumsum(np.square(W).sum(axis=0)))
    left = np.append(1.0, (1 - np.cumsum(np.square(features), axis=1)).max(axis=0))
    found = map_error_bounds._bound_coefficients(Residuals(left, 0.0, truth[-1]), squares, np.sqrt(squares))
    assert found[-1] == pytest.approx(max(truth[-1], 1.0))
    assert (found[1:] >= truth * (1 - 1e-9)).all()
    assert (found >= 1.0).all()
    by_rank = np.arange(1.0, 22.0)
    known = Residuals(left, 0.0, by_rank)
    assert (map_error_bounds._bound_coefficients(known, squares, np.sqrt(squares)) == by_rank).all()
    overflowed = map_error_bounds._bound_coefficients(
        Residuals(left, 0.0, truth[-1], excess=np.inf), squares, np.sqrt(squares)
    )
    assert overflowed[-1] == pytest.approx(max(truth[-1], 1.0))
    assert (overflowed[1:-1] > 1e100).all()
    longer = Residuals(left, 0.0, truth[-1], excess=3.0)
    twice = map_error_bounds._bound_coefficients(longer, squares, np.sqrt(squares))
    assert twice[1] == pytest.approx(max(1.0, 2 * np.sqrt(squares[1])))  # features of twice the length
    assert twice[-2] == pytest.approx(
        min(truth[-1] + np.sqrt((left[-2] + 3) * (squares[-1] - squares[-2])), 2 * np.sqrt(squares[-2]))
    )


def test_features_that_are_longer_than_their_rows_are_seen(rng):
    X, kernel = rng.normal(size=(30, 2)), kernels.Gaussian(0.5)
    root = fitted(kernel, X[:9])
    root = replace(root, weights=2 * root.weights)  # features of twice the length
    score = prepare_scorer(Model(kernel, X[:9], {"features": Head(root.weights)}))
    found = training_statistics.measure_largest_residuals(score, [X], np.ones(30), root, np.ones(9))
    truth = np.square(kernel(X, X[:9]) @ root.weights).sum(axis=1)
    assert found.excess == pytest.approx(truth.max() - 1)
    assert found.lowest == pytest.approx(1 - truth.max())


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("landmarks", [None, "random_pivots"])
def test_bounds_do_not_change_with_the_unit_of_the_kernel(rng, basis, landmarks):
    X = rng.normal(size=(40, 3)) * np.exp(rng.uniform(-0.7, 0.7, (40, 1)))
    n, found = None if landmarks is None else 15, []
    for unit in (2.0**-400, 1.0, 2.0**400):
        kernel = unit * kernels.Polynomial(3, scale=1.0, offset=0.0)
        phi = ExactFeatureMap(kernel, basis=basis, landmarks=landmarks, n_landmarks=n, random_state=0).fit(X)
        found.append(phi.error_bounds_)
    for others in found[1:]:
        np.testing.assert_allclose(others, found[0], rtol=1e-6)


def test_coefficients_in_eigenvectors_of_all_rows_are_no_longer_than_the_rows(rng):
    X, kernel = rng.normal(size=(30, 2)), kernels.Gaussian(0.5)
    for scales in (1.0, 1.5):
        root = roots.inverse_root(np.asfortranarray(kernel(X)), scales=np.where(np.arange(30) < 15, scales, 1.0))
        found = map_error_bounds.bound_landmark_residuals(root, np.ones(30)).coefficient_norm
        np.testing.assert_array_equal(found, np.full(31, scales))
        W = root.weights * np.sqrt(root.values)  # S^-1 V
        P = np.cumsum(W.T[:, :, np.newaxis] * (W * np.square(root.scales)[:, np.newaxis]).T[:, np.newaxis, :], axis=0)
        assert (np.linalg.norm(P, axis=1).max(axis=1) <= scales * (1 + 1e-12)).all()


def test_what_a_root_of_k_itself_drops_moves_coefficients_to_large_rows(rng):
    X, lengths = rng.normal(size=(60, 2)), rng.permutation(np.logspace(-2, 1, 60))
    root = roots.inverse_root(np.asfortranarray(kernels.Gaussian(0.5)(X) * np.outer(lengths, lengths)), rcond=1e-6)
    V = root.weights * np.sqrt(root.values)
    truth = (np.linalg.norm(lengths[:, np.newaxis] * (V @ V.T), axis=0) / lengths).max()
    assert truth > 3
    assert 0.5 < map_error_bounds.bound_landmark_residuals(root, lengths).coefficient_norm / truth < 2
