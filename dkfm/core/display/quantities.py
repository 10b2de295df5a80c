"""Format bytes, seconds and names of columns."""

from collections.abc import Sequence

_MAX_NAMED = 5
"""Largest number of columns that a message names."""


def format_bytes(size: int) -> str:
    """Format a number of bytes with up to three digits.

    >>> format_bytes(512), format_bytes(40_000), format_bytes(12_345_678_901)
    ('512 B', '40 kB', '12.3 GB')
    """
    for unit, least in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size} B"


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> format_seconds(0.242), format_seconds(40.3), format_seconds(800), format_seconds(9000)
    ('0.24 s', '40 s', '13 min', '2.5 h')
    """
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_megabytes(size: int) -> str:
    """Format a number of bytes in megabytes, with the exact number.

    >>> format_megabytes(1_600_000_000)
    '1,600 MB (1600000000 bytes)'
    """
    return f"{size / 1e6:,.0f} MB ({size} bytes)"


def format_columns(count: int) -> str:
    """Format a number of columns.

    >>> format_columns(1), format_columns(1000)
    ('1 column', '1,000 columns')
    """
    return f"{count:,} column{'s' * (count != 1)}"


def format_names(names: Sequence[object], most: int = _MAX_NAMED) -> str:
    """Return the first columns, by name or number, at most `most`, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"column{'s' * (len(names) > 1)} {', '.join(f'{name!r:.100}' for name in names[:most])}{more}"
