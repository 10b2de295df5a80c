"""Dask arrays through a model: lazy, exact metadata, small graphs, temporary files gone with their last user."""

import gc
import pickle
import warnings

import dask
import dask.array as da
import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import DkfmError, InvalidInputError
from dkfm.execution import lazy_scoring


@pytest.fixture
def fitted(rng):
    return dkfm.KernelPCA(3, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(60, 4)))


def test_metadata_are_exact_before_anything_is_computed(fitted, rng):
    Z = da.from_array(rng.normal(size=(50, 4)), chunks=((20, 0, 29, 1), (2, 2)))
    found = fitted.transform(Z)
    assert isinstance(found, da.Array)
    assert (found.shape, found.chunks, found.dtype) == ((50, 3), ((20, 0, 29, 1), (3,)), np.float64)
    computed = found.compute(scheduler="threads")
    np.testing.assert_allclose(computed, fitted.transform(Z.compute()), atol=1e-12)


def test_unknown_chunk_sizes_stay_unknown_and_score_right(fitted, rng):
    Z = rng.normal(size=(50, 4))
    lazy_rows = da.from_array(Z, chunks=(10, 4))
    some = lazy_rows[lazy_rows[:, 0] > 0]
    found = fitted.transform(some)
    assert np.isnan(found.shape[0])
    np.testing.assert_allclose(found.compute(scheduler="synchronous"), fitted.transform(Z[Z[:, 0] > 0]), atol=1e-12)


def test_integers_and_float32_blocks_are_widened(fitted, rng):
    Z = rng.integers(-2, 3, size=(20, 4))
    for dtype in (np.int16, np.float32):
        found = fitted.transform(da.from_array(Z.astype(dtype), chunks=(7, 4)))
        assert found.dtype == np.float64
        np.testing.assert_allclose(found.compute(scheduler="synchronous"), fitted.transform(Z), atol=1e-12)


def test_residuals_are_lazy_too(rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(2.0)).fit(rng.normal(size=(40, 3)))
    Z = rng.normal(size=(9, 3))
    found = phi.residual(da.from_array(Z, chunks=(4, 3)))
    assert found.shape == (9,)
    np.testing.assert_allclose(found.compute(scheduler="synchronous"), phi.residual(Z), atol=1e-12)


def test_a_bad_block_raises_when_it_is_computed(fitted):
    rows = np.zeros((10, 4))
    rows[8] = np.nan
    with pytest.raises(InvalidInputError, match=r"^block 2 of the dask array must be finite, and row 2 contains NaN"):
        fitted.transform(da.from_array(rows, chunks=(3, 4))).compute(scheduler="synchronous")
    with pytest.raises(InvalidInputError, match="real numbers"):
        fitted.transform(da.ones((4, 4), dtype=complex))


@pytest.fixture
def large(rng, tmp_path):
    """A model of 8 MB: too large to travel in a graph."""
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(0.5), workspace=tmp_path / "w").fit(rng.normal(size=(1000, 3)))
    assert phi.model_.nbytes > lazy_scoring.SMALL_MODEL
    return phi


