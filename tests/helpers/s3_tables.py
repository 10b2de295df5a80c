"""What the tests of s3 tables share."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp

from dkfm.sources import chunk_cache, csr_npz, parquet
from dkfm.sources.parquet_files import footers
from helpers.parquet_files import table


def fresh():
    """Make this process one that has read nothing yet."""
    csr_npz.clear_unpacked()
    chunk_cache.clear_chunks()
    parquet._cached_layouts.clear_unless_busy()
    footers.cached_metadata.cache_clear()


def parquet_bytes(data, group_rows=100, **options):
    file = io.BytesIO()
    pq.write_table(data if isinstance(data, pa.Table) else table(data), file, row_group_size=group_rows, **options)
    return file.getvalue()


def npz_bytes(matrix, compressed=True):
    file = io.BytesIO()
    sp.save_npz(file, matrix, compressed=compressed)
    return file.getvalue()


def split(folder, rows):
    """Write a folder of files with ids, of which one has its columns in another order."""
    for name, part, order in [("b/1", 1, "abc"), ("a", 0, "cab"), ("b/2", 2, "abc"), ("c", 3, "abc")]:
        held = slice(250 * part, 250 * (part + 1))
        columns = table(rows[held]).select(order).append_column("id", pa.array(range(held.start, held.stop)))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.parquet").write_bytes(parquet_bytes(columns))
    for name in ("_SUCCESS", "notes.txt", "_metadata/a.parquet", ".hidden/a=1/x.parquet", "_x.parquet", ".x.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not looked at")


def dense(rows):
    return rows.toarray() if sp.issparse(rows) else rows
