"""The estimators: laws over kernels, bases and random rows, scikit-learn's manners, small and odd inputs, refusals."""

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import contracts
import dkfm
from dkfm import kernels
from dkfm.errors import DkfmError, DkfmWarning, InvalidInputError, KernelError, NotPSDError
from helpers import strategies

MAPS = [
    (kernels.Gaussian(2.0), "symmetric"),
    (kernels.Gaussian(2.0), "spectral"),
    (kernels.Gaussian(0.2), "symmetric"),
    (kernels.Laplacian(1.0), "spectral"),
    (kernels.Linear(), "symmetric"),
    (kernels.Polynomial(3, 0.5, 1.0), "spectral"),
    (0.5 * kernels.Gaussian(1.0) * kernels.Polynomial(2) + 1.0, "symmetric"),
]


@pytest.mark.costly
@pytest.mark.parametrize(("kernel", "basis"), MAPS, ids=repr)
def test_maps_obey_the_laws(kernel, basis, rng):
    X, Z = rng.normal(size=(90, 3)), rng.normal(size=(31, 3))
    phi = dkfm.ExactFeatureMap(kernel, basis=basis).fit(X)
    contracts.check_feature_map(phi, X, Z)
    contracts.check_scoring(phi, Z)


@given(strategies.rows(1, 25), st.sampled_from([k for k, _ in MAPS]), st.sampled_from(["symmetric", "spectral"]))
@settings(max_examples=40)
def test_maps_are_exact_on_any_rows_with_duplicates_and_constants(X, kernel, basis):
    # The bound grows with the square root of the condition of rows on a grid: sqrt(1 / (4 eps)) times eps, and N.
    contracts.check_feature_map(dkfm.ExactFeatureMap(kernel, basis=basis).fit(X), X, X[::-1] + 0.25, bound=1e-6)


@pytest.mark.slow
@given(strategies.rows(1, 20), st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=15)
def test_the_tiles_of_the_gram_do_not_show_in_the_map(X, q, tile):
    with tempfile.TemporaryDirectory() as folder:
        whole = dkfm.KernelPCA(q, kernel=kernels.Gaussian(1.0)).fit(X)
        tiled = dkfm.KernelPCA(q, kernel=kernels.Gaussian(1.0), tile_rows=tile, workspace=folder).fit(X)
    np.testing.assert_allclose(tiled.eigenvalues_, whole.eigenvalues_, atol=1e-12 * len(X))
    products = [s @ s.T for s in (whole.transform(X), tiled.transform(X))]
    if q >= (whole.eigenvalues_ > 1e-9).sum():  # a cut through equal eigenvalues keeps any of their vectors
        np.testing.assert_allclose(*products, atol=1e-7)


def test_components_obey_the_laws(rng):
    X, Z = rng.normal(size=(80, 4)), rng.normal(size=(21, 4))
    for kernel in (kernels.Gaussian(2.0), kernels.Linear(), kernels.Polynomial(2)):
        pca = dkfm.KernelPCA(3, kernel=kernel).fit(X)
        contracts.check_scoring(pca, Z)
        assert pca.certificate_.error < 1e-12
        np.testing.assert_allclose(pca.fit_transform(X), pca.transform(X), atol=1e-10)
        np.testing.assert_allclose(np.linalg.norm(pca.eigenvectors_, axis=0), 1, rtol=1e-12)


@pytest.mark.slow
def test_components_of_the_digits_equal_scikit_learns_to_ten_digits(digits):
    from sklearn.decomposition import KernelPCA as Peer

    X, Z = digits[0][:700], digits[0][700:]
    for kernel, peer in [
        (kernels.Gaussian(2.0), Peer(12, kernel="rbf", gamma=1 / 8, eigen_solver="dense")),
        (kernels.Polynomial(5, 1 / 64, 1.0), Peer(12, kernel="poly", gamma=1 / 64, degree=5, eigen_solver="dense")),
    ]:
        found, truth = dkfm.KernelPCA(12, kernel=kernel).fit(X), peer.fit(X)
        np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=1e-10)
        assert np.abs(np.abs(found.transform(Z)) - np.abs(truth.transform(Z))).max() < 1e-10


