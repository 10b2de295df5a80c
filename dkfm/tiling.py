"""Row slices, tile pairs and counts: integers only.

A *tile* is a block of consecutive rows; tile ``i`` of ``rows`` rows covers ``[i * rows, (i + 1) * rows)``, the last
one possibly less.
"""

import operator
from collections.abc import Iterator

from dkfm.errors import InvalidInputError

__all__ = ["count", "lower_tiles", "require_count", "row_slice", "row_slices"]


def count(n: int, rows: int) -> int:
    """How many tiles of ``rows`` rows cover ``n`` rows.

    >>> count(10, 4)
    3
    """
    return -(-n // rows)


def row_slice(tile: int, n: int, rows: int) -> slice:
    """Return the rows of one tile.

    >>> row_slice(2, 10, 4)
    slice(8, 10, None)
    """
    return slice(tile * rows, min((tile + 1) * rows, n))


def row_slices(n: int, rows: int) -> Iterator[slice]:
    """All tiles in order.

    >>> list(row_slices(5, 3))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return (row_slice(tile, n, rows) for tile in range(count(n, rows)))


def lower_tiles(n: int, rows: int) -> Iterator[tuple[int, int]]:
    """Tile pairs ``(i, j)`` with ``j <= i``: the lower triangle, row by row.

    >>> list(lower_tiles(5, 3))
    [(0, 0), (1, 0), (1, 1)]
    """
    return ((i, j) for i in range(count(n, rows)) for j in range(i + 1))


def require_count(value: object, name: str) -> int:
    """Return a positive integer, or raise an InvalidInputError that names the parameter.

    >>> require_count(3, "chunk_rows")
    3
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is no integer is refused below
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise InvalidInputError(f"{name} must be a positive integer, and is {value!r}.")
    return number
