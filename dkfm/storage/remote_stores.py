"""Upload models to URLs, the marker last, and download them into a folder, where they are checked like local models.

A model that is being uploaded or replaced has no marker, so that no reader accepts it.
"""

import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dkfm.errors import (
    DamagedStoreError,
    IncompleteStoreError,
    StoreError,
    StoreExistsError,
    UnreachableError,
    UnsupportedStoreError,
)
from dkfm.files import local, temporary_folders
from dkfm.files.location import locate, parse_remote, require_writable
from dkfm.files.object_store import Remote
from dkfm.storage import json_reading, own_files, store_metadata, zarr_store
from dkfm.storage.model_store import Record, load_record, save_record

_METADATA = "zarr.json"
_copies: dict[tuple[int, str, str], Path] = {}
"""Local copies of models, by process, URL and digest."""

_lock = threading.Lock()


def save_model(path: str | Path, record: Record, *, overwrite: bool = False) -> str:
    """Write a model store at a path or a URL and return its digest.

    Raises
    ------
    InvalidInputError
        The name ends like a file of another format.
    StoreExistsError
        Something exists there; it is left untouched.
    UnreachableError
        The upload failed; files that were uploaded have no marker and can be overwritten.
    """
    require_writable(locate(path), "model")
    remote = parse_remote(path)
    if remote is None:
        return save_record(local.as_local_path(path).absolute(), record, overwrite=overwrite)
    _require_outside_stores(remote)
    _list_replaceable_files(remote, "model", overwrite)
    with _temporary_model_path() as folder, _url_in_messages(folder, remote):
        digest = save_record(folder, record)
        _upload(folder, remote, overwrite)
    return digest


def load_model(path: str | Path, *, trusted: Collection[str] = ()) -> Record:
    """Read a model store at a path or a URL, as `load_record` does."""
    with open_model_folder(path) as folder:
        return load_record(folder, trusted=trusted)


def read_store_kind(path: str | Path) -> str:
    """Return the kind of the store at a path or a URL; raise a StoreError if dkfm did not write it."""
    remote = parse_remote(path)
    if remote is None:
        return str(store_metadata.read_own_attributes(local.as_local_path(path).absolute())["kind"])
    return str(read_remote_attributes(remote)["kind"])


def require_writable_location(path: str | Path, *, overwrite: bool = False) -> None:
    """Raise an error unless a model can be written at a path or a URL.

    Parameters
    ----------
    path : str or Path
        Path or URL of the model.
    overwrite : bool, default=False
        Whether a model of dkfm may be there.

    Raises
    ------
    InvalidInputError
        The name ends like a file of another format.
    StoreExistsError
        Something exists there that is not replaced.
    """
    require_writable(locate(path), "model")
    remote = parse_remote(path)
    if remote is None and overwrite:
        zarr_store.read_replaceable_attributes(local.as_local_path(path).absolute(), "model", overwrite=True)
    elif remote is None:
        zarr_store.require_free(local.as_local_path(path).absolute())
    elif overwrite:
        _list_replaceable_files(remote, "model", overwrite)
    elif is_taken_at(remote):
        raise StoreExistsError(
            f"{remote} holds something already; choose another URL, or replace dkfm's own with overwrite=True "
            "(--overwrite)."
        )


@contextmanager
def open_model_folder(path: str | Path, digest: str | None = None, within: Path | None = None) -> Iterator[Path]:
    """Yield the folder of a model; for a URL, that of a copy which is removed when the context ends.

    The arguments are those of `get_cached_model_folder`.
    """
    remote = parse_remote(path)
    if remote is None:
        yield local.as_local_path(path).absolute()
        return
    with _temporary_model_path(within) as folder, _url_in_messages(folder, remote):
        _download(remote, folder, digest)
        yield folder


def get_cached_model_folder(path: str | Path, digest: str, within: Path | None = None) -> Path:
    """Return the folder of a model; for a URL, that of a copy that this process downloads once.

    Parameters
    ----------
    path : str or Path
        Path or URL of the model.
    digest : str
        Expected digest of the model; checked only when a copy is downloaded.
    within : Path, optional
        Folder for the copy, which is removed when this process ends; the temporary directory by default.
    """
    remote = parse_remote(path)
    if remote is None:
        return local.as_local_path(path)
    key = (os.getpid(), remote.url, digest)
    with _lock:
        if key not in _copies:
            parent = temporary_folders.TemporaryFolder("model", within)
            try:
                _download(remote, parent.path / "model", digest)
            except BaseException:
                parent.remove()
                raise
            _copies[key] = parent.path / "model"
        return _copies[key]


@contextmanager
def _temporary_model_path(within: Path | None = None) -> Iterator[Path]:
    with temporary_folders.open_temporary_folder("model", within) as folder:
        yield folder.resolve() / "model"


@contextmanager
def _url_in_messages(folder: Path, remote: Remote) -> Iterator[None]:
    """Replace the path of a folder by the URL of its model in error messages."""
    try:
        yield
    except StoreError as error:
        if str(folder) not in str(error):
            raise
        raise type(error)(str(error).replace(str(folder), remote.redacted_url)) from error


def is_taken_at(remote: Remote) -> bool:
    """Return whether an object exists at a URL or below it."""
    return remote.size() is not None or next(remote.list_objects(), None) is not None


def read_remote_attributes(remote: Remote, kind: str | None = None) -> dict[str, object]:
    """Return dkfm's own attributes of a store; raise as `store_metadata.read_own_attributes` does."""
    metadata = _read_metadata(remote)
    if metadata is not None:
        return store_metadata.parse_own_attributes(metadata, remote, kind)
    if is_taken_at(remote):
        raise UnsupportedStoreError(f"{remote}/{_METADATA} is missing, so {remote} is not a store that dkfm reads.")
    raise StoreError(f"There is nothing at {remote}.")


