"""Ends that are hard to reach: ignored, repeated and dropped signals, full disks, bugs that look like a lack."""

import errno
import fcntl
import gc
import json
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import dask.array as da
import pytest
from click.testing import CliRunner

import dkfm
from dkfm.cli import app, process
from dkfm.core.display.terminal_output import escape_control_characters
from dkfm.errors import StoreError
from dkfm.execution import lazy_scoring, worker_checks
from dkfm.execution.worker_checks import WorkerRequirements
from dkfm.files import temporary_folders
from dkfm.storage.output_files import LocalOutput
from helpers.harness import left


@pytest.fixture
def signals():
    numbers = signal.SIGINT, signal.SIGALRM, *temporary_folders._ENDING_SIGNALS
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    gc.unfreeze()  # a command freezes what it imported


@pytest.fixture
def as_program(signals, monkeypatch, capfd):
    """Run a command as the whole of this process; the exit code, standard output and standard error come back."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.delenv("DKFM_TRACEBACK", raising=False)

    def ended(command):
        with pytest.raises(SystemExit) as info:
            process.run_command(command)
        return info.value.code, *capfd.readouterr()

    return ended


def test_a_process_that_catches_the_exit_of_a_command_is_its_own_again(as_program):
    assert as_program(lambda: None)[0] == 0
    before = gc.get_freeze_count()
    CliRunner().invoke(app.main, ["info", "nothing"])
    assert gc.get_freeze_count() == before


def interrupt():
    signal.raise_signal(signal.SIGINT)


def open_records():
    """Return how many records of temporary folders this process has open, removed ones too."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            names.append(str(path.readlink()))
    return sum("owner.json" in name for name in names)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_destructor_that_fails_after_an_interruption_says_nothing(as_program, number):
    class Failing:
        def __del__(self):
            raise AttributeError("a client that is closed has no loop")

    def command():
        with app._terminate_as_interrupt():
            signal.raise_signal(number)
        raise AssertionError("not reached")

    def command_with_a_destructor():
        try:
            command()
        finally:
            Failing()

    assert as_program(command_with_a_destructor) == (130, "", "Interrupted.\n")


def test_ctrl_c_that_whoever_started_the_command_ignores_is_ignored(as_program):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert as_program(interrupt) == (0, "", "")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_alarm_is_the_users_until_an_interruption_was_dropped(as_program):
    signal.signal(signal.SIGALRM, own := lambda *_: None)
    seen = []

    class Interrupted:
        def __del__(self):
            interrupt()

    def command():
        seen.append(signal.getsignal(signal.SIGALRM))
        Interrupted()
        threading.Event().wait(60)

    assert as_program(command) == (130, "", "Interrupted.\n")
    assert seen == [own]


def test_an_interruption_that_was_dropped_at_the_very_end_comes_to_nothing(as_program):
    class Interrupted:
        def __del__(self):
            interrupt()

    def command():
        Interrupted()

    assert as_program(command)[0] in (0, 130)
    time.sleep(3 * process._REPEAT_AFTER)


def test_an_interruption_that_a_library_swallows_is_raised_again_later_and_not_at_once(as_program, monkeypatch):
    monkeypatch.setattr(process, "_IGNORE_SECONDS", 0.1)
    steps = []

    def command():
        try:
            interrupt()
        except KeyboardInterrupt:
            steps.append("swallowed")
        interrupt()
        steps.append("ignored")
        time.sleep(0.15)
        interrupt()
        steps.append("never")

    assert as_program(command) == (130, "", "Interrupted.\n")
    assert steps == ["swallowed", "ignored"]


def test_an_end_that_hangs_is_left_by_a_later_interruption(as_program, monkeypatch):
    monkeypatch.setattr(os, "_exit", left := [].append)
    assert as_program(lambda: None) == (0, "", "")
    interrupt()
    assert left.__self__ == []
    monkeypatch.setattr(process, "_IGNORE_SECONDS", 0.0)
    interrupt()
    assert left.__self__ == [130]


def raised_after(before, error):
    def command():
        try:
            raise before
        except type(before):
            raise error  # noqa: B904  # as a bug in a handler does

    return command


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "KeyError: "),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "KeyError: "),
        (ValueError("can't start new thread"), "KeyError: "),
        (
            OSError(errno.EMFILE, "Too many open files", "x"),
            "ResourceError: The system refused x: Too many open files.",
        ),
        (OSError(errno.ENOSPC, "No space left", "x"), "ResourceError: The system refused x: No space left."),
        (MemoryError("3 TiB"), "ResourceError: The system gave no more memory (3 TiB)"),
        (RuntimeError("can't start new thread"), "ResourceError: The system gave no more threads"),
    ],
)
def test_only_a_lack_counts_for_what_was_raised_after_it(as_program, before, words):
    code, out, err = as_program(raised_after(before, KeyError("name")))
    assert (code, out) == (1, "")
    assert err.startswith(words)


def test_an_error_of_the_system_that_is_raised_itself_is_told_as_its_own(as_program):
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "x")
    _, _, err = as_program(raised_after(MemoryError(), error))
    assert err == "ResourceError: The system refused x: No such file or directory.\n"


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "Too many open files", "x"), KeyError("name")])
def test_a_traceback_is_shown_of_whatever_it_is(as_program, monkeypatch, error):
    monkeypatch.setenv("DKFM_TRACEBACK", "1")

    def command():
        raise error

    with pytest.raises(type(error)) as info:
        process.run_command(command)
    assert info.value is error


@pytest.mark.parametrize(
    ("code", "ended"), [("no", (1, "", "no\n")), (None, (0, "", "")), (3, (3, "", "")), ((1, 2), (1, "", "(1, 2)\n"))]
)
def test_an_exit_with_words_says_them_and_is_a_failure(as_program, code, ended):
    assert as_program(lambda: sys.exit(code)) == ended


