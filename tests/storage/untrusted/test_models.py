"""What strangers send is data: refused by name, before it is read, in the memory and the time that a reader has.

Every store here is opened by `reader`, a process with one gigabyte to spare; what hangs or kills it fails.
"""

import json
import os
import re
import shutil
from functools import partial

import pytest

from dkfm.storage import store_metadata
from helpers.reader import SPARE
from helpers.untrusted import (
    array,
    at,
    chunked,
    codec,
    edit,
    folder,
    link,
    long,
    moved_out,
    pipe,
    raw,
    require_refused,
    resealed,
    sealed,
    text,
)


def attributes(change):
    return lambda store: edit(store / "zarr.json", lambda m: change(m["attributes"]["dkfm"]))


def nested(kernel, depth):
    for _ in range(depth):
        kernel = {"name": "power", "kernel": kernel, "exponent": 1}
    return kernel


def gigabyte(store):
    """Make landmarks of more than the reader has, as their file has them: a hole."""
    rows = SPARE // 24
    edit(store / "landmarks/zarr.json", lambda m: (m.update(shape=[rows, 3]), chunked(m, rows, 3)))
    os.truncate(store / "landmarks/c/0/0", rows * 24 + 4)


def longer(store):
    """Make the one chunk of the landmarks longer than they are, and sound."""
    array("landmarks", lambda m: chunked(m, 60, 3))(store)
    file = store / "landmarks/c/0/0"
    file.write_bytes(sealed(file.read_bytes()[:-4] + bytes(240)))


GAUSSIAN = {"name": "gaussian", "sigma": 2.0}


NAMES = [
    "../model",
    "/etc",
    "a/../landmarks",
    "landmarks/",
    "./landmarks",
    "..",
    "",
    "a\0b",
    "\ud800",
    "x" * 5000,
    7,
    ["x"],
]


WHOLE = {
    "petabytes": array("landmarks", lambda m: m.update(shape=[2**46, 3])),
    "chunks of petabytes": array("landmarks", lambda m: (m.update(shape=[2**46, 3]), chunked(m, 2**46, 3))),
    "more chunk than array": array("landmarks", lambda m: chunked(m, 2**40, 3)),
    "a chunk a little longer than the array": longer,
    "no chunks": array("landmarks", lambda m: m.update(shape=[0, 3])),
    "zstd": array("landmarks", lambda m: m["codecs"].append(codec("zstd", level=1))),
    "a shard": array("landmarks", lambda m: m.update(codecs=[codec("sharding_indexed", chunk_shape=[50, 3])])),
    "keys of another kind": array("landmarks", lambda m: m["chunk_key_encoding"].update(name="v2")),
    "an unknown part": array("landmarks", lambda m: m.update(x={"must_understand": False})),
    "a setting of the grid": array("landmarks", lambda m: m["chunk_grid"]["configuration"].update(x=1)),
    "names of axes": array("landmarks", lambda m: m.update(dimension_names=["a", 7])),
    "a link for an array": at("landmarks", moved_out),
    "a link for a chunk": at("landmarks/c/0/0", moved_out),
    "a pipe for a chunk": at("landmarks/c/0/0", pipe),
    "a device for a chunk": at("landmarks/c/0/0", link, "/dev/zero"),
    "a folder for a chunk": at("landmarks/c/0/0", folder),
    "a kernel nested deep": attributes(lambda a: a.update(kernel=nested(GAUSSIAN, 40))),
    "a kernel nested as deep as JSON goes": attributes(lambda a: a.update(kernel=nested(GAUSSIAN, 58))),
    "a kernel of lists": attributes(lambda a: a.update(kernel={"name": "sum", "terms": [[[[GAUSSIAN]]]]})),
    "a kernel that is a class": attributes(lambda a: a.update(kernel={"name": "os.system", "command": "true"})),
    "a kernel with two names": attributes(lambda a: a.update(kernel={"name": ["gaussian", "linear"], "sigma": 1.0})),
    "a kernel with a hidden parameter": attributes(lambda a: a["kernel"].update(__class__="x")),
    "a kernel that is code": attributes(
        lambda a: a.update(
            kernel={"name": "function", "function": {"function": "os:system", "source": "0" * 64}},
        )
    ),
    "a version that is true": attributes(lambda a: a.update(version=True)),
    "a kind that is a list": attributes(lambda a: a.update(kind=["model"])),
    **{
        f"weights at {name!r:.12}": attributes(partial(lambda n, a: a["heads"]["scores"].update(weights=n), name))
        for name in NAMES
    },
    **{f"more at {name!r:.12}": attributes(partial(lambda n, a: a.update(extra=[n]), name)) for name in NAMES},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "describe"])
@pytest.mark.parametrize("change", WHOLE.values(), ids=WHOLE)
def test_a_model_that_is_whole_and_is_not_dkfms_is_refused(reader, sound, kind, change, request):
    store = sound("model")
    resealed(store, change)
    answer = reader.ask(kind, store)
    if kind == "describe" and "that is code" in request.node.name:
        assert "os:system" in answer["value"]
    else:
        require_refused(answer)


