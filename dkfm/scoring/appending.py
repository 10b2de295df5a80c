"""Append the rows of new files to an output: keep its full chunks, and score what comes after them.

The files of a folder of Parquet are noted beside the output, in the order in which their rows are scored. New files
come after them, whatever their names. Before its marker is removed, the receipts of the chunks that stay are written to
the journal, for the output as it was and as it will be; then its description is replaced in one step. So the same
command goes on from wherever it was stopped.
"""

import hashlib
import uuid
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

from dkfm.errors import InvalidInputError, StoreError, StoreExistsError
from dkfm.scoring import completion, output_store
from dkfm.scoring.output_store import Output
from dkfm.scoring.receipts import Journal, Receipt
from dkfm.sources.base import Source
from dkfm.sources.file_names import FileStat, StoredNames, read_file_stats, require_known_files, write_file_stats
from dkfm.sources.parquet_file_list import TableFiles

_MAX_RESCORED_CHUNKS = 16
"""An output of at most as many rows as so many larger chunks have is scored again in such chunks."""

_RECEIPTS_PER_SEGMENT = 10_000
"""Receipts of kept chunks that are written at once."""


@runtime_checkable
class FromFiles(Protocol):
    """A source that reads the files of a table one after the other."""

    @property
    def table(self) -> TableFiles:
        """Files of the table."""

    def with_files(self, names: tuple[str, ...] | StoredNames) -> Self:
        """Return a source of some of the files, in the order of their names in `names`."""


@dataclass(frozen=True)
class InputFiles:
    """Files of a table that a job scores."""

    stats: tuple[FileStat, ...]
    """Name, size and time of change, or stamp, of each file, in the order of the rows."""
    known: int | None = None
    """Number of the first files, which the existing output has scored; None if it did not note its files."""
    known_state: str = ""
    """State of these files; see `dkfm.files.change_detection`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files."""
        return tuple(name for name, _, _ in self.stats)

    @property
    def has_new(self) -> bool:
        """Whether there are files that the existing output has not scored."""
        return self.known is not None and self.known < len(self.stats)


def choose_files(source: Source, existing: Output | None, append: bool) -> tuple[Source, InputFiles | None]:
    """Return a source whose files are in the order in which an output scores them, and a list of these files.

    Parameters
    ----------
    source : Source
        Rows as they were given.
    existing : Output, optional
        Output that the job resumes, or to which it appends.
    append : bool
        Whether files that are new since are scored after those of the output.

    Raises
    ------
    InvalidInputError
        `append` is set, and the source is no folder of Parquet files, or a file that was scored changed or is gone.
    StoreExistsError
        `append` is set, and the output did not note its files.
    """
    found = source.table.list_stats() if isinstance(source, FromFiles) else []
    if not isinstance(source, FromFiles) or found[0][0] == "":
        if append:
            raise InvalidInputError(
                f"append (--append) scores the files that are new in a folder of Parquet, and {source.name} is none."
            )
        return source, None
    stored = None if existing is None else read_file_stats(existing.location, existing.creation_id)
    if stored is None:
        if append and existing is not None:
            raise StoreExistsError(
                f"{existing.root} did not note the files of its input, so that none can be appended; replace it with "
                "overwrite=True (--overwrite)."
            )
        files = InputFiles(tuple(found))
        return (source.with_files(files.names) if append else source), files
    names = tuple(name for name, _, _ in stored)
    if append:
        stored = [*stored, *require_known_files(stored, found, source.name)]
    elif sorted(names) != [name for name, _, _ in found] or list(names) == sorted(names):
        return source, InputFiles(tuple(found), len(found))
    known_state = replace(source.table, names=names).stamp(include_ctime=True)
    files = InputFiles(tuple(stored), len(names), known_state)
    return source.with_files(files.names), files


def may_enlarge_chunks(existing: Output, chunk_rows: int) -> bool:
    """Return whether an output is to be scored anew in larger chunks: those of a few rows would stay a few forever."""
    is_small = existing.n_chunks == 1 or existing.rows <= _MAX_RESCORED_CHUNKS * chunk_rows
    return is_small and chunk_rows > existing.chunk_rows


