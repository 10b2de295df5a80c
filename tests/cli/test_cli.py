"""The command line, as a user types it: exit codes, one sentence on standard error, the README's words."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import dkfm
from dkfm.cli.app import main
from dkfm.errors import DkfmWarning


@pytest.fixture
def run(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    np.save("train.npy", rng.normal(size=(80, 3)))
    np.save("test.npy", rng.normal(size=(50, 3)))
    return lambda line: CliRunner().invoke(main, line.split())


def test_a_pca_is_fitted_scored_verified_and_described(run):
    result = run("fit train.npy model --method pca --kernel gaussian --param sigma=2 --components 4 --tile-rows 30")
    assert result.exit_code == 0, result.output
    share = dkfm.load("model").explained_variance_ratio_.sum()
    components = (
        f"Gaussian(sigma=2.0), 80 landmarks, 4 components with {100 * share:.3g} % of the variance, certificate"
    )
    assert components in result.stdout
    result = run("score model test.npy scores.zarr --chunk-rows 20")
    assert result.exit_code == 0, result.output
    assert "scores.zarr: 50 rows" in result.stdout
    found = dkfm.open_scores("scores.zarr").compute()
    np.testing.assert_allclose(found, dkfm.load("model").transform(np.load("test.npy")), atol=1e-12)
    assert "certificate" in run("verify model").stdout
    assert "50 rows, every chunk" in run("verify scores.zarr").stdout
    facts = json.loads(run("info model --json").stdout)
    assert (facts["estimator"], facts["landmarks"], facts["outputs"]) == (
        "KernelPCA",
        80,
        {"scores": 4, "reconstruction_error": 1},
    )
    assert facts["explained_share"] == pytest.approx(share)
    facts = json.loads(run("info scores.zarr --json").stdout)
    assert (facts["rows"], facts["outputs"], facts["complete"]) == (50, {"scores": 4}, True)
    assert "KernelPCA" in run("info model").stdout
    assert "rank" not in run("info model").stdout  # that of a pca is not known


@pytest.fixture
def mapped(run):
    """A map, and the features of test.npy in three chunks."""
    assert run("fit train.npy map --method features --basis cholesky --kernel gaussian --param sigma=2").exit_code == 0
    assert run("score map test.npy features.zarr --chunk-rows 20").exit_code == 0
    return run


def test_what_verify_measures_of_an_output_is_printed_as_json(mapped):
    found = json.loads(mapped("verify features.zarr --json").stdout)
    assert found == {"kind": "scores", "path": "features.zarr", "rows": 50, "chunks": 3}
    found = json.loads(mapped("verify features.zarr --against test.npy --sample 10 --json").stdout)
    assert (found["against"], found["sampled"]) == ("test.npy", 10)
    assert 0 < found["worst"] < 1
    Path("features.zarr/features/c/1/0").unlink()
    failed = mapped("verify features.zarr --json")
    assert (failed.exit_code, json.loads(failed.stdout)["error"]) == (1, "DamagedStoreError")


def test_what_verify_measures_of_a_model_is_printed_as_json(mapped):
    phi = dkfm.load("map")
    expected = phi.verify(np.load("test.npy"))
    found = json.loads(mapped("verify map --against test.npy --json").stdout)
    assert (found["kind"], found["path"], found["against"]) == ("model", "map", "test.npy")
    assert (found["estimator"], found["rank"], found["error_bound"]) == ("ExactFeatureMap", phi.rank_, phi.error_bound_)
    assert found["measured"] == expected.to_dict()
    assert found["measured"]["max_residual"] == expected.residuals.max()
    # A point with itself reaches the bound, and each of the two is rounded in its own way.
    assert found["measured"]["between"]["error"] <= found["measured"]["bound"] + 1e-14
    assert set(json.loads(mapped("verify map --json").stdout)["measured"]) == {"certificate"}


def test_infinite_errors_are_null_in_json(run):
    with pytest.warns(DkfmWarning):
        run("fit train.npy neg --method features --kernel negative_squared_distance --on-indefinite clip")
    for command in ("verify neg --json", "verify neg --against test.npy --json", "info neg --json"):
        json.loads(run(command).stdout, parse_constant=pytest.fail)
    assert json.loads(run("verify neg --json").stdout)["measured"]["certificate"]["relative_error"] is None


def test_verify_says_where_a_model_was_and_refuses_options_without_effect(mapped):
    for line in ("verify map --sample 9", "verify features.zarr --sample 9", "verify features.zarr --model map"):
        assert mapped(line).exit_code == 2
    Path("map").rename("moved")
    lost = mapped("verify features.zarr --against test.npy").stderr
    assert "was at " in lost
    assert "--model" in lost
    assert mapped("verify features.zarr --against test.npy --model moved").exit_code == 0


@pytest.mark.slow
def test_features_in_both_bases_and_residuals_are_scored(run):
    for basis in ("symmetric", "spectral", "cholesky"):
        assert run(f"fit train.npy {basis} --method features --basis {basis} --kernel linear").exit_code == 0
        found = run(f"verify {basis} --against test.npy")
        assert found.exit_code == 0
        assert f"{basis}: {3 if basis == 'cholesky' else 80} landmarks, rank 3, error bound " in found.stdout
        assert f"{basis}: condition" in found.stdout
        assert "\ntest.npy with the landmarks: " in found.stdout
        assert "test.npy with each other: " in found.stdout
        assert " by their residuals" in found.stdout
        assert "test.npy residuals: " in found.stdout
    assert run("score spectral test.npy f.zarr").exit_code == 0
    assert run("score spectral test.npy r.zarr --output residual").exit_code == 0
    assert dkfm.open_scores("f.zarr").shape == (50, 3)
    assert dkfm.open_scores("r.zarr").shape == (50, 1)


@pytest.mark.slow
def test_features_on_landmarks_in_float32_are_fitted_and_described(run):
    line = "fit train.npy some --method features --kernel gaussian --param sigma=1 --landmarks pivots --n-landmarks 20"
    assert run(f"{line} --basis cholesky --dtype float32 --centered --tol 0.95").exit_code == 0
    phi = dkfm.load("some")
    assert (phi.rank_ < 20, phi.dtype, phi.centered) == (True, "float32", True)
    assert phi.error_bound_ <= 0.95
    assert "pairs of training points, at fit" in run("verify some").stdout
    facts = json.loads(run("info some --json").stdout)
    assert facts["rank"] == facts["landmarks"] == phi.rank_
    assert set(facts["certificates"]) == {"certificate", "training_certificate"}
    (kernel,) = (line for line in run("info some").stdout.splitlines() if line.startswith("kernel "))
    assert json.loads(kernel.removeprefix("kernel ")) == facts["kernel"]  # as --kernel takes it
    assert run("score some test.npy s.zarr").exit_code == 0
    assert dkfm.open_scores("s.zarr").dtype == np.float32
    assert run("fit train.npy other --method features --kernel linear --landmarks uniform").exit_code == 1
    narrow = "--kernel gaussian --param sigma=0.001 --landmarks uniform --n-landmarks 2"
    assert run(f"fit train.npy nothing --method features {narrow}").exit_code == 0
    assert "error bound 1.0e+00 (of 1 or more: it says nothing)" in run("verify nothing").stdout
    assert "it says nothing" not in run("verify some").stdout


def test_features_whose_rows_are_sampled_know_no_bound(run):
    np.save("many.npy", np.random.default_rng(1).normal(size=(1100, 3)))
    line = "fit many.npy some --method features --kernel gaussian --param sigma=1 --landmarks uniform --n-landmarks 20"
    fitted = run(f"{line} --certify sample")
    assert (fitted.exit_code, dkfm.load("some").certify) == (0, "sample")
    found = run("verify some --against test.npy")
    assert found.exit_code == 0
    for printed in (fitted.stdout, found.stdout):
        assert "error bound not known, for training rows were sampled" in printed
        assert "pairs of a random sample of 1,024 training rows, not of all of them" in printed
    facts = json.loads(run("info some --json").stdout)
    assert facts["parameters"]["certify"] == "sample"
    assert facts["certificates"]["training_certificate"]["sampled_rows"] == 1024
    assert "test.npy with each other: " in found.stdout
    assert "by their residuals" not in found.stdout
    assert "sampled_rows" not in facts["certificates"]["certificate"]
    refused = run(line.replace("some", "other") + " --certify sample --tol 0.5")
    assert (refused.exit_code, "tol= needs the errors of all training rows" in refused.stderr) == (1, True)
    assert run("fit train.npy other --method pca --kernel linear --certify all").exit_code == 2


def test_a_damaged_model_is_one_sentence_and_exit_code_1(run):
    assert run("fit train.npy model --method features --kernel gaussian --param sigma=1").exit_code == 0
    phi = dkfm.load("model")
    phi.model_.heads["features"].weights[3, 3] *= 1 + 1e-6
    phi.save("model", overwrite=True)
    result = run("verify model --against test.npy")
    assert result.exit_code == 1
    assert "CertificateError: The model measures" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_workspace_keeps_the_gram_and_info_tells_of_it(run, tmp_path):
    line = "fit train.npy {} --kernel gaussian --param sigma=2 --tile-rows 30 --workspace w"
    assert run(line.format("a")).exit_code == 0
    (kept,) = tmp_path.glob("w/gram-*.zarr")
    times = [p.stat().st_mtime_ns for p in kept.rglob("c/*/*")]
    assert run(line.format("b")).exit_code == 0
    assert [p.stat().st_mtime_ns for p in kept.rglob("c/*/*")] == times
    facts = json.loads(run(f"info {kept} --json").stdout)
    assert (facts["kind"], facts["shape"], facts["complete"]) == ("gram", [80, 80], True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fit none.npy model --kernel linear", "There is no"),
        ("fit train.npy model --kernel gausian", "near it: gaussian"),
        ("fit train.npy model --kernel cubic", "there are additive_chi2, additive_chi_squared"),
        ("fit train.npy model --kernel gaussian --param sigma=-1", "sigma > 0"),
        ("fit train.npy model --kernel gaussian --param sigma=1e200", "whose square"),
        ("fit train.npy model --kernel gaussian --param width=1", "parameter sigma, and got width"),
        ("fit train.npy model --kernel rbff", "near it: rbf"),
        ("fit train.npy model --kernel ChiSquared", "near it: chi_squared"),
        ("fit train.npy model --kernel gaussian --param sigma=wide", "or 'median', and got 'wide'"),
        ("fit train.npy model --kernel sum", "There is no kernel named 'sum'"),
        ("fit nan.npy model --kernel linear", "row 5 contains NaN"),
        ("fit flat.npy model --kernel linear", "two dimensions"),
        ("fit train.npy taken --kernel linear", "overwrite=True (--overwrite)"),
        ("score none test.npy out", "There is nothing at"),
        ("score train.npy test.npy out", "is a file, and no store"),
        ("score taken test.npy out", "not a store"),
        ("info none", "There is nothing at"),
        ("verify none", "There is nothing at"),
    ],
)
def test_a_named_error_is_one_sentence_on_standard_error_and_exit_code_1(run, line, words, tmp_path):
    rows = np.load("train.npy")
    np.save("flat.npy", rows[0])
    rows[5, 1] = np.nan
    np.save("nan.npy", rows)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    result = run(line)
    assert result.exit_code == 1, result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "line",
    [
        "",
        "fit",
        "fly",
        "fit train.npy model",
        "fit train.npy model --kernel linear --param sigma",
        "fit train.npy model --kernel gaussian:sigma=3 --param sigma=4",
        "fit train.npy model --kernel linear --components 0",
        "fit train.npy model --kernel linear --method features --components 2",
        "fit train.npy model --kernel linear --method pca --basis spectral",
        "fit train.npy model --kernel linear --method pca --n-landmarks 3",
        "fit train.npy model --kernel linear --method features --tol 1",
        "fit train.npy model --kernel linear --method features --dtype float16",
        "demo --rows 0",
    ],
)
def test_wrong_usage_exits_with_2(run, line):
    assert run(line).exit_code == 2


def test_on_invalid_nan_counts_the_rows(run):
    rows = np.load("test.npy")
    rows[7] = np.nan
    np.save("bad.npy", rows)
    run("fit train.npy model --kernel gaussian --param sigma=2 --components 2")
    assert run("score model bad.npy out").exit_code == 1
    result = run("score model bad.npy out --on-invalid nan --overwrite")
    assert result.exit_code == 0
    assert "1 of them invalid" in result.stdout


def test_a_scheduler_is_used_when_named(run, client):
    address = client.scheduler.address
    assert run(f"fit train.npy model --kernel linear --tile-rows 30 --scheduler {address}").exit_code == 0
    assert run(f"score model test.npy out --scheduler {address} --chunk-rows 10").exit_code == 0
    assert dkfm.open_scores("out").shape == (50, 3)


def test_version_and_help():
    assert dkfm.__version__ in CliRunner().invoke(main, ["--version"]).output
    assert "demo" in CliRunner().invoke(main, ["-h"]).output


def test_the_help_names_every_kernel(run):
    from dkfm.kernels import serialization

    text = " ".join(run("fit --help").output.split())
    assert all(name in text for name in serialization._NUMERIC)


@pytest.mark.costly
@pytest.mark.parametrize(("given", "sigma"), [("2", 2.0), ("1,2,3", (1.0, 2.0, 3.0)), ("(1,2,3)", (1.0, 2.0, 3.0))])
def test_parameters_are_numbers_or_one_for_each_column(run, given, sigma):
    assert run(f"fit train.npy model{len(given)} --kernel gaussian --param sigma={given}").exit_code == 0
    assert dkfm.load(f"model{len(given)}").kernel_.sigma == sigma


def test_an_indefinite_kernel_is_clipped_where_that_is_asked_for(run):
    refused = run("fit train.npy clipped --kernel sigmoid --param offset=-1 --method features")
    assert refused.exit_code == 1
    assert "--on-indefinite clip" in refused.stderr
    with pytest.warns(DkfmWarning):
        assert run("fit train.npy clipped --kernel sigmoid --param offset=-1 --method features --on-indefinite clip")
