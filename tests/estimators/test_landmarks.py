"""Maps on some landmarks, weighted, centred, truncated: their bounds hold, and they are the map that they say."""

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

import contracts
import dkfm
from dkfm import kernels
from dkfm.errors import DkfmWarning, InvalidInputError, KernelError, NotPSDError
from helpers import oracles, strategies

BASES = ["symmetric", "spectral", "cholesky"]
SELECTORS = ["uniform", "kmeans", "pivots", "random_pivots"]
K = kernels.Gaussian(1.5)


def bound_holds(phi, X, Z):
    """The certified bound, on every pair of a training row and any row, to rounding."""
    k = phi.kernel_
    found = phi.transform(X) @ phi.transform(Z).T
    largest = k.diag(X).max()
    allowed = phi.error_bound_ * np.sqrt(k.diag(Z) * largest)
    assert (np.abs(found - k(X, Z)) <= allowed + 1e-9 * largest).all()


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("selector", SELECTORS)
def test_the_error_of_a_map_on_chosen_landmarks_is_certified(basis, selector, rng):
    X, Z = rng.normal(size=(300, 3)), rng.normal(size=(60, 3))
    phi = dkfm.ExactFeatureMap(K, basis=basis, landmarks=selector, n_landmarks=40, random_state=1).fit(X)
    assert phi.transform(Z).shape == (60, 40)
    assert phi.model_.landmarks.shape == (40, 3)
    bound_holds(phi, X, Z)
    assert phi.certificate_.error < 1e-12  # of the landmarks it is exact
    assert 1e-4 < phi.training_certificate_.error <= phi.error_bound_
    dense = oracles.gaussian(X, phi.model_.landmarks, 1.5)
    nystroem = dense @ np.linalg.solve(oracles.gaussian(*[phi.model_.landmarks] * 2, 1.5), dense.T)
    np.testing.assert_allclose(phi.transform(X) @ phi.transform(X).T, nystroem, atol=1e-9)
    worst = np.sqrt((1 - np.diag(nystroem)).max())
    np.testing.assert_allclose(phi.error_bound_, worst, rtol=1e-6)
    if selector != "kmeans":
        np.testing.assert_array_equal(X[phi.landmark_indices_], phi.model_.landmarks)
    assert phi.verify(Z).bound <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is 0 on these rows:dkfm.errors.DkfmWarning")
@given(strategies.rows(2, 30), strategies.expressions, st.sampled_from(BASES), st.integers(1, 6))
@settings(max_examples=40)
def test_bounds_of_chosen_landmarks_hold_on_any_rows(X, kernel, basis, count):
    if kernel.definiteness is not kernels.Definiteness.PSD:
        return
    count = min(count, len(X))
    phi = dkfm.ExactFeatureMap(kernel, basis=basis, landmarks="random_pivots", n_landmarks=count, random_state=0).fit(X)
    size = contracts.value_scale(kernel, np.vstack([X, X + 0.25]))
    found, truth = phi.transform(X) @ phi.transform(X + 0.25).T, kernel(X, X + 0.25)
    allowed = phi.error_bound_ * np.sqrt(kernel.diag(X).max() * kernel.diag(X + 0.25))
    assert (np.abs(found - truth) <= allowed + 1e-6 * size).all()


def test_pivots_explain_more_than_rows_at_random(rng):
    X = np.concatenate([rng.normal(size=(480, 2)) / 10, 9 * rng.normal(size=(20, 2))])  # a cluster and outliers
    bounds = {
        name: dkfm.ExactFeatureMap(K, landmarks=name, n_landmarks=40, random_state=0).fit(X).error_bound_
        for name in ("uniform", "pivots", "random_pivots")
    }
    assert bounds["pivots"] < 0.1 * bounds["uniform"]
    assert bounds["random_pivots"] < 0.5 * bounds["uniform"]


