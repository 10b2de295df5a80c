"""Log lines of commands: on standard error, as text or JSON, more with -v, and none with -q."""

import json
import logging
import os
import re
import subprocess
import sys
from datetime import datetime

import numpy as np
import pytest
from click.testing import CliRunner

from dkfm.cli.app import main
from dkfm.execution import progress

COMMAND = "from dkfm.execution import progress; progress.HEARTBEAT_SECONDS = 0.0; from dkfm.cli.app import main; main()"
JOBS = [
    "fit rows.npy other --kernel gaussian:sigma=2 --tile-rows 20",
    "score model rows.npy other --chunk-rows 20",
    "verify scores --against rows.npy",
    "verify model",
]


@pytest.fixture
def run(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", rng.normal(size=(60, 3)))
    np.save("labels.npy", np.arange(60) % 2)
    runner = CliRunner()
    for line in ("fit rows.npy model --kernel gaussian -q", "score model rows.npy scores --chunk-rows 20 -q"):
        assert runner.invoke(main, line.split()).exit_code == 0
    return lambda line: runner.invoke(main, line.split())


@pytest.mark.parametrize("line", JOBS)
def test_quiet_commands_print_nothing_on_success(line, run):
    result = run(f"{line} -q")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def warn(option):
    """Return the standard error of a process that warns: pytest makes errors of warnings in this one."""
    line = f"fit rows.npy other --kernel gaussian --method features --landmarks uniform --n-landmarks 99 {option}"
    command = [sys.executable, "-m", "dkfm", *line.split()]
    return subprocess.run(command, capture_output=True, check=True, text=True).stderr


@pytest.mark.slow
def test_quiet_commands_still_print_results_warnings_and_errors(run):
    assert json.loads(run("score model rows.npy third -q --json").stdout)["rows"] == 60
    assert "gaussian" in run("compare rows.npy --labels labels.npy --kernel gaussian -q").stdout.lower()
    refused = run("score model nowhere.npy other -q")
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert warn("-q") == "DkfmWarning: n_landmarks is 99 and there are 60 rows, which are taken.\n"


@pytest.mark.costly
@pytest.mark.parametrize("line", JOBS[:3])
def test_more_lines_are_logged_with_verbose_and_each_has_a_time_a_level_and_a_stage(line, run):
    stderr = run(f"{line} -v").stderr
    levels = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (\w+) \w+: .+$", stderr, re.MULTILINE)
    assert len(levels) == stderr.count("\n")
    assert set(levels) == {"INFO", "DEBUG"}
    usual = run(f"{line.replace('other', 'third')}").stderr
    assert usual.count(" INFO ") == usual.count("\n") == levels.count("INFO")


def test_verbose_and_quiet_exclude_each_other(run):
    assert run("verify scores -v -q").exit_code == 2


@pytest.mark.parametrize(
    ("line", "stages"),
    [
        (JOBS[0], {"fit", "gram", "root"}),
        (JOBS[1], {"score"}),
        (JOBS[2], {"verify"}),
        ("compare rows.npy --labels labels.npy --kernel gaussian", {"compare", "fit", "gram", "root"}),
    ],
)
def test_json_lines_have_numbers_as_fields(line, stages, run):
    lines = [json.loads(text) for text in run(f"{line} --log-json").stderr.splitlines()]
    assert {one["stage"] for one in lines} == stages
    assert all(datetime.fromisoformat(one["time"]).utcoffset() is not None for one in lines)
    assert {one["level"] for one in lines} == {"INFO"}
    assert lines[0]["rows"] in (60, 45)


@pytest.mark.slow
def test_errors_and_warnings_are_json_too(run):
    (problem,) = [json.loads(text) for text in run("score model nowhere.npy other --log-json").stderr.splitlines()]
    assert (problem["level"], problem["stage"]) == ("ERROR", "dkfm")
    assert "nowhere.npy" in problem["message"]
    warned = [json.loads(text) for text in warn("--log-json").splitlines()]
    (warning,) = [one for one in warned if one["level"] == "WARNING"]
    assert warning["message"].startswith("DkfmWarning: n_landmarks is 99")


def test_the_logger_is_as_it_was_after_a_command(run):
    logger = logging.getLogger("dkfm")
    run("verify scores -v")
    run("score model nowhere.npy other --log-json")
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert logger.level == logging.NOTSET


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--log-json"], ["--no-progress"], ["-q"]])
def test_a_log_file_says_how_far_a_job_is(options, run, tmp_path):
    arguments = ["score", "model", "rows.npy", "other", "--chunk-rows", "2", *options]
    with (tmp_path / "job.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, stderr=log, check=False
        )
    assert done.returncode == 0
    lines = (tmp_path / "job.log").read_text().splitlines()
    if options == ["-q"]:
        assert lines == []
        return
    if options == ["--log-json"]:
        parsed = [json.loads(line) for line in lines]
        assert {(one["done"], one["total"], one.get("seconds_left")) for one in parsed[1:]} >= {(30, 30, 0.0)}
        assert parsed[0]["chunks"] == 30
        return
    assert " INFO score: " in lines[0]
    last = re.search(r" INFO score: 30 of 30 tasks, \S+ a second, about 0 s left$", "\n".join(lines))
    assert bool(last) == (not options)
    assert len(lines) >= (1 if options else 31)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--no-progress"]])
def test_the_log_of_a_verification_says_how_far_it_is(options, run):
    command = [sys.executable, "-c", COMMAND, "verify", "scores", *options]
    log = subprocess.run(command, capture_output=True, check=True, text=True).stderr
    assert (" INFO verify: 3 of 3 tasks" in log) == (not options)


@pytest.mark.parametrize("option", ["", "--no-progress"])
def test_the_log_of_a_fit_in_a_map_says_how_far_it_is(option, run, monkeypatch):
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.0)
    run("fit rows.npy map --method features --kernel gaussian -q")
    result = run(f"fit rows.npy pca --method pca --map map --components 2 {option}")
    assert result.exit_code == 0
    assert (" INFO moments: 2 of 2 tasks" in result.stderr) == (not option)


@pytest.mark.slow
def test_a_terminal_of_no_width_gets_lines_in_place_of_bars(run):
    """A pseudo-terminal has no width until somebody sets it, as under some schedulers."""
    leader, follower = os.openpty()
    try:
        arguments = ["score", "model", "rows.npy", "other", "--chunk-rows", "20"]
        environment = {**os.environ, "TERM": "xterm"}
        command = [sys.executable, "-c", COMMAND, *arguments]
        subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=environment, check=True)
        shown = os.read(leader, 10**6).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert " INFO score: 3 of 3 tasks" in shown
    assert "\x1b" not in shown
