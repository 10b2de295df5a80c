"""Labels in a column of a table: text, numbers, or the key of its folders, for `dkfm fit` and `dkfm compare`."""

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.sparse import csr_array

import dkfm
from dkfm import kernels
from dkfm.cli.app import main

pd = pytest.importorskip("pandas", reason="the extra dataframe brings it")
pytest.importorskip("pyarrow", reason="the extra dataframe brings it")

KINDS = np.array(["cat", "dog", "eel"])


@pytest.fixture
def frame(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    y = np.arange(90) % 3
    frame = pd.DataFrame(rng.normal(size=(90, 3)) + 2.0 * y[:, np.newaxis], columns=list("abc"))
    return frame.assign(name=[f"row {i}" for i in range(90)], kind=KINDS[y])


def run(line):
    return CliRunner().invoke(main, line.split())


FIT = "fit x.parquet model --method fisher --kernel gaussian --param sigma=2 --label-column kind --id-column name"
LABELS = {
    "decimals": lambda kinds: kinds.map({"cat": Decimal(2**60), "dog": Decimal(2**60 + 1), "eel": Decimal(5)}),
    "text": lambda kinds: kinds,
    "categories": lambda kinds: kinds.astype("category"),
    "integers": lambda kinds: kinds.map({"cat": 2**60, "dog": 2**60 + 1, "eel": 5}),
    "whole numbers": lambda kinds: kinds.map({"cat": 0.0, "dog": 1.0, "eel": 2.0}),
    "booleans": lambda kinds: kinds == "cat",
}


@pytest.mark.parametrize("labels", LABELS)
def test_labels_of_a_table_are_text_or_numbers(frame, labels):
    frame["kind"] = LABELS[labels](frame["kind"])
    frame.to_parquet("x.parquet")
    result = run(FIT)
    assert result.exit_code == 0, result.stderr
    found, y = dkfm.load("model"), np.asarray(frame["kind"])
    if labels in ("whole numbers", "decimals"):
        y = y.astype(np.int64)
    expected = dkfm.KernelFisher(kernel=kernels.Gaussian(2.0)).fit(frame[list("abc")], y)
    assert found.feature_names_in_.tolist() == list("abc")
    assert found.classes_.dtype.kind == {"text": "U", "categories": "U", "booleans": "b"}.get(labels, "i")
    assert found.classes_.tolist() == np.unique(y).tolist()
    assert (found.predict(frame[list("abc")]) == expected.predict(frame[list("abc")])).all()


def test_labels_may_be_the_key_of_folders(frame):
    for kind, part in frame.groupby("kind"):
        folder = Path("x.parquet") / f"kind={kind}"
        folder.mkdir(parents=True)
        part.drop(columns="kind").to_parquet(folder / "part.parquet")
    assert run(FIT).exit_code == 0
    assert dkfm.load("model").classes_.tolist() == KINDS.tolist()


def refuse_empty(frame):
    return frame.assign(kind=frame["kind"].where(frame.index != 7))


def refuse_far(frame):
    return frame.assign(kind=np.where(frame["kind"] == "cat", 1e300, 2e300))


def refuse_long(frame):
    return frame.assign(kind=frame["kind"].where(frame.index != 7, "a" * 1001))


def refuse_equal(frame):
    return frame.assign(kind=["cat\0" if i == 7 else str(kind) for i, kind in enumerate(frame["kind"])])


def refuse_dates(frame):
    return frame.assign(kind=pd.Timestamp("2024-01-01"))


@pytest.mark.parametrize("dry", ["", " --dry-run"])
@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (refuse_empty, FIT, "x.parquet has no label in 1 of 90 rows; leave these rows out."),
        (refuse_far, FIT, "has fractions, NaN or numbers beyond 64 bits"),
        (refuse_long, FIT, "longer than 1000 characters"),
        (refuse_equal, FIT, "equal but for trailing NULs"),
        (refuse_dates, FIT, ", and must hold text, booleans or whole numbers."),
        (
            lambda frame: frame.rename(columns={"kind": "kid"}),
            FIT,
            "has no column 'kind'; near it: 'kid'",
        ),
        (
            lambda frame: frame,
            FIT.replace("column name", "column nam"),
            "no column 'nam' for ids or labels; near it: 'name'",
        ),
        (
            lambda frame: frame.assign(day="x"),
            FIT,
            "has column 'day' of type ",
        ),
        (
            lambda frame: frame.assign(kind=frame["a"]),
            FIT,
            "dkfm fit --method ridge --target-columns kind predicts numbers",
        ),
    ],
)
def test_what_are_no_labels_is_a_sentence(frame, change, line, said, dry):
    change(frame).to_parquet("x.parquet")
    result = run(line + dry)
    assert result.exit_code == 1
    assert said in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "method",
    [
        "fisher --label-column kind",
        "ridge --target-columns b",
        "features --basis spectral",
        "features --basis cholesky",
    ],
)
def test_columns_are_standardized_for_every_method(frame, method):
    frame["a"] *= 1e3
    frame.to_parquet("x.parquet")
    columns = "a,c" if "target-columns" in method else "a,b,c"
    line = f"fit x.parquet model --method {method} --kernel gaussian --param sigma=2 --standardize --columns "
    result = run(line + columns)
    assert result.exit_code == 0, result.stderr
    found = dkfm.load("model")
    X = frame[found.feature_names_in_.tolist()]
    standardize = kernels.Standardize(tuple(X.mean()), tuple(X.std(ddof=0)))
    K = kernels.Gaussian(2.0).warp(standardize)(X, X)
    np.testing.assert_allclose(found.kernel_(X.to_numpy(), X.to_numpy()), K, rtol=1e-12)


