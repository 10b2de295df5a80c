"""What file systems of fsspec's differ in: how they are opened, listed, and asked to let one writer win.

S3's are opened with limits: ten seconds until a connection and sixty for each part of an answer, unless fsspec's own
configuration says otherwise, eight times at most; a server's errors are tried again by botocore, four times.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dkfm.errors import MissingExtraError, StoreError
from dkfm.refusals import conflict

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["connected", "created", "listed", "stamp"]

_S3 = ("s3", "s3a")
_EXCLUSIVE = (*_S3, "memory")
"""File systems that are known to create a file only where there is none."""

_STAMPS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
"""What file systems call a text that is another one once the file has changed; the first that is there counts."""

_S3_OPTIONS: dict[str, Any] = {"max_concurrency": 1}
"""One request reads one object: several would mix two versions of it."""

_S3_CONFIG: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 4}}
"""Seconds until a connection, and between two parts of an answer; and how often a request is tried."""

_S3_ROUNDS = 2
"""How often s3fs begins anew where botocore has given up, or where an answer broke off."""

_CONFLICTS = 4
_memory_lock = threading.Lock()


def connected(url: str, name: str) -> "tuple[AbstractFileSystem, str]":
    """Return the file system of a URL: fsspec keeps one for each process and set of options, also after a fork."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in _S3:
        set_here = {**conf.get("s3a", {}), **conf.get("s3", {})}
        config = {**_S3_CONFIG, **set_here.get("config_kwargs", {})}
        options |= {**_S3_OPTIONS, **set_here, "config_kwargs": config, "use_listings_cache": False}
    try:
        files, path = url_to_fs(url, **options)
    except ImportError as error:
        extra = "pip install 'dkfm[s3]'" if scheme in _S3 else str(error).partition("\n")[0]
        raise MissingExtraError(f"{name} needs a package that is not installed: {extra.rstrip('.')}.") from None
    except ValueError as error:
        raise StoreError(f"{name} is on no file system that fsspec knows ({error}).") from None
    if scheme in _S3:
        files.retries = _S3_ROUNDS
    return files, str(path)


def _protocols(files: "AbstractFileSystem") -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def created(files: "AbstractFileSystem", path: str, data: bytes, name: str) -> bool:
    """Write a file where there is none; False where there is one."""
    if not set(_protocols(files)) & set(_EXCLUSIVE):
        known = ", ".join(f"{scheme}://" for scheme in _EXCLUSIVE)
        raise StoreError(f"{name} cannot be written: only {known} are known to let one writer win.")
    with _memory_lock if "memory" in _protocols(files) else nullcontext():  # it looks first, then writes
        return _won(files, path, data)


def _won(files: "AbstractFileSystem", path: str, data: bytes) -> bool:
    for attempt in range(1, _CONFLICTS + 1):
        try:
            files.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            status = conflict(error)
            if status == 412:
                return False
            if status != 409 or attempt == _CONFLICTS:  # S3: another one wrote or removed it at this moment
                raise
            time.sleep(0.1 * attempt)
        else:
            break
    return True


def listed(files: "AbstractFileSystem", prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what lies below a prefix; of S3 page by page, where fsspec would hold all of a million names."""
    if not set(_protocols(files)) & set(_S3):
        yield from files.find(prefix.rstrip("/"), detail=True).items()
        return
    bucket, _, key = prefix.partition("/")
    after: dict[str, str] = {}
    while True:
        page = files.call_s3("list_objects_v2", Bucket=bucket, Prefix=key, **after)
        for entry in page.get("Contents", []):
            yield f"{bucket}/{entry['Key']}", {**entry, "size": entry["Size"]}
        if not page.get("IsTruncated"):
            return
        after = {"ContinuationToken": page["NextContinuationToken"]}


def stamp(status: Mapping[str, Any]) -> str:
    """Return a text that is another one once a file has changed."""
    found = next((status[key] for key in _STAMPS if status.get(key)), "")
    # Some give a time in one form where they list files, and in another where they are asked for one.
    return str(found.timestamp() if isinstance(found, datetime) else found)
