"""."""

import os
import pickle
import tempfile
import tracemalloc
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.errors import InvalidInputError
from dkfm.files.object_store import Remote
from dkfm.sources import chunk_cache, parquet
from dkfm.sources.base import read_finite
from dkfm.sources.opening import open_source
from dkfm.sources.parquet import ParquetSource
from dkfm.sources.parquet_files import footers, row_groups
from helpers.parquet_files import refusal, table, write


def in_another_process(source):
    """A source as a task of a fresh process has it."""
    parquet._cached_layouts.clear_unless_busy()
    return pickle.loads(pickle.dumps(source))


# Files, each of row groups of so many rows.
layouts = st.lists(st.lists(st.integers(1, 7), max_size=4), min_size=1, max_size=4).filter(any)


@pytest.mark.slow
@given(layouts, st.data())
def test_any_slices_of_any_layout_of_files_and_row_groups_give_the_rows_of_the_table(layout, data):
    rows = np.random.default_rng(len(layout)).normal(size=(sum(map(sum, layout)), 3))
    wanted = data.draw(st.permutations("abc"))[: data.draw(st.integers(1, 3))]
    begun, owners = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number, groups in enumerate(layout):
            order = data.draw(st.permutations("abc"))
            file = Path(folder, f"{number}.parquet")
            with pq.ParquetWriter(file, table(rows).select(order).schema) as writer:
                for size in groups:
                    writer.write_table(table(rows[begun : begun + size]).select(order), row_group_size=size)
                    begun += size
            owners += [(str(file), row) for row in range(sum(groups))]
        source = in_another_process(ParquetSource.open(Path(folder), wanted))
        places = ["abc".index(name) for name in wanted]
        assert (source.shape, source.columns) == ((len(rows), len(wanted)), tuple(wanted))
        assert source.chunk_rows == max(max(groups, default=0) for groups in layout)
        for _ in range(4):
            first = data.draw(st.integers(0, len(rows)))
            last = data.draw(st.integers(first, len(rows)))
            read = source.read(slice(first, last))
            assert read.dtype == np.float64
            np.testing.assert_array_equal(read, rows[first:last, places])
        assert [source.locate_row(row) for row in range(len(rows))] == owners


@pytest.mark.slow
@given(st.permutations("abcdefgh"), st.permutations("abcdefgh"))
def test_a_shuffled_file_reads_equal(order, wanted):
    rows = np.random.default_rng(0).normal(size=(20, 8))
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "x.parquet"), table(rows, "abcdefgh").select(order))
        np.testing.assert_array_equal(
            in_another_process(ParquetSource.open(path, wanted)).read(slice(3, 17)),
            rows[3:17, ["abcdefgh".index(name) for name in wanted]],
        )
        assert ParquetSource.open(path).columns == tuple(order)


def test_files_are_read_in_the_order_of_their_relative_names(rows, tmp_path):
    for name, part in [("b/1.parquet", 1), ("a.parquet", 0), ("b/2.parquet", 2), ("c.parquet", 3)]:
        write(tmp_path / name, rows[250 * part : 250 * (part + 1)])
    for name in ("_SUCCESS", "notes.txt", "_metadata/a.parquet", ".hidden/a=1/x.parquet", "_x.parquet", ".x.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("not looked at")
    source = open_source(tmp_path)
    np.testing.assert_array_equal(source.read(slice(0, 1000)), rows)
    assert source.locate_row(600) == (str(tmp_path / "b/2.parquet"), 100)
    assert source.name == str(tmp_path)


def test_numbers_of_every_type_are_read_as_float64_and_nulls_as_nan(tmp_path):
    kinds = [
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float32(), pa.float64()),
    ]
    columns = {str(kind): pa.array([1, 0, None], kind) for kind in kinds}
    columns["bool"] = pa.array([True, False, None])
    columns["decimal"] = pa.array([Decimal("1.00"), Decimal("0.00"), None], pa.decimal128(9, 2))
    columns["wide"] = pa.array([Decimal("1.00"), Decimal("0.00"), None], pa.decimal256(50, 2))
    columns["half"] = pa.array([np.float16(1), np.float16(0), None], pa.float16())
    source = open_source(write(tmp_path / "x.parquet", pa.table(columns)))
    read = source.read(slice(0, 3))
    assert read.dtype == np.float64
    np.testing.assert_array_equal(read, np.array([[1.0], [0.0], [np.nan]]) * np.ones(len(columns)))
    with pytest.raises(InvalidInputError, match=r"x\.parquet must be finite, and row 2 contains NaN"):
        read_finite(source, slice(1, 3))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array(["a"]), "string"),
        (pa.array(["1"]).dictionary_encode(), "dictionary"),
        (pa.array([0], pa.timestamp("us")), "timestamp"),
        (pa.array([0], pa.date32()), "date32"),
        (pa.array([[1.0]]), "list"),
        (pa.array([{"x": 1.0}]), "struct"),
        (pa.array([b"a"]), "binary"),
        (pa.nulls(1), "null"),
    ],
    ids=str,
)
def test_a_column_of_something_else_than_numbers_is_refused_by_name_and_type(values, kind, tmp_path):
    path = write(tmp_path / "x.parquet", pa.table({"a": [1.0], "other": values}))
    message = refusal(path)
    assert "'other'" in message
    assert kind in message
    assert "x.parquet" in message
    np.testing.assert_array_equal(ParquetSource.open(path, ["a"]).read(slice(0, 1)), [[1.0]])


