"""Append the rows of new files to an output: keep its full chunks, and score the rows after them.

The files of a folder of Parquet files are recorded beside the output, in the order in which their rows are scored. New
files come after them, whatever their names. Before the marker is removed, the receipts of the kept chunks are written
to the journal, for the old and for the extended output. Then the description is replaced atomically. So the same
command resumes wherever it was stopped. If the order of the files is not that of their names, the description has its
digest.
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
    file_names,
    find_new_files,
    read_file_stats,
    read_finished_count,
    write_file_stats,
)
from dkfm.sources.parquet_files.listing import TableFiles
from dkfm.storage import store_metadata

_MAX_RESCORED_CHUNKS = 16
"""An output that would have at most this number of larger chunks is scored again in such chunks."""

_MIN_ENLARGEMENT = 4
"""Smallest ratio of the rows of such a larger chunk to those of an existing one."""

_ORDER = "order"
"""Setting of an output with the digest of the order of its files, if that is not the order of their names."""

_RECEIPTS_PER_SEGMENT = 10_000
"""Number of receipts of kept chunks that are written at a time."""


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
class ScoredFiles:
    """Files that an output has scored, and after which a job appends others."""

    stats: tuple[FileStat, ...]
    """Name, size and time of change, or stamp, of each file."""
    state: str
    """State of these files; see `dkfm.files.change_detection`. Empty if there are none."""
    n_finished: int
    """Number of leading files that a finished output has scored."""
    finished_state: str
    """State of these finished files."""
    replaces_others: bool
    """Whether the unfinished output recorded other files after these, some of which have changed or are gone."""


@dataclass(frozen=True)
class InputFiles:
    """Files of a table that a job scores."""

    stats: tuple[FileStat, ...]
    """Name, size and time of change, or stamp, of each file, in the order of the rows."""
    are_noted: bool = False
    """Whether the existing output has recorded its files."""
    scored: ScoredFiles | None = None
    """The leading files, if the existing output has scored them and the job appends the others; else None."""


def order_input_files(source: Source, existing: Output | None, append: bool) -> tuple[Source, InputFiles | None]:
    """Return a source whose files are in the order in which an output scores them, and a list of these files.

    Parameters
    ----------
    source : Source
        Rows as the user passed them.
    existing : Output, optional
        Output that the job resumes, or to which it appends.
    append : bool
        Whether new files are scored after those of the output. Files that no finished output has scored all count as
        new if one of them has changed.

    Raises
    ------
    InvalidInputError
        `append` is set, and the source is not a folder of Parquet files, or a file that a finished output scored has
        changed or is gone.
    StoreExistsError
        `append` is set, and the output did not record its files.
    """
    found = source.table_files.list_stats() if isinstance(source, FromFiles) else []
    if not isinstance(source, FromFiles) or found[0][0] == "":
        if append:
            raise InvalidInputError(
                f"append (--append) scores the new files of a folder of Parquet files, and {source.name} is no folder."
            )
        return source, None
    noted = None if existing is None else _read_noted(existing)
    if existing is None or noted is None:
        if append and existing is not None and existing.input["stamp"] != digest_file_stats(found):
            raise StoreExistsError(
                f"{existing.root} did not note the files of its input, so that none can be appended; replace it with "
                "overwrite=True (--overwrite)."
            )
        files = InputFiles(tuple(found))
        return (source.with_files(file_names(found)) if append else source), files
    if append:
        files = _find_files_to_append(source.table_files, existing, noted, found)
    else:
        names = list(file_names(noted))
        if sorted(names) != [*file_names(found)] or names == sorted(names):
            return source, InputFiles(tuple(found), are_noted=True)
        present = {stats[0]: stats for stats in found}  # the same files, whether they have changed or not
        files = InputFiles(tuple(present[name] for name in names), are_noted=True)
    ordered = source.with_files(file_names(files.stats))
    if not ordered.is_opening_valid(digest_file_stats(sorted(files.stats))):
        raise InvalidInputError(f"{source.name} changed while it was opened; run the job again.")
    return ordered, files


def _find_files_to_append(
    table: TableFiles, existing: Output, noted: list[FileStat], found: list[FileStat]
) -> InputFiles:
    """Return the files that an output recorded, followed by the new files."""
    known, n_finished = noted, len(noted)
    if not existing.has_marker:
        count = read_finished_count(existing.output_location, existing.creation_id)
        n_finished = n_finished if count is None else count
        if not set(noted) <= set(found):
            known = noted[:n_finished]
    stats, replaces_others = (*known, *find_new_files(known, found, str(table))), len(known) < len(noted)
    if len(known) == len(stats) and not replaces_others:
        return InputFiles(stats, are_noted=True)
    names = file_names(known)
    state, finished_state = (
        replace(table, names=some).stamp(include_ctime=True) if some else "" for some in (names, names[:n_finished])
    )
    scored = ScoredFiles(tuple(known), state, n_finished, finished_state, replaces_others)
    return InputFiles(stats, are_noted=True, scored=scored)


def _read_noted(output: Output) -> list[FileStat] | None:
    """Return the files that an output recorded; None if it recorded none.

    Raises
    ------
    DamagedStoreError
        The record is lost, and the files were not in the order of their names.
    """
    noted, order = read_file_stats(output.output_location, output.creation_id), output.settings.get(_ORDER)
    if order is not None and (noted is None or _digest_order(noted) != order):
        raise DamagedStoreError(
            f"{output.root} has lost the order of the files of its input; replace it with overwrite=True (--overwrite)."
        )
    return noted


def _digest_order(stats: Sequence[FileStat]) -> str:
    """Return a digest of the names of files in their order."""
    return hashlib.sha256("\0".join(file_names(stats)).encode("utf-8", "surrogateescape")).hexdigest()


def may_enlarge_chunks(existing: Output, chunk_rows: int) -> bool:
    """Return whether to score an output again in larger chunks, because a small output would keep its small chunks."""
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
        Receipts of the full chunks, which stay if rows are appended.
    done : int
        Number of chunks that need not be scored.

    Raises
    ------
    StoreExistsError
        The existing output is of another job.
    """
    scored = None if files is None else files.scored
    if scored is None:
        is_other = existing.describe_difference(requested) is not None
        output_store.require_same_job(existing, requested, _describe_new_files(source, existing) if is_other else "")
        receipts = {receipt.chunk: receipt for receipt in completion.load_receipts(existing, state)[0]}
        return [], existing.n_chunks - len(completion.find_chunks_to_score(existing, receipts))
    chunk_rows = existing.chunk_rows
    is_one_chunk = requested.rows == requested.chunk_rows < chunk_rows  # so few rows are left
    if (scored.replaces_others and is_one_chunk) or may_enlarge_chunks(existing, requested.chunk_rows):
        chunk_rows = requested.chunk_rows
    extended = replace(
        existing,
        rows=requested.rows,
        chunk_rows=chunk_rows,
        input={**existing.input, "stamp": requested.input["stamp"]},
        settings={**existing.settings, "chunk_rows": str(chunk_rows)},
    )
    output_store.require_same_job(extended, requested)
    full = 0
    if chunk_rows == existing.chunk_rows:
        full = _count_known_rows(existing, source, scored) // chunk_rows
    kept = _find_full_chunks(existing, source.name, scored, full)
    if scored.replaces_others and len(kept) < extended.n_chunks:
        rows = f"the rows after those of its first {len(scored.stats):,} files" if scored.stats else "all rows"
        warn_caller(
            f"Files of {source.name} have changed, or are gone, since {existing.root} was left unfinished; {rows} are "
            "scored again."
        )
    return kept, len(kept)


