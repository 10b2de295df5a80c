"""Check workers before they run tasks: package versions, shared storage, memory, and one BLAS thread per task.

The driver asks all workers before the first task. A worker that joins later checks itself before its first task.
"""

import asyncio
import sys
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.core.display.quantities import format_megabytes
from dkfm.errors import ClusterError, DkfmError, StoreError, UnfitWorkerError, extract_reason, warn_caller
from dkfm.execution import memory
from dkfm.execution.blas_threads import describe_blas_architectures, describe_blas_libraries, measure_task_blas_threads
from dkfm.execution.clusters.current_client import wait_for_workers, worker_address
from dkfm.execution.executors import Executor
from dkfm.sources.base import Source
from dkfm.storage.output_files import OutputLocation

if TYPE_CHECKING:
    from distributed import Client, Worker

_ANSWER_TIMEOUT = 30.0
"""Seconds to wait for a worker's answer. A worker that is late checks itself at the start of its first task."""

_PACKAGES = (
    *("dask", "distributed", "numpy", "scipy", "numba", "llvmlite", "zarr", "numcodecs", "msgpack", "cloudpickle"),
    "dkfm",
)
"""Packages that need the same version on driver and workers, because they transfer tasks or affect the bits of scores.

google-crc32c is not listed: every version computes the same checksum.
"""

_SHARED_DISK_REMEDY = (
    "use a path that is the same disk on every machine (--workspace for the Gram matrix of a fit), or an object store"
)


@dataclass(frozen=True, eq=False)
class WorkerRequirements:
    """Requirements of the tasks of a job on a worker; equal if their probe files, unique to a job, have equal names."""

    location: OutputLocation
    """Where tasks write."""
    probe: str
    """Name of a file that the driver writes at `location` for as long as the job runs; empty if nothing is written."""
    probe_text: bytes
    """Content of the probe file."""
    versions: Mapping[str, str | None]
    """Versions of Python and of packages on the driver; None for a package that the driver does not have."""
    task_bytes: int
    """Bytes of memory that one task takes."""
    shared_bytes: int
    """Bytes of memory that all tasks of a process share."""
    source: Source | None
    """Input that tasks read, unless it lies at `location`."""
    stamp: str
    """Stamp of `source` on the driver."""
    model_path: str = ""
    """Path of a model on this file system; empty if there is none."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerRequirements) and self.probe == other.probe

    def __hash__(self) -> int:
        return hash(self.probe)


@contextmanager
def exclude_unfit_with_probe(executor: Executor, requirements: WorkerRequirements) -> Iterator[None]:
    """Write the probe file, exclude unfit workers, and remove the file when the context ends.

    Workers that join later check themselves. `find_unfit_workers` lists the errors and warnings.
    """
    location, name = requirements.location, requirements.probe
    location.write_file(name, requirements.probe_text)
    try:
        exclude_unfit_workers(executor, requirements)
        yield
    finally:
        with suppress(StoreError):  # an error of the job is more important than a remaining file
            location.remove_files([name])


def exclude_unfit_workers(executor: Executor, requirements: WorkerRequirements) -> None:
    """Check every worker of an executor's cluster; those that are unfit get no tasks, and a warning names each."""
    if executor.client is not None:
        for error in find_unfit_workers(executor.client, requirements):
            executor.exclude_worker(error)


def find_unfit_workers(client: "Client", requirements: WorkerRequirements) -> list[UnfitWorkerError]:
    """Return an error for every worker that does not meet the requirements; it names the worker and the remedy.

    Raises
    ------
    UnfitWorkerError
        No worker meets them.
    ClusterError
        The scheduler or all of the workers do not answer, or there is no worker.

    Warns
    -----
    DkfmWarning
        Workers have different BLAS libraries, or the same library for different processors.
    """
    workers = wait_for_workers(client)
    answers = _ask_workers(client, list(workers), requirements)
    blas: dict[str, list[str]] = {}
    unfit: list[UnfitWorkerError] = []
    for worker, answer in answers.items():
        if isinstance(answer, _Answer) and not answer.fault:
            blas.setdefault(answer.blas, []).append(worker)
        elif not isinstance(answer, OSError):  # an OSError means that the worker left or is slow
            fault = answer.fault if isinstance(answer, _Answer) else _describe_error(answer)
            unfit.append(UnfitWorkerError(worker, fault))
    late = [worker for worker, answer in answers.items() if isinstance(answer, TimeoutError)]
    if unfit and not blas and not late:
        raise unfit[0]
    _warn_of_blas(blas)
    if answers and len(late) == len(answers):
        raise ClusterError(f"No worker has answered in {_ANSWER_TIMEOUT:.0f} seconds; are they still there?")
    return unfit


def local_versions(*, tables: bool = False) -> dict[str, str | None]:
    """Return the versions that driver and workers must share: of Python and packages, of pyarrow too for `tables`."""
    return {name: _version(name) for name in ("python", *_PACKAGES, *(["pyarrow"] if tables else []))}


