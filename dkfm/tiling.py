"""Row slices, tile pairs and counts: integers only.

A *tile* is a block of consecutive rows; tile ``i`` of ``rows`` rows covers ``[i * rows, (i + 1) * rows)``, the last
one possibly less.
"""

import operator
from collections.abc import Iterator

from dkfm.errors import InvalidInputError

__all__ = ["count", "is_part", "lower_tiles", "require_count", "row_slice", "row_slices", "tile_rows"]

_TILE_BYTES = 2**22
"""A kernel block of 4 MB stays near the processor, beside that of another thread."""

_LEAST, _MOST_BYTES = 128, 2**13
"""Rows of a tile, and bytes of a column of one."""


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


def is_part(rows: int, chunk_rows: int) -> bool:
    """Whether so many rows are much less than a chunk, which is then decoded once for many tasks.

    >>> is_part(500, 1000), is_part(1000, 1000)
    (True, False)
    """
    return 2 * rows <= chunk_rows


def tile_rows(n: int, d: int = 0, width: int = 0, itemsize: int = 8) -> int:
    """Return the rows of a tile against n landmarks of d columns, for `width` outputs: 128 to 1,024; in float32 2,048.

    As many as keep the kernel block small; more where landmarks or weights, which are read once a tile, are wide.

    >>> tile_rows(100), tile_rows(4000), tile_rows(4000, 784), tile_rows(4000, 784, itemsize=4), tile_rows(10**6)
    (1024, 131, 1024, 2048, 128)
    """
    return min(_MOST_BYTES // itemsize, max(_LEAST, _TILE_BYTES // (itemsize * n), 4 * d, width))


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
