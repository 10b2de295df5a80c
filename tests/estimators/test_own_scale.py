"""Every pair exact to its own scale, or a warning that says how far it is from that; models of earlier versions."""

import contextlib
import functools
import warnings
from dataclasses import replace

import numpy as np
import pytest

from dkfm import ExactFeatureMap, KernelFisher, KernelPCA, KernelRidge, batch_score, verify_scores
from dkfm.errors import DkfmWarning, KernelError, UnsupportedStoreError
from dkfm.kernels import Affine, Gaussian, Linear, Polynomial
from dkfm.numerics import pivoted_cholesky
from helpers.recorded import drop_resource_warnings

BASES = ["symmetric", "spectral", "cholesky"]
NINTH = Polynomial(9, scale=1 / 60, offset=0.0)


def mixed(rng, n=300, d=20):
    """Rows whose lengths differ by a factor of e^3.5, so that their ninth powers span 27 orders of magnitude."""
    return rng.normal(size=(n, d)) * np.exp(rng.uniform(-3, 0.5, size=(n, 1)))


def own_error(phi, X, Z):
    """Return the largest error of an inner product, over ``sqrt(k(x, x) k(z, z))``; rows of no length must be 0."""
    k, error = phi.kernel_, phi.transform(X) @ phi.transform(Z).T - phi.kernel_(X, Z)
    scale = np.sqrt(np.outer(k.diag(X), k.diag(Z)))
    assert not error[scale == 0].any()
    return np.abs(error[scale > 0] / scale[scale > 0]).max()


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("more", ["nothing", "a row twice", "a row of zeros", "an outlier"])
def test_rows_of_mixed_lengths_are_exact_to_their_own_scale(basis, more, rng):
    X, Z = mixed(rng), mixed(rng)
    X[5] = {"nothing": X[5], "a row twice": X[6], "a row of zeros": 0.0, "an outlier": 1e6 * X[5]}[more]
    phi = ExactFeatureMap(NINTH, basis=basis).fit(X)
    assert phi.condition_ < 1e3
    assert own_error(phi, X, X) < 1e-13
    assert max(own_error(phi, X, Z), own_error(phi, X, 1e-9 * Z)) < phi.error_bound_ < 1e-6
    assert own_error(phi, X, Z) < 1e-13


@pytest.mark.parametrize("columns", [2, 5])
def test_the_symmetric_basis_is_a_rotation_where_the_rank_is_low(columns, rng):
    X, Z = mixed(rng, 100, columns), mixed(rng, 50, columns)
    phi = ExactFeatureMap(Linear(), basis="symmetric").fit(X)
    assert phi.transform(Z).shape == (50, 100)
    assert len(phi.eigenvalues_) == columns
    assert max(own_error(phi, X, X), own_error(phi, X, Z)) < 1e-13
    values, vectors = np.linalg.eigh(Linear()(X))  # K^(-1/2) k_z, of the pseudo-inverse
    leading = vectors[:, -columns:]
    truth = Linear()(Z, X) @ leading / np.sqrt(values[-columns:]) @ leading.T
    np.testing.assert_allclose(phi.transform(Z), truth, rtol=0, atol=1e-9 * np.abs(truth).max())


def test_a_symmetric_map_that_neither_root_serves_warns_with_both_scales(rng):
    X = mixed(rng, 60, 5)
    X[1] = X[0] * (1 + 1e-6 * rng.normal(size=5))
    with pytest.warns(DkfmWarning, match=r"certificate of this map is .* of each pair's own scale, .* error bound .*"):
        phi = ExactFeatureMap(NINTH, basis="symmetric").fit(X)
    assert phi.certificate_.relative_error > 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error", DkfmWarning)
        ExactFeatureMap(NINTH, basis="cholesky").fit(X)


