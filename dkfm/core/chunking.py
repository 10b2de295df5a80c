"""Divide rows into chunks, pieces and tiles, from plain integers."""

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dkfm.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_CHUNKS = 2**20
"""Largest number of chunks of an output, because one marker holds the receipts of all chunks."""

_TASK_SECONDS = 0.5
"""Predicted seconds of a task: a hundred times the seconds of the scheduler for a task."""

_BALANCE_TOLERANCE = 1.02
"""Chunk sizes whose busiest thread gets at most this many times the least possible rows are equally good."""

_MIN_TASKS = 4
"""Smallest number of tasks of a job, so that its progress is visible."""

_MAX_CHUNK_BYTES = 2**26
"""Largest size of the scores of one task, which are one file."""

_PIECE_VALUES = 2**18
"""Values of the rows of a piece."""

_MAX_PIECE_BYTES = 2**23
"""Largest size of a piece in the model's precision, where its rows fill tiles."""

_MAX_PIECE_ROWS = 2048
"""Largest number of rows of a piece that has more than `_PIECE_VALUES` values."""

_MIN_PIECE_ROWS = 256
"""Rows of a piece below which a thread that reads the next one costs more than it saves."""

_PIECES = 3
"""Number of pieces in which a task reads its rows if it can."""

_MIN_GROUP_ROWS = 4096
"""Rows of a row group below which the constant work for each of its columns counts."""

_MAX_GROUP_BYTES = 2**25
"""Largest size of the pieces that are collected for a row group."""

_PARTS_TRIED = 1000
"""Numbers of parts of a source's chunk among which one that divides it is looked for."""


