"""What strangers send is data: refused by name, before it is read, in the memory and the time that a reader has.

Every store here is opened by `reader`, a process with one gigabyte to spare; what hangs or kills it fails.
"""

import json
import re
import shutil

import pytest

from helpers.untrusted import (
    OWN,
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
    text,
)


def shard_of(document):
    return document["codecs"][0]["configuration"]


def nested_shards(document, depth):
    inner = document["codecs"]
    for _ in range(depth):
        inner = [codec("sharding_indexed", chunk_shape=[20, 3], codecs=inner, index_codecs=[LITTLE])]
    document["codecs"] = inner


LITTLE = codec("bytes", endian="little")


SOURCE_METADATA = {
    "a pickle filter": lambda m: m["codecs"].insert(0, codec("numcodecs.pickle")),
    "a pickle of objects": lambda m: m.update(codecs=[codec("numcodecs.pickle", protocol=5)]),
    "vlen-bytes": lambda m: m.update(codecs=[codec("vlen-bytes")]),
    "vlen-utf8": lambda m: m.update(codecs=[codec("vlen-utf8"), codec("zstd")]),
    "an unknown codec": lambda m: m["codecs"].append({"name": "os.system", "must_understand": False}),
    "a codec that is a name": lambda m: m.update(codecs=["bytes", "zstd"]),
    "a codec of two": lambda m: m["codecs"].append({"name": ["zstd", "gzip"]}),
    "codecs of one text": lambda m: m["codecs"].append({"name": "crc32c zstd"}),
    "no codecs": lambda m: m.update(codecs=[]),
    "codecs that are none": lambda m: m.update(codecs={"name": "bytes"}),
    "no bytes": lambda m: m.update(codecs=[codec("zstd")]),
    "bytes twice": lambda m: m["codecs"].insert(0, LITTLE),
    "compressed twice": lambda m: m["codecs"].append(codec("gzip", level=1)),
    "ten thousand codecs": lambda m: m.update(codecs=[codec("transpose", order=[0, 1])] * 10_000 + m["codecs"]),
    "a transpose of nothing": lambda m: m["codecs"].insert(0, codec("transpose", order=[5, 9])),
    "a transpose of text": lambda m: m["codecs"].insert(0, codec("transpose", order="FF")),
    "bytes of no order": lambda m: m["codecs"].__setitem__(0, codec("bytes", endian="middle")),
    "objects": lambda m: m.update(data_type="object"),
    "objects by name": lambda m: m.update(data_type={"name": "object", "configuration": {}}),
    "text": lambda m: m.update(data_type="string"),
    "text of fixed length": lambda m: m.update(data_type=codec("fixed_length_utf32", length_bytes=2**40)),
    "raw bits": lambda m: m.update(data_type="r1000000000000"),
    "bytes of any length": lambda m: m.update(data_type="variable_length_bytes"),
    "structures": lambda m: m.update(data_type=codec("structured", fields=[["a", "float64"]])),
    "complex": lambda m: m.update(data_type="complex128"),
    "petabytes": lambda m: m.update(shape=[2**46, 3]),
    "petabytes in tiny chunks": lambda m: (m.update(shape=[2**36, 2**13]), chunked(m, 1, 1)),
    "a chunk of terabytes": lambda m: chunked(m, 2**38, 3),
    "a chunk a little too large": lambda m: (m.update(shape=[2**30, 1]), chunked(m, 2**30 + 1, 1)),
    "a row of terabytes": lambda m: (m.update(shape=[10, 2**40]), chunked(m, 1, 2**30)),
    "a row in a million chunks": lambda m: (m.update(shape=[10, 2**20]), chunked(m, 1, 1)),
    "negative": lambda m: m.update(shape=[-50, 3]),
    "true": lambda m: m.update(shape=[True, 3]),
    "a fraction": lambda m: m.update(shape=[50.0, 3]),
    "not a number": lambda m: m.update(shape=[float("nan"), 3]),
    "huge": lambda m: m.update(shape=[2**63, 3]),
    "huger": lambda m: m.update(shape=[10**300, 3]),
    "text for lengths": lambda m: m.update(shape=["50", "3"]),
    "no shape": lambda m: m.pop("shape"),
    "no axes": lambda m: (m.update(shape=[]), chunked(m)),
    "one axis": lambda m: (m.update(shape=[50]), chunked(m, 10)),
    "many axes": lambda m: (m.update(shape=[1] * 33), chunked(m, *[1] * 33)),
    "no rows": lambda m: m.update(shape=[0, 3]),
    "chunks of no rows": lambda m: chunked(m, 0, 3),
    "negative chunks": lambda m: chunked(m, -10, 3),
    "true chunks": lambda m: chunked(m, True, 3),
    "chunks of another rank": lambda m: chunked(m, 10, 3, 1),
    "a grid that is not regular": lambda m: m.update(chunk_grid=codec("rectangular", chunk_shape=[[10, 40], 3])),
    "a grid that is a list": lambda m: m.update(chunk_grid=[10, 3]),
    "keys that lead out": lambda m: m.update(chunk_key_encoding=codec("default", separator="/../")),
    "keys of a stranger": lambda m: m.update(chunk_key_encoding=codec("suffix", suffix="/../../x")),
    "keys that are none": lambda m: m.update(chunk_key_encoding=None),
    "transformers": lambda m: m.update(storage_transformers=[codec("x")]),
    "a field that must be understood": lambda m: m.update(pickled={"must_understand": True}),
    "a fill value that is an object": lambda m: m.update(fill_value={"__reduce__": ["os.system", "true"]}),
    "a fill value that is text": lambda m: m.update(fill_value="0xzz"),
    "no fill value": lambda m: m.pop("fill_value"),
    "names of axes that are none": lambda m: m.update(dimension_names=[1, {"a": 2}, "x"]),
    "version 2": lambda m: m.update(zarr_format=2),
    "version 3.0": lambda m: m.update(zarr_format=3.0),
    "version true": lambda m: m.update(zarr_format=True),
    "a node of another type": lambda m: m.update(node_type="script"),
    "a group": lambda m: m.update(node_type="group"),
}


