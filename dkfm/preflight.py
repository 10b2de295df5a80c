"""Checks before the first task: what memory and disk are there, and whether the plan fits."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm import budget
from dkfm.clusters import worker_facts
from dkfm.errors import BudgetError, ClusterError

if TYPE_CHECKING:
    from distributed import Client

__all__ = [
    "available_memory",
    "peak_memory",
    "require_disk",
    "require_driver",
    "room",
    "scarcest_worker",
    "task_budget",
]

_SHARE = 0.6
"""A worker above this share of its limit starts to spill; above 0.8 it is paused for ever, silently."""


def available_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of its container's limit."""
    import psutil
    from distributed.system import MEMORY_LIMIT

    here = psutil.Process(os.getpid()).memory_info().rss
    return int(min(psutil.virtual_memory().available, MEMORY_LIMIT - here))


def peak_memory() -> int:
    """Return the largest resident size that this process ever had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage, whose figure a process takes over from the one that started it.
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, on macOS


def require_driver(n: int, d: int, blocks: int = 1, copies: int = 1, squares: int = budget.EIGENVECTORS) -> None:
    """Raise a BudgetError unless this process can hold the root of an N x N Gram matrix."""
    if n > budget.LARGEST_ROOT:
        raise BudgetError(
            f"The root of a Gram matrix of N = {n} training rows is beyond LAPACK's {budget.LARGEST_ROOT}; fit fewer "
            'rows, choose some with landmarks=, or use basis="cholesky", which needs none where the rank is low.'
        )
    have = available_memory()
    remedy = f"the largest N that fits is {budget.largest_n(have, d, blocks, copies, squares)}"
    budget.require(budget.fit_bytes(n, d, blocks, copies, squares), have, f"The root of N = {n} training rows", remedy)


def require_disk(path: Path, need: int, what: str = "The Gram matrix") -> None:
    """Raise a BudgetError unless the file system of `path` has room."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    have = shutil.disk_usage(folder).free
    budget.require(need, have, f"{what} at {path}", "choose a larger disk, or fewer rows")


def task_budget(client: "Client | None", threads: int, shared: int = 0) -> int:
    """Return the bytes that one task may take where every thread runs one, beside `shared` bytes of the process.

    It is the least of all workers; without a client, of this process and its number of threads.
    """
    if client is None:
        return (available_memory() - shared) // threads
    return min(_rooms(client, shared).values())


def scarcest_worker(client: "Client | None") -> str:
    """Return the address of the worker whose tasks have the least memory; nothing without a client."""
    if client is None:
        return ""
    rooms = _rooms(client, 0)
    return min(rooms, key=rooms.__getitem__)


def _rooms(client: "Client", shared: int) -> dict[str, int]:
    facts = worker_facts(client)
    if not facts:
        raise ClusterError("The scheduler does not answer, or has no workers; start one and try again.")
    return {name: room(fact["memory_limit"], int(fact["nthreads"]), shared) for name, fact in facts.items()}


def room(limit: int | None, threads: int, shared: int) -> int:
    """Return the bytes that a task may take of a worker whose threads run one each, beside `shared` bytes of it.

    A worker without a limit of its own has what is left of its machine, which is taken to be as much as of this one.
    """
    return (int(_SHARE * (limit or available_memory())) - shared) // threads
