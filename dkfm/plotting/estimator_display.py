"""Plot the standard pictures of a fitted estimator side by side."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from dkfm.errors import InvalidInputError
from dkfm.estimators import ExactFeatureMap
from dkfm.plotting.axes import ensure_panel_axes
from dkfm.plotting.data import Labels, Values
from dkfm.plotting.figures import certificates, components, spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_INCHES = 4.5
"""Width and height of a picture."""


def display(
    estimator: BaseEstimator,
    X: Values | None = None,
    labels: Labels | None = None,
    *,
    ax: "Sequence[Axes] | None" = None,
) -> "list[Axes]":
    """Plot the standard pictures of a fitted estimator: those of `spectrum`, `certificates` and `components`.

    Parameters
    ----------
    estimator : fitted ExactFeatureMap, KernelPCA or KernelFisher
        A feature map is drawn with its spectrum and its certificates, components with their spectrum, and discriminants
        only with the scores of `X`.
    X : array-like or dask array of shape (n, d), optional
        Rows, whose first two columns of scores are drawn too.
    labels : array-like or dask array of shape (n,), optional
        Labels of the rows.
    ax : sequence of matplotlib axes, optional
        Axes to draw on, one for each picture; new ones by default.

    Returns
    -------
    list of matplotlib axes
        The axes with the pictures.

    Raises
    ------
    InvalidInputError
        The estimator is of another class, or discriminants are given without rows.
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import KernelPCA, plotting
    >>> X = np.random.default_rng(0).normal(size=(100, 2))
    >>> [axes.get_title() for axes in plotting.display(KernelPCA(3, kernel="rbf").fit(X), X)]
    ['Spectrum, rank 3', 'Kernel principal components']
    """
    if isinstance(estimator, type) or not hasattr(estimator, "fit"):
        raise InvalidInputError(f"display draws a fitted estimator, and {estimator!r:.50} is none.")
    check_is_fitted(estimator)
    draw: list[Callable[[Axes], Axes]] = []
    if hasattr(estimator, "eigenvalues_") or hasattr(estimator, "pivots_"):
        draw.append(lambda panel: spectrum(estimator, ax=panel))
    if isinstance(estimator, ExactFeatureMap) and not estimator.kernel_.is_precomputed:
        draw.append(lambda panel: certificates(estimator, ax=panel))
    if X is not None and hasattr(estimator, "transform"):
        draw.append(lambda panel: components(estimator, labels, X=X, ax=panel))
    if not draw:
        needs = "needs the rows X to draw" if hasattr(estimator, "transform") else "cannot draw"
        raise InvalidInputError(f"display {needs} a {type(estimator).__name__}.")
    panels = ensure_panel_axes(len(draw), ax, _PANEL_INCHES)
    return [picture(panel) for picture, panel in zip(draw, panels, strict=True)]
