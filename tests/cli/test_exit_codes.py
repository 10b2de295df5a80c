"""The exit code of a command says whose fault it was, and with --json the failure is JSON too; with real failures."""

import importlib
import json
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import dkfm
from dkfm import errors
from dkfm.cli import failures
from dkfm.cli.app import main
from dkfm.errors import BudgetError, ClusterError, DkfmError, PartialOutputError, SchedulerNameError
from dkfm.scoring.planning import Plan
from helpers import harness

COMMAND = [sys.executable, "-m", "dkfm"]

KILLER = """\
import os, numpy as np

def kernel(X, Y):
    if (np.asarray(X)[:, 0] == 7.0).any() and os.path.exists(__file__ + ".armed"):
        os._exit(1)
    return np.asarray(X) @ np.asarray(Y).T
"""
"""A kernel that kills its worker at one row."""


@pytest.fixture
def here(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    np.save("train.npy", rng.normal(size=(40, 3)))
    dkfm.KernelPCA(2, kernel=dkfm.kernels.Linear()).fit(np.load("train.npy")).save("model")
    return tmp_path


@pytest.fixture
def run(here):
    return lambda line: CliRunner().invoke(main, line.split())


def check(code, stdout, stderr, expected, kind):
    """Check what a command with --json ended with."""
    facts = json.loads(stdout)
    assert (code, facts["exit_code"], facts["error"]) == (expected, expected, kind)
    assert facts["message"] in stderr
    assert len(facts) == 3


@pytest.fixture
def closed_address():
    """Return an address at which nobody listens, for as long as the test runs."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and never listens
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_what_is_done_ends_with_0_and_its_json_alone(run):
    assert run("info model --json").exit_code == 0
    result = run("score model train.npy out --json")
    assert (result.exit_code, json.loads(result.stdout)["rows"]) == (0, 40)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("score none train.npy out --json", "StoreError"),
        ("score model none out --json", "InvalidInputError"),
        ("score model nan.npy out -q --json", "InvalidInputError"),
        ("info none --json", "StoreError"),
        ("compare train.npy --labels none.npy --kernel linear --json", "InvalidInputError"),
    ],
)
def test_an_input_or_a_model_at_fault_ends_with_1(run, line, kind):
    np.save("nan.npy", np.array([[0.0, 1.0, 2.0], [0.0, np.nan, 2.0]]))
    result = run(line)
    check(result.exit_code, result.stdout, result.stderr, 1, kind)
    plain = run(line.removesuffix(" --json"))
    assert (plain.exit_code, plain.stdout, plain.stderr) == (1, "", result.stderr)


@pytest.mark.parametrize(
    "line",
    [
        "score model train.npy --json",
        "score model train.npy out --json --chunk-rows 0",
        "score --json model train.npy out --fly",
        "score model train.npy out --json --report page.html",
        "info --json",
        "bench --kernels --scheduler a --json",
        "--json",
        "fly --json",
    ],
)
def test_wrong_usage_ends_with_2(run, line):
    result = run(line)
    check(result.exit_code, result.stdout, result.stderr, 2, "UsageError")


def test_no_scheduler_ends_with_3(run, closed_address, monkeypatch):
    monkeypatch.setattr(importlib.import_module("dkfm.execution.clusters.connect"), "_ANSWER_TIMEOUT", 0.2)
    result = run(f"score model train.npy out --json --scheduler {closed_address}")
    check(result.exit_code, result.stdout, result.stderr, 3, "ClusterError")


@pytest.mark.slow
def test_a_chunk_that_kills_every_worker_ends_with_4_and_the_others_are_there(here, monkeypatch):
    site_folder = here / "site"
    site_folder.mkdir()
    (site_folder / "exit_killer.py").write_text(KILLER)
    monkeypatch.syspath_prepend(site_folder)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(site_folder), *sys.path]))
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "0")
    from exit_killer import kernel

    rows = np.random.default_rng(0).normal(size=(50, 3))
    rows[33, 0] = 7.0
    np.save("rows.npy", rows)
    dkfm.KernelPCA(1, kernel=dkfm.kernels.Function(kernel)).fit(rows[:20]).save("own")
    (site_folder / "exit_killer.py.armed").touch()
    with harness.Site(site_folder, workers=1) as site:
        command = [*COMMAND, "score", "own", "rows.npy", "out", "--json", "--chunk-rows", "10", "--no-progress"]
        command += ["--trusted", "exit_killer:kernel", "--scheduler", site.address]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=harness.LIMIT)
    check(ended.returncode, ended.stdout, ended.stderr, 4, "PartialOutputError")
    assert "the other 4 chunks are done" in ended.stderr
    assert sorted(int(path.parent.name) for path in here.glob("out/scores/c/*/0")) == [0, 1, 2, 4]


def test_a_job_that_is_interrupted_ends_with_130(here, rng):
    np.save("rows.npy", rng.normal(size=(200_000, 3)))
    line = [*COMMAND, "score", "model", "rows.npy", "out", "--chunk-rows", "500", "--json", "-q"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        harness.wait_for(lambda: list(here.glob("out/scores/c/*/0")) or driver.poll() is not None, "a chunk")
        driver.send_signal(signal.SIGINT)
        stdout, stderr = driver.communicate(timeout=60)
    check(driver.returncode, stdout, stderr, 130, "KeyboardInterrupt")
    assert stderr == "Interrupted; dkfm score goes on from there with the same command.\n"


def test_a_plan_that_is_refused_is_a_failure_alone_as_json_and_after_the_plan_as_text(run, monkeypatch):
    def refuse(plan):
        raise BudgetError("It does not fit.")

    monkeypatch.setattr(Plan, "require", refuse)
    result = run("score model train.npy out --dry-run --json")
    check(result.exit_code, result.stdout, result.stderr, 1, "BudgetError")
    assert "40 of 3 columns" in run("score model train.npy out --dry-run").stdout


@pytest.mark.slow
def test_what_no_command_expects_ends_with_1_and_is_json_too(here):
    code = "from dkfm.cli import app, inspection\ninspection.describe_store = lambda path: 1 / 0\napp.main()\n"
    ended = subprocess.run(
        [sys.executable, "-c", code, "info", "model", "--json"], capture_output=True, text=True, check=False
    )
    check(ended.returncode, ended.stdout, ended.stderr, 1, "ZeroDivisionError")


def test_a_word_after_two_dashes_asks_for_no_json(run):
    result = run("info -- --json")
    assert (result.exit_code, result.stdout) == (1, "")


def test_every_error_has_the_code_of_its_class():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DkfmError)]
    codes = {kind: failures.find_exit_code(kind) for kind in kinds}
    assert {kind for kind, code in codes.items() if code == 4} == {PartialOutputError}
    assert {kind for kind, code in codes.items() if code == 2} == {SchedulerNameError}
    assert {kind for kind, code in codes.items() if code in (2, 3, 4)} == {
        kind for kind in kinds if issubclass(kind, ClusterError)
    }
    assert failures.find_exit_code(KeyboardInterrupt) == 130


def test_the_help_has_every_code():
    text = CliRunner().invoke(main, ["--help"]).output
    for code in (0, *(code for _, code in failures.EXIT_CODES)):
        assert f"\n    {code:<4d} " in text
