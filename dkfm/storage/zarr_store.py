"""Stores on disk: made beside their place and moved there whole, completed by a marker that is written last.

Every array is chunked Zarr version 3 with a checksum in each chunk and a fill value that cannot pass for data.
"""

import errno
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import google_crc32c
import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from dkfm.errors import DkfmWarning, StoreError, StoreExistsError, reason
from dkfm.files import local, temporary
from dkfm.files.local import new_file, sync_folder, translate_write_errors
from dkfm.storage import ownership, zarr_codecs, zarr_schema

if TYPE_CHECKING:
    from zarr.core.metadata import ArrayV3Metadata

Json = Mapping[str, object]
ZarrArray: TypeAlias = "zarr.Array[ArrayV3Metadata]"


@contextmanager
def new_store(
    path: Path, kind: str, attributes: Json, arrays: Iterable[str], *, overwrite: bool = False
) -> Iterator[zarr.Group]:
    """Make a store beside its place and move it there whole and durable.

    A failure leaves what was there before. A kill does too, or leaves the new store, or, in the one moment between two
    renames, both of them whole beside the path under hidden names. What a kill left unfinished beside the path goes
    when the next store is made there.

    Parameters
    ----------
    path : Path
        Where it goes; nothing may be there, unless it may be overwritten and all of it is dkfm's.
    kind : str
        A kind of `dkfm.storage.zarr_schema`.
    attributes : mapping
        Plain JSON values.
    arrays : iterable of str
        Names of all arrays that the store will ever hold: what else lies there is not dkfm's.

    Raises
    ------
    StoreExistsError
        Something is there; it is left untouched.
    StoreError
        The file system will not.
    """
    own = {**attributes, "kind": kind, "version": zarr_schema.VERSIONS[kind], "arrays": sorted(arrays)}
    json.dumps(own)  # what cannot be written is told before anything is touched
    with new_store_folder(path, kind, overwrite=overwrite) as beside:
        yield zarr.create_group(beside, zarr_format=3, attributes={"dkfm": own})


