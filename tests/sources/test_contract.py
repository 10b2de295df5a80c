"""Every source obeys the contract of sources, whatever holds the rows."""

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import zarr

from contracts import check_source
from dkfm.execution.job_input import open_input
from dkfm.sources.opening import open_source
from dkfm.sources.zarr import CsrCopySource
from dkfm.storage import csr
from dkfm.storage.zarr_store import new_store

ROWS = np.where(np.random.default_rng(3).uniform(size=(57, 4)) < 0.5, 0.0, np.arange(57 * 4).reshape(57, 4) / 8)
"""Half zeros; float32 holds all values."""


def saved_npy(folder, values):
    np.save(folder / "x.npy", values)
    return folder / "x.npy"


def saved_npz(folder):
    sp.save_npz(folder / "x.npz", sp.csr_array(ROWS))
    return folder / "x.npz"


def saved_zarr(folder, **options):
    zarr.create_array(folder / "x.zarr", data=ROWS, chunks=(10, 4), **options)
    return folder / "x.zarr"


def saved_group(folder):
    zarr.create_group(folder / "g.zarr").create_array("rows", data=ROWS, chunks=(10, 3))
    return folder / "g.zarr"


def saved_parquet(folder, parts=1):
    (folder / "table").mkdir()
    for number, part in enumerate(np.array_split(ROWS, parts)):
        pq.write_table(pa.table(dict(zip("abcd", part.T, strict=True))), folder / "table" / f"{number}.parquet", 10)
    return folder / "table"


ON_DISK = {
    ".npy": lambda folder: saved_npy(folder, ROWS),
    ".npy, by columns": lambda folder: saved_npy(folder, np.asfortranarray(ROWS)),
    ".npy, float32": lambda folder: saved_npy(folder, ROWS.astype(np.float32)),
    ".npz": saved_npz,
    "Zarr": saved_zarr,
    "Zarr, not compressed": lambda folder: saved_zarr(folder, compressors=None),
    "Zarr, a group": saved_group,
    "Parquet": saved_parquet,
    "Parquet, three files": lambda folder: saved_parquet(folder, 3),
}


@pytest.mark.parametrize("kind", ON_DISK)
def test_sources_on_a_disk_obey_the_contract(kind, tmp_path):
    source = open_source(ON_DISK[kind](tmp_path))
    check_source(source, ROWS)
    assert source.location is not None


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_array, pd.DataFrame, pa.table])
def test_sources_in_memory_obey_the_contract(kind):
    table = kind in (pd.DataFrame, pa.table)
    source = open_source(kind(dict(zip("abcd", ROWS.T, strict=True)) if table else ROWS))
    check_source(source, ROWS, travels=False)
    assert source.location is None


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rows_of_a_dask_collection_obey_the_contract(dtype):
    with open_input(da.from_array(ROWS.astype(dtype), chunks=((10, 20, 27), (3, 1))), "X", None) as source:
        check_source(source, ROWS)
    frame = dd.from_pandas(pd.DataFrame(ROWS.astype(dtype), columns=list("abcd")), npartitions=5)
    with open_input(frame, "X", None) as source:
        check_source(source, ROWS)


def test_rows_that_a_driver_stores_for_its_workers_obey_the_contract(tmp_path):
    memory = open_source(sp.csr_array(ROWS))
    with new_store(tmp_path / "rows.zarr", "rows", {}, csr.array_names("rows")) as group:
        csr.write_csr(group, "rows", memory.array)
    check_source(
        CsrCopySource(
            tmp_path / "rows.zarr", ROWS.shape, memory.float64s_per_row, memory.max_nnz_per_row_window, "rows"
        ),
        ROWS,
    )
