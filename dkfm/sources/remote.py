"""Rows of .npy files and Zarr arrays on an object store: sources that read no more than the rows that are asked for.

What they are is decided from headers and metadata alone, by the rules of files on a local disk.
"""

import uuid
import zlib
from dataclasses import dataclass, field

import numpy as np
import zarr
from zarr.storage import FsspecStore, StorePath

from dkfm.core.rows import Array, require_two_dimensions
from dkfm.errors import InvalidInputError, reason
from dkfm.files import fsspec_options
from dkfm.files.object_store import Remote
from dkfm.sources import chunk_cache
from dkfm.sources.npy import MAX_HEADER, parse_header
from dkfm.storage import bounded_chunks, json_documents, zarr_schema

__all__ = ["RemoteNpySource", "RemoteZarrSource", "open_remote"]

_METADATA = "zarr.json"


def open_remote(place: Remote) -> "RemoteNpySource | RemoteZarrSource":
    """Return the rows of a .npy file, of a Zarr array, or of the only array of a Zarr group.

    Raises
    ------
    InvalidInputError
        Nothing there, or something that does not hold rows of real numbers.
    StoreError
        The store did not answer, or the array is refused.
    """
    if place.url.endswith(".npy"):
        return RemoteNpySource.open(place)
    if place.size(_METADATA) is not None:
        return RemoteZarrSource.open(place)
    if place.size() is None and next(place.names(), None) is None:
        raise InvalidInputError(f"There is no {place}.")
    raise InvalidInputError(
        f"{place} is neither a .npy, .npz or .parquet file, nor a folder of .parquet files, nor a Zarr version 3 store."
    )


@dataclass(frozen=True)
class _Placed:
    """Rows of one object, or of those below one prefix."""

    place: Remote
    shape: tuple[int, int]

    @property
    def name(self) -> str:
        """The URL, without credentials."""
        return self.place.name

    @property
    def row_values(self) -> int:
        """The columns."""
        return self.shape[1]

    def values_of(self, rows: int) -> int:
        """Return how many float64 values so many rows take in memory."""
        return rows * self.shape[1]

    def stamp(self) -> str:
        """Return a digest of names, sizes and ETags."""
        return self.place.stamp()

    state = stamp

    def is_of(self, stamp: str) -> bool:  # nothing was kept of the rows but what their head says
        """Whether header or metadata, read again, say the same."""
        return bool(open_remote(self.place) == self)

    def where(self, row: int) -> tuple[str, int]:
        """Return the URL, and the row."""
        return self.name, row


@dataclass(frozen=True)
class RemoteNpySource(_Placed):
    """Rows of a .npy file, never unpickled; some rows are one request."""

    dtype: str
    offset: int
    """Where its values begin."""
    chunk_rows: int = 1
    single: bool = False
    """Whether rows of float32 are read as they are."""

    @classmethod
    def open(cls, place: Remote) -> "RemoteNpySource":
        """Read the header of a file."""
        size = place.size()
        if size is None:
            raise InvalidInputError(f"There is no {place}.")
        header = parse_header(place.read("", 0, min(size, MAX_HEADER)), place.name, size)
        require_two_dimensions(header.shape, header.dtype, place.name)
        if header.by_columns:
            raise InvalidInputError(
                f"{place} is stored by columns (Fortran order), so that no row can be read alone; "
                "save numpy.ascontiguousarray(X) instead."
            )
        return cls(place, (header.shape[0], header.shape[1]), header.dtype.str, header.offset)

    def decoding_bytes(self, chunks: int) -> int:
        """Return the bytes of the answer of which the rows are made; a chunk is a row."""
        return chunks * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.shape[1] * np.dtype(self.dtype).itemsize

    def read(self, rows: slice) -> Array:
        """Return some rows."""
        start, stop = rows.start, max(rows.start, min(rows.stop, self.shape[0]))
        data = self.place.read("", self.offset + start * self._row_bytes, self.offset + stop * self._row_bytes)
        if len(data) != (stop - start) * self._row_bytes:
            raise InvalidInputError(f"Rows {start} to {stop} of {self.place} cannot be read: the file was cut short.")
        return chunk_cache.widened(np.frombuffer(data, self.dtype).reshape(-1, self.shape[1]), self.single)


@dataclass(frozen=True)
class RemoteZarrSource(_Placed):
    """Rows of an array in a Zarr version 3 store; its metadata are checked whenever they are read."""

    chunk_rows: int
    single: bool = False
    """Whether rows of float32 are read as they are."""
    opened: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """Which opening of the array this is: what was decoded for an earlier one may have changed since."""

    @classmethod
    def open(cls, place: Remote) -> "RemoteZarrSource":
        """Read the metadata of an array, or of the only array of a group."""
        metadata = _metadata(place)
        if metadata.get("node_type") == "group":
            arrays = [name for name in place.folders() if place.size(f"{name}/{_METADATA}") is not None]
            if len(arrays) != 1:
                held = ", ".join(arrays) or "none"
                raise InvalidInputError(f"{place} is a group; name one of its arrays as {place}/NAME ({held}).")
            place = place.join(arrays[0])
            metadata = _metadata(place)
        info = zarr_schema.array_info(metadata, place, source=True)
        if len(info.shape) != 2 or 0 in info.shape:
            raise InvalidInputError(f"{place} must hold rows and columns, and its shape is {info.shape}.")
        return cls(place, (info.shape[0], info.shape[1]), info.chunks[0])

    def decoding_bytes(self, chunks: int) -> int:
        """Return the bytes of chunks as they are stored, and as they are decoded."""
        return chunk_cache.chunk_bytes(self.shape, self.chunk_rows, chunks)

    def read(self, rows: slice) -> Array:
        """Return some rows; of a chunk much larger than they are, which is kept for those after them."""
        return chunk_cache.by_chunks((self.opened, self.single), rows, self.chunk_rows, self._read)

    def _read(self, rows: slice) -> Array:
        metadata = _metadata(self.place)
        info = zarr_schema.array_info(metadata, self.place, source=True)
        if info.shape != self.shape or info.chunks[0] != self.chunk_rows:
            raise InvalidInputError(f"{self.place} was replaced by an array of shape {info.shape} while it was read.")
        return chunk_cache.widened(_values(self.place, metadata, rows), self.single)


def _metadata(place: Remote) -> dict[str, object]:
    data = place.read(_METADATA, 0, json_documents.MAX_JSON + 1)
    if len(data) > json_documents.MAX_JSON:
        raise InvalidInputError(
            f"{place}/{_METADATA} has more than {json_documents.MAX_JSON} bytes, and is no metadata."
        )
    return json_documents.parsed(data, f"{place}/{_METADATA}")


def _values(place: Remote, metadata: dict[str, object], rows: slice) -> np.ndarray:
    """Return some rows of an array as they are stored; a chunk that is not there is its fill value."""
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    with place.telling("read") as (files, path):
        # One connection serves rows and all else: an asynchronous one of Zarr's own would never be closed.
        chunks = FsspecStore(AsyncFileSystemWrapper(files, asynchronous=True), read_only=True, path=path)
        array = zarr.Array(zarr.AsyncArray(bounded_chunks.metadata_of(metadata), StorePath(chunks)))
        try:
            return np.asarray(fsspec_options.patiently(files, lambda: array[rows]))
        except (ValueError, RuntimeError, TypeError, EOFError, zlib.error) as error:  # bytes that are no chunk
            told = f"Rows {rows.start} to {rows.stop} of {place} cannot be read: {reason(error)}."
            raise InvalidInputError(told) from error
