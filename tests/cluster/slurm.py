"""A Slurm of its own on this machine, as root: munged, slurmctld and slurmd on loopback, with private state.

`python tests/cluster/slurm.py` starts one, prints what to export, and keeps it until Ctrl-C.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

CORES, MEMORY = 8, 8192
"""What the one node says it has, and MiB: jobs are to run side by side, whatever this machine is."""

_CONF = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={node}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=20
OverTimeLimit=0
JobRequeue=1
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={node} CPUs={cores} RealMemory={memory} State=UNKNOWN
PartitionName=all Nodes={name} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A Slurm that runs: its folder, and what the environment of its commands has."""

    folder: Path

    @property
    def environment(self):
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command):
        """Return what one of Slurm's commands prints."""
        environment = os.environ | self.environment
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    def jobs(self, name=None):
        """Return the numbers and states of the jobs that have not ended, oldest first."""
        asked = ["--name", name] if name else []
        lines = self.ask("squeue", "--noheader", "--sort", "i", "--format", "%i %T", *asked).splitlines()
        return [tuple(line.split()) for line in lines]


def processes_of(folder):
    """Return the processes that have a folder in their environment or command: a private folder names its own."""
    found, mark = [], str(folder).encode()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            about = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
            if process.pid != os.getpid() and any(mark in text for text in about):
                found.append(process)
    return found


@contextmanager
def slurm():
    """Start a Slurm of one node and end it, with its jobs; all that it writes is in one folder, which goes too."""
    with tempfile.TemporaryDirectory(prefix="dkfm-slurm-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            with ExitStack() as stack:
                try:
                    started = _started(folder, stack)
                except AssertionError as error:
                    logs = "".join(path.read_text() for path in (*folder.glob("*.log"), *folder.glob("*.out")))
                    raise AssertionError(f"{error}: {logs}") from None
                yield started
        finally:
            _end_all(folder)


def _started(folder, stack):
    started = Slurm(folder)
    ports = _free_ports(2)
    host = socket.gethostname().partition(".")[0]
    conf = _CONF.format(
        name=f"dkfm{secrets.token_hex(4)}",
        host=host,
        folder=folder,
        controller=ports[0],
        node=ports[1],
        cores=CORES,
        memory=MEMORY,
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {option: folder / f"munge.{option}" for option in ("socket", "pid", "log", "seed")}
    munged = ["munged", "--foreground", "--force", "--key-file", key, "--socket", files["socket"]]
    munged += ["--pid-file", files["pid"], "--log-file", files["log"], "--seed-file", files["seed"]]
    _daemon(stack, started, munged)
    _wait_for(files["socket"].exists, "munged")
    name = conf.split("ClusterName=")[1].split()[0]
    _daemon(stack, started, ["slurmctld", "-D", "-c", "-f", folder / "slurm.conf"])
    _wait_for(lambda: _answers(started), "slurmctld")
    _daemon(stack, started, ["slurmd", "-D", "-N", name, "-f", folder / "slurm.conf"])
    _wait_for(lambda: started.ask("sinfo", "--noheader", "--format", "%T") == "idle", "slurmd")
    stack.callback(_cancel_all, started)
    return started


def _daemon(stack, started, command, **more):
    program = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin:/sbin")
    log = stack.enter_context((started.folder / f"{command[0]}.out").open("ab"))
    environment = os.environ | started.environment | more
    running = subprocess.Popen(
        [program, *map(str, command[1:])], stdout=log, stderr=log, env=environment, start_new_session=True
    )
    stack.callback(_end, running)


def _end(running):
    running.terminate()
    try:
        running.wait(20)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait(20)


def _cancel_all(started):
    jobs = [number for number, _ in started.jobs()]
    if jobs:
        started.ask("scancel", "--full", "--signal=KILL", *jobs)
        started.ask("scancel", *jobs)
    with suppress(AssertionError):  # what does not go is ended with the rest
        _wait_for(lambda: not started.jobs(), "the end of all jobs")


def _end_all(folder):
    """End what jobs left: a step's keeper leaves the family of its daemon, and so may a job's processes."""
    deadline = time.monotonic() + 20
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)


def _answers(started):
    try:
        return bool(started.ask("sinfo", "--noheader"))
    except subprocess.CalledProcessError:
        return False


def _free_ports(number):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for(is_so, what, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} seconds"
        time.sleep(0.05)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), slurm() as running:
        for name, value in running.environment.items():
            print(f"export {name}={value}", flush=True)
        signal.pause()
