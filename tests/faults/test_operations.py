"""A job that ends at any one operation of its store, or whose files are damaged, is finished by the same command."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dkfm
from dkfm.errors import DkfmError, StoreError
from dkfm.scoring import output_store
from helpers import harness
from helpers.harness import TOTALS, numbers

EVENTS = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return harness.Job.made(tmp_path_factory.mktemp("small"), rows=250, chunk_rows=50)


def score(job, target, **options):
    return dkfm.batch_score(*job.paths(target), chunk_rows=job.chunk_rows, progress=False, **options)


def in_child(work):
    """Run something in a child process; return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ending_at(operation, root, work):
    """Run something in this process until it comes to the given operation on files below a folder: it ends there.

    Opening, making, linking, naming, removing, and making durable count; 0 means that it came to its end before.
    """
    done = 0

    def count(path):
        nonlocal done
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(root)):
            done += 1
            if done == operation:
                os._exit(9)

    def watch(event, arguments):
        if event in EVENTS and not (event == "open" and arguments[1] == "r"):
            count(arguments[0])

    fsync = os.fsync
    os.fsync = os.fdatasync = lambda descriptor: (
        count(Path(f"/proc/self/fd/{descriptor}").readlink()),
        fsync(descriptor),
    )
    sys.addaudithook(watch)
    work()
    return 0


@pytest.mark.parametrize("form", ["scores", "scores.parquet"])
@numbers(9, 1)
def test_a_job_that_ends_at_any_operation_goes_on(small, tmp_path, monkeypatch, form, faults):
    """One in so many operations; all of them in full."""
    monkeypatch.setattr("dkfm.core.cpus.COUNT", 1)
    whole = harness.Job(small.folder, small.chunk_rows)
    if form.endswith("parquet"):
        whole.expected = tmp_path / "expected.parquet"
        score(small, whole.expected)
    target, operation, code = tmp_path / form, 1, 9
    while code == 9:
        code = in_child(partial(ending_at, operation, tmp_path, partial(score, small, target)))
        TOTALS.faults += code == 9
        assert in_child(lambda: bool(score(small, target).rows != 250)) == 0
        for path in list(tmp_path.glob(".*")):  # an output that had no name yet, beside its place
            shutil.rmtree(path)
        whole.settle(target)
        operation += faults
    assert operation > 40
    assert code == 0


def flip(path, rng):
    raw = bytearray(path.read_bytes())
    raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(raw)


DAMAGE = {
    "deleted": lambda path, rng: path.unlink(),
    "truncated": lambda path, rng: os.truncate(path, int(rng.integers(path.stat().st_size))),
    "extended": lambda path, rng: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped": flip,
    "zeros": lambda path, rng: path.write_bytes(bytes(path.stat().st_size)),
    "another chunk": lambda path, rng: path.write_bytes(_other(path).read_bytes()),
}


def _other(path):
    number = int(path.parent.name) if path.name == "0" else int(path.stem.split("-")[1])
    other = (number + 1) % 4  # whole chunks
    return path.parents[1] / str(other) / "0" if path.name == "0" else path.with_name(f"part-{other:05d}.parquet")


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("form", ["scores", "scores.parquet"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_any_chunk_is_found_by_readers_and_mended_by_the_same_command(small, tmp_path, kind, form, finished):
    rng = np.random.default_rng(0)
    target = tmp_path / form
    score(small, target)
    good = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    for number in range(5):
        path = target / output_store.read_output(target).format.file_names(number)[0]
        DAMAGE[kind](path, rng)
        TOTALS.faults += 1
        with pytest.raises(StoreError):
            dkfm.verify_scores(target)
        with pytest.raises(StoreError):
            dkfm.open_scores(target).compute(scheduler="synchronous")
        with pytest.raises(StoreError):
            list(dkfm.iter_scores(target))
        if not finished:
            (target / "_COMPLETE").unlink()
        assert score(small, target).scored_chunks == 1
        assert path.read_bytes() == good[path]
        assert json.loads((target / "_COMPLETE").read_bytes()) == json.loads(good[target / "_COMPLETE"])


@numbers(100, 2000)
def test_every_flipped_bit_of_an_output_is_an_error_or_changes_no_score(small, tmp_path, faults):
    rng = np.random.default_rng(faults)
    for form in ("scores", "scores.parquet"):
        target = tmp_path / form
        score(small, target)
        good = _read(target)
        files = [path for path in sorted(target.rglob("*")) if path.is_file()]
        sizes = np.array([path.stat().st_size for path in files])
        for _ in range(faults // 2):
            path = files[int(rng.choice(len(files), p=sizes / sizes.sum()))]
            before = path.read_bytes()
            flip(path, rng)
            TOTALS.faults += 1
            try:
                found = _read(target)
            except DkfmError:
                found = good
            TOTALS.wrong += int((found != good).any(axis=1).sum()) if found.shape == good.shape else len(good)
            path.write_bytes(before)
        assert TOTALS.wrong == 0


def _read(target):
    dkfm.verify_scores(target)
    return np.concatenate([block for block, _ in dkfm.iter_scores(target)])


def test_an_input_that_changes_under_way_completes_nothing(small, tmp_path, monkeypatch):
    from dkfm.errors import InvalidInputError, StoreExistsError
    from dkfm.scoring import tasks

    rows, target, read = tmp_path / "rows.npy", tmp_path / "scores", tasks._read_rows_and_ids
    shutil.copy(small.folder / "rows.npy", rows)

    def changed(work, part):
        if part.start == 100:
            np.save(tmp_path / "new.npy", np.load(rows) + 1)
            (tmp_path / "new.npy").rename(rows)
        return read(work, part)

    monkeypatch.setattr(tasks, "_read_rows_and_ids", changed)
    with pytest.raises(InvalidInputError, match="changed while it was scored"):
        dkfm.batch_score(small.folder / "model", rows, target, chunk_rows=50, progress=False)
    TOTALS.faults += 1
    monkeypatch.undo()
    with pytest.raises(StoreError, match="did not finish"):
        dkfm.open_scores(target)
    with pytest.raises(StoreExistsError, match="has changed since"):
        dkfm.batch_score(small.folder / "model", rows, target, progress=False)
    assert dkfm.batch_score(small.folder / "model", rows, target, overwrite=True, progress=False).rows == 250


def mounted(folder, size):
    """Mount a file system in memory, or skip: it takes privileges."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        # reason: mounting takes privileges that not every machine gives, and nothing else makes a disk that is full
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")  # reason: as above


def test_a_full_disk_is_a_sentence_and_with_more_room_the_same_command_goes_on(job, tmp_path):
    disk = tmp_path / "disk"
    mounted(disk, "1m")
    try:
        target, ballast = disk / "scores", disk / "ballast"
        log = tmp_path / "driver.log"
        with harness.process(job.command(target), log) as driver:
            job.wait_for_a_chunk(target, driver)
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            TOTALS.faults += 1
            assert driver.wait(harness.LIMIT) == 1
        assert "No space left on device" in harness.sentence(log.read_text())
        told = harness.sentence(harness.run(job.command(target), code=1))
        assert "BudgetError: The output at" in told
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert "20,000 rows" in harness.run(job.command(target))
        job.settle(target)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
