"""A cluster of the hosts of a file, started over SSH: encrypted, and gone with the driver.

Dask gives its settings to remote processes on their command lines, where other users of those hosts read them. So the
key of the cluster goes through the SSH connection into a file that only its owner may read, the settings name that
file, and what put it there removes it when the connection ends, however that comes about.
"""

import asyncio
import logging
import re
import secrets
import shlex
import sys
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from distributed.deploy import ssh

from dkfm.errors import ClusterError, InvalidInputError, MissingExtraError, reason, shown
from dkfm.files.local import read_plain

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection, SSHClientProcess
    from distributed import SpecCluster

_LINE = re.compile(
    r"(?:(?P<user>\w[\w.-]*)@)?(?P<name>\w[\w.-]*)(?::(?P<port>\d{1,5}))?(?:\s+python=(?P<python>/\S+))?"
)

_MAX_HOSTS = 2**20
"""Bytes of a file of hosts."""

_PATIENCE = 60
"""Seconds that a host has for each step: to let us in, to import Dask, to start a process of it."""

_GOODBYE = 15
"""Seconds that a process has to end by itself."""

_KEEP = """
umask 077
mkdir "$1" 2>/dev/null || [ -O "$1" ] || exit
trap 'rm -rf "$1"' EXIT
trap exit HUP INT TERM
while IFS= read -r line && [ "$line" ]; do printf "%s\\n" "$line"; done > "$1/dask.pem"
echo "$1 $SSH_CONNECTION"
cat > /dev/null
"""
"""Keep what comes up to an empty line in a folder of its own, until there is nobody at the other end."""

_LEAVE = (
    'exec 3<&0; "$@" 3<&- & task=$!; (cat <&3; kill $task) >/dev/null 2>&1 & watch=$!; '
    "wait $task; code=$?; kill $watch 2>/dev/null; exit $code"
)
"""Run a command, and end it when there is nobody at the other end: a driver that was killed cannot do it."""


@dataclass(frozen=True)
class _Host:
    name: str
    user: str | None
    port: int | None
    python: str

    def __str__(self) -> str:
        user, port = "" if self.user is None else f"{self.user}@", "" if self.port is None else f":{self.port}"
        return f"{user}{self.name}{port}"

    @property
    def options(self) -> dict[str, Any]:
        """What asyncssh is told beside the user's own configuration; of known hosts it is told nothing."""
        named = {"username": self.user, "port": self.port}
        # A firewall that forgets an idle connection would end the cluster.
        return {key: value for key, value in named.items() if value is not None} | {"keepalive_interval": 30}


@contextmanager
def ssh_cluster(path: str) -> "Iterator[tuple[SpecCluster, float]]":
    """Start a scheduler and workers on the hosts of a file, and end them.

    Each line is `[user@]host[:port] [python=/path]`; what follows a # is a comment. The first host runs the scheduler,
    every other one a worker with a thread a core; a single host runs both. Keys and known hosts are those of
    ~/.ssh/config. All that they say is encrypted, with a certificate of this cluster alone.

    Parameters
    ----------
    path : str
        The file of hosts. Their Python is the one at the path of this one unless their lines name another.

    Yields
    ------
    cluster : distributed.SpecCluster
        As distributed.SSHCluster returns it; it listens where SSH reached each host. All its workers have started.
    wait : float
        Seconds after which a worker that has not come will not.

    Raises
    ------
    InvalidInputError
        If the file is not there, is empty, or has a line that is not understood.
    MissingExtraError
        If asyncssh or cryptography is not installed.
    ClusterError
        If a host does not let us in, or does not start what it is to run; the message names it.

    Examples
    --------
    >>> with ssh_cluster("no/such/hosts"):
    ...     pass
    Traceback (most recent call last):
        ...
    dkfm.errors.InvalidInputError: The hosts in no/such/hosts cannot be read: No such file or directory.
    """
    hosts = _hosts(path)
    _require_extra()
    from distributed import Security
    from distributed.utils import LoopRunner, sync

    security, folder = Security.temporary(), f"/tmp/dkfm-{secrets.token_hex(16)}"  # noqa: S108  # nobody guesses it
    with ExitStack() as stack:
        runner = LoopRunner()
        runner.start()
        stack.callback(runner.stop)
        keys = _Keys(folder, f"{security.tls_client_cert}{security.tls_client_key}\n")
        stack.callback(sync, runner.loop, keys.remove)
        addresses = sync(runner.loop, keys.put, list(dict.fromkeys(hosts)))
        cluster = stack.enter_context(_started(hosts, addresses, f"{folder}/dask.pem", security, runner.loop))
        yield cluster, _PATIENCE


