"""Complete an output: compare its chunks with their receipts, and write the marker with all receipts last."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from dkfm.errors import DamagedStoreError, IncompleteStoreError, StoreError
from dkfm.files.location import Location
from dkfm.scoring import output_store
from dkfm.scoring import receipts as journal
from dkfm.scoring.formats.chunk_writing import Chunk, combine_summaries, read_chunk_files
from dkfm.scoring.output_store import Output
from dkfm.scoring.receipts import Receipt
from dkfm.storage import json_reading, own_files, zarr_schema
from dkfm.storage.codec_checks import CRC_BYTES

_MAX_MARKER_BYTES = 2**26
"""Largest marker that is read, in bytes."""

_MARKER_FIELDS = ("crc32c", "invalid_rows", "bytes")
"""Fields of the receipts in a marker."""


def is_sound(output: Output, receipt: Receipt) -> bool:
    """Read all files of a chunk, and return whether they are as a receipt says."""
    if not _is_of_output(output, receipt):
        return False
    contents = read_chunk_files(output.format, output.chunk(receipt.chunk))
    expected = receipt.invalid_rows, receipt.crc32c, receipt.bytes
    return contents is not None and combine_summaries(contents) == expected


def _is_of_output(output: Output, receipt: Receipt) -> bool:
    """Return whether a receipt has the number, the rows and the files of a chunk of this output."""
    if receipt.chunk >= output.n_chunks:
        return False
    files = 1 if output.is_table else len(output.columns)
    return receipt.rows == output.chunk(receipt.chunk).rows and len(receipt.crc32c) == files


def iter_journal_receipts(output: Output, input_stamp: str | None = None) -> Iterator[Receipt]:
    """Yield the receipts in an output's journal; with `input_stamp`, only those of the input with that stamp."""
    receipts = journal.read_receipts(output.location, output.creation_id, input_stamp)
    return (receipt for receipt in receipts if _is_of_output(output, receipt))


def find_chunks_to_score(output: Output, receipts: Mapping[int, Receipt]) -> list[int]:
    """Return the chunks without a receipt, or with lost or resized files; if none, those with other last bytes."""
    location, file_names, trailer_bytes = output.location, output.format.file_names, output.format.trailer_bytes
    sizes = location.file_sizes(name for number in receipts for name in file_names(number))

    def has_size(receipt: Receipt) -> bool:
        return sum(sizes.get(name, 0) for name in file_names(receipt.chunk)) == receipt.bytes

    lost = [number for number in range(output.n_chunks) if not (number in receipts and has_size(receipts[number]))]
    if lost or output.is_table:  # all Parquet files end with the same bytes
        return lost
    ends = location.read_last_bytes(sizes, CRC_BYTES)
    return [
        number
        for number, receipt in receipts.items()
        if [ends.get(name) for name in file_names(number)] != [*map(trailer_bytes, receipt.crc32c)]
    ]


def find_chunks_with_files(output: Output, numbers: Sequence[int]) -> set[int]:
    """Return those chunks of `numbers` that have any file."""
    file_names = output.format.file_names
    sizes = output.location.file_sizes(name for number in numbers for name in file_names(number))
    return {number for number in numbers if any(name in sizes for name in file_names(number))}


def complete_output(output: Output, receipts: Mapping[int, Receipt], input_stamp: str = "") -> None:
    """Check that readers will accept an output, and write its marker with all receipts and the stamp of the input.

    Raises
    ------
    StoreError
        The output was removed or replaced, or contains a link or a file that does not belong to it.
    """
    output_store.require_not_replaced(output.root, output.creation_id)
    output_store.ensure_array_metadata(output, output.location)
    require_same_output_on_disk(output)
    ordered = [receipts[number] for number in range(output.n_chunks)]
    columns = [[getattr(receipt, name) for receipt in ordered] for name in _MARKER_FIELDS]
    content = {
        "sum": _compute_marker_digest(output, columns),
        "input": input_stamp,
        **dict(zip(_MARKER_FIELDS, columns, strict=True)),
    }
    output.location.write_file(zarr_schema.MARKER, json.dumps(content).encode())


