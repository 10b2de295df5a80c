"""Log the start of a scoring job, and report its result as an object and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dkfm.core.display.quantities import format_bytes
from dkfm.errors import ClusterError, PartialOutputError
from dkfm.execution.stage_log import describe_place, log_missing_extra, log_stage
from dkfm.scoring.job_setup import ScoringJob
from dkfm.scoring.output_store import Output
from dkfm.scoring.receipts import ChunkReceipt

_MAX_SLOWEST = 5
"""Largest number of slow chunks in a report."""


@dataclass(frozen=True)
class SlowChunk:
    """A chunk that took long.

    Attributes
    ----------
    chunk : int
        Number of the chunk.
    seconds : float
        Seconds that its task took.
    worker : str
        Address of the worker.
    """

    chunk: int
    seconds: float
    worker: str


@dataclass(frozen=True)
class ScoreReport:
    """Result of a finished scoring job.

    Attributes
    ----------
    path : str
        Path or URL of the output.
    rows : int
        Rows of the output.
    invalid_rows : int
        Rows of the output without a score.
    chunks : int
        Chunks of the output.
    bytes : int
        Size of all chunks on disk.
    scored_rows : int
        Rows that this run scored; earlier runs scored the others.
    scored_chunks : int
        Chunks that this run scored.
    seconds : float
        Seconds that this run took.
    retries : int
        Tasks that dkfm started again. Dask itself starts the tasks of a worker that died again, which are not counted.
    duplicates : int
        Chunks whose files another task had already written; they were not written twice.
    slowest : tuple of SlowChunk
        Chunks of this run that took the longest time.
    """

    path: str
    rows: int
    invalid_rows: int
    chunks: int
    bytes: int
    scored_rows: int
    scored_chunks: int
    seconds: float
    retries: int
    duplicates: int
    slowest: tuple[SlowChunk, ...]

    @property
    def rows_per_second(self) -> float:
        """Rows that this run scored, divided by its seconds."""
        return self.scored_rows / self.seconds if self.seconds > 0 else float("inf")

    def to_json(self) -> str:
        """Return the report as JSON."""
        rate = self.scored_rows / self.seconds if self.seconds > 0 else None
        return json.dumps(asdict(self) | {"rows_per_second": rate})


def make_report(
    output: Output,
    receipts: Mapping[int, ChunkReceipt],
    new: Mapping[int, ChunkReceipt],
    seconds: float,
    retries: int,
    duplicates: int,
) -> ScoreReport:
    """Return the report of a job from the receipts of all chunks and of the chunks that it scored itself."""
    by_seconds = sorted(new.values(), key=lambda receipt: -receipt.seconds)[:_MAX_SLOWEST]
    return ScoreReport(
        path=str(output.root),
        rows=output.rows,
        invalid_rows=sum(receipt.invalid_rows for receipt in receipts.values()),
        chunks=output.n_chunks,
        bytes=sum(receipt.bytes for receipt in receipts.values()),
        scored_rows=sum(receipt.rows for receipt in new.values()),
        scored_chunks=len(new),
        seconds=seconds,
        retries=retries,
        duplicates=duplicates + sum(receipt.is_preexisting for receipt in new.values()),
        slowest=tuple(SlowChunk(receipt.chunk, round(receipt.seconds, 3), receipt.worker) for receipt in by_seconds),
    )


def require_no_fatal_chunks(output: Output, fatal: Sequence[int]) -> None:
    """Raise an error if any chunk killed every worker that scored it; `fatal` has the numbers of such chunks.

    The error is a PartialOutputError if there are other chunks, else a ClusterError.
    """
    if fatal:
        kind = PartialOutputError if len(fatal) < output.n_chunks else ClusterError
        rows = ", ".join(f"{output.chunk_slice(n).start} to {output.chunk_slice(n).stop - 1}" for n in fatal[:5])
        raise kind(
            f"Every worker died that scored rows {rows} (chunks {', '.join(map(str, fatal[:5]))}; {len(fatal)} "
            f"such chunks), even alone; the other {output.n_chunks - len(fatal)} chunks are done."
        )


def log_chunk_check(job: ScoringJob, output: Output, chunks: int) -> None:
    """Log the number of existing chunks that are read and checked."""
    place = describe_place(job.executor)
    log_stage("look", f"{chunks:,} chunks of {output.root} read and checked on {place}", chunks=chunks)


def log_scoring_start(job: ScoringJob, output: Output, chunks: int) -> None:
    """Log the number of chunks to score, their source and destination."""
    plan = replace(job.plan, done=job.plan.chunks - chunks)
    log_stage(
        "score",
        f"{job.source.name}, {plan.rows:,} rows of {plan.columns:,} columns, into {output.root}: {chunks:,} of "
        f"{plan.chunks:,} chunks of {plan.chunk_rows:,} rows and {format_bytes(plan.chunk_bytes)}, on "
        f"{describe_place(job.executor)}",
        seconds=plan.seconds,
        rows=plan.rows,
        columns=plan.columns,
        chunks=plan.chunks,
        done=plan.done,
        threads=plan.threads,
        path=str(output.root),
    )
    log_missing_extra(job.loaded_model.model.kernel, plan.seconds)
