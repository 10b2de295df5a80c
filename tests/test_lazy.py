"""Dask arrays through a model: lazy, exact metadata, small graphs, temporary files gone with their last user."""

import gc
import pickle
import warnings

import dask.array as da
import numpy as np
import pytest

import dkfm
from dkfm import kernels, lazy
from dkfm.errors import DkfmError, InvalidInputError


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
    with pytest.raises(InvalidInputError, match="NaN"):
        fitted.transform(da.full((4, 4), np.nan)).compute(scheduler="synchronous")
    with pytest.raises(InvalidInputError, match="real numbers"):
        fitted.transform(da.ones((4, 4), dtype=complex))


@pytest.fixture
def large(rng, tmp_path):
    """A model of 8 MB: too large to travel in a graph."""
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(0.5), workspace=tmp_path / "w").fit(rng.normal(size=(1000, 3)))
    assert phi.model_.nbytes > lazy.SMALL_MODEL
    return phi


def test_a_large_model_is_opened_by_path_and_its_tasks_are_small(large, rng):
    Z = da.from_array(rng.normal(size=(200, 3)), chunks=(50, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = large.transform(Z)
    tasks = {key: task for key, task in found.dask.items() if "array-" not in str(key)}
    assert max(len(pickle.dumps(task)) for task in tasks.values()) < 10_000
    np.testing.assert_allclose(found.compute(scheduler="synchronous"), large.transform(Z.compute()), atol=1e-10)


def test_a_large_model_lives_as_long_as_its_last_lazy_result(large, rng, tmp_path):
    found = large.transform(da.from_array(rng.normal(size=(20, 3)), chunks=(5, 3)))
    (folder,) = (tmp_path / "w").glob("dkfm-model-*")
    assert not hasattr(pickle.loads(pickle.dumps(large)), "_carried_model")
    large.__dict__.clear()
    gc.collect()
    assert found.compute(scheduler="synchronous").shape == (20, 1000)
    del found
    gc.collect()
    assert not folder.exists()


def test_a_dask_dataframe_is_refused_by_name(fitted):
    class Frame:
        def __dask_graph__(self):
            return {}

    with pytest.raises(DkfmError, match="to_dask_array"):
        fitted.transform(Frame())


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
    assert phi.model_.nbytes > lazy.SMALL_MODEL
    Z = rng.normal(size=(9, 3))
    found = phi.transform(da.from_array(Z, chunks=(4, 3))).compute(scheduler="synchronous")
    np.testing.assert_allclose(found, phi.transform(Z), atol=1e-10)


def test_a_large_model_that_went_to_a_worker_outlives_its_estimator(large, rng, client, tmp_path):
    Z = rng.normal(size=(20, 3))
    truth = large.transform(Z)
    found = large.transform(da.from_array(Z, chunks=(5, 3))).persist()
    large.__dict__.clear()
    gc.collect()
    assert len(list((tmp_path / "w").glob("dkfm-model-*/model/_COMPLETE"))) == 1
    np.testing.assert_allclose(found.compute(), truth, atol=1e-10)


def test_a_workspace_that_is_a_file_is_told_in_one_sentence(large, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DkfmError, match="cannot be written"):
        large.set_params(workspace=tmp_path / "file").transform(da.ones((4, 3)))
