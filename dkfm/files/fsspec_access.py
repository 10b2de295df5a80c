"""Open and list file systems of fsspec, retry requests, and create files exclusively.

Transient failures are retried with growing pauses for two minutes. S3 has timeouts of ten seconds for a connection and
sixty for each part of an answer, unless fsspec's configuration sets others. If that configuration, the environment or
AWS's configuration file sets the number of attempts for S3, that number is used instead of two minutes.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import datetime
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from dkfm.errors import DkfmError, MissingExtraError, StoreError
from dkfm.files.fsspec_errors import find_conflict_status, is_transient

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

_RETRY_SECONDS = 120.0
"""Seconds after which a failing request is no longer repeated.

A task repeats its request three more times; all of that is less than the stall timeout of a job.
"""

_FIRST_PAUSE = 0.5
"""Longest pause before the second request, in seconds; each further pause is twice as long."""

_MAX_PAUSE = 15.0
"""Longest pause between two requests, in seconds."""

_S3_SCHEMES = ("s3", "s3a")
"""Schemes of S3."""

_EXCLUSIVE_SCHEMES = (*_S3_SCHEMES, "memory")
"""Schemes of file systems that support exclusive creation of a file."""

_STAMP_KEYS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
"""Keys of file systems for a value that changes with the file; the first existing key is used."""

_S3_OPTIONS: dict[str, Any] = {"max_concurrency": 1}
"""Options of s3fs: an object is read with one request, because several requests could read different versions."""

_S3_CONFIG: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60}
"""Options of botocore: seconds to connect, and to wait for the next part of an answer."""

_S3_RETRIES = {"total_max_attempts": 2}
"""Attempts of botocore itself, so that one failed part does not restart a large upload."""

_S3FS_ATTEMPTS = 2
"""Attempts of s3fs after botocore has given up, or after an answer broke off."""

_AWS_VARIABLES = ("AWS_MAX_ATTEMPTS", "AWS_CONFIG_FILE", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "HOME")
"""Environment variables that set the number of attempts, or the files that set it."""

_MAX_CONFLICTS = 4
"""Attempts of an exclusive creation while S3 reports a conflict."""

_memory_lock = threading.Lock()


def open_filesystem(url: str, name: str) -> "tuple[AbstractFileSystem, str]":
    """Return the file system and the path of a URL; fsspec caches file systems for each process and set of options."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in _S3_SCHEMES:
        options |= {**_S3_OPTIONS, **_read_s3_options(), "use_listings_cache": False}
    try:
        if scheme in _S3_SCHEMES:
            options["config_kwargs"] = _botocore_config_kwargs()
        files, path = url_to_fs(url, **options)
    except ImportError as error:
        extra = "pip install 'dkfm[s3]'" if scheme in _S3_SCHEMES else str(error).partition("\n")[0]
        raise MissingExtraError(f"{name} needs a package that is not installed: {extra.rstrip('.')}.") from None
    except ValueError as error:
        raise StoreError(f"{name} is on no file system that fsspec knows ({error}).") from None
    if scheme in _S3_SCHEMES:
        files.retries = _S3FS_ATTEMPTS
    return files, str(path)


def _read_s3_options() -> dict[str, Any]:
    """Return the options for S3 in fsspec's configuration."""
    from fsspec.config import conf

    return {**conf.get("s3a", {}), **conf.get("s3", {})}


def _botocore_config_kwargs() -> dict[str, Any]:
    """Return the options of botocore: those of this module, overridden by the user's."""
    ours = _S3_CONFIG if _s3_attempts_are_set() else {**_S3_CONFIG, "retries": _S3_RETRIES}
    return {**ours, **_read_s3_options().get("config_kwargs", {})}


def _s3_attempts_are_set() -> bool:
    """Return whether the user's configuration sets the number of attempts for S3."""
    configured = _read_s3_options()
    if "retries" in configured.get("config_kwargs", {}):
        return True
    return _aws_config_sets_attempts(configured.get("profile"), *map(os.environ.get, _AWS_VARIABLES))


@cache
def _aws_config_sets_attempts(profile: str | None, *variables: str | None) -> bool:
    """Return whether the environment or AWS's files set the number of attempts; `variables` are for the cache."""
    session = import_module("botocore.session").Session(profile=profile)
    return session.get_config_variable("max_attempts") is not None


def retry(files: "AbstractFileSystem", request: Callable[[], T]) -> T:
    """Make a request, and repeat it while the failure is transient and time is left.

    If the user's configuration sets the number of attempts for S3, botocore repeats the request instead.

    Raises
    ------
    Exception
        The exception of the last request.
    """
    is_counted = bool(set(_protocols(files)) & set(_S3_SCHEMES)) and _s3_attempts_are_set()
    until = time.monotonic() + (0.0 if is_counted else _RETRY_SECONDS)
    longest = _FIRST_PAUSE
    while True:
        try:
            return request()
        except Exception as error:
            # Pauses are random, so that clients that failed together do not retry together.
            pause = random.uniform(longest / 2, longest)  # noqa: S311  # not used for security
            if isinstance(error, DkfmError) or not is_transient(error) or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        longest = min(2 * longest, _MAX_PAUSE)


def _protocols(files: "AbstractFileSystem") -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def require_exclusive_creation(schemes: Iterable[str], name: str) -> None:
    """Raise a StoreError unless one of the schemes of a file system is known to support `create_exclusively`."""
    if not set(schemes) & set(_EXCLUSIVE_SCHEMES):
        known = ", ".join(f"{scheme}://" for scheme in _EXCLUSIVE_SCHEMES)
        raise StoreError(f"{name} cannot be written: only {known} are known to let one writer win.")


def create_exclusively(files: "AbstractFileSystem", path: str, data: bytes, name: str) -> bool:
    """Create a file; return False, and change nothing, if it exists."""
    require_exclusive_creation(_protocols(files), name)
    with _memory_lock if "memory" in _protocols(files) else nullcontext():  # it checks, then writes
        return _try_to_create(files, path, data)


def _try_to_create(files: "AbstractFileSystem", path: str, data: bytes) -> bool:
    for attempt in range(1, _MAX_CONFLICTS + 1):
        try:
            files.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            status = find_conflict_status(error)
            if status == 412:
                return False
            if status != 409 or attempt == _MAX_CONFLICTS:  # 409: another writer created or removed it just now
                raise
            time.sleep(0.1 * attempt)
        else:
            break
    return True


def list_below(files: "AbstractFileSystem", prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and properties of the files below a prefix; S3 is listed page by page to bound memory."""
    if not set(_protocols(files)) & set(_S3_SCHEMES):
        listing: Mapping[str, Mapping[str, Any]] = retry(files, lambda: files.find(prefix.rstrip("/"), detail=True))
        yield from listing.items()
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
    """Return a text that changes when an object changes."""
    stamp = next((status[key] for key in _STAMP_KEYS if status.get(key)), "")
    # Some file systems give times in different forms in a listing and for a single file.
    return str(stamp.timestamp() if isinstance(stamp, datetime) else stamp)
