"""What a scoring job did, for its reader in the morning and for machines."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from dkfm.scoring.receipts import Receipt

_SLOWEST = 5


@dataclass(frozen=True)
class SlowChunk:
    """A chunk that took long."""

    chunk: int
    seconds: float
    worker: str


@dataclass(frozen=True)
class ScoreReport:
    """What a finished scoring job did.

    Attributes
    ----------
    path : str
        The output.
    rows, invalid_rows, chunks, bytes : int
        Of the whole output; invalid rows scored NaN.
    scored_rows, scored_chunks : int
        Of this run: the others were there.
    seconds : float
        From the first task of this run to the last.
    retries, duplicates : int
        Tasks that were started once more, and chunks that were there when their task came to write them.
    slowest : tuple of SlowChunk
        Those of this run that took longest: number, seconds, worker.
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
        """Return all of it as JSON."""
        rate = self.scored_rows / self.seconds if self.seconds > 0 else None
        return json.dumps(asdict(self) | {"rows_per_second": rate})


def slowest_chunks(receipts: Iterable[Receipt]) -> tuple[SlowChunk, ...]:
    """Return the chunks that took longest."""
    ordered = sorted(receipts, key=lambda receipt: -receipt.seconds)[:_SLOWEST]
    return tuple(SlowChunk(receipt.chunk, round(receipt.seconds, 3), receipt.worker) for receipt in ordered)
