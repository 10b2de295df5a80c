"""Models and sources on an object store: a real S3 server process, and a proxy that makes it fail."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.errors import (
    DamagedStoreError,
    IncompleteStoreError,
    StoreError,
    StoreExistsError,
    UnreachableError,
    UnsupportedStoreError,
)
from dkfm.execution import model_cache
from dkfm.files.object_store import Remote
from dkfm.storage import json_reading, remote_stores, store_metadata
from helpers.s3_models import flip, npy
from helpers.s3_server import one_sentence, put


def contents(place):
    return {name: place.read(name) for name, _, _ in place.list_objects()}


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
    model.remove_objects("landmarks/c/0/0")
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
    assert changes[0] == ("DELETE", store_metadata.MARKER)
    assert changes[-1] == ("PUT", store_metadata.MARKER)
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
    proxy.faults = [("PUT", "/m/zarr.json", "lost"), ("PUT", store_metadata.MARKER, "lost")]
    fitted.save(f"{place.url}/m")
    dkfm.load(f"{place.url}/m")


def marker_with(model, **changes):
    return json.dumps({**json.loads(model.read(store_metadata.MARKER)), **changes}).encode()


DAMAGE = {
    "a changed byte": (DamagedStoreError, lambda m: m.replace("landmarks/c/0/0", flip(m.read("landmarks/c/0/0")))),
    "a short object": (DamagedStoreError, lambda m: m.replace("landmarks/c/0/0", m.read("landmarks/c/0/0")[:-1])),
    "a lost object": (DamagedStoreError, lambda m: m.remove_objects("landmarks/c/0/0")),
    "lost metadata": (UnsupportedStoreError, lambda m: m.remove_objects("zarr.json")),
    "another object": (DamagedStoreError, lambda m: m.replace("landmarks/more", b"x")),
    "no marker": (IncompleteStoreError, lambda m: m.remove_objects(store_metadata.MARKER)),
    "a marker of something": (DamagedStoreError, lambda m: m.replace(store_metadata.MARKER, b"[]")),
    "a marker without files": (
        DamagedStoreError,
        lambda m: m.replace(store_metadata.MARKER, marker_with(m, files=None)),
    ),
    "a marker of more": (
        DamagedStoreError,
        lambda m: m.replace(store_metadata.MARKER, marker_with(m, files={"../../x": "0"})),
    ),
    "metadata of another": (UnsupportedStoreError, lambda m: m.replace("zarr.json", b"{}")),
    "nothing": (StoreError, lambda m: m.remove_objects(*contents(m))),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_model_at_a_url_is_refused_by_its_url(model, what):
    error, damage = DAMAGE[what]
    damage(model)
    with pytest.raises(error) as caught:
        dkfm.load(model.url)
    assert type(caught.value) is error
    subjects = ("", "The marker ", "The chunk c/0/0 of ", "There is nothing at ")
    assert str(caught.value).startswith(tuple(f"{subject}{model.url}" for subject in subjects))
    assert one_sentence(caught.value)


def test_names_that_would_leave_the_folder_are_refused(model, tmp_path):
    outside = {"../x": 1, "a/../../x": 1, "/x": 1, "a//x": 1, "./x": 1}
    for name in outside:
        with pytest.raises(StoreError, match="no file of a folder"):
            model.download_objects(tmp_path / "in", {name: 1})
    assert list(tmp_path.rglob("x")) == []


def test_metadata_that_are_too_large_are_not_read(model, monkeypatch):
    monkeypatch.setattr(json_reading, "MAX_JSON", 100)
    with pytest.raises(UnsupportedStoreError, match="metadata are below 100"):
        dkfm.load(model.url)


def test_a_marker_at_a_url_may_be_as_large_as_a_local_one(model, fitted, rows):
    model.replace(store_metadata.MARKER, model.read(store_metadata.MARKER).ljust(json_reading.MAX_JSON + 1))
    np.testing.assert_array_equal(dkfm.load(model.url).transform(rows), fitted.transform(rows))


def test_a_model_larger_than_the_disk_is_not_downloaded(model, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(StoreError, match="room for 10"):
        dkfm.load(model.url)


def test_a_process_copies_a_model_once_whatever_its_threads_ask(model, rows, proxy, tmp_path):
    digest = json.loads(model.read(store_metadata.MARKER))["digest"]
    proxy.seen.clear()
    with ThreadPoolExecutor(6) as pool:
        copies = set(pool.map(lambda _: remote_stores.get_cached_model_folder(model.url, digest, tmp_path), range(6)))
    assert len(copies) == 1
    assert next(iter(copies)).is_relative_to(tmp_path)
    assert sum(path.endswith("/landmarks/c/0/0") for _, path in proxy.seen) == 1
    with pytest.raises(DamagedStoreError, match="another model"):
        remote_stores.get_cached_model_folder(model.url, "0" * 64, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert remote_stores.get_cached_model_folder(tmp_path, digest) == tmp_path


def test_a_forked_process_reads_after_its_parent_and_leaves_its_copy(model, place, rows, tmp_path):
    digest = json.loads(model.read(store_metadata.MARKER))["digest"]
    zarr.create_array(tmp_path / "x.zarr", data=rows, chunks=(7, 3))
    put(place, tmp_path)
    place.replace("x.npy", npy(rows))
    copies = tmp_path / "copies"
    copies.mkdir()
    code = (
        "import os, pathlib; from dkfm.sources.opening import open_source\n"
        "from dkfm.storage.remote_stores import get_cached_model_folder\n"
        f"copy = get_cached_model_folder({model.url!r}, {digest!r}, pathlib.Path({str(copies)!r}))\n"
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
def test_a_worker_opens_a_model_at_a_url_and_keeps_a_copy_only_to_stream_it(
    model, fitted, rows, streamed, tmp_path, monkeypatch
):
    monkeypatch.setattr(model_cache, "nanny_local_directory", lambda: tmp_path)
    digest = json.loads(model.read(store_metadata.MARKER))["digest"]
    try:
        scorer = model_cache.get_saved_scorer(model.url, digest, stream_weights=streamed)
        np.testing.assert_allclose(scorer("scores", rows), fitted.transform(rows), atol=1e-12)
        assert len(list(tmp_path.iterdir())) == streamed
    finally:
        model_cache.remove_model(digest)
