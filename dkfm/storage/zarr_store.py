"""Create stores atomically: write to a hidden folder beside the path, write the marker last, and rename the folder.

Every array is chunked Zarr version 3 with a checksum in each chunk and a fill value that no valid value equals. Zarr is
imported in the functions that call it, because a job reads its model and writes its scores without Zarr.
"""

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import google_crc32c
import numpy as np
import numpy.typing as npt

from dkfm.errors import StoreError, StoreExistsError, extract_reason, warn_caller
from dkfm.files import local, temporary_folders
from dkfm.files.local import new_file, sync_folder, translate_write_errors
from dkfm.storage import array_metadata_checks, own_files, store_metadata

if TYPE_CHECKING:
    import zarr
    from zarr.core.metadata import ArrayV3Metadata

Json = Mapping[str, object]
ZarrArray: TypeAlias = "zarr.Array[ArrayV3Metadata]"


@contextmanager
def new_store(
    path: Path, kind: str, attributes: Json, arrays: Iterable[str], *, overwrite: bool = False
) -> Iterator["zarr.Group"]:
    """Create a store beside its path, sync it to disk, and rename it to the path when the context ends.

    An earlier store is first renamed to a hidden name. After a failure, it is back at the path. After a kill, the path
    has the earlier or the new store, or neither: a kill between the two renames leaves both complete, under hidden
    names. Unfinished files that a kill leaves beside the path are removed when the next store is created there.

    Parameters
    ----------
    path : Path
        Path of the store; nothing may exist there, except with `overwrite` a store with only dkfm's files.
    kind : str
        Kind of the store: a key of `dkfm.storage.store_metadata.VERSIONS`.
    attributes : mapping
        Attributes of the store, as plain JSON values.
    arrays : iterable of str
        Names of all arrays that the store will ever contain; other files in it are not dkfm's.
    overwrite : bool
        Whether to replace a store of the same kind.

    Raises
    ------
    StoreExistsError
        Something exists at the path; it is left untouched.
    StoreError
        The file system refuses to write.
    """
    import zarr

    own = {**attributes, "kind": kind, "version": store_metadata.VERSIONS[kind], "arrays": sorted(arrays)}
    json.dumps(own)  # raises for invalid attributes before anything is changed
    with new_store_folder(path, kind, overwrite=overwrite) as partial:
        yield zarr.create_group(partial, zarr_format=3, attributes={"dkfm": own})


