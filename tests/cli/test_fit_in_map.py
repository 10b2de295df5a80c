"""`dkfm fit --map`: components and discriminants of all rows of a file, in the features of a map."""

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import dkfm
from dkfm import ExactFeatureMap, KernelFisher, KernelPCA, kernels
from dkfm.cli import fit
from dkfm.cli.app import main
from dkfm.errors import DkfmWarning


@pytest.fixture
def data(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    X = rng.normal(size=(600, 3))
    y = (X[:, 0] > 0).astype(np.int64)
    np.save("x.npy", X)
    np.save("y.npy", y)
    np.save("few.npy", y[:5])
    pd.DataFrame(X, columns=["a", "b", "c"]).assign(label=y, id=range(600)).to_parquet("x.parquet")
    phi = ExactFeatureMap(kernels.Gaussian(2.0), basis="cholesky", tol=1e-3)
    phi.fit(X).save("map")
    phi.fit(pd.DataFrame(X[:, [2, 0]], columns=["c", "a"])).save("named")
    return X, y


def run(line, exit_code=0):
    ended = CliRunner().invoke(main, line.split())
    assert ended.exit_code == exit_code, ended.output
    return ended.output if exit_code else ended.stdout


def test_components_of_a_map(data):
    X, _ = data
    facts = json.loads(run("fit x.npy pca --method pca --map map --components 3 --json"))
    assert facts["model"] == "pca"
    truth = KernelPCA.from_map(dkfm.load("map"), 3, X)
    np.testing.assert_allclose(dkfm.load("pca").transform(X), truth.transform(X), atol=1e-12)


@pytest.mark.costly
@pytest.mark.parametrize("labels", ["x.npy fda --labels y.npy", "x.parquet fda --label-column label --id-column id"])
def test_discriminants_of_a_map(data, labels):
    X, y = data
    run(f"fit {labels} --method fisher --map map --shrinkage 0.01")
    truth = KernelFisher.from_map(dkfm.load("map"), y, X, shrinkage=0.01)
    np.testing.assert_array_equal(dkfm.load("fda").predict(X), truth.predict(X))


def test_columns_are_those_of_the_map(data):
    X, _ = data
    run("fit x.parquet selected --method features --kernel gaussian --param sigma=2 --basis cholesky --columns c,a")
    run("fit x.parquet pca --map selected --components 2")
    pca = dkfm.load("pca")
    assert list(pca.feature_names_in_) == ["c", "a"]
    for columns in ("a,c", "c,b"):
        assert "give both the same columns" in run(f"fit x.parquet m --map selected --columns {columns}", 1)
    truth = KernelPCA.from_map(dkfm.load("selected"), 2, pd.DataFrame(X[:, [2, 0]], columns=["c", "a"]))
    np.testing.assert_allclose(pca.eigenvalues_, truth.eigenvalues_, rtol=1e-12)


@pytest.mark.parametrize(
    "line",
    [
        "x.npy m --components 2",
        "x.npy m --method fisher --labels y.npy",
        "x.npy m --method ridge --targets y.npy",
        "x.parquet m --map named --components 2",
        "x.parquet m --map named --method fisher --label-column label",
    ],
)
def test_a_plan_says_what_the_pass_takes_and_writes_nothing(data, line):
    before = sorted(Path.cwd().rglob("*"))
    line = line if "--map" in line else f"{line} --map map"
    plan = json.loads(run(f"fit {line} --dry-run --json"))
    phi = dkfm.load("named" if "named" in line else "map")
    assert plan["method"] == f"sums of {phi.rank_:,} features of all rows, in one pass"
    assert (plan["rows"], plan["columns"], plan["landmarks"]) == (len(data[0]), phi.n_features_in_, phi.rank_)
    assert plan["disk_bytes"] == 0
    assert sorted(Path.cwd().rglob("*")) == before
    run(f"fit {line}")  # what is planned can be fitted


def test_labels_of_a_table_are_no_features_of_the_plan_nor_of_the_fit(data):
    line = "fit x.parquet m --method fisher --kernel gaussian --param sigma=2 --label-column label --id-column id"
    assert json.loads(run(f"{line} --dry-run --json"))["columns"] == 3
    run(line)
    assert list(dkfm.load("m").feature_names_in_) == ["a", "b", "c"]


@pytest.mark.alike
@pytest.mark.parametrize(
    ("line", "exit_code", "sentence"),
    [
        ("x.npy m --method pca", 2, "takes --kernel, as --kernel gaussian, or --map"),
        ("x.npy m --map map --kernel rbf", 2, "takes --kernel, as --kernel gaussian, or --map"),
        ("x.npy m --map map --param sigma=1", 2, "--param does not go with --map"),
        ("x.npy m --map map --standardize", 2, "--standardize does not go with --map"),
        ("x.npy m --map map --method features", 2, "--map belongs to --method pca"),
        ("x.parquet m --map map --dry-run", 1, "5 columns and the map was fitted with 3"),
        ("x.npy m --map map --method fisher --labels y.npy --shrinkage auto --dry-run", 2, "--shrinkage auto needs"),
        ("x.npy m --map map --method fisher --labels y.npy --shrinkage auto", 2, "--shrinkage auto needs"),
        ("x.npy m --map nowhere", 1, "nowhere"),
        ("x.npy map --map map --dry-run", 1, "map"),
        ("x.npy m --map map --method ridge --targets none.npy --dry-run", 1, "There is no none.npy"),
        (
            "x.npy m --map map --method fisher --labels few.npy --dry-run",
            1,
            "shape (5,), and must have 600 rows",
        ),
        ("x.parquet m --map named --method fisher --label-column none --dry-run", 1, "none"),
        ("x.parquet m --map named --method ridge --target-columns label,c", 1, "'c' is a feature of the map"),
        ("x.parquet m --map named --method ridge --target-columns c --dry-run", 1, "'c' is a feature of the map"),
        ("x.parquet m --map map", 1, "5 columns and the map was fitted with 3"),
        ("x.npy map --map map --overwrite", 1, "map"),
        ("x.npy map --map map --overwrite --dry-run", 1, "which this job reads"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(data, line, exit_code, sentence):
    output = run(f"fit {line}", exit_code)
    assert sentence in output
    assert "Traceback" not in output
    assert isinstance(dkfm.load("map"), ExactFeatureMap)


def test_a_model_of_components_is_no_map(data):
    run("fit x.npy pca --kernel rbf --components 2")
    assert "--map takes a feature map, and pca is a KernelPCA" in run("fit x.npy m --map pca", 1)


def test_few_components_of_a_sigmoid_drop_its_negative_part_as_in_python(data):
    with pytest.warns(DkfmWarning, match="negative"):
        run("fit x.npy pca --kernel sigmoid --components 2")
    assert "NotPSDError" in run("fit x.npy pca2 --kernel sigmoid --components 2 --on-indefinite raise", 1)


@pytest.mark.parametrize("dry_run", ["", " --dry-run"])
def test_a_feature_with_the_name_of_ids_is_a_warning(data, dry_run):
    line = "fit x.parquet m --kernel gaussian:sigma=2"
    with pytest.warns(DkfmWarning, match="The column 'id' is a feature; .* --id-column id, or leave it out with"):
        run(f"{line}{dry_run}")
    for chosen in ("--id-column id", "--columns a,id"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DkfmWarning)
            run(f"{line} {chosen} --overwrite{dry_run}")


def test_a_table_that_is_replaced_after_its_labels_are_read_is_refused(data, monkeypatch):
    pd.read_parquet("x.parquet").iloc[::-1].to_parquet("other.parquet")
    split_labels = fit._split_labels

    def split_and_replace_table(*arguments):
        found = split_labels(*arguments)
        Path("other.parquet").replace("x.parquet")
        return found

    monkeypatch.setattr(fit, "_split_labels", split_and_replace_table)
    line = "fit x.parquet m --map named --method fisher --label-column label"
    assert "x.parquet changed while it was read" in run(line, 1)
    assert not Path("m").exists()


@pytest.mark.parametrize(
    "line", ["--components 2", "--method ridge --target-columns y", "--method fisher --label-column label"]
)
def test_the_columns_of_a_table_are_those_of_the_map(data, line):
    table = pd.read_parquet("x.parquet").assign(comment="some text", y=1.0)
    table[["comment", *table.columns[:-2][::-1], "y"]].to_parquet("more.parquet")
    line = f"fit more.parquet m --map named {line}"
    assert json.loads(run(f"{line} --dry-run --json"))["columns"] == 2
    run(line)
    assert list(dkfm.load("m").feature_names_in_) == list(dkfm.load("named").feature_names_in_)
