"""What `--scheduler` takes, what it refuses in one sentence, and how long a command waits for the first worker."""

import logging
import sys
import warnings

import pytest
from click.testing import CliRunner
from distributed import Client

from dkfm.cli.app import main
from dkfm.cli.process import _format_warning
from dkfm.errors import ClusterError, DkfmWarning, SchedulerNameError
from dkfm.execution import memory
from dkfm.execution.clusters import current_client
from dkfm.execution.clusters.connect import _warn_of_open_port, connect
from helpers.recorded import drop_resource_warnings


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        ("tcp://10.0.0.1:8786", True),
        ("tcp://head:8786", True),
        ("tcp://[2001:db8::1]:8786", True),
        ("tcp://127.0.0.1:8786", False),
        ("tcp://localhost:8786", False),
        ("tcp://[::1]:8786", False),
        ("tls://10.0.0.1:8786", False),
    ],
)
def test_a_plain_port_that_others_reach_brings_a_warning(address, warned):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _warn_of_open_port(address)
    assert [
        f"Whoever reaches {address} can run code there" in str(one.message) for one in drop_resource_warnings(told)
    ] == [True] * warned


def test_a_warning_of_a_command_is_one_line():
    assert _format_warning(DkfmWarning("Look."), DkfmWarning, "cli.py", 7) == "DkfmWarning: Look.\n"


def test_a_scheduler_file_leads_to_its_scheduler(client, tmp_path):

    (tmp_path / "scheduler.json").write_text(f'{{"address": "{client.scheduler.address}"}}')
    with connect(str(tmp_path / "scheduler.json"), set_as_default=False) as found:
        assert found.submit(int, "7").result() == 7


def test_a_lost_scheduler_leaves_no_traceback_in_the_log(client):
    """A message is on its way as the connection breaks."""
    from distributed.batched import logger

    told = []
    handler = logging.Handler()
    handler.emit = told.append
    logger.addHandler(handler)
    try:
        with connect(client.scheduler.address, set_as_default=False) as found:
            stream = found.scheduler_comm

            async def lose():
                stream.send({"op": "heartbeat-client"})
                stream.comm.abort()
                await stream.stopped.wait()

            found.sync(lose)
    finally:
        logger.removeHandler(handler)
    assert told == []


FORMS = "host:port, tcp://host:port, tls://host:port, the path of a scheduler file, slurm:FILE"


@pytest.mark.parametrize(
    "spec", ["k8s:foo", "kubernetes:x", "host:port", "slrm:dkfm.yaml", "ssh:", "slurm:", "", ":", "tcp://", "tls:// "]
)
def test_a_scheduler_that_has_none_of_the_forms_is_told_them(spec):
    with pytest.raises(SchedulerNameError, match=rf"{FORMS} and ssh:HOSTS\.$"), connect(spec):
        pass
    result = CliRunner().invoke(main, ["score", "m", "i", "o", "--scheduler", spec])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("SchedulerNameError: ")


@pytest.mark.parametrize("command", ["score", "fit"])
def test_the_help_has_every_form_of_a_scheduler(command):
    text = " ".join(CliRunner().invoke(main, [command, "--help"]).output.split())
    for form in (*FORMS.split(", "), "ssh:HOSTS", "--wait-for-workers SECONDS"):
        assert form in text, form


@pytest.fixture
def scheduler_alone():
    """Return the address of a scheduler without workers."""
    from distributed import LocalCluster

    place = {"protocol": "tcp", "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=0, processes=False, **place) as cluster:
        yield cluster


@pytest.mark.costly
@pytest.mark.parametrize("line", ["score m i o", "bench --quick"])
def test_a_cluster_without_workers_is_told_of_and_waited_for_as_long_as_asked_for(scheduler_alone, monkeypatch, line):
    monkeypatch.setattr(current_client, "_MESSAGE_AFTER", 0.2)
    address = scheduler_alone.scheduler_address
    result = CliRunner().invoke(main, [*line.split(), "--scheduler", address, "--wait-for-workers", "0.5"])
    assert result.exit_code == 3
    message, sentence = result.stderr.splitlines()
    assert message == f"Waiting for a worker of {address}, 0.5 seconds at most."
    assert sentence.startswith(f"ClusterError: No worker of {address} has come in 0.5 seconds; start one, or wait")


def test_a_worker_that_comes_while_the_command_waits_is_used(scheduler_alone, monkeypatch, capsys):
    monkeypatch.setattr(current_client, "_MESSAGE_AFTER", 0.0)
    started = []

    def start_a_worker(message):
        started.append(message)
        scheduler_alone.scale(1)

    monkeypatch.setattr(current_client, "print_message", start_a_worker)
    with connect(scheduler_alone.scheduler_address, set_as_default=False, wait_for_workers=60) as found:
        assert found.submit(int, "7").result() == 7
    assert started == [f"Waiting for a worker of {scheduler_alone.scheduler_address}, 60 seconds at most."]


def test_a_task_budget_waits_for_a_worker_where_all_were_killed(scheduler_alone, monkeypatch, capsys):
    monkeypatch.setattr(current_client, "_MESSAGE_AFTER", 0.0)
    monkeypatch.setattr(current_client, "print_message", lambda message: scheduler_alone.scale(1))
    with Client(scheduler_alone.scheduler_address, set_as_default=False) as client:
        assert current_client.fetch_workers(client) == {}
        assert memory.task_budget(client, threads=1) > 0


def test_the_message_comes_within_five_seconds():
    assert current_client._MESSAGE_AFTER < 5


@pytest.mark.parametrize("line", ["score m i o", "fit i m --kernel linear", "bench"])
def test_there_is_no_waiting_without_a_scheduler(line):
    result = CliRunner().invoke(main, [*line.split(), "--wait-for-workers", "5"])
    assert result.exit_code == 2
    assert "--wait-for-workers belongs to --scheduler." in result.stderr


@pytest.mark.costly
@pytest.mark.parametrize("spec", ["[::1]:1", "127.0.0.1:1", "localhost:1", "nowhere.invalid:1"])
def test_a_host_with_a_port_is_an_address(spec, monkeypatch):
    monkeypatch.setattr(sys.modules["dkfm.execution.clusters.connect"], "_ANSWER_TIMEOUT", 0.2)
    with pytest.raises(ClusterError, match="There is no scheduler at"), connect(spec):
        pass
