"""Jobs that go on: what was done stays, what changed is refused by name, several outputs come from one pass."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.errors import (
    BudgetError,
    InvalidInputError,
    KernelError,
    StoreError,
    StoreExistsError,
)
from dkfm.execution import memory
from dkfm.scoring import output_store
from helpers.resumed_jobs import NAMES, expected, score, values


def test_the_same_call_on_a_finished_output_does_nothing_and_says_so(made, tmp_path):
    first = score(made, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = score(made, tmp_path / "out", chunk_rows=None)
    assert (first.scored_chunks, again.scored_chunks, again.rows, again.bytes) == (5, 0, 100, first.bytes)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_lost_or_damaged_is_made_again_and_nothing_else(made, tmp_path_factory, data):
    target = tmp_path_factory.mktemp("job") / data.draw(st.sampled_from(["out", "out.parquet"]))
    score(made, target, output=["scores", "reconstruction_error"])
    good = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    output = output_store.read_output(target)
    bad = data.draw(st.sets(st.integers(0, 4)))
    for number in bad:
        path = target / data.draw(st.sampled_from(output.format.file_names(number)))
        other = target / output.format.file_names((number + 1) % 4)[0]
        how = data.draw(st.sampled_from(["gone", "short", "flipped", "another"]))
        raw = bytearray(good[path])
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes({"short": good[path][:-1], "flipped": bytes(raw), "another": good[other]}[how])
    same = {
        number
        for number in bad
        if all(
            (target / f).exists() and (target / f).read_bytes() == good[target / f]
            for f in output.format.file_names(number)
        )
    }
    lost = data.draw(st.sampled_from(["nothing", "marker", "journal", "both"]))
    if lost in ("marker", "both"):
        (target / "_COMPLETE").unlink()
    if lost in ("journal", "both"):
        shutil.rmtree(target / "_journal")
    report = score(made, target, output=["scores", "reconstruction_error"])
    assert report.scored_chunks == (5 if lost == "both" else len(bad - same))
    for path, raw in good.items():
        if "_journal" not in path.parts:
            assert path.read_bytes() == raw
    shutil.rmtree(target)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: {"model": made / "other"}, "it was written with another model, that of "),
        (lambda made: {"source": made / "rows.zarr"}, "the input is .*rows.zarr and was .*rows.npy"),
        (lambda made: {"output": "reconstruction_error"}, "the output is reconstruction_error and was scores"),
        (lambda made: {"on_invalid": "nan"}, "on_invalid is nan and was raise"),
        (lambda made: {"chunk_rows": 21}, "chunk_rows is 21 and was 20"),
    ],
    ids=["model", "input", "output", "on_invalid", "chunk_rows"],
)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_what_changed_is_refused_by_name_and_nothing_is_touched(made, tmp_path, change, words, finished, rng):
    if not (made / "other").exists():
        dkfm.KernelPCA(3).fit(rng.normal(size=(30, 4))).save(made / "other")
    score(made, tmp_path / "out")
    if not finished:
        (tmp_path / "out" / "_COMPLETE").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    call = {"model": made / "unnamed", "source": made / "rows.npy", "chunk_rows": 20} | change(made)
    with pytest.raises(StoreExistsError, match=words) as caught:
        dkfm.batch_score(call.pop("model"), call.pop("source"), tmp_path / "out", progress=False, **call)
    assert "\n" not in str(caught.value)
    may_go_on = not finished and change(made).keys() <= {"output", "on_invalid", "chunk_rows"}
    assert ("; give the same settings as before to go on, choose" in str(caught.value)) == may_go_on
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_an_input_with_other_values_is_refused(made, tmp_path):
    rows = tmp_path / "rows.npy"
    shutil.copy(made / "rows.npy", rows)
    dkfm.batch_score(made / "unnamed", rows, tmp_path / "out", progress=False)
    np.save(rows, np.load(rows) + 1)
    (tmp_path / "out" / "_COMPLETE").unlink()
    with pytest.raises(StoreExistsError, match=r"the input .*rows\.npy has changed since; choose another path"):
        dkfm.batch_score(made / "unnamed", rows, tmp_path / "out", progress=False)
    X = np.load(rows)
    dkfm.batch_score(made / "unnamed", X, tmp_path / "memory", progress=False)
    X[3, 1] += 1
    with pytest.raises(StoreExistsError, match="the input source has changed since"):
        dkfm.batch_score(made / "unnamed", X, tmp_path / "memory", progress=False)


def test_several_outputs_come_from_one_pass_over_the_kernel(made, tmp_path, monkeypatch):
    from dkfm.numerics import scorer

    passes, block = [], scorer.Scorer.kernel_values
    monkeypatch.setattr(scorer.Scorer, "kernel_values", lambda self, *a: passes.append(1) or block(self, *a))
    monkeypatch.setattr("dkfm.core.cpus.COUNT", 1)
    score(made, tmp_path / "one")
    alone = len(passes)
    score(made, tmp_path / "two", output=["reconstruction_error", "scores"])
    assert len(passes) == 2 * alone
    for output in ("scores", "reconstruction_error"):
        np.testing.assert_allclose(values(tmp_path / "two", output), expected(made, output), atol=1e-12)
    np.testing.assert_array_equal(values(tmp_path / "two"), values(tmp_path / "two", "reconstruction_error"))
    with pytest.raises(StoreError, match="no output 'features'; it has reconstruction_error, scores"):
        dkfm.open_scores(tmp_path / "two", "features")
    for wrong in ([], ["scores", "scores"]):
        with pytest.raises(InvalidInputError, match="each output once"):
            score(made, tmp_path / "no", output=wrong)


@pytest.mark.slow
def test_a_table_scores_by_name_and_keeps_its_ids_in_order(made, tmp_path):
    report = score(made, tmp_path / "out.parquet", "rows.parquet", id_column="id")
    assert report.rows == 100
    frame = dkfm.open_scores(tmp_path / "out.parquet")
    assert frame.divisions == (0, 20, 40, 60, 80, 99)
    found = frame.compute(scheduler="synchronous")
    assert found.columns.tolist() == ["id", "kernelpca0", "kernelpca1", "kernelpca2"]
    assert found["id"].tolist() == [f"row {i}" for i in range(100)]
    np.testing.assert_allclose(found.iloc[:, 1:].to_numpy(), expected(made), atol=1e-12)
    whole = pq.read_table(tmp_path / "out.parquet")  # as any reader of Parquet
    assert whole.column("id").to_pylist() == found["id"].tolist()
    blocks = list(dkfm.iter_scores(tmp_path / "out.parquet"))
    assert [ids[0] for _, ids in blocks] == ["row 0", "row 20", "row 40", "row 60", "row 80"]
    score(made, tmp_path / "out", "rows.parquet")
    np.testing.assert_array_equal(values(tmp_path / "out"), found.iloc[:, 1:].to_numpy())
    assert dkfm.verify_scores(tmp_path / "out.parquet", made / "rows.parquet").worst < 1
    assert dkfm.verify_scores(tmp_path / "out", made / "rows.parquet").worst < 1


def test_arguments_that_are_none_are_one_sentence(made, tmp_path):
    table = pq.read_table(made / "rows.parquet").drop_columns(["b"])
    pq.write_table(table, tmp_path / "less.parquet")
    pq.write_table(pq.read_table(made / "rows.parquet").append_column("scores", [range(100)]), made / "scores.parquet")
    for source, target, options, words in [
        (tmp_path / "less.parquet", "out", {}, "'b'|b"),
        (
            made / "rows.parquet",
            "out",
            {"columns": ["a", "b", "c", "e"]},
            "'e', and the model was fitted with 'a', 'b', 'c', 'd'",
        ),
        (made / "rows.parquet", "out.parquet", {"id_column": "kernelpca1"}, "column|ids"),
        (made / "rows.parquet", "out.parquet", {"id_column": "key"}, "key"),
        (made / "scores.parquet", "out.parquet", {"id_column": "scores"}, "called 'scores', as scores or a column"),
        (made / "rows.parquet", "out.parquet", {"id_column": ""}, "''"),
        (made / "rows.npy", "out", {"output": 5}, "output must name each output once, and is 5"),
        (made / "rows.npy", "out", {"output": [["scores"]]}, "no output \\['scores'\\]; it has scores"),
        (made / "rows.npy", "out", {"columns": 5}, "columns must be a list of names, and is 5"),
        (made / "rows.npy", "out", {"client": "x"}, "client must be a Client of distributed, and is 'x'"),
        (
            made / "rows.npy",
            "out",
            {"client": SimpleNamespace(asynchronous=False)},
            "client must be a Client",
        ),  # a cluster
        *((made / "rows.npy", "out", {"stall_timeout": wrong}, "stall_timeout") for wrong in (-1, "5", None, np.nan)),
        (made / "rows.npy", "out", {"id_column": "id"}, "is neither"),
        (made / "rows.npy", "out.parquet", {"id_column": "id"}, "is neither"),
        (made / "rows.npy", "out", {"columns": NAMES}, "is neither"),
    ]:
        with pytest.raises(InvalidInputError, match=words) as caught:
            dkfm.batch_score(made / "model", source, tmp_path / target, progress=False, **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / target).exists()


@pytest.mark.parametrize("wrong", [None, 5, b"out"])
def test_what_is_no_path_is_one_sentence(wrong, made):
    score_rows = partial(dkfm.batch_score, made / "unnamed", made / "rows.npy")
    for use in (score_rows, dkfm.open_scores, dkfm.verify_scores, dkfm.load):
        with pytest.raises(StoreError, match="must be text, a Path or a URL"):
            use(wrong)


@pytest.mark.slow
def test_rows_that_have_no_score_are_named_by_file_and_row(made, tmp_path, monkeypatch):
    rows = np.load(made / "rows.npy")
    rows[[45, 47, 59, 61], [2, 2, 0, 3]] = np.nan
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    for part in (0, 1):
        some = rows[50 * part : 50 * part + 50]
        pq.write_table(pa.table(dict(zip(NAMES, some.T, strict=True))), folder / f"part{part}.parquet")
    monkeypatch.setattr("dkfm.core.cpus.COUNT", 1)
    words = r"part0\.parquet must be finite, and rows 45, 47 and 1 more contain NaN or infinity in columns 'a', 'c';"
    with pytest.raises(InvalidInputError, match=words):
        dkfm.batch_score(made / "model", folder, tmp_path / "out", chunk_rows=20, progress=False)
    report = dkfm.batch_score(
        made / "model",
        folder,
        tmp_path / "nan",
        output=["scores", "reconstruction_error"],
        chunk_rows=20,
        on_invalid="nan",
        progress=False,
    )
    assert report.invalid_rows == 4
    for output in ("scores", "reconstruction_error"):
        assert np.flatnonzero(np.isnan(values(tmp_path / "nan", output)).any(axis=1)).tolist() == [45, 47, 59, 61]
    assert dkfm.verify_scores(tmp_path / "nan", folder).sampled == 100


def test_values_of_sparse_rows_that_are_not_finite_are_named_by_row_and_column(rng, tmp_path):
    Z = rng.binomial(1, 0.4, size=(30, 9)).astype(np.float64)
    pca = dkfm.KernelPCA(1, kernel=kernels.Polynomial(3)).fit(sparse.csr_array(Z))
    Z[4, [6, 2]] = np.inf, np.nan
    with pytest.raises(InvalidInputError, match="row 4 contains NaN or infinity in columns 2, 6;"):
        dkfm.batch_score(pca, sparse.csr_array(Z), tmp_path / "out", progress=False)


def test_names_and_seconds_may_be_of_any_kind(made, tmp_path):
    options = {"columns": (name for name in NAMES), "stall_timeout": np.float32(9), "progress": False}
    dkfm.batch_score(made / "model", made / "rows.parquet", tmp_path / "out", output=np.array(["scores"]), **options)
    np.testing.assert_allclose(values(tmp_path / "out"), expected(made), atol=1e-12)


def test_rows_that_overflow_are_named_too(rng, tmp_path):
    pca = dkfm.KernelPCA(1, kernel=kernels.Polynomial(3)).fit(rng.normal(size=(9, 1)))
    Z = np.ones((30, 1))
    Z[[7, 9]] = 1e200
    with pytest.raises(KernelError, match=r"Rows 7, 9 of source overflow Polynomial"):
        dkfm.batch_score(pca, Z, tmp_path / "out", chunk_rows=30, progress=False)


def test_a_plan_tells_chunks_bytes_hours_and_the_refusal_and_writes_nothing(made, tmp_path, monkeypatch):
    plan = dkfm.plan_score(made / "unnamed", made / "rows.npy", tmp_path / "out", chunk_rows=20)
    assert (plan.rows, plan.chunks, plan.chunk_rows, plan.width, plan.done) == (100, 5, 20, 3, 0)
    assert plan.output_bytes == 100 * 3 * 8
    told = str(plan)
    for words in ("5 of 20 rows", "2.4 kB of scores, 480 B a chunk", "of memory, where a worker has", "time    about "):
        assert words in told
    assert not (tmp_path / "out").exists()
    score(made, tmp_path / "out")
    assert dkfm.plan_score(made / "unnamed", made / "rows.npy", tmp_path / "out").done == 5
    monkeypatch.setattr(memory, "measure_free_memory", lambda: 2000)
    plan = dkfm.plan_score(made / "unnamed", made / "rows.npy", tmp_path / "new")
    with pytest.raises(BudgetError, match=r"needs .* are there"):
        plan.require()


def test_the_command_line_has_the_plan_the_report_and_the_verification(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [str(made / "model"), str(made / "rows.parquet"), "out.parquet", "--id-column", "id"]

    def run(*line):
        return CliRunner().invoke(main, ["score", *paths, "--chunk-rows", "20", *line])

    assert "5 of 20 rows, 0 of them done" in run("--dry-run").stdout
    assert not (tmp_path / "out.parquet").exists()
    report = json.loads(run("--json").stdout)
    assert (report["rows"], report["scored_chunks"], len(report["slowest"])) == (100, 5, 5)
    assert report["rows_per_second"] > 0
    assert "100 rows, 5 of 5 chunks were there" in run().stdout
    assert "5 of them done" in run("--dry-run").stdout
    refused = run("--output", "scores, reconstruction_error")
    assert refused.exit_code == 1
    assert "StoreExistsError" in refused.stderr
    verify = ["verify", "out.parquet", "--against", str(made / "rows.parquet"), "--sample", "40"]
    done = CliRunner().invoke(main, verify)
    assert "40 rows scored anew by the formula agree: they differ by" in done.stdout
    monkeypatch.setattr(memory, "measure_free_memory", lambda: 2000)
    refused = run("--dry-run", "--overwrite")
    assert refused.exit_code == 1
    assert "chunks" in refused.stdout
    assert "BudgetError" in refused.stderr
