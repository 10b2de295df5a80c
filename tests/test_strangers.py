"""What strangers send is data: refused by name, before it is read, in the memory and the time that a reader has.

Every store here is opened by `reader`, a process with one gigabyte to spare; what hangs or kills it fails.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import struct
from functools import partial

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Blosc, Zstd
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import dkfm
from dkfm import kernels
from dkfm.storage import zarr_schema
from reader import SPARE, Reader

SOURCES = {
    "plain": {"compressors": None},
    "crc": {"compressors": [Crc32cCodec()]},
    "zstd": {"compressors": [ZstdCodec()]},
    "gzip": {"compressors": [GzipCodec()]},
    "blosc": {"compressors": [BloscCodec()]},
    "both": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "inside": {"compressors": [Crc32cCodec(), ZstdCodec()]},
    "shard": {"compressors": [ZstdCodec()], "shards": (20, 3)},
}
OWN = {"model": "model", "sparse": "model", "gram": "gram", "scores": "scores"}
"""A store of each kind of dkfm's own, and what reads it."""


def make(root):
    """One sound store of every kind."""
    rows = np.random.default_rng(7).normal(size=(50, 3))
    for name, options in SOURCES.items():
        made = {"filters": None, "fill_value": 0.0, "shape": (50, 3), "dtype": "float64", "chunks": (10, 3), **options}
        zarr.create_array(root / name, **made)[...] = rows
    group = zarr.create_group(root / "group")
    group.create_array("x", data=rows, chunks=(10, 3), compressors=[ZstdCodec()])
    np.save(root / "x.npy", rows)
    fitted = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rows)
    fitted.save(root / "model")
    from scipy.sparse import csr_array

    dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(csr_array(rows)).save(root / "sparse")
    dkfm.build_gram(kernels.Gaussian(2.0), rows, root / "gram", tile_rows=20)
    dkfm.batch_score(root / "model", rows, root / "scores", chunk_rows=10, progress=False)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    root = tmp_path_factory.mktemp("real")
    make(root)
    return root


@pytest.fixture(scope="module")
def reader(real):
    warm = [("source", real / name) for name in (*SOURCES, "group", "x.npy")]
    warm += [(kind, real / name) for name, kind in OWN.items()]
    warm += [
        (kind, real / name) for name in OWN for kind in ("describe", "verify") if (kind, name) != ("verify", "gram")
    ]
    made = Reader(warm)
    yield made
    made.close()


@pytest.fixture
def sound(real, tmp_path):
    """Copy one of the sound stores, to be damaged."""

    def copied(name):
        to = tmp_path / ("x.npy" if name == "x.npy" else "store")
        (shutil.copytree if (real / name).is_dir() else shutil.copy)(real / name, to)
        return to

    return copied


