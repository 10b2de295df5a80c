"""Sums in the order of numbers: the same bits in any order of arrival, and bounded memory where many parts wait."""

import numpy as np
import pytest

from dkfm.gram import ordered_sums
from dkfm.gram.ordered_sums import OrderedSums
from helpers.harness import left


def parts_of(rng, blocks, count):
    parts = {(block, number): rng.normal(size=(7, 3)) for block in range(blocks) for number in range(count)}
    truth = np.zeros((7 * blocks, 3))
    for (block, _), part in parts.items():
        truth[7 * block : 7 * block + 7] += part
    return parts, truth


@pytest.mark.parametrize("spills", [True, False])
def test_any_order_of_arrival_has_the_same_bits(rng, tmp_path, monkeypatch, spills):
    monkeypatch.setattr(ordered_sums, "_MAX_WAITING_BYTES", 0 if spills else 2**26)
    parts, truth = parts_of(rng, 3, 9)
    for _ in range(5):
        sums, keys, files = OrderedSums(np.zeros(truth.shape), 7, tmp_path), list(parts), 0
        for at in rng.permutation(len(keys)):
            sums.add(*keys[at], parts[keys[at]])
            files = max(files, len(left(tmp_path)))
        np.testing.assert_array_equal(sums.total, truth)
        assert (files > 0) is spills
        assert left(tmp_path) == []
        assert sums._waiting_bytes == 0
        assert not sums._early


def test_parts_that_wait_for_one_take_no_more_memory_than_the_sum(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(ordered_sums, "_MAX_WAITING_BYTES", 0)
    parts, truth = parts_of(rng, 2, 50)
    sums = OrderedSums(np.zeros(truth.shape), 7, tmp_path)
    for (block, number), part in parts.items():
        if number:
            sums.add(block, number, part)
        assert sums._waiting_bytes <= truth.nbytes
    for block in (0, 1):
        sums.add(block, 0, parts[block, 0])
    np.testing.assert_array_equal(sums.total, truth)
    assert left(tmp_path) == []
