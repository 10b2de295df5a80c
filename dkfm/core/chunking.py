"""Which rows a scoring task has, and how many of them it reads at a time: from plain integers."""

import operator
from collections.abc import Iterator

from dkfm.errors import InvalidInputError

MAX_CHUNKS = 2**20
"""Receipts that one marker holds."""

_TASK_SECONDS = 0.5
"""On paper: a hundred times the scheduler's share. It is the same however many rows there are, and so is the memory."""

_EVEN = 1.02
"""How many times the rows of the least busy plan are as good."""

_TASKS = 4
"""At least so many: a job shows how far it is."""

_CHUNK_BYTES = 2**26
"""Of the scores of a task: a file."""

_PIECE_VALUES, _PIECE_BYTES, _PIECE_ROWS, _PIECES = 2**18, 2**23, 2048, 3
"""Rows that are read at a time have so many values, and more, up to so many bytes in the model's precision, only up to
so many rows, which fill tiles; and in how many pieces a task reads its rows if it can.
"""


def choose_chunk_rows(rows: int, row_seconds: float, row_bytes: int, threads: int = 1, step: int = 1) -> int:
    """Return the rows of a task and of its chunk: of half a second, in step with a source, for evenly busy threads.

    Parameters
    ----------
    rows : int
    row_seconds : float
        Of one thread.
    row_bytes : int
        Of the scores of a row.
    threads : int
    step : int
        Rows of a chunk of the source; 1 where it has none.

    Returns
    -------
    int
        It may be more than `rows` by less than a step.

    Examples
    --------
    >>> choose_chunk_rows(1_000_000, 1.8e-5, 160, 2, 1000)
    25000
    """
    wanted = min(int(_TASK_SECONDS / row_seconds), count_tiles(rows, _TASKS), _CHUNK_BYTES // row_bytes)
    return _balanced(rows, max(1, wanted), threads, step)


def _balanced(rows: int, wanted: int, threads: int, step: int) -> int:
    """Return the rows of chunks in step with a source, no more than are wanted but for that, for evenly busy threads.

    >>> _balanced(240_000, 27_000, 2, 1000), _balanced(36_000, 5_000, 2, 1000)
    (24000, 3000)
    """
    each = count_tiles(rows, threads * wanted)
    if rows <= threads * wanted:
        return align_to_chunks(wanted, step)  # not a chunk for every thread: some would be tiny
    sizes = {
        align_to_chunks(count_tiles(rows, threads * more), step) for more in range(each, min(2 * each, each + 9) + 1)
    }
    loads = {size: size * count_tiles(count_tiles(rows, size), threads) for size in sizes}
    return max(size for size, load in loads.items() if load <= _EVEN * min(loads.values()))


def align_to_chunks(wanted: int, chunk: int) -> int:
    """Return about the rows that are wanted: whole chunks of a source, or an even part of one that is larger.

    >>> align_to_chunks(4_400, 1_000), align_to_chunks(300, 1_000)
    (4000, 250)
    """
    if chunk <= wanted:
        return (wanted + chunk // 2) // chunk * chunk
    parts = count_tiles(chunk, wanted)
    even = next((more for more in range(parts, 2 * parts) if chunk % more == 0), parts)
    return count_tiles(chunk, even)


def choose_piece_rows(chunk_rows: int, values: int, step: int = 1, itemsize: int = 8) -> int:
    """Return how many rows a task reads at a time: whole chunks, or parts of one that is kept; some pieces a task.

    Parameters
    ----------
    chunk_rows : int
        Of the task.
    values : int
        Of a row of the source.
    step : int
        Rows of a chunk of the source.
    itemsize : int
        Of what the model computes in.

    Examples
    --------
    >>> choose_piece_rows(25_000, 50, 1000), choose_piece_rows(500, 784)
    (5000, 167)
    """
    few, many = _PIECE_VALUES // values, _PIECE_BYTES // (itemsize * values)
    wanted = min(count_tiles(chunk_rows, _PIECES), max(1, few, min(many, _PIECE_ROWS)))
    if is_small_part(chunk_rows, step):
        return wanted
    whole = max(1, wanted // step) * step
    return min(chunk_rows, whole)


_TILE_BYTES = 2**22
"""A kernel block of 4 MB stays near the processor, beside that of another thread."""

_LEAST, _MOST_BYTES = 128, 2**13
"""Rows of a tile, and bytes of a column of one."""


def count_tiles(n: int, rows: int) -> int:
    """How many tiles of ``rows`` rows cover ``n`` rows.

    >>> count_tiles(10, 4)
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
    return (row_slice(tile, n, rows) for tile in range(count_tiles(n, rows)))


def lower_triangle_tiles(n: int, rows: int) -> Iterator[tuple[int, int]]:
    """Tile pairs ``(i, j)`` with ``j <= i``: the lower triangle, row by row.

    >>> list(lower_triangle_tiles(5, 3))
    [(0, 0), (1, 0), (1, 1)]
    """
    return ((i, j) for i in range(count_tiles(n, rows)) for j in range(i + 1))


def is_small_part(rows: int, chunk_rows: int) -> bool:
    """Whether so many rows are much less than a chunk, which is then decoded once for many tasks.

    >>> is_small_part(500, 1000), is_small_part(1000, 1000)
    (True, False)
    """
    return 2 * rows <= chunk_rows


def choose_tile_rows(n: int, d: int = 0, width: int = 0, itemsize: int = 8) -> int:
    """Return the rows of a tile against n landmarks of d columns, for `width` outputs: 128 to 1,024; in float32 2,048.

    As many as keep the kernel block small; more where landmarks or weights, which are read once a tile, are wide.

    >>> choose_tile_rows(100), choose_tile_rows(4000), choose_tile_rows(10**6)
    (1024, 131, 128)
    >>> choose_tile_rows(4000, 784), choose_tile_rows(4000, 784, itemsize=4)
    (1024, 2048)
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
