"""Append the rows of new files to an output: keep its full chunks, and score what comes after them.

The files of a folder of Parquet are noted beside the output, in the order in which their rows are scored. New files
come after them, whatever their names. Before its marker is removed, the receipts of the chunks that stay are written to
the journal, for the output as it was and as it will be; then its description is replaced in one step. So the same
command goes on from wherever it was stopped. Where the order is not that of the names, the description has its digest.
"""

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

from dkfm.errors import DamagedStoreError, InvalidInputError, StoreExistsError, warn_caller
from dkfm.files.change_detection import digest_file_stats
from dkfm.scoring import completion, marker, output_store
from dkfm.scoring.output_store import Output
from dkfm.scoring.receipts import ChunkReceipt, Journal
from dkfm.sources.base import Source
from dkfm.sources.parquet_files.journal import (
    FileStat,
    StoredNames,
    find_new_files,
    read_file_stats,
    read_finished_count,
    write_file_stats,
)
from dkfm.sources.parquet_files.listing import TableFiles
from dkfm.storage import store_metadata

_MAX_RESCORED_CHUNKS = 16
"""An output of at most as many rows as so many larger chunks have is scored again in such chunks."""

_MIN_ENLARGEMENT = 4
"""How many times as large such chunks are at least."""

_ORDER = "order"
"""Setting of an output with the digest of the order of its files, if that is not the order of their names."""

_RECEIPTS_PER_SEGMENT = 10_000
"""Receipts of kept chunks that are written at once."""


@runtime_checkable
class FromFiles(Protocol):
    """A source that reads the files of a table one after the other."""

    @property
    def table_files(self) -> TableFiles:
        """Files of the table."""

    def with_files(self, names: tuple[str, ...] | StoredNames) -> Self:
        """Return a source of some of the files, in the order of their names in `names`."""

    def is_opening_valid(self, current_stamp: str) -> bool:
        """Return whether the files are still those that were opened, given a later `current_stamp`."""


@dataclass(frozen=True)
class InputFiles:
    """Files of a table that a job scores."""

    stats: tuple[FileStat, ...]
    """Name, size and time of change, or stamp, of each file, in the order of the rows."""
    n_known: int | None = None
    """Number of the first files, which the existing output has scored; None if it did not note its files."""
    known_stamp: str = ""
    """State of these files; see `dkfm.files.change_detection`."""
    replaces: bool = False
    """Whether an unfinished output noted other files after these, of which some have changed or are gone."""
    n_finished: int = 0
    """Number of the first files that a finished output has scored."""
    finished_stamp: str = ""
    """State of these files."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files."""
        return tuple(name for name, _, _ in self.stats)

    @property
    def has_new(self) -> bool:
        """Whether the files are others than those that the existing output scores."""
        return self.n_known is not None and (self.n_known < len(self.stats) or self.replaces)


def order_input_files(source: Source, existing: Output | None, append: bool) -> tuple[Source, InputFiles | None]:
    """Return a source whose files are in the order in which an output scores them, and a list of these files.

    Parameters
    ----------
    source : Source
        Rows as they were given.
    existing : Output, optional
        Output that the job resumes, or to which it appends.
    append : bool
        Whether files that are new since are scored after those of the output. If others than those that a finished
        output has scored have changed since, all of these count as new.

    Raises
    ------
    InvalidInputError
        `append` is set, and the source is no folder of Parquet files, or a file that a finished output scored has
        changed or is gone.
    StoreExistsError
        `append` is set, and the output did not note its files.
    """
    found = source.table_files.list_stats() if isinstance(source, FromFiles) else []
    if not isinstance(source, FromFiles) or found[0][0] == "":
        if append:
            raise InvalidInputError(
                f"append (--append) scores the files that are new in a folder of Parquet, and {source.name} is none."
            )
        return source, None
    stored = None if existing is None else _read_stored(existing)
    if stored is None:
        is_grown = existing is not None and existing.input["stamp"] != digest_file_stats(found)
        if append and existing is not None and is_grown:
            raise StoreExistsError(
                f"{existing.root} did not note the files of its input, so that none can be appended; replace it with "
                "overwrite=True (--overwrite)."
            )
        files = InputFiles(tuple(found))
        return (source.with_files(files.names) if append else source), files
    known, n_finished = stored, len(stored)
    if append and existing is not None and not existing.has_marker:
        noted = read_finished_count(existing.output_location, existing.creation_id)
        n_finished = n_finished if noted is None else noted
        known = stored if set(stored) <= set(found) else stored[:n_finished]
    names = tuple(name for name, _, _ in known)
    if append:
        replaces, stored = len(known) < len(stored), [*known, *find_new_files(known, found, source.name)]
    elif sorted(names) != [name for name, _, _ in found] or list(names) == sorted(names):
        return source, InputFiles(tuple(found), len(found))
    else:  # the same files, in the order of the output, whether they have changed or not
        present = {stats[0]: stats for stats in found}
        replaces, stored = False, [present[name] for name in names]
    known_stamp, finished_stamp = (
        replace(source.table_files, names=some).stamp(include_ctime=True) if some else ""
        for some in (names, names[:n_finished])
    )
    files = InputFiles(tuple(stored), len(names), known_stamp, replaces, n_finished, finished_stamp)
    ordered = source.with_files(files.names)
    if not ordered.is_opening_valid(digest_file_stats(sorted(stored))):
        raise InvalidInputError(f"{source.name} changed while it was opened; run the job again.")
    return ordered, files


