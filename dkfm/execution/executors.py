"""What runs tasks: a Dask client, or a pool of threads in this process; both behind four methods."""

import asyncio
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from dkfm.errors import ClusterError, DkfmWarning, StalledError, UnfitWorkerError, WorkerDiedError, reason
from dkfm.execution.clusters.client import ask_scheduler, find_client, is_inside_worker, wait_for_workers, worker_facts
from dkfm.files import temporary

if TYPE_CHECKING:
    import distributed
    from distributed import Client

Key: TypeAlias = tuple[str, int, int]
"""Name of the run, number of the task, and which copy of it: names of a task on the dashboard."""

_GATHER = 15
"""Seconds that a result of a few bytes has to come from its worker."""

_SILENT = 20
"""Seconds without a sign of life, after which a worker's tasks are better run elsewhere too."""

_CHOICE = 16
"""Workers among which a task may choose once one of them all is not fit."""

_NOTHING = object()
"""In place of a result that did not come."""

R = TypeVar("R")


@dataclass(frozen=True)
class FinishedTask:
    """A task that came to its end: with a value, or an error."""

    key: Key
    value: object = None
    error: BaseException | None = None


@dataclass(frozen=True)
class ExecutorHealth:
    """What is known of those who run tasks.

    Attributes
    ----------
    answers : bool
        Whether the scheduler answers.
    running, paused, silent : tuple of str
        Addresses of workers: those that take tasks, those that have no memory left for one, and those not heard of.
    stuck : tuple of Key
        Tasks on the latter two, those whose results do not come from there, and those for workers that are gone.
    """

    answers: bool = True
    running: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    stuck: tuple[Key, ...] = ()


class Executor(Protocol):
    """Runs tasks and hands them back as they finish."""

    threads: int

    @property
    def client(self) -> "Client | None":
        """The client of a cluster, if tasks run on one."""

    def submit(
        self, key: Key, function: Callable[..., R], *arguments: object, workers: Iterable[str] | None = None
    ) -> None:
        """Start one task, on some workers alone if they are given."""

    def finished(self, timeout: float) -> FinishedTask | None:
        """Wait for a task that finished, so many seconds at most."""

    def health(self) -> ExecutorHealth:
        """Return what is known of those who run tasks."""

    def avoid(self, error: UnfitWorkerError) -> bool:
        """Give a worker that is not fit no more tasks; False where there is no other."""

    def cancel(self, *, wait: bool = True) -> None:
        """Give up what has not finished."""


class ThreadExecutor:
    """A pool of threads in this process."""

    client = None

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dkfm")
        self._done: SimpleQueue[tuple[Key, Future[Any]]] = SimpleQueue()

    def submit(
        self, key: Key, function: Callable[..., R], *arguments: object, workers: Iterable[str] | None = None
    ) -> None:
        """Start one task."""
        self._pool.submit(function, *arguments).add_done_callback(lambda future: self._done.put((key, future)))

    def finished(self, timeout: float) -> FinishedTask | None:
        """Wait for a task that finished, so many seconds at most."""
        try:
            key, future = self._done.get(timeout=timeout)
        except Empty:
            return None
        error = future.exception()
        return FinishedTask(key, None if error else future.result(), error)

    def health(self) -> ExecutorHealth:
        """Return that this process is well."""
        return ExecutorHealth(running=("this process",))

    def avoid(self, error: UnfitWorkerError) -> bool:
        """Return that there is no other process."""
        return False

    def cancel(self, *, wait: bool = True) -> None:
        """Drop what has not started and wait for what has."""
        self._pool.shutdown(wait=wait, cancel_futures=True)


