"""Overlap reading and writing with computation, by one background thread."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


def prefetch(reads: Iterable[Callable[[], R]]) -> Iterator[R]:
    """Yield the results of calls in their order; the next call runs in a thread while a result is used.

    At most two results are in memory. An exception of a call is raised when its result is due. The first call runs in
    the current thread, because there is no work to overlap, so a single call needs no thread.

    >>> list(prefetch([lambda: 1, lambda: 2, lambda: 3]))
    [1, 2, 3]
    """
    calls = iter(reads)
    for first in calls:
        result = first()
        with ThreadPoolExecutor(1, thread_name_prefix="dkfm-read") as pool:
            for read in calls:
                pending = pool.submit(read)
                yield result
                del result  # free it before the next wait
                result = pending.result()
            yield result


def overlap_writes(items: Iterable[R], use: Callable[[R], object], count: int) -> None:
    """Call a function with each of `count` items, in order, in a thread; the next item is computed here meanwhile.

    At most two items are in memory. An exception of a call is raised after the next item is computed. The last call
    runs in the current thread, because there is no work to overlap, so a single call needs no thread.

    >>> overlap_writes(iter([1, 2]), print, 2)
    1
    2
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dkfm-write") as pool:
        pending: Future[object] | None = None
        for number, item in enumerate(items, 1):
            if pending is not None:
                pending.result()
            if number == count:
                use(item)
                pending = None
            else:
                pending = pool.submit(use, item)
            del item  # so that only the thread refers to it
        if pending is not None:
            pending.result()
