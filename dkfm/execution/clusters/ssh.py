"""Start a Dask cluster over SSH on the hosts of a file, with TLS between them; the cluster ends with the driver.

Dask passes settings to remote processes on their command lines, which other users of those hosts can read. The key of
the cluster is therefore sent through the SSH connection into a file that only its owner may read, and the settings name
that file. A shell on each host removes it as soon as the connection ends for any reason.
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

from dkfm.errors import ClusterError, InvalidInputError, MissingExtraError, extract_reason, format_value
from dkfm.files.local import read_plain

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection, SSHClientProcess
    from distributed import SpecCluster

_HOST_LINE = re.compile(
    r"(?:(?P<user>\w[\w.-]*)@)?(?P<name>\w[\w.-]*)(?::(?P<port>\d{1,5}))?(?:\s+python=(?P<python>/\S+))?"
)

_MAX_FILE_BYTES = 2**20
"""Largest file of hosts that is read, in bytes."""

_STEP_TIMEOUT = 60
"""Timeout of a host, in seconds, for each step: accepting the connection, importing Dask, starting a process."""

_EXIT_TIMEOUT = 15
"""Timeout, in seconds, for a process to end by itself."""

_HOLD_KEY_SCRIPT = """
umask 077
mkdir "$1" 2>/dev/null || [ -O "$1" ] || exit
trap 'rm -rf "$1"' EXIT
trap exit HUP INT TERM
while IFS= read -r line && [ "$line" ]; do printf "%s\\n" "$line"; done > "$1/dask.pem"
echo "$1 $SSH_CONNECTION"
cat > /dev/null
"""
"""Shell script: write standard input up to an empty line to a private file, and remove it when the input ends."""

_RUN_WHILE_CONNECTED = (
    'exec 3<&0; "$@" 3<&- & task=$!; (cat <&3; kill $task) >/dev/null 2>&1 & watch=$!; '
    "wait $task; code=$?; kill $watch 2>/dev/null; exit $code"
)
"""Shell script: run a command and kill it when standard input ends, which happens even if the driver is killed."""


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
        """Arguments of ``asyncssh.connect``; keys and known hosts come from the user's SSH configuration."""
        given = {"username": self.user, "port": self.port}
        # Firewalls drop idle connections, and the cluster ends with its connections.
        return {key: value for key, value in given.items() if value is not None} | {"keepalive_interval": 30}


@contextmanager
def ssh_cluster(path: str) -> "Iterator[tuple[SpecCluster, float]]":
    """Start a scheduler and workers on the hosts of a file; stop them when the context ends.

    Each line is `[user@]host[:port] [python=/path]`; text after a # is a comment. The first host runs the scheduler,
    every other host a worker with a thread for each core; a single host runs both. Keys and known hosts are those of
    ~/.ssh/config. All traffic is encrypted with a certificate made for this cluster.

    Parameters
    ----------
    path : str
        The file of hosts. Each host runs the Python at this process's own path unless its line names another.

    Yields
    ------
    cluster : distributed.SpecCluster
        A cluster like that of distributed.SSHCluster, whose workers have started. Each process listens on the address
        at which SSH reached its host.
    wait : float
        Seconds that a client waits for the first worker.

    Raises
    ------
    InvalidInputError
        The file does not exist, is empty, or has a line that is not valid.
    MissingExtraError
        asyncssh or cryptography is not installed.
    ClusterError
        A host refuses the connection or does not start its process; the message names the host.

    Examples
    --------
    >>> with ssh_cluster("no/such/hosts"):
    ...     pass
    Traceback (most recent call last):
        ...
    dkfm.errors.InvalidInputError: The hosts in no/such/hosts cannot be read: No such file or directory.
    """
    hosts = _read_hosts(path)
    _require_extra()
    from distributed import Security
    from distributed.utils import LoopRunner, sync

    security, folder = Security.temporary(), f"/tmp/dkfm-{secrets.token_hex(16)}"  # noqa: S108  # the name cannot be guessed
    with ExitStack() as stack:
        runner = LoopRunner()
        runner.start()
        stack.callback(runner.stop)
        keys = _KeyFiles(folder, f"{security.tls_client_cert}{security.tls_client_key}\n")
        stack.callback(sync, runner.loop, keys.remove)
        addresses = sync(runner.loop, keys.connect_and_upload, list(dict.fromkeys(hosts)))
        cluster = stack.enter_context(_start_cluster(hosts, addresses, f"{folder}/dask.pem", security, runner.loop))
        yield cluster, _STEP_TIMEOUT


