"""Connect to the cluster that `--scheduler` names: an address, a scheduler file, or a cluster to start."""

import asyncio
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dkfm.errors import ClusterError, SchedulerNameError, StoreError, extract_reason, warn_caller
from dkfm.execution.clusters import current_client
from dkfm.storage import json_reading

if TYPE_CHECKING:
    from distributed import Client

_MAX_FILE_BYTES = 2**22
"""Largest scheduler file that is read, in bytes."""

_ANSWER_TIMEOUT = 5.0
"""Seconds to wait for an answer."""

_CLUSTERS = {"slurm": "slurm_cluster", "ssh": "ssh_cluster"}
"""Context manager of each cluster that is started: it yields the cluster and the seconds to wait for a worker."""

_FORMS = "host:port, tcp://host:port, tls://host:port, the path of a scheduler file, slurm:FILE and ssh:HOSTS"

_NOT_A_SCHEDULER = "what is there does not answer as a scheduler does; is it the port of its dashboard?"


@contextmanager
def connect(spec: str, *, set_as_default: bool = True, wait_for_workers: float | None = None) -> "Iterator[Client]":
    """Connect to a cluster, which is started first if `spec` says so, and wait for its first worker.

    Parameters
    ----------
    spec : str
        ``tcp://host:port``, ``tls://host:port`` or ``host:port``; a scheduler file; ``slurm:FILE`` to start a cluster
        whose workers are jobs of Slurm; ``ssh:HOSTS`` to start one on the hosts of a file. The last two are closed when
        the context ends.
    set_as_default : bool
        Whether the client becomes Dask's current client.
    wait_for_workers : float, optional
        Seconds to wait for the first worker; by default 30 for a running cluster, 60 over SSH, and the value in the
        file of a Slurm cluster.

    Yields
    ------
    distributed.Client
        A client that is connected.

    Raises
    ------
    SchedulerNameError
        `spec` has none of these forms.
    ClusterError
        There is no scheduler, it refuses the connection, the cluster does not start, or no worker joins.
    """
    kind, colon, path = spec.partition(":")
    if colon and kind in _CLUSTERS:
        if not path:
            raise SchedulerNameError(f"{spec} names no file; the forms of a scheduler are {_FORMS}.")
        with _start_cluster_and_connect(kind, path, set_as_default, wait_for_workers) as client:
            yield client
        return
    address = _scheduler_address(spec)
    with _open_client(address, spec, set_as_default) as client:
        wait = current_client.WORKER_TIMEOUT if wait_for_workers is None else wait_for_workers
        current_client.wait_for_workers(client, wait, spec)
        yield client


@contextmanager
def _start_cluster_and_connect(kind: str, path: str, current: bool, wait_seconds: float | None) -> "Iterator[Client]":
    from distributed import Client

    start = getattr(import_module(f"dkfm.execution.clusters.{kind}"), _CLUSTERS[kind])
    _silence_connections()
    with start(path) as (cluster, wait):
        try:
            client = Client(cluster, set_as_default=current)
        except OSError as error:
            cause = f"at {cluster.scheduler_address}: {extract_reason(error)}"
            raise ClusterError(f"The scheduler of {kind}:{path} is not reached {cause}.") from None
        with client:
            current_client.wait_for_workers(client, wait if wait_seconds is None else wait_seconds, f"{kind}:{path}")
            yield client


def _scheduler_address(spec: str) -> str:
    """Return the address in a scheduler file, or `spec` itself as an address."""
    if not spec.rpartition("://")[2].strip(" :"):
        raise SchedulerNameError(f"{spec!r} names no scheduler; the forms are {_FORMS}.")
    if "://" in spec:
        return spec
    is_there = _exists(spec)
    if not is_there and not spec.endswith(".json"):
        if not spec.rpartition(":")[2].strip(" /").isdigit():
            raise SchedulerNameError(f"{spec} names no scheduler; the forms are {_FORMS}.")
        return f"tcp://{spec}"
    if not is_there:
        raise ClusterError(f"There is no {spec}; it is the file that a scheduler writes with --scheduler-file.")
    try:
        address = json_reading.read_json(Path(spec), _MAX_FILE_BYTES).get("address")
        if not isinstance(address, str):
            raise TypeError("its address is no text")
    except (StoreError, TypeError) as error:
        raise ClusterError(f"{spec} is not the file of a running scheduler: {extract_reason(error)}.") from None
    return address


def _exists(spec: str) -> bool:
    try:
        return Path(spec).exists()
    except (OSError, ValueError):  # too long for a path, or it contains a NUL character
        return False


def _warn_of_open_port(address: str) -> None:
    if address.startswith("tcp://") and not _is_loopback(address):
        warn_caller(
            f"Whoever reaches {address} can run code there, for nothing asks who it is; cluster/tls in dkfm's "
            "repository tells how to make certificates, and how a tls:// address is used."
        )


def _is_loopback(address: str) -> bool:
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _open_client(address: str, spec: str, current: bool) -> "Iterator[Client]":
    current_client.require_dask_version()
    from distributed import Client
    from distributed.versions import VersionMismatchWarning

    _silence_connections()
    try:
        _require_scheduler(address)
        _warn_of_open_port(address)
        with warnings.catch_warnings():
            # Versions that matter are compared before the first task, with a shorter message.
            warnings.simplefilter("ignore", VersionMismatchWarning)
            client = Client(address, timeout=10, set_as_default=current)
    except TypeError:
        cause = "the configuration of Dask has no certificates here (distributed.comm.tls); cluster/tls makes some"
        raise ClusterError(f"There is no scheduler at {spec} that takes us: {cause}.") from None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError if Dask's configuration requires encryption
        raise ClusterError(f"There is no scheduler at {spec} that takes us: {extract_reason(error)}.") from None
    with client:
        yield client


def _silence_connections() -> None:
    """Keep the tracebacks of Distributed out of the log: a connection that breaks is reported in one sentence.

    A cluster of Slurm silences its scheduler only until it is closed, and some of its connections break later.
    """
    for name in ("distributed.batched", "distributed.client", "distributed.comm.tcp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _require_scheduler(address: str) -> None:
    """Raise an OSError if no scheduler answers at an address; a Client would wait forever."""
    from distributed import Security
    from distributed.core import rpc

    async def ask() -> None:
        security = Security().get_connection_args("client")
        async with rpc(address, timeout=_ANSWER_TIMEOUT, connection_args=security) as scheduler:
            await scheduler.identity()

    try:
        asyncio.run(asyncio.wait_for(ask(), 2 * _ANSWER_TIMEOUT))
    except TimeoutError:
        raise OSError(_NOT_A_SCHEDULER) from None
    except (OSError, ValueError, RuntimeError):
        raise
    except Exception as error:  # distributed may raise anything when it parses the bytes of another server
        if isinstance(error, TypeError) and address.startswith("tls://"):
            raise  # certificates are missing
        raise OSError(_NOT_A_SCHEDULER) from None
