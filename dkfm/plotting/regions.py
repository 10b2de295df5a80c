"""Pictures of the plane: what an estimator of two columns predicts, and its components as contour lines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dkfm.core.frames import column_names, unwrap
from dkfm.errors import InvalidInputError
from dkfm.estimators.feature_names import require_fitted_columns, select_fitted_columns
from dkfm.plotting.axes import add_legend, ensure_axes, label_color, make_panels, require_column, scatter, write_note
from dkfm.plotting.data import (
    Labels,
    Values,
    concatenate_labels,
    plain_label,
    plane_corners,
    plane_grid,
    sample_for_plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = 8
"""So many components are drawn unless they are named."""


class Predictor(Protocol):
    """What `decision_regions` draws."""

    def predict(self, X: object) -> object:
        """Return a label for each row."""


class Transformer(Protocol):
    """What `contours` draws."""

    def transform(self, X: object) -> object:
        """Return components, (n, q)."""


def decision_regions(
    estimator: Predictor, X: Values, labels: Labels | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Draw what an estimator predicts over the plane, and points of it.

    Parameters
    ----------
    estimator : fitted estimator with `predict`
        Of two columns.
    X : array-like or dask array of shape (n, 2)
        The plane is what they span, and a tenth more. At most 5,000 are drawn.
    labels : array-like or dask array of shape (n,), optional
        Of the points: they have the colours of the regions.
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib axes

    Raises
    ------
    InvalidInputError
        Rows that are not of two columns, or predictions that are not one label a row.
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import plotting
    >>> from sklearn.neighbors import KNeighborsClassifier
    >>> X = np.random.default_rng(0).normal(size=(100, 2))
    >>> y = np.where(X[:, 0] > 0, "right", "left")
    >>> plotting.decision_regions(KNeighborsClassifier().fit(X, y), X, y).get_title()
    'What KNeighborsClassifier predicts'
    """
    X = _require_drawn(estimator, "predict", X)
    rows, marks, note = sample_for_plot(X, "X", labels)
    horizontal, vertical, points = plane_grid(plane_corners(rows))
    predicted = np.asarray(estimator.predict(select_fitted_columns(estimator, points)))
    if predicted.shape != (len(points),):
        raise InvalidInputError(
            f"decision_regions draws one label a row, and {type(estimator).__name__}.predict returned "
            f"{predicted.shape} for {len(points):,} rows."
        )
    seen = predicted if marks is None else concatenate_labels(predicted, marks, "What is predicted and labels")
    ax = ensure_axes(ax)
    classes, codes = np.unique(seen, return_inverse=True)
    colours = [label_color(code, len(classes)) for code in range(len(classes))]
    regions = codes[: len(points)].reshape(len(vertical), len(horizontal))
    from matplotlib.colors import ListedColormap

    ax.pcolormesh(
        horizontal, vertical, regions, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(classes) - 0.5, alpha=0.3
    )
    if marks is None:
        ax.scatter(rows[:, 0], rows[:, 1], s=8, color="black", alpha=0.8)
    for code, value in enumerate(classes if marks is not None else ()):
        chosen = rows[codes[len(points) :] == code]
        ax.scatter(
            chosen[:, 0],
            chosen[:, 1],
            s=12,
            color=colours[code],
            edgecolors="black",
            linewidths=0.3,
            label=plain_label(value),
        )
    if marks is not None:
        add_legend(ax, len(classes))
    ax.set(xlabel="column 1", ylabel="column 2", title=f"What {type(estimator).__name__} predicts")
    write_note(ax, note)
    return ax


def contours(
    estimator: Transformer,
    X: Values,
    labels: Labels | None = None,
    *,
    numbers: Sequence[int] | None = None,
    ax: "Axes | Sequence[Axes] | None" = None,
) -> "list[Axes]":
    """Draw each component as contour lines over the plane: the classic toy of kernel PCA.

    Parameters
    ----------
    estimator : fitted estimator with `transform`
        Of two columns; a `KernelPCA`, a map, discriminants.
    X : array-like or dask array of shape (n, 2)
        The plane is what they span, and a tenth more. At most 5,000 are drawn.
    labels : array-like or dask array of shape (n,), optional
        Of the points.
    numbers : sequence of int, optional
        Which components, from 0; by default the first, at most 8.
    ax : matplotlib axes, or a sequence of them, one for each component, optional

    Returns
    -------
    list of matplotlib axes, one for each component

    Raises
    ------
    InvalidInputError
        Rows that are not of two columns, components that are not there, or another number of axes.
    MissingExtraError
        Matplotlib is not installed.

    Notes
    -----
    Schoelkopf, Smola and Mueller, "Nonlinear component analysis as a kernel eigenvalue problem" (1998), figure 4.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import KernelPCA, plotting
    >>> from dkfm.kernels import Gaussian
    >>> X = np.random.default_rng(0).normal(size=(100, 2))
    >>> axes = plotting.contours(KernelPCA(3, kernel=Gaussian(1.0)).fit(X), X)
    >>> [ax.get_title() for ax in axes]
    ['component 1', 'component 2', 'component 3']
    """
    X = _require_drawn(estimator, "transform", X)
    rows, marks, note = sample_for_plot(X, "X", labels)
    horizontal, vertical, points = plane_grid(plane_corners(rows))
    values = np.asarray(estimator.transform(select_fitted_columns(estimator, points)))
    if values.ndim != 2 or len(values) != len(points):
        raise InvalidInputError(
            f"contours draws components (n, q), and {type(estimator).__name__}.transform returned {values.shape} for "
            f"{len(points):,} rows."
        )
    asked = list(
        range(min(values.shape[1], _PANELS)) if numbers is None else np.atleast_1d(np.asarray(numbers, object))
    )
    if not asked:
        raise InvalidInputError("contours draws one component or more, and numbers names none.")
    for number in asked:
        require_column(number, values.shape[1])
    axes = make_panels(len(asked), ax)
    for number, panel in zip(asked, axes, strict=True):
        heights = values[:, number].reshape(len(vertical), len(horizontal))
        panel.contourf(horizontal, vertical, heights, 20, cmap="Greys", alpha=0.6)
        panel.contour(horizontal, vertical, heights, 10, colors="black", linewidths=0.6)
        scatter(panel, rows, marks)
        panel.set(title=f"component {number + 1}", xticks=(), yticks=())
        write_note(panel, note)
    return axes


def _require_drawn(estimator: object, method: str, X: Values) -> Values:
    """Return rows as they are drawn, once an estimator has the method and was fitted to columns of these names."""
    if not hasattr(estimator, method):
        raise InvalidInputError(f"The picture is of what {method} returns, and a {type(estimator).__name__} has none.")
    rows: Values = unwrap(X)  # type: ignore[assignment]  # what it holds
    require_fitted_columns(estimator, column_names(rows))
    return rows