def test_escaped_json_is_the_same_json_above_16_bits():
    text = json.dumps({"path": "a\U000e0041\U0010ffff\udcff\x7f.npy"}, ensure_ascii=False)
    assert escape_control_characters(text).isascii()
    assert json.loads(escape_control_characters(text)) == json.loads(text)


def test_another_blas_at_the_driver_is_neither_a_fault_nor_a_warning(threaded_client, monkeypatch, recwarn):
    versions = worker_checks.local_versions(tables=True)
    requirements = WorkerRequirements(LocalOutput("/"), "", b"", versions, 1000, 0, None, "")
    assert "BLAS" not in requirements.versions
    monkeypatch.setattr(worker_checks, "describe_blas_libraries", lambda: "")  # as of a worker that has macOS' own
    worker_checks.find_unfit_workers(threaded_client, requirements)
    (answer,) = threaded_client.run(worker_checks._answer, requirements).values()
    assert answer.blas.startswith("unknown for ")
    assert not list(recwarn)


def test_many_parts_hold_one_file_open_and_a_sweep_leaves_them(tmp_path, monkeypatch):
    before = open_records()
    parts = [temporary_folders.TemporarySubfolder("model", tmp_path) for _ in range(40)]
    for part in parts:
        (part.path / "file").touch()
    assert open_records() == before + 1
    (above,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(temporary_folders, "_folders", {})  # what another process knows
        temporary_folders.remove_abandoned(tmp_path)
    assert all((part.path / "file").exists() for part in parts)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # a forked child
        parts[0].remove()
        other = temporary_folders.TemporarySubfolder("model", tmp_path)
        assert other.path.parent != above
        other.remove()
    assert left(tmp_path) == [above.name]
    assert parts[0].path.exists()
    for part in parts[1:]:
        part.remove()
    assert left(above) == sorted([parts[0].path.name, "owner.json"])
    parts[0].remove()
    assert left(tmp_path) == []
    assert open_records() == before
    again = temporary_folders.TemporarySubfolder("model", tmp_path)
    assert again.path.is_dir()
    again.remove()
    assert left(tmp_path) == []


def test_a_part_is_made_after_its_shared_folder_was_removed_by_others(tmp_path):
    first = temporary_folders.TemporarySubfolder("model", tmp_path)
    (first.path.parent / "owner.json").unlink()
    first.path.rmdir()
    first.path.parent.rmdir()
    second = temporary_folders.TemporarySubfolder("model", tmp_path)
    assert second.path.is_dir()
    first.remove()
    second.remove()
    assert left(tmp_path) == []


@pytest.mark.slow
def test_models_that_went_to_workers_hold_one_file_open_together(tmp_path, monkeypatch, rng):
    monkeypatch.setattr(lazy_scoring, "SMALL_MODEL", 0)
    X, before = rng.normal(size=(8, 2)), open_records()
    for _ in range(3):
        phi = dkfm.ExactFeatureMap("rbf", workspace=tmp_path).fit(X)
        pickle.dumps(phi.transform(da.ones((4, 2))).dask)
        del phi
    gc.collect()
    assert open_records() == before + 1
    assert len(list(tmp_path.glob("dkfm-model-*/*/model/_COMPLETE"))) == 3
    for folder in [folder for folder in temporary_folders._folders.values() if folder.path.parent == tmp_path]:
        folder.remove()
    assert left(tmp_path) == []


def test_a_folder_whose_record_finds_no_room_is_gone(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before, known = open_records(), dict(temporary_folders._folders)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="No space left"):
        temporary_folders.TemporaryFolder("gram", tmp_path)
    monkeypatch.undo()
    assert left(tmp_path) == []
    assert (open_records(), temporary_folders._folders) == (before, known)


def test_an_empty_folder_of_an_unfinished_store_is_swept_after_an_hour(tmp_path):
    names = [f".dkfm-partial-{digit * 32}" for digit in "0123"] + [f"dkfm-gram-{'4' * 32}"]
    gone, young, full, link, other = (tmp_path / name for name in names)
    (tmp_path / "mine").mkdir()
    link.symlink_to(tmp_path / "mine")
    for path in (gone, young, full, other):
        path.mkdir()
    (full / "store").touch()
    for path in (gone, full, other, tmp_path / "mine"):
        os.utime(path, (time.time() - 4000,) * 2)
    temporary_folders.remove_abandoned(tmp_path)
    assert left(tmp_path) == sorted(path.name for path in (young, full, link, other, tmp_path / "mine"))


def test_a_signal_whose_end_was_dropped_in_a_destructor_ends_when_it_is_sent_again(signals, monkeypatch):
    monkeypatch.setattr(temporary_folders, "_REPEAT_AFTER", 0.1)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(temporary_folders, "remove_all_folders", lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    monkeypatch.setattr(os, "kill", lambda *sent: seen.append(sent))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    seen = []

    class Ended:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def work():
        with temporary_folders.unwinding_on_signals():
            Ended()
            signal.raise_signal(signal.SIGTERM)  # at once: what the first one ends is not disturbed
            seen.append("on")
            time.sleep(0.15)
            signal.raise_signal(signal.SIGTERM)
            seen.append("never")

    with pytest.raises(SystemExit) as info:
        work()
    assert info.value.code == 128 + signal.SIGTERM
    assert seen == ["on", signal.SIG_IGN, (os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_lock_is_not_waited_for(tmp_path, monkeypatch):
    asked, flock = [], fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda file, how: (asked.append(how), flock(file, how)))
    temporary_folders.TemporaryFolder("gram", tmp_path).remove()
    assert asked == [fcntl.LOCK_EX | fcntl.LOCK_NB]
