"""Numbers of rows that do not stay in memory: in a file without a name, which has all its room before it is mapped."""

import mmap
import os
import resource
import shutil
import tempfile

import numpy as np
import pytest

from dkfm.errors import BudgetError, StoreError
from dkfm.files import row_values
from dkfm.files.row_values import allocate_row_values, count_memory_and_disk_bytes, iter_blocks


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Folder of the file; arrays above 80 bytes are in one."""
    monkeypatch.setattr(row_values, "_MAX_MEMORY_BYTES", 80)
    monkeypatch.setattr(row_values, "BLOCK_ROWS", 7)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def is_mapped(values):
    return isinstance(getattr(values.base, "obj", values.base), mmap.mmap)


@pytest.mark.parametrize("n", [1, 10, 11, 1000])
def test_many_are_in_a_file_that_has_no_name(n, folder):
    values, truth = allocate_row_values(n), np.arange(n) / 3
    values[:] = truth
    assert values.dtype == np.float64
    assert list(folder.iterdir()) == []
    assert is_mapped(values) == (n > 10) == bool(count_memory_and_disk_bytes(n)[1])
    np.testing.assert_array_equal(values, truth)
    np.testing.assert_array_equal(np.concatenate([block for _, block in iter_blocks(values)]), truth)
    assert all(np.shares_memory(block, values) for _, block in iter_blocks(values))


def test_the_file_has_its_room_before_a_value_is_set(folder, monkeypatch):
    opened, original = [], tempfile.TemporaryFile

    def open_and_keep(**options):
        file = original(**options)
        opened.append(os.dup(file.fileno()))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", open_and_keep)
    allocate_row_values(100_000)
    (folder / "plain").write_bytes(bytes(800_000))
    assert os.fstat(opened[0]).st_blocks >= (folder / "plain").stat().st_blocks  # a sparse file has none
    os.close(opened[0])


def test_a_full_disk_is_an_error_before_a_value_is_set(folder, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StoreError, match="File too large"):
            allocate_row_values(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, 7999))
    with pytest.raises(
        BudgetError, match=r"A number for each row in .* needs .*; use another disk with the variable TMPDIR"
    ):
        allocate_row_values(1000)
    assert list(folder.iterdir()) == []
