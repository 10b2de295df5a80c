"""What file systems of fsspec's differ in: how they are opened, listed, and asked to let one writer win.

What may pass is tried again, after pauses that grow, for two minutes. S3's are opened with limits: ten seconds until a
connection and sixty for each part of an answer, unless fsspec's own configuration says otherwise. Where that, the
environment or AWS's configuration file says how often S3 is asked, this is how often.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from datetime import datetime
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from dkfm.errors import DkfmError, MissingExtraError, StoreError
from dkfm.files.fsspec_errors import conflict_status, is_transient

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

_PATIENCE = 120.0
"""Seconds after which a request that keeps failing is not made again.

A task of a job makes its request anew three times; all of it is less than a job's stall timeout.
"""

_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
"""Seconds before the second request at most; each pause is twice the one before, up to the longest."""

_S3 = ("s3", "s3a")
_EXCLUSIVE = (*_S3, "memory")
"""File systems that are known to create a file only where there is none."""

_STAMPS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
"""What file systems call a text that is another one once the file has changed; the first that is there counts."""

_S3_OPTIONS: dict[str, Any] = {"max_concurrency": 1}
"""One request reads one object: several would mix two versions of it."""

_S3_CONFIG: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60}
"""Seconds until a connection, and between two parts of an answer."""

_S3_RETRIES = {"total_max_attempts": 2}
"""How often botocore itself makes a request: a large upload does not begin anew for one part that failed."""

_S3_ROUNDS = 2
"""How often s3fs begins anew where botocore has given up, or where an answer broke off."""

_AWS_PLACES = ("AWS_MAX_ATTEMPTS", "AWS_CONFIG_FILE", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "HOME")
"""What of the environment says how often a request is made, or where that stands."""

_CONFLICTS = 4
_memory_lock = threading.Lock()


def open_filesystem(url: str, name: str) -> "tuple[AbstractFileSystem, str]":
    """Return the file system of a URL: fsspec keeps one for each process and set of options, also after a fork."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in _S3:
        options |= {**_S3_OPTIONS, **_s3_set_here(), "use_listings_cache": False}
    try:
        if scheme in _S3:
            options["config_kwargs"] = _s3_config()
        files, path = url_to_fs(url, **options)
    except ImportError as error:
        extra = "pip install 'dkfm[s3]'" if scheme in _S3 else str(error).partition("\n")[0]
        raise MissingExtraError(f"{name} needs a package that is not installed: {extra.rstrip('.')}.") from None
    except ValueError as error:
        raise StoreError(f"{name} is on no file system that fsspec knows ({error}).") from None
    if scheme in _S3:
        files.retries = _S3_ROUNDS
    return files, str(path)


def _s3_set_here() -> dict[str, Any]:
    """Return the options of S3 in fsspec's configuration."""
    from fsspec.config import conf

    return {**conf.get("s3a", {}), **conf.get("s3", {})}


def _s3_config() -> dict[str, Any]:
    """Return botocore's options: the user's, and those of this module where the user has none."""
    ours = _S3_CONFIG if _s3_attempts_are_set() else {**_S3_CONFIG, "retries": _S3_RETRIES}
    return {**ours, **_s3_set_here().get("config_kwargs", {})}


def _s3_attempts_are_set() -> bool:
    """Whether the user says how often a request of S3 is made."""
    set_here = _s3_set_here()
    if "retries" in set_here.get("config_kwargs", {}):
        return True
    return _aws_sets_attempts(set_here.get("profile"), *map(os.environ.get, _AWS_PLACES))


@cache
def _aws_sets_attempts(profile: str | None, *places: str | None) -> bool:
    """Whether the environment or AWS's configuration file says so; `places` are what that depends on."""
    session = import_module("botocore.session").Session(profile=profile)
    return session.get_config_variable("max_attempts") is not None


def retry(files: "AbstractFileSystem", request: Callable[[], T]) -> T:
    """Make a request, and again while what goes wrong may pass, until that takes too long.

    Where the user says how often S3 is asked, this is how often: botocore does that within one request.

    Raises
    ------
    Exception
        What the last request raised.
    """
    is_counted = bool(set(_protocols(files)) & set(_S3)) and _s3_attempts_are_set()
    until = time.monotonic() + (0.0 if is_counted else _PATIENCE)
    longest = _PAUSE
    while True:
        try:
            return request()
        except Exception as error:
            # Random pauses: those who failed together do not come back together.
            pause = random.uniform(longest / 2, longest)  # noqa: S311  # no secret
            if isinstance(error, DkfmError) or not is_transient(error) or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        longest = min(2 * longest, _LONGEST_PAUSE)


def _protocols(files: "AbstractFileSystem") -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def create_exclusively(files: "AbstractFileSystem", path: str, data: bytes, name: str) -> bool:
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
            status = conflict_status(error)
            if status == 412:
                return False
            if status != 409 or attempt == _CONFLICTS:  # S3: another one wrote or removed it at this moment
                raise
            time.sleep(0.1 * attempt)
        else:
            break
    return True


def list_below(files: "AbstractFileSystem", prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what lies below a prefix; of S3 page by page, where fsspec would hold all of a million names."""
    if not set(_protocols(files)) & set(_S3):
        found: Mapping[str, Mapping[str, Any]] = retry(files, lambda: files.find(prefix.rstrip("/"), detail=True))
        yield from found.items()
        return
    bucket, _, key = prefix.partition("/")
    after: dict[str, str] = {}
    while True:
        page = retry(files, partial(files.call_s3, "list_objects_v2", Bucket=bucket, Prefix=key, **after))
        for entry in page.get("Contents", []):
            yield f"{bucket}/{entry['Key']}", {**entry, "size": entry["Size"]}
        if not page.get("IsTruncated"):
            return
        after = {"ContinuationToken": page["NextContinuationToken"]}


def object_stamp(status: Mapping[str, Any]) -> str:
    """Return a text that is another one once a file has changed."""
    found = next((status[key] for key in _STAMPS if status.get(key)), "")
    # Some give a time in one form where they list files, and in another where they are asked for one.
    return str(found.timestamp() if isinstance(found, datetime) else found)
