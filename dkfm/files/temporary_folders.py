"""Create temporary folders, remove them at the end and on SIGTERM or SIGHUP, and sweep those of dead processes.

Each folder holds a record of the process that created it, which is locked while the process lives. `remove_abandoned`
removes a folder of this user if its lock is free and its process has ended on this host. It never follows a link, and
never touches a folder without a record, because others could create a folder of this name. A kill at the wrong moment
may leave the folder of an unfinished store empty and without a record; such a folder is removed after an hour.

Signals: while a folder of `open_temporary_folder` is in use in the main thread, SIGTERM and SIGHUP unwind the stack,
unless the program has changed their default action. The folders of this process are removed, the default action is
restored, and the signal is sent again, so that the exit status is the same as without dkfm. A second signal after a
second raises again, because Python drops an exception that is raised in a destructor. At all other times, and in other
threads, dkfm handles no signals.
"""

import atexit
import math
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

from dkfm.core import budget
from dkfm.core.display.quantities import format_bytes
from dkfm.errors import TemporaryStoreWarning, warn_caller
from dkfm.files.local import translate_write_errors
from dkfm.files.process_records import RECORD_NAME, create_locked_record, has_ended
from dkfm.files.signals import postpone_signal

_ANNOUNCED_BYTES = 10**9
"""Size, in bytes, above which a warning announces a temporary store."""

_FOLDER_NAME = re.compile(r"\.?dkfm-[a-z]+-[0-9a-f]{32}")

_UNFINISHED_PREFIX = ".dkfm-partial-"
"""Beginning of the names of folders of unfinished stores."""

_UNUSED_SECONDS = 3600.0
"""Age after which an empty folder of an unfinished store is removed."""

_REPEAT_AFTER = 1.0
"""Seconds after which another signal raises again, because the first exception was dropped or the clean-up is slow."""

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that unwind the stack."""

_REMEDY = "use another disk with workspace= (--workspace) of a fit, or with the variable TMPDIR"

_sharing = threading.RLock()
"""Guards `_shared`; reentrant, because a destructor may run at any line."""

_folders: "dict[Path, TemporaryFolder]" = {}
_removed: deque[tuple[int, Path]] = deque(maxlen=1000)
"""Last folders that were removed, each with the process that made it.

After an interruption, a thread of Zarr that still writes a file makes its folder again.
"""
_shared: "dict[tuple[int, str, Path], TemporaryFolder]" = {}


class TemporaryFolder:
    """A temporary folder that lives until `remove`, or as long as this process.

    Parameters
    ----------
    kind : str
        A word of lower-case letters; the name of the folder is ``dkfm-kind-`` and 32 random digits.
    within : str or Path, optional
        Existing folder in which to create it; the temporary directory by default.
    need : int
        Bytes that it will hold, or 0 if unknown; see `require_room`.
    what : str
        Description of the content, as the subject of a sentence.
    hidden : bool
        Whether the name begins with a dot.

    Raises
    ------
    BudgetError
        The disk has less than `need` bytes free.
    StoreError
        The file system refuses to create the folder.
    """

    def __init__(
        self, kind: str, within: str | Path | None = None, *, need: int = 0, what: str = "", hidden: bool = False
    ) -> None:
        parent = _parent(within)
        self.path, self._creator = parent / f"{'.' * hidden}dkfm-{kind}-{uuid.uuid4().hex}", os.getpid()
        self._record: int | None = None
        self.parts = 0
        with translate_write_errors(parent):
            remove_abandoned(parent)
            require_room(parent, need, what)
            _folders[self.path] = self
            try:
                self.path.mkdir(mode=0o700)
                self._record = create_locked_record(self.path)
            except BaseException:
                del _folders[self.path]
                with suppress(OSError):
                    (self.path / RECORD_NAME).unlink(missing_ok=True)
                    self.path.rmdir()
                raise

    def remove(self) -> None:
        """Remove the folder and its content; in a forked child, which does not own it, do nothing.

        If something cannot be removed now, as a file that is still being written, the end of the process tries again.
        """
        if os.getpid() != self._creator or self.path not in _folders:
            return
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _remove_open_folder(self.path, descriptor)
            finally:
                os.close(descriptor)
        if not self.path.exists() and _folders.pop(self.path, None) is not None:
            _removed.append((self._creator, self.path))
            if self._record is not None:
                os.close(self._record)


class TemporarySubfolder:
    """A subfolder of a `TemporaryFolder` that all subfolders of the same kind and parent share.

    Thousands of objects of `TemporaryFolder` would keep too many files open. The parameters are the same.
    """

    def __init__(self, kind: str, within: str | Path | None = None, *, need: int = 0, what: str = "") -> None:
        parent, self._creator = _parent(within), os.getpid()
        with _sharing, translate_write_errors(parent):
            folder = _shared.get((self._creator, kind, parent))
            if folder is not None:
                require_room(parent, need, what)
                folder.parts += 1  # from here on the removal of another part, in a destructor, keeps the folder
            if folder is None or not folder.path.exists():
                folder = TemporaryFolder(kind, parent, need=need, what=what)
                folder.parts = 1
                _shared[self._creator, kind, parent] = folder
            self._folder, self.path = folder, folder.path / uuid.uuid4().hex
            try:
                self.path.mkdir(mode=0o700)
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Remove the part, and with the last part the folder; in a forked child, which does not own it, do nothing."""
        if os.getpid() == self._creator:
            shutil.rmtree(self.path, ignore_errors=True)
            with _sharing:
                self._folder.parts -= 1
                if self._folder.parts == 0:
                    self._folder.remove()


