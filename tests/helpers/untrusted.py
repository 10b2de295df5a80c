"""What the tests of strangers share."""

import hashlib
import json
import os
import re
import shutil

import google_crc32c
import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import dkfm
from dkfm import kernels
from dkfm.storage import store_metadata

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
    sums = {name: sha256_of(root / name) for name in names if name != store_metadata.MARKER}
    (root / store_metadata.MARKER).write_text(json.dumps({"files": sums, "digest": _manifest_digest(sums)}))


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


def chunked(document, *lengths):
    document["chunk_grid"]["configuration"]["chunk_shape"] = list(lengths)


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
    return lambda store: (store / name).write_text(change((store / name).read_text(encoding="utf-8")), encoding="utf-8")


def sealed(data):
    return data + google_crc32c.value(data).to_bytes(4, "little")


def array(name, change):
    return lambda store: edit(store / name / "zarr.json", change)