@pytest.mark.parametrize("estimator", [dkfm.ExactFeatureMap(kernels.Gaussian(1.0)), dkfm.KernelPCA(2)], ids=repr)
@pytest.mark.parametrize(
    "X",
    [
        np.array([[1.0, 2.0]]),
        np.array([[1.0], [2.0]]),
        np.ones((5, 3)),
        np.zeros((4, 2)),
        np.arange(12).reshape(4, 3),
        np.arange(12, dtype=np.float32).reshape(4, 3),
        np.array([[0, 255], [1, 2]], dtype=np.uint8),
        [[1, 2], [3, 4]],
        np.asfortranarray(np.arange(6.0).reshape(3, 2)),
        np.arange(24.0).reshape(4, 6)[:, ::2],
    ],
    ids=lambda X: str(np.asarray(X).tolist())[:30],
)
def test_small_constant_integer_float32_and_strided_rows_work(estimator, X):
    fitted = estimator.fit(X)
    found = fitted.transform(X)
    assert len(found) == len(X)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, fitted.transform(np.array(X, dtype=np.float64)))


@pytest.mark.parametrize("estimator", [dkfm.ExactFeatureMap(kernels.Gaussian(1.0)), dkfm.KernelPCA(2)], ids=repr)
@pytest.mark.parametrize(
    ("X", "words"),
    [
        ([[1.0], [np.nan]], "row 1 contains NaN"),
        ([[np.inf], [1.0]], "row 0 contains infinity"),
        (np.ones((0, 2)), "at least one row"),
        (np.ones((2, 0)), "at least one row"),
        (np.ones(3), "two dimensions"),
        (np.array([[object()]]), "real numbers"),
        (np.array([[1j]]), "real numbers"),
    ],
)
def test_bad_training_rows_are_refused_in_one_sentence(estimator, X, words):
    with pytest.raises(InvalidInputError, match=words) as caught:
        estimator.fit(X)
    assert "\n" not in str(caught.value)


def test_another_number_of_columns_is_refused_with_both(rng):
    import dask.array as da

    fitted = dkfm.KernelPCA(2).fit(rng.normal(size=(10, 3)))
    for Z in (np.ones((2, 4)), da.ones((2, 4))):
        with pytest.raises(InvalidInputError, match=r"4.*3"):
            fitted.transform(Z)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: dkfm.ExactFeatureMap("gausian"), KernelError, "near it: gaussian"),
        (lambda: dkfm.ExactFeatureMap(3), KernelError, "kernel must be a dkfm kernel"),
        (lambda: dkfm.ExactFeatureMap(kernels.Linear(), basis="polar"), InvalidInputError, "symmetric, spectral"),
        (lambda: dkfm.ExactFeatureMap(kernels.Linear(), rcond=2), InvalidInputError, "rcond"),
        (lambda: dkfm.ExactFeatureMap(kernels.Linear(), on_indefinite="x"), InvalidInputError, "on_indefinite"),
        (lambda: dkfm.ExactFeatureMap(kernels.Linear(), tile_rows=-1), InvalidInputError, "tile_rows"),
        (lambda: dkfm.KernelPCA(0), InvalidInputError, "n_components"),
        (lambda: dkfm.KernelPCA(1.5), InvalidInputError, "n_components"),
        (
            lambda: dkfm.ExactFeatureMap(kernels.Function(lambda X, Y: -(X @ Y.T))),
            NotPSDError,
            "lambda_min = -.*lambda_max = ",
        ),
    ],
)
def test_bad_parameters_are_refused_by_name_at_fit(make, error, words, rng):
    with pytest.raises(error, match=words):
        make().fit(rng.normal(size=(10, 3)))


def test_nothing_is_scored_before_fit():
    from sklearn.exceptions import NotFittedError

    for call in ("transform", "save", "verify"):
        with pytest.raises(NotFittedError):
            getattr(dkfm.KernelPCA(2), call)("x")


def test_a_row_that_overflows_the_kernel_is_named(rng):
    fitted = dkfm.KernelPCA(2, kernel=kernels.Polynomial(3)).fit(rng.normal(size=(10, 1)))
    with pytest.raises(KernelError, match="Row 1 of X overflows"):
        fitted.transform([[1.0], [1e200]])


def test_the_model_does_not_change_with_the_rows_it_was_fitted_to(rng):
    X, Z = rng.normal(size=(30, 2)), rng.normal(size=(5, 2))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0)).fit(X)
    before = phi.transform(Z)
    X[:] = 0
    np.testing.assert_array_equal(phi.transform(Z), before)


@pytest.mark.slow
def test_new_points_of_a_wide_kernel_do_not_pass_for_damage(rng):
    # Training pairs are exact to 1e-13; new ones to the square root of what the rank dropped.
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(15.0)).fit(rng.normal(size=(800, 6)))
    found = phi.verify(rng.normal(size=(3000, 6))).against
    assert phi.certificate_.error < found.error < 2e-8


