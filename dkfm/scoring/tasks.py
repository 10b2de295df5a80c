"""Define the tasks of a scoring job: score and write a chunk, check chunks that exist, or measure for a plan."""

import os
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dkfm.core import budget, chunking
from dkfm.core.background_io import prefetch
from dkfm.core.display.quantities import format_names
from dkfm.core.rows import Array, Rows, find_nonfinite_columns, zero_nonfinite_rows
from dkfm.errors import DkfmError, InvalidInputError, KernelError, WorkerDiedError
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import worker_address
from dkfm.execution.executors import Executor
from dkfm.execution.model_cache import get_saved_scorer
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, require_fit_worker
from dkfm.files.object_store import Remote
from dkfm.files.temporary_folders import open_temporary_folder
from dkfm.numerics import links
from dkfm.numerics.scorer import Scorer
from dkfm.scoring import completion, output_store
from dkfm.scoring.formats.chunk_files import Piece, combine_summaries, write_chunk_files
from dkfm.scoring.formats.id_array import propose_parquet, try_convert_ids
from dkfm.scoring.output_store import Output
from dkfm.scoring.planning import Plan
from dkfm.scoring.receipts import ChunkReceipt
from dkfm.sources.base import NamedColumns, Source

if TYPE_CHECKING:
    import pyarrow as pa

_MEASURED_ROWS = 1024
"""Number of rows that are scored to predict the time of a job."""

_MAX_NAMED_ROWS = 5
"""Largest number of rows that a message names."""

_TRIAL_SECONDS, _TRIAL_BYTES = 0.05, 2**22
"""Largest seconds and bytes of scores of a trial chunk, which is written to measure the time of its files."""

_MIN_TRIALS, _MAX_TRIALS = 2, 32
"""Smallest and largest number of trial chunks that each thread writes."""

_TRIAL_THREADS = 8
"""Largest number of threads that write trial chunks."""

_MEASURED_REQUESTS = 5
"""Number of timed requests to an object store, of which the median counts."""

_REQUESTS_PER_CHUNK, _REQUESTS_PER_FILE = 4, 2
"""Number of requests to an object store for a chunk, which check that its output is the same, and for each file."""


@runtime_checkable
class HasIds(Protocol):
    """A source whose rows may have ids."""

    id_column: str | None

    def read_ids(self, rows: slice) -> "pa.Array":
        """Return the ids of a slice of rows."""

    def find_file_with_missing_ids(self) -> str | None:
        """Return the name of a file whose metadata report rows without ids; None if there is none."""


@dataclass(frozen=True)
class SharedTaskArguments:
    """Arguments that the tasks of a job share."""

    model_path: str
    """Path or URL of the model."""
    model_digest: str
    """Digest of the model."""
    trusted: tuple[str, ...]
    """User functions that the kernel may import."""
    streamed: bool
    """Whether weights stay in the store."""
    source: Source
    """Rows to score."""
    piece_rows: int
    """Rows to read and score at a time."""
    output: Output
    """Where scores are written."""
    on_invalid: str
    """What to do with rows that are not finite. One of "raise", "nan"."""
    requirements: WorkerRequirements | None = None
    """What a worker must have."""
    distrusts_existing_files: bool = False
    """Whether existing files of a chunk may hold other scores."""


def score_chunk(work: SharedTaskArguments, number: int) -> ChunkReceipt:
    """Score the rows of one chunk, write it, and return its receipt."""
    start, output, chunk = time.perf_counter(), work.output, work.output.chunk(number)
    require_fit_worker(work.requirements)
    scorer = get_saved_scorer(work.model_path, work.model_digest, work.trusted, work.streamed)
    require_current = partial(output_store.require_not_replaced, output.root, output.creation_id)
    with single_blas_thread(scorer.may_call_scipy_blas):
        parts = _piece_slices(work, output.chunk_slice(number))
        contents, existed = write_chunk_files(
            output.format,
            chunk,
            _score_pieces(work, scorer, parts),
            len(parts),
            require_current,
            work.distrusts_existing_files,
        )
    return ChunkReceipt(
        number,
        chunk.rows,
        *combine_summaries(contents),
        seconds=time.perf_counter() - start,
        worker=worker_address() or f"process {os.getpid()}",
        is_preexisting=existed,
    )


def measure_row_seconds(work: SharedTaskArguments) -> float:
    """Read and score some rows of a job without writing them; return the seconds for one row on one thread."""
    scorer = get_saved_scorer(work.model_path, work.model_digest, work.trusted, work.streamed)
    names, piece = [columns.output for columns in work.output.columns], min(work.piece_rows, work.output.rows)
    reads = list[float]()
    for _ in range(2):
        start = time.perf_counter()
        Z = work.source.read(slice(0, piece))
        reads.append(time.perf_counter() - start)
    first, again = max(reads), reads[1]  # the first read may decode a chunk that stays cached for other tasks
    read_seconds = (first - again) / max(piece, min(work.source.chunk_rows, work.output.rows)) + again / piece
    sample, seconds = Z[:_MEASURED_ROWS], list[float]()
    with single_blas_thread(scorer.may_call_scipy_blas):
        for _ in range(3):  # the first call may compile
            start = time.perf_counter()
            _score_or_nan(scorer, names, sample, work.source, 0)
            seconds.append(time.perf_counter() - start)
    return read_seconds + min(seconds) / int(sample.shape[0])


