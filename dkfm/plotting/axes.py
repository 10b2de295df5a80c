"""Create the axes, colours, legends and notes of all plots, and save pictures."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from sklearn.base import is_classifier

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, MissingExtraError
from dkfm.estimators import ExactFeatureMap
from dkfm.files import local
from dkfm.plotting.data import iter_label_masks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_LEGEND_LABELS = 20
"""Largest number of labels that get a legend; more labels get a colour bar."""

_SIGNATURE = b"Software\0dkfm"
"""Metadata by which a PNG file of dkfm is recognized."""


def import_pyplot() -> ModuleType:
    """Return `matplotlib.pyplot`; if it is missing, raise a MissingExtraError that says how to install it."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise MissingExtraError("Pictures need Matplotlib; install it with pip install 'dkfm[plot]'.") from error
    return plt


def ensure_axes(ax: "Axes | None") -> "Axes":
    """Return `ax`, or the axes of a new figure if it is None."""
    return import_pyplot().figure(layout="constrained").add_subplot() if ax is None else ax


def ensure_panel_axes(count: int, ax: "Axes | Sequence[Axes] | None", inches: float = 2.6) -> "list[Axes]":
    """Return a list of `count` axes: those of `ax`, or square axes of a new figure with up to four columns."""
    if ax is not None:
        axes = list(np.atleast_1d(np.asarray(ax, dtype=object)).ravel())
        if len(axes) != count:
            raise InvalidInputError(f"{count} pictures need as many axes, and ax holds {len(axes)}.")
        return axes
    columns = min(count, 4)
    rows = -(-count // columns)
    figure = import_pyplot().figure(figsize=(inches * columns, inches * rows), layout="constrained")
    return [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def require_component(number: object, q: int) -> None:
    """Raise an InvalidInputError unless `number` is an integer from 0 to q - 1."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < q:
        raise InvalidInputError(f"There are {q} components, with numbers from 0, and {number!r:.50} is none of them.")


def get_score_name(estimator: object) -> str:
    """Return the name of a column of an estimator's `transform`, for plots."""
    if isinstance(estimator, ExactFeatureMap):
        return "feature"
    has_tags = hasattr(estimator, "__sklearn_tags__")
    return "discriminant" if has_tags and is_classifier(estimator) else "component"


def choose_label_color(code: int, count: int) -> tuple[float, float, float, float]:
    """Return the RGBA colour of label number `code` of `count` labels."""
    from matplotlib import colormaps

    if count <= 10:
        return colormaps["tab10"](code)
    if count <= _MAX_LEGEND_LABELS:
        return colormaps["tab20"](code)
    return colormaps["viridis"](code / (count - 1))


def scatter(ax: "Axes", points: Array, labels: npt.NDArray[np.generic] | None) -> None:
    """Draw points (n, 2) in one colour for each label; more than 20 different labels get a colour bar."""
    values = np.empty(0) if labels is None else np.unique(labels)
    if len(values) <= _MAX_LEGEND_LABELS:
        for code, (name, mask) in enumerate(iter_label_masks(labels, len(points))):
            colour = choose_label_color(code, len(values))
            ax.scatter(points[mask, 0], points[mask, 1], s=8, color=colour, label=name, alpha=0.8)
        return
    shades = np.asarray(labels)
    numeric = shades.dtype.kind in "biuf"
    shades = shades if numeric else np.searchsorted(values, shades)
    collection = ax.scatter(points[:, 0], points[:, 1], s=8, c=shades, alpha=0.8)
    bar_label = "label" if numeric else f"label, its place among {len(values):,} in order"
    ax.figure.colorbar(collection, ax=ax, label=bar_label)


def write_note(ax: "Axes", note: str) -> None:
    """Write a note, if it is not empty, into the lower right corner of the axes."""
    if note:
        ax.annotate(note, (0.99, 0.01), xycoords="axes fraction", ha="right", va="bottom", fontsize="x-small")


def add_legend(ax: "Axes", count: int) -> None:
    """Add a legend unless there are more than 20 labels."""
    if count <= _MAX_LEGEND_LABELS:
        ax.legend(markerscale=2, ncols=2, fontsize="small")


def save_picture(ax: "Axes | Sequence[Axes]", path: str | Path) -> None:
    """Write the figure of some axes to a PNG file, atomically, and close it; replace an earlier file of dkfm.

    Parameters
    ----------
    ax : matplotlib axes, or sequence of them
        Axes of one figure, such as those that `display` or `contours` returned.
    path : str or Path
        Path of the file; its name must end with ``.png``.

    Raises
    ------
    InvalidInputError
        The name does not end with ``.png``, or the folder does not exist.
    StoreExistsError
        The path holds another file, which is left unchanged.
    """
    if Path(path).suffix.lower() != ".png":
        raise InvalidInputError(f"A picture is a PNG file, and {path} does not end with .png.")
    target = Path(path).resolve()  # write to the target of a symbolic link, and keep the link
    require_replaceable_picture(target)
    panels = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
    if not len(panels):
        raise InvalidInputError("There are no axes to save.")
    if not hasattr(panels[0], "get_figure"):
        raise InvalidInputError(f"save_picture takes matplotlib axes, and ax is {ax!r:.50}.")
    figure = panels[0].get_figure(root=True)
    assert figure is not None  # noqa: S101  # for the type checker: axes that were drawn on have a figure
    with local.new_file(target, target.parent) as output:
        figure.savefig(output.file, format="png", dpi=120, metadata={"Software": "dkfm"})
        output.commit()
    import_pyplot().close(figure)


def require_replaceable_picture(path: Path) -> None:
    """Raise unless a picture can be written to a path: its folder exists, and it holds no file of another program."""
    local.require_replaceable_file(path, _SIGNATURE, "picture")
