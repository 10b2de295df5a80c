"""Size a scoring job in advance: its tasks, bytes, hours and machines, and the limit of its scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil, inf

from dkfm.core import budget, chunking
from dkfm.core.chunking import choose_tile_rows, count_tiles, require_count
from dkfm.core.display.quantities import format_bytes, format_seconds
from dkfm.errors import BudgetError, InvalidInputError

_MAX_SCHEDULER_SHARE = 0.25
"""Largest share of its time that a scheduler may spend on tasks; load varies, and it answers workers and dashboards."""

_HOUR = 3600.0

_PYTHON_BYTES = 2 * 10**8
"""Memory of Python and its libraries in a worker, in bytes."""

_PLANNED_SHARE = 0.6
"""Share of the memory limit of a worker that tasks may take: beyond it, Dask spills to disk and pauses."""


@dataclass(frozen=True)
class Constants:
    """Costs of the parts of a job on a machine, measured by `dkfm bench --json`; the defaults are assumptions.

    Attributes
    ----------
    value_seconds : float
        Seconds of one thread for one float64 kernel value, without its multiplications.
    product_seconds : float
        Seconds of one thread for one multiplication and addition. A kernel value needs d of them, and one for each
        output.
    scheduler_seconds : float
        Seconds of the scheduler's thread for one task.
    read_bytes, write_bytes : float
        Bytes per second that one thread reads, or writes durably and reads back, while all threads do the same.

    Examples
    --------
    >>> Constants.from_report({"constants": {"scheduler_seconds": 0.001}}).scheduler_seconds
    0.001
    """

    value_seconds: float = budget.VALUE_SECONDS
    product_seconds: float = budget.PRODUCT_SECONDS
    scheduler_seconds: float = 4e-3
    read_bytes: float = 2e8
    write_bytes: float = 1e8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0.0 if field.name.endswith("seconds") else 1.0
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < inf:
                raise InvalidInputError(
                    f"The constant {field.name} must be a number of at least {least:g}, and is {value!r}."
                )

    @classmethod
    def from_report(cls, report: Mapping[str, object]) -> "Constants":
        """Return the constants in a report of `dkfm bench --json`; missing constants have their default values.

        Raises
        ------
        InvalidInputError
            The report has no constants, an unknown constant, or one that is not a number.
        """
        measured, known = report.get("constants"), {field.name for field in fields(cls)}
        if not isinstance(measured, Mapping) or not set(measured) <= known:
            unknown = sorted(map(str, set(measured) - known)) if isinstance(measured, Mapping) else "none"
            raise InvalidInputError(
                f'A report of dkfm bench --json has "constants", of {", ".join(sorted(known))}; here are {unknown}.'
            )
        return cls(**measured)


@dataclass(frozen=True)
class Sizing:
    """The size of a scoring job.

    Attributes
    ----------
    rows, n, columns, width : int
        The job scores `rows` rows of `columns` columns against n landmarks, to `width` columns of scores.
    chunk_rows : int
        Rows of a task.
    asked : bool
        Whether `chunk_rows` differs from the default of `plan_score`, so that `chunk_rows=` (`--chunk-rows`) must be
        given.
    machines, cores : int
        Number of machines, and number of cores of each. A machine has one worker with a thread for each core.
    task_bytes, model_bytes : int
        Memory of a task, and memory that all tasks of a worker share, in bytes.
    read_bytes, written_bytes : int
        Bytes of all float64 rows, and of all scores.
    task_seconds : float
        Seconds of a thread for a task: arithmetic, reading and writing in sequence.
    scheduler_seconds : float
        Seconds of the scheduler for a task.
    """

    rows: int
    n: int
    columns: int
    width: int
    chunk_rows: int
    asked: bool
    machines: int
    cores: int
    task_bytes: int
    model_bytes: int
    read_bytes: int
    written_bytes: int
    task_seconds: float
    scheduler_seconds: float

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return count_tiles(self.rows, self.chunk_rows)

    @property
    def threads(self) -> int:
        """Number of threads of all machines."""
        return self.machines * self.cores

    @property
    def worker_bytes(self) -> int:
        """Bytes of memory of a worker with a thread for each core, without Python and its libraries."""
        return budget.worker_bytes(self.model_bytes, self.task_bytes, self.cores, 0)

    @property
    def memory_limit(self) -> int:
        """Memory limit of a worker in bytes (`memory:`, `--memory-limit`), with Python and what Dask keeps free."""
        return ceil((self.worker_bytes + _PYTHON_BYTES) / _PLANNED_SHARE)

    @property
    def core_hours(self) -> float:
        """Hours that one core would need for all rows."""
        return self.rows / self.chunk_rows * self.task_seconds / _HOUR

    @property
    def hours(self) -> float:
        """Hours until the last task ends, or until the scheduler has handled all tasks, whichever is later."""
        return max(self._working_seconds, self.tasks * self.scheduler_seconds) / _HOUR

    @property
    def scheduler_share(self) -> float:
        """Share of its time that the scheduler is busy; above 1, the scheduler limits the job."""
        return self.tasks * self.scheduler_seconds / self._working_seconds

    @property
    def scheduler_threads(self) -> float:
        """Largest number of worker threads that one scheduler keeps busy."""
        return self.task_seconds / self.scheduler_seconds if self.scheduler_seconds else inf

    @property
    def _working_seconds(self) -> float:
        rows = min(self.rows, count_tiles(self.tasks, self.threads) * self.chunk_rows)
        return rows / self.chunk_rows * self.task_seconds

    def __str__(self) -> str:
        size, chosen = format_bytes, f", with chunk_rows={self.chunk_rows}" if self.asked else ""
        hours = f"{self.core_hours:,.0f}" if self.core_hours >= 10 else f"{self.core_hours:.2g}"
        what = f"against {self.n:,} landmarks, to {self.width:,} columns"
        lines = {
            "rows": f"{self.rows:,} of {self.columns:,} columns, {what}",
            "tasks": f"{self.tasks:,} of {self.chunk_rows:,} rows{chosen}",
            "machines": f"{self.machines:,} of {self.cores:,} cores",
            "time": f"about {format_seconds(self.hours * _HOUR)}; {hours} hours of a core",
            "memory": f"{size(self.worker_bytes)} a worker, so a limit of {size(self.memory_limit)}",
            "read": f"{size(self.read_bytes)}, and {size(self.written_bytes)} written",
            "scheduler": f"busy for {self.scheduler_share:.0%} of the time",
        }
        return "\n".join(f"{name:10}{text}" for name, text in lines.items())


def sizing(
    rows: int,
    n: int,
    d: int,
    width: int,
    *,
    hours: float = 1.0,
    machines: int | None = None,
    cores: int = 16,
    chunk_rows: int | None = None,
    itemsize: int = 8,
    constants: Constants = Constants(),
) -> Sizing:
    """Size a scoring job of dense rows: its tasks, bytes and hours on given machines, or the machines for given hours.

    Parameters
    ----------
    rows, n, d, width : int
        The job scores `rows` rows of d columns against n landmarks, to `width` columns of scores.
    hours : float
        Largest duration of the job, above 0.
    machines : int, optional
        Number of machines; by default the fewest that finish within `hours`.
    cores : int
        Cores of a machine.
    chunk_rows : int, optional
        Rows of a task. The default is that of `plan_score`, or more if the scheduler would be busy for more than a
        quarter of its time or the job would have too many chunks.
    itemsize : int
        Bytes of a value of the model: 8 for float64, 4 for float32.
    constants : Constants
        Costs on the machines.

    Returns
    -------
    Sizing
        The size of the job.

    Raises
    ------
    InvalidInputError
        A number is not positive.
    BudgetError
        No number of machines finishes within `hours`.

    Examples
    --------
    >>> size = sizing(10**9, 4000, 50, 20)
    >>> size.tasks, round(size.core_hours, 1), size.machines, round(size.scheduler_share, 2)
    (33216, 5.6, 1, 0.11)
    """
    given = {"rows": rows, "n": n, "d": d, "width": width, "cores": cores, "itemsize": itemsize}
    for name, value in {**given, "chunk_rows": chunk_rows, "machines": machines}.items():
        if value is not None or name in given:
            require_count(value, name)
    if not hours > 0:
        raise InvalidInputError(f"hours must be a positive number, and is {hours!r:.60}.")
    job = _Job(rows, n, d, width, cores, chunk_rows, itemsize, constants)
    if machines is not None:
        return job.size_on(machines)
    size = job.size_on(max(1, ceil(job.row_seconds * rows / (hours * _HOUR * cores))))
    while size.hours > hours:
        if size.threads >= size.tasks or size.scheduler_share >= 1:
            raise BudgetError(
                f"{rows} rows in tasks of {size.chunk_rows} take {format_seconds(size.hours * _HOUR)} on any "
                f"number of machines, and {format_seconds(hours * _HOUR)} are there: "
                f"{job.describe_remedy(size)}."
            )
        size = job.size_on(size.machines + max(1, int(size.machines * (size.hours / hours - 1))))
    return size


@dataclass(frozen=True)
class _Job:
    """The parameters of `sizing`."""

    rows: int
    n: int
    d: int
    width: int
    cores: int
    chunk_rows: int | None
    itemsize: int
    constants: Constants

    @property
    def row_seconds(self) -> float:
        """Seconds in which a thread reads, scores and writes one row."""
        cost, size = self.constants, self.itemsize
        scoring = budget.score_row_seconds(self.n, self.d, self.width, size, cost.value_seconds, cost.product_seconds)
        return scoring + 8 * self.d / cost.read_bytes + size * self.width / cost.write_bytes

    def size_on(self, machines: int) -> Sizing:
        """Return the size of the job on a number of machines."""
        itemsize, threads = self.itemsize, machines * self.cores
        planned = chunking.choose_chunk_rows(
            self.rows, budget.score_row_seconds(self.n, self.d, self.width, itemsize), itemsize * self.width, threads
        )
        chosen = min(self.rows, self.chunk_rows or max(planned, self._least_chunk_rows(threads)))
        piece = chunking.choose_read_rows(chosen, self.d, 1, itemsize)
        tile = min(piece, choose_tile_rows(self.n, self.d, self.width, itemsize))
        return Sizing(
            rows=self.rows,
            n=self.n,
            columns=self.d,
            width=self.width,
            chunk_rows=chosen,
            asked=chosen != min(self.rows, planned),
            machines=machines,
            cores=self.cores,
            task_bytes=budget.score_task_bytes(piece, self.d, self.n, self.width, tile, itemsize=itemsize),
            model_bytes=budget.model_bytes(self.n, self.d, (self.n + 1) * self.width, itemsize=itemsize),
            read_bytes=8 * self.rows * self.d,
            written_bytes=itemsize * count_tiles(self.rows, chosen) * chosen * self.width,
            task_seconds=chosen * self.row_seconds,
            scheduler_seconds=self.constants.scheduler_seconds,
        )

    def _least_chunk_rows(self, threads: int) -> int:
        """Return the smallest number of chunk rows that neither overloads the scheduler nor gives too many chunks."""
        wanted = threads * self.constants.scheduler_seconds / (_MAX_SCHEDULER_SHARE * self.row_seconds)
        each = self.rows / (threads * max(1, wanted, count_tiles(self.rows, chunking.MAX_CHUNKS)))
        return count_tiles(self.rows, threads * max(1, int(each)))

    def describe_remedy(self, size: Sizing) -> str:
        """Return a remedy for a job that no number of machines finishes in time."""
        if size.scheduler_share >= 1:
            rows = self._least_chunk_rows(size.threads)
            return f"the scheduler is the limit, and chunk_rows of {rows} leave it its time"
        return "use fewer chunk_rows, or more hours"
