"""Real processes on loopback, and what is done to them: a scheduler, workers with nannies, `dkfm score` as the driver.

Everything is seeded and bounded in time, and everything that was started ends with its context.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

import dkfm
from dkfm import kernels
from dkfm.scoring import output_store, receipts
from dkfm.storage.output_files import LocalOutput

ROWS, CHUNK_ROWS, COLUMNS, LANDMARKS = 20_000, 500, 40, 600
"""Of the job that is disturbed: forty tasks of a fifth of a second."""

LIMIT = 240
"""Seconds for any process that is waited for."""

WHOLE_CAMPAIGN = os.environ.get("DKFM_FAULTS") == "all"
"""Whether all faults in all cases are asked for."""


@dataclass
class Totals:
    """What was done to all jobs, and what became of them."""

    faults: int = 0
    again: int = 0
    lost: int = 0
    wrong: int = 0

    def __str__(self):
        counts = f"{self.faults} faults injected, {self.again} chunks run again"
        return f"{counts}, {self.lost} rows lost, {self.wrong} rows wrong"


TOTALS = Totals()


@dataclass
class Job:
    """A model, rows, and the scores of a run that nothing disturbed."""

    folder: Path
    chunk_rows: int = CHUNK_ROWS
    expected: Path = field(init=False)

    def __post_init__(self):
        self.expected = self.folder / "expected"

    @classmethod
    def made(cls, folder, rows=ROWS, chunk_rows=CHUNK_ROWS):
        rng = np.random.default_rng(3)
        kernel = kernels.Matern(1.7, 6.0)  # Bessel functions take long enough to be killed in
        dkfm.KernelPCA(4, kernel=kernel).fit(rng.normal(size=(LANDMARKS, COLUMNS))).save(folder / "model")
        np.save(folder / "rows.npy", rng.normal(size=(rows, COLUMNS)))
        job = cls(folder, chunk_rows)
        dkfm.batch_score(*job.paths(job.expected), chunk_rows=chunk_rows, progress=False)
        return job

    def paths(self, target):
        return self.folder / "model", self.folder / "rows.npy", target

    def command(self, target, *options):
        paths = map(str, self.paths(target))
        return [*DKFM, "score", *paths, "--chunk-rows", str(self.chunk_rows), "--no-progress", *options]

    def settle(self, target):
        """Hold a finished output against the one that nothing disturbed, count, and let it go."""
        found, expected = output_store.read_output(target), output_store.read_output(self.expected)
        dkfm.verify_scores(target)
        for number in range(expected.n_chunks):
            ours, theirs = (output.root / output.format.file_names(number)[0] for output in (found, expected))
            rows = expected.chunk(number).rows
            TOTALS.lost += 0 if ours.exists() else rows
            TOTALS.wrong += 0 if ours.read_bytes() == theirs.read_bytes() else rows
        partial = [path for path in target.rglob("*") if path.name.endswith(".partial")]
        shutil.rmtree(target)
        assert not partial
        assert (TOTALS.lost, TOTALS.wrong) == (0, 0)

    def count_lost_work(self, target):
        """Count the chunks that a killed driver leaves without receipts: they are run again."""
        if (target / "zarr.json").exists():
            told = {receipt.chunk for receipt in receipts.read_receipts(LocalOutput(target))}
            TOTALS.again += max(0, self.chunks_there(target) - len(told))

    def wait_for_a_chunk(self, target, driver):
        """Wait until there is one more, or the driver is gone."""
        before = self.chunks_there(target)
        wait_for(lambda: self.chunks_there(target) > before or driver.poll() is not None, "a chunk", LIMIT)

    def chunks_there(self, target):
        """Return how many chunks of an output have their names."""
        return sum(1 for _ in target.glob("scores/c/*/0"))


DKFM = [sys.executable, "-W", "error", "-m", "dkfm"]


def environment(**more):
    return os.environ | {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "10s", "PYTHONUNBUFFERED": "1"} | more


def run(command, code=0, **options):
    """Run a command to its end; return what it printed."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False, env=environment(), **options
    )
    assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout if code == 0 else done.stderr


