"""Folded linear models: the same as the pair of map and model, in memory, lazily, saved and in batch jobs."""

import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.cluster import KMeans
from sklearn.cross_decomposition import CCA, PLSCanonical, PLSRegression
from sklearn.decomposition import PCA, IncrementalPCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import (
    ElasticNet,
    HuberRegressor,
    Lasso,
    LinearRegression,
    LogisticRegression,
    Perceptron,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    RidgeCV,
    SGDClassifier,
    SGDOneClassSVM,
    SGDRegressor,
)
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, StandardScaler
from sklearn.svm import SVC, LinearSVC, LinearSVR

import dkfm
from dkfm import kernels
from dkfm.errors import CertificateError, DkfmWarning, InvalidInputError, NotSupportedError, UnsupportedStoreError
from dkfm.estimators.fitting import linear_models

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
OUTPUTS = ("predict", "decision_function", "predict_proba", "transform")


def name_of(model):
    return repr(model).replace("\n", "").replace(" ", "")


def rows_and_labels(seed, classes, n=60):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    angle = np.arctan2(X[:, 1], X[:, 0]) + rng.normal(scale=0.3, size=n)
    return X, np.digitize(angle, np.linspace(-np.pi, np.pi, classes + 1)[1:-1])


def map_of(basis, X, **options):
    return dkfm.ExactFeatureMap(kernels.Gaussian(1.5), basis=basis, **options).fit(X)


