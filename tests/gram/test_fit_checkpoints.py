"""States of long fits: a kill between any two writes leaves one that is whole, and a fit goes on with the same bits."""

import errno
import json
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dkfm import kernels
from dkfm.errors import StoreError, UnsupportedStoreError
from dkfm.files import local
from dkfm.gram import fit_checkpoints
from dkfm.gram.fit_checkpoints import keep_states_until_end, open_checkpoint
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source
from helpers.harness import left

KERNEL = kernels.Gaussian(1.0)
ROWS = MemorySource(np.arange(6.0).reshape(3, 2))


def opened(workspace, kernel=KERNEL, rows=ROWS, **parameters):
    return open_checkpoint(workspace, "fit", kernel, rows, parameters)


class Killed(BaseException):
    """What ends a fit at some line."""


def leave_state(workspace, *states, **given):
    """Save states of numbers and arrays, and be killed."""
    with suppress(Killed), opened(workspace, **given) as checkpoint:
        for state in states:
            checkpoint.save(*state)
        raise Killed


def found(workspace, **given):
    """Return the numbers that a fit finds, and what it reads of their arrays; the state stays."""
    with suppress(Killed), opened(workspace, **given) as checkpoint:
        numbers = dict(checkpoint.numbers)
        arrays = {name: checkpoint.load_array(name) for name in "ab" if name in checkpoint._files}
        raise Killed
    return numbers, arrays


def test_a_state_is_that_of_the_same_fit_alone(tmp_path):
    leave_state(tmp_path, ({"step": 3}, {"a": np.arange(4)}))
    numbers, arrays = found(tmp_path)
    assert numbers == {"step": 3}
    np.testing.assert_array_equal(arrays["a"], np.arange(4))
    for other in ({"kernel": kernels.Gaussian(2.0)}, {"rows": MemorySource(ROWS.array + 1)}, {"tol": 0.1}):
        with opened(tmp_path, **other) as checkpoint:
            assert checkpoint.numbers == {}
    with opened(tmp_path):
        pass
    assert left(tmp_path) == []


def test_kept_arrays_are_not_written_again_and_others_go(tmp_path):
    a, b, c = np.arange(3.0), np.arange(4.0), np.arange(5.0)
    leave_state(tmp_path, ({"step": 1}, {"a": a, "b": b}), ({"step": 2}, {"b": c}, ["a"]))
    numbers, arrays = found(tmp_path)
    assert numbers == {"step": 2}
    np.testing.assert_array_equal(arrays["a"], a)
    np.testing.assert_array_equal(arrays["b"], c)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*.npy"))) == 2


@pytest.mark.parametrize("at", range(12))
def test_a_kill_between_any_two_writes_leaves_the_state_before_or_after(tmp_path, monkeypatch, at):
    leave_state(tmp_path, ({"step": 1}, {"a": np.zeros(3), "b": np.ones(2)}))
    calls, real = [], {name: getattr(os, name) for name in ("fsync", "unlink", "replace")}

    def counted(name):
        def call(*given, **options):
            calls.append(name)
            if len(calls) > at:
                raise Killed
            return real[name](*given, **options)

        return call

    for name in real:
        monkeypatch.setattr(os, name, counted(name))
    with suppress(Killed), opened(tmp_path) as checkpoint:
        checkpoint.save({"step": 2}, {"b": np.full(2, 2.0)}, ["a"])
        raise Killed
    monkeypatch.undo()
    numbers, arrays = found(tmp_path)
    np.testing.assert_array_equal(arrays["a"], np.zeros(3))
    np.testing.assert_array_equal(arrays["b"], np.full(2, float(numbers["step"])))


@pytest.mark.parametrize("damage", ["state", "array", "format", "strange"])
def test_a_damaged_state_is_none(tmp_path, damage):
    leave_state(tmp_path, ({"step": 1}, {"a": np.arange(100.0)}))
    (folder,) = tmp_path.iterdir()
    if damage == "array":
        (file,) = folder.glob("*.npy")
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    elif damage == "format":
        content = json.loads((folder / "state.json").read_text())["content"]
        content["identity"]["format"] = 0
        state = {"content": content, "sha256": fit_checkpoints._digest(content)}
        (folder / "state.json").write_text(json.dumps(state))
    else:
        (folder / "state.json").write_text("{" if damage == "state" else '{"identity": 3, "arrays": [1]}')
    assert found(tmp_path) == ({}, {})