def choose_chunk_rows(
    rows: int, row_seconds: float, row_bytes: int, threads: int = 1, source_chunk_rows: int = 1
) -> int:
    """Choose the rows of a task, which are one chunk of the output.

    A task takes half a second, or more if the kernel is so slow that the output would have too many chunks. Its chunk
    is aligned to the chunks of the source, and all threads are equally busy.

    Parameters
    ----------
    rows : int
        Rows of the job.
    row_seconds : float
        Seconds of one thread for a row.
    row_bytes : int
        Bytes of the scores of a row.
    threads : int
        Threads that run tasks.
    source_chunk_rows : int
        Rows of a chunk of the source; 1 if it has no chunks.

    Returns
    -------
    int
        Rows of a chunk; it may exceed `rows` by less than `source_chunk_rows`.

    Examples
    --------
    >>> choose_chunk_rows(1_000_000, 1.8e-5, 160, 2, 1000)
    25000
    """
    # Balance and alignment may make chunks smaller.
    in_time = max(int(_TASK_SECONDS / row_seconds), count_tiles(rows, MAX_CHUNKS // 4))
    wanted = min(in_time, count_tiles(rows, _MIN_TASKS), _MAX_CHUNK_BYTES // row_bytes)
    return _balance_chunk_rows(rows, max(1, wanted), threads, source_chunk_rows)


def choose_row_group_rows(row_bytes: int) -> int:
    """Choose up to how many rows pieces are collected into one row group of a table.

    Every column of a row group costs as much as some thousand values, so groups of few rows take long.

    >>> choose_row_group_rows(160), choose_row_group_rows(32_000)
    (4096, 1048)
    """
    return max(1, min(_MIN_GROUP_ROWS, _MAX_GROUP_BYTES // row_bytes))


def _balance_chunk_rows(rows: int, wanted: int, threads: int, step: int) -> int:
    """Return a number of chunk rows, aligned and at most about `wanted`, that keeps all threads equally busy.

    >>> _balance_chunk_rows(240_000, 27_000, 2, 1000), _balance_chunk_rows(36_000, 5_000, 2, 1000)
    (24000, 3000)
    """
    each = count_tiles(rows, threads * wanted)
    if rows <= threads * wanted:
        return round_to_chunk_rows(wanted, step)  # one chunk per thread would make some chunks tiny
    shares = range(each, min(2 * each, each + 9) + 1)  # chunks of each thread
    sizes = {round_to_chunk_rows(count_tiles(rows, threads * share), step) for share in shares}
    loads = {size: size * count_tiles(count_tiles(rows, size), threads) for size in sizes}
    return max(size for size, load in loads.items() if load <= _BALANCE_TOLERANCE * min(loads.values()))


def round_to_chunk_rows(wanted: int, chunk: int) -> int:
    """Round a number of rows to whole chunks of a source, or to an equal part of a larger chunk.

    >>> round_to_chunk_rows(4_400, 1_000), round_to_chunk_rows(300, 1_000)
    (4000, 250)
    """
    if chunk <= wanted:
        return (wanted + chunk // 2) // chunk * chunk
    parts = count_tiles(chunk, wanted)
    tried = range(parts, min(2 * parts, parts + _PARTS_TRIED))
    return count_tiles(chunk, next((more for more in tried if chunk % more == 0), parts))


def choose_read_rows(chunk_rows: int, values_per_row: int, source_chunk_rows: int = 1, itemsize: int = 8) -> int:
    """Choose how many rows a task reads at a time: whole chunks of the source, or parts of a cached chunk.

    Parameters
    ----------
    chunk_rows : int
        Rows of the task.
    values_per_row : int
        Values of a row of the source.
    source_chunk_rows : int
        Rows of a chunk of the source.
    itemsize : int
        Bytes of a value in the model's precision.

    Returns
    -------
    int
        Rows of a piece.

    Examples
    --------
    >>> choose_read_rows(25_000, 50, 1000), choose_read_rows(500, 784)
    (5000, 256)
    """
    few, many = _PIECE_VALUES // values_per_row, _MAX_PIECE_BYTES // (itemsize * values_per_row)
    share = max(count_tiles(chunk_rows, _PIECES), min(chunk_rows, _MIN_PIECE_ROWS))
    wanted = min(share, max(1, few, min(many, _MAX_PIECE_ROWS)))
    if is_at_most_half_chunk(chunk_rows, source_chunk_rows):
        return wanted
    return min(chunk_rows, max(1, wanted // source_chunk_rows) * source_chunk_rows)


_TILE_BYTES = 2**23
"""Size of a kernel block of one tile: large enough to hide Python's overhead, and small beside a shared cache."""

_MIN_TILE_ROWS = 128
"""Smallest number of rows of a tile."""

_TILE_ROW_STEP = 64
"""Larger numbers of rows are multiples of this; `skinny_matmul` takes 128 rows at a time, and a small rest as long."""

_MAX_TILE_COLUMN_BYTES = 2**13
"""Largest size of one column of a tile."""


def count_tiles(n: int, rows: int) -> int:
    """Return how many tiles of ``rows`` rows cover ``n`` rows.

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
    """Return the rows of all tiles, in order.

    >>> list(row_slices(5, 3))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return (row_slice(tile, n, rows) for tile in range(count_tiles(n, rows)))


def split_by_chunk(start: int, stop: int, chunk_rows: int) -> Iterator[tuple[int, slice]]:
    """Yield the chunks that contain the rows from `start` to `stop`, each with its part of them as a slice.

    >>> list(split_by_chunk(3, 8, 5))
    [(0, slice(3, 5, None)), (1, slice(0, 3, None))]
    """
    for chunk in range(start // chunk_rows, count_tiles(stop, chunk_rows)):
        first = chunk * chunk_rows
        yield chunk, slice(max(0, start - first), min(chunk_rows, stop - first))


def split_by_part(
    start: int, stop: int, first_rows: "Sequence[int] | npt.NDArray[np.int64]"
) -> Iterator[tuple[int, slice]]:
    """Yield the parts, of any lengths, that contain the rows from `start` to `stop`, each with its rows as a slice.

    `first_rows` has the first row of each part, and at the end the number of all rows.

    >>> list(split_by_part(1, 5, [0, 2, 2, 9]))
    [(0, slice(1, 2, None)), (2, slice(0, 3, None))]
    """
    while start < stop:
        part = bisect_right(first_rows, start) - 1  # the last part that begins here; parts before it are empty
        first, end = int(first_rows[part]), min(stop, int(first_rows[part + 1]))
        yield part, slice(start - first, end - first)
        start = end


def lower_triangle_tile_indices(n: int, rows: int) -> Iterator[tuple[int, int]]:
    """Return the tile pairs ``(i, j)`` with ``j <= i``, row by row: the lower triangle.

    >>> list(lower_triangle_tile_indices(5, 3))
    [(0, 0), (1, 0), (1, 1)]
    """
    return ((i, j) for i in range(count_tiles(n, rows)) for j in range(i + 1))


def is_at_most_half_chunk(rows: int, chunk_rows: int) -> bool:
    """Return whether some rows are at most half a chunk; such a chunk is decoded once for several tasks.

    >>> is_at_most_half_chunk(500, 1000), is_at_most_half_chunk(1000, 1000)
    (True, False)
    """
    return 2 * rows <= chunk_rows


def choose_tile_rows(n_landmarks: int, d: int = 0, width: int = 0, itemsize: int = 8) -> int:
    """Choose the largest number of rows of a tile: 128 to 1,024, or to 2,048 in float32.

    A tile is scored against `n_landmarks` landmarks of d columns, for `width` outputs. Landmarks and weights are read
    once for each tile, so that tiles have more rows where these are wide.

    >>> choose_tile_rows(100), choose_tile_rows(4000), choose_tile_rows(10**6)
    (1024, 256, 128)
    >>> choose_tile_rows(4000, 784), choose_tile_rows(4000, 784, itemsize=4)
    (1024, 2048)
    """
    rows = max(_MIN_TILE_ROWS, _TILE_BYTES // (itemsize * n_landmarks), 4 * d, width)
    return min(_MAX_TILE_COLUMN_BYTES // itemsize, rows // _TILE_ROW_STEP * _TILE_ROW_STEP)


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
        raise InvalidInputError(f"{name} must be a positive integer, and is {value!r:.60}.")
    return number