def fitted(model, phi, X, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's solvers on few rows
        return clone(model).fit(phi.transform(X), y)


def allowed(phi, model, Z, output):
    """Return what rounding allows the pair and its fold to differ by: 64 eps (sum |k| |W_map| |A| + |b|)."""
    after = linear_models.read_linear_model(model).outputs[output][0]
    head, eps = phi.model_.head(phi._output), np.finfo(phi.model_.dtype).eps
    K = np.asarray(phi.model_.kernel(Z, phi.model_.points), np.float64)
    return 64 * eps * linear_models.sum_of_magnitudes(head, after, K).max(axis=1)


def has(model, output):
    """Return whether a model has an output; a discriminant analysis by least squares has a method that only raises."""
    return hasattr(model, output) and not (output == "transform" and getattr(model, "solver", "") == "lsqr")


def require_equal(folded, phi, model, Z):
    """Raise unless a fold returns what the pair does, everything of it and nothing else."""
    F = phi.transform(Z)
    for output in OUTPUTS:
        assert hasattr(folded, output) == has(model, output), output
        if not hasattr(folded, output):
            continue
        found, expected = np.asarray(getattr(folded, output)(Z)), np.asarray(getattr(model, output)(F))
        assert found.shape == expected.shape, output
        bound = allowed(phi, model, Z, output)
        if output == "predict" and hasattr(folded, "classes_"):
            decision = np.asarray(model.decision_function(F)).reshape(len(F), -1)
            both = decision if decision.shape[1] > 1 else np.hstack([-decision, decision])
            ordered = np.sort(both, axis=1)
            clear = ordered[:, -1] - ordered[:, -2] > 2 * bound
            assert clear.mean() > (0.9 if phi.model_.dtype == np.float64 else 0.1)  # the bound is no estimate
            np.testing.assert_array_equal(found[clear], expected[clear])
            continue
        difference = np.abs(found - expected).reshape(len(F), -1)
        # Chances change by less than what they are made of, and round themselves; but for shares of small sums.
        scale = 4 if output == "predict_proba" else 1
        assert (scale * bound + 64 * np.finfo(phi.model_.dtype).eps >= difference.T).all(), output


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


@pytest.mark.parametrize("form", ["zarr", "parquet"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_job_writes_codes_decisions_and_chances_in_one_pass(tmp_path, form, dtype):
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="the extra dataframe brings it")
    X, y = rows_and_labels(8, 3, 200)
    phi = map_of("spectral", X, dtype=dtype)
    folded = dkfm.fold(phi, fitted(LogisticRegression(), phi, X, np.array(["no", "maybe", "yes"])[y]))
    names, path = ["predict", "decision_function", "predict_proba"], tmp_path / f"out.{form}"
    Z = X + 0.1
    Z[17, 1] = np.nan
    report = dkfm.batch_score(folded, Z, path, output=names, on_invalid="nan", chunk_rows=60, progress=False)
    assert (report.rows, report.invalid_rows) == (200, 1)
    valid = np.arange(200) != 17
    found = dkfm.open_scores(path) if form == "parquet" else {name: dkfm.open_scores(path, name) for name in names}
    if form == "parquet":
        table = found.compute()
        assert list(table.columns) == ["predict", *(f"{name}{i}" for name in names[1:] for i in range(3))]
        found = {name: table[[c for c in table.columns if c.startswith(name)]].to_numpy() for name in names[1:]}
        found["predict"] = table[["predict"]].to_numpy()
    codes = np.asarray(found["predict"])
    assert (codes.dtype, codes[17, 0]) == (np.int64, -1)
    np.testing.assert_array_equal(folded.classes_[codes[valid, 0]], folded.predict(Z[valid]))
    for name in names[1:]:
        values = np.asarray(found[name])
        assert values.dtype == np.dtype(dtype)
        expected = getattr(folded, name)(Z[valid])
        np.testing.assert_allclose(values[valid], expected, rtol=0, atol=1e2 * np.finfo(dtype).eps)
        assert np.isnan(values[17]).all()
    assert dkfm.verify_scores(path, Z, model=_saved(folded, tmp_path)).worst <= 1
    if form == "zarr":
        own = zarr.open_group(path, mode="r").attrs["dkfm"]
        assert own["classes"] == ["maybe", "no", "yes"]
    blocks = [block for block, _ in dkfm.iter_scores(path, "predict")]
    np.testing.assert_array_equal(np.concatenate(blocks)[:, 0], codes[:, 0])


def _saved(folded, tmp_path):
    folded.save(tmp_path / "model")
    return tmp_path / "model"


def test_a_wrong_code_in_an_output_is_found_by_the_formula(tmp_path):
    X, y = rows_and_labels(9, 3, 100)
    phi = map_of("spectral", X)
    pair = LogisticRegression().fit(phi.transform(X), y)
    other = LogisticRegression().fit(phi.transform(X), (y + 1) % 3)
    for name, model in (("model", pair), ("other", other)):
        dkfm.fold(phi, model).save(tmp_path / name)
        dkfm.batch_score(tmp_path / name, X, tmp_path / f"{name}.zarr", progress=False)
    assert dkfm.verify_scores(tmp_path / "model.zarr", X).worst <= 1
    from dkfm.scoring import outputs, verification

    output = outputs.read_output(tmp_path / "model.zarr")
    receipts = verification.completion.marker_receipts(output)
    model = dkfm.load(tmp_path / "other").model_
    with pytest.raises(CertificateError, match="predict"):
        verification._worst(output, receipts, model, verification.open_source(X), slice(0, 50))


def test_dask_arrays_and_frames_stay_lazy():
    da, dd = pytest.importorskip("dask.array"), pytest.importorskip("dask.dataframe", reason="the extra dataframe")
    import pandas as pd

    X, y = rows_and_labels(10, 3)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    phi = map_of("spectral", frame)
    folded = dkfm.fold(phi, LogisticRegression().fit(phi.transform(frame), np.array(["u", "v", "w"])[y]))
    expected = folded.predict(frame)
    lazily = folded.predict(da.from_array(X, chunks=(25, 3)))
    assert (lazily.shape, lazily.chunks, lazily.dtype) == ((60,), ((25, 25, 10),), expected.dtype)
    np.testing.assert_array_equal(lazily.compute(scheduler="synchronous"), expected)
    rows = dd.from_pandas(frame[["c", "a", "b"]], npartitions=3)
    series = folded.predict(rows)
    np.testing.assert_array_equal(series.compute(scheduler="synchronous").to_numpy(), expected)
    chances = folded.predict_proba(rows).compute(scheduler="synchronous")
    assert list(chances.columns) == ["predict_proba0", "predict_proba1", "predict_proba2"]
    np.testing.assert_allclose(chances.to_numpy(), folded.predict_proba(frame), rtol=1e-12)


def test_what_is_not_affine_is_refused_by_name():
    X, y = rows_and_labels(11, 2)
    phi = map_of("spectral", X)
    for model in (SVC(), KMeans(2), PoissonRegressor(), make_pipeline(MaxAbsScaler(), LogisticRegression())):
        pair = fitted(model, phi, X, y)
        name = type(pair[0] if hasattr(pair, "steps") else pair).__name__
        with pytest.raises(NotSupportedError, match=f"{name} .* can still run on what transform returns"):
            dkfm.fold(phi, pair)
    with pytest.raises(NotSupportedError, match="transforms nothing"):
        dkfm.fold(phi, make_pipeline("passthrough", fitted(Ridge(), phi, X, y), fitted(Ridge(), phi, X, y)))
    with pytest.raises(NotFittedError):
        dkfm.fold(phi, LogisticRegression())
    with pytest.raises(InvalidInputError, match="feature map of dkfm's"):
        dkfm.fold(PCA().fit(X), LogisticRegression().fit(X, y))
    with pytest.raises(InvalidInputError, match="fitted to 3 features, and the map returns"):
        dkfm.fold(phi, LogisticRegression().fit(X, y))
    several = fitted(RidgeClassifier(), phi, X, np.stack([y, 1 - y, y], axis=1))
    with pytest.raises(NotSupportedError, match="RidgeClassifier"):
        dkfm.fold(phi, several)


class Louder(LogisticRegression):
    """A subclass whose outputs are not those of its coefficients."""

    def predict_proba(self, X):
        return super().predict_proba(X) ** 2


class Plain(LogisticRegression):
    """A subclass that changes nothing."""


def test_a_subclass_is_taken_at_its_word_only_where_it_is_true():
    X, y = rows_and_labels(12, 3)
    phi = map_of("spectral", X)
    pair = fitted(Plain(), phi, X, y)
    require_equal(dkfm.fold(phi, pair), phi, pair, X)
    with pytest.raises(NotSupportedError, match="predict_proba of Louder is not what its coefficients say"):
        dkfm.fold(phi, fitted(Louder(), phi, X, y))


def test_a_scaler_that_divides_by_rounding_is_told_with_the_number():
    X = np.random.default_rng(0).normal(size=(150, 1))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(3.0), basis="spectral").fit(X)
    pair = fitted(make_pipeline(StandardScaler(), LogisticRegression(C=1e6)), phi, X, X[:, 0] > 0)
    with pytest.warns(DkfmWarning, match=r"differ by \d.\de-\d\d of an output's spread"):
        dkfm.fold(phi, pair)
    narrow = dkfm.ExactFeatureMap(kernels.Gaussian(0.3), basis="spectral", dtype="float32").fit(X)
    pair = fitted(make_pipeline(StandardScaler(), Ridge(1e-3)), narrow, X, np.sin(3 * X[:, 0]))
    pair[-1].coef_ = np.eye(narrow.rank_)[-1]  # nothing but the feature that is nearest to rounding
    with pytest.raises(NotSupportedError, match=r"differ by \d.\de-01 of an output's spread"):
        dkfm.fold(narrow, pair)


def test_a_row_that_overflows_has_no_class_in_a_job_and_in_its_verification(tmp_path):
    X, y = rows_and_labels(15, 2, 100)
    product = dkfm.KernelFisher(kernel=kernels.Linear(), shrinkage=1e-6).fit(X / 3, y), 9e306
    kernel = dkfm.KernelFisher(kernel=kernels.Polynomial(9)).fit(X / 3, y), 1e200
    for number, (estimator, value) in enumerate((product, kernel)):  # what overflows
        Z = X.copy()
        Z[7] = value, 0, 0
        names = ["predict", "decision_function", "predict_proba"]
        path, model = tmp_path / f"{number}.zarr", tmp_path / f"{number}"
        estimator.save(model)
        report = dkfm.batch_score(model, Z, path, output=names, on_invalid="nan", progress=False)
        assert report.invalid_rows == 1
        assert dkfm.open_scores(path, "predict").compute(scheduler="synchronous")[7, 0] == -1
        assert dkfm.verify_scores(path, Z).worst <= 1


def test_an_outlier_detector_keeps_what_lies_on_its_border():
    X, _ = rows_and_labels(16, 2)
    phi = dkfm.ExactFeatureMap(kernels.Linear(), basis="spectral").fit(X)
    pair = SGDOneClassSVM(fit_intercept=False, random_state=0).fit(phi.transform(X))
    folded, border = dkfm.fold(phi, pair), np.zeros((1, 3))
    assert pair.decision_function(phi.transform(border))[0] == folded.decision_function(border)[0] == 0
    np.testing.assert_array_equal(folded.predict(border), pair.predict(phi.transform(border)))
    assert folded.predict(X).dtype == pair.predict(phi.transform(X)).dtype


def test_a_classifier_of_one_class_is_refused_and_one_of_thirty_is_not():
    X = rows_and_labels(17, 2)[0]
    phi = map_of("spectral", X)
    with pytest.raises(NotSupportedError, match="one class alone"):
        dkfm.fold(phi, fitted(RidgeClassifier(), phi, X, np.zeros(60)))
    pair = fitted(RidgeClassifier(), phi, X, np.arange(60) % 30)
    assert len(dkfm.fold(phi, pair).classes_) == 30


def test_an_output_that_is_constant_is_no_rounding():
    X = rows_and_labels(18, 2)[0]
    phi = map_of("spectral", X)
    for model in (Lasso(100.0), LinearRegression()):
        folded = dkfm.fold(phi, fitted(model, phi, X, np.full(60, 7.0)))
        np.testing.assert_allclose(folded.predict(X), 7.0)
        assert folded.rounding_ < 1e-8


def test_a_discriminant_analysis_that_was_another_one_before_has_no_transform():
    X, y = rows_and_labels(19, 3)
    phi = map_of("spectral", X)
    pair = LinearDiscriminantAnalysis().fit(phi.transform(X), y)
    pair.set_params(solver="lsqr", shrinkage=0.1).fit(phi.transform(X), y)
    assert not hasattr(dkfm.fold(phi, pair), "transform")


def test_weights_that_are_no_numbers_are_found_by_verify():
    X, y = rows_and_labels(20, 3)
    phi = map_of("spectral", X)
    folded = dkfm.fold(phi, fitted(LogisticRegression(), phi, X, y))
    folded.model_.head("predict").weights[0, 0] = np.nan
    with pytest.raises(CertificateError):
        folded.verify()


def test_it_is_frozen_for_scikit_learn():
    X, y = rows_and_labels(13, 2)
    phi = map_of("spectral", X)
    folded = dkfm.fold(phi, LogisticRegression().fit(phi.transform(X), y))
    assert clone(folded) is folded
    assert folded.fit(X, y) is folded
    assert cross_val_score(folded, X, y, cv=2).mean() == pytest.approx(folded.score(X, y), abs=0.1)
    regressor = dkfm.fold(phi, Ridge().fit(phi.transform(X), X[:, 0]))
    assert regressor.score(X, X[:, 0]) == pytest.approx(
        Ridge().fit(phi.transform(X), X[:, 0]).score(phi.transform(X), X[:, 0])
    )
    axes = dkfm.fold(phi, PCA(2).fit(phi.transform(X)))
    np.testing.assert_array_equal(axes.fit_transform(X), axes.transform(X))
    assert list(axes.get_feature_names_out()) == ["foldedtransformer0", "foldedtransformer1"]
    assert axes.set_output(transform="pandas").transform(X).shape == (60, 2)


def test_a_store_that_is_not_one_of_a_fold_is_refused(tmp_path):
    from dkfm.storage.model_store import Record, save_record

    X, y = rows_and_labels(14, 3)
    phi = map_of("spectral", X)
    record = dkfm.fold(phi, LogisticRegression().fit(phi.transform(X), y))._record()
    changes = {
        "kind": {"kind": "oracle"},
        "regressor": {"kind": "regressor"},
        "transformer": {"kind": "transformer"},
        "twice": {"classes": [0, 1, 1]},
        "mixed": {"classes": [0, True, 2]},
        "endless": {"classes": [0, 1, 10**400]},
        "wide": {"classes": [0, 1, 2**63]},
        "classes": {"classes": [0, 1]},
        "order": {"classes": [2, 1, 0]},
        "words": {"classes": ["a", "b", {}]},
        "type": {"classes_dtype": "O8"},
    }
    for name, change in changes.items():
        save_record(tmp_path / name, Record(record.estimator, {}, {**record.fitted, **change}, {}, record.model))
        with pytest.raises(UnsupportedStoreError):
            dkfm.load(tmp_path / name)
    for head, link in (("predict", "identity"), ("predict", "softmax"), ("decision_function", "argmax")):
        heads = {**record.model.heads, head: replace(record.model.heads[head], link=link)}
        path = tmp_path / f"{head} {link}"
        save_record(path, Record(record.estimator, {}, record.fitted, {}, replace(record.model, heads=heads)))
        with pytest.raises(UnsupportedStoreError):
            dkfm.load(path)
    with pytest.raises(UnsupportedStoreError, match="classes"):
        dkfm.batch_score(tmp_path / "order", X, tmp_path / "out", progress=False)
    save_record(tmp_path / "other", Record("FoldedTransformer", {}, record.fitted, {}, record.model))
    with pytest.raises(UnsupportedStoreError, match="do not fit each other"):
        dkfm.load(tmp_path / "other")
