"""What strangers send is data: refused by name, before it is read, in the memory and the time that a reader has.

Every store here is opened by `reader`, a process with one gigabyte to spare; what hangs or kills it fails.
"""

import json
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfm.storage import store_metadata
from helpers.untrusted import OWN, folder, pipe, require_refused, resealed


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
    if name in ("model", "sparse") and file != store_metadata.MARKER:
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
    needed = store_metadata.JOURNAL not in file.parts  # receipts of a job that is finished
    if kind in ("model", "scores") and (how in ("link", "pipe") or (needed and how in ("folder", "delete", "cut"))):
        require_refused(answer)
    shutil.rmtree(store.parent)
