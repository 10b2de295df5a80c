"""Files on this file system: how all are opened to be read, and how new ones are whole before they have their names.

Only plain files are opened, and none of them waits. A new file is durable before it has its name: what a kill leaves is
hidden, or done.
"""

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader, RawIOBase
from pathlib import Path

from dkfm.errors import DkfmError, StoreError, StoreExistsError, UnreachableError, UnsupportedStoreError, reason

ABANDONED_SECONDS = 3600.0
"""Seconds after which a file that was being written is taken for a dead writer's."""

_HEAD = 4096
"""Bytes at the begin of a file in which it says who wrote it."""

_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of this file system; a URL of another one is refused, and so is what cannot be a path here."""
    text = os.fspath(path)
    if "://" in text:
        raise StoreError(f"{text} is not on a local file system; only models, rows and outputs may be elsewhere.")
    path = Path(text)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # the latter where it has a NUL character
        raise StoreError(f"{text} cannot be used: {getattr(error, 'strerror', None) or reason(error)}.") from None
    return path


def open_plain(path: str | os.PathLike[str], most: int | None = None) -> BufferedReader:
    """Open a plain file to be read, whatever lies at its path: a pipe, a socket, a device or a folder is refused.

    Parameters
    ----------
    path : str or Path
    most : int, optional
        Bytes that the file may have.

    Raises
    ------
    OSError
        There is no such file, it is not a plain one, or it is larger; `strerror` is a part of a sentence.
    """
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115  # the caller closes it; Path has no opener
    size = os.fstat(file.fileno()).st_size
    if most is not None and size > most:
        file.close()
        raise OSError(errno.EFBIG, f"it has {size} bytes and may have {most}", str(path))
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    """Return the descriptor of a plain file; a pipe would wait for a writer, and a device might do anything."""
    _require_plain(Path(path).stat().st_mode, path)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_plain(os.fstat(descriptor).st_mode, path)  # it may have been replaced since
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


def read_plain(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a plain file of at most so many bytes; raise as `open_plain` does."""
    with open_plain(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)  # it takes memory for all that is asked for
    if len(data) != size:
        raise OSError(errno.EAGAIN, "it changed while it was read", str(path))
    return data


class BoundedReader(BufferedReader):
    """A binary file of which at most so many bytes are read at a time, whatever a length in it says."""

    def __init__(self, raw: RawIOBase, most: int) -> None:
        super().__init__(raw, 2**18)
        self._most = most

    def read(self, size: int | None = -1, /) -> bytes:
        """Read some bytes; of a call for all that is left only so many may come."""
        wanted = self._most + 1 if size is None or size < 0 else size
        data = super().read(wanted) if wanted <= self._most + 1 else b""
        if wanted > self._most + 1 or len(data) > self._most:
            raise ValueError(f"a part of it is longer than {self._most} bytes")
        return data


def is_partial(name: str) -> bool:
    """Whether a file has the name of one that is being written."""
    return _PARTIAL.search(name) is not None


@contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a sentence."""
    try:
        yield
    except DkfmError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}.") from error


def make_folder(path: Path) -> Path:
    """Make a folder, with those above it, where there is none, and return its path."""
    with translate_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def hidden_sibling(path: Path, suffix: str) -> Path:
    """Return a hidden name in the folder of a path, which nobody else has."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{suffix}")


@dataclass(frozen=True)
class NewFile:
    """A file that is being written under a hidden name beside its place."""

    path: Path
    file: BufferedRandom
    _root: Path
    _hidden: Path
    durable = True

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
        if not exclusive:
            _rename(self._hidden, self.path)
        elif not _link(self._hidden, self.path):
            return False
        for folder in self.path.relative_to(self._root).parents:
            sync_folder(self._root / folder)
        return True


def _rename(hidden: Path, path: Path) -> None:
    try:
        hidden.replace(path)
    except FileNotFoundError:
        raise _cleaned_up(path) from None


def _cleaned_up(path: Path) -> UnreachableError:
    """Return the error of a file whose hidden name another run removed when it completed the output."""
    return UnreachableError(f"{path} cannot be written: another run cleaned up while it was made.")


def _link(hidden: Path, path: Path) -> bool:
    try:
        os.link(hidden, path)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if path.exists():
            return False  # another run completed this output, and cleaned up
        raise _cleaned_up(path) from None
    except OSError:  # a file system without links; what others write there meanwhile has the same values
        if path.exists():
            return False
        _rename(hidden, path)
    return True


@contextmanager
def new_file(path: Path, root: Path) -> Iterator[NewFile]:
    """Open a new file at a path below `root`, for writing and reading; without `keep` nothing is left of it.

    The root must be there: a folder that somebody removed is not made again. Folders below it are made, and none of
    them may be a link.

    Not through Zarr, which copies the values to encode them and does not wait until they are durable.
    """
    hidden = hidden_sibling(path, "partial")
    with translate_write_errors(root):
        try:
            _make_folders(path, root)
            with hidden.open("xb+") as file:
                yield NewFile(path, file, root, hidden)
        except FileNotFoundError:
            _require_root(path, root)
            raise
        finally:
            hidden.unlink(missing_ok=True)


def require_signature(path: Path, sign: bytes, what: str) -> None:
    """Raise a `StoreExistsError` where a file is there that does not have a sign at its begin; an empty one may go."""
    with translate_write_errors(path):
        if not path.exists():
            return
        head = b"not a file"
        if path.is_file():
            with open_plain(path) as file:
                head = file.read(_HEAD)
    if head and sign not in head:
        raise StoreExistsError(
            f"{path} holds something that is not a {what} of dkfm's; move it away, or choose another path."
        )


def _make_folders(path: Path, root: Path) -> None:
    """Make the folders that lead from a root to a file."""
    _require_root(path, root)
    require_no_links(path, root)
    for folder in reversed(path.relative_to(root).parents[:-1]):
        (root / folder).mkdir(exist_ok=True)
    require_no_links(path, root)


def _require_root(path: Path, root: Path) -> None:
    if not root.is_dir():
        raise StoreError(f"{path} cannot be written: {root} was removed meanwhile.")


def require_no_links(path: Path, root: Path) -> None:
    """Raise an UnsupportedStoreError where a link leads from a root to a file in it: it may lead anywhere."""
    for folder in path.relative_to(root).parents[:-1]:
        if (root / folder).is_symlink():
            raise UnsupportedStoreError(f"{path} is left as it is: {root / folder} is a link.")


def sync_tree(root: Path) -> None:
    """Make all files below a folder durable, and their names."""
    for folder, _, names in os.walk(root):
        for name in names:
            sync_file(Path(folder) / name)
        sync_folder(Path(folder))


def sync_file(path: Path) -> None:
    """Make what is in a file durable."""
    with open_plain(path) as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
