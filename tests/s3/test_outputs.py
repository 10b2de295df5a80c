"""Batch jobs whose models, rows and outputs are on an object store: a real S3 server, and a proxy that fails."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from click.testing import CliRunner

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.errors import (
    DamagedStoreError,
    IncompleteStoreError,
    InvalidInputError,
    StoreError,
    StoreExistsError,
    UnreachableError,
)
from dkfm.files.object_store import Remote
from dkfm.scoring import completion, output_store, receipts
from dkfm.scoring import run as scoring
from dkfm.storage.output_files import output_at

pytest.importorskip("s3fs", reason="the README's environment of tests has no extra s3; .ci/run has")
pytest.importorskip("moto", reason="the README's environment of tests has no S3 server; .ci/run has")


@pytest.fixture
def job(place, rng, tmp_path):
    """A model, 100 rows and where the output goes, all at URLs; and the scores as they are made here."""
    fitted = dkfm.KernelPCA(3, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(60, 4)))
    fitted.save(f"{place.url}/model")
    rows = rng.normal(size=(100, 4))
    np.save(tmp_path / "rows.npy", rows)
    place.create("rows.npy", (tmp_path / "rows.npy").read_bytes())
    return fitted, rows, place


def score(job, name="scores", **options):
    _, _, place = job
    paths = (f"{place.url}/{part}" for part in ("model", "rows.npy", name))
    return dkfm.batch_score(*paths, **{"chunk_rows": 30, "progress": False} | options)


def bytes_of(place):
    return {name: place.read(name) for name, _, _ in place.list_objects() if not name.startswith("_journal")}


@pytest.mark.parametrize("name", ["scores", "scores.parquet"])
def test_a_job_at_urls_scores_what_one_here_does(job, tmp_path, name):
    fitted, rows, place = job
    report = score(job, name, output=["scores", "reconstruction_error"])
    assert (report.rows, report.chunks, report.path) == (100, 4, f"{place.url}/{name}")
    found = dkfm.open_scores(report.path).compute(scheduler="synchronous")
    values = found if name == "scores" else found.to_numpy()[:, :3]
    np.testing.assert_allclose(values, fitted.transform(rows), atol=1e-12)
    blocks = list(dkfm.iter_scores(report.path, "reconstruction_error"))
    errors = np.concatenate([block for block, _ in blocks])[:, 0]
    np.testing.assert_allclose(errors, fitted.reconstruction_error(rows), atol=1e-12)
    assert np.concatenate([numbers for _, numbers in blocks]).tolist() == list(range(100))
    assert dkfm.verify_scores(report.path, f"{place.url}/rows.npy").worst < 1
    # Bit for bit what a job in a folder writes.
    dkfm.batch_score(
        f"{place.url}/model",
        tmp_path / "rows.npy",
        tmp_path / name,
        output=["scores", "reconstruction_error"],
        chunk_rows=30,
        progress=False,
    )
    here, there = output_store.read_output(tmp_path / name).format, output_store.read_output(place.join(name)).format
    for number in range(4):
        for file in here.file_names(number):
            assert (tmp_path / name / file).read_bytes() == there.output_location.root.read(file)


def test_the_command_line_scores_verifies_and_describes_at_urls(job):
    _, _, place = job
    paths = [f"{place.url}/{name}" for name in ("model", "rows.npy", "scores")]
    run = CliRunner().invoke
    assert "100 rows" in run(main, ["score", *paths]).stdout
    found = run(main, ["verify", paths[2], "--against", paths[1]])
    assert found.exit_code == 0, found.output
    assert "100 rows, every chunk as it was written" in found.stdout
    assert json.loads(run(main, ["info", paths[2], "--json"]).stdout)["complete"] is True
    again = run(main, ["score", *paths])
    assert "1 of 1 chunks were there" in again.stdout or "4 of 4 chunks were there" in again.stdout
    other = run(main, ["score", *paths, "--output", "reconstruction_error"])
    assert other.exit_code == 1
    assert other.stderr.count("\n") == 1


def test_a_job_that_was_cut_short_goes_on_at_its_url(job, monkeypatch):
    _, _, place = job
    score(job, "expected")
    run_tasks, runs = scoring.run_tasks, []

    def dies(*arguments, **options):
        runs.append(arguments[1])
        tasks = list(arguments[3])
        if len(runs) == 1:
            run_tasks(*arguments[:3], tasks[:2], 2, *arguments[5:], **options)
            raise KeyboardInterrupt
        return run_tasks(*arguments[:3], tasks, *arguments[4:], **options)

    monkeypatch.setattr(scoring, "run_tasks", dies)
    with pytest.raises(KeyboardInterrupt):
        score(job)
    with pytest.raises(IncompleteStoreError):
        dkfm.open_scores(f"{place.url}/scores")
    report = score(job)
    assert (report.scored_chunks, report.chunks) == (2, 4)
    found, expected = (bytes_of(place.join(name)) for name in ("scores", "expected"))
    same = [name for name in expected if "/c/" in name]
    assert len(same) == 4
    assert all(found[name] == expected[name] for name in same)


class Ending:
    """Lets so many operations of an object store pass; at the next one the job ends."""

    def __init__(self, patch, operations):
        self.left, self.ended = operations, False
        for name in ("create", "replace", "remove_objects"):
            patch.setattr(Remote, name, self.counted(getattr(Remote, name)))

    def counted(self, honest):
        def act(place, *arguments):
            self.left -= 1
            if self.left < 0:
                self.ended = True
                raise KeyboardInterrupt
            return honest(place, *arguments)

        return act


def test_every_operation_at_which_a_job_ends_leaves_what_the_same_call_finishes(job, monkeypatch):
    _, _, place = job
    score(job, "expected")
    expected = bytes_of(place.join("expected"))
    ended, operations = True, -1
    while ended:
        operations += 1
        with monkeypatch.context() as patch:
            patch.setattr("dkfm.core.cpus.COUNT", 1)
            ending = Ending(patch, operations)
            with suppress(KeyboardInterrupt):
                score(job)
        ended = ending.ended
        score(job)
        found = bytes_of(place.join("scores"))
        assert all(found[name] == expected[name] for name in expected if "/c/" in name)
        dkfm.verify_scores(f"{place.url}/scores")
        place.join("scores").remove_objects(*[name for name, _, _ in place.join("scores").list_objects()])
    assert operations > 7


@pytest.mark.parametrize("damage", ["gone", "short", "flipped"])
@pytest.mark.parametrize("name", ["scores", "scores.parquet"])
def test_a_damaged_object_is_told_by_readers_and_made_again_by_the_same_call(job, damage, name):
    _, _, place = job
    score(job, name)
    output = output_store.read_output(place.join(name))
    (file,) = output.format.file_names(2)
    good = output.root.read(file)
    if damage == "gone":
        output.root.remove_objects(file)
    else:
        output.root.replace(file, good[:-7] if damage == "short" else good[:9] + bytes([good[9] ^ 16]) + good[10:])
    for reads in (dkfm.verify_scores, lambda url: dkfm.open_scores(url).compute(scheduler="synchronous")):
        with pytest.raises(DamagedStoreError):
            reads(f"{place.url}/{name}")
    assert score(job, name).scored_chunks == 1
    assert output.root.read(file) == good


def test_many_writers_of_one_chunk_leave_one_of_them_and_all_tell_of_it(job):
    from dkfm.scoring.tasks import SharedTaskArguments, score_chunk
    from dkfm.sources.opening import open_source

    _, _, place = job
    score(job)
    output = output_store.read_output(place.join("scores"))
    digest, source = output.model["digest"], open_source(f"{place.url}/rows.npy")
    completion.remove_marker(output)
    completion.remove_chunks(output, [1])
    work = SharedTaskArguments(f"{place.url}/model", digest, (), False, source, 30, output, "raise")
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: score_chunk(work, 1), range(8)))
    assert len({receipt.file_checksums for receipt in told}) == 1
    assert completion.is_sound(output, told[0])


def test_two_jobs_on_one_url_both_end_well_or_in_a_sentence(job):
    def go(_):
        try:
            return score(job).rows
        except StoreExistsError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(go, range(2)))
    assert 100 in said
    assert score(job).scored_chunks == 0


def test_what_is_there_is_not_replaced_unless_it_is_meant_and_dkfm_s(job):
    _, _, place = job
    score(job)
    with pytest.raises(StoreExistsError, match="another job: the output is"):
        score(job, output="reconstruction_error")
    assert score(job, output="reconstruction_error", overwrite=True).rows == 100
    assert sorted(name for name in bytes_of(place.join("scores")) if name.endswith("zarr.json")) == [
        "reconstruction_error/zarr.json",
        "zarr.json",
    ]
    place.create("scores/thesis.txt", b"mine")
    with pytest.raises(StoreExistsError, match=r"thesis\.txt"):
        score(job, overwrite=True)
    place.create("mine/thesis.txt", b"mine")
    for overwrite in (False, True):
        with pytest.raises(StoreExistsError, match="did not write"):
            score(job, "mine", overwrite=overwrite)
    assert place.read("mine/thesis.txt") == place.read("scores/thesis.txt") == b"mine"
    with pytest.raises(InvalidInputError, match="which this job reads"):
        dkfm.batch_score(f"{place.url}/model", f"{place.url}/rows.npy", place.url, overwrite=True, progress=False)


def test_an_object_that_changes_under_way_completes_nothing(job, monkeypatch):
    from dkfm.scoring import tasks

    _, _, place = job
    read = tasks._read_rows_and_ids

    def changed(work, part):
        if part.start == 60:
            place.replace("rows.npy", place.read("rows.npy")[:-8] + bytes(8))
        return read(work, part)

    monkeypatch.setattr(tasks, "_read_rows_and_ids", changed)
    with pytest.raises(InvalidInputError, match="changed while it was scored"):
        score(job)
    with pytest.raises(IncompleteStoreError):
        dkfm.open_scores(f"{place.url}/scores")


def test_a_server_that_fails_now_and_then_costs_time_and_no_row(job, proxy):
    fitted, rows, _ = job
    proxy.faults = [("GET", "rows.npy", 500), ("PUT", "scores", 503), ("HEAD", "model", 500)]
    report = score(job)
    found = dkfm.open_scores(report.path).compute(scheduler="synchronous")
    np.testing.assert_allclose(found, fitted.transform(rows), atol=1e-12)


def test_a_server_that_fails_for_good_is_a_sentence_and_the_job_goes_on_when_it_is_back(job, proxy, monkeypatch):
    _, _, place = job
    from dkfm.scoring import tasks

    read = tasks._read_rows_and_ids

    def failing(work, part):
        if part.start >= 60:
            proxy.faults = [("GET", "rows.npy", 500)] * 1000
        return read(work, part)

    monkeypatch.setattr(tasks, "_read_rows_and_ids", failing)
    with pytest.raises(UnreachableError) as caught:
        score(job)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(tasks, "_read_rows_and_ids", read)
    proxy.faults = []
    assert score(job).rows == 100
    dkfm.verify_scores(f"{place.url}/scores")


def test_workers_in_processes_of_their_own_score_at_urls(job, client):
    fitted, rows, place = job
    report = score(job, client=client)
    found = dkfm.open_scores(report.path).compute(scheduler="synchronous")
    np.testing.assert_allclose(found, fitted.transform(rows), atol=1e-12)
    assert len(list(receipts.read_receipts(output_at(place.join("scores"))))) == 4


def test_nothing_at_a_url_is_a_sentence(place):
    for reads in (dkfm.open_scores, dkfm.verify_scores):
        with pytest.raises(StoreError, match="There is nothing at"):
            reads(f"{place.url}/none")


def test_a_write_that_comes_late_from_a_replaced_job_is_never_taken_for_this_one_s(job, rng):
    _, rows, place = job
    score(job)
    output = output_store.read_output(place.join("scores"))
    (file,) = output.format.file_names(1)
    stale = output.root.read(file)
    other = dkfm.KernelPCA(3, kernel=kernels.Gaussian(1.0)).fit(rng.normal(size=(60, 4)))
    other.save(f"{place.url}/model", overwrite=True)
    create = type(output.root).create

    def after_a_late_one(self, name, data):
        if name == file:
            self.replace(name, stale)
        return create(self, name, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(output.root), "create", after_a_late_one)
        score(job, overwrite=True)
    found = dkfm.open_scores(f"{place.url}/scores").compute(scheduler="synchronous")
    np.testing.assert_allclose(found, other.transform(rows), atol=1e-12)


def test_objects_that_changed_places_are_not_read(job):
    _, _, place = job
    score(job)
    output = output_store.read_output(place.join("scores"))
    scores = dkfm.open_scores(f"{place.url}/scores")
    files = [output.format.file_names(number)[0] for number in range(2)]
    data = [output.root.read(file) for file in files]
    for file, other in zip(files, reversed(data), strict=True):
        output.root.replace(file, other)
    with pytest.raises(DamagedStoreError, match="Chunk"):
        scores.compute(scheduler="synchronous")
    with pytest.raises(DamagedStoreError, match="Chunk"):
        dkfm.open_scores(f"{place.url}/scores").compute(scheduler="synchronous")
    assert score(job).scored_chunks == 2


def test_a_plan_writes_nothing_at_a_url_and_no_secret_is_kept(job):
    _, _, place = job
    score(job)
    place.join("scores").remove_objects("scores/zarr.json")
    before = bytes_of(place)
    assert dkfm.plan_score(*(f"{place.url}/{name}" for name in ("model", "rows.npy", "scores"))).done == 4
    assert bytes_of(place) == before
    assert score(job).scored_chunks == 0
    assert "scores/scores/zarr.json" in bytes_of(place)
