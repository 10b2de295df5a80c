"""Measure available memory and disk, and check before the first task that the plan fits."""

import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dkfm.core import budget
from dkfm.errors import BudgetError
from dkfm.execution.clusters.current_client import wait_for_workers

if TYPE_CHECKING:
    from distributed import Client

_SPILL_SHARE = 0.6
"""Share of a worker's memory limit above which Dask spills data to disk."""

_PAUSE_SHARE = 0.8
"""Share of a worker's memory limit above which Dask pauses the worker, silently and indefinitely."""

_BLAS_BUFFER_BYTES = 2**27
"""Address space that a BLAS reserves for the buffers of its threads, beyond the buffers that a plan counts."""

_CGROUP_FOLDER = Path("/sys/fs/cgroup")
"""Folder of the resource limits of a container."""

_CGROUP_LIMITS = (
    *("memory/memory.limit_in_bytes", "memory/memory.soft_limit_in_bytes"),  # version 1
    *("memory.max", "memory.high", "memory.low"),  # version 2
)
"""Files with a memory limit in bytes, or with a word if there is no limit."""

_MODULE_BYTES = 2**28
"""Upper bound of the memory of a worker that has imported dkfm and has run no task."""

_LAPACK_REMEDIES = {
    "ExactFeatureMap": 'a map with landmarks= (--landmarks) or basis="cholesky" (--basis), which needs no such root '
    "where the rank is low",
    "KernelPCA": "few components (n_components=, --components), or the features of a map with KernelPCA.from_map",
    "KernelFisher": "with a number as shrinkage= (--shrinkage), or the features of a map with KernelFisher.from_map",
    "KernelRidge": "with a number as alpha= (--alpha), or the features of a map with KernelRidge.from_map",
    "inverse_transform": "without fit_inverse_transform=True",
}
"""Ways to fit more rows than LAPACK takes, by estimator or method."""

_caches: list[Callable[[], None]] = []
"""Functions that empty caches of this process."""


def register_cache(clear: Callable[[], None]) -> None:
    """Register a function that empties a cache, to be called before work is refused for lack of memory."""
    _caches.append(clear)


def cache_bytes(limit: int) -> int:
    """Return the bytes of a process that may stay in caches between jobs.

    That is the memory below the pause limit, minus the imported modules and what tasks may allocate.

    >>> cache_bytes(4 * 10**9), cache_bytes(10**9)
    (531564544, 0)
    """
    return max(0, int((_PAUSE_SHARE - _SPILL_SHARE) * limit) - _MODULE_BYTES)


def clear_caches_and_measure_memory() -> int:
    """Empty the caches of this process, and return the bytes that it may still allocate; see `measure_free_memory`."""
    for clear in _caches:
        clear()
    return measure_free_memory()


def measure_free_memory() -> int:
    """Return the bytes that this process may still allocate, given the machine, the container, and `ulimit -v`."""
    import psutil

    here = min(psutil.virtual_memory().available, memory_limit() - resident_memory())
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return int(here)
    # OpenBLAS retries forever if it cannot map its buffers, so their address space is kept free.
    return int(min(here, max(0, limit - psutil.Process().memory_info().vms - _BLAS_BUFFER_BYTES)))


@cache
def memory_limit() -> int:
    """Return the memory limit of this process in bytes, as Dask does: from machine, container and RLIMIT_RSS.

    Dask's own function is not used, because importing `distributed` takes longer than a small job.
    """
    import psutil

    limit = int(psutil.virtual_memory().total)
    for name in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            group = int((_CGROUP_FOLDER / name).read_text())
            limit = min(limit, group) if group > 0 else limit
    resident = resource.getrlimit(resource.RLIMIT_RSS)[1]
    return min(limit, resident) if resident > 0 else limit