def _count_known_rows(existing: Output, source: Source, scored: ScoredFiles) -> int:
    """Return the number of rows of the files that an output has scored and that have not changed since."""
    if not scored.replaces_others or not isinstance(source, FromFiles):
        return existing.rows
    names = file_names(scored.stats)
    return source.with_files(names).shape[0] if names else 0


def _find_full_chunks(existing: Output, source_name: str, scored: ScoredFiles, full: int) -> list[ChunkReceipt]:
    """Return receipts of the first `full` chunks; none, with a warning, if the files have changed since."""
    known, is_finished = completion.load_receipts(existing, scored.state)
    if is_finished and marker.read_input_stamp(existing) not in ("", scored.state):
        known = []
        warn_caller(
            f"{source_name} was copied or written to since the chunks of {existing.root} were scored; they are scored "
            "again."
        )
    return list({receipt.chunk: receipt for receipt in known if receipt.chunk < full}.values())


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
    existing: Output,
    requested: Output,
    kept: list[ChunkReceipt],
    stats: Sequence[FileStat],
    scored: ScoredFiles,
    state: str,
) -> Output:
    """Extend an output, now unfinished, by the rows of new files; return it with its new id.

    Parameters
    ----------
    existing : Output
        Output that scored the first files.
    requested : Output
        Output of all files.
    kept : list of ChunkReceipt
        Receipts of chunks that stay.
    stats : sequence of (str, int, int or str)
        Name, size and time of change, or stamp, of each of all files.
    scored : ScoredFiles
        The first files.
    state : str
        State of all files; see `dkfm.files.change_detection`.

    Raises
    ------
    StoreError
        The output was replaced meanwhile.
    """
    # Concurrent drivers with the same files derive the same id.
    words = f"{existing.creation_id} {requested.input['stamp']} {requested.chunk_rows}"
    settings = dict(requested.settings)
    names = list(file_names(stats))
    if names != sorted(names):
        settings[_ORDER] = _digest_order(stats)
    extended = replace(requested, settings=settings, creation_id=hashlib.sha256(words.encode()).hexdigest()[:32])
    current = output_store.find_output(existing.root)
    if current is not None and current.creation_id == extended.creation_id:
        return current
    output_store.require_not_replaced(existing.root, existing.creation_id)
    former = [name for name in existing.output_location.list_files() if name.startswith(f"{store_metadata.JOURNAL}/")]
    write_file_stats(existing.output_location, extended.creation_id, stats, scored.n_finished)
    if len(scored.stats) == scored.n_finished and not scored.replaces_others:
        # It is finished: this is noted before its marker goes.
        write_file_stats(existing.output_location, existing.creation_id, scored.stats, scored.n_finished)
    # The last of these is for a run that finds the new files changed or gone.
    for creation_id, of in (
        (existing.creation_id, scored.state),
        (extended.creation_id, state),
        (extended.creation_id, scored.finished_state),
    ):
        _write_receipts(existing, kept, creation_id, of)
    completion.remove_marker(existing)
    stays = extended.n_chunks if extended.chunk_rows == existing.chunk_rows else 0
    completion.remove_chunks(existing, range(stays, existing.n_chunks))
    output_store.replace_description(extended)
    # The record of the former output stays for drivers that started with it.
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
    """Return a source that reads its files in the order in which an output scored them, without new files."""
    if not isinstance(source, FromFiles):
        return source
    names, found = file_names(_read_noted(output) or ()), file_names(source.table_files.list_stats())
    if not names or found in (("",), names):
        return source
    if missing := set(names).difference(found):
        raise InvalidInputError(
            f"{source.name} has no {min(missing)}, whose rows {output.root} scores; verify without against (--against)."
        )
    return source.with_files(names)


def replace_names_by_reference(source: Source, output: Output) -> Source:
    """Return a source that reads the names of its files from an output, so that it stays small in every task."""
    if not isinstance(source, FromFiles) or source.table_files.names is None:
        return source
    return replace(source, table_files=replace(source.table_files, names=StoredNames(output.root, output.creation_id)))  # type: ignore[type-var]  # a dataclass
