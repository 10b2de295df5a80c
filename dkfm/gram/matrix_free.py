"""Multiply a Gram matrix without storing it: kernel values are computed tile by tile, used, and discarded.

A task computes a square tile of the lower triangle in pieces that stay in the processor's cache. It multiplies the tile
and its transpose. The contributions of tiles to a block of rows are added in a fixed order, so a product is bitwise
equal on any number of threads or workers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import cast

import numpy as np

from dkfm.core import budget, chunking
from dkfm.core.budget import PIECE_COLUMNS, PIECE_ROWS
from dkfm.core.rows import Array, Rows
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.errors import ClusterError, KernelError
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.executors import Executor, open_executor
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, require_fit_worker
from dkfm.gram.ordered_sums import OrderedSums
from dkfm.gram.shared_arrays import SharedArrays, open_shared_arrays
from dkfm.kernels.base import Kernel, evaluate_block
from dkfm.kernels.pairwise.block_operations import Evaluator
from dkfm.numerics.skinny_and_triangular_matmul import skinny_matmul, skinny_matmul_of_transpose
from dkfm.sources.base import Source
from dkfm.sources.memory import MemorySource

_DIAGONAL_ROWS = 2200
"""Largest number of rows of a diagonal square that is not split into two squares and the rectangle below them."""

_DIAGONAL_COLUMNS = 512
"""Largest number of columns of a diagonal square that are multiplied at a time.

