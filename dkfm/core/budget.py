"""Predict the memory and the time of fits, tasks and workers; raise before work starts that does not fit.

Every number of bytes is an upper bound; the tests compare it with measured peaks. Arrays are float64, with 8 bytes per
value, unless `itemsize` is given. `blocks` and `copies` are `peak_blocks` and `landmark_copies` of a kernel.
"""

from math import isqrt

from dkfm.core import cpus
from dkfm.core.chunking import choose_tile_rows
from dkfm.core.display.quantities import format_megabytes
from dkfm.errors import BudgetError

_VALUE, _OVERHEAD = 8, 2**27
"""Bytes of a value, and of thread stacks, BLAS buffers, and memory that the allocator keeps of earlier tiles."""

PROCESS_BYTES = 2**24
"""Bytes that tasks add to a process in addition to their arrays: thread stacks and BLAS buffers."""

STALL_SECONDS = 600.0
"""Time without a finished task after which a job fails."""

VALUE_SECONDS = 1e-9
"""Assumed time of one thread for one float64 kernel value, without its multiplications."""

PRODUCT_SECONDS = 4.5e-11
"""Assumed time of one thread for one float64 multiplication and addition."""

WRITE_BYTES = 4e8
"""Assumed bytes a second that one thread writes durably and reads back."""

_ROUND_BYTES = 2**25
"""Bytes of threads and libraries during rounds of pivots, in addition to `PROCESS_BYTES`."""

EIGENVECTOR_SQUARES, FEW_EIGENVECTOR_SQUARES = 3, 2
"""Number of (N, N) arrays that an eigendecomposition needs for all eigenvectors, and for a few."""

ROTATION_SQUARES = 9
"""Number of (N, N) arrays that `ExactFeatureMap` needs where a singular value decomposition rotates its root."""

PIVOT_SQUARES = 2
"""Number of (N, N) arrays that a pivoted Cholesky factorization of a Gram matrix needs."""

PIECE_ROWS = 512
"""Rows of a piece of a matrix-free product; its values take eight megabytes, which fit into a shared cache."""

PIECE_COLUMNS = 2048
"""Columns of a piece."""

PASS_TILE_ROWS = 16_384
"""Largest number of rows of a task of a pass over rows."""

PASS_TILE_VALUES = 2**22
"""Largest number of values of the rows of such a task: 34 megabytes."""

PASS_PIECE_VALUES = 2**18
"""Kernel values that such a task holds at a time: two megabytes, which stay in the processor's cache."""

ROUND_CANDIDATES = 2048
"""Number of candidates of a round, from which pivots are chosen."""

MAX_DROPPED = 2**20
"""Largest number of residuals that the attribute `dropped_` of a map keeps; it keeps the largest ones."""

_PRODUCT_RATE = 7e10
"""Assumed multiplications and additions a second, one by one, of a product with few columns on all threads."""

_CERTIFIED_ROWS = 640
"""Largest number of landmarks whose pairs are certified."""

LARGEST_DENSE_N = 32_765
"""Largest N for LAPACK, whose 1 + 6n + 2n^2 values of workspace are counted in 32 bits: a map's root has n = N + 1."""


