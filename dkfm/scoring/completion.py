"""Complete an output: find the chunks to score from receipts, and write the marker last; open a finished output."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from dkfm.errors import DamagedStoreError, IncompleteStoreError, StoreError
from dkfm.files.location import Location
from dkfm.scoring import marker, output_store
from dkfm.scoring import receipts as journal
from dkfm.scoring.formats.chunk_files import combine_summaries, read_chunk_files
from dkfm.scoring.marker import ReceiptTable
from dkfm.scoring.output_store import Output
from dkfm.scoring.receipts import ChunkReceipt
from dkfm.storage import own_files, store_metadata
from dkfm.storage.array_metadata_checks import CRC_BYTES

_MAX_NAMED = 5
"""Largest number of chunks that a message names."""


def is_sound(output: Output, receipt: ChunkReceipt) -> bool:
    """Read all files of a chunk, and return whether they match a receipt."""
    if not _is_of_output(output, receipt):
        return False
    contents = read_chunk_files(output.format, output.chunk(receipt.chunk))
    expected = receipt.invalid_rows, receipt.file_checksums, receipt.bytes
    return contents is not None and combine_summaries(contents) == expected


def _is_of_output(output: Output, receipt: ChunkReceipt) -> bool:
    """Return whether a receipt has the number, the rows and the files of a chunk of this output."""
    if receipt.chunk >= output.n_chunks:
        return False
    files = len(output.format.file_names(receipt.chunk))
    return receipt.rows == output.chunk(receipt.chunk).rows and len(receipt.file_checksums) == files


def iter_journal_receipts(output: Output, input_stamp: str | None = None) -> Iterator[ChunkReceipt]:
    """Yield the receipts in an output's journal; with `input_stamp`, only those of the input with that stamp."""
    receipts = journal.read_receipts(output.output_location, output.creation_id, input_stamp)
    return (receipt for receipt in receipts if _is_of_output(output, receipt))


def load_receipts(output: Output, input_stamp: str) -> tuple[list[ChunkReceipt], bool]:
    """Return the receipts in the marker of an output and True; without a valid marker, those in its journal and False.

    Receipts in the journal count only if they belong to the input in its present state.
    """
    try:
        return list(marker.read_receipt_table(output)), True
    except (IncompleteStoreError, DamagedStoreError):
        return list(iter_journal_receipts(output, input_stamp)), False


def find_chunks_to_score(output: Output, receipts: Mapping[int, ChunkReceipt]) -> list[int]:
    """Return the chunks without a receipt, or with lost or resized files; if there are none, those with another end."""
    location, chunk_format = output.output_location, output.format
    file_names, encode_trailer = chunk_format.file_names, chunk_format.encode_trailer
    sizes = location.find_file_sizes(name for number in receipts for name in file_names(number))

    def has_size(receipt: ChunkReceipt) -> bool:
        return sum(sizes.get(name, 0) for name in file_names(receipt.chunk)) == receipt.bytes

    lost = [number for number in range(output.n_chunks) if not (number in receipts and has_size(receipts[number]))]
    if lost or output.is_table:  # all Parquet files end with the same bytes
        return lost
    ends = location.read_last_bytes(sizes, CRC_BYTES)
    return [
        number
        for number, receipt in receipts.items()
        if [ends.get(name) for name in file_names(number)] != [*map(encode_trailer, receipt.file_checksums)]
    ]


def find_chunks_with_files(output: Output, numbers: Sequence[int]) -> set[int]:
    """Return those chunks of `numbers` that have any file."""
    file_names = output.format.file_names
    sizes = output.output_location.find_file_sizes(name for number in numbers for name in file_names(number))
    return {number for number in numbers if any(name in sizes for name in file_names(number))}


def complete_output(output: Output, receipts: Mapping[int, ChunkReceipt], input_stamp: str = "") -> None:
    """Check that readers will accept an output, and write its marker with all receipts and the stamp of the input.

    Raises
    ------
    StoreError
        The output was removed or replaced, or contains a link or a file that does not belong to it.
    """
    output_store.require_not_replaced(output.root, output.creation_id)
    output_store.ensure_arrays(output, output.output_location)
    require_same_output_on_disk(output)
    output.output_location.write_file(store_metadata.MARKER, marker.encode_marker(output, receipts, input_stamp))


def require_same_output_on_disk(output: Output) -> None:
    """Raise a StoreError unless readers would accept the output, apart from the marker."""
    # `require_no_extra_files` checks that files are plain.
    existing = output_store.find_output(output.root, check_plain=False)
    if existing is None or output_store.describe_output(existing) != output_store.describe_output(output):
        raise StoreError(f"{output.root} was removed, or is another output than the one that was made.")
    require_no_extra_files(output)


def remove_marker(output: Output) -> None:
    """Remove the marker of an output, before any of its chunks is removed or replaced."""
    output.output_location.remove_files([store_metadata.MARKER])


def remove_chunks(output: Output, numbers: Sequence[int]) -> None:
    """Remove the files of some chunks, if they exist."""
    output.output_location.remove_files(name for number in numbers for name in output.format.file_names(number))


def open_complete(root: Location) -> tuple[Output, ReceiptTable]:
    """Open a finished output, and check the names and the sizes of all its files from one listing.

    No chunk is opened; its bytes are compared with its receipt when it is read. An extra file in the folder of a single
    chunk is found only by `verify_scores`.

    Raises
    ------
    StoreError
        There is no output, it is not finished, or a chunk is lost or truncated.
    """
    output = output_store.read_output(root, check_plain=False)
    sizes = output.output_location.list_sizes()  # raises for links and special files
    receipts = marker.read_receipt_table(output)
    file_columns = list(zip(*map(output.format.file_names, range(output.n_chunks)), strict=True))
    _require_no_extra_names(output, set(sizes).difference(*file_columns))
    totals = sum(np.fromiter((sizes.get(name, 0) for name in names), np.int64) for names in file_columns)
    lost = np.flatnonzero(totals != receipts.bytes)
    if len(lost):
        raise DamagedStoreError(describe_damaged_chunks(output, lost.tolist()))
    return output, receipts


def describe_damaged_chunks(output: Output, numbers: Sequence[int]) -> str:
    """Return a sentence that names damaged chunks of an output, the first ones with their files."""
    first, is_one = numbers[:_MAX_NAMED], len(numbers) == 1
    more = f" and {len(numbers) - len(first):,} more" if len(numbers) > len(first) else ""
    files = ", ".join(output.format.file_names(number)[0] for number in first)
    return (
        f"Chunk{'' if is_one else 's'} {', '.join(map(str, first))}{more} of {output.root} {'is' if is_one else 'are'} "
        f"lost, or not what was written ({files}); the same dkfm score makes {'it' if is_one else 'them'} again."
    )


def require_no_extra_files(output: Output) -> None:
    """Raise a DamagedStoreError if the output contains a file that belongs to no chunk."""
    expected = {name for number in range(output.n_chunks) for name in output.format.file_names(number)}
    _require_no_extra_names(output, (name for name in output.output_location.list_files() if name not in expected))


def _require_no_extra_names(output: Output, names: Iterable[str]) -> None:
    """Raise a DamagedStoreError unless all names, which are those of no chunk, are names of dkfm's other files."""
    own = {"arrays": [*output.array_layouts], "kind": "scores", "form": output.settings.get("form")}
    for name in names:
        if own_files.find_foreign_name([name], own) or store_metadata.is_chunk_name(name):
            raise DamagedStoreError(
                f"{output.root} has gained {name}, which is of none of its chunks; move it out of the output."
            )
