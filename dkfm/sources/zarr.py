"""Read rows, dense and CSR, of arrays in Zarr version 3 stores, on this file system and on object stores.

The metadata of an array, with its codecs, are validated before Zarr opens it.
"""

import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.errors import DkfmError, InvalidInputError, extract_reason
from dkfm.files import fsspec_access
from dkfm.files.location import Location, join
from dkfm.files.object_store import Remote
from dkfm.sources import chunk_cache
from dkfm.sources.base import CsrRows, DenseRows
from dkfm.storage import csr, json_reading, store_metadata
from dkfm.storage.raw_chunk_reader import RawArray

_METADATA = "zarr.json"


def open_zarr(location: Location) -> "ZarrSource | RemoteZarrSource":
    """Return a source from the metadata of an array, or of the only array of a group."""
    return RemoteZarrSource.open(location) if isinstance(location, Remote) else ZarrSource.open(location)


@dataclass(frozen=True)
class _ZarrRows(DenseRows, ABC):
    """Rows of an array; a chunk that is much larger than the requested rows is cached for later reads."""

    cache_token: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False, kw_only=True)
    """Random id of this opening, a key of cached chunks: chunks cached for an earlier opening may be outdated."""

    def read_overhead_bytes(self, chunks: int) -> int:
        """Return the bytes of concurrently decoded chunks, both stored and decoded."""
        return chunk_cache.estimate_concurrent_decode_bytes(self.shape, self.chunk_rows, chunks)

    def is_opening_valid(self, current_stamp: str) -> bool:  # only the metadata were kept
        """Return whether the metadata, read again, give an equal source."""
        return open_zarr(self.location) == self

    def read(self, rows: slice) -> Array:
        """Return some rows; cache a chunk that is much larger than they are."""
        return chunk_cache.read_rows_caching_chunks(
            (self.cache_token, self.keep_float32), rows, self.chunk_rows, self._read
        )

    @abstractmethod
    def _read(self, rows: slice) -> Array:
        """Return some rows, without the cache."""


@dataclass(frozen=True)
class ZarrSource(_ZarrRows):
    """Rows of an array in a store on this file system."""

    location: Path
    uncompressed_array: RawArray | None = None
    """Reader that needs no Zarr, if the chunks are stored as in memory."""

    @classmethod
    def open(cls, path: Path) -> "ZarrSource":
        """Return a source from the metadata of an array, or of the only array of a group."""
        if store_metadata.stat_regular_file_within(path, path / _METADATA) is None:
            if (path / ".zarray").exists():
                raise InvalidInputError(
                    f"{path} is an array of Zarr version 2, and dkfm reads version 3; convert it in Python, by "
                    'zarr.create_array("v3.zarr", data=zarr.open_array("v2.zarr")[:], zarr_format=3).'
                )
            raise InvalidInputError(f"There is no Zarr version 3 array at {path}.")
        metadata = json_reading.read_json(path / _METADATA)
        array = cast("Path", _resolve_array(path, metadata, lambda: [p.parent.name for p in path.glob("*/zarr.json")]))
        if array != path:
            store_metadata.stat_regular_file_within(path, array / _METADATA)
        _, info = store_metadata.read_source_metadata_and_info(array)
        raw = RawArray.open_if_supported(array, info)
        return cls(array, _checked_shape(info, array), info.chunks[0], uncompressed_array=raw)

    def _read(self, rows: slice) -> Array:
        path = self.location
        try:
            values = None if self.uncompressed_array is None else self.uncompressed_array.read(rows)
            if values is None:
                from dkfm.storage.bounded_chunks import read_bounded  # imports zarr

                values = read_bounded(path, rows)
            return chunk_cache.as_float(values, self.keep_float32)
        except DkfmError:
            raise
        except Exception as error:  # decoders raise many classes for invalid bytes
            message = f"Rows {rows.start} to {rows.stop} of {path} cannot be read: {extract_reason(error)}."
            raise InvalidInputError(message) from error


