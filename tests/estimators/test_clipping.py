"""A kernel that is not positive semi-definite and is clipped keeps its whole positive part, in every estimator."""

import warnings

import numpy as np
import pytest

import dkfm
from dkfm import KernelFisher, KernelPCA, kernels
from dkfm.errors import DkfmWarning, NotPSDError, NotSupportedError
from dkfm.numerics import kernel_components, roots
from dkfm.numerics.eigensolvers import lanczos
from dkfm.numerics.weighting import Weighting

pytestmark = pytest.mark.filterwarnings("ignore:.*negative part is dropped:dkfm.errors.DkfmWarning")

EPS = np.finfo(np.float64).eps
KERNELS = {
    "sigmoid": kernels.Sigmoid(0.5, -0.5),
    "sigmoid of a negative diagonal": kernels.Sigmoid(0.1, -3.0),
    "distance": kernels.NegativeSquaredDistance(),
    "random": "precomputed",
}


def case(name, n=76):
    """Return a kernel, training rows, and their Gram matrix."""
    rng, kernel = np.random.default_rng(5), KERNELS[name]
    X = rng.normal(size=(n, n if kernel == "precomputed" else 4))
    if kernel == "precomputed":
        X = X + X.T
        return kernel, X, X
    return kernel, X, kernel(X)


def centred(K, w=None):
    w = np.ones(len(K)) if w is None else w
    S = np.sqrt(w)[:, None] * (np.eye(len(K)) - w / w.sum())
    return S @ K @ S.T


def positive(A):
    """Return the positive eigenvalues of a matrix, descending, and its positive part."""
    values, V = np.linalg.eigh(A)
    kept = values > 4 * EPS * np.abs(values).max()
    return values[kept][::-1], (V[:, kept] * values[kept]) @ V[:, kept].T


def clipped(name, **options):
    kernel, X, K = case(name)
    return dkfm.ExactFeatureMap(kernel, on_indefinite="clip", **options).fit(X), X, K


# Feature maps.


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6, 1e-20])
@pytest.mark.filterwarnings("ignore:.*on these rows", "ignore:The certificate of")  # k(x, x) is 0
def test_values_of_rows_without_a_length_show_an_indefinite_kernel(rng, scale):
    X, K = rng.normal(size=(5, 2)), scale * (np.ones((5, 5)) - np.eye(5))
    for kernel, rows in ((kernels.NegativeSquaredDistance(scale), X), ("precomputed", K)):
        with pytest.raises(NotPSDError, match="not positive semi-definite"):
            dkfm.ExactFeatureMap(kernel, basis="cholesky").fit(rows)
    phi = dkfm.ExactFeatureMap(kernels.NegativeSquaredDistance(scale), landmarks="pivots", on_indefinite="clip").fit(X)
    assert phi.error_bound_ == np.inf


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("basis", ["symmetric", "spectral"])
@pytest.mark.parametrize("name", KERNELS)
def test_features_of_a_clipped_kernel_have_the_inner_products_of_its_positive_part(name, basis, dtype):
    phi, X, K = clipped(name, basis=basis, dtype=dtype)
    values, P = positive(K)
    F = phi.transform(X).astype(np.float64)
    # Rounding of kernel values, of either precision, times the root of the largest over the smallest eigenvalue.
    atol = (1e-12 if dtype == "float64" else 1e-4) * np.abs(K).max() * len(K)
    np.testing.assert_allclose(F @ F.T, P, rtol=0, atol=atol)
    if dtype == "float64":
        np.testing.assert_allclose(phi.eigenvalues_, values, rtol=0, atol=1e-12 * np.abs(values).max())
        assert phi.n_negative_ == (np.linalg.eigvalsh(K) < 0).sum() or name == "distance"  # whose zeros are rounding
        assert phi.rank_ + len(phi.dropped_) == len(K)
    assert phi.error_bound_ == np.inf