@pytest.mark.parametrize("is_held_out", [False, True])
def test_compare_reads_labels_from_the_tables(frame, is_held_out):
    frame[:60].to_parquet("x.parquet")
    frame[60:].to_parquet("z.parquet")
    line = "compare x.parquet --label-column kind --id-column name --kernel gaussian:sigma=2 --json"
    result = run(line + " --test z.parquet" * is_held_out)
    assert result.exit_code == 0, result.stderr
    X, y = frame[list("abc")], np.asarray(frame["kind"], dtype=str)
    held_out = {"test": X[60:], "test_labels": y[60:]} if is_held_out else {}
    expected = dkfm.compare_kernels([kernels.Gaussian(2.0)], X[:60], y[:60], **held_out).compared[0]
    assert json.loads(result.stdout)["kernels"][0]["Fisher_accuracy"] == expected.fisher_accuracy


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("x.parquet", 2, "takes --labels, or --label-column of a table; one of them"),
        ("x.parquet --label-column kind --labels y.npy", 2, "one of them"),
        ("x.parquet --label-column kind --id-column name --test-labels y.npy", 2, "belongs to --labels"),
        ("x.npy --label-column kind", 1, "names a column of a table, and x.npy is none; use --labels"),
    ],
)
def test_options_of_labels_that_do_not_go_together_are_told(frame, line, code, said):
    frame.to_parquet("x.parquet")
    np.save("x.npy", frame[list("abc")].to_numpy())
    result = run(f"compare {line} --kernel linear")
    assert result.exit_code == code
    assert said in result.stderr


def test_compare_scales_the_columns_of_training_rows(frame):
    frame["a"] *= 1e4
    frame["c"] = 7.0
    frame[:60].to_parquet("x.parquet")
    frame[60:].to_parquet("z.parquet")
    line = "compare x.parquet --label-column kind --id-column name --kernel gaussian:sigma=0.1 --standardize"
    line += " --test z.parquet --columns a,b,c"
    result = run(line)
    assert result.exit_code == 0, result.stderr
    assert "scaled to mean 0 and variance 1 over the training rows" in result.stdout
    X, y = frame[list("abc")].to_numpy(), np.asarray(frame["kind"], dtype=str)
    mean, scale = X[:60].mean(axis=0), X[:60].std(axis=0)
    Z = (X - mean) / np.where(scale > 0, scale, 1.0)
    expected = dkfm.compare_kernels([kernels.Gaussian(0.1)], Z[:60], y[:60], test=Z[60:], test_labels=y[60:])
    found = json.loads(run(f"{line} --json").stdout)["kernels"][0]
    assert found["Fisher_accuracy"] == expected.compared[0].fisher_accuracy
    assert found["condition"] == pytest.approx(expected.compared[0].condition, rel=1e-6)
    with pytest.raises(dkfm.errors.NotSupportedError, match="Sparse rows are not standardized"):
        dkfm.compare_kernels([kernels.Linear()], csr_array(X), y, standardize=True)


