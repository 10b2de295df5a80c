"""How large a scoring job is, on paper: its tasks, bytes, hours and machines, and what its scheduler allows."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil, inf

from dkfm.core import budget, chunking
from dkfm.core.chunking import choose_tile_rows, count_tiles, require_count
from dkfm.errors import BudgetError, InvalidInputError

_BUSY = 0.25
"""Share of its time that a scheduler may work: it has bursts, and answers workers and dashboards too."""

_HOUR = 3600.0


@dataclass(frozen=True)
class Constants:
    """What the parts of a job cost on some machine; `dkfm bench --json` measures them, the defaults are of paper.

    Attributes
    ----------
    value_seconds : float
        Of one thread, of a kernel's value in float64 beside its products.
    product_seconds : float
        Of one thread, of one multiplication and addition: d of a kernel's value, and one of it and each output.
    scheduler_seconds : float
        Of the scheduler's thread, of a task.
    read_bytes, write_bytes : float
        That one thread reads, or writes durably and reads back, in a second, while all others of its machine do.

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
        """Return the constants of a report of `dkfm bench --json`; what it lacks is as on paper.

        Raises
        ------
        InvalidInputError
            It has none, or one that is unknown, or no number.
        """
        measured, known = report.get("constants"), {field.name for field in fields(cls)}
        if not isinstance(measured, Mapping) or not set(measured) <= known:
            told = sorted(map(str, set(measured) - known)) if isinstance(measured, Mapping) else "none"
            raise InvalidInputError(
                f'A report of dkfm bench --json has "constants", of {", ".join(sorted(known))}; here are {told}.'
            )
        return cls(**measured)


@dataclass(frozen=True)
class Sizing:
    """A scoring job on paper.

    Attributes
    ----------
    rows, n, columns, width : int
        Rows of so many columns, scored against n landmarks to so many columns of scores.
    chunk_rows : int
        Of a task.
    asked : bool
        Whether a job would take other chunks by itself: these have to be asked for, with `chunk_rows=`
        (`--chunk-rows`).
    machines, cores : int
        How many, and of how many cores each; every core is a thread of one worker a machine.
    task_bytes, model_bytes : int
        Memory of a task, and what all tasks of a worker share.
    read_bytes, written_bytes : int
        Of float64 rows, and of scores.
    task_seconds : float
        Of a thread: arithmetic, reading and writing, as if none were done beside another.
    scheduler_seconds : float
        Of the scheduler, of a task.
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
        """How many tasks."""
        return count_tiles(self.rows, self.chunk_rows)

    @property
    def threads(self) -> int:
        """Of all machines."""
        return self.machines * self.cores

    @property
    def worker_bytes(self) -> int:
        """Memory of a worker with a thread a core, beside what Python and its libraries take of it."""
        return budget.worker_bytes(self.model_bytes, self.task_bytes, self.cores, 0)

    @property
    def core_hours(self) -> float:
        """Hours of one core for all rows."""
        return self.rows / self.chunk_rows * self.task_seconds / _HOUR

    @property
    def hours(self) -> float:
        """Hours until the last task ends, or until the scheduler has seen to all."""
        return max(self._working, self.tasks * self.scheduler_seconds) / _HOUR

    @property
    def scheduler_share(self) -> float:
        """Tasks a second times seconds of the scheduler's a task; more than 1 is more than it can."""
        return self.tasks * self.scheduler_seconds / self._working

    @property
    def scheduler_threads(self) -> float:
        """From how many threads on the scheduler is the limit: more of them wait for it."""
        return self.task_seconds / self.scheduler_seconds if self.scheduler_seconds else inf

    @property
    def _working(self) -> float:
        return (
            min(self.rows, count_tiles(self.tasks, self.threads) * self.chunk_rows)
            / self.chunk_rows
            * self.task_seconds
        )


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
    """Size a scoring job of dense rows: tasks, bytes and hours on some machines, or the machines for some hours.

    Parameters
    ----------
    rows, n, d, width : int
        Rows of d columns, scored against n landmarks to `width` columns of scores.
    hours : float
        By when it has to be done.
    machines : int, optional
        How many there are, whatever the hours; by default as few as are done by then.
    cores : int
        Of a machine.
    chunk_rows : int, optional
        Of a task. By default those of a plan; or, where these would keep the scheduler busy for more than a quarter of
        its time, or be more than a job may have, as many as do not.
    itemsize : int
        8 for float64, 4 for float32.
    constants : Constants
        Of the machine.

    Returns
    -------
    Sizing

    Raises
    ------
    BudgetError
        No number of machines is done by then.

    Examples
    --------
    >>> found = sizing(10**9, 4000, 50, 20)
    >>> found.tasks, round(found.core_hours, 1), found.machines, round(found.scheduler_share, 2)
    (33216, 5.6, 1, 0.11)
    """
    given = {"rows": rows, "n": n, "d": d, "width": width, "cores": cores, "chunk_rows": chunk_rows or 1}
    for name, value in {**given, "machines": machines or 1}.items():
        require_count(value, name)
    job = _Job(rows, n, d, width, cores, chunk_rows, itemsize, constants)
    if machines is not None:
        return job.on(machines)
    found = job.on(max(1, ceil(job.row_seconds * rows / (hours * _HOUR * cores))))
    while found.hours > hours:
        if found.threads >= found.tasks or found.scheduler_share >= 1:
            raise BudgetError(
                f"{rows} rows in tasks of {found.chunk_rows} take {budget.format_seconds(found.hours * _HOUR)} on any "
                f"number of machines, and {budget.format_seconds(hours * _HOUR)} are there: {job.remedy(found)}."
            )
        found = job.on(found.machines + max(1, int(found.machines * (found.hours / hours - 1))))
    return found


