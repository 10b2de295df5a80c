"""What a scoring job will do, on paper: chunks in step with the source, and the bytes of a task and of a worker."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dkfm.core import budget, chunking
from dkfm.core.rows import row_values
from dkfm.errors import InvalidInputError
from dkfm.kernels.algebra import computes_in_float64
from dkfm.numerics import links
from dkfm.numerics.matmul import partial_product_values
from dkfm.numerics.model import Head, Model, StoredWeights
from dkfm.sources.base import Source

_STREAMED_ROWS = 64, 4096
"""Rows of a task that reads its weights from the store: for fewer it would be reading alone."""

_LINK_COPIES = 6
"""Of a product, which a link to classes or their chances makes: less its offset, exponentials, sums, shares."""


@dataclass(frozen=True)
class WriteBuffers:
    """How many pieces, and chunks, of scores a task holds to write them, beside those that it made."""

    pieces: int = 0
    chunks: int = 0


@dataclass(frozen=True)
class Plan:
    """Plain numbers, made before anything is written; as text, what a user wants to know of a job.

    Attributes
    ----------
    rows, columns, width : int
        Of the source, and of all outputs together.
    chunk_rows, chunks : int
        Of the output; a chunk is a task.
    piece_rows : int
        Rows that a task reads at a time, while it scores those before them.
    streamed : bool
        Whether the weights stay in the store, and every task reads them from there.
    task_bytes, model_bytes : int
        What one task takes, and what all tasks of a process share.
    chunk_bytes : int
        Of the scores in a chunk.
    row_seconds : float
        What a row takes one thread, on paper.
    threads : int
        Of all workers.
    have_bytes : int
        What a task may take of its worker; fewer than `task_bytes` are a refusal.
    worker : str
        The worker with the fewest of them; empty on threads of this process.
    done : int
        Chunks that are there.
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
    threads: int
    have_bytes: int = 0
    worker: str = ""
    done: int = 0

    @property
    def output_bytes(self) -> int:
        """Bytes of all scores on disk."""
        return self.chunks * self.chunk_bytes

    @property
    def seconds(self) -> float:
        """Seconds that what is left takes, on paper."""
        return (self.chunks - self.done) * self.chunk_rows * self.row_seconds / self.threads

    def worker_bytes(self, threads: int, before: int) -> int:
        """Return the peak bytes of a worker process with some threads; `before` are those of `process_bytes`."""
        return budget.worker_bytes(self.model_bytes, self.task_bytes, threads, before)

    def require(self) -> None:
        """Raise a BudgetError unless a worker can hold its tasks."""
        remedy = "use a smaller chunk_rows, a source of smaller chunks, fewer threads, or more memory"
        where = f" on the worker {self.worker}" if self.worker else ""
        budget.require_fits(
            self.task_bytes, self.have_bytes, f"A scoring task of {self.chunk_rows} rows{where}", remedy
        )

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self) | {"output_bytes": self.output_bytes, "seconds": self.seconds})

    def __str__(self) -> str:
        told = budget.format_bytes
        lines = {
            "rows": f"{self.rows:,} of {self.columns:,} columns, to {self.width:,} columns of scores",
            "chunks": f"{self.chunks:,} of {self.chunk_rows:,} rows, {self.done:,} of them done",
            "output": f"{told(self.output_bytes)}, {told(self.chunk_bytes)} a chunk",
            "tasks": f"{self.chunks - self.done:,}, {self.threads} at a time",
            "task": f"{told(self.task_bytes)} of memory, where a worker has {told(self.have_bytes)} for each",
            "model": f"{told(self.model_bytes)} a worker" + (", weights read from the store" * self.streamed),
            "time": f"about {budget.format_seconds(self.seconds)} on paper",
        }
        return "\n".join(f"{name:<7} {line}" for name, line in lines.items())


def plan_in_memory(
    model: Model,
    outputs: Sequence[str],
    source: Source,
    chunk_rows: int | None = None,
    threads: int = 1,
    writing: WriteBuffers = WriteBuffers(),
) -> Plan:
    """Plan a job with the whole model in memory: chunks of half a second, in step with those of the source.

    Of many chunks every thread gets as many as the others.

    Raises
    ------
    InvalidInputError
        The source has another number of columns than the model.
    """
    heads = _checked(model, outputs, source)
    n, rows, size = model.landmarks.shape[0], source.shape[0], model.dtype.itemsize
    width = sum(head.width for head in heads)
    if chunk_rows is None:
        chunk_rows = chunking.choose_chunk_rows(
            rows, _row_seconds(model, heads, source), size * width, threads, source.chunk_rows
        )
    chunk_rows = min(chunk_rows, rows)
    wide = max(max(head.width, head.columns) for head in heads)
    tile = chunking.choose_tile_rows(n, _dense_columns(model), wide, size)
    piece_rows = chunking.choose_piece_rows(chunk_rows, source.row_values, source.chunk_rows, size)
    return _plan(model, heads, source, chunk_rows, piece_rows, tile, threads, writing)


