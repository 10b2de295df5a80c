"""Compare methods for repeated products with a Gram matrix: in memory, from disk, or matrix-free.

The chosen method has the shortest predicted time among those that fit, or almost the shortest and less memory.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import inf, isqrt
from statistics import mean
from threading import Lock

import numpy as np

from dkfm.core import budget, cpus
from dkfm.core.budget import PIECE_COLUMNS, PIECE_ROWS
from dkfm.core.chunking import count_tiles
from dkfm.core.rows import Array
from dkfm.core.scratch_buffers import allocate_aligned
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import is_inside_worker
from dkfm.gram import build, matrix_free
from dkfm.gram.stored_gram import disk_bytes
from dkfm.gram.training_data import TILE_VALUES
from dkfm.kernels.base import Definiteness, Kernel
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics.eigensolvers import lanczos

_TRIAL_SHAPES = (16, 16), (64, 64), (PIECE_ROWS, PIECE_COLUMNS)
"""Rows and columns of the blocks that are timed, in this order."""

_LONG_TRIAL = 5e-3
"""Seconds of a timed block above which no larger block is timed."""

_SAME_TIME = 1.3
"""Ratio up to which two predicted times count as equal."""

SHARED_SECONDS = 1.25
"""Factor by which tasks take longer if several run, because they share caches and memory, and read rows."""

_PRODUCT_ROWS = 512
"""Rows and columns of the matrices whose product is timed."""

_PRODUCT_COUNT = 4
"""Number of products that each thread computes at the same time as the others."""

_PRODUCT_THREADS = 16
"""Largest number of threads in this measurement; each has a product of two megabytes."""

_REPETITIONS = 3
"""Number of repetitions of a measurement; the fastest counts."""

_measuring = Lock()


class ProductMethod(StrEnum):
    """Where the values of a Gram matrix are kept between two products."""

    DENSE = "in memory"
    STORED = "on disk"
    MATRIX_FREE = "computed anew each time"


@dataclass(frozen=True)
class ProductCost:
    """Predicted costs of the products with a Gram matrix by one method."""

    method: ProductMethod
    seconds: float
    """Predicted seconds of all products, including the computation of the matrix."""
    memory_bytes: int
    """Largest memory of this process."""
    basis_columns: int
    """Capacity of the basis of Lanczos, in columns."""
    disk_bytes: int = 0
    """Size of the matrix on disk, with the rows beside it."""
    task_bytes: int = 0
    """Memory of a task on a worker; 0 if no workers are used."""


@dataclass(frozen=True)
class LanczosProblem:
    """The products that find a few eigenvectors, and where they are computed."""

    kernel: Kernel
    n: int
    """Rows of the matrix."""
    float64s_per_row: int
    """Stored values of a row, on average."""
    n_components: int
    """Number of eigenvectors."""
    products: int
    """Expected number of products."""
    tile_rows: int | None
    """Rows of a tile, if the user specified them."""
    threads: int
    """Threads that run tasks."""
    is_cluster: bool
    """Whether the threads are those of a cluster."""
    keeps_store: bool
    """Whether the user requested the matrix on disk, by a workspace."""
    disk_room: int
    """Bytes that the matrix may take on disk."""

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return lanczos.choose_block_columns(self.n, self.n_components)

    @property
    def full_basis_columns(self) -> int:
        """Columns of a large basis, which is rarely restarted."""
        return lanczos.choose_basis_columns(self.n, self.n_components)

    @property
    def small_basis_columns(self) -> int:
        """Columns of a small basis, which holds little more than the expected products."""
        expected = (self.products * 5 // 4 + 1) * self.block_columns
        return min(self.full_basis_columns, max(expected, 4 * (self.n_components + self.block_columns)))

    @property
    def basis_seconds(self) -> float:
        """Predicted seconds of all work besides the products."""
        return budget.reorthogonalization_seconds(self.n, self.block_columns, self.products)


def has_near_start(kernel: Kernel) -> bool:
    """Return whether matrix-free Lanczos starts from eigenvectors of some rows, which saves one or two products.

    For a kernel that may have negative eigenvalues, the first block is random, because more products detect these more
    reliably.
    """
    return kernel.definiteness is Definiteness.PSD and is_code_free(kernel)


def compare_product_costs(task: LanczosProblem, available: int) -> list[ProductCost]:
    """Return the costs of the best method, then of the others that fit in `available` bytes and on the disk.

    Among methods of almost equal time, the one with the least memory is best. If the user requested the matrix on disk,
    the matrix-free method is used only if the matrix does not fit there; it is never used for a precomputed matrix.
    """
    costs = [_cost_dense(task), _cost_stored(task)]
    if not task.kernel.is_precomputed:
        costs.append(_cost_matrix_free(task))
    costs.sort(key=lambda cost: _cost_sort_key(task, cost, available))
    if not _cost_sort_key(task, costs[0], available)[0]:
        limit = _SAME_TIME * costs[0].seconds
        alike = [
            cost
            for cost in costs
            if _cost_sort_key(task, cost, available)[:2] == (False, False) and cost.seconds <= limit
        ]
        first = min(alike, key=lambda cost: cost.memory_bytes, default=costs[0])
        costs.sort(key=lambda cost: cost is not first)
    return costs


def _cost_sort_key(task: LanczosProblem, cost: ProductCost, available: int) -> tuple[bool, bool, float]:
    fits = cost.memory_bytes <= available and cost.disk_bytes <= task.disk_room
    unwanted = task.keeps_store and cost.method is ProductMethod.MATRIX_FREE
    return (False, unwanted, cost.seconds) if fits else (True, False, float(cost.memory_bytes))


def _gram_seconds(task: LanczosProblem, tile_rows: int | None) -> float:
    if task.kernel.is_precomputed:
        return 0.0
    values = task.n * task.n / 2 * value_seconds(task.kernel, task.float64s_per_row) / task.threads
    return values + budget.gram_seconds(task.n, 0, task.threads, tile_rows)


def _cost_dense(task: LanczosProblem) -> ProductCost:
    kernel = task.kernel
    stores = build.stores_gram(kernel, task.n, task.tile_rows, "" if task.keeps_store else None, task.is_cluster)
    rows = min(task.n, task.tile_rows or build.TILE_ROWS)
    seconds = _gram_seconds(task, rows if stores else None)
    seconds += budget.centring_seconds(task.n) + task.basis_seconds
    seconds += task.products * budget.dense_product_seconds(task.n, task.block_columns)
    need = budget.lanczos_bytes(
        task.n,
        task.float64s_per_row,
        task.full_basis_columns,
        task.block_columns,
        kernel.peak_blocks,
        kernel.landmark_copies,
    )
    return ProductCost(
        ProductMethod.DENSE,
        seconds,
        need,
        task.full_basis_columns,
        *_disk_and_task_bytes(task, rows if stores else None),
    )


def _cost_stored(task: LanczosProblem) -> ProductCost:
    rows, threads = min(task.n, task.tile_rows or build.TILE_ROWS), cpus.COUNT
    if task.kernel.is_precomputed:
        rows, threads = min(task.n, isqrt(TILE_VALUES)), 1
    seconds = _gram_seconds(task, rows) + task.basis_seconds
    seconds += (task.products + 1) * budget.stored_product_seconds(task.n, task.block_columns)
    need = budget.lanczos_out_of_core_bytes(
        task.n,
        task.float64s_per_row,
        task.small_basis_columns,
        task.block_columns,
        rows,
        threads,
        task.kernel.landmark_copies,
    )
    return ProductCost(ProductMethod.STORED, seconds, need, task.small_basis_columns, *_disk_and_task_bytes(task, rows))


def _cost_matrix_free(task: LanczosProblem) -> ProductCost:
    kernel, columns = task.kernel, task.block_columns
    rows = min(task.n, task.tile_rows or matrix_free.choose_tile_rows(task.n, task.float64s_per_row, columns))
    value = value_seconds(kernel, task.float64s_per_row)
    products = task.products - (task.products > 1 and has_near_start(kernel))
    all_products = products * (value + 2 * columns * budget.PRODUCT_SECONDS) + value  # the last term is for the means
    tiles = count_tiles(task.n, rows)
    values = SHARED_SECONDS * rows * rows * tiles * (tiles + 1) / 2
    seconds = values * all_products / task.threads + task.basis_seconds
    each = budget.matrix_free_task_bytes(
        rows, task.float64s_per_row, columns, kernel.peak_blocks, kernel.landmark_copies
    )
    threads = 0 if task.is_cluster else task.threads
    basis_columns = task.small_basis_columns
    need = budget.lanczos_matrix_free_bytes(task.n, task.float64s_per_row, basis_columns, columns) + threads * each
    state = budget.lanczos_checkpoint_bytes(task.n, basis_columns, columns) if task.keeps_store else 0
    return ProductCost(ProductMethod.MATRIX_FREE, seconds, need, basis_columns, state, each if task.is_cluster else 0)


def _disk_and_task_bytes(task: LanczosProblem, rows: int | None) -> tuple[int, int]:
    """Return the bytes on disk of a matrix in tiles of some rows, and those of a task; 0 if it is not stored."""
    kernel = task.kernel
    if rows is None or kernel.is_precomputed:
        return 0, 0
    each = budget.gram_task_bytes(rows, task.float64s_per_row, kernel.peak_blocks, kernel.landmark_copies)
    return disk_bytes(task.n, task.float64s_per_row, rows), each if task.is_cluster else 0


def factor_seconds(n: int, threads: int, seconds_per_value: float = 0.0) -> float:
    """Predict the seconds of threads that factor an N x N Gram matrix in tiles on disk.

    A kernel value takes `seconds_per_value` of one thread; by default the matrix exists already.
    """
    values = SHARED_SECONDS * n * n / 2 * seconds_per_value / threads
    return budget.factor_seconds(n, threads, multiplication_seconds()) + values


def multiplication_seconds() -> float:
    """Measure the seconds of a thread for a multiplication and addition of a large matrix product, once.

    As many threads as tasks multiply at the same time, because each is slower than a single thread.
    """
    with _measuring:  # concurrent measurements would slow each other down
        return _measure_multiplication_seconds(1 if is_inside_worker() else min(cpus.COUNT, _PRODUCT_THREADS))


@lru_cache(maxsize=2)
def _measure_multiplication_seconds(threads: int) -> float:
    shape, least = (_PRODUCT_ROWS, _PRODUCT_ROWS), inf
    left, right = np.random.default_rng(0).normal(size=(2, *shape))

    def time_products(out: Array) -> float:
        start = time.perf_counter()
        for _ in range(_PRODUCT_COUNT):
            np.matmul(left, right, out=out)
        return time.perf_counter() - start

    with single_blas_thread(), ThreadPoolExecutor(threads) as pool:
        products = [np.empty(shape) for _ in range(threads)]
        for _ in range(_REPETITIONS):
            least = min(least, mean(pool.map(time_products, products)))
    return least / (_PRODUCT_COUNT * _PRODUCT_ROWS**3)


def value_seconds(kernel: Kernel, d: int) -> float:
    """Measure the seconds of one thread for a kernel value of rows of d columns; cache the result for equal kernels.

    It is the time of a value in a block of `PIECE_ROWS` by `PIECE_COLUMNS`. The fixed cost of a call, measured with a
    single value, is divided by the number of values in such a block.

    The rows are random histograms, which most kernels accept. For a kernel that fails on them, for example because it
    needs other columns, the time of a simple kernel is returned.
    """
    try:
        return _measure_value_seconds(kernel, d)
    except TypeError:  # a function that has no hash
        return _measure_value_seconds.__wrapped__(kernel, d)


@lru_cache(maxsize=64)
def _measure_value_seconds(kernel: Kernel, d: int) -> float:
    with single_blas_thread(), np.errstate(all="ignore"), suppress(Exception):  # a function of the user
        rows = np.random.default_rng(0).uniform(0.1, 1.9, (PIECE_ROWS + PIECE_COLUMNS, d))
        rows *= d / rows.sum(axis=1, keepdims=True)
        resolved = kernel.resolve(rows)
        call = _time_block(resolved, rows[:1], rows[1:2])
        for count, columns in _TRIAL_SHAPES:
            seconds = max(0.0, _time_block(resolved, rows[:count], rows[count : count + columns]) - call)
            if seconds > _LONG_TRIAL:
                break
        return seconds / (count * columns) + call / (PIECE_ROWS * PIECE_COLUMNS)
    return budget.VALUE_SECONDS


def _time_block(kernel: Kernel, X: Array, Y: Array) -> float:
    """Compute a block several times; return the seconds of the fastest."""
    evaluate, buffer, least = kernel.make_evaluator(Y), allocate_aligned(8 * len(X) * len(Y)), inf
    out = buffer.view(np.float64).reshape(len(X), len(Y))
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        evaluate(X, out)
        least = min(least, time.perf_counter() - start)
    return least
