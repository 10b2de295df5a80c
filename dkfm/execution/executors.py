"""Run tasks on a Dask cluster or on a pool of threads in this process, behind one interface."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from dkfm.core import cpus
from dkfm.errors import (
    ClusterError,
    StalledError,
    UnfitWorkerError,
    WorkerDiedError,
    extract_reason,
    warn_caller,
)
from dkfm.execution.clusters.current_client import (
    ask_scheduler,
    fetch_workers,
    find_client,
    is_inside_worker,
    wait_for_workers,
)
from dkfm.files import temporary_folders

if TYPE_CHECKING:
    import distributed
    from distributed import Client

Key: TypeAlias = tuple[str, int, int]
"""Name of the run, number of the task, and number of the copy: Dask's key of a task, shown on the dashboard."""

_GATHER_TIMEOUT = 15
"""Seconds to wait for a result of a few bytes to arrive from its worker."""

_SILENCE_LIMIT = 20
"""Seconds without a heartbeat after which copies of a worker's tasks start on other workers of a small cluster."""

_WORKERS_PER_HEARTBEAT_SECOND = 200
"""Workers of a large cluster for each second between two heartbeats of one, as `distributed` chooses that time."""

_MAX_ALLOWED_WORKERS = 16
"""Largest number of workers that are listed as allowed for a task if the cluster has an unfit worker."""

_NO_RESULT = object()
"""Sentinel for a result that did not arrive."""

R = TypeVar("R")


@dataclass(frozen=True)
class FinishedTask:
    """A task that returned a value or raised an error."""

    key: Key
    value: object = None
    error: BaseException | None = None


@dataclass(frozen=True)
class ExecutorHealth:
    """State of the workers behind an executor."""

    answers: bool = True
    """Whether the scheduler answers."""
    running_addresses: tuple[str, ...] = ()
    """Addresses of workers that take tasks."""
    paused_addresses: tuple[str, ...] = ()
    """Addresses of workers that Dask paused for lack of memory."""
    silent_addresses: tuple[str, ...] = ()
    """Addresses of workers whose heartbeats stopped."""
    stuck_tasks: tuple[Key, ...] = ()
    """Tasks held by paused or silent workers, finished there without a result, or limited to workers that are gone."""


class Executor(Protocol):
    """Run tasks and return them as they finish."""

    threads: int

    @property
    def client(self) -> "Client | None":
        """Client of the cluster that runs the tasks; None if threads of this process run them."""

    def submit(
        self, key: Key, function: Callable[..., R], *arguments: object, workers: Iterable[str] | None = None
    ) -> None:
        """Start a task; `workers`, if given, are the only ones that may run it."""

    def wait_for_task(self, timeout: float) -> FinishedTask | None:
        """Return the next task that finishes; None if none does within `timeout` seconds."""

    def update_health(self) -> ExecutorHealth:
        """Update and return the state of the workers."""

    def exclude_worker(self, error: UnfitWorkerError) -> bool:
        """Exclude the worker that an error names from further tasks; return False if there is no other worker."""

    def cancel(self, *, wait: bool = True) -> None:
        """Cancel the tasks that have not finished."""


class ThreadExecutor:
    """Run tasks on a pool of threads in this process."""

    client = None

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dkfm")
        self._done: SimpleQueue[tuple[Key, Future[Any]]] = SimpleQueue()

    def submit(
        self, key: Key, function: Callable[..., R], *arguments: object, workers: Iterable[str] | None = None
    ) -> None:
        """Start a task."""
        self._pool.submit(function, *arguments).add_done_callback(lambda future: self._done.put((key, future)))

    def wait_for_task(self, timeout: float) -> FinishedTask | None:
        """Return the next task that finishes; None if none does within `timeout` seconds."""
        try:
            key, future = self._done.get(timeout=timeout)
        except Empty:
            return None
        error = future.exception()
        return FinishedTask(key, None if error else future.result(), error)

    def update_health(self) -> ExecutorHealth:
        """Return this process as the only running worker."""
        return ExecutorHealth(running_addresses=("this process",))

    def exclude_worker(self, error: UnfitWorkerError) -> bool:
        """Return False: there is no other process."""
        return False

    def cancel(self, *, wait: bool = True) -> None:
        """Drop tasks that have not started, and wait for those that have."""
        self._pool.shutdown(wait=wait, cancel_futures=True)


