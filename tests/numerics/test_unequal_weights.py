"""Discriminants of rows with weights of very different sizes, against the definition in extended precision."""

from contextlib import nullcontext

import numpy as np
import pytest
from sklearn.datasets import load_digits

import dkfm
from dkfm import kernels
from dkfm.errors import DkfmWarning
from dkfm.numerics.supervised import fisher, spectral_gram
from dkfm.numerics.supervised.classes import Classes
from dkfm.numerics.weighting import Weighting, center_and_weigh_gram_in_place
from helpers.extended_precision import decide_in_extended_precision, solve_in_extended_precision
from helpers.recorded import drop_resource_warnings


@pytest.mark.parametrize(
    ("kernel", "weight", "tolerance", "seed"),
    [
        (kernels.Gaussian(30.0), 1.0, 1e-8, 0),
        (kernels.Gaussian(30.0), 1e4, 1e-6, 1),  # that of the heavy row is a large eigenvalue among small ones
        (kernels.Gaussian(30.0), 1e6, 1e-4, 4),
        (kernels.Gaussian(2.0), 1e6, 1e-7, 0),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The certificate of these scores")
def test_a_row_of_large_weight_does_not_hide_the_eigenvalues_of_others(kernel, weight, tolerance, seed):
    rng = np.random.default_rng(seed)
    y = np.arange(40) % 2
    X, Z = rng.normal(size=(40, 3)) + y[:, np.newaxis] * [1.0, 0.0, 0.0], rng.normal(size=(200, 3))
    w = np.where(np.arange(40) == 0, weight, 1.0)
    K, classes = kernel(X, X), Classes(y, w, 2)
    expected = decide_in_extended_precision(K, kernel(Z, X), y, w, 1e-3)
    spectral = spectral_gram.decompose_gram(np.asfortranarray(K), classes, "raise")
    found = fisher.solve_from_eigenvectors(spectral, classes, 1e-3)
    T, constants = fisher.decision_functions(found.means, classes.effective_priors)
    decisions = (kernel(Z, X) @ (found.weights @ T) - (found.offset @ T + constants))[:, 0]
    np.testing.assert_allclose(decisions, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    fitted = dkfm.KernelFisher(kernel=kernel, shrinkage=1e-3).fit(X, y, sample_weight=w)
    errors = np.abs(fitted.decision_function(Z) - expected) / np.abs(expected).max()
    assert errors.max() <= 10 * fitted.certificate_.error + 1e-9


def test_a_ridge_below_rounding_is_told():
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    X = rng.normal(size=(40, 3)) + y[:, np.newaxis] * [1.0, 0.0, 0.0]
    w = np.where(np.arange(40) == 0, 2.5e7, 1.0)
    with pytest.warns(DkfmWarning, match="the ridge is little beside the rounding of kernel values: raise shrinkage"):
        fitted = dkfm.KernelFisher(kernel=kernels.Gaussian(30.0), shrinkage=1e-12).fit(X, y, sample_weight=w)
    assert fitted.certificate_.error == 1.0


@pytest.mark.parametrize("factor", [1e-250, 1.0, 1e250])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 5.0), (1.0, 100.0), (1e8, 1e8)], ids=str)
@pytest.mark.parametrize("shrinkage", [1e-7, 1e-9, 1e-30])
def test_a_small_ridge_of_a_kernel_of_low_rank_is_not_told(rng, factor, weights, shrinkage):
    X, y = rng.normal(size=(60, 3)), np.arange(60) % 2
    w = np.where(np.arange(60) < 3, weights[1], weights[0])
    fitted = dkfm.KernelFisher(kernel=factor * kernels.Linear(), shrinkage=shrinkage).fit(X, y, sample_weight=w)
    assert fitted.certificate_.error < 1e-10


@pytest.mark.parametrize("shrinkage", [1e-300, 1e-308, 1e-315])
@pytest.mark.filterwarnings("ignore:The certificate of these scores")
def test_a_ridge_that_underflows_is_no_warning_of_numpys(rng, shrinkage):
    X, y = rng.normal(size=(60, 3)), np.arange(60) % 2
    dkfm.KernelFisher(kernel=kernels.Linear(), shrinkage=shrinkage).fit(X, y)