def test_a_missing_column_is_named_with_the_file_and_a_few_of_those_there(rows, tmp_path):
    write(tmp_path / "a.parquet", table(rows, "abc"))
    write(tmp_path / "b.parquet", table(rows, "abd"))
    message = refusal(tmp_path, ["a", "c"])
    assert message == f"{tmp_path / 'b.parquet'} has no column 'c'; it has columns 'a', 'b', 'd'."
    wide = write(tmp_path / "w" / "w.parquet", pa.table({f"p{i}": [1.0] for i in range(500)}))
    assert refusal(wide, ["x\ny"]).endswith(
        "no column 'x\\ny'; it has columns 'p0', 'p1', 'p2', 'p3', 'p4' and 495 more."
    )


def test_without_names_every_file_has_the_columns_of_the_first(rows, tmp_path):
    write(tmp_path / "a.parquet", table(rows[:, :2], "ab"))
    write(tmp_path / "b.parquet", table(rows, "abc"))
    assert "b.parquet has column 'c', which" in refusal(tmp_path)
    source = in_another_process(ParquetSource.open(tmp_path, ["a", "b"]))
    np.testing.assert_array_equal(source.read(slice(0, 2000)), np.vstack([rows, rows])[:, :2])


def test_columns_that_are_not_names_each_once_are_refused(rows, tmp_path):
    path = write(tmp_path / "x.parquet", rows)
    assert "must be a list of names, and is 'abc'" in refusal(path, "abc")
    assert "must be a list of names" in refusal(path, [0, 1])
    assert "columns names column 'a' more than once" in refusal(path, ["a", "b", "a"])
    assert "at least one column" in refusal(path, [])
    twice = write(tmp_path / "twice.parquet", pa.table([rows[:, 0], rows[:, 1]], ["a", "a"]))
    assert "has column 'a' more than once" in refusal(twice)


