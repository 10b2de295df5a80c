"""Bars of progress: in a notebook, or on standard error where that is a terminal; none of what takes no time.

Inside a worker there are none, for its output is the user's terminal too, and its fits run many at once.
"""

import sys
import warnings
from typing import TYPE_CHECKING

from tqdm import TqdmWarning

from dkfm.core.budget import format_seconds
from dkfm.execution.clusters.client import is_inside_worker

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # without ipywidgets a notebook has the plain bar, quietly
    from tqdm.auto import tqdm

if TYPE_CHECKING:
    from typing import Never

LEAST_SECONDS = 2.0
"""What takes less has no bar."""


def step_bar(name: str, total: int | None, unit: str, shown: bool) -> "tqdm[Never]":
    """Return a bar that moves with ``update(steps)``, and appears once it has run for two seconds.

    Parameters
    ----------
    name : str
    total : int, optional
        How many steps there are, where that is known.
    unit : str
        What a step is.
    shown : bool
        Whether the user wants one.
    """
    return _bar(name, total, unit, LEAST_SECONDS, None, shown)


def call_bar(name: str, seconds: float, shown: bool) -> "tqdm[Never]":
    """Return a line that tells how long a call will take that cannot be looked into; at its end, how long it took.

    Parameters
    ----------
    name : str
    seconds : float
        As predicted. Below two there is no line.
    shown : bool
        Whether the user wants one.
    """
    told = f"{name}, about {format_seconds(seconds)}"
    # LAPACK holds the interpreter's lock, so that no thread could move it on.
    return _bar(told, None, "", 0.0, "{desc}: {elapsed}", shown and seconds >= LEAST_SECONDS)


def _bar(name: str, total: int | None, unit: str, delay: float, bar_format: str | None, shown: bool) -> "tqdm[Never]":
    visible = shown and (_in_notebook() or _on_terminal()) and not is_inside_worker()
    return tqdm(
        desc=name,
        total=total,
        unit=unit,
        delay=delay,
        bar_format=bar_format,
        disable=not visible,  # tqdm itself would take a notebook's plain output for none
        file=sys.stderr,
    )


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # a program may run without standard error


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
