"""Read Zarr arrays with uncompressed chunks directly from their files, ten times faster than Zarr does.

In a user's input, Zarr reads arrays with other codecs, and rows with missing chunks.
"""

from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import split_by_chunk
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
        stop = min(rows.stop, n)
        parts = _split_by_chunks(rows.start, stop, self.info.chunks[0])
        files = [self.path / "c" / str(number) / "0" for number, _, _ in parts]
        for file in files:
            status = store_metadata.stat_regular_file_within(self.path, file)
            if status is None:
                return None
            if status.st_size != self._expected_file_bytes:
                raise ValueError(f"{file} has {status.st_size} bytes and must have {self._expected_file_bytes}.")
        values = np.empty((stop - rows.start, d), np.dtype(self.info.dtype_name).newbyteorder("<"))
        for file, (_, target, selected) in zip(files, parts, strict=True):
            _read_part(values[target], file, self.info.chunks, (selected,), checked=bool(self.info.checksum_bytes))
        return values

    @property
    def _expected_file_bytes(self) -> int:
        return prod(self.info.chunks) * np.dtype(self.info.dtype_name).itemsize + (self.info.checksum_bytes or 0)


def read_own_array(path: Path, selection: tuple[slice, ...] = ()) -> npt.NDArray[np.generic]:
    """Return an array of a dkfm store, or the part that is selected by slices, one for each axis.

    Raises
    ------
    UnsupportedStoreError
        The metadata are not those of an array of a dkfm store.
    ValueError
        A chunk has a wrong size or a wrong checksum.
    OSError
        A chunk has no file.
    """
    info = store_metadata.read_array_info(path)
    selection = selection or (slice(None),) * len(info.shape)
    chosen = [part.indices(n)[:2] for part, n in zip(selection, info.shape, strict=True)]
    values = np.empty([max(0, stop - start) for start, stop in chosen], np.dtype(info.dtype_name).newbyteorder("<"))
    if not values.size:
        return values
    axes = (_split_by_chunks(*bounds, length) for bounds, length in zip(chosen, info.chunks, strict=True))
    for parts in product(*axes):
        index, targets, sources = zip(*parts, strict=True)
        _read_part(values[targets], path.joinpath("c", *map(str, index)), info.chunks, sources, checked=True)
    return values


def _split_by_chunks(start: int, stop: int, length: int) -> list[tuple[int, slice, slice]]:
    """Return the number of each chunk of an axis from `start` to `stop`, with its slices of the result and the chunk.

    >>> _split_by_chunks(3, 8, 5)
    [(0, slice(0, 2, None), slice(3, 5, None)), (1, slice(2, 5, None), slice(0, 3, None))]
    """
    parts = ((number, number * length - start, part) for number, part in split_by_chunk(start, stop, length))
    return [(number, slice(shift + part.start, shift + part.stop), part) for number, shift, part in parts]


def _read_part(
    part: npt.NDArray[np.generic], file: Path, chunk_shape: tuple[int, ...], selection: tuple[slice, ...], checked: bool
) -> None:
    """Read the selected part of a chunk into a part of an array, directly if the whole chunk is selected."""
    if part.shape == chunk_shape and part.flags.c_contiguous:
        read_chunk_into_array(part, file, checked)
    else:
        chunk: npt.NDArray[np.generic] = np.empty(chunk_shape, part.dtype)
        read_chunk_into_array(chunk, file, checked)
        part[...] = chunk[selection]


def has_intact_chunk(array: Path, index: tuple[int, ...], chunk_shape: tuple[int, ...]) -> bool:
    """Return whether a chunk of float64 of an array exists and its checksum is right."""
    try:
        read_chunk_into_array(np.empty(chunk_shape), array.joinpath("c", *map(str, index)), checked=True)
    except (ValueError, OSError):
        return False
    return True


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