def test_what_pandas_keeps_as_an_index_is_no_column_unless_it_is_named(rows, tmp_path):
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list("abc"), index=np.arange(1000)[::-1])
    frame.to_parquet(tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet")
    assert source.columns == ("a", "b", "c")
    np.testing.assert_array_equal(source.read(slice(0, 1000)), rows)
    named = open_source(tmp_path / "x.parquet", columns=["c", "__index_level_0__"])
    np.testing.assert_array_equal(named.read(slice(0, 2)), [[rows[0, 2], 999], [rows[1, 2], 998]])


def test_names_with_dots_are_those_of_columns_and_not_of_their_parts(tmp_path):
    columns = {"a": [1.0, 2.0], "a.b": [3.0, 4.0], "s": [{"x": 5.0}, {"x": 6.0}]}
    path = write(tmp_path / "x.parquet", pa.table(columns))
    np.testing.assert_array_equal(ParquetSource.open(path, ["a.b", "a"]).read(slice(0, 2)), [[3, 1], [4, 2]])
    np.testing.assert_array_equal(ParquetSource.open(path, ["a"]).read(slice(0, 2)), [[1], [2]])
    assert "has no column 's.x'" in refusal(path, ["s.x"])


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(range(1000)),
        pa.array([f"row {i}" for i in range(999)] + [None]),
        pa.array(range(1000), pa.timestamp("ns", "UTC")),
        pa.array([b"%d" % i for i in range(1000)]),
        pa.array([Decimal(i) for i in range(1000)]),
    ],
    ids=lambda ids: str(ids.type),
)
def test_ids_of_any_plain_type_are_read_beside_the_rows(ids, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(row_groups, "_BATCH_VALUES", 30)
    for part in (0, 1):
        half = slice(500 * part, 500 * (part + 1))
        write(tmp_path / f"{part}.parquet", table(rows[half]).add_column(part, "id", ids[half.start : half.stop]))
    source = in_another_process(open_source(tmp_path, id_column="id"))
    assert (source.columns, source.id_column) == (("a", "b", "c"), "id")
    for first, last in [(0, 1000), (7, 9), (95, 730), (500, 500), (990, 5000)]:
        found = source.read_ids(slice(first, last))
        assert isinstance(found, pa.Array)
        assert found.equals(ids[first:last])
    np.testing.assert_array_equal(source.read(slice(450, 550)), rows[450:550])
    if pa.types.is_integer(ids.type):
        assert open_source(tmp_path, columns=["id", "a"], id_column="id").read(slice(3, 4))[0, 0] == 3


def test_categories_are_read_as_their_values_and_may_be_text_in_another_file(rows, tmp_path):
    for name, ids in [("a", pa.array(["x", "y"]).dictionary_encode()), ("b", pa.array(["y", None]))]:
        write(tmp_path / f"{name}.parquet", table(rows[:2]).append_column("id", ids))
    source = open_source(tmp_path, id_column="id")
    assert source.read_ids(slice(0, 4)).equals(pa.array(["x", "y", "y", None]))
    assert source.find_file_with_missing_ids() == str(tmp_path / "b.parquet")
    numbers = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1]), pa.array([10**12, 7]))
    write(tmp_path / "c" / "a.parquet", table(rows[:3]).append_column("id", numbers))
    source = open_source(tmp_path / "c", id_column="id")
    assert source.read_ids(slice(1, 3)).equals(pa.array([10**12, 7]))
    assert source.find_file_with_missing_ids() is None


def test_ids_that_are_missing_or_of_no_plain_type_or_of_two_are_refused(rows, tmp_path):
    path = write(tmp_path / "a.parquet", table(rows[:2]).append_column("id", pa.array([["x"], ["y"]])))
    assert "'id'" in refusal(path, id_column="id")
    assert "near it: 'id'" in refusal(path, ["a"], "idd")
    assert "no column 'key' for ids" in refusal(path, ["a"], "key")
    write(path, table(rows[:2]).append_column("id", pa.array([1, 2])))
    write(tmp_path / "b.parquet", table(rows[:2]).append_column("id", pa.array(["x", "y"])))
    assert "one type in all files" in refusal(tmp_path, id_column="id")
    with pytest.raises(InvalidInputError, match="id_column="):
        ParquetSource.open(path).read_ids(slice(0, 1))


def test_float32_is_read_as_it_is_only_where_all_columns_are_and_it_is_asked_for(rows, tmp_path):
    single = pa.table({name: rows[:, i].astype(np.float32) for i, name in enumerate("abc")})
    write(tmp_path / "s.parquet", single)
    write(tmp_path / "m.parquet", single.set_column(1, "b", [rows[:, 1]]))
    mixed = pa.concat_tables([single.select("ab"), single.select("ab")])
    write(tmp_path / "f.parquet" / "1.parquet", mixed.set_column(1, "b", [np.tile(rows[:, 1], 2)]))
    write(tmp_path / "f.parquet" / "2.parquet", mixed)
    for name, columns, dtype in [("s", "abc", "f4"), ("f", "ab", "f8"), ("m", "abc", "f8"), ("m", "ac", "f4")]:
        source = open_source(tmp_path / f"{name}.parquet", columns=list(columns))
        for part in (slice(0, 1000), slice(3, 20)):
            assert source.read(part).dtype == np.float64
            assert source.with_float32_preserved().read(part).dtype == dtype
            np.testing.assert_array_equal(source.with_float32_preserved().read(part), source.read(part))


