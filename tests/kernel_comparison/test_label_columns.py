"""Labels that are a column of the rows: of a Parquet table, or of a data frame in memory."""

import warnings

import dask.array as da
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dkfm
from dkfm import compare_kernels, kernels
from dkfm.errors import DkfmWarning, InvalidInputError
from dkfm.sources.opening import open_source
from helpers.recorded import drop_resource_warnings

GAUSSIAN = [kernels.Gaussian(1.5)]


@pytest.fixture
def frame(rng):
    y = np.arange(80) % 2
    rows = pd.DataFrame(rng.normal(size=(80, 3)) + y[:, np.newaxis], columns=["a", "b", "c"])
    return rows.assign(kind=y)  # a number, which would be a feature that tells the classes apart


def figures(comparison):
    (one,) = comparison.compared
    return one.neighbour_accuracy, one.silhouette, one.fisher_accuracy, one.rank


@pytest.mark.parametrize(
    "convert", [lambda frame: frame, pl.from_pandas, pa.Table.from_pandas, "x.parquet", "folder of x.parquet"]
)
def test_a_column_of_labels_is_no_feature(convert, frame, tmp_path):
    rows, test = frame[:60], frame[60:]

    def compare_arrays(columns):
        return figures(compare_kernels(GAUSSIAN, rows[columns], rows.kind, test=test[columns], test_labels=test.kind))

    if isinstance(convert, str):
        paths = [tmp_path / name / "x.parquet" for name in ("train", "test")]
        for path, part in zip(paths, (rows, test), strict=True):
            path.parent.mkdir()
            part.to_parquet(path)
        tables = [path.parent if convert.startswith("folder") else path for path in paths]
    else:
        tables = [convert(rows), convert(test)]
    found = figures(compare_kernels(GAUSSIAN, tables[0], "kind", test=tables[1]))
    few = figures(compare_kernels(GAUSSIAN, tables[0], "kind", test=tables[1], columns=["c", "a"]))
    assert found == compare_arrays(["a", "b", "c"])
    assert few == compare_arrays(["c", "a"])
    assert few != found


def test_what_a_comparison_tells_is_short_and_names_the_kernel(frame):
    far = frame[["a", "b", "c"]] + 1e7
    with pytest.warns(DkfmWarning, match=r"^offset: The certificate of ") as caught:
        found = compare_kernels({"near": GAUSSIAN[0], "offset": kernels.Polynomial(3)}, far, frame.kind)
    assert all(str(one.message).startswith("offset: ") for one in drop_resource_warnings(caught))
    assert len(repr(found)) < 2_000
    labels = ["elsewhere"] * 20
    kinds = frame.kind.map({0: "a", 1: "b"})
    with pytest.raises(InvalidInputError, match="None of the test labels is a label of the training rows"):
        compare_kernels(GAUSSIAN, far[:60], kinds[:60], test=far[60:], test_labels=labels)


def warn_of_rows(X, Y):
    warnings.warn("rows of mine", UserWarning, stacklevel=1)
    return X @ Y.T


def test_warnings_pass_the_filters_of_the_caller_as_they_are(frame):
    given = [kernels.Function(warn_of_rows)], frame[["a", "b", "c"]] + 0.0, frame.kind
    for action, shown in (("ignore", set()), ("default", {"rows of mine"})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings(action, module=__name__)
            compare_kernels(*given)
        assert {str(one.message) for one in caught} == shown
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(InvalidInputError, match="rows of mine"):
            compare_kernels(*given)


def test_a_column_that_is_not_there_is_told(frame, tmp_path, rng):
    frame.to_parquet(tmp_path / "x.parquet")
    for rows, words in (
        (frame, "X has no column 'kinds' of labels; near it: 'kind'"),
        (tmp_path / "x.parquet", "kinds"),
        (rng.normal(size=(80, 3)), "The labels 'kinds' name a column, and X has no names of columns"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            compare_kernels(GAUSSIAN, rows, "kinds")
    for rows in (frame, tmp_path / "x.parquet"):
        with pytest.raises(InvalidInputError, match="The column 'kind' has the labels, so it is no feature"):
            compare_kernels(GAUSSIAN, rows, "kind", columns=["a", "kind"])
    for rows in (da.from_array(frame[["a", "b"]].to_numpy()), open_source(tmp_path / "x.parquet")):
        with pytest.raises(InvalidInputError, match="columns names columns of a table or a data frame"):
            compare_kernels(GAUSSIAN, rows, frame.kind, columns=["a"])
    with pytest.raises(InvalidInputError, match="name a column, and X has no names"):
        compare_kernels(GAUSSIAN, open_source(frame[["a", "b"]]), "kind")
    np.save(tmp_path / "x.npy", rng.normal(size=(80, 3)))
    with pytest.raises(InvalidInputError, match="name a column, and X has no names"):
        compare_kernels(GAUSSIAN, tmp_path / "x.npy", "kind")
    with pytest.raises(dkfm.errors.DkfmError, match="columns and id_column name columns of Parquet files"):
        compare_kernels(GAUSSIAN, tmp_path / "x.npy", frame.kind, columns=["a"])
