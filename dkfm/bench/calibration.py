"""Measure the constants of a sizing on the workers of a cluster while all their threads are busy."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from dkfm.bench.bench_environment import AGREEMENT_ROWS, BenchEnvironment
from dkfm.bench.timing import Ratio
from dkfm.bench.workloads import default_gaussian, make_random_kernel_pca
from dkfm.core.display.text_tables import Row
from dkfm.core.sizing import Constants
from dkfm.errors import DkfmWarning
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.executors import Executor, open_executor
from dkfm.execution.task_runner import run_tasks
from dkfm.numerics import scorer
from dkfm.numerics.model import Head, Model
from dkfm.scoring.job_setup import JobRequest, open_job
from dkfm.scoring.run import batch_score
from dkfm.scoring.tasks import SharedTaskArguments

if TYPE_CHECKING:
    from distributed import Client

_FEW_COLUMNS = 10
"""Columns at which the kernel function dominates the time of a kernel value."""

_MANY_COLUMNS = 784
"""Columns at which the products dominate."""

_OUTPUTS = 20
_WIDE_COLUMNS = 1000
"""Columns of rows or of scores that are transferred with almost no arithmetic."""

_CHUNKS_PER_THREAD = 4
_UNITS = {
    "value_seconds": ("nanoseconds of a kernel's value", 1e9),
    "product_seconds": ("picoseconds of a product", 1e12),
    "scheduler_seconds": ("microseconds of the scheduler for a task", 1e6),
    "read_bytes": ("MB a second that a thread reads", 1e-6),
    "write_bytes": ("MB a second that a thread writes", 1e-6),
}


@dataclass(frozen=True)
class MeasuredConstants:
    """Measured values of the costs of `core.sizing.Constants`: for the name of each, one value for each round."""

    measurements_by_name: Mapping[str, Sequence[float]]

    @property
    def constants(self) -> Constants:
        """Medians of all rounds; noise can make a difference negative, which counts as 0."""
        return Constants(**{name: max(0.0, median(values)) for name, values in self.measurements_by_name.items()})

    def table_rows(self) -> list[Row]:
        """Return the rows of a table, one for each constant."""
        rows: list[Row] = []
        for name, (description, scale) in _UNITS.items():
            values = self.measurements_by_name[name]
            scaled = Ratio.of([scale * value for value in values], [1.0] * len(values))
            rows.append({"constant": description, "measured": scaled})
        return rows


def measure_constants(
    environment: BenchEnvironment, n: int, rows: int, tasks: int, moved_bytes: int
) -> MeasuredConstants:
    """Measure each constant once in every round.

    Each thread scores `rows` rows against n landmarks, and reads and writes `moved_bytes`; the scheduler runs `tasks`
    empty tasks.
    """
    with open_executor(environment.client) as executor:
        few, many = (_measure_value_seconds(environment, executor, n, d, rows) for d in (_FEW_COLUMNS, _MANY_COLUMNS))
    products = [(b - a) / (_MANY_COLUMNS - _FEW_COLUMNS) for a, b in zip(few, many, strict=True)]
    values = [a - product * (_FEW_COLUMNS + _OUTPUTS) for a, product in zip(few, products, strict=True)]
    read, written = _measure_read_and_write_rates(environment, moved_bytes)
    scheduler = [measure_scheduler_seconds(environment, tasks) for _ in range(environment.rounds)]
    measured = values, products, scheduler, read, written
    return MeasuredConstants(dict(zip(_UNITS, measured, strict=True)))


def _measure_value_seconds(
    environment: BenchEnvironment, executor: Executor, n: int, columns: int, rows: int
) -> list[float]:
    """Return the CPU seconds, in each round, of a thread for one kernel value and its product with the weights."""
    seconds = []
    for _ in range(environment.rounds):
        tasks, found = [(n, columns, rows)] * environment.threads, list[float]()
        measure, count = _measure_scoring_cpu_seconds, len(tasks)
        run_tasks(executor, "dkfm-bench-loop", measure, tasks, count, progress=False, on_result=found.append)
        seconds.append(median(found) / (rows * n))
    return seconds


def _measure_scoring_cpu_seconds(n: int, columns: int, rows: int) -> float:
    """Score rows through components of random weights; return the CPU seconds of this thread."""
    rng = np.random.default_rng([n, columns])
    head = Head(rng.normal(size=(n, _OUTPUTS)), np.zeros(_OUTPUTS))
    score = scorer.prepare_scorer(Model(default_gaussian(columns), rng.normal(size=(n, columns)), {"scores": head}))
    Z = rng.normal(size=(rows, columns))
    with single_blas_thread():
        score("scores", Z[:AGREEMENT_ROWS])
        start = time.thread_time()  # not wall time: its noise would exceed the differences measured here
        score("scores", Z)
        return time.thread_time() - start


def _measure_read_and_write_rates(
    environment: BenchEnvironment, bytes_per_thread: int
) -> tuple[list[float], list[float]]:
    """Return the bytes a second that a thread reads, and those that it writes, of each round."""
    thread_rows = bytes_per_thread // (8 * _WIDE_COLUMNS)
    jobs = {}
    for name, columns, width in (("read", _WIDE_COLUMNS, 1), ("write", 1, _WIDE_COLUMNS)):
        model = environment.save_model(make_random_kernel_pca(2, width, columns))
        source = environment.create_random_rows(thread_rows * environment.threads, columns)
        jobs[name] = partial(_score_rows, environment.client, model, source, max(1, thread_rows // _CHUNKS_PER_THREAD))
    times = environment.time_jobs(jobs)
    read, written = (
        [8 * _WIDE_COLUMNS * thread_rows / seconds for seconds in times.seconds_by_name[name]] for name in jobs
    )
    return read, written


def _score_rows(client: "Client", model: Path, source: Path, chunk_rows: int, destination: Path) -> None:
    batch_score(model, source, destination, client=client, chunk_rows=chunk_rows, progress=False)


def measure_scheduler_seconds(environment: BenchEnvironment, tasks: int) -> float:
    """Run empty tasks with the arguments of a job's tasks; return the CPU seconds of the scheduler for one task."""
    model, source = environment.save_model(make_random_kernel_pca(2, 1, 1)), environment.create_random_rows(tasks, 1)
    request = JobRequest(environment.folder / "nothing", None, "raise", 1, None, None, overwrite=False, trusted=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DkfmWarning)  # of chunks of one row: none is written
        with open_job(model, source, request, environment.client) as job:
            work = job.make_task_arguments(job.output)
            numbered = ((work, number) for number in range(tasks))
            before = _read_scheduler_cpu_seconds(environment.client)
            run_tasks(job.executor, "dkfm-bench-nothing", _do_nothing, numbered, tasks, progress=False)
            return (_read_scheduler_cpu_seconds(environment.client) - before) / tasks


def _do_nothing(work: SharedTaskArguments, number: int) -> int:
    return number


def _read_scheduler_cpu_seconds(client: "Client") -> float:
    """Return the CPU seconds that the two threads of a scheduler have used so far.

    A scheduler in this process shares them with the client, whose time is then included.
    """
    return float(client.run_on_scheduler(_sum_thread_cpu_seconds))


async def _sum_thread_cpu_seconds() -> float:
    from distributed.utils import offload

    return time.thread_time() + await offload(time.thread_time)
