"""Postpone signals that arrive between the ``__enter__`` of a with statement and its body.

If a signal handler raises at this point, Python 3.14 does not call ``__exit__``, so a lock stays locked forever and the
process hangs (python/cpython#148874). Other versions run no handler at this point.
"""

import _thread
import os
import time
from opcode import opmap
from types import FrameType

_CALL, _LOAD_SPECIAL = opmap["CALL"], opmap.get("LOAD_SPECIAL")

_RESEND_AFTER = 1e-3
"""Seconds after which a postponed signal is sent again."""

_MAX_POSTPONEMENTS = 100
"""Largest number of successive postponements; after them, a thread that waits for a lock is interrupted."""

_postponements = 0


def postpone_signal(number: int, frame: FrameType | None) -> bool:
    """Send a signal to this process again a little later, if its handler must not raise now.

    Parameters
    ----------
    number : int
        Number of the signal.
    frame : frame or None
        Frame that the handler interrupts.

    Returns
    -------
    bool
        Whether the signal was postponed; the handler must then return.
    """
    global _postponements  # noqa: PLW0603  # handlers run in the main thread only
    if frame is None or _postponements >= _MAX_POSTPONEMENTS or not _is_entering_with(frame):
        _postponements = 0
        return False
    _postponements += 1
    _thread.start_new_thread(_send_later, (number,))  # `threading` takes locks, perhaps the one that was just taken
    return True


def _is_entering_with(frame: FrameType) -> bool:
    """Return whether the last instruction of a frame calls the enter method of a with statement."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return at >= 2 and code[at] == _CALL and code[at - 2] == _LOAD_SPECIAL


def _send_later(number: int) -> None:
    time.sleep(_RESEND_AFTER)
    os.kill(os.getpid(), number)
