"""Read JSON objects of stores from small plain files; duplicate names, which parsers read differently, are an error."""

import errno
import json
from itertools import chain
from pathlib import Path

import google_crc32c

from dkfm.errors import DamagedStoreError, StoreError, UnsupportedStoreError, extract_reason
from dkfm.files import local

MAX_JSON = 2**24
"""Largest size of metadata, in bytes."""

_MAX_DEPTH = 64
"""Largest depth of nested lists and objects."""

_MAX_CONTAINERS = 2**21
"""Largest number of lists and objects; in memory, each takes 30 times the bytes of its text."""


def read_json(path: Path, max_bytes: int = MAX_JSON) -> dict[str, object]:
    """Read a JSON object from a plain file of at most `max_bytes` bytes."""
    try:
        return parse_json(local.read_plain(path, max_bytes), path)
    except FileNotFoundError:
        raise UnsupportedStoreError(f"{path} is missing, so {path.parent} is not a store that dkfm reads.") from None
    except MemoryError as error:
        raise DamagedStoreError(f"{path} is not valid JSON ({extract_reason(error)}).") from None
    except OSError as error:
        error_type = UnsupportedStoreError if error.errno in (errno.EINVAL, errno.EFBIG) else StoreError
        raise error_type(f"{path} cannot be read: {error.strerror}.") from None


def parse_json(data: bytes, name: object) -> dict[str, object]:
    """Parse a JSON object; `name` is its name in messages."""
    if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
        raise DamagedStoreError(f"{name} is not valid JSON (it has more than {_MAX_CONTAINERS} lists and objects).")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedStoreError(f"{name} is not valid JSON ({extract_reason(error)}).") from None
    if not isinstance(value, dict):
        raise DamagedStoreError(f"{name} must hold a JSON object.")
    if not _is_shallow(value):
        raise DamagedStoreError(f"{name} holds JSON that is nested deeper than {_MAX_DEPTH}.")
    return value


def _reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return members


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level = list(chain.from_iterable(nested))
        if not level:
            return True
    return False


def compute_text_crc32c(*texts: str) -> int:
    """Return the CRC-32C of texts joined by NUL bytes, which shows whether an object is complete."""
    return int(google_crc32c.value("\0".join(texts).encode("utf-8", "surrogatepass")))