def test_a_large_model_is_opened_by_path_and_its_tasks_are_small(large, rng):
    Z = da.from_array(rng.normal(size=(200, 3)), chunks=(50, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = large.transform(Z)
    tasks = {key: task for key, task in found.dask.items() if "array-" not in str(key)}
    assert max(len(pickle.dumps(task)) for task in tasks.values()) < 10_000
    np.testing.assert_allclose(found.compute(scheduler="synchronous"), large.transform(Z.compute()), atol=1e-10)


@pytest.mark.slow
def test_a_large_model_lives_as_long_as_its_last_lazy_result(large, rng, tmp_path):
    found = large.transform(da.from_array(rng.normal(size=(20, 3)), chunks=(5, 3)))
    (folder,) = (tmp_path / "w").glob("dkfm-model-*")
    assert pickle.loads(pickle.dumps(large))._model_cache.graph_model is None
    large.__dict__.clear()
    gc.collect()
    assert found.compute(scheduler="synchronous").shape == (20, 1000)
    del found
    gc.collect()
    assert not folder.exists()


def test_a_dask_collection_that_has_no_columns_is_refused(fitted):
    class Series:
        shape = (3,)

        def __dask_graph__(self):
            return {}

    with pytest.raises(DkfmError, match="arrays and data frames are transformed"):
        fitted.transform(Series())


@pytest.fixture
def frame(rng):
    pd = pytest.importorskip("pandas")
    return pd.DataFrame(rng.normal(size=(50, 4)), columns=list("abcd"), index=pd.Index(np.arange(50) * 3, name="id"))


def test_a_bad_partition_is_named_by_the_first_of_its_index(frame):
    dd = pytest.importorskip("dask.dataframe", reason="the extra dataframe")
    pca = dkfm.KernelPCA(2).fit(frame)
    frame.iloc[33, 1] = np.inf
    with pytest.raises(InvalidInputError, match=r"^the partition from index 75 on must be finite, and row 8 contains"):
        pca.transform(dd.from_pandas(frame, npartitions=2)).compute(scheduler="synchronous")


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_dask_data_frame_keeps_its_index_and_takes_its_columns_by_name(frame, dtype):
    dd = pytest.importorskip("dask.dataframe")
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(2.0), basis="cholesky", dtype=dtype, tol=0.1).fit(frame)
    shuffled = dd.from_pandas(frame[list("dbca")].assign(other="text"), npartitions=3)
    found = phi.transform(shuffled)
    assert isinstance(found, dd.DataFrame)
    assert found.divisions == shuffled.divisions
    assert list(found.columns) == list(phi.get_feature_names_out())
    assert set(found.dtypes) == {np.dtype(dtype)}
    computed = found.compute(scheduler="synchronous")
    assert computed.index.equals(frame.index)
    assert set(computed.dtypes) == {np.dtype(dtype)}
    rounding = 1e-6 if dtype == "float32" else 1e-13  # products of other numbers of rows are rounded otherwise
    np.testing.assert_allclose(computed.to_numpy(), phi.transform(frame), rtol=0, atol=rounding)
    residual = phi.residual(shuffled)
    np.testing.assert_allclose(residual.compute(scheduler="synchronous"), phi.residual(frame), atol=1e-6)
    with pytest.raises(InvalidInputError, match="lacks column 'a', which fit saw"):
        phi.transform(shuffled[["b", "c", "d"]])
    unnamed = dkfm.ExactFeatureMap(kernels.Gaussian(2.0)).fit(frame.to_numpy())
    with pytest.warns(UserWarning, match="has feature names, but"):
        unnamed.transform(shuffled[list("abcd")])
    with pytest.warns(), pytest.raises(InvalidInputError, match="X has 3 features, but ExactFeatureMap is expecting 4"):
        unnamed.transform(shuffled[["b", "c", "d"]])


# Of pandas 3.1, to the reader of Parquet in Dask.
@pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame")
@pytest.mark.parametrize("large_model", [False, True])
def test_a_dask_data_frame_may_come_from_any_query(large_model, frame, tmp_path, monkeypatch):
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    monkeypatch.setattr(lazy_scoring, "SMALL_MODEL", 0 if large_model else 10**9)
    pca = dkfm.KernelPCA(2, kernel="rbf").fit(frame)
    made = dd.from_pandas(frame.assign(z=1.0), npartitions=4)
    for number in range(4):
        frame.assign(z=1.0)[13 * number : 13 * number + 13].to_parquet(tmp_path / f"{number}.parquet", index=False)
    read = dd.read_parquet(tmp_path)
    queries = [
        (read, frame),
        (read[list("dcba")], frame),
        (read[read["a"] > 0], frame[frame["a"] > 0]),
        (made.repartition(npartitions=3), frame),
        (dd.concat([made, made]), pd.concat([frame, frame])),
        (made.astype("Float64"), frame),
        (made.assign(a=made["a"].astype("category")), frame),
    ]
    for query, rows in queries:
        found = pca.transform(query).compute(scheduler="synchronous")
        np.testing.assert_allclose(
            found.sort_values("kernelpca0"), pca.transform(rows)[pca.transform(rows)[:, 0].argsort()]
        )
        assert len(pca.reconstruction_error(query)) == len(rows)
    (optimized,) = dask.optimize(pca.transform(made))
    assert optimized.compute(scheduler="synchronous").shape == (50, 2)
    with pytest.raises(InvalidInputError, match="its column 'b' is "):
        pca.transform(made.assign(b=made["b"].astype(str)))


def test_an_empty_partition_of_a_data_frame_is_an_empty_one(frame):
    dd = pytest.importorskip("dask.dataframe")
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(2.0), basis="spectral").fit(frame)
    some = dd.from_pandas(frame, npartitions=5)
    kept = some.map_partitions(lambda part: part[part.index < 40])  # the last ones are empty
    found = phi.transform(kept).compute(scheduler="synchronous")
    np.testing.assert_array_equal(found.index, frame.index[frame.index < 40])
    assert phi.transform(kept).partitions[4].compute(scheduler="synchronous").shape == (0, phi.rank_)


