"""Encrypted connections with certificates of the script: who has one of them gets in, and nobody else."""

import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import sockets
from cluster.needs import needs
from helpers import harness

needs("openssl")


TLS = Path(__file__).parents[2] / "cluster" / "tls"


def make(folder, *options, code=0):
    return harness.run(["sh", str(TLS / "make-certificates.sh"), str(folder), *options], code)


def configured(path, folder, **others):
    """Write the configuration of the recipe for certificates of a folder, some files from another one."""
    text = (TLS / "tls.yaml").read_text()
    for name, other in others.items():
        text = text.replace(f"certificates/{name}", f"{other}/{name}")
    path.write_text(text.replace(" certificates/", f" {folder}/"))
    return {"DASK_CONFIG": str(path)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "theirs"):
        make(folder / name, "2")
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return harness.Job.made(tmp_path_factory.mktemp("job"), rows=600, chunk_rows=100)


@pytest.fixture(scope="module")
def address(folder):
    """The address of a scheduler that requires certificates, with a worker."""
    environment = harness.environment(**configured(folder / "ours.yaml", folder / "ours"))
    address = f"tls://127.0.0.1:{sockets.free_port()}"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", address]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--host", "127.0.0.1", "--nthreads", "1"]
    worker += ["--protocol", "tls", "--memory-limit", "1GB", "--local-directory", str(folder / "scratch")]
    page = ["--dashboard-address", "127.0.0.1:0"]
    with (
        harness.process([*command, *page], folder / "scheduler.log", env=environment) as scheduler,
        harness.process([*worker, *page], folder / "worker.log", env=environment) as started,
    ):
        log = folder / "worker.log"
        harness.wait_for(lambda: "Registered to" in log.read_text(), "the worker")
        running = [*sockets.family(scheduler.pid), *sockets.family(started.pid)]
        assert sockets.listening(running) == {"127.0.0.1"}
        yield address


def score(job, target, address, environment, code=0):
    """Run the smoke job; return what it printed, and how long it took."""
    command, before = job.command(target, "--scheduler", address), time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, env=harness.environment(**environment)
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr, time.monotonic() - before


def test_the_right_certificate_gets_in_and_the_smoke_job_runs(address, job, folder, tmp_path):
    told, _ = score(job, tmp_path / "out", address, configured(tmp_path / "ours.yaml", folder / "ours"))
    assert "600 rows" in told
    job.settle(tmp_path / "out")


@pytest.mark.parametrize(
    "who", ["a foreign certificate", "a foreign authority", "no certificate", "plain TCP", "plain TCP, certified"]
)
def test_nobody_else_gets_in_and_each_is_told_so_in_a_sentence(who, address, job, folder, tmp_path):
    ours, theirs = folder / "ours", folder / "theirs"
    given = {
        "a foreign certificate": {"client": theirs},  # and the right authority: it is the scheduler that refuses
        "a foreign authority": {"client": theirs, "ca": theirs},
        "plain TCP, certified": {},
    }
    environment = configured(tmp_path / "tls.yaml", ours, **given[who]) if who in given else {}
    asked = address.replace("tls://", "tcp://") if who.startswith("plain") else address
    told, seconds = score(job, tmp_path / "out", asked, environment, code=3)
    assert harness.sentence(told).startswith(f"ClusterError: There is no scheduler at {asked} that takes us: ")
    assert seconds < 60
    assert not (tmp_path / "out").exists()


def _handshake(address, folder, name):
    """Return what a TLS connection with this certificate comes to, up to the first byte."""
    host, port = address.removeprefix("tls://").split(":")
    context = ssl.create_default_context(cafile=str(folder / "ours" / "ca.pem"))
    context.check_hostname = False
    if name:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain) as secure:
        return secure.recv(1)


def test_the_scheduler_ends_the_handshake_of_whom_it_does_not_know(address, folder):
    assert _handshake(address, folder, "ours/client")
    for name in (None, "theirs/client"):
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            _handshake(address, folder, name)


def test_the_script_makes_keys_for_their_owner_alone_and_overwrites_nothing(folder, tmp_path):
    ours = folder / "ours"
    roles = ("ca", "scheduler", "worker", "client")
    assert {path.name for path in ours.iterdir()} == {f"{role}.{kind}" for role in roles for kind in ("pem", "key")}
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in ours.iterdir()} == {0o600}
    before = {path: path.read_bytes() for path in ours.iterdir()}
    assert "is there already" in make(ours, code=1)
    assert {path: path.read_bytes() for path in ours.iterdir()} == before
    assert make(tmp_path / "made", "no number of days", code=1)
    assert not list(tmp_path.iterdir())


def test_each_certificate_is_of_one_use_and_of_so_many_days(folder):
    ours = folder / "ours"
    uses = {"scheduler": "sslserver", "worker": "sslserver", "client": "sslclient"}
    for role, use in uses.items():
        check = ["openssl", "verify", "-x509_strict", "-CAfile", str(ours / "ca.pem"), "-purpose", use]
        harness.run([*check, str(ours / f"{role}.pem")])
        lives = ["openssl", "x509", "-noout", "-in", str(ours / f"{role}.pem"), "-checkend"]
        harness.run([*lives, str(2 * 86_400 - 600)])
        harness.run([*lives, str(2 * 86_400 + 600)], code=1)
    refused = ["openssl", "verify", "-CAfile", str(ours / "ca.pem"), "-purpose", "sslserver", str(ours / "client.pem")]
    assert subprocess.run(refused, check=False, capture_output=True).returncode != 0
