"""Plot spectra, components, certificates and novelty scores with Matplotlib (the extra `plot`).

Every function draws on `ax`, or on axes of a new figure, and returns the axes. No function needs a display. Arrays are
NumPy or Dask arrays. If there are more rows than a function's limit, it draws a seeded sample and notes this on the
plot; for a dask array it computes only the chunks that hold the sample.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from dkfm.core.frames import convert_container, is_dask_collection
from dkfm.core.rows import Array, Rows
from dkfm.errors import InvalidInputError
from dkfm.estimators import ExactFeatureMap
from dkfm.numerics import scorer
from dkfm.numerics.certificates import certificate
from dkfm.plotting.axes import (
    add_legend,
    ensure_axes,
    get_score_name,
    require_component,
    scatter,
    write_note,
)
from dkfm.plotting.data import (
    Labels,
    Values,
    iter_label_masks,
    read_matrix_shape,
    require_finite_vector,
    sample_for_plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_QUANTILE = 0.95
"""Quantile of the known rows beyond which a new row counts as novel."""

_TITLES = {
    "component": "Kernel principal components",
    "discriminant": "Kernel Fisher discriminants",
    "feature": "Features",
}
"""Titles of plots of scores, by the name of a column."""


def spectrum(eigenvalues: Values | BaseEstimator, dropped: Values | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Plot kept and dropped eigenvalues on a logarithmic scale, separated by a line.

    Parameters
    ----------
    eigenvalues : array-like or dask array of shape (r,), or fitted estimator
        Kept eigenvalues, positive and in descending order: `eigenvalues_`, or `pivots_` in the cholesky basis. For a
        fitted `ExactFeatureMap`, its `dropped_` is plotted too; for a `KernelPCA`, zero eigenvalues count as dropped.
    dropped : array-like or dask array of shape (m,), optional
        Eigenvalues that were treated as zero, `dropped_`. The absolute values of negative ones are drawn with another
        marker; exact zeros are only counted.
    ax : matplotlib axes, optional
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib axes
        The axes with the plot.

    Raises
    ------
    InvalidInputError
        An array is not one-dimensional, no eigenvalue is kept, a kept eigenvalue is not positive, or the estimator has
        no eigenvalues.
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
    kept, rest, quantity = _read_spectrum(eigenvalues, dropped)
    if not (kept > 0).all():
        raise InvalidInputError(f"Kept eigenvalues are positive, and one is {kept.min():.3g}; give others as dropped.")
    ax = ensure_axes(ax)
    r = len(kept)
    ax.semilogy(np.arange(1, r + 1), kept, ".-", markersize=3, linewidth=1, label=f"{r:,} kept")
    index = np.arange(r + 1, r + 1 + len(rest))
    for mask, marker, description in ((rest > 0, ".", "dropped"), (rest < 0, "x", "dropped, negative: their size")):
        if mask.any():
            ax.semilogy(index[mask], np.abs(rest[mask]), marker, markersize=3, label=f"{mask.sum():,} {description}")
    if len(rest):
        zeros = int((rest == 0).sum())
        ax.axvline(r + 0.5, color="black", linewidth=1, linestyle="--", label="the cut")
        if zeros:
            ax.plot([], [], " ", label=f"{zeros:,} dropped, zero: not drawn")
        ax.legend(fontsize="small")
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    ax.set(xlabel="index", ylabel=quantity, title=f"Spectrum, rank {r}")
    ax.grid(alpha=0.3)
    return ax


def components(
    scores: Values | BaseEstimator,
    labels: Labels | None = None,
    *,
    X: Values | None = None,
    pair: tuple[int, int] = (0, 1),
    ax: "Axes | None" = None,
) -> "Axes":
    """Plot two columns of scores, such as components or discriminants, coloured by labels.

    Parameters
    ----------
    scores : array-like or dask array of shape (n, q), or fitted estimator
        Scores, or an estimator whose `transform` computes the scores of `X`. At most 5,000 rows are drawn. A single
        column is drawn as a histogram.
    labels : array-like or dask array of shape (n,), optional
        Numbers or strings. More than 20 different labels get a colour bar instead of a legend.
    X : array-like or dask array of shape (n, d), optional
        Rows that the estimator transforms; a dask array is transformed lazily.
    pair : (int, int)
        Numbers of the two columns, from 0.
    ax : matplotlib axes, optional
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib axes
        The axes with the plot.

    Raises
    ------
    InvalidInputError
        The shapes do not match, or a column does not exist.
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
    scores, what = _resolve_scores(scores, X)
    q = read_matrix_shape(scores, "scores")[1]
    rows, row_labels, note = sample_for_plot(scores, "scores", labels)
    first, second = _require_pair(pair, q)
    ax = ensure_axes(ax)
    if q == 1:
        edges = np.histogram_bin_edges(rows[:, 0], 40).tolist()
        for name, mask in iter_label_masks(row_labels, len(rows)):
            ax.hist(rows[mask, 0], edges, alpha=0.6, label=name)
        ax.set(xlabel=f"{what} 1", ylabel="rows")
    else:
        scatter(ax, rows[:, (first, second)], row_labels)
        ax.set(xlabel=f"{what} {first + 1}", ylabel=f"{what} {second + 1}")
    ax.set_title(_TITLES[what])
    if row_labels is not None:
        add_legend(ax, len(np.unique(row_labels)))
    write_note(ax, note)
    return ax