def _read_metadata(remote: Remote) -> dict[str, object] | None:
    most = json_reading.MAX_JSON
    metadata = _read_json(remote, _METADATA, most)
    return _read_json(remote, store_metadata.TABLE_ATTRIBUTES, most) if metadata is None else metadata


def _read_json(remote: Remote, name: str, max_bytes: int) -> dict[str, object] | None:
    size = remote.size(name)
    if size is None:
        return None
    if size > max_bytes:
        raise UnsupportedStoreError(f"{remote}/{name} has {size} bytes; metadata are below {max_bytes}.")
    return json_reading.parse_json(remote.read(name), f"{remote}/{name}")


def _require_outside_stores(remote: Remote) -> None:
    scheme, _, path = remote.url.partition("://")
    parts = path.split("/")
    for count in range(1, len(parts)):
        above = Remote(f"{scheme}://{'/'.join(parts[:count])}")
        attrs = find_own_attributes_at(above)
        if attrs:
            raise own_files.make_inside_store_error(remote, above, attrs)


def find_own_attributes_at(remote: Remote) -> dict[str, object]:
    """Return the attributes that dkfm wrote into the store at a URL, or {} if there is no valid store of dkfm."""
    try:
        metadata = _read_metadata(remote)
        return {} if metadata is None else store_metadata.parse_own_attributes(metadata, remote)
    except UnreachableError:
        raise
    except StoreError:
        return {}


def _list_replaceable_files(remote: Remote, kind: str, overwrite: bool) -> list[str]:
    """Return the names of the files to replace; none if nothing exists there. Raise if they may not be replaced."""
    if not is_taken_at(remote):
        return []
    attrs = find_own_attributes_at(remote)
    if not attrs or remote.size() is not None:
        raise own_files.make_foreign_store_error(remote)
    own_files.require_overwritable(
        remote, attrs, kind, overwrite=overwrite, is_complete=lambda: remote.size(store_metadata.MARKER) is not None
    )
    names = [name for name, _, _ in remote.list_objects()]
    own_files.require_no_foreign_file(remote, own_files.find_foreign_name(names, attrs))
    return names


def _upload(folder: Path, remote: Remote, overwrite: bool) -> None:
    """Upload a model: remove an existing marker first, and write the new one last; one of several writers succeeds."""
    create_remote_store(remote, "model", _METADATA, (folder / _METADATA).read_bytes(), overwrite)
    remote.upload_files(
        folder, [name for name in store_metadata.list_files(folder) if name not in (store_metadata.MARKER, _METADATA)]
    )
    _create_object(remote, store_metadata.MARKER, (folder / store_metadata.MARKER).read_bytes())


def create_remote_store(remote: Remote, kind: str, name: str, metadata: bytes, overwrite: bool) -> None:
    """Claim a location for a store by writing its metadata; if a store is replaced, its marker is removed first.

    Raises
    ------
    StoreExistsError
        Something else exists there, or another writer claimed it at the same moment.
    """
    _require_outside_stores(remote)
    replaced = _list_replaceable_files(remote, kind, overwrite)
    if replaced:
        last = (_METADATA, store_metadata.TABLE_ATTRIBUTES)  # they identify the other files as dkfm's
        remote.remove_objects(store_metadata.MARKER)
        remote.remove_objects(*(other for other in replaced if other not in (store_metadata.MARKER, *last)))
        remote.remove_objects(*(other for other in replaced if other in last))
    _create_object(remote, name, metadata)


def _create_object(remote: Remote, name: str, data: bytes) -> None:
    if not remote.create(name, data) and remote.read(name) != data:  # equal if only the answer to this writer was lost
        raise StoreExistsError(f"Something was written to {remote} meanwhile; no complete store is there.")


def _download(remote: Remote, folder: Path, digest: str | None = None) -> None:
    """Download a model, after a check that the store has exactly the files that its marker lists."""
    read_remote_attributes(remote, "model")
    marker = _read_json(remote, store_metadata.MARKER, store_metadata.MAX_MARKER_BYTES)
    if marker is None:
        raise IncompleteStoreError(f"{remote} has no {store_metadata.MARKER} marker: whatever wrote it did not finish.")
    if digest is not None and marker.get("digest") != digest:
        raise DamagedStoreError(
            f"{remote} holds another model than the one that was asked for: it was replaced, or it is another path."
        )
    sizes = _list_verified_sizes(remote, marker.get("files"))
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    if sum(sizes.values()) > free:
        raise StoreError(f"{remote} has {sum(sizes.values())} bytes and {folder.parent} has room for {free}.")
    temporary_folders.warn_of_large_store(folder.parent, sum(sizes.values()), f"A copy of {remote}")
    with local.translate_write_errors(folder):
        remote.download_objects(folder, sizes)


def _list_verified_sizes(remote: Remote, marker_files: object) -> dict[str, int]:
    if not isinstance(marker_files, Mapping):
        raise DamagedStoreError(f"The marker {remote}/{store_metadata.MARKER} is damaged.")
    sizes = {}
    for name, size, _ in remote.list_objects():
        if name != store_metadata.MARKER and name not in marker_files:  # stop early: there may be millions of others
            raise DamagedStoreError(f"{remote} has gained {name} since it was written; remove it.")
        sizes[name] = size
    missing = sorted({*marker_files, store_metadata.MARKER} - set(sizes))
    if missing:
        raise DamagedStoreError(f"{remote} has lost {missing[0]}.")
    return sizes