def test_a_state_of_which_a_byte_changed_is_none(tmp_path):
    leave_state(tmp_path, ({"step": 17, "lowest": -1.5, "bound": float("inf")}, {"a": np.arange(3.0)}))
    numbers, _ = found(tmp_path)
    (folder,) = tmp_path.iterdir()
    text = (folder / "state.json").read_bytes()
    read = []
    for at in range(len(text)):
        changed = bytearray(text)
        changed[at] = ord("7") if text[at] != ord("7") else ord("8")
        (folder / "state.json").write_bytes(changed)
        read.append(fit_checkpoints.Checkpoint(folder, json.loads(text)["content"]["identity"]).numbers)
    assert read == [{}] * len(text)
    (folder / "state.json").write_bytes(text)
    assert fit_checkpoints.Checkpoint(folder, json.loads(text)["content"]["identity"]).numbers == numbers


@pytest.mark.parametrize("state", [True, False])
def test_what_dkfm_did_not_write_stays_in_the_folder_of_a_state(tmp_path, state):
    leave_state(tmp_path, ({"step": 1}, {"a": np.arange(3.0)}))
    (folder,) = tmp_path.iterdir()
    if not state:
        (folder / "state.json").unlink()
    (folder / "notes.txt").write_text("mine")
    (folder / "more").mkdir()
    (folder / "more" / "a.npy").write_text("mine")
    with opened(tmp_path) as checkpoint:
        checkpoint.save({"step": 2}, {"a": np.zeros(1)})
    assert left(folder) == ["more", "notes.txt"]
    assert (folder / "more" / "a.npy").read_text() == "mine"
    leave_state(tmp_path, ({"step": 3}, {"a": np.arange(3.0)}))  # and the folder is used again
    assert found(tmp_path)[0] == {"step": 3}


def test_no_other_process_takes_a_folder_before_it_is_emptied(tmp_path, monkeypatch):
    leave_state(tmp_path, ({"step": 1}, {"a": np.arange(3.0)}))
    (folder,) = tmp_path.iterdir()
    (folder / "notes.txt").write_text("mine")
    taken, unlink = [], Path.unlink

    def enter_and_unlink(path):
        if path.parent == folder:
            with opened(tmp_path) as other:
                taken.append((path.name, other is not fit_checkpoints.NO_CHECKPOINT))
        unlink(path)

    with opened(tmp_path):
        monkeypatch.setattr(Path, "unlink", enter_and_unlink)
    assert [name for name, _ in taken][0::2] == ["state.json", "lock"]
    assert not any(is_taken for _, is_taken in taken)


@pytest.mark.slow
def test_a_second_process_at_the_same_fit_keeps_nothing(tmp_path):
    code = (
        "import sys, numpy as np\nfrom dkfm import kernels\nfrom dkfm.gram.fit_checkpoints import open_checkpoint\n"
        "from dkfm.sources.memory import MemorySource\nrows = MemorySource(np.arange(6.0).reshape(3, 2))\n"
        "with open_checkpoint(sys.argv[1], 'fit', kernels.Gaussian(1.0), rows, {}): print('in', flush=True), input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "in\n"
        before = left(tmp_path)
        with opened(tmp_path) as checkpoint:
            checkpoint.save({"step": 1}, {"a": np.zeros(1)})
        assert left(tmp_path) == before
        with opened(tmp_path, tol=1.0):
            pass
        other.communicate("\n")
    with opened(tmp_path) as checkpoint:
        assert checkpoint.numbers == {}
    assert left(tmp_path) == []


def test_nothing_is_kept_without_a_workspace_or_of_code(tmp_path):
    for workspace, kernel in ((None, KERNEL), (tmp_path, kernels.Function(lambda X, Y: X @ Y.T))):
        with opened(workspace, kernel) as checkpoint:
            checkpoint.save({"step": 1}, {"a": np.zeros(2)})
    assert left(tmp_path) == []


def test_a_full_disk_is_one_sentence_and_the_state_before_stays(tmp_path, monkeypatch):
    leave_state(tmp_path, ({"step": 1}, {"a": np.zeros(3)}))

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fit_checkpoints, "write_npy", refuse)
    with pytest.raises(StoreError, match="No space left"), opened(tmp_path) as checkpoint:
        checkpoint.save({"step": 2}, {"a": np.ones(3)})
    assert found(tmp_path)[0] == {"step": 1}
    (folder,) = tmp_path.iterdir()
    assert left(folder) == sorted(["lock", "state.json", next(folder.glob("a-*.npy")).name])


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_after_the_rename_of_a_state_leaves_one_that_is_whole(tmp_path, monkeypatch, error):
    leave_state(tmp_path, ({"step": 1}, {"a": np.zeros(3)}))
    sync = local.sync_parent_folders

    def interrupt(path, root):
        if path.name == "state.json":
            raise error
        sync(path, root)

    monkeypatch.setattr(local, "sync_parent_folders", interrupt)
    with pytest.raises((error, StoreError)), opened(tmp_path) as checkpoint:
        checkpoint.save({"step": 2}, {"b": np.ones(3)}, kept=["a"])
    monkeypatch.undo()
    numbers, arrays = found(tmp_path)
    assert numbers == {"step": 2}
    assert sorted(arrays) == ["a", "b"]
    leave_state(tmp_path, ({"step": 3}, {"b": np.ones(2)}))
    (folder,) = tmp_path.iterdir()
    assert left(folder) == sorted(["lock", "state.json", next(folder.glob("b-*.npy")).name])


