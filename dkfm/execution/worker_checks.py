"""What a worker must be before it gets a task: of the driver's versions, on the same store, with room, one BLAS thread.

All workers are asked before the first task; one that joins later asks itself before its own first.
"""

import asyncio
import sys
import warnings
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.core import budget
from dkfm.errors import ClusterError, DkfmError, DkfmWarning, StoreError, UnfitWorkerError, reason
from dkfm.execution import memory
from dkfm.execution.blas_threads import blas_libraries, blas_processors, count_blas_threads
from dkfm.execution.clusters.client import worker_facts, worker_name
from dkfm.sources.base import Source
from dkfm.storage.output_location import OutputLocation

if TYPE_CHECKING:
    from distributed import Client, Worker

_ANSWER = 30.0
"""Seconds that a worker has to answer. One that does not is asked by its first task, if it ever gets to one."""

_PACKAGES = (
    *("dask", "distributed", "numpy", "scipy", "numba", "llvmlite", "zarr", "numcodecs", "msgpack", "cloudpickle"),
    "dkfm",
)
"""Of the same versions everywhere, or nowhere: what carries tasks, and what makes the bits of scores.

google-crc32c is none of them: every version computes the same checksum.
"""

_SHARED = (
    "use a path that is the same disk on every machine (--workspace for the Gram matrix of a fit), or an object store"
)


@dataclass(frozen=True, eq=False)
class WorkerRequirements:
    """What tasks need where they run; told by its mark.

    Attributes
    ----------
    place : Place
        Where they write.
    mark : str
        The name of a file there that no other place has, as long as the job runs; empty where nothing is written; and
        what is in it:
    text : bytes
    versions : mapping of str to str or None
        Of Python and packages, as the driver has them; None for a package that it does not have.
    task_bytes, shared_bytes : int
        What one task takes, and what all tasks of a process share.
    source : Source, optional
        What they read that is not at `place`; and what it must be there:
    stamp : str
    model : str
        The path of a model in this file system; empty without one.
    """

    place: OutputLocation
    mark: str
    text: bytes
    versions: Mapping[str, str | None]
    task_bytes: int
    shared_bytes: int
    source: Source | None
    stamp: str
    model: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerRequirements) and self.mark == other.mark

    def __hash__(self) -> int:
        return hash(self.mark)


@contextmanager
def marker_file(place: OutputLocation, name: str, text: bytes) -> Iterator[None]:
    """Leave a file at a place, for as long as the context lasts."""
    place.put(name, text)
    try:
        yield
    finally:
        with suppress(StoreError):  # what happened meanwhile is told, not this
            place.remove([name])


@contextmanager
def fit_workers(client: "Client", demand: WorkerRequirements) -> Iterator[None]:
    """Leave the mark of a demand for as long as the context lasts, and ask every worker whether it is fit.

    Workers that join later ask themselves; see `require_fit` for the errors.
    """
    with marker_file(demand.place, demand.mark, demand.text):
        require_fit(client, demand)
        yield


def require_fit(client: "Client", demand: WorkerRequirements) -> None:
    """Ask every worker of a cluster whether it is fit.

    Raises
    ------
    UnfitWorkerError
        One is not; the message names it, and says what to do.
    ClusterError
        None answers.

    Warns
    -----
    DkfmWarning
        Their BLAS differs, or computes for different processors.
    """
    workers = worker_facts(client)
    if workers is None:
        raise ClusterError("The scheduler does not answer; is it still there?")
    answers = _asked(client, list(workers), demand)
    blas: dict[str, list[str]] = {}
    for worker, answer in answers.items():
        if isinstance(answer, _Answer):
            _require(worker, answer.fault)
            blas.setdefault(answer.blas, []).append(worker)
        elif not isinstance(answer, OSError):  # of the way there: it left, or takes its time
            _require(worker, _error_of(answer))
    _warn_of_blas(blas)
    if answers and all(isinstance(answer, TimeoutError) for answer in answers.values()):
        raise ClusterError(f"No worker has answered in {_ANSWER:.0f} seconds; are they still there?")


def local_versions(*, tables: bool = False) -> dict[str, str | None]:
    """Return what this process has of what the driver and its workers must have the same, for tables of Parquet too."""
    return {name: _version(name) for name in ("python", *_PACKAGES, *(["pyarrow"] if tables else []))}


@cache  # a lookup reads a file, and a process keeps what it has imported
def _version(name: str) -> str | None:
    if name == "python":
        return ".".join(map(str, sys.version_info[:2]))  # what is of one minor version reads the other
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def require_fit_here(demand: WorkerRequirements | None) -> None:
    """Raise an `UnfitWorkerError` where this process is a worker and not fit; one that is fit is asked once."""
    if demand is not None and worker_name() is not None:
        _require_process(demand)


