"""Ctrl-C while a command still imports what it needs ends it as the system does, and not in the middle of an import.

In effect by being imported, where this process is the command; `dkfm.cli.process` takes interruptions over from it.
"""

import signal
import sys
from pathlib import Path

_COMMANDS = (Path("dkfm"), Path("dkfm/__main__.py"))
"""How the name of a program ends that is nothing else."""


def _is_command(program: str) -> bool:
    return any(Path(program).parts[-len(name.parts) :] == name.parts for name in _COMMANDS)


if _is_command(sys.argv[0] if sys.argv else "") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
