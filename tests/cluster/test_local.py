"""A scheduler and workers of one machine: the commands, units and containers of cluster/local."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from dask.utils import parse_bytes

import dkfm
from cluster import sockets
from helpers import harness

LOCAL = Path(__file__).parents[2] / "cluster" / "local"
COMMANDS = re.findall(r"^    (.*)$", (LOCAL / "README.md").read_text().partition("## As services")[0], re.M)
UNITS = {path.stem: path for path in LOCAL.glob("*.service")}
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return harness.Job.made(tmp_path_factory.mktemp("job"), rows=1_500, chunk_rows=30)


class Site:
    """What a reader who types the commands of the README has, on ports that are free here."""

    def __init__(self, folder):
        self.folder, self._stack = folder, ExitStack()
        self._ports = {"8786": str(sockets.free_port()), "8787": str(sockets.free_port())}
        self.address = f"tcp://127.0.0.1:{self._ports['8786']}"

    def written(self, command):
        return re.sub(r"\b878[67]\b", lambda found: self._ports[found[0]], command)

    def __enter__(self):
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        self.environment = harness.environment(PATH=path, PYTHONPATH=str(Path(dkfm.__file__).parent.parent))
        self.started = [self._start(command) for command in COMMANDS[:2]]
        log = self.folder / "1.log"
        harness.wait_for(lambda: "Registered to" in log.read_text(), "the worker")
        return self

    def __exit__(self, *error):
        self._stack.close()

    def _start(self, command):
        number = 0 if " scheduler " in command else 1
        return self._stack.enter_context(
            harness.process(
                ["sh", "-c", self.written(command)],
                self.folder / f"{number}.log",
                cwd=self.folder,
                env=self.environment,
            )
        )

    def run(self, command):
        done = subprocess.run(
            ["sh", "-c", self.written(command)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=harness.LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def processes(self):
        return [process for started in self.started for process in sockets.family(started.pid)]

    def workers(self):
        return [process for process in self.processes() if "spawn_main" in " ".join(sockets.command(process))]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with Site(tmp_path_factory.mktemp("local")) as running:
        yield running


def test_the_commands_of_the_readme_run_as_they_are_written(site):
    scheduler, worker, *smoke = COMMANDS
    assert scheduler.startswith("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=10 dask scheduler ")
    assert worker.startswith("dask worker ")
    assert [command.split()[:2] for command in smoke][1:] == [["dkfm", what] for what in ("fit", "score", "verify")]
    for command in smoke:
        told = site.run(command)
    assert "5,000" in told
    assert sockets.listening(site.processes()) == {"127.0.0.1"}


def test_a_killed_worker_loses_nothing(site, job, tmp_path):
    target, log = tmp_path / "out", tmp_path / "log"
    with harness.process(job.command(target, "--scheduler", site.address), log) as driver:
        job.wait_for_a_chunk(target, driver)
        (worker,) = site.workers()
        worker.suspend()  # what it has begun keeps the job from its end
        assert driver.poll() is None, log.read_text()
        worker.kill()
        assert driver.wait(harness.LIMIT) == 0, log.read_text()
    job.settle(target)
    assert [found.pid for found in site.workers()] != [worker.pid]


def test_the_scheduler_forgives_as_many_failures_as_the_readme_says(site):
    from distributed import Client

    def allowed(dask_scheduler):
        return dask_scheduler.allowed_failures

    with Client(site.address, timeout=20) as client:
        assert client.run_on_scheduler(allowed) == 10


def _words(unit):
    """Return the command of a unit, and the variables before it."""
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str
    parser.read(UNITS[unit])
    service = dict(parser["Service"])
    return shlex.split(service["ExecStart"]), service


@pytest.mark.parametrize("name", ["scheduler", "worker"])
def test_units_start_what_the_readme_starts(name):
    words, service = _words(f"dask-{name}")
    assert words[:2] == ["%h/dkfm/.venv/bin/dask", name]
    manual = shlex.split(next(command for command in COMMANDS if f"dask {name} " in command))
    options = [dict(re.findall(r"(--[\w-]+) (\S+)", " ".join(command))) for command in (words, manual)]
    assert options[0].keys() == options[1].keys()
    mine = {"--nthreads", "--local-directory"}
    assert [option for option in options[0] if options[0][option] != options[1][option] and option not in mine] == []
    there = harness.run([sys.executable, "-m", f"distributed.cli.dask_{name}", "--help"])
    assert not [option for option in options[0] if not re.search(rf"{option}\b", there)]
    assert re.fullmatch(r"\d+G", service["MemoryMax"])
    if name == "worker":
        assert parse_bytes(options[0]["--memory-limit"]) < int(service["MemoryMax"][:-1]) * 2**30
    else:
        assert service["Environment"] == manual[0]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="Other tests read the units without it.")
def test_systemd_understands_the_units(tmp_path):
    for unit in UNITS.values():
        (tmp_path / unit.name).write_text(unit.read_text().replace("%h/dkfm/.venv/bin", str(BIN)))
    units = [str(tmp_path / unit.name) for unit in UNITS.values()]
    assert len(units) == 2
    command = ["systemd-analyze", "--user", "verify", *units]
    environment = harness.environment(XDG_RUNTIME_DIR=str(tmp_path), HOME=str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_containers_are_pinned_bounded_and_published_on_loopback_alone():
    services = yaml.safe_load((LOCAL / "compose.yaml").read_text())["services"]
    assert set(services) == {"scheduler", "worker", "dkfm"}
    for name, service in services.items():
        assert re.fullmatch(r"[\w./-]+(:\d+\.\d+\.\d+[\w.-]*|@sha256:[0-9a-f]{64})", service["image"]), name
        assert [port for port in service.get("ports", []) if not port.startswith("127.0.0.1:")] == []
        assert re.fullmatch(r"\d+g", service["mem_limit"])
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert not {"network_mode", "privileged", "devices"} & set(service)
        assert service["user"] != "0:0"
        assert service["image"] == f"dkfm:{dkfm.__version__}"
    build = services["scheduler"]["build"]
    assert (LOCAL / build["context"]).resolve() == LOCAL.parents[1]
    limit = services["worker"]["command"][services["worker"]["command"].index("--memory-limit") + 1]
    assert parse_bytes(limit) < int(services["worker"]["mem_limit"][:-1]) * 2**30
    for name in ("scheduler", "worker"):
        there = harness.run([sys.executable, "-m", f"distributed.cli.dask_{name}", "--help"])
        options = [word for word in services[name]["command"] if word.startswith("--")]
        assert not [option for option in options if not re.search(rf"{option}\b", there)]
