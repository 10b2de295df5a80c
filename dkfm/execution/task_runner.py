"""Runs tasks through a bounded window, and sees to it that each ends: done, done elsewhere, or named in an error.

A worker that dies takes its tasks with it, innocent ones too; one that hangs keeps them; a scheduler that dies says
nothing. So tasks whose workers died are run again one by one when all others are done, tasks that a silent or paused
worker holds are run elsewhere too, and after a time without any result the job ends with what is known of the cluster.
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

_WINDOW = 3
"""Tasks in flight per thread: enough to hide the scheduler's milliseconds, few enough to hold no memory."""

_LOOK = 2.0
"""Seconds between two looks at the cluster."""

_QUIET = 0.05
"""Seconds without a result, after which there is time for what can wait."""

_ALONE = 3
"""Times that a task is run alone, each time on as many workers as the scheduler gives it, before it is blamed."""

_ATTEMPTS = 4
"""Of a task whose store did not answer."""


@dataclass
class Tally:
    """How tasks came to their ends.

    Attributes
    ----------
    retries : int
        Tasks that were started once more, here or elsewhere.
    duplicates : int
        Results that were there already.
    killers : list of int
        Numbers of the tasks whose workers died although nothing else ran.
    """

    retries: int = 0
    duplicates: int = 0
    killers: list[int] = field(default_factory=list)


def run_tasks(
    executor: Executor,
    name: str,
    function: Callable[..., R],
    tasks: Iterable[tuple[object, ...]],
    total: int,
    progress: bool,
    done: Callable[[R], object] | None = None,
    *,
    idle: Callable[[], object] = lambda: None,
    stall: float | None = None,
) -> Tally:
    """Run ``function(*task)`` for every task, and call `done` with each result as it comes.

    Parameters
    ----------
    executor : Executor
    name : str
        What the dashboard calls the tasks.
    function : callable
    tasks : iterable of tuple
        Arguments; consumed as the window moves.
    total : int
        How many there are.
    progress : bool
        Whether to show a progress bar: see `dkfm.execution.progress`.
    done : callable, optional
        It has each result once, in the order of finishing.
    idle : callable
        Called over and over while no result comes.
    stall : float, optional
        Seconds without a result after which the job ends. Without it a task may take as long as it likes, and the job
        ends after `STALL_SECONDS` in which no worker was well.

    Returns
    -------
    Tally

    Raises
    ------
    ClusterError
        The cluster is gone, or nothing was heard of it for too long.
    DkfmError
        What a task raised.
    """
    with step_bar(name, total, "task", progress) as bar:

        def finish(result: R) -> None:
            if done is not None:
                done(result)
            bar.update()

        return _Run(executor, f"{name}-{uuid.uuid4().hex}", function, finish, idle, total, stall).all_of(tasks)


class _Run(Generic[R]):
    """The tasks of one run that are under way; `run_tasks` explains its arguments."""

    def __init__(
        self,
        executor: Executor,
        name: str,  # a key that is alive would return its old result
        function: Callable[..., R],
        finish: Callable[[R], object],
        idle: Callable[[], object],
        total: int,
        stall: float | None,
    ) -> None:
        self._executor, self._name, self._function, self._finish = executor, name, function, finish
        self._idle, self._total, self._stall = idle, total, stall
        self._open: dict[int, tuple[object, ...]] = {}
        self._copies: dict[int, int] = {}
        """Of each open or suspected task, how many were started; and of those, how many have not ended.

        A suspect that is run again is another copy: of the same name a cluster may still have the end it came to.
        """
        self._running: dict[int, int] = {}
        self._suspects: dict[int, tuple[object, ...]] = {}
        self._done = 0
        self._heard = self._looked = time.monotonic()
        self._tally = Tally()

    def all_of(self, tasks: Iterable[tuple[object, ...]]) -> Tally:
        """Run everything."""
        self._drain(enumerate(tasks))
        suspects, self._suspects = self._suspects, {}
        for number, arguments in sorted(suspects.items()):
            if self._kills(number, arguments):
                self._tally.killers.append(number)
        return self._tally

    def _kills(self, number: int, arguments: tuple[object, ...]) -> bool:
        """Run a task alone, some times if need be: whether its workers die each time, which is its doing then."""
        for _ in range(_ALONE):
            self._tally.retries += 1
            self._drain(iter([(number, arguments)]))
            if self._suspects.pop(number, None) is None:
                return False
        return True

    def _drain(self, numbered: Iterator[tuple[int, tuple[object, ...]]]) -> None:
        while True:
            for number, arguments in islice(numbered, max(0, _WINDOW * self._executor.threads - len(self._open))):
                self._open[number] = arguments
                self._start(number)
            if not self._open:
                return
            finished = self._executor.finished(_QUIET)
            if finished is None:
                self._idle()
            else:
                self._take(finished)
            if time.monotonic() - self._looked > _LOOK:
                self._look()

    def _start(self, number: int, workers: Iterable[str] | None = None) -> None:
        copy = self._copies.get(number, 0)
        self._copies[number], self._running[number] = copy + 1, self._running.get(number, 0) + 1
        self._executor.submit((self._name, number, copy), self._function, *self._open[number], workers=workers)

    def _take(self, finished: FinishedTask) -> None:
        name, number, _ = finished.key
        if name != self._name:
            return  # what an earlier run of this executor did not wait for
        self._heard, error = time.monotonic(), finished.error
        self._running[number] -= 1
        if number not in self._open:
            self._tally.duplicates += error is None
            if not self._running[number]:
                del self._running[number]
        elif error is None:
            self._close(number)
            del self._copies[number]
            self._done += 1
            self._finish(cast("R", finished.value))
        elif self._running[number]:
            return  # another copy of it is under way
        elif isinstance(error, WorkerDiedError):
            self._suspects[number] = self._close(number)
        elif isinstance(error, UnfitWorkerError) and self._executor.avoid(error):
            self._start(number)
        elif isinstance(error, UnreachableError) and self._copies[number] < _ATTEMPTS:
            self._tally.retries += 1
            self._start(number)
        else:
            raise error

    def _close(self, number: int) -> tuple[object, ...]:
        if not self._running[number]:
            del self._running[number]
        return self._open.pop(number)

    def _look(self) -> None:
        """See how the cluster is, start elsewhere what is stuck, and end what has been silent for too long."""
        health = self._executor.health()
        self._looked = time.monotonic()
        for number in {key[1] for key in health.stuck}:
            if health.running and number in self._open and self._running[number] == 1:
                self._tally.retries += 1
                self._start(number, health.running)
        if self._stall is None and health.answers and health.running:
            self._heard = self._looked
        silence = self._looked - self._heard
        if silence > (self._stall or STALL_SECONDS):
            raise StalledError(
                f"No task finished for {silence:.0f} seconds ({self._done} of {self._total} are done): "
                f"{_reason(health, len(self._open))}"
            )


def _reason(health: ExecutorHealth, tasks: int) -> str:
    if not health.answers:
        return "the scheduler does not answer."
    if health.silent and not health.running:
        return f"of {', '.join(health.silent[:3])} nothing is heard."
    if health.paused and not health.running:
        return "every worker is paused, without memory for another task; use a smaller chunk_rows, or more memory."
    if not health.running:
        return "there is no worker."
    return f"{tasks} tasks are with {len(health.running)} workers that are well; give them a longer stall timeout."