@pytest.mark.parametrize("basis", BASES)
def test_landmarks_are_given_by_number_or_as_points(basis, rng):
    X, Z = rng.normal(size=(50, 2)), rng.normal(size=(9, 2))
    numbers = np.array([7, 3, 30, 11])
    for landmarks in (numbers, numbers.tolist(), X[numbers], csr_array(X[numbers])):
        rows = csr_array(X) if isinstance(landmarks, csr_array) else X
        phi = dkfm.ExactFeatureMap(K, basis=basis, landmarks=landmarks).fit(rows)
        expected = oracles.symmetric_map(
            oracles.gaussian(X[numbers], X[numbers], 1.5), oracles.gaussian(X[numbers], Z, 1.5)
        )
        np.testing.assert_allclose(phi.transform(Z) @ phi.transform(Z).T, expected @ expected.T, atol=1e-12)
    assert set(dkfm.ExactFeatureMap(K, basis=basis, landmarks=numbers).fit(X).landmark_indices_) == set(numbers)


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize(
    ("selector", "count"), [("uniform", 12), ("pivots", None), ("random_pivots", 12), ([4, 1, 9], None)]
)
def test_landmarks_of_a_given_gram_are_those_of_its_points(basis, selector, count, rng, tmp_path):
    X, Z = rng.normal(size=(40, 3)), rng.normal(size=(9, 3))
    options = {"basis": basis, "landmarks": selector, "n_landmarks": count, "random_state": 3, "centered": True}
    truth = dkfm.ExactFeatureMap(K, **options).fit(X)
    phi = dkfm.ExactFeatureMap("precomputed", **options).fit(K(X))
    np.testing.assert_array_equal(phi.landmark_indices_, truth.landmark_indices_)
    np.testing.assert_allclose(phi.transform(K(Z, X)), truth.transform(Z), atol=1e-9)
    np.testing.assert_allclose(phi.error_bounds_, truth.error_bounds_, atol=1e-7)
    phi.save(tmp_path / "phi")
    assert dkfm.load(tmp_path / "phi").verify(K(X)).certificate.error < 1e-12
    short = phi.truncate(3)
    np.testing.assert_allclose(short.transform(K(Z, X)), truth.truncate(3).transform(Z), atol=1e-9)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"landmarks": "best"}, "uniform, kmeans, pivots, random_pivots"),
        ({"landmarks": "uniform"}, "needs n_landmarks"),
        ({"n_landmarks": 3}, "n_landmarks needs landmarks="),
        ({"landmarks": [1, 2], "n_landmarks": 2}, "belongs to a selector"),
        ({"landmarks": [1, 1]}, "different numbers of rows of some weight, from 0 to 8"),
        ({"landmarks": [-1]}, "different numbers of rows"),
        ({"landmarks": [9]}, "different numbers of rows"),
        ({"landmarks": [True, False, True]}, "a mask of 3 rows, and X has 9 at least"),
        ({"landmarks": [0.5]}, "some integers"),
        ({"landmarks": []}, "some integers"),
        ({"landmarks": 3}, "their number is n_landmarks"),
        ({"landmarks": "uniform", "n_landmarks": 3, "random_state": "x"}, "random_state"),
        ({"centered": "yes"}, "centered must be True or False"),
        ({"landmarks": [[1.0, 2.0, 3.0]]}, "landmarks have 3 columns and X has 2"),
        ({"landmarks": [[1.0, np.nan]]}, "landmarks must be finite"),
        ({"landmarks": "pivots", "n_landmarks": 0}, "n_landmarks"),
    ],
)
def test_landmarks_that_are_none_are_refused(parameters, words, rng):
    with pytest.raises(InvalidInputError, match=words):
        dkfm.ExactFeatureMap(K, **parameters).fit(rng.normal(size=(9, 2)))
    if parameters.get("landmarks") == [[1.0, 2.0, 3.0]]:
        with pytest.raises(InvalidInputError, match="numbers of rows, for it has no points"):
            dkfm.ExactFeatureMap("precomputed", **parameters).fit(np.eye(9))
        with pytest.raises(InvalidInputError, match="needs points"):
            dkfm.ExactFeatureMap("precomputed", landmarks="kmeans", n_landmarks=2).fit(np.eye(9))


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("options", [{}, {"landmarks": "pivots", "n_landmarks": 30}], ids=["all", "some"])
def test_a_centred_map_is_the_centred_kernel(basis, options, rng):
    X, Z = rng.normal(size=(80, 3)) + 5, rng.normal(size=(20, 3)) + 5
    plain = dkfm.ExactFeatureMap(K, basis=basis, **options).fit(X)
    psi = dkfm.ExactFeatureMap(K, basis=basis, centered=True, **options).fit(X)
    np.testing.assert_allclose(psi.transform(X).mean(axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(psi.transform(Z), plain.transform(Z) - plain.transform(X).mean(axis=0), atol=1e-9)
    np.testing.assert_array_equal(psi.residual(Z), plain.residual(Z))
    if not options:
        np.testing.assert_allclose(psi.transform(X) @ psi.transform(X).T, oracles.centred(K(X)), atol=1e-12)
    assert psi.verify(Z).against.error < 1e-9


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=8)
def test_weights_are_repeated_rows(basis, seed):
    rng = np.random.default_rng(seed)
    X, Z, w = rng.normal(size=(25, 2)), rng.normal(size=(9, 2)), rng.integers(0, 4, size=25)
    w[0] = 1
    options = {"basis": basis, "centered": True}
    weighted = dkfm.ExactFeatureMap(K, **options).fit(X, sample_weight=w)
    repeated = dkfm.ExactFeatureMap(K, **options).fit(np.repeat(X, w, axis=0))
    products = [psi.transform(Z) @ psi.transform(Z).T for psi in (weighted, repeated)]
    np.testing.assert_allclose(*products, atol=1e-7)
    assert set(weighted.landmark_indices_ if 0 in w else [0]) <= set(np.flatnonzero(w)) | {0}


@pytest.mark.parametrize(
    "weights", [np.ones(8), np.ones((9, 1)), -np.ones(9), np.zeros(9), np.full(9, np.nan), ["a"] * 9]
)
def test_weights_that_are_none_are_refused(weights, rng):
    with pytest.raises(InvalidInputError, match="sample_weight must be"):
        dkfm.ExactFeatureMap(K).fit(rng.normal(size=(9, 2)), sample_weight=weights)


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("sigma", [0.3, 3.0], ids=["explicit", "factored"])
def test_a_truncated_map_is_the_first_features_with_the_error_that_it_states(basis, centered, sigma, rng, tmp_path):
    X, Z = rng.normal(size=(150, 2)), rng.normal(size=(30, 2))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(sigma), basis=basis, centered=centered).fit(X)
    whole = phi.transform(Z)
    short = phi.truncate(tol=0.05)
    assert short.rank_ < phi.rank_
    assert short.error_bound_ <= 0.05 < phi.error_bounds_[short.rank_ - 1]
    if basis != "symmetric":
        np.testing.assert_allclose(short.transform(Z), whole[:, : short.rank_], atol=1e-9)
    if not centered:
        bound_holds(short, X, Z)
    np.testing.assert_allclose(phi.truncate(short.rank_).transform(Z), short.transform(Z), atol=1e-12)
    np.testing.assert_array_equal(phi.transform(Z), whole)  # itself it did not change
    again = short.truncate(3)
    np.testing.assert_allclose(again.transform(Z), phi.truncate(3).transform(Z), atol=1e-9)
    assert phi.truncate(tol=0.0).rank_ == phi.rank_
    assert len(short.dropped_) == len(phi.dropped_) + phi.rank_ - short.rank_
    short.save(tmp_path / "short")
    np.testing.assert_array_equal(dkfm.load(tmp_path / "short").transform(Z), short.transform(Z))


