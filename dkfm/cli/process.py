"""The process of a command: its streams, Ctrl-C, and an end in one sentence whatever the system refuses."""

import errno
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from dkfm.core.printing import print_message
from dkfm.errors import OutputError, ResourceError, reason

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that was interrupted, as shells give it."""

_AGAIN = 0.01
"""Seconds after which an interruption is raised again that came where Python drops exceptions."""

_PATIENCE = 2.0
"""Seconds for which further interruptions are ignored: what the first one ends takes a while."""

_LACKS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC})

_NO_SEGMENT, _NO_THREAD = "failed to map segment", "can't start new thread"

_OUTPUT = f"{OutputError.__name__}: Standard output cannot be written: {{}}."


def run_command(command: Callable[[], object]) -> NoReturn:
    """Run a command as the whole of this process, and end with its exit code.

    Parameters
    ----------
    command : callable
        It returns nothing or an exit code, or raises SystemExit.
    """
    _open_streams()
    interruption = _Interruption()
    code: object = 1
    try:
        code = command()
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            print_message(str(code))  # as Python does
            code = 1
    except BaseException as error:
        if interruption.came or isinstance(error, KeyboardInterrupt):  # a library may make another error of it
            print_message("Interrupted.")
            code = INTERRUPTED
        else:
            print_message(_sentence(error))
    interruption.end()
    if (failed := _flush()) is not None and not code:
        print_message(_OUTPUT.format(failed))
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Put something in the place of standard streams that are closed, or the next file would get their numbers.

    Standard output is opened for reading, so that a result that is printed there is an error and not lost.
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # it gets the lowest number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for the life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


class _Interruption:
    """Ctrl-C, raised once in `_PATIENCE`: those that follow at once would only end the ending.

    Nothing is raised where whoever started this process has it ignore Ctrl-C.
    """

    def __init__(self) -> None:
        self.came = False
        self._last = -math.inf
        self._before = sys.unraisablehook
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._raise)
            sys.unraisablehook = self._dropped

    def end(self) -> None:
        """Raise nothing more: Python's own end takes a while, and one that hangs is left by another Ctrl-C."""
        if signal.getsignal(signal.SIGALRM) == self._raise:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) == self._raise:
            self._last = time.monotonic()
            signal.signal(signal.SIGINT, self._leave)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._last >= _PATIENCE:
            self.came, self._last = True, time.monotonic()
            raise KeyboardInterrupt

    def _leave(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._last >= _PATIENCE:
            os._exit(INTERRUPTED)

    def _dropped(self, unraisable: "UnraisableHookArgs") -> None:
        """Raise an interruption again that came in a destructor or a callback, where Python drops it."""
        main = threading.current_thread() is threading.main_thread()
        if unraisable.exc_type is KeyboardInterrupt and main:
            self._last = -math.inf
            signal.signal(signal.SIGALRM, self._raise)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        elif not self.came:
            self._before(unraisable)


def _flush() -> str | None:
    """Write out what the standard streams hold; return why standard output does not take it, None where it does.

    What is not taken is dropped: Python would try again at its end, and say so in several lines.
    """
    failed = None
    for number, stream in enumerate((sys.stdout, sys.stderr), 1):
        try:
            stream.flush()
        except OSError as error:
            failed = failed or (_words(error) if number == 1 else None)
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                stream.flush()
    return failed


def _sentence(error: BaseException) -> str:
    """Return what is said of an error that no command expects."""
    if os.environ.get("DKFM_TRACEBACK"):
        raise error
    if isinstance(error, OSError) and (failed := _flush()) is not None:
        return _OUTPUT.format(failed)
    told = _refused(error)
    if told is not None:
        return f"{ResourceError.__name__}: The system {told}."
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"{type(error).__name__}: {reason(error)} ({where}); dkfm did not expect this: DKFM_TRACEBACK=1 shows more."


def _refused(error: BaseException) -> str | None:
    """Return what the system refused; None where an error is of another kind."""
    if not isinstance(error, OSError):
        error = _lack(error)
    if isinstance(error, OSError):
        what = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the command"
        return f"refused {what}: {_words(error)}"
    if isinstance(error, MemoryError) or _NO_SEGMENT in str(error):
        return f"gave no more memory ({reason(error)}); raise its limit, or use fewer rows"
    if _NO_THREAD in str(error):
        return "gave no more threads; raise the limit of processes (ulimit -u), or that of memory (ulimit -v)"
    return None


def _lack(error: BaseException) -> BaseException:
    """Return what the system lacked where an error was made of that, as libraries do; else the error itself."""
    found: BaseException | None = error
    while found is not None:
        told = str(found)
        if (
            isinstance(found, MemoryError)
            or (isinstance(found, OSError) and found.errno in _LACKS)
            or (isinstance(found, ImportError) and _NO_SEGMENT in told)
            or (isinstance(found, RuntimeError) and _NO_THREAD in told)
        ):
            return found
        found = found.__context__
    return error


def _words(error: OSError) -> str:
    return error.strerror or reason(error)
