"""Show progress bars in notebooks and on terminals, for work that takes a while.

Workers show none: they print to the user's terminal too, and run many fits at once.
"""

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol, Self, cast

from dkfm.core.budget import format_seconds
from dkfm.execution.clusters.current_client import is_inside_worker

MIN_SECONDS = 2.0
"""Shorter work has no bar."""


class Bar(AbstractContextManager["Bar"], Protocol):
    """What work does with its bar, shown or not."""

    n: float
    """Steps done."""
    total: float | None
    """All steps, if known."""

    def update(self, n: float = 1) -> object:
        """Move the bar by `n` steps."""


class _HiddenBar:
    """A bar that nobody sees."""

    n: float = 0
    total: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        pass


def step_bar(name: str, total: int | None, unit: str, shown: bool) -> Bar:
    """Return a bar that moves with ``update(steps)`` and appears after two seconds, if the user wants one (`shown`).

    `total` is the number of steps, if known, and `unit` the name of a step.
    """
    return _bar(name, total, unit, MIN_SECONDS, None, shown)


def show_elapsed_bar(name: str, seconds: float, shown: bool) -> Bar:
    """Return a line with the predicted `seconds` of one blocking call, which reports no progress, and its elapsed time.

    There is no line below two seconds, or if the user does not want one (`shown`).
    """
    description = f"{name}, about {format_seconds(seconds)}"
    # LAPACK holds the interpreter's lock, so no thread could update a bar meanwhile.
    return _bar(description, None, "", 0.0, "{desc}: {elapsed}", shown and seconds >= MIN_SECONDS)


def _bar(name: str, total: int | None, unit: str, delay: float, bar_format: str | None, shown: bool) -> Bar:
    if not shown or not (_in_notebook() or _on_terminal()) or is_inside_worker():
        return _HiddenBar()
    return _import_tqdm()(desc=name, total=total, unit=unit, delay=delay, bar_format=bar_format, file=sys.stderr)


@cache
def _import_tqdm() -> Callable[..., Bar]:
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        # Without ipywidgets, tqdm falls back to a plain bar with a warning.
        warnings.simplefilter("ignore", TqdmWarning)
        from tqdm.auto import tqdm
    return cast("Callable[..., Bar]", tqdm)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # stderr is None in a program that has none


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
