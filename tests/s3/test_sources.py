"""Models and sources on an object store: a real S3 server process, and a proxy that makes it fail."""

import io
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zarr

import dkfm
from dkfm.errors import (
    DkfmError,
    InvalidInputError,
    StoreError,
)
from dkfm.files.object_store import Remote, open_file
from dkfm.sources.opening import open_source
from helpers.s3_models import flip, npy
from helpers.s3_server import put


def stored(folder, rows):
    """Put rows of every kind into a folder; return their names."""
    np.save(folder / "x.npy", rows)
    np.save(folder / "single.npy", rows.astype(np.float32))
    np.save(folder / "big.npy", (100 * rows).astype(">i2"))
    np.save(folder / "bool.npy", rows > 0)
    zarr.create_array(folder / "x.zarr", data=rows, chunks=(7, 2))
    zarr.create_array(folder / "whole.zarr", data=rows, chunks=(60, 3))
    zarr.create_array(folder / "single.zarr", data=rows.astype(np.float32), chunks=(10, 3))
    zarr.create_array(folder / "bytes.zarr", data=rows, chunks=(9, 3), compressors=None)
    zarr.create_array(folder / "sharded.zarr", data=rows, chunks=(5, 3), shards=(25, 3))
    holes = zarr.create_array(folder / "holes.zarr", shape=(60, 3), chunks=(10, 3), dtype="f8", fill_value=2.5)
    holes[10:20] = rows[10:20]
    group = zarr.create_group(folder / "group.zarr")
    for name in ("x", "y"):
        group.create_array(name, data=rows, chunks=(50, 3))
    zarr.create_group(folder / "one.zarr").create_array("only", data=rows)
    names = [p.name for p in folder.iterdir() if p.name != "group.zarr"]
    return [*names, "group.zarr/x"]


def test_sources_at_urls_read_what_local_ones_read(place, rows, tmp_path):
    names = stored(tmp_path, rows)
    put(place, tmp_path)
    for name in names:
        local, remote = open_source(tmp_path / name), open_source(f"{place.url}/{name}")
        assert len(pickle.dumps(remote)) < 400
        assert pickle.loads(pickle.dumps(remote)) == remote
        assert (remote.shape, remote.chunk_rows, remote.float64s_per_row) == (
            local.shape,
            local.chunk_rows,
            local.float64s_per_row,
        )
        assert remote.locate_row(7) == (remote.name, 7)
        assert remote.name.startswith(place.url)
        for first, second in ((local, remote), (local.with_float32_preserved(), remote.with_float32_preserved())):
            for part in (slice(0, 60), slice(11, 29), slice(0, 1), slice(59, 60), slice(55, 90), slice(20, 20)):
                ours, theirs = second.read(part), first.read(part)
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours, theirs)


def test_a_source_reads_no_more_than_its_rows(place, rng, proxy):
    X = rng.normal(size=(20_000, 5))
    place.replace("x.npy", npy(X))
    source = open_source(f"{place.url}/x.npy")
    asked = []
    original = Remote.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remote, "read", lambda self, *where: asked.append(original(self, *where)) or asked[-1])
        np.testing.assert_array_equal(source.read(slice(5000, 5010)), X[5000:5010])
    assert [len(data) for data in asked] == [10 * 5 * 8]


def test_a_stamp_is_another_once_an_object_has_changed(place, rows, tmp_path):
    zarr.create_array(tmp_path / "x.zarr", data=rows, chunks=(10, 3))
    np.save(tmp_path / "x.npy", rows)
    put(place, tmp_path)
    for name, changed in (("x.npy", "x.npy"), ("x.zarr", "x.zarr/c/3/0")):
        source = open_source(f"{place.url}/{name}")
        before = source.stamp()
        assert source.stamp() == before
        place.replace(changed, flip(place.read(changed)))
        assert source.stamp() != before


def test_a_store_beside_an_object_of_its_own_url_is_opened(place, rows, tmp_path):
    """Some tools mark a folder by an empty object of its name."""
    zarr.create_array(tmp_path / "marked.zarr", data=rows)
    put(place, tmp_path)
    place.replace("marked.zarr", b"")
    np.testing.assert_array_equal(open_source(f"{place.url}/marked.zarr").read(slice(0, 5)), rows[:5])


