"""Read, write and list objects on any object store that fsspec supports.

Listings are never stale. An exclusive creation succeeds for one writer only. If a store does not answer, an error is
raised after about two minutes; its message does not contain the credentials that a URL may have.
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
from dkfm.files import change_detection, fsspec_access
from dkfm.files.fsspec_errors import as_store_error, is_transient, strip_credentials

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

_PARALLEL_REQUESTS = 8
"""Files of a folder that are transferred at a time."""

_PART_BYTES = 2**26
"""Bytes of an object that are downloaded at a time."""

_LOCAL_SCHEMES = ("file", "local")


@dataclass(frozen=True, repr=False)
class Remote:
    """An object or a prefix on an object store; names are relative to it, and "" is the object itself.

    It holds only a URL, so it can be sent with a task, and connects where it is used. Credentials, endpoints and other
    options come from fsspec's configuration and the environment there.
    """

    url: str
    """URL with a scheme that fsspec knows."""

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0]
        if scheme in _LOCAL_SCHEMES:
            raise StoreError(f"{self} is on a local file system; give its path.")
        if "::" in self.url:  # a cache could return old content
            raise StoreError(f"{self} is a chain of file systems; give the URL of the last one alone.")

    @property
    def redacted_url(self) -> str:
        """URL without credentials, for messages."""
        return strip_credentials(self.url)

    def __str__(self) -> str:
        return self.redacted_url

    def __repr__(self) -> str:
        return f"Remote({self.redacted_url!r})"

    def join(self, name: str) -> "Remote":
        """Return the location of a name below this one."""
        return Remote(f"{self.url}/{name}") if name else self

    def read(self, name: str = "", start: int | None = None, stop: int | None = None) -> bytes:
        """Return the content of an object, or a range of it; fewer bytes if the object is shorter."""
        if stop is not None and stop <= (start or 0):
            return b""
        remote = self.join(name)
        return bytes(remote._request("read", lambda files, path: files.cat_file(path, start=start, end=stop)))

    def size(self, name: str = "") -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        status = self.join(name).read_size_and_stamp()
        return None if status is None else status[0]

    def read_size_and_stamp(self) -> tuple[int, str] | None:
        """Return the size in bytes and the stamp of an object; None if it does not exist."""
        info = self._request("read", _read_info)
        if info is None or info["type"] != "file":
            return None
        return int(info["size"]), fsspec_access.object_stamp(info)

    def list_objects(self) -> Iterator[tuple[str, int, str]]:
        """Yield the name, the size in bytes and the stamp of every object below this prefix."""
        with self.open_filesystem("listed") as (files, path):
            prefix = path.rstrip("/") + "/"
            for key, status in fsspec_access.list_below(files, prefix):
                if key.startswith(prefix) and not key.endswith("/"):  # a slash at the end marks a folder
                    yield key.removeprefix(prefix), int(status["size"]), fsspec_access.object_stamp(status)

    def list_folders(self) -> list[str]:
        """Return the names of the folders directly below this prefix."""
        entries = self._request("listed", _list_entries)
        return sorted(e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory")

    def compute_tree_stamp(self) -> str:
        """Return a digest of names, sizes and stamps of the object, or of all objects below the prefix."""
        status = self.read_size_and_stamp()
        return change_detection.digest_file_stats(sorted(self.list_objects()) if status is None else [("", *status)])

    def create(self, name: str, data: bytes) -> bool:
        """Create an object; return False, and change nothing, if it exists.

        If an answer was lost, the existing object may be the caller's own; the caller can read it back to find out.
        """
        remote = self.join(name)
        return remote._request(
            "written", lambda files, path: fsspec_access.create_exclusively(files, path, data, str(remote))
        )

    def require_exclusive_creation(self) -> None:
        """Raise a StoreError, without a request, if `create` does not work with this scheme."""
        fsspec_access.require_exclusive_creation([self.url.partition("://")[0]], str(self))

    def replace(self, name: str, data: bytes) -> None:
        """Write an object, and replace one that exists."""
        self.join(name)._request("written", lambda files, path: files.pipe_file(path, data))

    def remove_objects(self, *names: str) -> None:
        """Remove the objects that exist, with a few requests at a time."""
        _run_parallel(self._remove_object, names)

    def _remove_object(self, name: str) -> None:
        self.join(name)._request("removed", _remove_file)

    def upload_files(self, folder: Path, names: Iterable[str]) -> None:
        """Write files of a folder under their names, a few at a time, and replace those that exist."""
        _run_parallel(lambda name: self.replace(name, (folder / name).read_bytes()), names)

    def download_objects(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Read objects into files of a folder, a few at a time; raise if a size is not the expected one."""
        for name in sizes:
            if name.startswith("/") or not all(re.fullmatch(r"(?!\.\.?$)[^/\\\0]+", part) for part in name.split("/")):
                raise StoreError(f"{self} holds {name!r}, which no file of a folder can be called.")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _run_parallel(lambda name: self._download_object(folder / name, name, sizes[name]), sizes)

    def _download_object(self, file: Path, name: str, size: int) -> None:
        with file.open("xb") as opened:
            for start in range(0, size, _PART_BYTES):
                part = self.read(name, start, min(start + _PART_BYTES, size))
                if len(part) != min(_PART_BYTES, size - start):
                    raise StoreError(f"{self.join(name)} cannot be read: it was replaced meanwhile.")
                opened.write(part)

    def _request(self, verb: str, request: "Callable[[AbstractFileSystem, str], T]") -> T:
        """Make a request for this path, retry transient failures, and return the answer."""
        with self.open_filesystem(verb) as (files, path):
            return fsspec_access.retry(files, lambda: request(files, path))

    @contextmanager
    def open_filesystem(self, verb: str) -> "Iterator[tuple[AbstractFileSystem, str]]":
        """Yield the file system and the path in it; an error in the body becomes a StoreError that names the `verb`."""
        try:
            yield fsspec_access.open_filesystem(self.url, self.redacted_url)
        except (DkfmError, MemoryError):
            raise
        except Exception as error:
            raise as_store_error(self.redacted_url, verb, error, self.url) from error