def gram_store_bytes(n: int, tile_rows: int) -> int:
    """Return the bytes on disk of an N x N Gram matrix in whole tiles.

    >>> gram_store_bytes(20_000, 2_000)
    3200000000
    """
    padded = -(-n // tile_rows) * tile_rows
    return _VALUE * padded * padded


def gram_task_bytes(tile_rows: int, d: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the bytes of a task that computes one tile of a Gram matrix.

    A task holds the kernel's temporary blocks and the block that is checked; later the block, its contiguous transpose
    and a padded chunk. In addition it holds the rows of both sides, and the arrays that the kernel prepares from them.
    """
    return _VALUE * (max(blocks + 1, 3) * tile_rows * tile_rows + (4 + copies) * tile_rows * (d + 2))


def tile_rows_within(available: int, d: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the largest number of tile rows whose task needs at most `available` bytes, at least 1.

    >>> gram_task_bytes(tile_rows_within(10**9, 784), 784) <= 10**9
    True
    """
    available = max(0, available)  # negative if the modules of a worker exceed its memory limit
    # square t^2 + side t = available / 8
    square, side = max(blocks + 1, 3), (4 + copies) * (d + 2)
    return max(1, (isqrt(side * side + 4 * square * (available // _VALUE)) - side) // (2 * square))


def fit_bytes(n: int, d: int, blocks: int = 1, copies: int = 1, squares: int = EIGENVECTOR_SQUARES) -> int:
    """Return the peak bytes of the driver that fits N rows of d columns.

    The driver holds `squares` (N, N) arrays: the Gram matrix or a copy, which LAPACK overwrites with vectors, and a
    workspace of twice its size; or the Gram matrix and its pivoted factor; or the kernel's temporary blocks, where the
    Gram matrix is a single tile. It also holds the landmarks, and what the kernel prepares from them. Tiles that
    threads of the driver compute before that need `gram_task_bytes` each.
    """
    return _VALUE * (max(squares, blocks + 1) * n * n + 6 * n + (2 + copies) * n * (d + 3)) + _OVERHEAD


def lanczos_bytes(n: int, d: int, basis_columns: int, block_columns: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the peak bytes of the driver that finds a few eigenvectors by Lanczos, with the Gram matrix in memory.

    The driver holds the Gram matrix, or the kernel's temporary blocks where it is a single tile; a basis of columns,
    and some blocks of columns; the rows, and what the kernel prepares from them.

    >>> lanczos_bytes(20_000, 50, 720, 32) < fit_bytes(20_000, 50) / 2
    True
    """
    squares, basis = blocks + 1 if n <= 2048 else 1, _basis_values(n, basis_columns, block_columns)
    return _VALUE * (squares * n * n + basis + (2 + copies) * n * (d + 3)) + _OVERHEAD


def lanczos_out_of_core_bytes(
    n: int, d: int, basis_columns: int, block_columns: int, tile_rows: int, threads: int, copies: int = 1
) -> int:
    """Return the peak memory, in bytes, of Lanczos on a Gram matrix on disk, of which each thread holds one tile."""
    tiles = threads * tile_rows * tile_rows + 4 * (threads + 1) * tile_rows * block_columns
    return _VALUE * (tiles + _basis_values(n, basis_columns, block_columns) + (2 + copies) * n * (d + 3)) + _OVERHEAD


def lanczos_matrix_free_bytes(n: int, d: int, basis_columns: int, block_columns: int) -> int:
    """Return the peak bytes of the driver that finds a few eigenvectors by products without a matrix, less its tasks.

    The driver holds the basis, blocks of columns, some of which the allocator keeps, and the rows, twice for workers.
    """
    blocks = n * (6 * block_columns + 2 * (d + 3))
    return _VALUE * (_basis_values(n, basis_columns, block_columns) + blocks) + PROCESS_BYTES


def lanczos_checkpoint_bytes(n: int, basis_columns: int, block_columns: int) -> int:
    """Return the bytes on disk of a state of Lanczos and, as at a restart, of half of the next state."""
    return _VALUE * n * (basis_columns * 3 // 2 + 2 * block_columns)


def matrix_free_task_bytes(tile_rows: int, d: int, columns: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the bytes of a task that multiplies a tile of a matrix-free Gram matrix, for both of its sides.

    A task holds the rows and the right sides of the tile, and what it adds to both, twice while that is sent; and the
    kernel's blocks of a piece, whose rows and landmarks are prepared, with its products. Neither exceeds the tile.
    """
    rows, piece_columns, prepared = min(tile_rows, PIECE_ROWS), min(tile_rows, PIECE_COLUMNS), copies * (d + 2)
    piece = piece_columns * (blocks * rows + 2 * columns) + (rows + piece_columns) * prepared
    return _VALUE * (2 * tile_rows * (d + 3 * columns) + piece)


def _basis_values(n: int, basis_columns: int, block_columns: int) -> int:
    return n * (basis_columns + 8 * block_columns) + 4 * basis_columns * basis_columns


def columnwise_pivots_bytes(n: int, d: int, r: int, copies: int = 1) -> int:
    """Return the peak bytes of the driver that finds r pivots among N rows of d columns without a Gram matrix.

    The driver holds the factor (N, r), that of the pivots and its inverse (r, r), the rows, and `copies` of the rows.
    """
    return _VALUE * (n * (r + 8) + 3 * r * r + (2 + copies) * n * (d + 3)) + _OVERHEAD


def streamed_pivots_bytes(n: int, d: int, r: int, tasks: int = 0) -> int:
    """Return the peak bytes of the driver that finds r pivots in rounds, beside the residuals of all N rows.

    The driver sorts some of the residuals; it holds the pivots, and then either the kernel values of the candidates of
    a round with a factor (r, r) and that of the next round, or in a pass the factor, its inverse, and what takes
    `tasks` bytes in threads of this process.

    >>> streamed_pivots_bytes(10**6, 5, 1000) < 10**9
    True
    """
    in_round = ROUND_CANDIDATES * (3 * ROUND_CANDIDATES + 2 * r + d) + 2 * r * r
    in_pass = 4 * r * r + tasks // _VALUE
    held = 5 * min(n, MAX_DROPPED) + 2 * r * (d + 16) + max(in_round, in_pass)
    return _VALUE * held + PROCESS_BYTES + _ROUND_BYTES


def pivot_task_bytes(d: int, r: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the bytes of a task that computes residuals of a tile of rows from r pivots.

    A task holds its rows, the pivots and what the kernel prepares from them, weights, and a piece of kernel values and
    of features.
    """
    held = _pass_tile_values(d) + (1 + copies) * r * (d + 3) + r * (r + 16)
    return _VALUE * (held + (blocks + 2) * PASS_PIECE_VALUES)


def feature_sums_task_bytes(d: int, n: int, r: int, columns: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the bytes of a task that sums r features from n landmarks, and their products, over a tile of rows.

    A task holds rows, landmarks and what the kernel prepares from them, weights, sums, and values of a smaller tile.
    """
    held = _pass_tile_values(d + columns) + (1 + copies) * n * (d + 3) + n * r + (r + columns) * (r + 1)
    return _VALUE * (held + choose_tile_rows(n) * (blocks * n + 2 * r))


def _pass_tile_values(width: int) -> int:
    """Return the largest number of values of a tile of a pass, of rows of `width` values and three more."""
    return min(PASS_TILE_ROWS * (width + 3), PASS_TILE_VALUES + 4 * PASS_TILE_ROWS)


def columnwise_pivots_seconds(n: int, d: int, r: int, extra_value_seconds: float = 0.0) -> float:
    """Predict the seconds to find r pivots among N rows column by column, with memory read at 30 GB/s."""
    return r * (1e-4 + n * ((4 * r + 8 * d) / 3e10 + extra_value_seconds))


def gram_and_pivots_seconds(n: int, d: int, r: int, extra_value_seconds: float = 0.0) -> float:
    """Predict the seconds to compute the Gram matrix of N rows of d columns on all CPUs and find r pivots in it."""
    return n * n * (8e-9 + 5e-11 * d + r / 5e10 + extra_value_seconds / 2 / cpus.COUNT)


def gram_seconds(n: int, d: int, threads: int, tile_rows: int | None = None, extra_value_seconds: float = 0.0) -> float:
    """Predict the seconds to compute the Gram matrix of N rows of d columns on threads of this machine or of a cluster.

    The threads share the time that a thread for each CPU would take. Tiles of `tile_rows` rows are written to disk. A
    value takes `extra_value_seconds` beside those of a simple kernel.
    """
    files = 0 if tile_rows is None else (-(-n // tile_rows)) ** 2
    return (gram_and_pivots_seconds(n, d, 0, extra_value_seconds) * cpus.COUNT + files * FILE_SECONDS) / threads


def dense_product_seconds(n: int, columns: int) -> float:
    """Predict the seconds to multiply an N x N Gram matrix in memory by some columns, on all threads of this process.

    >>> round(dense_product_seconds(20_000, 32), 2)
    0.37
    """
    return 2 * n * n * columns / _PRODUCT_RATE


def centring_seconds(n: int) -> float:
    """Predict the seconds to centre an N x N Gram matrix in memory."""
    return 3.5e-9 * n * n


def reorthogonalization_seconds(n: int, columns: int, products: int) -> float:
    """Predict the seconds of Lanczos besides its products: the orthogonalization of the blocks of columns."""
    return 8 * n * columns * columns * products * products / 2 / _PRODUCT_RATE


def stored_product_seconds(n: int, columns: int) -> float:
    """Predict the seconds to multiply an N x N Gram matrix on disk by some columns, read at 2 GB/s."""
    return dense_product_seconds(n, columns) + _VALUE * n * n / 2 / 2e9


def eigendecomposition_seconds(n: int, squares: int = EIGENVECTOR_SQUARES) -> float:
    """Predict the seconds of a decomposition with some (N, N) arrays: 10 or 6 N^3 operations at 10^11 a second.

    >>> eigendecomposition_seconds(8000)
    51.2
    """
    return (10 if squares == EIGENVECTOR_SQUARES else 6) * n**3 / 1e11


def cholesky_seconds(n: int) -> float:
    """Predict the seconds to factorize an N x N Gram matrix without pivots, and to solve a few systems with it."""
    return 1.1 * n**3 / 6 * PRODUCT_SECONDS / cpus.COUNT


def factor_task_bytes(tile_rows: int, d: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the bytes of a task that computes a tile of a Cholesky factor.

    A task holds its tile and a product, two tiles that are multiplied, and the chunk that is written; or the kernel's
    blocks of the tile; and the rows of both sides with what the kernel prepares from them.
    """
    return _VALUE * (max(5, blocks + 2) * tile_rows * tile_rows + (4 + copies) * tile_rows * (d + 2))


def tiled_system_bytes(n: int, d: int, columns: int, tasks: int = 0, blocks: int = 1, copies: int = 1) -> int:
    """Return the peak bytes of the driver that solves systems of some right sides without a Gram matrix in memory.

    The driver holds the rows, twice while they are written for workers, some copies of the right sides, and what takes
    `tasks` bytes in threads of this process. For the certificate it then holds what the kernel prepares from the rows
    with copies on the way, and a tile for each thread, beside the tiles of the factor that threads keep.
    """
    rows = n * (d + 3)
    certificate = _VALUE * ((4 + copies) * rows + cpus.COUNT * ((blocks + 1) * choose_tile_rows(n) * n + 2**23))
    return 8 * _VALUE * n * columns + max(2 * _VALUE * rows + tasks + PROCESS_BYTES, certificate + _OVERHEAD)


def tiled_map_bytes(n: int, d: int, tasks: int = 0, blocks: int = 1, copies: int = 1) -> int:
    """Return the peak bytes of the driver that fits a map whose weights stay on disk.

    The driver holds the rows, twice while they are written for workers, and what takes `tasks` bytes in threads of this
    process. For the certificate it then holds kernel values and features of some landmarks, and panels of weights.
    """
    rows = _VALUE * n * (d + 3)
    certificate = _VALUE * (4 + blocks) * _CERTIFIED_ROWS * n + 2**26
    return max(2 * rows + tasks, (1 + copies) * rows + certificate) + PROCESS_BYTES + _OVERHEAD


def inverse_task_bytes(n: int, tile_rows: int, columns: int) -> int:
    """Return the bytes of a task that computes some columns of the inverse of a tiled factor, in blocks of rows."""
    return _VALUE * (columns * (n + 3 * tile_rows) + tile_rows * tile_rows)


def factor_seconds(n: int, threads: int, product_seconds: float = PRODUCT_SECONDS) -> float:
    """Predict the seconds of threads that factor an N x N Gram matrix in tiles, which are written durably."""
    return (1.1 * n**3 / 6 * product_seconds + _VALUE * n * n / 2 / WRITE_BYTES) / threads


def largest_n_within(limit: int, d: int, blocks: int = 1, copies: int = 1, squares: int = EIGENVECTOR_SQUARES) -> int:
    """Return the largest N whose `fit_bytes` are at most `limit`; 0 if there is none.

    >>> n = largest_n_within(8 * 2**30, 50)
    >>> fit_bytes(n, 50) <= 8 * 2**30 < fit_bytes(n + 1, 50)
    True
    """
    low, high = 0, LARGEST_DENSE_N + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit_bytes(middle, d, blocks, copies, squares) <= limit else (low, middle)
    return low


def model_bytes(n: int, d: int, weight_values: int, copies: int = 1, itemsize: int = _VALUE) -> int:
    """Return the bytes of a model in a worker: landmarks, what the kernel prepares from them, and `weight_values`."""
    return itemsize * (n * d + copies * n * (d + 3) + weight_values)


def score_task_bytes(
    piece_rows: int,
    d: int,
    n: int,
    width: int,
    tile_rows: int,
    blocks: int = 1,
    product_columns: int = 0,
    itemsize: int = _VALUE,
    decode_bytes: int = 0,
) -> int:
    """Return the bytes of one scoring task beside the model.

    A task holds the piece of rows that it scores, the one that it prefetches, and `decode_bytes` to decode it; the
    scores of the piece, those of the piece that is written meanwhile, and their encoded form; and one tile of `blocks`
    kernel blocks and of a product with `product_columns` columns.
    """
    tile = blocks * tile_rows * n + 3 * tile_rows * (d + 2) + tile_rows * product_columns
    return 3 * _VALUE * piece_rows * d + itemsize * (3 * piece_rows * width + tile) + decode_bytes


def worker_bytes(model: int, task: int, threads: int, baseline_bytes: int) -> int:
    """Return the peak bytes of a worker process: those before the job, its model, and one task for each thread."""
    return baseline_bytes + PROCESS_BYTES + model + threads * task


def score_row_seconds(
    n: int,
    d: int,
    width: int,
    itemsize: int = _VALUE,
    value_seconds: float = VALUE_SECONDS,
    product_seconds: float = PRODUCT_SECONDS,
) -> float:
    """Predict the seconds of one thread to score one row: n kernel values, and their product with the weights.

    >>> round(1e6 * score_row_seconds(4000, 50, 20))
    17
    """
    return n * (value_seconds + product_seconds * (d + width)) * itemsize / _VALUE


FILE_SECONDS = 2e-3
"""Seconds to create a file, and to flush the file and two folders to disk."""

CHUNK_SECONDS = 5e-3
"""Fixed seconds of one thread for a chunk of an output; threads of a process wait for each other."""


def require_fits(need: int, have: int, what: str, remedy: str) -> None:
    """Raise a BudgetError with both numbers unless `need` bytes fit into `have`."""
    if need > have:
        raise BudgetError(f"{what} needs {format_megabytes(need)} and {format_megabytes(have)} are there; {remedy}.")
