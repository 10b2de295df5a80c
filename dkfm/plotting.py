"""Pictures, with Matplotlib (the extra `plot`)."""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dkfm.errors import MissingExtraError
from dkfm.kernels.rows import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["components", "save_picture", "spectrum"]


def _pyplot() -> ModuleType:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("Pictures need Matplotlib; install it with pip install 'dkfm[plot]'.") from error
    return pyplot


def _axes(ax: "Axes | None") -> "Axes":
    return _pyplot().figure(layout="constrained").add_subplot() if ax is None else ax


def spectrum(eigenvalues: Array, *, ax: "Axes | None" = None) -> "Axes":
    """Draw eigenvalues (r,) on a logarithmic scale.

    Parameters
    ----------
    eigenvalues : ndarray of shape (r,)
        Positive, in descending order.
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib axes
    """
    ax = _axes(ax)
    ax.semilogy(np.arange(1, len(eigenvalues) + 1), eigenvalues, ".-", markersize=3, linewidth=1)
    ax.set(xlabel="index", ylabel="eigenvalue of the Gram matrix", title=f"Spectrum, rank {len(eigenvalues)}")
    ax.grid(alpha=0.3)
    return ax


def components(scores: Array, labels: npt.NDArray[np.int64] | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the first two components of scores (n, q), coloured by labels (n,).

    Returns
    -------
    matplotlib axes
    """
    ax = _axes(ax)
    groups = [(None, scores)] if labels is None else [(v, scores[labels == v]) for v in np.unique(labels)]
    for value, points in groups:
        ax.scatter(points[:, 0], points[:, 1], s=8, label=value, alpha=0.8)
    ax.set(xlabel="component 1", ylabel="component 2", title="Kernel principal components")
    if labels is not None:
        ax.legend(markerscale=2, ncols=2, fontsize="small")
    return ax


def save_picture(ax: "Axes", path: Path) -> None:
    """Write the figure of some axes to a file and close it."""
    figure = ax.get_figure(root=True)
    assert figure is not None  # noqa: S101  # axes that were drawn on have one; this tells the type checker
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)