@lru_cache(maxsize=8)
def _require_process(demand: WorkerRequirements) -> None:
    from distributed import get_worker

    worker = get_worker()
    _require(str(worker.address), _fault_of(worker, demand))


@dataclass(frozen=True)
class _Answer:
    """What a worker lacks, nothing where it is fit; and by which BLAS, for which processor, it computes.

    The driver's is not compared: it computes no scores. Which of those that a process has loaded NumPy and SciPy use is
    not always known, so that another one is no fault.
    """

    fault: str
    blas: str


async def _answer(demand: WorkerRequirements, dask_worker: "Worker") -> _Answer:
    """Return what the worker says that runs this, beside its event loop: a disk may be slow."""
    fault = await asyncio.to_thread(_fault_of, dask_worker, demand)
    return _Answer(fault, "" if fault else f"{blas_libraries() or 'unknown'} for {blas_processors() or 'unknown'}")


def _warn_of_blas(workers: Mapping[str, list[str]]) -> None:
    if len(workers) > 1:
        found = "; ".join(f"{blas} on {addresses[0]}" for blas, addresses in sorted(workers.items()))
        warnings.warn(
            f"The workers compute by different BLAS, or for different processors ({found}), so that which worker "
            "computes a row changes its scores within rounding.",
            DkfmWarning,
            stacklevel=2,
        )


def _fault_of(worker: "Worker", demand: WorkerRequirements) -> str:
    """Return what a worker lacks, in words that follow its name; nothing where it is fit."""
    try:
        return (
            _of_versions(demand) or _of_store(demand) or _of_input(demand) or _of_memory(worker, demand) or _of_blas()
        )
    except (DkfmError, OSError) as error:
        return f"cannot take tasks: {reason(error)}; {_SHARED}."


def _of_versions(demand: WorkerRequirements) -> str:
    for name, needed in demand.versions.items():
        found = _version(name)
        if found != needed:
            told = f"{name} {found}" if found else f"no {name}"
            return f"has {told}, and the driver {needed or 'has none'}; install the same on both."
    return ""


def _of_store(demand: WorkerRequirements) -> str:
    if not demand.mark:
        return ""
    opened = demand.place.open(demand.mark, len(demand.text))
    if opened is not None:
        with opened:
            if opened.read(len(demand.text) + 1) == demand.text:
                return ""
    return f"does not see the same {demand.place} as the driver; {_SHARED}."


def _of_input(demand: WorkerRequirements) -> str:
    if demand.model and not Path(demand.model).exists():
        return f"does not see the model {demand.model}; {_SHARED}."
    if demand.source is None or demand.source.stamp() == demand.stamp:
        return ""
    told = f"does not see the same {demand.source.name} as the driver, by its size or time of change"
    return f"{told}; {_SHARED}, or copies that keep the times."


def _of_memory(worker: "Worker", demand: WorkerRequirements) -> str:
    limit, threads = worker.memory_manager.memory_limit, worker.state.nthreads
    have = memory.thread_budget(limit, threads, demand.shared_bytes, memory.resident_memory())
    if have >= demand.task_bytes:
        return ""
    need, there = budget.format_megabytes(demand.task_bytes), budget.format_megabytes(have)
    return f"has {there} for a task of {need}; give it more memory or fewer threads, or use smaller tasks."


def _of_blas() -> str:
    found = count_blas_threads()
    return f"computes with {found} BLAS threads a task; start it with OMP_NUM_THREADS=1." if found > 1 else ""


def _require(worker: str, fault: str) -> None:
    if fault:
        raise UnfitWorkerError(worker, fault)


def _error_of(answer: object) -> str:
    """Return what it says of a worker that it answers with an error."""
    said = reason(answer) if isinstance(answer, BaseException) else "it has no answer"
    return f"cannot do what the driver asks ({said}); install the same versions there, of dkfm too."


def _asked(client: "Client", workers: list[str], demand: WorkerRequirements) -> dict[str, object]:
    """Return what each worker answers, or the error that it raised or that came in place of an answer, by address."""

    async def ask(worker: str) -> object:
        call: Awaitable[dict[str, object]] = client.run(_answer, demand, workers=[worker], on_error="return")
        try:
            return (await asyncio.wait_for(call, _ANSWER)).get(worker)
        except OSError as error:  # which a TimeoutError is
            return error

    async def ask_all() -> list[object]:
        return await asyncio.gather(*map(ask, workers))

    return dict(zip(workers, client.sync(ask_all), strict=True))
