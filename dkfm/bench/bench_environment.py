"""Provide the cluster, stored rows and models of timed jobs, and check that rivals agree before they are timed."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dkfm.bench import sklearn_peers
from dkfm.bench.timing import Times, time_round_robin
from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import DisagreementError
from dkfm.estimators.base import KernelEstimator
from dkfm.execution import memory
from dkfm.sources.opening import open_source
from dkfm.storage import zarr_store

if TYPE_CHECKING:
    from distributed import Client

DTYPE_TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
"""Precisions of scores, and the largest difference between rivals, relative to the largest score."""

AGREEMENT_ROWS = 50
"""Number of rows on which rivals must agree."""

Job: TypeAlias = Callable[[Path, Path], object]
"""Function that scores the rows of one stored array into another."""


@dataclass(frozen=True)
class BenchEnvironment:
    """Cluster and folder of the timed jobs."""

    client: "Client"
    """Client of the cluster."""
    folder: Path
    """Folder for all files."""
    sklearn_chunk_sizes: tuple[int, ...]
    """Rows of a scikit-learn task, ascending; stored rows have chunks of the first size."""
    rounds: int
    """Number of times that each job is timed."""

    @property
    def threads(self) -> int:
        """Number of threads of all workers."""
        return sum(self.client.nthreads().values())

    def create_random_rows(self, rows: int, columns: int, dtype: str = "float64") -> Path:
        """Return the path of a stored array of standard normal rows; write the array on the first call."""
        path = self.folder / f"rows-{rows}-{columns}-{dtype}"
        if not path.exists():
            array = _create_array(path, (rows, columns), self.sklearn_chunk_sizes[0], dtype)
            for part in row_slices(rows, 16 * self.sklearn_chunk_sizes[0]):
                array[part] = np.random.default_rng(part.start).normal(size=(part.stop - part.start, columns))
        return path / "rows"

    def save_model(self, estimator: KernelEstimator) -> Path:
        """Save an estimator in a new folder, and return its path."""
        path = Path(tempfile.mkdtemp(prefix="model-", dir=self.folder))
        estimator.save(path)
        return path

    def make_sklearn_jobs(self, fitted: sklearn_peers.Transformer, n: int, width: int) -> dict[str, Job]:
        """Return scikit-learn's jobs, by the chunk sizes whose blocks with n points fit into a worker; at least one."""
        sizes, budget = self.sklearn_chunk_sizes, memory.task_budget(self.client, self.threads)
        peer = sklearn_peers.ScatteredPeer.scatter(self.client, fitted, width)
        fitting = [rows for rows in sizes if 3 * 8 * rows * n <= budget] or sizes[:1]
        return {f"{rows:,}": partial(peer.score, chunk_rows=rows) for rows in fitting}

    def time_jobs(self, jobs: Mapping[str, Callable[[Path], object]], rounds: int | None = None) -> Times:
        """Time jobs in turn; see `time_round_robin`."""
        return time_round_robin(jobs, rounds or self.rounds, self.folder / "out")


def _create_array(path: Path, shape: tuple[int, int], chunk_rows: int, dtype: str = "float64") -> zarr_store.ZarrArray:
    import zarr

    group, chunks = zarr.create_group(path, zarr_format=3), (min(chunk_rows, shape[0]), shape[1])
    return zarr_store.add_array(group, "rows", shape, chunks, dtype)


def require_agreement(
    environment: BenchEnvironment,
    dkfm_jobs: Mapping[str, Job],
    sklearn_jobs: Mapping[str, Job],
    rows: Array,
    make_comparable: Callable[[Array, Array], tuple[Array, Array]],
) -> None:
    """Run every job on some rows (n, d), and raise a DisagreementError if scores differ; workers import modules here.

    `dkfm_jobs` has dkfm's jobs by precision, `sklearn_jobs` those of scikit-learn by chunk size. `make_comparable` is
    `align_signs` or `sample_inner_products`.
    """
    folder = Path(tempfile.mkdtemp(prefix="few-", dir=environment.folder))
    _create_array(folder / "rows", rows.shape, environment.sklearn_chunk_sizes[0])[...] = rows
    scores: dict[str, Array] = {}
    for name, job in {**dkfm_jobs, **sklearn_jobs}.items():
        job(folder / "rows" / "rows", folder / name)
        scores[name] = np.asarray(open_source(folder / name).read(slice(0, len(rows))))
    for name in dkfm_jobs:
        for peer in sklearn_jobs:
            left, right = make_comparable(scores[name], scores[peer])
            error, scale = float(np.abs(left - right).max()), float(np.abs(right).max())
            if not error <= DTYPE_TOLERANCES[name] * scale:  # also true for NaN
                raise DisagreementError(
                    f"dkfm's {name} scores of {rows.shape[1]} columns differ from scikit-learn's by {error:.1e}, where "
                    f"the largest is {scale:.1e} and {DTYPE_TOLERANCES[name] * scale:.1e} is allowed; "
                    "nothing was timed."
                )


def align_signs(scores: Array, others: Array) -> tuple[Array, Array]:
    """Return `scores` with the sign of each component flipped to match `others`, and `others`."""
    return scores * np.where((scores * others).sum(axis=0) < 0, -1.0, 1.0), others


def sample_inner_products(features: Array, others: Array) -> tuple[Array, Array]:
    """Return inner products of the first `AGREEMENT_ROWS` rows with all; exact maps agree on training rows."""
    return features[:AGREEMENT_ROWS] @ features.T, others[:AGREEMENT_ROWS] @ others.T
