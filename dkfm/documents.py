"""JSON of stores: read from plain files alone, of a size that is small, without anything that readers take two ways."""

import json
import os
import stat
from pathlib import Path

from dkfm.errors import DamagedStoreError, StoreError, UnsupportedStoreError, reason

__all__ = ["MAX_JSON", "parsed", "read_json"]

MAX_JSON, _MAX_DEPTH = 2**24, 64
"""Bytes of metadata, and objects within objects, at most."""


def read_json(path: Path, most: int = MAX_JSON) -> dict[str, object]:
    """Read a JSON object from a plain file of at most so many bytes."""
    try:
        return parsed(_plain_bytes(path, most), path)
    except FileNotFoundError:
        raise UnsupportedStoreError(f"{path} is missing, so {path.parent} is not a store that dkfm reads.") from None
    except MemoryError as error:
        raise DamagedStoreError(f"{path} is not valid JSON ({reason(error)}).") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from None


def parsed(data: bytes, name: object) -> dict[str, object]:
    """Return the JSON object that some bytes are; `name` is what messages call them."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedStoreError(f"{name} is not valid JSON ({reason(error)}).") from None
    if not isinstance(value, dict):
        raise DamagedStoreError(f"{name} must hold a JSON object.")
    if not _is_shallow(value):
        raise DamagedStoreError(f"{name} holds JSON that is nested deeper than {_MAX_DEPTH}.")
    return value


def _plain_bytes(path: Path, most: int) -> bytes:
    # A pipe in its place would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnsupportedStoreError(f"{path} is not a plain file.")
        if status.st_size > most:
            raise UnsupportedStoreError(f"{path} has {status.st_size} bytes; metadata are at most {most}.")
        return file.read(status.st_size)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for children in nested for child in children]
        if not level:
            return True
    return False
