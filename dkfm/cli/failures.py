"""Report the failure of a command: an exit code, a sentence on standard error, and with ``--json`` a JSON object."""

import json
import signal
from collections.abc import Sequence
from contextlib import suppress

import click

from dkfm.cli import logging_options
from dkfm.core.display.terminal_output import print_message, print_result
from dkfm.errors import ClusterError, OutputError, PartialOutputError, SchedulerNameError

EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, 128 + signal.SIGINT),  # as in shells
    (click.UsageError, 2),
    (SchedulerNameError, 2),
    (PartialOutputError, 4),
    (ClusterError, 3),
    (BaseException, 1),
)
"""Exit code of each class of errors; the first matching class determines the code."""

EXPLANATION = """\b
Exit codes:
  0    done
  1    an invalid or missing input, model or file, too little memory or disk, or another error
  2    wrong usage
  3    a cluster failure: no scheduler, or workers that are lost or unfit
  4    a partial output: some chunks failed, all others are complete
  130  interrupted
With --json a failure is a JSON object on standard output too:
  {"error": CLASS, "exit_code": CODE, "message": SENTENCE}"""
"""Description of the exit codes in the help."""

_options: Sequence[str] = ()
"""Words of the command line up to ``--``."""


def remember_options(words: Sequence[str]) -> None:
    """Remember a command line before it is parsed: with ``--json`` and ``--log-json`` usage errors are JSON too."""
    global _options  # noqa: PLW0603  # one command runs in a process
    options = list(words)
    _options = options[: options.index("--") if "--" in options else None]


def has_option(name: str) -> bool:
    """Return whether the command line has an option that takes a value."""
    return any(word.partition("=")[0] == name for word in _options)


def find_exit_code(kind: type[BaseException]) -> int:
    """Return the exit code of a command that ends with an error of a class.

    >>> find_exit_code(ClusterError), find_exit_code(ValueError)
    (3, 1)
    """
    return next(code for base, code in EXIT_CODES if issubclass(kind, base))


def report_failure(kind: type[BaseException], message: str) -> int:
    """Print an error of a class in one sentence, and as JSON if that was asked for; return the exit code."""
    text = message if kind is KeyboardInterrupt else f"{kind.__name__}: {message}"
    print_message(logging_options.to_json("ERROR", "dkfm", text) if "--log-json" in _options else text)
    print_json_failure(kind, message)
    return find_exit_code(kind)


def print_json_failure(kind: type[BaseException], message: str) -> None:
    """Print an error of a class as a JSON object on standard output if that was asked for."""
    if "--json" in _options:
        facts = {"error": kind.__name__, "exit_code": find_exit_code(kind), "message": message}
        with suppress(OutputError):  # the reader has closed standard output
            print_result(json.dumps(facts))
