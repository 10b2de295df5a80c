"""Score millions of rows with a saved model: plan, run a task for each chunk, collect receipts, write the marker.

A task holds paths, digests and numbers, but no arrays; each worker process opens the model once. An interrupted job
resumes: only chunks without a correct receipt run again.
"""

import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dkfm.core.budget import STALL_SECONDS
from dkfm.errors import (
    ClusterError,
    DamagedStoreError,
    InvalidInputError,
    StoreError,
    StoreExistsError,
    UnfitWorkerError,
    warn_caller,
)
from dkfm.execution import memory, worker_checks
from dkfm.execution.model_cache import holds_model, remove_model, shrink_to_free_memory
from dkfm.execution.task_runner import Tally, run_tasks
from dkfm.execution.worker_checks import WorkerRequirements
from dkfm.files import local
from dkfm.files.location import parse_remote
from dkfm.scoring import appending, completion, marker, output_store
from dkfm.scoring.job_setup import JobRequest, Savable, ScoringJob, open_job
from dkfm.scoring.output_store import Output
from dkfm.scoring.planning import Plan
from dkfm.scoring.receipts import ChunkReceipt, Journal, build_probe_segment
from dkfm.scoring.report import ScoreReport, log_chunk_check, log_scoring_start, make_report, require_no_fatal_chunks
from dkfm.scoring.tasks import find_sound_receipts, measure_plan, score_chunk
from dkfm.sources import chunk_cache, csr_npz
from dkfm.sources.base import NamedColumns
from dkfm.sources.parquet_files.journal import write_file_stats

if TYPE_CHECKING:
    from distributed import Client

_MAX_ROUNDS = 3
"""Rounds in which chunks that were lost during the job are scored again, before the job fails."""

_CHUNKS_PER_CHECK = 16
"""Existing chunks that one task reads and checks."""


def batch_score(
    model: "str | Path | Savable",
    source: object,
    destination: str | Path,
    *,
    output: str | Sequence[str] | None = None,
    client: "Client | None" = None,
    on_invalid: Literal["raise", "nan"] = "raise",
    chunk_rows: int | None = None,
    columns: Sequence[str] | None = None,
    id_column: str | None = None,
    stall_timeout: float = STALL_SECONDS,
    overwrite: bool = False,
    append: bool = False,
    progress: bool = True,
    trusted: Collection[str] = (),
) -> ScoreReport:
    """Score the rows of a source with a model and write an output, or resume an unfinished output.

    Parameters
    ----------
    model : path, URL or fitted estimator
        A saved model, or an estimator, which is saved to a temporary folder for the job.
    source : path, URL, zarr.Array or array-like of shape (n, d)
        The rows: see `dkfm.sources.opening.open_source`. On a cluster every worker must see the same file.
    destination : path or URL
        Where to write the output: a folder of Parquet files if the name ends in ``.parquet``, else a Zarr store. An
        unfinished output of the same model, input and settings is resumed. The chunks of a finished one are checked,
        and damaged chunks are scored again. Anything else raises an error.
    output : str or sequence of str, optional
        Outputs of the model to compute in one pass. A KernelPCA has "scores" (default) and "reconstruction_error"; a
        feature map has "features" (default) and "residual". A classifier has "predict": labels in Parquet, null for an
        invalid row, and in Zarr int64 codes of the classes that the output's attributes list, -1 for an invalid row.
    client : distributed.Client, optional
        Client of a cluster; by default Dask's current client, else threads of this process.
    on_invalid : {"raise", "nan"}
        Action for a row that contains NaN or infinity, or for which the kernel overflows: raise an error before its
        chunk is written, or count the row and write NaN (null in Parquet, -1 for the code of a class).
    chunk_rows : int, optional
        Rows of a task, which writes one chunk of the output.
    columns : sequence of str, optional
        Names of the columns of a table; by default those of the fit, or all columns if the fit had no names.
    id_column : str, optional
        Column of a table that identifies its rows. It becomes the first column of a Parquet output, or an array of its
        name in a Zarr output, which supports integers and text without nulls.
    stall_timeout : float
        Seconds without a finished task after which the job ends with an error.
    overwrite : bool
        Whether to replace an earlier dkfm output at `destination`.
    append : bool
        Whether to append the rows of files that were added to a folder of Parquet files since the output was written.
        These rows come after those of the other files, whatever the names of the files. Full chunks stay; an incomplete
        last chunk is scored again with the new rows.
    progress : bool
        Whether to show a progress bar.
    trusted : collection of str
        User functions, as ``module:function``, that may be imported and called as the kernel of a saved model. Every
        worker must be able to import them.

    Returns
    -------
    ScoreReport
        Numbers of rows and chunks, seconds, retries, and the slowest chunks.

    Raises
    ------
    InvalidInputError, StoreError, BudgetError, ClusterError
        The job cannot start, or fails. The output then has no completion marker, so no reader accepts it; the same call
        resumes it.

    Examples
    --------
    >>> import dkfm, numpy as np, tempfile
    >>> X = np.random.default_rng(0).normal(size=(300, 5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dkfm.KernelPCA(2, kernel=dkfm.kernels.Gaussian(3.0)).fit(X[:100]).save(folder + "/model")
    ...     report = dkfm.batch_score(folder + "/model", X, folder + "/scores.zarr", progress=False)
    ...     report.rows, dkfm.open_scores(folder + "/scores.zarr").shape
    (300, (300, 2))
    """
    _require_seconds(stall_timeout)
    request = JobRequest(destination, output, on_invalid, chunk_rows, columns, id_column, overwrite, trusted, append)
    while True:  # repeat if another process creates the output after this one has looked for it
        with ExitStack() as after_job, open_job(model, source, request, client) as job:
            after_job.callback(_clear_caches, job)  # when the threads of the job have ended
            job.plan.require()
            if isinstance(job.output.root, Path):
                left = (job.plan.chunks - job.plan.done) * job.plan.chunk_bytes
                memory.require_disk(job.output.root, left, "The output")
            output_begun = _open_or_create_output(job)
            if output_begun is not None:
                return _JobRun(job, output_begun, stall_timeout, progress).run()


