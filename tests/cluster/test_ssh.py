"""A cluster over SSH: Debian's sshd on loopback, with keys, known hosts and a configuration of its own."""

import base64
import getpass
import json
import os
import re
import socket
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import dkfm
from cluster import sockets
from cluster.needs import needs
from dkfm.errors import ClusterError, InvalidInputError, MissingExtraError
from helpers import harness

needs("sshd", "ssh-keygen", "import asyncssh", "import cryptography")

from dkfm.execution.clusters.ssh import _read_hosts, ssh_cluster  # noqa: E402  # after it is known to be of use

LOOPBACK = {"127.0.0.1"}


class Sshd:
    """A server that notes every command, and a home whose configuration and known hosts lead to it."""

    def __init__(self, folder):
        self.folder, self.home, self.port = folder, folder / "home", sockets.free_port()
        self.log, self.scratch = folder / "commands", folder / "scratch"

    @contextmanager
    def running(self):
        ssh = self.home / ".ssh"
        ssh.mkdir(parents=True, mode=0o700)
        for key in (self.folder / "host_key", ssh / "key", self.folder / "other_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        (self.folder / "authorized").write_text((ssh / "key.pub").read_text())
        public = (self.folder / "host_key.pub").read_text()
        (ssh / "known").write_text(f"[127.0.0.1]:{self.port} {public}")
        files = f"IdentityFile {ssh}/key\nUserKnownHostsFile {ssh}/known\n"
        (ssh / "config").write_text(f"Host alias\nHostName 127.0.0.1\nPort {self.port}\nHost *\n{files}")
        force = self.folder / "force"
        force.write_text(f'#!/bin/sh\nprintf "%s\\n" "$SSH_ORIGINAL_COMMAND" >> {self.log}\n')
        with force.open("a") as script:
            # A BLAS that computes for another type of processor has other last bits.
            script.writelines(f"export {k}={v}\n" for k, v in os.environ.items() if k.startswith("OPENBLAS_"))
            script.write(f'export PYTHONPATH={Path(dkfm.__file__).parent.parent}\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
        force.chmod(0o755)
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host_key\nStrictModes no\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nPidFile none\nForceCommand {force}\nPermitRootLogin yes\n"
        )
        if os.geteuid() == 0:
            # Debian makes this empty folder when its service starts; another run of these tests may be using it.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        command = [sockets.program("sshd"), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with harness.process(command, self.folder / "sshd.log") as self.process:
            harness.wait_for(lambda: sockets.answers(self.port), "sshd")
            yield self

    def hosts(self, *lines):
        path = self.folder / "hosts"
        path.write_text("\n".join(lines) or f"{getpass.getuser()}@127.0.0.1:{self.port}  # all of it\n")
        return str(path)

    def environment(self):
        return {"HOME": str(self.home), "DASK_TEMPORARY_DIRECTORY": str(self.scratch), "SSH_AUTH_SOCK": ""}

    def processes(self):
        """Return what runs over SSH, without the server itself."""
        return sockets.family(self.process.pid)[1:]

    def workers(self):
        return [process for process in self.processes() if "spawn_main" in " ".join(sockets.command(process))]

    def commands(self):
        """Return every command that it was told, and what of Dask's configuration stood in it."""
        text = self.log.read_text()
        encoded = re.findall(r'DASK_INTERNAL_INHERIT_CONFIG="([\w=-]+)"', text)
        return text, [base64.urlsafe_b64decode(one).decode() for one in encoded]

    def folders(self):
        """Return where keys were put."""
        return {Path(found) for found in re.findall(r"/tmp/dkfm-\w+", self.log.read_text())}


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    with Sshd(tmp_path_factory.mktemp("sshd")).running() as running:
        yield running


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return harness.Job.made(tmp_path_factory.mktemp("ssh"), rows=1_500, chunk_rows=30)


@pytest.fixture
def home(sshd, monkeypatch):
    """This process, with the home that knows the server."""
    for name, value in sshd.environment().items():
        monkeypatch.setenv(name, value)
    sshd.log.unlink(missing_ok=True)
    yield sshd
    assert not any(folder.exists() for folder in (sshd.folders() if sshd.log.exists() else ()))


@contextmanager
def scoring(sshd, job, target, *lines):
    """A driver, and what its cluster started, at the time of the first chunk."""
    sshd.log.unlink(missing_ok=True)
    command = job.command(target, "--scheduler", f"ssh:{sshd.hosts(*lines)}")
    log = target.with_suffix(".log")
    with harness.process(
        command, log, env=harness.environment(**sshd.environment()), stdin=subprocess.DEVNULL
    ) as driver:
        job.wait_for_a_chunk(target, driver)
        assert driver.poll() is None, log.read_text()
        yield driver
    assert "Traceback" not in log.read_text()


def test_the_smoke_job_loses_nothing_when_a_worker_is_killed(sshd, job, tmp_path):
    target, here = tmp_path / "out", f"127.0.0.1:{sshd.port}"
    lines = ("# the scheduler, then workers", here, f"{here} python={sys.executable}", "alias  # of the configuration")
    with scoring(sshd, job, target, *lines) as driver:
        workers = sshd.workers()
        workers[0].suspend()  # what it has begun keeps the job from its end
        assert len(workers) == 2
        running = [*sshd.processes(), *sockets.family(driver.pid)]
        assert sockets.listening([psutil.Process(sshd.process.pid), *running]) == LOOPBACK
        assert not [process for process in psutil.process_iter() if b"PRIVATE KEY" in sockets.decoded(process)]
        (folder,) = sshd.folders()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [(file.name, stat.S_IMODE(file.stat().st_mode)) for file in folder.iterdir()] == [("dask.pem", 0o600)]
        assert "PRIVATE KEY" in (folder / "dask.pem").read_text()
        workers[0].kill()
        assert driver.wait(harness.LIMIT) == 0
        assert not psutil.wait_procs([process for process in running if process.pid != driver.pid], 30)[1]
    assert "1,500 rows" in target.with_suffix(".log").read_text()
    job.settle(target)
    # The server noted every command whole, also those that were there too shortly to be seen.
    text, configurations = sshd.commands()
    assert len(configurations) == 3
    assert all(json.loads(found)["distributed"]["comm"]["require-encryption"] for found in configurations)
    assert "PRIVATE KEY" not in text + "".join(configurations)
    assert not folder.exists()
    assert not list(sshd.scratch.glob("dask-scratch-space/worker-*"))


def test_a_killed_driver_takes_its_cluster_and_its_key_with_it(sshd, job, tmp_path):
    target = tmp_path / "out"
    with scoring(sshd, job, target) as driver:
        (folder,) = sshd.folders()
        assert folder.exists()
        assert sshd.workers()
        running = sshd.processes()  # what outlives its connection is no longer the server's child
        driver.kill()
        _, left = psutil.wait_procs(running, 60)
        for process in left:
            process.kill()
        assert not left
        assert not folder.exists()


def _python(folder, text):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"python={path}"


def _told(spec):
    """Return the sentence with which a cluster did not start."""
    with pytest.raises(ClusterError) as told, ssh_cluster(spec):
        pass
    return str(told.value)


def test_a_host_that_does_not_answer_is_named(home):
    there, port = f"127.0.0.1:{home.port}", sockets.free_port()
    told = _told(home.hosts(there, f"127.0.0.1:{port}"))
    assert told.startswith(f"127.0.0.1:{port} cannot be reached over SSH: [Errno 111] ")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patch:
        patch.setattr("dkfm.execution.clusters.ssh._STEP_TIMEOUT", 2)
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        assert _told(home.hosts(mute)).startswith(f"{mute} has not answered over SSH for 2 seconds")


def test_a_refused_key_and_an_unknown_host_are_named(home):
    configuration = home.home / ".ssh" / "config"
    text = configuration.read_text()
    here = home.hosts(f"127.0.0.1:{home.port}")
    try:
        configuration.write_text(text.replace("IdentityFile", f"IdentityFile {home.folder}/other_key\n#"))
        assert _told(here).startswith(f"127.0.0.1:{home.port} takes none of your keys")
        (home.folder / "empty").touch()
        configuration.write_text(text.replace("UserKnownHostsFile", f"UserKnownHostsFile {home.folder}/empty\n#"))
        assert _told(here).startswith(f"The host key of 127.0.0.1:{home.port} is not")
    finally:
        configuration.write_text(text)


def test_a_host_whose_python_lacks_dask_is_named(home, tmp_path):
    bare = _python(tmp_path, f'exec {sys.executable} -I -S "$@"')
    told = _told(home.hosts(f"127.0.0.1:{home.port}", f"alias {bare}"))
    assert re.fullmatch(r".*/python on alias cannot import .*No module named 'distributed'.*; install dkfm .*", told)
    assert "on alias cannot import" in _told(home.hosts("alias python=/no/such/python"))


@pytest.mark.parametrize("what", ["The scheduler", "The worker"])
def test_a_host_that_does_not_start_its_part_is_named(what, home, tmp_path):
    broken = "alias " + _python(tmp_path, '[ "$1" = -c ]')
    told = _told(home.hosts(*([broken] if what == "The scheduler" else [f"127.0.0.1:{home.port}", broken])))
    assert re.fullmatch(rf"{what}.* did not start on alias \(.*\)\.", told)
    harness.wait_for(lambda: not home.processes(), "the end of what was started")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no host"),
        ("# nothing\n\n", "names no host"),
        ("one\ntwo three\n", r"Line 2 of .* is 'two three'; expected \[user@\]host\[:port\]"),
        ("one:0\n", "Line 1 of .* is 'one:0'"),
        ("one:65536\n", "Line 1"),
        ("a@b@c\n", "Line 1"),
        ("one; rm\n", "Line 1"),
        ("-oProxyCommand=x\n", "Line 1"),
        ("one python=relative\n", "Line 1"),
        ("one\ntwo\n\ntwo # again\n", "Line 4 of .* is a second worker on two"),
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe", "cannot be read: it is not text"),
    ],
)
def test_a_file_that_names_no_hosts_is_refused_in_a_sentence(text, sentence, tmp_path):
    path = tmp_path / "hosts"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInputError, match=sentence), ssh_cluster(str(path)):
        pass


@pytest.mark.parametrize("package", ["asyncssh", "cryptography"])
def test_without_its_packages_the_extra_is_named(package, tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("one\n")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"dkfm\[ssh\]"), ssh_cluster(str(tmp_path / "hosts")):
        pass


def test_the_hosts_of_the_folder_are_understood():
    hosts = Path(__file__).parents[2] / "cluster" / "ssh" / "hosts"
    assert len(_read_hosts(str(hosts))) >= 3
