"""Read and write the files of an output, in a folder of this file system or below a prefix of an object store.

A file appears under its name only when it is complete, and replaces another file only if the caller requests it.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Protocol

from dkfm.errors import DamagedStoreError, StoreError, UnreachableError
from dkfm.files import local
from dkfm.files.location import Location
from dkfm.files.object_store import Remote
from dkfm.storage import json_reading, own_files, remote_stores, store_metadata, zarr_store

_MAX_ATTEMPTS = 8
"""Attempts to write a file; another run of the job that completes the output removes partial files."""

_MAX_SINGLE_REQUESTS = 4
"""Below this many names, sizes are requested one by one; for more, the whole prefix is listed."""

_PARALLEL_REQUESTS = 8
"""Requests to an object store at a time."""


class PendingFile(Protocol):
    """A file that is being written and does not have its final name yet."""

    @property
    def name(self) -> str:
        """Name of the file in messages."""

    @property
    def file(self) -> IO[bytes]:
        """Open file, for writing and reading back."""

    @property
    def is_synced_on_commit(self) -> bool:
        """Whether the content must be synced to disk before the file gets its name."""

    def commit(self, *, exclusive: bool = False) -> bool:
        """Give the file its final name; return False, and change nothing, if `exclusive` and the name exists."""


class OutputLocation(Protocol):
    """Files of one output, in a folder or below a prefix."""

    @property
    def can_receive_stale_writes(self) -> bool:
        """Whether, on this kind of storage, a file begun for an earlier output may still get its name."""

    def create_output(self, name: str, data: bytes, overwrite: bool) -> AbstractContextManager["OutputLocation"]:
        """Create an output with a first file of this name and data; yield the location to which to write the others."""

    def find_own_attributes(self) -> dict[str, object] | None:
        """Return the attributes of dkfm's store here, or None if nothing is; else raise, or return {}."""

    def read_attributes(self) -> dict[str, object]:
        """Return dkfm's attributes of the output here, checked as `store_metadata.read_own_attributes` does."""

    def read_array_info(self, name: str) -> store_metadata.ArrayInfo | None:
        """Return shape, chunks and dtype in the metadata of an array; None if it has no metadata."""

    def list_files(self) -> Iterator[str]:
        """Yield the names of all files; raise a StoreError if one is not a plain file."""

    def list_sizes(self) -> Mapping[str, int]:
        """Return the size of each file in bytes, from one listing; raise a StoreError if one is not a plain file.

        Files that do not belong into the folder of a chunk may be left out.
        """

    def find_file_sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the size of each file that exists, in bytes."""

    def require_plain_files(self) -> None:
        """Raise a StoreError if something is not a plain file, such as a link."""

    def read_last_bytes(self, sizes: Mapping[str, int], length: int) -> dict[str, bytes]:
        """Return the last `length` bytes of each file; `sizes` gives the names and sizes."""

    def open_for_reading(self, name: str, max_bytes: int | None = None) -> IO[bytes] | None:
        """Open a file for reading; None if it does not exist. Only `max_bytes` + 1 bytes need to be readable."""

    def make_folder(self, name: str) -> None:
        """Create a folder durably unless it exists; do nothing where there are no folders."""

    def sync_names(self, names: Iterable[str]) -> None:
        """Make the names of existing files durable, whichever process created them; do nothing if they always are."""

    def create_file(self, name: str, folder: str = "") -> AbstractContextManager[PendingFile]:
        """Begin a file, which is removed at the end of the context unless it was committed.

        `folder` is a folder above the file that `make_folder` has created.
        """

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file durably, and replace one that exists."""

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove the files that exist, durably."""

    def remove_partial_files(self, seconds: float = 0.0) -> None:
        """Remove files of killed writers to which nothing was written for `seconds`."""


@dataclass(frozen=True)
class LocalOutput:
    """Files of an output in a folder of this file system."""

    root: Path
    can_receive_stale_writes = False  # hidden files are removed together with the folder of their output

    def __str__(self) -> str:
        return str(self.root)

    @contextmanager
    def create_output(self, name: str, data: bytes, overwrite: bool) -> Iterator["OutputLocation"]:
        """Create an output with its first file, in a hidden folder that is renamed when the context ends."""
        with zarr_store.new_store_folder(self.root, "scores", overwrite=overwrite) as folder:
            folder.mkdir()
            (folder / name).write_bytes(data)
            yield LocalOutput(folder)

    def find_own_attributes(self) -> dict[str, object] | None:
        """Return the attributes of dkfm's store here; raise if something else is here."""
        return zarr_store.require_own_attributes(self.root) if zarr_store.is_taken(self.root) else None

    def read_attributes(self) -> dict[str, object]:
        """Return dkfm's attributes of the output here."""
        return store_metadata.read_own_attributes(self.root, "scores")

    def read_array_info(self, name: str) -> store_metadata.ArrayInfo | None:
        """Return shape, chunks and dtype in the metadata of an array."""
        return store_metadata.read_array_info(self.root / name, text=True)

    def list_files(self) -> Iterator[str]:
        """Yield the names of all files."""
        return store_metadata.list_files(self.root)

    def list_sizes(self) -> Mapping[str, int]:
        """Return the size of each file in bytes, from one listing."""
        return store_metadata.list_file_sizes(self.root)

    def find_file_sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the size of each file that exists, in bytes."""
        sizes = {}
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError):
                sizes[name] = (self.root / name).stat().st_size
        return sizes

    def require_plain_files(self) -> None:
        """Raise a StoreError if something is not a plain file."""
        for _ in self.list_files():
            pass

    def read_last_bytes(self, sizes: Mapping[str, int], length: int) -> dict[str, bytes]:
        """Return the last `length` bytes of each file; `sizes` gives the names and sizes."""
        ends = {}
        for name, size in sizes.items():
            opened = self.open_for_reading(name)
            if opened is not None:
                with opened:
                    opened.seek(max(0, size - length))
                    ends[name] = opened.read(length)
        return ends

    def open_for_reading(self, name: str, max_bytes: int | None = None) -> IO[bytes] | None:
        """Open a file for reading."""
        try:
            return local.open_plain(self.root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self.root / name} cannot be read: {error.strerror}.") from None

    def make_folder(self, name: str) -> None:
        """Create a folder durably unless it exists."""
        local.make_durable_folder(self.root / name, self.root)

    def sync_names(self, names: Iterable[str]) -> None:
        """Make the names of existing files durable, whichever process created them."""
        with local.translate_write_errors(self.root):
            for name in names:
                local.sync_parent_folders(self.root / name, self.root)

    @contextmanager
    def create_file(self, name: str, folder: str = "") -> Iterator[PendingFile]:
        """Begin a file, which is removed at the end of the context unless it was committed."""
        with local.new_file(self.root / name, self.root, self.root / folder) as new:
            yield new

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file durably; try again if another run of the job removed it while it was half written."""
        for left in reversed(range(_MAX_ATTEMPTS)):
            try:
                self._write(name, data)
                return
            except UnreachableError:
                if not left:
                    raise

    def _write(self, name: str, data: bytes) -> None:
        with local.new_file(self.root / name, self.root) as new:
            new.file.write(data)
            new.commit()

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files."""
        with local.translate_write_errors(self.root):
            folders = set()
            for name in names:
                local.require_no_links(self.root / name, self.root)
                with suppress(FileNotFoundError):
                    (self.root / name).unlink()
                    folders.add((self.root / name).parent)
            for folder in folders:
                local.sync_folder(folder)

    def remove_partial_files(self, seconds: float = 0.0) -> None:
        """Remove files of killed writers to which nothing was written for `seconds`."""
        own_files.remove_partial_files(self.root, self.read_attributes(), seconds)


@dataclass(frozen=True)
class RemoteOutput:
    """Files of an output below a prefix of an object store."""

    root: Remote
    can_receive_stale_writes = True  # a request that was sent may arrive at any time

    def __str__(self) -> str:
        return str(self.root)

    @contextmanager
    def create_output(self, name: str, data: bytes, overwrite: bool) -> Iterator["OutputLocation"]:
        """Create an output with its first file, which claims the prefix."""
        remote_stores.create_remote_store(self.root, "scores", name, data, overwrite)
        yield self

    def find_own_attributes(self) -> dict[str, object] | None:
        """Return the attributes of dkfm's store here."""
        return remote_stores.find_own_attributes_at(self.root) if remote_stores.is_taken_at(self.root) else None

    def read_attributes(self) -> dict[str, object]:
        """Return dkfm's attributes of the output here."""
        return remote_stores.read_remote_attributes(self.root, "scores")

    def read_array_info(self, name: str) -> store_metadata.ArrayInfo | None:
        """Return shape, chunks and dtype in the metadata of an array."""
        metadata = read_json(self, f"{name}/zarr.json")
        if metadata is None:
            return None
        return store_metadata.parse_array_info(metadata, f"{self.root}/{name}", text=True)

    def list_files(self) -> Iterator[str]:
        """Yield the names of all files."""
        return (name for name, _, _ in self.root.list_objects())

    def list_sizes(self) -> Mapping[str, int]:
        """Return the size of each file in bytes, from one listing."""
        return {name: size for name, size, _ in self.root.list_objects()}

    def find_file_sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the size of each file that exists, in bytes."""
        requested = set(names)
        if len(requested) < _MAX_SINGLE_REQUESTS:
            sizes = {name: self.root.size(name) for name in requested}
            return {name: size for name, size in sizes.items() if size is not None}
        return {name: size for name, size in self.list_sizes().items() if name in requested}

    def require_plain_files(self) -> None:
        """Do nothing: an object store has only plain objects."""

    def read_last_bytes(self, sizes: Mapping[str, int], length: int) -> dict[str, bytes]:
        """Return the last `length` bytes of each object, with a few requests at a time."""

        def end(name: str) -> tuple[str, bytes]:
            return name, self.root.read(name, max(0, sizes[name] - length), sizes[name])

        with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="dkfm-ends") as pool:
            return dict(pool.map(end, sizes))

    def open_for_reading(self, name: str, max_bytes: int | None = None) -> IO[bytes] | None:
        """Read a file into memory with one request, so that all of it is of one version."""
        if self.root.size(name) is None:
            return None
        return BytesIO(self.root.read(name) if max_bytes is None else self.root.read(name, 0, max_bytes + 1))

    def make_folder(self, name: str) -> None:
        """Do nothing: an object store has no folders."""

    def sync_names(self, names: Iterable[str]) -> None:
        """Do nothing: an object that exists is durable."""

    @contextmanager
    def create_file(self, name: str, folder: str = "") -> Iterator[PendingFile]:
        """Begin a file, which is removed at the end of the context unless it was committed."""
        with local.translate_write_errors(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
            yield _PendingObject(self.root, name, file)

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file."""
        self.root.replace(name, data)

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files."""
        self.root.remove_objects(*names)

    def remove_partial_files(self, seconds: float = 0.0) -> None:
        """Do nothing: an object that was not written completely does not exist."""


@dataclass(frozen=True)
class _PendingObject:
    """An object that is being written to a temporary file."""

    root: Remote
    key: str
    file: IO[bytes]
    is_synced_on_commit = False

    @property
    def name(self) -> str:
        """Name of the file in messages."""
        return f"{self.root}/{self.key}"

    def commit(self, *, exclusive: bool = False) -> bool:
        """Write the object with one request, and read it back."""
        self.file.seek(0)
        data = self.file.read()
        if not exclusive:
            self.root.replace(self.key, data)
        elif not self.root.create(self.key, data):
            return False
        if self.root.read(self.key) != data:
            raise DamagedStoreError(f"{self.name} does not read back as it was written.")
        return True


def output_at(root: Location) -> OutputLocation:
    """Return the location of the output at a path or URL."""
    return RemoteOutput(root) if isinstance(root, Remote) else LocalOutput(root)


def read_json(location: OutputLocation, name: str, max_bytes: int = json_reading.MAX_JSON) -> dict[str, object] | None:
    """Return the JSON object in a file of an output; None if the file does not exist."""
    opened = location.open_for_reading(name, max_bytes)
    if opened is None:
        return None
    with opened:
        return json_reading.parse_json(opened.read(max_bytes + 1), f"{location}/{name}")
