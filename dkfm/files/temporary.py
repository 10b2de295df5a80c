"""Temporary folders: removed at the end, by SIGTERM and SIGHUP too; what a killed process left, the next one removes.

Each folder holds a record of the process that made it, locked as long as that process lives. `remove_abandoned` removes
a folder of this user whose lock is free and whose process ended on this host. It never follows a link and never touches
what has no record: a name alone proves nothing in a folder that others write to. One of a store that is empty has none
after a kill at the wrong moment, and is removed after an hour.

Signals: while a folder of `temporary_folder` is in use in the main thread, SIGTERM and SIGHUP unwind the stack where
the program left their default action. The folders of this process are removed, the default action is restored, and the
signal is sent again, so that the exit status is the one without dkfm. One that comes a second later raises again, as
Python drops what is raised in a destructor. At all other times, and in other threads, dkfm handles no
signal, and the next start sweeps.
"""

import atexit
import fcntl
import json
import math
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

from dkfm.core import budget
from dkfm.errors import TemporaryStoreWarning
from dkfm.files.local import translate_write_errors

_ANNOUNCED = 10**9
"""Bytes above which a temporary store is announced."""

_RECORD = "owner.json"
_NAME = re.compile(r"\.?dkfm-[a-z]+-[0-9a-f]{32}")
_MAX_RECORD = 4096
_UNFINISHED = ".dkfm-partial-"
_UNUSED = 3600.0
"""Seconds after which an empty folder of an unfinished store is nobody's."""

_AGAIN = 1.0
"""Seconds after which a signal raises again: what the one before raised has been dropped, or takes too long."""

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_REMEDY = "use another disk with workspace= (--workspace) of a fit, or with the variable TMPDIR"

_sharing = threading.RLock()
_folders: "dict[Path, TemporaryFolder]" = {}
_shared: "dict[tuple[int, str, Path], TemporaryFolder]" = {}


class TemporaryFolder:
    """A temporary folder that lives until `remove`, or as long as this process.

    Parameters
    ----------
    kind : str
        A word of lower-case letters: the folder is called ``dkfm-kind-`` and 32 random digits.
    within : str or Path, optional
        Where it is made, a folder that is there; the temporary directory by default.
    need : int
        Bytes that it will hold, as far as known; see `require_room`.
    what : str
        What it holds, in words that begin a sentence.
    hidden : bool
        Whether the name begins with a dot.

    Raises
    ------
    BudgetError
        The disk has no room for `need` bytes.
    StoreError
        The file system refuses.
    """

    def __init__(
        self, kind: str, within: str | Path | None = None, *, need: int = 0, what: str = "", hidden: bool = False
    ) -> None:
        parent = _parent(within)
        self.path, self._maker = parent / f"{'.' * hidden}dkfm-{kind}-{uuid.uuid4().hex}", os.getpid()
        self._record: int | None = None
        self.parts = 0
        with translate_write_errors(parent):
            remove_abandoned(parent)
            require_room(parent, need, what)
            _folders[self.path] = self
            try:
                self.path.mkdir(mode=0o700)
                self._record = _written_record(self.path)
            except OSError:
                del _folders[self.path]
                with suppress(OSError):
                    (self.path / _RECORD).unlink(missing_ok=True)
                    self.path.rmdir()
                raise

    def remove(self) -> None:
        """Remove the folder with all that is in it; in a forked child, which does not own it, do nothing.

        What cannot be removed now, such as a file that somebody still writes, is tried again at the end of the process.
        """
        if os.getpid() != self._maker or self.path not in _folders:
            return
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _clear(self.path, descriptor)
            finally:
                os.close(descriptor)
        if not self.path.exists():
            _folders.pop(self.path, None)
            if self._record is not None:
                os.close(self._record)


class SharedPart:
    """A folder in a `TemporaryFolder` that all parts of a kind in one place share; parameters are those of it.

    There may be thousands of parts, and an open file for each would be too many.
    """

    def __init__(self, kind: str, within: str | Path | None = None, *, need: int = 0, what: str = "") -> None:
        parent, self._maker = _parent(within), os.getpid()
        with _sharing, translate_write_errors(parent):
            above = _shared.get((self._maker, kind, parent))
            if above is not None:
                require_room(parent, need, what)
                above.parts += 1  # from here on no other part's end, in a destructor at any line, removes it
            if above is None or not above.path.exists():
                above = TemporaryFolder(kind, parent, need=need, what=what)
                above.parts = 1
                _shared[self._maker, kind, parent] = above
            self._above, self.path = above, above.path / uuid.uuid4().hex
            try:
                self.path.mkdir(mode=0o700)
            except OSError:
                self.remove()
                raise

    def remove(self) -> None:
        """Remove the part, the last one with what all share; in a forked child, which does not own it, do nothing."""
        if os.getpid() == self._maker:
            shutil.rmtree(self.path, ignore_errors=True)
            with _sharing:
                self._above.parts -= 1
                if self._above.parts == 0:
                    self._above.remove()


def _parent(within: str | Path | None) -> Path:
    return Path(tempfile.gettempdir() if within is None else within).absolute()


@contextmanager
def temporary_folder(
    kind: str, within: str | Path | None = None, *, need: int = 0, what: str = "", hidden: bool = False
) -> Iterator[Path]:
    """Lend the path of a `TemporaryFolder`, with its parameters; remove it at the end, by SIGTERM and SIGHUP too."""
    with unwinding_on_signals():
        made = TemporaryFolder(kind, within, need=need, what=what, hidden=hidden)
        try:
            yield made.path
        finally:
            made.remove()


