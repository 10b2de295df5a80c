"""What a comparison of kernels found: a table, and a page with pictures."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from dkfm import plotting
from dkfm.comparison import html_page
from dkfm.comparison.tsne import Embedding
from dkfm.core.rows import Array
from dkfm.core.text_tables import Row, Table
from dkfm.kernels import Kernel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ClassificationMarks: TypeAlias = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class KernelComparison:
    """What one kernel makes of the rows.

    Attributes
    ----------
    name : str
    kernel : Kernel
        With all its parameters filled in.
    rank, condition : int, float
        Of the Gram matrix of the training rows.
    least_similarity, most_similarity : float
        The smallest and the largest k(x, x) of a training row.
    neighbour_accuracy : float
        The share of test rows whose nearest training row, in the feature space, has their label.
    silhouette : float
        Of the training rows in the feature space, by their labels: 1 where classes are far apart, 0 where they mix.
    fisher_accuracy : float
        The share of test rows that `KernelFisher` labels right.
    seconds : float
        What all of this took; pictures are not counted.
    eigenvalues, dropped : ndarray
        Kept and taken for zero.
    discriminants : ndarray of shape (m, q)
        Of the test rows that are drawn.
    embedding : Embedding, optional
        Where t-SNE was asked for, and openTSNE is installed.
    """

    name: str
    kernel: Kernel
    rank: int
    condition: float
    least_similarity: float
    most_similarity: float
    neighbour_accuracy: float
    silhouette: float
    fisher_accuracy: float
    seconds: float
    eigenvalues: Array
    dropped: Array
    discriminants: Array
    embedding: Embedding | None = None

    def row(self) -> Row:
        """Return its line of the table."""
        return {
            "kernel": self.name,
            "rank": self.rank,
            "condition": self.condition,
            "least_k(x,x)": self.least_similarity,
            "most_k(x,x)": self.most_similarity,
            "1-NN_accuracy": self.neighbour_accuracy,
            "silhouette": self.silhouette,
            "Fisher_accuracy": self.fisher_accuracy,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Kernels beside each other; `str` is the table.

    Attributes
    ----------
    compared : tuple of Compared
    refused : mapping of str to str
        Kernels that make no feature map of these rows, and why not.
    words : tuple of str
        What was measured on which rows.
    """

    compared: tuple[KernelComparison, ...]
    refused: Mapping[str, str]
    words: tuple[str, ...]
    _labels: ClassificationMarks
    _test_labels: ClassificationMarks
    _without_tsne: str

    @property
    def table(self) -> Table:
        """A line for each kernel."""
        return Table("Kernels", [one.row() for one in self.compared])

    def __str__(self) -> str:
        said = (f"{name} is left out: {why}" for name, why in self.refused.items())
        return "\n".join([*self.table.lines(), "", *self.words, *said])

    def to_json(self) -> str:
        """Return the table, what was left out, and what was measured, for machines."""
        return json.dumps({"kernels": self.table.plain(), "refused": dict(self.refused), "about": self.words})

    def to_html(self) -> str:
        """Return one page that needs no other file: the table, and for each kernel its pictures.

        Raises
        ------
        MissingExtraError
            Matplotlib is not installed.
        """
        said = [f"{name} is left out: {why}" for name, why in self.refused.items()]
        missing = [self._without_tsne] if self._without_tsne else []
        sections = [
            html_page.Section(one.name, (), tuple(_pictures(one, self._labels, self._test_labels)))
            for one in self.compared
        ]
        return html_page.render_page("Kernels compared", [*self.words, *said, *missing], self.table.texts(), sections)

    def save_page(self, path: str | Path) -> None:
        """Write `to_html` to a file, in place of an earlier page of dkfm's.

        Raises
        ------
        StoreExistsError
            The file is something else; it is left untouched.
        """
        html_page.write_page(path, self.to_html())


def _pictures(
    one: KernelComparison, labels: ClassificationMarks, test_labels: ClassificationMarks
) -> Iterator[html_page.Picture]:
    """Yield the pictures of a kernel; of t-SNE where there is an embedding."""
    if one.embedding is not None:
        sides = ("training", one.embedding.train, labels), ("test", one.embedding.test, test_labels)
        for (what, places, marks), how in zip(sides, ("learned from", "which placed"), strict=True):
            yield html_page.draw_picture(
                partial(_scatter, places, marks, f"t-SNE of the feature space, {what} rows", "t-SNE"),
                f"Scatter plot of {len(places):,} {what} rows in the plane of t-SNE, coloured by label.",
                f"t-SNE of the feature space, {how} {len(places):,} {what} rows.",
            )
    if one.discriminants.shape[1]:  # classes of one mean have none
        yield html_page.draw_picture(
            partial(_scatter, one.discriminants, test_labels, "Fisher discriminants, test rows", "discriminant"),
            f"Plot of {len(one.discriminants):,} test rows along the Fisher discriminants, coloured by label.",
            f"Fisher discriminants of {len(one.discriminants):,} test rows. Of all test rows {one.fisher_accuracy:.1%} "
            "get their label.",
        )
    cut = f"{one.rank:,} eigenvalues kept, {len(one.dropped):,} dropped"
    yield html_page.draw_picture(
        lambda ax: plotting.spectrum(one.eigenvalues, one.dropped, ax=ax),
        f"Eigenvalues of the Gram matrix on a logarithmic scale: {cut}.",
        f"Spectrum of the Gram matrix: {cut}, condition {one.condition:.1e}.",
    )


def _scatter(places: Array, labels: ClassificationMarks, title: str, axis: str, ax: "Axes") -> None:
    plotting.components(places, labels, ax=ax)
    ax.set_title(title)
    ax.set_xlabel(ax.get_xlabel().replace("component", axis))
    ax.set_ylabel(ax.get_ylabel().replace("component", axis))
