"""Places that are read and places that are written: they must not lie in each other."""

from collections.abc import Iterable
from pathlib import Path

from dkfm.errors import InvalidInputError, StoreError
from dkfm.files.object_store import Remote, Root

__all__ = ["place_of", "require_apart", "require_outside"]


def place_of(source: object) -> Root | None:
    """Return where the rows of a source are, on this machine or on an object store; None of those in memory."""
    found: Root | None = (
        getattr(source, "path", None) or getattr(source, "place", None) or getattr(source, "root", None)
    )
    return found


def require_apart(written: Root, what: str, read: Iterable[Root | None]) -> None:
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


def require_outside(written: Root, what: str, read: Iterable[Root | None]) -> None:
    """Raise where a place that will be written is, or lies in, one that is read; it may hold one."""
    for place in read:
        whole = None if place is None else _hierarchy(place)
        if whole is not None and _is_within(written, whole):
            raise InvalidInputError(f"The {what} {written} lies in {whole}, which this job reads; choose another path.")


def _hierarchy(place: Root) -> Root:
    """Return the outermost group of Zarr's that a place is part of, or the place."""
    whole = place
    for folder in _above(place):
        if not _is_group(folder):
            break
        whole = folder
    return whole


def _above(place: Root) -> list[Root]:
    """Return the folders that a place lies in, the nearest first."""
    if isinstance(place, Path):
        return [*place.resolve().parents]
    scheme, _, path = place.url.partition("://")
    parts = path.split("/")
    return [Remote(f"{scheme}://{'/'.join(parts[:n])}") for n in range(len(parts) - 1, 1, -1)]


def _is_group(folder: Root) -> bool:
    if isinstance(folder, Path):
        return (folder / "zarr.json").is_file()
    try:
        return folder.size("zarr.json") is not None
    except StoreError:
        return False  # what may not be looked at is not what is read


def _is_within(inner: Root, outer: Root) -> bool:
    if isinstance(inner, Remote) and isinstance(outer, Remote):
        return f"{_plain(inner)}/".startswith(f"{_plain(outer)}/")
    return isinstance(inner, Path) and isinstance(outer, Path) and inner.resolve().is_relative_to(outer.resolve())


def _plain(place: Remote) -> str:
    """Return a URL without empty parts of its path; s3a and s3 are one."""
    scheme, _, path = place.url.partition("://")
    return f"{scheme.replace('s3a', 's3')}://{'/'.join(part for part in path.split('/') if part)}"