SHARD_METADATA = {
    "a pickle": lambda m: shard_of(m)["codecs"].insert(0, codec("numcodecs.pickle")),
    "vlen-bytes": lambda m: shard_of(m).update(codecs=[codec("vlen-bytes")]),
    "an unknown codec of the index": lambda m: shard_of(m)["index_codecs"].append(codec("numcodecs.pickle")),
    "a compressed index": lambda m: shard_of(m)["index_codecs"].append(codec("gzip", level=1)),
    "an index of another order": lambda m: shard_of(m).update(index_codecs=[codec("bytes", endian="big")]),
    "no codecs": lambda m: shard_of(m).pop("codecs"),
    "an index in the middle": lambda m: shard_of(m).update(index_location="middle"),
    "an unknown setting": lambda m: shard_of(m).update(run="os.system"),
    "chunks of no rows": lambda m: shard_of(m).update(chunk_shape=[0, 3]),
    "chunks that do not fit": lambda m: shard_of(m).update(chunk_shape=[7, 3]),
    "chunks larger than the shard": lambda m: shard_of(m).update(chunk_shape=[2**40, 3]),
    "chunks of another rank": lambda m: shard_of(m).update(chunk_shape=[10]),
    "an index of gigabytes": lambda m: (
        m.update(shape=[2**28, 1]),
        chunked(m, 2**28, 1),
        shard_of(m).update(chunk_shape=[1, 1]),
    ),
    "shards in shards": lambda m: nested_shards(m, 2),
    "shards in shards without end": lambda m: nested_shards(m, 200),
    "compressed shards": lambda m: m["codecs"].append(codec("zstd", level=1, checksum=False)),
    "configured by a list": lambda m: m["codecs"][0].update(configuration=[]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(pytest.param("zstd", change, id=f"array, {what}") for what, change in SOURCE_METADATA.items()),
        *(pytest.param("shard", change, id=f"shards, {what}") for what, change in SHARD_METADATA.items()),
    ],
)
def test_metadata_of_a_source_are_refused_before_a_chunk_is_opened(reader, sound, name, change):
    store = sound(name)
    edit(store / "zarr.json", change)
    answer = reader.ask("source", store)
    require_refused(answer)
    assert answer["chunks"] == []
    assert name != "shard" or re.search(r"codecs are not ones|nested deeper", answer["message"])


def version_2(store):
    shutil.rmtree(store)
    store.mkdir()
    filters = [{"id": "pickle", "protocol": 5}]
    document = {"zarr_format": 2, "shape": [50, 3], "chunks": [10, 3], "dtype": "|O", "filters": filters, "order": "C"}
    (store / ".zarray").write_text(json.dumps({**document, "compressor": {"id": "zlib", "level": 1}, "fill_value": 0}))
    (store / "0.0").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


DOCUMENTS = {
    "is empty": text("zarr.json", b""),
    "is nested": text("zarr.json", b"[" * 900 + b"]" * 900),
    "is nested in a part": raw("zarr.json", lambda t: t.replace("{", '{"a": ' + "[" * 90 + "]" * 90 + ",", 1)),
    "is nested without end": text("zarr.json", b'{"a":' * 1_000_000),
    "is of 100 MB": long("zarr.json", 100_000_000),
    "is of many lists": text("zarr.json", b"[" + b"[]," * 500_000 + b"[]]"),
    "has a name twice": raw("zarr.json", lambda t: t.replace('"node_type"', '"node_type": "group", "node_type"')),
    "has a number of 5000 digits": raw("zarr.json", lambda t: t.replace("{", '{"a": ' + "5" * 5000 + ",", 1)),
    "is not UTF-8": text("zarr.json", b'{"zarr_format": "\xff"}'),
    "has a mark of byte order": raw("zarr.json", lambda t: "\ufeff" + t),
    "has half a character": text("zarr.json", b'{"zarr_format": 3, "node_type": "array", "data_type": "\\ud800"}'),
    "is a pipe": at("zarr.json", pipe),
    "is a folder": at("zarr.json", folder),
    "is a device": at("zarr.json", link, "/dev/zero"),
    "is a link out": at("zarr.json", moved_out),
    "is a link to itself": at("zarr.json", link, "zarr.json"),
    "is gone": lambda store: (store / "zarr.json").unlink(),
}