def measure_plan(plan: Plan, work: SharedTaskArguments, executor: Executor) -> Plan:
    """Return a plan with the seconds of a row and of a chunk, measured by trial tasks on the executor of the job.

    Chunks of few rows are written to a hidden folder beside the output, or in the nearest folder that exists above it.
    Nothing is written to an object store; this process only measures its response time. If that fails, if weights are
    read from the store, or if no chunk remains to be scored, the predicted seconds of a chunk are kept.
    """
    measured = list[float]()
    run_tasks(executor, "dkfm-plan", measure_row_seconds, [(work,)], 1, progress=False, on_result=measured.append)
    if not measured:
        raise WorkerDiedError("The workers died that scored some rows to predict the time.")
    plan, root = replace(plan, row_seconds=measured[0]), work.output.root
    if plan.streamed or plan.done == plan.chunks:
        return plan
    with suppress(DkfmError):  # the job itself reports errors of its rows or its storage
        if isinstance(root, Path):
            return _measure_chunks(plan, work, executor, root)
        requests = _REQUESTS_PER_CHUNK + _REQUESTS_PER_FILE * len(work.output.format.file_names(0))
        return replace(plan, chunk_seconds=plan.chunk_seconds + requests * _measure_request_seconds(root))
    return plan


def _measure_chunks(plan: Plan, work: SharedTaskArguments, executor: Executor, root: Path) -> Plan:
    """Write trial chunks, and return a plan with the seconds of a chunk minus those of its rows."""
    row_bytes, step = plan.chunk_bytes // plan.chunk_rows, work.source.chunk_rows
    write_seconds = row_bytes / budget.WRITE_BYTES
    enough = max(1, int(min(_TRIAL_SECONDS / (plan.row_seconds + write_seconds), _TRIAL_BYTES / row_bytes)))
    rows = min(plan.chunk_rows, enough if enough < step else chunking.round_to_chunk_rows(enough, step))
    chunks = max(_MIN_TRIALS, min(_MAX_TRIALS, 2 * enough // rows)) * min(executor.threads, _TRIAL_THREADS)
    nearest = next(folder for folder in root.absolute().parents if folder.is_dir())
    need = (chunks + executor.threads) * rows * row_bytes
    with open_temporary_folder("plan", nearest, need=need, what="A trial of chunks", hidden=True) as folder:
        trial = replace(work, output=replace(work.output, root=folder / "first", chunk_rows=rows), on_invalid="nan")
        _time_chunks(trial, executor, executor.threads)  # warm-up: open the model on workers, and import modules
        seconds = _time_chunks(replace(trial, output=replace(trial.output, root=folder / "timed")), executor, chunks)
    row_seconds = plan.row_seconds if rows < plan.chunk_rows else min(plan.row_seconds, seconds / rows)
    rest = max(0.0, seconds - rows * (row_seconds + write_seconds))
    return replace(plan, row_seconds=row_seconds, chunk_seconds=rest)


def _time_chunks(work: SharedTaskArguments, executor: Executor, most: int) -> float:
    """Score at most `most` chunks of a new output; return the seconds of one thread for each."""
    output = replace(work.output, rows=min(work.output.rows, most * work.output.chunk_rows))
    work = replace(work, output=output_store.create_output(output, overwrite=False))
    start, count = time.perf_counter(), output.n_chunks
    try:
        tasks = ((work, number) for number in range(count))
        tally = run_tasks(executor, "dkfm-plan", score_chunk, tasks, count, progress=False)
    except BaseException:
        executor.cancel()  # other tasks would continue to write into a folder that is removed
        raise
    if tally.fatal_task_numbers:
        raise WorkerDiedError("Workers died of a trial.")
    return (time.perf_counter() - start) / count * min(executor.threads, count)


def _measure_request_seconds(root: Remote) -> float:
    """Return the seconds that an object store takes for an answer."""
    seconds = []
    for _ in range(_MEASURED_REQUESTS):
        start = time.perf_counter()
        root.size("trial")
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _piece_slices(work: SharedTaskArguments, rows: slice) -> list[slice]:
    """Return the rows of each piece of a chunk."""
    return [
        slice(rows.start + part.start, rows.start + part.stop)
        for part in chunking.row_slices(rows.stop - rows.start, work.piece_rows)
    ]


def _score_pieces(work: SharedTaskArguments, scorer: Scorer, parts: list[slice]) -> Generator[Piece]:
    """Yield the scores of some pieces of rows; the next piece is prefetched."""
    names = [columns.output for columns in work.output.columns]
    strict = work.on_invalid == "raise"
    for at, (Z, ids) in enumerate(prefetch([partial(_read_rows_and_ids, work, part) for part in parts])):
        if strict:
            _require_finite(work.source, Z, parts[at:])
        yield Piece((_score_or_raise if strict else _score_or_nan)(scorer, names, Z, work.source, parts[at].start), ids)


def _read_rows_and_ids(work: SharedTaskArguments, rows: slice) -> "tuple[Rows, pa.Array | None]":
    """Return some rows, and their ids if the output has an id column."""
    source, array = work.source, work.output.ids
    if not work.output.settings.get("id_column") or not isinstance(source, HasIds):
        return source.read(rows), None
    ids = source.read_ids(rows)
    if array is not None:
        ids, fault = try_convert_ids(ids, array)
        if fault is not None:
            file, row = source.locate_row(rows.start + fault[0])
            instead = propose_parquet(work.output.root)
            raise InvalidInputError(f"Row {row} of {file} {fault[1]}; give each row an id, or {instead}.")
    return source.read(rows), ids


def _require_finite(source: Source, Z: Rows, parts: list[slice]) -> None:
    """Raise if the rows Z, of `parts[0]`, are not finite; the error names such rows and columns of all `parts`."""
    values = Z if isinstance(Z, np.ndarray) else Z.data
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):  # one cheap pass; an overflow of the sum leads to the exact check below
            return
    if zero_nonfinite_rows(Z)[0].all():
        return
    bad: list[npt.NDArray[np.intp]] = []
    bad_columns: set[int] = set()
    for part in parts:
        Z = source.read(part)
        bad.append(part.start + np.flatnonzero(~zero_nonfinite_rows(Z)[0]))
        bad_columns.update(find_nonfinite_columns(Z).tolist())
    names = source.columns if isinstance(source, NamedColumns) else range(source.shape[1])
    where = format_names([names[column] for column in sorted(bad_columns)])
    (file, rows), contain = _build_message_parts(source, np.concatenate(bad))
    raise InvalidInputError(
        f"{file} must be finite, and {rows} {contain} NaN or infinity in {where}; nothing of this chunk was "
        "written, and others may have such rows too: repair or remove them and run the job again, or score them NaN "
        '(on_invalid="nan", overwrite=True, or --on-invalid nan --overwrite, without append).'
    )


def _score_or_raise(scorer: Scorer, names: list[str], Z: Rows, source: Source, first: int) -> dict[str, Array]:
    """Return the scores of rows; raise if any is not finite, and name the file and the rows."""
    scores = scorer.score_heads(names, Z)
    bad = np.flatnonzero(~_finite_rows(scores.values()))
    if len(bad):
        (file, rows), contain = _build_message_parts(source, bad + first)
        raise KernelError(
            f"{rows.capitalize()} of {file} overflow{'s' if contain == 'contains' else ''} {scorer.model.kernel!r}: "
            f"the {', '.join(names)} are not finite."
        )
    return scores


def _score_or_nan(scorer: Scorer, names: list[str], Z: Rows, source: Source, first: int) -> dict[str, Array]:
    """Return the scores of rows; rows without scores get NaN, or no class."""
    valid, rows = zero_nonfinite_rows(Z)
    with np.errstate(over="ignore", invalid="ignore"):
        scores = scorer.score_heads(names, rows)
    valid &= _finite_rows(scores.values())
    for values in scores.values():
        values[~valid] = links.NO_CODE if values.dtype.kind == "i" else np.nan
    return scores


def _finite_rows(scores: Iterable[Array]) -> npt.NDArray[np.bool_]:
    """Return which rows are finite in all outputs."""
    finite: npt.NDArray[np.bool_] = np.logical_and.reduce([links.find_valid_rows(values) for values in scores])
    return finite


def _build_message_parts(source: Source, bad: npt.NDArray[np.intp]) -> tuple[tuple[str, str], str]:
    """Return parts of an error message about bad rows: the file of the first, the rows in it, and "contain(s)"."""
    locations = [source.locate_row(int(row)) for row in bad[:_MAX_NAMED_ROWS]]
    file = locations[0][0]
    numbers = [str(row) for name, row in locations if name == file]
    more = len(bad) - len(numbers)
    rows = ", ".join(numbers) + (f" and {more} more" if more else "")
    return (file, f"row {rows}" if len(bad) == 1 else f"rows {rows}"), "contains" if len(bad) == 1 else "contain"


def find_sound_receipts(
    output: Output, receipts: Sequence[ChunkReceipt], requirements: WorkerRequirements | None = None
) -> list[ChunkReceipt]:
    """Read some chunks; return the receipts that match them, at most one for each chunk."""
    require_fit_worker(requirements)
    sound: dict[int, ChunkReceipt] = {}
    for receipt in receipts:
        if receipt.chunk not in sound and completion.is_sound(output, receipt):
            sound[receipt.chunk] = receipt
    return list(sound.values())