def test_a_sigmoid_keeps_all_of_its_98_positive_eigenvalues():
    X = np.random.default_rng(0).normal(size=(200, 5))
    assert dkfm.ExactFeatureMap(kernels.Sigmoid(0.5, -0.5), basis="spectral", on_indefinite="clip").fit(X).rank_ == 98


@pytest.mark.parametrize("n", [50, 300])
def test_zeros_of_a_clipped_kernel_are_still_dropped(n, rng):
    X, Y = rng.normal(size=(n, 5)) + 1e3, np.repeat(rng.normal(size=(n // 2, 5)), 2, axis=0)
    distance, sigmoid = kernels.NegativeSquaredDistance(), kernels.Sigmoid(0.5, -0.5)
    found = roots.inverse_root(np.asfortranarray(distance(X)), on_indefinite="clip")
    assert len(found.values) == 6
    found = roots.inverse_root(np.asfortranarray(sigmoid(Y)), on_indefinite="clip")
    assert len(found.values) == len(roots.inverse_root(np.asfortranarray(sigmoid(Y[::2])), on_indefinite="clip").values)


def test_a_kernel_that_is_indefinite_by_rounding_alone_keeps_the_cut_of_twice_its_lowest_eigenvalue():
    lowest = -200 * EPS
    K = np.diag([1.0, 0.5, 300 * EPS, 500 * EPS, lowest])
    for policy in ("raise", "clip"):
        with pytest.warns(DkfmWarning, match="more than rounding explains"):
            found = roots.inverse_root(K.copy(order="F"), on_indefinite=policy)
        np.testing.assert_array_equal(found.values, [1.0, 0.5, 500 * EPS])


def test_rcond_cuts_a_clipped_kernel_too():
    _, _, K = case("random")
    found = roots.inverse_root(np.asfortranarray(K), rcond=0.5, on_indefinite="clip")
    assert found.values[-1] > 0.5 * found.values[0] >= found.dropped_values[0]


@pytest.mark.parametrize("name", ["sigmoid", "random"])
def test_a_tolerance_takes_no_positive_eigenvalue_of_a_clipped_kernel(name):
    kernel, X, K = case(name)
    phi = dkfm.ExactFeatureMap(kernel, basis="spectral", on_indefinite="clip", tol=0.3)
    with pytest.warns(DkfmWarning, match="No rank of this map is within tol"):
        assert phi.fit(X).rank_ == len(positive(K)[0])


def test_residuals_leave_out_eigenvectors_by_the_rounding_of_the_whole_spectrum():
    found = roots.Root(np.eye(3), np.array([1.0, 1e-3, 1e-8]), np.array([-1e6]), np.ones(3))
    assert roots.make_residual_head(found).n_leading_columns == 2


@pytest.mark.parametrize("name", list(KERNELS)[:3])
def test_a_clipped_map_says_what_its_certificate_is_and_measures_new_points_without_a_bound(name):
    with pytest.warns(DkfmWarning, match="`certificate_` says how far the features are from the kernel"):
        phi, X, K = clipped(name)
    _, P = positive(K)
    largest = max(np.abs(K).max(), np.abs(P).max())
    found = phi.verify(X[:20] + 0.1)
    assert phi.certificate_.error >= 0.1 * np.abs(P - K).max() / largest > 1e-3
    assert found.against.error > 1e-3
    assert found.bound == np.inf
    assert "without a bound\nresiduals: none, for the kernel was clipped" in str(found)


def test_a_clipped_precomputed_kernel_is_not_measured_against_what_was_left_of_it():
    phi, _, K = clipped("random", basis="spectral")
    with pytest.raises(NotSupportedError, match="rcond"):
        phi.truncate(phi.rank_)
    assert phi.verify(K).certificate.error == phi.certificate_.error > 0.1


# Components.


@pytest.mark.parametrize(("dtype", "weighted"), [("float64", False), ("float64", True), ("float32", False)])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_all_formulations_and_solvers_have_the_components_of_the_positive_part(name, center, weighted, dtype):
    kernel, X, K = case(name)
    w = np.random.default_rng(1).uniform(0.5, 2, len(K)) if weighted else np.ones(len(K))
    A = centred(K, w) if center else np.sqrt(np.outer(w, w)) * K
    values, P = positive(A)
    options = {"kernel": kernel, "on_indefinite": "clip", "centered": center, "dtype": dtype}
    few = 2
    for more in (*({"formulation": f} for f in kernel_components.FORMULATIONS), {"eigen_solver": "arpack"}):
        q = few if "eigen_solver" in more else min(5, len(values))
        found = KernelPCA(q, **options, **more).fit(X, sample_weight=w if weighted else None)
        np.testing.assert_allclose(found.eigenvalues_, values[:q], rtol=0, atol=1e-11 * np.abs(A).max() * len(A))
        assert found.certificate_.error < (1e-9 if dtype == "float64" else 1e-2)
        shares = values[:q] / values.sum()
        known = "eigen_solver" not in more or np.linalg.eigvalsh(A)[0] > -1e-9 * values[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error" if known else "ignore")
            ratio = found.explained_variance_ratio_
        np.testing.assert_allclose(ratio, shares if known else np.full(q, np.nan), rtol=0, atol=1e-10)
        V = found.eigenvectors_
        tolerance = 1e-9 if dtype == "float64" else 1e-4
        np.testing.assert_allclose(P @ V, V * values[:q], rtol=0, atol=tolerance * np.abs(A).max() * len(A))


@pytest.mark.parametrize("name", ["sigmoid", "random"])
def test_the_least_components_that_explain_a_share_do_so_of_the_positive_part(name):
    kernel, X, K = case(name)
    values, _ = positive(centred(K))
    q = int((np.cumsum(values) >= 0.5 * values.sum()).argmax()) + 1
    found = KernelPCA(0.5, kernel=kernel, on_indefinite="clip").fit(X)
    assert len(found.eigenvalues_) == q


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("name", list(KERNELS)[:3])
def test_components_of_a_clipped_map_are_those_of_its_features(name, center):
    phi, X, K = clipped(name, basis="spectral")
    _, P = positive(K)
    values, _ = positive(centred(P) if center else P)
    for rows in (None, X):
        found = KernelPCA.from_map(phi, 3, rows, centered=center)
        np.testing.assert_allclose(found.eigenvalues_, values[:3], rtol=1e-9)
        np.testing.assert_allclose(found.explained_variance_ratio_, values[:3] / values.sum(), rtol=1e-9)


def test_components_of_a_clipped_map_of_landmarks_share_the_variance_of_its_features():
    _, X, _ = case("sigmoid")
    kernel = KERNELS["sigmoid"]
    phi = dkfm.ExactFeatureMap(kernel, landmarks=np.arange(30), basis="spectral", on_indefinite="clip").fit(X)
    F = phi.transform(X)
    values = np.linalg.svd(F - F.mean(axis=0), compute_uv=False) ** 2
    found = KernelPCA.from_map(phi, None, X)
    np.testing.assert_allclose(found.explained_variance_ratio_[:5], values[:5] / values.sum(), rtol=1e-9)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", ["sigmoid", "random"])
def test_lanczos_does_not_know_the_shares_of_a_clipped_kernel_and_says_so(name, stored, tmp_path):
    _, _, K = case(name)
    weighting = Weighting(np.ones(len(K)))
    problem = kernel_components.make_product_problem(K.__matmul__, np.diagonal(K), weighting)
    if not stored:
        problem = kernel_components.make_dense_problem(np.asfortranarray(K), weighting)
    start = np.random.default_rng(0).normal(size=(len(K), lanczos.choose_block_columns(len(K), 2)))
    found, _ = kernel_components.solve_leading_components(
        problem, start, kernel_components.ComponentOptions(2, on_indefinite="auto"), weighting
    )
    assert np.isnan(found.eigenvalue_sum)
    kernel, X, _ = case(name)
    model = KernelPCA(2, kernel=kernel, eigen_solver="arpack").fit(X)
    if name == "sigmoid":
        model.save(tmp_path / "model")
        model = dkfm.load(tmp_path / "model")
    with pytest.warns(DkfmWarning, match='shares of variance are NaN.*eigen_solver="dense"'):
        assert np.isnan(model.explained_variance_ratio_).all()


def test_a_negative_part_that_no_product_shows_is_told_by_the_trace():
    values, weighting = np.concatenate([[100.0, 100.0], np.full(28, 1e-3), np.full(170, -1.0)]), np.ones(200)
    problem = kernel_components.EigenProblem(lambda C: values[:, None] * C, np.zeros(200), float(values.sum()))
    wanted, start = (
        kernel_components.ComponentOptions(2, on_indefinite="raise"),
        np.eye(200, 16),
    )  # which sees no negative eigenvalue
    with pytest.raises(NotPSDError):
        kernel_components.solve_leading_components(
            problem, start, wanted, Weighting(weighting, centered=False), max_products=1
        )


def test_shares_of_a_positive_semi_definite_kernel_are_of_the_trace_in_every_solver(rng):
    X = rng.normal(size=(90, 4))
    for solver in ("dense", "arpack"):
        found = KernelPCA(2, kernel="rbf", eigen_solver=solver).fit(X)
        trace = np.trace(centred(found.kernel_(X))) / len(X)
        np.testing.assert_allclose(found.total_variance_, trace, rtol=1e-12)


# Discriminants.


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_discriminants_of_a_clipped_kernel_are_those_of_its_positive_part(name, dtype):
    kernel, X, K = case(name)
    y = np.random.default_rng(2).integers(3, size=len(K))
    found = KernelFisher(kernel=kernel, shrinkage=0.1, on_indefinite="clip", dtype=dtype).fit(X, y)
    values, P = positive(centred(K))
    U, s, _ = np.linalg.svd(P)
    F = U[:, : len(values)] * np.sqrt(s[: len(values)])
    means = np.array([F[y == c].mean(axis=0) for c in range(3)])
    within = (F - means[y]).T @ (F - means[y]) / len(K)
    ridge = 0.1 * np.trace(within) / len(K)
    sizes = np.bincount(y) / len(K)
    ratios = np.linalg.eigvals(
        np.linalg.solve(within + ridge * np.eye(len(s[: len(values)])), (means.T * sizes) @ means)
    )
    np.testing.assert_allclose(found.ratios_, np.sort(ratios.real)[::-1][:2], rtol=1e-6)
    np.testing.assert_allclose(found.ridge_, ridge, rtol=1e-9)
    assert found.certificate_.error < (1e-7 if dtype == "float64" else 1e-2)


def test_discriminants_use_positive_eigenvalues_below_the_most_negative_one(rng):
    # The classes differ along a direction of which the kernel has less than twice its most negative eigenvalue.
    y = np.repeat([0, 1], 40)
    Q = np.linalg.qr(np.column_stack([np.ones(80), 2 * y - 1, rng.normal(size=(80, 78))]))[0]
    values = np.concatenate([[0.0, 1.0, 40.0, -1.0], np.full(40, 0.01), np.zeros(36)])
    found = KernelFisher(kernel="precomputed", shrinkage=1e-3, on_indefinite="clip").fit((Q * values) @ Q.T, y)
    assert found.score((Q * values) @ Q.T, y) == 1.0


def test_a_shrinkage_is_chosen_with_all_positive_eigenvalues():
    kernel, X, _ = case("sigmoid")
    y = (X[:, 0] > 0).astype(int)
    found = KernelFisher(kernel=kernel, shrinkage="auto", on_indefinite="clip").fit(X, y)
    assert np.isfinite(found.ridge_)
    assert found.certificate_.error < 1e-6
