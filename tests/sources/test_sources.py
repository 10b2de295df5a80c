import numpy as np
import pandas as pd
import pytest
import zarr

from dkfm.errors import DkfmError, InvalidInputError
from dkfm.sources.base import read_finite
from dkfm.sources.opening import open_source


@pytest.fixture
def rows(rng):
    return rng.normal(size=(50, 3))


def test_every_kind_of_source_reads_the_same_rows(rows, tmp_path):
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "f.npy", np.asfortranarray(rows))
    zarr.create_array(tmp_path / "x.zarr", data=rows, chunks=(7, 2))
    group = zarr.create_group(tmp_path / "g.zarr")
    group.create_array("x", data=rows, chunks=(50, 3))
    group.create_array("y", data=rows, chunks=(50, 3))
    zarr.create_array(tmp_path / "s.zarr", data=rows, chunks=(5, 3), shards=(25, 3))
    array = zarr.open_array(tmp_path / "x.zarr", mode="r")
    names = ["x.npy", "f.npy", "x.zarr", "g.zarr/x", "s.zarr"]
    for data in [rows, rows.tolist(), array, group["y"], *(tmp_path / n for n in names), str(tmp_path / "x.npy")]:
        source = open_source(data)
        assert source.shape == (50, 3)
        np.testing.assert_array_equal(source.read(slice(11, 29)), rows[11:29])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32, np.bool_])
def test_other_dtypes_are_widened(dtype, tmp_path):
    values = np.array([[0, 1], [1, 0]], dtype)
    np.save(tmp_path / "x.npy", values)
    zarr.create_array(tmp_path / "x.zarr", data=values)
    for name in ("x.npy", "x.zarr"):
        read = open_source(tmp_path / name).read(slice(0, 2))
        assert read.dtype == np.float64
        np.testing.assert_array_equal(read, values)


def test_the_row_that_is_not_finite_is_numbered_in_the_whole(rows, tmp_path):
    rows[33, 1] = np.nan
    np.save(tmp_path / "x.npy", rows)
    with pytest.raises(InvalidInputError, match=r"x\.npy must be finite, and row 33 contains NaN"):
        read_finite(open_source(tmp_path / "x.npy"), slice(30, 40))


def test_what_is_not_a_source_is_refused_in_one_sentence(tmp_path, rows):
    import dask.array as da

    np.save(tmp_path / "object.npy", np.array([[object()]]), allow_pickle=True)
    np.save(tmp_path / "flat.npy", np.ones(3))
    np.save(tmp_path / "empty.npy", np.ones((0, 3)))
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "x.csv").write_text("1,2")
    (tmp_path / "file.zarr").write_text("{}")
    zarr.create_array(tmp_path / "flat.zarr", data=np.ones(3))
    zarr.create_group(tmp_path / "none.zarr")
    zarr.open_array(tmp_path / "v2.zarr", shape=(2, 2), zarr_format=2, mode="w", dtype="f8")
    for data in [
        *(
            tmp_path / n
            for n in ("object.npy", "flat.npy", "empty.npy", "cut.npy", "x.csv", "file.zarr", "missing.npy")
        ),
        *(tmp_path / n for n in ("flat.zarr", "none.zarr", "v2.zarr", "none.zarr/x")),
        "nosuch://bucket/x.npy",
        da.ones((3, 3)),
        np.ones(3),
        np.array([["a"]]),
    ]:
        with pytest.raises(DkfmError) as caught:
            open_source(data)
        assert "\n" not in str(caught.value)
    with pytest.raises(DkfmError, match=r"file\.zarr is neither a \.npy, \.npz or \.parquet file"):
        open_source(tmp_path / "file.zarr")  # a store is a folder
    for name in ("folder", "folder.npy"):
        (tmp_path / name).mkdir()
        with pytest.raises(InvalidInputError, match=f"{name} is an empty folder"):
            open_source(tmp_path / name)
        (tmp_path / name / "x.csv").write_text("1,2\n")
        with pytest.raises(InvalidInputError, match="is neither a"):
            open_source(tmp_path / name)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), ()])
def test_a_file_without_rows_and_columns_is_refused_without_words_of_python(tmp_path, shape):
    np.save(tmp_path / "x.npy", np.ones(shape))
    with pytest.raises(
        InvalidInputError, match=r"x\.npy must have two dimensions .*; save one column as \(n, 1\)"
    ) as said:
        open_source(tmp_path / "x.npy")
    assert "reshape" not in str(said.value).lower()


def test_a_group_of_zarr_is_refused_as_its_path_is(tmp_path, rows):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    for name in ("rows", "others"):
        group.create_array(name, data=rows)
    for data in (group, tmp_path / "x.zarr"):
        with pytest.raises(InvalidInputError, match=r"x\.zarr is a group; name one of its arrays"):
            open_source(data)
    with pytest.raises(InvalidInputError, match="A group of Zarr holds several arrays"):
        open_source(zarr.group(zarr.storage.MemoryStore()))


def test_an_array_of_zarr_version_2_is_refused_and_converted_as_the_message_says(tmp_path, rows, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zarr.create_array("v2.zarr", data=rows, zarr_format=2)
    with pytest.raises(InvalidInputError, match=r"v2\.zarr is an array of Zarr version 2") as refused:
        open_source("v2.zarr")
    eval(str(refused.value).partition("Python, by ")[2].rstrip("."))
    np.testing.assert_array_equal(open_source("v3.zarr").read(slice(0, 50)), rows)


def test_a_frame_without_rows_is_refused_as_one(rows):
    frame = pd.DataFrame(rows[:0, :2], columns=["a", "b"])
    with pytest.raises(InvalidInputError, match=r"^source needs at least one row"):
        open_source(frame, "source")


def test_an_unknown_codec_of_a_source_is_refused_before_it_is_opened(tmp_path, rows):
    import json

    zarr.create_array(tmp_path / "x.zarr", data=rows)
    metadata = json.loads((tmp_path / "x.zarr" / "zarr.json").read_text())
    metadata["codecs"].append({"name": "numcodecs.pickle"})
    (tmp_path / "x.zarr" / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(DkfmError, match="codecs"):
        open_source(tmp_path / "x.zarr")
