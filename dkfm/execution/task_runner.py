"""Run tasks through a bounded window until each has succeeded or is named in an error.

If a worker dies, all its tasks fail, whichever caused it; they run again one by one after all others. If a worker is
silent or paused, copies of its tasks run on other workers. If no result arrives for too long, for example because the
scheduler died, the job ends with an error that describes the cluster.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar, cast

from dkfm.core.budget import STALL_SECONDS
from dkfm.errors import StalledError, UnfitWorkerError, UnreachableError, WorkerDiedError
from dkfm.execution.executors import Executor, ExecutorHealth, FinishedTask
from dkfm.execution.progress import step_bar

R = TypeVar("R")

_TASKS_PER_THREAD = 3
"""Tasks in flight per thread: enough to hide the scheduler's latency, few enough to hold little memory."""

_HEALTH_INTERVAL = 2.0
"""Seconds between two health checks of the cluster."""

_IDLE_AFTER = 0.05
"""Seconds without a result after which `on_idle` is called."""

_ISOLATED_RETRIES = 3
"""Number of runs of a suspected task alone, before the task is blamed for the death of workers."""

_MAX_ATTEMPTS = 4
"""Attempts at a task whose object store does not answer."""


@dataclass
class Tally:
    """Count retries and failures of a run."""

    retries: int = 0
    """Tasks that were started again."""
    duplicates: int = 0
    """Results of copies of tasks that were already finished."""
    fatal_task_numbers: list[int] = field(default_factory=list)
    """Numbers of tasks that killed their workers each time they ran alone."""


def run_tasks(
    executor: Executor,
    name: str,
    function: Callable[..., R],
    tasks: Iterable[tuple[object, ...] | None],
    total: int,
    progress: bool,
    on_result: Callable[[R], object] | None = None,
    *,
    on_idle: Callable[[], object] = lambda: None,
    stall_seconds: float | None = None,
) -> Tally:
    """Run ``function(*task)`` for every task, and call `on_result` with each result as it arrives.

    Parameters
    ----------
    executor : Executor
        Runs the tasks.
    name : str
        Name of the tasks on the dashboard.
    function : callable
        Called with the arguments of each task.
    tasks : iterable of tuple or None
        Arguments of each task; read as tasks are submitted. None means that the next task depends on a running one; the
        iterable is read again after the next result.
    total : int
        Number of tasks.
    progress : bool
        Whether to show a progress bar, or to log progress without a terminal: see `dkfm.execution.progress`.
    on_result : callable, optional
        Called once with each result, in the order in which tasks finish.
    on_idle : callable
        Called repeatedly while no result arrives.
    stall_seconds : float, optional
        Seconds without a result after which the job ends. By default a task may take any time, and the job ends only
        after `STALL_SECONDS` without a running worker.

    Returns
    -------
    Tally
        Retries, duplicates, and tasks that killed their workers.

    Raises
    ------
    ClusterError
        The cluster is gone, or did not answer for too long.
    DkfmError
        A task raised it.
    """
    with step_bar(name, total, "task", progress) as bar:

        def idle() -> None:
            on_idle()
            bar.update(0)

        def finish(result: R) -> None:
            if on_result is not None:
                on_result(result)
            bar.update()

        return _Run(executor, name, function, finish, idle, total, stall_seconds).run_all(tasks)


@dataclass
class _Task:
    """A task without a result so far."""

    arguments: tuple[object, ...]
    copies: int = 0
    """Number of copies that were started.

    Each run of a task is a copy with its own key, because a cluster may still have the result of an earlier key.
    """
    running: int = 0
    """Number of copies that have not ended."""


def _number_tasks(tasks: Iterable[tuple[object, ...] | None]) -> Iterator[tuple[int, _Task] | None]:
    number = 0
    for arguments in tasks:
        yield None if arguments is None else (number, _Task(arguments))
        number += arguments is not None