def _read_hosts(path: str) -> list[_Host]:
    """Return the host of the scheduler, then those of the workers."""
    try:
        lines = read_plain(path, _MAX_FILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInputError(f"The hosts in {path} cannot be read: {why}.") from None
    hosts: list[_Host] = []
    for n, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.fullmatch(text)
        if match is None or not 0 < int(match["port"] or 22) < 2**16:
            raise InvalidInputError(
                f"Line {n} of {path} is {format_value(text)}; expected [user@]host[:port] and perhaps python=/path."
            )
        port = int(match["port"]) if match["port"] else None
        host = _Host(match["name"], match["user"], port, match["python"] or sys.executable)
        if str(host) in map(str, hosts[1:]):
            raise InvalidInputError(f"Line {n} of {path} is a second worker on {host}; one has a thread for each core.")
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


class _KeyFiles:
    """Keep the certificate and key of a cluster in a folder of the same name on each of its hosts."""

    def __init__(self, folder: str, pem: str) -> None:
        self._folder, self._pem = folder, pem
        self._connections: list[SSHClientConnection] = []
        self._shells: list[SSHClientProcess[str]] = []

    async def connect_and_upload(self, hosts: list[_Host]) -> list[tuple[_Host, str, str]]:
        """Write the files; return each host with its SSH host name and the address at which SSH reached it."""
        results = await asyncio.gather(*(self._connect_and_upload(host) for host in hosts), return_exceptions=True)
        for host, result in zip(hosts, results, strict=True):
            if isinstance(result, BaseException):
                _raise_ssh_error(host, result)
        return [(host, *result) for host, result in zip(hosts, results, strict=True) if isinstance(result, tuple)]

    async def _connect_and_upload(self, host: _Host) -> tuple[str, str]:
        import asyncssh

        connection = await asyncio.wait_for(asyncssh.connect(host.name, **host.options), _STEP_TIMEOUT)
        self._connections.append(connection)
        command = f"{shlex.quote(host.python)} -c 'import distributed, dkfm'"
        trial = await asyncio.wait_for(connection.run(command, stdin=asyncssh.DEVNULL), _STEP_TIMEOUT)
        if trial.exit_status != 0:
            lines = str(trial.stderr or "").strip().splitlines() or [f"it ended with {trial.exit_status}"]
            raise ClusterError(
                f"{host.python} on {host} cannot import Dask and dkfm ({lines[-1]}); install dkfm there, or name "
                "another Python in its line, as python=/path."
            )
        shell = await connection.create_process(f"sh -c {shlex.quote(_HOLD_KEY_SCRIPT)} sh {self._folder}")
        self._shells.append(shell)
        shell.stdin.write(self._pem)
        while line := await asyncio.wait_for(shell.stdout.readline(), _STEP_TIMEOUT):
            words = line.split()  # a login may print lines before
            if words[:1] == [self._folder] and len(words) == 5:
                return str(connection.get_extra_info("host")), words[3]
        raise ClusterError(f"{host} cannot keep the cluster's key in {self._folder}; has it a shell, and room in /tmp?")

    async def remove(self) -> None:
        """End the shells, which remove the files, and close the connections."""
        await asyncio.gather(*map(_close_stdin_and_wait, self._shells))
        for connection in self._connections:
            connection.close()
            await connection.wait_closed()


async def _close_stdin_and_wait(process: "SSHClientProcess[str]") -> None:
    """Close the standard input of a process, which ends it, and wait for the end."""
    import asyncssh

    with suppress(OSError, asyncssh.Error):  # the process may have ended before
        process.stdin.write_eof()
        await asyncio.wait_for(process.wait_closed(), _EXIT_TIMEOUT)


def _raise_ssh_error(host: _Host, error: BaseException) -> NoReturn:
    """Raise an error of the connection to a host as a ClusterError of one sentence."""
    import asyncssh

    if isinstance(error, ClusterError) or not isinstance(error, Exception):
        raise error
    unknown = isinstance(error, FileNotFoundError) and str(error.filename).endswith("known_hosts")
    if isinstance(error, asyncssh.PermissionDenied):
        message = f"{host} takes none of your keys; make `ssh {host.name}` work without a password, and try again."
    elif isinstance(error, asyncssh.HostKeyNotVerifiable) or unknown:
        message = f"The host key of {host} is not among your known hosts; see what `ssh {host.name}` says of it."
    elif isinstance(error, TimeoutError):
        message = f"{host} has not answered over SSH for {_STEP_TIMEOUT} seconds; see whether `ssh {host.name}` does."
    else:
        message = f"{host} cannot be reached over SSH: {extract_reason(error)}."
    raise ClusterError(message) from None


@contextmanager
def _start_cluster(
    hosts: list[_Host], addresses: list[tuple[_Host, str, str]], pem: str, security: Any, loop: Any
) -> "Iterator[SpecCluster]":
    import dask
    from distributed import SpecCluster

    reached = {host: (name, address) for host, name, address in addresses}
    first, *others = hosts
    scheduler = {"cls": _Scheduler, "options": {"host": first, "name": reached[first][0], "listen": reached[first][1]}}
    workers = {str(host): {"cls": _Worker, "options": {"host": host, "listen": reached[host][1]}} for host in others}
    remote = {
        "distributed.comm.tls.ca-file": pem,
        **{f"distributed.comm.tls.{role}": {"cert": pem, "key": None} for role in ("client", "scheduler", "worker")},
        "distributed.comm.require-encryption": True,
        "logging": {"distributed": "info"},  # Dask reads the log line that says that a process has started
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
            problem = f"The scheduler on {first} is not reached from here: {extract_reason(cause)}"
            hint = "a firewall may be between; a driver on that host, or an open range of ports, helps"
            raise ClusterError(f"{problem}; {hint}.") from None
    with cluster:
        yield cluster


class _GracefulExit:
    """Let a remote process end by itself, because a worker that is killed leaves its files behind."""

    proc: Any

    async def close(self) -> None:
        if self.proc is not None:
            await _close_stdin_and_wait(self.proc)
        await super().close()  # type: ignore[misc]  # the base class of Dask is untyped


class _Scheduler(_GracefulExit, ssh.Scheduler):
    def __init__(self, host: _Host, name: str, listen: str) -> None:
        options = {"host": listen, "port": 0, "protocol": "tls", "dashboard_address": "127.0.0.1:0"}
        super().__init__(host.name, host.options, options, _python_command(host))
        self._host, self._public_name = host, name

    async def start(self) -> None:
        await _wait_until_started(self._host, "The scheduler", super().start(), self)  # type: ignore[no-untyped-call]  # Dask's
        # The address on which it listens may be known only inside its network.
        self.address = f"tls://{self._public_name}:{str(self.address).rpartition(':')[2]}"


class _Worker(_GracefulExit, ssh.Worker):
    def __init__(self, scheduler: str, host: _Host, listen: str, name: str) -> None:
        options = {"host": listen, "protocol": "tls", "dashboard": False, "name": name}
        options["dashboard_address"] = "127.0.0.1:0"  # the worker serves other pages there even without a dashboard
        super().__init__(scheduler, host.name, host.options, options, remote_python=_python_command(host), name=name)
        self._host = host

    async def start(self) -> None:
        await _wait_until_started(self._host, f"The worker, which must reach {self.scheduler},", super().start(), self)  # type: ignore[no-untyped-call]  # Dask's


def _python_command(host: _Host) -> str:
    return f"sh -c {shlex.quote(_RUN_WHILE_CONNECTED)} sh {shlex.quote(host.python)}"


async def _wait_until_started(host: _Host, what: str, starting: Awaitable[None], process: Any) -> None:
    """Wait until a process has started on a host."""
    import asyncssh

    try:
        await asyncio.wait_for(starting, _STEP_TIMEOUT)
    except Exception as error:
        cause = f"in {_STEP_TIMEOUT} seconds" if isinstance(error, TimeoutError) else f"({extract_reason(error)})"
        raise ClusterError(f"{what} did not start on {host} {cause}.") from None
    # A process blocks once the buffer of its unread output is full.
    await process.proc.redirect(stdout=asyncssh.DEVNULL, stderr=asyncssh.DEVNULL)
