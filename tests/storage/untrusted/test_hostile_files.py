"""Files of strangers: none is waited for, none takes memory that its size does not explain, none ends the process."""

import ast
import os
import signal
import socket
import subprocess
import sys
import tracemalloc
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import dkfm
from dkfm.cli import option_parsing
from dkfm.errors import DkfmError, InvalidInputError
from dkfm.execution.clusters import connect, slurm_config, ssh
from dkfm.files import local
from dkfm.kernels import Gaussian
from dkfm.scoring import planning
from dkfm.sources import csr_npz, npy
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source
from dkfm.storage import csr, json_reading, model_store, output_files, raw_chunk_reader

TEXT = {"capture_output": True, "text": True}
ROOT = Path(dkfm.__file__).parent


@contextmanager
def a_hang_is_an_error(seconds=20):
    def stop(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def opened_as_scheduler(path):
    with connect.connect(str(path)):
        pass


OPENED = {
    "x.npy": open_source,
    "x.npz": open_source,
    "x.parquet": open_source,
    "labels": lambda path: option_parsing.read_labels(str(path), "--labels", 5),
    "scheduler.json": opened_as_scheduler,
    "hosts": lambda path: ssh._read_hosts(str(path)),
    "slurm.yaml": lambda path: slurm_config.read_slurm_file(str(path)),
    "zarr.json": json_reading.read_json,
    "part-00000.parquet": lambda path: output_files.LocalOutput(path.parent).open_for_reading(path.name),
    "c": model_store.compute_sha256,
}


def pipe(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("make", [pipe, listening, device, folder])
def test_whatever_is_not_a_plain_file_is_refused_at_once(make, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    make(Path(name))
    with a_hang_is_an_error(), pytest.raises(DkfmError) as caught:
        OPENED[name](tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_chunk_that_became_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "0")
    with a_hang_is_an_error(), pytest.raises(OSError, match="it is not a plain file"):
        raw_chunk_reader.read_chunk_into_array(np.empty(3), tmp_path / "0", checked=False)


def test_a_file_is_open_as_any_other(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    with local.open_plain(tmp_path / "x") as file:
        assert os.get_blocking(file.fileno())
        assert not os.get_inheritable(file.fileno())
        assert file.read() == b"abc"
    assert local.read_plain(tmp_path / "x", 3) == b"abc"
    with pytest.raises(OSError, match="it has 3 bytes and may have 2"):
        local.read_plain(tmp_path / "x", 2)


def test_a_small_file_takes_little_memory_however_large_it_may_be(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    tracemalloc.start()
    try:
        local.read_plain(tmp_path / "x", 2**24)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


OTHERS = {
    ("performance_report", "read_text"),  # a page that Dask has just written into our own temporary folder
    ("object_store", "read_bytes"),  # a model in our own temporary folder
    ("remote_stores", "read_bytes"),
    ("memory", "read_text"),  # of /proc and /sys
    ("cpus", "read_text"),
    ("machine", "read_text"),
    ("process_records", "read_text"),
    ("training_data", "memmap"),  # a Gram matrix in a file of our own that has no name
}


def test_files_are_opened_to_be_read_by_one_function():
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            mode = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            reads = called.rpartition(".")[2] == "open" and mode and set(mode[-1]) <= set("rbt")
            if reads or called.endswith((".read_bytes", ".read_text", "np.load", "np.fromfile", "np.memmap")):
                found.add((path.stem, "np.load" if called == "np.load" else called.rpartition(".")[2]))
    assert found - {("local", "open"), ("csr_npz", "memmap")} <= OTHERS  # of npz, a file without a name that it wrote


ROWS = np.random.default_rng(5).integers(-99, 99, (50, 7))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<f4", ">f4", "<f2", "i1", ">i8", "<u2", "?"])
def test_npy_files_of_any_order_and_dtype_read_as_numpy_does(dtype, order, tmp_path, monkeypatch):
    stored = np.asarray(ROWS, dtype, order=order)
    np.save(tmp_path / "x.npy", stored)
    monkeypatch.setattr(npy, "_BUFFER_BYTES", 100)
    source = open_source(tmp_path / "x.npy")
    for part in (slice(0, 50), slice(3, 4), slice(45, 60), slice(7, 7)):
        read = source.read(part)
        np.testing.assert_array_equal(read, stored[part].astype(np.float64))
        assert read.dtype == np.float64
    np.testing.assert_array_equal(npy.load_npy(tmp_path / "x.npy"), stored)


def test_labels_that_are_not_one_a_row_are_refused_before_they_are_read(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (2**28,)})
        file.truncate(file.tell() + 8 * 2**28)  # a hole
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=r"shape \(268435456,\), and must have 60 rows"):
            npy.load_npy(tmp_path / "x.npy", 60)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["<U1", ">U3"])
def test_text_that_is_not_unicode_is_refused(dtype, tmp_path):
    np.save(tmp_path / "x.npy", np.full(6, 0x110000, np.dtype("u4").newbyteorder(dtype[0])).view(dtype))
    with pytest.raises(InvalidInputError, match="its text is not Unicode"):
        npy.load_npy(tmp_path / "x.npy")
    np.save(tmp_path / "y.npy", np.array(["\U0010ffff", ""], dtype))
    assert npy.load_npy(tmp_path / "y.npy").tolist() == ["\U0010ffff", ""]


@pytest.mark.slow
def test_rows_outlive_a_file_that_is_cut_short(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((100_000, 4)))
    code = (
        "import os, sys; from dkfm.sources.opening import open_source; source = open_source(sys.argv[1])\n"
        "rows = source.read(slice(0, 100_000)); os.truncate(sys.argv[1], 200); print(rows.sum())"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x.npy"], check=False, **TEXT)
    assert (done.returncode, done.stdout) == (0, "400000.0\n"), done.stderr


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_a_npy_file_that_is_cut_while_it_is_read_is_an_error(dtype, order, tmp_path, monkeypatch):
    path, read = tmp_path / "x.npy", npy._read_header
    np.save(path, np.ones((50, 7), dtype, order=order))
    source = open_source(path)

    def cut(file, name):
        header = read(file, name)
        os.truncate(path, 150)
        return header

    monkeypatch.setattr(npy, "_read_header", cut)
    with pytest.raises(InvalidInputError, match=r"Rows 3 to 9 of .* cannot be read: the file was cut short\.$"):
        source.read(slice(3, 9))


@pytest.mark.costly
@pytest.mark.parametrize("read", [open_source, lambda path: option_parsing.read_labels(str(path), "--labels", 5)])
def test_a_header_of_gigabytes_takes_no_memory(read, tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from dkfm.cli import option_parsing as arguments\n"
        "from dkfm.sources.opening import open_source\nfrom dkfm.errors import InvalidInputError\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0]) * 4096 + 2**28\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages, pages))\n"
        "path, what = sys.argv[1:]\n"
        "try: open_source(path) if what == 'rows' else arguments.read_labels(path, '--labels', 5)\n"
        "except InvalidInputError as error: print(error)"
    )
    with (tmp_path / "x.npy").open("wb") as file:
        file.write(b"\x93NUMPY\x02\x00" + (2**32 - 13).to_bytes(4, "little"))
        file.truncate(2**32)
    kind = "rows" if read is open_source else "labels"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x.npy", kind], check=False, **TEXT)
    assert "cannot be read as a .npy file" in done.stdout, done.stderr
    assert "allocate" not in done.stdout
    assert "MemoryError" not in done.stdout


def saved(path, data, indices, indptr, shape):
    parts = {"data": data, "indices": indices, "indptr": indptr, "shape": np.array(shape), "format": np.array(b"csr")}
    np.savez(path, **{name: np.asarray(part) for name, part in parts.items()})
    return path


POINTERS = {
    "begins at 1": [1, 2, 3],
    "falls": [0, 3, 2],
    "leads out": [0, 2, 9],
    "ends early": [0, 1, 2],
    "begins below": [-1, 2, 3],
}


@pytest.mark.parametrize("pointers", POINTERS.values(), ids=POINTERS)
def test_a_npz_file_whose_pointers_are_unsound_is_refused_when_it_is_opened(pointers, tmp_path):
    path = saved(tmp_path / "x.npz", [1.0, 2.0, 3.0], [0, 1, 2], pointers, (2, 3))
    with pytest.raises(InvalidInputError, match=r"do not make rows: the pointers"):
        open_source(path)


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_column_that_is_none_is_refused_with_any_row(bad, tmp_path):
    source = open_source(saved(tmp_path / "x.npz", [1.0, 2.0, 3.0], [0, 1, bad], [0, 2, 3], (2, 3)))
    with pytest.raises(InvalidInputError, match="columns must be from 0 to 2"):
        source.read(slice(0, 1))


@pytest.mark.parametrize("form", ["csr", "csc", "bsr", "coo"])
@pytest.mark.parametrize("bad", [-5, 10**6])
def test_sparse_arrays_in_memory_whose_parts_do_not_fit_are_refused(bad, form):
    X = sp.csr_array(np.eye(4)).asformat(form)
    (X.coords[0] if form == "coo" else X.indices)[1] = bad
    with pytest.raises(InvalidInputError, match="no sound sparse array"):
        open_source(X)


def test_sparse_arrays_in_memory_whose_pointers_fall_are_refused():
    X = sp.csr_array(np.ones((3, 3)))
    X.indptr[:] = [0, 7, 3, 9]
    with pytest.raises(InvalidInputError, match="no sound sparse array"):
        open_source(X)
    X.indptr[:] = [1, 3, 6, 9]
    with pytest.raises(InvalidInputError, match="no sound sparse array"):
        dkfm.KernelPCA(1, kernel=Gaussian(1.0)).fit(X)


def test_runs_of_rows_hold_at_most_what_is_planned_for_them(rng):
    X = sp.csr_array(rng.random((300, 40)) < rng.random((300, 1)) ** 4) * 1.0
    source = MemorySource(X)
    for rows in (1, 2, 3, 7, 64, 100, 255, 299, 300, 400):
        most = max(X[at : at + rows].nnz for at in range(300))
        assert 2 * most <= source.max_size_in_float64s(rows) <= 2 * 2 * most + rows
    pieces = csr.PointerCheck(X.nnz)
    for part in np.array_split(X.indptr, 17):
        pieces.add(part)
    assert pieces.max_nnz_per_row_window() == source.max_nnz_per_row_window


def test_a_job_is_planned_for_the_heaviest_rows(tmp_path, rng):
    model = dkfm.KernelPCA(2, kernel=Gaussian(1.0)).fit(sp.csr_array(rng.normal(size=(20, 1000)))).model_
    heavy = np.zeros(5001, np.int64)
    heavy[3000:] = 1000
    path = saved(tmp_path / "x.npz", np.ones(1000), np.arange(1000), heavy, (5000, 1000))
    for source in (open_source(path), MemorySource(sp.load_npz(path))):
        assert source.float64s_per_row < 5
        plan = planning.plan_with_model_in_memory(model, ["scores"], source)
        assert plan.piece_rows * source.float64s_per_row < source.max_size_in_float64s(plan.piece_rows)
        light = MemorySource(sp.csr_array((5000, 1000)))
        spare = planning.plan_with_model_in_memory(model, ["scores"], light, plan.chunk_rows).task_bytes
        assert plan.task_bytes - spare > 2 * 16 * 1000


def test_a_directory_of_many_members_is_not_read(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for number in range(2000):
            archive.writestr(f"{number}", b"")
    monkeypatch.setattr(csr_npz, "_MAX_READ_BYTES", 2**16)
    with pytest.raises(InvalidInputError, match="a part of it is longer than 65536 bytes"):
        open_source(tmp_path / "x.npz")
