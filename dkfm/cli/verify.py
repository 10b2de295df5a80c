"""Run `dkfm verify`: measure a stored model or an output again, without scikit-learn, and describe the result."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, cast

from dkfm.cli.process import disable_gc_during_imports
from dkfm.errors import InvalidInputError

if TYPE_CHECKING:
    from dkfm.core.rows import Array
    from dkfm.estimators.stored.base import StoredEstimator
    from dkfm.estimators.stored.feature_map import StoredMap
    from dkfm.estimators.stored.folded import StoredFold
    from dkfm.estimators.stored.ridge import StoredRidge

_FEW = 4
"""Largest number of targets whose numbers are all printed."""


def verify_output(
    path: str, against: str | None, sample: int, model: str | None, trusted: Collection[str], progress: bool
) -> tuple[dict[str, object], list[str]]:
    """Compare an output with its receipts, and with rows of its input if given.

    `progress` says whether to show a progress bar.

    Returns
    -------
    facts : dict
        Measurements, as JSON values.
    lines : list of str
        The same measurements as text, with the path.
    """
    with disable_gc_during_imports():
        from dkfm.scoring.verification import verify_scores

    result = verify_scores(path, against, sample=sample, model=model, trusted=trusted, progress=progress)
    facts = {"kind": "scores", "path": path, "rows": result.rows, "chunks": result.chunks}
    lines = [f"{path}: {result.rows:,} rows, every chunk as it was written"]
    if against is not None:
        facts |= {"against": against, "sampled": result.sampled, "worst": result.worst, "ids": result.ids_compared}
        share = "less than 0.001" if result.worst < 1e-3 else f"at most {result.worst:.1g}"
        difference = f"{result.sampled:,} rows scored anew by the formula agree: they differ by {share}"
        ids = ", and their ids are those of the input" if result.ids_compared else ""
        lines.append(f"{path}: {difference} of what rounding allows{ids}")
    return facts, lines


def verify_model(path: str, against: str | None, trusted: Collection[str]) -> tuple[dict[str, object], list[str]]:
    """Measure a model again, on the rows of a source if one is given; return facts and lines as `verify_output`."""
    with disable_gc_during_imports():
        from dkfm.estimators.stored.feature_map import StoredMap
        from dkfm.estimators.stored.opening import open_stored

    stored = open_stored(path, trusted)
    result = stored.verify(_read_points(stored, against))
    first, *others = str(result).splitlines()
    lines = [f"{path}: {first}"]
    if isinstance(stored, StoredMap):
        lines += (f"{path}: {line}" for line in (format_model_size(stored), *_iter_map_lines(stored)))
    lines += (f"{against} {line}" for line in others)
    facts = {"kind": "model", "path": path, **describe_fitted_model(stored)}
    return facts | ({} if against is None else {"against": against}) | {"measured": result.to_dict()}, lines


def _read_points(stored: "StoredEstimator | StoredFold", against: str | None) -> object:
    """Return the rows on which to measure a model: a sample, or the whole Gram matrix of a precomputed kernel."""
    from dkfm.sources.base import read_evenly_spaced_rows
    from dkfm.sources.opening import open_source

    if stored.model.kernel.is_precomputed:
        if against is None:
            raise InvalidInputError("A model of a precomputed kernel is verified --against the Gram matrix of its fit.")
        source = open_source(against, fitted_columns=stored.feature_names)
        return source.read(slice(0, source.shape[0]))
    if against is None:
        return None
    return read_evenly_spaced_rows(open_source(against, fitted_columns=stored.feature_names), 512)


def format_model_size(stored: "StoredEstimator") -> str:
    """Return the size of a fitted model in a few words."""
    from dkfm.estimators.stored.components import StoredComponents
    from dkfm.estimators.stored.discriminants import StoredDiscriminants
    from dkfm.estimators.stored.feature_map import StoredMap
    from dkfm.estimators.stored.ridge import StoredRidge

    landmarks = f"{stored.model.landmarks.shape[0]:,} landmarks"
    if isinstance(stored, StoredComponents):
        count, share = stored.model.head(stored.output_head_name).n_columns, stored.explained_share
        variance = f" with {100 * share:.3g} % of the variance" if isfinite(share) else ""
        return f"{landmarks}, {count:,} {'component' if count == 1 else 'components'}{variance}"
    if isinstance(stored, StoredDiscriminants):
        classes, shrinkage = cast("Array", stored.values["priors"]), cast("float", stored.values["shrinkage"])
        return f"{landmarks}, {len(classes):,} classes, shrinkage {shrinkage:.3g}"
    if isinstance(stored, StoredRidge):
        width = stored.model.head(stored.output_head_name).n_columns
        return f"{landmarks}, {width:,} {'target' if width == 1 else 'targets'}, {_describe_penalties(stored)}"
    if not isinstance(stored, StoredMap):
        return landmarks
    bound = "not known, for training rows were sampled" if stored.error_bound is None else f"{stored.error_bound:.1e}"
    bound += "" if stored.error_bound is None or stored.error_bound < 1 else " (of 1 or more: it says nothing)"
    return f"{landmarks}, rank {len(stored.eigenvalues_or_pivots):,}, error bound {bound}"


def _describe_penalties(stored: "StoredRidge") -> str:
    """Return the penalties of a regression, with the leave-one-out errors if these selected them."""
    alpha = stored.parameters["fitted_alpha"]
    penalties = cast("list[float]", alpha if isinstance(alpha, list) else [alpha])
    text = f"alpha {_format_few(penalties)}"
    if stored.left_out_rmse is None:
        return text
    path = cast("Array", stored.values["alphas"])
    if path.min() in penalties or path.max() in penalties:
        text += f", at an end of the penalties that were tried, {_format_range(path)}"
    of = " of decision values" if stored.has_classes else ""
    return f"{text}, root mean squared error{of} of left-out rows {_format_few(stored.left_out_rmse)}"


def _format_few(values: "Sequence[float] | Array") -> str:
    """Return up to four numbers with three digits in their order, and the range of more."""
    if len(values) > _FEW or len(set(values)) == 1:
        return _format_range(values)
    return ", ".join(f"{value:.3g}" for value in values)


def _format_range(values: "Iterable[float] | Array") -> str:
    """Return the smallest and the largest of some numbers with three digits, or one number if they are equal."""
    ends = sorted({f"{value:.3g}" for value in values}, key=float)
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def describe_fitted_model(stored: "StoredEstimator | StoredFold") -> dict[str, object]:
    """Return the estimator, its kernel, its sizes and its known errors, for JSON."""
    from dkfm.estimators.stored.components import StoredComponents
    from dkfm.estimators.stored.discriminants import StoredDiscriminants
    from dkfm.estimators.stored.feature_map import StoredMap
    from dkfm.estimators.stored.folded import StoredFold
    from dkfm.estimators.stored.ridge import StoredRidge
    from dkfm.kernels import serialization
    from dkfm.numerics.certificates.certificate import Certificate

    facts = {
        "estimator": stored.estimator,
        "kernel": serialization.to_config(stored.model.kernel),
        "landmarks": stored.model.landmarks.shape[0],
        "outputs": {name: head.width for name, head in stored.model.heads.items()},
    }
    if isinstance(stored, StoredFold):
        return facts
    if isinstance(stored, StoredMap):
        facts |= {"rank": len(stored.eigenvalues_or_pivots), "error_bound": stored.error_bound}
    if isinstance(stored, StoredComponents):
        facts |= {"explained_share": stored.explained_share}
    if isinstance(stored, StoredDiscriminants):
        facts |= {"shrinkage": stored.values["shrinkage"]}
    if isinstance(stored, StoredRidge):
        facts |= stored.describe_penalty()
    certificates = {name: value.to_dict() for name, value in stored.values.items() if isinstance(value, Certificate)}
    return facts | certificates


def _iter_map_lines(stored: "StoredMap") -> Iterator[str]:
    from dkfm.numerics.roots import condition_number

    dropped = cast("Array", stored.values["dropped"])
    negative = f"{len(dropped):,} dropped, {int((dropped < 0).sum()):,} of them negative"
    yield f"condition {condition_number(stored.eigenvalues_or_pivots):.1e}, {negative}"
    if "training_certificate" in stored.values:
        yield f"pairs of training points, at fit: {stored.values['training_certificate']}"
