"""The constants of a sizing, measured on the workers of a cluster with all of their threads at work."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from dkfm.bench.competitors import FEW, BenchSite
from dkfm.bench.timing import Ratio
from dkfm.bench.workloads import default_gaussian, random_components
from dkfm.core.sizing import Constants
from dkfm.core.text_tables import Row
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.executors import Executor, open_executor
from dkfm.execution.task_runner import run_tasks
from dkfm.numerics import scorer
from dkfm.numerics.model import Head, Model
from dkfm.scoring.prepare import JobRequest, prepare_job
from dkfm.scoring.run import batch_score
from dkfm.scoring.tasks import ChunkWork

if TYPE_CHECKING:
    from distributed import Client

_FEW, _MANY, _OUTPUTS = 10, 784, 20
"""Columns, few and many, and outputs: what a kernel's value costs is seen at few, its products at many."""

_WIDE = 1000
"""Columns of rows, and of scores, that are moved with next to no arithmetic."""

_CHUNKS = 4
"""Of a thread that moves."""

_UNITS = {
    "value_seconds": ("nanoseconds of a kernel's value", 1e9),
    "product_seconds": ("picoseconds of a product", 1e12),
    "scheduler_seconds": ("microseconds of the scheduler for a task", 1e6),
    "read_bytes": ("MB a second that a thread reads", 1e-6),
    "write_bytes": ("MB a second that a thread writes", 1e-6),
}


@dataclass(frozen=True)
class MeasuredConstants:
    """What was measured of each constant, round by round."""

    rounds: Mapping[str, Sequence[float]]

    @property
    def constants(self) -> Constants:
        """The medians; of a difference that noise made negative, 0."""
        return Constants(**{name: max(0.0, median(found)) for name, found in self.rounds.items()})

    def rows(self) -> list[Row]:
        """Return them for a table."""
        return [
            {"constant": told, "measured": Ratio.of([scale * value for value in self.rounds[name]], [1.0] * rounds)}
            for name, (told, scale) in _UNITS.items()
            if (rounds := len(self.rounds[name]))
        ]


def measure_constants(site: BenchSite, n: int, rows: int, tasks: int, moved: int) -> MeasuredConstants:
    """Measure each constant, as often as there are rounds.

    Parameters
    ----------
    site : Site
    n, rows : int
        Landmarks, and the rows that every thread scores against them.
    tasks : int
        That do nothing.
    moved : int
        Bytes that every thread reads, and that it writes.
    """
    with open_executor(site.client) as running:
        few, many = (_loops(site, running, n, columns, rows) for columns in (_FEW, _MANY))
    products = [(b - a) / (_MANY - _FEW) for a, b in zip(few, many, strict=True)]
    values = [a - product * (_FEW + _OUTPUTS) for a, product in zip(few, products, strict=True)]
    read, written = _moves(site, moved)
    nothing = [run_nothing(site, tasks) for _ in range(site.rounds)]
    found = values, products, nothing, read, written
    return MeasuredConstants(dict(zip(_UNITS, found, strict=True)))


def _loops(site: BenchSite, running: Executor, n: int, columns: int, rows: int) -> list[float]:
    """Return the seconds of a thread for a row and a landmark, of each round."""
    each: list[list[float]] = []
    for _ in range(site.rounds):
        taken: list[float] = []
        tasks = [(n, columns, rows)] * site.threads
        run_tasks(running, "dkfm-bench-loop", _loop, tasks, len(tasks), progress=False, done=taken.append)
        each.append(taken)
    return [median(taken) / (rows * n) for taken in each]


def _loop(n: int, columns: int, rows: int) -> float:
    """Score rows through components of random weights; return the seconds."""
    rng = np.random.default_rng([n, columns])
    head = Head(rng.normal(size=(n, _OUTPUTS)), np.zeros(_OUTPUTS))
    score = scorer.prepare_scorer(Model(default_gaussian(columns), rng.normal(size=(n, columns)), {"scores": head}))
    Z = rng.normal(size=(rows, columns))
    with single_blas_thread():
        score("scores", Z[:FEW])
        start = time.thread_time()  # of this core alone: the constants are differences, which noise would drown
        score("scores", Z)
        return time.thread_time() - start


def _moves(site: BenchSite, moved: int) -> tuple[list[float], list[float]]:
    """Return the bytes a second of a thread that reads, and of one that writes, of each round."""
    each = moved // (8 * _WIDE)
    jobs = {}
    for name, columns, width in (("read", _WIDE, 1), ("write", 1, _WIDE)):
        model, source = site.saved(random_components(2, width, columns)), site.rows(each * site.threads, columns)
        jobs[name] = partial(_score, site.client, model, source, max(1, each // _CHUNKS))
    times = site.timed(jobs)
    read, written = ([8 * _WIDE * each / seconds for seconds in times.seconds[name]] for name in jobs)
    return read, written


def _score(client: "Client", model: Path, source: Path, chunk_rows: int, destination: Path) -> None:
    batch_score(model, source, destination, client=client, chunk_rows=chunk_rows, progress=False)


def run_nothing(site: BenchSite, tasks: int) -> float:
    """Run tasks that carry what those of a job do, and do nothing; return the scheduler's seconds for one."""
    model, source = site.saved(random_components(2, 1, 1)), site.rows(tasks, 1)
    request = JobRequest(site.folder / "nothing", None, "raise", 1, None, None, overwrite=False, trusted=())
    with prepare_job(model, source, request, site.client) as job:
        digest, plan = job.record.digest, job.plan
        work = ChunkWork(
            job.model, digest, job.trusted, plan.streamed, job.source, plan.piece_rows, job.output, "raise"
        )
        numbered = ((work, number) for number in range(tasks))
        before = _scheduler_seconds(site.client)
        run_tasks(job.executor, "dkfm-bench-nothing", _do_nothing, numbered, tasks, progress=False)
        return (_scheduler_seconds(site.client) - before) / tasks


def _do_nothing(work: ChunkWork, number: int) -> int:
    return number


def _scheduler_seconds(client: "Client") -> float:
    """Return how many seconds the two threads of a scheduler have worked so far.

    Where it is in this process it shares them with the client, whose part is in the figure then.
    """
    return float(client.run_on_scheduler(_worked))


async def _worked() -> float:
    from distributed.utils import offload

    return time.thread_time() + await offload(time.thread_time)
