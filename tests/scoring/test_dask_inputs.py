"""Dask arrays and data frames as inputs of jobs: computed block by block, never gathered, resumed if they are equal."""

import subprocess
import sys
import tempfile

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy.sparse import csr_array

import dkfm
from dkfm import kernels
from dkfm.errors import ClusterError, DkfmWarning, InvalidInputError, StoreExistsError

NAMES = list("abcd")


@pytest.fixture
def frame(rng):
    values = pd.DataFrame(rng.normal(size=(300, 4)), columns=NAMES)
    return values.assign(key=[f"row {number}" for number in range(300)], flag=values["a"] > 0)


@pytest.fixture
def pca(frame):
    return dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(frame[NAMES][:60])


@pytest.fixture
def unnamed(frame):
    """The same without names, for arrays."""
    return dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(frame[NAMES][:60].to_numpy())


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, in which nothing may be left."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []


def score(model, rows, target, **options):
    return dkfm.batch_score(model, rows, target, progress=False, **options)


def values(target):
    return np.asarray(dkfm.open_scores(target).compute())


@pytest.mark.costly
@pytest.mark.parametrize("chunks", [(37, 3), (300, 4), (37, 4), ((100, 0, 200), (1, 1, 1, 1))])
@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: xr.DataArray(rows, dims=("row", "column"))])
def test_a_dask_array_is_scored_as_its_values_are(chunks, wrap, unnamed, frame, tmp_path):
    X = frame[NAMES].to_numpy()
    report = score(unnamed, wrap(da.from_array(X, chunks=chunks)), tmp_path / "out")
    assert report.rows == 300
    np.testing.assert_allclose(values(tmp_path / "out"), unnamed.transform(X), rtol=1e-12, atol=1e-14)


def test_unknown_lengths_are_found_by_the_pass_that_writes(unnamed, frame, tmp_path):
    X = da.from_array(frame[NAMES].to_numpy(), chunks=(37, 4))
    score(unnamed, X[X[:, 0] > 0], tmp_path / "out")
    expected = unnamed.transform(frame[NAMES][frame["a"] > 0].to_numpy())
    np.testing.assert_allclose(values(tmp_path / "out"), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_dask_frame_is_taken_by_name_in_any_order_with_ids(pca, frame, tmp_path):
    lazy = dd.from_pandas(frame[["key", "d", "flag", "b", "a", "c"]], npartitions=7)
    some = lazy[lazy["flag"]]
    score(pca, some, tmp_path / "out.parquet", id_column="key")
    kept = frame[frame["flag"]]
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert found.pop("key").tolist() == kept["key"].tolist()
    np.testing.assert_allclose(found, pca.transform(kept[NAMES]), rtol=1e-12, atol=1e-14)
    assert score(pca, some, tmp_path / "out.parquet", id_column="key").scored_chunks == 0


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["int64", "string", "category"])
def test_a_zarr_output_has_the_ids_of_a_dask_frame(dtype, pca, frame, tmp_path):
    ids = pd.Series(range(300), frame.index).astype("string" if dtype == "category" else dtype).astype(dtype)
    lazy = dd.from_pandas(frame.assign(number=ids), npartitions=3)
    score(pca, lazy[lazy["flag"]], tmp_path / "out", columns=NAMES, id_column="number")
    found = np.concatenate([numbers for _, numbers in dkfm.iter_scores(tmp_path / "out")])
    assert found.tolist() == ids[frame["flag"]].tolist()


def test_a_zarr_output_of_a_dask_frame_refuses_what_it_does_not_keep(pca, frame, tmp_path):
    lazy = dd.from_pandas(frame, npartitions=3)
    with pytest.raises(InvalidInputError, match="integers or text, and 'a' is double"):
        score(pca, lazy, tmp_path / "out", columns=NAMES, id_column="a")
    assert not (tmp_path / "out").exists()


