"""What scoring costs at least: its products and exponentials bare, and dkfm's loop alone, on plain threads."""

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
class _Thread:
    """Buffers of one thread, and what it shares with the others."""

    rows: Array
    landmarks: Array
    weights: Array
    values: Array
    out: Array

    def run(self, count: int) -> None:
        """Score that many rows, over and over those of one tile."""
        for part in row_slices(count, len(self.rows)):
            n = part.stop - part.start
            values = np.matmul(self.rows[:n], self.landmarks.T, out=self.values[:n])
            np.exp(values, out=values)
            np.matmul(values, self.weights, out=self.out[:n])


def bare_arithmetic(
    rows: int, columns: int, n: int, width: int, dtype: str, tile: int, threads: int
) -> Callable[[Path], None]:
    """Return what runs the arithmetic of a Gaussian's scores alone, with nothing to check and nothing to allocate.

    Parameters
    ----------
    rows, columns : int
        Of what is scored.
    n, width : int
        Landmarks and components.
    dtype : str
    tile : int
        Rows of a product.
    threads : int
        Each takes its share of the rows, with one BLAS thread.
    """
    rng, inner = np.random.default_rng(0), columns + 2
    # The products lie between -2 and 0: exp of much less would be timed on its slow path.
    landmarks = (-2 / inner * rng.uniform(size=(n, inner))).astype(dtype)
    weights = rng.normal(size=(n, width)).astype(dtype)

    def thread() -> _Thread:
        Z, values = rng.uniform(size=(tile, inner)).astype(dtype), allocate_aligned(tile * n * landmarks.itemsize)
        values[:] = 0
        return _Thread(Z, landmarks, weights, values.view(dtype).reshape(tile, n), np.zeros((tile, width), dtype))

    shares = [part.stop - part.start for part in row_slices(rows, -(-rows // threads))]
    crew = [thread() for _ in shares]

    def run(_: Path) -> None:
        with single_blas_thread(), ThreadPoolExecutor(threads) as pool:
            list(pool.map(_Thread.run, crew, shares))

    return run


def bare_tile_loop(model: Model, Z: Array, threads: int) -> Callable[[Path], None]:
    """Return what scores rows in memory through dkfm's tile loop, without Dask and without files."""
    score, shares = scorer.prepare_scorer(model), list(row_slices(len(Z), -(-len(Z) // threads)))

    def run(_: Path) -> None:
        with single_blas_thread(), ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda part: score("scores", Z[part]), shares))

    return run
