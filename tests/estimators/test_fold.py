"""Folded linear models: the same as the pair of map and model, in memory, lazily, saved and in batch jobs."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import is_classifier, is_regressor
from sklearn.cross_decomposition import CCA, PLSCanonical, PLSRegression
from sklearn.decomposition import PCA, IncrementalPCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import (
    ElasticNet,
    HuberRegressor,
    Lasso,
    LinearRegression,
    LogisticRegression,
    Perceptron,
    Ridge,
    RidgeClassifier,
    RidgeCV,
    SGDClassifier,
    SGDOneClassSVM,
    SGDRegressor,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC, LinearSVR

import dkfm
from dkfm import kernels
from dkfm.errors import InvalidInputError
from helpers.fold_cases import fitted, map_of, require_equal, rows_and_labels

CLASSIFIERS = [
    LogisticRegression(),
    RidgeClassifier(),
    LinearSVC(),
    SGDClassifier(random_state=0),
    SGDClassifier(loss="log_loss", random_state=0),
    SGDClassifier(loss="modified_huber", random_state=0),
    Perceptron(),
    LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
    LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.1),
    LinearDiscriminantAnalysis(),
    make_pipeline(StandardScaler(), LogisticRegression()),
    make_pipeline(StandardScaler(with_mean=False), "passthrough", PCA(5), LinearSVC()),
    make_pipeline(make_pipeline(PCA(8, whiten=True)), SGDClassifier(loss="log_loss", random_state=0)),
]


REGRESSORS = [
    LinearRegression(),
    Ridge(),
    RidgeCV(),
    Lasso(0.01),
    ElasticNet(0.01),
    HuberRegressor(max_iter=2000),
    SGDRegressor(random_state=0),
    LinearSVR(),
    PLSRegression(2),
    CCA(1),
    PLSCanonical(1),
    make_pipeline(StandardScaler(), Ridge()),
]


TRANSFORMERS = [
    PCA(3),
    PCA(3, whiten=True),
    IncrementalPCA(3),
    TruncatedSVD(3),
    StandardScaler(),
    make_pipeline(StandardScaler(), TruncatedSVD(2)),
]


ONE_CLASS = [SGDOneClassSVM(random_state=0), make_pipeline(StandardScaler(), SGDOneClassSVM(random_state=0))]


def name_of(model):
    return repr(model).replace("\n", "").replace(" ", "")


@pytest.mark.alike
@pytest.mark.parametrize(
    "basis", ["symmetric", *(pytest.param(basis, marks=pytest.mark.slow) for basis in ("spectral", "cholesky"))]
)
@pytest.mark.parametrize("model", CLASSIFIERS, ids=name_of)
@given(st.integers(0, 2**16), st.integers(2, 4))
@settings(max_examples=4)
def test_a_folded_classifier_is_the_pair(model, basis, seed, classes):
    X, y = rows_and_labels(seed, classes)
    phi, names = map_of(basis, X), np.array(["b", "a", "d", "c"])[y]
    pair = fitted(model, phi, X, names)
    folded = dkfm.fold(phi, pair)
    require_equal(folded, phi, pair, np.random.default_rng(seed).normal(size=(20, 3)))
    assert is_classifier(folded)
    np.testing.assert_array_equal(folded.classes_, pair.classes_)


@pytest.mark.costly
@pytest.mark.alike
@pytest.mark.parametrize(
    "basis", ["spectral", *(pytest.param(basis, marks=pytest.mark.slow) for basis in ("symmetric", "cholesky"))]
)
@pytest.mark.parametrize("model", [*REGRESSORS, *TRANSFORMERS, *ONE_CLASS], ids=name_of)
@given(st.integers(0, 2**16))
@settings(max_examples=4)
def test_a_folded_regressor_or_transformer_is_the_pair(model, basis, seed):
    X, _ = rows_and_labels(seed, 2)
    phi = map_of(basis, X)
    pair = fitted(model, phi, X, np.sin(X[:, 0]) + X[:, 1] ** 2)
    folded = dkfm.fold(phi, pair)
    require_equal(folded, phi, pair, np.random.default_rng(seed).normal(size=(20, 3)))
    assert is_regressor(folded) == is_regressor(pair)


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"centered": True}, {"n_landmarks": 20, "landmarks": "uniform"}]
)
@pytest.mark.parametrize("basis", ["symmetric", "spectral", "cholesky"])
def test_any_map_can_be_folded(basis, options):
    X, y = rows_and_labels(1, 3, 200)
    phi = map_of(basis, X, **options)
    pair = fitted(LogisticRegression(), phi, X, y)
    require_equal(dkfm.fold(phi, pair), phi, pair, X[:40] + 0.1)


def test_components_and_folds_can_be_folded_too():
    X, y = rows_and_labels(2, 3, 200)
    pca = dkfm.KernelPCA(6, kernel=kernels.Gaussian(1.5)).fit(X)
    pair = fitted(LogisticRegression(), pca, X, y)
    require_equal(dkfm.fold(pca, pair), pca, pair, X + 0.1)
    phi = map_of("spectral", X)
    axes = fitted(PCA(4), phi, X, y)
    first = dkfm.fold(phi, axes)
    again = fitted(LinearSVC(), first, X, y)
    np.testing.assert_array_equal(dkfm.fold(first, again).predict(X), again.predict(axes.transform(phi.transform(X))))


def test_chances_of_liblinear_are_those_of_each_class_alone():
    X, y = rows_and_labels(3, 2)
    phi = map_of("spectral", X)
    pair = fitted(LogisticRegression(solver="liblinear"), phi, X, y)
    require_equal(dkfm.fold(phi, pair), phi, pair, X)


def test_several_targets_have_as_many_columns():
    X, _ = rows_and_labels(3, 2)
    phi = map_of("spectral", X)
    for model in (Ridge(), PLSRegression(2), CCA(2)):
        pair = fitted(model, phi, X, X[:, :2] ** 2)
        require_equal(dkfm.fold(phi, pair), phi, pair, X)


def test_a_precomputed_kernel_folds_by_its_columns():
    X, y = rows_and_labels(4, 3)
    K = kernels.Gaussian(1.5)(X)
    phi = dkfm.ExactFeatureMap("precomputed", basis="spectral").fit(K)
    pair = LogisticRegression().fit(phi.transform(K), y)
    folded = dkfm.fold(phi, pair)
    np.testing.assert_allclose(folded.predict_proba(K), pair.predict_proba(phi.transform(K)), rtol=1e-9, atol=1e-12)
    assert not hasattr(folded, "rounding_")


def test_rows_may_be_sparse_or_a_data_frame():
    pd = pytest.importorskip("pandas", reason="the extra dataframe brings it")
    X, y = rows_and_labels(5, 3)
    X[X < 0] = 0
    phi = map_of("spectral", sparse.csr_array(X))
    pair = LogisticRegression().fit(phi.transform(sparse.csr_array(X)), y)
    np.testing.assert_array_equal(dkfm.fold(phi, pair).predict(sparse.csr_array(X)), pair.predict(phi.transform(X)))
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    phi = map_of("spectral", frame).set_output(transform="pandas")
    pair = LogisticRegression().fit(phi.transform(frame), y)  # which then knows the names of its features
    folded = dkfm.fold(phi, pair)
    np.testing.assert_array_equal(folded.predict(frame), pair.predict(phi.transform(frame)))
    with pytest.raises(ValueError, match="feature names"):
        folded.predict(frame[["c", "b", "a"]])


@pytest.mark.costly
@pytest.mark.parametrize("labels", [[3, 7, 9], [True, False, True], [0.0, 1.0, 2.0], ["x", "y", "z"]])
def test_a_saved_fold_returns_the_same_and_needs_no_linear_model(tmp_path, labels):
    X, y = rows_and_labels(6, 3)
    phi = map_of("cholesky", X)
    folded = dkfm.fold(phi, LogisticRegression().fit(phi.transform(X), np.array(labels)[y]))
    folded.save(tmp_path / "model")
    loaded = dkfm.load(tmp_path / "model")
    for output in ("predict", "decision_function", "predict_proba"):
        np.testing.assert_array_equal(getattr(loaded, output)(X), getattr(folded, output)(X))
    assert loaded.classes_.dtype == folded.classes_.dtype
    assert not hasattr(loaded, "transform")
    assert (loaded.rounding_, loaded.kind_) == (folded.rounding_, "classifier")
    assert loaded.verify().worst <= 1


def test_labels_that_a_store_cannot_hold_are_refused_before_it_is_made(tmp_path):
    X, y = rows_and_labels(6, 3)
    phi = map_of("spectral", X)
    dates = np.array(["2026-01-01", "2026-01-02", "2026-01-03"], "datetime64[D]")[y]
    pair = LogisticRegression().fit(phi.transform(X), dates)
    with pytest.raises(InvalidInputError, match="datetime64"):
        dkfm.fold(phi, pair)


@pytest.mark.slow
def test_scoring_imports_no_linear_model(tmp_path):
    X, y = rows_and_labels(7, 3)
    phi = map_of("spectral", X)
    dkfm.fold(phi, LogisticRegression().fit(phi.transform(X), y)).save(tmp_path / "model")
    np.save(tmp_path / "rows.npy", X)
    script = """
        import sys

        class Refused:
            def find_spec(self, name, path=None, target=None):
                if name.startswith("sklearn.linear_model"):
                    raise AssertionError(name)

        sys.meta_path.insert(0, Refused())
        import dkfm, numpy as np
        model = dkfm.load("model")
        report = dkfm.batch_score("model", "rows.npy", "out", output=["predict", "predict_proba"], progress=False)
        codes = dkfm.open_scores("out", "predict").compute()[:, 0]
        assert (model.classes_[codes] == model.predict(np.load("rows.npy"))).all()
        try:
            import sklearn.linear_model
        except AssertionError:
            print(report.rows)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["60"], done.stderr