def test_a_fit_takes_a_dask_data_frame_with_its_names(frame):
    dd = pytest.importorskip("dask.dataframe")
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(2.0)).fit(dd.from_pandas(frame, npartitions=3))
    assert list(phi.feature_names_in_) == list("abcd")
    np.testing.assert_array_equal(
        phi.transform(frame), dkfm.ExactFeatureMap(kernels.Gaussian(2.0)).fit(frame).transform(frame)
    )


def test_lazy_results_stay_lazy_whatever_container_is_asked_for(frame):
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    for estimator in (dkfm.ExactFeatureMap(kernels.Gaussian(2.0)), dkfm.KernelPCA(2)):
        fitted = estimator.fit(frame).set_output(transform="pandas")
        assert isinstance(fitted.transform(frame), pd.DataFrame)
        assert fitted.transform(frame).index.equals(frame.index)
        with pytest.warns(UserWarning, match="X does not have valid feature names"):
            assert isinstance(fitted.transform(da.from_array(frame.to_numpy(), chunks=20)), da.Array)
        assert isinstance(fitted.transform(dd.from_pandas(frame, npartitions=2)), dd.DataFrame)


def test_functions_that_look_alike_are_not_taken_for_each_other(rng):
    X, Z = rng.normal(size=(20, 2)), rng.normal(size=(9, 2))
    rows = da.from_array(Z, chunks=(4, 2))
    for power in (1, 2):
        phi = dkfm.ExactFeatureMap(kernels.Function(lambda A, B, p=power: (A @ B.T + 9) ** p)).fit(X)
        found = phi.transform(rows).compute(scheduler="synchronous")
        np.testing.assert_allclose(found, phi.transform(Z), atol=1e-9)


def test_a_large_model_with_a_function_travels_in_the_graph(rng):
    gaussian = kernels.Gaussian(0.5)
    phi = dkfm.ExactFeatureMap(kernels.Function(gaussian.block)).fit(rng.normal(size=(900, 3)))
    assert phi.model_.nbytes > lazy_scoring.SMALL_MODEL
    Z = rng.normal(size=(9, 3))
    found = phi.transform(da.from_array(Z, chunks=(4, 3))).compute(scheduler="synchronous")
    np.testing.assert_allclose(found, phi.transform(Z), atol=1e-10)


@pytest.mark.slow
def test_a_large_model_that_went_to_a_worker_outlives_its_estimator(large, rng, client, tmp_path):
    Z = rng.normal(size=(20, 3))
    truth = large.transform(Z)
    found = large.transform(da.from_array(Z, chunks=(5, 3))).persist()
    large.__dict__.clear()
    gc.collect()
    assert len(list((tmp_path / "w").glob("dkfm-model-*/*/model/_COMPLETE"))) == 1
    np.testing.assert_allclose(found.compute(), truth, atol=1e-10)


def test_a_workspace_that_is_a_file_is_told_in_one_sentence(large, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DkfmError, match="cannot be written"):
        large.set_params(workspace=tmp_path / "file").transform(da.ones((4, 3)))


def _rows_of_a_block(block_info=None):
    """Make two rows of 50,000 columns, of which a few are not zero, where they are needed."""
    (start, stop), (_, columns) = block_info[None]["array-location"]
    rows = np.zeros((stop - start, columns))
    rows[:, :3] = np.random.default_rng(start).normal(size=(stop - start, 3))
    return rows


@pytest.mark.slow
def test_a_model_of_200_mb_scores_1000_blocks_on_a_cluster_in_small_tasks_without_a_warning(threaded_client, rng):
    import cloudpickle
    import dask

    X = np.zeros((500, 50_000))
    X[:, :3] = rng.normal(size=(500, 3))
    pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(1.0).on((0, 1, 2))).fit(X)
    assert pca.model_.nbytes >= 200_000_000
    Z = da.map_blocks(_rows_of_a_block, chunks=((2,) * 1000, (50_000,)), dtype=float, meta=np.empty((0, 0)))
    (found,) = dask.optimize(pca.transform(Z))
    tasks = dict(found.__dask_graph__())
    assert len(tasks) >= 1000
    assert max(len(cloudpickle.dumps(task)) for task in tasks.values()) < 10_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = pca.transform(Z).compute()
    for start in (0, 998, 1998):
        few = Z[start : start + 2].compute()
        np.testing.assert_allclose(scores[start : start + 2], pca.transform(few), rtol=0, atol=1e-12)
    points = np.concatenate([np.random.default_rng(start).normal(size=(2, 3)) for start in range(0, 2000, 2)])
    peer = dkfm.KernelPCA(2, kernel=kernels.Gaussian(1.0)).fit(X[:, :3])
    np.testing.assert_allclose(scores, peer.transform(points), rtol=0, atol=1e-9)
