"""Keep the names of the files of a table beside an output, in the order in which their rows are scored.

The names are in segments of the output's journal, instead of receipts. With them, a job continues in the same order
after files were added to the folder of its input.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dkfm.core.chunking import row_slices
from dkfm.errors import DamagedStoreError, InvalidInputError
from dkfm.files.location import Location
from dkfm.storage import json_reading, store_metadata
from dkfm.storage.output_files import OutputLocation, output_at, read_json

FileStat = tuple[str, int, int | str]
"""Name of a file, its size in bytes, and its time of change in ns, or on an object store its stamp."""

_FILES_PER_SEGMENT = 512
"""Number of file names in a segment, which is read as a whole."""


def file_names(stats: Sequence[FileStat]) -> tuple[str, ...]:
    """Return the names of files in their order."""
    return tuple(name for name, _, _ in stats)


@dataclass(frozen=True)
class StoredNames:
    """Names of files that are stored in an output.

    Attributes
    ----------
    root : Path or Remote
        Location of the output.
    output_id : str
        Id of the output.
    """

    root: Location
    output_id: str

    def read(self) -> tuple[str, ...]:
        """Return the names in order.

        Raises
        ------
        DamagedStoreError
            The names do not exist any more.
        """
        stats = read_file_stats(output_at(self.root), self.output_id)
        if stats is None:
            raise DamagedStoreError(f"{self.root} has lost the names of the files of its input.")
        return file_names(stats)


def write_file_stats(location: OutputLocation, output: str, stats: Sequence[FileStat], n_finished: int = 0) -> None:
    """Store names, sizes and times of change of the files of a table in their order.

    Parameters
    ----------
    location : OutputLocation
        Location of the output.
    output : str
        Id of the output.
    stats : sequence of (str, int, int or str)
        Name, size in bytes and time of change, or stamp, of each file.
    n_finished : int
        Number of the first files that a finished output has scored.
    """
    for number, part in enumerate(row_slices(len(stats), _FILES_PER_SEGMENT)):
        text = json.dumps(stats[part])
        content = {
            "crc32c": json_reading.compute_text_crc32c(output, text),
            "output": output,
            "total": len(stats),
            "files": text,
            "finished": n_finished,
            "finished_crc32c": json_reading.compute_text_crc32c(output, str(n_finished)),
        }
        location.write_file(_segment_name(output, number), json.dumps(content).encode())


def read_file_stats(location: OutputLocation, output: str) -> list[FileStat] | None:
    """Return the files that `write_file_stats` stored; None if there are none, or if they are damaged."""
    stats: list[FileStat] = []
    total: int | None = None
    number = 0
    while total is None or len(stats) < total:
        try:
            part, total = _read_segment(location, output, number)
        except (KeyError, TypeError, ValueError, RecursionError, DamagedStoreError):
            return None
        stats, number = stats + part, number + 1
    return stats if len(stats) == total and len({*file_names(stats)}) == total else None


def read_finished_count(location: OutputLocation, output: str) -> int | None:
    """Return the number of the first files that a finished output has scored; None if that is not known."""
    try:
        content = _read_content(location, output, 0)
        count, checksum = content["finished"], content["finished_crc32c"]
    except (KeyError, TypeError, ValueError, RecursionError, DamagedStoreError):
        return None
    if type(count) is not int or count < 0 or checksum != json_reading.compute_text_crc32c(output, str(count)):
        return None
    return count


def _read_content(location: OutputLocation, output: str, number: int) -> dict[str, object]:
    """Return the content of a segment; raise an error if it does not exist or is not JSON."""
    name = _segment_name(output, number)
    found = read_json(location, name)
    if found is None:
        raise DamagedStoreError(f"{location} has no {name}.")
    return found


def _read_segment(location: OutputLocation, output: str, number: int) -> tuple[list[FileStat], int]:
    """Return the files in a segment, and the number of all files; raise an error if it is missing or damaged."""
    content = _read_content(location, output, number)
    text, total = str(content["files"]), content["total"]
    if type(total) is not int or content["crc32c"] != json_reading.compute_text_crc32c(output, text):
        raise DamagedStoreError(f"{location}/{_segment_name(output, number)} is damaged.")
    return [_parse_stats(*row) for row in json.loads(text)], total


def _segment_name(output: str, number: int) -> str:
    """Return the name of a segment; raise a DamagedStoreError if the id of the output, read from a file, is invalid."""
    name = f"{output}-{number:06d}.json"
    if not store_metadata.is_journal_segment_name(name):
        raise DamagedStoreError(f"The id of an output is {output!r:.50}, which dkfm gives to none.")
    return f"{store_metadata.JOURNAL}/{name}"


def _parse_stats(name: object, size: object, changed: object) -> FileStat:
    if not isinstance(name, str) or type(size) is not int or not isinstance(changed, int | str):
        raise TypeError("a name, a size and a time")
    return name, size, changed


def find_new_files(known: Sequence[FileStat], found: Sequence[FileStat], where: str) -> list[FileStat]:
    """Return the found files that are not known, sorted; raise an InvalidInputError if a known one changed or is gone.

    Parameters
    ----------
    known, found : sequence of (str, int, int or str)
        Files that were scored, and files that exist now.
    where : str
        Name of the folder in messages.
    """
    present = {stats[0]: stats for stats in found}
    for name, size, changed in known:
        if name not in present:
            raise InvalidInputError(
                f"{where} has lost {name}, which was scored; new files alone can be appended: give the folder that was "
                "scored, with all its files, or score what is left again with overwrite=True (--overwrite)."
            )
        if present[name] != (name, size, changed):
            raise InvalidInputError(
                f"{where}/{name} has changed since it was scored; new files alone can be appended: score all files "
                "again with overwrite=True (--overwrite)."
            )
    names = {*file_names(known)}
    return sorted(stats for stats in found if stats[0] not in names)