def keep_after_exit(path: Path) -> None:
    """Let nobody sweep a temporary folder after this process: what is in it may be all that is left of something."""
    (path / _RECORD).unlink(missing_ok=True)


def remove_all_folders() -> None:
    """Remove all folders that this process still has."""
    for made in list(_folders.values()):
        made.remove()


atexit.register(remove_all_folders)


def require_room(parent: Path, need: int, what: str) -> None:
    """Raise a BudgetError unless a disk has room for a temporary store; announce one that is large.

    Parameters
    ----------
    parent : Path
        The folder that the store is made in.
    need : int
        Bytes of the store.
    what : str
        What it holds, in words that begin a sentence.
    """
    if need:
        budget.require_fits(need, shutil.disk_usage(parent).free, f"{what} in {parent}", _REMEDY)
        warn_of_large_store(parent, need, what)


def warn_of_large_store(parent: Path, need: int, what: str) -> None:
    """Warn with a `TemporaryStoreWarning` before a temporary store of more than 1 GB is written."""
    if need > _ANNOUNCED:
        message = f"{what} takes {budget.format_bytes(need)} in {parent} until the work is done; or {_REMEDY}."
        warnings.warn(message, TemporaryStoreWarning, stacklevel=2)


class _Ended(SystemExit):
    """The end that a signal asks for."""


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, remove what is temporary, and then end the process as by default.

    In the main thread alone, and only for signals that the program and whoever started it left as they are by default.
    """
    main = threading.current_thread() is threading.main_thread()
    taken = [number for number in _ENDINGS if main and signal.getsignal(number) is signal.SIG_DFL]
    received: list[int] = []
    last = -math.inf
    maker = os.getpid()

    def set_all(action: signal.Handlers) -> None:
        for number in taken:
            signal.signal(number, action)

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != maker:  # a forked child cleans nothing
            set_all(signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        nonlocal last
        if time.monotonic() - last >= _AGAIN:  # what the first one ends is not disturbed by a second one at once
            received.append(number)
            last = time.monotonic()
            raise _Ended(128 + number)

    try:
        for number in taken:
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
    """Sweep the temporary directory, the first time in a process."""
    remove_abandoned(Path(tempfile.gettempdir()))


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders in a folder that ended processes of this user on this host have left."""
    with suppress(OSError):
        for path in [path for path in parent.iterdir() if _NAME.fullmatch(path.name) and path not in _folders]:
            with suppress(OSError, ValueError, LookupError, TypeError):  # a record that is none proves nothing
                _sweep(path)


def _sweep(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            record = os.open(_RECORD, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
        except FileNotFoundError:
            old = time.time() - os.fstat(descriptor).st_mtime > _UNUSED
            if path.name.startswith(_UNFINISHED) and _is_own(descriptor) and old:
                path.rmdir()  # which an empty one alone lets happen
            return
        try:
            if _is_own(descriptor) and _is_own(record) and _is_left(record):
                _clear(path, descriptor)
        finally:
            os.close(record)
    finally:
        os.close(descriptor)


def _is_own(descriptor: int) -> bool:
    """Whether this user made an open folder, or an open file that has no second name."""
    found = os.fstat(descriptor)
    return found.st_uid == os.geteuid() and (stat.S_ISDIR(found.st_mode) or found.st_nlink == 1)


def _clear(path: Path, descriptor: int) -> None:
    """Remove a folder that is open, its record last: who is killed meanwhile leaves it to be swept."""
    for name in os.listdir(descriptor):
        if name == _RECORD:
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)
    if os.listdir(descriptor) == [_RECORD]:
        os.unlink(_RECORD, dir_fd=descriptor)
    path.rmdir()


def _written_record(path: Path) -> int:
    """Write the record of a new folder and return it open, locked where the file system has locks."""
    record = os.open(path / _RECORD, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        locked = True
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)  # to wait for one may be for ever
        except OSError:
            locked = False
        told = {**_host(), "pid": os.getpid(), "start": _start(os.getpid()), "locked": locked}
        os.write(record, json.dumps(told).encode())
    except BaseException:
        os.close(record)
        raise
    return record


def _is_left(record: int) -> bool:
    """Whether the process that wrote a record has ended; False where that cannot be known."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        free = False
    else:
        free = True
    told, here = json.loads(os.read(record, _MAX_RECORD)), _host()
    released = free and told["locked"] is True
    if not _same(told, here, "boot" if here["boot"] else "host"):
        return released and _same(told, here, "host", "machine") and bool(here["machine"])  # it was started anew
    if _same(told, here, "pids"):
        return bool(told["start"] != _start(told["pid"]))
    return released  # of another container, where numbers of processes mean nothing


def _same(told: Mapping[str, object], here: Mapping[str, object], *names: str) -> bool:
    return all(told[name] == here[name] for name in names)


def _host() -> dict[str, str]:
    """Return what tells this host, its start, and its numbering of processes from others, as far as known."""
    pids = ""
    with suppress(OSError):
        pids = str(Path("/proc/self/ns/pid").readlink())
    machine, boot = _text("/etc/machine-id"), _text("/proc/sys/kernel/random/boot_id")
    return {"host": socket.gethostname(), "machine": machine, "boot": boot, "pids": pids}


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _start(pid: int) -> str | None:
    """Return when a process started, in ticks since the host did; None where there is none, or only a zombie."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _signalled(pid)
    return None if state in "ZX" else facts[18]


def _signalled(pid: int) -> str | None:
    """Return a word where a process of this number lives, on systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "alive"
