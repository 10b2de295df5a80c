"""Parquet files and .npz files on an object store: what they are on a disk, from no more requests than they need."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp

import dkfm
from dkfm import kernels
from dkfm.errors import InvalidInputError
from dkfm.files.object_store import Remote
from dkfm.sources import chunk_cache
from dkfm.sources.opening import open_source
from helpers.s3_server import one_sentence, put
from helpers.s3_tables import dense, fresh, npz_bytes, parquet_bytes, split, table

pytest.importorskip("s3fs", reason="the README's environment of tests has no extra s3; .ci/run has")


pytest.importorskip("moto", reason="the README's environment of tests has no S3 server; .ci/run has")


PARTS = [slice(0, 1000), slice(0, 1), slice(95, 730), slice(410, 420), slice(990, 5000), slice(20, 20)]


@pytest.fixture(autouse=True)
def forgotten():
    yield
    fresh()


@pytest.mark.parametrize(
    "options",
    [
        {"id_column": "id"},
        {"columns": ["c", "a"]},
        {"columns": ["b"], "id_column": "id"},
        {"fitted_columns": ["c", "b", "a"], "id_column": "id"},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["folder", "folder.parquet", "folder/b/1.parquet"])
def test_tables_at_urls_are_those_on_a_disk(name, options, place, rows, tmp_path):
    split(tmp_path / "folder", rows)
    split(tmp_path / "folder.parquet", rows)
    put(place, tmp_path)
    local, remote = open_source(tmp_path / name, **options), open_source(f"{place.url}/{name}", **options)
    fresh()
    assert type(local) is type(remote)
    assert len(pickle.dumps(remote)) < 700
    assert pickle.loads(pickle.dumps(remote)) == remote
    assert (remote.shape, remote.chunk_rows, remote.columns) == (local.shape, local.chunk_rows, local.columns)
    assert remote.name == f"{place.url}/{name}"
    for row in (0, 249, 250, 999):
        if row < local.shape[0]:
            file, number = local.locate_row(row)
            assert remote.locate_row(row) == (file.replace(str(tmp_path), place.url), number)
    for part in PARTS:
        np.testing.assert_array_equal(remote.read(part), local.read(part))
        if remote.id_column:
            assert remote.read_ids(part).equals(local.read_ids(part))


def test_float32_at_a_url_is_read_as_it_is_where_it_is_asked_for(place, rows):
    place.replace("x.parquet", parquet_bytes(table(rows.astype(np.float32))))
    source = open_source(f"{place.url}/x.parquet")
    assert source.read(slice(3, 20)).dtype == np.float64
    assert source.with_float32_preserved().read(slice(3, 20)).dtype == np.float32


@pytest.mark.parametrize("compressed", [True, False])
def test_sparse_rows_at_a_url_are_those_on_a_disk(compressed, place, matrix, tmp_path):
    place.replace("x.npz", npz_bytes(matrix, compressed))
    (tmp_path / "x.npz").write_bytes(npz_bytes(matrix, compressed))
    local, remote = open_source(tmp_path / "x.npz"), open_source(f"{place.url}/x.npz")
    assert len(pickle.dumps(remote)) < 500
    assert pickle.loads(pickle.dumps(remote)) == remote
    assert (remote.shape, remote.chunk_rows, remote.float64s_per_row) == (
        local.shape,
        1,
        local.float64s_per_row,
    )
    assert (remote.name, remote.locate_row(7)) == (f"{place.url}/x.npz", (f"{place.url}/x.npz", 7))
    for part in PARTS:
        ours, theirs = remote.read(part), local.read(part)
        for name in ("data", "indices", "indptr"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_a_process_unpacks_sparse_rows_once_whatever_threads_read_them(place, matrix, proxy):
    place.replace("x.npz", npz_bytes(matrix))
    source = open_source(f"{place.url}/x.npz")
    proxy.seen.clear()
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda first: source.read(slice(first, first + 50)), range(0, 1000, 50)))
    np.testing.assert_array_equal(sp.vstack(parts).toarray(), matrix.toarray())
    methods = [method for method, _ in proxy.seen]
    assert methods.count("GET") <= 6
    assert methods.count("HEAD") <= 20 + 4


def test_only_the_row_groups_and_columns_that_are_wanted_are_asked_for(place, rng, monkeypatch):
    columns = {f"p{i}": rng.normal(size=40_000) for i in range(20)}
    data = parquet_bytes(pa.table(columns), 10_000, use_dictionary=False, compression=None)
    place.replace("x.parquet", data)
    few, whole = (open_source(f"{place.url}/x.parquet", columns=names) for names in (["p7", "p3"], None))
    few.read(slice(0, 10))  # the footer
    asked, original = [], Remote.read
    monkeypatch.setattr(Remote, "read", lambda self, *where: asked.append(original(self, *where)) or asked[-1])
    chunk_cache.clear_chunks()
    found = few.read(slice(12_000, 13_000))
    np.testing.assert_array_equal(found, np.stack([columns["p7"], columns["p3"]], 1)[12_000:13_000])
    assert len(asked) == 2
    assert 2 * 80_000 < sum(map(len, asked)) < 2 * 81_000
    few.read(slice(14_000, 15_000))
    assert len(asked) == 2
    asked.clear()
    whole.read(slice(20_000, 30_000))
    assert len(asked) == 1
    assert 20 * 80_000 < len(asked[0]) < 20 * 81_000


def test_footers_of_a_folder_are_read_once_by_a_process(place, rows, tmp_path, proxy):
    split(tmp_path, rows)
    put(place, tmp_path)
    source = open_source(place.url, id_column="id")
    fresh()
    again = pickle.loads(pickle.dumps(source))
    proxy.seen.clear()
    assert again.columns == source.columns
    first = len(proxy.seen)
    assert (again.columns, again.locate_row(700)) == (source.columns, (f"{place.url}/b/2.parquet", 200))
    assert len(proxy.seen) == first


def test_an_object_that_changed_is_refused_and_has_another_stamp(place, rows, matrix, tmp_path):
    split(tmp_path, rows)
    put(place, tmp_path)
    place.replace("x.npz", npz_bytes(matrix))
    table_, sparse = open_source(place.url, columns=["a", "b", "c"]), open_source(f"{place.url}/x.npz")
    stamps = table_.stamp(), sparse.stamp()
    assert stamps == (table_.opened_stamp, sparse.opened_stamp)
    for source in (table_, sparse):
        np.testing.assert_array_equal(dense(source.read(slice(500, 510))), dense(source.read(slice(500, 1000)))[:10])
    place.replace("_SUCCESS", b"no row of the table")
    assert table_.stamp() == stamps[0]
    place.replace("b/2.parquet", parquet_bytes(2 * rows[500:750]))
    place.replace("x.npz", npz_bytes(2 * matrix))
    assert table_.stamp() != stamps[0]
    assert sparse.stamp() != stamps[1]
    for part in (slice(500, 510), slice(500, 600), slice(0, 1000)):
        for source in (table_, sparse):
            with pytest.raises(InvalidInputError, match="changed since it was opened; open it again") as caught:
                source.read(part)
            assert one_sentence(caught.value)
    np.testing.assert_array_equal(table_.read(slice(0, 10)), rows[:10])
    fresh()
    for source in (table_, sparse):
        with pytest.raises(InvalidInputError, match="changed since it was opened; open it again"):
            source.read(slice(0, 10))
    np.testing.assert_array_equal(dense(open_source(f"{place.url}/x.npz").read(slice(0, 9))), 2 * dense(matrix)[:9])


def test_partitions_and_patterns_of_objects_are_those_of_files(place, rows):
    for year, part in ((2024, rows[:400]), (2025, rows[400:])):
        place.replace(f"t/year={year}/x.parquet", parquet_bytes(part))
    source = open_source(f"{place.url}/t", id_column="year")
    np.testing.assert_array_equal(source.read(slice(0, 1000)), rows)
    assert source.read_ids(slice(399, 401)).to_pylist() == ["2024", "2025"]
    for pattern in ("year=2025", "year=*5", "*/*", "**/x.parquet"):
        found = pickle.loads(pickle.dumps(open_source(f"{place.url}/t/{pattern}")))
        np.testing.assert_array_equal(
            found.read(slice(0, 1000)), rows[400:] if "2025" in pattern or "5" in pattern else rows
        )
    with pytest.raises(InvalidInputError, match=r"holds no \.parquet file"):
        open_source(f"{place.url}/t/year=3*")


@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_new_objects_are_appended_to_an_output_at_a_url(output, place, rows):
    pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(table(rows[:60]))
    options = {"append": True, "chunk_rows": 100, "progress": False}
    target = f"{place.url}/{output}"
    place.replace("in/m.parquet", parquet_bytes(rows[:350]))
    dkfm.batch_score(pca, f"{place.url}/in", target, **options)
    place.replace("in/a.parquet", parquet_bytes(rows[350:]))
    fresh()
    report = dkfm.batch_score(pca, f"{place.url}/in", target, **options)
    assert (report.rows, report.scored_rows) == (1000, 700)
    scores = np.asarray(dkfm.open_scores(target).compute())
    np.testing.assert_allclose(scores, pca.transform(table(rows)), rtol=1e-10, atol=1e-12)
    fresh()
    assert dkfm.batch_score(pca, f"{place.url}/in", target, progress=False).scored_chunks == 0
    place.replace("in/m.parquet", parquet_bytes(rows[:351]))
    with pytest.raises(InvalidInputError, match=r"m\.parquet has changed since it was scored"):
        dkfm.batch_score(pca, f"{place.url}/in", target, **options)
