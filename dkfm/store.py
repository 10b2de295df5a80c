"""Stores on disk: created whole in an empty place, completed by a marker that is written last and durably.

Every array is chunked Zarr version 3 with a checksum in each chunk and a fill value that cannot pass for data.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec

from dkfm import formats
from dkfm.errors import StoreError, StoreExistsError

__all__ = ["ZarrArray", "add_array", "complete", "create", "is_taken", "local_path", "open_array", "require_free"]

if TYPE_CHECKING:
    from zarr.core.metadata import ArrayV3Metadata

Json = Mapping[str, object]
ZarrArray: TypeAlias = "zarr.Array[ArrayV3Metadata]"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of this file system; a URL of another one is refused."""
    text = os.fspath(path)
    if "://" in text:
        raise StoreError(f"{text} is not on a local file system, and this version stores nowhere else.")
    return Path(text)


def create(path: Path, kind: str, attributes: Json, *, overwrite: bool = False) -> zarr.Group:
    """Create a store where there is nothing, or where dkfm's own files may be replaced.

    Raises
    ------
    StoreExistsError
        Something is there; it is left untouched.
    """
    if is_taken(path):
        _remove_own(path, kind, overwrite)
    own = {"dkfm": {**attributes, "kind": kind, "version": formats.VERSIONS[kind]}}
    try:
        return zarr.create_group(path, zarr_format=3, attributes=own)
    except OSError as error:
        raise StoreError(f"Nothing can be written at {path}: {error.strerror}.") from None


def require_free(path: Path) -> None:
    """Raise a StoreExistsError where there is something already: known before hours of work, not after."""
    if is_taken(path):
        raise StoreExistsError(f"{path} holds something already; it was left untouched.")


def is_taken(path: Path) -> bool:
    """Whether there is anything at a path; an empty folder is nothing, and so is what a killed writer left half."""
    if path.is_dir():
        return any(formats.files(path))
    return path.exists() or path.is_symlink()


def _remove_own(path: Path, kind: str, overwrite: bool) -> None:
    """Remove dkfm's own files at a path, if all are, and if told to."""
    try:
        formats.read_group(path, kind)
    except StoreError:
        raise StoreExistsError(
            f"{path} holds something that dkfm did not write there; it was left untouched."
        ) from None
    if not overwrite:
        state = "a complete" if (path / formats.MARKER).exists() else "an unfinished"
        raise StoreExistsError(
            f"{path} holds {state} dkfm {kind} store; choose another path, or replace it with overwrite."
        )
    foreign = [name for name in formats.files(path) if not formats.is_own_file(name)]
    if foreign:
        raise StoreExistsError(f"{path} holds {foreign[0]}, which dkfm did not write; it was left untouched.")
    # The marker goes first: a removal that is cut short must not look complete.
    (path / formats.MARKER).unlink(missing_ok=True)
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    for entry in path.iterdir():
        entry.unlink()


def add_array(
    group: zarr.Group, name: str, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str = "float64"
) -> ZarrArray:
    """Add an array in dkfm's one layout: no compression, crc32c, every chunk written, missing ones read as NaN."""
    array: ZarrArray = group.create_array(
        name,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=-1 if dtype == "int64" else np.nan,
        filters=None,
        serializer=BytesCodec(endian="little"),
        compressors=[Crc32cCodec()],
        config={"write_empty_chunks": True},
    )
    return array


def open_array(path: Path, name: str, mode: str = "r") -> ZarrArray:
    """Open one array of a store whose metadata have been accepted; writing keeps chunks of zeros."""
    formats.read_array(path / name)
    array: ZarrArray = zarr.open_array(path / name, mode="r" if mode == "r" else "r+", zarr_format=3)
    # What Array.with_config does, which only later versions of Zarr have.
    metadata = cast("ArrayV3Metadata", array.metadata)
    return zarr.Array(zarr.AsyncArray(metadata, array.store_path, {"write_empty_chunks": True, "order": "C"}))


def complete(path: Path, content: Json) -> None:
    """Write the completion marker: durable before it has its name."""
    temporary = path / f"{formats.MARKER}.{uuid.uuid4().hex}.partial"
    with temporary.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path / formats.MARKER)
    sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