def _read_stored(output: Output) -> list[FileStat] | None:
    """Return the files that an output noted; None if it noted none.

    Raises
    ------
    DamagedStoreError
        They were not in the order of their names, and are lost.
    """
    stored, order = read_file_stats(output.output_location, output.creation_id), output.settings.get(_ORDER)
    if order is not None and (stored is None or _digest_order(stored) != order):
        raise DamagedStoreError(
            f"{output.root} has lost the order of the files of its input; replace it with overwrite=True (--overwrite)."
        )
    return stored


def _digest_order(stats: Sequence[FileStat]) -> str:
    """Return a digest of the names of files in their order."""
    return hashlib.sha256("\0".join(name for name, _, _ in stats).encode("utf-8", "surrogateescape")).hexdigest()


def may_enlarge_chunks(existing: Output, chunk_rows: int) -> bool:
    """Return whether an output is to be scored anew in larger chunks: those of a few rows would stay a few forever."""
    if existing.n_chunks == 1:
        return chunk_rows > existing.chunk_rows
    return existing.rows <= _MAX_RESCORED_CHUNKS * chunk_rows and chunk_rows >= _MIN_ENLARGEMENT * existing.chunk_rows


def find_reusable_chunks(
    existing: Output, requested: Output, source: Source, files: InputFiles | None, state: str
) -> tuple[list[ChunkReceipt], int]:
    """Compare an existing output, unfinished or to be appended to, with the one that a job requests.

    Parameters
    ----------
    existing, requested : Output
        The outputs.
    source : Source
        Rows to score.
    files : InputFiles, optional
        Files that the source reads.
    state : str
        State of the source; see `dkfm.files.change_detection`.

    Returns
    -------
    kept : list of ChunkReceipt
        Receipts of chunks that stay if rows are appended: those that are full.
    done : int
        Number of chunks that need not be scored.

    Raises
    ------
    StoreExistsError
        The existing output is of another job.
    """
    if files is None or not files.has_new:
        is_other = existing.describe_difference(requested) is not None
        output_store.require_same_job(existing, requested, _describe_new_files(source, existing) if is_other else "")
        receipts = {receipt.chunk: receipt for receipt in completion.load_receipts(existing, state)[0]}
        return [], existing.n_chunks - len(completion.find_chunks_to_score(existing, receipts))
    chunk_rows = existing.chunk_rows
    is_one_chunk = requested.rows == requested.chunk_rows < chunk_rows  # so few rows are left
    if (files.replaces and is_one_chunk) or may_enlarge_chunks(existing, requested.chunk_rows):
        chunk_rows = requested.chunk_rows
    extended = replace(
        existing,
        rows=requested.rows,
        chunk_rows=chunk_rows,
        input={**existing.input, "stamp": requested.input["stamp"]},
        settings={**existing.settings, "chunk_rows": str(chunk_rows)},
    )
    output_store.require_same_job(extended, requested)
    full = _count_known_rows(existing, source, files) // chunk_rows if chunk_rows == existing.chunk_rows else 0
    if files.replaces:
        warn_caller(
            f"Files of {source.name} have changed, or are gone, since {existing.root} was left unfinished; the rows "
            f"after those of its first {files.n_known:,} files are scored again."
        )
    known, is_finished = completion.load_receipts(existing, files.known_stamp)
    if is_finished and marker.read_input_stamp(existing) not in ("", files.known_stamp):
        known = []
        warn_caller(
            f"{source.name} was copied or written to since the chunks of {existing.root} were scored; they are scored "
            "again."
        )
    kept = {receipt.chunk: receipt for receipt in known if receipt.chunk < full}
    return list(kept.values()), len(kept)


