"""Axes, colours and notes that pictures share."""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, MissingExtraError
from dkfm.plotting.data import group_by_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND = 20
"""So many labels have a colour and a line in the legend; more have a colour bar."""


def pyplot() -> ModuleType:
    """Return Matplotlib's pyplot, or say how to install it."""
    try:
        from matplotlib import pyplot as found
    except ImportError as error:
        raise MissingExtraError("Pictures need Matplotlib; install it with pip install 'dkfm[plot]'.") from error
    return found


def ensure_axes(ax: "Axes | None") -> "Axes":
    """Return axes that were given, or those of a new figure."""
    return pyplot().figure(layout="constrained").add_subplot() if ax is None else ax


def make_panels(count: int, ax: "Axes | Sequence[Axes] | None") -> "list[Axes]":
    """Return as many axes as there are components."""
    if ax is not None:
        given = list(np.atleast_1d(np.asarray(ax, dtype=object)).ravel())
        if len(given) != count:
            raise InvalidInputError(f"{count} components need as many axes, and ax holds {len(given)}.")
        return given
    across = min(count, 4)
    down = -(-count // across)
    figure = pyplot().figure(figsize=(2.6 * across, 2.6 * down), layout="constrained")
    return [figure.add_subplot(down, across, place + 1) for place in range(count)]


def require_column(number: object, q: int) -> None:
    """Raise unless a number is that of one of q components."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < q:
        raise InvalidInputError(f"There are {q} components, with numbers from 0, and {number!r:.50} is none of them.")


def label_color(code: int, count: int) -> tuple[float, float, float, float]:
    """Return the colour of one of some labels."""
    from matplotlib import colormaps

    if count <= 10:
        return colormaps["tab10"](code)
    if count <= _LEGEND:
        return colormaps["tab20"](code)
    return colormaps["viridis"](code / (count - 1))


def scatter(ax: "Axes", points: Array, marks: npt.NDArray[np.generic] | None) -> None:
    """Draw points, a colour for each label, or a colour bar where labels are many."""
    values = np.empty(0) if marks is None else np.unique(marks)
    if len(values) <= _LEGEND:
        for code, (name, chosen) in enumerate(group_by_label(marks, len(points))):
            colour = label_color(code, len(values))
            ax.scatter(points[chosen, 0], points[chosen, 1], s=8, color=colour, label=name, alpha=0.8)
        return
    shades = np.asarray(marks)
    numeric = shades.dtype.kind in "biuf"
    shades = shades if numeric else np.searchsorted(values, shades)
    drawn_points = ax.scatter(points[:, 0], points[:, 1], s=8, c=shades, alpha=0.8)
    what = "label" if numeric else f"label, its place among {len(values):,} in order"
    ax.figure.colorbar(drawn_points, ax=ax, label=what)


def write_note(ax: "Axes", note: str) -> None:
    """Say on the picture that it shows a sample."""
    if note:
        ax.annotate(note, (0.99, 0.01), xycoords="axes fraction", ha="right", va="bottom", fontsize="x-small")


def add_legend(ax: "Axes", count: int) -> None:
    """Add a legend of labels, where they are few enough for one."""
    if count <= _LEGEND:
        ax.legend(markerscale=2, ncols=2, fontsize="small")