def _clear_caches(job: ScoringJob) -> None:
    if not job.is_model_cacheable:
        remove_model(job.loaded_model.digest)
    shrink_to_free_memory()
    chunk_cache.clear_chunks()
    csr_npz.clear_unpacked()


def _require_seconds(stall_timeout: object) -> None:
    if isinstance(stall_timeout, bool) or not isinstance(stall_timeout, Real) or not float(stall_timeout) > 0:
        raise InvalidInputError(f"stall_timeout must be a number of seconds > 0, and is {stall_timeout!r:.100}.")


def _open_or_create_output(job: ScoringJob) -> Output | None:
    """Return the existing output of a job, or create it; return None if another process has just created it."""
    existing, files = job.existing_output, job.files
    if existing is not None and files is not None and files.scored is not None:
        state = job.input_watch.stamp_with_ctime
        return appending.extend_output(existing, job.output, job.kept_receipts, files.stats, files.scored, state)
    if existing is not None:
        if files is not None and not files.are_noted:
            write_file_stats(existing.output_location, existing.creation_id, files.stats, len(files.stats))
        return existing
    try:
        return output_store.create_output(job.output, job.overwrite, () if files is None else files.stats)
    except StoreExistsError:
        if job.overwrite or output_store.find_output(job.output.root) is None:
            raise
        return None


def plan_score(
    model: "str | Path | Savable",
    source: object,
    destination: str | Path,
    *,
    output: str | Sequence[str] | None = None,
    client: "Client | None" = None,
    on_invalid: Literal["raise", "nan"] = "raise",
    chunk_rows: int | None = None,
    columns: Sequence[str] | None = None,
    id_column: str | None = None,
    overwrite: bool = False,
    append: bool = False,
    trusted: Collection[str] = (),
) -> Plan:
    """Return the plan of `batch_score` with the same arguments; leave nothing on disk.

    To predict the time, trial tasks read and score some rows on the threads or workers of the job. They write a few
    chunks to a hidden temporary folder beside the output, or in the nearest folder above it that exists. Nothing is
    written to an object store. A dask collection is computed and written to a temporary folder, as by the job, because
    its number of rows is not known before.

    Raises
    ------
    InvalidInputError, StoreError, ClusterError
        As `batch_score`, except for two checks. A plan does not check whether workers see the storage of the output,
        because that needs a file there. The plan's method `require` checks whether workers have enough memory.

    Examples
    --------
    >>> import dkfm, numpy as np
    >>> X = np.random.default_rng(0).normal(size=(300, 5))
    >>> plan = dkfm.plan_score(dkfm.KernelPCA(2).fit(X), X, "scores.zarr", chunk_rows=100)
    >>> plan.chunks, plan.output_bytes
    (3, 4800)
    """
    request = JobRequest(destination, output, on_invalid, chunk_rows, columns, id_column, overwrite, trusted, append)
    with ExitStack() as after_job, open_job(model, source, request, client) as job:
        if job.plan.task_bytes > job.plan.available_bytes:
            return job.plan
        worker_checks.exclude_unfit_workers(job.executor, _make_worker_requirements(job, "", b""))
        digest = job.loaded_model.digest
        after_job.callback(chunk_cache.clear_chunks)
        if job.executor.client is None and not holds_model(digest):
            after_job.callback(remove_model, digest)
        return measure_plan(job.plan, job.make_task_arguments(job.output), job.executor)


