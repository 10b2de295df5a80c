"""Whatever NumPy can read as rows is taken as rows, and what it cannot is refused in a sentence."""

from functools import partial

import numpy as np
import pytest
import zarr
from scipy import sparse

import dkfm
from dkfm import kernels
from dkfm.core.rows import as_rows
from dkfm.errors import InvalidInputError
from dkfm.sources.opening import open_source

ROWS = np.random.default_rng(0).normal(size=(40, 3))
K = kernels.Gaussian(3.0)


class Tensor:
    """What offers nothing but its values."""

    def __array__(self, dtype=None, copy=None):
        return ROWS.copy() if copy else ROWS


LIKE = {
    "list": ROWS.tolist(),
    "memoryview": memoryview(ROWS),
    "matrix": ROWS.view(np.matrix),  # np.matrix itself warns, or not, depending on the tests before
    "masked": np.ma.array(ROWS),
    "tensor": Tensor(),
    **{kind: getattr(sparse, f"{kind}_array")(ROWS) for kind in ("csr", "csc", "coo", "bsr", "dok", "lil", "dia")},
}


@pytest.fixture(scope="module")
def pca():
    return dkfm.KernelPCA(2, kernel=K).fit(ROWS)


@pytest.mark.parametrize("name", LIKE)
def test_array_likes_are_rows(pca, name):
    expected = pca.transform(ROWS)
    np.testing.assert_allclose(pca.transform(LIKE[name]), expected, rtol=0, atol=1e-13)
    fitted = dkfm.KernelPCA(2, kernel=K).fit(LIKE[name])
    np.testing.assert_allclose(fitted.transform(ROWS), expected, rtol=0, atol=1e-12)


def test_a_data_array_counts_as_the_array_that_it_holds(pca, tmp_path):
    xr, da = pytest.importorskip("xarray"), pytest.importorskip("dask.array")
    X = xr.DataArray(ROWS, dims=("row", "column"))
    lazy = xr.DataArray(da.from_array(ROWS, chunks=(15, 2)), dims=("row", "column"))
    phi = dkfm.ExactFeatureMap(K, basis="spectral").fit(X)
    for method in (pca.transform, pca.reconstruction_error, phi.residual, phi.distance):
        expected, found = method(ROWS), method(X)
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, expected)
        lazily = method(lazy)
        assert isinstance(lazily, da.Array)
        np.testing.assert_allclose(lazily.compute(scheduler="synchronous"), expected, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(dkfm.KernelPCA(2, kernel=K).fit_transform(X), pca.fit_transform(ROWS))
    fisher = dkfm.KernelFisher(kernel=K).fit(lazy, xr.DataArray(ROWS[:, 0] > 0))
    assert fisher.predict(X).shape == (40,)
    dkfm.batch_score(pca, X, tmp_path / "out.zarr", progress=False)
    with pytest.raises(InvalidInputError, match="is a dask collection, which is not read here; compute it"):
        dkfm.build_gram(K, lazy, tmp_path / "gram.zarr")


class Labelled:
    """A NumPy-backed array with the face of xarray's: dims, coords, data, and a graph that is None."""

    dims, coords, data, shape, dtype, ndim = ("row", "column"), {}, ROWS, ROWS.shape, ROWS.dtype, 2

    def __array__(self, dtype=None, copy=None):
        return ROWS

    def __dask_graph__(self):
        return None

    def map_blocks(self):
        raise AssertionError


def test_an_array_that_only_looks_like_a_dask_collection_is_one_in_memory(pca):
    np.testing.assert_array_equal(pca.transform(Labelled()), pca.transform(ROWS))


@pytest.mark.parametrize("make", ["series", "data set", "lazy series"])
def test_what_is_no_array_of_rows_is_refused_in_a_sentence(pca, make):
    if make == "data set":
        xr = pytest.importorskip("xarray")
        given = xr.Dataset({"a": ("row", ROWS[:, 0])})
    else:
        pd = pytest.importorskip("pandas")
        given = pd.Series(ROWS[:, 0])
        if make == "lazy series":
            given = pytest.importorskip("dask.dataframe").from_pandas(given, npartitions=2)
    for method in (pca.transform, pca.reconstruction_error, dkfm.KernelPCA(2, kernel=K).fit):
        with pytest.raises(InvalidInputError):
            method(given)


def test_a_spectrum_is_that_of_every_estimator_that_has_one(pca):
    pytest.importorskip("matplotlib").use("Agg")
    spectrum = dkfm.plotting.spectrum
    assert spectrum(pca).get_title() == "Spectrum, rank 2"
    assert spectrum(dkfm.KernelPCA(5, kernel="linear").fit(ROWS)).get_title() == "Spectrum, rank 3"
    for basis in ("symmetric", "spectral", "cholesky"):
        phi = dkfm.ExactFeatureMap(kernels.Linear(), basis=basis).fit(ROWS)
        assert spectrum(phi).get_title() == "Spectrum, rank 3"
    fisher = dkfm.KernelFisher(kernel=K).fit(ROWS, ROWS[:, 0] > 0)
    with pytest.raises(InvalidInputError, match="a KernelFisher has none"):
        spectrum(fisher)
    with pytest.raises(InvalidInputError, match="what predict returns; KernelPCA has no predict"):
        dkfm.plotting.decision_regions(pca, ROWS[:, :2])


def test_dates_of_numpy_among_objects_are_no_rows():
    for one in (np.datetime64("2026-01-01"), np.timedelta64(3, "D")):
        with pytest.raises(InvalidInputError, match="X must hold real numbers, and has dates or times"):
            as_rows(np.array([[1.0, one]], dtype=object))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_that_float64_rounds_are_refused(tmp_path, dtype):
    pa = pytest.importorskip("pyarrow", reason="the extra dataframe brings it")
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra dataframe brings it")
    for largest in (2**53, 2**53 + 1):
        values = np.array([[largest, 1], [3, 4]], dtype)
        np.save(tmp_path / "rows.npy", values)
        np.save(tmp_path / "columns.npy", np.asfortranarray(values))
        sparse.save_npz(tmp_path / "rows.npz", sparse.csr_array(values))
        zarr.save(str(tmp_path / f"{largest}.zarr"), values)
        pq.write_table(pa.table({"a": values[:, 0], "b": values[:, 1]}), tmp_path / "rows.parquet")
        stored = ("rows.npy", "columns.npy", "rows.npz", f"{largest}.zarr", "rows.parquet")
        readers = [partial(open_source(tmp_path / name, "X").read, slice(0, 2)) for name in stored]
        rows_in_memory = values, sparse.csc_array(values), sparse.lil_array(values), sparse.dok_array(values)
        for read in (*(partial(as_rows, rows) for rows in rows_in_memory), *readers):
            if largest == 2**53:
                rows = read()
                dense = rows.toarray() if sparse.issparse(rows) else rows
                np.testing.assert_array_equal(dense, values.astype(np.float64))
            else:
                with pytest.raises(InvalidInputError, match="integers above 2"):
                    read()


def test_a_column_of_ids_beside_numbers_is_refused():
    pd = pytest.importorskip("pandas", reason="the extra dataframe brings it")
    frame = pd.DataFrame({"id": [2**53 + 1, 2**53], "value": [0.5, 1.0]})
    with pytest.raises(InvalidInputError, match="leave out a column of ids"):
        as_rows(frame)
    np.testing.assert_array_equal(as_rows(frame.assign(id=[2**53, -(2**53)])), [[2**53, 0.5], [-(2**53), 1.0]])
