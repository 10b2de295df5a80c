"""Record the process that created a folder, locked while the process lives, and find whether it has ended."""

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

RECORD_NAME = "owner.json"
"""Name of the record in a folder."""

_MAX_RECORD_BYTES = 4096
"""Bytes of a record that are read."""


def create_locked_record(path: Path) -> int:
    """Write the record of a new folder; return its descriptor, locked if the file system supports locks."""
    record = os.open(path / RECORD_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        locked = True
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)  # never wait for a lock
        except OSError:
            locked = False
        content = {**_describe_host(), "pid": os.getpid(), "start": _start_time(os.getpid()), "locked": locked}
        os.write(record, json.dumps(content).encode())
    except BaseException:
        os.close(record)
        raise
    return record


def has_ended(record: int) -> bool:
    """Return whether the process that wrote a record has ended; False if that cannot be known."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        free = False
    else:
        free = True
    owner, here = json.loads(os.read(record, _MAX_RECORD_BYTES)), _describe_host()
    released = free and owner["locked"] is True
    if not _have_equal_fields(owner, here, "boot" if here["boot"] else "host"):  # rebooted, or another host
        return released and _have_equal_fields(owner, here, "host", "machine") and bool(here["machine"])
    if _have_equal_fields(owner, here, "pids"):
        return bool(owner["start"] != _start_time(owner["pid"]))
    return released  # another container, whose process ids are not valid here


def _have_equal_fields(owner: Mapping[str, object], here: Mapping[str, object], *names: str) -> bool:
    return all(owner[name] == here[name] for name in names)


def _describe_host() -> dict[str, str]:
    """Return the name, machine id, boot id and process namespace of this host; empty where unknown."""
    pids = ""
    with suppress(OSError):
        pids = str(Path("/proc/self/ns/pid").readlink())
    machine, boot = _read_text("/etc/machine-id"), _read_text("/proc/sys/kernel/random/boot_id")
    return {"host": socket.gethostname(), "machine": machine, "boot": boot, "pids": pids}


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Return when a process started, in ticks since boot; None if there is no such process, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # the name in it is cut to 15 bytes
        state, *facts = stat.rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _probe_process(pid)
    return None if state in "ZX" else facts[18]


def _probe_process(pid: int) -> str | None:
    """Return a constant if a process exists, else None; used on systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "alive"