@pytest.mark.parametrize("basis", BASES)
def test_a_tolerance_is_the_error_that_is_asked_for(basis, rng):
    X = rng.normal(size=(200, 2))
    exact = dkfm.ExactFeatureMap(K, basis=basis).fit(X)
    loose = dkfm.ExactFeatureMap(K, basis=basis, tol=1e-2).fit(X)
    assert loose.rank_ < exact.rank_
    assert exact.error_bound_ < 1e-5 < loose.error_bound_ <= 1e-2
    bound_holds(loose, X, rng.normal(size=(50, 2)))
    assert exact.truncate(tol=1e-2).rank_ == loose.rank_


def test_pivots_leave_of_a_small_tolerance_what_rounding_takes():
    X = np.random.default_rng(0).normal(size=(800, 2))
    assert dkfm.ExactFeatureMap(kernels.Gaussian(0.3), basis="cholesky", tol=1e-6).fit(X).error_bound_ <= 1e-6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of them"),
        ((3, 0.1), "one of them"),
        ((0,), "rank"),
        ((99,), "is 9, and 99 is more"),
        ((None, 2.0), "tol"),
    ],
)
def test_a_truncation_needs_a_rank_or_a_tolerance(arguments, words, rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(0.1), basis="spectral").fit(rng.normal(size=(9, 2)))
    rank, tol = (*arguments, None, None)[:2]
    with pytest.raises(InvalidInputError, match=words):
        phi.truncate(rank, tol=tol)