def test_a_state_is_of_the_columns_and_the_file_that_were_read(tmp_path):
    frame = pd.DataFrame(np.arange(12.0).reshape(3, 4), columns=list("abcd"))
    for name in ("x.parquet", "y.parquet"):
        frame.to_parquet(tmp_path / name)
    os.utime(tmp_path / "y.parquet", ns=(1, (tmp_path / "x.parquet").stat().st_mtime_ns))
    read = open_source(tmp_path / "x.parquet", columns=["a", "b"])
    leave_state(tmp_path / "w", ({"step": 1}, {"a": np.zeros(2)}), rows=read)
    assert found(tmp_path / "w", rows=open_source(tmp_path / "x.parquet", columns=["a", "b"]))[0] == {"step": 1}
    for name, columns in (("x.parquet", ["c", "d"]), ("x.parquet", ["b", "a"]), ("y.parquet", ["a", "b"])):
        assert found(tmp_path / "w", rows=open_source(tmp_path / name, columns=columns))[0] == {}


@pytest.mark.parametrize("saves", [True, False])
def test_a_process_that_comes_while_the_state_is_removed_has_a_folder_of_its_own(tmp_path, monkeypatch, saves):
    inside, remove = ExitStack(), fit_checkpoints._remove

    def enter_meanwhile(folder):
        monkeypatch.setattr(fit_checkpoints, "_remove", remove)
        remove(folder)
        other = inside.enter_context(opened(tmp_path))
        assert other is not fit_checkpoints.NO_CHECKPOINT
        if saves:
            other.save({"step": 5}, {"a": np.zeros(1)})
        inside.push(lambda *_: found.extend(left(tmp_path)))

    found = []
    monkeypatch.setattr(fit_checkpoints, "_remove", enter_meanwhile)
    with opened(tmp_path) as checkpoint:
        checkpoint.save({"step": 1}, {"a": np.zeros(1)})
    inside.close()
    assert len(found) == 1
    assert left(tmp_path) == []


def test_a_state_stays_until_the_whole_fit_ends(tmp_path):
    with suppress(Killed), keep_states_until_end():
        with opened(tmp_path) as checkpoint:
            checkpoint.save({"step": 1}, {"a": np.zeros(1)})
        raise Killed
    assert found(tmp_path)[0] == {"step": 1}
    with keep_states_until_end():
        with keep_states_until_end(), opened(tmp_path) as checkpoint:
            assert checkpoint.numbers == {"step": 1}
        assert len(left(tmp_path)) == 1
    assert left(tmp_path) == []


def test_numbers_of_numpy_are_numbers(tmp_path):
    leave_state(tmp_path, ({"step": 1}, {}), tol=np.float64(0.5), count=np.int64(3))
    assert found(tmp_path, tol=0.5, count=3)[0] == {"step": 1}


def test_nothing_behind_a_link_is_touched(tmp_path):
    leave_state(tmp_path, ({"step": 1}, {"a": np.zeros(1)}))
    (folder,) = tmp_path.iterdir()
    precious = tmp_path / "precious"
    folder.rename(precious)
    folder.symlink_to(precious)
    before = left(precious)
    with pytest.raises(UnsupportedStoreError, match="is a link"), opened(tmp_path):
        pass
    assert left(precious) == before


def test_files_that_are_not_ours_stay(tmp_path):
    leave_state(tmp_path, ({"step": 1}, {"a": np.zeros(1)}))
    (folder,) = tmp_path.iterdir()
    (folder / "thesis.npy").write_text("mine")
    leave_state(tmp_path, ({"step": 2}, {"a": np.ones(1)}))
    assert (folder / "thesis.npy").read_text() == "mine"


def test_a_file_system_without_locks_keeps_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fit_checkpoints.fcntl, "flock", refuse)
    with opened(tmp_path) as checkpoint:
        assert checkpoint is fit_checkpoints.NO_CHECKPOINT
