"""The ids of a Zarr output are an array beside the scores, which xarray takes for a coordinate."""

import io
import json
import shutil
import tempfile
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.vlen import VLenUTF8

import dkfm
from dkfm import kernels
from dkfm.errors import DamagedStoreError, InvalidInputError, StoreExistsError
from dkfm.scoring.formats.chunk_files import Chunk
from dkfm.scoring.formats.id_array import IdArray
from helpers.resumed_jobs import NAMES

PCA = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(np.random.default_rng(0).normal(size=(20, 2)))

SMALLEST, LARGEST = -(2**63), 2**63 - 1


def score(ids, folder, *, chunk_rows=20, name="id", **options):
    """Score a table with these ids into a Zarr output, and return its path."""
    ids = ids if isinstance(ids, pa.Array) else pa.array(ids)
    rows = np.random.default_rng(1).normal(size=(2, len(ids)))
    target = folder / "scores.zarr"
    if not (folder / "model").exists():
        PCA.save(folder / "model")
        pq.write_table(pa.table({"x": rows[0], "y": rows[1], name: ids}), folder / "rows.parquet")
    options = {"columns": ["x", "y"], "id_column": name, "progress": False} | options
    dkfm.batch_score(folder / "model", folder / "rows.parquet", target, chunk_rows=chunk_rows, **options)
    return target


def read(target):
    return np.concatenate([ids for _, ids in dkfm.iter_scores(target)]).tolist()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(SMALLEST, LARGEST), min_size=1, max_size=30) | st.lists(st.text(), min_size=1, max_size=30),
    st.integers(1, 40),
)
def test_any_ids_in_any_chunks_are_read_as_they_were(ids, chunk_rows):
    with tempfile.TemporaryDirectory() as folder:
        target = score(ids, Path(folder), chunk_rows=chunk_rows)
        assert read(target) == ids
        assert zarr.open_array(target / "id", mode="r")[...].tolist() == ids
        assert dkfm.verify_scores(target, Path(folder) / "rows.parquet").rows == len(ids)


@pytest.mark.costly
@pytest.mark.parametrize("kind", [pa.int8(), pa.uint32(), pa.string(), pa.large_string()], ids=str)
def test_ids_of_any_integers_and_texts_are_kept(tmp_path, kind):
    ids = pa.array([7, 3, 5, 7, 100]).cast(kind)
    assert read(score(ids, tmp_path, chunk_rows=2)) == ids.to_pylist()


@pytest.mark.costly
@pytest.mark.parametrize("text", [False, True])
def test_xarray_opens_them_lazily_as_a_coordinate(tmp_path, text):
    xr = pytest.importorskip("xarray")
    ids = [f"kérnel {number}" if text else 3 * number for number in range(50)]
    target = score(ids, tmp_path)
    with xr.open_zarr(target) as found:
        assert set(found) == {"scores"}
        assert set(found.coords) == {"id"}
        assert found["id"].dims == ("row",)
        assert found["id"].chunks is not None
        assert text or found["id"].chunks[0][0] == 20  # text has chunks of its own in older versions of xarray
        assert found["id"].to_numpy().tolist() == ids
        chosen = found["scores"][(found["id"] == ids[7]).compute()]
        np.testing.assert_array_equal(chosen, np.asarray(dkfm.open_scores(target))[7:8])


@pytest.mark.costly
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_damage_to_a_chunk_of_ids_is_found_and_mended_by_the_same_command(tmp_path, text, finished):
    ids = [f"row {number}" if text else number for number in range(50)]
    target = score(ids, tmp_path)
    good = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    path = target / "id" / "c" / "1"
    raw = bytearray(good[path])
    raw[9] ^= 1
    for damage in (bytes(raw), good[path][:-1], good[path] + b"\0", b"", good[target / "id" / "c" / "0"], None):
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
        with pytest.raises(DamagedStoreError):
            dkfm.verify_scores(target)
        with pytest.raises(DamagedStoreError):
            read(target)
        if not finished:
            (target / "_COMPLETE").unlink()
        score(ids, tmp_path)
        assert {name: file for name, file in good.items() if file != name.read_bytes()} == {}


