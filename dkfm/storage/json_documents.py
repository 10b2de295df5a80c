"""JSON of stores: read from plain files alone, of a size that is small, without anything that readers take two ways."""

import errno
import json
from pathlib import Path

from dkfm.errors import DamagedStoreError, StoreError, UnsupportedStoreError, reason
from dkfm.files import local

MAX_JSON, _MAX_DEPTH, _MAX_PARTS = 2**24, 64, 2**21
"""Bytes of metadata, objects within objects, and lists and objects in all, at most: each takes 30 times its text."""


def read_json(path: Path, most: int = MAX_JSON) -> dict[str, object]:
    """Read a JSON object from a plain file of at most so many bytes."""
    try:
        return parse_json(local.read_plain(path, most), path)
    except FileNotFoundError:
        raise UnsupportedStoreError(f"{path} is missing, so {path.parent} is not a store that dkfm reads.") from None
    except MemoryError as error:
        raise DamagedStoreError(f"{path} is not valid JSON ({reason(error)}).") from None
    except OSError as error:
        refused = UnsupportedStoreError if error.errno in (errno.EINVAL, errno.EFBIG) else StoreError
        raise refused(f"{path} cannot be read: {error.strerror}.") from None


def parse_json(data: bytes, name: object) -> dict[str, object]:
    """Return the JSON object that some bytes are; `name` is what messages call them."""
    if data.count(b"[") + data.count(b"{") > _MAX_PARTS:
        raise DamagedStoreError(f"{name} is not valid JSON (it has more than {_MAX_PARTS} lists and objects).")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedStoreError(f"{name} is not valid JSON ({reason(error)}).") from None
    if not isinstance(value, dict):
        raise DamagedStoreError(f"{name} must hold a JSON object.")
    if not _is_shallow(value):
        raise DamagedStoreError(f"{name} holds JSON that is nested deeper than {_MAX_DEPTH}.")
    return value


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
