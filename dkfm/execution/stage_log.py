"""Log the stages of work on the logger ``dkfm``: one line at the start of each stage, with its numbers as fields.

The logger has a NullHandler and no level, so nothing is printed unless a program configures logging. Tasks log nothing,
because every worker would repeat their lines.
"""

import logging
from collections.abc import Mapping

from dkfm.core.display.quantities import format_seconds
from dkfm.core.display.terminal_output import escape_control_characters
from dkfm.execution.clusters.current_client import is_inside_worker
from dkfm.execution.executors import Executor
from dkfm.files.fsspec_errors import strip_credentials
from dkfm.kernels.base import Kernel

LONG_SECONDS = 1.0
"""Predicted seconds above which a certificate is logged, or an extra that would save time."""

LOGGER = logging.getLogger("dkfm")
LOGGER.addHandler(logging.NullHandler())


def log_stage(stage: str, text: str, *, seconds: float | None = None, **fields: float | str) -> None:
    """Log the work or the progress of a stage, unless this runs in a task of a worker.

    Parameters
    ----------
    stage : str
        Name of the stage, such as "gram"; the attribute `stage` of the record.
    text : str
        Description of the work, its size and its place. Credentials in URLs are removed, control characters escaped.
    seconds : float, optional
        Predicted seconds, which are added to the text.
    **fields : int, float or str
        Numbers and places in the text. With the seconds they are the attribute `fields` of the record, a dict.
    """
    if seconds is not None:
        text, fields = f"{text}, about {format_seconds(seconds)}", {**fields, "seconds": round(seconds, 3)}
    _log(logging.INFO, stage, text, fields)


def log_missing_extra(kernel: Kernel, seconds: float) -> None:
    """Log that the extra "fast" would help, if values of the kernel take seconds and it is not installed."""
    if seconds >= LONG_SECONDS and kernel.lacks_extra_fast():
        log_stage("kernel", f"pip install 'dkfm[fast]' makes values of {kernel!r} two to five times faster")


def log_detail(stage: str, text: str, **fields: float | str) -> None:
    """Log a detail for debugging or profiling; the parameters are those of `log_stage`."""
    _log(logging.DEBUG, stage, text, fields)


def _log(level: int, stage: str, text: str, fields: Mapping[str, float | str]) -> None:
    if LOGGER.isEnabledFor(level) and not is_inside_worker():
        clean = {name: _clean(value) if isinstance(value, str) else value for name, value in fields.items()}
        LOGGER.log(level, _clean(text), extra={"stage": stage, "fields": clean}, stacklevel=3)


def _clean(text: str) -> str:
    return escape_control_characters(strip_credentials(text))


def describe_place(executor: Executor) -> str:
    """Return where the tasks of an executor run, in words."""
    threads = f"{executor.threads} thread{'s' * (executor.threads != 1)}"
    if executor.client is None:
        return f"{threads} of this process"
    scheduler = executor.client.scheduler
    address = "" if scheduler is None else f" at {scheduler.address}"
    return f"{threads} of the cluster{address}"