@pytest.mark.costly
@pytest.mark.parametrize("name", ["customer", None])
def test_the_index_of_pandas_may_be_the_ids(name, pca, frame, tmp_path):
    indexed = frame.set_index(pd.Index([f"c{number}" for number in range(300)], name=name))[NAMES]
    for rows, target in [(indexed, "a.parquet"), (dd.from_pandas(indexed, npartitions=3, sort=False), "b.parquet")]:
        score(pca, rows, tmp_path / target, id_column=name or "index")
        assert pd.read_parquet(tmp_path / target)[name or "index"].tolist() == indexed.index.tolist()
    if name is not None:
        indexed.to_parquet(tmp_path / "in.parquet")
        score(pca, tmp_path / "in.parquet", tmp_path / "c.parquet", id_column=name)
        assert pd.read_parquet(tmp_path / "c.parquet")[name].tolist() == indexed.index.tolist()


@pytest.mark.slow
def test_on_a_cluster_workers_compute_and_write_the_blocks(client, pca, unnamed, frame, tmp_path):
    X = da.from_array(frame[NAMES].to_numpy(), chunks=(37, 4)) + 0
    score(unnamed, X, tmp_path / "out", client=client)
    np.testing.assert_allclose(values(tmp_path / "out"), pca.transform(frame[NAMES]), rtol=1e-12, atol=1e-14)
    lazy = dd.from_pandas(frame, npartitions=3)
    assert score(pca, lazy, tmp_path / "b.parquet", client=client, id_column="key").rows == 300


def test_workers_that_die_are_the_fault_of_the_cluster(unnamed, frame, tmp_path, monkeypatch):
    class KilledWorker(Exception):  # as distributed calls it
        __module__ = "distributed.scheduler"

    def die(*tasks, **options):
        raise KilledWorker("dkfm-input-0")

    monkeypatch.setattr("dask.base.compute", die)
    with pytest.raises(ClusterError, match=r"source cannot be computed \(KilledWorker"):
        score(unnamed, da.from_array(frame[NAMES].to_numpy(), chunks=(100, 4)), tmp_path / "out")


