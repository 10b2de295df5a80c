"""Add the logging options, and write log lines, warnings and errors of a command to standard error as text or JSON."""

import functools
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click

from dkfm.core.display.terminal_output import escape_control_characters, print_message, print_result

_QUIET = "dkfm.quiet"
"""Key in click's `Context.meta`, which all contexts of a command share."""


def add_logging_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add the options -v, -q and --log-json to a command, and write its log lines to standard error."""

    @click.option("-v", "--verbose", is_flag=True, help="Also log how long each stage took.")
    @click.option("-q", "--quiet", is_flag=True, help="Print only warnings and errors: no log, progress or summary.")
    @click.option("--log-json", is_flag=True, help="Write log lines, warnings and errors to standard error as JSON.")
    @functools.wraps(command)
    def run(*, verbose: bool, quiet: bool, log_json: bool, **options: object) -> object:
        if verbose and quiet:
            raise click.UsageError("-v asks for more lines and -q for none; give one of them.")
        click.get_current_context().meta.update({_QUIET: quiet})
        level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
        with _log_to_standard_error(level, log_json):
            return command(**options)

    return run


def is_quiet() -> bool:
    """Return whether the running command has the option --quiet: no progress bars and no summary."""
    return bool(click.get_current_context().meta.get(_QUIET))


def print_summary(*lines: str) -> None:
    """Write lines about finished work to standard output, unless the command is quiet."""
    if not is_quiet():
        print_result(*lines)


@contextmanager
def _log_to_standard_error(level: int, as_json: bool) -> Iterator[None]:
    """Write log records of dkfm from a level upwards, with `as_json` also warnings; restore the logger at the end."""
    logger, former_level, former_format = logging.getLogger("dkfm"), logging.getLogger("dkfm").level, None
    handler = _StandardErrorHandler(as_json)
    logger.addHandler(handler)
    logger.setLevel(level)
    if as_json:
        former_format, warnings.formatwarning = warnings.formatwarning, _format_warning_as_json
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former_level)
        if former_format is not None:
            warnings.formatwarning = former_format


class _StandardErrorHandler(logging.Handler):
    """Write records to the `sys.stderr` of the moment, which may be replaced during a command."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        text = "%(asctime)s %(levelname)s %(stage)s: %(message)s"
        self.setFormatter(_JsonFormatter() if as_json else logging.Formatter(text, defaults={"stage": "dkfm"}))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record in one line; ignore failures, because there is nowhere to report them."""
        print_message(self.format(record))


class _JsonFormatter(logging.Formatter):
    """Format a record as a JSON object: time, level, stage, message, and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON of a record, in one line."""
        stage, fields = getattr(record, "stage", "dkfm"), getattr(record, "fields", {})
        return to_json(record.levelname, stage, record.getMessage(), **fields)


def to_json(level: str, stage: str, message: str, **fields: Any) -> str:  # values of JSON
    """Return a log line as a JSON object: the current time, level, stage, message and other fields."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "stage": stage, "message": message} | fields)


def _format_warning_as_json(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    text = escape_control_characters(f"{category.__name__}: {message}")
    return f"{to_json('WARNING', 'warning', text)}\n"
