"""Jobs that go on: what was done stays, what changed is refused by name, several outputs come from one pass."""

import json
import shutil
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.errors import (
    CertificateError,
    DamagedStoreError,
    DkfmWarning,
    InvalidInputError,
    StalledError,
    StoreError,
)
from dkfm.execution import task_runner
from dkfm.numerics.certificates.reference_scores import ReferenceScorer
from dkfm.scoring import completion, marker, output_store, receipts, tasks
from dkfm.sources.opening import open_source
from dkfm.storage.output_files import LocalOutput
from helpers.resumed_jobs import NAMES, expected, score, values


def test_interrupted_is_a_sentence_and_what_is_done_stays(made, tmp_path, monkeypatch):
    score_chunk = tasks.score_chunk

    def interrupted(work, number):
        if number == 3:
            raise KeyboardInterrupt
        return score_chunk(work, number)

    monkeypatch.setattr("dkfm.scoring.run.score_chunk", interrupted)
    monkeypatch.setattr("dkfm.core.cpus.COUNT", 1)
    line = ["score", str(made / "unnamed"), str(made / "rows.npy"), str(tmp_path / "out"), "--chunk-rows", "20"]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 130
    assert "goes on from there" in done.stderr
    monkeypatch.undo()
    assert "3 of 5 chunks were there" in CliRunner().invoke(main, line).stdout


def test_a_chunk_that_is_done_is_told_of_while_the_next_is_made(made, tmp_path, monkeypatch):
    """A kill then takes no more than what was in flight."""
    score_chunk, place = tasks.score_chunk, LocalOutput(tmp_path / "out")

    def last_waits_for_the_receipts_of_all_others(work, number):
        deadline = time.monotonic() + 60
        while number == 4 and {receipt.chunk for receipt in receipts.read_receipts(place)} != {0, 1, 2, 3}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return score_chunk(work, number)

    monkeypatch.setattr("dkfm.scoring.run.score_chunk", last_waits_for_the_receipts_of_all_others)
    monkeypatch.setattr("dkfm.core.cpus.COUNT", 1)
    assert score(made, tmp_path / "out").scored_chunks == 5


@pytest.mark.slow
def test_a_silent_job_ends_within_its_stall_timeout(made, tmp_path, monkeypatch):
    import threading

    release = threading.Event()
    monkeypatch.setattr("dkfm.scoring.run.score_chunk", lambda work, number: release.wait(60))
    try:
        with pytest.raises(StalledError, match="No task finished for"):
            score(made, tmp_path / "out", stall_timeout=0.5)
    finally:
        release.set()


def test_scores_that_are_not_the_model_s_are_told_by_row(made, tmp_path):
    """A chunk whose receipt is true but whose scores are not: only the formula tells."""
    score(made, tmp_path / "out")
    output = output_store.read_output(tmp_path / "out")
    kept = dict(enumerate(marker.read_receipt_table(output)))
    wrong = values(tmp_path / "out")[40:60].copy()
    wrong[7, 1] += 1e-9
    completion.remove_chunks(output, [2])
    from dkfm.scoring.formats import chunk_files

    (held,), _ = chunk_files.write_chunk_files(
        output.format, output.chunk(2), (chunk_files.Piece({"scores": part}) for part in [wrong]), 1, lambda: None
    )
    kept[2] = receipts.ChunkReceipt(2, 20, 0, (held.crc32c,), held.bytes)
    completion.complete_output(output, kept)
    assert dkfm.verify_scores(tmp_path / "out").rows == 100
    with pytest.raises(CertificateError, match="row 47"):
        dkfm.verify_scores(tmp_path / "out", made / "rows.npy")


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("basis", ["symmetric", "spectral", "cholesky"])
@pytest.mark.parametrize(
    "kernel",
    [
        kernels.Gaussian(1.0),
        *(pytest.param(k, marks=pytest.mark.slow) for k in (kernels.Polynomial(3), kernels.Laplacian(2.0))),
    ],
    ids=repr,
)
def test_every_output_of_every_map_is_within_what_rounding_allows_of_the_formula(kernel, basis, dtype, rng, tmp_path):
    phi = dkfm.ExactFeatureMap(kernel, basis=basis, dtype=dtype, centered=True).fit(rng.normal(size=(80, 3)))
    Z = rng.normal(size=(300, 3))
    np.save(tmp_path / "z.npy", Z)
    phi.save(tmp_path / "model")
    dkfm.batch_score(
        tmp_path / "model", tmp_path / "z.npy", tmp_path / "out", output=["features", "residual"], progress=False
    )
    assert dkfm.verify_scores(tmp_path / "out", tmp_path / "z.npy", sample=300).worst < 1
    # The formula is that of the documents, in one line of NumPy.
    features, _ = ReferenceScorer(phi.model_).compute(["features"], Z[:5])["features"]
    np.testing.assert_allclose(features, phi.transform(Z[:5]), atol=1e-4 if dtype == "float32" else 1e-9)