def _make_worker_requirements(job: ScoringJob, probe_name: str, probe_content: bytes) -> WorkerRequirements:
    """Return what a job needs of its workers; `probe_name` is empty if the probe file does not exist yet."""
    return WorkerRequirements(
        location=job.output.output_location,
        probe=probe_name,
        probe_text=probe_content,
        versions=worker_checks.local_versions(tables=job.output.is_table or isinstance(job.source, NamedColumns)),
        task_bytes=job.plan.task_bytes,
        shared_bytes=job.plan.model_bytes,
        source=job.source,
        stamp=job.source.stamp(),
        model_path=job.model_path if parse_remote(job.model_path) is None else "",
    )


class _JobRun:
    """State of one run of a job."""

    def __init__(self, job: ScoringJob, output: Output, stall: float, progress: bool) -> None:
        if job.executor.client is not None:
            job = replace(job, source=appending.replace_names_by_reference(job.source, output))
        self._job, self._output, self._stall, self._progress = job, output, stall, progress
        self._receipts: dict[int, ChunkReceipt] = {}
        self._new: dict[int, ChunkReceipt] = {}
        self._retries = self._duplicates = 0
        self._requirements: WorkerRequirements | None = None
        self._unverified: set[int] = set()
        """Chunks that have files but no verified receipt."""

    def run(self) -> ScoreReport:
        """Score the chunks that are missing, and complete the output."""
        job, output = self._job, self._output
        start = time.perf_counter()
        try:
            with self._check_workers_during_run():
                if job.existing_output is None or not self._verify_existing_output(output):
                    self._score_and_complete(output)
        except UnfitWorkerError:
            raise
        except ClusterError as error:
            raise type(error)(f"{error} The same command goes on from there.") from error
        return make_report(
            output, self._receipts, self._new, time.perf_counter() - start, self._retries, self._duplicates
        )

    @contextmanager
    def _check_workers_during_run(self) -> Iterator[None]:
        """Check the workers of a cluster; workers that join later check themselves in their first task."""
        job = self._job
        if job.executor.client is None:
            yield
            return
        probe, text = build_probe_segment()
        self._requirements = _make_worker_requirements(job, probe, text)
        with worker_checks.exclude_unfit_with_probe(job.executor, self._requirements):
            yield

    def _score_and_complete(self, output: Output) -> None:
        """Score the missing chunks and write the marker; repeat if chunks were removed meanwhile."""
        watch = self._job.input_watch
        new_journal = Journal(output.output_location, uuid.uuid4().hex, output.creation_id, watch.stamp_with_ctime)
        for _ in range(_MAX_ROUNDS):
            self._score_missing_chunks(output, new_journal)
            watch.require_same("scored", "run it again with overwrite=True (--overwrite), which scores all chunks anew")
            completion.complete_output(output, self._receipts, watch.stamp_with_ctime)
            lost = completion.find_chunks_to_score(output, self._receipts)
            if not lost:
                output.output_location.remove_partial_files()
                return
            completion.remove_marker(output)
        raise DamagedStoreError(f"Chunk {lost[0]} of {output.root} is lost again and again; who else writes there?")

    def _verify_existing_output(self, output: Output) -> bool:
        """Read all chunks that have receipts; return whether the output is complete and undamaged.

        Chunks with files but no receipt are noted as unverified. Of a damaged output only the marker is removed,
        because another driver may be writing the same output.
        """
        output.output_location.remove_partial_files(local.ABANDONED_SECONDS)
        if not output.is_table:
            output_store.ensure_arrays(output, output.output_location)
        checked: set[ChunkReceipt] = set()
        while True:  # another driver may add receipts meanwhile
            known, complete = completion.load_receipts(output, self._job.input_watch.stamp_with_ctime)
            new = set(known) - checked
            if not new:
                break
            self._keep_sound_receipts(output, new)
            checked |= new
        self._drop_receipts_of_changed_input(output, complete)
        lost = [number for number in range(output.n_chunks) if number not in self._receipts]
        if lost and complete:
            completion.remove_marker(output)
        elif complete:
            completion.require_same_output_on_disk(output)
        self._unverified = set(lost) if self._job.appends else completion.find_chunks_with_files(output, lost)
        return complete and not lost

    def _drop_receipts_of_changed_input(self, output: Output, is_complete: bool) -> None:
        """Drop receipts of chunks scored before the input changed, and warn, unless the output is complete."""
        stamp, stale = self._job.input_watch.stamp_with_ctime, 0
        if not is_complete:
            every, current = ({r.chunk for r in completion.iter_journal_receipts(output, of)} for of in (None, stamp))
            stale = len(every - current)
        elif len(self._receipts) < output.n_chunks and marker.read_input_stamp(output) not in ("", stamp):
            stale = len(self._receipts)
            self._receipts.clear()
        if stale:
            warn_caller(
                f"{self._job.input_watch.source.name} was copied or written to since {stale} chunks of {output.root} "
                "were scored; they are scored again."
            )

    def _keep_sound_receipts(self, output: Output, receipts: Collection[ChunkReceipt]) -> None:
        """Read chunks in tasks, and keep in `_receipts` the receipts that match their chunks."""
        groups: dict[int, list[ChunkReceipt]] = {}
        for receipt in receipts:
            groups.setdefault(receipt.chunk // _CHUNKS_PER_CHECK, []).append(receipt)

        def keep(sound: list[ChunkReceipt]) -> None:
            self._receipts.update({receipt.chunk: receipt for receipt in sound})

        log_chunk_check(self._job, output, len(receipts))
        tasks = ((output, group, self._requirements) for group in groups.values())
        run_tasks(
            *(self._job.executor, "dkfm-look", find_sound_receipts, tasks, len(groups), self._progress, keep),
            stall_seconds=self._stall,
        )

    def _score_missing_chunks(self, output: Output, new_journal: Journal) -> None:
        """Run rounds of tasks until no chunk is missing or differs from its receipt."""
        try:
            for _ in range(_MAX_ROUNDS):
                left = completion.find_chunks_to_score(output, self._receipts)
                if not left:
                    break
                lost = [number for number in left if self._receipts.pop(number, None)]
                if lost:
                    output_store.require_not_replaced(output.root, output.creation_id)
                    completion.remove_chunks(output, lost)
                tally = self._run_tasks(output, left, new_journal)
                self._retries, self._duplicates = self._retries + tally.retries, self._duplicates + tally.duplicates
                require_no_fatal_chunks(output, [left[number] for number in tally.fatal_task_numbers])
        except BaseException:
            with suppress(StoreError):  # the first error is more important
                new_journal.flush()
            raise
        new_journal.flush()
        left = completion.find_chunks_to_score(output, self._receipts)
        if left:
            raise DamagedStoreError(f"Chunk {left[0]} of {output.root} is lost again and again; who else writes there?")

    def _run_tasks(self, output: Output, chunk_numbers: list[int], new_journal: Journal) -> Tally:
        job = self._job

        def done(receipt: ChunkReceipt) -> None:
            self._receipts[receipt.chunk] = self._new[receipt.chunk] = receipt
            new_journal.add(receipt)

        work = job.make_task_arguments(output, self._requirements)
        unverified_work = replace(work, distrusts_existing_files=True)
        log_scoring_start(job, output, len(chunk_numbers))
        tasks = ((unverified_work if number in self._unverified else work, number) for number in chunk_numbers)
        return run_tasks(
            *(job.executor, "dkfm-score", score_chunk, tasks, len(chunk_numbers), self._progress, done),
            on_idle=new_journal.flush_if_due,
            stall_seconds=self._stall,
        )
