"""Where jobs are timed: a cluster, a folder, rows and models in it; and whether rivals agree before they are."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dkfm.bench import sklearn_peers
from dkfm.bench.timing import Times, time_in_turn
from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import DisagreementError
from dkfm.estimators.base import KernelEstimator
from dkfm.execution import memory
from dkfm.sources.opening import open_source
from dkfm.storage import zarr_store

if TYPE_CHECKING:
    from distributed import Client

DTYPES = {"float64": 1e-6, "float32": 1e-3}
"""What scores are computed in, and the difference, relative to the largest, at which rivals no longer agree."""

FEW = 50
"""Rows that rivals have to agree on."""

Job: TypeAlias = Callable[[Path, Path], object]
"""Scores the rows of one stored array into another."""


@dataclass(frozen=True)
class BenchSite:
    """Where jobs run.

    Attributes
    ----------
    client : distributed.Client
    folder : Path
        For everything that is written.
    chunks : tuple of int
        Rows of a task of scikit-learn's, ascending; stored rows have chunks of the first.
    rounds : int
    """

    client: "Client"
    folder: Path
    chunks: tuple[int, ...]
    rounds: int

    @property
    def threads(self) -> int:
        """Threads of all workers."""
        return sum(self.client.nthreads().values())

    def rows(self, rows: int, columns: int, dtype: str = "float64") -> Path:
        """Return a stored array of that shape, of standard normal rows, written if it is the first time."""
        path = self.folder / f"rows-{rows}-{columns}-{dtype}"
        if not path.exists():
            array = _create(path, (rows, columns), self.chunks[0], dtype)
            for part in row_slices(rows, 16 * self.chunks[0]):
                array[part] = np.random.default_rng(part.start).normal(size=(part.stop - part.start, columns))
        return path / "rows"

    def saved(self, estimator: KernelEstimator) -> Path:
        """Return the path of a saved estimator."""
        path = Path(tempfile.mkdtemp(prefix="model-", dir=self.folder))
        estimator.save(path)
        return path

    def jobs(self, fitted: sklearn_peers.Transformer, n: int, width: int) -> dict[str, Job]:
        """Return scikit-learn's jobs by their rows a task: those whose blocks against n points fit into a worker."""
        there = memory.task_budget(self.client, self.threads)
        peer = sklearn_peers.PeerOnWorkers.of(self.client, fitted, width)
        fitting = [rows for rows in self.chunks if 3 * 8 * rows * n <= there] or self.chunks[:1]
        return {f"{rows:,}": partial(peer.score, chunk_rows=rows) for rows in fitting}

    def timed(self, rivals: Mapping[str, Callable[[Path], object]], rounds: int | None = None) -> Times:
        """Time rivals in turn."""
        return time_in_turn(rivals, rounds or self.rounds, self.folder / "out")


def _create(path: Path, shape: tuple[int, int], chunk_rows: int, dtype: str = "float64") -> zarr_store.ZarrArray:
    import zarr

    group, chunks = zarr.create_group(path, zarr_format=3), (min(chunk_rows, shape[0]), shape[1])
    return zarr_store.add_array(group, "rows", shape, chunks, dtype)


def require_agreement(
    site: BenchSite,
    ours: Mapping[str, Job],
    theirs: Mapping[str, Job],
    rows: Array,
    alike: Callable[[Array, Array], tuple[Array, Array]],
) -> None:
    """Run every job on a few rows, which also lets workers import what they need.

    Parameters
    ----------
    site : Site
    ours : mapping of str to Job
        By what they compute in.
    theirs : mapping of str to Job
    rows : ndarray of shape (n, d)
    alike : callable
        Makes two arrays of scores comparable: `align_signs` or `sample_inner_products`.

    Raises
    ------
    DisagreementError
        Two of them do not compute the same.
    """
    folder = Path(tempfile.mkdtemp(prefix="few-", dir=site.folder))
    _create(folder / "rows", rows.shape, site.chunks[0])[...] = rows
    found: dict[str, Array] = {}
    for name, job in {**ours, **theirs}.items():
        job(folder / "rows" / "rows", folder / name)
        found[name] = np.asarray(open_source(folder / name).read(slice(0, len(rows))))
    for name in ours:
        for peer in theirs:
            left, right = alike(found[name], found[peer])
            error, scale = float(np.abs(left - right).max()), float(np.abs(right).max())
            if not error <= DTYPES[name] * scale:  # a NaN is not
                raise DisagreementError(
                    f"dkfm's {name} scores of {rows.shape[1]} columns differ from scikit-learn's by {error:.1e}, where "
                    f"the largest is {scale:.1e} and {DTYPES[name] * scale:.1e} is allowed; nothing was timed."
                )


def align_signs(scores: Array, others: Array) -> tuple[Array, Array]:
    """Return the scores with the signs that bring each component nearest to the others', and these."""
    return scores * np.where((scores * others).sum(axis=0) < 0, -1.0, 1.0), others


def sample_inner_products(features: Array, others: Array) -> tuple[Array, Array]:
    """Return the inner products of the first `FEW` rows with all: training rows, where all exact maps have the same."""
    return features[:FEW] @ features.T, others[:FEW] @ others.T
