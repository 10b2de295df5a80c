"""Hold the results of a comparison of kernels, and show them as a table or as a page with plots."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from dkfm import plotting
from dkfm.core.display.text_tables import Row, Table
from dkfm.core.rows import Array
from dkfm.kernel_comparison import html_page
from dkfm.kernel_comparison.tsne_embedding import Embedding
from dkfm.kernels import Kernel, serialization

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LabelArray: TypeAlias = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class KernelResult:
    """The results of one kernel.

    Attributes
    ----------
    name : str
        Name in the table.
    kernel : Kernel
        Fitted kernel, with all its parameters.
    rank, condition : int, float
        Rank and condition number of the Gram matrix of the training rows.
    least_similarity, most_similarity : float
        Smallest and largest k(x, x) of a training row, the squared length of its features unless the kernel is clipped.
    neighbour_accuracy : float
        Share of test rows whose nearest training row, in the feature space, has the same label.
    silhouette : float
        Mean silhouette of training rows in the feature space: 1 if classes are far apart, 0 if they mix.
    shrinkage : float
        Shrinkage of `KernelFisher`, as given or as selected.
    fisher_accuracy : float
        Share of test rows that `KernelFisher` classifies correctly.
    seconds : float
        Seconds of the fit and of all measurements above, without t-SNE and plots.
    eigenvalues, dropped : ndarray of shape (r,) and (p,)
        Kept eigenvalues, and eigenvalues that were treated as zero.
    discriminants : ndarray of shape (m, q)
        Fisher discriminants of the plotted test rows.
    discriminants_problem : str
        Reason why there are no discriminants, such as no shrinkage that predicts any left-out row correctly; empty if
        there are discriminants.
    is_clipped : bool
        Whether the negative part of a kernel that is not positive semi-definite was dropped.
    embedding : Embedding, optional
        t-SNE of the features, if it was requested and openTSNE is installed.
    """

    name: str
    kernel: Kernel
    rank: int
    condition: float
    least_similarity: float
    most_similarity: float
    neighbour_accuracy: float
    silhouette: float
    shrinkage: float
    fisher_accuracy: float
    seconds: float
    eigenvalues: Array = field(repr=False)
    dropped: Array = field(repr=False)
    discriminants: Array = field(repr=False)
    discriminants_problem: str = ""
    is_clipped: bool = False
    embedding: Embedding | None = field(default=None, repr=False)

    def to_table_row(self) -> Row:
        """Return the row of this kernel in the table."""
        return {
            "kernel": self.name,
            "rank": self.rank,
            "condition": self.condition,
            "least_k(x,x)": self.least_similarity,
            "most_k(x,x)": self.most_similarity,
            "1-NN_accuracy": self.neighbour_accuracy,
            "silhouette": self.silhouette,
            "shrinkage": self.shrinkage,
            "Fisher_accuracy": self.fisher_accuracy,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Results of all compared kernels; `str` returns the table.

    Attributes
    ----------
    compared : tuple of KernelResult
        Results of each kernel that has a feature map of these rows.
    refused : mapping of str to str
        Names of the other kernels, with the reason for each.
    words : tuple of str
        Sentences that describe the measurements and the rows.
    """

    compared: tuple[KernelResult, ...]
    refused: Mapping[str, str]
    words: tuple[str, ...]
    _labels: LabelArray = field(repr=False)
    _test_labels: LabelArray = field(repr=False)
    _tsne_problem: str = field(repr=False)

    @property
    def table(self) -> Table:
        """The table, with a row for each kernel."""
        return Table("Kernels", [result.to_table_row() for result in self.compared])

    def _list_problems(self) -> list[str]:
        """Return a sentence for each kernel that is left out, clipped, or has no discriminants, and for t-SNE."""
        refused = (f"{name} is left out: {reason}" for name, reason in self.refused.items())
        return [*refused, *self._list_remarks(), *([self._tsne_problem] if self._tsne_problem else [])]

    def _list_remarks(self) -> list[str]:
        """Return a sentence for each compared kernel that is clipped, or has no discriminants."""
        clipped = [
            f"{one.name} is compared without its negative part: its smallest eigenvalue is "
            f"{one.dropped.min(initial=0.0):.3g}, its largest {one.eigenvalues.max(initial=0.0):.3g}."
            for one in self.compared
            if one.is_clipped
        ]
        without = [(one.name, one.discriminants_problem) for one in self.compared if one.discriminants_problem]
        return [*clipped, *(f"{name} has no discriminants: {reason}" for name, reason in without)]

    def __str__(self) -> str:
        return "\n".join([*self.table.format_lines(), "", *self.words, *self._list_problems()])

    def to_json(self) -> str:
        """Return the table, the kernels left out and the sentences about the measurements as JSON.

        The `config` of a kernel is accepted by ``--kernel``; it is None for a user function.
        """
        rows = [
            {**row, "config": serialization.to_config(one.kernel) if serialization.is_code_free(one.kernel) else None}
            for row, one in zip(self.table.to_json_rows(), self.compared, strict=True)
        ]
        about = [*self.words, *self._list_remarks()]
        return json.dumps({"kernels": rows, "refused": dict(self.refused), "about": about})

    def to_html(self) -> str:
        """Return a self-contained HTML page with the table and the plots of each kernel.

        Raises
        ------
        MissingExtraError
            Matplotlib is not installed.
        """
        notes = [*self.words, *self._list_problems()]
        sections = [
            html_page.Section(result.name, tuple(_draw_pictures(result, self._labels, self._test_labels)))
            for result in self.compared
        ]
        return html_page.render_page(notes, self.table.format_cells(), sections)

    def save_page(self, path: str | Path) -> None:
        """Write the page of `to_html` to a file; replace an earlier page of dkfm.

        Raises
        ------
        StoreExistsError
            The path holds another file, which is left unchanged.
        """
        html_page.write_page(path, self.to_html())