def plan_streamed(
    model: Model,
    outputs: Sequence[str],
    source: Source,
    have: Callable[[int], int],
    chunk_rows: int | None = None,
    threads: int = 1,
    writing: WriteBuffers = WriteBuffers(),
) -> Plan:
    """Plan a job whose weights are read from the store by every task, for as many rows as its memory takes.

    Parameters
    ----------
    model : Model
        With weights in its store.
    outputs : sequence of str
    source : Source
    have : callable
        From the bytes that the tasks of a process share to those that one task may take.
    chunk_rows : int, optional
    threads : int
    writing : Writing
    """
    heads = _checked(model, outputs, source)

    def planned(rows: int) -> Plan:
        return _plan(model, heads, source, rows, rows, rows, threads, writing, streamed=True)

    if chunk_rows is None:
        chunk_rows = _rows_within(planned, source, have)
    return planned(min(chunk_rows, source.shape[0]))


def _row_seconds(model: Model, heads: Sequence[Head], source: Source) -> float:
    width = sum(head.width for head in heads)
    return budget.score_seconds(model.landmarks.shape[0], source.row_values, width, model.dtype.itemsize)


def _rows_within(planned: Callable[[int], Plan], source: Source, have: Callable[[int], int]) -> int:
    """Return as many rows of a task as memory takes, in step with the source."""
    least, rows = _STREAMED_ROWS
    spare = have(planned(least).model_bytes)
    while rows > least and planned(chunking.align_to_chunks(rows, source.chunk_rows)).task_bytes > spare:
        rows = max(least, rows * 3 // 4)
    return chunking.align_to_chunks(rows, source.chunk_rows)


def _checked(model: Model, outputs: Sequence[str], source: Source) -> list[Head]:
    if source.shape[1] != model.columns:
        raise InvalidInputError(
            f"{source.name} has {source.shape[1]} columns and the model was fitted with {model.columns}."
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
    tile: int,
    threads: int,
    writing: WriteBuffers,
    *,
    streamed: bool = False,
) -> Plan:
    n, rows, kernel, tile = model.landmarks.shape[0], source.shape[0], model.kernel, min(tile, piece_rows)
    values = chunking.count_tiles(source.values_of(piece_rows), piece_rows)
    chunks, size = chunking.count_tiles(rows, chunk_rows), model.dtype.itemsize
    row_bytes = sum(head.width * head.dtype.itemsize for head in heads)
    width = chunking.count_tiles(row_bytes, size)  # codes of classes are as wide as two float32
    if chunks > chunking.MAX_CHUNKS:
        raise InvalidInputError(
            f"{rows} rows in {chunks} chunks are more than {chunking.MAX_CHUNKS}; raise chunk_rows."
        )
    shared_read, beside = _reading_bytes(source, chunk_rows, piece_rows)
    blocks = kernel.peak_blocks + (0 if kernel.supports_out else 1)
    if size < np.dtype(np.float64).itemsize and computes_in_float64(kernel):
        blocks = 1 + 2 * (kernel.peak_blocks + 1)  # a block in float64, and rounded
    if values < source.shape[1] or not isinstance(model.landmarks, np.ndarray):
        blocks += 3  # sparse rows are multiplied beside the block
    product = max(_product_columns(head) for head in heads)
    beside += size * max(partial_product_values(n, head.columns) for head in heads)
    if streamed:
        beside += 3 * size * n * max(map(_panel, heads))
    beside += row_bytes * (writing.pieces * piece_rows + writing.chunks * chunk_rows)
    beside += 3 * size * max(0, source.values_of(tile) - tile * values)  # of the tile that has more than others
    task = budget.score_task_bytes(piece_rows, values, n, width, tile, blocks, product, size, beside)
    held, stored = row_values(model.landmarks), model.head_values - (model.stored_values if streamed else 0)
    return Plan(
        rows=rows,
        columns=source.shape[1],
        width=sum(head.width for head in heads),
        chunk_rows=chunk_rows,
        chunks=chunks,
        piece_rows=piece_rows,
        streamed=streamed,
        task_bytes=task,
        model_bytes=shared_read + budget.model_bytes(n, held, stored, kernel.landmark_copies, size),
        chunk_bytes=row_bytes * chunk_rows,
        row_seconds=_row_seconds(model, heads, source),
        threads=threads,
    )


def _reading_bytes(source: Source, chunk_rows: int, piece_rows: int) -> tuple[int, int]:
    """Return the bytes that reading takes of a process, and of a task, beside the rows that were asked for."""
    step = source.chunk_rows
    if not chunking.is_small_part(chunk_rows, step):
        return 0, source.decoding_bytes(chunking.count_tiles(piece_rows, step) + 1)
    # A chunk is decoded for the tasks of a process while the one before it is still kept.
    return 2 * 8 * source.shape[1] * min(step, source.shape[0]) + source.decoding_bytes(1), 0


def _panel(head: Head) -> int:
    """Return how many columns of a head's weights are read from their store together."""
    return head.weights.panel if isinstance(head.weights, StoredWeights) else 0


def _product_columns(head: Head) -> int:
    """Return the columns of what a head makes beside its output."""
    if head.link == links.IDENTITY:
        return head.columns if head.rotation is not None else 0
    return head.columns * (1 if links.needs_diagonal(head.link) else _LINK_COPIES)


def _dense_columns(model: Model) -> int:
    return model.landmarks.shape[1] if isinstance(model.landmarks, np.ndarray) else 0
