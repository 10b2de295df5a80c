"""The README is the manual: its commands, examples, numbers and names are those of the code."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dkfm
from dkfm import kernels
from dkfm.core import budget
from dkfm.kernels import serialization

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)
SHELL = re.findall(r"```bash\n(.*?)```", TEXT, re.S)


@pytest.fixture
def folder(tmp_path, rng):
    """Where a reader has followed the README so far: rows, and the file that it names."""
    np.save(tmp_path / "train.npy", rng.normal(size=(200, 5)))
    np.save(tmp_path / "labels.npy", rng.integers(0, 3, 200))
    np.save(tmp_path / "test.npy", rng.normal(size=(500, 5)))
    table = {"id": np.arange(1000, 1500), **dict(zip("abcde", np.load(tmp_path / "test.npy").T, strict=True))}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    for code in PYTHON:
        if (name := re.match(r"# (\w+\.py)\n", code)) is not None:
            (tmp_path / name[1]).write_text(code)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_every_python_example_runs_as_a_script(number, folder):
    # What a notebook may do at the top, a script that starts processes must guard.
    code = PYTHON[number].replace("1_000_000", "20_000").replace("3000", "300").replace("20_000, 2", "2000, 2")
    guarded = "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in code.splitlines())
    (folder / "example.py").write_text(guarded)
    environment = {**os.environ, "DASK_TEMPORARY_DIRECTORY": str(folder)}
    subprocess.run([sys.executable, "example.py"], cwd=folder, check=True, timeout=120, env=environment)


@pytest.mark.slow
def test_every_shell_example_runs_in_order(folder):
    for line in "".join(SHELL).strip().splitlines():
        program, *arguments = line.split()
        assert program == "dkfm"
        subprocess.run([sys.executable, "-m", "dkfm", *arguments], cwd=folder, check=True, timeout=120)
    assert dkfm.open_scores(folder / "scores.zarr").shape == (500, 20)
    assert dkfm.open_scores(folder / "cauchy.zarr").shape == (500, 5)
    assert dkfm.open_scores(folder / "labels.zarr").dtype == np.int64
    assert (folder / "compare.html").read_text().count("<img ") == 3 * 4
    table = dkfm.open_scores(folder / "scores.parquet").compute(scheduler="synchronous")
    assert table.columns.tolist() == ["id", *(f"kernelpca{i}" for i in range(20)), "reconstruction_error"]
    assert table["id"].tolist() == list(range(1000, 1500))


def test_its_examples_are_short():
    lengths = [len([x for x in code.splitlines() if x.strip()]) for code in PYTHON]
    assert max(lengths) <= 12
    own = next(length for code, length in zip(PYTHON, lengths, strict=True) if "def cauchy" in code)
    assert own == 1 + 3


def test_the_kernels_of_the_table_are_those_that_have_a_name():
    rows = re.findall(r"^\| `(\w+)\(([\w, ]*)\)` \| .* \| ([\w, ]*)\|$", TEXT, re.M)
    named = {name: kernel for name, kernel in vars(kernels).items() if config_name(kernel)}
    assert {name for name, _, _ in rows} == set(named) - {"Precomputed"}
    for name, parameters, notes in rows:
        kernel = named[name]()
        assert [field.name for field in dataclasses.fields(kernel)] == [p for p in parameters.split(", ") if p]
        assert ("s" in notes.replace(",", " ").split()) == kernel.supports_sparse
        assert ("conditional" in notes) == (kernel.definiteness is kernels.Definiteness.CONDITIONAL)
        assert ("indefinite" in notes) == (kernel.definiteness is kernels.Definiteness.INDEFINITE)


def config_name(kernel):
    return isinstance(kernel, type) and kernel in serialization._PLAIN.values()


def test_the_first_screen_has_the_two_commands():
    first = TEXT.splitlines()[:24]
    assert "    python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/dkfm demo" in first
    assert "    python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest -n 2" in first


def test_the_table_of_limits_is_what_the_budget_predicts():
    rows = re.findall(r"^\| ([\d,]+) \| ([\d.]+) GB \|", TEXT, re.M)
    assert len(rows) == 6
    for n, gigabytes in rows:
        assert f"{budget.fit_bytes(int(n.replace(',', '')), 50) / 1e9:.2g}" == f"{float(gigabytes):.2g}"
