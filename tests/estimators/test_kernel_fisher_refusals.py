"""`KernelFisher`: what a user sees of it."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.exceptions import NotFittedError

import dkfm
from dkfm import KernelFisher, KernelPCA, kernels
from dkfm.cli.app import main
from dkfm.errors import DkfmWarning, InvalidInputError


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"shrinkage": -1.0}, "finite number >= 0"),
        ({"shrinkage": "much"}, "finite number >= 0"),
        ({"shrinkage": np.nan}, "finite number >= 0"),
        ({"shrinkage": True}, "finite number >= 0"),
        pytest.param({"shrinkage": 10**400}, "finite number >= 0", id="huge"),
        ({"shrinkage": 0}, "singular"),
        ({"priors": [0.5, 0.5]}, "each of the 3 classes"),
        ({"priors": [0.5, 0.5, 0.0]}, "positive"),
        ({"priors": [0.5, 0.5, 0.5]}, "sum of 1"),
        ({"priors": "equal"}, "positive number"),
        ({"n_components": 3}, "at most 2"),
        ({"n_components": 0}, "n_components"),
        ({"on_indefinite": "auto"}, "on_indefinite must be"),
        ({"dtype": "float16"}, "dtype must be"),
    ],
    ids=str,
)
def test_a_parameter_that_cannot_be_is_told_in_a_sentence(parameters, words, data):
    with pytest.raises(InvalidInputError, match=words):
        KernelFisher(kernel="rbf", **parameters).fit(*data)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (None, "requires y"),
        (["a", 1] * 60, "y mixes words and others"),
        (["a", None] * 60, r"in row 1 \(60 of 120 rows\)"),
        (np.zeros(120), "1 class"),
        (np.zeros(119), "119 labels and X has 120 rows"),
        (np.linspace(0, 1, 120), "label a row"),
        (np.where(np.arange(120) % 50 == 7, np.nan, 1.0), r"NaN or infinite in row 7 \(3 of 120 rows\); leave"),
        (np.where(np.arange(120) == 9, None, "a"), r"in row 9 \(1 of 120 rows\)"),
        (np.where(np.arange(120) == 9, np.nan, np.array(["a", "b"] * 60, object)), r"in row 9 \(1 of 120 rows\)"),
        (np.ma.masked_equal(np.arange(120) % 3, 2), "y has masked values"),
        (np.zeros((120, 2)), "label a row"),
        (np.zeros(120, "datetime64[s]"), "Unknown label type: datetime64"),
    ],
    ids=[
        "none",
        "mixed",
        "none of a list",
        "one",
        "few",
        "numbers",
        "nan",
        "no text",
        "nan in text",
        "masked",
        "table",
        "dates",
    ],
)
def test_labels_that_are_none_are_told_in_a_sentence(labels, words, data):
    with pytest.raises(InvalidInputError, match=words):
        KernelFisher(kernel="rbf").fit(data[0], labels)


def test_a_fit_that_fails_leaves_the_estimator_as_it_was(data):
    X, y = data
    fda = KernelFisher(kernel="rbf").fit(X, y)
    before = fda.predict(X)
    with pytest.raises(InvalidInputError):
        fda.fit(X[:50], y[:50] * 0)
    np.testing.assert_array_equal(fda.predict(X), before)


@pytest.fixture
def run(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    np.save("train.npy", data[0])
    np.save("y.npy", data[1])
    return lambda line: CliRunner().invoke(main, line.split())


@pytest.mark.slow
def test_the_command_line_fits_it_from_a_file_of_labels(run, data):
    result = run("fit train.npy model --method fisher --labels y.npy --kernel gaussian --param sigma=2 --components 1")
    assert result.exit_code == 0, result.output
    assert "120 landmarks, 3 classes, shrinkage 0.001, certificate" in result.stdout
    fda = dkfm.load("model")
    assert fda.transform(data[0]).shape == (120, 1)
    np.testing.assert_array_equal(
        fda.predict(data[0]), KernelFisher(kernel=kernels.Gaussian(2.0)).fit(*data).predict(data[0])
    )
    assert run("verify model").exit_code == 0
    facts = json.loads(run("info model --json").stdout)
    assert facts["outputs"] == {"scores": 1, "decision_function": 3, "predict": 1, "predict_proba": 3}
    assert run("score model train.npy out.zarr --output predict").exit_code == 0
    codes = dkfm.open_scores("out.zarr").compute()
    np.testing.assert_array_equal(codes[:, 0], fda.predict(data[0]))
    found = run("fit train.npy chosen --method fisher --labels y.npy --shrinkage auto --kernel linear")
    assert found.exit_code == 0
    assert dkfm.load("chosen").shrinkage_ in dkfm.numerics.supervised.shrinkage.SHRINKAGE_GRID


def test_the_command_line_takes_labels_from_a_column_of_a_table(run, data):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"label": data[1], **dict(zip("abcd", data[0].T, strict=True))}
    pq.write_table(pa.table(table), "train.parquet")
    result = run("fit train.parquet model --method fisher --label-column label --kernel gaussian --param sigma=2")
    assert result.exit_code == 0, result.output
    fda = dkfm.load("model")
    assert fda.feature_names_in_.tolist() == list("abcd")
    assert fda.classes_.tolist() == [0, 1, 2]
    assert fda.classes_.dtype == np.int64


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "9" * 400, "much"])
@pytest.mark.parametrize("command", ["fit no.npy new --method fisher --labels y.npy", "compare no.npy --labels y"])
def test_a_shrinkage_that_is_none_is_a_usage_error(run, command, value):
    result = run(f"{command} --kernel gaussian --shrinkage {value}")
    assert result.exit_code == 2
    assert f'{value} is no number >= 0, nor "auto"' in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--labels none.npy", "There is no none.npy"),
        ("--labels words.txt", "takes a .npy file"),
        ("--labels objects.npy", "takes a .npy file"),
        ("--labels several.npz", "takes a .npy file of one label a row"),
        ("--labels train.npy", "of shape (n,), and train.npy has (120, 4)"),
        ("--labels short.npy", "short.npy has the shape (100,), and must have 120 rows"),
        ("--labels same.npy", "1 class"),
        ("--labels numbers.npy", "label a row"),
        ("--labels y.npy --shrinkage 0", "singular"),
        ("--labels y.npy --components 0.5", "positive integer"),
        ("--label-column y", "column of a table"),
    ],
)
def test_labels_that_will_not_do_are_one_sentence(run, line, words, tmp_path):
    np.save("short.npy", np.zeros(100))
    np.save("same.npy", np.zeros(120, int))
    np.save("numbers.npy", np.linspace(0, 1, 120))
    np.save("objects.npy", np.array([None] * 120))
    np.savez("several.npz", a=np.zeros(3))
    (tmp_path / "words.txt").write_text("one two three")
    result = run(f"fit train.npy model --method fisher --kernel gaussian --quiet {line}")
    assert result.exit_code == 1, result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "line",
    [
        "--method fisher",
        "--method fisher --labels y.npy --label-column y",
        "--method fisher --labels y.npy --shrinkage much",
        "--method fisher --labels y.npy --basis spectral",
        "--method pca --labels y.npy",
        "--method features --shrinkage 0",
    ],
)
def test_options_that_do_not_belong_together_are_wrong_usage(run, line):
    assert run(f"fit train.npy model --kernel linear {line}").exit_code == 2


def test_labels_of_no_kind_are_one_sentence():
    X = np.arange(12.0).reshape(6, 2)
    for y in (
        np.array(["a", 1] * 3, object),
        np.array(["a", None] * 3, object),
        np.array([b"a", b"b"] * 3),
        np.arange(6, dtype=np.longdouble) % 2,
    ):
        with pytest.raises(InvalidInputError):
            KernelFisher().fit(X, y)


def test_a_ridge_beside_which_classes_are_one_is_told(data):
    with pytest.warns(DkfmWarning, match="the priors alone decide"):
        KernelFisher(shrinkage=1e15).fit(*data)


def test_auto_on_rows_that_tell_nothing_asks_for_a_number():
    X, y = np.array([[0.0], [1.0], [2.0]]), np.array([0, 0, 1])
    with pytest.raises(InvalidInputError, match="give it a number"):
        KernelFisher(shrinkage="auto").fit(X, y)


@pytest.mark.parametrize("estimator", [dkfm.KernelPCA, KernelFisher, dkfm.KernelRidge, dkfm.KernelRidgeClassifier])
def test_only_a_fitted_feature_map_has_features_in_which_another_model_is_fitted(estimator, data):
    X, y = data
    labels = {} if estimator is dkfm.KernelPCA else {"y": y}
    for other in (None, "model", dkfm.ExactFeatureMap, KernelPCA(2).fit(X)):
        with pytest.raises(InvalidInputError, match="feature_map must be an ExactFeatureMap"):
            estimator.from_map(other, X=X, **labels)
    with pytest.raises(NotFittedError):
        estimator.from_map(dkfm.ExactFeatureMap("rbf"), X=X, **labels)


@pytest.mark.parametrize("basis", ["spectral", "cholesky"])
def test_a_map_of_rank_0_has_no_discriminants(basis):
    X, y = np.zeros((10, 2)), np.arange(10) % 2
    with pytest.warns(DkfmWarning, match="no features"):
        phi = dkfm.ExactFeatureMap(kernels.Linear(), basis=basis).fit(X)
    with pytest.raises(InvalidInputError, match="do not vary within their classes"):
        KernelFisher.from_map(phi, y, X)


def test_info_and_json_have_the_shrinkage_that_is_chosen(run):
    line = "fit train.npy chosen --method fisher --labels y.npy --kernel gaussian --shrinkage auto --json --quiet"
    fitted, known = json.loads(run(line).stdout), json.loads(run("info chosen --json").stdout)
    assert fitted["shrinkage"] == known["shrinkage"] == dkfm.load("chosen").shrinkage_
    assert known["parameters"]["shrinkage"] == "auto"
