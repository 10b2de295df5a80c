"""Which kernel? What each makes of the same labelled rows, in one table and on one page."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import TypeAlias

import numpy as np

from dkfm.comparison import tsne
from dkfm.comparison.labelled_rows import LabelledRows, load_labelled_rows
from dkfm.comparison.result import Comparison, KernelComparison
from dkfm.core.chunking import row_slices
from dkfm.core.rows import Rows
from dkfm.errors import InvalidInputError, KernelError, MissingExtraError
from dkfm.estimators import ExactFeatureMap, KernelFisher
from dkfm.kernels import Kernel, KernelSpec, as_kernel
from dkfm.numerics import scorer

Kernels: TypeAlias = Sequence[KernelSpec] | Mapping[str, KernelSpec]

_BLOCK = 2**22
"""Values of a block of distances to all training rows: 32 MB."""


def compare_kernels(
    kernels: Kernels,
    X: object,
    y: object,
    *,
    test: object = None,
    test_labels: object = None,
    shrinkage: float = 1e-3,
    embedding: bool = False,
    random_state: int = 0,
) -> Comparison:
    """Fit each kernel to labelled rows and measure what its feature space makes of the labels.

    Parameters
    ----------
    kernels : sequence of kernels, or mapping of names to kernels
        As `ExactFeatureMap` takes them; without names they are called by what they are.
    X : array-like, scipy.sparse array, dask collection or path, of shape (n, d)
        Training rows; a path or a URL is what `batch_score` takes.
    y : array-like or dask array of shape (n,)
        Their labels, whole numbers or words of at least two classes.
    test, test_labels : the same, of shapes (m, d) and (m,), optional
        Rows that are held out, at most 10,000 of them, at random with a seed. By default a quarter of X, with the
        shares that classes have in X.
    shrinkage : float
        Of `KernelFisher`.
    embedding : bool
        Whether to compute t-SNE for the page, with openTSNE (the extra `tsne`).
    random_state : int
        Of the split, the samples and t-SNE.

    Returns
    -------
    Comparison
        Prints as a table; `save_page` writes the pictures. Nearest neighbours and silhouettes are those of distances
        ``sqrt(k(x, x) + k(z, z) - 2 k(x, z))``, which need no map; silhouettes and t-SNE are of at most 2,000 rows.

    Raises
    ------
    InvalidInputError
        Rows or labels that do not fit, no kernel, or none that makes a feature map of these rows. Where one does, those
        that do not are in `refused`, each with its reason.
    BudgetError
        More training rows than this process can fit; none is read.

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
    named = _named(kernels)
    rows = load_labelled_rows(X, y, test, test_labels, random_state)
    without = _missing_tsne() if embedding else ""
    compared: list[KernelComparison] = []
    refused: dict[str, str] = {}
    for name, spec in named:
        try:
            compared.append(_measured(name, spec, rows, shrinkage, random_state if embedding and not without else None))
        except (KernelError, InvalidInputError) as error:
            refused[_once(name or repr(spec), refused)] = str(error)
    if not compared:
        name, why = next(iter(refused.items()))
        raise InvalidInputError(f"No kernel makes a feature map of these rows; {name}: {why}")
    return Comparison(
        tuple(compared),
        refused,
        tuple(_about(rows, shrinkage)),
        rows.labels[rows.some],
        rows.test_labels[rows.some_of_test],
        without,
    )


def _named(kernels: Kernels) -> list[tuple[str, KernelSpec]]:
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


def _once(name: str, taken: Mapping[str, str]) -> str:
    """Return a name that is not taken yet."""
    return next(word for word in chain([name], (f"{name} ({n})" for n in count(2))) if word not in taken)


def _missing_tsne() -> str:
    """Return why there will be no t-SNE, or nothing."""
    try:
        tsne.require_opentsne()
    except MissingExtraError as error:
        return str(error)
    return ""


def _measured(name: str, spec: KernelSpec, rows: LabelledRows, shrinkage: float, seed: int | None) -> KernelComparison:
    start = time.perf_counter()
    given = as_kernel(spec)
    if given.is_precomputed:
        raise InvalidInputError("A precomputed kernel has no points to compare.")
    phi = ExactFeatureMap(given, basis="spectral", progress=False).fit(rows.train)
    kernel = phi.kernel_
    own = kernel.evaluate_diagonal(rows.train)
    nearest, silhouette = _neighbour_accuracy(kernel, rows), _silhouette(kernel, rows)
    fisher = KernelFisher.from_map(phi, rows.labels, shrinkage=shrinkage)
    accuracy = float(fisher.score(rows.test, rows.test_labels))
    seconds = time.perf_counter() - start
    shown = rows.test[rows.some_of_test]
    return KernelComparison(
        name=name or repr(kernel),
        kernel=kernel,
        rank=phi.rank_,
        condition=phi.condition_,
        least_similarity=float(own.min()),
        most_similarity=float(own.max()),
        neighbour_accuracy=nearest,
        silhouette=silhouette,
        fisher_accuracy=accuracy,
        seconds=seconds,
        eigenvalues=phi.eigenvalues_,
        dropped=phi.dropped_,
        discriminants=np.asarray(fisher.transform(shown)),
        embedding=None if seed is None else _embedded(phi, rows, shown, seed),
    )


def _embedded(phi: ExactFeatureMap, rows: LabelledRows, shown: Rows, seed: int) -> tsne.Embedding:
    train, test = (np.asarray(phi.transform(some)) for some in (rows.train[rows.some], shown))
    return tsne.embed(train, test, random_state=seed)


def _neighbour_accuracy(kernel: Kernel, rows: LabelledRows) -> float:
    right = 0
    for tile in row_slices(len(rows.test_labels), max(1, _BLOCK // len(rows.labels))):
        nearest = scorer.kernel_distances(kernel, rows.test[tile], rows.train).argmin(axis=1)
        right += int((rows.labels[nearest] == rows.test_labels[tile]).sum())
    return right / len(rows.test_labels)


def _silhouette(kernel: Kernel, rows: LabelledRows) -> float:
    from sklearn.metrics import silhouette_score

    points, labels = rows.train[rows.some], rows.labels[rows.some]
    if not 2 <= len(np.unique(labels)) < len(labels):
        return float("nan")  # of a sample that missed the rare classes
    return float(silhouette_score(scorer.kernel_distances(kernel, points, points), labels, metric="precomputed"))


def _about(rows: LabelledRows, shrinkage: float) -> Iterator[str]:
    """Yield what was measured on which rows."""
    n, d = rows.train.shape
    yield (
        f"{n:,} training rows of {d:,} columns in {len(np.unique(rows.labels)):,} classes; {len(rows.test_labels):,} "
        f"test rows{rows.held_out}."
    )
    of = "the training rows" if len(rows.some) == n else f"{len(rows.some):,} training rows, taken at random"
    yield (
        "Rank, condition and the range of k(x,x): of the training rows. Accuracies: the share of test rows that get "
        "their label, from the nearest training row in the feature space, or from Fisher discriminants "
        f"(shrinkage {shrinkage:g}). Silhouette: of {of}, in the feature space. Seconds: all of these together."
    )