KINDS = [
    ("zstd", "source"),
    ("group", "source"),
    *OWN.items(),
    ("gram", "describe"),
    ("scores", "describe"),
    ("scores", "verify"),
]


@pytest.mark.alike
@pytest.mark.parametrize(
    ("name", "kind"), [KINDS[1], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in (KINDS[0], *KINDS[2:]))]
)
@pytest.mark.parametrize("change", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_store_whose_metadata_are_no_document_is_refused(reader, sound, name, kind, change):
    store = sound(name)
    change(store)
    answer = reader.ask(kind, store)
    require_refused(answer)
    assert answer["chunks"] == []


@pytest.mark.alike
@pytest.mark.parametrize(
    "name",
    ["model/landmarks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("x", "gram/gram", "scores/scores"))],
)
@pytest.mark.parametrize("change", DOCUMENTS.values(), ids=DOCUMENTS)
def test_an_array_whose_metadata_are_no_document_is_refused(reader, sound, name, change):
    within, _, array = name.rpartition("/")
    store = sound(within or "group")
    if within == "model":
        resealed(store, lambda root: change(root / array))
    else:
        change(store / array)
    require_refused(reader.ask(OWN.get(within, "source"), store))


CHUNK = "c/0/0"


FILES = {
    "version 2 of pickles": (version_2, "zstd"),
    "no store": (lambda store: (shutil.rmtree(store), store.mkdir()), "zstd"),
    "a file for a folder": (lambda store: (shutil.rmtree(store), store.write_text("{}")), "zstd"),
    "a chunk that is a link out": (at(CHUNK, moved_out), "zstd"),
    "a plain chunk that is a link out": (at(CHUNK, moved_out), "crc"),
    "chunks that are a link out": (at("c", moved_out), "zstd"),
    "plain chunks that are a link out": (at("c", moved_out), "plain"),
    "a folder of chunks that is a link out": (at("c/0", moved_out), "shard"),
    "an array that is a link out": (at("x", moved_out), "group"),
    "a chunk that leads to a device": (at(CHUNK, link, "/dev/zero"), "zstd"),
    "a plain chunk that leads to a device": (at(CHUNK, link, "/dev/zero"), "plain"),
    "a chunk that leads to nothing": (at(CHUNK, link, "annex"), "zstd"),
    "a plain chunk that leads to nothing": (at(CHUNK, link, "annex"), "crc"),
    "a chunk that leads to itself": (at(CHUNK, link, "0"), "zstd"),
    "a chunk that leads by ..": (at(CHUNK, link, "../../../../../../../../../../etc/passwd"), "zstd"),
    "a chunk that is a pipe": (at(CHUNK, pipe), "zstd"),
    "a plain chunk that is a pipe": (at(CHUNK, pipe), "crc"),
    "a shard that is a pipe": (at(CHUNK, pipe), "shard"),
    "a chunk that is a folder": (at(CHUNK, folder), "zstd"),
    "a plain chunk that is a folder": (at(CHUNK, folder), "plain"),
    "a chunk of gigabytes": (long(CHUNK, 2**33), "zstd"),
    "a plain chunk of gigabytes": (long(CHUNK, 2**33), "plain"),
    "a chunk with a checksum of gigabytes": (long(CHUNK, 2**33), "both"),
    "a shard of gigabytes": (long(CHUNK, 2**33), "shard"),
    "a shard shorter than its index": (long(CHUNK, 20), "shard"),
}


@pytest.mark.costly
@pytest.mark.parametrize(("change", "name"), FILES.values(), ids=FILES)
def test_a_source_whose_files_are_not_those_of_chunks_is_refused_before_one_is_opened(reader, sound, change, name):
    store = sound(name)
    change(store)
    answer = reader.ask("source", store)
    require_refused(answer)
    assert answer["chunks"] == []


def test_links_within_a_source_are_the_users_own(reader, sound):
    store = sound("zstd")
    truth = reader.ask("source", store)["value"]
    (store / "c/0/0").rename(store / "c/0/kept")
    (store / "c/0/0").symlink_to("kept")
    (store.parent / "by another name").symlink_to(store)
    for path in (store, store.parent / "by another name"):
        answer = reader.ask("source", path)
        assert answer["value"] == truth, answer


def test_links_that_lead_in_circles_do_not_hang_what_looks_for_changes(reader, sound):
    store = sound("zstd")
    for name in ("a", "b", "c/0/d"):
        (store / name).symlink_to(store)
    assert reader.ask("stamp", store)["error"] is None