def test_classes_of_one_mean_have_one_warning():
    X = np.repeat(np.random.default_rng(0).normal(size=(6, 3)), 10, axis=0)
    with pytest.warns(DkfmWarning, match="the priors alone decide") as warned:
        dkfm.KernelFisher(kernel=kernels.Gaussian(1.0), shrinkage=1e-7).fit(X, np.arange(60) % 2)
    assert len(drop_resource_warnings(warned)) == 1


def test_warnings_of_discriminants_name_the_line_of_the_caller():
    rng = np.random.default_rng(0)
    X, y, w = rng.normal(size=(40, 3)), np.arange(40) % 2, np.where(np.arange(40) == 0, 1e8, 1.0)
    with pytest.warns(DkfmWarning, match="the ridge is little") as warned:
        dkfm.KernelFisher(kernel=kernels.Gaussian(30.0), shrinkage=1e-5).fit(X, y, sample_weight=w)
    assert drop_resource_warnings(warned)[0].filename == __file__


@pytest.mark.filterwarnings("ignore:There are significant negative")
def test_the_negative_part_of_a_clipped_kernel_is_no_rounding():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 3)), np.arange(60) % 2
    sigmoid = kernels.Sigmoid(1.0, -1.0)
    fitted = dkfm.KernelFisher(kernel=sigmoid, on_indefinite="clip", shrinkage=1e-11).fit(X, y)
    assert fitted.certificate_.error < 1e-10


@pytest.mark.parametrize(("spread", "alpha", "is_told"), [(8, 1e-2, True), (4, 1e-2, False), (0, 1e-6, False)])
@pytest.mark.parametrize("basis", ["spectral", "cholesky"])
def test_what_sums_over_rows_lose_of_small_weights_is_in_the_certificate_of_a_map(spread, alpha, is_told, basis):
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(60, 3)), 10.0 ** rng.uniform(-spread, spread, size=60)
    y = X[:, 0] + rng.normal(size=60)
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis=basis).fit(X)
    with pytest.warns(DkfmWarning, match="beside alpha, rounding is large") if is_told else nullcontext():
        found = dkfm.KernelRidge.from_map(phi, y, X, alpha=alpha, sample_weight=w if spread else None)
    K = kernels.Gaussian(1.0)(X, X).astype(np.longdouble)
    expected = K @ solve_in_extended_precision(K + np.diag(alpha / (w if spread else np.ones(60))), y)
    error = float(np.abs(found.predict(X) - expected).max() / np.abs(y).max())
    assert error <= 10 * found.certificate_.error
    assert spread or found.certificate_.error < 1e-10  # rounding of the sums is estimated, at most 100 times too large