@pytest.mark.parametrize("basis", BASES)
def test_products_that_are_not_translation_invariant_warn_in_float32(basis, rng):
    X = rng.normal(size=(100, 3)) + 1e4
    k = Gaussian(2.0) * Polynomial(2)
    with pytest.warns(DkfmWarning, match=r'certificate .* its error bound \d.*fit with dtype="float64"'):
        phi = ExactFeatureMap(k, basis=basis, dtype="float32").fit(X)
    assert own_error(phi, X, X) < phi.error_bound_
    with warnings.catch_warnings():
        warnings.simplefilter("error", DkfmWarning)
        ExactFeatureMap(k, basis=basis).fit(X)


def test_components_of_columns_far_from_0_warn_and_are_not_more_than_the_columns(rng):
    X = rng.normal(size=(300, 3)) + 1e6
    with pytest.warns(DkfmWarning, match="centre the columns of X"):
        assert len(KernelPCA(kernel=Linear()).fit(X).eigenvalues_) == 3
    phi = ExactFeatureMap(Linear(), basis="spectral").fit(X)
    with pytest.warns(DkfmWarning, match="centre the columns of X"):
        assert len(KernelPCA.from_map(phi).eigenvalues_) == 3


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
def test_two_clusters_far_apart_are_within_the_bound_and_verified(basis, rng, tmp_path):
    X = np.concatenate([rng.normal(size=(100, 3)) + 1e3, rng.normal(size=(100, 3)) - 1e3])
    phi = ExactFeatureMap(Gaussian(2.0), basis=basis).fit(X)
    Z = X + rng.normal(size=X.shape)
    assert 1e-13 < own_error(phi, X, Z) < phi.error_bound_ < 1e-6
    np.save(tmp_path / "Z.npy", Z)
    phi.save(tmp_path / "model")
    batch_score(tmp_path / "model", tmp_path / "Z.npy", tmp_path / "scores", progress=False)
    assert verify_scores(tmp_path / "scores", Z).worst < 1


def test_small_rows_that_are_no_landmarks_are_seen_at_fit(rng, monkeypatch):
    """Pivots that leave the small rows out are exact among themselves; the training rows are not."""
    factor = functools.partial(pivoted_cholesky.factor_gram, limit=100)
    monkeypatch.setattr(pivoted_cholesky, "factor_gram", lambda K, tol, _: factor(K, tol))
    with pytest.warns(
        DkfmWarning, match=r"The certificate of the training rows is 1.0e.00 of .* at most 1e-06 is expected"
    ):
        phi = ExactFeatureMap(NINTH, basis="cholesky", build="gram").fit(mixed(rng))
    assert len(phi.pivots_) == 100
    assert phi.certificate_.relative_error < 1e-12
    assert phi.training_certificate_.relative_error > 0.9


def saved_before_scales(phi, bounds):
    """Return the record of a map as an earlier version saved it: without scales and `certify`, with other bounds."""
    record = phi._to_record()
    arrays = {name: a for name, a in record.extra_arrays.items() if name != "scales"}
    parameters = {name: value for name, value in record.parameters.items() if name != "certify"}
    return replace(record, parameters=parameters, extra_arrays={**arrays, "error_bounds": bounds})