def edit(file, change):
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def sha256_of(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resealed(root, change):
    """Change the files of a model, and make its marker agree, as a stranger can."""
    from dkfm.storage.model_store import _manifest_digest

    change(root)
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    sums = {name: sha256_of(root / name) for name in names if name != zarr_schema.MARKER}
    (root / zarr_schema.MARKER).write_text(json.dumps({"files": sums, "digest": _manifest_digest(sums)}))


def require_refused(answer):
    assert answer["named"], answer
    assert answer["error"] is not None
    assert "\n" not in answer["message"]
    assert "Traceback" not in answer["message"]
    assert not re.search("MemoryError|allocate", answer["message"])
    assert len(answer["message"]) < 10_000
    assert answer["unpickled"] == []


def codec(name, **configuration):
    return {"name": name, "configuration": configuration}


def shard_of(document):
    return document["codecs"][0]["configuration"]


def chunked(document, *lengths):
    document["chunk_grid"]["configuration"]["chunk_shape"] = list(lengths)


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


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(pytest.param("zstd", change, id=f"array, {what}") for what, change in SOURCE_METADATA.items()),
        *(
            pytest.param("shard", change, id=f"shards, {what}", marks=pytest.mark.slow)
            for what, change in SHARD_METADATA.items()
        ),
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


def link(path, to):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(to)


def moved_out(path):
    outside = path.parents[len(path.parts) - 1 - path.parts.index("store")] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def at(name, change, *more):
    """Return what does something to one file of a store."""
    return lambda store: change(store / name, *more)


def text(name, content):
    return lambda store: (store / name).write_bytes(content)


def long(name, size):
    """Return what makes a file long, by holes."""
    return lambda store: os.truncate(store / name, size)


def raw(name, change):
    return lambda store: (store / name).write_text(change((store / name).read_text()))


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


@pytest.mark.parametrize(
    ("name", "kind"), [*KINDS[1:3], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in (KINDS[0], *KINDS[3:]))]
)
@pytest.mark.parametrize("change", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_store_whose_metadata_are_no_document_is_refused(reader, sound, name, kind, change):
    store = sound(name)
    change(store)
    answer = reader.ask(kind, store)
    require_refused(answer)
    assert answer["chunks"] == []


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


def zstd_of(size, stated=None):
    """Return a frame of zeros of some size in runs of 128 kB, 4 bytes each, that states this size, another, or none."""
    head = bytes([0x00, 0x58]) if stated is None else bytes([0xC0, 0x58]) + struct.pack("<Q", stated)
    runs, rest = divmod(size, 2**17)
    blocks = [(2**17 << 3 | 2).to_bytes(3, "little") + b"\0"] * runs
    return b"\x28\xb5\x2f\xfd" + head + b"".join(blocks) + (rest << 3 | 3).to_bytes(3, "little") + b"\0"


def blosc_of(stated):
    data = bytearray(Blosc().encode(bytes(2**20)))
    data[4:8] = struct.pack("<I", stated)
    return bytes(data)


def sealed(data):
    return data + google_crc32c.value(data).to_bytes(4, "little")


VALUES = 2**17
"""Of the one chunk of an array that a bomb is put in: files of its 1 MB are not refused for their size."""

BOMBS = {
    "zstd of terabytes, as it states": ("zstd", zstd_of(2**20, 2**42)),
    "zstd of gigabytes, as it states": ("zstd", zstd_of(2**33, 2**33)),
    "zstd of gigabytes, unstated": ("zstd", zstd_of(2**35)),
    "zstd of gigabytes, stated as a chunk": ("zstd", zstd_of(2**33, 8 * VALUES)),
    "zstd of less than it states": ("zstd", zstd_of(2**10, 8 * VALUES)),
    "zstd of less, as it states": ("zstd", zstd_of(2**10, 2**10)),
    "zstd of less, unstated": ("zstd", zstd_of(2**10)),
    "zstd of a chunk, and another frame": ("zstd", zstd_of(8 * VALUES, 8 * VALUES) + zstd_of(2**10, 2**42)),
    "zstd of a chunk, and gigabytes": ("zstd", Zstd().encode(bytes(8 * VALUES)) + zstd_of(2**34)),
    "zstd with a sound checksum": ("both", sealed(zstd_of(2**35))),
    "zstd over a checksum": ("inside", zstd_of(2**35)),
    "zstd of nothing": ("zstd", b""),
    "zstd of half a head": ("zstd", b"\x28\xb5\x2f\xfd\xc0"),
    "gzip of gigabytes": ("gzip", gzip.compress(bytes(2**24)) * 120),
    "gzip cut short": ("gzip", gzip.compress(bytes(8 * VALUES))[:500]),
    "gzip of less": ("gzip", gzip.compress(bytes(2**10))),
    "gzip of nothing": ("gzip", b""),
    "blosc of gigabytes, as it states": ("blosc", blosc_of(2**31 - 64)),
    "blosc of less, as it states": ("blosc", blosc_of(2**10)),
    "blosc of half a head": ("blosc", b"\x02\x01\x21\x08" + struct.pack("<I", 8 * VALUES)),
    "blosc of noise": ("blosc", b"\x02\x01\x21\x08" + struct.pack("<III", 8 * VALUES, 2**30, 500) + bytes(484)),
}


def array_of(path, name, data):
    zarr.create_array(path, shape=(VALUES, 1), dtype="float64", chunks=(VALUES, 1), filters=None, **SOURCES[name])
    (path / "c/0").mkdir(parents=True)
    (path / "c/0/0").write_bytes(data)


@pytest.mark.parametrize(("name", "data"), BOMBS.values(), ids=BOMBS)
def test_a_chunk_that_decodes_to_another_size_than_its_own_takes_no_memory_and_is_refused(reader, tmp_path, name, data):
    array_of(tmp_path / "x", name, data)
    require_refused(reader.ask("source", tmp_path / "x"))


@pytest.mark.parametrize("data", [zstd_of(8 * VALUES), zstd_of(8 * VALUES, 8 * VALUES)], ids=["unstated", "stated"])
def test_what_other_writers_compress_is_read(reader, tmp_path, data):
    array_of(tmp_path / "x", "zstd", data)
    assert reader.ask("source", tmp_path / "x")["value"] == "float64(1,)" + "00" * 80


def forged_index(*entries, grown=0):
    """Return what puts other places into the index of the first shard, with a sound checksum."""

    def change(store):
        file = store / "c/0/0"
        data = bytearray(file.read_bytes())
        index = struct.pack("<4Q", *entries)
        data[-36:] = bytes(grown) + sealed(index)
        file.write_bytes(bytes(data))

    return change


INDICES = {
    "beyond the end": forged_index(10**6, 200, 10**6, 200),
    "of exabytes": forged_index(0, 2**63, 0, 2**63),
    "that wrap around": forged_index(2**64 - 8, 16, 2**64 - 8, 16),
    "of more than a chunk": forged_index(0, 900, 0, 900, grown=800),
    "of half nothing": forged_index(0, 2**64 - 1, 0, 2**64 - 1),
    "of no bytes": forged_index(0, 0, 0, 0),
}


@pytest.mark.parametrize("change", INDICES.values(), ids=INDICES)
def test_an_index_of_a_shard_that_lies_is_refused(reader, sound, change):
    store = sound("shard")
    change(store)
    require_refused(reader.ask("source", store))


def header(text, version=1):
    data = text.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(data)) + data