def test_maps_of_a_chosen_rank_or_a_clipped_kernel_are_measured_on_new_points_too(rng):
    X, Z = rng.normal(size=(200, 3)), rng.normal(size=(50, 3))
    found = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), rcond=1e-3).fit(X).verify(Z).against
    assert 1e-4 < found.error < 0.2
    sigmoid = kernels.Function(lambda A, B: np.tanh(2 * A @ B.T - 1))
    with pytest.warns(DkfmWarning, match="lambda_min"):
        clipped = dkfm.ExactFeatureMap(sigmoid, on_indefinite="clip").fit(X)
    assert clipped.verify(Z).against.error > 1e-3


def test_column_names_that_are_not_names_are_refused_before_the_work(rng, monkeypatch):
    from dkfm.estimators import base
    from dkfm.gram import build

    def refuse(*_, **__):
        raise TypeError("Feature names are only supported if all input features have string names.")

    monkeypatch.setattr(base, "validate_data", refuse)
    monkeypatch.setattr(build, "compute_driver_gram", None)
    with pytest.raises(InvalidInputError, match="string names"):
        dkfm.KernelPCA(1).fit(rng.normal(size=(5, 2)))


def test_a_fit_that_fails_leaves_the_estimator_as_it_was(rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0)).fit(rng.normal(size=(20, 4)))
    Z = rng.normal(size=(5, 4))
    before = phi.transform(Z)
    phi.kernel = kernels.Function(lambda X, Y: -(X @ Y.T))
    with pytest.raises(NotPSDError):
        phi.fit(rng.normal(size=(20, 6)))
    np.testing.assert_array_equal(phi.transform(Z), before)
    with pytest.raises(InvalidInputError, match=r"6 features.*expecting 4"):
        phi.transform(np.ones((2, 6)))


def test_landmarks_are_prepared_once_for_many_calls(rng, monkeypatch):
    from dkfm.numerics import scorer

    pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(30, 6)))
    made, prepare = [], scorer.prepare_scorer
    monkeypatch.setattr(scorer, "prepare_scorer", lambda model: made.append(1) or prepare(model))
    for _ in range(3):
        pca.transform(np.ones((1, 6)))
    assert len(made) == 1


def test_a_refit_forgets_the_model_before_it(rng):
    import dask.array as da

    X, Y, Z = rng.normal(size=(30, 2)), rng.normal(size=(20, 2)), da.from_array(rng.normal(size=(5, 2)))
    pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(1.0)).fit(X)
    pca.transform(Z)
    pca.fit(Y)
    np.testing.assert_allclose(pca.transform(Z).compute(scheduler="synchronous"), pca.transform(Z.compute()))


def test_pipelines_feature_names_and_set_output_work(rng):
    X = rng.normal(size=(30, 4))
    pipeline = make_pipeline(StandardScaler(), dkfm.KernelPCA(3, kernel=kernels.Gaussian(2.0)))
    assert pipeline.fit_transform(X).shape == (30, 3)
    assert pipeline.get_feature_names_out().tolist() == ["kernelpca0", "kernelpca1", "kernelpca2"]
    assert pipeline[1].n_features_in_ == 4


def test_verify_measures_anew_and_fails_when_a_weight_changed(rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0)).fit(rng.normal(size=(50, 3)))
    assert phi.verify().certificate.error == phi.certificate_.error
    found = phi.verify(rng.normal(size=(20, 3)))
    assert (found.against.pairs, found.between.pairs) == (50 * 20, 20 * 20)
    phi.model_.heads["features"].weights[:, 3] *= 1 + 1e-6
    with pytest.raises(DkfmError, match="when it was fitted"):
        phi.verify()
    with pytest.raises(InvalidInputError, match="training rows alone"):
        dkfm.KernelPCA(1).fit(rng.normal(size=(9, 2))).verify(np.ones((2, 2)))


def test_a_conditional_kernel_has_components_and_no_map(rng):
    X = rng.normal(size=(30, 3))
    conditional = kernels.NegativeSquaredDistance()
    with pytest.raises(NotPSDError, match=r"NegativeSquaredDistance.*KernelPCA takes this kernel.*lambda_min"):
        dkfm.ExactFeatureMap(conditional).fit(X)
    halved = dkfm.KernelPCA(2, kernel=0.5 * conditional).fit(X)
    linear = dkfm.KernelPCA(2).fit(X)
    np.testing.assert_allclose(halved.transform(X), linear.transform(X), rtol=0, atol=1e-12)
    assert dkfm.ExactFeatureMap(kernels.Exp(conditional)).fit(X).rank_ == 30
