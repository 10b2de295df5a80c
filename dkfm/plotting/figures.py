"""Pictures, with Matplotlib (the extra `plot`).

Every function draws on `ax`, or on axes of a new figure, and returns them; none shows anything, so none needs a
display. Arrays are NumPy's or Dask's. Of more rows than are said here a seeded sample is drawn, and the picture says
so; of a dask array the chunks that hold its rows are computed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from dkfm.core.frames import is_dask_collection, unwrap
from dkfm.core.rows import Array, Rows
from dkfm.errors import InvalidInputError
from dkfm.estimators import ExactFeatureMap
from dkfm.files import local
from dkfm.numerics import scorer
from dkfm.numerics.certificates import certificate
from dkfm.plotting.axes import add_legend, ensure_axes, pyplot, require_column, scatter, write_note
from dkfm.plotting.data import Labels, Values, group_by_label, require_column_values, require_matrix, sample_for_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KNOWN_SHARE = 0.95
_SIGN = b"Software\0dkfm"
"""What a picture of dkfm's says of itself."""


def spectrum(eigenvalues: Values | BaseEstimator, dropped: Values | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Draw eigenvalues on a logarithmic scale: those kept, those dropped, and the cut between them as a line.

    Parameters
    ----------
    eigenvalues : array-like or dask array of shape (r,), or fitted estimator
        Kept, positive, in descending order: `eigenvalues_`, or `pivots_` in the cholesky basis. Of an estimator its
        own: of an `ExactFeatureMap` with `dropped_`, of a `KernelPCA` with those that are zero as dropped.
    dropped : array-like or dask array of shape (m,), optional
        What was taken for zero, `dropped_`. Negative ones are drawn by their size, with a sign of their own; those that
        are zero are only counted.
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib axes

    Raises
    ------
    InvalidInputError
        Not one-dimensional, empty, or kept and not positive; or an estimator without a spectrum.
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import ExactFeatureMap, plotting
    >>> from dkfm.kernels import Linear
    >>> phi = ExactFeatureMap(Linear()).fit(np.random.default_rng(0).normal(size=(100, 2)))
    >>> plotting.spectrum(phi.eigenvalues_, phi.dropped_).get_title()
    'Spectrum, rank 2'
    """
    kept, rest = _spectrum_of(eigenvalues, dropped)
    if not (kept > 0).all():
        raise InvalidInputError(f"Kept eigenvalues are positive, and one is {kept.min():.3g}; give others as dropped.")
    ax = ensure_axes(ax)
    r = len(kept)
    ax.semilogy(np.arange(1, r + 1), kept, ".-", markersize=3, linewidth=1, label=f"{r:,} kept")
    index = np.arange(r + 1, r + 1 + len(rest))
    for chosen, marker, what in ((rest > 0, ".", "dropped"), (rest < 0, "x", "dropped, negative: their size")):
        if chosen.any():
            ax.semilogy(index[chosen], np.abs(rest[chosen]), marker, markersize=3, label=f"{chosen.sum():,} {what}")
    if len(rest):
        zeros = int((rest == 0).sum())
        ax.axvline(r + 0.5, color="black", linewidth=1, linestyle="--", label="the cut")
        if zeros:
            ax.plot([], [], " ", label=f"{zeros:,} dropped, zero: not drawn")
        ax.legend(fontsize="small")
    ax.set(xlabel="index", ylabel="eigenvalue of the Gram matrix", title=f"Spectrum, rank {r}")
    ax.grid(alpha=0.3)
    return ax


def components(
    scores: Values, labels: Labels | None = None, *, pair: tuple[int, int] = (0, 1), ax: "Axes | None" = None
) -> "Axes":
    """Draw two components of scores, or discriminants, or any columns, coloured by labels.

    Parameters
    ----------
    scores : array-like or dask array of shape (n, q)
        At most 5,000 rows are drawn. A single column is drawn as a histogram.
    labels : array-like or dask array of shape (n,), optional
        Numbers or strings. More than 20 different ones have a colour bar instead of a legend.
    pair : (int, int)
        Which columns, from 0.
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib axes

    Raises
    ------
    InvalidInputError
        Shapes that do not fit, or columns that are not there.
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import KernelPCA, plotting
    >>> from dkfm.kernels import Gaussian
    >>> X = np.random.default_rng(0).normal(size=(100, 2))
    >>> scores = KernelPCA(3, kernel=Gaussian(2.0)).fit_transform(X)
    >>> plotting.components(scores, np.where(X[:, 0] > 0, "right", "left"), pair=(0, 2)).get_ylabel()
    'component 3'
    """
    q = require_matrix(scores, "scores")[1]
    rows, marks, note = sample_for_plot(scores, "scores", labels)
    one, other = _pair(pair, q)
    ax = ensure_axes(ax)
    if q == 1:
        edges = np.histogram_bin_edges(rows[:, 0], 40).tolist()
        for name, chosen in group_by_label(marks, len(rows)):
            ax.hist(rows[chosen, 0], edges, alpha=0.6, label=name)
        ax.set(xlabel="component 1", ylabel="rows")
    else:
        scatter(ax, rows[:, (one, other)], marks)
        ax.set(xlabel=f"component {one + 1}", ylabel=f"component {other + 1}")
    ax.set_title("Kernel principal components")
    if marks is not None:
        add_legend(ax, len(np.unique(marks)))
    write_note(ax, note)
    return ax


def certificates(feature_map: ExactFeatureMap, Z: Values | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Draw what a certificate is the largest of: the relative error of each pair, ``|err| / sqrt(k(x, x) k(z, z))``.

    Parameters
    ----------
    feature_map : ExactFeatureMap
        Fitted. At most 512 of its landmarks are measured anew, evenly spread.
    Z : array-like or dask array of shape (m, d), optional
        Points to pair with them, at most 512; by default the landmarks again.
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib axes
        The line is the relative error that was measured when the map was fitted, which also knows one combination of
        all landmarks. Pairs without any error are only counted.

    Raises
    ------
    InvalidInputError
        Not a fitted map of points, or points of other columns.
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import ExactFeatureMap, plotting
    >>> from dkfm.kernels import Gaussian
    >>> phi = ExactFeatureMap(Gaussian(2.0)).fit(np.random.default_rng(0).normal(size=(50, 3)))
    >>> plotting.certificates(phi).get_title()
    'Errors of 2,500 pairs of landmarks'
    """
    if not isinstance(feature_map, ExactFeatureMap) or not hasattr(feature_map, "model_"):
        raise InvalidInputError(
            f"certificates draws the errors of a fitted ExactFeatureMap, and got {feature_map!r:.50}."
        )
    if feature_map.kernel_.is_precomputed:
        raise InvalidInputError("A map of a precomputed kernel has no points that could be measured anew.")
    model = feature_map.model_
    points = None if Z is None else _measured_points(feature_map, Z)
    landmarks = model.points[certificate.sample_evenly(model.landmarks.shape[0])]
    mean = vars(feature_map).get("mean_")
    errors = certificate.relative_errors(scorer.prepare_compact_scorer(model), landmarks, points, mean).ravel()
    shown = errors[errors > 0]
    if not np.isfinite(shown).all():
        raise InvalidInputError("Some pairs have an infinite relative error: a k(x, x) is 0 where a feature is not.")
    ax = ensure_axes(ax)
    what = "pairs of landmarks" if points is None else "pairs of landmarks and points"
    ax.set(xlabel="relative error", ylabel="pairs", title=f"Errors of {errors.size:,} {what}")
    fitted = feature_map.certificate_.relative_error
    if len(shown):
        ends = np.log10([min(shown.min(), fitted or np.inf), max(shown.max(), fitted)])
        ax.hist(shown, np.logspace(np.floor(ends[0]), np.floor(ends[1]) + 1, 60).tolist())
        ax.set_xscale("log")
    if fitted > 0:
        ax.axvline(fitted, color="black", linewidth=1, linestyle="--", label=f"certificate, {fitted:.1e}")
    ax.plot([], [], " ", label=f"{errors.size - len(shown):,} pairs have no error")
    ax.legend(fontsize="small")
    if landmarks.shape[0] < model.landmarks.shape[0]:
        write_note(ax, f"{landmarks.shape[0]} of {model.landmarks.shape[0]:,} landmarks, evenly spread")
    return ax


def novelty(known: Values, new: Values, *, quantity: str = "reconstruction error", ax: "Axes | None" = None) -> "Axes":
    """Draw the histograms of a novelty score of known rows and of new ones, as shares of each.

    Parameters
    ----------
    known, new : array-like or dask array of shape (n,) and (m,)
        `reconstruction_error` of components or `residual` of a map. At most 5,000 of each are drawn.
    quantity : str
        What they are.
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib axes
        The line is the 95 % quantile of the known rows that are drawn; the legend has the share of the new ones beyond.

    Raises
    ------
    InvalidInputError
        Not one-dimensional, empty, or not finite.
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import ExactFeatureMap, plotting
    >>> from dkfm.kernels import Gaussian
    >>> X = np.random.default_rng(0).normal(size=(100, 3))
    >>> phi = ExactFeatureMap(Gaussian(2.0), tol=0.1).fit(X)
    >>> plotting.novelty(phi.residual(X), phi.residual(X + 3), quantity="residual").get_xlabel()
    'residual'
    """
    sides, notes = [], []
    for values, name in ((known, "known"), (new, "new")):
        taken, _, note = sample_for_plot(values, name, None, shape=1)
        sides.append(require_column_values(taken, name))
        notes.append(f"{name}: {note}" if note else "")
    ax = ensure_axes(ax)
    line = float(np.quantile(sides[0], _KNOWN_SHARE))
    edges = np.histogram_bin_edges(np.concatenate(sides), 50).tolist()
    for values, label in zip(sides, ("known rows", f"new rows, {(sides[1] > line).mean():.1%} beyond"), strict=True):
        ax.hist(values, edges, weights=np.full(len(values), 1 / len(values)), alpha=0.6, label=label)
    ax.axvline(line, color="black", linewidth=1, linestyle="--", label=f"{_KNOWN_SHARE:.0%} of the known rows")
    ax.set(xlabel=quantity, ylabel="share of the rows", title="Novelty")
    ax.legend(fontsize="small")
    write_note(ax, "\n".join(filter(None, notes)))
    return ax


def _measured_points(feature_map: ExactFeatureMap, Z: Values) -> Rows:
    """Return points as a map takes them; of a dask array those that a certificate would measure."""
    Z = unwrap(Z)  # type: ignore[assignment]  # what it holds
    if is_dask_collection(Z):
        Z = np.asarray(Z[certificate.sample_evenly(require_matrix(Z, "Z")[0])])  # type: ignore[index]  # a dask array, as seen
    return feature_map._rows(Z, "Z")


def save_picture(ax: "Axes", path: Path) -> None:
    """Write the figure of some axes to a PNG file, in place of an earlier one of dkfm's, and close it.

    Raises
    ------
    StoreExistsError
        The file is something else; it is left untouched.
    """
    require_own_picture(path)
    figure = ax.get_figure(root=True)
    assert figure is not None  # noqa: S101  # axes that were drawn on have one; this tells the type checker
    figure.savefig(path, format="png", dpi=120, metadata={"Software": "dkfm"})
    pyplot().close(figure)


def require_own_picture(path: Path) -> None:
    """Raise where there is a file that `save_picture` did not write."""
    local.require_signature(path, _SIGN, "picture")


def _spectrum_of(given: Values | BaseEstimator, dropped: Values | None) -> tuple[Array, Array]:
    """Return eigenvalues and those dropped, as they are given or as an estimator has them."""
    values: Values
    if not isinstance(given, BaseEstimator):
        values = given
    else:
        check_is_fitted(given)
        found = next((vars(given)[name] for name in ("eigenvalues_", "pivots_") if name in vars(given)), None)
        if found is None:
            raise InvalidInputError(
                f"spectrum draws eigenvalues, and a {type(given).__name__} has none; give an array of what to draw."
            )
        own, zero = np.asarray(found), np.asarray(found) <= 0
        values = own[~zero]
        dropped = np.concatenate([own[zero], vars(given).get("dropped_", ())]) if dropped is None else dropped
    return require_column_values(values, "eigenvalues"), require_column_values(
        () if dropped is None else dropped, "dropped", least=0
    )


def _pair(pair: tuple[int, int], q: int) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InvalidInputError(f"pair takes the numbers of two columns, from 0, and got {pair!r:.50}.")
    if q > 1:
        for number in pair:
            require_column(number, q)
    return int(pair[0]), int(pair[1])