@pytest.mark.slow
def test_a_model_larger_than_memory_is_refused_with_its_size(reader, sound):
    store = sound("model")
    resealed(store, gigabyte)
    answer = reader.ask("model", store)
    require_refused(answer)
    assert answer["error"] == "BudgetError"
    assert re.search(r"has 10\d{8} bytes", answer["message"])


SUMS = {
    "another digest": raw("_COMPLETE", lambda t: json.dumps({**json.loads(t), "digest": "0" * 64})),
    "sums that are objects": raw("_COMPLETE", lambda t: json.dumps({**json.loads(t), "files": {"zarr.json": {}}})),
    "a file outside": raw("_COMPLETE", lambda t: json.dumps({**json.loads(t), "files": {"../x": "0" * 64}})),
}


MARKERS = {
    "a list": text("_COMPLETE", b"[]"),
    "nothing": text("_COMPLETE", b""),
    "nested": text("_COMPLETE", b'{"files": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "100 MB": long("_COMPLETE", 100_000_000),
    "a pipe": at("_COMPLETE", pipe),
    "a folder": at("_COMPLETE", folder),
    "a link": at("_COMPLETE", moved_out),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        *(pytest.param("model", "model", change, id=f"model, {what}") for what, change in (SUMS | MARKERS).items()),
        *(pytest.param("scores", "scores", change, id=f"scores, {what}") for what, change in MARKERS.items()),
        *(pytest.param("scores", "verify", change, id=f"verify, {what}") for what, change in MARKERS.items()),
    ],
)
def test_a_marker_that_is_not_the_stores_is_refused_before_a_chunk_is_opened(reader, sound, name, kind, change):
    store = sound(name)
    change(store)
    answer = reader.ask(kind, store)
    require_refused(answer)
    assert answer["chunks"] == []


UNMARKED = {
    "petabytes": lambda name: array(name, lambda m: m.update(shape=[2**46, 2**20])),
    "chunks of petabytes": lambda name: array(name, lambda m: (m.update(shape=[2**46] * 2), chunked(m, 2**46, 2**46))),
    "other rows": lambda name: array(name, lambda m: m.update(shape=[70, 70])),
    "other chunks": lambda name: array(name, lambda m: chunked(m, 25, 25)),
    "another type": lambda name: array(name, lambda m: m.update(data_type="float32")),
    "a pickle": lambda name: array(name, lambda m: m["codecs"].insert(0, codec("numcodecs.pickle"))),
    "a link for the array": lambda name: at(name, moved_out),
    "a link for the chunks": lambda name: at(f"{name}/c", moved_out),
    "a link for a chunk": lambda name: at(f"{name}/c/1/0", moved_out),
    "a pipe for a chunk": lambda name: at(f"{name}/c/1/0", pipe),
    "a folder for a chunk": lambda name: at(f"{name}/c/1/0", folder),
    "a chunk cut short": lambda name: long(f"{name}/c/1/0", 20),
    "a chunk of gigabytes": lambda name: long(f"{name}/c/1/0", 2**33),
    "a chunk too many": lambda name: lambda store: shutil.copytree(store / name / "c/1", store / name / "c/9"),
}


@pytest.mark.alike
@pytest.mark.parametrize("name", ["scores", pytest.param("gram", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", UNMARKED.values(), ids=UNMARKED)
def test_a_gram_or_scores_whose_files_are_not_what_was_written_are_refused(reader, sound, name, change):
    store = sound(name)
    change(name)(store)
    answer = reader.ask(name, store)
    require_refused(answer)
    assert answer["chunks"] == []


def test_a_gram_of_fewer_rows_than_it_says_is_refused(reader, sound):
    store = sound("gram")
    array("gram", lambda m: m.update(shape=[45, 45]))(store)
    answer = reader.ask("gram", store)
    require_refused(answer)
    assert "is of 50 rows" in answer["message"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name!r:.12}")
def test_scores_by_a_name_that_leads_elsewhere_are_refused(reader, sound, name):
    store = sound("scores")
    attributes(lambda a: a["outputs"][0].__setitem__(0, name))(store)
    for kind in ("scores", "verify"):
        require_refused(reader.ask(kind, store))


def test_a_strangers_unfinished_gram_is_not_written_through_its_links(reader, sound):
    store = sound("gram")
    (store / store_metadata.MARKER).unlink()
    moved_out(store / "gram/c/1")
    outside = store.parent / "outside"
    (outside / "0").unlink()
    require_refused(reader.ask("gram", store))
    assert sorted(p.name for p in outside.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("file", ["zarr.json", "landmarks/zarr.json", "landmarks/c/0/0", "_COMPLETE", "landmarks/c"])
def test_what_may_not_be_read_is_told(reader, sound, file):
    """To root nothing is forbidden, and the model is read."""
    store = sound("model")
    (store / file).chmod(0)
    answer = reader.ask("model", store)
    (store / file).chmod(0o700)
    assert answer["named"] != (os.geteuid() == 0), answer
