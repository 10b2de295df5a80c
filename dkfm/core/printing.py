"""Text for a terminal: what a file name or a file may hold is escaped, results and messages are written."""

import sys
from contextlib import suppress
from typing import TextIO

from dkfm.errors import OutputError, reason


def escape_control_characters(text: str) -> str:
    r"""Escape the characters of a text that a terminal would act on, in the way of JSON.

    These are control characters and line ends, marks that change the direction of writing, and what stands for bytes
    of a name that are not UTF-8: all but what `str.isprintable` takes for printable. JSON stays the same JSON.

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
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))  # two above U+FFFF, as JSON has it


def print_result(*lines: str) -> None:
    """Write lines on standard output, all at once.

    Raises
    ------
    OutputError
        Standard output does not take them.
    """
    try:
        _write(sys.stdout, *lines)
    except OSError as error:
        raise OutputError(f"Standard output cannot be written: {error.strerror or reason(error)}.") from None


def print_message(*lines: str) -> None:
    """Write lines on standard error; where it does not take them nobody can be told."""
    with suppress(OSError):
        _write(sys.stderr, *lines)


def _write(stream: TextIO | None, *lines: str) -> None:
    if stream is None:
        raise OSError("it is closed")
    text = "".join(f"{escape_control_characters(line)}\n" for line in lines)
    encoding = stream.encoding or "utf-8"  # a stream of text in memory has none
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