def npy(shape, descr="'<f8'", order=False):
    return header(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n") + bytes(80)


NPY = {
    "petabytes": npy("(2**50, 3)".replace("2**50", str(2**50))),
    "exabytes that wrap around": npy(f"({2**61}, 8)"),
    "more digits than a number has": npy(f"({'9' * 400}, 1)"),
    "negative": npy("(-2, -5)"),
    "true": npy("(True, 3)"),
    "a fraction": npy("(2.0, 5)"),
    "objects": npy("(2, 5)", "'|O'"),
    "structures": npy("(2, 5)", "[('a', '|O'), ('b', '<f8')]"),
    "rows of nothing": npy("(10, 0)"),
    "text": npy("(2, 5)", "'<U2'"),
    "items of nothing": npy("(2, 5)", "'|V0'"),
    "an order that is none": npy("(2, 5)", order="'x'"),
    "nested": header("(" * 5000 + ")" * 5000),
    "long": header("{" + " " * 70_000 + "}", 2),
    "of gigabytes": b"\x93NUMPY\x03\x00\xff\xff\xff\xff{}",
    "code": header("__import__('os').system('true')"),
    "a pickle": b"\x80\x05cos\nsystem\n.",
    "half a head": b"\x93NUMPY\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("data", NPY.values(), ids=NPY)
def test_a_npy_file_that_holds_no_rows_is_refused(reader, tmp_path, data):
    (tmp_path / "x.npy").write_bytes(data)
    require_refused(reader.ask("source", tmp_path / "x.npy"))


def test_a_pipe_by_the_name_of_a_file_is_refused(reader, tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    require_refused(reader.ask("source", tmp_path / "x.npy"))


def attributes(change):
    return lambda store: edit(store / "zarr.json", lambda m: change(m["attributes"]["dkfm"]))


def array(name, change):
    return lambda store: edit(store / name / "zarr.json", change)


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


@pytest.mark.parametrize("name", ["gram", "scores"])
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
    (store / zarr_schema.MARKER).unlink()
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


def places(value, trail=()):
    """Return the trail of every value within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [trail, *(deeper for key, child in inner for deeper in places(child, (*trail, key)))]


def put(value, trail, new):
    """Return a JSON value with another at a trail; nothing at all for `GONE`."""
    if not trail:
        return {} if new is GONE else new
    parent = value
    for key in trail[:-1]:
        parent = parent[key]
    if new is GONE:
        del parent[trail[-1]]
    else:
        parent[trail[-1]] = new
    return value


GONE = object()
NUMBERS = [0, 1, -1, 2, 3, 7, 49, 51, 10**6, 2**31, 2**48 - 1, 2**53, 2**63, 2**64, 10**30, -(2**63), 0.5, 50.0, 1e308]
WORDS = ["", "..", "/", "../model", "float64", "float32", "int64", "bytes", "zstd", "gzip", "sharding_indexed", "NaN"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.sampled_from(NUMBERS)
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=5)
    | st.just(GONE)
)
VALUES_OF_JSON = LEAVES | st.lists(LEAVES.filter(lambda v: v is not GONE), max_size=3)
VALUES_OF_JSON |= st.dictionaries(st.sampled_from([*WORDS, "name", "x"]), st.sampled_from(NUMBERS), max_size=2)
WRITTEN = [
    *(("source", name, "zarr.json") for name in ("zstd", "crc", "shard", "group")),
    ("source", "group", "x/zarr.json"),
    *(("model", "model", file) for file in ("zarr.json", "landmarks/zarr.json", "head.0/zarr.json", "_COMPLETE")),
    *(("model", "sparse", file) for file in ("zarr.json", "landmarks.indptr/zarr.json")),
    *(("gram", "gram", file) for file in ("zarr.json", "gram/zarr.json", "rows/zarr.json", "_COMPLETE")),
    *(("scores", "scores", file) for file in ("zarr.json", "scores/zarr.json", "_COMPLETE")),
    *(("verify", "scores", file) for file in ("zarr.json", "scores/zarr.json", "_COMPLETE")),
    *(("describe", name, "zarr.json") for name in ("model", "gram", "scores")),
]


def require_refused_or(answer, same):
    if answer["error"] is not None:
        require_refused(answer)
    else:
        assert same(answer["value"]), answer


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "file"), WRITTEN, ids=lambda part: part)
@settings(max_examples=15)
@given(data=st.data())
def test_any_value_in_any_place_of_its_json_gives_a_refusal_or_rows(
    reader, real, tmp_path_factory, kind, name, file, data
):
    """A model is sealed again, as a stranger can. What a model, a source and a description say is then theirs to say.

    A Gram is the same; so are scores, but for rows at the end: their marker does not say how many there are.
    """
    store = tmp_path_factory.mktemp("json") / "store"
    shutil.copytree(real / name, store)
    truth = reader.ask(kind, store)["value"]
    document = json.loads((store / file).read_text())
    trail = data.draw(st.sampled_from(places(document)))
    text = json.dumps(put(document, trail, data.draw(VALUES_OF_JSON)))
    if name in ("model", "sparse") and file != zarr_schema.MARKER:
        resealed(store, lambda root: (root / file).write_text(text))
    else:
        (store / file).write_text(text)
    answer = reader.ask(kind, store)
    same = {"gram": truth.__eq__, "scores": truth.__eq__}.get(kind, lambda _: True)
    require_refused_or(answer, same)
    shutil.rmtree(store)


def damage(file, other, how, place, outside):
    """Do something to a file that a disk, a network or a person may do."""
    content = file.read_bytes()
    if how == "delete":
        file.unlink()
    elif how == "cut":
        os.truncate(file, place % max(1, len(content)))
    elif how == "extend":
        file.write_bytes(content + bytes(place % 40 + 1))
    elif how == "flip":
        at = place % (8 * len(content))
        file.write_bytes(content[: at // 8] + bytes([content[at // 8] ^ 1 << at % 8]) + content[at // 8 + 1 :])
    elif how == "exchange":
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif how == "link":
        file.rename(outside)
        file.symlink_to(outside)
    else:
        {"pipe": pipe, "folder": folder}[how](file)


DAMAGE = ["delete", "cut", "extend", "flip", "exchange", "link", "pipe", "folder"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN, "crc", "zstd", "shard", "plain"])
@settings(max_examples=30)
@given(data=st.data())
def test_any_damage_to_any_file_is_told_or_does_not_matter(reader, real, tmp_path_factory, name, data):
    """A model and scores are told or the same to the last bit, and no link in them is followed.

    Of a Gram two sound tiles that were exchanged are not told: a tile has its own checksum, and no receipt. Of a source
    a chunk with a checksum is; what has none, its metadata, a chunk that is gone and two exchanged ones are not.
    """
    kind = OWN.get(name, "source")
    store = tmp_path_factory.mktemp("damage") / "store"
    shutil.copytree(real / name, store)
    truth = reader.ask(kind, store)["value"]
    files = sorted(path for path in store.rglob("*") if path.is_file())
    file, other = data.draw(st.sampled_from(files)), data.draw(st.sampled_from(files))
    how = data.draw(st.sampled_from(DAMAGE))
    damage(file, other, how, data.draw(st.integers(0, 2**20)), store.parent / "outside")
    answer = reader.ask(kind, store)
    checked = name == "crc" and file.name != "zarr.json" and how not in ("delete", "exchange")
    told = kind in ("model", "scores") or checked or (kind == "gram" and how != "exchange")
    require_refused_or(answer, truth.__eq__ if told else lambda _: True)
    needed = zarr_schema.JOURNAL not in file.parts  # receipts of a job that is finished
    if kind in ("model", "scores") and (how in ("link", "pipe") or (needed and how in ("folder", "delete", "cut"))):
        require_refused(answer)
    shutil.rmtree(store.parent)
