"""Runs tasks through a bounded window and counts what comes back: a cluster that dies does not raise by itself."""

import uuid
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar, cast

from dkfm.clusters import Executor
from dkfm.errors import ClusterError
from dkfm.progress import of_steps

__all__ = ["run"]

R = TypeVar("R")

_WINDOW = 3
"""Tasks in flight per thread: enough to hide the scheduler's milliseconds, few enough to hold no memory."""


def run(
    executor: Executor,
    name: str,
    function: Callable[..., R],
    tasks: Iterable[tuple[object, ...]],
    total: int,
    progress: bool,
) -> list[R]:
    """Run ``function(*task)`` for every task and return the results in the order of finishing.

    Parameters
    ----------
    executor : Executor
    name : str
        What the dashboard calls the tasks.
    function : callable
    tasks : iterable of tuple
        Arguments; consumed as the window moves.
    total : int
        How many there are.
    progress : bool
        Whether to show a progress bar: see `dkfm.progress`.

    Raises
    ------
    ClusterError
        Fewer results than tasks.
    """
    run_id = f"{name}-{uuid.uuid4().hex}"  # a key that is alive would return its old result
    numbered = enumerate(tasks)
    results: list[R] = []

    def submit(count: int) -> None:
        for number, arguments in islice(numbered, count):
            executor.submit((run_id, number), function, *arguments)

    submit(_WINDOW * executor.threads)
    with of_steps(name, total, "task", progress) as bar:
        for result in executor.as_completed():
            results.append(cast("R", result))
            bar.update()
            submit(1)
    if len(results) != total:
        raise ClusterError(f"The cluster finished {len(results)} of {total} tasks and is gone; start it and try again.")
    return results
