"""What a file system of fsspec's raises, as one sentence of dkfm's: which may pass if it is tried again, and which not.

The packages below fsspec have exceptions without a common class, and may not be installed: they are known by name.
"""

import errno
import re
from collections.abc import Iterator, Mapping

from dkfm.errors import StoreError, UnreachableError

_PASSING = {
    *("HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead"),
    *("IncompleteReadError", "ResponseParserError", "ServerDisconnectedError", "TimeoutError", "gaierror"),
}
_PASSING_NUMBERS = {errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT}
"""As which s3fs translates the answers 409, 500 and 503."""

_PASSING_CODES = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")
"""Which may be a signature; in names of objects on other stores "?" is a letter."""


def as_store_error(name: str, verb: str, error: Exception, url: str = "") -> StoreError:
    """Return the sentence for what went wrong where something was to be read, written, listed or removed."""
    kind = UnreachableError if is_transient(error) else StoreError
    return kind(f"{name} cannot be {verb}: {_reason(error).replace(url or name, name)}.")


def is_transient(error: BaseException) -> bool:
    """Whether what went wrong may go well if it is tried again."""
    return any(map(_passes, _chain(error)))


def strip_credentials(text: str) -> str:
    """Return a text with the user, the password and the signature of each URL in it left out."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("", text))


def conflict_status(error: BaseException) -> int | None:
    """Return the status of an answer which says that another writer was there (412), or is just now (409)."""
    return next((s for e in _chain(error) if (s := _status(e)) in (409, 412)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _response(error: BaseException, part: str) -> Mapping[str, object]:
    response = getattr(error, "response", None)
    found = response.get(part) if isinstance(response, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _status(error: BaseException) -> int | None:
    status = _response(error, "ResponseMetadata").get("HTTPStatusCode", getattr(error, "status", None))
    return status if isinstance(status, int) else None


def _passes(error: BaseException) -> bool:
    status = _status(error)
    if status is not None and (status >= 500 or status in (408, 409, 425, 429)):
        return True
    named = {cls.__name__ for cls in type(error).__mro__} & _PASSING
    numbered = isinstance(error, OSError) and error.errno in _PASSING_NUMBERS
    return bool(named) or numbered or _response(error, "Error").get("Code") in _PASSING_CODES


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None and is_transient(error.__cause__):
        return _reason(error.__cause__)
    code = next((c for e in _chain(error) if (c := _response(e, "Error").get("Code"))), None)
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket" if code == "NoSuchBucket" else "nothing is there"
    text = str(getattr(error, "strerror", None) or error).strip().partition("\n")[0].rstrip(". ")
    return strip_credentials(text) or type(error).__name__
