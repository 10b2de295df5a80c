"""Overlap reading and writing with computation, by one background thread."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


def prefetch(reads: Iterable[Callable[[], R]]) -> Iterator[R]:
    """Yield the results of calls in their order; the next call runs in a thread while a result is used.

    At most two results are in memory. An exception of a call is raised when its result is due.

    >>> list(prefetch([lambda: 1, lambda: 2, lambda: 3]))
    [1, 2, 3]
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dkfm-read") as pool:
        pending: Future[R] | None = None
        for read in reads:
            previous, pending = pending, pool.submit(read)
            if previous is not None:
                yield previous.result()
                del previous  # free the result before the next wait
        if pending is not None:
            yield pending.result()


def write_behind(items: Iterable[R], use: Callable[[R], object]) -> None:
    """Call a function with each item, in order, in a thread; the next item is computed here meanwhile.

    At most two items are in memory. An exception of a call is raised when the next item is there.

    >>> write_behind(iter([1, 2]), print)
    1
    2
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dkfm-write") as pool:
        pending: Future[object] | None = None
        for item in items:
            if pending is not None:
                pending.result()
            pending = pool.submit(use, item)
            del item  # only the thread keeps it
        if pending is not None:
            pending.result()