def test_compare_drops_a_negative_part_and_warns_of_ids(frame):
    frame.rename(columns={"b": "b_id"}).to_parquet("x.parquet")
    line = "compare x.parquet --label-column kind --id-column name --kernel sigmoid:scale=1,offset=-1 --kernel linear"
    with pytest.warns(dkfm.errors.DkfmWarning) as warned:
        plain, clipped = (json.loads(run(f"{line} --json{option}").stdout) for option in ("", " --on-indefinite clip"))
    assert [len(found["refused"]) for found in (plain, clipped)] == [1, 0]
    assert any(str(one.message).startswith("The column 'b_id' is a feature; if it identifies rows") for one in warned)
    assert "is compared without its negative part" in clipped["about"][-1]
    assert run(f"{line.partition(' --kernel')[0]} --kernel linear --columns a,b_id").exit_code == 0  # without a warning


def test_compare_takes_a_sample(frame):
    frame.to_parquet("x.parquet")
    X, y = frame[list("abc")].to_numpy(), frame["kind"].to_numpy(dtype=str)
    line = "compare x.parquet --label-column kind --id-column name --kernel gaussian:sigma=2 --sample 40 --json"
    result = run(line)
    assert "input: columns 'a', 'b', 'c' of " in result.stderr
    found = json.loads(result.stdout)
    expected = dkfm.compare_kernels([kernels.Gaussian(2.0)], X, y, sample=40)
    assert found["kernels"][0]["Fisher_accuracy"] == expected.compared[0].fisher_accuracy
    assert found["about"] == list(expected.words)


def test_compare_takes_a_shrinkage(frame):
    frame[:60].to_parquet("x.parquet")
    frame[60:].to_parquet("z.parquet")
    line = "compare x.parquet --label-column kind --id-column name --kernel gaussian:sigma=0.3 --test z.parquet --json"
    X, y = frame[list("abc")], np.asarray(frame["kind"], dtype=str)
    accuracies = set()
    for option, shrinkage in (("", "auto"), (" --shrinkage auto", "auto"), (" --shrinkage 1e-5", 1e-5)):
        expected = dkfm.compare_kernels(
            [kernels.Gaussian(0.3)], X[:60], y[:60], test=X[60:], test_labels=y[60:], shrinkage=shrinkage
        )
        found = json.loads(run(line + option).stdout)
        assert found["kernels"][0]["Fisher_accuracy"] == expected.compared[0].fisher_accuracy
        accuracies.add(expected.compared[0].fisher_accuracy)
        fisher = dkfm.KernelFisher(kernel=kernels.Gaussian(0.3), shrinkage=shrinkage).fit(X[:60], y[:60])
        assert found["kernels"][0]["shrinkage"] == fisher.shrinkage_
        assert found["kernels"][0]["Fisher_accuracy"] == fisher.score(X[60:], y[60:])
        assert ("Shrinkage: chosen for each kernel" in found["about"][1]) == (shrinkage == "auto")
    assert len(accuracies) == 2


@pytest.mark.parametrize("name", ["k,x", " kind"])
def test_a_label_with_a_comma_or_a_space_in_its_name_is_no_feature(frame, name):
    frame = frame.rename(columns={"kind": name}).drop(columns="name")
    frame.assign(**{name: np.arange(90) % 3}).to_parquet("x.parquet")
    words = ["fit", "x.parquet", "model", "--method", "fisher", "--kernel", "gaussian", "--label-column"]
    assert CliRunner().invoke(main, [*words, name]).exit_code == 0
    assert dkfm.load("model").feature_names_in_.tolist() == list("abc")


def test_a_target_that_is_missing_is_told_with_its_column(frame):
    frame.assign(b=frame["b"].where(frame.index != 7)).to_parquet("x.parquet")
    result = run("fit x.parquet model --method ridge --kernel linear --target-columns b --columns a,c")
    assert result.exit_code == 1
    assert "row 7 contains NaN in column 'b' (1 of 90 rows" in result.stderr


