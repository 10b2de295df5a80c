"""."""

import os
import pickle
import struct
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import dkfm
from dkfm.errors import InvalidInputError
from dkfm.sources import csr_npz
from dkfm.sources.opening import open_source
from helpers.npz_files import archive, members, npy, refusal, save


@pytest.fixture(autouse=True)
def forgotten():
    yield
    csr_npz.clear_unpacked()


def patched(path, name, **sizes):
    """Change what the directory and the header of a member say of its sizes."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as opened:
        info = opened.getinfo(name)
    entry = content.index(b"PK\x01\x02")
    while content[entry + 46 : entry + 46 + len(name)] != name.encode():
        entry = content.index(b"PK\x01\x02", entry + 4)
    for start, places in (
        (entry, {"crc": 16, "stored": 20, "size": 24}),
        (info.header_offset, {"crc": 14, "size": 22}),
    ):
        for key, value in sizes.items():
            if key in places:
                content[start + places[key] : start + places[key] + 4] = struct.pack("<I", value)
    path.write_bytes(content)
    return path


LIES = {
    "fewer pointers": {"indptr": npy(np.zeros(200, np.int32))},
    "more rows": {"shape": npy(np.array([10**9, 30]))},
    "no rows": {"shape": npy(np.array([0, 30])), "indptr": npy(np.zeros(1, np.int32))},
    "negative columns": {"shape": npy(np.array([200, -30]))},
    "three lengths": {"shape": npy(np.array([200, 30, 1]))},
    "fractional shape": {"shape": npy(np.array([200.0, 30.0]))},
    "long format": {"format": npy(np.array(b"csr" * 1000))},
    "fewer indices": {"indices": npy(np.zeros(5, np.int32))},
    "no indices": {"indices": None},
    "complex": {"data": npy(np.zeros(600, complex))},
    "text": {"data": npy(np.array(["a"] * 600))},
    "long double": {"data": npy(np.zeros(600, np.longdouble))},
    "float indices": {"indices": npy(np.zeros(600))},
    "two dimensions": {"data": npy(np.zeros((600, 1)))},
    "header of more": {"data": npy(np.zeros(600), shape=(10**15,))},
    "header of fewer": {"data": npy(np.zeros(600), shape=(6,))},
    "negative shape": {"data": npy(np.zeros(600), shape=(-600, -1))},
    "empty type": {"data": npy(np.zeros(600), descr="|S0")},
    "long header": {"data": npy(np.zeros(600), version=(2, 0))},
    "no header": {"data": b"nothing"},
    "header of code": {"data": npy(np.zeros(600), descr="__import__('os')")},
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie_are_refused_before_anything_is_unpacked(lie, matrix, tmp_path, monkeypatch):
    unpacked = []
    assert matrix.nnz == 600
    path = archive(tmp_path / "x.npz", members(matrix))
    np.testing.assert_array_equal(open_source(path).read(slice(0, 200)).toarray(), matrix.toarray())
    csr_npz.clear_unpacked()
    monkeypatch.setattr(csr_npz, "_map_on_disk", lambda *_: unpacked.append(1))
    refusal(archive(path, members(matrix, **LIES[lie])))
    assert not unpacked


@pytest.mark.parametrize(
    ("directory", "message"), [(False, "is damaged: it has 4800 bytes"), (True, "end with the 10{13} values")]
)
def test_a_member_whose_header_claims_terabytes_is_refused_before_anything_is_unpacked(
    directory, message, matrix, tmp_path, monkeypatch
):
    claimed = {name: npy(getattr(matrix, name), shape=(10**13,)) for name in ("data", "indices")}
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members(matrix, **claimed).items():
            opened.writestr(name, content)
        for name, part in [("data", matrix.data), ("indices", matrix.indices)] if directory else []:
            opened.getinfo(f"{name}.npy").file_size += (10**13 - 600) * part.itemsize
    monkeypatch.setattr(csr_npz, "_map_on_disk", lambda *_: pytest.fail("unpacked"))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=message) as caught:
            open_source(tmp_path / "x.npz").read(slice(0, 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < 2**24


@pytest.mark.parametrize(
    "pointers",
    [
        [0, *[5] * 199, 601],
        [-1, *[5] * 199, 600],
        [0, 9, 3, *[5] * 197, 600],
        [0, 2**63 - 1, -2, *[5] * 197, 600],
        [0, *[2**62] * 199, 600],
    ],
    ids=["beyond", "before", "falling", "overflowing", "far"],
)
def test_pointers_that_lead_out_of_the_values_are_refused(pointers, matrix, tmp_path):
    path = archive(tmp_path / "x.npz", members(matrix, indptr=npy(np.array(pointers, np.int64))))
    assert "do not make rows" in refusal(path)


@pytest.mark.parametrize("column", [30, -1, 2**31 - 1])
def test_columns_that_are_not_there_are_refused(column, matrix, tmp_path):
    matrix.indices[17] = column
    assert "do not make rows" in refusal(archive(tmp_path / "x.npz", members(matrix)))


@pytest.mark.costly
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_a_member_that_gives_more_than_it_declares_is_refused_and_not_unpacked_further(
    method, matrix, tmp_path, monkeypatch
):
    bomb = npy(matrix.data) + bytes(50_000_000 if method == zipfile.ZIP_DEFLATED else 5000)
    path = archive(tmp_path / "x.npz", members(matrix, data=bomb), method)
    assert "is damaged" in refusal(path)  # the directory is honest, and the header is not
    honest, written, pieces = npy(matrix.data), [], csr_npz._read_buffers

    def counted(*arguments):
        for piece in pieces(*arguments):
            written.append(len(piece))
            yield piece

    monkeypatch.setattr(csr_npz, "_read_buffers", counted)
    for sum_of, message in [(honest, "data.npy"), (bomb[: len(honest) + 1], "more or fewer bytes than it declares")]:
        patched(path, "data.npy", size=len(honest), crc=zipfile.crc32(sum_of))
        source = open_source(path)
        written.clear()
        with pytest.raises(InvalidInputError, match=message):
            source.read(slice(0, 1))
        assert sum(written) <= len(honest) + 200  # and of the small members


def test_a_member_that_gives_fewer_bytes_than_it_declares_is_refused(matrix, tmp_path):
    declared = npy(np.zeros(10**6), shape=(10**6,))
    contents = members(matrix, data=declared, indices=npy(np.zeros(10**6, np.int32)))
    contents["indptr.npy"] = npy(np.array([*[0] * 200, 10**6]))
    path = archive(tmp_path / "x.npz", contents | {"data.npy": declared[:5000]})
    patched(path, "data.npy", size=len(declared))
    assert "x.npz" in refusal(path)


def test_what_does_not_fit_on_the_disk_is_refused_with_both_numbers(matrix, tmp_path, monkeypatch):
    source = open_source(save(tmp_path / "x.npz", matrix))
    needed = 600 * (8 + 4) + 201 * 4
    free = type("Usage", (), {"free": needed})
    monkeypatch.setattr(csr_npz.shutil, "disk_usage", lambda _: free)
    source.read(slice(0, 1))
    csr_npz.clear_unpacked()
    free.free = needed - 1
    with pytest.raises(InvalidInputError, match=rf"takes {needed} bytes .* {needed - 1} free: .*TMPDIR"):
        source.read(slice(0, 1))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_that_numpy_never_writes_are_refused(method, matrix, tmp_path):
    assert "compressed as NumPy never does" in refusal(archive(tmp_path / "x.npz", members(matrix), method))


def test_names_of_members_are_never_paths(matrix, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "here"))
    path = archive(tmp_path / "x.npz", members(matrix) | {"../escaped": b"x", "/tmp/escaped.npy": b"x"})
    open_source(path).read(slice(0, 200))
    assert list((tmp_path / "here").iterdir()) == []
    assert sorted(tmp_path.iterdir()) == [tmp_path / "here", path]
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as opened:
        opened.writestr("data.npy", npy(matrix.data + 1))
    assert "holds 2 arrays named 'data'" in refusal(path)


def test_a_process_unpacks_a_file_once_whatever_threads_read_it_until_it_forgets(matrix, tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    unpacked, mapped = [], csr_npz._map_on_disk
    monkeypatch.setattr(csr_npz, "_map_on_disk", lambda *arguments: unpacked.append(1) or mapped(*arguments))
    path = save(tmp_path / "x.npz", matrix)
    source = pickle.loads(pickle.dumps(open_source(path)))
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda first: source.read(slice(first, first + 10)), range(0, 200, 10)))
    np.testing.assert_array_equal(sp.vstack(parts).toarray(), matrix.toarray())
    open_source(path).read(slice(0, 10))
    assert len(unpacked) == 3
    csr_npz.clear_unpacked()
    source.read(slice(0, 10))
    assert len(unpacked) == 6


def test_what_is_unpacked_has_no_name_and_its_room_is_free_once_it_is_forgotten(matrix, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = open_source(save(tmp_path / "x.npz", matrix))

    def held():
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    read = source.read(slice(0, 200))
    assert list(tmp_path.iterdir()) == [tmp_path / "x.npz"]
    assert held() == 3
    csr_npz.clear_unpacked()
    assert held() == 0
    np.testing.assert_array_equal(read.toarray(), matrix.toarray())


def test_a_file_that_changed_has_another_stamp_and_is_refused(matrix, tmp_path):
    path = save(tmp_path / "x.npz", matrix)
    source = open_source(path)
    source.read(slice(0, 10))
    assert source.stamp() == source.opened_stamp
    save(path, 2 * matrix)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert source.stamp() != source.opened_stamp
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="changed since it was opened; open it again"):
            source.read(slice(0, 10))
        csr_npz.clear_unpacked()
    np.testing.assert_array_equal(open_source(path).read(slice(0, 10)).toarray(), 2 * matrix.toarray()[:10])
    again = open_source(path)
    path.unlink()
    with pytest.raises(InvalidInputError, match="cannot be read"):
        again.read(slice(0, 10))


def test_memory_is_that_of_the_rows_asked_for_and_a_task_is_small(tmp_path, rng):
    n = 200_000
    wide = sp.csr_array(
        (rng.normal(size=10 * n), rng.integers(0, 10**6, 10 * n), np.arange(0, 10 * n + 1, 10)), shape=(n, 10**6)
    )
    source = open_source(save(tmp_path / "x.npz", wide, compressed=False))
    assert len(pickle.dumps(source)) < 1000
    tracemalloc.start()
    try:
        read = source.read(slice(100_000, 101_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read.nnz > 9900
    assert peak < 3 * 8 * source.float64s_per_row * 1000 + 3 * csr_npz._BUFFER_BYTES < wide.data.nbytes / 3


def test_a_matrix_without_a_value_is_read(tmp_path):
    source = open_source(save(tmp_path / "x.npz", sp.csr_array((5, 4))))
    assert source.float64s_per_row == 1
    np.testing.assert_array_equal(source.read(slice(1, 4)).toarray(), np.zeros((3, 4)))


@pytest.mark.slow
def test_a_file_scores_and_builds_as_its_rows_do_and_is_forgotten_after_it(matrix, tmp_path):
    path, kernel = save(tmp_path / "x.npz", matrix), dkfm.kernels.Gaussian(2.0)
    pca = dkfm.KernelPCA(2, kernel=kernel).fit(matrix)
    dkfm.batch_score(pca, path, tmp_path / "out", chunk_rows=33, progress=False)
    assert len(csr_npz._unpacked) == 0
    found = dkfm.open_scores(tmp_path / "out").compute(scheduler="synchronous")
    np.testing.assert_allclose(found, pca.transform(matrix), atol=1e-12)
    gram = dkfm.build_gram(kernel, path, tmp_path / "gram", tile_rows=64)
    np.testing.assert_allclose(gram[:], kernel(matrix), atol=1e-12)
