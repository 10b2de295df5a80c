"""Which files of a folder, or of a prefix, are those of a table, and whether one of them is still what it was then."""

import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dkfm.errors import InvalidInputError
from dkfm.files import change_detection
from dkfm.files.local import open_plain
from dkfm.files.object_store import Remote, Root, open_file

__all__ = ["File", "read", "state"]


@dataclass(frozen=True)
class File:
    """A file as it was when it was listed."""

    path: Root
    bytes: int
    changed: int | str
    """The time of change, or what an object store has for it."""

    @property
    def far(self) -> bool:
        """Whether each read of it is a request."""
        return isinstance(self.path, Remote)

    def open(self) -> io.RawIOBase | io.BufferedReader:
        """Open it to be read; of an object no more is asked for than is read."""
        return open_file(self.path, self.bytes).detach() if isinstance(self.path, Remote) else open_plain(self.path)

    def require_same(self) -> None:
        """Raise unless it has still its size and its time of change."""
        try:
            status = self.path.status() if isinstance(self.path, Remote) else _status(self.path.stat())
        except OSError:
            status = None
        if status != (self.bytes, self.changed):
            raise InvalidInputError(f"{self.path} changed since it was opened; open it again.")


def read(place: Root) -> tuple[str, tuple[File, ...]]:
    """List the Parquet files below a place in the order of their relative names, or a file; return their stamp too.

    Raises
    ------
    InvalidInputError
        None there, a partition folder, a link that leads out of the folder or to a folder, or what is no plain file.
    StoreError
        An object store that did not answer.
    """
    found = _files(place) if isinstance(place, Path) else _objects(place)
    if not found:
        raise InvalidInputError(f"{place} holds no .parquet file whose name begins with neither '_' nor '.'.")
    files = (File(place.join(n) if isinstance(place, Remote) else place / n, size, at) for n, size, at in found)
    return change_detection.of_files(found), tuple(files)


def state(place: Root) -> str:
    """Return the state of the files that `read` lists, as `dkfm.files.change_detection` says; at a URL their stamp."""
    return change_detection.of_files(_files(place, exact=True) if isinstance(place, Path) else _objects(place))


def _files(path: Path, *, exact: bool = False) -> list[tuple[str, int, int | str]]:
    try:
        found = sorted(_below(path), key=lambda file: file[0]) if path.is_dir() else [("", path.stat())]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None
    for name, status in found:
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInputError(f"{path / name} is not a plain file, and rows are read from files alone.")
    return [(name, *_status(status, exact)) for name, status in found]


def _status(status: os.stat_result, exact: bool = False) -> tuple[int, int | str]:
    return status.st_size, change_detection.change_of(status, exact)


def _objects(place: Remote) -> list[tuple[str, int, int | str]]:
    status = place.status()
    if status is not None:
        return [("", *status)]
    found: list[tuple[str, int, int | str]] = []
    for name, size, stamp in place.names():
        parts = name.split("/")
        if not name.endswith(".parquet") or any(part.startswith(("_", ".")) for part in parts):
            continue
        if partition := next((depth for depth, part in enumerate(parts[:-1], 1) if "=" in part), None):
            raise _partitioned(f"{place.join('/'.join(parts[:partition]))}")
        found.append((name, size, stamp))
    if not found and next(place.names(), None) is None:
        raise InvalidInputError(f"There is no {place}.")
    return sorted(found)


def _below(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    folders, home = [""], root.resolve()
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name, is_folder = f"{folder}{entry.name}", entry.is_dir()
                if entry.name.startswith(("_", ".")) or not (is_folder or name.endswith(".parquet")):
                    continue
                if entry.is_symlink() and (is_folder or not Path(entry.path).resolve().is_relative_to(home)):
                    raise InvalidInputError(f"{entry.path} is refused: it is a link to a folder, or out of {root}.")
                if is_folder and "=" in entry.name:
                    raise _partitioned(entry.path)
                if is_folder:
                    folders.append(f"{name}/")
                else:
                    yield name, entry.stat()


def _partitioned(folder: str) -> InvalidInputError:
    return InvalidInputError(
        f"{folder} is a partition folder, whose column is not in its files: "
        "name the folder of one partition, or write the column into the files."
    )