class ClientExecutor:
    """Run tasks on a Dask cluster."""

    def __init__(self, client: "Client") -> None:
        if client.asynchronous:
            raise ClusterError("This client is asynchronous, and dkfm needs a synchronous one: Client(...).")
        wait_for_workers(client)
        self.client = client
        self._done: SimpleQueue[tuple[distributed.Future[Any], object]] = SimpleQueue()
        self._pending: dict[Key, distributed.Future[Any]] = {}
        self._heartbeats: dict[str, tuple[object, float]] = {}
        """Last heartbeat of each worker, and when this process first saw it."""
        self._late: set[Key] = set()
        """Finished tasks whose results did not arrive, for example because a worker hangs."""
        self._unfit: set[str] = set()
        self._fit: tuple[str, ...] = ()
        self._turn = count()
        self._allowed: dict[Key, frozenset[str]] = {}
        """Workers that may run a task, for tasks that are restricted to some workers."""
        self.threads = 1
        self.update_health()

    def submit(
        self, key: Key, function: Callable[..., R], *arguments: object, workers: Iterable[str] | None = None
    ) -> None:
        """Start a task; `workers`, if given, are the only ones that may run it."""
        if workers is None:
            workers = self._fit if self._unfit else ()
        allowed = self._select_next_workers(workers)
        if allowed:
            self._allowed[key] = allowed
        future = self.client.submit(function, *arguments, key=key, pure=False, workers=list(allowed) or None)
        self._pending[key] = future
        future.add_done_callback(self._on_end)

    def _on_end(self, future: "distributed.Future[Any]") -> None:
        """Queue a task that has ended; the result, if there is one, is gathered on the client's event loop first."""
        loop: Any = self.client.loop
        if future.status == "finished":
            # A result that did not arrive is requested again after a pause, so that other results come first.
            loop.add_callback(self._gather, future, _GATHER_TIMEOUT if future.key in self._late else 0)
        else:
            self._done.put((future, _NO_RESULT))

    async def _gather(self, future: "distributed.Future[Any]", pause: float) -> None:
        """Gather one result concurrently with all others, so that a worker that hangs delays only its own."""
        value: object = _NO_RESULT
        await asyncio.sleep(pause)
        with suppress(Exception, asyncio.CancelledError):  # the worker or the scheduler is gone or hangs
            value = await asyncio.wait_for(future, _GATHER_TIMEOUT)
        self._done.put((future, value))

    def _select_next_workers(self, workers: Iterable[str]) -> frozenset[str]:
        """Return a few of the workers in rotation, because sending all addresses with each task would be slow."""
        every = list(workers)
        first = next(self._turn) % max(1, len(every))
        return frozenset((every + every)[first : first + _MAX_ALLOWED_WORKERS])

    def wait_for_task(self, timeout: float) -> FinishedTask | None:
        """Return the next task that finishes; None if none does within `timeout` seconds."""
        try:
            future, value = self._done.get(timeout=timeout)
        except Empty:
            return None
        if future.key not in self._pending:
            return None
        if future.status == "error":
            error = _translate_task_error(future.exception(timeout=_GATHER_TIMEOUT), future.key)
            return self._pop_task(future.key, None, error)
        if future.status == "cancelled":
            raise ClusterError("The scheduler is gone, and all that it was to do.")
        if value is not _NO_RESULT:
            return self._pop_task(future.key, value, None)
        if future.status == "finished":
            self._late.add(future.key)
        else:  # the result was lost with its worker, and the scheduler computes it again
            self._late.discard(future.key)
        future.add_done_callback(self._on_end)  # called again for the old result or for a new one
        return None

    def _pop_task(self, key: Key, value: object, error: BaseException | None) -> FinishedTask:
        del self._pending[key]  # the cluster forgets a result that has no future
        self._allowed.pop(key, None)
        self._late.discard(key)
        return FinishedTask(key, value, error)

    def update_health(self) -> ExecutorHealth:
        """Ask the scheduler for the state of its workers; a worker is silent if its last heartbeat stays the same."""
        facts = fetch_workers(self.client)
        if facts is None:
            return ExecutorHealth(answers=False)
        now = time.monotonic()
        self._heartbeats = {a: self._get_dated_heartbeat(a, fact["last_seen"], now) for a, fact in facts.items()}
        limit = max(_SILENCE_LIMIT, 3 * (1 + len(facts) / _WORKERS_PER_HEARTBEAT_SECOND))
        silent = tuple(address for address, (_, since) in self._heartbeats.items() if now - since > limit)
        paused = tuple(a for a, fact in facts.items() if fact["status"] == "paused" and a not in silent)
        running = tuple(a for a in facts if a not in paused and a not in silent and a not in self._unfit)
        self._fit = running or tuple(address for address in self._fit if address not in self._unfit)
        self.threads = max(1, sum(int(facts[address]["nthreads"]) for address in running))
        deserted = (key for key, allowed in self._allowed.items() if allowed.isdisjoint(running))
        late = self._late if paused or silent else ()
        stuck = (*self._tasks_held_by([*paused, *silent]), *late, *deserted)
        return ExecutorHealth(True, running, paused, silent, stuck)

    def exclude_worker(self, error: UnfitWorkerError) -> bool:
        """Exclude a worker from further tasks if there are or were other workers, and warn once."""
        if error.worker not in self._unfit:
            self._unfit.add(error.worker)
            self.update_health()
            if self._fit:  # workers that are gone may return
                warn_caller(f"{error} It gets no more tasks of this job.")
        return bool(self._fit)

    def _get_dated_heartbeat(self, address: str, last: object, now: float) -> tuple[object, float]:
        """Return the worker's last heartbeat, and the time at which this heartbeat was first seen."""
        before = self._heartbeats.get(address)
        return before if before is not None and before[0] == last else (last, now)

    def _tasks_held_by(self, workers: list[str]) -> tuple[Key, ...]:
        if not workers:
            return ()
        held = ask_scheduler(self.client, "processing", workers=workers) or {}
        keys = (tuple(key) for keys in held.values() for key in keys if not isinstance(key, str))
        return tuple(key for key in keys if key in self._pending)

    def cancel(self, *, wait: bool = True) -> None:
        """Cancel the tasks that have not finished."""
        pending, self._pending = list(self._pending.values()), {}
        if pending and wait and self.client.status == "running":
            self.client.cancel(pending)


