"""Frames of pandas, polars and pyarrow mean the same to every estimator; what is no frame of rows is refused."""

from pathlib import Path

import dask
import numpy as np
import pytest
from dask import bag
from sklearn.linear_model import Ridge

import dkfm
from dkfm import kernels
from dkfm.errors import InvalidInputError

dd = pytest.importorskip("dask.dataframe", reason="the extra dataframe brings it")
pd = pytest.importorskip("pandas", reason="the extra dataframe brings it")
pa = pytest.importorskip("pyarrow", reason="the extra dataframe brings it")
pl = pytest.importorskip("polars", reason="the extra test brings it")
xr = pytest.importorskip("xarray", reason="the extra test brings it")

ROWS = np.random.default_rng(0).normal(size=(40, 3))
LABELS = (ROWS[:, 0] > 0).astype(int)
FRAME = pd.DataFrame(ROWS, columns=["a", "b", "c"])
K = kernels.Gaussian(2.0)
KINDS = {
    "polars": lambda f: pl.DataFrame({name: f[name].to_numpy() for name in f}),
    "table": lambda f: pa.Table.from_pandas(f, preserve_index=False),
    "batch": lambda f: pa.RecordBatch.from_pandas(f, preserve_index=False),
}


def results(X):
    """Return what every estimator computes from a frame, with estimators that are fitted to it."""
    phi, pca = dkfm.ExactFeatureMap(K, basis="spectral").fit(X), dkfm.KernelPCA(2, kernel=K)
    fisher = dkfm.KernelFisher(kernel=K).fit(X, LABELS)
    folded = dkfm.fold(phi, Ridge().fit(phi.transform(X), ROWS[:, 0]))
    made = (pca.fit_transform(X), pca.transform(X), pca.reconstruction_error(X), phi.residual(X), phi.distance(X))
    return [*made, fisher.predict(X), fisher.score(X, LABELS), folded.predict(X), list(pca.feature_names_in_)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_frame_gives_what_pandas_gives(kind):
    for found, expected in zip(results(KINDS[kind](FRAME)), results(FRAME), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_in_another_order_are_refused_as_those_of_pandas_are(kind):
    pca = dkfm.KernelPCA(2, kernel=K).fit(FRAME)
    with pytest.raises(InvalidInputError, match="feature names should match"):
        pca.transform(KINDS[kind](FRAME[["c", "a", "b"]]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_of_float32_gives_a_model_of_float32(kind):
    frame = FRAME.astype(np.float32)
    for X, dtype in ((frame, "float32"), (FRAME, "float64"), (frame.assign(a=FRAME["a"]), "float64")):
        assert dkfm.KernelPCA(2, kernel=K).fit(X).model_.dtype == dtype
        assert dkfm.KernelPCA(2, kernel=K).fit(KINDS[kind](X)).model_.dtype == dtype


REFUSED = {
    "data set": (xr.Dataset({"a": ("row", ROWS[:, 0])}), "^A Dataset of xarray .* select one"),
    "lazy data set": (xr.Dataset({"a": ("row", ROWS[:, 0])}).chunk(), "^A Dataset of xarray .* select one"),
    "delayed": (dask.delayed(ROWS), r"^Of dask's collections only .* compute\(\)"),
    "bag": (bag.from_sequence([1, 2], npartitions=1), r"^Of dask's collections only .* compute\(\)"),
    "lazy frame": (pl.DataFrame({"a": ROWS[:, 0]}).lazy(), r"^A LazyFrame of polars .* collect\(\)"),
}
CALLS = {
    "fit": lambda X: dkfm.KernelPCA(2, kernel=K).fit(X),
    "fit of a map": lambda X: dkfm.ExactFeatureMap(K).fit(X),
    "fit of discriminants": lambda X: dkfm.KernelFisher(kernel=K).fit(X, LABELS),
    "landmarks": lambda X: dkfm.ExactFeatureMap(K, landmarks=X).fit(ROWS),
    "transform": lambda X: dkfm.KernelPCA(2, kernel=K).fit(ROWS).transform(X),
    "residual": lambda X: dkfm.ExactFeatureMap(K).fit(ROWS).residual(X),
    "compare": lambda X: dkfm.compare_kernels([K], X, LABELS),
    "batch_score": lambda X: dkfm.batch_score(dkfm.KernelPCA(2, kernel=K).fit(ROWS), X, "never_written"),
    "a kernel": K,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", REFUSED)
def test_what_holds_no_rows_is_refused_in_one_sentence_that_says_what_to_do(given, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, sentence = REFUSED[given]
    with pytest.raises(InvalidInputError, match=sentence):
        CALLS[call](X)


TAKE_ROWS_IN_MEMORY = {
    "transform": CALLS["transform"],
    "fit_transform": lambda X: dkfm.KernelPCA(2, kernel=K).fit_transform(X),
    "fit_transform of a map": lambda X: dkfm.ExactFeatureMap(K).fit_transform(X),
    "predict": lambda X: dkfm.KernelFisher(kernel=K).fit(ROWS, LABELS).predict(X),
    "a kernel": K,
}


@pytest.mark.parametrize("call", TAKE_ROWS_IN_MEMORY)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_refused_as_one_where_rows_in_memory_are_needed(kind, call, tmp_path):
    np.save(tmp_path / "x.npy", ROWS)
    with pytest.raises(InvalidInputError, match=r"must hold rows in memory here, and is .*x\.npy'; if that is a path"):
        TAKE_ROWS_IN_MEMORY[call](kind(tmp_path / "x.npy"))


@pytest.mark.parametrize("kind", ["pandas", *KINDS, "path"])
def test_missing_numbers_are_told_by_the_names_of_their_columns(kind, tmp_path):
    frame = FRAME.copy()
    frame.loc[5, "b"], frame.loc[7, "c"] = np.nan, np.inf
    if kind == "path":
        X = tmp_path / "x.parquet"
        frame.to_parquet(X)
    else:
        X = KINDS.get(kind, lambda frame: frame)(frame)
    told = r"row 5 contains NaN in column 'b' \(2 of 40 rows that were checked together, in columns 'b', 'c'\)"
    with pytest.raises(InvalidInputError, match=told):
        dkfm.KernelPCA(2, kernel=K).fit(X)


def test_a_column_may_be_called_what_arrow_calls_the_names_of_columns():
    frame = FRAME.rename(columns={"a": "column_names"})
    frame.loc[3, "c"] = np.nan
    with pytest.raises(InvalidInputError, match="row 3 contains NaN in column 'c'"):
        dkfm.KernelPCA(1).fit(frame)
    model = dkfm.KernelPCA(1).fit(frame.fillna(0.0))
    assert model.feature_names_in_.tolist() == ["column_names", "b", "c"]
    with pytest.raises(InvalidInputError, match="its column 'b' does not"):
        dkfm.KernelPCA(1).fit(frame.assign(b="text"))


@pytest.mark.parametrize("kind", ["pandas", *KINDS])
def test_a_frame_without_a_column_of_the_fit_or_with_another_is_told_which(kind):
    model, convert = dkfm.KernelPCA(2, kernel=K).fit(FRAME), KINDS.get(kind, lambda frame: frame)
    for frame, told in ((FRAME[["a", "c"]], "now missing:\n- b$"), (FRAME.assign(d=0.0), "unseen at fit time:\n- d$")):
        X = convert(frame)
        with pytest.raises(InvalidInputError, match=told):
            model.transform(X)


ESTIMATORS = (dkfm.KernelRidgeClassifier, dkfm.KernelFisher)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", ["Int64", "UInt8", "int64[pyarrow]", "boolean", "bool[pyarrow]"])
def test_nullable_labels_are_those_of_numpy(estimator, dtype, rng):
    large = 2**53 if "64" in dtype else 0
    values = np.array([large, large + 1] if "bool" not in dtype else [False, True])
    labels = pd.Series(values[np.arange(40) % 2], dtype=dtype)
    classes = estimator(kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(40, 3)), labels).classes_
    np.testing.assert_array_equal(classes, values)
    assert classes.dtype == labels.dtype.numpy_dtype


@pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")  # of pandas 3.1, to dask's to_parquet
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("labels", [["x", "y"], [3, 5], [False, True]])
def test_lazy_labels_of_a_frame_are_written_and_read(estimator, labels, rng, tmp_path):
    frame = pd.DataFrame(rng.normal(size=(40, 3)), columns=[*"abc"])
    model = estimator(kernel=kernels.Gaussian(2.0)).fit(frame, np.array(labels)[np.arange(40) % 2])
    lazy = dd.from_pandas(frame, npartitions=2)
    predicted = model.predict(lazy)
    assert predicted.dtype == predicted.compute().dtype
    lazy.assign(label=predicted).to_parquet(tmp_path / "out")
    read = pd.read_parquet(tmp_path / "out")
    np.testing.assert_array_equal(read["label"].to_numpy(), model.predict(frame))
