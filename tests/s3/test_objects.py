"""Models and sources on an object store: a real S3 server process, and a proxy that makes it fail."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from dkfm.errors import (
    StoreError,
)
from dkfm.files.object_store import Remote

pytest.importorskip("s3fs", reason="the README's environment of tests has no extra s3; .ci/run has")


pytest.importorskip("moto", reason="the README's environment of tests has no S3 server; .ci/run has")


def test_an_object_is_read_measured_listed_and_removed_as_it_is_now(place):
    assert (place.size("a"), list(place.list_objects()), place.list_folders()) == (None, [], [])
    place.replace("a", b"0123456789")
    place.replace("b/c/d", b"x")
    assert (place.size("a"), place.size("b"), place.size("b/c/d")) == (10, None, 1)
    parts = {(): b"0123456789", (3,): b"3456789", (3, 5): b"34", (8, 20): b"89", (5, 5): b""}
    assert {part: place.read("a", *part) for part in parts} == parts
    assert [(name, size) for name, size, _ in place.list_objects()] == [("a", 10), ("b/c/d", 1)]
    assert place.list_folders() == ["b"]
    stamps = {name: stamp for name, _, stamp in place.list_objects()}
    place.replace("a", b"9876543210")
    place.remove_objects("b/c/d", "b/none")
    [(name, size, stamp)] = place.list_objects()
    assert (name, size, stamp != stamps["a"]) == ("a", 10, True)
    assert place.list_folders() == []


def test_what_another_process_writes_is_seen_at_once(place):
    assert place.size("x") is None
    assert list(place.list_objects()) == []
    code = f"from dkfm.files.object_store import Remote; Remote({place.url!r}).replace('x', b'abc')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert place.size("x") == 3
    assert [name for name, _, _ in place.list_objects()] == ["x"]


def test_a_listing_is_read_page_by_page(place, tmp_path, proxy):
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(b"")
    place.upload_files(tmp_path, [f"{number}" for number in range(20)])
    proxy.seen.clear()
    listing = place.list_objects()
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
