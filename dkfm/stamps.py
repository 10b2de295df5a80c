"""Which files these are: names, sizes, and times of change or ETags, so that a job knows its input again."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["of_files", "of_path"]


def of_path(path: Path) -> str:
    """Return a digest of a file, or of every file below a folder: relative names, bytes, and times of change."""
    return of_files(sorted(_files(path)))


def of_files(files: Iterable[tuple[str, int, int | str]]) -> str:
    """Return a digest of files: names in the order given, bytes, and times of change or what stores have for them."""
    found = hashlib.sha256()
    for name, size, changed in files:
        # A name on disk may be bytes that are no text.
        found.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    if not path.is_dir():
        status = path.stat()
        yield "", status.st_size, status.st_mtime_ns
        return
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(f"{path}/{folder}") as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):  # a link may lead back to where it lies
                    folders.append(f"{name}/")
                else:
                    status = entry.stat(follow_symlinks=entry.is_file())
                    yield name, status.st_size, status.st_mtime_ns