def test_another_id_column_is_another_job(made, tmp_path):
    where = made / "model", made / "rows.parquet", tmp_path / "out"
    dkfm.batch_score(*where, id_column="id", progress=False)
    assert read(tmp_path / "out") == [f"row {number}" for number in range(100)]
    for options in ({}, {"id_column": "note"}):
        with pytest.raises(
            StoreExistsError, match=r"id_column \(--id-column\) .* and 'id' was given when it was written"
        ):
            dkfm.batch_score(*where, progress=False, **options)


def test_partitions_and_frames_have_ids_too(made, tmp_path):
    table = pq.read_table(made / "rows.parquet")
    for country in ("de", "fr"):
        (tmp_path / "sales" / f"country={country}").mkdir(parents=True)
        pq.write_table(table, tmp_path / "sales" / f"country={country}" / "a.parquet")
    dkfm.batch_score(made / "model", tmp_path / "sales", tmp_path / "out", id_column="country", progress=False)
    assert read(tmp_path / "out") == ["de"] * 100 + ["fr"] * 100
    frame = table.to_pandas().set_index("id")[NAMES]
    dkfm.batch_score(made / "model", frame, tmp_path / "of-a-frame", id_column="id", progress=False)
    assert read(tmp_path / "of-a-frame") == frame.index.tolist()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1.5, 2.0], r"integers or text, and 'id' is double; convert it, or write .*/scores\.parquet"),
        (pa.array([1, 2], pa.timestamp("s")), "timestamp"),
        ([True, False], "bool"),
        ([3, 4, None, 4], "Rows of .*rows.parquet have no 'id'"),
        (["a", "b", None], "Rows of .*rows.parquet have no 'id'"),
        (pa.array([1, 2, 5, 2**64 - 1], pa.uint64()), r"Row 3 of .*rows.parquet has an integer of 2\^63 or more"),
        (["a", "b", "c" * 2**17], "Row 2 of .*rows.parquet has 131072 bytes for 'id', over 65536"),
        (pa.array([b"a", b"b", b"\xc3"]).view(pa.string()), "Row 2 of .*rows.parquet has no valid UTF-8 for 'id'"),
    ],
)
def test_ids_that_an_array_does_not_keep_are_one_sentence(tmp_path, ids, words):
    with pytest.raises(InvalidInputError, match=words) as caught:
        score(ids, tmp_path, chunk_rows=2)
    assert "\n" not in str(caught.value)


def test_missing_ids_that_no_footer_tells_of_are_found_by_their_row(tmp_path):
    PCA.save(tmp_path / "model")
    (tmp_path / "in").mkdir()
    for name, ids in [("a", ["a", "b", "c"]), ("b", ["d", "e", None])]:
        table = pa.table({"x": [0.0] * 3, "y": [1.0] * 3, "id": ids})
        pq.write_table(table, tmp_path / "in" / f"{name}.parquet", write_statistics=False)
    where = tmp_path / "model", tmp_path / "in", tmp_path / "out"
    with pytest.raises(InvalidInputError, match=r"Row 2 of .*b.parquet has no 'id'; give each row an id, or write"):
        dkfm.batch_score(*where, columns=["x", "y"], id_column="id", progress=False)


@pytest.mark.parametrize("ids", [[3, None, 4], ["a", "b", None]])
def test_a_frame_without_an_id_is_refused_before_anything_is_written(tmp_path, ids):
    frame = pa.table({"x": [0.0] * 3, "y": [1.0] * 3, "id": ids})
    with pytest.raises(InvalidInputError, match="Rows of source have no 'id'"):
        dkfm.batch_score(PCA, frame, tmp_path / "out", columns=["x", "y"], id_column="id", progress=False)
    assert not (tmp_path / "out").exists()


