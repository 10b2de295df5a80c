"""Define a least-recently-used cache that removes old values before the next value is computed, not after."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")
R = TypeVar("R")


class LruCache(Generic[V]):
    """Values by key, shared by the threads of a process; each is computed once.

    A library's cache removes an old value after it has stored the new one, and computes values outside its lock: then
    two large values more than the limit are in memory at a time.

    Parameters
    ----------
    kept : int or callable
        Largest total size of the values that stay beside the one that is asked for, or a function that returns it.
    size_of : callable
        Returns the size of a value; by default each counts as 1.

    Examples
    --------
    >>> cache = LruCache(1)
    >>> [cache.get_or_compute(key, lambda: key.upper()) for key in "aba"]
    ['A', 'B', 'A']
    """

    def __init__(self, kept: int | Callable[[], int], size_of: Callable[[V], int] = lambda value: 1) -> None:
        self._kept, self._size_of = kept, size_of
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get_or_compute(self, key: Hashable, compute: Callable[[], V]) -> V:
        """Return the value of a key; compute it if it is not cached."""
        with self._lock:
            return self._get_or_compute(key, compute)

    def call_with_value(self, function: Callable[[V], R], key: Hashable, compute: Callable[[], V]) -> R:
        """Return a function of the value of a key, during which no value is removed or computed.

        So a value that is too large to be held twice is not used after another value has replaced it.
        """
        with self._lock:
            return function(self._get_or_compute(key, compute))

    def _get_or_compute(self, key: Hashable, compute: Callable[[], V]) -> V:
        if not self._values or key != next(reversed(self._values)):
            requested = self._values.pop(key, None)
            self._shrink(self._kept() if callable(self._kept) else self._kept)
            self._values[key] = compute() if requested is None else requested
        return self._values[key]

    def _shrink(self, kept: int) -> None:
        while sum(map(self._size_of, self._values.values())) > kept:
            self._values.popitem(last=False)

    def shrink_unless_busy(self, kept: int) -> None:
        """Remove the least recently used values until their total size is at most `kept`.

        Do nothing if a thread, perhaps this one, is computing or using a value: it may read from a disk that hangs.
        """
        if not self._lock.locked():  # a signal after `acquire(blocking=False)` would leave the lock taken
            with self._lock:
                self._shrink(kept)

    def clear_unless_busy(self, unwanted: Callable[[Hashable], bool] = lambda key: True) -> None:
        """Remove the values of some keys, by default all; do nothing if a thread is computing or using a value."""
        if not self._lock.locked():
            with self._lock:
                for key in [key for key in self._values if unwanted(key)]:
                    del self._values[key]
