"""Which files these are, and whether they are still as they were.

A stamp is a digest of names, sizes and times of change, or ETags. It names an input: a later run compares it with the
one that an output is of. A copy that keeps the times has the same stamp, on this machine or on a worker's disk.

The state of files has their times of status change (ctime) too, which no program sets back as `cp -p` and `rsync -t`
set back the other. It tells whether an input stayed as it was while it was read, and is compared between processes that
see the same files: a copy has another one. A `Watch` also holds the file or the folder open, so that another one in its
place is noticed by its inode. Inodes are not part of the state: some network file systems number a file anew once
nobody has it open. On object stores the state is the stamp.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dkfm.errors import InvalidInputError


def digest_path(path: Path, *, exact: bool = False) -> str:
    """Return a digest of a file, or of every file below a folder: their stamp, or, if `exact`, their state."""
    return digest_files(sorted(_files(path, exact)))


def digest_files(files: Iterable[tuple[str, int, int | str]]) -> str:
    """Return a digest of files: names in the order given, bytes, and times of change or what stores have for them."""
    found = hashlib.sha256()
    for name, size, changed in files:
        # A name on disk may be bytes that are no text.
        found.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def time_of_change(status: os.stat_result, exact: bool) -> int | str:
    """Return when a file changed, as a stamp has it; as a state has it, the time of its last status change too."""
    return f"{status.st_mtime_ns} {status.st_ctime_ns}" if exact else status.st_mtime_ns


def _files(path: Path, exact: bool) -> Iterator[tuple[str, int, int | str]]:
    if not path.is_dir():
        status = path.stat()
        yield "", status.st_size, time_of_change(status, exact)
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
                    yield name, status.st_size, time_of_change(status, exact)


class Stamped(Protocol):
    """Rows that know their state."""

    @property
    def name(self) -> str:
        """What messages call them."""

    @property
    def location(self) -> object:
        """Where they are: a path, where this file system has them."""

    def state(self) -> str:
        """Return what is another text once anything was written."""


@dataclass(frozen=True)
class Watch:
    """Rows, and their state when the watch began."""

    source: Stamped
    state: str
    path: Path | None
    held: int | None
    """The descriptor of what was at the path then."""

    def require_same(self, verb: str, remedy: str) -> None:
        """Raise an InvalidInputError where anything was written to the rows since, or others are in their place."""
        if not self.is_same():
            raise InvalidInputError(
                f"{self.source.name} changed while it was {verb}, so that the result may be of two inputs; {remedy}."
            )

    def is_same(self) -> bool:
        """Whether nothing was written to the rows since, nor to their modes or links, and they are in their place."""
        try:
            moved = (
                self.path is not None
                and self.held is not None
                and not os.path.samestat(os.fstat(self.held), self.path.stat())
            )
            return not moved and self.source.state() == self.state
        except OSError:
            return False


@contextmanager
def watch(source: Stamped) -> Iterator[Watch]:
    """Watch rows, those of a file or a folder by their `path`, from now on."""
    path = source.location if isinstance(source.location, Path) else None
    held = None
    try:
        if path is not None:
            held = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        yield Watch(source, source.state(), path, held)
    finally:
        if held is not None:
            os.close(held)
