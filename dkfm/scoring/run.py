"""Millions of rows through a saved model: plan, tasks that own whole chunks, receipts, completion marker.

A task carries two paths, a digest and a number; the model is opened once per worker process. A job that was cut short
goes on where it was: only chunks without a receipt that is true run again.
"""

import time
import uuid
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.core.budget import STALL_SECONDS
from dkfm.errors import (
    ClusterError,
    DamagedStoreError,
    DkfmWarning,
    StoreError,
    StoreExistsError,
    UnfitWorkerError,
)
from dkfm.execution import memory, worker_checks
from dkfm.execution.model_cache import remove_model
from dkfm.execution.task_runner import Tally, run_tasks
from dkfm.execution.worker_checks import WorkerRequirements
from dkfm.files import local
from dkfm.files.location import at_url
from dkfm.scoring import completion, outputs
from dkfm.scoring.outputs import Output
from dkfm.scoring.planning import Plan
from dkfm.scoring.prepare import JobRequest, Savable, ScoringJob, known_receipts, prepare_job
from dkfm.scoring.receipts import Journal, Receipt, empty_segment
from dkfm.scoring.report import ScoreReport, slowest_chunks
from dkfm.scoring.tasks import ChunkWork, check_chunks, score_chunk
from dkfm.sources import chunk_cache, npz
from dkfm.sources.base import Named

if TYPE_CHECKING:
    from distributed import Client

_ROUNDS = 3
"""How often chunks that get lost while the job runs are made again."""

_CHECKED_TOGETHER = 16
"""Chunks that a task reads again."""


