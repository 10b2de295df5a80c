"""Log what a scoring job is about to do: the chunks that it looks at, and those that it scores."""

from dataclasses import replace

from dkfm.core import budget
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.scoring.job_setup import ScoringJob
from dkfm.scoring.output_store import Output


def log_look(job: ScoringJob, output: Output, chunks: int) -> None:
    """Log how many existing chunks of an output are read and checked."""
    place = describe_place(job.executor)
    log_stage("look", f"{chunks:,} chunks of {output.root} read and checked on {place}", chunks=chunks)


def log_scoring(job: ScoringJob, output: Output, chunks: int) -> None:
    """Log how many chunks are scored, of what and where."""
    plan = replace(job.plan, done=job.plan.chunks - chunks)
    log_stage(
        "score",
        f"{job.source.name}, {plan.rows:,} rows of {plan.columns:,} columns, into {output.root}: {chunks:,} of "
        f"{plan.chunks:,} chunks of {plan.chunk_rows:,} rows and {budget.format_bytes(plan.chunk_bytes)}, on "
        f"{describe_place(job.executor)}",
        seconds=plan.seconds,
        rows=plan.rows,
        columns=plan.columns,
        chunks=plan.chunks,
        done=plan.done,
        threads=plan.threads,
        path=str(output.root),
    )
