"""Places on an object store, behind any URL of fsspec's: what stores and sources need of them, and nothing more.

Promises: no listing is a stale one; what is created exclusively has one creator; a store that does not answer is an
error after two minutes or so, of one sentence, without the credentials that a URL may hold.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dkfm.errors import DkfmError, StoreError
from dkfm.files import change_detection, fsspec_options
from dkfm.files.fsspec_errors import as_store_error, is_transient, strip_credentials

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

_AT_ONCE, _PART = 8, 2**26
"""Files of a folder that travel at a time; and the bytes that are read at a time."""

_LOCAL = ("file", "local")


@dataclass(frozen=True, repr=False)
class Remote:
    """An object, or what lies below a prefix, on an object store; names are relative to it, and "" is the place itself.

    It is a value of one text: it travels in a task, and connects where it is used. Credentials, endpoints and other
    options are those of fsspec's configuration and of the environment there.
    """

    url: str

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0]
        if scheme in _LOCAL:
            raise StoreError(f"{self} is on a local file system; give its path.")
        if "::" in self.url:  # what a cache holds may have changed since
            raise StoreError(f"{self} is a chain of file systems; give the URL of the last one alone.")

    @property
    def name(self) -> str:
        """What messages call it: the URL without credentials."""
        return strip_credentials(self.url)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Remote({self.name!r})"

    def join(self, name: str) -> "Remote":
        """Return a place below this one."""
        return Remote(f"{self.url}/{name}") if name else self

    def read(self, name: str = "", start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes of an object, or some of them; fewer where it is shorter."""
        if stop is not None and stop <= (start or 0):
            return b""
        place = self.join(name)
        return bytes(place._ask("read", lambda files, path: files.cat_file(path, start=start, end=stop)))

    def size(self, name: str = "") -> int | None:
        """Return the bytes of an object; None where there is none."""
        status = self.join(name).status()
        return None if status is None else status[0]

    def status(self) -> tuple[int, str] | None:
        """Return the bytes and the stamp of an object; None where there is none."""
        found = self._ask("read", _info)
        if found is None or found["type"] != "file":
            return None
        return int(found["size"]), fsspec_options.object_stamp(found)

    def names(self) -> Iterator[tuple[str, int, str]]:
        """Yield the name, the bytes and the stamp of every object below, as they are on the store now."""
        with self.telling("listed") as (files, path):
            prefix = path.rstrip("/") + "/"
            for key, status in fsspec_options.list_below(files, prefix):
                if key.startswith(prefix) and not key.endswith("/"):  # a name that ends so is a sign for a folder
                    yield key.removeprefix(prefix), int(status["size"]), fsspec_options.object_stamp(status)

    def folders(self) -> list[str]:
        """Return the names that have objects below them, one step below this place."""
        found = self._ask("listed", _entries)
        return sorted(f["name"].rstrip("/").rpartition("/")[2] for f in found if f["type"] == "directory")

    def stamp(self) -> str:
        """Return a digest of names, sizes and stamps: of the object, or of all below."""
        status = self.status()
        return change_detection.digest_files(sorted(self.names()) if status is None else [("", *status)])

    def create(self, name: str, data: bytes) -> bool:
        """Write an object where there is none; False where there is one already, which is left as it is.

        After an answer that was lost on its way that one may be the caller's own: who needs to know reads it back.
        """
        place = self.join(name)
        return place._ask(
            "written", lambda files, path: fsspec_options.create_exclusively(files, path, data, str(place))
        )

    def replace(self, name: str, data: bytes) -> None:
        """Write an object, whatever is there."""
        self.join(name)._ask("written", lambda files, path: files.pipe_file(path, data))

    def remove(self, *names: str) -> None:
        """Remove objects, some at a time; one that is not there is none."""
        _each(self._remove, names)

    def _remove(self, name: str) -> None:
        self.join(name)._ask("removed", _removed)

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Write files of a folder under their names, some at a time, whatever is there."""
        _each(lambda name: self.replace(name, (folder / name).read_bytes()), names)

    def download(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Read objects into files of a folder, some at a time; of each exactly the bytes that it is said to have."""
        for name in sizes:
            if name.startswith("/") or not all(re.fullmatch(r"(?!\.\.?$)[^/\\\0]+", part) for part in name.split("/")):
                raise StoreError(f"{self} holds {name!r}, which no file of a folder can be called.")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _each(lambda name: self._download(folder / name, name, sizes[name]), sizes)

    def _download(self, file: Path, name: str, size: int) -> None:
        with file.open("xb") as opened:
            for start in range(0, size, _PART):
                part = self.read(name, start, min(start + _PART, size))
                if len(part) != min(_PART, size - start):
                    raise StoreError(f"{self.join(name)} cannot be read: it was replaced meanwhile.")
                opened.write(part)

    def _ask(self, verb: str, request: "Callable[[AbstractFileSystem, str], T]") -> T:
        """Return what a request for this path gives, which is made again while the store fails."""
        with self.telling(verb) as (files, path):
            return fsspec_options.retry(files, lambda: request(files, path))

    @contextmanager
    def telling(self, verb: str) -> "Iterator[tuple[AbstractFileSystem, str]]":
        """Lend the file system and the path in it; turn what they refuse into a sentence."""
        try:
            yield fsspec_options.open_filesystem(self.url, self.name)
        except (DkfmError, MemoryError):
            raise
        except Exception as error:
            raise as_store_error(self.name, verb, error, self.url) from error


def _info(files: "AbstractFileSystem", path: str) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = files.info(path)
    except FileNotFoundError as error:
        if is_transient(error):  # of HTTP fsspec says so whatever happened
            raise
        return None
    return found


def _entries(files: "AbstractFileSystem", path: str) -> list[Mapping[str, Any]]:
    try:
        return list(files.ls(path, detail=True, refresh=True))
    except FileNotFoundError as error:
        if is_transient(error):
            raise
        return []


def _removed(files: "AbstractFileSystem", path: str) -> None:
    with suppress(FileNotFoundError):
        files.rm_file(path)


def _each(act: Any, names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dkfm-remote") as pool:
        for _ in pool.map(act, names):
            pass


def open_file(place: "Remote | str", size: int | None = None) -> io.BufferedReader:
    """Open an object, of which the bytes may be known, as a binary file that seeks: no more is read than is asked for.

    Raises
    ------
    StoreError
        Nothing there; at a read, what `Remote.read` raises.
    """
    remote = place if isinstance(place, Remote) else Remote(place)
    size = remote.size() if size is None else size
    if size is None:
        raise StoreError(f"{remote} cannot be read: nothing is there.")
    return io.BufferedReader(_Reader(remote, size), 2**18)


class _Reader(io.RawIOBase):
    """A place and a position."""

    def __init__(self, place: Remote, size: int) -> None:
        self._place, self._size, self._at = place, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"{at} is before the beginning of {self._place}.")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._at))
        part = self._place.read("", self._at, self._at + wanted)
        if len(part) != wanted:  # fewer would read as the end of the file
            raise StoreError(f"{self._place} cannot be read: it was replaced meanwhile.")
        view[:wanted] = part
        self._at += wanted
        return wanted