def _count_known_rows(existing: Output, source: Source, files: InputFiles) -> int:
    """Return the number of rows of the files that an existing output scored and that have not changed since."""
    if not files.replaces or not isinstance(source, FromFiles):
        return existing.rows
    names = files.names[: files.n_known]
    return source.with_files(names).shape[0] if names else 0


def _describe_new_files(source: Source, existing: Output) -> str:
    """Return a hint that new files can be appended to an output; empty if they cannot."""
    if not isinstance(source, FromFiles):
        return ""
    stored = read_file_stats(existing.output_location, existing.creation_id)
    try:
        new = [] if stored is None else find_new_files(stored, source.table_files.list_stats(), source.name)
    except InvalidInputError:
        return ""
    if not new:
        return ""
    are = "1 file is" if len(new) == 1 else f"{len(new):,} files are"
    return f" ({are} new: append=True (--append) scores what is new alone)"


def extend_output(
    existing: Output, requested: Output, kept: list[ChunkReceipt], files: InputFiles, state: str
) -> Output:
    """Make an output one that has the rows of new files too, unfinished; return it with its new id.

    Parameters
    ----------
    existing : Output
        Output that scored the first files.
    requested : Output
        Output of all files.
    kept : list of ChunkReceipt
        Receipts of chunks that stay.
    files : InputFiles
        All files.
    state : str
        State of all files; see `dkfm.files.change_detection`.

    Raises
    ------
    StoreError
        The output was replaced meanwhile.
    """
    # Drivers that are started together with the same files make the same id.
    words = f"{existing.creation_id} {requested.input['stamp']} {requested.chunk_rows}"
    settings = dict(requested.settings)
    if sorted(files.names) != list(files.names):
        settings[_ORDER] = _digest_order(files.stats)
    extended = replace(requested, settings=settings, creation_id=hashlib.sha256(words.encode()).hexdigest()[:32])
    current = output_store.find_output(existing.root)
    if current is not None and current.creation_id == extended.creation_id:
        return current
    output_store.require_not_replaced(existing.root, existing.creation_id)
    former = [name for name in existing.output_location.list_files() if name.startswith(f"{store_metadata.JOURNAL}/")]
    write_file_stats(existing.output_location, extended.creation_id, files.stats, files.n_finished)
    if files.n_known == files.n_finished and not files.replaces:  # it is finished: this is noted before its marker goes
        known = files.stats[: files.n_finished]
        write_file_stats(existing.output_location, existing.creation_id, known, files.n_finished)
    # The last of these serves a run that finds the new files changed, or gone.
    for creation_id, of in (
        (existing.creation_id, files.known_stamp),
        (extended.creation_id, state),
        (extended.creation_id, files.finished_stamp),
    ):
        _write_receipts(existing, kept, creation_id, of)
    completion.remove_marker(existing)
    stays = extended.n_chunks if extended.chunk_rows == existing.chunk_rows else 0
    completion.remove_chunks(existing, range(stays, existing.n_chunks))
    output_store.replace_description(extended)
    # What was noted for the former output stays for drivers that began with it.
    ids = existing.creation_id, extended.creation_id
    existing.output_location.remove_files(name for name in former if not any(of in name for of in ids))
    return extended


def _write_receipts(output: Output, receipts: list[ChunkReceipt], creation_id: str, state: str) -> None:
    """Write receipts to the journal of an output, for the given id of the output and state of its input."""
    journal = Journal(output.output_location, uuid.uuid4().hex, creation_id, state)
    for number, receipt in enumerate(receipts, 1):
        journal.add(receipt)
        if number % _RECEIPTS_PER_SEGMENT == 0:
            journal.flush()
    journal.flush()


def restore_file_order(source: Source, output: Output) -> Source:
    """Return a source that reads its files in the order in which an output scored them, without those that are new."""
    if not isinstance(source, FromFiles):
        return source
    names = tuple(name for name, _, _ in _read_stored(output) or ())
    found = [name for name, _, _ in source.table_files.list_stats()]
    if not names or found in ([""], list(names)):
        return source
    if missing := set(names).difference(found):
        raise InvalidInputError(f"{source.name} has no {min(missing)}, whose rows {output.root} scores.")
    return source.with_files(names)


def replace_names_by_reference(source: Source, output: Output) -> Source:
    """Return a source that reads the names of its files from an output, so that it stays small in every task."""
    if not isinstance(source, FromFiles) or source.table_files.names is None:
        return source
    return replace(source, table_files=replace(source.table_files, names=StoredNames(output.root, output.creation_id)))  # type: ignore[type-var]  # a dataclass
