import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.core import chunking


@given(st.integers(1, 200), st.integers(1, 50))
def test_slices_cover_every_row_once(n, rows):
    assert [i for s in chunking.row_slices(n, rows) for i in range(s.start, s.stop)] == list(range(n))


@given(st.integers(1, 60), st.integers(1, 20))
def test_lower_tiles_and_their_images_cover_every_entry_once(n, rows):
    seen = [[0] * n for _ in range(n)]
    for i, j in chunking.lower_triangle_tile_indices(n, rows):
        for a, b in {(i, j), (j, i)}:
            row, column = chunking.row_slice(a, n, rows), chunking.row_slice(b, n, rows)
            for r in range(row.start, row.stop):
                for c in range(column.start, column.stop):
                    seen[r][c] += 1
    assert all(value == 1 for line in seen for value in line)


@pytest.mark.parametrize("row_seconds", [1e-6, 1e-3, 10.0])
@pytest.mark.parametrize("step", [1, 7, 1000, 10**6])
@pytest.mark.parametrize("threads", [1, 3, 1000])
def test_slow_kernels_do_not_make_more_chunks_than_an_output_may_have(row_seconds, step, threads):
    for rows in (1, 10**6, 5 * 10**9 + 1):
        chunk_rows = chunking.choose_chunk_rows(rows, row_seconds, 8, threads, step)
        assert chunking.count_tiles(rows, chunk_rows) <= chunking.MAX_CHUNKS


def test_few_numbers_of_parts_of_a_huge_chunk_are_tried(monkeypatch):
    assert chunking.round_to_chunk_rows(300, 1001) == 143
    monkeypatch.setattr(chunking, "_PARTS_TRIED", 2)
    assert chunking.round_to_chunk_rows(300, 1001) == 251