def _parent(within: str | Path | None) -> Path:
    return Path(tempfile.gettempdir() if within is None else within).absolute()


@contextmanager
def open_temporary_folder(
    kind: str, within: str | Path | None = None, *, need: int = 0, what: str = "", hidden: bool = False
) -> Iterator[Path]:
    """Yield the path of a `TemporaryFolder`; remove it when the context ends, or on SIGTERM and SIGHUP."""
    with unwinding_on_signals():
        folder = TemporaryFolder(kind, within, need=need, what=what, hidden=hidden)
        try:
            yield folder.path
        finally:
            folder.remove()


def has_temporary_name(path: Path) -> bool:
    """Return whether a path has the name of a temporary folder of dkfm's.

    >>> has_temporary_name(Path("dkfm-model-" + 32 * "0")), has_temporary_name(Path("dkfm-model-of-mine"))
    (True, False)
    """
    return _FOLDER_NAME.fullmatch(path.name) is not None


def remove_owner_record(path: Path) -> None:
    """Remove the owner record of a temporary folder that may hold the only copy of user data, so it is never swept."""
    (path / RECORD_NAME).unlink(missing_ok=True)


def remove_all_folders() -> None:
    """Remove all temporary folders of this process, and those that a thread of it has made again."""
    for folder in list(_folders.values()):
        folder.remove()
    for creator, path in list(_removed):
        if creator == os.getpid():
            shutil.rmtree(path, ignore_errors=True)


atexit.register(remove_all_folders)


def require_room(parent: Path, need: int, what: str, remedy: str = _REMEDY) -> None:
    """Raise a BudgetError unless a disk has space for a temporary store; warn if the store is large.

    Parameters
    ----------
    parent : Path
        Folder that will contain the store.
    need : int
        Size of the store, in bytes.
    what : str
        Description of the content, as the subject of a sentence.
    remedy : str
        How the user can choose another disk.
    """
    if need:
        budget.require_fits(need, shutil.disk_usage(parent).free, f"{what} in {parent}", remedy)
        warn_of_large_store(parent, need, what, remedy)


def warn_of_large_store(parent: Path, need: int, what: str, remedy: str = _REMEDY) -> None:
    """Warn with a `TemporaryStoreWarning` if a temporary store will be larger than 1 GB."""
    if need > _ANNOUNCED_BYTES:
        message = f"{what} takes {format_bytes(need)} in {parent} until the work is done; or {remedy}."
        warn_caller(message, TemporaryStoreWarning)


class _EndedBySignal(SystemExit):
    """Raised by a signal to unwind the stack."""


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack and remove temporary folders before they end the process.

    This applies only in the main thread, and only to signals whose action is the default one.
    """
    main = threading.current_thread() is threading.main_thread()
    handled = [number for number in _ENDING_SIGNALS if main and signal.getsignal(number) is signal.SIG_DFL]
    received: list[int] = []
    last = -math.inf
    creator = os.getpid()

    def set_all(action: signal.Handlers) -> None:
        for number in handled:
            signal.signal(number, action)

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != creator:  # a forked child removes nothing
            set_all(signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        nonlocal last
        # A second signal at once does not interrupt the clean-up.
        if time.monotonic() - last >= _REPEAT_AFTER and not postpone_signal(number, frame):
            received.append(number)
            last = time.monotonic()
            raise _EndedBySignal(128 + number)

    try:
        for number in handled:
            signal.signal(number, end)
        yield
    finally:
        try:
            if received:
                set_all(signal.SIG_IGN)
                remove_all_folders()
        finally:
            set_all(signal.SIG_DFL)
            if received:
                os.kill(os.getpid(), received[0])


@cache
def remove_abandoned_once() -> None:
    """Remove abandoned folders in the temporary directory, once for each process."""
    remove_abandoned(Path(tempfile.gettempdir()))


def remove_abandoned(parent: Path) -> None:
    """Remove temporary folders that dead processes of this user on this host have left in a folder."""
    with suppress(OSError):
        for path in [path for path in parent.iterdir() if has_temporary_name(path) and path not in _folders]:
            with suppress(OSError, ValueError, LookupError, TypeError):  # an invalid record proves nothing
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            record = os.open(RECORD_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
        except FileNotFoundError:
            old = time.time() - os.fstat(descriptor).st_mtime > _UNUSED_SECONDS
            if path.name.startswith(_UNFINISHED_PREFIX) and _is_owned_by_user(descriptor) and old:
                path.rmdir()  # fails unless it is empty
            return
        try:
            if _is_owned_by_user(descriptor) and _is_owned_by_user(record) and has_ended(record):
                _remove_open_folder(path, descriptor)
        finally:
            os.close(record)
    finally:
        os.close(descriptor)


def _is_owned_by_user(descriptor: int) -> bool:
    """Return whether this user owns an open folder, or an open file without further hard links."""
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and (stat.S_ISDIR(status.st_mode) or status.st_nlink == 1)


def _remove_open_folder(path: Path, descriptor: int) -> None:
    """Remove an open folder, its record last, so that the folder can still be swept after a kill."""
    for name in os.listdir(descriptor):
        if name == RECORD_NAME:
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)
    if os.listdir(descriptor) == [RECORD_NAME]:
        os.unlink(RECORD_NAME, dir_fd=descriptor)
    path.rmdir()
