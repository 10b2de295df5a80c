"""Locations: a path of this file system, or a place on an object store; nothing else asks which of the two one is."""

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from dkfm.errors import InvalidInputError, StoreError
from dkfm.files import change_detection
from dkfm.files.local import local_path, open_plain
from dkfm.files.object_store import Remote, open_file

Location: TypeAlias = Path | Remote
"""A file or folder of this file system, or an object or prefix on an object store."""


def at_url(path: object) -> "Remote | None":
    """Return the place that a URL names; None for a path of this file system.

    >>> at_url("s3://bucket/model").join("zarr.json"), at_url("model")
    (Remote('s3://bucket/model/zarr.json'), None)
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return Remote(str(text).rstrip("/")) if "://" in str(text) else None


def locate(path: object) -> Location:
    """Return the location that a path or a URL names; a path is made absolute.

    Raises
    ------
    StoreError
        It is neither.
    """
    place = at_url(path)
    return local_path(path).absolute() if place is None else place  # type: ignore[arg-type]  # it refuses what is no path


def is_remote(location: Location) -> bool:
    """Whether each read is a request to an object store."""
    return isinstance(location, Remote)


def join(location: Location, name: str) -> Location:
    """Return the location of a name below another one."""
    return location.join(name) if isinstance(location, Remote) else location / name


def open_location(location: Location, size: int | None = None) -> io.RawIOBase | io.BufferedReader:
    """Open a file to be read, or an object, of which no more is asked for than is read; its bytes may be known."""
    return open_file(location, size).detach() if isinstance(location, Remote) else open_plain(location)


def open_unbuffered(location: Location, size: int | None = None) -> io.RawIOBase:
    """Open a file or an object to be read; no more is read than is asked for."""
    opened = open_location(location, size)
    return opened.detach() if isinstance(opened, io.BufferedReader) else opened


def status(location: Location) -> tuple[int, int | str]:
    """Return the bytes of a file or an object, and its time of change or ETag.

    Raises
    ------
    OSError, InvalidInputError
        There is none.
    """
    if isinstance(location, Path):
        found = location.stat()
        return found.st_size, change_detection.time_of_change(found, exact=False)
    known = location.status()
    if known is None:
        raise InvalidInputError(f"There is no {location}.")
    return known


def stamp(location: Location) -> str:
    """Return a digest of names, sizes, and times of change or ETags: of a file or an object, or of all below."""
    return change_detection.digest_path(location) if isinstance(location, Path) else location.stamp()


def state(location: Location) -> str:
    """Return a digest that no writer can bring back; the stamp on an object store."""
    return change_detection.digest_path(location, exact=True) if isinstance(location, Path) else location.stamp()


def require_apart(written: Location, what: str, read: Iterable[Location | None]) -> None:
    """Raise where a place that will be written is, holds, or lies in one that is read.

    Links are followed. What is read of a Zarr hierarchy is all of it.

    Parameters
    ----------
    written : Path or Remote
    what : str
        What messages call it, as "output".
    read : iterable of Path, Remote or None
    """
    places = [place for place in read if place is not None]
    for place in places:
        if _is_within(place, written):
            raise InvalidInputError(f"The {what} {written} would replace {place}, which this job reads.")
    require_outside(written, what, places)


def require_outside(written: Location, what: str, read: Iterable[Location | None]) -> None:
    """Raise where a place that will be written is, or lies in, one that is read; it may hold one."""
    for place in read:
        whole = None if place is None else _hierarchy(place)
        if whole is not None and _is_within(written, whole):
            raise InvalidInputError(f"The {what} {written} lies in {whole}, which this job reads; choose another path.")


def _hierarchy(place: Location) -> Location:
    """Return the outermost group of Zarr's that a place is part of, or the place."""
    whole = place
    for folder in _above(place):
        if not _is_group(folder):
            break
        whole = folder
    return whole


def _above(place: Location) -> list[Location]:
    """Return the folders that a place lies in, the nearest first."""
    if isinstance(place, Path):
        return [*place.resolve().parents]
    scheme, _, path = place.url.partition("://")
    parts = path.split("/")
    return [Remote(f"{scheme}://{'/'.join(parts[:n])}") for n in range(len(parts) - 1, 1, -1)]


def _is_group(folder: Location) -> bool:
    if isinstance(folder, Path):
        return (folder / "zarr.json").is_file()
    try:
        return folder.size("zarr.json") is not None
    except StoreError:
        return False  # what may not be looked at is not what is read


def _is_within(inner: Location, outer: Location) -> bool:
    if isinstance(inner, Remote) and isinstance(outer, Remote):
        return f"{_plain(inner)}/".startswith(f"{_plain(outer)}/")
    return isinstance(inner, Path) and isinstance(outer, Path) and inner.resolve().is_relative_to(outer.resolve())


def _plain(place: Remote) -> str:
    """Return a URL without empty parts of its path; s3a and s3 are one."""
    scheme, _, path = place.url.partition("://")
    return f"{scheme.replace('s3a', 's3')}://{'/'.join(part for part in path.split('/') if part)}"
