"""Parquet files and .npz files on an object store: what they are on a disk, from no more requests than they need."""

import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
import zarr

import dkfm
from dkfm import kernels
from dkfm.errors import InvalidInputError, UnreachableError
from dkfm.files import fsspec_access
from dkfm.files.object_store import Remote
from dkfm.sources.csr_npz import NpzSource
from dkfm.sources.opening import open_source
from dkfm.sources.parquet_files import footers, row_groups
from helpers.s3_server import SECRET, one_sentence, put
from helpers.s3_tables import dense, fresh, npz_bytes, parquet_bytes, split, table


@pytest.fixture(autouse=True)
def forgotten():
    yield
    fresh()


PLAIN = {"use_dictionary": False, "compression": None}


MEANWHILE = {
    "a row group": lambda source: source.read(slice(400, 500)),
    "a part of a row group": lambda source: source.read(slice(400, 420)),
    "all row groups": lambda source: source.read(slice(0, 1000)),
    "ids": lambda source: source.read_ids(slice(400, 500)),
    "ids of the first batch": lambda source: source.read_ids(slice(400, 410)),
    "a footer that is not kept": lambda source: footers.cached_metadata.cache_clear() or source.read(slice(400, 500)),
    "a table that is not kept": lambda source: fresh() or source.read(slice(400, 500)),
    "an opening": lambda source: open_source(source.name, id_column="id"),
}


def replace_before_a_read(monkeypatch, place, data):
    """Replace an object after it was looked at, and before it is read."""
    original = Remote.read

    def read(self, *where):
        monkeypatch.undo()
        place.replace("", data)
        return original(self, *where)

    monkeypatch.setattr(Remote, "read", read)


@pytest.mark.parametrize("what", MEANWHILE)
@pytest.mark.parametrize("other", ["values", "names", "nothing"])
def test_rows_of_an_object_that_is_replaced_while_it_is_read_are_never_given(what, other, place, rows, monkeypatch):
    # Of the same length: nothing but the object's ETag tells them apart.
    monkeypatch.setattr(row_groups, "_BATCH_VALUES", 30)
    place, ids = place.join("x.parquet"), pa.array(range(1000))
    before = parquet_bytes(table(rows).append_column("id", ids), **PLAIN)
    after = {
        "values": parquet_bytes(table(rows + 1).append_column("id", pa.array(range(1, 1001))), **PLAIN),
        "names": parquet_bytes(table(rows, "bca").append_column("id", ids), **PLAIN),
        "nothing": bytes(len(before)),
    }[other]
    assert len(after) == len(before)
    place.replace("", before)
    source = open_source(place.url, id_column="id")
    source.read(slice(0, 10))
    with pytest.MonkeyPatch.context() as patch:
        replace_before_a_read(patch, place, after)
        with pytest.raises(InvalidInputError, match=r"x\.parquet changed since it was opened"):
            MEANWHILE[what](source)
        assert place.read() == after
    place.replace("", before)
    np.testing.assert_array_equal(source.read(slice(0, 1000)), rows)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("other", ["values", "nothing"])
def test_sparse_rows_that_are_replaced_while_they_are_read_are_never_given(other, again, place, matrix, monkeypatch):
    place, before = place.join("x.npz"), npz_bytes(matrix, compressed=False)
    after = {"values": npz_bytes(2 * matrix, compressed=False), "nothing": bytes(len(before))}[other]
    assert len(after) == len(before)
    place.replace("", before)
    source = open_source(place.url)
    replace_before_a_read(monkeypatch, place, after)
    with pytest.raises(InvalidInputError, match=r"x\.npz changed since it was opened"):
        open_source(place.url) if again else source.read(slice(0, 10))
    assert place.read() == after
    place.replace("", before)
    np.testing.assert_array_equal(dense(source.read(slice(0, 1000))), matrix.toarray())


