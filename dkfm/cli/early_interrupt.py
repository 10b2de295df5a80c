"""Let Ctrl-C end a command without a traceback while it is still importing its modules.

Importing this module has this effect if this process runs the command. Later, `dkfm.cli.process` handles Ctrl-C.
"""

import signal
import sys
from pathlib import Path

_COMMANDS = (Path("dkfm"), Path("dkfm/__main__.py"))
"""Ends of the path of a program that runs the command."""


def _is_command(program: str) -> bool:
    return any(Path(program).parts[-len(name.parts) :] == name.parts for name in _COMMANDS)


if _is_command(sys.argv[0] if sys.argv else "") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