def test_categories_are_ids_by_their_values(tmp_path):
    ids = pa.array(["b", "a", "b", "c"])
    assert read(score(ids.dictionary_encode(), tmp_path, chunk_rows=3)) == ids.to_pylist()


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", ["scores", "SCORES", "scores_column", "two words", "_journal", "zarr.json", "../x", "\u6f22" * 40]
)
def test_names_that_no_array_beside_the_scores_has_are_refused(tmp_path, name):
    with pytest.raises(InvalidInputError, match="rename"):
        score([1, 2], tmp_path, name=name)
    assert not (tmp_path / "scores.zarr").exists()


@pytest.fixture(scope="module")
def made_texts(tmp_path_factory):
    return score([f"k\xe9y {number}" for number in range(7)], tmp_path_factory.mktemp("texts"), chunk_rows=4)


@given(st.integers(0, 60), st.binary(min_size=1, max_size=4), st.sampled_from(["change", "insert", "cut"]))
def test_readers_and_verification_agree_on_any_bytes_of_texts(made_texts, position, others, kind):
    good = (made_texts / "id" / "c" / "0").read_bytes()[:-4]
    position = min(position, len(good))
    rest = {"change": position + len(others), "insert": position, "cut": position + 1}[kind]
    data = good[:position] + others * (kind != "cut") + good[rest:]
    array = IdArray("id", "string", 4)
    try:
        expected = [*VLenUTF8().decode(data)] if data[:4] == good[:4] else None
    except ValueError:
        expected = None
    found = array.decode(data)
    assert (None if found is None else found.tolist()) == expected
    stream = io.BytesIO(data + google_crc32c.value(data).to_bytes(4, "little"))
    is_whole = expected is not None and len(data) == 20 + sum(len(text.encode()) for text in expected)
    assert (array.summarize_file(Chunk(0, 4), stream) is not None) == is_whole


@pytest.mark.parametrize("chunk_rows", [2**31, 2**32 - 1])
def test_a_small_file_of_many_rows_takes_no_memory(chunk_rows):
    array = IdArray("id", "string", chunk_rows)
    data = array.header + b"\0" * 60
    assert array.decode(data) is None
    stream = io.BytesIO(data + google_crc32c.value(data).to_bytes(4, "little"))
    assert array.summarize_file(Chunk(0, chunk_rows), stream) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"id_dtype": "int64"},
        {"id_dtype": "float64"},
        {"id_dtype": None},
        {"id_column": "../x"},
        {"id_column": "scores"},
    ],
)
def test_a_stranger_s_description_of_ids_is_checked(tmp_path, made_texts, settings):
    shutil.copytree(made_texts, tmp_path / "out")
    path = tmp_path / "out" / "zarr.json"
    description = json.loads(path.read_text())
    description["attributes"]["dkfm"]["settings"] |= settings
    path.write_text(json.dumps(description))
    with pytest.raises(DamagedStoreError):
        read(tmp_path / "out")


def test_a_stranger_s_chunk_of_more_texts_than_zarr_counts_is_refused(tmp_path, made_texts):
    shutil.copytree(made_texts, tmp_path / "out")
    path = tmp_path / "out" / "zarr.json"
    description = json.loads(path.read_text())
    description["attributes"]["dkfm"] |= {"rows": 2**33, "chunk_rows": 2**33}
    path.write_text(json.dumps(description))
    with pytest.raises(DamagedStoreError, match=r"\(a size\)"):
        read(tmp_path / "out")


def test_a_stranger_s_ids_that_are_no_texts_are_a_sentence(tmp_path):
    target = score(["a", "b"], tmp_path, chunk_rows=2)
    path = target / "id" / "c" / "0"
    data = b"\2\0\0\0" + b"\xff\xff\xff\x7f" + path.read_bytes()[8:-4]
    path.write_bytes(data + google_crc32c.value(data).to_bytes(4, "little"))
    with pytest.raises(DamagedStoreError):
        read(target)
