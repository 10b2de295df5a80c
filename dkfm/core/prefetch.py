"""Files beside work: while one piece is worked on, a thread fetches the next, or writes the one before."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


def prefetch(reads: Iterable[Callable[[], R]]) -> Iterator[R]:
    """Yield what some calls return, in their order; while one result is used, the next call runs in a thread.

    At most two results are held. What a call raises is raised in its turn.

    >>> list(prefetch([lambda: 1, lambda: 2, lambda: 3]))
    [1, 2, 3]
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dkfm-read") as pool:
        coming: Future[R] | None = None
        for read in reads:
            result, coming = coming, pool.submit(read)
            if result is not None:
                yield result.result()
                del result  # what was used is let go before another wait
        if coming is not None:
            yield coming.result()


def write_behind(items: Iterable[R], use: Callable[[R], object]) -> None:
    """Call a function with every item, in their order, in a thread, while the next one is made here.

    At most two items are held. What a call raises is raised when the next item is there.

    >>> write_behind(iter([1, 2]), print)
    1
    2
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dkfm-write") as pool:
        going: Future[object] | None = None
        for item in items:
            if going is not None:
                going.result()
            going = pool.submit(use, item)
            del item  # it is the thread's
        if going is not None:
            going.result()