def test_distances_are_those_of_the_features_where_one_is_a_landmark(rng):
    X, Z = rng.normal(size=(60, 3)), rng.normal(size=(1500, 3))
    phi = dkfm.ExactFeatureMap(kernels.Polynomial(2), centered=True).fit(X)
    features = phi.transform(X)[:, np.newaxis] - phi.transform(Z[:40])
    residual = phi.residual(Z[:40])
    truth = np.sqrt(np.square(features).sum(axis=2) + residual)
    np.testing.assert_allclose(phi.distance(X, Z[:40]), truth, rtol=1e-9, atol=1e-6)
    k = phi.kernel_
    found = phi.distance(Z)
    assert (np.diag(found) == 0).all()
    squares = k.diag(Z[:7])[:, None] + k.diag(Z[:9]) - 2 * k(Z[:7], Z[:9])
    np.testing.assert_allclose(found[:7, :9], np.sqrt(np.maximum(squares, 0)), atol=1e-6)
    lazily = phi.distance(da.from_array(Z, chunks=((700, 0, 800), 3)), X)
    assert (lazily.shape, lazily.chunks) == ((1500, 60), ((700, 0, 800), (60,)))
    np.testing.assert_allclose(lazily.compute(scheduler="synchronous"), phi.distance(Z, X), atol=1e-6)
    with pytest.raises(InvalidInputError, match="Y has 2 features, but ExactFeatureMap is expecting 3 features"):
        phi.distance(X, np.ones((2, 2)))
    with pytest.raises(dkfm.errors.KernelError, match="overflows"):
        phi.distance(X, np.full((1, 3), 1e200))


def test_landmarks_by_number_are_those_of_the_rows_that_fit_was_given(rng):
    X, w = rng.normal(size=(60, 2)), np.ones(60)
    w[[0, 7]] = 0
    phi = dkfm.ExactFeatureMap(K, landmarks=[5, 59, 9]).fit(X, sample_weight=w)
    np.testing.assert_array_equal(phi.landmark_indices_, [5, 59, 9])
    np.testing.assert_array_equal(phi.model_.landmarks, X[[5, 59, 9]])
    with pytest.raises(InvalidInputError, match="rows of some weight, from 0 to 59"):
        dkfm.ExactFeatureMap(K, landmarks=[5, 7]).fit(X, sample_weight=w)
    mask = np.zeros(60, bool)
    mask[[3, 4]] = True
    np.testing.assert_array_equal(dkfm.ExactFeatureMap(K, landmarks=mask).fit(X).landmark_indices_, [3, 4])