def batch_score(
    model: "str | Path | Savable",
    source: object,
    destination: str | Path,
    *,
    output: str | Sequence[str] | None = None,
    client: "Client | None" = None,
    on_invalid: str = "raise",
    chunk_rows: int | None = None,
    columns: Sequence[str] | None = None,
    id_column: str | None = None,
    stall_timeout: float = STALL_SECONDS,
    overwrite: bool = False,
    progress: bool = True,
    trusted: Collection[str] = (),
) -> ScoreReport:
    """Score the rows of a source through a model into an output, or go on with one that was begun.

    Parameters
    ----------
    model : path, URL or fitted estimator
        A saved model, or an estimator, which is saved for the time of the job.
    source : path, URL, zarr.Array or array-like of shape (n, d)
        Where the rows are: see `dkfm.sources.base.open_source`. On a cluster every worker must see it.
    destination : str or Path
        Or a URL: where the output is made, a folder of Parquet where it ends in ``.parquet``, else a Zarr store. One
        of the same model, input and settings is gone on with; a complete one is read again, and mended where it is
        damaged; anything else is refused.
    output : str or sequence of str, optional
        Which outputs of the model, all from one pass: by default "scores" of a KernelPCA, which has
        "reconstruction_error" too, and "features" of a map, which has "residual". Of a classifier "predict": int64
        codes of the classes that the attributes of the output list, -1 for a row that is invalid.
    client : distributed.Client, optional
        By default the current one, else threads of this process.
    on_invalid : {"raise", "nan"}
        A row with NaN or infinity, or one that overflows the kernel, stops the job before its chunk is written, or
        scores NaN and is counted.
    chunk_rows : int, optional
        Rows of a task, which is one chunk of the output.
    columns : sequence of str, optional
        Of a table, by name: by default those that the model was fitted with, or, if it knows no names, all.
    id_column : str, optional
        Of a table: what tells its rows apart; the output, a table too, has it as its first column.
    stall_timeout : float
        Seconds without a finished task after which the job ends with an error.
    overwrite : bool
        Whether an earlier output of dkfm's at `destination` is replaced.
    progress : bool
        Whether to show a progress bar.
    trusted : collection of str
        Functions of yours, as ``module:function``, that may be imported and run as the kernel of a saved model; every
        worker must be able to import them.

    Returns
    -------
    ScoreReport

    Raises
    ------
    InvalidInputError, StoreError, BudgetError, ClusterError
        In one sentence each; the output is then without its marker, and no reader takes it for finished. The same call
        goes on from there.

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
    request = JobRequest(destination, output, on_invalid, chunk_rows, columns, id_column, overwrite, trusted)
    while True:  # until nobody else begins the output between the look at it and its creation
        with prepare_job(model, source, request, client) as job:
            job.plan.require()
            if isinstance(job.wanted.root, Path):
                left = (job.plan.chunks - job.plan.done) * job.plan.chunk_bytes
                memory.require_disk(job.wanted.root, left, "The output")
            begun = _begin(job)
            if begun is not None:
                return _Scoring(job, begun, stall_timeout, progress).run()


def _begin(job: ScoringJob) -> Output | None:
    """Return the output of a job, created if it is new; None where another run created one since it was looked for."""
    if job.found is not None:
        return job.found
    try:
        return outputs.create_output(job.wanted, job.overwrite)
    except StoreExistsError:
        if job.overwrite or outputs.find_output(job.wanted.root) is None:
            raise
        return None


def plan_score(
    model: "str | Path | Savable",
    source: object,
    destination: str | Path,
    *,
    output: str | Sequence[str] | None = None,
    client: "Client | None" = None,
    on_invalid: str = "raise",
    chunk_rows: int | None = None,
    columns: Sequence[str] | None = None,
    id_column: str | None = None,
    overwrite: bool = False,
    trusted: Collection[str] = (),
) -> Plan:
    """Return what `batch_score` would do, with the same parameters; nothing is written.

    Raises
    ------
    InvalidInputError, StoreError, ClusterError
        What `batch_score` would refuse, but for what takes a file at the output to see: whether every worker has the
        same. That a worker cannot hold a task, the plan's `require` tells.

    Examples
    --------
    >>> import dkfm, numpy as np
    >>> X = np.random.default_rng(0).normal(size=(300, 5))
    >>> plan = dkfm.plan_score(dkfm.KernelPCA(2).fit(X), X, "scores.zarr", chunk_rows=100)
    >>> plan.chunks, plan.output_bytes
    (3, 4800)
    """
    request = JobRequest(destination, output, on_invalid, chunk_rows, columns, id_column, overwrite, trusted)
    with prepare_job(model, source, request, client) as job:
        if job.running.client is not None and job.plan.task_bytes <= job.plan.have_bytes:
            worker_checks.check_workers(job.running.client, _requirements(job, "", b""))
        return job.plan


def _requirements(job: ScoringJob, probe: str, text: bytes) -> WorkerRequirements:
    """Return what a job needs of its workers; `probe` is empty if nothing is written at the output yet."""
    return WorkerRequirements(
        location=job.wanted.place,
        probe=probe,
        probe_text=text,
        versions=worker_checks.local_versions(tables=job.wanted.is_table or isinstance(job.rows, Named)),
        task_bytes=job.plan.task_bytes,
        shared_bytes=job.plan.model_bytes,
        source=job.rows,
        stamp=job.rows.stamp(),
        model=job.model if at_url(job.model) is None else "",
    )


class _Scoring:
    """A job at work."""

    def __init__(self, job: ScoringJob, output: Output, stall: float, progress: bool) -> None:
        self._job, self._output, self._stall, self._progress = job, output, stall, progress
        self._receipts: dict[int, Receipt] = {}
        self._new: dict[int, Receipt] = {}
        self._retries = self._duplicates = 0
        self._requirements: WorkerRequirements | None = None
        self._doubted: set[int] = set()
        """Chunks of which something was there without a receipt that is true."""

    def run(self) -> ScoreReport:
        """Do all that is not done, and complete the output."""
        job, output = self._job, self._output
        start = time.perf_counter()
        try:
            with self._fit_workers(output):
                if job.found is None or not self._look_again(output):
                    self._finish(output)
        except UnfitWorkerError:
            raise
        except ClusterError as error:
            raise type(error)(f"{error} The same command goes on from there.") from error
        finally:
            remove_model(job.record.digest)
            chunk_cache.clear_chunks()
            npz.clear_unpacked()
        return self._report(output, time.perf_counter() - start)

    @contextmanager
    def _fit_workers(self, output: Output) -> Iterator[None]:
        """Ask the workers of a cluster whether they are fit; each of their tasks knows what that is."""
        job, client = self._job, self._job.running.client
        if client is None:
            yield
            return
        probe, text = empty_segment()
        self._requirements = _requirements(job, probe, text)
        with worker_checks.checked_workers(client, self._requirements):
            yield

    def _finish(self, output: Output) -> None:
        """Score what is left, and complete the output, unless somebody takes chunks from it meanwhile."""
        book = Journal(output.place, uuid.uuid4().hex, output.run, self._job.watch.state)
        for _ in range(_ROUNDS):
            self._score(output, book)
            self._job.watch.require_same("scored", "run it again, and all chunks are scored anew")
            completion.complete_output(output, self._receipts, self._job.watch.state)
            lost = completion.missing_chunks(output, self._receipts)
            if not lost:
                output.place.sweep()
                return
            completion.remove_marker(output)
        raise DamagedStoreError(f"Chunk {lost[0]} of {output.root} is lost again and again; who else writes there?")

    def _look_again(self, output: Output) -> bool:
        """Read what is there again; doubt what no receipt tells; say whether all is there and complete.

        Nothing is removed: another driver may be writing it, and takes it for done.
        """
        output.place.sweep(local.ABANDONED_SECONDS)
        if not output.is_table:
            outputs.write_array_metadata(output, output.place)
        checked: set[Receipt] = set()
        there, complete = known_receipts(output, self._job.watch.state)
        while new := set(there) - checked:  # until no other driver adds any
            self._check(output, new)
            checked |= new
            there, complete = known_receipts(output, self._job.watch.state)
        self._leave_other_rows(output, complete)
        lost = [number for number in range(output.chunks) if number not in self._receipts]
        if lost and complete:
            completion.remove_marker(output)
        elif complete:
            completion.require_readable(output)
        self._doubted = completion.begun_chunks(output, lost)
        return complete and not lost

    def _leave_other_rows(self, output: Output, complete: bool) -> None:
        """Let go of chunks of rows in another state, and say so; a whole output is left as it is."""
        state, stale = self._job.watch.state, 0
        if not complete:
            told, own = ({there.chunk for there in completion.journal_receipts(output, of)} for of in (None, state))
            stale = len(told - own)
        elif len(self._receipts) < output.chunks and completion.input_state(output) not in ("", state):
            stale = len(self._receipts)
            self._receipts.clear()
        if stale:
            warnings.warn(
                f"{self._job.watch.source.name} was copied or written to since {stale} chunks of {output.root} were "
                "scored; they are scored again.",
                DkfmWarning,
                stacklevel=4,
            )

    def _check(self, output: Output, receipts: Collection[Receipt]) -> None:
        """Read chunks again, and keep the receipts that are true."""
        groups: dict[int, list[Receipt]] = {}
        for receipt in receipts:
            groups.setdefault(receipt.chunk // _CHECKED_TOGETHER, []).append(receipt)

        def keep(sound: list[Receipt]) -> None:
            self._receipts.update({receipt.chunk: receipt for receipt in sound})

        tasks = ((output, group, self._requirements) for group in groups.values())
        run_tasks(
            self._job.running, "dkfm-look", check_chunks, tasks, len(groups), self._progress, keep, stall=self._stall
        )

    def _score(self, output: Output, book: Journal) -> None:
        """Run the tasks of all chunks that are not there as their receipts say."""
        try:
            for _ in range(_ROUNDS):
                left = completion.missing_chunks(output, self._receipts)
                if not left:
                    break
                completion.remove_chunks(output, [number for number in left if self._receipts.pop(number, None)])
                tally = self._run(output, left, book)
                self._retries, self._duplicates = self._retries + tally.retries, self._duplicates + tally.duplicates
                self._require_no_killers(output, [left[number] for number in tally.killers])
        except BaseException:
            with suppress(StoreError):  # what went wrong first is told
                book.flush()
            raise
        book.flush()
        left = completion.missing_chunks(output, self._receipts)
        if left:
            raise DamagedStoreError(f"Chunk {left[0]} of {output.root} is lost again and again; who else writes there?")

    def _run(self, output: Output, left: list[int], book: Journal) -> Tally:
        job = self._job

        def done(receipt: Receipt) -> None:
            self._receipts[receipt.chunk] = self._new[receipt.chunk] = receipt
            book.add(receipt)

        read = job.rows.with_float32() if output.dtype == "float32" else job.rows
        on_invalid = str(output.settings["on_invalid"])
        work = ChunkWork(
            *(job.model, job.record.digest, job.trusted, job.plan.streamed, read, job.plan.piece_rows),
            *(output, on_invalid, self._requirements),
        )
        doubting = replace(work, doubted=True)
        tasks = ((doubting if number in self._doubted else work, number) for number in left)
        return run_tasks(
            *(job.running, "dkfm-score", score_chunk, tasks, len(left), self._progress, done),
            idle=book.flush_if_due,
            stall=self._stall,
        )

    def _require_no_killers(self, output: Output, killers: list[int]) -> None:
        if killers:
            rows = ", ".join(f"{output.slice(n).start} to {output.slice(n).stop - 1}" for n in killers[:5])
            raise ClusterError(
                f"Every worker died that scored rows {rows} (chunks {', '.join(map(str, killers[:5]))}; {len(killers)} "
                f"such chunks), even alone; the other {output.chunks - len(killers)} chunks are done."
            )

    def _report(self, output: Output, seconds: float) -> ScoreReport:
        everything, new = self._receipts.values(), self._new.values()
        return ScoreReport(
            path=str(output.root),
            rows=output.rows,
            invalid_rows=sum(receipt.invalid_rows for receipt in everything),
            chunks=output.chunks,
            bytes=sum(receipt.bytes for receipt in everything),
            scored_rows=sum(receipt.rows for receipt in new),
            scored_chunks=len(new),
            seconds=seconds,
            retries=self._retries,
            duplicates=self._duplicates + sum(receipt.found for receipt in new),
            slowest=slowest_chunks(new),
        )
