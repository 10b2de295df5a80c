"""Keep the receipts of chunks in a journal while a job runs; its numbered segments are written once.

A segment names its output, by a creation id, and its input, by a stamp (see `dkfm.files.change_detection`). A segment
is ignored, and its chunks are scored again, if it is damaged, belongs to another output or state of the input, or names
none, as in earlier versions.
"""

import json
import math
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dkfm.errors import DamagedStoreError
from dkfm.storage import json_reading, store_metadata
from dkfm.storage.output_files import OutputLocation, read_json

_MIN_SEGMENT_INTERVAL = 0.05
"""Smallest number of seconds between two segments."""

_MAX_SEGMENT_INTERVAL = 60.0
"""Largest number of seconds between two segments, unless writing them is slow."""

_INTERVAL_SHARE = 0.005
"""Seconds between two segments, as a share of the elapsed time, so that a long job has few segments."""

_COST_FACTOR = 50
"""Smallest number of seconds between two segments, as a multiple of the seconds to write the last one."""

MAX_NUMBER = 2**63
"""Numbers of chunks, rows and bytes are smaller than this."""


@dataclass(frozen=True)
class ChunkReceipt:
    """Record of a chunk that a task wrote and read back."""

    chunk: int
    """Number of the chunk."""
    rows: int
    """Rows of the chunk."""
    invalid_rows: int
    """Number of rows whose scores are NaN, or that have no class."""
    file_checksums: tuple[int, ...]
    """Checksum of each file."""
    bytes: int
    """Size of all files."""
    seconds: float = 0.0
    """Seconds that the task took."""
    worker: str = ""
    """Address of the worker."""
    is_preexisting: bool = False
    """Whether the chunk existed already."""

    @classmethod
    def from_json_values(cls, *values: Any) -> "ChunkReceipt":  # values of JSON
        """Return a receipt with values that were read from a file.

        Raises
        ------
        TypeError, ValueError
            A value has the wrong type or is out of range.
        """
        receipt = cls(*values)
        numbers = receipt.chunk, receipt.rows, receipt.invalid_rows, receipt.bytes, *receipt.file_checksums
        if not all(type(number) is int and 0 <= number < MAX_NUMBER for number in numbers):
            raise ValueError("A receipt has numbers.")
        if max(receipt.file_checksums) >= 2**32 or receipt.invalid_rows > receipt.rows:
            raise ValueError("A receipt has checksums of 32 bits, and no more invalid rows than rows.")
        if type(receipt.seconds) not in (int, float) or not 0 <= receipt.seconds < math.inf:
            raise ValueError("A receipt has seconds.")
        if type(receipt.worker) is not str or type(receipt.is_preexisting) is not bool:
            raise TypeError("A receipt names its worker, and says whether its chunk was found.")
        return receipt


class Journal:
    """Write the receipts of one run of a job to disk in segments.

    Parameters
    ----------
    location : OutputLocation
        Location of the output.
    run : str
        Unique id of this run, in the names of its segments.
    creation_id : str
        Id of the output.
    input_stamp : str
        Stamp of the input; see `dkfm.files.change_detection`.
    """

    def __init__(self, location: OutputLocation, run: str, creation_id: str = "", input_stamp: str = "") -> None:
        self._location, self._run, self._identity = location, run, (creation_id, input_stamp)
        self._pending: list[ChunkReceipt] = []
        self._segments = 0
        self._started = self._written = time.monotonic()
        self._write_seconds = 0.0

    def add(self, receipt: ChunkReceipt) -> None:
        """Add a receipt, and write the pending receipts if enough time has passed."""
        self._pending.append(receipt)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write the pending receipts if enough time has passed; also called while no result arrives."""
        now = time.monotonic()
        share = _INTERVAL_SHARE * (now - self._started)
        pause = max(min(_MAX_SEGMENT_INTERVAL, max(_MIN_SEGMENT_INTERVAL, share)), _COST_FACTOR * self._write_seconds)
        if self._pending and now - self._written > pause:
            self.flush()

    def flush(self) -> None:
        """Write the pending receipts durably."""
        begun = time.monotonic()
        if self._pending:
            self._location.write_file(*_build_segment(self._run, self._segments, self._pending, *self._identity))
            self._segments, self._pending = self._segments + 1, []
        self._written = time.monotonic()
        self._write_seconds = self._written - begun


def build_probe_segment() -> tuple[str, bytes]:
    """Return the name and the content of a segment without receipts, under a new name."""
    return _build_segment(uuid.uuid4().hex, 0, [], "", "")


def _build_segment(
    run: str, number: int, receipts: Iterable[ChunkReceipt], output: str, stamp: str
) -> tuple[str, bytes]:
    """Return the name and the JSON content of a segment, which is not written here."""
    rows = json.dumps([list(asdict(receipt).values()) for receipt in receipts])
    content = {
        "crc32c": json_reading.compute_text_crc32c(output, stamp, rows),
        "output": output,
        "input": stamp,
        "receipts": rows,
    }
    return f"{store_metadata.JOURNAL}/{run}-{number:06d}.json", json.dumps(content).encode()


def read_receipts(
    location: OutputLocation, creation_id: str | None = None, input_stamp: str | None = None
) -> Iterator[ChunkReceipt]:
    """Yield the receipts in all segments of a journal; a chunk may have changed since its receipt was written.

    Parameters
    ----------
    location : OutputLocation
        Location of the output.
    creation_id : str, optional
        Id of the output; receipts of other outputs are left out.
    input_stamp : str, optional
        Stamp of the input; receipts with another stamp are left out.

    Yields
    ------
    ChunkReceipt
        Receipts; a chunk may have several.
    """
    for name in sorted(location.list_files()):
        folder, _, segment = name.partition("/")
        if folder == store_metadata.JOURNAL and store_metadata.is_journal_segment_name(segment):
            yield from _read_segment(location, name, creation_id, input_stamp)


def _read_segment(location: OutputLocation, name: str, *wanted: str | None) -> Iterable[ChunkReceipt]:
    """Return the receipts of one segment if its output and its input are the wanted ones; None accepts any."""
    try:
        content = read_json(location, name)
        if content is None:
            return []
        found_id, found_stamp, text = (str(content[key]) for key in ("output", "input", "receipts"))
        is_sound = json_reading.compute_text_crc32c(found_id, found_stamp, text) == content["crc32c"]
        is_requested = all(want in (None, found) for want, found in zip(wanted, (found_id, found_stamp), strict=True))
        return [_parse_receipt(row) for row in json.loads(text)] if is_sound and is_requested else []
    except (KeyError, TypeError, ValueError, RecursionError, DamagedStoreError):
        return []


def _parse_receipt(row: list[Any]) -> ChunkReceipt:
    chunk, rows, invalid, crc32c, *others = row
    return ChunkReceipt.from_json_values(chunk, rows, invalid, tuple(crc32c), *others)