def certificates(feature_map: ExactFeatureMap, Z: Values | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Plot a histogram of relative errors ``|error| / sqrt(k(x, x) k(z, z))``; the certificate is their maximum.

    Parameters
    ----------
    feature_map : ExactFeatureMap
        Fitted map. At most 512 of its landmarks, evenly spread, are measured again.
    Z : array-like or dask array of shape (m, d), optional
        Points to pair with the landmarks; at most 512, evenly spread, are used. By default the landmarks themselves.
    ax : matplotlib axes, optional
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib axes
        The axes with the histogram. A line marks the relative error that was measured at the fit, which also covers a
        linear combination of all landmarks. Pairs with an error of exactly 0 are only counted.

    Raises
    ------
    InvalidInputError
        The map is not fitted or has a precomputed kernel, or the points have another number of columns.
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
            f"certificates draws the errors of a fitted ExactFeatureMap, and got a {type(feature_map).__name__}."
        )
    if feature_map.kernel_.is_precomputed:
        raise InvalidInputError("A map of a precomputed kernel has no points that could be measured anew.")
    model = feature_map.model_
    points = None if Z is None else _load_sampled_points(feature_map, Z)
    landmarks = model.original_landmarks[certificate.sample_evenly(model.landmarks.shape[0])]
    score, mean = scorer.prepare_compact_scorer(model), vars(feature_map).get("mean_")
    errors = certificate.compute_relative_map_errors(score, landmarks, points, mean).ravel()
    shown = errors[errors > 0]
    if not np.isfinite(shown).all():
        raise InvalidInputError("Some pairs have an infinite relative error: a k(x, x) is 0 where a feature is not.")
    ax = ensure_axes(ax)
    pairs = "pairs of landmarks" if points is None else "pairs of landmarks and points"
    ax.set(xlabel="relative error", ylabel="pairs", title=f"Errors of {errors.size:,} {pairs}")
    fitted = feature_map.certificate_.relative_error
    if len(shown):
        ends = np.log10([min(shown.min(), fitted or np.inf), max(shown.max(), fitted)])
        ax.hist(shown, np.logspace(np.floor(ends[0]), np.floor(ends[1]) + 1, 60).tolist())
        ax.set_xscale("log")
    if fitted > 0:
        ax.axvline(fitted, color="black", linewidth=1, linestyle="--", label=f"certificate, {fitted:.1e}")
    ax.plot([], [], " ", label=f"{errors.size - len(shown):,} pairs have no error")
    if landmarks.shape[0] < model.landmarks.shape[0]:
        ax.plot([], [], " ", label=f"{landmarks.shape[0]} of {model.landmarks.shape[0]:,} landmarks, evenly spread")
    ax.legend(fontsize="small")
    return ax


