"""Models at URLs: made in a folder and uploaded, the marker last; downloaded into a folder, and checked there as any.

A model that is being uploaded or replaced has no marker, so that no reader takes it for one.
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
from dkfm.files import local, temporary
from dkfm.files.location import at_url
from dkfm.files.object_store import Remote
from dkfm.storage import json_documents, ownership, zarr_schema, zarr_store
from dkfm.storage.model_store import Record, load_record, save_record

_METADATA = "zarr.json"
_copies: dict[tuple[int, str, str], Path] = {}
_lock = threading.Lock()


def save_model(path: str | Path, record: Record, *, overwrite: bool = False) -> str:
    """Write a model store at a path or a URL and return its digest.

    Raises
    ------
    StoreExistsError
        Something is there; it is left untouched.
    UnreachableError
        The store at a URL did not take it; what is there has no marker, and may be overwritten.
    """
    place = at_url(path)
    if place is None:
        return save_record(local.local_path(path).absolute(), record, overwrite=overwrite)
    _require_outside_stores(place)
    _require_replaceable(place, "model", overwrite)
    with _temporary() as folder, _named(folder, place):
        digest = save_record(folder, record)
        _upload(folder, place, overwrite)
    return digest


def load_model(path: str | Path, *, trusted: Collection[str] = ()) -> Record:
    """Read a model store at a path or a URL, as `load_record` does."""
    with fetch_model(path) as folder:
        return load_record(folder, trusted=trusted)


def store_kind(path: str | Path) -> str:
    """Return what kind of store of dkfm's there is at a path or a URL."""
    place = at_url(path)
    own = zarr_schema.read_group(local.local_path(path).absolute()) if place is None else remote_attributes(place)
    return str(own["kind"])


def require_free_location(path: str | Path) -> None:
    """Raise a StoreExistsError where there is something at a path or a URL already."""
    place = at_url(path)
    if place is None:
        zarr_store.require_free(local.local_path(path).absolute())
    elif is_taken_at(place):
        raise StoreExistsError(f"{place} holds something already; it was left untouched.")


@contextmanager
def fetch_model(path: str | Path) -> Iterator[Path]:
    """Lend the folder where a model lies: its own, or that of a copy of the model at a URL."""
    place = at_url(path)
    if place is None:
        yield local.local_path(path).absolute()
        return
    with _temporary() as folder, _named(folder, place):
        _fetch(place, folder)
        yield folder


def local_copy(path: str | Path, digest: str, within: Path | None = None) -> Path:
    """Return the folder where a model lies: its own, or a copy that this process made once of the one at a URL.

    Parameters
    ----------
    path : str or Path
    digest : str
        Of the model that is meant.
    within : Path, optional
        Where the copy is made; it is removed when this process ends.
    """
    place = at_url(path)
    if place is None:
        return local.local_path(path)
    key = (os.getpid(), place.url, digest)
    with _lock:
        if key not in _copies:
            above = temporary.TemporaryFolder("model", within)
            try:
                _fetch(place, above.path / "model", digest)
            except BaseException:
                above.remove()
                raise
            _copies[key] = above.path / "model"
        return _copies[key]


@contextmanager
def _temporary() -> Iterator[Path]:
    with temporary.temporary_folder("model") as folder:
        yield folder.resolve() / "model"


@contextmanager
def _named(folder: Path, place: Remote) -> Iterator[None]:
    """Say the URL where a message says the folder."""
    try:
        yield
    except StoreError as error:
        if str(folder) not in str(error):
            raise
        raise type(error)(str(error).replace(str(folder), place.name)) from error


def is_taken_at(place: Remote) -> bool:
    """Whether there is anything at a URL."""
    return place.size() is not None or next(place.list_objects(), None) is not None


def remote_attributes(place: Remote, kind: str | None = None) -> dict[str, object]:
    """Return dkfm's own attributes of a store; raise as `formats.read_group` does."""
    metadata = _described(place)
    if metadata is not None:
        return zarr_schema.group_attributes(metadata, place, kind)
    if is_taken_at(place):
        raise UnsupportedStoreError(f"{place}/{_METADATA} is missing, so {place} is not a store that dkfm reads.")
    raise StoreError(f"{place} is not a store: nothing is there.")


def _described(place: Remote) -> dict[str, object] | None:
    metadata = _json(place, _METADATA)
    return _json(place, zarr_schema.TABLE) if metadata is None else metadata


def _json(place: Remote, name: str) -> dict[str, object] | None:
    size = place.size(name)
    if size is None:
        return None
    if size > json_documents.MAX_JSON:
        raise UnsupportedStoreError(f"{place}/{name} has {size} bytes; metadata are below {json_documents.MAX_JSON}.")
    return json_documents.parse_json(place.read(name), f"{place}/{name}")


