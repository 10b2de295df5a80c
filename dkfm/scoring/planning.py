"""Plan a scoring job: chunks aligned to the source, the memory of a task and of a worker, and the expected time."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dkfm.core import budget, chunking
from dkfm.core.display.quantities import format_bytes, format_columns, format_seconds
from dkfm.core.rows import estimate_float64s_per_row
from dkfm.errors import InvalidInputError
from dkfm.kernels.algebra import needs_float64_block
from dkfm.numerics import links
from dkfm.numerics.model import Head, Model, StoredWeights
from dkfm.numerics.skinny_and_triangular_matmul import count_partial_product_values
from dkfm.sources.base import NamedColumns, Source

_MIN_STREAMED_ROWS = 64
"""Smallest number of rows of a task that reads weights from the store; with fewer, it would mostly read."""

_MAX_STREAMED_ROWS = 4096
"""Largest number of rows of a task that reads weights from the store."""

_LINK_COPIES = 6
"""Temporary arrays of the size of the (n, q) product that a link to classes or probabilities needs."""

_LONG_SECONDS = 10.0
"""Seconds above which the fixed cost of all chunks may cause a warning."""


@dataclass(frozen=True)
class WriteCopies:
    """Copies of scores that a task holds while it writes them."""

    group_copies: int = 0
    """Copies of the pieces that are collected for a row group."""
    chunk_copies: int = 0
    """Copies of a chunk."""


@dataclass(frozen=True)
class Plan:
    """Plan of a scoring job, made before its output is created; `str` gives a summary.

    Attributes
    ----------
    rows : int
        Rows of the source.
    columns : int
        Columns of the source.
    width : int
        Columns of all outputs together.
    chunk_rows : int
        Rows of a chunk of the output; a task scores one chunk.
    chunks : int
        Number of chunks.
    piece_rows : int
        Rows that a task reads and scores at a time.
    streamed : bool
        Whether tasks read the weights from the store, because they do not fit into memory.
    task_bytes : int
        Memory of one task, in bytes.
    model_bytes : int
        Memory that all tasks of a process share, in bytes.
    chunk_bytes : int
        Size of the scores of a chunk on disk, in bytes; not the memory of a task.
    row_seconds : float
        Seconds of one thread for one row, measured on some of the rows by `plan_score`, or predicted.
    chunk_seconds : float
        Seconds of one thread for a chunk, independent of its number of rows, measured by `plan_score` where the output
        will be, or predicted.
    threads : int
        Threads of all workers.
    available_bytes : int
        Memory of `worker` for one task, in bytes: its memory less the model, divided by its threads. `require` raises
        if it is less than `task_bytes`.
    worker : str
        Worker with the least memory among those that can hold a task, or with the most memory if none can; empty on
        threads of this process. Workers with less memory get no tasks.
    done : int
        Number of chunks that exist already and are not scored again.
    """

    rows: int
    columns: int
    width: int
    chunk_rows: int
    chunks: int
    piece_rows: int
    streamed: bool
    task_bytes: int
    model_bytes: int
    chunk_bytes: int
    row_seconds: float
    chunk_seconds: float
    threads: int
    available_bytes: int = 0
    worker: str = ""
    done: int = 0

    @property
    def output_bytes(self) -> int:
        """Size of all scores on disk, in bytes."""
        return self.chunks * self.chunk_bytes

    @property
    def seconds(self) -> float:
        """Predicted seconds for the remaining chunks."""
        chunks = self.chunks - self.done
        task_seconds = self.chunk_rows * self.row_seconds + self.chunk_bytes / budget.WRITE_BYTES
        return chunks * task_seconds / self.threads + self.file_seconds

    @property
    def file_seconds(self) -> float:
        """Predicted fixed cost, in seconds, of the files of the remaining chunks, independent of their rows."""
        return (self.chunks - self.done) * self.chunk_seconds / self.threads

    @property
    def has_small_chunks(self) -> bool:
        """Whether the files of all chunks take long, and longer than the scores."""
        return self.file_seconds >= _LONG_SECONDS and self.chunk_rows * self.row_seconds < self.chunk_seconds

    def worker_bytes(self, threads: int, baseline_bytes: int) -> int:
        """Return the peak memory of a worker process in bytes; `baseline_bytes` is its memory before the first task."""
        return budget.worker_bytes(self.model_bytes, self.task_bytes, threads, baseline_bytes)

    def require(self) -> None:
        """Raise a BudgetError if a worker has too little memory for a task."""
        remedy = "use a smaller chunk_rows, a source of smaller chunks, fewer threads, or more memory"
        where = f" on the worker {self.worker}" if self.worker else ""
        budget.require_fits(
            self.task_bytes, self.available_bytes, f"A scoring task of {self.chunk_rows} rows{where}", remedy
        )

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self) | {"output_bytes": self.output_bytes, "seconds": self.seconds})

    def __str__(self) -> str:
        size = format_bytes
        lines = {
            "rows": f"{self.rows:,} of {format_columns(self.columns)}, to {format_columns(self.width)} of scores",
            "chunks": f"{self.chunks:,} of {self.chunk_rows:,} rows, {self.done:,} of them done",
            "output": f"{size(self.output_bytes)} of scores, {size(self.chunk_bytes)} a chunk",
            "tasks": f"{self.chunks - self.done:,}, {self.threads} at a time",
            "task": f"{size(self.task_bytes)} of memory, where a worker has {size(self.available_bytes)} for each",
            "model": f"{size(self.model_bytes)} a worker" + (", weights read from the store" * self.streamed),
            "time": f"about {format_seconds(self.seconds)}",
        }
        return "\n".join(f"{name:<7} {line}" for name, line in lines.items())


def plan_with_model_in_memory(
    model: Model,
    outputs: Sequence[str],
    source: Source,
    chunk_rows: int | None = None,
    threads: int = 1,
    write_copies: WriteCopies = WriteCopies(),
) -> Plan:
    """Plan a job with the whole model in memory.

    By default a chunk takes about half a second and is aligned to the chunks of the source, and every thread gets the
    same number of chunks.

    Raises
    ------
    InvalidInputError
        The source has another number of columns than the model.
    """
    heads = _select_heads(model, outputs, source)
    n, rows, size = model.landmarks.shape[0], source.shape[0], model.dtype.itemsize
    width = sum(head.width for head in heads)
    if chunk_rows is None:
        chunk_rows = chunking.choose_chunk_rows(
            rows, _row_seconds(model, heads, source), size * width, threads, source.chunk_rows
        )
    chunk_rows = min(chunk_rows, rows)
    wide = max(max(head.width, head.n_columns) for head in heads)
    tile = chunking.choose_tile_rows(n, _dense_landmark_columns(model), wide, size)
    piece_rows = chunking.choose_read_rows(chunk_rows, source.float64s_per_row, source.chunk_rows, size)
    return _plan(model, heads, source, chunk_rows, piece_rows, tile, threads, write_copies)


def plan_with_streamed_weights(
    model: Model,
    outputs: Sequence[str],
    source: Source,
    available_bytes: Callable[[int], int],
    chunk_rows: int | None = None,
    threads: int = 1,
    write_copies: WriteCopies = WriteCopies(),
) -> Plan:
    """Plan a job whose tasks read the weights from the store, with as many rows per task as memory allows.

    `available_bytes` is a function from the bytes that the tasks of a process share to the bytes that one task may
    take. The other parameters are those of `plan_with_model_in_memory`.
    """
    heads = _select_heads(model, outputs, source)

    def plan_rows(rows: int) -> Plan:
        return _plan(model, heads, source, rows, rows, rows, threads, write_copies, streamed=True)

    if chunk_rows is None:
        chunk_rows = _choose_rows_for_streamed_weights(plan_rows, source, available_bytes)
    return plan_rows(min(chunk_rows, source.shape[0]))


def _row_seconds(model: Model, heads: Sequence[Head], source: Source) -> float:
    return model.predict_row_seconds(source.float64s_per_row, sum(head.width for head in heads))


def _choose_rows_for_streamed_weights(
    plan_rows: Callable[[int], Plan], source: Source, available_bytes: Callable[[int], int]
) -> int:
    """Return the largest number of rows, aligned to the source, for which the task of `plan_rows` fits into memory."""
    rows, step = _MAX_STREAMED_ROWS, source.chunk_rows
    available = available_bytes(plan_rows(_MIN_STREAMED_ROWS).model_bytes)
    while rows > _MIN_STREAMED_ROWS and plan_rows(chunking.round_to_chunk_rows(rows, step)).task_bytes > available:
        rows = max(_MIN_STREAMED_ROWS, rows * 3 // 4)
    return chunking.round_to_chunk_rows(rows, step)


def _select_heads(model: Model, outputs: Sequence[str], source: Source) -> list[Head]:
    """Return the heads of the requested outputs; raise an InvalidInputError if they cannot score the source."""
    d = model.n_features_in
    if source.shape[1] != d:
        remedy = ""
        if isinstance(source, NamedColumns):
            remedy = f"; columns= (--columns) names the {d} of the model, and id_column= (--id-column) the ids"
        raise InvalidInputError(
            f"{source.name} gives {source.shape[1]} columns and the model was fitted with {d}{remedy}."
        )
    for output in outputs:
        head = model.head(output)
        if model.kernel.is_precomputed and links.needs_diagonal(head.link):
            raise InvalidInputError(
                f"The {output} of a precomputed kernel needs k(z, z): use {output}(Z, diag=) in Python."
            )
        if head.width == 0:
            raise InvalidInputError(f"This model has no {output}: its training rows do not vary.")
    return [model.head(output) for output in outputs]


def _plan(
    model: Model,
    heads: Sequence[Head],
    source: Source,
    chunk_rows: int,
    piece_rows: int,
    tile_rows: int,
    threads: int,
    write_copies: WriteCopies,
    *,
    streamed: bool = False,
) -> Plan:
    n, rows, tile_rows = model.landmarks.shape[0], source.shape[0], min(tile_rows, piece_rows)
    values = chunking.count_tiles(source.max_size_in_float64s(piece_rows), piece_rows)
    chunks, size = chunking.count_tiles(rows, chunk_rows), model.dtype.itemsize
    row_bytes = sum(head.width * head.output_dtype.itemsize for head in heads)
    width = chunking.count_tiles(row_bytes, size)  # an int64 code is as large as two float32 values
    if chunks > chunking.MAX_CHUNKS:
        raise InvalidInputError(
            f"{rows} rows in {chunks} chunks are more than {chunking.MAX_CHUNKS}; raise chunk_rows."
        )
    shared_read, extra = _estimate_read_bytes(source, chunk_rows, piece_rows)
    blocks = _count_kernel_blocks(model, has_sparse_rows=values < source.shape[1])
    product = max(_temporary_columns(head) for head in heads)
    extra += size * max(count_partial_product_values(n, head.n_columns) for head in heads)
    if streamed:
        extra += 3 * size * n * max(map(_weight_panel_columns, heads))
    extra += row_bytes * write_copies.chunk_copies * chunk_rows
    group_rows = max(piece_rows, min(chunk_rows, chunking.choose_row_group_rows(row_bytes)))
    extra += row_bytes * write_copies.group_copies * group_rows
    # A single tile of sparse rows may have more values than the average.
    extra += 3 * size * max(0, source.max_size_in_float64s(tile_rows) - tile_rows * values)
    task = budget.score_task_bytes(piece_rows, values, n, width, tile_rows, blocks, product, size, extra)
    landmark_values = estimate_float64s_per_row(model.landmarks)
    weight_values = model.n_head_elements - (model.n_stored_head_elements if streamed else 0)
    return Plan(
        rows=rows,
        columns=source.shape[1],
        width=sum(head.width for head in heads),
        chunk_rows=chunk_rows,
        chunks=chunks,
        piece_rows=piece_rows,
        streamed=streamed,
        task_bytes=task,
        model_bytes=shared_read + budget.model_bytes(n, landmark_values, weight_values, model.landmark_copies, size),
        chunk_bytes=row_bytes * chunk_rows,
        row_seconds=_row_seconds(model, heads, source),
        chunk_seconds=budget.CHUNK_SECONDS,
        threads=threads,
    )


def _count_kernel_blocks(model: Model, has_sparse_rows: bool) -> int:
    """Return how many arrays as large as a block of kernel values a task holds at a time."""
    kernel = model.kernel
    blocks = kernel.peak_blocks + (0 if kernel.supports_out else 1)
    if model.dtype.itemsize < np.dtype(np.float64).itemsize and needs_float64_block(kernel):
        blocks = 1 + 2 * (kernel.peak_blocks + 1)  # blocks in float64 and a rounded one
    if has_sparse_rows or not isinstance(model.landmarks, np.ndarray):
        blocks += 3  # sparse products need temporaries
    return blocks


def _estimate_read_bytes(source: Source, chunk_rows: int, piece_rows: int) -> tuple[int, int]:
    """Return the bytes that reading needs besides the rows: those that all tasks of a process share, and a task's."""
    step = source.chunk_rows
    if not chunking.is_at_most_half_chunk(chunk_rows, step):
        return source.cached_bytes, source.read_overhead_bytes(chunking.count_tiles(piece_rows, step) + 1)
    # Tasks of a process share decoded chunks: the next chunk is decoded while the previous one is still cached.
    decoded = 2 * 8 * source.shape[1] * min(step, source.shape[0])
    return decoded + source.read_overhead_bytes(1) + source.cached_bytes, 0


def _weight_panel_columns(head: Head) -> int:
    """Return how many columns of a head's weights are read from the store together."""
    return head.weights.panel_columns if isinstance(head.weights, StoredWeights) else 0


def _temporary_columns(head: Head) -> int:
    """Return the columns of the temporaries that a head needs besides its output."""
    if head.link == links.IDENTITY:
        return head.n_columns if head.sqrt_eigenvalues is not None else 0
    return head.n_columns * (1 if links.needs_diagonal(head.link) else _LINK_COPIES)


def _dense_landmark_columns(model: Model) -> int:
    return model.landmarks.shape[1] if isinstance(model.landmarks, np.ndarray) else 0
