"""Which files these are: names, sizes and times of change, so that a job knows whether its input is still the same."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["of_path"]


def of_path(path: Path) -> str:
    """Return a digest of a file, or of every file below a folder: relative names, bytes, and times of change."""
    found = hashlib.sha256()
    for name, status in sorted(_files(path)):
        found.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return found.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    if not path.is_dir():
        yield "", path.stat()
        return
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(path / folder) as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):  # a link may lead back to where it lies
                    folders.append(f"{name}/")
                else:
                    yield name, entry.stat(follow_symlinks=entry.is_file())
