"""Which rows a scoring task has, and how many of them it reads at a time: from plain integers."""

from dkfm.tiling import count, is_part

__all__ = ["MAX_CHUNKS", "chunk_rows", "in_step", "piece_rows"]

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


def chunk_rows(rows: int, row_seconds: float, row_bytes: int, threads: int = 1, step: int = 1) -> int:
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
    >>> chunk_rows(1_000_000, 1.8e-5, 160, 2, 1000)
    25000
    """
    wanted = min(int(_TASK_SECONDS / row_seconds), count(rows, _TASKS), _CHUNK_BYTES // row_bytes)
    return _balanced(rows, max(1, wanted), threads, step)


def _balanced(rows: int, wanted: int, threads: int, step: int) -> int:
    """Return the rows of chunks in step with a source, no more than are wanted but for that, for evenly busy threads.

    >>> _balanced(240_000, 27_000, 2, 1000), _balanced(36_000, 5_000, 2, 1000)
    (24000, 3000)
    """
    each = count(rows, threads * wanted)
    if rows <= threads * wanted:
        return in_step(wanted, step)  # not a chunk for every thread: some would be tiny
    sizes = {in_step(count(rows, threads * more), step) for more in range(each, min(2 * each, each + 9) + 1)}
    loads = {size: size * count(count(rows, size), threads) for size in sizes}
    return max(size for size, load in loads.items() if load <= _EVEN * min(loads.values()))


def in_step(wanted: int, chunk: int) -> int:
    """Return about the rows that are wanted: whole chunks of a source, or an even part of one that is larger.

    >>> in_step(4_400, 1_000), in_step(300, 1_000)
    (4000, 250)
    """
    if chunk <= wanted:
        return (wanted + chunk // 2) // chunk * chunk
    parts = count(chunk, wanted)
    even = next((more for more in range(parts, 2 * parts) if chunk % more == 0), parts)
    return count(chunk, even)


def piece_rows(chunk_rows: int, values: int, step: int = 1, itemsize: int = 8) -> int:
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
    >>> piece_rows(25_000, 50, 1000), piece_rows(500, 784)
    (5000, 167)
    """
    few, many = _PIECE_VALUES // values, _PIECE_BYTES // (itemsize * values)
    wanted = min(count(chunk_rows, _PIECES), max(1, few, min(many, _PIECE_ROWS)))
    if is_part(chunk_rows, step):
        return wanted
    whole = max(1, wanted // step) * step
    return min(chunk_rows, whole)
