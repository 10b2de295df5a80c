"""Read the footers of Parquet files, within a limit of their size.

Footers are untrusted: they are checked before any page is decoded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from dkfm.errors import DkfmError, InvalidInputError, UnreachableError, extract_reason
from dkfm.files.local import ReadSizeLimitedReader
from dkfm.files.location import open_unbuffered
from dkfm.sources.parquet_files.listing import TableFile
from dkfm.sources.parquet_files.schemas import pa, pq

_MAX_FOOTER_BYTES = 2**27
"""Largest size of the footer of a file."""

KEPT_FOOTER_BYTES = 2**25
"""Largest memory of the footers that are kept with the layout of a table; each file has an equal share."""

CACHED_FOOTERS = 4
"""Files whose footers a process caches, of those that are not kept."""

_FOOTER_BYTES = 10_000
"""Constant part of the memory of a footer."""

_COLUMN_CHUNK_BYTES = 2_000
"""Part of this memory for each column of each row group; 1,000 to 2,000 were measured."""


@contextmanager
def parquet_errors(file: TableFile) -> Iterator[None]:
    """Raise an InvalidInputError if a file is damaged, or is not the one listed after the context."""
    try:
        yield
    except DkfmError as error:
        if file.is_remote and not isinstance(error, UnreachableError):
            file.require_same()  # the file may be gone, or shorter
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        file.require_same()
        raise InvalidInputError(f"{file} cannot be read as a Parquet file: {extract_reason(error)}.") from error
    file.require_same()  # an object is read with several requests, and an open file may be overwritten


def _read_metadata(file: TableFile) -> "pq.FileMetaData":
    """Read the footer of a file, with a limit on the size that the file declares."""
    with ReadSizeLimitedReader(open_unbuffered(file.location, file.size), _MAX_FOOTER_BYTES) as source:
        metadata = pq.read_metadata(source)
    file.require_same()
    return metadata


cached_metadata = lru_cache(maxsize=CACHED_FOOTERS)(_read_metadata)


class FileFooter(NamedTuple):
    """Content of the footer of one file."""

    metadata: "pq.FileMetaData | None"
    """The footer itself, if it is small enough to be kept."""
    schema: "pa.Schema"
    group_rows: list[int]
    bytes: int
    """Memory of the footer."""
    has_null_ids: bool


def read_footer(file: TableFile, id_column: str | None, kept_bytes: int = 0) -> FileFooter:
    """Read the footer of a file, and keep it if it takes at most `kept_bytes`, independently of other files."""
    with parquet_errors(file):
        metadata = _read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
        _ = schema.names  # raises an error if a name is not text
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        has_null_ids = id_column is not None and _has_nulls(metadata, id_column)
    declared, total = metadata.num_rows, sum(rows)
    if min(rows, default=0) < 0 or declared != total:
        raise InvalidInputError(f"{file} is damaged: it says {declared} rows, its row groups {total}.")
    size = _FOOTER_BYTES + _COLUMN_CHUNK_BYTES * metadata.num_columns * metadata.num_row_groups
    return FileFooter(metadata if size <= kept_bytes else None, schema, rows, size, has_null_ids)


def _has_nulls(metadata: "pq.FileMetaData", name: str) -> bool:
    """Return whether the footer of a file says that a column has nulls."""
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    if name not in paths:
        return False  # a nested column
    index = paths.index(name)
    found = (metadata.row_group(number).column(index).statistics for number in range(metadata.num_row_groups))
    return any(one is not None and one.has_null_count and one.null_count > 0 for one in found)