@pytest.mark.slow
def test_a_job_resumes_an_equal_collection_and_refuses_another_one(unnamed, frame, tmp_path):
    X = frame[NAMES].to_numpy(copy=True)
    score(unnamed, da.from_array(X.copy(), chunks=(100, 4)), tmp_path / "out", chunk_rows=50)
    next((tmp_path / "out" / "scores" / "c").glob("3/0")).unlink()
    report = score(unnamed, da.from_array(X.copy(), chunks=(100, 4), name=False), tmp_path / "out", chunk_rows=50)
    assert report.scored_chunks == 1
    X[7, 1] += 1e-9
    with pytest.raises(StoreExistsError, match=r"the input source has changed since.*overwrite"):
        score(unnamed, da.from_array(X, chunks=(100, 4)), tmp_path / "out", chunk_rows=50)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda X, f: X[:, 0], "must have two dimensions"),
        (lambda X, f: X[X[:, 0] > 99], "at least one row"),
        (lambda X, f: X.map_blocks(lambda block: 1 / 0 * block, meta=X), r"cannot be computed \(ZeroDivisionError"),
        (lambda X, f: X.map_blocks(str, dtype=str), "source"),
        (lambda X, f: dd.from_pandas(f.drop(columns="b"), npartitions=2), "has no column 'b'"),
        (lambda X, f: dd.from_pandas(f.assign(a="text"), npartitions=2), "'a' of source does not hold numbers"),
        (lambda X, f: f["a"], "two dimensions|rows of numbers|shape"),
        (lambda X, f: dd.from_pandas(f["a"], npartitions=2), "must be a dask array or data frame"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused_and_nothing_is_left(make, words, pca, frame, tmp_path):
    X = da.from_array(frame[NAMES].to_numpy(), chunks=(100, 4))
    with pytest.raises(InvalidInputError, match=words):
        score(pca, make(X, frame), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_columns_that_are_called_by_numbers_are_taken_in_their_order_and_not_by_name(frame, tmp_path):
    rows = pd.DataFrame(frame[NAMES].to_numpy())
    pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rows)
    lazy = dd.from_pandas(rows, npartitions=3)
    score(pca, lazy, tmp_path / "out")
    np.testing.assert_allclose(values(tmp_path / "out"), pca.transform(rows), rtol=1e-12, atol=1e-14)
    with pytest.warns(DkfmWarning, match="called by numbers or tuples, which are not matched"):
        score(dkfm.KernelPCA(2).fit(frame[NAMES]), lazy, tmp_path / "named")
    for options in ({"columns": ["1", "0", "2", "3"]}, {"id_column": "0"}):
        with pytest.raises(InvalidInputError, match="are called by numbers"):
            score(pca, lazy, tmp_path / "other.parquet", **options)


def test_ids_of_two_types_are_refused(pca, frame, tmp_path):
    parts = [frame[:100], frame[100:].assign(key=1)]
    lazy = dd.from_map(lambda number: parts[number], [0, 1], meta=frame[:0])
    with pytest.raises(InvalidInputError, match=r"The ids of source are int64 and .*string; give them one type"):
        score(pca, lazy, tmp_path / "out.parquet", id_column="key")


def test_rows_that_are_not_finite_are_named_by_their_number_in_the_collection(unnamed, frame, tmp_path):
    X = frame[NAMES].to_numpy(copy=True)
    X[250, 2] = np.nan
    with pytest.raises(InvalidInputError, match="source must be finite, and row 250 contains"):
        score(unnamed, da.from_array(X, chunks=(100, 4)), tmp_path / "out")


@pytest.mark.parametrize("convert", [pd.DataFrame.to_numpy, csr_array, pd.DataFrame.copy, pd.DataFrame.reset_index])
def test_rows_in_memory_that_workers_read_from_a_copy_keep_their_name(convert, client, pca, unnamed, frame, tmp_path):
    frame.loc[30, "a"] = np.inf
    given = convert(frame[NAMES])
    ids = {"id_column": "index"} if "index" in getattr(given, "columns", ()) else {}
    with pytest.raises(InvalidInputError, match=r"^source must be finite, and row 30 "):
        dkfm.batch_score(
            pca if hasattr(given, "columns") else unnamed,
            given,
            tmp_path / "out.parquet",
            client=client,
            progress=False,
            **ids,
        )


def test_an_array_with_a_coordinate_called_columns_has_no_names(pca, frame, tmp_path):
    rows = xr.DataArray(frame[NAMES].to_numpy(), dims=("row", "columns"), coords={"columns": NAMES[::-1]})
    with pytest.warns(DkfmWarning, match="source has no names of columns"):
        score(pca, rows, tmp_path / "out")


def test_a_dataset_is_refused(pca, frame, tmp_path):
    data = xr.Dataset({"rows": (("row", "column"), da.from_array(frame[NAMES].to_numpy()))})
    with pytest.raises(InvalidInputError, match="Dataset"):
        score(pca, data, tmp_path / "out")


PROGRAM = """
import dask.array as da, numpy as np, sys, dkfm
from dkfm import kernels
from dkfm.execution import memory
pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(np.random.default_rng(0).normal(size=(50, 20)))
blocks = int(sys.argv[2])
X = da.random.default_rng(0).normal(size=(20_000 * blocks, 20), chunks=(20_000, 20))
dkfm.batch_score(pca, X[:40_000], sys.argv[1] + "/first", progress=False)
before = memory.peak_memory()
dkfm.batch_score(pca, X, sys.argv[1] + "/out", progress=False)
print(memory.peak_memory() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path):
    def measure(blocks):
        folder = tmp_path / str(blocks)
        folder.mkdir()
        line = [sys.executable, "-c", PROGRAM, str(folder), str(blocks)]
        return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)

    rows_bytes = 8 * 20 * 20_000 * 60
    assert measure(60) < rows_bytes / 3
