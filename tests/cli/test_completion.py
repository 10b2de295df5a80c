"""Completion by shells: commands, options, files and the names of kernels, without importing NumPy."""

import os
import subprocess
import sys

import pytest

from dkfm.cli import option_parsing
from dkfm.kernels import kernel_specs, serialization

COMMAND = """
import sys
from dkfm.cli.app import main
try:
    main(prog_name="dkfm")
finally:
    assert "numpy" not in sys.modules
"""


def complete(shell, *words):
    """What a shell is offered after some words, the last of which is not complete."""
    environment = os.environ | {
        "_DKFM_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(["dkfm", *words]),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
    }
    done = subprocess.run([sys.executable, "-c", COMMAND], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_names_that_are_completed_are_those_of_the_registry():
    assert list(option_parsing.KERNEL_NAMES) == serialization.list_named_kernels()
    theirs = set(kernel_specs._FACTORIES).difference(serialization.list_named_kernels())
    assert set(option_parsing.SCIKIT_LEARN_NAMES) == theirs


@pytest.mark.costly
@pytest.mark.parametrize("command", [["fit", "a", "b"], ["compare", "a"]])
def test_kernels_are_completed(command):
    assert complete("bash", *command, "--kernel", "p") == [
        "plain,periodic",
        "plain,poly",
        "plain,polynomial",
        "plain,precomputed",
    ]


@pytest.mark.slow
def test_commands_options_choices_and_files_are_completed():
    assert complete("bash", "ve") == ["plain,verify"]
    assert complete("bash", "predict", "ve") == ["plain,verify"]  # no command, and not refused here
    assert complete("bash", "score", "--sch") == ["plain,--scheduler"]
    assert complete("bash", "fit", "--basis", "sp") == ["plain,spectral"]
    assert complete("bash", "fit", "ro") == ["file,ro"]
    assert complete("bash", "info", "ro") == ["file,ro"]
    assert "plain" in complete("zsh", "fit", "a", "b", "--kernel", "ga")
    assert complete("fish", "fit", "a", "b", "--kernel", "ga") == ["plain,gaussian"]


@pytest.mark.costly
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell):
    environment = os.environ | {"_DKFM_COMPLETE": f"{shell}_source"}
    done = subprocess.run([sys.executable, "-c", COMMAND], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "bash" in done.stderr  # an old bash has no completion
    assert "_DKFM_COMPLETE" in done.stdout
