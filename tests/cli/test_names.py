"""Names that the command line refuses: outputs that promise another format, and misspelt options and kernels."""

import dataclasses
import re
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import dkfm
from dkfm.cli import option_parsing
from dkfm.cli.app import main
from dkfm.errors import InvalidInputError, find_similar_names
from dkfm.kernels.serialization import _NUMERIC

SUGGESTS_COMMANDS = hasattr(click.exceptions, "NoSuchCommand")
"""Whether this version of click says which command was meant."""

OTHERS = [".csv", ".npy", ".npz", ".h5", ".hdf5", ".feather", ".arrow", ".txt", ".json", ".CSV", ".pq", ".PARQUET"]


@pytest.fixture
def here(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    np.save("train.npy", rng.normal(size=(40, 3)))
    dkfm.KernelPCA(2, kernel=dkfm.kernels.Linear()).fit(np.load("train.npy")).save("model")
    return tmp_path


@pytest.fixture
def run(here):
    return lambda line: CliRunner().invoke(main, line.split())


def test_a_fit_names_the_columns_that_it_takes_and_info_names_them_later(run, here, rng):
    pq = pytest.importorskip("pyarrow.parquet")  # reason: it is an extra
    pa = pytest.importorskip("pyarrow")  # reason: it is an extra
    pq.write_table(pa.table({"id": range(9), **dict(zip("xy", rng.normal(size=(2, 9)), strict=True))}), "t.parquet")
    result = run("fit t.parquet new --kernel linear --id-column id")
    assert re.search(r"INFO input: columns 'x', 'y' of ", result.stderr)
    assert "column_names" in (found := run("info new").output)
    assert "id" not in found.partition("column_names")[2].partition("\n")[0]


@pytest.mark.parametrize("options", ["", " --components 2", " --method features --basis cholesky"])
def test_a_fit_names_the_file_of_a_row_that_is_not_finite(run, here, rng, options):
    pq = pytest.importorskip("pyarrow.parquet")  # reason: it is an extra
    pa = pytest.importorskip("pyarrow")  # reason: it is an extra
    (here / "t").mkdir()
    for name, x in [("a", [1.0, 2.0, 3.0]), ("b", [4.0, None, 6.0])]:
        pq.write_table(pa.table({"x": x, "y": [1.0, 2.0, 3.0]}), here / "t" / f"{name}.parquet")
    result = run(f"fit t new --kernel linear{options}")
    assert result.exit_code == 1
    assert "b.parquet must be finite, and row 1 contains NaN in column 'x' (1 of " in result.stderr


@pytest.mark.parametrize("suffix", OTHERS)
def test_an_output_that_promises_another_format_is_refused_before_any_work(run, here, suffix):
    before = sorted(here.rglob("*"))
    for line in (f"score none none out{suffix}", f"score model train.npy out{suffix} --dry-run"):  # inputs come later
        result = run(line)
        assert result.exit_code == 1
        assert f"out{suffix} cannot be a {suffix} file; dkfm writes Zarr" in result.stderr
        assert "or Parquet (name it out.parquet)" in result.stderr
        assert result.stderr.count("\n") == 1
    with pytest.raises(InvalidInputError, match="dkfm writes Zarr"):
        dkfm.batch_score("model", "train.npy", Path(f"out{suffix}"), overwrite=True)
    assert sorted(here.rglob("*")) == before


@pytest.mark.alike
@pytest.mark.parametrize("suffix", [*OTHERS, ".parquet"])
def test_a_model_that_promises_another_format_is_refused_before_the_fit(run, here, suffix):
    before = sorted(here.rglob("*"))
    result = run(f"fit none.npy new{suffix} --kernel linear")
    assert result.exit_code == 1
    assert f"new{suffix} cannot be a {suffix} file; dkfm writes Zarr: name it new.zarr." in result.stderr
    with pytest.raises(InvalidInputError, match="dkfm writes Zarr"):
        dkfm.load("model").save(f"new{suffix}", overwrite=True)
    with pytest.raises(InvalidInputError, match="dkfm writes Zarr"):
        dkfm.load("model").save(f"memory://bucket/new{suffix}")
    assert sorted(here.rglob("*")) == before


@pytest.mark.costly
@pytest.mark.parametrize("name", ["out", "out.zarr", "out.2024", "run.1.zarr", "scores.of.me", "a.csv/out"])
def test_names_that_promise_nothing_else_are_taken(run, here, name):
    (here / "a.csv").mkdir()
    assert run(f"score model train.npy {name}").exit_code == 0
    assert dkfm.open_scores(name).shape == (40, 2)


def test_an_input_of_an_unknown_format_says_which_are_known(run, here):
    Path("rows.csv").write_text("1,2,3\n")
    told = run("score model rows.csv out").stderr
    assert "rows.csv is neither a .npy, .npz or .parquet file" in told
    assert "save its rows as one of these" in told


@pytest.mark.parametrize("more", ["", " --dry-run"])
def test_a_fit_without_rows_says_nothing_else(run, here, more):
    assert (
        run(f"fit missing.npy new --kernel gaussian{more}").stderr
        == f"InvalidInputError: There is no {here / 'missing.npy'}.\n"
    )


@pytest.mark.parametrize("name", sorted(_NUMERIC))
def test_a_misspelt_name_is_told_the_one_that_was_meant(name):
    middle = len(name) // 2
    for wrong in (name[:middle] + name[middle + 1 :], f"{name}s", name.upper(), name[:4], name.replace("_", "-")):
        assert name in find_similar_names(wrong, _NUMERIC), wrong


@pytest.mark.parametrize("name", ["spline", "product", "sine-wave", "cubic", "poisson", "", "x", "a" * 50])
def test_an_unrelated_name_is_told_no_name(name):
    assert find_similar_names(name, _NUMERIC) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fit a b --kernal linear", "Did you mean --kernel\\?"),
        ("fit a b --n-component 3", "Did you mean --components\\?"),
        ("score a b c --rows 3", "Did you mean --chunk-rows\\?"),
        ("score a b c --timeout 3", "Did you mean --stall-timeout\\?"),
        ("fit a b --seed 3", r"No such option '--seed'\. Did you mean --random-state\?"),
        ("score a b c --seed 3", r"No such option:? '?--seed'?\.?\n"),  # click's versions differ
        ("compare a --sigma 3", r"No such option '--sigma'\. .* --kernel NAME:sigma=VALUE\.\n"),
        ("validate a", r"No such command 'validate'\. Did you mean verify\?\n"),
        ("fit a b --degree 3", r"No such option '--degree'\. .* --param degree=VALUE\.\n"),
        ("fit a b --length-scale=3", r"No such option '--length-scale'\. .* --param length_scale=VALUE\.\n"),
        ("predict a b c", r"No such command 'predict'\. Did you mean score\?\n"),
        ("score a b c --colour", r"No such option:? '?--colour'?\.?\n"),
        ("score a b c --address x", r"No such option:? '?--address'?\.?\n"),
        (
            "skore a b c",
            r"No such command 'skore'\." + " Did you mean score" * SUGGESTS_COMMANDS,
        ),
        ("bake", r"No such command 'bake'\.\n"),
    ],
)
def test_an_unknown_option_or_command_is_told_what_is_near_and_no_nonsense(run, line, words):
    result = run(line)
    assert result.exit_code == 2
    assert re.search(words, result.stderr)
    assert ("Did you mean" in result.stderr) == ("Did you mean" in words)


def test_the_parameters_that_an_option_may_mean_are_those_of_the_kernels():
    fields = {field.name for kernel in _NUMERIC.values() for field in dataclasses.fields(kernel)}
    assert set(option_parsing.KERNEL_PARAMETERS) == (fields | {"coef0"}) - {"alpha", "columns"}


def test_an_unknown_kernel_is_told_those_that_there_are(run):
    assert "there are additive_chi2, additive_chi_squared" in run("fit train.npy m --kernel spline").stderr
    with pytest.raises(dkfm.errors.KernelError, match="it has additive_chi2, chi2"):
        dkfm.kernels.from_sklearn("warped")
