"""Open plain files of this file system, and write new ones atomically.

Only regular files (called plain) are opened, and opening never blocks. A new file is flushed to disk before it is
renamed to its final name, so a kill leaves either a hidden partial file or a complete file.
"""

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader, RawIOBase
from pathlib import Path

from dkfm.errors import (
    DkfmError,
    InvalidInputError,
    StoreError,
    StoreExistsError,
    UnreachableError,
    UnsupportedStoreError,
    extract_reason,
)

ABANDONED_SECONDS = 3600.0
"""Seconds without a write after which a partial file counts as abandoned."""

_SIGNATURE_BYTES = 4096
"""Bytes at the beginning of a file that are searched for dkfm's signature."""

_PARTIAL_NAME = re.compile(r"\.[0-9a-f]{32}\.partial$")


def as_local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of this file system; raise a StoreError for a URL or for an object that is not a path."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise StoreError(f"A path must be text, a Path or a URL, and is {path!r:.100}.")
    if not text:
        raise StoreError("A path is empty text; '.' is the current folder.")
    if "://" in text:
        raise StoreError(f"{text} is not on a local file system; only models, rows and outputs may be elsewhere.")
    path = Path(text)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError) as error:  # ValueError if it contains a NUL character
        cause = getattr(error, "strerror", None) or extract_reason(error)
        raise StoreError(f"{text} cannot be used: {cause}.") from None
    return path


def open_plain(path: str | os.PathLike[str], max_bytes: int | None = None) -> BufferedReader:
    """Open a plain file for reading; raise for a pipe, a socket, a device or a folder.

    Parameters
    ----------
    path : str or Path
        Path of the file.
    max_bytes : int, optional
        Largest size of the file, in bytes.

    Returns
    -------
    io.BufferedReader
        The open file.

    Raises
    ------
    OSError
        The file does not exist, is not a plain file, or is too large; `strerror` can be part of a sentence.
    """
    file = open(path, "rb", opener=_open_without_blocking)  # noqa: SIM115  # the caller closes it; Path has no opener
    size = os.fstat(file.fileno()).st_size
    if max_bytes is not None and size > max_bytes:
        file.close()
        raise OSError(errno.EFBIG, f"it has {size} bytes and may have {max_bytes}", str(path))
    return file


