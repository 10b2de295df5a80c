"""Write Dask's performance report of a job: check the path before the job, and write after it, even if it failed."""

import html
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dkfm.core.display.terminal_output import print_message
from dkfm.errors import ClusterError, InvalidInputError, extract_reason
from dkfm.files import local, temporary_folders
from dkfm.files.location import locate, require_disjoint
from dkfm.kernel_comparison import html_page as pages

if TYPE_CHECKING:
    from distributed import Client, performance_report

_ANSWER_TIMEOUT = 30
"""Timeout, in seconds, for the scheduler to answer whether it can make a report."""

_REPORT_TIMEOUT = 60
"""Timeout, in seconds, for the scheduler to make a report of at most 100,000 tasks, which is all that Dask keeps."""


def require_report(page: str | None, scheduler: str | None, *used: str) -> None:
    """Raise before any work if the requested report could not be written.

    Parameters
    ----------
    page : str or None
        Path of the report; None for no report.
    scheduler : str or None
        Address of the scheduler.
    *used : str
        Paths and URLs that the job reads or writes; the report must not lie in them or replace them.

    Raises
    ------
    click.UsageError
        There is no scheduler to report on.
    InvalidInputError, StoreError
        No file can be written at the path.

    Examples
    --------
    >>> require_report(None, None)
    >>> require_report("report.html", None)
    Traceback (most recent call last):
    click.exceptions.UsageError: There is no cluster to report on; name one with --scheduler.
    """
    if page is None:
        return
    if scheduler is None:
        raise click.UsageError("There is no cluster to report on; name one with --scheduler.")
    local.require_parent_folder(Path(page))
    path = Path(page).resolve()
    if path.exists() and not path.is_file():
        raise InvalidInputError(f"{page} cannot be written: it is no file.")
    pages.require_replaceable_page(path)
    require_disjoint(path, "report", [locate(name) for name in used])
    with local.translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with local.new_file(path, path.parent):
        pass  # a file can be created in this folder


@contextmanager
def record_report(client: "Client", page: str | None) -> Iterator[None]:
    """Record Dask's report of a cluster, and write it when the context ends; replace an earlier page atomically.

    If the report fails, the job does not fail; a line is written to standard error.

    Raises
    ------
    ClusterError
        The scheduler cannot make a report; raised before the job.
    """
    if page is None:
        yield
        return
    from distributed import performance_report

    report = performance_report(mode="inline")  # one file with all scripts

    async def begin() -> None:
        await client.run_on_scheduler(version, "bokeh")
        await report.__aenter__()

    try:
        client.sync(begin, callback_timeout=_ANSWER_TIMEOUT)
    except Exception as error:  # the scheduler may raise any exception
        remedy = "install dask[diagnostics] where it runs, or leave out --report"
        raise ClusterError(f"The scheduler can make no report ({extract_reason(error)}); {remedy}.") from None
    try:
        yield
    finally:
        try:
            _write(client, report, Path(page).resolve())
        except Exception as error:
            print_message(f"There is no report at {page}: {extract_reason(error)}.")


def _write(client: "Client", report: "performance_report", path: Path) -> None:
    if client.status != "running":
        raise ClusterError("the scheduler is gone")
    command = html.escape(shlex.join(["dkfm", *sys.argv[1:]]))
    with temporary_folders.open_temporary_folder("report") as folder:
        # Use a plain file name, because Dask interprets some characters in a path.
        report.filename = f"{folder}/report.html"
        try:
            client.sync(report.__aexit__, None, None, None, code=command, callback_timeout=_REPORT_TIMEOUT)
        except TimeoutError:
            raise ClusterError(f"the scheduler did not make it in {_REPORT_TIMEOUT} seconds") from None
        except Exception as error:
            if type(error).__name__ != "TemplateNotFound":
                raise
            raise ClusterError("the Dask of the scheduler is too old for its Bokeh; it needs 2026.3 or newer") from None
        text = Path(report.filename).read_text(encoding="utf-8")
        pages.write_page(path, text.replace("<head>", f"<head>{pages.GENERATOR}", 1))