def _read_info(files: "AbstractFileSystem", path: str) -> Mapping[str, Any] | None:
    try:
        info: Mapping[str, Any] = files.info(path)
    except FileNotFoundError as error:
        if is_transient(error):  # fsspec raises this class for every HTTP failure
            raise
        return None
    return info


def _list_entries(files: "AbstractFileSystem", path: str) -> list[Mapping[str, Any]]:
    try:
        return list(files.ls(path, detail=True, refresh=True))
    except FileNotFoundError as error:
        if is_transient(error):
            raise
        return []


def _remove_file(files: "AbstractFileSystem", path: str) -> None:
    with suppress(FileNotFoundError):
        files.rm_file(path)


def _run_parallel(action: Any, names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="dkfm-remote") as pool:
        for _ in pool.map(action, names):
            pass


def open_file(location: "Remote | str", size: int | None = None) -> io.BufferedReader:
    """Open an object as a seekable binary file that requests only the bytes that are read.

    `size`, if known, saves a request.

    Raises
    ------
    StoreError
        The object does not exist; reading raises as `Remote.read` does.
    """
    remote = location if isinstance(location, Remote) else Remote(location)
    size = remote.size() if size is None else size
    if size is None:
        raise StoreError(f"{remote} cannot be read: nothing is there.")
    return io.BufferedReader(_RemoteFile(remote, size), 2**18)


class _RemoteFile(io.RawIOBase):
    """Unbuffered reader of an object: the object, its size, and a position."""

    def __init__(self, remote: Remote, size: int) -> None:
        self._remote, self._size, self._position = remote, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"{position} is before the beginning of {self._remote}.")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._position))
        part = self._remote.read("", self._position, self._position + count)
        if len(part) != count:  # fewer bytes would mean the end of the file
            raise StoreError(f"{self._remote} cannot be read: it was replaced meanwhile.")
        view[:count] = part
        self._position += count
        return count
