"""A stored estimator is checked and measured without its class as with it."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

import dkfm
from dkfm import estimators
from dkfm.errors import CertificateError, InvalidInputError, UnsupportedStoreError
from dkfm.estimators.kernel_ridge import RidgeEstimator
from dkfm.estimators.stored import opening
from dkfm.kernels import Gaussian, Linear
from dkfm.numerics.certificates.verification import Verification

K = Gaussian(2.0)
LABELS = np.arange(60) % 3
PHI = dkfm.ExactFeatureMap(K, basis="cholesky")


FITS = {
    "map": lambda X: dkfm.ExactFeatureMap(K, centered=True).fit(X),
    "pivots": lambda X: dkfm.ExactFeatureMap(K, basis="cholesky", n_landmarks=20, landmarks="pivots").fit(X),
    "sampled": lambda X: dkfm.ExactFeatureMap(K, n_landmarks=20, landmarks="uniform", certify="sample").fit(X),
    "truncated": lambda X: dkfm.ExactFeatureMap(K).fit(X).truncate(30),
    "components": lambda X: dkfm.KernelPCA(3, kernel=K).fit(X),
    "components of a map": lambda X: dkfm.KernelPCA.from_map(PHI.fit(X), 3, X),
    "discriminants": lambda X: dkfm.KernelFisher(kernel=K).fit(X, LABELS),
    "discriminants of a map": lambda X: dkfm.KernelFisher.from_map(PHI.fit(X), LABELS, X),
    "regression": lambda X: dkfm.KernelRidge(0.1, kernel=K).fit(X, X[:, :2]),
    "regression of a map": lambda X: dkfm.KernelRidge.from_map(PHI.fit(X), X[:, 0], X),
    "ridge classifier": lambda X: dkfm.KernelRidgeClassifier("loo", kernel=K).fit(X, LABELS),
    "folded": lambda X: dkfm.fold(PHI.fit(X), LogisticRegression().fit(PHI.transform(X), LABELS)),
    "transformer": lambda X: dkfm.fold(PHI.fit(X), PCA(2).fit(PHI.transform(X))),
}


@pytest.fixture(params=FITS)
def fitted(request, rng):
    X = rng.normal(size=(60, 3))
    return FITS[request.param](X)


@pytest.mark.costly
def test_a_stored_estimator_measures_what_the_loaded_one_measures(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    assert str(opening.open_stored(tmp_path / "model").verify()) == str(dkfm.load(tmp_path / "model").verify())


@pytest.mark.costly
def test_new_points_are_measured_alike_and_only_for_maps(fitted, tmp_path, rng):
    Z = rng.normal(size=(30, 3))
    fitted.save(tmp_path / "model")
    for verify in (opening.open_stored(tmp_path / "model").verify, dkfm.load(tmp_path / "model").verify):
        if isinstance(fitted, dkfm.KernelPCA | dkfm.KernelFisher | RidgeEstimator):
            with pytest.raises(InvalidInputError, match=rf"A {type(fitted).__name__} is measured on its training rows"):
                verify(Z)
        else:
            assert str(verify(Z)) == str(fitted.verify(Z))
            if isinstance(verify(Z), Verification):
                with pytest.raises(InvalidInputError, match="X has 2 features, but ExactFeatureMap is expecting 3"):
                    verify(Z[:, :2])


def test_moved_landmarks_are_found_without_the_class(fitted):
    if hasattr(fitted, "certificate_"):
        moved = replace(fitted.model_, landmarks=fitted.model_.landmarks * 1.1)
        with pytest.raises(CertificateError, match=r"measured .* when it was fitted"):
            opening._from_record(replace(fitted._to_record(), model=moved)).verify()


def test_both_know_the_same_estimators():
    assert {*opening._CLASSES, *opening._HAVE_TRANSFORM} == set(estimators._REGISTRY)


def test_numbers_of_numpy_are_stored_by_fits_in_a_map(rng, tmp_path):
    X = rng.normal(size=(60, 3))
    dkfm.KernelPCA.from_map(PHI.fit(X), np.int64(2), X, centered=np.bool_(True)).save(tmp_path / "model")
    assert dkfm.load(tmp_path / "model").n_components == 2


def test_an_unknown_estimator_is_refused_alike(tmp_path, rng):
    class Mine(dkfm.KernelPCA):
        pass

    Mine(2, kernel=K).fit(rng.normal(size=(20, 3))).save(tmp_path / "model")
    for read in (dkfm.load, opening.open_stored):
        with pytest.raises(UnsupportedStoreError, match=r"is not an estimator that dkfm can read: KeyError: .*Mine"):
            read(tmp_path / "model")


@pytest.mark.costly
@pytest.mark.parametrize("name", ["error_bounds_", "dropped_", "eigenvalues_", "mean_"])
def test_a_store_whose_arrays_do_not_fit_its_model_is_refused(name, rng, tmp_path):
    phi = dkfm.ExactFeatureMap(K, basis="spectral", centered=True).fit(rng.normal(size=(30, 2)))
    setattr(phi, name, np.ones((3, 3)))
    phi.save(tmp_path / "phi")
    with pytest.raises(UnsupportedStoreError, match="do not fit its model"):
        dkfm.load(tmp_path / "phi")


def test_a_store_of_another_precision_than_it_says_is_refused(rng, tmp_path):
    phi = dkfm.ExactFeatureMap(K).fit(rng.normal(size=(30, 2)))
    phi._params_at_fit["dtype"] = "float32"
    phi.save(tmp_path / "phi")
    with pytest.raises(UnsupportedStoreError, match="not of the precision"):
        dkfm.load(tmp_path / "phi")


def without_moments(record):
    arrays = {name: array for name, array in record.extra_arrays.items() if name not in ("codes", "mean")}
    return replace(record, extra_arrays=arrays)


def without_columns(record):
    decision = replace(record.model.head("decision_function"), n_leading_columns=0)
    return replace(record, model=replace(record.model, heads={**record.model.heads, "decision_function": decision}))


def without_classes(record):
    return replace(record, fitted={name: value for name, value in record.fitted.items() if name != "classes"})


def with_classes(*labels):
    return lambda record: replace(record, fitted={**record.fitted, "classes": list(labels)})


def with_numbers(**numbers):
    return lambda record: replace(record, fitted={**record.fitted, "numbers": {**record.fitted["numbers"], **numbers}})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("discriminants", without_moments, "neither the classes of their rows nor moments"),
        ("discriminants of a map", without_moments, "neither the classes of their rows nor moments"),
        ("ridge classifier", without_columns, "outputs of a regression"),
        ("discriminants", without_classes, "classes of this model are not what dkfm writes"),
        ("ridge classifier", without_classes, "classes of this model are not what dkfm writes"),
        ("ridge classifier", with_classes(-1, 2**63), "classes of this model are not what dkfm writes"),
        ("ridge classifier", with_classes(True, 2), "classes of this model are not what dkfm writes"),
        ("ridge classifier", with_classes("b", "a"), "classes of this model are not what dkfm writes"),
        ("components", with_numbers(total_weight=0.0), "weight of components is not positive"),
        ("components of a map", with_numbers(total_weight=-60.0), "weight of components is not positive"),
    ],
)
def test_values_that_no_fit_has_are_refused(name, change, words, rng):
    record = FITS[name](rng.normal(size=(60, 3)))._to_record()
    opening._from_record(record)
    with pytest.raises(UnsupportedStoreError, match=words):
        opening._from_record(change(record))


@pytest.mark.filterwarnings("ignore:.*(rounding|certificate|variance)")
@pytest.mark.parametrize(
    "fit",
    [
        lambda value: dkfm.KernelPCA(2, kernel=Linear(), eigen_solver="arpack").fit(np.full((200, 3), 1e5 + value)),
        lambda value: dkfm.KernelPCA.from_map(dkfm.ExactFeatureMap(Linear()).fit(np.full((60, 3), value)), 2),
    ],
)
def test_a_variance_of_equal_rows_that_rounding_makes_negative_is_stored(fit, tmp_path):
    fitted = map(fit, np.arange(0.1, 4.0, 0.1))  # processors sum in other orders
    pca = next(pca for pca in fitted if pca.total_variance_ < 0)
    pca.save(tmp_path / "model")
    assert dkfm.load(tmp_path / "model").total_variance_ == pca.total_variance_
    assert np.isnan(opening.open_stored(tmp_path / "model").explained_share)
