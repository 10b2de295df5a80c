"""Models and sources on an object store: a real S3 server process, and a proxy that makes it fail."""

import io
import json
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from s3 import BUCKET, SECRET, one_sentence, put

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.errors import (
    DamagedStoreError,
    DkfmError,
    IncompleteStoreError,
    InvalidInputError,
    StoreError,
    StoreExistsError,
    UnreachableError,
    UnsupportedStoreError,
)
from dkfm.execution import model_cache
from dkfm.files import fsspec_options
from dkfm.files.object_store import Remote, open_file
from dkfm.sources.opening import open_source
from dkfm.storage import json_documents, model_transfer, zarr_schema

pytest.importorskip("s3fs", reason="the README's environment of tests has no extra s3; .ci/run has")
pytest.importorskip("moto", reason="the README's environment of tests has no S3 server; .ci/run has")

pytestmark = pytest.mark.s3


@pytest.fixture
def rows(rng):
    return rng.normal(size=(60, 3))


@pytest.fixture
def fitted(rows):
    return dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rows)


@pytest.fixture
def model(place, fitted):
    fitted.save(f"{place.url}/model")
    return place.join("model")


def npy(values, **options):
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def contents(place):
    return {name: place.read(name) for name, _, _ in place.names()}


def test_an_object_is_read_measured_listed_and_removed_as_it_is_now(place):
    assert (place.size("a"), list(place.names()), place.folders()) == (None, [], [])
    place.replace("a", b"0123456789")
    place.replace("b/c/d", b"x")
    assert (place.size("a"), place.size("b"), place.size("b/c/d")) == (10, None, 1)
    parts = {(): b"0123456789", (3,): b"3456789", (3, 5): b"34", (8, 20): b"89", (5, 5): b""}
    assert {part: place.read("a", *part) for part in parts} == parts
    assert [(name, size) for name, size, _ in place.names()] == [("a", 10), ("b/c/d", 1)]
    assert place.folders() == ["b"]
    stamps = {name: stamp for name, _, stamp in place.names()}
    place.replace("a", b"9876543210")
    place.remove("b/c/d", "b/none")
    [(name, size, stamp)] = place.names()
    assert (name, size, stamp != stamps["a"]) == ("a", 10, True)
    assert place.folders() == []


def test_what_another_process_writes_is_seen_at_once(place):
    assert place.size("x") is None
    assert list(place.names()) == []
    code = f"from dkfm.files.object_store import Remote; Remote({place.url!r}).replace('x', b'abc')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert place.size("x") == 3
    assert [name for name, _, _ in place.names()] == ["x"]


def test_a_listing_is_read_page_by_page(place, tmp_path, proxy):
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(b"")
    place.upload(tmp_path, [f"{number}" for number in range(20)])
    proxy.seen.clear()
    listing = place.names()
    next(listing)
    assert len(proxy.seen) == 1
    assert len({name for name, _, _ in listing}) == 19
    assert len(proxy.seen) == 3


def test_of_racing_writers_exactly_one_creates_an_object(place, proxy):
    # The proxy lets one request at a time through: moto looks whether an object is there, and writes it, in two steps.
    for race in range(5):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda writer, race=race: place.create(f"{race}", b"%d" % writer), range(8)))
        assert sum(won) == 1
        assert place.read(f"{race}") == b"%d" % won.index(True)


def test_an_object_of_many_parts_is_created_once(place):
    data = bytes(101 * 2**20)
    assert place.create("large", data)
    assert place.size("large") == len(data)
    place.replace("small", b"x")
    assert not place.create("small", data)
    assert place.size("small") == 1


def test_a_file_system_that_cannot_create_exclusively_is_refused(tmp_path, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "protocol", "other")
    with pytest.raises(StoreError, match=r"known to let one writer win\.$"):
        Remote("memory://a").create("x", b"")


def test_a_writer_whose_answer_was_lost_reads_back_its_own(place, proxy):
    proxy.faults = [("PUT", "x", "lost")]
    assert not place.create("x", b"mine")
    assert place.read("x") == b"mine"


