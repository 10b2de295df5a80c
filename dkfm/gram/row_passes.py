"""Pass over the rows of a source with tasks that compute residuals of pivots, sum features, or read selected rows."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from dkfm.core import chunking
from dkfm.core.budget import PASS_PIECE_VALUES, PASS_TILE_ROWS, PASS_TILE_VALUES
from dkfm.core.rows import Array, Rows, stack_rows
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.errors import ClusterError, KernelError
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.executors import Executor
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, require_fit_worker
from dkfm.files.row_values import allocate_row_values
from dkfm.gram.ordered_sums import OrderedSums
from dkfm.gram.shared_arrays import SharedArrays
from dkfm.gram.streamed_rows import evaluate_finite_diagonal
from dkfm.kernels.base import Kernel
from dkfm.numerics import training_statistics
from dkfm.numerics.map_error_bounds import estimate_largest_norm
from dkfm.numerics.model import Head, Model
from dkfm.numerics.roots import Root, replace_zero_lengths, row_lengths
from dkfm.numerics.scorer import prepare_scorer
from dkfm.numerics.training_statistics import WeightedRows
from dkfm.sources.base import Source, read_finite

Indices = npt.NDArray[np.intp]
R = TypeVar("R")

_SMALL_TILE_ROWS = 1024
"""Largest number of rows of a task if the rows are few."""

_TILES = 16
"""Number of tasks if the rows are neither few nor many."""


@dataclass(frozen=True, eq=False)
class RowPasses:
    """Passes of tasks over the rows of a source."""

    kernel: Kernel
    source: Source
    executor: Executor
    shared: SharedArrays
    shows_progress: bool = False
    """Whether a pass shows a progress bar."""

    @property
    def tile_rows(self) -> int:
        """Rows of a task."""
        return choose_tile_rows(self.source.shape[0], self.source.float64s_per_row)

    def compute_initial_residuals(self) -> Array:
        """Return the residuals before the first pivot: 1, or 0 for zero vectors, or -1 for a negative k(x, x)."""
        residuals = allocate_row_values(self.source.shape[0])
        self._run(compute_diagonal_signs, (), partial(_store, residuals))
        return residuals

    def subtract_squares(self, residuals: Array, pivots: Rows, weights: Array) -> None:
        """Subtract the squares of the features ``k(x, pivots) weights / |x|`` from the residuals (N,) of all rows."""
        with self.shared.share(pivots) as P, self.shared.share(np.ascontiguousarray(weights)) as W:
            self._run(compute_squares, (P, W), partial(_subtract, residuals))

    def recompute_residuals(self, residuals: Array, pivots: Rows, weights: Array, probes: Array) -> float:
        """Recompute the residuals (N,) of all rows from all features; return the largest norm of coefficients.

        `probes` (r, 16) are such that their products with the features of a row estimate the norm of its coefficients.
        """
        norms = [1.0]

        def store(result: tuple[slice, Array, float]) -> None:
            residuals[result[0]] = result[1]
            norms.append(result[2])

        everything = np.ascontiguousarray(np.hstack([weights, weights @ probes]))
        with self.shared.share(pivots) as P, self.shared.share(everything) as W:
            self._run(measure_largest_residuals, (P, W), store)
        return max(norms)

    def compute_feature_moments(self, landmarks: Rows, root: Root, weighted: WeightedRows) -> tuple[Array, Array]:
        """Return the weighted sums ``sum w a phi`` (c, r) for each column a, and ``sum w phi phi'`` (r, r)."""
        count, r = weighted.n_columns, root.weights.shape[1]
        sums = OrderedSums(np.zeros((1, _count_sums(count, r))), 1, self.shared.folder)
        parts = list(chunking.row_slices(self.source.shape[0], self.tile_rows))
        numbers = {part.start: number for number, part in enumerate(parts)}

        def add(result: tuple[slice, Array]) -> None:
            sums.add(0, numbers[result[0].start], result[1])

        with self.shared.share(landmarks) as L, self.shared.share(np.ascontiguousarray(root.weights)) as W:
            arguments = ((L, W, root.triangular, weighted.subset(part)) for part in parts)
            self._run_parts("dkfm-moments", compute_moments_of_rows, parts, arguments, add)
        return _split_sums(sums.total, count, r)

    def take_rows(self, numbers: Indices) -> Rows:
        """Return some rows; a task for each tile reads them."""
        ascending, inverse = np.unique(numbers, return_inverse=True)
        tiles, counts = np.unique(ascending // self.tile_rows, return_counts=True)
        parts: list[tuple[int, Rows]] = []
        groups = np.split(ascending, np.cumsum(counts)[:-1])
        tasks = [
            (self.source, int(tile), group, self.shared.requirements) for tile, group in zip(tiles, groups, strict=True)
        ]
        tally = run_tasks(self.executor, "dkfm-pivots", read_selected_rows, tasks, len(tasks), False, parts.append)
        self._require_done(tally.fatal_task_numbers)
        by_tile = dict(parts)
        return stack_rows([by_tile[int(tile)] for tile in tiles])[inverse]

    def _run(self, task: Callable[..., R], arguments: tuple[object, ...], on_result: Callable[[R], object]) -> None:
        parts = list(chunking.row_slices(self.source.shape[0], self.tile_rows))
        self._run_parts("dkfm-pivots", task, parts, repeat(arguments), on_result)

    def _run_parts(
        self,
        name: str,
        task: Callable[..., R],
        parts: list[slice],
        arguments: Iterable[tuple[object, ...]],
        on_result: Callable[[R], object],
    ) -> None:
        tasks = (
            (self.kernel, self.source, part, *more, self.shared.requirements)
            for part, more in zip(parts, arguments, strict=False)
        )
        tally = run_tasks(self.executor, name, task, tasks, len(parts), self.shows_progress, on_result)
        self._require_done(tally.fatal_task_numbers)

    def _require_done(self, fatal: list[int]) -> None:
        if fatal:
            raise ClusterError(
                f"Every worker died that read tile {fatal[0]} of {self.tile_rows} rows of {self.source.name}."
            )


def choose_tile_rows(n: int, width: int) -> int:
    """Choose the rows of a task, for n rows of `width` values each: fewer rows if threads would otherwise be idle.

    >>> choose_tile_rows(10**6, 5), choose_tile_rows(10**6, 784), choose_tile_rows(20_000, 5), choose_tile_rows(3000, 5)
    (16384, 5349, 1250, 750)
    """
    tiles = min(_TILES, 2 * chunking.count_tiles(n, 2 * _SMALL_TILE_ROWS))
    return max(1, min(PASS_TILE_ROWS, chunking.count_tiles(n, tiles), PASS_TILE_VALUES // max(1, width)))


def _store(residuals: Array, result: tuple[slice, Array]) -> None:
    residuals[result[0]] = result[1]


def _subtract(residuals: Array, result: tuple[slice, Array]) -> None:
    residuals[result[0]] -= result[1]


def read_selected_rows(
    source: Source, tile: int, numbers: Indices, requirements: WorkerRequirements | None
) -> tuple[int, Rows]:
    """Return a tile's number and some of its rows, whose numbers ascend."""
    require_fit_worker(requirements)
    first = int(numbers[0])
    return tile, read_finite(source, slice(first, int(numbers[-1]) + 1))[numbers - first]


def compute_diagonal_signs(
    kernel: Kernel, source: Source, rows: slice, requirements: WorkerRequirements | None
) -> tuple[slice, Array]:
    """Return the signs of k(x, x) of some rows."""
    require_fit_worker(requirements)
    return rows, np.sign(evaluate_finite_diagonal(kernel, read_finite(source, rows), rows.start))


def compute_squares(
    kernel: Kernel,
    source: Source,
    rows: slice,
    pivots: Source,
    weights: Source,
    requirements: WorkerRequirements | None,
) -> tuple[slice, Array]:
    """Return the sums of squares of some features of rows, as shares of k(x, x)."""
    require_fit_worker(requirements)
    squares = np.empty(rows.stop - rows.start)
    with single_blas_thread():
        for piece, features, _ in _iter_features(kernel, source, rows, pivots, weights):
            squares[piece] = np.einsum("ij,ij->i", features, features)
    return rows, squares


def measure_largest_residuals(
    kernel: Kernel,
    source: Source,
    rows: slice,
    pivots: Source,
    columns: Source,
    requirements: WorkerRequirements | None,
) -> tuple[slice, Array, float]:
    """Return the residuals of some rows from all features, and the largest norm of their coefficients."""
    require_fit_worker(requirements)
    residuals, norm, rank = np.empty(rows.stop - rows.start), 0.0, pivots.shape[0]
    with single_blas_thread():
        for piece, features, signs in _iter_features(kernel, source, rows, pivots, columns):
            residuals[piece] = signs - np.einsum("ij,ij->i", features[:, :rank], features[:, :rank])
            norm = max(norm, estimate_largest_norm(features[:, rank:]))
    return rows, residuals, norm


def compute_moments_of_rows(
    kernel: Kernel,
    source: Source,
    rows: slice,
    landmarks: Source,
    weights: Source,
    triangular: bool,
    weighted: WeightedRows,
    requirements: WorkerRequirements | None,
) -> tuple[slice, Array]:
    """Return sums over some rows (1, s), for `RowPasses.compute_feature_moments`."""
    require_fit_worker(requirements)
    X, L, W = read_finite(source, rows), _read_all(landmarks), cast("Array", _read_all(weights))
    columns = weighted.weighted_columns()
    sums = np.zeros((1, _count_sums(weighted.n_columns, W.shape[1])))
    first, second = _split_sums(sums, weighted.n_columns, W.shape[1])
    scorer = prepare_scorer(Model(kernel, L, {"features": Head(W, triangular=triangular)}))
    with single_blas_thread(), np.errstate(over="ignore", invalid="ignore"):  # what overflows raises below
        training_statistics.add_features_and_products(scorer, [X], columns, weighted.weights, first, second)
    if not np.isfinite(sums).all():
        raise KernelError(f"{kernel!r}, or a feature, is not finite for a row from {rows.start} on of {source.name}.")
    return rows, sums


def _count_sums(count: int, r: int) -> int:
    return count * r + r * r


def _split_sums(sums: Array, count: int, r: int) -> tuple[Array, Array]:
    """Return views of sums (1, s): of features (c, r), and of products (r, r)."""
    first, second = np.split(sums[0], [count * r])
    return first.reshape(count, r), second.reshape(r, r)


def _read_all(source: Source) -> Rows:
    return source.read(slice(0, source.shape[0]))


def _iter_features(
    kernel: Kernel, source: Source, rows: slice, pivots: Source, weights: Source
) -> Iterator[tuple[slice, Array, Array]]:
    """Yield slices of the rows, their features with the weights over their lengths, and the signs of their k(x, x)."""
    X, P, W = read_finite(source, rows), _read_all(pivots), _read_all(weights)
    evaluate, n, m = kernel.make_evaluator(P), X.shape[0], P.shape[0]
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite raise below
        diagonal = kernel.evaluate_diagonal(X)
    lengths = replace_zero_lengths(row_lengths(diagonal))
    size = max(16, min(n, PASS_PIECE_VALUES // m))
    with _value_buffer.borrow(size, m, np.dtype(np.float64)) as buffer:
        for piece in chunking.row_slices(n, size):
            with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite raise
                features = evaluate(X[piece], buffer[: piece.stop - piece.start]) @ W
            features /= lengths[piece, np.newaxis]
            if not np.isfinite(features).all():
                row = rows.start + piece.start + int(np.isfinite(features).all(axis=1).argmin())
                raise KernelError(f"{kernel!r}, or a feature, is not finite for row {row} of {source.name}.")
            yield piece, features, np.sign(diagonal[piece])


_value_buffer = ThreadBuffer()