class _Run(Generic[R]):
    """State of one call of `run_tasks`, which describes the arguments."""

    def __init__(
        self,
        executor: Executor,
        name: str,  # made unique: Dask would return the old result of a key that it still has
        function: Callable[..., R],
        finish: Callable[[R], object],
        idle: Callable[[], object],
        total: int,
        stall: float | None,
    ) -> None:
        self._executor, self._name, self._function = executor, f"{name}-{uuid.uuid4().hex}", function
        self._finish, self._idle, self._total, self._stall = finish, idle, total, stall
        self._open: dict[int, _Task] = {}
        """Tasks that run, by number."""
        self._suspects: dict[int, _Task] = {}
        """Tasks whose workers died; they run again, alone."""
        self._done = 0
        self._last_result = self._last_check = time.monotonic()
        self._tally = Tally()

    def run_all(self, tasks: Iterable[tuple[object, ...] | None]) -> Tally:
        """Run all tasks, then each suspected task alone, followed by the tasks that wait for it."""
        numbered, is_waiting = _number_tasks(tasks), True
        while is_waiting and not self._tally.fatal_task_numbers:
            is_waiting = self._run_window(numbered)
            if is_waiting and not self._suspects:
                raise AssertionError("A task waits for the result of a task that was not read before it.")
            suspects, self._suspects = self._suspects, {}
            for number in sorted(suspects):
                if self._rerun_and_check_fatal(number, suspects[number]):
                    self._tally.fatal_task_numbers.append(number)
        return self._tally

    def _rerun_and_check_fatal(self, number: int, task: _Task) -> bool:
        """Run a task alone, a few times if necessary; return whether its workers died each time."""
        for _ in range(_ISOLATED_RETRIES):
            self._tally.retries += 1
            self._run_window(iter([(number, task)]))
            if self._suspects.pop(number, None) is None:
                return False
        return True

    def _run_window(self, numbered: Iterator[tuple[int, _Task] | None]) -> bool:
        """Run tasks until none is open; return whether other tasks remain that wait for a suspected task."""
        while True:
            window = _TASKS_PER_THREAD * self._executor.threads
            is_waiting = False
            for entry in islice(numbered, max(0, window - len(self._open))):
                if is_waiting := entry is None:
                    break
                number, task = entry
                self._open[number] = task
                self._start(number)
            if not self._open:
                return is_waiting
            finished = self._wait_for_task()
            if finished is None:
                self._idle()
            else:
                self._handle(finished)
            if time.monotonic() - self._last_check > _HEALTH_INTERVAL:
                self._check_health()

    def _wait_for_task(self) -> FinishedTask | None:
        """Return the next task that finishes; time for which this process was stopped is not counted as silence."""
        start = time.monotonic()
        finished = self._executor.wait_for_task(_IDLE_AFTER)
        waited = time.monotonic() - start
        if waited > _HEALTH_INTERVAL:
            self._last_result += waited
        return finished

    def _start(self, number: int, workers: Iterable[str] | None = None) -> None:
        task = self._open[number]
        key = self._name, number, task.copies
        task.copies, task.running = task.copies + 1, task.running + 1
        self._executor.submit(key, self._function, *task.arguments, workers=workers)

    def _handle(self, finished: FinishedTask) -> None:
        name, number, _ = finished.key
        if name != self._name:
            return  # a task of an earlier run on this executor
        self._last_result, error, task = time.monotonic(), finished.error, self._open.get(number)
        if task is None:  # another copy was faster
            self._tally.duplicates += error is None
            return
        task.running -= 1
        if error is None:
            del self._open[number]
            self._done += 1
            self._finish(cast("R", finished.value))
        elif task.running:
            return  # another copy of the task is running
        elif isinstance(error, WorkerDiedError):
            self._suspects[number] = self._open.pop(number)
        elif isinstance(error, UnfitWorkerError) and self._executor.exclude_worker(error):
            self._start(number)
        elif isinstance(error, UnreachableError) and task.copies < _MAX_ATTEMPTS:
            self._tally.retries += 1
            self._start(number)
        else:
            raise error

    def _check_health(self) -> None:
        """Start copies of stuck tasks on other workers; raise a StalledError after too long a silence."""
        health = self._executor.update_health()
        self._last_check = time.monotonic()
        for number in {number for name, number, _ in health.stuck_tasks if name == self._name}:
            if health.running_addresses and number in self._open and self._open[number].running == 1:
                self._tally.retries += 1
                self._start(number, health.running_addresses)
        if self._stall is None and health.answers and health.running_addresses:
            self._last_result = self._last_check
        silence = self._last_check - self._last_result
        if silence > (self._stall or STALL_SECONDS):
            raise StalledError(
                f"No task finished for {silence:.0f} seconds ({self._done} of {self._total} are done): "
                f"{_explain_stall(health, len(self._open))}"
            )


def _explain_stall(health: ExecutorHealth, tasks: int) -> str:
    if not health.answers:
        return "the scheduler does not answer."
    if running := len(health.running_addresses):
        return f"{tasks} tasks are with {running} workers that are well; give them a longer stall timeout."
    if health.silent_addresses:
        return f"of {', '.join(health.silent_addresses[:3])} nothing is heard."
    if health.paused_addresses:
        return "every worker is paused, without memory for another task; use a smaller chunk_rows, or more memory."
    return "there is no worker."