def test_parts_of_a_row_group_decode_it_once_and_another_opening_decodes_it_anew(rows, tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", rows, 400)
    source, groups, decode = ParquetSource.open(path), [], row_groups._decode_group_into_array
    monkeypatch.setattr(
        row_groups,
        "_decode_group_into_array",
        lambda file, table, group, out: groups.append(group) or decode(file, table, group, out),
    )
    for first in (0, 100, 400, 200, 500, 300, 600, 800, 700, 900):
        np.testing.assert_array_equal(source.read(slice(first, first + 70)), rows[first : first + 70])
    assert groups == [0, 1, 2]
    ParquetSource.open(path).read(slice(900, 950))
    assert groups == [0, 1, 2, 2]
    chunk_cache.clear_chunks()
    ParquetSource.open(path).read(slice(0, 800))  # whole row groups are not kept
    assert groups[4:] == [0, 1]
    assert len(chunk_cache._chunks) == 0


def test_row_groups_of_a_file_are_decoded_from_one_opening_of_it(rows, tmp_path, monkeypatch):
    for number in range(3):
        write(tmp_path / "x" / f"{number}.parquet", rows, 90)
    opened, open_parquet_file = [], row_groups.open_parquet_file
    monkeypatch.setattr(
        row_groups,
        "open_parquet_file",
        lambda table, group, **options: (
            opened.append(table.group_file(group).location.name) or open_parquet_file(table, group, **options)
        ),
    )
    read = ParquetSource.open(tmp_path / "x").read(slice(0, 3 * len(rows)))
    np.testing.assert_array_equal(read, np.concatenate([rows] * 3))
    assert opened == ["0.parquet", "1.parquet", "2.parquet"]


@pytest.mark.parametrize(
    ("place", "group_rows", "one_at_a_time"),
    [("local", 30, True), ("local", 3_000, False), ("memory://small-groups/rows.parquet", 30, False)],
)
def test_one_thread_at_a_time_decodes_small_row_groups_on_disk(place, group_rows, one_at_a_time, tmp_path, monkeypatch):
    rows = np.random.default_rng(0).normal(size=(6_000, 3))
    path = tmp_path / "rows.parquet"
    write(path, rows, group_rows)
    if place != "local":
        Remote(place).replace("", path.read_bytes())
    held, decode = [], row_groups._decode_files_into_arrays
    monkeypatch.setattr(
        row_groups,
        "_decode_files_into_arrays",
        lambda *arguments: held.append(row_groups._small_groups_lock.locked()) or decode(*arguments),
    )
    source = open_source(path if place == "local" else place)
    np.testing.assert_array_equal(source.read(slice(0, 5_000)), rows[:5_000])
    assert set(held) == {one_at_a_time}


@pytest.mark.parametrize(("columns", "requests"), [("ab", 1), ("abc", 1), ("ac", 2)])
def test_near_columns_of_an_object_are_one_request(columns, requests, tmp_path, monkeypatch):
    rows = np.random.default_rng(0).normal(size=(2_000, 3))
    place = Remote("memory://requests/rows.parquet")
    place.replace("", write(tmp_path / "rows.parquet", rows, 1_000).read_bytes())
    source = open_source(place.url, columns=[*columns])
    made, read = [], Remote.read
    monkeypatch.setattr(Remote, "read", lambda *arguments: made.append(arguments) or read(*arguments))
    np.testing.assert_array_equal(source.read(slice(0, 1_000)), rows[:1_000, ["abc".index(name) for name in columns]])
    assert len(made) == requests


@pytest.mark.parametrize(("kept", "read_again"), [(1.0, 0), (0.5, 1), (0.0, 3)])
def test_small_footers_are_not_read_again_with_the_rows(kept, read_again, rows, tmp_path, monkeypatch):
    for number, group_rows in enumerate((1_000, 100, 1_000)):
        write(tmp_path / "x" / f"{number}.parquet", rows, group_rows)
    metadata = [pq.read_metadata(tmp_path / "x" / f"{number}.parquet") for number in range(3)]
    sizes = [10_000 + 2_000 * one.num_columns * one.num_row_groups for one in metadata]
    assert sizes[1] > 2 * sizes[0] == 2 * sizes[2]
    footers.cached_metadata.cache_clear()
    monkeypatch.setattr(footers, "KEPT_FOOTER_BYTES", 3 * int(kept * sizes[1]))
    source = ParquetSource.open(tmp_path / "x")
    for _ in range(2):
        np.testing.assert_array_equal(source.read(slice(0, 3 * len(rows))), np.concatenate([rows] * 3))
    assert footers.cached_metadata.cache_info().misses == read_again
    assert source.cached_bytes == (3 * sizes[1] if kept == 0 else sum(sizes)), "each footer counts"


def test_a_file_that_changed_has_another_stamp_and_is_refused(rows, tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", rows)
    source = ParquetSource.open(tmp_path)
    source.read(slice(1000, 1010))
    (tmp_path / "_SUCCESS").write_text("no row of the table")
    assert source.stamp() == source.opened_stamp
    status = (tmp_path / "b.parquet").stat()
    os.utime(tmp_path / "b.parquet", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert source.stamp() != source.opened_stamp
    for part in (slice(1000, 1010), slice(1000, 1100), slice(0, 2000)):
        with pytest.raises(InvalidInputError, match=r"b\.parquet changed since it was opened"):
            source.read(part)
    np.testing.assert_array_equal(source.read(slice(0, 10)), rows[:10])
    with pytest.raises(InvalidInputError, match="changed since it was opened; open it again"):
        in_another_process(source).read(slice(0, 10))
    again, before = ParquetSource.open(tmp_path), source.stamp()
    write(tmp_path / "c.parquet", rows)
    assert again.stamp() != before
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(InvalidInputError, match="changed"):
        again.read(slice(1500, 1510))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [None, range(300), range(299, 19, -1)], ids=["all", "in order", "reversed"])
def test_a_source_of_500_files_is_small_in_a_task(wanted, tmp_path):
    names = [f"a_column_with_a_name_that_is_long_{i:04}" for i in range(300)]
    first = write(tmp_path / "x" / "0000.parquet", pa.table({name: [1.0] for name in names}))
    for number in range(1, 500):
        os.link(first, first.with_name(f"{number:04}.parquet"))
    source = ParquetSource.open(tmp_path / "x", None if wanted is None else [names[i] for i in wanted])
    assert len(pickle.dumps(source)) < 10_000
    assert source.shape[0] == 500
    assert pickle.loads(pickle.dumps(source)) == source
    assert in_another_process(source).columns == tuple(names if wanted is None else [names[i] for i in wanted])


def test_reading_a_slice_holds_its_rows_and_two_row_groups_and_not_the_file(tmp_path, rng):
    rows = rng.normal(size=(100_000, 10))
    path = write(tmp_path / "x.parquet", table(rows, "abcdefghij"), 5000)
    source, pool, before = ParquetSource.open(path), pa.proxy_memory_pool(pa.default_memory_pool()), None
    source.read(slice(0, 10))
    chunk_cache.clear_chunks()
    before = pa.default_memory_pool()
    tracemalloc.start()
    pa.set_memory_pool(pool)
    try:
        read = source.read(slice(42_000, 57_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        pa.set_memory_pool(before)
        tracemalloc.stop()
    np.testing.assert_array_equal(read, rows[42_000:57_000])
    group = 5000 * 10 * 8
    # The first and the last one, kept for those after them, and the bytes of one, and at times of the next.
    assert peak < read.nbytes + 4.5 * group
    assert 0 < pool.max_memory() < 4 * group


def test_only_columns_that_are_asked_for_are_decoded(tmp_path, rng):
    columns = {f"p{i}": rng.normal(size=20_000) for i in range(50)}
    source = ParquetSource.open(write(tmp_path / "x.parquet", pa.table(columns), 20_000), ["p7"])
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        np.testing.assert_array_equal(source.read(slice(0, 20_000))[:, 0], columns["p7"])
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 10 * 20_000 * 8
