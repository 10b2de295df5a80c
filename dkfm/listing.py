"""Which files of a folder are those of a table, and whether one of them is still what it was when it was listed."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dkfm import stamps
from dkfm.errors import InvalidInputError

__all__ = ["File", "read"]


@dataclass(frozen=True)
class File:
    """A file as it was when it was listed."""

    path: Path
    bytes: int
    changed: int

    def require_same(self) -> None:
        """Raise unless it has still its size and its time of change."""
        try:
            status = self.path.stat()
            same = (status.st_size, status.st_mtime_ns) == (self.bytes, self.changed)
        except OSError:
            same = False
        if not same:
            raise InvalidInputError(f"{self.path} changed since it was opened; open it again.")


def read(path: Path) -> tuple[str, tuple[File, ...]]:
    """List the Parquet files below a folder in the order of their relative names, or a file; return their stamp too.

    Raises
    ------
    InvalidInputError
        None there, a partition folder, a link that leads out of the folder or to a folder, or what is no plain file.
    """
    try:
        found = sorted(_below(path), key=lambda file: file[0]) if path.is_dir() else [("", path.stat())]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None
    for name, status in found:
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInputError(f"{path / name} is not a plain file, and rows are read from files alone.")
    if not found:
        raise InvalidInputError(f"{path} holds no .parquet file whose name begins with neither '_' nor '.'.")
    files = tuple(File(path / name, status.st_size, status.st_mtime_ns) for name, status in found)
    return stamps.of_files(found), files


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
                    raise InvalidInputError(
                        f"{entry.path} is a partition folder, whose column is not in its files: "
                        "name the folder of one partition, or write the column into the files."
                    )
                if is_folder:
                    folders.append(f"{name}/")
                else:
                    yield name, entry.stat()