@dataclass(frozen=True)
class RemoteZarrSource(_ZarrRows):
    """Rows of an array on an object store; its metadata are validated at every read."""

    location: Remote

    @classmethod
    def open(cls, remote: Remote) -> "RemoteZarrSource":
        """Return a source from the metadata of an array, or of the only array of a group."""
        metadata = _read_remote_metadata(remote)
        array = cast("Remote", _resolve_array(remote, metadata, lambda: _list_remote_arrays(remote)))
        if array != remote:
            metadata = _read_remote_metadata(array)
        info = store_metadata.parse_array_info(metadata, array, source=True)
        return cls(array, _checked_shape(info, array), info.chunks[0])

    def _read(self, rows: slice) -> Array:
        remote = self.location
        metadata = _read_remote_metadata(remote)
        info = store_metadata.parse_array_info(metadata, remote, source=True)
        if info.shape != self.shape or info.chunks[0] != self.chunk_rows:
            raise InvalidInputError(f"{remote} was replaced by an array of shape {info.shape} while it was read.")
        return chunk_cache.as_float(_read_remote_rows(remote, metadata, rows), self.keep_float32)


def _resolve_array(location: Location, metadata: dict[str, object], list_arrays: Callable[[], list[str]]) -> Location:
    """Return the location of an array: the given one, or that of the only array of a group."""
    if metadata.get("node_type") != "group":
        return location
    names = sorted(list_arrays())
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise InvalidInputError(f"{location} is a group; name one of its arrays as {location}/NAME ({listed}).")
    return join(location, names[0])


def _checked_shape(info: store_metadata.ArrayInfo, location: Location) -> tuple[int, int]:
    if len(info.shape) != 2 or 0 in info.shape:
        raise InvalidInputError(f"{location} must hold rows and columns, and its shape is {info.shape}.")
    return info.shape[0], info.shape[1]


def _list_remote_arrays(remote: Remote) -> list[str]:
    return [name for name in remote.list_folders() if remote.size(f"{name}/{_METADATA}") is not None]


def _read_remote_metadata(remote: Remote) -> dict[str, object]:
    data = remote.read(_METADATA, 0, json_reading.MAX_JSON + 1)
    if len(data) > json_reading.MAX_JSON:
        raise InvalidInputError(
            f"{remote}/{_METADATA} has more than {json_reading.MAX_JSON} bytes, and is no metadata."
        )
    return json_reading.parse_json(data, f"{remote}/{_METADATA}")


def _read_remote_rows(remote: Remote, metadata: dict[str, object], rows: slice) -> np.ndarray:
    """Return some rows of an array in its dtype; a missing chunk has the fill value."""
    import zarr
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
    from zarr.storage import FsspecStore, StorePath

    from dkfm.storage.bounded_chunks import metadata_with_bounded_codecs

    with remote.open_filesystem("read") as (files, path):
        # Share the connection, because an asynchronous one that Zarr opens would never be closed.
        chunks = FsspecStore(AsyncFileSystemWrapper(files, asynchronous=True), read_only=True, path=path)
        array = zarr.Array(zarr.AsyncArray(metadata_with_bounded_codecs(metadata), StorePath(chunks)))
        try:
            return np.asarray(fsspec_access.retry(files, lambda: array[rows]))
        except (ValueError, RuntimeError, TypeError, EOFError, zlib.error) as error:  # invalid bytes of a chunk
            message = f"Rows {rows.start} to {rows.stop} of {remote} cannot be read: {extract_reason(error)}."
            raise InvalidInputError(message) from error


@dataclass(frozen=True)
class CsrCopySource(CsrRows):
    """CSR rows in a store that the driver writes for its workers, as three arrays with a common name."""

    location: Path
    array_prefix: str
    """Common name of the three arrays."""

    def read(self, rows: slice) -> Rows:
        """Return some rows."""
        return csr.read_csr(self.location, self.array_prefix, self.shape[1], rows)

    def is_opening_valid(self, current_stamp: str) -> bool:  # only the driver writes this store
        """Return True: no other process writes the store."""
        return True
