"""Folded linear models: the same as the pair of map and model, in memory, lazily, saved and in batch jobs."""

from dataclasses import replace

import numpy as np
import pytest
import zarr
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import (
    Lasso,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    SGDOneClassSVM,
)
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, StandardScaler
from sklearn.svm import SVC

import dkfm
from dkfm import kernels
from dkfm.cli.inspection import describe_store
from dkfm.cli.verify import verify_model
from dkfm.errors import CertificateError, DkfmWarning, InvalidInputError, NotSupportedError, UnsupportedStoreError
from helpers.fold_cases import fitted, map_of, require_equal, rows_and_labels


@pytest.mark.costly
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
        assert list(table.columns) == ["predict", *(f"{name}_{kind}" for name in names[1:] for kind in folded.classes_)]
        found = {name: table[[c for c in table.columns if c.startswith(name)]].to_numpy() for name in names[1:]}
        assert table["predict"].isna().sum() == 1
        np.testing.assert_array_equal(table["predict"].dropna(), folded.predict(Z[valid]))
    codes = np.concatenate([block for block, _ in dkfm.iter_scores(path, "predict")])
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
        np.testing.assert_array_equal(found["predict"], codes)


@pytest.mark.parametrize(("model", "name"), [(Ridge(), "Folded"), (PCA(2), "FoldedTransformer")])
def test_verify_measures_a_fold_for_json(tmp_path, model, name):
    X, y = rows_and_labels(0, 2)
    phi = map_of("spectral", X)
    path = str(_saved(dkfm.fold(phi, fitted(model, phi, X, y * 1.0)), tmp_path))
    facts, (line,) = verify_model(path, None, ())
    assert facts["estimator"] == name == describe_store(path)["estimator"]
    assert 0 <= facts["measured"]["worst"] <= 1
    assert facts["measured"]["rows"] == facts["landmarks"] == len(X)
    assert line.startswith(f"{path}: {len(X)} landmarks differ from the formula")


def _saved(folded, tmp_path):
    folded.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_a_wrong_code_in_an_output_is_found_by_the_formula(tmp_path):
    X, y = rows_and_labels(9, 3, 100)
    phi = map_of("spectral", X)
    pair = LogisticRegression().fit(phi.transform(X), y)
    other = LogisticRegression().fit(phi.transform(X), (y + 1) % 3)
    for name, model in (("model", pair), ("other", other)):
        dkfm.fold(phi, model).save(tmp_path / name)
        dkfm.batch_score(tmp_path / name, X, tmp_path / f"{name}.zarr", progress=False)
    assert dkfm.verify_scores(tmp_path / "model.zarr", X).worst <= 1
    from dkfm.scoring import output_store, verification

    output = output_store.read_output(tmp_path / "model.zarr")
    receipts = verification.marker.read_receipt_table(output)
    reference = verification.ReferenceScorer(dkfm.load(tmp_path / "other").model_)
    with pytest.raises(CertificateError, match="predict"):
        verification._compute_max_error_ratio(output, receipts, reference, verification.open_source(X), slice(0, 50))


def test_dask_arrays_and_frames_stay_lazy():
    da, dd = pytest.importorskip("dask.array"), pytest.importorskip("dask.dataframe", reason="the extra dataframe")
    import pandas as pd

    X, y = rows_and_labels(10, 3)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    phi = map_of("spectral", frame)
    folded = dkfm.fold(phi, LogisticRegression().fit(phi.transform(frame), np.array(["u", "v", "w"])[y]))
    expected = folded.predict(frame)
    with pytest.warns(UserWarning, match="X does not have valid feature names, but Folded was fitted with"):
        lazily = folded.predict(da.from_array(X, chunks=(25, 3)))
    assert (lazily.shape, lazily.chunks, lazily.dtype) == ((60,), ((25, 25, 10),), expected.dtype)
    np.testing.assert_array_equal(lazily.compute(scheduler="synchronous"), expected)
    rows = dd.from_pandas(frame[["c", "a", "b"]], npartitions=3)
    series = folded.predict(rows)
    np.testing.assert_array_equal(series.compute(scheduler="synchronous").to_numpy(), expected)
    chances = folded.predict_proba(rows).compute(scheduler="synchronous")
    assert list(chances.columns) == ["predict_proba_u", "predict_proba_v", "predict_proba_w"]
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
    with pytest.raises(InvalidInputError, match=r"is a Pipeline; .* as in fold\(p\[0\], p\[1\]\)"):
        dkfm.fold(make_pipeline(phi, fitted(Ridge(), phi, X, y)), Ridge())
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_store_that_is_not_one_of_a_fold_is_refused(tmp_path):
    from dkfm.storage.model_store import Record, save_record

    X, y = rows_and_labels(14, 3)
    phi = map_of("spectral", X)
    record = dkfm.fold(phi, LogisticRegression().fit(phi.transform(X), y))._to_record()
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
