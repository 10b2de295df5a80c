"""Kernels and weights times any power of two change components, discriminants and regressions by that power alone.

Powers of two are exact, so that what a road without overflow and underflow computes has the same bits.
"""

import warnings

import numpy as np
import pytest

from dkfm import KernelFisher, KernelPCA, KernelRidge, kernels
from dkfm.errors import DkfmError, InvalidInputError, KernelError
from dkfm.numerics.eigensolvers import lanczos

SCALES = [2.0**exponent for exponent in (-900, -560, -300, 300, 560, 900)]


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("scale", SCALES)
def test_lanczos_of_a_scaled_matrix_makes_the_same_steps(scale, rng):
    Q = np.linalg.qr(rng.normal(size=(300, 300)))[0]
    A, start = (Q * 1.0 / np.arange(1, 301)) @ Q.T, rng.normal(size=(300, 16))
    truth = lanczos.largest_eigenpairs(lambda V: A @ V, start, 4)
    found = lanczos.largest_eigenpairs(lambda V: scale * (A @ V), start, 4)
    assert found.n_products == truth.n_products
    np.testing.assert_allclose(found.values / scale, truth.values, rtol=1e-14)
    assert np.abs(np.abs(np.einsum("ij,ij->j", found.vectors, truth.vectors)) - 1).max() < 1e-13
    assert (found.residuals / scale <= 10 * np.maximum(truth.residuals, 1e-15)).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("solver", ["arpack", "dense"])
def test_components_of_a_scaled_kernel_are_scaled(scale, solver, rng):
    X, kernel = rng.normal(size=(120, 3)), kernels.Laplacian(1.0)
    truth = KernelPCA(4, kernel=kernel, eigen_solver="dense").fit(X)
    found = KernelPCA(4, kernel=scale * kernel, eigen_solver=solver).fit(X)
    np.testing.assert_allclose(found.eigenvalues_ / scale, truth.eigenvalues_, rtol=1e-12)
    np.testing.assert_allclose(found.transform(X) / np.sqrt(scale), truth.transform(X), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", SCALES)
def test_discriminants_of_scaled_weights_are_the_same(scale, rng):
    X, weights = rng.normal(size=(60, 3)), rng.integers(1, 4, 60).astype(float)
    y = (X[:, 0] > 0).astype(int)
    for shrinkage in (0.1, 1e-3):
        truth, found = (
            KernelFisher(kernel=kernels.Gaussian(1.3), shrinkage=shrinkage * factor)
            .fit(X, y, weights * factor)
            .decision_function(X)
            for factor in (1.0, scale)
        )
        np.testing.assert_allclose(found, truth, rtol=1e-8, atol=1e-8 * np.abs(truth).max())


@pytest.mark.parametrize(
    "fit",
    [
        lambda X, y: KernelFisher(kernel="linear", shrinkage=1e-6).fit(X * 1e-151, y),
        lambda X, y: KernelFisher(kernel=1e-310 * kernels.Gaussian(1.0), shrinkage=0.1).fit(X, y),
        lambda X, y: KernelFisher(kernel=1e-298 * kernels.Gaussian(1.0), shrinkage=1e-6).fit(X, y),
        lambda X, y: KernelFisher(kernel=1e-300 * kernels.Gaussian(1.0)).fit(X, y, np.full(60, 1e-11)),
        lambda X, y: KernelFisher(kernel="linear", shrinkage="auto").fit(X * 1e-155, y),
        lambda X, y: KernelRidge("loo", kernel="linear").fit(X * 1e-160, y),
        lambda X, y: KernelRidge("loo", kernel=1e-320 * kernels.Gaussian(1.0)).fit(X, y),
    ],
)
def test_kernel_values_whose_inverse_overflows_are_refused(fit, rng):
    X = rng.normal(size=(60, 3))
    words = r"scale the kernel or the rows up\.$|coefficients of the model: scale the rows or the kernel, .* up if"
    with pytest.raises(DkfmError, match=words):
        fit(X, (X[:, 0] > 0).astype(int))


@pytest.mark.parametrize("rows", [12, 60])
@pytest.mark.parametrize("solver", ["dense", "arpack"])
def test_kernel_values_whose_sums_overflow_are_refused(rows, solver):
    with pytest.raises(KernelError, match="have sums above 1e308; scale the kernel down"):
        KernelPCA(2, kernel=kernels.Constant(1e308), eigen_solver=solver).fit(np.ones((rows, 4)))


def test_large_rows_have_the_regressions_and_discriminants_of_small_ones(rng):
    X, T, scale = rng.normal(size=(60, 3)), rng.normal(size=60), 2.0**500
    y = (X[:, 0] > 0).astype(int)
    truth = KernelRidge(1.0, kernel="linear").fit(X, T).predict(X)
    found = KernelRidge(scale * scale, kernel="linear").fit(X * scale, T).predict(X * scale)
    np.testing.assert_allclose(found, truth, rtol=1e-10)
    for shrinkage in (0.1, "auto"):
        fisher = KernelFisher(kernel="linear", shrinkage=shrinkage)
        truth = fisher.fit(X, y).predict_proba(X)
        np.testing.assert_allclose(fisher.fit(X * scale, y).predict_proba(X * scale), truth, atol=1e-9)


def test_rows_whose_kernel_values_are_nothing_beside_a_penalty_have_a_regression(rng):
    X, T, scale = rng.normal(size=(60, 3)), rng.normal(size=60), 2.0**-512
    found = KernelRidge(1.0, kernel="linear").fit(X * scale, T).predict(X * scale)
    np.testing.assert_allclose(found / scale / scale, X @ (X.T @ T), rtol=1e-8)


@pytest.mark.parametrize("value", [0.0, 1.1e-145, 0.1])
def test_equal_rows_do_not_vary_within_their_classes_whatever_their_scale(value):
    with pytest.raises(InvalidInputError, match="do not vary within their classes"):
        KernelFisher(kernel="linear").fit(np.full((60, 3), value), np.arange(60) % 2)
