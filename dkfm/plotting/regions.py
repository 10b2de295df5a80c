"""Plot the predictions and the components of estimators over a plane of two columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from sklearn.base import RegressorMixin

from dkfm.core.frames import column_names, convert_container
from dkfm.errors import InvalidInputError
from dkfm.estimators.columns_between_models import require_fitted_columns, to_named_frame
from dkfm.plotting.axes import (
    add_legend,
    choose_label_color,
    ensure_axes,
    ensure_panel_axes,
    get_score_name,
    require_component,
    scatter,
    write_note,
)
from dkfm.plotting.data import (
    Labels,
    Values,
    compute_plot_corners,
    concatenate_labels,
    escape_label,
    plane_grid,
    require_sortable,
    sample_for_plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_NUMBERS = 256
"""Largest number of different predicted floats that are drawn as classes; what predicts more is a regression."""

_MAX_PANELS = 8
"""Largest number of components that are drawn by default."""


class Predictor(Protocol):
    """Estimator that `decision_regions` accepts."""

    def predict(self, X: object) -> object:
        """Return a label for each row."""


class Transformer(Protocol):
    """Estimator that `contours` accepts."""

    def transform(self, X: object) -> object:
        """Return the components (n, q) of rows."""


def decision_regions(
    estimator: Predictor, X: Values, labels: Labels | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Plot the labels that an estimator predicts over the plane, with points on top.

    Parameters
    ----------
    estimator : fitted estimator with `predict`
        Estimator that was fitted to two columns.
    X : array-like or dask array of shape (n, 2)
        Points to draw, at most 5,000. The plot covers their bounding box and a margin of a tenth.
    labels : array-like or dask array of shape (n,), optional
        Labels of the points, which are drawn in the colours of the predicted regions.
    ax : matplotlib axes, optional
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib axes
        The axes with the plot.

    Raises
    ------
    InvalidInputError
        X does not have two columns, `predict` does not return one label for each row, or the estimator is a regression.
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
    X = _validate_plot_data(estimator, "predict", X)
    rows, row_labels, note = sample_for_plot(X, "X", labels)
    horizontal, vertical, points = plane_grid(compute_plot_corners(rows))
    predicted = require_sortable(np.asarray(estimator.predict(to_named_frame(estimator, points))), "Predictions")
    if predicted.shape != (len(points),):
        raise InvalidInputError(
            f"decision_regions draws one label a row, and {type(estimator).__name__}.predict returned "
            f"{predicted.shape} for {len(points):,} rows."
        )
    seen = predicted if row_labels is None else concatenate_labels(predicted, row_labels, "Predictions and labels")
    classes, codes = np.unique(seen, return_inverse=True)
    if isinstance(estimator, RegressorMixin) or (predicted.dtype.kind == "f" and len(classes) > _MAX_NUMBERS):
        raise InvalidInputError(f"decision_regions draws classes, and {type(estimator).__name__} predicts numbers.")
    ax = ensure_axes(ax)
    colours = [choose_label_color(code, len(classes)) for code in range(len(classes))]
    regions = codes[: len(points)].reshape(len(vertical), len(horizontal))
    from matplotlib.colors import ListedColormap

    ax.pcolormesh(
        horizontal, vertical, regions, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(classes) - 0.5, alpha=0.3
    )
    if row_labels is None:
        ax.scatter(rows[:, 0], rows[:, 1], s=8, color="black", alpha=0.8)
    else:
        for code, value in enumerate(classes):
            x, y = rows[codes[len(points) :] == code].T
            label, colour = escape_label(value), colours[code]
            ax.scatter(x, y, s=12, color=colour, edgecolors="black", linewidths=0.3, label=label)
        add_legend(ax, len(classes))
    across, upward = map(escape_label, column_names(X) or ("column 1", "column 2"))
    ax.set(xlabel=across, ylabel=upward, title=f"What {type(estimator).__name__} predicts")
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
    """Plot each component as contour lines over the plane, as in the classic toy example of kernel PCA.

    Parameters
    ----------
    estimator : fitted estimator with `transform`
        `KernelPCA`, `ExactFeatureMap` or `KernelFisher` that was fitted to two columns.
    X : array-like or dask array of shape (n, 2)
        Points to draw, at most 5,000. The plot covers their bounding box and a margin of a tenth.
    labels : array-like or dask array of shape (n,), optional
        Labels of the points.
    numbers : sequence of int, optional
        Numbers of the components, from 0; by default the first eight or fewer.
    ax : matplotlib axes or sequence of them, optional
        Axes to draw on, one for each component; new ones by default.

    Returns
    -------
    list of matplotlib axes
        The axes of each component.

    Raises
    ------
    InvalidInputError
        X does not have two columns, a component does not exist, or the numbers of axes and components differ.
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
    X = _validate_plot_data(estimator, "transform", X)
    rows, row_labels, note = sample_for_plot(X, "X", labels)
    horizontal, vertical, points = plane_grid(compute_plot_corners(rows))
    values = np.asarray(estimator.transform(to_named_frame(estimator, points)))
    if values.ndim != 2 or len(values) != len(points):
        raise InvalidInputError(
            f"contours draws components (n, q), and {type(estimator).__name__}.transform returned {values.shape} for "
            f"{len(points):,} rows."
        )
    requested = list(
        range(min(values.shape[1], _MAX_PANELS)) if numbers is None else np.atleast_1d(np.asarray(numbers, object))
    )
    if not requested:
        raise InvalidInputError("contours draws one component or more, and numbers names none.")
    for number in requested:
        require_component(number, values.shape[1])
    axes = ensure_panel_axes(len(requested), ax)
    for number, panel in zip(requested, axes, strict=True):
        heights = values[:, number].reshape(len(vertical), len(horizontal))
        panel.contourf(horizontal, vertical, heights, 20, cmap="Greys", alpha=0.6)
        panel.contour(horizontal, vertical, heights, 10, colors="black", linewidths=0.6)
        scatter(panel, rows, row_labels)
        panel.set(title=f"{get_score_name(estimator)} {number + 1}", xticks=(), yticks=())
        write_note(panel, note)
    return axes


def _validate_plot_data(estimator: object, method: str, X: Values) -> Values:
    """Return the array or table in X; raise unless the estimator has the method and the columns of X are its own."""
    if not hasattr(estimator, method):
        raise InvalidInputError(f"The picture shows what {method} returns; {type(estimator).__name__} has no {method}.")
    rows: Values = convert_container(X)  # type: ignore[assignment]  # the wrapped array
    require_fitted_columns(estimator, column_names(rows))
    return rows
