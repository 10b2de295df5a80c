"""Log the size and the predicted time of a Gram matrix before it is computed."""

from dkfm.core import budget
from dkfm.core.rows import Rows
from dkfm.execution.executors import Executor
from dkfm.execution.stage_log import describe_place, log_missing_extra, log_stage
from dkfm.kernels.base import Kernel
from dkfm.sources.base import Source


def log_gram(
    kernel: Kernel,
    rows: Rows | Source,
    tiles: int,
    where: str,
    executor: Executor | None = None,
    stored_tile_rows: int | None = None,
) -> None:
    """Log a line about a Gram matrix.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    rows : ndarray, scipy.sparse array or Source of shape (N, d)
        Training rows.
    tiles : int
        Number of tiles to compute.
    where : str
        Where the matrix is kept, for example "in memory".
    executor : Executor, optional
        Executor of the tasks; by default this thread computes the only tile.
    stored_tile_rows : int, optional
        Rows of a tile, if tiles are written to disk.
    """
    n, d = rows.shape
    threads, place = (1, "this thread") if executor is None else (executor.threads, describe_place(executor))
    parts = "1 tile" if tiles == 1 else f"{tiles:,} tiles"
    text = f"{n:,} x {n:,} kernel values of rows of {d:,} columns, {parts}, {where}, on {place}"
    extra = kernel.estimate_extra_value_seconds(d)
    seconds = budget.gram_seconds(n, d, threads, stored_tile_rows, extra)
    log_stage("gram", text, seconds=seconds, rows=n, columns=d, tiles=tiles, threads=threads)
    log_missing_extra(kernel, seconds)