def test_what_is_not_a_source_at_a_url_is_refused_in_one_sentence(place, rows, tmp_path):
    zarr.create_array(tmp_path / "codec.zarr", data=rows)
    metadata = json.loads((tmp_path / "codec.zarr/zarr.json").read_text())
    metadata["codecs"].append({"name": "numcodecs.pickle"})
    (tmp_path / "codec.zarr/zarr.json").write_text(json.dumps(metadata))
    zarr.create_array(tmp_path / "flat.zarr", data=np.ones(3))
    zarr.create_group(tmp_path / "none.zarr")
    (tmp_path / "json.zarr").mkdir()
    (tmp_path / "json.zarr/zarr.json").write_text("{")
    put(place, tmp_path)
    whole = npy(rows)
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 3), }".ljust(127) + b"\n"
    files = {
        "order.npy": (npy(np.asfortranarray(rows)), "by columns"),
        "object.npy": (npy(np.array([[object()]]), allow_pickle=True), "pickled objects"),
        "fields.npy": (npy(np.ones((2, 2), "f8,f8")), "real numbers"),
        "complex.npy": (npy(rows * 1j), "Complex"),
        "flat.npy": (npy(rows[0]), "two dimensions"),
        "none.npy": (npy(rows[:0]), "at least one row"),
        "negative.npy": (header, "its shape is"),
        "cut.npy": (whole[:-1], "for its shape"),
        "header.npy": (whole[:60], "cannot be read as a .npy file"),
        "magic.npy": (b"\x93NUM", "cannot be read as a .npy file"),
        "empty.npy": (b"", "cannot be read as a .npy file"),
        "text.npy": (b"not an array, and of more than ten bytes", "cannot be read as a .npy file"),
        "x.csv": (b"1,2", "neither"),
    }
    for name, (data, _) in files.items():
        place.replace(name, data)
    rest = {"missing.npy": "There is no", "missing": "There is no", "codec.zarr": "codecs", "flat.zarr": "its shape"}
    more = {"none.zarr": "is a group", "json.zarr": "not valid JSON"}
    for name, words in {**{name: words for name, (_, words) in files.items()}, **rest, **more}.items():
        with pytest.raises(DkfmError, match=words) as caught:
            open_source(f"{place.url}/{name}")
        assert "\n" not in str(caught.value)
        assert place.url in str(caught.value)


def test_a_source_that_was_damaged_meanwhile_is_an_error(place, rows, tmp_path):
    from zarr.codecs import Crc32cCodec

    zarr.create_array(tmp_path / "x.zarr", data=rows, chunks=(10, 3), compressors=[Crc32cCodec()])
    zarr.create_array(tmp_path / "y.zarr", data=rows[:20], chunks=(10, 3))
    put(place, tmp_path)
    place.replace("x.npy", npy(rows))
    array, file = open_source(f"{place.url}/x.zarr"), open_source(f"{place.url}/x.npy")
    place.replace("x.npy", npy(rows)[:-1])
    with pytest.raises(InvalidInputError, match="cut short"):
        file.read(slice(50, 60))
    place.replace("x.zarr/c/1/0", flip(place.read("x.zarr/c/1/0")))
    np.testing.assert_array_equal(array.read(slice(0, 10)), rows[:10])
    with pytest.raises(InvalidInputError, match="Rows 10 to 20"):
        array.read(slice(10, 20))
    place.replace("x.zarr/zarr.json", place.read("y.zarr/zarr.json"))
    with pytest.raises(InvalidInputError, match="was replaced"):
        array.read(slice(0, 10))
    place.remove_objects("x.zarr/zarr.json", "x.npy")
    for source in (array, file):
        with pytest.raises(StoreError, match="nothing is there"):
            source.read(slice(0, 10))


def test_threads_read_sources_at_urls_together(place, rows, tmp_path):
    zarr.create_array(tmp_path / "x.zarr", data=rows, chunks=(7, 3))
    np.save(tmp_path / "x.npy", rows)
    put(place, tmp_path)
    parts = [slice(start, start + 10) for start in range(0, 60, 10)]
    for name in ("x.zarr", "x.npy"):
        with ThreadPoolExecutor(6) as pool:
            read = list(pool.map(open_source(f"{place.url}/{name}").read, parts))
        np.testing.assert_array_equal(np.concatenate(read), rows)


def test_worker_processes_score_rows_at_a_url(place, rows, fitted, tmp_path, client):
    zarr.create_array(tmp_path / "x.zarr", data=rows, chunks=(10, 3))
    put(place, tmp_path)
    place.replace("x.npy", npy(rows))
    for name in ("x.zarr", "x.npy"):
        target = tmp_path / f"scores-{name}.zarr"
        dkfm.batch_score(fitted, f"{place.url}/{name}", target, client=client, progress=False)
        np.testing.assert_allclose(dkfm.open_scores(target).compute(), fitted.transform(rows), atol=1e-12)


def test_a_file_at_a_url_is_read_as_one_on_a_disk(place, rng):
    data = rng.integers(0, 256, 700_000, dtype=np.uint8).tobytes()
    place.replace("data", data)
    local = io.BytesIO(data)
    with open_file(f"{place.url}/data") as remote:
        assert (remote.readable(), remote.seekable(), remote.writable()) == (True, True, False)
        for offset, whence, size in (
            (0, 0, 5),
            (-7, 2, 20),
            (300_000, 0, 400_000),
            (-5, 1, 1),
            (650_000, 0, -1),
            (0, 0, -1),
        ):
            assert remote.seek(offset, whence) == local.seek(offset, whence)
            assert remote.read(size) == local.read(size)
            assert remote.tell() == local.tell()
        with pytest.raises(ValueError, match="before the beginning"):
            remote.raw.seek(-1)
    with pytest.raises(StoreError, match="nothing is there"):
        open_file(f"{place.url}/none")


def test_parquet_and_npz_are_read_through_such_a_file(place, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table({"a": rows[:, 0]}), file)
    place.replace("x.parquet", file.getvalue())
    with open_file(f"{place.url}/x.parquet") as remote:
        np.testing.assert_array_equal(pq.read_table(remote)["a"].to_numpy(), rows[:, 0])
    file = io.BytesIO()
    np.savez(file, a=rows)
    place.replace("x.npz", file.getvalue())
    with open_file(f"{place.url}/x.npz") as remote, np.load(remote, allow_pickle=False) as held:
        np.testing.assert_array_equal(held["a"], rows)
