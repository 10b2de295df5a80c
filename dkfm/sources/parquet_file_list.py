"""List the Parquet files of a table in a folder or below a prefix, and detect whether they change."""

import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dkfm.errors import InvalidInputError
from dkfm.files.change_detection import change_time_for_stamp, digest_file_stats
from dkfm.files.location import Location, is_remote, join, open_location, read_size_and_stamp
from dkfm.files.object_store import Remote


@dataclass(frozen=True)
class TableFile:
    """A file with its size and time of change when it was listed."""

    location: Location
    size: int
    """Size of the file, in bytes."""
    changed: int | str
    """Time of change in ns; on an object store, the stamp of the object."""

    def __str__(self) -> str:
        return str(self.location)

    @property
    def is_remote(self) -> bool:
        """Whether the file is on an object store, where each read is a request."""
        return is_remote(self.location)

    def open(self) -> io.RawIOBase | io.BufferedReader:
        """Open the file for reading; of an object only the bytes that are read are requested."""
        return open_location(self.location, self.size)

    def require_same(self) -> None:
        """Raise an InvalidInputError if the size or the time of change of the file differ from those listed."""
        try:
            same = read_size_and_stamp(self.location) == (self.size, self.changed)
        except (OSError, InvalidInputError):
            same = False
        if not same:
            raise InvalidInputError(f"{self.location} changed since it was opened; open it again.")


def list_files_with_stamp(location: Location) -> tuple[str, tuple[TableFile, ...]]:
    """Return the stamp and the list of a single file, or of all Parquet files of a folder sorted by relative name.

    Raises
    ------
    InvalidInputError
        There is no such file, a partition folder, a link to a folder or out of the folder, or not a plain file.
    StoreError
        An object store does not respond.
    """
    listed = _list_local(location) if isinstance(location, Path) else _list_remote(location)
    if not listed:
        raise InvalidInputError(f"{location} holds no .parquet file whose name begins with neither '_' nor '.'.")
    files = (TableFile(join(location, name), size, changed) for name, size, changed in listed)
    return digest_file_stats(listed), tuple(files)


def stamp_with_ctime(location: Location) -> str:
    """Return the state of the files that `list_files_with_stamp` lists; on an object store their stamp."""
    return digest_file_stats(
        _list_local(location, include_ctime=True) if isinstance(location, Path) else _list_remote(location)
    )


def _list_local(path: Path, *, include_ctime: bool = False) -> list[tuple[str, int, int | str]]:
    try:
        entries = sorted(_walk(path), key=lambda file: file[0]) if path.is_dir() else [("", path.stat())]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None
    for name, entry in entries:
        if not stat.S_ISREG(entry.st_mode):
            raise InvalidInputError(f"{path / name} is not a plain file, and rows are read from files alone.")
    return [(name, entry.st_size, change_time_for_stamp(entry, include_ctime)) for name, entry in entries]


def _list_remote(remote: Remote) -> list[tuple[str, int, int | str]]:
    object_status = remote.read_size_and_stamp()
    if object_status is not None:
        return [("", *object_status)]
    listed: list[tuple[str, int, int | str]] = []
    for name, size, changed in remote.list_objects():
        parts = name.split("/")
        if not name.endswith(".parquet") or any(part.startswith(("_", ".")) for part in parts):
            continue
        if partition_depth := next((depth for depth, part in enumerate(parts[:-1], 1) if "=" in part), None):
            raise _partition_error(f"{remote.join('/'.join(parts[:partition_depth]))}")
        listed.append((name, size, changed))
    if not listed and next(remote.list_objects(), None) is None:
        raise InvalidInputError(f"There is no {remote}.")
    return sorted(listed)


def _walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    folders, resolved = [""], root.resolve()
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name, is_folder = f"{folder}{entry.name}", entry.is_dir()
                if entry.name.startswith(("_", ".")) or not (is_folder or name.endswith(".parquet")):
                    continue
                if entry.is_symlink() and (is_folder or not Path(entry.path).resolve().is_relative_to(resolved)):
                    raise InvalidInputError(f"{entry.path} is refused: it is a link to a folder, or out of {root}.")
                if is_folder and "=" in entry.name:
                    raise _partition_error(entry.path)
                if is_folder:
                    folders.append(f"{name}/")
                else:
                    yield name, entry.stat()


def _partition_error(folder: str) -> InvalidInputError:
    return InvalidInputError(
        f"{folder} is a partition folder, whose column is not in its files: "
        "name the folder of one partition, or write the column into the files."
    )