@contextmanager
def new_store_folder(path: Path, kind: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden path for a store's files; sync them and rename it to `path`, as `new_store` does."""
    with translate_write_errors(path):
        _require_outside_stores(path)
        read_replaceable_attributes(path, kind, overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folders.open_temporary_folder("partial", path.parent, hidden=True) as folder:
            partial = folder / local.hidden_sibling(path, "partial").name
            yield partial
            local.sync_tree(partial)
            if overwrite and is_taken(path):
                temporary_folders.remove_owner_record(folder)  # between the two renames, no other store can be opened
                _replace_store(partial, path, kind)
            else:
                _rename_new_store(partial, path)
            sync_folder(path.parent)


def _replace_store(partial: Path, path: Path, kind: str) -> None:
    attrs = read_replaceable_attributes(path, kind, overwrite=True)
    aside = local.hidden_sibling(path, "old")
    try:
        path.rename(aside)
        partial.rename(path)
    except BaseException as error:  # Ctrl-C too
        if aside.exists() and (partial.exists() or not path.exists()):
            _restore(aside, path, error)
        raise
    finally:
        if path.exists() and not partial.exists():
            _sync_replacement(path, aside)
            _remove_renamed_store(aside, attrs)


def _sync_replacement(path: Path, aside: Path) -> None:
    """Sync the folder of a store that has replaced an earlier one, which must stay if that fails."""
    try:
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or extract_reason(error)
        raise StoreError(f"{path} may not be on the disk ({reason}); the earlier store is {aside}.") from error


def _restore(aside: Path, path: Path, cause: BaseException) -> None:
    try:
        aside.rename(path)
    except OSError:
        message = getattr(cause, "strerror", None) or extract_reason(cause)
        raise StoreError(f"{path} could not be replaced ({message}); the earlier store is {aside}.") from cause


def _rename_new_store(partial: Path, path: Path) -> None:
    try:
        partial.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise StoreExistsError(f"Something was written to {path} meanwhile; it was left untouched.") from None
        raise


def is_taken(path: Path) -> bool:
    """Return whether anything except an empty folder exists at a path."""
    if path.is_dir() and not path.is_symlink():
        return any(path.iterdir())
    return path.exists() or path.is_symlink()


def require_free(path: Path) -> None:
    """Raise a StoreExistsError if something exists at a path; callers check this before hours of work, not after."""
    if is_taken(path):
        raise StoreExistsError(
            f"{path} holds something already; choose another path, or replace dkfm's own with overwrite=True "
            "(--overwrite)."
        )


def _require_outside_stores(path: Path) -> None:
    for parent in path.resolve().parents:
        try:
            attrs = store_metadata.read_own_attributes(parent)
        except StoreError:
            continue
        raise own_files.make_inside_store_error(path, parent, attrs)


def require_own_attributes(path: Path) -> dict[str, object]:
    """Return the attributes of the store at a path; raise a StoreExistsError if dkfm did not write one there."""
    if path.is_symlink():
        raise StoreExistsError(f"{path} is a link, which was left untouched; give the path that it points to.")
    try:
        attrs = store_metadata.read_own_attributes(path)
    except StoreError:
        attrs = {}
    if not attrs:
        raise own_files.make_foreign_store_error(path)
    return attrs


def read_replaceable_attributes(path: Path, kind: str, overwrite: bool) -> dict[str, object]:
    """Return the attributes of the store to replace; none if nothing exists. Raise if it may not be replaced."""
    if not is_taken(path):
        return {}
    attrs = require_own_attributes(path)
    marker = path / store_metadata.MARKER
    own_files.require_overwritable(path, attrs, kind, overwrite=overwrite, is_complete=marker.exists)
    own_files.require_no_foreign_file(path, own_files.find_foreign_entry(path, attrs))
    return attrs


def remove_own_store(path: Path, kind: str) -> None:
    """Remove a store of a kind, atomically for its readers; raise if it contains files that are not dkfm's."""
    with translate_write_errors(path):
        attrs = read_replaceable_attributes(path, kind, overwrite=True)
        aside = local.hidden_sibling(path, "old")
        try:
            path.rename(aside)
        finally:
            _remove_renamed_store(aside, attrs)


def _remove_renamed_store(aside: Path, attrs: Json) -> None:
    """Remove a renamed store, even after Ctrl-C, because no later run would find it under its hidden name."""
    try:
        _try_remove_renamed_store(aside, attrs)
    except BaseException:
        _try_remove_renamed_store(aside, attrs)
        raise


def _try_remove_renamed_store(aside: Path, attrs: Json) -> None:
    """Remove a store that was renamed, if it exists; files that others have written to it meanwhile are kept."""
    if not aside.exists():
        return
    if own_files.find_foreign_entry(aside, attrs) is None:
        with (
            suppress(OSError, StoreError),
            temporary_folders.open_temporary_folder("old", aside.parent, hidden=True) as folder,
        ):
            aside.rename(folder / "store")  # a folder that a kill leaves is swept later
    elif not own_files.remove_own_files(aside, attrs):
        message = f"{aside} is what is left of a store that was replaced: it came to hold something that is not dkfm's."
        warn_caller(message)


def add_array(
    group: "zarr.Group",
    name: str,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: str = "float64",
    dimension_names: tuple[str, ...] | None = None,
) -> ZarrArray:
    """Add an array in dkfm's layout: crc32c, no compression, every chunk written, and the fill value of its dtype."""
    from zarr.codecs import BytesCodec, Crc32cCodec, VLenUTF8Codec

    array: ZarrArray = group.create_array(
        name,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=fill_value(dtype),
        filters=None,
        serializer=VLenUTF8Codec() if dtype == "string" else BytesCodec(endian="little"),
        compressors=[Crc32cCodec()],
        config={"write_empty_chunks": True},
        dimension_names=dimension_names,
    )
    return array


@lru_cache(maxsize=16)
def encode_array_metadata(
    shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str, dimension_names: tuple[str, ...]
) -> bytes:
    """Return the content of ``zarr.json`` for an array of `add_array`."""
    codec, settings = ("vlen-utf8", {}) if dtype == "string" else ("bytes", {"endian": "little"})
    metadata = {
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": store_metadata.FILL_VALUES[dtype],
        "codecs": [{"name": codec, "configuration": settings}, {"name": "crc32c"}],
        "attributes": {},
        "dimension_names": dimension_names,
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }
    return json.dumps(metadata, indent=2).encode()


def fill_value(dtype: str) -> float | str:
    """Return the fill value of an array of dkfm's: NaN, -1 for integers, or no text."""
    fill = store_metadata.FILL_VALUES[dtype]
    return np.nan if fill == "NaN" else fill


def open_array(path: Path, name: str, mode: str = "r") -> ZarrArray:
    """Check the metadata of an array of a store, and open it; chunks that hold only fill values are written too."""
    import zarr

    store_metadata.read_array_info(path / name)
    array: ZarrArray = zarr.open_array(path / name, mode="r" if mode == "r" else "r+", zarr_format=3)
    # The same as Array.with_config, which only later versions of Zarr have.
    metadata = cast("ArrayV3Metadata", array.metadata)
    return zarr.Array(zarr.AsyncArray(metadata, array.store_path, {"write_empty_chunks": True, "order": "C"}))


def write_completion_marker(path: Path, content: Json) -> None:
    """Write the completion marker durably and atomically."""
    with new_file(path / store_metadata.MARKER, path) as new:
        new.file.write(json.dumps(content).encode())
        new.commit()


def view_as_uint8(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Return the bytes of a C-contiguous array as a view."""
    return values.reshape(-1).view(np.uint8)


def write_chunk(array: Path, index: tuple[int, ...], values: npt.NDArray[np.generic]) -> None:
    """Write one chunk of an array of `add_array` durably.

    `index` is the position of the chunk in the grid. A chunk at the end of the array is padded with the fill value.
    """
    info = store_metadata.read_array_info(array)
    rest = [n - i * chunk for n, i, chunk in zip(info.shape, index, info.chunks, strict=True)]
    if values.shape != tuple(map(min, info.chunks, rest)):
        raise AssertionError(f"Values of shape {values.shape} are not chunk {index} of {array}.")
    dtype = np.dtype(info.dtype_name).newbyteorder("<")
    data = np.ascontiguousarray(values, dtype)
    if data.shape != info.chunks:
        data = np.full(info.chunks, fill_value(info.dtype_name), dtype)
        data[tuple(map(slice, values.shape))] = values
    checksum = int(google_crc32c.value(view_as_uint8(data)))
    with new_file(array.joinpath("c", *map(str, index)), array) as new:
        new.file.write(view_as_uint8(data).data)
        new.file.write(checksum.to_bytes(array_metadata_checks.CRC_BYTES, "little"))
        new.commit()


def sync_chunk(array: Path, index: tuple[int, ...]) -> None:
    """Flush a chunk, whichever process wrote it, and the entries of its folders to disk."""
    file = Path("c", *map(str, index))
    local.sync_file(array / file)
    for folder in file.parents:
        sync_folder(array / folder)
