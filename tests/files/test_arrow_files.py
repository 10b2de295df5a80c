"""Files that are opened for Arrow: what is read ahead is the file's, and none of Arrow's threads takes part."""

import io
import os
import subprocess
import sys

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dkfm.files import arrow_files
from dkfm.files.arrow_files import RangeReader, reopen_natively

BYTES = bytes(range(251)) * 200
PLACES = st.integers(-3, len(BYTES) + 9)


class CountingFile(io.BytesIO):
    """A file in memory that records what is asked of it."""

    def __init__(self, data):
        super().__init__(data)
        self.requests = []

    def read(self, size=-1):
        self.requests.append((self.tell(), size))
        return super().read(size)


@given(
    ahead=st.lists(st.lists(st.tuples(PLACES, st.integers(-2, 60_000)), max_size=5), max_size=3),
    reads=st.lists(st.tuples(st.integers(0, len(BYTES) + 9), st.integers(-1, 60_000)), max_size=8),
)
def test_whatever_is_read_ahead_reads_give_the_bytes_of_the_file(ahead, reads):
    reader, plain = RangeReader(io.BytesIO(BYTES), len(BYTES)), io.BytesIO(BYTES)
    for ranges in ahead:
        reader.read_ahead(ranges)
        for start, size in [*((max(0, start), size) for start, size in ranges if size >= 0), *reads]:
            for file in (reader, plain):
                file.seek(start)
            assert bytes(reader.read(size)) == plain.read(size)
            assert reader.tell() == plain.tell()
    assert reader.seek(-7, io.SEEK_END) == plain.seek(-7, io.SEEK_END)
    assert reader.seek(3, io.SEEK_CUR) == plain.seek(3, io.SEEK_CUR)
    assert bytes(reader.read()) == plain.read()


def test_near_ranges_are_one_request_and_are_not_asked_for_again():
    gap, file = arrow_files._GAP_BYTES, CountingFile(BYTES)
    reader, ranges = RangeReader(file, len(BYTES)), [(100 + 20 + gap, 30), (100, 20), (105, 3), (300 + 2 * gap, 40)]
    reader.read_ahead(ranges)
    assert file.requests == [(100, 50 + gap), (300 + 2 * gap, 40)]
    for start, size in ranges:
        reader.seek(start)
        assert reader.read(size) == BYTES[start : start + size]
    assert len(file.requests) == 2
    reader.read_ahead([])
    reader.seek(100)
    assert reader.read(20) == BYTES[100:120]
    assert len(file.requests) == 3


def test_a_range_that_no_file_has_is_not_read_ahead():
    file = CountingFile(BYTES)
    RangeReader(file, len(BYTES)).read_ahead([(-1, 5), (5, -1), (0, 0), (len(BYTES) - 3, 4), (0, 2**62)])
    assert file.requests == []


def test_a_file_that_is_opened_again_is_the_one_that_was_opened(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b"before")
    with path.open("rb") as file:
        path.unlink()
        path.write_bytes(b"another file")
        with reopen_natively(file) as native:
            assert isinstance(native, pa.NativeFile)
            assert native.read() == b"before"
        assert file.read() == b"before"  # it has a position of its own
    assert native.closed
    memory = io.BytesIO(b"object")
    with reopen_natively(memory) as same:
        assert same is memory
    assert not memory.closed


READ_AND_SCORE = """
import os, threading, time

import dask.dataframe
import fsspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import dkfm
from dkfm.cli.verify import verify_output

def count_native_threads():
    return psutil.Process().num_threads() - threading.active_count()

rows = np.random.default_rng(0).normal(size=(3000, 4))
np.save("rows.npy", rows)
names = [f"text {i}" for i in range(3000)]
table = pa.table({"id": names, **dict(zip("abcd", rows.T))})
pq.write_table(table, "rows.parquet", row_group_size=700)
with fsspec.open("memory://rows.parquet", "wb") as file:
    pq.write_table(table, file, row_group_size=700)
model = dkfm.KernelPCA(3, kernel=dkfm.kernels.Gaussian(2.0)).fit(rows[:200])
model.save("model")
dkfm.batch_score("model", "rows.npy", "scores.zarr", progress=False)
pq.read_metadata("rows.parquet")  # imports what it needs

before = count_native_threads()
for number, place in enumerate(("rows.parquet", "memory://rows.parquet")):
    output = f"scores{number}.parquet"
    dkfm.batch_score("model", place, output, id_column="id", progress=False)
    frame = dkfm.open_scores(output).compute()
    assert frame["id"].tolist() == names, frame["id"]
    assert sum(len(block) for block, _ in dkfm.iter_scores(output)) == 3000
    verify_output(output, place, 3000, None, (), False)
ends = time.monotonic() + 10  # threads of Python that end are still there for a moment; those of Arrow stay
while (now := count_native_threads()) > before and time.monotonic() < ends:
    time.sleep(0.01)
assert now <= before, "Arrow has started threads"
pq.ParquetFile(open("rows.parquet", "rb")).read()
assert count_native_threads() > now, "threads of Arrow are not seen"
os._exit(0)  # an exit may hang, because of the threads of the last line but one
"""


def test_no_thread_of_arrow_reads_or_decodes(tmp_path):
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}  # jemalloc has threads of its own
    command = [sys.executable, "-W", "default", "-c", READ_AND_SCORE]  # it warns of names, whatever PYTHONWARNINGS is
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120, env=environment)
