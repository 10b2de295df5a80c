"""Write results and messages to a terminal, with control characters of file names and files escaped."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from typing import TextIO

from dkfm.errors import OutputError, extract_reason


def escape_control_characters(text: str) -> str:
    r"""Escape the characters that a terminal would interpret, as JSON does.

    These are all that `str.isprintable` rejects: control characters, line ends, marks that change the direction of
    writing, and surrogates for bytes of a name that are not UTF-8. JSON text keeps its meaning.

    >>> escape_control_characters("a\x1b[2J\nb")
    'a\\u001b[2J\\nb'
    """
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    if character in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[character]
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))  # JSON writes two units above U+FFFF


def print_result(*lines: str) -> None:
    """Write lines to standard output in one call.

    Raises
    ------
    OutputError
        Standard output cannot be written.
    """
    try:
        _write(sys.stdout, *lines)
    except OSError as error:
        raise OutputError(f"Standard output cannot be written: {error.strerror or extract_reason(error)}.") from None


def print_json(facts: Mapping[str, object]) -> None:
    """Write facts to standard output as a JSON object in one line; numbers that are not finite are null in JSON.

    Raises
    ------
    OutputError
        Standard output cannot be written.

    Examples
    --------
    >>> print_json({"error": float("inf"), "pairs": [1, 2]})
    {"error": null, "pairs": [1, 2]}
    """
    print_result(json.dumps(_replace_nonfinite(facts), allow_nan=False))


def _replace_nonfinite(value: object) -> object:
    """Return a value of JSON with None in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def print_message(*lines: str) -> None:
    """Write lines to standard error; a failure is ignored, as there is nowhere to report it."""
    with suppress(OSError):
        _write(sys.stderr, *lines)


def _write(stream: TextIO | None, *lines: str) -> None:
    if stream is None:
        raise OSError("it is closed")
    text = "".join(f"{escape_control_characters(line)}\n" for line in lines)
    encoding = stream.encoding or "utf-8"  # io.StringIO has none
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
