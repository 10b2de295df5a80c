"""States of long fits: a kill between any two writes leaves one that is whole, and a fit goes on with the same bits."""

import json
import os
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest

from dkfm import kernels
from dkfm.errors import StoreError, StoreExistsError
from dkfm.gram import checkpoints
from dkfm.gram.checkpoints import open_checkpoint
from dkfm.sources.memory import MemorySource
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
        state = json.loads((folder / "state.json").read_text())
        state["identity"]["format"] = 0
        (folder / "state.json").write_text(json.dumps(state))
    else:
        (folder / "state.json").write_text("{" if damage == "state" else '{"identity": 3, "arrays": [1]}')
    assert found(tmp_path) == ({}, {})


def test_two_processes_are_not_at_the_same_fit(tmp_path):
    code = (
        "import sys, numpy as np\nfrom dkfm import kernels\nfrom dkfm.gram.checkpoints import open_checkpoint\n"
        "from dkfm.sources.memory import MemorySource\nrows = MemorySource(np.arange(6.0).reshape(3, 2))\n"
        "with open_checkpoint(sys.argv[1], 'fit', kernels.Gaussian(1.0), rows, {}): print('in', flush=True), input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(StoreExistsError, match="at the same fit"), opened(tmp_path):
            pass
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

    monkeypatch.setattr(checkpoints, "write_npy", refuse)
    with pytest.raises(StoreError, match="No space left"), opened(tmp_path) as checkpoint:
        checkpoint.save({"step": 2}, {"a": np.ones(3)})
    assert found(tmp_path)[0] == {"step": 1}
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*.npy"))) == 1