def peak_memory() -> int:
    """Return the peak resident size of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage cannot be used, because a child process inherits the peak of its parent.
        lines = status.read_text(errors="replace").splitlines()  # the name in it is cut to 15 bytes
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, on macOS


def require_lapack_order(n: int, estimator: str = "ExactFeatureMap") -> None:
    """Raise a BudgetError if N x N matrices are too large for LAPACK, independently of memory.

    The message has the remedies of `estimator`, a key of `_LAPACK_REMEDIES`.
    """
    if n > budget.LARGEST_DENSE_N:
        raise BudgetError(
            f"The root of a Gram matrix of N = {n} training rows is beyond LAPACK's {budget.LARGEST_DENSE_N}; fit "
            f"fewer rows, or {_LAPACK_REMEDIES[estimator]}."
        )


def require_factorization_memory(
    n: int,
    d: int,
    blocks: int = 1,
    copies: int = 1,
    squares: int = budget.EIGENVECTOR_SQUARES,
    estimator: str = "ExactFeatureMap",
) -> None:
    """Raise a BudgetError unless this process has the memory to factorize an N x N Gram matrix: `budget.fit_bytes`."""
    require_lapack_order(n, estimator)
    have = clear_caches_and_measure_memory()
    remedy = f"the largest N that fits is {budget.largest_n_within(have, d, blocks, copies, squares)}"
    budget.require_fits(
        budget.fit_bytes(n, d, blocks, copies, squares), have, f"The root of N = {n} training rows", remedy
    )


def has_factorization_memory(
    n: int, d: int, blocks: int = 1, copies: int = 1, squares: int = budget.EIGENVECTOR_SQUARES
) -> bool:
    """Return whether this process has the memory to factorize an N x N Gram matrix: see `budget.fit_bytes`."""
    return (
        n <= budget.LARGEST_DENSE_N
        and budget.fit_bytes(n, d, blocks, copies, squares) <= clear_caches_and_measure_memory()
    )


def require_gram_memory(n: int, d: int, blocks: int, copies: int, squares: int, estimator: str) -> None:
    """Raise a BudgetError unless this process can hold `squares` (N, N) arrays, including the Gram matrix."""
    if squares == budget.EIGENVECTOR_SQUARES:
        require_factorization_memory(n, d, blocks, copies, squares, estimator)
        return
    remedy = f"fit fewer rows, or the features of a map on fewer landmarks with {estimator}.from_map"
    need = budget.fit_bytes(n, d, blocks, copies, squares)
    budget.require_fits(need, clear_caches_and_measure_memory(), f"The Gram matrix of N = {n} training rows", remedy)


def require_disk(path: Path, need: int, what: str = "The Gram matrix") -> None:
    """Raise a BudgetError unless the file system of `path` has `need` bytes free."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    have = shutil.disk_usage(folder).free
    budget.require_fits(need, have, f"{what} at {path}", "choose a larger disk, or fewer rows")


def task_budget(client: "Client | None", threads: int, shared: int = 0, needed: int | None = None) -> int:
    """Return the bytes that one task may allocate if every thread runs one and a process also holds `shared` bytes.

    With a client, it is the smallest budget among the workers that have `needed` bytes for a task, or the largest
    budget if none has. Without a client, it is the budget of this process with `threads` threads. Its caches are
    emptied first, unless `needed` bytes for a task are already free.
    """
    if client is None:
        if needed is not None and (have := (measure_free_memory() - shared) // threads) >= needed:
            return have
        return (clear_caches_and_measure_memory() - shared) // threads
    budgets = [have(shared) for have in worker_task_budget_functions(client, shared).values()]
    return budgets[0] if needed is None else next((have for have in budgets if have >= needed), budgets[-1])


def worker_task_budget_functions(client: "Client", shared: int) -> dict[str, Callable[[int], int]]:
    """Return the task budget of every worker by its address, the smallest first.

    Each budget is a function from the bytes that the tasks of a process share to the bytes of a task. They are sorted
    for `shared` bytes. If all workers are gone, for example during a restart, the function waits for the next one.
    """
    facts = wait_for_workers(client)

    def budget_of(fact: dict[str, Any], shared: int) -> int:
        return thread_budget(fact["memory_limit"], int(fact["nthreads"]), shared, int(fact["metrics"]["memory"]))

    addresses = sorted(facts, key=lambda address: budget_of(facts[address], shared))
    return {address: partial(budget_of, facts[address]) for address in addresses}


def thread_budget(limit: int | None, threads: int, shared: int, held: int) -> int:
    """Return the bytes that a task may allocate on a worker if every thread runs one and all share `shared` bytes.

    `limit` is the memory limit of the worker (0 or None for none), and `held` its resident size before its first task.
    Imported modules may take a large part of a small limit, so the budget also stays below the pause limit. Memory
    beyond the modules may be a cache of an earlier job, and is not counted. For a worker without a limit, the available
    memory of this machine is used as an estimate. The result is negative if `shared` does not fit.
    """
    if not limit:
        return (int(_SPILL_SHARE * clear_caches_and_measure_memory()) - shared) // threads
    return (min(int(_SPILL_SHARE * limit), int(_PAUSE_SHARE * limit) - min(held, _MODULE_BYTES)) - shared) // threads


def resident_memory() -> int:
    """Return the resident size of this process, in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)