With more columns, more values above the diagonal are computed; with fewer, each value takes longer.
"""

_TYPICAL_BLOCKS, _MAX_BLOCKS = 8, 16
"""Typical and largest number of blocks of rows; tasks that need too much memory are split further."""

_SMALL_TILE_PRODUCTS = 10**8
"""Multiplications of a tile below which its task on a cluster costs more than the tile; then fewer blocks are used."""

_VALUE_PRODUCTS = 100
"""Multiplications that take as long as a kernel value, besides those with its rows and right sides."""

_MANY_TILE_ROWS = 7500
"""Rows of a tile above which more than the typical number of blocks is used."""

_TILE_VALUES = 2**24
"""Largest number of values of the rows, right sides and products of a task: 134 megabytes."""

_Contribution = tuple[int, int, Array, Array | None]
"""Block numbers of a tile, its product, and the product of its transpose, which is None on the diagonal."""


@dataclass(frozen=True, eq=False)
class MatrixFreeGram:
    """Gram matrix of rows whose values each product computes anew; `open_matrix_free` creates one."""

    kernel: Kernel
    rows: Source
    """Training rows (N, d), where the tasks read them."""
    executor: Executor
    """Runs the tasks of all products."""
    tile_rows: int
    """Rows and columns of a tile."""
    shared: SharedArrays
    """Shares right sides with the tasks."""
    shows_progress: bool = False
    """Whether a product shows a progress bar."""

    def __matmul__(self, V: Array) -> Array:
        """Return the product (N, p) with V (N, p); repeated products are bitwise equal.

        Raises
        ------
        KernelError
            A kernel value, or a product, is not finite.
        ClusterError
            A tile killed its workers repeatedly, or the cluster is gone.
        """
        pairs = list(chunking.lower_triangle_tile_indices(len(V), self.tile_rows))
        sums = OrderedSums(np.zeros(V.shape), self.tile_rows, self.shared.folder)

        def add(contribution: _Contribution) -> None:
            row, column, product, transposed = contribution
            sums.add(row, column, product)
            if transposed is not None:
                sums.add(column, row, transposed)

        with self.shared.share(np.ascontiguousarray(V)) as right:
            tasks = ((self.kernel, self.rows, right, pair, self.tile_rows, self.shared.requirements) for pair in pairs)
            tally = run_tasks(self.executor, "dkfm-product", multiply_tile, tasks, len(pairs), self.shows_progress, add)
        if tally.fatal_task_numbers:
            raise ClusterError(f"Every worker died that multiplied the tile {pairs[tally.fatal_task_numbers[0]]}.")
        return sums.total


def choose_tile_rows(n: int, width: int, columns: int) -> int:
    """Choose the rows of a tile, for rows of some values and right sides of some columns.

    From some 6000 rows on there are 8 to 16 blocks of rows, so that 36 to 136 tasks each compute for some hundredths of
    a second or more, and return few values compared with those that they compute. Fewer rows have fewer blocks.

    >>> [choose_tile_rows(n, 50, 32) for n in (600, 2400, 9000, 20_000, 100_000, 10**6)]
    [600, 800, 1125, 2500, 7143, 62500]
    >>> choose_tile_rows(60_000, 2000, 32), choose_tile_rows(1400, 4000, 32)
    (4000, 175)
    """
    small_tile_rows = max(1, isqrt(_SMALL_TILE_PRODUCTS // (_VALUE_PRODUCTS + width + 2 * columns)))
    typical = min(_TYPICAL_BLOCKS, max(1, n // small_tile_rows))
    blocks = min(_MAX_BLOCKS, max(typical, chunking.count_tiles(n, _MANY_TILE_ROWS)))
    most = max(1, _TILE_VALUES // (2 * width + 4 * columns))
    return chunking.count_tiles(n, max(blocks, chunking.count_tiles(n, most)))


@contextmanager
def open_matrix_free(
    kernel: Kernel,
    X: Rows,
    columns: int,
    *,
    tile_rows: int | None = None,
    workspace: str | Path | None = None,
    progress: bool = False,
) -> Iterator[MatrixFreeGram]:
    """Yield the Gram matrix of rows X (N, d) for products with at most `columns` columns.

    With `progress`, a long product shows a progress bar.

    On a cluster, the rows and the right sides are files in a temporary folder that the workers must see. It is in the
    workspace if there is one.

    Raises
    ------
    BudgetError
        A worker has too little memory for a tile, or the disk has too little space for the rows.
    UnfitWorkerError
        No worker sees the folder.
    """
    n, source = X.shape[0], MemorySource(X)
    width = source.float64s_per_row
    rows = min(n, tile_rows or choose_tile_rows(n, width, columns))
    task_bytes = budget.matrix_free_task_bytes(rows, width, columns, kernel.peak_blocks, kernel.landmark_copies)
    disk = 8 * n * (width + columns)
    with (
        open_executor(None) as executor,
        open_shared_arrays(executor, task_bytes, disk, "The training rows", workspace) as shared,
        shared.share(X) as shared_rows,
    ):
        yield MatrixFreeGram(kernel, shared_rows, executor, rows, shared, progress)


def multiply_tile(
    kernel: Kernel,
    source: Source,
    right: Source,
    pair: tuple[int, int],
    tile_rows: int,
    requirements: WorkerRequirements | None = None,
) -> _Contribution:
    """Compute a tile in pieces; return its product with the right side, and that of its transpose."""
    require_fit_worker(requirements)
    rows, columns = (chunking.row_slice(number, source.shape[0], tile_rows) for number in pair)
    X, V = source.read(rows), cast("Array", right.read(rows))  # right sides are dense
    with single_blas_thread(), np.errstate(over="ignore", invalid="ignore"):  # what overflows raises below
        parts: tuple[Array, ...]
        if rows == columns:
            parts = (_multiply_diagonal(kernel, X, V),)
        else:
            parts = _multiply_off_diagonal(kernel, X, source.read(columns), V, cast("Array", right.read(columns)))
        if not all(np.isfinite(part).all() for part in parts):
            _require_finite_values(kernel, X, source.read(columns), (rows.start, columns.start))
            raise KernelError(f"Products with the values of {kernel!r} are not finite.")
    return (*pair, parts[0], parts[1] if len(parts) == 2 else None)


def _require_finite_values(kernel: Kernel, X: Rows, Y: Rows, first: tuple[int, int]) -> None:
    """Raise a KernelError that names the rows of a value that is not finite; `first` are the numbers of the first."""
    for columns in chunking.row_slices(Y.shape[0], PIECE_COLUMNS):
        for rows in chunking.row_slices(X.shape[0], PIECE_ROWS):
            evaluate_block(kernel, X[rows], Y[columns], (first[0] + rows.start, first[1] + columns.start))


def _multiply_diagonal(kernel: Kernel, X: Rows, V: Array) -> Array:
    """Return ``k(X, X) V`` (n, p); values below small squares on the diagonal are also used transposed."""
    n = len(V)
    if n > _DIAGONAL_ROWS:
        first, second = slice(n // 2), slice(n // 2, n)
        product = np.concatenate([_multiply_diagonal(kernel, X[half], V[half]) for half in (first, second)])
        below, above = _multiply_off_diagonal(kernel, X[second], X[first], V[second], V[first])
        product[first] += above
        product[second] += below
        return product
    product = np.zeros(V.shape)
    width = chunking.count_tiles(n, chunking.count_tiles(n, _DIAGONAL_COLUMNS))
    for columns in chunking.row_slices(n, width):
        rows, evaluate = slice(columns.start, n), kernel.make_evaluator(X[columns])
        _add_products(evaluate, X[rows], (V[rows], V[columns]), (product[rows], product[columns]), width)
    return product


def _multiply_off_diagonal(kernel: Kernel, X: Rows, Y: Rows, V: Array, W: Array) -> tuple[Array, Array]:
    """Return ``k(X, Y) W`` (n, p) and ``k(X, Y)' V`` (m, p), for V (n, p) and W (m, p)."""
    product, transposed = np.zeros(V.shape), np.zeros(W.shape)
    for columns in chunking.row_slices(len(W), PIECE_COLUMNS):
        evaluate = kernel.make_evaluator(Y[columns])
        _add_products(evaluate, X, (V, W[columns]), (product, transposed[columns]))
    return product, transposed


def _add_products(
    evaluate: Evaluator, X: Rows, right_sides: tuple[Array, Array], products: tuple[Array, Array], first: int = 0
) -> None:
    """Add ``k(X, Y) W`` to the first product (n, p) and ``k(X, Y)' V`` to the second (m, p), with right sides V and W.

    `evaluate` returns k(X, Y), some rows at a time. The second product uses only the rows from number `first` on,
    because in a square on the diagonal the rows before it are Y itself.
    """
    (V, W), (product, transposed) = right_sides, products
    (n, p), m = V.shape, len(W)
    across, down = np.empty((min(n, PIECE_ROWS), p)), np.empty((m, p))
    with _value_buffer.borrow(1, min(n, PIECE_ROWS) * m, np.dtype(np.float64)) as buffer:
        for rows in chunking.row_slices(n, PIECE_ROWS):
            size, skipped = rows.stop - rows.start, max(0, first - rows.start)
            values = evaluate(X[rows], buffer[0, : size * m].reshape(size, m))
            skinny_matmul(values, W, across[:size])
            product[rows] += across[:size]
            if skipped < size:
                skinny_matmul_of_transpose(values[skipped:], V[rows][skipped:], down)
                transposed += down
            del values  # if it is not the buffer, free it before the next one is allocated


_value_buffer = ThreadBuffer()