@pytest.mark.parametrize("kernel", [Gaussian(2.0), Polynomial(2)])
def test_bounds_of_models_of_earlier_versions_are_converted(kernel, rng):
    X = rng.normal(size=(60, 3)) * np.logspace(-1, 1, 60)[:, np.newaxis]
    phi = ExactFeatureMap(kernel, basis="cholesky").fit(X)
    K = kernel(X)
    longest = np.sqrt(np.diagonal(K).max())
    features = phi.transform(X)
    r = len(phi.pivots_)
    missing = [np.diagonal(K) - np.square(features[:, :j]).sum(axis=1) for j in range(r + 1)]
    old = np.sqrt(np.maximum([m.max() for m in missing], 0)) / longest + 1e-12
    found = ExactFeatureMap._from_record(saved_before_scales(phi, old))
    np.testing.assert_array_equal(found.scales_, np.ones(r))
    assert (found.error_bounds_ >= np.minimum(old, 1.0)).all()
    for j in range(r + 1):
        own = np.abs(features[:, :j] @ features[:, :j].T - K) / np.sqrt(np.outer(np.diagonal(K), np.diagonal(K)))
        assert own.max() <= found.error_bounds_[j], j
    assert found.truncate(r // 2).error_bound_ >= found.error_bound_


@pytest.mark.parametrize("scales", [np.ones(59), np.full(60, np.nan), -np.ones(60), np.ones((60, 1))])
def test_scales_that_are_not_lengths_of_the_landmarks_are_refused(scales, rng):
    record = ExactFeatureMap(Gaussian(0.5), basis="spectral").fit(rng.normal(size=(60, 3)))._to_record()
    with pytest.raises(UnsupportedStoreError, match="of a feature map"):
        ExactFeatureMap._from_record(replace(record, extra_arrays={**record.extra_arrays, "scales": scales}))


@pytest.mark.parametrize("factor", [1e-300, 1e300])
@pytest.mark.parametrize("basis", BASES)
def test_certificates_and_bounds_of_kernels_of_any_size_are_numbers(factor, basis, rng):
    X, y = rng.normal(size=(60, 3)), rng.integers(0, 2, 60)
    k = factor * Gaussian(2.0)
    phi = ExactFeatureMap(k, basis=basis).fit(X)
    ordinary = ExactFeatureMap(Gaussian(2.0), basis=basis).fit(X)
    np.testing.assert_allclose(phi.error_bounds_, ordinary.error_bounds_, rtol=1e-6)
    fits = [phi, KernelPCA(5, kernel=k).fit(X), KernelPCA.from_map(phi, 5, X), KernelFisher(kernel=k).fit(X, y)]
    for found in (*fits, KernelFisher.from_map(phi, y, X)):
        assert 0 < found.certificate_.error < 1e-9
        assert 0 < found.certificate_.relative_error < 1e-6


@pytest.mark.costly
@pytest.mark.parametrize("basis", ["spectral", "cholesky"])
def test_few_rows_that_round_more_than_all_others_count_in_the_bound(basis, rng):
    """Three rows that are not in an even sample of 512."""
    X, far = rng.normal(size=(1100, 3)), 1e4 + rng.normal(size=(3, 3))
    X[[1, 3, 5]] = far
    phi = ExactFeatureMap(Gaussian(0.1) * Polynomial(2, offset=1.0), basis=basis, dtype="float32").fit(X)
    found = own_error(phi, X[:8], far + 0.05 * rng.normal(size=(3, 3)))
    assert 1e-3 < found < phi.error_bound_ < 1


@pytest.mark.parametrize("shift", [1e4, 1e8])
@pytest.mark.parametrize("h", [lambda X, shift: X + shift, None])
def test_bounds_count_what_a_map_of_rows_rounds(h, shift, rng):
    """More than the last bits of the rows."""
    X = rng.normal(size=(60, 3))
    Z, wide = X + 0.1, np.longdouble
    k = Gaussian(0.3).warp(Affine(1.0, shift) if h is None else functools.partial(h, shift=shift))
    phi = ExactFeatureMap(k, basis="spectral").fit(X)
    K = np.exp(-np.square(X.astype(wide)[:, np.newaxis] - Z).sum(axis=2) / (2 * wide(0.3) ** 2))
    assert 1e-13 < np.abs(phi.transform(X) @ phi.transform(Z).T - K).max() < phi.error_bound_ < 1e-3


def test_float32_rounds_distances_that_no_two_training_rows_have(rng):
    X = 1e3 * rng.normal(size=(100, 10))
    Z = X + rng.normal(size=X.shape) / 3
    phi = ExactFeatureMap(Gaussian(1.0), dtype="float32").fit(X)
    assert 1e-5 < own_error(phi, X, Z) < phi.error_bound_ < 0.1
    phi.verify(Z)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("basis", BASES)
def test_small_rows_of_centred_maps_are_certified_to_their_own_scale(basis, rng):
    X = rng.normal(size=(30, 3))
    X[0] = 0.0
    for kernel, rows in ((Linear(), X), (Polynomial(3), np.concatenate([X, 1e-4 * X[1:6]]))):
        phi = ExactFeatureMap(kernel, basis=basis, centered=True).fit(rows)
        assert phi.certificate_.relative_error < 1e-13
        for Z in (1e-12 * X, np.zeros((1, 3))):
            assert phi.verify(Z).between.relative_error < 1e-13


@pytest.mark.filterwarnings("ignore:.* has an eigenvalue of:dkfm.errors.DkfmWarning")  # by underflow
@pytest.mark.parametrize("scale", [1e-155, 1e-60])
@pytest.mark.parametrize("basis", BASES)
def test_rows_whose_kernel_values_are_tiny_are_fitted_and_those_that_underflow_are_verified(basis, scale, rng):
    X = rng.normal(size=(30, 3))
    underflows = pytest.warns(DkfmWarning, match="of 30 of 30 rows") if scale == 1e-155 else contextlib.nullcontext()
    with underflows:
        assert 0 < ExactFeatureMap(Linear(), basis=basis).fit(scale * X).error_bound_ < 1e-4
    verified = ExactFeatureMap(Polynomial(3), basis=basis).fit(X).verify(scale * X)
    assert verified.against.relative_error < 1e-13


def test_a_map_without_features_warns():
    with pytest.warns(DkfmWarning, match="is 0 on these rows, so the map has no features; scale"):
        phi = ExactFeatureMap(Polynomial(9, offset=0.0, scale=1.0)).fit(1e-40 * np.eye(3))
    assert phi.rank_ == 0


@pytest.mark.parametrize("estimator", [KernelPCA, KernelFisher, KernelRidge])
def test_scores_that_float32_does_not_hold_are_refused(estimator, rng):
    X = rng.normal(size=(60, 5)).astype(np.float32) * 1000
    with pytest.raises(KernelError, match=r'float32 does not hold the values of Polynomial.*dtype="float64"'):
        estimator(kernel=Polynomial(9, scale=1.0)).fit(X, np.arange(60) % 3)


def test_components_in_float32_far_from_0_warn(rng):
    X = rng.normal(size=(300, 5)).astype(np.float32)
    KernelPCA(3).fit(X)
    with pytest.warns(DkfmWarning, match="float32 does not hold these scores"):
        pca = KernelPCA(3).fit(X + 1000)
    assert 1e-4 < pca.certificate_.error < 1e-2


@pytest.mark.parametrize("basis", BASES)
def test_a_remedy_is_one_that_was_not_tried(basis, rng):
    X = rng.normal(size=(300, 5)) + 1e6 * np.sign(rng.normal(size=(300, 1)))
    with pytest.warns(DkfmWarning, match="float32 does not hold these features") as told:
        ExactFeatureMap(Gaussian(0.5), basis=basis, dtype="float32").fit(X)
    assert ("cholesky" in str(drop_resource_warnings(told)[0].message)) == (basis != "cholesky")


def test_components_whose_rows_float32_makes_equal_warn(rng):
    with pytest.warns(DkfmWarning, match="certificate of these scores is 1.0e"):
        KernelPCA(2, kernel=Linear(), dtype="float32").fit(rng.normal(size=(100, 3)) + 1e8)


def test_the_certificate_of_a_map_that_loses_small_rows_is_what_its_features_lose(rng):
    X = rng.normal(size=(200, 4)) * 10 ** rng.uniform(-1, 1, size=(200, 1))
    with pytest.warns(DkfmWarning, match='fit with basis="cholesky"'):
        phi = ExactFeatureMap(Polynomial(9, scale=0.25, offset=0.5)).fit(X)
    assert 0.1 < phi.certificate_.relative_error < 2
    assert phi.verify().certificate.relative_error < 2
