"""Receipts of chunks, kept while a job runs: numbered segments, each written once and never changed.

A segment that is damaged is as one that is not there: its chunks are scored again, and tell the same. So is one of
another output, by the id of its creation, or of an input in another state (see `dkfm.files.change_detection`): what it
tells of may be of other rows. A segment of an earlier version, which says neither, counts for no output.
"""

import json
import math
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import google_crc32c

from dkfm.errors import DamagedStoreError
from dkfm.storage import json_documents, zarr_schema
from dkfm.storage.output_location import OutputLocation

_LEAST, _MOST, _SHARE, _COST = 0.05, 60.0, 0.005, 50
"""Seconds between two segments: at least and at most; as a share of the time so far, so that they stay few; and how
many times what the last one took.
"""


_MAX_NUMBER = 2**63
"""No chunk, row or byte has this number."""


@dataclass(frozen=True)
class Receipt:
    """What a task says of the chunk that it wrote and read back.

    Attributes
    ----------
    chunk, rows, invalid_rows : int
        Its number, its rows, and how many of them scored NaN.
    crc32c : tuple of int
        Of each file.
    bytes : int
        Of all files.
    seconds : float
        That the task took.
    worker : str
        Where it ran.
    found : bool
        Whether the chunk was there already.
    """

    chunk: int
    rows: int
    invalid_rows: int
    crc32c: tuple[int, ...]
    bytes: int
    seconds: float = 0.0
    worker: str = ""
    found: bool = False

    @classmethod
    def checked(cls, *values: Any) -> "Receipt":  # what stands in JSON
        """Return a receipt of values that were read.

        Raises
        ------
        TypeError, ValueError
            They are not those of one.
        """
        receipt = cls(*values)
        numbers = receipt.chunk, receipt.rows, receipt.invalid_rows, receipt.bytes, *receipt.crc32c
        if not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers):
            raise ValueError("A receipt has numbers.")
        if max(receipt.crc32c) >= 2**32 or receipt.invalid_rows > receipt.rows:
            raise ValueError("A receipt has checksums of 32 bits, and no more invalid rows than rows.")
        if type(receipt.seconds) not in (int, float) or not 0 <= receipt.seconds < math.inf:
            raise ValueError("A receipt has seconds.")
        if type(receipt.worker) is not str or type(receipt.found) is not bool:
            raise TypeError("A receipt names its worker, and says whether its chunk was found.")
        return receipt


class Journal:
    """The receipts of one run of a job, on their way to disk.

    Parameters
    ----------
    place : Place
    run : str
        The id of this run, which its segments are named by.
    output, state : str
        The id of the output, and the state of the input: see `Receipt`'s readers, `read_receipts`.
    """

    def __init__(self, place: OutputLocation, run: str, output: str = "", state: str = "") -> None:
        self._place, self._run, self._of = place, run, (output, state)
        self._waiting: list[Receipt] = []
        self._segments = 0
        self._started = self._written = time.monotonic()
        self._took = 0.0

    def add(self, receipt: Receipt) -> None:
        """Take a receipt, and write those that wait if it is time."""
        self._waiting.append(receipt)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write the receipts that wait if it is time: no chunk waits for the next one to be told of."""
        now = time.monotonic()
        pause = max(min(_MOST, max(_LEAST, _SHARE * (now - self._started))), _COST * self._took)
        if self._waiting and now - self._written > pause:
            self.flush()

    def flush(self) -> None:
        """Write the receipts that wait; they are durable then."""
        begun = time.monotonic()
        if self._waiting:
            self._place.put(*_segment(self._run, self._segments, self._waiting, *self._of))
            self._segments, self._waiting = self._segments + 1, []
        self._written = time.monotonic()
        self._took = self._written - begun


def empty_segment() -> tuple[str, bytes]:
    """Return the name of a segment that no run has, and what is in it: no receipt."""
    return _segment(uuid.uuid4().hex, 0, [])


def _segment(run: str, number: int, told: Iterable[Receipt], output: str = "", state: str = "") -> tuple[str, bytes]:
    rows = json.dumps([list(asdict(receipt).values()) for receipt in told])
    content = {"crc32c": _checksum(output, state, rows), "output": output, "input": state, "receipts": rows}
    return f"{zarr_schema.JOURNAL}/{run}-{number:06d}.json", json.dumps(content).encode()


def _checksum(*texts: str) -> int:
    return int(google_crc32c.value("\0".join(texts).encode()))


def read_receipts(place: OutputLocation, output: str | None = None, state: str | None = None) -> Iterator[Receipt]:
    """Yield the receipts of all runs of a job, some of them perhaps of a chunk that is no longer as they say.

    Parameters
    ----------
    place : Place
    output, state : str, optional
        Only those of the output with this id; only those of runs that found the input in this state.
    """
    for name in sorted(place.names()):
        folder, _, segment = name.partition("/")
        if folder == zarr_schema.JOURNAL and zarr_schema.is_segment_name(segment):
            yield from _of_segment(place, name, output, state)


def _of_segment(place: OutputLocation, name: str, output: str | None, state: str | None) -> Iterable[Receipt]:
    opened = place.open(name, json_documents.MAX_JSON)
    if opened is None:
        return []
    try:
        with opened:
            content = json_documents.parse_json(opened.read(json_documents.MAX_JSON + 1), f"{place}/{name}")
        of, found, text = (str(content[key]) for key in ("output", "input", "receipts"))
        if _checksum(of, found, text) != content["crc32c"] or output not in (None, of) or state not in (None, found):
            return []
        return [_receipt(row) for row in json.loads(text)]
    except (KeyError, TypeError, ValueError, RecursionError, DamagedStoreError):
        return []


def _receipt(row: list[Any]) -> Receipt:
    chunk, rows, invalid, crc32c, *others = row
    return Receipt.checked(chunk, rows, invalid, tuple(crc32c), *others)
