"""Show progress bars in notebooks and on terminals, for work that takes a while.

Workers show none: they print to the user's terminal too, and run many fits at once.
"""

import sys
import warnings
from typing import TYPE_CHECKING

from tqdm import TqdmWarning

from dkfm.core.budget import format_seconds
from dkfm.execution.clusters.current_client import is_inside_worker

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # without ipywidgets, tqdm falls back to a plain bar with a warning
    from tqdm.auto import tqdm

if TYPE_CHECKING:
    from typing import Never

MIN_SECONDS = 2.0
"""Shorter work has no bar."""


def step_bar(name: str, total: int | None, unit: str, shown: bool) -> "tqdm[Never]":
    """Return a bar that moves with ``update(steps)`` and appears after two seconds, if the user wants one (`shown`).

    `total` is the number of steps, if known, and `unit` the name of a step.
    """
    return _bar(name, total, unit, MIN_SECONDS, None, shown)


def show_elapsed_bar(name: str, seconds: float, shown: bool) -> "tqdm[Never]":
    """Return a line with the predicted `seconds` of one blocking call, which reports no progress, and its elapsed time.

    There is no line below two seconds, or if the user does not want one (`shown`).
    """
    description = f"{name}, about {format_seconds(seconds)}"
    # LAPACK holds the interpreter's lock, so no thread could update a bar meanwhile.
    return _bar(description, None, "", 0.0, "{desc}: {elapsed}", shown and seconds >= MIN_SECONDS)


def _bar(name: str, total: int | None, unit: str, delay: float, bar_format: str | None, shown: bool) -> "tqdm[Never]":
    visible = shown and (_in_notebook() or _on_terminal()) and not is_inside_worker()
    return tqdm(
        desc=name,
        total=total,
        unit=unit,
        delay=delay,
        bar_format=bar_format,
        disable=not visible,  # tqdm's own test takes the output of a notebook for no terminal
        file=sys.stderr,
    )


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # stderr is None in a program that has none


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