def test_a_model_comes_back_from_a_url_as_it_went(place, fitted, rows):
    for estimator in (fitted, dkfm.ExactFeatureMap(kernels.Gaussian(2.0), basis="cholesky").fit(rows)):
        url = f"{place.url}/{type(estimator).__name__}"
        estimator.save(url)
        loaded = dkfm.load(url)
        np.testing.assert_array_equal(loaded.transform(rows), estimator.transform(rows))


def test_a_model_at_a_url_is_described_and_verified(model, tmp_path):
    run = CliRunner().invoke
    facts = json.loads(run(main, ["info", "--json", model.url]).output)
    assert (facts["kind"], facts["path"], facts["landmarks"]) == ("model", model.url, 60)
    verified = run(main, ["verify", model.url])
    assert (verified.exit_code, model.url in verified.output) == (0, True)
    model.remove("landmarks/c/0/0")
    failed = run(main, ["verify", model.url])
    assert (failed.exit_code, "landmarks/c/0/0" in failed.output) == (1, True)


def test_a_fit_of_the_command_line_reads_and_writes_urls(place, rows):
    place.replace("train.npy", npy(rows))
    arguments = ["fit", f"{place.url}/train.npy", f"{place.url}/m", "--kernel", "gaussian", "--no-progress"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert dkfm.load(f"{place.url}/m").X_fit_.shape == (60, 3)
    refused = CliRunner().invoke(main, arguments)
    assert (refused.exit_code, "holds something already" in refused.output) == (1, True)


def test_what_is_there_is_left_untouched(model, place, fitted):
    place.replace("other/data.txt", b"mine")
    place.replace("object", b"mine")
    before = contents(place)
    for url in (model.url, f"{place.url}/other", f"{place.url}/object", f"{model.url}/inside", place.url):
        with pytest.raises(StoreExistsError) as caught:
            fitted.save(url)
        assert one_sentence(caught.value)
    for url in (f"{place.url}/other", f"{place.url}/object"):
        with pytest.raises(StoreExistsError, match="did not write"):
            fitted.save(url, overwrite=True)
    assert contents(place) == before


def test_an_object_that_dkfm_did_not_write_keeps_a_model_from_being_replaced(model, fitted):
    model.replace("landmarks/notes.txt", b"mine")
    before = contents(model)
    with pytest.raises(StoreExistsError, match=r"holds landmarks/notes\.txt, which dkfm did not write"):
        fitted.save(model.url, overwrite=True)
    assert contents(model) == before


def test_a_neighbour_whose_name_begins_alike_is_another_place(model, fitted):
    Remote(model.url + "2").replace("data.txt", b"mine")
    fitted.save(model.url, overwrite=True)
    dkfm.load(model.url)
    assert contents(Remote(model.url + "2")) == {"data.txt": b"mine"}


def test_a_replaced_model_has_no_marker_until_it_is_whole(model, rows, proxy):
    newer = dkfm.KernelPCA(1, kernel=kernels.Gaussian(1.0)).fit(rows[:20])
    proxy.seen.clear()
    newer.save(model.url, overwrite=True)
    changes = [(method, path.rpartition("/model/")[2]) for method, path in proxy.seen if method in ("PUT", "DELETE")]
    assert changes[0] == ("DELETE", zarr_schema.MARKER)
    assert changes[-1] == ("PUT", zarr_schema.MARKER)
    puts = [name for method, name in changes if method == "PUT"]
    removed = [name for method, name in changes if method == "DELETE"]
    assert (removed[-1], puts[0]) == ("zarr.json", "zarr.json")
    np.testing.assert_array_equal(dkfm.load(model.url).transform(rows), newer.transform(rows))
    assert set(contents(model)) == set(puts)


def test_an_upload_that_broke_off_is_no_model_and_is_replaced(place, fitted, proxy):
    proxy.faults = [("PUT", "/landmarks/c/", 500)] * 20
    with pytest.raises(UnreachableError) as caught:
        fitted.save(f"{place.url}/m")
    assert one_sentence(caught.value)
    proxy.faults = []
    with pytest.raises(IncompleteStoreError):
        dkfm.load(f"{place.url}/m")
    with pytest.raises(StoreExistsError, match="an unfinished dkfm model store"):
        fitted.save(f"{place.url}/m")
    fitted.save(f"{place.url}/m", overwrite=True)
    dkfm.load(f"{place.url}/m")


def test_of_two_who_save_at_once_one_is_told(place, rows, proxy):
    models = [dkfm.KernelPCA(2, kernel=kernels.Gaussian(s)).fit(rows) for s in (1.0, 2.0, 3.0, 4.0)]

    def save(model):
        try:
            model.save(f"{place.url}/m")
        except StoreExistsError:
            return None
        return model

    with ThreadPoolExecutor(4) as pool:
        [winner] = [model for model in pool.map(save, models) if model is not None]
    assert dkfm.load(f"{place.url}/m").kernel_ == winner.kernel_


def test_a_save_whose_answers_were_lost_is_a_save(place, fitted, proxy):
    proxy.faults = [("PUT", "/m/zarr.json", "lost"), ("PUT", zarr_schema.MARKER, "lost")]
    fitted.save(f"{place.url}/m")
    dkfm.load(f"{place.url}/m")


def flip(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def marker_with(model, **changes):
    return json.dumps({**json.loads(model.read(zarr_schema.MARKER)), **changes}).encode()


DAMAGE = {
    "a changed byte": (DamagedStoreError, lambda m: m.replace("landmarks/c/0/0", flip(m.read("landmarks/c/0/0")))),
    "a short object": (DamagedStoreError, lambda m: m.replace("landmarks/c/0/0", m.read("landmarks/c/0/0")[:-1])),
    "a lost object": (DamagedStoreError, lambda m: m.remove("landmarks/c/0/0")),
    "lost metadata": (UnsupportedStoreError, lambda m: m.remove("zarr.json")),
    "another object": (DamagedStoreError, lambda m: m.replace("landmarks/more", b"x")),
    "no marker": (IncompleteStoreError, lambda m: m.remove(zarr_schema.MARKER)),
    "a marker of something": (DamagedStoreError, lambda m: m.replace(zarr_schema.MARKER, b"[]")),
    "a marker without files": (DamagedStoreError, lambda m: m.replace(zarr_schema.MARKER, marker_with(m, files=None))),
    "a marker of more": (
        DamagedStoreError,
        lambda m: m.replace(zarr_schema.MARKER, marker_with(m, files={"../../x": "0"})),
    ),
    "metadata of another": (UnsupportedStoreError, lambda m: m.replace("zarr.json", b"{}")),
    "nothing": (StoreError, lambda m: m.remove(*contents(m))),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_model_at_a_url_is_refused_by_its_url(model, what):
    error, damage = DAMAGE[what]
    damage(model)
    with pytest.raises(error) as caught:
        dkfm.load(model.url)
    assert type(caught.value) is error
    assert str(caught.value).startswith((model.url, f"The marker {model.url}", f"The chunk c/0/0 of {model.url}"))
    assert one_sentence(caught.value)


def test_names_that_would_leave_the_folder_are_refused(model, tmp_path):
    outside = {"../x": 1, "a/../../x": 1, "/x": 1, "a//x": 1, "./x": 1}
    for name in outside:
        with pytest.raises(StoreError, match="no file of a folder"):
            model.download(tmp_path / "in", {name: 1})
    assert list(tmp_path.rglob("x")) == []


def test_metadata_that_are_too_large_are_not_read(model, monkeypatch):
    monkeypatch.setattr(json_documents, "MAX_JSON", 100)
    with pytest.raises(UnsupportedStoreError, match="metadata are below 100"):
        dkfm.load(model.url)


def test_a_model_larger_than_the_disk_is_not_downloaded(model, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(StoreError, match="room for 10"):
        dkfm.load(model.url)


def test_a_process_copies_a_model_once_whatever_its_threads_ask(model, rows, proxy, tmp_path):
    digest = json.loads(model.read(zarr_schema.MARKER))["digest"]
    proxy.seen.clear()
    with ThreadPoolExecutor(6) as pool:
        copies = set(pool.map(lambda _: model_transfer.local_copy(model.url, digest, tmp_path), range(6)))
    assert len(copies) == 1
    assert next(iter(copies)).is_relative_to(tmp_path)
    assert sum(path.endswith("/landmarks/c/0/0") for _, path in proxy.seen) == 1
    with pytest.raises(DamagedStoreError, match="another model"):
        model_transfer.local_copy(model.url, "0" * 64, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert model_transfer.local_copy(tmp_path, digest) == tmp_path


def test_a_forked_process_reads_after_its_parent_and_leaves_its_copy(model, place, rows, tmp_path):
    digest = json.loads(model.read(zarr_schema.MARKER))["digest"]
    zarr.create_array(tmp_path / "x.zarr", data=rows, chunks=(7, 3))
    put(place, tmp_path)
    place.replace("x.npy", npy(rows))
    copies = tmp_path / "copies"
    copies.mkdir()
    code = (
        "import os, pathlib; from dkfm.sources.opening import open_source\n"
        "from dkfm.storage.model_transfer import local_copy\n"
        f"copy = local_copy({model.url!r}, {digest!r}, pathlib.Path({str(copies)!r}))\n"
        f"sources = [open_source({place.url!r} + name) for name in ('/x.npy', '/x.zarr')]\n"
        "want = [source.read(slice(0, 60)).tolist() for source in sources]\n"
        "child = os.fork()\n"
        "assert [source.read(slice(0, 60)).tolist() for source in sources] == want\n"
        "if child == 0: raise SystemExit\n"
        "assert os.waitpid(child, 0)[1] == 0; assert (copy / 'zarr.json').exists()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert done.stderr == b""
    assert list(copies.iterdir()) == []


@pytest.mark.parametrize("streamed", [False, True])
def test_a_worker_opens_a_model_at_a_url(model, fitted, rows, streamed):
    digest = json.loads(model.read(zarr_schema.MARKER))["digest"]
    try:
        scorer = model_cache.get_saved_scorer(model.url, digest, streamed=streamed)
        np.testing.assert_allclose(scorer("scores", rows), fitted.transform(rows), atol=1e-12)
    finally:
        model_cache.remove_model(digest)


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
        assert (remote.shape, remote.chunk_rows, remote.row_values) == (local.shape, local.chunk_rows, local.row_values)
        assert remote.where(7) == (remote.name, 7)
        assert remote.name.startswith(place.url)
        for first, second in ((local, remote), (local.with_float32(), remote.with_float32())):
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
    place.remove("x.zarr/zarr.json", "x.npy")
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
        target = tmp_path / f"scores-{name}"
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


def operations(place):
    return {
        "GET": lambda: place.read("x"),
        "HEAD": lambda: place.size("x"),
        "PUT": lambda: place.replace("x", b"data"),
        "DELETE": lambda: place.remove("x"),
    }


PASSING = [*(("GET", fault) for fault in (500, 503, 1.7, "cut")), ("HEAD", 500), ("PUT", 503), ("PUT", 1.7)]


@pytest.mark.parametrize(("method", "fault"), PASSING)
def test_a_server_that_fails_for_a_while_is_asked_again(place, proxy, method, fault):
    place.replace("x", b"data")
    proxy.seen.clear()
    proxy.faults = [(method, "/x", fault)]
    found = operations(place)[method]()
    assert found in (b"data", 4, None)
    assert proxy.faults == []
    assert len(proxy.seen) == 2


def test_a_server_that_keeps_failing_is_unreachable(place, proxy):
    place.replace("x", b"data")
    for (method, operation), fault in zip(operations(place).items(), (500, 503, 503, 500), strict=True):
        proxy.faults = [(method, "/x", fault)] * 20
        start = time.monotonic()
        with pytest.raises(UnreachableError) as caught:
            operation()
        assert time.monotonic() - start < 15
        assert one_sentence(caught.value)
        assert f"{place.url}/x cannot be" in str(caught.value)
    proxy.faults = [("GET", "/bucket", 503)] * 20
    with pytest.raises(UnreachableError, match="cannot be listed"):
        list(place.names())


def test_a_silent_server_is_unreachable_in_bounded_time(place, proxy):
    place.replace("x", b"data")
    proxy.faults = [("GET", "/x", 2.0)] * 20
    start = time.monotonic()
    with pytest.raises(UnreachableError, match="cannot be read") as caught:
        place.read("x")
    assert time.monotonic() - start < 15
    assert one_sentence(caught.value)


def test_a_server_that_is_not_there_is_unreachable(place, monkeypatch):
    from fsspec.config import conf

    limits = {"retries": {"total_max_attempts": 2}}
    monkeypatch.setitem(conf, "s3", {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": limits})
    for act in (lambda: dkfm.load(place.url), lambda: open_source(f"{place.url}/x.npy")):
        with pytest.raises(UnreachableError) as caught:
            act()
        assert one_sentence(caught.value)


def test_rows_of_a_server_that_fails_are_unreachable_or_right(place, rows, tmp_path, proxy):
    zarr.create_array(tmp_path / "x.zarr", data=rows, chunks=(10, 3))
    put(place, tmp_path)
    source = open_source(f"{place.url}/x.zarr")
    proxy.faults = [("GET", "/c/1/0", 500), ("GET", "/c/2/0", "cut"), ("GET", "/c/3/0", 1.7)]
    np.testing.assert_array_equal(source.read(slice(0, 60)), rows)
    assert proxy.faults == []
    proxy.faults = [("GET", "/c/1/0", 503)] * 20
    with pytest.raises(UnreachableError) as caught:
        source.read(slice(0, 60))
    assert one_sentence(caught.value)


def test_limits_are_sane_without_being_told():
    files = Remote(f"{BUCKET}/x")
    with files.telling("read") as (system, _):
        config = system.config_kwargs
    assert (config["connect_timeout"], config["read_timeout"]) == (10, 60)
    assert config["retries"]["total_max_attempts"] * system.retries <= 10
    assert not system.dircache.use_listings_cache


def test_what_is_refused_for_good_is_no_unreachable_store(place, monkeypatch):
    for act in (
        lambda: Remote("s3://no-such-bucket/x").read(),
        lambda: Remote("s3://no-such-bucket/x").create("y", b""),
        lambda: place.read("none"),
        lambda: Remote("nosuch://x").read(),
        lambda: Remote("file:///x"),
        lambda: Remote("simplecache::s3://user:SeCrEt@bucket/x"),
    ):
        with pytest.raises(StoreError) as caught:
            act()
        assert type(caught.value) is StoreError
        assert one_sentence(caught.value)


def test_messages_hold_no_credentials(monkeypatch):
    monkeypatch.setattr(fsspec_options, "_PATIENCE", 0.0)
    for url in ("http://user:SeCrEt@127.0.0.1:9/x.npy", "ftp://user:SeCrEt@127.0.0.1:9/x.npy"):
        place = Remote(url)
        assert SECRET not in f"{place} {place!r} {place.name}"
        for act in (place.read, place.size, lambda place=place: open_source(place.url)):
            with pytest.raises(UnreachableError) as caught:
                act()
            assert one_sentence(caught.value)
    assert Remote(f"https://host/x?Signature={SECRET}").name == "https://host/x"


def test_without_the_extra_the_error_names_it(tmp_path):
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from dkfm.files.object_store import Remote; from dkfm.errors import MissingExtraError\n"
        "try: Remote('s3://bucket/x').read()\n"
        "except MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip().endswith("pip install 'dkfm[s3]'.")
    assert done.stdout.count("\n") == 1


def test_nothing_is_left_in_the_temporary_folder(model, rows, monkeypatch, tmp_path):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dkfm.load(model.url)
    model.remove("landmarks/c/0/0")
    with pytest.raises(DamagedStoreError):
        dkfm.load(model.url)
    assert list(Path(tmp_path).iterdir()) == []
