"""Where an output lies: a folder of this file system, or a prefix of an object store, behind the same few operations.

A file gets its name when all of it is there, and does not take the place of another unless that is meant.
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
from dkfm.storage import json_documents, model_transfer, ownership, zarr_schema, zarr_store

_TRIES = 8
"""How often a file is written; each other run of a job removes what is half written once, when it is done."""

_FEW, _AT_ONCE = 4, 8
"""Names for which a place is asked one by one, and requests at a time."""


class PendingFile(Protocol):
    """A file that is being written and has no name yet."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def file(self) -> IO[bytes]:
        """Where it is written, and read back."""

    @property
    def durable(self) -> bool:
        """Whether what is in it must be durable before it has its name."""

    def keep(self, *, once: bool = False) -> bool:
        """Give the file its name; with `once` not in place of another: False where there is one."""


class OutputLocation(Protocol):
    """A folder, or what is like one."""

    @property
    def late(self) -> bool:
        """Whether what was begun for an output that was here before may still get its name."""

    def create(self, name: str, data: bytes, overwrite: bool) -> AbstractContextManager["OutputLocation"]:
        """Begin an output with its first file; yield where its other files go until all of them are there."""

    def own_attributes(self) -> dict[str, object] | None:
        """Return the attributes of dkfm's store here; None where nothing is, an empty dict where dkfm wrote none."""

    def attributes(self) -> dict[str, object]:
        """Return what dkfm says of the output here, checked as `zarr_schema.read_group` does."""

    def array(self, name: str) -> zarr_schema.ArrayInfo | None:
        """Return what the metadata of an array state; None where there are none."""

    def names(self) -> Iterator[str]:
        """Yield the names of all files; refuse what is not a plain one."""

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the bytes of those files that are there."""

    def require_plain(self) -> None:
        """Raise where there is something that is not a plain file, such as a link."""

    def ends(self, sizes: Mapping[str, int], length: int) -> dict[str, bytes]:
        """Return the last bytes of files of these sizes."""

    def open(self, name: str, most: int | None = None) -> IO[bytes] | None:
        """Open a file to be read; None where there is none. Of one larger than `most` bytes no more need be there."""

    def new(self, name: str) -> AbstractContextManager[PendingFile]:
        """Begin a file, of which nothing is left unless it is kept."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file, durably, whatever is there."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as they are there; durably for those who look next."""

    def sweep(self, seconds: float = 0.0) -> None:
        """Remove what killed writers left, where nothing was written to it for so long."""


@dataclass(frozen=True)
class LocalOutput:
    """A folder of this file system."""

    root: Path
    late = False  # a file lies, hidden, in the folder that goes with the output

    def __str__(self) -> str:
        return str(self.root)

    @contextmanager
    def create(self, name: str, data: bytes, overwrite: bool) -> Iterator["OutputLocation"]:
        """Begin an output with its first file, in a folder beside its place."""
        with zarr_store.new_store_folder(self.root, "scores", overwrite=overwrite) as folder:
            folder.mkdir()
            (folder / name).write_bytes(data)
            yield LocalOutput(folder)

    def own_attributes(self) -> dict[str, object] | None:
        """Return the attributes of dkfm's store here; raise where something else is."""
        return zarr_store.require_own_store(self.root) if zarr_store.is_taken(self.root) else None

    def attributes(self) -> dict[str, object]:
        """Return what dkfm says of the output here."""
        return zarr_schema.read_group(self.root, "scores")

    def array(self, name: str) -> zarr_schema.ArrayInfo | None:
        """Return what the metadata of an array state."""
        return zarr_schema.read_array(self.root / name)

    def names(self) -> Iterator[str]:
        """Yield the names of all files."""
        return zarr_schema.list_files(self.root)

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the bytes of those files that are there."""
        found = {}
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError):
                found[name] = (self.root / name).stat().st_size
        return found

    def require_plain(self) -> None:
        """Raise where there is something that is not a plain file."""
        for _ in self.names():
            pass

    def ends(self, sizes: Mapping[str, int], length: int) -> dict[str, bytes]:
        """Return the last bytes of files of these sizes."""
        found = {}
        for name, size in sizes.items():
            opened = self.open(name)
            if opened is not None:
                with opened:
                    opened.seek(max(0, size - length))
                    found[name] = opened.read(length)
        return found

    def open(self, name: str, most: int | None = None) -> IO[bytes] | None:
        """Open a file to be read."""
        try:
            return local.open_plain(self.root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self.root / name} cannot be read: {error.strerror}.") from None

    @contextmanager
    def new(self, name: str) -> Iterator[PendingFile]:
        """Begin a file."""
        with local.new_file(self.root / name, self.root) as new:
            yield new

    def put(self, name: str, data: bytes) -> None:
        """Write a file, durably, and anew where another run that completed the output removed it half written."""
        for left in reversed(range(_TRIES)):
            try:
                self._put(name, data)
                return
            except UnreachableError:
                if not left:
                    raise

    def _put(self, name: str, data: bytes) -> None:
        with local.new_file(self.root / name, self.root) as new:
            new.file.write(data)
            new.keep()

    def remove(self, names: Iterable[str]) -> None:
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

    def sweep(self, seconds: float = 0.0) -> None:
        """Remove what killed writers left."""
        ownership.remove_partial_files(self.root, self.attributes(), seconds)


@dataclass(frozen=True)
class RemoteOutput:
    """What lies below a prefix on an object store."""

    root: Remote
    late = True  # a request may take as long as it likes

    def __str__(self) -> str:
        return str(self.root)

    @contextmanager
    def create(self, name: str, data: bytes, overwrite: bool) -> Iterator["OutputLocation"]:
        """Begin an output with its first file, which claims the place."""
        model_transfer.claim(self.root, "scores", name, data, overwrite)
        yield self

    def own_attributes(self) -> dict[str, object] | None:
        """Return the attributes of dkfm's store here."""
        return model_transfer.own_attributes_at(self.root) if model_transfer.is_taken_at(self.root) else None

    def attributes(self) -> dict[str, object]:
        """Return what dkfm says of the output here."""
        return model_transfer.remote_attributes(self.root, "scores")

    def array(self, name: str) -> zarr_schema.ArrayInfo | None:
        """Return what the metadata of an array state."""
        path = f"{name}/zarr.json"
        if self.root.size(path) is None:
            return None
        data = self.root.read(path, 0, json_documents.MAX_JSON + 1)
        return zarr_schema.array_info(json_documents.parse_json(data, f"{self.root}/{path}"), f"{self.root}/{name}")

    def names(self) -> Iterator[str]:
        """Yield the names of all files."""
        return (name for name, _, _ in self.root.names())

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the bytes of those files that are there."""
        wanted = set(names)
        if len(wanted) < _FEW:
            sizes = {name: self.root.size(name) for name in wanted}
            return {name: size for name, size in sizes.items() if size is not None}
        return {name: size for name, size, _ in self.root.names() if name in wanted}

    def require_plain(self) -> None:
        """Do nothing: there are only objects."""

    def ends(self, sizes: Mapping[str, int], length: int) -> dict[str, bytes]:
        """Return the last bytes of objects of these sizes, some at a time."""

        def end(name: str) -> tuple[str, bytes]:
            return name, self.root.read(name, max(0, sizes[name] - length), sizes[name])

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dkfm-ends") as pool:
            return dict(pool.map(end, sizes))

    def open(self, name: str, most: int | None = None) -> IO[bytes] | None:
        """Open a file to be read: all of it is in memory then, for one request is one state of it."""
        if self.root.size(name) is None:
            return None
        return BytesIO(self.root.read(name) if most is None else self.root.read(name, 0, most + 1))

    @contextmanager
    def new(self, name: str) -> Iterator[PendingFile]:
        """Begin a file."""
        with local.translate_write_errors(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
            yield _NewObject(self.root, name, file)

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""
        self.root.replace(name, data)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        self.root.remove(*names)

    def sweep(self, seconds: float = 0.0) -> None:
        """Do nothing: what was not written to its end is not there."""


@dataclass(frozen=True)
class _NewObject:
    """An object that is being made in a temporary file."""

    root: Remote
    key: str
    file: IO[bytes]
    durable = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.root}/{self.key}"

    def keep(self, *, once: bool = False) -> bool:
        """Write the object in one request, and read it back."""
        self.file.seek(0)
        data = self.file.read()
        if not once:
            self.root.replace(self.key, data)
        elif not self.root.create(self.key, data):
            return False
        if self.root.read(self.key) != data:
            raise DamagedStoreError(f"{self.name} does not read back as it was written.")
        return True


def output_at(root: Location) -> OutputLocation:
    """Return the place that a root names."""
    return RemoteOutput(root) if isinstance(root, Remote) else LocalOutput(root)
