"""Find the Dask client to use, ask its scheduler about the workers, and choose the settings of Dask."""

import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dkfm.core.display.terminal_output import print_message
from dkfm.errors import ClusterError, InvalidInputError

if TYPE_CHECKING:
    from distributed import Client, Worker

WORKER_TIMEOUT = 30.0
"""Seconds to wait for the first worker of a cluster that runs already."""

_MESSAGE_AFTER = 2.0
"""Seconds of waiting for the first worker after which a message is printed."""

_ANSWER_TIMEOUT = 10
"""Seconds to wait for an answer of the scheduler."""

_OLDEST_DASK = (2025, 2)
"""Oldest version of Dask that works; the same as in pyproject.toml."""


def find_client(client: "Client | None") -> "Client | None":
    """Return the given client, else Dask's current client; None inside a worker, which computes in its own process."""
    if client is not None and not (hasattr(client, "asynchronous") and hasattr(client, "submit")):  # as a LocalCluster
        raise InvalidInputError(f"client must be a Client of distributed, and is {client!r:.100}.")
    if client is not None or "distributed" not in sys.modules or is_inside_worker():
        return client
    from distributed import default_client

    try:
        current: Client = default_client()
    except ValueError:
        return None
    return current


def is_inside_worker() -> bool:
    """Return whether this runs in a task of a distributed worker."""
    return worker_address() is not None


def worker_address() -> str | None:
    """Return the address of the distributed worker whose task this is; None outside a task."""
    worker = _find_worker()
    return None if worker is None else str(worker.address)


def worker_memory_limit() -> int | None:
    """Return the memory limit in bytes of the distributed worker whose task this is; None without one."""
    worker = _find_worker()
    return None if worker is None else worker.memory_manager.memory_limit or None


def nanny_local_directory() -> Path | None:
    """Return the directory that a nanny removes after this worker process; None without a nanny or a worker."""
    worker = _find_worker()
    return Path(worker.local_directory) if worker is not None and worker.nanny else None


def _find_worker() -> "Worker | None":
    """Return the distributed worker whose task this is; None outside a task, where `distributed` is not imported."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        worker: Worker = get_worker()
    except ValueError:
        return None
    return worker


def fetch_workers(client: "Client") -> dict[str, dict[str, Any]] | None:
    """Return the scheduler's facts on each worker, by address; None if the scheduler does not answer."""
    identity = ask_scheduler(client, "identity")
    return None if identity is None else dict(identity["workers"])


def wait_for_workers(
    client: "Client", seconds: float | None = None, name: str = "the cluster"
) -> dict[str, dict[str, Any]]:
    """Wait until a cluster has a worker, paused or not; print a message to standard error if it takes long.

    Parameters
    ----------
    client : distributed.Client
        Client of the cluster.
    seconds : float, optional
        Longest time to wait, as the user asked for; `WORKER_TIMEOUT` by default.
    name : str
        Name of the cluster in messages.

    Returns
    -------
    dict
        The scheduler's facts on each worker, by address; at least one.

    Raises
    ------
    ClusterError
        No worker comes, the scheduler does not answer, or the client is closed.
    """
    limit = WORKER_TIMEOUT if seconds is None else seconds
    start, request, is_announced = time.monotonic(), None, False
    last_answer = start
    while not (facts := fetch_workers(client)):
        now = time.monotonic()
        waited = now - start
        if client.status == "closed":
            raise ClusterError("This client is closed; open another one: Client(...).")
        if facts is None and (client.status != "running" or now - last_answer > min(limit, WORKER_TIMEOUT)):
            raise ClusterError("The scheduler does not answer; is it still there?")
        if facts is not None:
            last_answer = now
            # An adaptive cluster starts workers only for tasks. This task is released when the function returns.
            request = request or client.submit(int, key=f"dkfm-worker-{uuid.uuid4().hex}")
        if waited > limit:
            remedy = "start one" if seconds is None else "start one, or wait longer (--wait-for-workers),"
            raise ClusterError(f"No worker of {name} has come in {limit:g} seconds; {remedy} and try again.")
        if waited > _MESSAGE_AFTER and not is_announced:
            print_message(f"Waiting for a worker of {name}, {limit:g} seconds at most.")
            is_announced = True
        time.sleep(0.1)
    return facts


def ask_scheduler(client: "Client", method: str, **options: object) -> Any:  # JSON of distributed
    """Call a method of the scheduler and return its answer; None after a timeout."""
    if client.status != "running":
        return None
    try:
        return client.sync(getattr(client.scheduler, method), callback_timeout=_ANSWER_TIMEOUT, **options)
    except (TimeoutError, OSError):
        return None


def select_default_overrides(settings: Mapping[str, tuple[object, object]]) -> dict[str, object]:
    """Return our values of settings, pairs of Dask's default and ours, except those that the user has changed."""
    import dask
    import distributed  # noqa: F401  # it sets its defaults

    return {key: ours for key, (default, ours) in settings.items() if dask.config.get(key, None) == default}


def require_dask_version() -> None:
    """Raise a ClusterError if the installed Dask is too old: it would fail later with errors hard to understand."""
    from importlib.metadata import version

    for name in ("dask", "distributed"):
        present = version(name)
        if tuple(map(int, present.split(".")[:2])) < _OLDEST_DASK:
            oldest = ".".join(map(str, _OLDEST_DASK))
            raise ClusterError(f"dkfm needs {name} {oldest} or newer, and {present} is installed; install dkfm again.")