def test_a_model_that_moved_is_found_where_it_is_said_to_be(made, tmp_path):
    shutil.copytree(made / "unnamed", tmp_path / "model")
    dkfm.batch_score(tmp_path / "model", made / "rows.npy", tmp_path / "out", progress=False)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(StoreError, match=r"was at .*, and is not there"):
        dkfm.verify_scores(tmp_path / "out", made / "rows.npy")
    assert dkfm.verify_scores(tmp_path / "out", made / "rows.npy", model=tmp_path / "moved").worst < 1


def test_receipts_survive_a_journal_whose_segments_are_damaged_or_a_stranger_s(made, tmp_path, monkeypatch):
    monkeypatch.setattr(receipts, "_MIN_SEGMENT_INTERVAL", 60.0)  # one segment, at the end
    score(made, tmp_path / "out")
    place = LocalOutput(tmp_path / "out")
    (segment,) = (tmp_path / "out" / "_journal").iterdir()
    assert len(list(receipts.read_receipts(place))) == 5
    good = json.loads(segment.read_text())
    rows = json.loads(good["receipts"])
    import google_crc32c

    for wrong in ([], [1], [[]], [[1, 2]], [["a", *rows[0][1:]]], [[-1, *rows[0][1:]]], [[*rows[0], 1]], None, 5):
        text = json.dumps(wrong)
        segment.write_text(json.dumps({"crc32c": google_crc32c.value(text.encode()), "receipts": text}))
        assert list(receipts.read_receipts(place)) == []
    segment.write_text(json.dumps(good | {"crc32c": good["crc32c"] ^ 1}))
    assert list(receipts.read_receipts(place)) == []
    (tmp_path / "out" / "_COMPLETE").unlink()
    assert score(made, tmp_path / "out").scored_chunks == 5


@pytest.mark.slow
def test_segments_stay_few_however_long_a_job_is(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(receipts.time, "monotonic", lambda: now)
    puts = []

    class Place:
        def write_file(self, name, data):
            puts.append(name)

    book = receipts.Journal(Place(), "0" * 32)
    for number in range(36_000):  # an hour of ten chunks a second
        now = number / 10
        book.add(receipts.ChunkReceipt(number, 1, 0, (1,), 8))
    book.flush()
    assert 100 < len(puts) < 2000
    assert len(set(puts)) == len(puts)


@pytest.mark.slow
def test_a_window_of_tasks_is_all_that_a_job_holds(made, tmp_path, monkeypatch):
    most = 0
    start = task_runner._Run._start

    def counted(self, number, workers=None):
        nonlocal most
        most = max(most, len(self._open))
        start(self, number, workers)

    monkeypatch.setattr(task_runner._Run, "_start", counted)
    monkeypatch.setattr("dkfm.core.cpus.COUNT", 2)
    score(made, tmp_path / "out", chunk_rows=1)
    assert 0 < most <= 6


def test_what_a_finished_output_is_read_from_is_checked_chunk_by_chunk(made, tmp_path):
    score(made, tmp_path / "out")
    blocks = dkfm.iter_scores(tmp_path / "out")
    first, rows = next(blocks)
    np.testing.assert_array_equal(rows, np.arange(20))
    np.testing.assert_array_equal(first, values(tmp_path / "out")[:20])
    chunk = tmp_path / "out" / "scores" / "c" / "4" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-4] + b"abcd")
    with pytest.raises(DamagedStoreError, match="Chunk 4"):
        list(blocks)


def test_ids_of_any_kind_come_back(made, tmp_path):
    import datetime

    rows = np.load(made / "rows.npy")[:6]
    columns = dict(zip(NAMES, rows.T, strict=True))
    for kind, ids in {
        "int": pa.array(range(6)),
        "text": pa.array(list("uvwxyz")),
        "time": pa.array([datetime.datetime(2026, 1, day) for day in range(1, 7)]),  # ids have no zone
    }.items():
        pq.write_table(pa.table({"id": ids, **columns}), tmp_path / f"{kind}.parquet")
        target = tmp_path / f"{kind}-out.parquet"
        dkfm.batch_score(
            made / "model", tmp_path / f"{kind}.parquet", target, id_column="id", chunk_rows=4, progress=False
        )
        assert pq.read_table(target).column("id").combine_chunks() == ids
        assert open_source(target / "part-00000.parquet", id_column="id").shape == (4, 3)


def test_columns_in_another_order_are_those_of_the_fit(made, tmp_path):
    score(made, tmp_path / "out", "rows.parquet", columns=["d", "c", "b", "a"])
    np.testing.assert_allclose(values(tmp_path / "out"), expected(made), atol=1e-12)