def _hosts(path: str) -> list[_Host]:
    """Return the scheduler's host and those of the workers."""
    try:
        lines = read_plain(path, _MAX_HOSTS).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInputError(f"The hosts in {path} cannot be read: {why}.") from None
    hosts: list[_Host] = []
    for number, line in enumerate(lines, 1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        found = _LINE.fullmatch(said)
        if found is None or not 0 < int(found["port"] or 22) < 2**16:
            raise InvalidInputError(
                f"Line {number} of {path} is {shown(said)}; expected [user@]host[:port] and perhaps python=/path."
            )
        port = int(found["port"]) if found["port"] else None
        host = _Host(found["name"], found["user"], port, found["python"] or sys.executable)
        if str(host) in map(str, hosts[1:]):
            raise InvalidInputError(
                f"Line {number} of {path} is a second worker on {host}; one has a thread for each core."
            )
        hosts.append(host)
    if not hosts:
        raise InvalidInputError(f"{path} names no host; write one a line, the one for the scheduler first.")
    return hosts if len(hosts) > 1 else 2 * hosts


def _require_extra() -> None:
    try:
        import asyncssh  # noqa: F401
        import cryptography  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "A cluster over SSH needs asyncssh and cryptography; install them with pip install 'dkfm[ssh]'."
        ) from error


class _Keys:
    """The certificate and key of a cluster, in a folder of the same name on each of its hosts."""

    def __init__(self, folder: str, pem: str) -> None:
        self._folder, self._pem = folder, pem
        self._kept: list[tuple[SSHClientConnection, SSHClientProcess[str] | None]] = []

    async def put(self, hosts: list[_Host]) -> list[tuple[_Host, str, str]]:
        """Return by what name each host is known, and on which of its addresses SSH reached it."""
        found = await asyncio.gather(*(self._put(host) for host in hosts), return_exceptions=True)
        for host, result in zip(hosts, found, strict=True):
            if isinstance(result, BaseException):
                _refuse(host, result)
        return [(host, *result) for host, result in zip(hosts, found, strict=True) if isinstance(result, tuple)]

    async def _put(self, host: _Host) -> tuple[str, str]:
        import asyncssh

        connection = await asyncio.wait_for(asyncssh.connect(host.name, **host.options), _PATIENCE)
        self._kept.append((connection, None))
        command = f"{shlex.quote(host.python)} -c 'import distributed, dkfm'"
        tried = await asyncio.wait_for(connection.run(command, stdin=asyncssh.DEVNULL), _PATIENCE)
        if tried.exit_status != 0:
            said = str(tried.stderr or "").strip().splitlines() or [f"it ended with {tried.exit_status}"]
            raise ClusterError(
                f"{host.python} on {host} cannot import Dask and dkfm ({said[-1]}); install dkfm there, or name "
                "another Python in its line, as python=/path."
            )
        keep = await connection.create_process(f"sh -c {shlex.quote(_KEEP)} sh {self._folder}")
        self._kept[self._kept.index((connection, None))] = (connection, keep)
        keep.stdin.write(self._pem)
        while line := await asyncio.wait_for(keep.stdout.readline(), _PATIENCE):
            words = line.split()  # what a login prints may come first
            if words[:1] == [self._folder] and len(words) == 5:
                return str(connection.get_extra_info("host")), words[3]
        raise ClusterError(f"{host} cannot keep the cluster's key in {self._folder}; has it a shell, and room in /tmp?")

    async def remove(self) -> None:
        """Let the hosts remove what they keep, and hang up."""
        await asyncio.gather(*(_end(keep) for _, keep in self._kept if keep is not None))
        for connection, _ in self._kept:
            connection.close()
            await connection.wait_closed()


async def _end(process: "SSHClientProcess[str]") -> None:
    """Tell a process that there is nobody any more, and wait for its end."""
    import asyncssh

    with suppress(OSError, asyncssh.Error):  # it may be gone
        process.stdin.write_eof()
        await asyncio.wait_for(process.wait_closed(), _GOODBYE)