@contextmanager
def process(command, log=None, **options):
    """Start a process in a group of its own, and end the group at the end, whatever state it is in."""
    with ExitStack() as stack:
        output = subprocess.DEVNULL if log is None else stack.enter_context(log.open("ab"))
        started = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, **{"env": environment()} | options
        )
        try:
            yield started
        finally:
            end(started)


def end(started):
    """End a process and those that it started."""
    family = [started.pid]
    with suppress(psutil.NoSuchProcess):
        family += [child.pid for child in psutil.Process(started.pid).children(recursive=True)]
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    started.wait(30)


class Site:
    """A scheduler and workers, each worker with a nanny."""

    def __init__(self, folder, workers=2, threads=1, **worker_environment):
        self.folder, self._workers, self._threads = folder, workers, threads
        self._environment, self._stack = worker_environment, ExitStack()
        self.nannies = []

    def __enter__(self):
        self.folder.mkdir(exist_ok=True)
        described = self.folder / "scheduler.json"
        described.unlink(missing_ok=True)
        inside, host = self.place()
        command = [*inside, sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", host, "--port", "0"]
        command += ["--dashboard-address", "127.0.0.1:0", "--no-show", "--no-jupyter"]
        self.scheduler = self._stack.enter_context(
            process([*command, "--scheduler-file", str(described)], self.folder / "scheduler.log")
        )
        wait_for(described.exists, "the scheduler")
        wait_for(lambda: described.read_text().strip().endswith("}"), "the scheduler's file")
        self.address = json.loads(described.read_text())["address"]
        for number in range(self._workers):
            self.start_worker(number, **self._environment)
        return self

    def __exit__(self, *error):
        self._stack.close()

    def place(self, number=None):
        """Return how a command begins that runs where a worker does, or the scheduler, and the address there."""
        return [], "127.0.0.1"

    def start_worker(self, number, before=(), scheduler=None, listen=None, memory="1GB", **more):
        """Start a worker, by some other command if need be; it listens where its place is, or as it is told."""
        inside, host = self.place(number)
        command = [*inside, *before, sys.executable, "-m", "distributed.cli.dask_worker", scheduler or self.address]
        command += ["--name", f"w{number}", "--nthreads", str(self._threads), "--memory-limit", memory]
        # Without an address of its own what a worker says over HTTP is said on every interface.
        command += [*(listen or ["--host", host]), "--no-dashboard", "--dashboard-address", f"{host}:0"]
        scratch = self.folder / f"scratch{number}"
        command += ["--local-directory", str(scratch), "--death-timeout", "60"]
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        log = self.folder / f"worker{number}.log"
        # What `python -m` imports first is what lies where it is started.
        options = {"env": environment(PYTHONPATH=path, **more), "cwd": self.folder}
        started = self._stack.enter_context(process(command, log, **options))
        self.nannies.append(started)
        return started

    def worker_of(self, nanny):
        """Return the process id of the worker that a nanny watches, None while there is none."""
        try:
            children = psutil.Process(nanny.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        workers = [child.pid for child in children if _is_worker(child)]
        return workers[0] if workers else None

    def kill_a_worker(self, rng):
        """Kill a worker, chosen at random among those that are there."""
        pids = [pid for pid in map(self.worker_of, self.nannies) if pid is not None]
        if pids:
            pid = pids[int(rng.integers(len(pids)))]
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
            TOTALS.faults += 1
            TOTALS.again += 1  # the one chunk that it was at
        return bool(pids)


def _is_worker(child):
    try:
        return "spawn_main" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(is_so, what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} seconds"
        time.sleep(0.02)


def sentence(text):
    """Return the one line that a failed command printed, which begins with the name of its error."""
    lines = [line for line in text.splitlines() if re.match(r"\w+Error: ", line)]
    assert len(lines) == 1, text
    return lines[0]


def numbers(few, campaign):
    """Parametrize a test by how many faults it injects: a few, or with DKFM_FAULTS=all those of the whole campaign."""
    return pytest.mark.parametrize(
        "faults", [pytest.param(campaign, marks=pytest.mark.timeout(3600)) if WHOLE_CAMPAIGN else few]
    )


def left(folder):
    """Return the names of what is left in a folder, in order."""
    return sorted(path.name for path in folder.iterdir())