def _compute_marker_digest(output: Output, columns: Sequence[object]) -> str:
    """Return a SHA-256 digest of an output's attributes and of the columns of its receipts, for the marker."""
    return hashlib.sha256(
        json.dumps([output_store.describe_output(output), *columns], sort_keys=True).encode()
    ).hexdigest()


def require_same_output_on_disk(output: Output) -> None:
    """Raise a StoreError unless readers would accept the output, apart from the marker."""
    existing = output_store.find_output(
        output.root, check_plain=False
    )  # `require_no_extra_files` checks for plain files
    if existing is None or output_store.describe_output(existing) != output_store.describe_output(output):
        raise StoreError(f"{output.root} was removed, or is another output than the one that was made.")
    require_no_extra_files(output)


def remove_marker(output: Output) -> None:
    """Remove the marker of an output, before any of its chunks is removed or replaced."""
    output.location.remove_files([zarr_schema.MARKER])


def remove_chunks(output: Output, numbers: Sequence[int]) -> None:
    """Remove the files of some chunks, if they exist."""
    output.location.remove_files(name for number in numbers for name in output.format.file_names(number))


def read_marker_receipts(output: Output) -> dict[int, Receipt]:
    """Return the receipt of each chunk in the marker of a finished output.

    Raises
    ------
    StoreError
        The output is not finished, or its marker belongs to another output.
    """
    marker = _read_required_marker(output)
    columns = [marker.get(name) for name in _MARKER_FIELDS]
    files = len(output.format.file_names(0))
    is_complete = all(isinstance(column, list) and len(column) == output.n_chunks for column in columns)
    if not is_complete or marker.get("sum") != _compute_marker_digest(output, columns):
        raise DamagedStoreError(f"The marker of {output.root} is not the one of its {output.n_chunks} chunks and rows.")
    try:
        return {
            number: _parse_receipt(output.chunk(number), files, *row)
            for number, row in enumerate(zip(*columns, strict=True))
        }
    except (TypeError, ValueError):
        raise DamagedStoreError(f"The marker of {output.root} has no receipts that dkfm writes.") from None


def read_input_stamp(output: Output) -> str:
    """Return the stamp of the input of a finished output; empty if its marker is of an old version without one.

    Raises
    ------
    StoreError
        The output is not finished.
    """
    return str(_read_required_marker(output).get("input", ""))


def _read_required_marker(output: Output) -> dict[str, object]:
    opened = output.location.open_for_reading(zarr_schema.MARKER, _MAX_MARKER_BYTES)
    if opened is None:
        raise IncompleteStoreError(
            f"{output.root} has no {zarr_schema.MARKER} marker: whatever wrote it did not finish."
        )
    with opened:
        return json_reading.parse_json(opened.read(_MAX_MARKER_BYTES + 1), f"{output.root}/{zarr_schema.MARKER}")


def _parse_receipt(chunk: Chunk, files: int, crc32c: Sequence[int], invalid: int, size: int) -> Receipt:
    if len(crc32c) != files:
        raise ValueError("A receipt has a checksum for each file.")
    return Receipt.from_json_values(chunk.number, chunk.rows, invalid, tuple(crc32c), size)


def open_complete(root: Location) -> tuple[Output, dict[int, Receipt]]:
    """Open a finished output, and check the sizes and last bytes of all its files.

    Raises
    ------
    StoreError
        There is no output, it is not finished, or a chunk is lost or cut short.
    """
    output = output_store.read_output(root)
    receipts = read_marker_receipts(output)
    require_no_extra_files(output)
    lost = find_chunks_to_score(output, receipts)
    if lost:
        raise DamagedStoreError(f"Chunk {lost[0]} of {root} is lost, or is not the one of its receipt.")
    return output, receipts


def require_no_extra_files(output: Output) -> None:
    """Raise a DamagedStoreError if the output contains a file that belongs to no chunk."""
    expected = {name for number in range(output.n_chunks) for name in output.format.file_names(number)}
    own = {
        "arrays": [columns.output for columns in output.columns],
        "kind": "scores",
        "form": output.settings.get("form"),
    }
    for name in output.location.list_files():
        if own_files.find_foreign_name([name], own) or (zarr_schema.is_chunk_name(name) and name not in expected):
            raise DamagedStoreError(
                f"{output.root} has gained {name}, which is of none of its chunks; move it out of the output."
            )
