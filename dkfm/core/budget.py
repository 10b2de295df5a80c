"""Bytes of a task and of the driver, from plain integers; work that does not fit is refused before it starts.

Every figure is an upper bound that the tests hold against measured peaks. Arrays are float64: 8 bytes a value.
"""

from math import isqrt

from dkfm.errors import BudgetError

_VALUE = 8
_OVERHEAD = 2**27
"""Thread stacks, BLAS buffers, and what the allocator keeps of the tiles that passed through it."""

PROCESS_BYTES = 2**24
"""What tasks add to a process beside their arrays: thread stacks and BLAS buffers."""

STALL_SECONDS = 600.0
"""After so long without a result a job is given up."""

VALUE_SECONDS, PRODUCT_SECONDS = 1e-9, 4.5e-11
"""On paper, of one thread in float64: of a kernel's value beside its products, and of one of these."""

EIGENVECTOR_SQUARES, PIVOT_SQUARES = 3, 2
"""How many arrays of N x N a root takes, that of eigenvectors and that of pivots."""

LARGEST_DENSE_N = 32_766
"""LAPACK's divide and conquer asks for 1 + 6N + 2N^2 values, counted in 32 bits."""


def gram_bytes(n: int, tile_rows: int) -> int:
    """Bytes on disk of an N x N Gram matrix in whole tiles.

    >>> gram_bytes(20_000, 2_000)
    3200000000
    """
    padded = -(-n // tile_rows) * tile_rows
    return _VALUE * padded * padded


def gram_task_bytes(tile_rows: int, d: int, blocks: int = 1, copies: int = 1) -> int:
    """Bytes of one Gram tile task.

    The kernel's blocks and one that is checked, or, later, the block, its mirror image in order, and a whole chunk that
    holds it; the rows of both sides, and what the kernel prepares of them.
    """
    return _VALUE * (max(blocks + 1, 3) * tile_rows * tile_rows + (4 + copies) * tile_rows * (d + 2))


def tile_rows_within(available: int, d: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the largest tile whose task stays within `available` bytes, at least 1.

    >>> gram_task_bytes(tile_rows_within(10**9, 784), 784) <= 10**9
    True
    """
    # square t^2 + side t = available / 8
    square, side = max(blocks + 1, 3), (4 + copies) * (d + 2)
    return max(1, (isqrt(side * side + 4 * square * (available // _VALUE)) - side) // (2 * square))


def fit_bytes(n: int, d: int, blocks: int = 1, copies: int = 1, squares: int = EIGENVECTOR_SQUARES) -> int:
    """Bytes that the driver takes, at its peak, to fit N rows of d columns.

    `squares` arrays of N x N: the Gram matrix, in which LAPACK leaves the eigenvectors, and twice that of workspace; or
    the Gram matrix and the factor of its pivots (or the kernel's blocks, where a Gram of one tile is computed here).
    Then the landmarks, and what the kernel prepares of them. Tiles that threads of this process compute at another time
    take `gram_task_bytes` each.
    """
    return _VALUE * (max(squares, blocks + 1) * n * n + 6 * n + (2 + copies) * n * (d + 3)) + _OVERHEAD


def lanczos_bytes(n: int, d: int, held: int, columns: int, blocks: int = 1, copies: int = 1) -> int:
    """Bytes that the driver takes, at its peak, to find a few eigenvectors of N rows of d columns, Gram in memory.

    The Gram matrix, or the kernel's blocks where it is of one tile; the `held` columns of a basis, half of them again
    when it starts anew, and some blocks of `columns`; the rows, and what the kernel prepares of them.

    >>> lanczos_bytes(20_000, 50, 720, 32) < fit_bytes(20_000, 50) / 2
    True
    """
    squares = blocks + 1 if n <= 2048 else 1
    return _VALUE * (squares * n * n + _basis(n, held, columns) + (2 + copies) * n * (d + 3)) + _OVERHEAD


def lanczos_stored_bytes(n: int, d: int, held: int, columns: int, tile_rows: int, threads: int, copies: int = 1) -> int:
    """Bytes of the same where the Gram matrix is in its store, and every thread has one tile of it."""
    tiles = threads * tile_rows * tile_rows + 4 * (threads + 1) * tile_rows * columns
    return _VALUE * (tiles + _basis(n, held, columns) + (2 + copies) * n * (d + 3)) + _OVERHEAD


def _basis(n: int, held: int, columns: int) -> int:
    return n * (3 * held // 2 + 6 * columns) + 4 * held * held


def pivot_columns_bytes(n: int, d: int, r: int, copies: int = 1) -> int:
    """Bytes that the driver takes, at its peak, to find r pivots among N rows of d columns without a Gram matrix.

    The factor; its rows that are pivots, and what they become; the rows, and what the kernel prepares of them.

    >>> pivot_columns_bytes(100_000, 2, 512) < 10**9
    True
    """
    return _VALUE * (n * (r + 8) + 3 * r * r + (2 + copies) * n * (d + 3)) + _OVERHEAD


def pivot_columns_seconds(n: int, d: int, r: int) -> float:
    """Seconds, on paper, to find r pivots among N rows column by column: memory is read at 30 GB/s."""
    return r * (1e-4 + n * (4 * r + 8 * d) / 3e10)


def pivots_seconds(n: int, d: int, r: int) -> float:
    """Seconds, on paper, to compute the Gram matrix of N rows of d columns and find r pivots in it."""
    return n * n * (8e-9 + 5e-11 * d + r / 5e10)


def eigendecomposition_seconds(n: int) -> float:
    """Seconds, on paper, to find the eigenvectors of an N x N Gram matrix: 10 N^3 operations, 10^11 a second.

    >>> eigendecomposition_seconds(8000)
    51.2
    """
    return 10 * n**3 / 1e11


def largest_n_within(
    available: int, d: int, blocks: int = 1, copies: int = 1, squares: int = EIGENVECTOR_SQUARES
) -> int:
    """Return the largest N whose `fit_bytes` stay within `available`; 0 where there is none.

    >>> n = largest_n_within(8 * 2**30, 50)
    >>> fit_bytes(n, 50) <= 8 * 2**30 < fit_bytes(n + 1, 50)
    True
    """
    low, high = 0, LARGEST_DENSE_N + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit_bytes(middle, d, blocks, copies, squares) <= available else (low, middle)
    return low


def model_bytes(n: int, d: int, weights: int, copies: int = 1, itemsize: int = _VALUE) -> int:
    """Bytes of a model in a worker: landmarks, what the kernel prepares of them, and `weights` values of heads."""
    return itemsize * (n * d + copies * n * (d + 3) + weights)


def score_task_bytes(
    piece_rows: int,
    d: int,
    n: int,
    width: int,
    tile_rows: int,
    blocks: int = 1,
    product: int = 0,
    itemsize: int = _VALUE,
    reading: int = 0,
) -> int:
    """Bytes of one scoring task beside the model.

    A piece of the rows, the next one, and `reading` bytes of what it is read from; the scores of one piece, those that
    are written meanwhile, and what they were made of; one tile of `blocks` kernel blocks, and of a product with
    `product` columns.
    """
    tile = blocks * tile_rows * n + 3 * tile_rows * (d + 2) + tile_rows * product
    return 3 * _VALUE * piece_rows * d + itemsize * (3 * piece_rows * width + tile) + reading


def worker_bytes(model: int, task: int, threads: int, before: int) -> int:
    """Bytes, at its peak, of a worker process: `before` it began, its model, and a task of each thread."""
    return before + PROCESS_BYTES + model + threads * task


def score_seconds(
    n: int, d: int, width: int, itemsize: int = _VALUE, value: float = VALUE_SECONDS, product: float = PRODUCT_SECONDS
) -> float:
    """Seconds, on paper, of one thread for one row: kernel values against n landmarks, and a product with them.

    >>> round(1e6 * score_seconds(4000, 50, 20))
    17
    """
    return n * (value + product * (d + width)) * itemsize / _VALUE


def require_fits(need: int, have: int, what: str, remedy: str) -> None:
    """Raise a BudgetError with both numbers unless `need` bytes fit into `have`."""
    if need > have:
        raise BudgetError(f"{what} needs {format_megabytes(need)} and {format_megabytes(have)} are there; {remedy}.")


def format_bytes(size: int) -> str:
    """Say a number of bytes in two or three digits.

    >>> format_bytes(512), format_bytes(40_000), format_bytes(12_345_678_901)
    ('512 B', '40 kB', '12.3 GB')
    """
    for unit, least in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size} B"


def format_seconds(seconds: float) -> str:
    """Say a time.

    >>> format_seconds(0.242), format_seconds(40.3), format_seconds(800), format_seconds(9000)
    ('0.24 s', '40 s', '13 min', '2.5 h')
    """
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_megabytes(size: int) -> str:
    """Say a number of bytes.

    >>> format_megabytes(1_600_000_000)
    '1,600 MB (1600000000 bytes)'
    """
    return f"{size / 1e6:,.0f} MB ({size} bytes)"
