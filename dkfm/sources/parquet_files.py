"""Which files of a folder, or of a prefix, are those of a table, and whether one of them is still what it was then."""

import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dkfm.errors import InvalidInputError
from dkfm.files import change_detection
from dkfm.files.location import Location, is_remote, join, open_location, status
from dkfm.files.object_store import Remote


@dataclass(frozen=True)
class TableFile:
    """A file as it was when it was listed."""

    location: Location
    bytes: int
    changed: int | str
    """The time of change, or what an object store has for it."""

    def __str__(self) -> str:
        return str(self.location)

    @property
    def far(self) -> bool:
        """Whether each read of it is a request."""
        return is_remote(self.location)

    def open(self) -> io.RawIOBase | io.BufferedReader:
        """Open it to be read; of an object no more is asked for than is read."""
        return open_location(self.location, self.bytes)

    def require_same(self) -> None:
        """Raise unless it has still its size and its time of change."""
        try:
            same = status(self.location) == (self.bytes, self.changed)
        except (OSError, InvalidInputError):
            same = False
        if not same:
            raise InvalidInputError(f"{self.location} changed since it was opened; open it again.")


def list_files(place: Location) -> tuple[str, tuple[TableFile, ...]]:
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
    files = (TableFile(join(place, n), size, at) for n, size, at in found)
    return change_detection.digest_files(found), tuple(files)


def files_state(place: Location) -> str:
    """Return the state of the files that `list_files` lists; at a URL their stamp."""
    return change_detection.digest_files(_files(place, exact=True) if isinstance(place, Path) else _objects(place))


def _files(path: Path, *, exact: bool = False) -> list[tuple[str, int, int | str]]:
    try:
        found = sorted(_below(path), key=lambda file: file[0]) if path.is_dir() else [("", path.stat())]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None
    for name, entry in found:
        if not stat.S_ISREG(entry.st_mode):
            raise InvalidInputError(f"{path / name} is not a plain file, and rows are read from files alone.")
    return [(name, entry.st_size, change_detection.time_of_change(entry, exact)) for name, entry in found]


def _objects(place: Remote) -> list[tuple[str, int, int | str]]:
    known = place.status()
    if known is not None:
        return [("", *known)]
    found: list[tuple[str, int, int | str]] = []
    for name, size, stamp in place.list_objects():
        parts = name.split("/")
        if not name.endswith(".parquet") or any(part.startswith(("_", ".")) for part in parts):
            continue
        if partition := next((depth for depth, part in enumerate(parts[:-1], 1) if "=" in part), None):
            raise _partitioned(f"{place.join('/'.join(parts[:partition]))}")
        found.append((name, size, stamp))
    if not found and next(place.list_objects(), None) is None:
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
