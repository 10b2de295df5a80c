"""What every source of rows obeys."""

import pickle

import numpy as np

from dkfm.sources.base import read_finite


def _dense(rows):
    return rows if isinstance(rows, np.ndarray) else rows.toarray()


def check_source(source, rows, travels=True):
    """A source of some rows (n, d) gives any of them, knows what it is, and travels in a task."""
    n, d = source.shape
    assert (n, d) == rows.shape
    for part in (slice(0, n), slice(0, 1), slice(n - 1, n), slice(n // 3, n // 2 + 1), slice(2, 2)):
        found = source.read(part)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(_dense(found), rows[part])
        np.testing.assert_array_equal(_dense(source.with_float32_preserved().read(part)), rows[part])
    np.testing.assert_array_equal(_dense(read_finite(source, slice(0, n))), rows)
    assert source.name
    assert source.chunk_rows >= 1
    assert source.float64s_per_row >= 1
    for count in (1, 2, n):
        held = max(np.count_nonzero(rows[a : a + count]) for a in range(n - count + 1))
        assert source.max_size_in_float64s(count) >= held, "no fewer values than any so many rows hold"
    assert source.read_overhead_bytes(1) >= 0
    assert source.cached_bytes >= 0
    stamp = source.stamp()
    assert (source.stamp(), source.stamp(include_ctime=True)) == (stamp, source.stamp(include_ctime=True))
    assert source.is_opening_valid(stamp)
    assert source.locate_row(n - 1)[1] in range(n)
    if travels:
        again = pickle.loads(pickle.dumps(source))
        np.testing.assert_array_equal(_dense(again.read(slice(0, n))), rows)
        assert again.stamp() == stamp
        assert len(pickle.dumps(source)) < 2000, "a source in a task is a few words"