@pytest.mark.filterwarnings("ignore:The certificate of these scores")
def test_norms_of_a_regression_in_float32_are_those_of_the_solution():
    X, y = (values[:200] for values in load_digits(return_X_y=True))
    wide, narrow = (dkfm.KernelRidge(1e-3, kernel="linear", dtype=dtype).fit(X, y) for dtype in ("float64", "float32"))
    np.testing.assert_allclose(narrow.norms_, wide.norms_, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("is_hidden", [False, True], ids=["seen", "orthogonal"])
@pytest.mark.filterwarnings("ignore:The certificate of these scores")
def test_norms_are_bounds_where_rounding_is_most_of_them(is_hidden, dtype):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        X, y = rng.normal(size=(50, 3)), rng.normal(size=50)
        if is_hidden:  # all but a millionth of the targets is orthogonal to the columns
            y -= X @ np.linalg.lstsq(X, y - 1e-6 * X[:, 0])[0]
        for alpha in (1e-8, 1e-6, 1e-3):
            model = dkfm.KernelRidge(alpha, kernel="linear", dtype=dtype).fit(X, y)
            norm = np.linalg.norm(np.linalg.solve(X.T @ X + alpha * np.eye(3), X.T @ y))
            assert norm <= model.norms_[0]
            assert is_hidden or model.norms_[0] <= norm * (1.01 if alpha == 1e-3 else 1e4)


@pytest.mark.parametrize("spread", [0, 4, 8])
@pytest.mark.parametrize("in_map", [False, True], ids=["fit", "map"])
@pytest.mark.filterwarnings("ignore:The certificate of these scores")
def test_certificates_of_discriminants_count_weights_of_all_sizes(spread, in_map):
    rng, kernel = np.random.default_rng(0), kernels.Gaussian(1.0)
    y = np.arange(60) % 2
    X, Z = rng.normal(size=(60, 3)) + y[:, np.newaxis] * [1.0, 0.0, 0.0], rng.normal(size=(100, 3))
    w = 10.0 ** rng.uniform(-spread, spread, size=60)
    expected = decide_in_extended_precision(kernel(X, X), kernel(Z, X), y, w, 1e-3)
    if in_map:
        phi = dkfm.ExactFeatureMap(kernel, basis="spectral").fit(X)
        found = dkfm.KernelFisher.from_map(phi, y, X, shrinkage=1e-3, sample_weight=w)
    else:
        found = dkfm.KernelFisher(kernel=kernel, shrinkage=1e-3).fit(X, y, sample_weight=w)
    error = np.abs(found.decision_function(Z) - expected).max() / np.abs(expected).max()
    assert error <= 10 * found.certificate_.error < (1e-10 if spread == 0 else 1e-2)


@pytest.mark.parametrize("seed", [4, 5])
def test_eigenvalues_vectors_coordinates_and_rounding_stay_together(seed):
    rng, kernel = np.random.default_rng(seed), kernels.Gaussian(30.0)
    y, w = np.arange(40) % 2, np.where(np.arange(40) == 0, 1e6, 1.0)
    X = rng.normal(size=(40, 3)) + y[:, np.newaxis] * [1.0, 0.0, 0.0]
    classes, G = Classes(y, w, 2), np.asfortranarray(kernel(X, X))
    means = center_and_weigh_gram_in_place(G, Weighting(w))
    Y, shares = classes.sqrt_weighted_centred_indicators(), w / w.sum()
    found = spectral_gram.decompose_centred(G.copy(order="F"), Y, "raise", means, Weighting(w))
    ridge = 1e-3 * found.within_class_scatter_trace(classes) / w.sum()
    for step in (lambda: found, lambda: found.include_small_values(ridge)):  # the second one uses up the first
        pairs = step()
        values = np.concatenate([pairs.omitted_values, pairs.values])
        V = pairs.all_vectors
        np.testing.assert_allclose(np.einsum("ij,ij->j", V, G @ V), values, rtol=1e-6, atol=1e-11)
        np.testing.assert_array_equal(V.T @ Y, np.concatenate([pairs.omitted_coordinates, pairs.coordinates]))
        mean = V[:, 0] * np.copysign(1.0, V[0, 0])
        np.testing.assert_allclose(mean, np.sqrt(shares), rtol=1e-12)
        assert np.abs(mean @ V[:, 1:]).max() < 1e-14
        noise = spectral_gram._estimate_noise(V, pairs.values.max(), w.sum() * (means @ shares), shares)
        np.testing.assert_allclose(pairs.noise, noise, rtol=1e-6)


def test_values_up_to_twice_the_most_negative_one_are_rounding(rng):
    Q = np.linalg.qr(np.column_stack([np.ones(50), rng.normal(size=(50, 49))])).Q[:, 1:]  # orthogonal to constants
    values = np.concatenate([[-2e-13, 1e-13, 3e-13, 5e-13], np.linspace(1.0, 2.0, 45)])
    classes = Classes(np.arange(50) % 2, np.ones(50), 2)
    found = spectral_gram.decompose_gram(np.asfortranarray((Q * values) @ Q.T), classes, "raise")
    np.testing.assert_allclose(found.values[:1], 5e-13, rtol=1e-2)
    assert len(found.omitted_values) == 4