def _translate_task_error(error: BaseException | None, key: Key) -> BaseException | None:
    """Return the error of a task, converted to an error of dkfm if the cluster caused it."""
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        return WorkerDiedError(f"The workers died that ran the task {key[1]}.")
    if isinstance(error, RuntimeError) and "deserialization of the task graph" in str(error):
        cause = extract_reason(error.__cause__ or error)
        return ClusterError(
            f"The scheduler cannot read a task ({cause}); it needs the modules that tasks name, in the same versions."
        )
    return error


@contextmanager
def open_executor(client: "Client | None") -> Iterator[Executor]:
    """Open an executor on a client, or on threads of this process; cancel unfinished tasks when the context ends."""
    temporary_folders.remove_abandoned_once()
    client = find_client(client)
    if client is None:
        with open_threads(cpus.COUNT) as threads:
            yield threads
        return
    with _cancel_at_end(ClientExecutor(client)) as executor:
        yield executor


@contextmanager
def open_threads(max_threads: int) -> Iterator[Executor]:
    """Open an executor on at most `max_threads` threads of this process; inside a Dask task it has one thread."""
    with _cancel_at_end(ThreadExecutor(1 if is_inside_worker() else min(cpus.COUNT, max_threads))) as executor:
        yield executor


@contextmanager
def _cancel_at_end(executor: Executor) -> Iterator[Executor]:
    try:
        yield executor
    except StalledError:
        executor.cancel(wait=False)  # waiting for a cluster that does not answer could take forever
        raise
    except BaseException:
        executor.cancel()
        raise
    executor.cancel()
