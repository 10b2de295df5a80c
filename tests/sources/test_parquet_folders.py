"""Tables as people have them: partition folders, and patterns of files."""

import fnmatch
import pickle
from itertools import permutations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.errors import InvalidInputError
from dkfm.sources import parquet
from dkfm.sources.label_column import read_label_column
from dkfm.sources.opening import open_source
from dkfm.sources.parquet_files.journal import StoredNames
from dkfm.sources.parquet_files.listing import TableFiles
from helpers.parquet_files import refusal, table, write

FILES = ["country=de/city=Bad%20Honnef/a.parquet", "country=de/city=Ulm/a.parquet", "country=fr/city=Lyon/a.parquet"]


@pytest.fixture
def partitioned(rows, tmp_path):
    for number, name in enumerate(FILES):
        write(tmp_path / "t" / name, rows[100 * number : 100 * (number + 1)], 30)
    return tmp_path / "t"


def test_keys_of_partitions_are_no_columns(partitioned, rows):
    source = open_source(partitioned)
    assert source.columns == ("a", "b", "c")
    np.testing.assert_array_equal(source.read(slice(50, 250)), rows[50:250])
    assert source.locate_row(150) == (str(partitioned / FILES[1]), 50)
    np.testing.assert_array_equal(open_source(partitioned / "country=de").read(slice(0, 200)), rows[:200])


@pytest.mark.parametrize(("key", "values"), [("country", ["de", "de", "fr"]), ("city", ["Bad Honnef", "Ulm", "Lyon"])])
def test_a_key_of_partitions_may_be_the_ids(key, values, partitioned):
    source = pickle.loads(pickle.dumps(open_source(partitioned, id_column=key)))
    parquet._cached_layouts.clear_unless_busy()
    assert source.columns == ("a", "b", "c")
    expected = np.repeat(values, 100)
    for part in [slice(0, 300), slice(95, 205), slice(10, 11), slice(5, 5)]:
        ids = source.read_ids(part)
        assert ids.type == pa.string()
        assert ids.to_pylist() == expected[part].tolist()


def test_a_partition_of_nulls_has_null_ids(rows, tmp_path):
    write(tmp_path / "t" / "day=__HIVE_DEFAULT_PARTITION__" / "a.parquet", rows[:2])
    assert open_source(tmp_path / "t", id_column="day").read_ids(slice(0, 2)).to_pylist() == [None, None]


def test_a_key_that_is_a_column_too_is_read_from_the_files(rows, tmp_path):
    data = table(rows[:3]).append_column("day", pa.array([1, 2, 3]))
    write(tmp_path / "t" / "day=7" / "a.parquet", data)
    assert open_source(tmp_path / "t", id_column="day").read_ids(slice(0, 3)).to_pylist() == [1, 2, 3]


def test_ids_that_some_files_lack_are_refused(partitioned, rows):
    write(partitioned / "a.parquet", rows[:5])
    assert "has no column 'country' for ids" in refusal(partitioned, id_column="country")
    assert "has no column 'continent' for ids" in refusal(partitioned, id_column="continent")


def test_two_columns_of_the_name_of_the_ids_are_refused(tmp_path):
    path = write(tmp_path / "x.parquet", pa.table([[1.0, 2.0], [3, 4], [5, 6]], ["a", "id", "id"]))
    with pytest.raises(InvalidInputError, match="has column 'id' more than once"):
        parquet.ParquetSource.open(path, id_column="id")


TEXTS = [pa.string(), pa.large_string()]
if int(pa.__version__.partition(".")[0]) >= 18:  # Arrow casts views of text, and writes them to Parquet
    TEXTS.append(pa.string_view())


@pytest.mark.parametrize("types", list(permutations(TEXTS, 2)))
def test_text_ids_of_two_writers_have_the_type_of_the_first_file(types, rows, tmp_path):
    for number, dtype in enumerate(types):
        ids = pa.array([f"{number}a", f"{number}b"], dtype)
        write(tmp_path / f"{number}.parquet", table(rows[:2]).append_column("id", ids))
    read = open_source(tmp_path, id_column="id").read_ids(slice(0, 4))
    assert read.equals(pa.array(["0a", "0b", "1a", "1b"], types[0]))


@pytest.mark.parametrize("dtype", [pa.time64("ns"), pa.month_day_nano_interval()], ids=str)
def test_ids_of_times_that_no_reader_of_scores_has_are_refused(dtype):
    frame = pa.table({"a": [1.0, 2.0], "id": pa.nulls(2, dtype)})
    with pytest.raises(InvalidInputError, match=r"The column .id. of .* and must hold plain numbers, text or times"):
        open_source(frame, id_column="id")


@pytest.mark.parametrize("dtype", TEXTS, ids=str)
def test_labels_are_text_of_any_type(dtype, tmp_path):
    path = write(tmp_path / "x.parquet", pa.table({"a": [1.0, 2.0], "kind": pa.array(["red", "blue"], dtype)}))
    assert read_label_column(open_source(path, columns=["a"]), "kind").tolist() == ["red", "blue"]


def test_a_column_of_nulls_alone_in_one_file_is_nan(rows, tmp_path):
    write(tmp_path / "a.parquet", table(rows[:2]))
    write(tmp_path / "b.parquet", table(rows[:3]).set_column(1, "b", pa.nulls(3)))
    for source in (open_source(tmp_path), open_source(tmp_path / "b.parquet", columns=["a", "b", "c"])):
        found = source.read(slice(source.shape[0] - 3, source.shape[0]))
        np.testing.assert_array_equal(found, np.where([False, True, False], np.nan, rows[:3]))
    assert "'b' of type null" in refusal(tmp_path / "b.parquet")  # which nobody asked for


