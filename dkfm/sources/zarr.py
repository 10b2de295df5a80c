"""Rows of arrays in Zarr version 3 stores, on this file system and on object stores.

What an array is, is decided from its metadata alone: its codecs are checked before it is opened.
"""

import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import zarr
from zarr.storage import FsspecStore, StorePath

from dkfm.core.rows import Array
from dkfm.errors import DkfmError, InvalidInputError, reason
from dkfm.files import fsspec_options
from dkfm.files.location import Location, join
from dkfm.files.object_store import Remote
from dkfm.sources import chunk_cache
from dkfm.sources.base import DenseRows
from dkfm.storage import bounded_chunks, json_documents, zarr_schema
from dkfm.storage.raw_chunks import RawArray

_METADATA = "zarr.json"


def open_zarr(location: Location) -> "ZarrSource | RemoteZarrSource":
    """Read the metadata of an array, or of the only array of a group."""
    return RemoteZarrSource.open(location) if isinstance(location, Remote) else ZarrSource.open(location)


@dataclass(frozen=True)
class _ZarrRows(DenseRows):
    """Rows of an array; a chunk much larger than the rows that are asked for is kept for those after them."""

    opened: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False, kw_only=True)
    """Which opening of the array this is: what was decoded for an earlier one may have changed since."""

    def decoding_bytes(self, chunks: int) -> int:
        """Return the bytes of chunks as they are stored, and as they are decoded."""
        return chunk_cache.chunk_bytes(self.shape, self.chunk_rows, chunks)

    def is_of(self, stamp: str) -> bool:  # nothing was kept of the array but its metadata
        """Whether the metadata, read again, say the same."""
        return open_zarr(self.location) == self

    def read(self, rows: slice) -> Array:
        """Return some rows; of a chunk much larger than they are, which is kept for those after them."""
        return chunk_cache.read_by_chunks((self.opened, self.keep_float32), rows, self.chunk_rows, self._read)

    def _read(self, rows: slice) -> Array:
        raise NotImplementedError


@dataclass(frozen=True)
class ZarrSource(_ZarrRows):
    """Rows of an array in a store on this file system."""

    plain: RawArray | None = None
    """How its rows are read without Zarr, if they can be."""

    @classmethod
    def open(cls, path: Path) -> "ZarrSource":
        """Read the metadata of an array, or of the only array of a group."""
        if zarr_schema.status_within(path, path / _METADATA) is None:
            raise InvalidInputError(f"There is no Zarr version 3 array at {path}.")
        metadata = json_documents.read_json(path / _METADATA)
        array = cast("Path", _array_at(path, metadata, lambda: sorted(p.parent.name for p in path.glob("*/zarr.json"))))
        if array != path:
            zarr_schema.status_within(path, array / _METADATA)
        _, info = zarr_schema.read_source(array)
        return cls(array, _shape(info, array), info.chunks[0], plain=RawArray.of(array, info))

    def _read(self, rows: slice) -> Array:
        path = cast("Path", self.location)
        try:
            values = None if self.plain is None else self.plain.read(rows)
            return chunk_cache.widen(
                bounded_chunks.read_bounded(path, rows) if values is None else values, self.keep_float32
            )
        except DkfmError:
            raise
        except Exception as error:  # whatever a decoder makes of a stranger's bytes
            raise InvalidInputError(
                f"Rows {rows.start} to {rows.stop} of {path} cannot be read: {reason(error)}."
            ) from error


@dataclass(frozen=True)
class RemoteZarrSource(_ZarrRows):
    """Rows of an array in a store on an object store; its metadata are checked whenever they are read."""

    @classmethod
    def open(cls, place: Remote) -> "RemoteZarrSource":
        """Read the metadata of an array, or of the only array of a group."""
        metadata = _remote_metadata(place)
        array = cast("Remote", _array_at(place, metadata, lambda: _remote_arrays(place)))
        if array != place:
            metadata = _remote_metadata(array)
        info = zarr_schema.array_info(metadata, array, source=True)
        return cls(array, _shape(info, array), info.chunks[0])

    def _read(self, rows: slice) -> Array:
        place = cast("Remote", self.location)
        metadata = _remote_metadata(place)
        info = zarr_schema.array_info(metadata, place, source=True)
        if info.shape != self.shape or info.chunks[0] != self.chunk_rows:
            raise InvalidInputError(f"{place} was replaced by an array of shape {info.shape} while it was read.")
        return chunk_cache.widen(_remote_values(place, metadata, rows), self.keep_float32)


def _array_at(location: Location, metadata: dict[str, object], arrays: Callable[[], Sequence[str]]) -> Location:
    """Return where an array is: the location, or the only array of the group that is there."""
    if metadata.get("node_type") != "group":
        return location
    names = arrays()
    if len(names) != 1:
        held = ", ".join(names) or "none"
        raise InvalidInputError(f"{location} is a group; name one of its arrays as {location}/NAME ({held}).")
    return join(location, names[0])


def _shape(info: zarr_schema.ArrayInfo, location: Location) -> tuple[int, int]:
    if len(info.shape) != 2 or 0 in info.shape:
        raise InvalidInputError(f"{location} must hold rows and columns, and its shape is {info.shape}.")
    return info.shape[0], info.shape[1]


def _remote_arrays(place: Remote) -> list[str]:
    return [name for name in place.folders() if place.size(f"{name}/{_METADATA}") is not None]


def _remote_metadata(place: Remote) -> dict[str, object]:
    data = place.read(_METADATA, 0, json_documents.MAX_JSON + 1)
    if len(data) > json_documents.MAX_JSON:
        raise InvalidInputError(
            f"{place}/{_METADATA} has more than {json_documents.MAX_JSON} bytes, and is no metadata."
        )
    return json_documents.parse_json(data, f"{place}/{_METADATA}")


def _remote_values(place: Remote, metadata: dict[str, object], rows: slice) -> np.ndarray:
    """Return some rows of an array as they are stored; a chunk that is not there is its fill value."""
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    with place.connected("read") as (files, path):
        # One connection serves rows and all else: an asynchronous one of Zarr's own would never be closed.
        chunks = FsspecStore(AsyncFileSystemWrapper(files, asynchronous=True), read_only=True, path=path)
        array = zarr.Array(zarr.AsyncArray(bounded_chunks.bounded_metadata(metadata), StorePath(chunks)))
        try:
            return np.asarray(fsspec_options.retry(files, lambda: array[rows]))
        except (ValueError, RuntimeError, TypeError, EOFError, zlib.error) as error:  # bytes that are no chunk
            told = f"Rows {rows.start} to {rows.stop} of {place} cannot be read: {reason(error)}."
            raise InvalidInputError(told) from error
