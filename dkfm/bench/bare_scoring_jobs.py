"""Measure lower bounds of scoring time on plain threads: bare products and exponentials, and the tile loop of dkfm."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.core.scratch_buffers import allocate_aligned
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.numerics import scorer
from dkfm.numerics.model import Model


@dataclass(frozen=True, eq=False)
class _ThreadWork:
    """Work of one thread: its own buffers, and the landmarks and weights that all threads share."""

    row_tile: Array
    landmarks: Array
    weights: Array
    kernel_values: Array
    scores: Array

    def run(self, n_rows: int) -> None:
        """Score `n_rows` rows by scoring the rows of one tile repeatedly."""
        for part in row_slices(n_rows, len(self.row_tile)):
            n = part.stop - part.start
            values = np.matmul(self.row_tile[:n], self.landmarks.T, out=self.kernel_values[:n])
            np.exp(values, out=values)
            np.matmul(values, self.weights, out=self.scores[:n])


def prepare_bare_arithmetic(
    rows: int, columns: int, n: int, width: int, dtype: str, tile_rows: int, threads: int
) -> Callable[[Path], None]:
    """Return a job that runs only the arithmetic of Gaussian scores, without checks or allocations.

    Parameters
    ----------
    rows, columns : int
        Shape of the scored rows.
    n, width : int
        Number of landmarks and of components.
    dtype : str
        Precision, "float64" or "float32".
    tile_rows : int
        Rows of each matrix product.
    threads : int
        Number of threads; each scores an equal share of the rows with one BLAS thread.
    """
    rng, k = np.random.default_rng(0), columns + 2
    # The products lie between -2 and 0, because exp is slower for very negative arguments.
    landmarks = (-2 / k * rng.uniform(size=(n, k))).astype(dtype)
    weights = rng.normal(size=(n, width)).astype(dtype)

    def allocate() -> _ThreadWork:
        Z, values = rng.uniform(size=(tile_rows, k)).astype(dtype), allocate_aligned(tile_rows * n * landmarks.itemsize)
        values[:] = 0
        return _ThreadWork(Z, landmarks, weights, values.view(dtype).reshape(-1, n), np.zeros((len(Z), width), dtype))

    shares = [part.stop - part.start for part in row_slices(rows, -(-rows // threads))]
    work = [allocate() for _ in shares]

    def run(_: Path) -> None:
        with single_blas_thread(), ThreadPoolExecutor(threads) as pool:
            list(pool.map(_ThreadWork.run, work, shares))

    return run


def prepare_threaded_tile_loop(model: Model, Z: Array, threads: int) -> Callable[[Path], None]:
    """Return a job that scores rows in memory by the tile loop on threads, without Dask and without files."""
    score, shares = scorer.prepare_scorer(model), list(row_slices(len(Z), -(-len(Z) // threads)))

    def run(_: Path) -> None:
        with single_blas_thread(), ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda part: score("scores", Z[part]), shares))

    return run
