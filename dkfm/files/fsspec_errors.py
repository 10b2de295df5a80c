"""Translate exceptions of fsspec into errors of dkfm, and distinguish transient from permanent ones.

Exceptions of the packages below fsspec have no common base class, and the packages may not be installed, so exceptions
are recognised by name.
"""

import errno
import re
from collections.abc import Iterator, Mapping

from dkfm.errors import StoreError, UnreachableError

_TRANSIENT_NAMES = {
    *("HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead"),
    *("IncompleteReadError", "ResponseParserError", "ServerDisconnectedError", "TimeoutError", "gaierror"),
}
_TRANSIENT_ERRNOS = {errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT}
"""Error numbers into which s3fs translates the HTTP statuses 409, 500 and 503."""

_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")
"""Query of an HTTP URL, which may contain a signature; on other stores, "?" may be part of an object's name."""


def as_store_error(name: str, verb: str, error: Exception, url: str = "") -> StoreError:
    """Return a StoreError, or an UnreachableError if it is transient, for a failure to `verb` an object."""
    cls = UnreachableError if is_transient(error) else StoreError
    return cls(f"{name} cannot be {verb}: {_reason(error).replace(url or name, name)}.")


def is_transient(error: BaseException) -> bool:
    """Return whether a request that failed may succeed if it is repeated."""
    return any(map(_is_transient, _cause_chain(error)))


def strip_credentials(text: str) -> str:
    """Return a text without the user, password and signature of each URL in it."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("", text))


def find_conflict_status(error: BaseException) -> int | None:
    """Return the HTTP status of a conflict with another writer, 412 or 409; None for other errors."""
    return next((s for e in _cause_chain(error) if (s := _status(e)) in (409, 412)), None)


def _cause_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _response_part(error: BaseException, part: str) -> Mapping[str, object]:
    response = getattr(error, "response", None)
    value = response.get(part) if isinstance(response, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _status(error: BaseException) -> int | None:
    status = _response_part(error, "ResponseMetadata").get("HTTPStatusCode", getattr(error, "status", None))
    return status if isinstance(status, int) else None


def _is_transient(error: BaseException) -> bool:
    status = _status(error)
    if status is not None and (status >= 500 or status in (408, 409, 425, 429)):
        return True
    names = {cls.__name__ for cls in type(error).__mro__} & _TRANSIENT_NAMES
    has_errno = isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS
    return bool(names) or has_errno or _response_part(error, "Error").get("Code") in _TRANSIENT_CODES


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None and is_transient(error.__cause__):
        return _reason(error.__cause__)
    code = next((c for e in _cause_chain(error) if (c := _response_part(e, "Error").get("Code"))), None)
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket" if code == "NoSuchBucket" else "nothing is there"
    text = str(getattr(error, "strerror", None) or error).strip().partition("\n")[0].rstrip(". ")
    return strip_credentials(text) or type(error).__name__
