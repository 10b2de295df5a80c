"""Fit several kernels to the same labelled rows, and compare them in a table and on an HTML page."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Literal, TypeAlias, get_args

import numpy as np

from dkfm.core import budget, cpus
from dkfm.core.argument_checks import require_flags
from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows
from dkfm.errors import DkfmWarning, InvalidInputError, KernelError, MissingExtraError, NotPSDError
from dkfm.estimators import ExactFeatureMap, KernelFisher
from dkfm.estimators.fitting.discriminants import check_shrinkage
from dkfm.estimators.fitting.parameter_types import IndefinitePolicy
from dkfm.estimators.standardization import describe_unlike_scales
from dkfm.execution.stage_log import log_stage
from dkfm.kernel_comparison import tsne_embedding
from dkfm.kernel_comparison.labelled_rows import LabelledRows, load_labelled_rows, standardize_columns
from dkfm.kernel_comparison.result import Comparison, KernelResult
from dkfm.kernels import Kernel, KernelSpec, Linear, as_kernel
from dkfm.kernels.base import Definiteness
from dkfm.numerics import scorer
from dkfm.numerics.supervised.shrinkage import predict_choice_seconds

Kernels: TypeAlias = Sequence[KernelSpec] | Mapping[str, KernelSpec]
Shrinkage: TypeAlias = float | Literal["auto"]
MapRows: TypeAlias = Callable[[Rows], Rows]

_MAX_BLOCK_VALUES = 2**22
"""Largest number of distances from test rows to all training rows computed at once: 32 MB."""

_LONG_SECONDS = 600.0
"""Predicted seconds above which the log says how to compare fewer rows."""

_LISTED_REASONS = 5
"""Largest number of kernels whose errors are listed if no kernel has a feature map."""

_FIT_FACTOR = 1.5
"""Time of all measurements of a kernel, divided by the time of its Gram matrix and eigenvectors."""


def compare_kernels(
    kernels: Kernels,
    X: object,
    y: object,
    *,
    test: object = None,
    test_labels: object = None,
    columns: Sequence[str] | None = None,
    shrinkage: Shrinkage = "auto",
    on_indefinite: IndefinitePolicy = "raise",
    standardize: bool = False,
    embedding: bool = False,
    sample: int | None = None,
    random_state: int = 0,
) -> Comparison:
    """Fit each kernel to labelled rows, and measure how well its feature space separates the labels.

    Parameters
    ----------
    kernels : sequence of kernels, or mapping of names to kernels
        Kernels as `ExactFeatureMap` accepts them. Without names, the table shows their representations.
    X : array-like, scipy.sparse array, dask collection or path, of shape (n, d)
        Training rows; a path or a URL as `batch_score` accepts it.
    y : array-like or dask array of shape (n,), or str
        Labels of the training rows: integers or strings, of at least two classes. A str is the name of the column with
        the labels in the data frame or Parquet table X; this column is then not a feature.
    test, test_labels : the same, of shapes (m, d) and (m,), optional
        Test rows and their labels. By default, the labels are in the same column as those of X. More than 10,000 test
        rows are sampled with a seed. Without test rows, a quarter of X is held out, stratified by class.
    columns : sequence of str, optional
        Names of the columns of a data frame or a Parquet table that are features; by default all but the labels.
    shrinkage : float or "auto", default="auto"
        Shrinkage of `KernelFisher`. "auto" selects one for each kernel by cross-validation over the training rows, and
        takes about twice as long as a number, which is used for all kernels. A number that is too small for noisy rows
        makes kernels of high rank look worse than they are.
    on_indefinite : {"raise", "clip"}, default="raise"
        Action for a kernel that is not positive semi-definite: leave it out, or drop its negative part. Neighbours and
        silhouettes of a clipped kernel use the distances of its features, unless it is conditionally positive
        semi-definite, as `NegativeSquaredDistance` is; the discriminants drop the negative part of the centred matrix.
    standardize : bool
        Whether columns are first scaled to mean 0 and variance 1 over the training rows.
    embedding : bool
        Whether to compute t-SNE for the page, with openTSNE (the extra `tsne`).
    sample : int, optional
        Largest number of rows of X to use, drawn at random; None uses all.
    random_state : int
        Seed of the samples, the split and t-SNE.

    Returns
    -------
    Comparison
        Results of each kernel. It prints as a table, and `save_page` writes a page with plots. Neighbours and
        silhouettes use the distances ``sqrt(k(x, x) + k(z, z) - 2 k(x, z))``, which need no map; silhouettes and t-SNE
        use at most 2,000 rows.

    Raises
    ------
    InvalidInputError
        The rows and labels do not match, no kernel is given, or no kernel has a feature map of these rows. If only some
        kernels fail, `refused` holds the reason of each. A kernel without discriminants has an accuracy of NaN.
    BudgetError
        This process has too little memory for so many training rows. No row is read in this case.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", section 4.

    Examples
    --------
    >>> from dkfm import compare_kernels
    >>> from dkfm.kernels import Gaussian, Linear
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> found = compare_kernels({"wide": Gaussian(100.0), "median": Gaussian("median"), "linear": Linear()}, X, y)
    >>> [(one.name, round(one.neighbour_accuracy, 2)) for one in found.compared]
    [('wide', 0.97), ('median', 0.97), ('linear', 0.97)]
    """
    named, chooses = _list_kernels(kernels), check_shrinkage(shrinkage) is None
    if on_indefinite not in get_args(IndefinitePolicy):
        raise InvalidInputError(f"on_indefinite must be one of raise, clip, and is {on_indefinite!r:.50}.")
    require_flags(standardize=standardize, embedding=embedding)
    rows = load_labelled_rows(X, y, test, test_labels, columns, sample, random_state)
    if standardize:
        rows = standardize_columns(rows)
    problem = _find_tsne_problem(len(rows.train_labels)) if embedding else ""
    seed = random_state if embedding and not problem else None
    _log_comparison(rows, len(named), chooses)
    compared, refused = _measure_kernels(named, rows, shrinkage, on_indefinite, seed)
    labels = rows.train_labels[rows.sampled_train_indices], rows.test_labels[rows.plotted_test_indices]
    unlike = describe_unlike_scales(rows.train)
    words = *_describe_measurements(rows, chooses), *([] if unlike is None else [unlike])
    return Comparison(tuple(compared), refused, words, *labels, problem)


def _measure_kernels(
    named: list[tuple[str, KernelSpec]],
    rows: LabelledRows,
    shrinkage: Shrinkage,
    on_indefinite: IndefinitePolicy,
    seed: int | None,
) -> tuple[list[KernelResult], dict[str, str]]:
    """Return the results of the kernels that have a map, and the errors of the others; raise if no kernel has one."""
    compared: list[KernelResult] = []
    refused: dict[str, str] = {}
    for position, (name, spec) in enumerate(named, 1):
        label = name or f"{spec!r:.100}"
        log_stage("compare", f"kernel {position:,} of {len(named):,}, {label}", number=position, total=len(named))
        try:
            with _name_kernel_in_warnings(label):
                compared.append(_measure_kernel(name, spec, rows, shrinkage, on_indefinite, seed))
        except (KernelError, InvalidInputError) as error:
            refused[_make_unique(name or repr(spec), refused)] = str(error)
    if not compared:
        reasons = [f"{name}: {reason}" for name, reason in islice(refused.items(), _LISTED_REASONS)]
        raise InvalidInputError(f"No kernel makes a feature map of these rows; {' '.join(reasons)}")
    return compared, refused


@contextmanager
def _name_kernel_in_warnings(label: str) -> Iterator[None]:
    """Prefix warnings of dkfm with the name of a kernel; hide those about a dropped part, which the result reports."""
    try:
        with warnings.catch_warnings(record=True) as shown:
            warnings.filterwarnings("ignore", "There are significant negative eigenvalues", DkfmWarning)
            yield
    finally:
        for one in shown:  # these have passed the warning filters
            named = one.category(f"{label}: {one.message}") if issubclass(one.category, DkfmWarning) else one.message
            warnings.showwarning(named, one.category, one.filename, one.lineno)


def _log_comparison(rows: LabelledRows, kernels: int, chooses_shrinkage: bool) -> None:
    """Log the size of a comparison and its predicted time."""
    (n, d), tested = rows.train.shape, len(rows.test_labels)
    fit_seconds = budget.gram_seconds(n, d, cpus.COUNT) + budget.eigendecomposition_seconds(n)
    seconds = kernels * _FIT_FACTOR * fit_seconds
    if chooses_shrinkage:
        seconds += kernels * (fit_seconds + predict_choice_seconds(n))
    text = f"{kernels:,} kernels on {n:,} training and {tested:,} test rows of {d:,} columns in this process"
    text += "; fewer rows with sample= (--sample)" if seconds > _LONG_SECONDS else ""
    log_stage("compare", text, seconds=seconds, kernels=kernels, rows=n, columns=d, test_rows=tested)


def _list_kernels(kernels: Kernels) -> list[tuple[str, KernelSpec]]:
    if isinstance(kernels, Mapping):
        pairs = [(str(name), spec) for name, spec in kernels.items()]
    elif isinstance(kernels, Sequence) and not isinstance(kernels, str):
        pairs = [("", spec) for spec in kernels]
    else:
        raise InvalidInputError(
            f"Kernels to compare are a list, or a mapping of names to them, and not {kernels!r:.50}."
        )
    if not pairs:
        raise InvalidInputError("There is no kernel to compare; name at least one.")
    return pairs


def _make_unique(name: str, used: Mapping[str, str]) -> str:
    """Return the name, with a number appended if the name is already used."""
    unique, number = name, 1
    while unique in used:
        number += 1
        unique = f"{name} ({number})"
    return unique


def _find_tsne_problem(n: int) -> str:
    """Return the reason why t-SNE of n training rows cannot be computed; empty if it can."""
    if n < tsne_embedding.MIN_ROWS:
        return f"t-SNE needs at least {tsne_embedding.MIN_ROWS} training rows, and there are {n}."
    try:
        tsne_embedding.require_opentsne()
    except MissingExtraError as error:
        return str(error)
    return ""


def _measure_kernel(
    name: str,
    spec: KernelSpec,
    rows: LabelledRows,
    shrinkage: Shrinkage,
    on_indefinite: IndefinitePolicy,
    seed: int | None,
) -> KernelResult:
    """Fit one kernel and measure it on the test rows; with a seed, compute t-SNE too."""
    start = time.perf_counter()
    requested = as_kernel(spec)
    if requested.is_precomputed:
        raise InvalidInputError("A precomputed kernel has no points to compare.")
    phi, is_clipped = _fit_map(requested, rows.train, on_indefinite)
    kernel = phi.kernel_
    diagonal = kernel.evaluate_diagonal(rows.train)
    neighbour_accuracy, silhouette = _measure_distances(phi, is_clipped, rows)
    seconds = time.perf_counter() - start
    embedding = None if seed is None or not phi.rank_ else _embed(phi, rows, seed)
    start = time.perf_counter()
    rank, condition, eigenvalues, dropped = phi.rank_, phi.condition_, phi.eigenvalues_, phi.dropped_
    del phi  # free its matrix before the next fit allocates one
    chosen, accuracy, discriminants, problem = _measure_discriminants(kernel, rows, shrinkage, is_clipped)
    seconds += time.perf_counter() - start
    return KernelResult(
        name=name or repr(kernel),
        kernel=kernel,
        rank=rank,
        condition=condition,
        least_similarity=float(diagonal.min()),
        most_similarity=float(diagonal.max()),
        neighbour_accuracy=neighbour_accuracy,
        silhouette=silhouette,
        shrinkage=chosen,
        fisher_accuracy=accuracy,
        seconds=seconds,
        eigenvalues=eigenvalues,
        dropped=dropped,
        discriminants=discriminants,
        discriminants_problem=problem,
        is_clipped=is_clipped,
        embedding=embedding,
    )


def _measure_discriminants(
    kernel: Kernel, rows: LabelledRows, shrinkage: Shrinkage, is_clipped: bool
) -> tuple[float, float, Array, str]:
    """Return the shrinkage, the accuracy, the discriminants of the plotted test rows, and why there are none."""
    policy: IndefinitePolicy = "clip" if is_clipped else "raise"
    fisher = KernelFisher(kernel=kernel, shrinkage=shrinkage, on_indefinite=policy, progress=False)
    try:
        fisher.fit(rows.train, rows.train_labels)
        accuracy = float(fisher.score(rows.test, rows.test_labels))
        return fisher.shrinkage_, accuracy, np.asarray(fisher.transform(rows.test[rows.plotted_test_indices])), ""
    except InvalidInputError as error:
        return float("nan"), float("nan"), np.empty((0, 0)), str(error)


def _embed(phi: ExactFeatureMap, rows: LabelledRows, seed: int) -> tsne_embedding.Embedding:
    """Return the t-SNE embedding of the features of the plotted training and test rows."""
    train, test = (
        np.asarray(phi.transform(part))
        for part in (rows.train[rows.sampled_train_indices], rows.test[rows.plotted_test_indices])
    )
    return tsne_embedding.embed(train, test, random_state=seed)


def _fit_map(kernel: Kernel, X: Rows, on_indefinite: IndefinitePolicy) -> tuple[ExactFeatureMap, bool]:
    """Return a map of rows, and whether the negative part of the kernel is dropped.

    "clip" is used only if "raise" fails, because the map of a positive semi-definite kernel is more exact.
    """
    try:
        return ExactFeatureMap(kernel, basis="spectral", progress=False).fit(X), False
    except NotPSDError:
        if on_indefinite == "raise":
            raise
    log_stage("compare", f"{kernel!r} is not positive semi-definite; its negative part is dropped")
    return ExactFeatureMap(kernel, basis="spectral", on_indefinite="clip", progress=False).fit(X), True


def _measure_distances(phi: ExactFeatureMap, is_clipped: bool, rows: LabelledRows) -> tuple[float, float]:
    """Return the accuracy of the nearest neighbour, and the silhouette.

    Distances are those of the kernel, or those of the features if a clipped kernel does not define distances. A
    conditionally positive semi-definite kernel does.
    """
    uses_features = is_clipped and phi.kernel_.definiteness is not Definiteness.CONDITIONAL
    kernel = Linear() if uses_features else phi.kernel_

    def map_rows(X: Rows) -> Rows:
        return np.asarray(phi.transform(X)) if uses_features else X

    return _nearest_neighbour_accuracy(kernel, rows, map_rows), _measure_silhouette(kernel, rows, map_rows)


def _nearest_neighbour_accuracy(kernel: Kernel, rows: LabelledRows, map_rows: MapRows) -> float:
    """Return the share of test rows whose nearest training row, by the kernel of mapped rows, has the same label."""
    train, correct = map_rows(rows.train), 0
    for tile in row_slices(len(rows.test_labels), max(1, _MAX_BLOCK_VALUES // len(rows.train_labels))):
        distances = scorer.kernel_distances(kernel, map_rows(rows.test[tile]), train)
        correct += int((rows.train_labels[distances.argmin(axis=1)] == rows.test_labels[tile]).sum())
    return correct / len(rows.test_labels)


def _measure_silhouette(kernel: Kernel, rows: LabelledRows, map_rows: MapRows) -> float:
    """Return the mean silhouette of training rows, by the distances of the kernel between mapped rows."""
    from sklearn.metrics import silhouette_score

    labels = rows.train_labels[rows.sampled_train_indices]
    if not 2 <= len(np.unique(labels)) < len(labels):
        return float("nan")  # the sample may lack rare classes
    points = map_rows(rows.train[rows.sampled_train_indices])
    return float(silhouette_score(scorer.kernel_distances(kernel, points, points), labels, metric="precomputed"))


def _describe_measurements(rows: LabelledRows, chooses_shrinkage: bool) -> Iterator[str]:
    """Yield two paragraphs: the sizes of the data, and the meaning of the columns of the table."""
    (n, d), sampled = rows.train.shape, len(rows.sampled_train_indices)
    classes = len(np.unique(rows.train_labels))
    yield (
        f"{n:,} training rows of {d:,} columns in {classes:,} classes{rows.train_origin_clause}; "
        f"{len(rows.test_labels):,} test rows{rows.test_origin_clause}."
    )
    penalty = "Shrinkage: as given; noisy rows need more than others."
    if chooses_shrinkage:
        penalty = "Shrinkage: chosen for each kernel, to predict each fifth of the training rows best from the others; "
        penalty += "name it in a fit (--shrinkage), which takes 0.001 otherwise."
    sample = "the training rows" if sampled == n else f"{sampled:,} training rows, taken at random"
    yield (
        "Rank, condition and the range of k(x,x): of the training rows. Accuracies: the share of test rows that get "
        f"their label, from the nearest training row in the feature space, or from Fisher discriminants. {penalty} "
        f"Silhouette: of {sample}, in the feature space. Seconds: all of these together."
    )
