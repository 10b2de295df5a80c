"""Handle paths of this file system and URLs of object stores in one way."""

import io
import os
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import TypeAlias

from dkfm.errors import InvalidInputError, StoreError
from dkfm.files.change_detection import digest_path_stats, get_stamp_times
from dkfm.files.local import as_local_path, open_plain
from dkfm.files.object_store import Remote, open_file

Location: TypeAlias = Path | Remote
"""A file or folder of this file system, or an object or prefix on an object store."""

_PARQUET = ".parquet"

_OTHER_FORMATS = frozenset(
    (
        *(".npy", ".npz", ".mat", ".h5", ".hdf5", ".nc", ".pkl", ".pickle", ".joblib"),
        *(".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson", ".html", ".xlsx", ".yaml", ".yml"),
        *(_PARQUET, ".pq", ".feather", ".arrow", ".ipc", ".orc", ".avro", ".db", ".sqlite"),
        *(".zip", ".tar", ".gz", ".bz2", ".xz", ".zst"),
    )
)
"""Suffixes, in lower case, of formats other than Zarr."""


def parse_remote(path: object) -> "Remote | None":
    """Return the remote location of a URL; None for a path of this file system.

    >>> parse_remote("s3://bucket/model").join("zarr.json"), parse_remote("model")
    (Remote('s3://bucket/model/zarr.json'), None)
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return Remote(str(text).rstrip("/")) if "://" in str(text) else None


def locate(path: object) -> Location:
    """Return the location of a path or a URL; a path is made absolute, without ``..`` unless it follows a link.

    Raises
    ------
    StoreError
        It is neither a path nor a URL.
    """
    remote = parse_remote(path)
    if remote is not None:
        return remote
    given = as_local_path(path).absolute()  # type: ignore[arg-type]  # it refuses other types
    normal = os.path.normpath(given)
    is_same = ".." in given.parts and os.path.realpath(normal) == os.path.realpath(given)
    return Path(normal) if is_same else given


def is_remote(location: Location) -> bool:
    """Return whether a location is on an object store, where each read is a request."""
    return isinstance(location, Remote)


def join(location: Location, name: str) -> Location:
    """Return the location of a name below another one."""
    return location.join(name) if isinstance(location, Remote) else location / name


def open_location(location: Location, size: int | None = None) -> io.RawIOBase | io.BufferedReader:
    """Open a file or an object for reading; `size`, if known, saves a request for the size of an object."""
    return open_file(location, size).detach() if isinstance(location, Remote) else open_plain(location)


def open_unbuffered(location: Location, size: int | None = None) -> io.RawIOBase:
    """Open a file or an object for unbuffered reading."""
    opened = open_location(location, size)
    return opened.detach() if isinstance(opened, io.BufferedReader) else opened


def read_size_and_stamp(location: Location) -> tuple[int, int | str]:
    """Return the size of a file or an object in bytes, and its mtime in ns or its ETag.

    Raises
    ------
    OSError, InvalidInputError
        It does not exist.
    """
    if isinstance(location, Path):
        stat = location.stat()
        return stat.st_size, get_stamp_times(stat, include_ctime=False)
    remote = location.read_size_and_stamp()
    if remote is None:
        raise InvalidInputError(f"There is no {location}.")
    return remote


def stamp(location: Location, *, include_ctime: bool = False) -> str:
    """Return the stamp of a file or an object, or of all files below a location; if `include_ctime`, the state.

    `change_detection` describes both; on an object store they are the same.
    """
    if isinstance(location, Path):
        return digest_path_stats(location, include_ctime=include_ctime)
    return location.compute_tree_stamp()


def require_writable(written: Location, what: str, *, allow_parquet: bool = False) -> None:
    """Raise if a store to write has the suffix of another format, or is on a file system where none can be written.

    Parameters
    ----------
    written : Path or Remote
        Location that will be written.
    what : str
        Name of `written` in messages, as "output".
    allow_parquet : bool
        Whether a name that ends in ``.parquet`` stands for a folder of Parquet files.

    Raises
    ------
    InvalidInputError
        The suffix is that of another format.
    StoreError
        The file system lets no single writer win.

    Examples
    --------
    >>> require_writable(Path("scores.zarr"), "output")
    >>> require_writable(Path("model.pkl"), "model")
    Traceback (most recent call last):
    dkfm.errors.InvalidInputError: The model model.pkl cannot be a .pkl file; dkfm writes Zarr: name it model.zarr.
    """
    if isinstance(written, Remote):
        written.require_exclusive_creation()
    suffix, name = PurePath(str(written)).suffix, PurePath(str(written)).stem
    if suffix.lower() not in _OTHER_FORMATS or (allow_parquet and suffix == _PARQUET):
        return
    forms = f"Zarr: name it {name}.zarr"
    if allow_parquet:
        forms = f"Zarr (name it {name}.zarr, or as you like) or Parquet (name it {name}{_PARQUET})"
    raise InvalidInputError(f"The {what} {written} cannot be a {suffix} file; dkfm writes {forms}.")


def require_disjoint(written: Location, what: str, read_locations: Iterable[Location | None]) -> None:
    """Raise an InvalidInputError if a location to write equals, contains, or lies in a location that is read.

    Links are followed. An array of a Zarr hierarchy stands for the whole hierarchy.

    Parameters
    ----------
    written : Path or Remote
        Location that will be written.
    what : str
        Name of `written` in messages, as "output".
    read_locations : iterable of Path, Remote or None
        Locations that are read.
    """
    inputs = [location for location in read_locations if location is not None]
    for location in inputs:
        if _is_within(location, written):
            raise InvalidInputError(f"The {what} {written} would replace {location}, which this job reads.")
    require_not_inside(written, what, inputs)


def require_not_inside(written: Location, what: str, read_locations: Iterable[Location | None]) -> None:
    """Raise an InvalidInputError if a location to write equals, or lies in, a location that is read."""
    for location in read_locations:
        root = None if location is None else _outermost_group(location)
        if root is not None and _is_within(written, root):
            raise InvalidInputError(f"The {what} {written} lies in {root}, which this job reads; choose another path.")


def _outermost_group(location: Location) -> Location:
    """Return the outermost Zarr group that contains a location, or the location itself."""
    outermost = location
    for folder in _parents(location):
        if not _is_group(folder):
            break
        outermost = folder
    return outermost


def _parents(location: Location) -> list[Location]:
    """Return the folders that contain a location, innermost first."""
    if isinstance(location, Path):
        return [*location.resolve().parents]
    scheme, _, path = location.url.partition("://")
    parts = path.split("/")
    return [Remote(f"{scheme}://{'/'.join(parts[:n])}") for n in range(len(parts) - 1, 1, -1)]


def _is_group(folder: Location) -> bool:
    if isinstance(folder, Path):
        return (folder / "zarr.json").is_file()
    try:
        return folder.size("zarr.json") is not None
    except StoreError:
        return False  # a prefix without permission to read is not part of the input


def _is_within(inner: Location, outer: Location) -> bool:
    if isinstance(inner, Remote) and isinstance(outer, Remote):
        return f"{_normalize_url(inner)}/".startswith(f"{_normalize_url(outer)}/")
    return isinstance(inner, Path) and isinstance(outer, Path) and inner.resolve().is_relative_to(outer.resolve())


def _normalize_url(remote: Remote) -> str:
    """Return a URL without empty parts of its path, and with s3 for s3a."""
    scheme, _, path = remote.url.partition("://")
    return f"{scheme.replace('s3a', 's3')}://{'/'.join(part for part in path.split('/') if part)}"
