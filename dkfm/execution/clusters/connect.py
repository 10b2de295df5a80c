"""What `--scheduler` names: the address of a scheduler, a file that has it, or a cluster that is started."""

import asyncio
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dkfm.core.printing import print_message
from dkfm.errors import ClusterError, DkfmWarning, StoreError, reason
from dkfm.execution.clusters.client import require_dask
from dkfm.storage import json_documents

if TYPE_CHECKING:
    from distributed import Client

_MAX_SCHEDULER = 2**22
"""Bytes of a scheduler file."""

_PATIENCE = 5.0
"""Seconds for an answer, and before it is said what is waited for."""


_STRANGER = "what is there does not answer as a scheduler does; is it the port of its dashboard?"


@contextmanager
def connect(spec: str, *, current: bool = True) -> "Iterator[Client]":
    """Connect to what a user named, as the current client or beside it.

    Parameters
    ----------
    spec : str
        ``tcp://host:port``, ``tls://host:port`` or ``host:port``; a scheduler file; ``slurm:FILE``, a cluster whose
        workers are jobs of Slurm; ``ssh:HOSTS``, one on the hosts of a file. The latter two are ended with the context.
    current : bool
        Whether what asks Dask for a client, without naming one, gets this one.

    Raises
    ------
    ClusterError
        There is no scheduler, or none that takes us; or the cluster did not start.
    """
    kind, colon, path = spec.partition(":")
    if colon and kind in ("slurm", "ssh"):
        with _started(kind, path, current) as client:
            yield client
        return
    address = _address(spec)
    with _client(address, spec, current) as client:
        yield client


@contextmanager
def _started(kind: str, path: str, current: bool) -> "Iterator[Client]":
    from distributed import Client

    if kind == "slurm":
        from dkfm.execution.clusters.slurm import slurm_cluster as started
    else:
        from dkfm.execution.clusters.ssh import ssh_cluster as started
    with started(path) as (cluster, wait):
        try:
            client = Client(cluster, set_as_default=current)
        except OSError as error:
            where = cluster.scheduler_address
            raise ClusterError(f"The scheduler of {kind}:{path} is not reached at {where}: {reason(error)}.") from None
        with client:
            _wait(client, f"{kind}:{path}", wait)
            yield client


def _wait(client: "Client", spec: str, seconds: float) -> None:
    """Wait for the first worker, and say so where that takes a while: a queue may be long."""
    for timeout in (_PATIENCE, max(0.0, seconds - _PATIENCE)):
        try:
            client.wait_for_workers(1, timeout=timeout)
        except TimeoutError:
            if timeout == _PATIENCE:
                print_message(f"Waiting for the first worker of {spec}, {seconds:.0f} seconds at most.")
            continue
        return
    raise ClusterError(f"No worker of {spec} has come in {seconds:.0f} seconds.")


def _address(spec: str) -> str:
    """Return the address that a scheduler file has, or that is one."""
    if "://" in spec or not (spec.endswith(".json") or _exists(spec)):
        return spec if "://" in spec else f"tcp://{spec}"
    try:
        found = json_documents.read_json(Path(spec), _MAX_SCHEDULER).get("address")
        if not isinstance(found, str):
            raise TypeError("its address is no text")
    except (StoreError, TypeError) as error:
        raise ClusterError(f"{spec} is not the file of a running scheduler: {reason(error)}.") from None
    return found


def _exists(spec: str) -> bool:
    try:
        return Path(spec).exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL character
        return False


def _warn_of_open_port(address: str) -> None:
    if address.startswith("tcp://") and not _is_loopback(address):
        warnings.warn(
            f"Whoever reaches {address} can run code there, for nothing asks who it is; cluster/tls in dkfm's "
            "repository tells how to make certificates, and how a tls:// address is used.",
            DkfmWarning,
            stacklevel=6,
        )


def _is_loopback(address: str) -> bool:
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _client(address: str, spec: str, current: bool) -> "Iterator[Client]":
    require_dask()
    from distributed import Client
    from distributed.versions import VersionMismatchWarning

    # That a scheduler went away is told in one sentence, not in a traceback of what tries to reach it.
    for name in ("distributed.batched", "distributed.client", "distributed.comm.tcp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        _require_scheduler(address)
        _warn_of_open_port(address)
        with warnings.catch_warnings():
            # A table of all versions; what matters of them is told in a sentence before the first task.
            warnings.simplefilter("ignore", VersionMismatchWarning)
            client = Client(address, timeout=10, set_as_default=current)
    except TypeError:
        told = "the configuration of Dask has no certificates here (distributed.comm.tls); cluster/tls makes some"
        raise ClusterError(f"There is no scheduler at {spec} that takes us: {told}.") from None
    except (OSError, ValueError, RuntimeError) as error:  # the last where Dask's configuration requires encryption
        raise ClusterError(f"There is no scheduler at {spec} that takes us: {reason(error)}.") from None
    with client:
        yield client


def _require_scheduler(address: str) -> None:
    """Raise an OSError where what answers is no scheduler: a Client would wait for its words without end."""
    from distributed import Security
    from distributed.core import rpc

    async def ask() -> None:
        async with rpc(address, timeout=_PATIENCE, connection_args=Security().get_connection_args("client")) as there:
            await there.identity()

    try:
        asyncio.run(asyncio.wait_for(ask(), 2 * _PATIENCE))
    except TimeoutError:
        raise OSError(_STRANGER) from None
    except (OSError, ValueError, RuntimeError):
        raise
    except Exception as error:  # whatever distributed makes of another server's words: lengths of exabytes, wrong types
        if isinstance(error, TypeError) and address.startswith("tls://"):
            raise  # there are no certificates
        raise OSError(_STRANGER) from None
