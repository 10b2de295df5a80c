"""Reading and writing beside computation: order, errors, how much is held, and no thread where nothing overlaps."""

import threading
from itertools import count

import pytest

from dkfm.core.background_io import overlap_writes, prefetch


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_results_and_items_keep_their_order(n):
    assert list(prefetch(lambda i=i: i for i in range(n))) == list(range(n))
    written = []
    overlap_writes(iter(range(n)), written.append, n)
    assert written == list(range(n))


def test_a_single_call_needs_no_thread():
    here, seen = threading.get_ident(), []
    list(prefetch([lambda: seen.append(threading.get_ident())]))
    overlap_writes(iter([0]), lambda _: seen.append(threading.get_ident()), 1)
    assert seen == [here, here]


def test_the_next_call_runs_while_a_result_is_used():
    begun = threading.Event()
    for number in prefetch([lambda: 0, lambda: begun.set() or 1]):
        if number == 0:
            assert begun.wait(30)


def test_an_item_is_written_while_the_next_is_computed():
    computed, written = threading.Event(), threading.Event()

    def items():
        yield 0
        assert written.wait(30)
        computed.set()
        yield 1

    overlap_writes(items(), lambda item: written.set() if item == 0 else computed.wait(30), 2)


@pytest.mark.parametrize("broken", range(3))
def test_an_exception_is_raised_when_its_result_is_due(broken):
    def read(i):
        if i == broken:
            raise ValueError(i)
        return i

    results = prefetch(lambda i=i: read(i) for i in range(3))
    assert [next(results) for _ in range(broken)] == list(range(broken))
    with pytest.raises(ValueError, match=str(broken)):
        next(results)
    with pytest.raises(ValueError, match=str(broken)):
        overlap_writes(iter(range(3)), read, 3)


def test_at_most_two_items_are_there():
    alive, most = set(), 0
    numbers = count()

    class Item:
        def __init__(self):
            nonlocal most
            self.number = next(numbers)
            alive.add(self.number)
            most = max(most, len(alive))

        def __del__(self):
            alive.discard(self.number)

    for result in prefetch([Item] * 6):
        del result
    overlap_writes((Item() for _ in range(6)), lambda item: None, 6)
    assert most <= 2