def match_existing(
    existing: Output, requested: Output, source: Source, files: InputFiles | None, state: str
) -> tuple[list[Receipt], int]:
    """Compare an existing output with the one that a job requests.

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
    kept : list of Receipt
        Receipts of chunks that stay if rows are appended: those that are full.
    done : int
        Number of chunks that need not be scored.

    Raises
    ------
    StoreExistsError
        The existing output is of another job.
    """
    if files is None or not files.has_new:
        output_store.require_same_job(existing, requested, _describe_new_files(source, existing))
        receipts = {receipt.chunk: receipt for receipt in completion.load_receipts(existing, state)[0]}
        return [], existing.n_chunks - len(completion.find_chunks_to_score(existing, receipts))
    chunk_rows = existing.chunk_rows
    if may_enlarge_chunks(existing, requested.chunk_rows):
        chunk_rows = requested.chunk_rows
    extended = replace(
        existing,
        rows=requested.rows,
        chunk_rows=chunk_rows,
        input={**existing.input, "stamp": requested.input["stamp"]},
        settings={**existing.settings, "chunk_rows": str(chunk_rows)},
    )
    output_store.require_same_job(extended, requested)
    full = existing.rows // chunk_rows if chunk_rows == existing.chunk_rows else 0
    known = completion.load_receipts(existing, files.known_state)[0]
    kept = {receipt.chunk: receipt for receipt in known if receipt.chunk < full}
    return list(kept.values()), len(kept)


def _describe_new_files(source: Source, existing: Output) -> str:
    """Return a hint that new files can be appended to an output; empty if they cannot."""
    if not isinstance(source, FromFiles):
        return ""
    stored = read_file_stats(existing.location, existing.creation_id)
    try:
        new = [] if stored is None else require_known_files(stored, source.table.list_stats(), source.name)
    except InvalidInputError:
        return ""
    if not new:
        return ""
    are = "1 file is" if len(new) == 1 else f"{len(new):,} files are"
    return f" ({are} new: append=True (--append) scores what is new alone)"


def extend_output(existing: Output, requested: Output, kept: list[Receipt], files: InputFiles, state: str) -> Output:
    """Make an output one that has the rows of new files too, unfinished; return it with its new id.

    Parameters
    ----------
    existing : Output
        Output that scored the first files.
    requested : Output
        Output of all files.
    kept : list of Receipt
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
    extended = replace(requested, creation_id=hashlib.sha256(words.encode()).hexdigest()[:32])
    current = output_store.find_output(existing.root)
    if current is not None and current.creation_id == extended.creation_id:
        return current
    output_store.require_not_replaced(existing.root, existing.creation_id)
    write_file_stats(existing.location, extended.creation_id, files.stats)
    for creation_id, of in ((existing.creation_id, files.known_state), (extended.creation_id, state)):
        _write_receipts(existing, kept, creation_id, of)
    completion.remove_marker(existing)
    if extended.chunk_rows != existing.chunk_rows:
        completion.remove_chunks(existing, range(existing.n_chunks))
    output_store.replace_description(extended)
    return extended


def _write_receipts(output: Output, receipts: list[Receipt], creation_id: str, state: str) -> None:
    """Write receipts to the journal of an output, for the given id of the output and state of its input."""
    journal = Journal(output.location, uuid.uuid4().hex, creation_id, state)
    for number, receipt in enumerate(receipts, 1):
        journal.add(receipt)
        if number % _RECEIPTS_PER_SEGMENT == 0:
            journal.flush()
    journal.flush()


def read_scored_order(source: Source, output: Output) -> Source:
    """Return a source that reads its files in the order in which an output scored them, without those that are new."""
    if not isinstance(source, FromFiles):
        return source
    stored = read_file_stats(output.location, output.creation_id)
    names = tuple(name for name, _, _ in stored or ())
    found = [name for name, _, _ in source.table.list_stats()]
    if not names or found in ([""], list(names)):
        return source
    if missing := set(names).difference(found):
        raise InvalidInputError(f"{source.name} has no {min(missing)}, whose rows {output.root} scores.")
    return source.with_files(names)


def refer_to_stored_names(source: Source, output: Output) -> Source:
    """Return a source that reads the names of its files from an output, so that it stays small in every task."""
    if not isinstance(source, FromFiles) or source.table.names is None:
        return source
    if output.creation_id == "":
        raise StoreError(f"{output.root} does not exist yet.")
    return replace(source, table=replace(source.table, names=StoredNames(output.root, output.creation_id)))  # type: ignore[type-var]  # a dataclass
