"""Files that are whole and durable before they have their names: what a kill leaves is hidden, or done."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from dkfm import formats
from dkfm.errors import DkfmError, StoreError, UnreachableError

__all__ = ["NewFile", "beside", "new_file", "sweep", "sync_file", "sync_folder", "sync_tree", "writing"]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a sentence."""
    try:
        yield
    except DkfmError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}.") from error


def beside(path: Path, suffix: str) -> Path:
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
        """What messages call it."""
        return str(self.path)

    def keep(self, *, once: bool = False) -> bool:
        """Give the file its name: what is in it, and the names that lead to it, are durable then.

        With `once` it does not take the place of another: False where there is one.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        if not once:
            self._hidden.replace(self.path)
        elif not _link(self._hidden, self.path):
            return False
        for folder in self.path.relative_to(self._root).parents:
            sync_folder(self._root / folder)
        return True


def _link(hidden: Path, path: Path) -> bool:
    try:
        os.link(hidden, path)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if path.exists():
            return False  # another run completed this output, and cleaned up
        raise UnreachableError(f"{path} cannot be written: another run cleaned up while it was made.") from None
    except OSError:  # a file system without links; what others write there meanwhile has the same values
        if path.exists():
            return False
        hidden.replace(path)
    return True


@contextmanager
def new_file(path: Path, root: Path) -> Iterator[NewFile]:
    """Open a new file at a path below `root`, for writing and reading; without `keep` nothing is left of it.

    Not through Zarr, which copies the values to encode them and does not wait until they are durable.
    """
    hidden = beside(path, "partial")
    with writing(root):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with hidden.open("xb+") as file:
                yield NewFile(path, file, root, hidden)
        finally:
            hidden.unlink(missing_ok=True)


def sweep(root: Path, seconds: float = 0.0) -> None:
    """Remove what killed writers left below a folder, where nothing was written to it for so long."""
    with writing(root):
        before = time.time() - seconds
        for folder, _, names in os.walk(root):
            for name in filter(formats.is_partial, names):
                path = Path(folder) / name
                with suppress(FileNotFoundError):
                    if path.lstat().st_mtime <= before:
                        path.unlink()


def sync_tree(root: Path) -> None:
    """Make all files below a folder durable, and their names."""
    for folder, _, names in os.walk(root):
        for name in names:
            sync_file(Path(folder) / name)
        sync_folder(Path(folder))


def sync_file(path: Path) -> None:
    """Make what is in a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
