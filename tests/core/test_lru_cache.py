"""The cache of values that this process used last."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.core.lru_cache import LruCache


def test_values_are_computed_once_and_the_least_recently_used_are_removed():
    cache, computed = LruCache(2), []
    for key in "aabacdb":
        assert cache.get_or_compute(key, lambda key=key: computed.append(key) or key.upper()) == key.upper()
    assert computed == ["a", "b", "c", "d", "b"]
    cache.clear_unless_busy(lambda key: key == "b")
    assert "b" not in cache
    cache.clear_unless_busy()
    assert len(cache) == 0


def test_room_is_made_by_size_before_a_value_is_computed():
    cache, kept = LruCache(10, size_of=len), []
    for key, length in enumerate((6, 6, 20, 1)):
        cache.get_or_compute(key, lambda length=length: kept.append(len(cache)) or "x" * length)
    assert kept == [0, 1, 1, 0]


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 12))
def test_values_beside_the_one_asked_for_never_take_more_than_may_stay(keys, kept):
    cache = LruCache(lambda: kept, size_of=len)
    for key in keys:
        others = lambda key=key: sum(len(cache._values[k]) for k in cache._values if k != key)  # noqa: E731
        value = cache.get_or_compute(key, lambda key=key, others=others: others() <= kept and "x" * key)
        assert value == "x" * key
        assert others() <= kept
    cache.shrink_unless_busy(3)
    assert sum(map(len, cache._values.values())) <= 3


def test_values_are_removed_at_once_or_not_at_all():
    cache = LruCache(2)
    cache.get_or_compute("a", lambda: cache.clear_unless_busy() or 1)
    assert "a" in cache
    cache.clear_unless_busy()
    assert len(cache) == 0


def test_nobody_waits_to_remove_values_while_a_read_hangs():
    cache, reads, ends = LruCache(2), threading.Event(), threading.Event()
    cache.get_or_compute("a", lambda: 1)
    reader = threading.Thread(target=cache.get_or_compute, args=("b", lambda: reads.set() or ends.wait(60)))
    reader.start()
    assert reads.wait(60)
    for remove in (cache.clear_unless_busy, lambda: cache.shrink_unless_busy(0)):
        remove()
        assert "a" in cache
    ends.set()
    reader.join(60)
    cache.shrink_unless_busy(0)
    assert len(cache) == 0


def test_no_value_is_computed_while_another_one_is_used():
    cache, used = LruCache(1), []

    def use(value):
        assert not cache._lock.acquire(blocking=False)
        used.append(value)
        return value + 1

    assert cache.call_with_value(use, "key", lambda: 1) == 2
    assert used == [1]


def test_a_value_that_cannot_be_computed_leaves_the_cache_usable():
    cache = LruCache(1)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_compute("key", lambda: 1 / 0)
    assert cache.get_or_compute("key", lambda: 3) == 3