@pytest.mark.parametrize("basis", BASES)
def test_points_that_are_no_training_rows_have_no_numbers(basis, rng):
    X = rng.normal(size=(60, 2))
    for landmarks, count in ((rng.normal(size=(20, 2)), None), ("kmeans", 20)):
        phi = dkfm.ExactFeatureMap(K, basis=basis, landmarks=landmarks, n_landmarks=count, random_state=0).fit(X)
        assert not hasattr(phi, "landmark_indices_")


@pytest.mark.costly
@pytest.mark.parametrize("selector", ["uniform", "kmeans"])
@pytest.mark.parametrize("sigma", [2.0, 5.0, 20.0])
def test_landmarks_of_a_wide_kernel_in_the_cholesky_basis_do_not_pass_for_an_indefinite_one(selector, sigma):
    for seed in range(6):
        X = np.random.default_rng(seed).normal(size=(300, 2))
        phi = dkfm.ExactFeatureMap(
            kernels.Gaussian(sigma), basis="cholesky", landmarks=selector, n_landmarks=50, random_state=seed
        ).fit(X)
        bound_holds(phi, X, X[::3] + 0.1)


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
def test_a_tolerance_of_a_map_on_landmarks_is_one_of_all_training_rows(basis, rng):
    X, options = (
        rng.normal(size=(400, 2)),
        {"basis": basis, "landmarks": "uniform", "n_landmarks": 150, "random_state": 0},
    )
    whole = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), **options).fit(X)
    loose = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), tol=0.6, **options).fit(X)
    assert loose.error_bound_ <= 0.6 < whole.error_bounds_[loose.rank_ - 1]
    assert loose.rank_ == whole.truncate(tol=0.6).rank_ < whole.rank_
    with pytest.warns(DkfmWarning, match="No rank of this map is within tol = 1e-09"):
        assert dkfm.ExactFeatureMap(kernels.Gaussian(1.0), tol=1e-9, **options).fit(X).rank_ == whole.rank_
    with pytest.warns(DkfmWarning, match="n_landmarks is 500 and there are 400 rows"):
        assert dkfm.ExactFeatureMap(K, landmarks="uniform", n_landmarks=500).fit(X).model_.landmarks.shape == (400, 2)


@pytest.mark.parametrize("options", [{"landmarks": "uniform", "n_landmarks": 20}, {"landmarks": [3]}], ids=["20", "1"])
@pytest.mark.parametrize("basis", BASES)
def test_an_indefinite_kernel_is_refused_on_landmarks_too(basis, options):
    X = np.random.default_rng(3).normal(size=(50, 2))
    with pytest.raises(NotPSDError):
        dkfm.ExactFeatureMap(kernels.Sigmoid(1.0, -1.0), basis=basis, random_state=0, **options).fit(X)


@pytest.mark.parametrize("kernel", [kernels.NegativeSquaredDistance(), kernels.AdditiveChiSquared()], ids=repr)
def test_a_kernel_without_pivots_is_not_taken_for_nothing(kernel, rng):
    X = rng.uniform(size=(30, 3))
    for build in ("gram", "columns"):
        with pytest.raises(NotPSDError):
            dkfm.ExactFeatureMap(kernel, basis="cholesky", build=build).fit(X)
    with pytest.raises(NotPSDError):
        dkfm.ExactFeatureMap("precomputed", basis="cholesky").fit(-np.eye(3))


def test_one_negative_row_among_many_is_found(rng):
    A = rng.normal(size=(1500, 3))
    G = A @ A.T
    G[701, 701] *= 0.5  # not among the rows that are sampled
    with pytest.raises(NotPSDError, match="of a row is -1 of its k"):
        dkfm.ExactFeatureMap("precomputed", basis="cholesky").fit(G)


