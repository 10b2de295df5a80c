"""What is read without Zarr is what Zarr reads."""

import json
import sys
import types

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

from dkfm.errors import InvalidInputError
from dkfm.sources.opening import open_source
from dkfm.storage import bounded_chunks, raw_chunk_reader, store_metadata, zarr_store

DTYPES = ["float64", "float32", "int64", "uint16", "uint8", "bool"]


def stored(path, values, chunks, **options):
    return zarr.create_array(
        path, shape=values.shape, dtype=values.dtype, chunks=chunks, filters=None, fill_value=1, **options
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_layout_reads_as_zarr_reads_it(tmp_path_factory, data):
    n, d = data.draw(st.integers(1, 23)), data.draw(st.integers(1, 4))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    values = np.random.default_rng(n).integers(0, 2 if dtype.kind == "b" else 100, size=(n, d)).astype(dtype)
    path = tmp_path_factory.mktemp("plain") / "x.zarr"
    options = data.draw(
        st.sampled_from(
            [
                {"compressors": None},
                {"compressors": [Crc32cCodec()]},
                {"compressors": [ZstdCodec()]},
                {"compressors": [ZstdCodec(), Crc32cCodec()]},
                {"compressors": None, "serializer": BytesCodec(endian="big")},
                {"compressors": None, "chunk_key_encoding": {"name": "default", "separator": "."}},
                {"compressors": None, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
            ]
        )
    )
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    array = stored(path, values, (rows, columns), **options)
    start = data.draw(st.integers(0, n - 1))
    array[start:] = values[start:]  # the chunks before are never written
    stop = data.draw(st.integers(start + 1, n))
    for part in (slice(start, stop), slice(0, n)):
        read = open_source(path).read(part)
        assert read.dtype == np.float64
        np.testing.assert_array_equal(read, array[part].astype(np.float64))


@pytest.mark.parametrize(("compressors", "plain"), [(None, True), ([Crc32cCodec()], True), ([ZstdCodec()], False)])
def test_only_plain_chunks_are_read_without_zarr(tmp_path, rng, monkeypatch, compressors, plain):
    values = rng.normal(size=(50, 3))
    stored(tmp_path / "x.zarr", values, (7, 3), compressors=compressors)[...] = values
    source = open_source(tmp_path / "x.zarr")
    opened = []
    honest = bounded_chunks.read_bounded
    monkeypatch.setattr(bounded_chunks, "read_bounded", lambda *a: opened.append(1) or honest(*a))
    np.testing.assert_array_equal(source.read(slice(5, 44)), values[5:44])
    assert bool(opened) != plain


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_a_damaged_chunk_is_a_sentence(tmp_path, rng, damage):
    values = rng.normal(size=(50, 3))
    stored(tmp_path / "x.zarr", values, (10, 3), compressors=[Crc32cCodec()])[...] = values
    chunk = tmp_path / "x.zarr" / "c" / "2" / "0"
    data = chunk.read_bytes()
    chunk.write_bytes(
        {"flip": data[:9] + bytes([data[9] ^ 1]) + data[10:], "cut": data[:-8], "grow": data + b"0"}[damage]
    )
    source = open_source(tmp_path / "x.zarr")
    with pytest.raises(InvalidInputError, match=r"Rows 15 to 25 of .* cannot be read"):
        source.read(slice(15, 25))
    np.testing.assert_array_equal(source.read(slice(0, 20)), values[:20])


def test_an_array_that_grew_since_it_was_opened_keeps_its_rows(tmp_path, rng):
    values = rng.normal(size=(25, 3))
    array = stored(tmp_path / "x.zarr", values, (10, 3), compressors=None)
    array[...] = values
    source = open_source(tmp_path / "x.zarr")
    array.append(values)
    np.testing.assert_array_equal(source.read(slice(0, 25)), values)


def test_what_a_chunk_file_ends_with_is_in_its_metadata(tmp_path, rng):
    values = rng.normal(size=(5, 3))
    for name, compressors, trailer in (("a", None, 0), ("b", [Crc32cCodec()], 4), ("c", [ZstdCodec()], None)):
        stored(tmp_path / name, values, (5, 3), compressors=compressors)
        assert store_metadata.read_source_metadata_and_info(tmp_path / name)[1].checksum_bytes == trailer


def test_a_chunk_longer_than_the_array_gives_no_more_than_its_rows(tmp_path, rng):
    values = rng.normal(size=(20, 3))
    stored(tmp_path / "x.zarr", values, (10_000, 3), compressors=None)[...] = values
    source = open_source(tmp_path / "x.zarr")
    np.testing.assert_array_equal(source.read(slice(2, 9)), values[2:9])
    assert source.uncompressed_array.read(slice(0, 10_000)).shape == (20, 3)


@pytest.mark.parametrize("there", [True, False])
def test_a_stranger_s_chunk_size_takes_no_memory(tmp_path, there):
    values = np.full((20, 3), 7.0)
    array = stored(tmp_path / "x.zarr", values, (20, 3), compressors=None)
    if there:
        array[...] = values
    file = tmp_path / "x.zarr" / "zarr.json"
    metadata = json.loads(file.read_text())
    metadata["chunk_grid"]["configuration"]["chunk_shape"] = [2**28, 3]
    file.write_text(json.dumps(metadata))
    source = open_source(tmp_path / "x.zarr")
    assert source.chunk_rows == 2**28
    if there:
        with pytest.raises(InvalidInputError, match=r"480 bytes and must have"):
            source.read(slice(0, 20))
    else:
        assert source.uncompressed_array.read(slice(0, 20)) is None


def test_an_array_that_was_made_anew_since_it_was_opened_is_left_to_zarr(tmp_path):
    stored(tmp_path / "x.zarr", np.ones((8, 4)), (8, 4), compressors=None)[...] = 1.5
    source = open_source(tmp_path / "x.zarr")
    counted = np.arange(32).reshape(8, 4)
    stored(tmp_path / "x.zarr", counted, (8, 4), compressors=None, overwrite=True)[...] = counted
    np.testing.assert_array_equal(source.read(slice(0, 8)), counted)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_part_of_an_array_of_ours_reads_as_zarr_reads_it(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=2)))
    chunks = tuple(data.draw(st.integers(1, max(1, length))) for length in shape)
    dtype = data.draw(st.sampled_from(["float64", "float32", "int64"]))
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    root = tmp_path_factory.mktemp("own") / "x.zarr"
    array = zarr_store.add_array(zarr.create_group(root, zarr_format=3), "x", shape, chunks, dtype)
    array[...] = values
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n + 2), st.integers(0, n + 2)))) for n in shape]
    part = tuple(slice(*both) for both in bounds)
    for selection in ((), part):
        read = raw_chunk_reader.read_own_array(root / "x", selection)
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, array[selection or ...])


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "string"])
@pytest.mark.parametrize(("shape", "chunks"), [((1000, 20), (100, 20)), ((7,), (3,)), ((0, 3), (1, 3))])
def test_the_metadata_of_an_array_are_what_zarr_would_write(tmp_path, dtype, shape, chunks):
    names = ("row", "scores_column")[: len(shape)]
    zarr_store.add_array(zarr.create_group(tmp_path / "x", zarr_format=3), "a", shape, chunks, dtype, names)
    written = zarr_store.encode_array_metadata(shape, chunks, dtype, names)
    assert json.loads(written) == json.loads((tmp_path / "x" / "a" / "zarr.json").read_text())


def test_an_axis_of_length_zero_beside_a_huge_one_is_not_split(tmp_path, monkeypatch):
    metadata = zarr_store.encode_array_metadata((0, 2**40), (1, 1), "float64", ("row", "column"))
    (tmp_path / "zarr.json").write_bytes(metadata)
    store_metadata.require_chunks(tmp_path, store_metadata.read_array_info(tmp_path))
    monkeypatch.setattr(raw_chunk_reader, "_split_by_chunks", None)  # it would take all memory
    assert raw_chunk_reader.read_own_array(tmp_path).shape == (0, 2**40)


def test_rows_are_opened_while_another_thread_imports_zarr(monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", types.ModuleType("zarr"))  # what is there until its import ends
    assert open_source(np.zeros((3, 2))).shape == (3, 2)
