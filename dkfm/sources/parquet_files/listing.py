"""List the Parquet files of a table in a folder or below a prefix, and detect whether they change."""

import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from dkfm.errors import InvalidInputError
from dkfm.files.change_detection import digest_file_stats, get_stamp_times
from dkfm.files.location import Location, is_remote, join, open_location, read_size_and_stamp
from dkfm.files.object_store import Remote
from dkfm.sources.parquet_files.journal import FileStat, StoredNames

_WILDCARDS = "*?["
"""Characters that make a part of a path a pattern."""

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""Value of a partition whose column is null."""


@dataclass(frozen=True)
class TableFile:
    """A file with its size and time of change when it was listed."""

    location: Location
    name: str
    """Name relative to the folder of the table; empty if the table is a single file."""
    size: int
    """Size of the file, in bytes."""
    stamp: int | str
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
            same = read_size_and_stamp(self.location) == (self.size, self.stamp)
        except (OSError, InvalidInputError):
            same = False
        if not same:
            raise InvalidInputError(f"{self.location} changed since it was opened; open it again.")


def find_partition_value(name: str, key: str) -> str | None:
    """Return the value of a key in the partition folders of a file's name; None if it is null.

    Raises
    ------
    KeyError
        No folder of the name is a partition by that key.

    >>> find_partition_value("country=de/city=Bad%20Honnef/a.parquet", "city")
    'Bad Honnef'
    """
    value = dict(part.split("=", 1) for part in name.split("/")[:-1] if "=" in part)[key]
    return None if value == _NULL_PARTITION else unquote(value)


@dataclass(frozen=True)
class TableFiles:
    """Files of a table: one file, or those below a folder or a prefix, sorted by name unless names are given.

    Attributes
    ----------
    location : Path or Remote
        File, folder or prefix.
    pattern : str, optional
        Pattern of the names of the files, or of folders that contain them, relative to `location`; ``*``, ``?`` and
        ``[...]`` match within a part of a name, ``**`` any number of parts.
    names : tuple of str or StoredNames, optional
        Names of the files in the order of the table; others are left out.
    """

    location: Location
    pattern: str | None = None
    names: tuple[str, ...] | StoredNames | None = None

    def __reduce__(self) -> tuple[type["TableFiles"], tuple[object, ...]]:
        return TableFiles, (self.location, self.pattern, self.names)  # without cached values, so that tasks stay small

    def __str__(self) -> str:
        return str(self.location) if self.pattern is None else f"{self.location}/{self.pattern}"

    @classmethod
    def parse(cls, location: Location) -> "TableFiles":
        """Return the files at a location, whose last parts may be a pattern.

        >>> TableFiles.parse(Path("/data/2024-*/*.parquet")).pattern
        '2024-*/*.parquet'
        """
        text = location.url if isinstance(location, Remote) else location.as_posix()
        parts = text.split("/")
        wild = [number for number, part in enumerate(parts) if any(mark in part for mark in _WILDCARDS)]
        if not wild or _exists(location):
            return cls(location)
        base, pattern = "/".join(parts[: wild[0]]), "/".join(parts[wild[0] :])
        return cls(Remote(base) if isinstance(location, Remote) else Path(base or "/"), pattern)

    @cached_property
    def explicit_names(self) -> tuple[str, ...] | None:
        """Names of the files in the order of the table; None if they are sorted."""
        return self.names.read() if isinstance(self.names, StoredNames) else self.names

    @cached_property
    def _is_match(self) -> Callable[[str], object]:
        """Function that returns whether a name matches the pattern."""
        try:
            return re.compile(_translate_pattern(self.pattern or "**")).fullmatch
        except re.error as error:
            raise InvalidInputError(f"{self} is no pattern of files: {error}.") from None

    def list_stats(self, *, include_ctime: bool = False) -> list[FileStat]:
        """Return the name, size and time of change of each file, or the stamp of each object, in order.

        Raises
        ------
        InvalidInputError
            There is no such file, or a file is a link to a folder or to outside the folder, or not a plain file.
        StoreError
            An object store does not respond.
        """
        location, is_match = self.location, self._is_match  # raises for what is no pattern
        if isinstance(location, Path):
            found = _list_local(location, include_ctime, self.pattern)
        else:
            found = _list_remote(location)
        if self.pattern is not None:
            found = [stats for stats in found if is_match(stats[0])]
        if self.explicit_names is not None:
            by_name = {stats[0]: stats for stats in found}
            if missing := [name for name in self.explicit_names if name not in by_name]:
                raise InvalidInputError(f"{self} has no {missing[0]} any more, which is one of its files.")
            return [by_name[name] for name in self.explicit_names]
        if not found:
            raise InvalidInputError(f"{self} holds no .parquet file whose name begins with neither '_' nor '.'.")
        return sorted(found)

    def stamp(self, *, include_ctime: bool = False) -> str:
        """Return a digest of names, sizes, and times of change or stamps of the files, whatever their order."""
        return digest_file_stats(sorted(self.list_stats(include_ctime=include_ctime)))

    def list_with_stamp(self) -> tuple[str, tuple[TableFile, ...]]:
        """Return the stamp, and the files in the order of the table."""
        listed = self.list_stats()
        files = (TableFile(join(self.location, name), name, size, changed) for name, size, changed in listed)
        return digest_file_stats(sorted(listed)), tuple(files)


def has_wildcards(location: Location) -> bool:
    """Return whether a location is a pattern if nothing is there."""
    return any(mark in (location.url if isinstance(location, Remote) else str(location)) for mark in _WILDCARDS)


def _exists(location: Location) -> bool:
    if isinstance(location, Path):
        return location.exists()
    return location.size() is not None or next(location.list_objects(), None) is not None


def _translate_pattern(pattern: str) -> str:
    """Return the regular expression of a pattern of names of files, or of folders above them."""
    parts = (r"(?:[^/]+/)*" if part == "**" else f"{_translate_part(part)}/" for part in pattern.split("/"))
    *above, last = parts
    return "".join(above) + (".*" if last.endswith("*") else f"{last[:-1]}(?:/.*)?")


def _translate_leading_parts(pattern: str | None) -> list[str]:
    """Return the regular expressions of the parts of a pattern before the first ``**``."""
    parts = [] if pattern is None else pattern.split("/")
    return [_translate_part(part) for part in parts[: parts.index("**") if "**" in parts else None]]


def _translate_part(part: str) -> str:
    """Return the regular expression of one part of a pattern, which matches no slash."""
    return re.sub(r"\*+|\[!?\]?[^\]]*\]|.", lambda match: _translate_mark(match[0]), part)


def _translate_mark(mark: str) -> str:
    if mark.startswith("*"):
        return "[^/]*"
    if mark == "?":
        return "[^/]"
    if len(mark) == 1:
        return re.escape(mark)
    body = re.sub(r"(.)-(.)|.", _translate_range, mark[1:-1].removeprefix("!"))
    return f"(?!/)[{'^' if mark.startswith('[!') else ''}{body}]"


def _translate_range(match: re.Match[str]) -> str:
    """Return the regular expression of a range of characters, or of one character."""
    return re.escape(match[0]) if match[1] is None else f"{re.escape(match[1])}-{re.escape(match[2])}"


def _list_local(path: Path, include_ctime: bool, pattern: str | None) -> list[FileStat]:
    try:
        entries = list(_walk(path, pattern)) if path.is_dir() else [("", path.stat())]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None
    for name, entry in entries:
        if not stat.S_ISREG(entry.st_mode):
            raise InvalidInputError(f"{path / name} is not a plain file, and rows are read from files alone.")
    return [(name, entry.st_size, get_stamp_times(entry, include_ctime)) for name, entry in entries]


def _list_remote(remote: Remote) -> list[FileStat]:
    object_status = remote.read_size_and_stamp()
    if object_status is not None:
        return [("", *object_status)]
    listed: list[FileStat] = [
        (name, size, changed)
        for name, size, changed in remote.list_objects()
        if name.endswith(".parquet") and not any(part.startswith(("_", ".")) for part in name.split("/"))
    ]
    if not listed and next(remote.list_objects(), None) is None:
        raise InvalidInputError(f"There is no {remote}.")
    return listed


def _walk(root: Path, pattern: str | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the status of each Parquet file below a folder; with a pattern, only where it may match."""
    folders, resolved = [""], root.resolve()
    may_match = [re.compile(part).fullmatch for part in _translate_leading_parts(pattern)]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name, is_folder = f"{folder}{entry.name}", entry.is_dir()
                if entry.name.startswith(("_", ".")) or not (is_folder or name.endswith(".parquet")):
                    continue
                depth = folder.count("/")
                if depth < len(may_match) and not may_match[depth](entry.name):
                    continue
                if entry.is_symlink() and (is_folder or not Path(entry.path).resolve().is_relative_to(resolved)):
                    raise InvalidInputError(f"{entry.path} is refused: it is a link to a folder, or out of {root}.")
                if is_folder:
                    folders.append(f"{name}/")
                else:
                    yield name, entry.stat()
