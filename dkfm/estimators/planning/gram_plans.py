"""Plan fits with the Gram matrix in memory or on disk."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dkfm.core import budget, cpus
from dkfm.estimators.planning.plan_report import FitPlan
from dkfm.execution import memory
from dkfm.gram import build
from dkfm.gram.stored_gram import disk_bytes
from dkfm.gram.training_data import TrainingData
from dkfm.kernels.base import Kernel


@dataclass(frozen=True)
class PlannedRows:
    """Facts about training rows, and the place of computation, that a plan needs."""

    n: int
    d: int
    kernel: Kernel
    threads: int
    is_cluster: bool
    is_streamed: bool
    """Whether the rows are read tile by tile."""
    read_sample: Callable[[int], TrainingData | None]
    """Function that reads a sample of about the given number of rows; it returns None if only their shape is known."""

    def estimate_fit_bytes(self, squares: int) -> int:
        """Return the bytes of this process that holds some (N, N) arrays."""
        return budget.fit_bytes(self.n, self.d, self.kernel.peak_blocks, self.kernel.landmark_copies, squares)


def plan_fit_with_gram(
    estimator: Any, rows: PlannedRows, what: str, squares: int, seconds: float, *, peak: int = 0
) -> FitPlan:
    """Return the plan of a fit that computes the Gram matrix, followed by work that takes `seconds`.

    The certificate computes all kernel values again, which takes little time for a simple kernel.
    """
    n, d, kernel = rows.n, rows.d, rows.kernel
    tile_rows = min(estimator.tile_rows or build.TILE_ROWS, n)
    stores = not kernel.is_precomputed and build.stores_gram(
        kernel, n, estimator.tile_rows, estimator.workspace, rows.is_cluster
    )
    threads = rows.threads if stores or n > tile_rows else 1
    extra = kernel.estimate_extra_value_seconds(d)
    gram_seconds = budget.gram_seconds(n, d, threads, tile_rows if stores else None, extra)
    task_bytes = budget.gram_task_bytes(tile_rows, d, kernel.peak_blocks, kernel.landmark_copies)
    need = rows.estimate_fit_bytes(squares)
    return FitPlan(
        rows=n,
        columns=d,
        landmarks=n,
        method=f"{what} with the Gram matrix in memory",
        memory_bytes=need,
        available_bytes=memory.clear_caches_and_measure_memory(),
        peak_bytes=max(need, peak),
        disk_bytes=disk_bytes(n, d, tile_rows) if stores else 0,
        place=resolve_gram_folder(estimator) if stores else "",
        task_bytes=task_bytes if stores and rows.is_cluster else 0,
        model_bytes=8 * n * (d + n),
        seconds=seconds + (0.0 if kernel.is_precomputed else gram_seconds + n * n * extra / cpus.COUNT),
    )


def resolve_gram_folder(estimator: Any) -> str:
    """Return the folder in which a Gram matrix is stored."""
    return str(Path(tempfile.gettempdir() if estimator.workspace is None else estimator.workspace).absolute())


def replace_model_bytes(plan: FitPlan, components: object) -> FitPlan:
    """Return a plan, with its alternatives, for a model with `components` columns of weights, at most one per row."""
    width = components if isinstance(components, int) else plan.rows
    others = tuple(replace_model_bytes(other, components) for other in plan.alternatives)
    return replace(plan, model_bytes=8 * plan.rows * (plan.columns + min(width, plan.rows)), alternatives=others)
