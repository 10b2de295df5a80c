"""Models and sources on an object store: a real S3 server process, and a proxy that makes it fail."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

import dkfm
from dkfm.errors import (
    DamagedStoreError,
    StoreError,
    UnreachableError,
)
from dkfm.files import fsspec_access
from dkfm.files.object_store import Remote
from dkfm.sources.opening import open_source
from helpers.s3_server import BUCKET, SECRET, one_sentence, put


def operations(place):
    return {
        "GET": lambda: place.read("x"),
        "HEAD": lambda: place.size("x"),
        "PUT": lambda: place.replace("x", b"data"),
        "DELETE": lambda: place.remove_objects("x"),
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
        list(place.list_objects())


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
    with files.open_filesystem("read") as (system, _):
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
    monkeypatch.setattr(fsspec_access, "_RETRY_SECONDS", 0.0)
    for url in ("http://user:SeCrEt@127.0.0.1:9/x.npy", "ftp://user:SeCrEt@127.0.0.1:9/x.npy"):
        place = Remote(url)
        assert SECRET not in f"{place} {place!r} {place.redacted_url}"
        for act in (place.read, place.size, lambda place=place: open_source(place.url)):
            with pytest.raises(UnreachableError) as caught:
                act()
            assert one_sentence(caught.value)
    assert Remote(f"https://host/x?Signature={SECRET}").redacted_url == "https://host/x"


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
    model.remove_objects("landmarks/c/0/0")
    with pytest.raises(DamagedStoreError):
        dkfm.load(model.url)
    assert list(Path(tmp_path).iterdir()) == []