class ClientExecutor:
    """Tasks on a Dask cluster."""

    def __init__(self, client: "Client") -> None:
        if client.asynchronous:
            raise ClusterError("This client is asynchronous, and dkfm needs a synchronous one: Client(...).")
        wait_for_workers(client)
        self.client = client
        self._done: SimpleQueue[tuple[distributed.Future[Any], object]] = SimpleQueue()
        self._pending: dict[Key, distributed.Future[Any]] = {}
        self._seen: dict[str, tuple[object, float]] = {}
        self._late: set[Key] = set()
        """Tasks that ended, and whose results did not come: whoever has them may hang."""
        self._unfit: set[str] = set()
        self._fit: tuple[str, ...] = ()
        self._turn = count()
        self._chosen: dict[Key, frozenset[str]] = {}
        """Of the tasks that only some workers may run, those workers."""
        self.threads = 1
        self.health()

    def submit(
        self, key: Key, function: Callable[..., R], *arguments: object, workers: Iterable[str] | None = None
    ) -> None:
        """Start one task, on some workers alone if they are given."""
        there = self._some(self._fit if workers is None and self._unfit else workers or ())
        if there:
            self._chosen[key] = there
        future = self.client.submit(function, *arguments, key=key, pure=False, workers=list(there) or None)
        self._pending[key] = future
        future.add_done_callback(self._ended)

    def _ended(self, future: "distributed.Future[Any]") -> None:
        """Take the news that a task has ended; its result, if it has one, comes on the loop of the client."""
        loop: Any = self.client.loop
        if future.status == "finished":
            # Few are asked for at a time: one that did not come lets others pass.
            loop.add_callback(self._bring, future, _GATHER if future.key in self._late else 0)
        else:
            self._done.put((future, _NOTHING))

    async def _bring(self, future: "distributed.Future[Any]", pause: float) -> None:
        """Ask for a result beside all others: a worker that hangs with one keeps nobody waiting."""
        value: object = _NOTHING
        await asyncio.sleep(pause)
        with suppress(Exception, asyncio.CancelledError):  # its worker, or the scheduler, went or hangs with it
            value = await asyncio.wait_for(future, _GATHER)
        self._done.put((future, value))

    def _some(self, workers: Iterable[str]) -> frozenset[str]:
        """Return a few of some workers, others each time: all of them, with every task, are many addresses."""
        every = list(workers)
        first = next(self._turn) % max(1, len(every))
        return frozenset((every + every)[first : first + _CHOICE])

    def finished(self, timeout: float) -> FinishedTask | None:
        """Wait for a task that finished, so many seconds at most."""
        from distributed import KilledWorker

        try:
            future, value = self._done.get(timeout=timeout)
        except Empty:
            return None
        if future.key not in self._pending:
            return None
        if future.status == "error":
            error = future.exception(timeout=_GATHER)
            if isinstance(error, KilledWorker):
                error = WorkerDiedError(f"The workers died that ran the task {future.key[1]}.")
            elif isinstance(error, RuntimeError) and "deserialization of the task graph" in str(error):
                told = (
                    f"({reason(error.__cause__ or error)}); it needs the modules that tasks name, in the same versions"
                )
                error = ClusterError(f"The scheduler cannot read a task {told}.")
            return self._taken(future.key, None, error)
        if future.status == "cancelled":
            raise ClusterError("The scheduler is gone, and all that it was to do.")
        if value is not _NOTHING:
            return self._taken(future.key, value, None)
        if future.status == "finished":
            self._late.add(future.key)
        else:  # lost with its worker, and made again
            self._late.discard(future.key)
        future.add_done_callback(self._ended)  # the same, or another once its worker is given up
        return None

    def _taken(self, key: Key, value: object, error: BaseException | None) -> FinishedTask:
        del self._pending[key]  # which lets the cluster forget it
        self._chosen.pop(key, None)
        self._late.discard(key)
        return FinishedTask(key, value, error)

    def health(self) -> ExecutorHealth:
        """Return what the scheduler says of its workers; silent are those whose last sign of life does not move."""
        facts = worker_facts(self.client)
        if facts is None:
            return ExecutorHealth(answers=False)
        now = time.monotonic()
        self._seen = {address: self._since(address, fact["last_seen"], now) for address, fact in facts.items()}
        silent = tuple(address for address, (_, since) in self._seen.items() if now - since > _SILENT)
        paused = tuple(a for a, fact in facts.items() if fact["status"] == "paused" and a not in silent)
        running = tuple(a for a in facts if a not in paused and a not in silent and a not in self._unfit)
        self._fit = running or tuple(address for address in self._fit if address not in self._unfit)
        self.threads = max(1, sum(int(facts[address]["nthreads"]) for address in running))
        deserted = (key for key, there in self._chosen.items() if there.isdisjoint(running))
        late = self._late if paused or silent else ()
        return ExecutorHealth(True, running, paused, silent, (*self._held_by([*paused, *silent]), *late, *deserted))

    def avoid(self, error: UnfitWorkerError) -> bool:
        """Give a worker no more tasks where others are or were, and say so once."""
        if error.worker not in self._unfit:
            self._unfit.add(error.worker)
            self.health()
            if self._fit:  # or were, and may be again
                warnings.warn(f"{error} It gets no more tasks of this job.", DkfmWarning, stacklevel=2)
        return bool(self._fit)

    def _since(self, address: str, last: object, now: float) -> tuple[object, float]:
        before = self._seen.get(address)
        return before if before is not None and before[0] == last else (last, now)

    def _held_by(self, workers: list[str]) -> tuple[Key, ...]:
        if not workers:
            return ()
        held = ask_scheduler(self.client, "processing", workers=workers) or {}
        keys = (tuple(key) for keys in held.values() for key in keys if not isinstance(key, str))
        return tuple(key for key in keys if key in self._pending)

    def cancel(self, *, wait: bool = True) -> None:
        """Cancel what has not finished."""
        pending, self._pending = list(self._pending.values()), {}
        if pending and wait and self.client.status == "running":
            self.client.cancel(pending)


@contextmanager
def open_executor(client: "Client | None") -> Iterator[Executor]:
    """Open the executor of a client, or of this process without one; unfinished tasks are cancelled at the end."""
    temporary.remove_abandoned_once()
    client = find_client(client)
    if client is not None:
        with _cancelled(ClientExecutor(client)) as on_cluster:
            yield on_cluster
        return
    from dask.system import CPU_COUNT

    with _cancelled(ThreadExecutor(1 if is_inside_worker() else CPU_COUNT)) as here:
        yield here


@contextmanager
def _cancelled(running: Executor) -> Iterator[Executor]:
    try:
        yield running
    except StalledError:
        running.cancel(wait=False)  # whatever does not answer would be waited for
        raise
    except BaseException:
        running.cancel()
        raise
    running.cancel()
