"""Which chunks an output has, by their receipts, and the marker that completes it and tells what each must be."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from dkfm.errors import DamagedStoreError, IncompleteStoreError, StoreError
from dkfm.files.location import Location
from dkfm.scoring import chunk_files, outputs
from dkfm.scoring import receipts as journal
from dkfm.scoring.chunk_files import Chunk
from dkfm.scoring.outputs import Output
from dkfm.scoring.receipts import Receipt
from dkfm.storage import json_documents, ownership, zarr_schema
from dkfm.storage.zarr_codecs import CRC_BYTES

_MAX_MARKER = 2**26


def is_sound(output: Output, receipt: Receipt) -> bool:
    """Read the files of a chunk again: whether they are what a receipt of it says."""
    if not _fits(output, receipt):
        return False
    held = chunk_files.read_chunk_files(output.form, output.chunk(receipt.chunk))
    return held is not None and chunk_files.summarize(held) == (receipt.invalid_rows, receipt.crc32c, receipt.bytes)


def _fits(output: Output, receipt: Receipt) -> bool:
    """Whether an output has such a chunk."""
    if receipt.chunk >= output.chunks:
        return False
    files = 1 if output.is_table else len(output.columns)
    return receipt.rows == output.chunk(receipt.chunk).rows and len(receipt.crc32c) == files


def journal_receipts(output: Output, state: str | None = None) -> Iterator[Receipt]:
    """Yield the receipts of the output's own journal; with a state only those of rows of an input in this state."""
    return (receipt for receipt in journal.read_receipts(output.place, output.run, state) if _fits(output, receipt))


def missing_chunks(output: Output, receipts: Mapping[int, Receipt]) -> list[int]:
    """Return the chunks whose files are not as large as a receipt says; if none, those whose files do not end so."""
    form, place = output.form, output.place
    sizes = place.sizes(name for number in receipts for name in form.files(number))

    def has_size(receipt: Receipt) -> bool:
        return sum(sizes.get(name, 0) for name in form.files(receipt.chunk)) == receipt.bytes

    lost = [number for number in range(output.chunks) if not (number in receipts and has_size(receipts[number]))]
    if lost or output.is_table:  # the ends of tables are all the same
        return lost
    ends = place.ends(sizes, CRC_BYTES)
    return [
        number
        for number, receipt in receipts.items()
        if [ends.get(name) for name in form.files(number)] != [form.end(crc) for crc in receipt.crc32c]
    ]


def begun_chunks(output: Output, numbers: Sequence[int]) -> set[int]:
    """Return those of some chunks of which there are files."""
    form = output.form
    sizes = output.place.sizes(name for number in numbers for name in form.files(number))
    return {number for number in numbers if any(name in sizes for name in form.files(number))}


def complete_output(output: Output, receipts: Mapping[int, Receipt], state: str = "") -> None:
    """Complete an output that reads as one: its marker has what every chunk must be, and the state of the input.

    Raises
    ------
    StoreError
        It was removed or replaced, or there is what no reader accepts, such as a link or a file that is not of it.
    """
    outputs.require_run(output.root, output.run)
    outputs.write_array_metadata(output, output.place)
    require_readable(output)
    ordered = [receipts[number] for number in range(output.chunks)]
    columns = [[getattr(receipt, name) for receipt in ordered] for name in _TOLD]
    content = {"sum": _sum(output, columns), "input": state, **dict(zip(_TOLD, columns, strict=True))}
    output.place.put(zarr_schema.MARKER, json.dumps(content).encode())


_TOLD = ("crc32c", "invalid_rows", "bytes")


def _sum(output: Output, columns: Sequence[object]) -> str:
    """Return a digest of all that a finished output says of itself."""
    return hashlib.sha256(json.dumps([outputs.describe_output(output), *columns], sort_keys=True).encode()).hexdigest()


def require_readable(output: Output) -> None:
    """Raise unless what lies there is the output, and nothing else: what its readers ask but for the marker."""
    found = outputs.find_output(output.root, plain=False)  # as `require_no_extra_files` sees
    if found is None or outputs.describe_output(found) != outputs.describe_output(output):
        raise StoreError(f"{output.root} was removed, or is another output than the one that was made.")
    require_no_extra_files(output)


def remove_marker(output: Output) -> None:
    """Take the marker of an output away, before a chunk of it goes or is replaced."""
    output.place.remove([zarr_schema.MARKER])


def remove_chunks(output: Output, numbers: Sequence[int]) -> None:
    """Remove the files of some chunks, as far as there are any."""
    output.place.remove(name for number in numbers for name in output.form.files(number))


def marker_receipts(output: Output) -> dict[int, Receipt]:
    """Return what the marker of a finished output says of each chunk.

    Raises
    ------
    StoreError
        Not finished, or with a marker that is not of this output.
    """
    marker = _marker(output)
    columns = [marker.get(name) for name in _TOLD]
    files = len(output.form.files(0))
    whole = all(isinstance(column, list) and len(column) == output.chunks for column in columns)
    if not whole or marker.get("sum") != _sum(output, columns):
        raise DamagedStoreError(f"The marker of {output.root} is not the one of its {output.chunks} chunks and rows.")
    try:
        return {
            number: _of_marker(output.chunk(number), files, *row)
            for number, row in enumerate(zip(*columns, strict=True))
        }
    except (TypeError, ValueError):
        raise DamagedStoreError(f"The marker of {output.root} has no receipts that dkfm writes.") from None


def input_state(output: Output) -> str:
    """Return the state of the input that a finished output was made of; nothing where its marker is of an old version.

    Raises
    ------
    StoreError
        Not finished.
    """
    return str(_marker(output).get("input", ""))


def _marker(output: Output) -> dict[str, object]:
    opened = output.place.open(zarr_schema.MARKER, _MAX_MARKER)
    if opened is None:
        raise IncompleteStoreError(
            f"{output.root} has no {zarr_schema.MARKER} marker: whatever wrote it did not finish."
        )
    with opened:
        return json_documents.parse_json(opened.read(_MAX_MARKER + 1), f"{output.root}/{zarr_schema.MARKER}")


def _of_marker(chunk: Chunk, files: int, crc32c: Sequence[int], invalid: int, size: int) -> Receipt:
    if len(crc32c) != files:
        raise ValueError("A receipt has a checksum for each file.")
    return Receipt.checked(chunk.number, chunk.rows, invalid, tuple(crc32c), size)


def open_complete(root: Location) -> tuple[Output, dict[int, Receipt]]:
    """Open a finished output, all chunks of which are there as far as a look at the ends of their files tells.

    Raises
    ------
    StoreError
        Not an output, not finished, or a chunk lost or cut short.
    """
    output = outputs.read_output(root)
    receipts = marker_receipts(output)
    require_no_extra_files(output)
    lost = missing_chunks(output, receipts)
    if lost:
        raise DamagedStoreError(f"Chunk {lost[0]} of {root} is lost, or is not the one of its receipt.")
    return output, receipts


def require_no_extra_files(output: Output) -> None:
    """Raise where there are files that no chunk has."""
    expected = {name for number in range(output.chunks) for name in output.form.files(number)}
    own = {
        "arrays": [columns.output for columns in output.columns],
        "kind": "scores",
        "form": output.settings.get("form"),
    }
    for name in output.place.names():
        if ownership.foreign_name([name], own) or (zarr_schema.is_chunk_name(name) and name not in expected):
            raise DamagedStoreError(
                f"{output.root} has gained {name}, which is of none of its chunks; move it out of the output."
            )
