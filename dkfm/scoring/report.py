"""Report what a scoring job did, as an object and as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from dkfm.scoring.receipts import Receipt

_MAX_SLOWEST = 5
"""Number of slow chunks in a report."""


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
        Rows of the output that scored NaN.
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
        Tasks that were started again.
    duplicates : int
        Chunks whose files were already there when their task came to write them; they were not written twice.
    slowest : tuple of SlowChunk
        Chunks of this run that took longest.
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


def slowest_chunks(receipts: Iterable[Receipt]) -> tuple[SlowChunk, ...]:
    """Return the chunks that took longest, slowest first."""
    ordered = sorted(receipts, key=lambda receipt: -receipt.seconds)[:_MAX_SLOWEST]
    return tuple(SlowChunk(receipt.chunk, round(receipt.seconds, 3), receipt.worker) for receipt in ordered)