@contextmanager
def new_store_folder(path: Path, kind: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Make the folder of a store, as `new_store` does; yield where its files go meanwhile."""
    with translate_write_errors(path):
        _require_outside_stores(path)
        _require_replaceable(path, kind, overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.temporary_folder("partial", path.parent, hidden=True) as folder:
            beside = folder / local.hidden_sibling(path, "partial").name
            yield beside
            local.sync_tree(beside)
            if overwrite and is_taken(path):
                temporary.keep_after_exit(
                    folder
                )  # between two renames the new store is the only one that can be opened
                _exchange(beside, path, kind)
            else:
                _move(beside, path)
            sync_folder(path.parent)


def _exchange(beside: Path, path: Path, kind: str) -> None:
    own = _require_replaceable(path, kind, overwrite=True)
    aside = local.hidden_sibling(path, "old")
    try:
        path.rename(aside)
        beside.rename(path)
    except BaseException as error:  # Ctrl-C too
        if aside.exists() and (beside.exists() or not path.exists()):
            _bring_back(aside, path, error)
        raise
    finally:
        if path.exists() and not beside.exists():
            _remove(aside, own)


def _bring_back(aside: Path, path: Path, why: BaseException) -> None:
    try:
        aside.rename(path)
    except OSError:
        told = getattr(why, "strerror", None) or reason(why)
        raise StoreError(f"{path} could not be replaced ({told}); what was there is {aside}.") from why


def _move(beside: Path, path: Path) -> None:
    try:
        beside.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise StoreExistsError(f"{path} came to hold something meanwhile; it was left untouched.") from None
        raise


def is_taken(path: Path) -> bool:
    """Whether there is anything at a path; an empty folder is nothing."""
    if path.is_dir() and not path.is_symlink():
        return any(path.iterdir())
    return path.exists() or path.is_symlink()


def require_free(path: Path) -> None:
    """Raise a StoreExistsError where there is something already: known before hours of work, not after."""
    if is_taken(path):
        raise StoreExistsError(f"{path} holds something already; it was left untouched.")


def _require_outside_stores(path: Path) -> None:
    for parent in path.resolve().parents:
        try:
            own = zarr_schema.read_group(parent)
        except StoreError:
            continue
        ownership.refuse_inside_store(path, parent, own)


def require_own_store(path: Path) -> dict[str, object]:
    """Return the attributes of the store at a path; raise a StoreExistsError where dkfm did not write one."""
    try:
        own = zarr_schema.read_group(path)
    except StoreError:
        own = {}
    if not own or path.is_symlink():
        raise StoreExistsError(f"{path} holds something that dkfm did not write there; it was left untouched.")
    return own


def _require_replaceable(path: Path, kind: str, overwrite: bool) -> dict[str, object]:
    """Return the attributes of the store that is to be replaced, none where nothing is there."""
    if not is_taken(path):
        return {}
    own = require_own_store(path)
    marker = path / zarr_schema.MARKER
    ownership.require_own_kind(path, own, kind, overwrite=overwrite, is_complete=marker.exists)
    ownership.require_only_own(path, ownership.foreign_entry(path, own))
    return own


def remove_own_store(path: Path, kind: str) -> None:
    """Remove a store of a kind, in one step for its readers; refuse where anything in it is not dkfm's."""
    with translate_write_errors(path):
        own = _require_replaceable(path, kind, overwrite=True)
        aside = local.hidden_sibling(path, "old")
        try:
            path.rename(aside)
        finally:
            _remove(aside, own)


def _remove(aside: Path, own: Json) -> None:
    """Remove a store that was moved aside, if it was, by Ctrl-C too: nothing else would look for it there."""
    try:
        _remove_aside(aside, own)
    except BaseException:
        _remove_aside(aside, own)
        raise


def _remove_aside(aside: Path, own: Json) -> None:
    """Remove a store that was moved aside; what somebody else has put into it meanwhile stays."""
    if not aside.exists():
        return
    if ownership.foreign_entry(aside, own) is None:
        with suppress(OSError, StoreError), temporary.temporary_folder("old", aside.parent, hidden=True) as folder:
            aside.rename(folder / "store")  # a kill meanwhile leaves nothing for ever
    elif not ownership.remove_own_files(aside, own):
        message = f"{aside} is what is left of a store that was replaced: it came to hold something that is not dkfm's."
        warnings.warn(message, DkfmWarning, stacklevel=5)


def add_array(
    group: zarr.Group, name: str, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str = "float64"
) -> ZarrArray:
    """Add an array in dkfm's one layout: crc32c, no compression, every chunk written, missing ones NaN, or -1."""
    array: ZarrArray = group.create_array(
        name,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=fill_value(dtype),
        filters=None,
        serializer=BytesCodec(endian="little"),
        compressors=[Crc32cCodec()],
        config={"write_empty_chunks": True},
    )
    return array


def array_metadata(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> bytes:
    """Return the ``zarr.json`` of an array of `add_array`."""
    memory: dict[str, Buffer] = {}
    add_array(zarr.create_group(MemoryStore(memory), zarr_format=3), "array", shape, chunks, dtype)
    return memory["array/zarr.json"].to_bytes()


def fill_value(dtype: str) -> float:
    """Return what missing chunks of an array of `add_array` read as: NaN, of integers -1."""
    return -1 if dtype == "int64" else np.nan


def open_array(path: Path, name: str, mode: str = "r") -> ZarrArray:
    """Open one array of a store whose metadata have been accepted; writing keeps chunks of zeros."""
    zarr_schema.read_array(path / name)
    array: ZarrArray = zarr.open_array(path / name, mode="r" if mode == "r" else "r+", zarr_format=3)
    # What Array.with_config does, which only later versions of Zarr have.
    metadata = cast("ArrayV3Metadata", array.metadata)
    return zarr.Array(zarr.AsyncArray(metadata, array.store_path, {"write_empty_chunks": True, "order": "C"}))


def write_marker(path: Path, content: Json) -> None:
    """Write the completion marker: durable before it has its name."""
    with new_file(path / zarr_schema.MARKER, path) as new:
        new.file.write(json.dumps(content).encode())
        new.commit()


def view_bytes(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Return the bytes of a C-contiguous array, not copied."""
    return values.reshape(-1).view(np.uint8)


def write_chunk(array: Path, place: tuple[int, ...], values: npt.NDArray[np.generic]) -> int:
    """Write one chunk of an array of `add_array`, durably.

    Parameters
    ----------
    array : Path
    place : tuple of int
        Of the chunk in the grid.
    values : ndarray
        Of the array's dtype; a chunk at an end of the array is filled up with what missing ones are.

    Returns
    -------
    int
        The crc32c of the chunk's values.
    """
    info = zarr_schema.read_array(array)
    require_chunk_shape(array, info, place, values.shape)
    data = np.ascontiguousarray(values, np.dtype(info.dtype).newbyteorder("<"))
    if data.shape != info.chunks:
        data = missing_values(info, info.chunks)
        data[tuple(map(slice, values.shape))] = values
    checksum = int(google_crc32c.value(view_bytes(data)))
    with new_file(array.joinpath("c", *map(str, place)), array) as new:
        new.file.write(view_bytes(data).data)
        new.file.write(checksum.to_bytes(zarr_codecs.CRC_BYTES, "little"))
        new.commit()
    return checksum


def require_chunk_shape(
    array: Path, info: zarr_schema.ArrayInfo, place: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Raise unless the values of a chunk at a place of the grid have that shape."""
    rest = [n - at * chunk for n, at, chunk in zip(info.shape, place, info.chunks, strict=True)]
    if shape != tuple(map(min, info.chunks, rest)):
        raise AssertionError(f"Values of shape {shape} are not chunk {place} of {array}.")


def missing_values(info: zarr_schema.ArrayInfo, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """Return values that stand for missing ones of an array."""
    return np.full(shape, fill_value(info.dtype), np.dtype(info.dtype).newbyteorder("<"))


def sync_chunk(array: Path, place: tuple[int, ...]) -> None:
    """Make a chunk durable that was written by whoever, and the names that lead to it."""
    file = Path("c", *map(str, place))
    local.sync_file(array / file)
    for folder in file.parents:
        sync_folder(array / folder)
