"""Checks before the first task: what memory and disk are there, and whether the plan fits."""

import os
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.core import budget
from dkfm.errors import BudgetError, ClusterError
from dkfm.execution.clusters.client import worker_facts

if TYPE_CHECKING:
    from distributed import Client

_SHARE, _PAUSE = 0.6, 0.8
"""A worker above the first share of its limit starts to spill; above the other it is paused for ever, silently."""

_BUFFERS = 2**27
"""Addresses that a BLAS takes for the buffers of its threads, beside what a plan has of them."""

_MODULES = 2**28
"""More than a worker with all that dkfm imports takes before its first task."""


def available_memory() -> int:
    """Return the bytes that this process may still take: of the machine, its container's limit, and `ulimit -v`."""
    import psutil
    from distributed.system import MEMORY_LIMIT

    here = min(psutil.virtual_memory().available, MEMORY_LIMIT - resident_memory())
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return int(here)
    # Where addresses end, OpenBLAS asks for its buffers for ever.
    return int(min(here, max(0, limit - psutil.Process().memory_info().vms - _BUFFERS)))


def peak_memory() -> int:
    """Return the largest resident size that this process ever had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage, whose figure a process takes over from the one that started it.
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, on macOS


def require_driver_memory(
    n: int, d: int, blocks: int = 1, copies: int = 1, squares: int = budget.EIGENVECTOR_SQUARES
) -> None:
    """Raise a BudgetError unless this process can hold the root of an N x N Gram matrix."""
    if n > budget.LARGEST_DENSE_N:
        raise BudgetError(
            f"The root of a Gram matrix of N = {n} training rows is beyond LAPACK's {budget.LARGEST_DENSE_N}; fit "
            "fewer "
            'rows, choose some with landmarks=, or use basis="cholesky", which needs none where the rank is low.'
        )
    have = available_memory()
    remedy = f"the largest N that fits is {budget.largest_n_within(have, d, blocks, copies, squares)}"
    budget.require_fits(
        budget.fit_bytes(n, d, blocks, copies, squares), have, f"The root of N = {n} training rows", remedy
    )


def has_driver_memory(
    n: int, d: int, blocks: int = 1, copies: int = 1, squares: int = budget.EIGENVECTOR_SQUARES
) -> bool:
    """Whether this process can hold the root of an N x N Gram matrix."""
    return n <= budget.LARGEST_DENSE_N and budget.fit_bytes(n, d, blocks, copies, squares) <= available_memory()


def require_disk(path: Path, need: int, what: str = "The Gram matrix") -> None:
    """Raise a BudgetError unless the file system of `path` has room."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    have = shutil.disk_usage(folder).free
    budget.require_fits(need, have, f"{what} at {path}", "choose a larger disk, or fewer rows")


def task_budget(client: "Client | None", threads: int, shared: int = 0) -> int:
    """Return the bytes that one task may take where every thread runs one, beside `shared` bytes of the process.

    It is the least of all workers; without a client, of this process and its number of threads.
    """
    if client is None:
        return (available_memory() - shared) // threads
    return smallest_worker_budget(client, shared)[0]


def smallest_worker_budget(client: "Client", shared: int) -> tuple[int, str]:
    """Return the bytes that a task may take of the worker that has the fewest of them, and its address."""
    facts = worker_facts(client)
    if not facts:
        raise ClusterError("The scheduler does not answer, or has no workers; start one and try again.")
    return min(
        (thread_budget(fact["memory_limit"], int(fact["nthreads"]), shared, int(fact["metrics"]["memory"])), worker)
        for worker, fact in facts.items()
    )


def thread_budget(limit: int | None, threads: int, shared: int, held: int) -> int:
    """Return the bytes that a task may take of a worker whose threads run one each, beside `shared` bytes of it.

    A process that holds a good part of a small limit with its modules alone leaves less than the usual share; what it
    holds beyond them may be what an earlier job left to be used again. A worker without a limit of its own has what is
    left of its machine, which is taken to be as much as of this one.
    """
    if not limit:
        return (int(_SHARE * available_memory()) - shared) // threads
    return (min(int(_SHARE * limit), int(_PAUSE * limit) - min(held, _MODULES)) - shared) // threads


def resident_memory() -> int:
    """Return the bytes that this process has in memory."""
    import psutil

    return int(psutil.Process(os.getpid()).memory_info().rss)
