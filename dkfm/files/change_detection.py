"""Identify input files, and detect whether they change while they are read.

The stamp of files is a digest of their names, sizes and times of change, or ETags. It identifies an input: a later run
compares it with the stamp in an output. A copy that keeps the times has the same stamp, here or on a worker's disk.

The state of files (`stamp` with `include_ctime`) also includes their times of status change (ctime), which programs
cannot set back as `cp -p` and `rsync -t` do with times of change. The state shows whether an input changed while it was
read. Only processes that see the same files can compare it: a copy has another state. A `Watch` also holds the file or
folder open, so that a replacement is detected by its inode. Inodes are not part of the state, because some network file
systems give a file a new one when no process has it open. On object stores the state is the stamp.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dkfm.errors import DkfmError, InvalidInputError


def digest_path_stats(path: Path, *, include_ctime: bool = False) -> str:
    """Return the stamp, or if `include_ctime` the state, of a file or of all files below a folder."""
    return digest_file_stats(sorted(_list_file_stats(path, include_ctime)))


def digest_file_stats(files: Iterable[tuple[str, int, int | str]]) -> str:
    """Return a digest of names, sizes in bytes, and times or ETags of files, in the given order."""
    digest = hashlib.sha256()
    for name, size, changed in files:
        # A name on disk may contain bytes that are not valid UTF-8.
        digest.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def get_stamp_times(status: os.stat_result, include_ctime: bool) -> int | str:
    """Return the mtime of a file in ns; if `include_ctime`, the text "mtime ctime" instead."""
    return f"{status.st_mtime_ns} {status.st_ctime_ns}" if include_ctime else status.st_mtime_ns


def _list_file_stats(path: Path, include_ctime: bool) -> Iterator[tuple[str, int, int | str]]:
    if not path.is_dir():
        status = path.stat()
        yield "", status.st_size, get_stamp_times(status, include_ctime)
        return
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(f"{path}/{folder}") as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):  # a link may lead to a folder that contains it
                    folders.append(f"{name}/")
                else:
                    status = entry.stat(follow_symlinks=entry.is_file())
                    yield name, status.st_size, get_stamp_times(status, include_ctime)


class WatchedInput(Protocol):
    """Input with a name, a location and a state."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def location(self) -> object:
        """Path of the input, if it is on this file system."""

    def stamp(self, *, include_ctime: bool = False) -> str:
        """Return a digest; if `include_ctime`, one that changes whenever anything is written to the input."""


@dataclass(frozen=True)
class Watch:
    """An input and its state when the watch began."""

    source: WatchedInput
    """The input."""
    stamp_with_ctime: str
    """State of the input at the beginning."""
    path: Path | None
    """Path of the input, if it is on this file system."""
    descriptor: int | None
    """Open descriptor of the file or folder that was at `path` at the beginning."""

    def require_same(self, verb: str, remedy: str) -> None:
        """Raise an InvalidInputError if the input was written to or replaced since the beginning."""
        if not self.is_same():
            raise InvalidInputError(
                f"{self.source.name} changed while it was {verb}, so that the result may be of two inputs; {remedy}."
            )

    def is_same(self) -> bool:
        """Return whether the input, with its modes and links, is unchanged and was not replaced."""
        try:
            replaced = (
                self.path is not None
                and self.descriptor is not None
                and not os.path.samestat(os.fstat(self.descriptor), self.path.stat())
            )
            return not replaced and self.source.stamp(include_ctime=True) == self.stamp_with_ctime
        except OSError:
            return False


@contextmanager
def watch(source: WatchedInput) -> Iterator[Watch]:
    """Watch an input for changes from now on."""
    path = source.location if isinstance(source.location, Path) else None
    descriptor = None
    try:
        if path is not None:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        yield Watch(source, source.stamp(include_ctime=True), path, descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def require_unchanged(source: WatchedInput, verb: str, remedy: str) -> Iterator[Watch]:
    """Raise an InvalidInputError at the end if an input has changed, also in place of another error.

    `verb` and `remedy` are parts of the message, as for `Watch.require_same`.
    """
    with watch(source) as watched:
        try:
            yield watched
        except DkfmError:
            watched.require_same(verb, remedy)
            raise
        watched.require_same(verb, remedy)