def _refuse(host: _Host, error: BaseException) -> NoReturn:
    """Raise what happened on the way to a host as one sentence."""
    import asyncssh

    if isinstance(error, ClusterError) or not isinstance(error, Exception):
        raise error
    unknown = isinstance(error, FileNotFoundError) and str(error.filename).endswith("known_hosts")
    if isinstance(error, asyncssh.PermissionDenied):
        told = f"{host} takes none of your keys; make `ssh {host.name}` work without a password, and try again."
    elif isinstance(error, asyncssh.HostKeyNotVerifiable) or unknown:
        told = f"The host key of {host} is not among your known hosts; see what `ssh {host.name}` says of it."
    elif isinstance(error, TimeoutError):
        told = f"{host} has not answered over SSH for {_PATIENCE} seconds; see whether `ssh {host.name}` does."
    else:
        told = f"{host} cannot be reached over SSH: {reason(error)}."
    raise ClusterError(told) from None


@contextmanager
def _started(
    hosts: list[_Host], addresses: list[tuple[_Host, str, str]], pem: str, security: Any, loop: Any
) -> "Iterator[SpecCluster]":
    import dask
    from distributed import SpecCluster

    reached = {host: (name, address) for host, name, address in addresses}
    first, *others = hosts
    scheduler = {"cls": _Scheduler, "options": {"host": first, "name": reached[first][0], "listen": reached[first][1]}}
    workers = {str(host): {"cls": _Worker, "options": {"host": host, "listen": reached[host][1]}} for host in others}
    tls = {role: {"cert": pem, "key": None} for role in ("client", "scheduler", "worker")}
    remote = {
        "distributed.comm.tls.ca-file": pem,
        **{f"distributed.comm.tls.{role}": files for role, files in tls.items()},
        "distributed.comm.require-encryption": True,
        "logging": {"distributed": "info"},  # what says that a process has started is a line of its log
    }
    with dask.config.set(remote):
        try:
            cluster = SpecCluster(
                workers, scheduler, security=security, loop=loop, name="SSHCluster", silence_logs=logging.WARNING
            )
        except RuntimeError as error:
            cause = error.__cause__ or error
            if isinstance(cause, ClusterError):
                raise cause from None
            told = "a firewall may be between; a driver on that host, or an open range of ports, helps"
            raise ClusterError(f"The scheduler on {first} is not reached from here: {reason(cause)}; {told}.") from None
    with cluster:
        yield cluster


class _Ending:
    """What ends by itself where it can: killed at once, a worker would leave its files behind."""

    proc: Any

    async def close(self) -> None:
        if self.proc is not None:
            await _end(self.proc)
        await super().close()  # type: ignore[misc]  # of a process of Dask's


class _Scheduler(_Ending, ssh.Scheduler):
    def __init__(self, host: _Host, name: str, listen: str) -> None:
        options = {"host": listen, "port": 0, "protocol": "tls", "dashboard_address": "127.0.0.1:0"}
        super().__init__(host.name, host.options, options, _python(host))
        self._host, self._known_as = host, name

    async def start(self) -> None:
        await _start(self._host, "The scheduler", super().start(), self)  # type: ignore[no-untyped-call]  # Dask's
        # Where it listens may be an address that only its own network knows.
        self.address = f"tls://{self._known_as}:{str(self.address).rpartition(':')[2]}"


class _Worker(_Ending, ssh.Worker):
    def __init__(self, scheduler: str, host: _Host, listen: str, name: str) -> None:
        options = {"host": listen, "protocol": "tls", "dashboard": False, "name": name}
        options["dashboard_address"] = "127.0.0.1:0"  # of what answers when there is no dashboard
        super().__init__(scheduler, host.name, host.options, options, remote_python=_python(host), name=name)
        self._host = host

    async def start(self) -> None:
        await _start(self._host, f"The worker, which must reach {self.scheduler},", super().start(), self)  # type: ignore[no-untyped-call]  # Dask's


def _python(host: _Host) -> str:
    return f"sh -c {shlex.quote(_LEAVE)} sh {shlex.quote(host.python)}"


async def _start(host: _Host, what: str, starting: Awaitable[None], process: Any) -> None:
    """Wait for what starts a process of Dask's on a host."""
    import asyncssh

    try:
        await asyncio.wait_for(starting, _PATIENCE)
    except Exception as error:
        why = f"in {_PATIENCE} seconds" if isinstance(error, TimeoutError) else f"({reason(error)})"
        raise ClusterError(f"{what} did not start on {host} {why}.") from None
    # A process whose words nobody takes stops when they fill a buffer.
    await process.proc.redirect(stdout=asyncssh.DEVNULL, stderr=asyncssh.DEVNULL)
