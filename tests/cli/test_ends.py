"""Every command ends in one sentence: whatever its streams, the system, a strange port or Ctrl-C do."""

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import dkfm
from dkfm.cli import fit, process
from dkfm.cli.app import main
from dkfm.cli.process import _format_warning
from dkfm.core.display.terminal_output import escape_control_characters, print_message, print_result
from dkfm.errors import ClusterError, DkfmWarning, OutputError, SchedulerNameError, StoreError
from dkfm.execution.clusters.connect import connect

HOSTILE = "a\x1b[2Jb\nc\u202ed\udcffe.npy"
COMMAND = [sys.executable, "-m", "dkfm"]


@pytest.fixture
def here(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    np.save("train.npy", rng.normal(size=(40, 3)))
    dkfm.KernelPCA(2, kernel=dkfm.kernels.Linear()).fit(np.load("train.npy")).save("model")
    return tmp_path


@pytest.fixture
def run(here):
    """Run a command whose words have passed through a shell, which hands on bytes in any locale."""

    def ended(*words):
        return CliRunner().invoke(main, [os.fsdecode(word.encode("utf-8", "surrogateescape")) for word in words])

    return ended


@pytest.fixture
def as_program(here, monkeypatch, capfd):
    """Run a command as the whole of this process; the exit code, standard output and standard error come back."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.delenv("DKFM_TRACEBACK", raising=False)

    def ended(command):
        with pytest.raises(SystemExit) as info:
            process.run_command(command)
        return info.value.code, *capfd.readouterr()

    yield ended
    for number, handler in signals.items():
        signal.signal(number, handler)
    gc.unfreeze()  # a command freezes what it imported


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\nc", r"a\u001b[2Jb\nc"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\udcff", r"\udcff"),
        ("\x9b31m", r"\u009b31m"),
        ("\U000e0041", r"\udb40\udc41"),
        ("größe κ", "größe κ"),
    ],
)
def test_what_a_terminal_would_act_on_is_escaped(text, shown):
    assert escape_control_characters(text) == shown


def test_escaped_json_is_the_same_json():
    text = json.dumps({"path": HOSTILE + "\x7f"})
    assert json.loads(escape_control_characters(text)) == json.loads(text)


@pytest.mark.parametrize(
    "line",
    [
        ("info", HOSTILE),
        ("verify", HOSTILE),
        ("score", "model", HOSTILE, "out.zarr"),
        ("score", HOSTILE, "train.npy", "out.zarr"),
        ("fit", HOSTILE, "other", "--kernel", "linear"),
        ("fit", "train.npy", "other", "--kernel", HOSTILE),
        ("fit", "train.npy", "other", "--kernel", "linear", "--scheduler", f"{HOSTILE}.json"),
        ("compare", "train.npy", "--labels", HOSTILE, "--kernel", "linear"),
    ],
    ids=lambda line: line[0],
)
def test_hostile_names_are_escaped_in_errors(run, line):
    result = run(*line)
    assert result.exit_code == (3 if "--scheduler" in line else 1)
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.endswith("\n")
    assert result.stderr.removesuffix("\n").isprintable()
    assert "1b[2J" in result.stderr


def test_hostile_names_are_escaped_in_results_and_in_usage(run):
    name = HOSTILE.replace("\udcff", "") + ".model"
    fitted = run("fit", "train.npy", name, "--kernel", "linear", "--components", "2")
    scored = run("score", name, "train.npy", "out\x1b[2J.zarr")
    described, checked = run("info", name), run("verify", name)
    for result in (fitted, scored, described, checked):
        assert result.exit_code == 0, result.output
        assert all(line.isprintable() for line in result.stdout.removesuffix("\n").split("\n"))
        assert r"\u001b[2J" in result.stdout
    for line in ((HOSTILE,), ("fit", f"--{HOSTILE}"), (f"--{HOSTILE}",)):
        wrong = run(*line)
        assert wrong.exit_code == 2
        assert "\x1b" not in wrong.stderr
        assert "1b[2J" in wrong.stderr


def test_a_warning_of_a_command_is_escaped():
    shown = _format_warning(f"{HOSTILE} is strange", DkfmWarning, "file", 1)
    assert shown == "DkfmWarning: a\\u001b[2Jb\\nc\\u202ed\\udcffe.npy is strange\n"


def test_a_terminal_that_knows_few_characters_gets_the_others_escaped(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        print_result("größe")
    assert (tmp_path / "out").read_text() == "gr\\xf6\\xdfe\n"


def test_output_that_is_not_taken_is_an_error_and_messages_are_not(monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        with pytest.raises(OutputError, match="No space left on device"):
            print_result("lost")
        print_message("lost")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="it is closed"):
        print_result("lost")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "code", "words"),
    [
        (">/dev/full", 1, "OutputError: Standard output cannot be written: No space left on device."),
        (">&-", 1, "OutputError: Standard output cannot be written: Bad file descriptor."),
        ("2>&-", 0, ""),
        (">&- 2>&- <&-", 1, ""),
    ],
)
def test_streams_that_are_full_or_closed_end_a_command_in_a_sentence(here, streams, code, words):
    line = f"'{sys.executable}' -m dkfm score model train.npy s.zarr {streams}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, check=False, text=True)
    messages = [line for line in ended.stderr.splitlines() if " INFO " not in line]  # --quiet would print no summary
    assert (ended.returncode, "\n".join(messages)) == (code, words)
    assert dkfm.open_scores("s.zarr").shape == (40, 2)


@pytest.mark.slow
def test_a_reader_that_goes_ends_a_command_in_a_sentence(here):
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([*COMMAND, "info", "model"], stdout=writing, stderr=subprocess.PIPE, check=False, text=True)
    os.close(writing)
    assert ended.returncode == 1
    assert ended.stderr == "OutputError: Standard output cannot be written: Broken pipe.\n"


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [500, 560, 600, 700])
def test_little_memory_is_a_sentence(here, megabytes):
    def little():
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20,) * 2)

    line = [*COMMAND, "fit", "train.npy", "other", "--kernel", "linear", "--quiet"]
    ended = subprocess.run(line, capture_output=True, check=False, text=True, preexec_fn=little)
    assert ended.returncode == 1
    assert ended.stderr.startswith(("ResourceError: The system gave no more ", "BudgetError: The root of N = "))
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(24, "Too many open files", "x\x1b"),
            r"ResourceError: The system refused x\u001b: Too many open files.",
        ),
        (MemoryError("Unable to allocate 3 TiB"), "ResourceError: The system gave no more memory (Unable to allocate"),
        (RuntimeError("can't start new thread"), "ResourceError: The system gave no more threads; raise"),
        (
            ImportError("x: failed to map segment"),
            "ResourceError: The system gave no more memory",
        ),
        (
            SystemError("error return without exception set"),
            "ResourceError: The system gave no more memory",
        ),
        (SystemError("unknown opcode"), "SystemError: unknown opcode (test_ends.py, line "),
        (ZeroDivisionError("two\nlines"), "ZeroDivisionError: two (test_ends.py, line "),
    ],
)
def test_what_no_command_expects_is_a_sentence(as_program, error, words):
    def command():
        raise error

    code, out, err = as_program(command)
    assert (code, out) == (1, "")
    assert err.startswith(words)
    assert err.count("\n") == 1


def test_an_error_that_libraries_made_of_a_lack_of_memory_is_told_as_that(as_program):
    def command():
        try:
            raise MemoryError
        except MemoryError:
            raise SystemError("error return without exception set")  # noqa: B904  # as numba does

    assert "gave no more memory" in as_program(command)[2]


def test_many_interruptions_are_one_and_let_the_end_end(as_program):
    steps = []

    def command():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            for step in range(12):
                signal.raise_signal(signal.SIGINT)
                steps.append(step)

    assert as_program(command) == (130, "", "Interrupted.\n")
    assert steps == list(range(12))


def test_an_interruption_in_a_destructor_is_not_lost(as_program):
    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def command():
        Interrupted()
        threading.Event().wait(60)

    assert as_program(command) == (130, "", "Interrupted.\n")


@pytest.mark.slow
def test_an_interrupted_job_says_how_to_go_on_and_goes_on(here, rng):
    np.save("rows.npy", rng.normal(size=(200_000, 3)))
    line = [*COMMAND, "score", "model", "rows.npy", "s.zarr", "--chunk-rows", "500", "--quiet"]
    driver = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while len(list(here.glob("s.zarr/scores/c/*/[0-9]*"))) < 40:  # more than are under way at once
        assert driver.poll() is None
    for _ in range(12):
        driver.send_signal(signal.SIGINT)
    _, err = driver.communicate(timeout=60)
    assert err == "Interrupted; dkfm score goes on from there with the same command.\n"
    assert driver.returncode == 130
    report = dkfm.batch_score("model", "rows.npy", "s.zarr", chunk_rows=500)
    assert report.rows == 200_000
    assert report.scored_chunks < report.chunks


@pytest.mark.parametrize(
    ("options", "clause"),
    [
        ("", ""),
        ("--workspace w", "; dkfm fit goes on with the same command, from what --workspace has"),
        ("--workspace=w", "; dkfm fit goes on with the same command, from what --workspace has"),
    ],
)
def test_an_interrupted_fit_says_how_to_go_on(here, monkeypatch, options, clause):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "run_fit", interrupt)
    result = CliRunner().invoke(main, f"fit train.npy m --kernel linear {options}".split())
    assert (result.exit_code, result.stderr) == (130, f"Interrupted{clause}.\n")


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000 + "z", "a\0b"], ids=["long", "deep", "NUL"])
@pytest.mark.parametrize(
    "use",
    [
        dkfm.load,
        dkfm.open_scores,
        lambda name: dkfm.batch_score("model", "train.npy", name),
        lambda name: dkfm.batch_score("model", "train.npy", f"{name}.parquet"),
        lambda name: dkfm.batch_score("model", name, "s.zarr"),
        lambda name: dkfm.batch_score(name, "train.npy", "s.zarr"),
        lambda name: dkfm.load("model").save(name),
        lambda name: dkfm.KernelPCA(1, kernel=dkfm.kernels.Linear(), workspace=name, tile_rows=9).fit(np.eye(20)),
    ],
    ids=["load", "open", "output", "table", "input", "model", "save", "workspace"],
)
def test_names_that_no_file_can_have_are_refused_by_name(here, name, use):
    with pytest.raises(StoreError, match="cannot be used: "):
        use(name)


@pytest.mark.parametrize("name", ["x" * 300, "slurm", "dask", "local"])
def test_a_name_without_a_port_that_is_no_file_is_refused_with_the_forms(name):
    with pytest.raises(SchedulerNameError, match="names no scheduler; the forms are host:port, tcp://"), connect(name):
        pass


def _answer(listener, words):
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:
            return
        with caller:
            caller.sendall(words)
            caller.recv(1)


@pytest.mark.parametrize(
    "words",
    [
        b"SSH-2.0-Open\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(64),
        (1).to_bytes(8, "little") + bytes(9),
    ],
    ids=["SSH", "HTTP", "zeros", "short"],
)
def test_a_port_of_another_server_is_a_sentence(words):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer, args=(listener, words), daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ClusterError, match="does not answer as a scheduler does"), connect(address):
            pass
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_a_scheduler_file_that_is_nested_deeply_is_refused(tmp_path):
    path = tmp_path / "scheduler.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ClusterError, match="is not the file of a running scheduler"), connect(str(path)):
        pass
