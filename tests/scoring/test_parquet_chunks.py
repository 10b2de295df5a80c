"""Files of a table of scores: their rows whatever the pieces, few row groups, few writes."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dkfm
from dkfm import kernels
from dkfm.core import chunking
from dkfm.scoring.formats import chunk_files
from dkfm.scoring.formats.chunk_files import Chunk, OutputColumns, Piece, ReadBackWriter, write_chunk_files
from dkfm.scoring.formats.parquet_chunks import ParquetChunks
from dkfm.storage.output_files import LocalOutput


def written(folder, sizes, values, classes, ids):
    """Write a chunk in pieces of the given sizes; return the path and the summaries."""
    columns = (
        OutputColumns("features", values.shape[1], "f", values.dtype.name),
        OutputColumns("predict", 1, "predict", "int64"),
    )
    ends = np.cumsum(sizes)
    pieces = (
        Piece({"features": values[a:b], "predict": classes[a:b]}, None if ids is None else ids[a:b])
        for a, b in zip([0, *ends[:-1]], ends, strict=True)
    )
    chunks = ParquetChunks(LocalOutput(folder), columns, None if ids is None else "id")
    summaries, _ = write_chunk_files(chunks, Chunk(0, len(values)), pieces, len(sizes), lambda: None)
    assert chunk_files.read_chunk_files(chunks, Chunk(0, len(values)))[0].crc32c == summaries[0].crc32c
    return folder / chunks.file_names(0)[0], summaries


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from(["float32", "float64"]),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_those_of_the_pieces_whatever_the_row_groups(tmp_path_factory, sizes, group_rows, has_ids, dtype):
    n, rng = sum(sizes), np.random.default_rng(len(sizes))
    values, classes = rng.normal(size=(n, 3)).astype(dtype), rng.integers(-1, 4, (n, 1))
    values[rng.random(n) < 0.2] = np.nan
    ids = pa.array([f"row {i}" if i % 3 else None for i in range(n)]) if has_ids else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "_MIN_GROUP_ROWS", group_rows)
        path, summaries = written(tmp_path_factory.mktemp("out"), sizes, values, classes, ids)
    table = pq.read_table(path)
    np.testing.assert_array_equal(np.column_stack([table[f"f{i}"].to_numpy() for i in range(3)]), values)
    assert {table[f"f{i}"].null_count for i in range(3)} == {np.isnan(values[:, 0]).sum()}
    assert table["predict"].to_pylist() == [None if code < 0 else code for code in classes[:, 0].tolist()]
    assert {str(table.schema.field(f"f{i}").type) for i in range(3)} == {str(pa.from_numpy_dtype(np.dtype(dtype)))}
    assert not has_ids or table["id"].combine_chunks().equals(ids)
    np.testing.assert_array_equal(summaries[0].invalid_mask, np.isnan(values[:, 0]) | (classes[:, 0] < 0))
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert all(a + b > group_rows for a, b in pairwise(groups))  # else they were one
    assert max(groups) <= max(group_rows, *sizes)


def test_pieces_of_wide_rows_share_a_row_group_and_columns_share_a_write(tmp_path, rng, monkeypatch):
    sizes = []
    write = ReadBackWriter.write
    monkeypatch.setattr(ReadBackWriter, "write", lambda self, data: sizes.append(len(data)) or write(self, data))
    values = rng.normal(size=(90, 1000))
    path, _ = written(tmp_path, [30, 30, 30], values, np.zeros((90, 1), np.int64), None)
    assert pq.read_metadata(path).num_row_groups == 1
    assert len(sizes) <= 2 + path.stat().st_size // 2**19


@pytest.mark.costly
@pytest.mark.parametrize("output", [None, ["predict", "decision_function"]])
def test_rows_without_scores_are_null_to_other_readers_and_as_in_a_store_to_ours(tmp_path, rng, output):
    rows, n_invalid = rng.normal(size=(300, 3)), 7
    fisher = dkfm.KernelFisher(kernel=kernels.Gaussian(2.0)).fit(rows[:60], np.arange(60) % 3)
    fisher.save(tmp_path / "model")
    fisher, rows[rng.permutation(300)[:n_invalid], 1] = tmp_path / "model", np.nan
    options = {"output": output, "on_invalid": "nan", "chunk_rows": 40, "progress": False}
    report = dkfm.batch_score(fisher, rows, tmp_path / "scores.parquet", **options)
    assert report.invalid_rows == n_invalid
    table = pq.read_table(tmp_path / "scores.parquet")
    assert {column.null_count for column in table.columns} == {n_invalid}
    dkfm.batch_score(fisher, rows, tmp_path / "scores.zarr", **options)
    for name in output or [None]:
        (same, numbers), (stored, _) = (
            map(np.concatenate, zip(*dkfm.iter_scores(tmp_path / f"scores.{form}", name), strict=True))
            for form in ("parquet", "zarr")
        )
        np.testing.assert_array_equal(same, stored)
        np.testing.assert_array_equal(numbers, np.arange(300))
    frame = dkfm.open_scores(tmp_path / "scores.parquet").compute()
    assert output is None or (frame["predict"].dtype == pd.Int64Dtype() and frame["predict"].isna().sum() == n_invalid)
    found = dkfm.verify_scores(tmp_path / "scores.parquet", rows)
    assert found.sampled == 300
    assert dkfm.batch_score(fisher, rows, tmp_path / "scores.parquet", **options).scored_chunks == 0


def test_a_file_of_nulls_alone_is_sound_and_small(tmp_path):
    values, n = np.full((50_000, 8), np.nan), 50_000
    path, summaries = written(tmp_path, [n], values, np.full((n, 1), -1), None)
    assert summaries[0].invalid_mask.all()
    assert path.stat().st_size < n


def test_files_of_earlier_versions_with_nan_in_place_of_nulls_are_sound(tmp_path, rng):
    values = rng.normal(size=(6, 1))
    values[2] = np.nan
    chunks = ParquetChunks(LocalOutput(tmp_path), (OutputColumns("features", 1, "f", "float64"),))
    field = pa.field("f0", pa.float64(), nullable=False)
    schema = pa.schema([field], metadata={b"dkfm": b'{"chunk": 0, "rows": 6}'})
    pq.write_table(pa.table([values[:, 0]], schema=schema), tmp_path / "part-00000.parquet")
    (found,) = chunk_files.read_chunk_files(chunks, Chunk(0, 6))
    assert found.invalid_mask.tolist() == [False, False, True, False, False, False]


IDS = {
    "int64": pa.array([2**60 + i if i % 5 else None for i in range(20)]),
    "uint64": pa.array([2**63 + i if i != 3 else None for i in range(20)], type=pa.uint64()),
    "int32": pa.array([i if i else None for i in range(20)], type=pa.int32()),
    "codes": pa.array([2**60 + i % 4 if i else None for i in range(20)]).dictionary_encode(),
    "bytes": pa.array([bytes([200 + i]) if i else None for i in range(20)]),
    "flags": pa.array([i % 2 == 0 if i != 3 else None for i in range(20)]),
    "days": pa.array([i if i else None for i in range(20)], type=pa.date32()),
    "decimals": pa.array([i if i else None for i in range(20)], type=pa.decimal128(20, 2)),
    "codes of bytes": pa.array([bytes([200, i]) if i else None for i in range(20)], type=pa.binary(2)),
    "text": pa.array([f"{i}" if i else None for i in range(20)]),
}
if int(pa.__version__.split(".")[0]) >= 18:  # earlier ones cannot write them to Parquet
    IDS["views of text"] = pa.array([f"{i}" if i else None for i in range(20)], type=pa.string_view())
    IDS["views of bytes"] = pa.array([bytes([200 + i]) if i else None for i in range(20)], type=pa.binary_view())


@pytest.mark.costly
@pytest.mark.parametrize("kind", IDS)
def test_ids_of_which_some_are_null_are_read_as_they_are(kind, tmp_path, rng):
    ids, X = IDS[kind], rng.normal(size=(20, 2))
    pq.write_table(pa.table({"a": X[:, 0], "b": X[:, 1], "id": ids}), tmp_path / "rows.parquet")
    model = dkfm.KernelPCA(1, kernel="rbf").fit(X)
    dkfm.batch_score(
        model, tmp_path / "rows.parquet", tmp_path / "out.parquet", id_column="id", columns=["a", "b"], chunk_rows=10
    )
    truth = ids.to_pylist()
    blocks = [rows for _, rows in dkfm.iter_scores(tmp_path / "out.parquet")]
    assert [None if value is None else value for block in blocks for value in block.tolist()] == truth
    found = dkfm.open_scores(tmp_path / "out.parquet").compute()["id"]
    assert [None if pd.isna(value) else value for value in found.astype(object)] == truth
