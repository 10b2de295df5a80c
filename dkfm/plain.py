"""Rows of Zarr arrays whose chunks are stored as they are in memory, read without Zarr: it takes ten times as long.

What is not plain, and what is missing, is left to Zarr.
"""

from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm import formats
from dkfm.tiling import count

__all__ = ["Plain"]


@dataclass(frozen=True)
class Plain:
    """An array (n, d) of chunks of whole rows."""

    path: Path
    info: formats.ArrayInfo

    @classmethod
    def of(cls, path: Path, info: formats.ArrayInfo) -> "Plain | None":
        """Return the array at a path, None where its chunk files are anything but whole rows of values."""
        whole_rows = len(info.shape) == 2 and info.chunks[1] == info.shape[1]
        return cls(path, info) if info.trailer is not None and whole_rows else None

    def read(self, rows: slice) -> npt.NDArray[np.generic] | None:
        """Return some rows as they are stored; None where one of their chunks has no file, and is its fill value.

        Raises
        ------
        ValueError
            A chunk of another size, or with another checksum, than it must have.
        """
        each = self.info.chunks[0]
        values = np.empty((rows.stop - rows.start, self.info.shape[1]), np.dtype(self.info.dtype).newbyteorder("<"))
        for number in range(rows.start // each, count(rows.stop, each)):
            first, last = max(rows.start, number * each), min(rows.stop, (number + 1) * each)
            part = values[first - rows.start : last - rows.start]
            chunk = part if len(part) == each else np.empty(self.info.chunks, values.dtype)
            try:
                self._fill(chunk, self.path / "c" / str(number) / "0")
            except FileNotFoundError:
                return None
            if chunk is not part:
                part[...] = chunk[first - number * each : last - number * each]
        return values

    def _fill(self, chunk: npt.NDArray[np.generic], file: Path) -> None:
        with file.open("rb") as opened:
            size, rest = opened.readinto(chunk.reshape(-1).view(np.uint8).data), opened.read()
        checksum = google_crc32c.value(chunk).to_bytes(formats.CRC_BYTES, "little") if self.info.trailer else b""
        if size != chunk.nbytes or rest != checksum:
            raise ValueError(f"{file} has another size or another checksum than it must have.")
