"""Clients of Dask: which one to use, and what its scheduler and its workers answer."""

import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dkfm.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

_ARRIVAL = 30
"""Seconds that the first worker of a cluster has to come."""

_ANSWER = 10
"""Seconds that a scheduler has to answer a question."""


_OLDEST_DASK = (2026, 3)
"""What pyproject.toml has."""


def find_client(client: "Client | None") -> "Client | None":
    """Return the client to use: the one given, else the current one; none inside a worker, which computes in place."""
    if client is not None or "distributed" not in sys.modules or is_inside_worker():
        return client
    from distributed import default_client

    try:
        current: Client = default_client()
    except ValueError:
        return None
    return current


def is_inside_worker() -> bool:
    """Whether this is a task of a distributed worker."""
    return worker_name() is not None


def worker_name() -> str | None:
    """Return the address of the distributed worker whose task this is; None outside of one."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        return str(get_worker().address)
    except ValueError:
        return None


def worker_folder() -> Path | None:
    """Return the directory that the nanny of this worker process clears after it; None elsewhere."""
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:
        return None
    return Path(worker.local_directory) if worker.nanny else None


def worker_facts(client: "Client") -> dict[str, dict[str, Any]] | None:
    """Return what a scheduler knows of each of its workers, by address; None if it does not answer."""
    identity = ask_scheduler(client, "identity")
    return None if identity is None else dict(identity["workers"])


def wait_for_workers(client: "Client") -> None:
    """Wait until there is a worker, be it a paused one; raise a ClusterError where none comes, or nobody answers."""
    deadline, wish = time.monotonic() + _ARRIVAL, None
    while not (facts := worker_facts(client)):
        # An adaptive cluster starts workers for tasks alone; this one is let go with the name.
        wish = wish or (None if facts is None else client.submit(int, key=f"dkfm-worker-{uuid.uuid4().hex}"))
        if facts is None:
            raise ClusterError("The scheduler does not answer; is it still there?")
        if time.monotonic() > deadline:
            raise ClusterError(f"The cluster has had no worker for {_ARRIVAL} seconds; start one and try again.")
        time.sleep(0.1)


def ask_scheduler(client: "Client", question: str, **options: object) -> Any:  # JSON of distributed
    """Return the scheduler's answer to one of its own questions; None if there is none soon."""
    if client.status != "running":
        return None
    try:
        return client.sync(getattr(client.scheduler, question), callback_timeout=_ANSWER, **options)
    except (TimeoutError, OSError):
        return None


def require_dask() -> None:
    """Raise unless Dask is as new as dkfm's package asks: an older one that is installed later fails in odd ways."""
    from importlib.metadata import version

    for name in ("dask", "distributed"):
        there = version(name)
        if tuple(map(int, there.split(".")[:2])) < _OLDEST_DASK:
            oldest = ".".join(map(str, _OLDEST_DASK))
            raise ClusterError(f"dkfm needs {name} {oldest} or newer, and {there} is installed; install dkfm again.")
