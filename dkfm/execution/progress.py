"""Show the progress of long work: bars in notebooks and on terminals, log lines everywhere else.

Tasks on workers show no progress, because workers of a local cluster share the user's terminal and run many fits at
once.
"""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Protocol, cast

from dkfm.core.display.quantities import format_seconds
from dkfm.execution.clusters.current_client import is_inside_worker
from dkfm.execution.stage_log import LOGGER, log_detail, log_stage

MIN_SECONDS = 2.0
"""Shorter work has no bar."""

HEARTBEAT_SECONDS = 30.0
"""Smallest number of seconds between two log lines about the same work."""

_DUMB_TERMINALS = frozenset({"", "dumb", "unknown"})
"""Values of TERM of terminals that cannot move the cursor, as a bar does."""


class Bar(AbstractContextManager["Bar"], Protocol):
    """Interface of a progress bar, shown or hidden."""

    n: float
    """Steps done."""
    total: float | None
    """All steps, if known."""

    def update(self, n: float = 1) -> object:
        """Move the bar by `n` steps."""

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        """Set the text that the next update shows after the steps."""


class _HiddenBar(AbstractContextManager["_HiddenBar"]):
    """A bar that is not shown."""

    n: float = 0
    total: float | None = None

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        pass

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        pass


class Heartbeat(AbstractContextManager["Heartbeat"]):
    """A bar that logs the progress when it is updated and `HEARTBEAT_SECONDS` have passed.

    Parameters
    ----------
    stage : str
        Name of the stage.
    total : int or None
        Number of steps, if known.
    unit : str
        Name of a step.
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, stage: str, total: float | None, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.n: float = 0
        self.total = total
        self._stage, self._unit, self._clock, self._postfix = stage, unit, clock, ""
        self._start = self._last = clock()

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        """Count `n` more steps; 0 only looks at the clock."""
        self.n += n
        now = self._clock()
        if now - self._last >= HEARTBEAT_SECONDS:
            self._last = now
            self._log(self.n / max(now - self._start, sys.float_info.min))

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        """Set the text of the next line after the steps."""
        self._postfix = f", {s}"

    def _log(self, rate: float) -> None:
        numbers = {"done": self.n, "rate": round(rate, 6)}
        if self.total is None:
            log_stage(self._stage, f"{self.n:,} {self._unit}s, {rate:.3g} a second{self._postfix}", **numbers)
            return
        text = f"{self.n:,} of {self.total:,} {self._unit}s, {rate:.3g} a second{self._postfix}"
        numbers["total"] = self.total
        if rate > 0:
            left = max(0.0, self.total - self.n) / rate
            text, numbers["seconds_left"] = f"{text}, about {format_seconds(left)} left", round(left, 3)
        log_stage(self._stage, text, **numbers)


def step_bar(name: str, total: int | None, unit: str, shown: bool) -> AbstractContextManager[Bar]:
    """Return a bar that moves with ``update(steps)`` and appears after two seconds, if the user wants one (`shown`).

    Without a terminal it is a `Heartbeat`. `total` is the number of steps, if known, and `unit` the name of a step.
    """
    return _bar(name, total, unit, MIN_SECONDS, None, shown)


def show_elapsed_bar(seconds: float, shown: bool) -> AbstractContextManager[Bar]:
    """Return a line with the predicted `seconds` of one blocking call, which reports no progress, and its elapsed time.

    There is no line below two seconds, without a terminal, or if the user does not want one (`shown`).
    """
    description = f"dkfm-root, about {format_seconds(seconds)}"
    # LAPACK holds the GIL, so no thread could update a bar meanwhile.
    return _bar(description, None, "", 0.0, "{desc}: {elapsed}", shown and seconds >= MIN_SECONDS)


@contextmanager
def _bar(name: str, total: int | None, unit: str, delay: float, bar_format: str | None, shown: bool) -> Iterator[Bar]:
    """Show a bar in a terminal or notebook, else a heartbeat, and log the seconds for debugging."""
    stage, start = name.partition(",")[0].removeprefix("dkfm-"), time.monotonic()
    bar: Bar = _HiddenBar()
    if shown and not is_inside_worker():
        if _in_notebook() or on_terminal():
            bar = _import_tqdm()(desc=name, total=total, unit=unit, delay=delay, bar_format=bar_format, file=sys.stderr)
        elif unit and LOGGER.isEnabledFor(logging.INFO):
            bar = Heartbeat(stage, total, unit)
    with bar:
        yield bar
    passed = time.monotonic() - start
    log_detail(stage, f"done in {format_seconds(passed)}", elapsed=round(passed, 3))


@cache
def _import_tqdm() -> Callable[..., Bar]:
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        # Without ipywidgets, tqdm falls back to a plain bar with a warning.
        warnings.simplefilter("ignore", TqdmWarning)
        from tqdm.auto import tqdm
    return cast("Callable[..., Bar]", tqdm)


def on_terminal() -> bool:
    """Return whether standard error is a terminal that can show a bar: one of some width that moves its cursor."""
    if sys.stderr is None or not sys.stderr.isatty():  # stderr is None in a program that has none
        return False
    if os.environ.get("TERM", "") in _DUMB_TERMINALS:
        return False
    with suppress(OSError):  # a stream without a descriptor
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return True


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
