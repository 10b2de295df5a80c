"""What `--scheduler` names: the address of a scheduler, a file that has it, or a cluster that is started."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dkfm.errors import ClusterError, DkfmWarning, reason

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["connected"]


@contextmanager
def connected(spec: str, *, current: bool = True) -> "Iterator[Client]":
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
    _warn_of_open_port(address)
    with _client(address, spec, current) as client:
        yield client


@contextmanager
def _started(kind: str, path: str, current: bool) -> "Iterator[Client]":
    from distributed import Client

    if kind == "slurm":
        from dkfm.slurm import slurm_cluster as started
    else:
        from dkfm.ssh import ssh_cluster as started
    with started(path) as (cluster, wait), Client(cluster, set_as_default=current) as client:
        try:
            client.wait_for_workers(1, timeout=wait)
        except TimeoutError:
            raise ClusterError(f"No worker of {kind}:{path} has come in {wait:.0f} seconds.") from None
        yield client


def _address(spec: str) -> str:
    """Return the address that a scheduler file has, or that is one."""
    if "://" in spec or not (spec.endswith(".json") or Path(spec).exists()):
        return spec if "://" in spec else f"tcp://{spec}"
    try:
        found = json.loads(Path(spec).read_text())["address"]
        if not isinstance(found, str):
            raise TypeError("its address is no text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{spec} is not the file of a running scheduler: {reason(error)}.") from None
    return found


def _warn_of_open_port(address: str) -> None:
    if address.startswith("tcp://") and not _is_loopback(address):
        warnings.warn(
            f"Whoever reaches {address} can run code there, for nothing asks who it is; cluster/tls in dkfm's "
            "repository tells how to make certificates, and how a tls:// address is used.",
            DkfmWarning,
            stacklevel=5,
        )


def _is_loopback(address: str) -> bool:
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _client(address: str, spec: str, current: bool) -> "Iterator[Client]":
    from distributed import Client
    from distributed.versions import VersionMismatchWarning

    # That a scheduler went away is told in one sentence, not in a traceback of what tries to reach it.
    for name in ("distributed.client", "distributed.comm.tcp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # A table of all versions; what matters of them is told in a sentence before the first task.
            warnings.simplefilter("ignore", VersionMismatchWarning)
            client = Client(address, timeout=10, set_as_default=current)
    except (OSError, ValueError, TypeError, RuntimeError) as error:  # the latter two of TLS without certificates
        raise ClusterError(f"There is no scheduler at {spec} that takes us: {reason(error)}.") from None
    with client:
        yield client