def _require_outside_stores(place: Remote) -> None:
    scheme, _, path = place.url.partition("://")
    parts = path.split("/")
    for last in range(1, len(parts)):
        above = Remote(f"{scheme}://{'/'.join(parts[:last])}")
        own = own_attributes_at(above)
        if own:
            ownership.refuse_inside_store(place, above, own)


def own_attributes_at(place: Remote) -> dict[str, object]:
    """Return dkfm's own attributes, none where it is no store of dkfm's."""
    try:
        metadata = _described(place)
        return {} if metadata is None else zarr_schema.group_attributes(metadata, place)
    except UnreachableError:
        raise
    except StoreError:
        return {}


def _require_replaceable(place: Remote, kind: str, overwrite: bool) -> list[str]:
    """Return the files that are to be replaced, none where nothing is there."""
    if not is_taken_at(place):
        return []
    own = own_attributes_at(place)
    if not own or place.size() is not None:
        raise StoreExistsError(f"{place} holds something that dkfm did not write there; it was left untouched.")
    ownership.require_own_kind(
        place, own, kind, overwrite=overwrite, is_complete=lambda: place.size(zarr_schema.MARKER) is not None
    )
    names = [name for name, _, _ in place.list_objects()]
    ownership.require_only_own(place, ownership.foreign_name(names, own))
    return names


def _upload(folder: Path, place: Remote, overwrite: bool) -> None:
    """Take the marker away first, and write it last; one writer of several wins the place."""
    claim(place, "model", _METADATA, (folder / _METADATA).read_bytes(), overwrite)
    place.upload(
        folder, [name for name in zarr_schema.list_files(folder) if name not in (zarr_schema.MARKER, _METADATA)]
    )
    _write_once(place, zarr_schema.MARKER, (folder / zarr_schema.MARKER).read_bytes())


def claim(place: Remote, kind: str, name: str, metadata: bytes, overwrite: bool) -> None:
    """Claim a place for a store with its metadata; what is replaced loses its marker first.

    Raises
    ------
    StoreExistsError
        Something else is there, or was claimed at the same moment.
    """
    _require_outside_stores(place)
    old = _require_replaceable(place, kind, overwrite)
    if old:
        ends = (zarr_schema.MARKER, _METADATA, zarr_schema.TABLE)
        place.remove(zarr_schema.MARKER)
        place.remove(*(other for other in old if other not in ends))
        place.remove(
            *(other for other in old if other in (_METADATA, zarr_schema.TABLE))
        )  # they say whose files these are
    _write_once(place, name, metadata)


def _write_once(place: Remote, name: str, data: bytes) -> None:
    if not place.create(name, data) and place.read(name) != data:  # equal: this one's own, whose answer was lost
        raise StoreExistsError(f"{place} came to hold something meanwhile; nothing of it is complete.")


def _fetch(place: Remote, folder: Path, digest: str | None = None) -> None:
    """Download what the marker of a model lists, once the store is seen to hold that and nothing else."""
    remote_attributes(place, "model")
    marker = _json(place, zarr_schema.MARKER)
    if marker is None:
        raise IncompleteStoreError(f"{place} has no {zarr_schema.MARKER} marker: whatever wrote it did not finish.")
    if digest is not None and marker.get("digest") != digest:
        raise DamagedStoreError(f"{place} holds another model than the one that was asked for; it was replaced.")
    sizes = _sizes(place, marker.get("files"))
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    if sum(sizes.values()) > free:
        raise StoreError(f"{place} has {sum(sizes.values())} bytes and {folder.parent} has room for {free}.")
    temporary.warn_of_large_store(folder.parent, sum(sizes.values()), f"A copy of {place}")
    with local.translate_write_errors(folder):
        place.download(folder, sizes)


def _sizes(place: Remote, listed: object) -> dict[str, int]:
    if not isinstance(listed, Mapping):
        raise DamagedStoreError(f"The marker {place}/{zarr_schema.MARKER} is damaged.")
    sizes = {}
    for name, size, _ in place.list_objects():
        if name != zarr_schema.MARKER and name not in listed:  # before any more are counted: there may be millions
            raise DamagedStoreError(f"{place} has lost or gained {name} since it was written.")
        sizes[name] = size
    lost = sorted({*listed, zarr_schema.MARKER} - set(sizes))
    if lost:
        raise DamagedStoreError(f"{place} has lost or gained {lost[0]} since it was written.")
    return sizes
