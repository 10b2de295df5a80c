"""`dkfm fit --method ridge`: a regression on targets of a file or of columns, and a classifier of labels."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import dkfm
from dkfm.cli.app import main
from dkfm.cli.verify import format_model_size
from dkfm.kernels import Gaussian


@pytest.fixture
def data(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    X = rng.normal(size=(300, 3))
    Y = np.column_stack([np.sin(X[:, 0]), X[:, 1] ** 2])
    np.save("x.npy", X)
    np.save("one.npy", Y[:, 0])
    np.save("two.npy", Y)
    np.save("labels.npy", np.where(X[:, 0] > 0, "b", "a"))
    table = pd.DataFrame(X, columns=["a", "b", "c"]).assign(
        s=Y[:, 0], t=Y[:, 1], label=(X[:, 0] > 0) * 3, id=range(300)
    )
    table.to_parquet("x.parquet")
    return X, Y


def run(line, exit_code=0):
    ended = CliRunner().invoke(main, f"fit {line}".split())
    assert ended.exit_code == exit_code, ended.output
    return ended.output if exit_code else ended.stdout


@pytest.mark.costly
@pytest.mark.parametrize(
    "solver",
    [
        "",
        *(
            pytest.param(f" --solver {name}", marks=pytest.mark.slow)
            for name in ("dense", "tiled --tile-rows 90", "cg")
        ),
    ],
)
@pytest.mark.parametrize(
    ("source", "columns"),
    [
        ("x.npy m --targets one.npy", 0),
        ("x.npy m --targets two.npy", slice(None)),
        ("x.parquet m --target-columns s --columns a,b,c", 0),
        ("x.parquet m --target-columns s,t --columns a,b,c --id-column id", slice(None)),
    ],
)
def test_the_model_is_that_of_python(data, source, columns, solver):
    X, Y = data
    facts = json.loads(run(f"{source} --method ridge --kernel gaussian --param sigma=2 --alpha 0.01{solver} --json"))
    assert facts["outputs"] == {"predict": Y[:, columns].reshape(300, -1).shape[1]}
    truth = dkfm.KernelRidge(0.01, kernel=Gaussian(2.0)).fit(X, Y[:, columns])
    found = dkfm.load("m").predict(pd.DataFrame(X, columns=["a", "b", "c"]) if "parquet" in source else X)
    np.testing.assert_allclose(found, truth.predict(X), atol=1e-8)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("source", "labels"),
    [
        ("x.npy m --labels labels.npy", "ab"),
        ("x.parquet m --label-column label --columns a,b,c", (0, 3)),
    ],
)
def test_labels_make_a_classifier_and_loo_chooses_the_penalty(data, source, labels):
    X, _ = data
    summary = run(f"{source} --method ridge --kernel gaussian --param sigma=2 --alpha loo")
    found = dkfm.load("m")
    assert tuple(found.classes_) == tuple(labels)
    assert f"300 landmarks, 1 target, alpha {found.alpha_:.3g}, " in summary
    left_out = np.sqrt(np.mean((found.loo_predictions_ - np.where(X[:, 0] > 0, 1, -1)) ** 2))
    assert f", root mean squared error of decision values of left-out rows {left_out:.3g}, certificate" in summary
    truth = dkfm.KernelRidgeClassifier("loo", kernel=Gaussian(2.0)).fit(X, np.where(X[:, 0] > 0, labels[1], labels[0]))
    assert found.alpha_ == truth.alpha_


def test_penalties_to_choose_from_are_given(data):
    facts = json.loads(
        run("x.npy m --method ridge --kernel gaussian --targets one.npy --alpha loo --alphas 1e-3,1/2,40 --json")
    )
    found = dkfm.load("m")
    assert found.alphas_.tolist() == [1e-3, 0.5, 40.0]
    assert found.alpha_ == facts["alpha"]


@pytest.mark.parametrize("targets", ["one", "two"])
def test_errors_of_left_out_rows_are_told(data, targets):
    line = f"x.npy m --method ridge --kernel gaussian --param sigma=2 --targets {targets}.npy"
    facts = json.loads(run(f"{line} --alpha loo --json"))
    found, y = dkfm.load("m"), np.load(f"{targets}.npy")
    expected = np.sqrt(np.mean((found.loo_predictions_ - y) ** 2, axis=0)).reshape(-1)
    np.testing.assert_allclose(facts["left_out_rmse"], expected, rtol=1e-9)
    np.testing.assert_array_equal(facts["alpha"], found.alpha_)
    told = json.loads(CliRunner().invoke(main, ["info", "m", "--json"]).stdout)
    assert (told["left_out_rmse"], told["alpha"]) == (facts["left_out_rmse"], facts["alpha"])
    ends = ", ".join(f"{error:.3g}" for error in expected)
    summary = run(f"{line} --alpha loo --overwrite")
    assert f", root mean squared error of left-out rows {ends}, certificate" in summary
    assert "left-out" not in run(f"{line} --alpha 1 --overwrite")
    assert "left_out_rmse" not in json.loads(CliRunner().invoke(main, ["info", "m", "--json"]).stdout)


def test_a_penalty_at_an_end_of_its_path_is_told(data, rng):
    X, y = data[0], data[1][:, 0] + rng.normal(size=300)
    for path, told in (([10.0, 1e4], True), ([1e-9, 10.0], True), ([1e-9, 10.0, 1e4], False)):
        model = dkfm.KernelRidge("loo", kernel=Gaussian(2.0), alphas=path).fit(X, y)
        assert model.alpha_ == 10.0
        end = (
            f"alpha 10, at an end of the penalties that were tried, {path[0]:.3g} to {path[-1]:.3g}, root mean squared"
        )
        assert (end in format_model_size(model._to_stored())) is told


@pytest.mark.costly
@pytest.mark.parametrize(("y", "predicts"), [("--targets two.npy", "values"), ("--labels labels.npy", "labels")])
def test_a_regression_in_the_features_of_a_map(data, y, predicts):
    X, Y = data
    dkfm.ExactFeatureMap(Gaussian(2.0), basis="cholesky").fit(X).save("map")
    run(f"x.npy m --method ridge --map map --alpha 0.01 {y}")
    if predicts == "values":
        truth = dkfm.KernelRidge(0.01, kernel=Gaussian(2.0)).fit(X, Y)
        np.testing.assert_allclose(dkfm.load("m").predict(X), truth.predict(X), atol=1e-7)
    else:
        assert (dkfm.load("m").predict(X) == np.load("labels.npy")).mean() > 0.95
    assert "--alpha loo needs a Gram matrix" in run(f"x.npy m --method ridge --map map --alpha loo {y}", 2)


@pytest.mark.parametrize(
    "method", ["ridge --targets one.npy", "ridge --labels labels.npy", "fisher --labels labels.npy"]
)
def test_a_dry_run_says_the_way_and_writes_nothing(data, method, tmp_path):
    before = sorted(tmp_path.iterdir())
    plan = run(f"x.npy m --method {method} --kernel gaussian --param sigma=2 --solver tiled --dry-run")
    assert "systems by a Cholesky factor in tiles on disk" in plan
    assert sorted(tmp_path.iterdir()) == before


def test_a_factor_in_a_workspace_is_described(data):
    options = "--kernel gaussian --param sigma=2 --solver tiled --tile-rows 100 --workspace w"
    run(f"x.npy m --method ridge --targets one.npy {options}")
    (factor,) = Path("w").iterdir()
    ended = CliRunner().invoke(main, ["info", str(factor), "--json"])
    facts = json.loads(ended.stdout)
    assert (facts["kind"], facts["alpha"], facts["tiles"], facts["of"], facts["complete"]) == (
        "factor",
        1.0,
        6,
        6,
        True,
    )


@pytest.mark.parametrize(
    ("line", "message", "code"),
    [
        ("x.npy m --method ridge --kernel rbf", "--method ridge takes --targets, or --target-columns", 2),
        ("x.npy m --method ridge --kernel rbf --targets one.npy --labels labels.npy", "one of them", 2),
        ("x.npy m --method pca --kernel rbf --targets one.npy", "--targets belongs to --method ridge", 2),
        ("x.npy m --method fisher --kernel rbf --alpha 1 --labels labels.npy", "--alpha belongs to --method ridge", 2),
        (
            "x.npy m --method pca --kernel rbf --labels labels.npy",
            "--labels belongs to --method fisher and --method",
            2,
        ),
        ("x.npy m --method ridge --kernel rbf --targets one.npy --components 2", "--components belongs to", 2),
        ("x.npy m --method ridge --kernel rbf --targets one.npy --alpha big", 'big is no number >= 0, nor "loo"', 2),
        ("x.npy m --method ridge --kernel rbf --targets one.npy --alpha -1", "no number >= 0", 2),
        ("x.npy m --method ridge --kernel rbf --targets one.npy --alphas 1,2", "--alphas goes with --alpha loo", 2),
        ("x.npy m --method ridge --kernel rbf --targets one.npy --alpha loo --alphas 1,0", "'0' is no number > 0", 2),
        ("x.npy m --method ridge --map map --targets one.npy --alphas 1,2", "--alphas does not go with --map", 2),
        ("x.npy m --method ridge --kernel rbf --targets labels.npy", "y must be numbers", 1),
        ("x.npy m --method ridge --kernel rbf --targets none.npy", "There is no none.npy, which --targets names", 1),
        ("x.npy m --method ridge --kernel rbf --target-columns s", "use --targets", 1),
        (
            "x.npy m --method ridge --kernel rbf --targets one.npy --alpha loo --solver cg",
            "has no Gram matrix in memory",
            1,
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(data, line, message, code, tmp_path):
    output = run(line, code)
    assert message in " ".join(output.split())
    assert "Traceback" not in output
    assert not (tmp_path / "m").exists()