def test_a_clipped_map_promises_no_bound(rng):
    sigmoid = kernels.Function(lambda A, B: np.tanh(2 * A @ B.T - 1))
    with pytest.warns(DkfmWarning, match="lambda_min"):
        phi = dkfm.ExactFeatureMap(sigmoid, basis="spectral", on_indefinite="clip").fit(rng.normal(size=(60, 3)))
    assert phi.error_bound_ == np.inf


@pytest.mark.parametrize("basis", BASES)
def test_parameters_that_change_after_a_fit_do_not_change_the_map(basis, rng, tmp_path):
    X, Z = rng.normal(size=(60, 2)), rng.normal(size=(9, 2))
    phi = dkfm.ExactFeatureMap(K, basis=basis).fit(X)
    rank, truth = phi.rank_, phi.transform(Z)
    phi.set_params(basis="spectral" if basis == "cholesky" else "cholesky", dtype="float32", centered=True)
    assert (phi.rank_, phi.truncate(5).rank_) == (rank, 5)
    phi.verify(Z)
    phi.save(tmp_path / "phi")
    loaded = dkfm.load(tmp_path / "phi")
    np.testing.assert_array_equal(loaded.transform(Z), truth)
    assert (loaded.basis, loaded.dtype, loaded.centered) == (basis, "float64", False)
    assert not any(hasattr(dkfm.ExactFeatureMap(K), name) for name in ("rank_", "condition_", "error_bound_"))


def test_a_refit_in_another_basis_leaves_nothing_of_the_one_before(rng):
    X = rng.normal(size=(60, 2))
    phi = dkfm.ExactFeatureMap(K, basis="spectral", centered=True).fit(X)
    phi.set_params(basis="cholesky", centered=False).fit(X)
    assert not hasattr(phi, "eigenvalues_")
    assert not hasattr(phi, "mean_")
    phi.verify(X)


@pytest.mark.parametrize("basis", BASES)
def test_a_truncated_map_of_a_given_gram_is_saved_and_verified(basis, rng, tmp_path):
    X = rng.normal(size=(40, 2))
    short = dkfm.ExactFeatureMap("precomputed", basis=basis).fit(K(X)).truncate(6)
    short.save(tmp_path / "short")
    assert dkfm.load(tmp_path / "short").verify(K(X)).certificate.error <= short.certificate_.error * 10 + 1e-13


def test_new_points_of_a_scale_that_no_sampled_landmark_has_are_no_damage():
    rng = np.random.default_rng(0)
    Y = rng.normal(size=(1000, 4))
    Y[333] *= 3000
    dkfm.ExactFeatureMap(kernels.Linear(), basis="spectral", tol=1e-2).fit(Y).verify(rng.normal(size=(20, 4)))


def test_rows_that_float32_does_not_hold_are_refused_at_fit():
    X = np.array([[1e7, 2.0], [3e7, 1.0], [1.0, 2.0]])
    with pytest.raises(KernelError, match="float32 does not hold"):
        dkfm.ExactFeatureMap(kernels.Polynomial(6), dtype="float32").fit(X)


def test_distances_are_of_rows_like_those_of_the_fit(rng):
    phi = dkfm.ExactFeatureMap(K).fit(rng.normal(size=(9, 4)))
    with pytest.raises(InvalidInputError, match="X has 7 features, but ExactFeatureMap is expecting 4 features"):
        phi.distance(np.ones((1, 7)), np.zeros((1, 7)))
    with pytest.raises(InvalidInputError, match="no points to compare"):
        dkfm.ExactFeatureMap("precomputed").fit(np.eye(3)).distance(np.eye(3))


def test_weights_near_the_end_of_the_numbers_have_a_mean(rng):
    X = rng.normal(size=(5, 2))
    psi = dkfm.ExactFeatureMap(K, centered=True).fit(X, sample_weight=np.full(5, 3e307))
    np.testing.assert_allclose(psi.mean_, dkfm.ExactFeatureMap(K, centered=True).fit(X).mean_)