@dataclass(frozen=True)
class _Job:
    """What is sized; `sizing` explains it."""

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
        """Seconds of a thread for a row."""
        given, size = self.constants, self.itemsize
        arithmetic = budget.score_seconds(self.n, self.d, self.width, size, given.value_seconds, given.product_seconds)
        return arithmetic + 8 * self.d / given.read_bytes + size * self.width / given.write_bytes

    def on(self, machines: int) -> Sizing:
        """Size it on some machines."""
        size, threads = self.itemsize, machines * self.cores
        planned = chunking.choose_chunk_rows(
            self.rows, budget.score_seconds(self.n, self.d, self.width, size), size * self.width, threads
        )
        chosen = min(self.rows, self.chunk_rows or max(planned, self._enough(threads)))
        piece = chunking.choose_piece_rows(chosen, self.d, 1, size)
        tile = min(piece, choose_tile_rows(self.n, self.d, self.width, size))
        return Sizing(
            rows=self.rows,
            n=self.n,
            columns=self.d,
            width=self.width,
            chunk_rows=chosen,
            asked=chosen != min(self.rows, planned),
            machines=machines,
            cores=self.cores,
            task_bytes=budget.score_task_bytes(piece, self.d, self.n, self.width, tile, itemsize=size),
            model_bytes=budget.model_bytes(self.n, self.d, (self.n + 1) * self.width, itemsize=size),
            read_bytes=8 * self.rows * self.d,
            written_bytes=size * count_tiles(self.rows, chosen) * chosen * self.width,
            task_seconds=chosen * self.row_seconds,
            scheduler_seconds=self.constants.scheduler_seconds,
        )

    def _enough(self, threads: int) -> int:
        """Return the rows of as many tasks for every thread as leave the scheduler its time, and a job may have."""
        wanted = threads * self.constants.scheduler_seconds / (_BUSY * self.row_seconds)
        each = self.rows / (threads * max(1, wanted, count_tiles(self.rows, chunking.MAX_CHUNKS)))
        return count_tiles(self.rows, threads * max(1, int(each)))

    def remedy(self, found: Sizing) -> str:
        """Say what to do about a job that no machines do in time."""
        if found.scheduler_share >= 1:
            return f"the scheduler is the limit, and chunk_rows of {self._enough(found.threads)} leave it its time"
        return "use fewer chunk_rows, or more hours"