def novelty(
    known: Values,
    new: Values,
    *,
    estimator: BaseEstimator | None = None,
    quantity: str = "reconstruction error",
    ax: "Axes | None" = None,
) -> "Axes":
    """Plot the histograms of a novelty score of known rows and of new rows, each scaled to sum to 1.

    Parameters
    ----------
    known, new : array-like or dask array of shape (n,) and (m,)
        Novelty scores: `reconstruction_error` of components or `residual` of a map; with `estimator`, rows (n, d) and
        (m, d). At most 5,000 of each are drawn. Known rows should not be those of the fit, whose scores are too small.
    estimator : fitted KernelPCA or ExactFeatureMap, optional
        Estimator that computes the scores of the rows.
    quantity : str
        Name of the novelty score, for the axis; with `estimator`, the name of its score is used.
    ax : matplotlib axes, optional
        Axes to draw on; new ones by default.

    Returns
    -------
    matplotlib axes
        The axes with the plot. A line marks the 95 % quantile of the drawn known rows; the legend states the share of
        new rows beyond it.

    Raises
    ------
    InvalidInputError
        An array is not one-dimensional, is empty, or is not finite.
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import ExactFeatureMap, plotting
    >>> from dkfm.kernels import Gaussian
    >>> X, known = np.random.default_rng(0).normal(size=(2, 100, 3))
    >>> phi = ExactFeatureMap(Gaussian(2.0), tol=0.1).fit(X)
    >>> plotting.novelty(phi.residual(known), phi.residual(known + 3), quantity="residual").get_xlabel()
    'residual'
    """
    if estimator is not None:
        quantity, score = _find_novelty_method(estimator)
        known, new = score(known), score(new)
    samples, notes = [], []
    for values, name in ((known, "known"), (new, "new")):
        sample, _, note = sample_for_plot(values, name, None, ndim=1)
        samples.append(require_finite_vector(sample, name))
        notes.append(f"{name}: {note}" if note else "")
    ax = ensure_axes(ax)
    cut = float(np.quantile(samples[0], _QUANTILE))
    edges = np.histogram_bin_edges(np.concatenate(samples), 50).tolist()
    for values, label in zip(samples, ("known rows", f"new rows, {(samples[1] > cut).mean():.1%} beyond"), strict=True):
        ax.hist(values, edges, weights=np.full(len(values), 1 / len(values)), alpha=0.6, label=label)
    ax.axvline(cut, color="black", linewidth=1, linestyle="--", label=f"{_QUANTILE:.0%} of the known rows")
    ax.set(xlabel=quantity, ylabel="share of the rows", title="Novelty")
    ax.legend(fontsize="small")
    write_note(ax, "\n".join(filter(None, notes)))
    return ax


def _resolve_scores(scores: Values | BaseEstimator, X: Values | None) -> tuple[Values, str]:
    """Return scores, computed by an estimator for rows X if one is given, and the name of a column."""
    if not isinstance(scores, BaseEstimator):
        if X is not None:
            raise InvalidInputError("X is for an estimator to transform, and the scores are given as an array.")
        return scores, "component"
    check_is_fitted(scores)
    if not hasattr(scores, "transform"):
        raise InvalidInputError(f"components draws what transform returns, and a {type(scores).__name__} has none.")
    if X is None:
        raise InvalidInputError(f"components of a {type(scores).__name__} needs the rows X.")
    return scores.transform(X), get_score_name(scores)


def _find_novelty_method(estimator: BaseEstimator) -> tuple[str, Callable[[Values], Values]]:
    """Return the name of the novelty score of an estimator, and the method that computes it."""
    check_is_fitted(estimator)
    for name in ("reconstruction_error", "residual"):
        if hasattr(estimator, name):
            return name.replace("_", " "), getattr(estimator, name)
    raise InvalidInputError(
        f"A {type(estimator).__name__} has no novelty score; a KernelPCA or an ExactFeatureMap has."
    )


def _load_sampled_points(feature_map: ExactFeatureMap, Z: Values) -> Rows:
    """Return points in the form that a map accepts; of a dask array, load only the rows that a certificate samples."""
    Z = convert_container(Z)  # type: ignore[assignment]  # the wrapped array
    if is_dask_collection(Z):
        Z = np.asarray(Z[certificate.sample_evenly(read_matrix_shape(Z, "Z")[0])])  # type: ignore[index]  # a dask array, checked above
    return feature_map._check_rows(Z, "Z")


def _read_spectrum(spectrum: Values | BaseEstimator, dropped: Values | None) -> tuple[Array, Array, str]:
    """Return kept and dropped eigenvalues of a fitted estimator, or of arrays, as float64, and their name."""
    values: Values
    quantity = "pivot" if hasattr(spectrum, "pivots_") else "eigenvalue"
    if not isinstance(spectrum, BaseEstimator):
        values = spectrum
    else:
        check_is_fitted(spectrum)
        fitted = next((vars(spectrum)[name] for name in ("eigenvalues_", "pivots_") if name in vars(spectrum)), None)
        if fitted is None:
            raise InvalidInputError(
                f"spectrum draws eigenvalues, and a {type(spectrum).__name__} has none; give an array of what to draw."
            )
        fitted, zero = np.asarray(fitted), np.asarray(fitted) <= 0
        values = fitted[~zero]
        dropped = np.concatenate([fitted[zero], vars(spectrum).get("dropped_", ())]) if dropped is None else dropped
    rest = require_finite_vector(() if dropped is None else dropped, "dropped", least=0)
    return require_finite_vector(values, "eigenvalues"), rest, quantity


def _require_pair(pair: tuple[int, int], q: int) -> tuple[int, int]:
    """Return the checked numbers of two of q columns; raise if they do not exist, unless there is only one column."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InvalidInputError(f"pair takes the numbers of two columns, from 0, and got {pair!r:.50}.")
    if q == 1:
        return 0, 0
    for number in pair:
        require_component(number, q)
    return int(pair[0]), int(pair[1])