def test_lost_objects_are_errors_of_one_sentence(place, rows, matrix, tmp_path):
    split(tmp_path / "t", rows)
    put(place, tmp_path)
    place.replace("x.parquet", parquet_bytes(rows))
    place.replace("x.npz", npz_bytes(matrix))
    folder = open_source(f"{place.url}/t", id_column="id")
    sources = [open_source(f"{place.url}/{name}") for name in ("x.parquet", "x.npz")]
    place.remove_objects("t/b/2.parquet", "x.parquet", "x.npz")
    for source in (folder, *sources):
        for in_another_process in (False, True):
            if in_another_process:
                fresh()
            with pytest.raises(InvalidInputError, match=r"changed since it was opened|There is no") as caught:
                source.read(slice(500, 510))
            assert one_sentence(caught.value)
    for name in ("x.parquet", "x.npz", "none", "none.parquet"):
        for options in ({}, {"columns": ["a"]}):
            with pytest.raises(InvalidInputError) as caught:
                open_source(f"{place.url}/{name}", **options)
            assert one_sentence(caught.value)
            if not options or name.endswith(".parquet"):
                assert str(caught.value) == f"There is no {place.url}/{name}."


def test_damaged_objects_are_refused_by_their_url(place, rows, matrix):
    whole, checked = parquet_bytes(rows), {"use_dictionary": False, "compression": None, "write_page_checksum": True}
    damaged = {"e": b"", "m": b"PAR1", "c": whole[:-20], "d": whole[:-4] + b"PARE", "t": b"a" * 50}
    for name, data in damaged.items():
        place.replace(f"{name}.parquet", data)
    sparse = npz_bytes(matrix)
    for name, data in {"c": sparse[: len(sparse) // 2], "t": b"no zip", "e": b""}.items():
        place.replace(f"{name}.npz", data)
        damaged[f"{name}.npz"] = data
    for name in damaged:
        url = f"{place.url}/{name}" if "." in name else f"{place.url}/{name}.parquet"
        with pytest.raises(InvalidInputError, match="cannot be read as a") as caught:
            open_source(url)
        assert one_sentence(caught.value)
        assert url in str(caught.value)
    content = bytearray(parquet_bytes(rows, 1000, **checked))
    content[content.index(rows[500, 1].tobytes())] ^= 1
    place.replace("bit.parquet", bytes(content))
    with pytest.raises(InvalidInputError, match=r"(?i)/bit\.parquet cannot be read.*crc"):
        open_source(f"{place.url}/bit.parquet").read(slice(0, 1000))


def test_what_is_no_table_at_a_url_is_refused_as_on_a_disk(place, rows, tmp_path):
    place.replace("h.parquet/_x.parquet", parquet_bytes(rows))
    with pytest.raises(InvalidInputError, match=r"holds no \.parquet file"):
        open_source(f"{place.url}/h.parquet")
    zarr.create_array(tmp_path / "x.zarr", data=rows)
    zarr.create_array(tmp_path / "z.parquet", data=rows)
    put(place, tmp_path)
    place.replace("x.zarr/stray.parquet", b"a Zarr store all the same")
    place.replace("x.npz", npz_bytes(sp.csr_array(rows)))
    for name in ("x.zarr", "z.parquet", "x.npz"):
        assert open_source(f"{place.url}/{name}").shape == (1000, 3)
        for options in ({"columns": ["a"]}, {"id_column": "a"}):
            with pytest.raises(InvalidInputError, match="columns and id_column name columns of Parquet files"):
                open_source(f"{place.url}/{name}", **options)


@pytest.mark.parametrize("fault", [500, 503, "cut", 1.7])
def test_a_server_that_fails_for_a_while_gives_the_rows(fault, place, rows, matrix, proxy):
    place.replace("x.parquet", parquet_bytes(rows))
    place.replace("x.npz", npz_bytes(matrix))
    source, sparse = open_source(f"{place.url}/x.parquet"), open_source(f"{place.url}/x.npz")
    for found, name, want in ((source, "/x.parquet", rows), (sparse, "/x.npz", matrix.toarray())):
        proxy.faults = [("GET", name, fault)]
        np.testing.assert_array_equal(dense(found.read(slice(0, 1000))), want)
        assert proxy.faults == []


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("name", ["folder", "x.parquet", "x.npz"])
def test_a_server_that_fails_for_ever_is_unreachable_in_one_sentence(
    name, method, place, rows, matrix, tmp_path, proxy
):
    split(tmp_path / "folder", rows)
    put(place, tmp_path)
    place.replace("x.parquet", parquet_bytes(rows))
    place.replace("x.npz", npz_bytes(matrix))
    url = f"{place.url}/{name}"
    source = open_source(url, **({"id_column": "id"} if name == "folder" else {}))
    for act in (
        lambda: source.read(slice(0, 500)),
        lambda: source.read(slice(0, 10)),
        lambda: fresh() or source.read(slice(0, 10)),
        lambda: open_source(url),
    ):
        proxy.faults = [(method, "/bucket", 500)] * 500
        start = time.monotonic()
        with pytest.raises(UnreachableError) as caught:
            act()
        assert time.monotonic() - start < 15
        assert one_sentence(caught.value)
        assert str(caught.value).startswith(place.url)
    proxy.faults = []
    assert source.read(slice(0, 10)).shape == (10, 3)


def test_no_credentials_of_a_url_are_told(monkeypatch):
    monkeypatch.setattr(fsspec_access, "_RETRY_SECONDS", 0.0)
    for name in ("x.parquet", "x.npz", "folder.parquet"):
        with pytest.raises(UnreachableError) as caught:
            open_source(f"http://user:{SECRET}@127.0.0.1:9/{name}")
        assert one_sentence(caught.value)
    place = Remote(f"ftp://user:{SECRET}@127.0.0.1:9/x.npz")
    assert SECRET not in NpzSource(place, (1, 1), 1, (), "").name


def test_other_file_systems_hold_tables_too(rows, matrix):
    place = Remote(f"memory://tables/{time.monotonic_ns()}")
    place.replace("t/a.parquet", parquet_bytes(rows[:300]))
    place.replace("t/b/c.parquet", parquet_bytes(rows[300:]))
    place.replace("x.npz", npz_bytes(matrix))
    source = open_source(f"{place.url}/t")
    np.testing.assert_array_equal(source.read(slice(0, 1000)), rows)
    np.testing.assert_array_equal(dense(open_source(f"{place.url}/x.npz").read(slice(0, 1000))), matrix.toarray())
    place.replace("t/b/c.parquet", parquet_bytes(rows[300:]))
    with pytest.raises(InvalidInputError, match=r"c\.parquet changed"):
        source.read(slice(300, 400))


def test_a_forked_process_reads_after_its_parent(place, rows, matrix, tmp_path):
    split(tmp_path, rows)
    put(place, tmp_path)
    place.replace("x.npz", npz_bytes(matrix))
    code = (
        "import os; from dkfm.sources.opening import open_source\n"
        f"sources = [open_source({place.url!r}, id_column='id'), open_source({place.url + '/x.npz'!r})]\n"
        "want = [source.read(slice(0, 500)).sum() for source in sources]\n"
        "child = os.fork()\n"
        "assert [source.read(slice(0, 500)).sum() for source in sources] == want\n"
        "if child == 0: raise SystemExit\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert done.stderr == b""


def test_worker_processes_score_tables_at_a_url(place, rows, matrix, tmp_path, client):
    pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rows[:50])
    split(tmp_path / "t", rows)
    put(place, tmp_path)
    place.replace("x.npz", npz_bytes(matrix))
    options = {"client": client, "progress": False}
    dkfm.batch_score(pca, f"{place.url}/t", tmp_path / "a.parquet", columns=list("abc"), id_column="id", **options)
    found = dkfm.open_scores(tmp_path / "a.parquet").compute()
    np.testing.assert_array_equal(found["id"], range(1000))
    np.testing.assert_allclose(found.drop(columns="id").to_numpy(), pca.transform(rows), atol=1e-12)
    dkfm.batch_score(pca, f"{place.url}/x.npz", tmp_path / "b", **options)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "b").compute(), pca.transform(matrix.toarray()), atol=1e-12)
