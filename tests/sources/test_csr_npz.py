"""."""

import contextlib
import io
import tempfile

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from dkfm.core.rows import estimate_float64s_per_row
from dkfm.errors import InvalidInputError
from dkfm.sources import csr_npz
from dkfm.sources.base import read_finite
from dkfm.sources.csr_npz import NpzSource
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source
from helpers.npz_files import archive, members, refusal, save


@pytest.fixture(autouse=True)
def forgotten():
    yield
    csr_npz.clear_unpacked()


@given(
    st.integers(1, 20),
    st.integers(1, 6),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(["f8", "f4", "i4", "?"]),
    st.data(),
)
def test_any_rows_of_any_matrix_are_read(n, d, density, compressed, dtype, data):
    rng = np.random.default_rng(n * d)
    matrix = sp.csr_array((rng.random((n, d)) < density) * rng.integers(1, 9, (n, d)).astype(dtype))
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(save(folder + "/x.npz", matrix, compressed))
        assert (source.shape, source.chunk_rows) == ((n, d), 1)
        first = data.draw(st.integers(0, n))
        last = data.draw(st.integers(first, n))
        read = source.read(slice(first, last))
        assert isinstance(read, sp.csr_array)
        assert read.dtype == np.float64
        assert read.has_canonical_format
        assert read.shape == (last - first, d)
        np.testing.assert_array_equal(read.toarray(), matrix.toarray()[first:last])


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_reads_as_the_matrix_in_memory(compressed, matrix, tmp_path):
    source, memory = open_source(save(tmp_path / "x.npz", matrix, compressed)), MemorySource(matrix)
    assert (
        (source.shape, source.float64s_per_row)
        == (memory.shape, memory.float64s_per_row)
        == ((200, 30), estimate_float64s_per_row(matrix))
    )
    read, expected = source.read(slice(20, 90)), memory.read(slice(20, 90))
    for part in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(read, part), getattr(expected, part))
        assert getattr(read, part).dtype == getattr(expected, part).dtype
    read.data[:] = 0  # rows of one's own
    np.testing.assert_array_equal(source.read(slice(20, 90)).toarray(), expected.toarray())
    assert source.locate_row(7) == (str(tmp_path / "x.npz"), 7)
    np.testing.assert_array_equal(
        open_source(save(tmp_path / "m.npz", sp.csr_matrix(matrix))).read(slice(0, 200)).toarray(), matrix.toarray()
    )


def test_columns_out_of_order_are_sorted_and_those_there_twice_added_up(tmp_path):
    messy = sp.csr_array((np.array([1.0, 2.0, 4.0]), np.array([2, 0, 2]), np.array([0, 3, 3])), shape=(2, 3))
    read = open_source(save(tmp_path / "x.npz", messy)).read(slice(0, 2))
    assert read.has_canonical_format
    np.testing.assert_array_equal(read.toarray(), [[2, 0, 5], [0, 0, 0]])


def test_what_is_not_finite_is_told_by_its_row(matrix, tmp_path):
    matrix.data[matrix.indptr[50]] = np.nan
    row = int(np.searchsorted(matrix.indptr, matrix.indptr[50], side="right")) - 1
    with pytest.raises(InvalidInputError, match=f"row {row} contains NaN"):
        read_finite(open_source(save(tmp_path / "x.npz", matrix)), slice(40, 60))


@pytest.mark.parametrize("form", ["csc", "coo", "bsr"])
def test_other_formats_are_refused_with_what_to_do(form, matrix, tmp_path):
    assert f"{form!r}, not csr: convert it with .tocsr()" in refusal(save(tmp_path / "x.npz", matrix.asformat(form)))


def test_files_that_hold_no_matrix_are_refused(matrix, tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones(3))
    assert "holds 0 arrays named 'format'; scipy.sparse.save_npz writes one" in refusal(tmp_path / "x.npz")
    (tmp_path / "y.npz").write_bytes(b"no zip")
    assert "cannot be read as a .npz file: File is not a zip file" in refusal(tmp_path / "y.npz")
    content = save(tmp_path / "z.npz", matrix).read_bytes()
    (tmp_path / "z.npz").write_bytes(content[: len(content) // 2])
    assert "cannot be read" in refusal(tmp_path / "z.npz")
    for place in range(0, len(content), 97):
        (tmp_path / "z.npz").write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
        with contextlib.suppress(InvalidInputError):  # or it was of no consequence
            read = open_source(tmp_path / "z.npz").read(slice(0, 200))
            np.testing.assert_array_equal(read.toarray(), matrix.toarray())
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        NpzSource.open(tmp_path / "missing.npz")


class Opened:
    """What must never be unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize("name", ["data", "indices", "indptr", "shape", "format"])
def test_objects_are_refused_and_never_unpickled(name, matrix, tmp_path):
    trap = io.BytesIO()
    np.save(trap, np.array([Opened()] * 2, object), allow_pickle=True)
    path = archive(tmp_path / "x.npz", members(matrix, **{name: trap.getvalue()}))
    assert f"array {name!r}" in refusal(path)
    assert "never unpickled" in refusal(path)
