"""Fixtures of these tests."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import dkfm
from dkfm import kernels
from helpers.resumed_jobs import NAMES


@pytest.fixture
def fitted(rng):
    return dkfm.KernelPCA(3, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(60, 4)))


@pytest.fixture
def one_thread(monkeypatch):
    """Chunks are scored in their order."""
    monkeypatch.setattr("dkfm.core.cpus.COUNT", 1)


@pytest.fixture
def job(fitted, rng, tmp_path):
    """A saved model, a source of 100 rows, and where the output goes."""
    fitted.save(tmp_path / "model")
    np.save(tmp_path / "z.npy", rng.normal(size=(100, 4)))
    return tmp_path / "model", tmp_path / "z.npy", tmp_path / "scores.zarr"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model that knows names, the same without names, and 100 rows as .npy file, as Zarr, and as a table with ids."""
    import pandas as pd

    folder, rng = tmp_path_factory.mktemp("made"), np.random.default_rng(5)
    frame = pd.DataFrame(rng.normal(size=(60, 4)), columns=NAMES)
    pca = dkfm.KernelPCA(3, kernel=kernels.Gaussian(2.0))
    pca.fit(frame).save(folder / "model")
    pca.fit(frame.to_numpy()).save(folder / "unnamed")
    rows = rng.normal(size=(100, 4))
    np.save(folder / "rows.npy", rows)
    zarr.create_array(folder / "rows.zarr", data=rows, chunks=(30, 4))
    ids = [f"row {i}" for i in range(100)]
    table = pa.table({"d": rows[:, 3], "id": ids, "b": rows[:, 1], "note": ids, "a": rows[:, 0], "c": rows[:, 2]})
    pq.write_table(table, folder / "rows.parquet", row_group_size=33)
    return folder
