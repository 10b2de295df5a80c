"""Bytes of a task and of the driver, from plain integers; work that does not fit is refused before it starts.

Every figure is an upper bound that the tests hold against measured peaks. Arrays are float64: 8 bytes a value.
"""

from math import isqrt

from dkfm.errors import BudgetError

__all__ = [
    "LARGEST_ROOT",
    "fit_bytes",
    "gram_bytes",
    "gram_task_bytes",
    "largest_n",
    "megabytes",
    "model_bytes",
    "require",
    "score_task_bytes",
    "tile_rows_within",
]

_VALUE = 8
_OVERHEAD = 2**27
"""Thread stacks, BLAS buffers, and what the allocator keeps of the tiles that passed through it."""

LARGEST_ROOT = 32_766
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

    The kernel's blocks and one that is checked, or, later, the block, the transposed one and the two that are encoded
    with their checksum; the rows of both sides, and what the kernel prepares of them.
    """
    return _VALUE * (max(blocks + 1, 4) * tile_rows * tile_rows + (4 + copies) * tile_rows * (d + 2))


def tile_rows_within(available: int, d: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the largest tile whose task stays within `available` bytes, at least 1.

    >>> gram_task_bytes(tile_rows_within(10**9, 784), 784) <= 10**9
    True
    """
    # square t^2 + side t = available / 8
    square, side = max(blocks + 1, 4), (4 + copies) * (d + 2)
    return max(1, (isqrt(side * side + 4 * square * (available // _VALUE)) - side) // (2 * square))


def fit_bytes(n: int, d: int, blocks: int = 1, copies: int = 1) -> int:
    """Bytes that the driver takes, at its peak, to fit N rows of d columns.

    The Gram matrix, in which LAPACK leaves the eigenvectors, and its workspace of twice that (or the kernel's blocks,
    where a Gram of one tile is computed here); the landmarks, and what the kernel prepares of them. Tiles that threads
    of this process compute at another time take `gram_task_bytes` each.
    """
    return _VALUE * (max(3, blocks + 1) * n * n + 6 * n + (2 + copies) * n * (d + 3)) + _OVERHEAD


def largest_n(available: int, d: int, blocks: int = 1, copies: int = 1) -> int:
    """Return the largest N whose `fit_bytes` stay within `available`; 0 where there is none.

    >>> n = largest_n(8 * 2**30, 50)
    >>> fit_bytes(n, 50) <= 8 * 2**30 < fit_bytes(n + 1, 50)
    True
    """
    low, high = 0, LARGEST_ROOT + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit_bytes(middle, d, blocks, copies) <= available else (low, middle)
    return low


def model_bytes(n: int, d: int, weights: int, copies: int = 1) -> int:
    """Bytes of a model in a worker: landmarks, what the kernel prepares of them, and `weights` values of heads."""
    return _VALUE * (n * d + copies * n * (d + 3) + weights)


def score_task_bytes(rows: int, d: int, n: int, width: int, tile_rows: int, blocks: int = 1) -> int:
    """Bytes of one scoring task beside the model and its source's chunk.

    Rows in, twice; scores out as computed, padded, encoded, with their checksum and read back; one tile.
    """
    tile = (blocks + 1) * tile_rows * n + 3 * tile_rows * (d + 2) + 2 * tile_rows * width
    return _VALUE * (2 * rows * d + 6 * rows * width + tile)


def require(need: int, have: int, what: str, remedy: str) -> None:
    """Raise a BudgetError with both numbers unless `need` bytes fit into `have`."""
    if need > have:
        raise BudgetError(f"{what} needs {megabytes(need)} and {megabytes(have)} are there; {remedy}.")


def megabytes(size: int) -> str:
    """Say a number of bytes.

    >>> megabytes(1_600_000_000)
    '1,600 MB (1600000000 bytes)'
    """
    return f"{size / 1e6:,.0f} MB ({size} bytes)"
