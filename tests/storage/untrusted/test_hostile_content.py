"""Content of strangers: long texts, kernels of many parts, ids of megabytes, and YAML that multiplies itself."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dkfm
from dkfm import errors
from dkfm.errors import DamagedStoreError, DkfmError, InvalidInputError, KernelError
from dkfm.execution.clusters import slurm_config
from dkfm.kernels import Linear, PowerSeries, serialization
from dkfm.sources.parquet import ParquetSource
from dkfm.sources.parquet_files import footers, row_groups
from dkfm.storage import json_reading

LINEAR = {"name": "linear"}
LONG = {
    "a series": {"name": "power_series", "kernel": LINEAR, "coefficients": [1.0] * 500_000},
    "a name": {"name": "q" * 7_900_000},
    "a parameter": {"name": "gaussian", "q" * 7_900_000: 1},
    "a function": {"function": "q" * 7_900_000, "source": ""},
    "a word": {"name": "gaussian", "sigma": "q" * 7_900_000},
    "a sum": {"name": "sum", "parts": [LINEAR] * 5000},
    "lists of lists": {"name": "columns", "kernel": LINEAR, "columns": [[0]] * 5000},
    "numbers": {"name": "columns", "kernel": LINEAR, "columns": [0] * (2**20 + 1)},
}


@pytest.mark.parametrize("stored", LONG.values(), ids=LONG)
def test_a_stored_kernel_that_is_too_long_is_refused_in_a_short_sentence(stored):
    with pytest.raises(DkfmError) as caught:
        serialization.from_config(stored)
    assert len(str(caught.value)) < 500


def test_a_kernel_that_no_reader_takes_is_not_written():
    with pytest.raises(KernelError, match="more than 1024 parts"):
        serialization.to_config(dkfm.kernels.Sum((Linear(),) * 1100))
    with pytest.raises(KernelError, match="at most 1024 coefficients, and got 1025"):
        PowerSeries(Linear(), np.ones(1025))
    assert (
        serialization.from_config(serialization.to_config(PowerSeries(Linear(), np.ones(1024)))).coefficients[-1] == 1
    )


def test_every_message_is_short_and_keeps_its_end():
    said = str(InvalidInputError(f"It holds {'x' * 10**6}; name another."))
    assert len(said) <= 2000
    assert said.startswith("It holds x")
    assert said.endswith("x; name another.")
    assert len(str(errors.UnfitWorkerError("tcp://h:1", "y" * 10**6))) <= 2000
    assert str(InvalidInputError("short")) == "short"


def test_values_are_shown_in_few_characters():
    nested = [1]
    for _ in range(40):
        nested = [nested] * 9
    for value in ("x" * 10**6, b"x" * 10**6, list(range(10**6)), {str(i): i for i in range(1000)}, 10**3000, nested):
        assert len(errors.format_value(value)) <= 100
    assert errors.format_value("x") == "'x'"


def ids_of(tmp_path, ids, kind, dictionary):
    table = pa.table({"id": pa.array(ids, kind), "x": np.arange(float(len(ids)))})
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=dictionary, dictionary_pagesize_limit=2**26)
    return ParquetSource.open(tmp_path / "x.parquet", id_column="id")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_an_id_of_megabytes_is_refused_in_little_memory(kind, tmp_path, monkeypatch):
    source = ids_of(tmp_path, ["y" * 2**22] * 100, kind, ["id"])
    assert (tmp_path / "x.parquet").stat().st_size < 10**6
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(InvalidInputError, match="longer than texts that name a row"):
            source.read_ids(slice(0, 100))
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 10 * 2**22  # and not a hundred of them


def test_ids_of_megabytes_each_are_refused_by_the_footer(tmp_path):
    source = ids_of(tmp_path, ["y" * 2**22 for _ in range(8)], pa.string(), False)
    with pytest.raises(InvalidInputError, match=r"row group 0 of .* takes 33"):
        source.read_ids(slice(0, 1))


@pytest.mark.parametrize("dictionary", [False, ["id"]])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(2)])
def test_ids_are_those_that_were_written(kind, dictionary, tmp_path):
    ids = [None if i == 7 else f"{i % 40:02}" for i in range(100)]
    source = ids_of(tmp_path, ids, kind, dictionary)
    for rows in (slice(0, 100), slice(5, 9), slice(50, 50)):
        found = source.read_ids(rows)
        assert found.type == kind
        assert found.equals(pa.array(ids, kind)[rows.start : rows.stop])


def test_a_column_that_says_it_has_more_than_its_rows_is_refused(tmp_path, monkeypatch):
    source = ids_of(tmp_path, ["a"] * 100, pa.string(), False)
    monkeypatch.setattr(row_groups, "_sum_declared_bytes", lambda *_: row_groups._COLUMN_BYTES + 41 * 100)
    with pytest.raises(InvalidInputError, match="at most"):
        source.read(slice(0, 100))


def test_a_footer_of_any_length_is_not_read(tmp_path, monkeypatch):
    ids_of(tmp_path, ["a"] * 100, pa.string(), False)
    monkeypatch.setattr(footers, "_MAX_FOOTER_BYTES", 100)
    with pytest.raises(InvalidInputError, match="a part of it is longer than 100 bytes"):
        ParquetSource.open(tmp_path / "x.parquet")


YAML = {
    "that multiplies itself": "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "dkfm: *i",
    "that holds itself": "dkfm: &a {jobs: *a}",
    "that is long": "dkfm: {jobs: " + "x" * 10**6 + "}",
    "of a long text": "dkfm: {jobs: " + "x" * 10**4 + "}",
}


@pytest.mark.parametrize("text", YAML.values(), ids=YAML)
def test_yaml_takes_no_more_than_it_says(text, tmp_path):
    (tmp_path / "slurm.yaml").write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        slurm_config.read_slurm_file(str(tmp_path / "slurm.yaml"))
    assert len(str(caught.value)) < 500


def test_aliases_that_multiply_nothing_are_read(tmp_path):
    (tmp_path / "slurm.yaml").write_text("x: &x {wait: 2h}\ndkfm: *x")
    assert slurm_config.read_slurm_file(str(tmp_path / "slurm.yaml")).first_worker_timeout_seconds == 7200


def test_json_of_millions_of_empty_lists_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    text = b'{"a": [' + b"[]," * 2_200_000 + b"[]]}"
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(DamagedStoreError, match="lists and objects"):
        json_reading.parse_json(text, "x.json")