def _open_without_blocking(path: str, flags: int) -> int:
    """Return the descriptor of a plain file; opening a pipe would block, and opening a device may have side effects."""
    _require_plain(Path(path).stat().st_mode, path)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_plain(os.fstat(descriptor).st_mode, path)  # it may have been replaced meanwhile
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_plain(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a plain file", path)


def read_plain(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a plain file of at most `max_bytes` bytes; raise as `open_plain` does."""
    with open_plain(path, max_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)  # read() allocates the requested size
    if len(data) != size:
        raise OSError(errno.EAGAIN, "it changed while it was read", str(path))
    return data


class ReadSizeLimitedReader(BufferedReader):
    """Binary file that reads at most `max_bytes` bytes at a time, even if a header in the file claims more."""

    def __init__(self, raw: RawIOBase, max_bytes: int) -> None:
        super().__init__(raw, 2**18)
        self._max_bytes = max_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes; raise a ValueError if they are more than the limit."""
        count = self._max_bytes + 1 if size is None or size < 0 else size
        data = super().read(count) if count <= self._max_bytes + 1 else b""
        if count > self._max_bytes + 1 or len(data) > self._max_bytes:
            raise ValueError(f"a part of it is longer than {self._max_bytes} bytes")
        return data


def is_partial(name: str) -> bool:
    """Return whether a name is that of a partial file, which is being written."""
    return _PARTIAL_NAME.search(name) is not None


@contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Raise a StoreError of one sentence in place of an OSError while writing."""
    try:
        yield
    except DkfmError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}.") from error


def make_folder(path: Path) -> Path:
    """Create a folder and its parents unless they exist; return its path."""
    with translate_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def hidden_sibling(path: Path, suffix: str) -> Path:
    """Return a unique hidden name in the folder of a path."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{suffix}")


@dataclass(frozen=True)
class NewFile:
    """A file that is being written under a hidden name beside its final path."""

    path: Path
    file: BufferedRandom
    _synced_root: Path
    _hidden: Path
    is_synced_on_commit = True

    @property
    def name(self) -> str:
        """Name of the file in messages."""
        return str(self.path)

    def commit(self, *, exclusive: bool = False) -> bool:
        """Give the file its final name; content and name are durable afterwards.

        Return False, and change nothing, if `exclusive` and a file of that name exists.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        if exclusive:
            created = _link(self._hidden, self.path)
        else:
            _rename(self._hidden, self.path)
            created = True
        # Also flush an existing file, because the task that wrote it may have been killed before it did.
        sync_parent_folders(self.path, self._synced_root)
        return created


def _rename(hidden: Path, path: Path) -> None:
    try:
        hidden.replace(path)
    except FileNotFoundError:
        raise _partial_file_removed_error(path) from None


def _partial_file_removed_error(path: Path) -> UnreachableError:
    """Return the error for a partial file that another run removed when it completed the output."""
    return UnreachableError(f"{path} cannot be written: another run cleaned up while it was made.")


def _link(hidden: Path, path: Path) -> bool:
    try:
        os.link(hidden, path)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if path.exists():
            return False  # another run completed this output and removed partial files
        raise _partial_file_removed_error(path) from None
    except OSError:  # a file system without hard links; other tasks write the same values
        if path.exists():
            return False
        _rename(hidden, path)
    return True


@contextmanager
def new_file(path: Path, root: Path, durable: Path | None = None) -> Iterator[NewFile]:
    """Open a new file at a path below `root` for writing and reading; remove it at the end unless it was committed.

    `root` must exist: a folder that was removed meanwhile is not created again. Folders below it are created, and none
    of them may be a link. Of the folders above the file, those above `durable` are not synced to disk, because their
    names are (`make_durable_folder`); by default `durable` is `root`.

    Zarr's own writer is not used, because it copies values to encode them and does not sync files to disk.
    """
    hidden = hidden_sibling(path, "partial")
    with translate_write_errors(root):
        try:
            _make_folders(path, root)
            with hidden.open("xb+") as file:
                yield NewFile(path, file, durable or root, hidden)
        except FileNotFoundError:
            _require_root_exists(path, root)
            raise
        finally:
            hidden.unlink(missing_ok=True)


def require_parent_folder(path: Path) -> None:
    """Raise an InvalidInputError if the folder of a file does not exist, or if the path itself is a folder."""
    folder = path.absolute().parent
    if not folder.is_dir() or path.is_dir():
        raise InvalidInputError(
            f"{path} cannot be written: {'it is a folder' if folder.is_dir() else 'its folder is not there'}."
        )


def require_replaceable_file(path: Path, signature: bytes, what: str) -> None:
    """Raise unless a file can be written: its folder exists, and an earlier one is empty or has a signature of dkfm.

    Raises
    ------
    InvalidInputError
        There is no folder for it.
    StoreExistsError
        The file has no signature at its beginning.
    """
    with translate_write_errors(path):
        require_parent_folder(path)
        if not path.exists():
            return
        head = b"not a file"
        if path.is_file():
            with open_plain(path) as file:
                head = file.read(_SIGNATURE_BYTES)
    if head and signature not in head:
        raise StoreExistsError(
            f"{path} holds something that is not a {what} of dkfm's; move it away, or choose another path."
        )


def _make_folders(path: Path, root: Path) -> None:
    """Create the folders between a root and a file."""
    _require_root_exists(path, root)
    require_no_links(path, root)
    folders = [root / folder for folder in path.relative_to(root).parents[:-1]]
    if folders:
        try:
            folders[0].mkdir(exist_ok=True)
        except FileNotFoundError:
            for folder in reversed(folders):
                folder.mkdir(exist_ok=True)
    require_no_links(path, root)


def make_durable_folder(path: Path, root: Path) -> None:
    """Create a folder below `root`, which must exist, and those between; sync their names to disk."""
    with translate_write_errors(root):
        _make_folders(path / "file", root)
        sync_parent_folders(path, root)


def sync_parent_folders(path: Path, root: Path) -> None:
    """Sync the folders of a path to disk, up to `root`."""
    for folder in path.relative_to(root).parents:
        sync_folder(root / folder)


def _require_root_exists(path: Path, root: Path) -> None:
    if not root.is_dir():
        raise StoreError(f"{path} cannot be written: {root} was removed meanwhile.")


def require_no_links(path: Path, root: Path) -> None:
    """Raise an UnsupportedStoreError if a folder between a root and a file is a link, which could point anywhere."""
    for folder in path.relative_to(root).parents[:-1]:
        if (root / folder).is_symlink():
            raise UnsupportedStoreError(f"{path} is left as it is: {root / folder} is a link.")


def sync_tree(root: Path) -> None:
    """Sync all files below a folder, and their names, to disk."""
    for folder, _, names in os.walk(root):
        for name in names:
            sync_file(Path(folder) / name)
        sync_folder(Path(folder))


def sync_file(path: Path) -> None:
    """Flush a file to disk with fsync, so that its content survives a crash."""
    with open_plain(path) as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder to disk with fsync, so that files created, renamed or deleted in it stay so after a crash."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
