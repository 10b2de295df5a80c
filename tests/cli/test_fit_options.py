"""Options of `dkfm fit` that Python has too: what is replaced, standardized, drawn and printed."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import dkfm
from dkfm.cli.app import main
from dkfm.core import chunking
from dkfm.errors import StoreError
from dkfm.execution import memory
from dkfm.kernels import Gaussian
from dkfm.storage import remote_stores


@pytest.fixture
def rows(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    rows = rng.normal(size=(60, 3)) * [1.0, 100.0, 0.01] + 5
    np.save("train.npy", rows)
    return rows


@pytest.fixture
def fit(rows):
    return lambda line: CliRunner().invoke(main, f"fit train.npy model --kernel gaussian {line}".split())


def test_a_model_is_replaced_only_with_overwrite(fit):
    assert fit("--param sigma=2").exit_code == 0
    refused = fit("--param sigma=3")
    assert refused.exit_code == 1
    assert "holds something already" in refused.stderr
    assert dkfm.load("model").kernel_ == Gaussian(2.0)
    assert fit("--param sigma=3 --overwrite").exit_code == 0
    assert dkfm.load("model").kernel_ == Gaussian(3.0)


@pytest.mark.parametrize("content", ["alone", "in a model", "in an output"])
def test_overwrite_replaces_nothing_that_dkfm_did_not_write_as_a_model(fit, rows, tmp_path, content):
    if content == "in a model":
        dkfm.KernelPCA(2, kernel=Gaussian(1.0)).fit(rows).save("model")
    if content == "in an output":
        dkfm.batch_score(dkfm.KernelPCA(2, kernel=Gaussian(1.0)).fit(rows), rows, "model", progress=False)
    else:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "mine.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    result = fit("--param sigma=3 --overwrite --columns never-read")  # refused before the rows are
    assert result.exit_code == 1
    assert "columns" not in result.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_fit_that_fails_leaves_the_model_that_it_would_replace(fit):
    assert fit("--param sigma=2").exit_code == 0
    np.save("train.npy", np.full((5, 3), np.nan))
    assert fit("--param sigma=3 --overwrite").exit_code == 1
    assert dkfm.load("model").kernel_ == Gaussian(2.0)


def test_standardize_is_that_of_python(fit, rows):
    assert fit("--param sigma=2 --components 3 --standardize").exit_code == 0
    ours = dkfm.KernelPCA(3, kernel=Gaussian(2.0)).fit(rows, standardize=True)
    np.testing.assert_allclose(dkfm.load("model").transform(rows), ours.transform(rows), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("build", ["gram", "rounds"])
def test_rows_that_are_read_in_parts_are_standardized(fit, rows, build, monkeypatch):
    monkeypatch.setattr(chunking, "choose_tile_rows", lambda *arguments: 7)
    assert fit(f"--method features --basis cholesky --build {build} --param sigma=2 --standardize").exit_code == 0
    found = dkfm.load("model").kernel_.h
    np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(found.scale, rows.std(axis=0), rtol=1e-13)


def test_the_memory_of_standardized_landmarks_is_counted(fit, monkeypatch):
    copies = []
    monkeypatch.setattr(memory, "require_factorization_memory", lambda *counted: copies.append(counted[-1]))
    assert fit("--method features --param sigma=2").exit_code == 0
    plain, copies[:] = copies[0], []
    assert fit("--method features --param sigma=2 --standardize --overwrite").exit_code == 0
    assert copies[0] == plain + 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--kernel gaussian", True),
        ("--kernel gaussian --basis cholesky", True),
        ("--kernel linear", True),
        ("--kernel gaussian --standardize", False),
        ("--kernel gaussian:sigma=0.01,10,0.01", False),
        ("--kernel chi_squared", False),
        ('--kernel {"name":"columns","kernel":{"name":"gaussian","sigma":1},"columns":[0,1,2]}', False),
    ],
)
def test_columns_that_hardly_count_are_told(tmp_path, monkeypatch, rng, options, told):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.abs(rng.normal(size=(60, 3))) * [1, 1000, 1])
    ended = CliRunner().invoke(main, f"fit x.npy model --method features {options}".split())
    assert ended.exit_code == 0, ended.output
    sentence = "2 of 3 columns that vary have a standard deviation below a hundredth of the largest"
    assert (sentence in ended.stderr) is told


def test_columns_that_hardly_count_are_named(tmp_path, monkeypatch, rng):
    pd = pytest.importorskip("pandas", reason="the extra dataframe brings it")
    monkeypatch.chdir(tmp_path)
    X = rng.normal(size=(60, 4)) * [0.0, 1.0, 1000.0, 1.0]
    pd.DataFrame(X, columns=["constant", "height", "income", "rate"]).to_parquet("x.parquet")
    ended = CliRunner().invoke(main, ["fit", "x.parquet", "model", "--method", "pca", "--kernel", "linear"])
    assert "2 of 3 columns that vary (columns 'height', 'rate') have a standard" in ended.stderr


@pytest.mark.slow
def test_the_same_seed_chooses_the_same_landmarks(fit):
    chosen = []
    for seed in (0, 0, 1):
        line = f"--method features --landmarks uniform --n-landmarks 9 --random-state {seed} --overwrite"
        assert fit(line).exit_code == 0
        chosen.append(dkfm.load("model").landmark_indices_.tolist())
    assert chosen[0] == chosen[1] != chosen[2]
    assert fit("--random-state 1 --overwrite").exit_code == 2


@pytest.mark.parametrize("line", ["--components 2", "--method features --basis cholesky"])
def test_what_was_fitted_is_printed_as_json(fit, line):
    facts = json.loads(fit(f"--param sigma=2 --json {line}").stdout)
    loaded = dkfm.load("model")
    assert facts["model"] == "model"
    assert facts["estimator"] == type(loaded).__name__
    assert facts["kernel"] == {"name": "gaussian", "sigma": 2.0}
    assert facts["landmarks"] == len(loaded.model_.landmarks)
    assert facts["certificate"] == loaded.certificate_.to_dict()
    if hasattr(loaded, "rank_"):
        assert (facts["rank"], facts["error_bound"]) == (loaded.rank_, loaded.error_bound_)
    assert set(facts["outputs"]) == set(loaded.model_.heads)


def test_a_store_that_is_damaged_is_not_replaced_by_chance(fit, tmp_path):
    assert fit("--param sigma=2").exit_code == 0
    (tmp_path / "model" / "zarr.json").write_text("{}")
    assert fit("--param sigma=3 --overwrite").exit_code == 1
    with pytest.raises(StoreError):
        dkfm.load("model")


def test_the_state_of_a_fit_stays_until_the_model_is_saved(fit, monkeypatch, tmp_path):
    def refuse(*given, **options):
        raise StoreError("the disk is full")

    line = "--method features --basis cholesky --param sigma=2 --workspace w"
    with monkeypatch.context() as patch:
        patch.setattr(remote_stores, "save_model", refuse)
        assert "the disk is full" in fit(line).output
    assert [path.name.partition("-")[0] for path in (tmp_path / "w").iterdir()] == ["pivots"]
    assert fit(line).exit_code == 0
    assert list((tmp_path / "w").iterdir()) == []