@pytest.mark.parametrize("factor", [1e3, 1e-7])
def test_a_plan_is_that_of_standardized_columns(frame, factor):
    frame[list("abc")] *= factor
    frame.to_parquet("x.parquet")
    line = "fit x.parquet model --method features --basis cholesky --build rounds --tol 0.1 --kernel gaussian"
    line += " --param sigma=2 --columns a,b,c --standardize"
    planned = json.loads(run(f"{line} --dry-run --json").stdout)
    assert run(line).exit_code == 0
    assert 0.5 < planned["landmarks"] / dkfm.load("model").rank_ < 2


@pytest.mark.parametrize(("size", "end"), [(1e200, "overflows"), (1e-170, "underflows")])
def test_columns_whose_variance_is_no_number_are_told(frame, size, end):
    frame.assign(b=np.where(frame.index % 2, size, -size)).to_parquet("x.parquet")
    for line in (
        "fit x.parquet model --kernel gaussian --components 2 --columns a,b --standardize",
        "compare x.parquet --label-column kind --id-column name --kernel linear --standardize",
    ):
        result = run(line)
        assert result.exit_code == 1
        assert f"Column 1 has numbers whose variance {end}, so it cannot be standardized." in result.stderr


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            "fit x.parquet m --method fisher --label-column kind --kernel linear --columns a,kind",
            "--label-column kind",
        ),
        ("fit x.parquet m --method ridge --target-columns b,c --kernel linear --columns a,c", "--target-columns c"),
        ("fit x.parquet model --kernel linear --id-column name --columns name,a", "--id-column name"),
        ("compare x.parquet --label-column kind --kernel linear --columns a,kind", "--label-column kind"),
        ("compare x.parquet --label-column kind --id-column name --kernel linear --columns a,name", "--id-column name"),
    ],
)
def test_what_an_option_names_for_something_else_is_refused_as_a_feature(frame, line, named):
    frame.to_parquet("x.parquet")
    result = run(line)
    assert result.exit_code == 2
    assert f"{named} is no feature; leave it out of --columns." in result.stderr


def test_columns_that_are_excluded_are_no_features(frame):
    """Whatever they hold: text, lists, or numbers."""
    frame.assign(tags=[[1, 2]] * 90).to_parquet("x.parquet")
    pca = "--kernel gaussian:sigma=2 --components 2 --exclude-columns kind,tags"
    fits = {
        "pca": f"fit x.parquet pca {pca},name",
        "fda": f"{FIT.replace('model', 'fda')} --exclude-columns tags",
        "some": f"fit x.parquet some {pca},b --id-column name",
    }
    for name, line in fits.items():
        planned = run(f"{line} --dry-run")
        assert f" of {2 if name == 'some' else 3} columns" in planned.stdout, planned.stderr
        assert run(line).exit_code == 0
        assert dkfm.load(name).feature_names_in_.tolist() == list("ac" if name == "some" else "abc")
    compare = "compare x.parquet --label-column kind --kernel gaussian:sigma=2 --json"
    named, others = (run(f"{compare} {columns}") for columns in ("--columns a,c", "--exclude-columns tags,name,b"))
    assert others.exit_code == 0, others.stderr
    first, second = (json.loads(found.stdout)["kernels"][0] for found in (named, others))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


@pytest.mark.parametrize(
    ("line", "said", "code"),
    [
        ("fit x.parquet m --kernel linear --columns a --exclude-columns b", "give one of them", 2),
        ("fit x.parquet m --map map --exclude-columns b", "--exclude-columns does not go with --map", 2),
        ("fit x.parquet m --kernel linear --exclude-columns nam", "has no column 'nam'; near it: 'name'", 1),
        ("fit x.npy m --kernel linear --exclude-columns b", "names columns of a table, and x.npy is none", 1),
        (
            "compare x.parquet --label-column kind --kernel linear --columns a --exclude-columns b",
            "give one of them",
            2,
        ),
        ("compare x.npy --labels y.npy --kernel linear --exclude-columns b", "and x.npy is none", 1),
        ("fit x.parquet m --kernel linear --exclude-columns kind,name,a,b,c", "at least one column of numbers", 1),
    ],
)
def test_columns_that_cannot_be_excluded_are_a_sentence(frame, line, said, code):
    frame.to_parquet("x.parquet")
    np.save("x.npy", frame[list("abc")])
    np.save("y.npy", np.arange(90) % 3)
    result = run(line)
    assert (result.exit_code, said in result.stderr) == (code, True), result.stderr
