"""What strangers send is data: refused by name, before it is read, in the memory and the time that a reader has.

Every store here is opened by `reader`, a process with one gigabyte to spare; what hangs or kills it fails.
"""

import gzip
import os
import struct

import pytest
import zarr
from numcodecs import Blosc, Zstd

from helpers.untrusted import (
    SOURCES,
    require_refused,
    sealed,
)


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data"), BOMBS.values(), ids=BOMBS)
def test_a_chunk_that_decodes_to_another_size_than_its_own_takes_no_memory_and_is_refused(reader, tmp_path, name, data):
    array_of(tmp_path / "x", name, data)
    require_refused(reader.ask("source", tmp_path / "x"))


@pytest.mark.costly
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
