"""Several hosts on one machine: network namespaces, joined by pairs of veth interfaces over a bridge in the first.

Nothing is made outside of the namespaces, so that no address here can meet one of the machine's or of another run's,
and an interface goes with its namespace.
"""

import os
import secrets
import signal
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass

NETWORK = "10.77.0"


@dataclass(frozen=True)
class Host:
    """A namespace with an address, which is at a port of the bridge unless it has the bridge itself."""

    name: str
    address: str
    bridge: str
    port: str

    def inside(self, *command):
        """Return the command that runs another one here, which sees mounts of its own."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self):
        """Take the port of the bridge down, as one who pulls the cable does: what is sent is lost, and nobody told."""
        ip("-n", self.bridge, "link", "set", self.port, "down")

    def mend(self):
        ip("-n", self.bridge, "link", "set", self.port, "up")

    def listening(self):
        """Return the addresses on which anything listens here, each with its port."""
        return [line.split()[3] for line in run(*self.inside("ss", "-Hltn")).splitlines()]

    def pids(self):
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def ip(*command):
    return run("ip", *command)


@contextmanager
def hosts(number):
    """Make so many hosts that reach each other and nothing else; they end with all that still runs in them.

    Raises
    ------
    OSError
        It takes privileges that this process has not.
    """
    prefix = f"dkfm-{secrets.token_hex(4)}"
    names = [f"{prefix}-{i}" for i in range(number)]
    first = names[0]
    made = [Host(name, f"{NETWORK}.{i + 1}", first, f"port{i}") for i, name in enumerate(names)]
    try:
        for host in made:
            ip("netns", "add", host.name)
            ip("-n", host.name, "link", "set", "lo", "up")
        ip("-n", first, "link", "add", "eth0", "type", "bridge")
        for host in made[1:]:
            ip("link", "add", "eth0", "netns", host.name, "type", "veth", "peer", "name", host.port, "netns", first)
            ip("-n", first, "link", "set", host.port, "master", "eth0", "up")
        for host in made:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
        yield made
    finally:
        for host in made:
            with suppress(OSError):  # it was not made
                for pid in host.pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                ip("netns", "delete", host.name)