@cache  # a lookup reads a file, and a process keeps what it has imported
def _version(name: str) -> str | None:
    if name == "python":
        return ".".join(map(str, sys.version_info[:2]))  # patch releases of one minor version are compatible
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def require_fit_worker(requirements: WorkerRequirements | None) -> None:
    """Raise an `UnfitWorkerError` if this process is a worker that does not meet the requirements.

    A worker is checked once for each job. Outside a worker nothing is checked.
    """
    if requirements is not None and worker_address() is not None:
        _require_fit_worker_once(requirements)


@lru_cache(maxsize=8)
def _require_fit_worker_once(requirements: WorkerRequirements) -> None:
    from distributed import get_worker

    worker = get_worker()
    if fault := _find_fault(worker, requirements):
        raise UnfitWorkerError(str(worker.address), fault)


@dataclass(frozen=True)
class _Answer:
    """A worker's answer: the requirement that it does not meet (empty if none), and its BLAS libraries and processors.

    The driver's BLAS is not compared, because the driver computes no scores. A process may load several BLAS libraries
    without telling which of them NumPy and SciPy call, so a difference between workers is not a fault.
    """

    fault: str
    blas: str


async def _answer(requirements: WorkerRequirements, dask_worker: "Worker") -> _Answer:
    """Check the worker that runs this, in a thread: a slow disk must not block the worker's event loop."""
    fault = await asyncio.to_thread(_find_fault, dask_worker, requirements)
    if fault:
        return _Answer(fault, "")
    return _Answer("", f"{describe_blas_libraries() or 'unknown'} for {describe_blas_architectures() or 'unknown'}")


def _warn_of_blas(workers: Mapping[str, list[str]]) -> None:
    if len(workers) > 1:
        examples = "; ".join(f"{blas} on {addresses[0]}" for blas, addresses in sorted(workers.items()))
        warn_caller(
            f"The workers compute by different BLAS, or for different processors ({examples}), so that which worker "
            "computes a row changes its scores within rounding."
        )


def _find_fault(worker: "Worker", requirements: WorkerRequirements) -> str:
    """Return a clause, to follow the name of a worker, about a requirement that it does not meet; empty if none."""
    try:
        return (
            _find_version_fault(requirements)
            or _find_store_fault(requirements)
            or _find_input_fault(requirements)
            or _find_memory_fault(worker, requirements)
            or _find_blas_fault()
        )
    except (DkfmError, OSError) as error:
        return f"cannot take tasks: {extract_reason(error)}; {_SHARED_DISK_REMEDY}."


def _find_version_fault(requirements: WorkerRequirements) -> str:
    for name, needed in requirements.versions.items():
        version = _version(name)
        if version != needed:
            installed = f"{name} {version}" if version else f"no {name}"
            return f"has {installed}, and the driver {needed or 'has none'}; install the same on both."
    return ""


def _find_store_fault(requirements: WorkerRequirements) -> str:
    text = requirements.probe_text
    if not requirements.probe:
        return ""
    probe = requirements.location.open_for_reading(requirements.probe, len(text))
    if probe is not None:
        with probe:
            if probe.read(len(text) + 1) == text:
                return ""
    return f"does not see the same {requirements.location} as the driver; {_SHARED_DISK_REMEDY}."


def _find_input_fault(requirements: WorkerRequirements) -> str:
    if requirements.model_path and not Path(requirements.model_path).exists():
        return f"does not see the model {requirements.model_path}; {_SHARED_DISK_REMEDY}."
    source = requirements.source
    if source is None or source.stamp() == requirements.stamp:
        return ""
    fault = f"does not see the same {source.location} as the driver, by its size or time of change"
    return f"{fault}; {_SHARED_DISK_REMEDY}, or copies that keep the times."


def _find_memory_fault(worker: "Worker", requirements: WorkerRequirements) -> str:
    limit, threads = worker.memory_manager.memory_limit, worker.state.nthreads
    available = memory.thread_budget(limit, threads, requirements.shared_bytes, memory.resident_memory())
    if available >= requirements.task_bytes:
        return ""
    need, there = format_megabytes(requirements.task_bytes), format_megabytes(available)
    return f"has {there} for a task of {need}; give it more memory or fewer threads, or use smaller tasks."


def _find_blas_fault() -> str:
    threads = measure_task_blas_threads()
    return f"computes with {threads} BLAS threads a task; start it with OMP_NUM_THREADS=1." if threads > 1 else ""


def _describe_error(answer: object) -> str:
    """Return the fault of a worker that answers with an error, or with nothing."""
    cause = extract_reason(answer) if isinstance(answer, BaseException) else "it has no answer"
    return f"cannot do what the driver asks ({cause}); install the same versions there, of dkfm too."


def _ask_workers(client: "Client", workers: list[str], requirements: WorkerRequirements) -> dict[str, object]:
    """Return each worker's answer by address; if it raised an error or could not answer, return the error instead."""

    async def ask(worker: str) -> object:
        call: Awaitable[dict[str, object]] = client.run(_answer, requirements, workers=[worker], on_error="return")
        try:
            return (await asyncio.wait_for(call, _ANSWER_TIMEOUT)).get(worker)
        except OSError as error:  # TimeoutError is one too
            return error

    async def ask_all() -> list[object]:
        return await asyncio.gather(*map(ask, workers))

    return dict(zip(workers, client.sync(ask_all), strict=True))
