"""Where tasks run: a Dask client, or a pool of threads in this process; both behind three methods."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from dkfm.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client, LocalCluster

__all__ = [
    "ClientExecutor",
    "Executor",
    "ThreadExecutor",
    "connected",
    "executor",
    "find_client",
    "inside_worker",
    "local_cluster",
]

_GOODBYE = 10
"""Seconds that the workers of a local cluster have to leave it."""

R = TypeVar("R")


class Executor(Protocol):
    """Runs tasks and hands them back as they finish; a context manager."""

    threads: int

    def submit(self, key: tuple[str, int], function: Callable[..., R], *arguments: object) -> None:
        """Start one task; `key` names it on the dashboard."""

    def as_completed(self) -> Iterator[object]:
        """Yield results as tasks finish, those submitted meanwhile too; raise what a task raised."""

    def cancel(self) -> None:
        """Give up what has not finished."""


class ThreadExecutor:
    """A pool of threads in this process."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dkfm")
        self._pending: set[Future[object]] = set()

    def submit(self, key: tuple[str, int], function: Callable[..., R], *arguments: object) -> None:
        """Start one task."""
        self._pending.add(self._pool.submit(function, *arguments))

    def as_completed(self) -> Iterator[object]:
        """Yield results as tasks finish."""
        while self._pending:
            done, self._pending = wait(self._pending, return_when=FIRST_COMPLETED)
            while done:
                yield done.pop().result()

    def cancel(self) -> None:
        """Drop what has not started and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class ClientExecutor:
    """Tasks on a Dask cluster."""

    def __init__(self, client: "Client") -> None:
        from distributed import as_completed

        if client.asynchronous:
            raise ClusterError("This client is asynchronous, and dkfm needs a synchronous one: Client(...).")
        try:
            client.wait_for_workers(1, timeout=30)
        except TimeoutError:
            raise ClusterError("The cluster has had no worker for 30 seconds; start one and try again.") from None
        self.threads = sum(client.nthreads().values())
        self._client = client
        self._completed = as_completed(loop=client.loop)
        self._pending: set[object] = set()

    def submit(self, key: tuple[str, int], function: Callable[..., R], *arguments: object) -> None:
        """Start one task."""
        future = self._client.submit(function, *arguments, key=key, pure=False)
        self._pending.add(future)
        self._completed.add(future)

    def as_completed(self) -> Iterator[object]:
        """Yield results as tasks finish."""
        for future in self._completed:
            self._pending.discard(future)
            yield self._result(future)

    def _result(self, future: "Future[object]") -> object:
        from distributed import CancelledError, KilledWorker
        from distributed.comm.core import CommClosedError

        try:
            return future.result()
        except (KilledWorker, CancelledError, CommClosedError) as error:
            raise ClusterError(f"The cluster lost the task {getattr(future, 'key', '')}: {error}") from error

    def cancel(self) -> None:
        """Cancel what has not finished."""
        if self._pending and self._client.status == "running":
            self._client.cancel(list(self._pending))
        self._pending.clear()


def find_client(client: "Client | None") -> "Client | None":
    """Return the client to use: the one given, else the current one; none inside a worker, which computes in place."""
    if client is not None or "distributed" not in sys.modules or inside_worker():
        return client
    from distributed import default_client

    try:
        current: Client = default_client()
    except ValueError:
        return None
    return current


def inside_worker() -> bool:
    """Whether this is a task of a distributed worker."""
    if "distributed" not in sys.modules:
        return False
    from distributed import get_worker

    try:
        get_worker()
    except ValueError:
        return False
    return True


@contextmanager
def executor(client: "Client | None") -> Iterator[Executor]:
    """Open the executor of a client, or of this process without one; unfinished tasks are cancelled at the end."""
    client = find_client(client)
    if client is not None:
        with _cancelled(ClientExecutor(client)) as on_cluster:
            yield on_cluster
        return
    from dask.system import CPU_COUNT

    with _cancelled(ThreadExecutor(1 if inside_worker() else CPU_COUNT)) as here:
        yield here


@contextmanager
def _cancelled(running: Executor) -> Iterator[Executor]:
    try:
        yield running
    finally:
        running.cancel()


@contextmanager
def connected(address: str, *, current: bool = True) -> Iterator["Client"]:
    """Connect to a scheduler, as the current client or beside it; raise a ClusterError where there is none."""
    from distributed import Client

    try:
        client = Client(address, timeout=10, set_as_default=current)
    except (OSError, ValueError) as error:
        raise ClusterError(f"There is no scheduler at {address}: {error}") from None
    with client:
        yield client


_QUIET: dict[str, tuple[object, object]] = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": (65536, 2**27),
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": (None, 2**25),
    "distributed.nanny.pre-spawn-environ.MALLOC_ARENA_MAX": (None, 2),
    "distributed.admin.tick.interval": ("20ms", "500ms"),
    "distributed.admin.system-monitor.interval": ("500ms", "1s"),
    "distributed.worker.memory.monitor-interval": ("100ms", "250ms"),
    "distributed.worker.profile.interval": ("10ms", "100ms"),
}
"""Dask's defaults, and ours. Its own cost a twentieth of two cores for memory that is given back to the system between
any two uses, and a fortieth for looking at itself so often.
"""


def _quiet() -> dict[str, object]:
    """Return the settings of `_QUIET` that are Dask's defaults here: what a user has set stays."""
    import dask
    import distributed  # noqa: F401  # its defaults

    return {key: ours for key, (default, ours) in _QUIET.items() if dask.config.get(key, None) == default}


@contextmanager
def local_cluster() -> Iterator["LocalCluster"]:
    """Start a cluster on this machine: one worker process with a thread a core; it listens on loopback alone."""
    import dask
    from dask.system import CPU_COUNT
    from distributed import LocalCluster

    from dkfm.parting import LeaveQuietly

    with (
        tempfile.TemporaryDirectory(prefix="dkfm-cluster-") as scratch,
        # The scheduler's too, which has no parameter for it.
        dask.config.set({"temporary-directory": scratch, **_quiet()}),
        LocalCluster(
            n_workers=1,
            threads_per_worker=CPU_COUNT,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            plugins=(LeaveQuietly(),),
        ) as cluster,
    ):
        try:
            yield cluster
        finally:
            # A worker that is told to go says nothing of a scheduler that is gone.
            cluster.scale(0)
            deadline = time.monotonic() + _GOODBYE
            while cluster.scheduler_info["workers"] and time.monotonic() < deadline:
                time.sleep(0.02)