def _draw_pictures(result: KernelResult, labels: LabelArray, test_labels: LabelArray) -> Iterator[html_page.Picture]:
    """Yield the plots of one kernel: t-SNE if it was computed, discriminants if there are any, and the spectrum."""
    if result.embedding is not None:
        sides = ("training", result.embedding.train, labels), ("test", result.embedding.test, test_labels)
        for (side, points, side_labels), verb in zip(sides, ("learned from", "which placed"), strict=True):
            yield html_page.draw_picture(
                partial(_plot_points, points, side_labels, f"t-SNE of the feature space, {side} rows", "t-SNE"),
                f"Scatter plot of {len(points):,} {side} rows in the plane of t-SNE, coloured by label.",
                f"t-SNE of the feature space, {verb} {len(points):,} {side} rows.",
            )
    if result.discriminants.shape[1]:  # classes with equal means have none
        yield html_page.draw_picture(
            partial(_plot_points, result.discriminants, test_labels, "Fisher discriminants, test rows", "discriminant"),
            f"Plot of {len(result.discriminants):,} test rows along the Fisher discriminants, coloured by label.",
            f"Fisher discriminants of {len(result.discriminants):,} test rows. Of all test rows "
            f"{result.fisher_accuracy:.1%} get their label.",
        )
    cut = f"{result.rank:,} eigenvalues kept, {len(result.dropped):,} dropped"
    yield html_page.draw_picture(
        lambda ax: plotting.spectrum(result.eigenvalues, result.dropped, ax=ax),
        f"Eigenvalues of the Gram matrix on a logarithmic scale: {cut}.",
        f"Spectrum of the Gram matrix: {cut}, condition {result.condition:.1e}.",
    )


def _plot_points(points: Array, labels: LabelArray, title: str, axis_name: str, ax: "Axes") -> None:
    plotting.components(points, labels, ax=ax)
    ax.set_title(title)
    ax.set_xlabel(ax.get_xlabel().replace("component", axis_name))
    ax.set_ylabel(ax.get_ylabel().replace("component", axis_name))
