"""A least-recently-used cache that makes room before the next value is computed, not after."""

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
    kept : int
        Largest total size of the values that stay when another one is computed.
    size_of : callable
        Returns the size of a value; by default each counts as 1.

    Examples
    --------
    >>> cache = LruCache(1)
    >>> [cache.get(key, lambda: key.upper()) for key in "aba"]
    ['A', 'B', 'A']
    """

    def __init__(self, kept: int, size_of: Callable[[V], int] = lambda value: 1) -> None:
        self._kept, self._size_of = kept, size_of
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, compute: Callable[[], V]) -> V:
        """Return the value of a key; compute it if it is not there."""
        with self._lock:
            return self._get(key, compute)

    def apply(self, function: Callable[[V], R], key: Hashable, compute: Callable[[], V]) -> R:
        """Return a function of the value of a key, during which no value is removed or computed.

        So a value that is too large to be held twice is not used after another one took its place.
        """
        with self._lock:
            return function(self._get(key, compute))

    def _get(self, key: Hashable, compute: Callable[[], V]) -> V:
        if key not in self._values:
            while sum(map(self._size_of, self._values.values())) > self._kept:
                self._values.popitem(last=False)
            self._values[key] = compute()
        self._values.move_to_end(key)
        return self._values[key]

    def remove(self, unwanted: Callable[[Hashable], bool] = lambda key: True) -> None:
        """Remove the values of some keys, by default all."""
        with self._lock:
            for key in [key for key in self._values if unwanted(key)]:
                del self._values[key]