@pytest.mark.slow
def test_a_model_without_names_takes_a_table_as_it_stands_and_says_so(made, tmp_path, rng):
    dkfm.KernelPCA(2).fit(rng.normal(size=(30, 4))).save(tmp_path / "nameless")
    call = tmp_path / "nameless", made / "rows.parquet"
    table = pq.read_table(made / "rows.parquet").drop_columns(["id", "note"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.warns(DkfmWarning, match="in the order of the table: d, b, a, c"):
        dkfm.batch_score(call[0], tmp_path / "rows.parquet", tmp_path / "out", progress=False)
    dkfm.batch_score(*call, tmp_path / "said", columns=["d", "b", "a", "c"], progress=False)
    np.testing.assert_allclose(values(tmp_path / "out"), values(tmp_path / "said"), atol=1e-13)
    assert dkfm.verify_scores(tmp_path / "said", made / "rows.parquet").worst < 1
    pq.write_table(table.append_column("price", table["a"]), tmp_path / "wide.parquet")
    with pytest.raises(InvalidInputError, match=r"5 columns .* with 4; columns= .--columns. names the 4 of the model"):
        dkfm.batch_score(call[0], tmp_path / "wide.parquet", tmp_path / "none", progress=False)


def test_rows_without_names_are_taken_in_the_order_of_the_fit_with_a_warning(made, tmp_path):
    for source in (made / "rows.npy", made / "rows.zarr", np.load(made / "rows.npy")):
        with pytest.warns(DkfmWarning, match=r"has no names of columns, .*must be in their order: a, b, c, d\.$"):
            dkfm.batch_score(made / "model", source, tmp_path / "out", progress=False, overwrite=True)
        np.testing.assert_allclose(values(tmp_path / "out"), expected(made), atol=1e-12)


def test_ids_that_are_called_as_scores_are_refused(made, tmp_path):
    table = pq.read_table(made / "rows.parquet")
    table = table.rename_columns(["kernelpca1" if name == "id" else name for name in table.column_names])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(InvalidInputError, match="The ids are called 'kernelpca1'"):
        dkfm.batch_score(made / "model", tmp_path / "rows.parquet", tmp_path / "o.parquet", id_column="kernelpca1")


def test_an_output_within_its_input_is_refused_before_the_work(made, tmp_path):
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    shutil.copy(made / "rows.parquet", folder / "part.parquet")
    shutil.copytree(made / "rows.zarr", tmp_path / "rows.zarr")
    for source in (folder, tmp_path / "rows.zarr"):
        with pytest.raises(InvalidInputError, match="which this job reads; choose another path"):
            dkfm.batch_score(made / "model", source, source / "out.parquet", progress=False)
        assert not (source / "out.parquet").exists()


def test_a_plan_counts_chunks_whose_files_are_there(made, tmp_path):
    score(made, tmp_path / "out")
    (tmp_path / "out" / "scores" / "c" / "3" / "0").unlink()
    assert dkfm.plan_score(made / "unnamed", made / "rows.npy", tmp_path / "out").done == 4


def test_what_is_in_an_output_and_not_of_it_is_told(made, tmp_path):
    score(made, tmp_path / "out.parquet", "rows.parquet")
    shutil.copy(tmp_path / "out.parquet" / "part-00001.parquet", tmp_path / "out.parquet" / "extra.parquet")
    for reads in (dkfm.open_scores, dkfm.verify_scores):
        with pytest.raises(DamagedStoreError, match=r"has gained extra\.parquet"):
            reads(tmp_path / "out.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e-200, 1.0, 30.0])
def test_rows_whose_scores_vanish_are_right(scale, rng, tmp_path):
    X = rng.normal(size=(40, 5))
    Z = scale * rng.normal(size=(50, 5))
    for number, estimator in enumerate(
        [
            dkfm.ExactFeatureMap(kernels.Linear(), basis="cholesky"),
            dkfm.ExactFeatureMap(kernels.Gaussian(0.5)),
            dkfm.KernelPCA(2, kernel=kernels.Gaussian(0.5)),
        ]
    ):
        estimator.fit(X).save(tmp_path / f"model{number}")
        dkfm.batch_score(tmp_path / f"model{number}", Z, tmp_path / f"out{number}", progress=False)
        assert dkfm.verify_scores(tmp_path / f"out{number}", Z).worst < 1


def test_chunks_that_changed_places_after_they_were_opened_are_not_read(made, tmp_path):
    score(made, tmp_path / "out")
    scores = dkfm.open_scores(tmp_path / "out")
    first, second = (tmp_path / "out" / "scores" / "c" / str(number) / "0" for number in range(2))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    with pytest.raises(DamagedStoreError, match="Chunk"):
        scores.compute(scheduler="synchronous")


def test_a_driver_that_loses_a_chunk_as_it_completes_makes_it_again(made, tmp_path, monkeypatch):
    from dkfm.scoring import completion

    complete, lost = completion.complete_output, []

    def taken(output, *told):
        complete(output, *told)
        if not lost:
            lost.append(1)
            completion.remove_chunks(output, [2])

    monkeypatch.setattr(completion, "complete_output", taken)
    score(made, tmp_path / "out")
    assert lost
    assert dkfm.verify_scores(tmp_path / "out").rows == 100