def test_each_column_without_numbers_is_named_with_its_type(rows, tmp_path):
    kinds = pa.array(["x"] * 3).dictionary_encode()
    table = pa.table({"a": rows[:3, 0], "when": pa.array([0, 1, 2], pa.timestamp("us")), "kind": kinds, "b": ["y"] * 3})
    write(tmp_path / "x.parquet", table.append_column("c", table["b"]).append_column("d", pa.array([b"z"] * 3)))
    message = refusal(tmp_path / "x.parquet")
    assert "has column 'when' of type timestamp[us] and column 'kind' of type dictionary<" in message
    assert "and columns 'b', 'c' of type string and others, and features are numbers" in message
    assert "; dkfm fit and dkfm compare also have --exclude-columns and --label-column." in message


def test_an_index_that_is_a_range_is_no_column_of_ids(rows, tmp_path):
    frame = pd.DataFrame(rows[:5], columns=list("abc")).rename_axis("id")
    frame.to_parquet(tmp_path / "x.parquet")
    assert "for ids or labels; pandas keeps this index as a range" in refusal(tmp_path / "x.parquet", id_column="id")
    frame.reset_index().to_parquet(tmp_path / "x.parquet")
    assert open_source(tmp_path / "x.parquet", id_column="id").read_ids(slice(0, 5)).to_pylist() == [0, 1, 2, 3, 4]


def test_a_key_is_no_column_of_features(partitioned):
    assert "has no column 'country' (keys of folders are no features, but may be the id_column)" in refusal(
        partitioned, ["a", "country"]
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("country=de", [0, 1]),
        ("country=*", [0, 1, 2]),
        ("country=*/city=[LU]*", [1, 2]),
        ("country=*/city=[!LU]*/*.parquet", [0]),
        ("**/a.parquet", [0, 1, 2]),
        ("*/city=U?m/**/a.parquet", [1]),
        ("**/city=Ulm", [1]),
    ],
)
def test_a_pattern_selects_files_and_folders(pattern, expected, partitioned, rows):
    source = open_source(f"{partitioned}/{pattern}")
    assert source.name == f"{partitioned}/{pattern}"
    wanted = np.concatenate([rows[100 * n : 100 * (n + 1)] for n in expected])
    parquet._cached_layouts.clear_unless_busy()
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).read(slice(0, 300)), wanted)


def test_what_a_pattern_does_not_match_is_not_looked_at(partitioned, rows, tmp_path):
    (partitioned / "other").mkdir()
    (partitioned / "other" / "link").symlink_to(tmp_path)
    (partitioned / "linked").symlink_to(tmp_path)
    assert open_source(f"{partitioned}/country=*/city=U*").shape == (100, 3)
    for pattern in ("*", "**/a.parquet", "other/*"):
        with pytest.raises(InvalidInputError, match="is refused: it is a link"):
            open_source(f"{partitioned}/{pattern}")


def test_names_that_were_read_do_not_travel_with_a_source(partitioned):
    names = tuple(f"country=de/{'x' * 50}{number}.parquet" for number in range(100))
    table = TableFiles(partitioned, names=StoredNames(partitioned, "0" * 32))
    vars(table)["explicit_names"] = names
    assert len(pickle.dumps(table)) < 1000
    assert pickle.loads(pickle.dumps(table)) == table


def test_a_pattern_without_files_is_refused(partitioned):
    assert "holds no .parquet file" in refusal(partitioned / "country=xx*")
    with pytest.raises(InvalidInputError, match="is no pattern of files"):
        open_source(f"{partitioned}/country=[z-a]")
    with pytest.raises(InvalidInputError, match="There is no"):
        open_source(f"{partitioned}/nothing")


def test_a_name_with_the_characters_of_a_pattern_is_a_name_if_it_exists(rows, tmp_path):
    write(tmp_path / "a[1].parquet", rows[:4])
    write(tmp_path / "a1.parquet", rows[4:9])
    assert open_source(tmp_path / "a[1].parquet").shape == (4, 3)
    assert open_source(tmp_path / "a[0-9].parquet").shape == (5, 3)


def test_new_files_outside_a_pattern_change_nothing_and_those_inside_do(partitioned, rows):
    source = open_source(f"{partitioned}/country=de/**")
    before, state = source.stamp(), source.stamp(include_ctime=True)
    write(partitioned / "country=fr" / "b.parquet", rows[:5])
    assert (source.stamp(), source.stamp(include_ctime=True)) == (before, state)
    write(partitioned / "country=de" / "b.parquet", rows[:5])
    assert source.stamp() != before


@given(
    st.text("ab*?[]!^-", min_size=1, max_size=6).filter(lambda text: "**" not in text), st.text("ab]!^-", max_size=5)
)
def test_a_part_of_a_pattern_matches_as_fnmatch_does(pattern, name):
    files = TableFiles("t", pattern)
    try:
        matches = bool(files._is_match(name))
    except InvalidInputError:
        return  # a range that is none, which fnmatch takes for one without members
    assert matches == fnmatch.fnmatchcase(name, pattern)


def test_named_files_are_read_in_the_order_of_their_names(partitioned, rows):
    source = open_source(partitioned, id_column="city").with_files((FILES[2], FILES[0]))
    np.testing.assert_array_equal(source.read(slice(0, 200)), np.concatenate([rows[200:300], rows[:100]]))
    assert source.read_ids(slice(99, 101)).to_pylist() == ["Lyon", "Bad Honnef"]
    before = source.stamp(include_ctime=True)
    write(partitioned / "country=it" / "b.parquet", rows[:5])
    assert source.stamp(include_ctime=True) == before
    (partitioned / FILES[0]).unlink()
    assert not source.is_opening_valid(open_source(partitioned).stamp())
    with pytest.raises(InvalidInputError, match="has no country=de"):
        source.stamp()
