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


def gram_task_bytes(tile_rows: int, d: int) -> int:
    """Bytes of one Gram tile task: its block, a temporary as large, the encoded copy, and the rows of both sides."""
    return _VALUE * (4 * tile_rows * tile_rows + 8 * tile_rows * (d + 2))


def tile_rows_within(available: int, d: int) -> int:
    """Return the largest tile whose task stays within `available` bytes, at least 1.

    >>> gram_task_bytes(tile_rows_within(10**9, 784), 784) <= 10**9
    True
    """
    # 4 t^2 + 8 t (d + 2) = available / 8
    half = d + 2
    return max(1, isqrt(half * half + available // (4 * _VALUE)) - half - 1)


def fit_bytes(n: int, d: int) -> int:
    """Bytes that the driver takes, at its peak, to fit N rows of d columns.

    The Gram matrix, in which LAPACK leaves the eigenvectors; its workspace of twice that; the landmarks.
    """
    return _VALUE * (3 * n * n + 6 * n + 3 * n * d) + _OVERHEAD


def largest_n(available: int, d: int) -> int:
    """Return the largest N whose `fit_bytes` stay within `available`; 0 where there is none.

    >>> n = largest_n(8 * 2**30, 50)
    >>> fit_bytes(n, 50) <= 8 * 2**30 < fit_bytes(n + 1, 50)
    True
    """
    low, high = 0, LARGEST_ROOT + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit_bytes(middle, d) <= available else (low, middle)
    return low


def model_bytes(n: int, d: int, weights: int) -> int:
    """Bytes of a model in a worker: landmarks, their prepared copies, and `weights` values of heads."""
    return _VALUE * (n * (3 * d + 4) + weights)


def score_task_bytes(rows: int, d: int, n: int, width: int, tile_rows: int) -> int:
    """Bytes of one scoring task beside the model: rows in, scores out twice, and one tile with its temporaries."""
    return _VALUE * (2 * rows * d + 2 * rows * width + 2 * tile_rows * n + 3 * tile_rows * (d + 2))


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
