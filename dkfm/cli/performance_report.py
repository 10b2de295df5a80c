"""Dask's report of a job, for the command line: asked for before the work, written after it, however that ended."""

import html
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.cli import options
from dkfm.comparison import html_page as pages
from dkfm.core.printing import print_message
from dkfm.errors import ClusterError, InvalidInputError, reason
from dkfm.files import local, temporary
from dkfm.files.location import locate, require_apart

if TYPE_CHECKING:
    from distributed import Client, performance_report

_ANSWER = 30
"""Seconds that a scheduler has to say whether it can make a report."""

_PAGE = 60
"""Seconds that it has to make one, of a hundred thousand tasks at most: Dask keeps no more."""


def require_report(page: str | None, scheduler: str | None, *used: str) -> None:
    """Raise before any work where a report that is asked for could not be written.

    Parameters
    ----------
    page : str or None
        Where it goes; None asks for none.
    scheduler : str or None
        What it would be of.
    used : str
        Paths and URLs that the job reads or writes, beside or in which the page must not be.

    Raises
    ------
    ClusterError
        There is no cluster.
    InvalidInputError, StoreError
        No file can be made there.

    Examples
    --------
    >>> require_report(None, None)
    >>> require_report("report.html", None)
    Traceback (most recent call last):
    dkfm.errors.ClusterError: There is no cluster to report on; name one with --scheduler.
    """
    if page is None:
        return
    if scheduler is None:
        raise ClusterError("There is no cluster to report on; name one with --scheduler.")
    options.require_writable_folder(page)
    path = Path(page).resolve()
    if path.exists() and not path.is_file():
        raise InvalidInputError(f"{page} cannot be written: it is no file.")
    pages.require_replaceable(path)
    require_apart(path, "report", [locate(name) for name in used])
    with local.translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with local.new_file(path, path.parent):
        pass  # the folder, the disk and the name allow it


@contextmanager
def write_report(client: "Client", page: str | None) -> Iterator[None]:
    """Write Dask's report of what a cluster does meanwhile; an earlier page of dkfm's is replaced at the end, whole.

    What becomes of the report is nothing to the job: where there is none at the end, a line on standard error says so.

    Raises
    ------
    ClusterError
        The scheduler cannot make one; this is found out before.
    """
    if page is None:
        yield
        return
    from distributed import performance_report

    report = performance_report(mode="inline")  # a page that needs no other

    async def begin() -> None:
        await client.run_on_scheduler(version, "bokeh")
        await report.__aenter__()

    try:
        client.sync(begin, callback_timeout=_ANSWER)
    except Exception as error:  # whatever a scheduler says that cannot
        remedy = "install dask[diagnostics] where it runs, or leave out --report"
        raise ClusterError(f"The scheduler can make no report ({reason(error)}); {remedy}.") from None
    try:
        yield
    finally:
        try:
            _write(client, report, Path(page).resolve())
        except Exception as error:
            print_message(f"There is no report at {page}: {reason(error)}.")


def _write(client: "Client", report: "performance_report", path: Path) -> None:
    if client.status != "running":
        raise ClusterError("the scheduler is gone")
    command = html.escape(shlex.join(["dkfm", *sys.argv[1:]]))
    with temporary.temporary_folder("report") as folder:
        # A name of our own: Dask reads more than a path into some.
        report.filename = f"{folder}/report.html"
        try:
            client.sync(report.__aexit__, None, None, None, code=command, callback_timeout=_PAGE)
        except TimeoutError:
            raise ClusterError(f"the scheduler did not make it in {_PAGE} seconds") from None
        text = Path(report.filename).read_text(encoding="utf-8")
        pages.write_page(path, text.replace("<head>", f"<head>{pages.GENERATOR}", 1))
