"""Gram matrices in Zarr: right, symmetric, resumable tile by tile, refused where something else lies."""

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfm
from dkfm import kernels
from dkfm.core import cpus
from dkfm.errors import (
    BudgetError,
    DamagedStoreError,
    DkfmError,
    InvalidInputError,
    KernelError,
    StoreExistsError,
    UnsupportedStoreError,
)
from dkfm.gram import build as gram
from dkfm.sources import base
from dkfm.sources.memory import MemorySource
from dkfm.sources.opening import open_source
from helpers import oracles

K = kernels.Gaussian(2.0)


def chunk_files(path):
    """Finished tiles and when they were written; what a writer is at comes and goes under a name of its own."""
    found = [p for p in (path / "gram" / "c").rglob("*") if p.suffix != ".partial" and p.is_file()]
    return {str(p.relative_to(path)): p.stat().st_mtime_ns for p in found}


@given(n=st.integers(1, 24), tile=st.integers(1, 30))
@settings(max_examples=15)
def test_any_tiling_gives_the_dense_matrix_to_the_last_bit_symmetric(tmp_path_factory, n, tile):
    X = np.random.default_rng(n).normal(size=(n, 6))
    array = dkfm.build_gram(K, X, tmp_path_factory.mktemp("g") / "gram", tile_rows=tile)
    found = array[:]
    assert np.array_equal(found, found.T)
    np.testing.assert_allclose(found, oracles.gaussian(X, X, 2.0), rtol=1e-13)
    assert array.chunks == (min(n, tile),) * 2


def test_rows_come_from_memory_npy_or_zarr_alike(tmp_path, rng):
    X = rng.normal(size=(50, 3))
    np.save(tmp_path / "x.npy", X)
    zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(7, 3))
    found = [
        dkfm.build_gram(K, data, tmp_path / f"gram{i}", tile_rows=20)[:]
        for i, data in enumerate([X, tmp_path / "x.npy", tmp_path / "x.zarr"])
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_training_rows_are_read_tile_by_tile(tmp_path, rng, monkeypatch):
    sizes = []
    read = MemorySource.read
    monkeypatch.setattr(MemorySource, "read", lambda s, rows: sizes.append(rows.stop - rows.start) or read(s, rows))
    monkeypatch.setattr(base, "_READ_VALUES", 30)  # the look at all rows before the first tile, in ten rows too
    dkfm.build_gram(K, rng.normal(size=(50, 3)), tmp_path / "gram", tile_rows=10)
    assert max(sizes) == 10


CHILD = """
import sys, numpy as np, dkfm
X = np.random.default_rng(0).normal(size=(2400, 300))
dkfm.build_gram(dkfm.kernels.Laplacian(50.0), X, sys.argv[1], tile_rows=100)
"""


@pytest.mark.slow
def test_a_killed_build_goes_on_and_leaves_finished_tiles_untouched(tmp_path):
    path = tmp_path / "gram"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not (path / "gram" / "c").exists() or len(chunk_files(path)) < 150:
            assert time.monotonic() < deadline
            assert child.poll() is None, "killed while it worked, not after"
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    before = chunk_files(path)
    assert 150 <= len(before) < 24 * 24
    assert not (path / "_COMPLETE").exists()
    X = np.random.default_rng(0).normal(size=(2400, 300))
    resumed = dkfm.build_gram(kernels.Laplacian(50.0), X, path, tile_rows=100)
    after = chunk_files(path)
    assert {name: after[name] for name in before} == before
    undisturbed = dkfm.build_gram(kernels.Laplacian(50.0), X, tmp_path / "other", tile_rows=100)
    np.testing.assert_array_equal(resumed[:], undisturbed[:])


def test_a_tile_without_its_image_or_with_a_flipped_bit_is_computed_again(tmp_path, rng):
    X, path = rng.normal(size=(60, 3)), tmp_path / "gram"
    truth = dkfm.build_gram(K, X, path, tile_rows=20)[:]
    (path / "_COMPLETE").unlink()
    (path / "gram" / "c" / "0" / "2").unlink()
    flipped = path / "gram" / "c" / "1" / "1"
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
    os.truncate(path / "gram" / "c" / "2" / "2", 100)
    before = chunk_files(path)
    np.testing.assert_array_equal(dkfm.build_gram(K, X, path, tile_rows=20)[:], truth)
    after = chunk_files(path)
    assert {n for n in before if after[n] != before[n]} == {"gram/c/1/1", "gram/c/2/2"}


def test_a_finished_gram_is_returned_as_it_is_whatever_the_tile(tmp_path, rng):
    X = rng.normal(size=(60, 3))
    dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=20)
    before = chunk_files(tmp_path / "gram")
    assert dkfm.build_gram(K, X, tmp_path / "gram").chunks == (20, 20)
    assert chunk_files(tmp_path / "gram") == before


def test_a_path_that_holds_something_else_is_left_untouched(tmp_path, rng):
    X = rng.normal(size=(30, 3))
    dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=20)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    zarr.create_group(tmp_path / "foreign")
    dkfm.KernelPCA(1).fit(X).save(tmp_path / "model")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for name, kernel, rows in [
        ("gram", kernels.Gaussian(3.0), X),
        ("gram", K, X + 1),
        ("gram", K, X[:-1]),
        ("folder", K, X),
        ("foreign", K, X),
        ("model", K, X),
        ("folder/mine.txt", K, X),
    ]:
        with pytest.raises(StoreExistsError, match="left untouched"):
            dkfm.build_gram(kernel, rows, tmp_path / name)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_an_unfinished_gram_goes_on_with_its_own_tiles_only(tmp_path, rng):
    X = rng.normal(size=(60, 3))
    dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=20)
    (tmp_path / "gram" / "_COMPLETE").unlink()
    with pytest.raises(StoreExistsError, match="tile_rows=20"):
        dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=30)
    assert dkfm.build_gram(K, X, tmp_path / "gram").chunks == (20, 20)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (np.array([[1.0], [2.0], [np.nan]]), "row 2 contains NaN"),
        (np.ones(4), "two dimensions"),
        (np.ones((0, 2)), "at least one row"),
        (np.array([[1j]]), "real numbers"),
        (np.array([["a"]], dtype=object), "real numbers"),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_written(tmp_path, bad, words):
    with pytest.raises(InvalidInputError, match=words):
        dkfm.build_gram(K, bad, tmp_path / "gram")
    assert not (tmp_path / "gram").exists()


def test_a_kernel_that_is_not_one_is_refused_with_the_rows_in_the_whole(tmp_path):
    X = np.arange(50.0)[:, None]
    with pytest.raises(KernelError, match="returned nan for rows 37 and "):
        dkfm.build_gram(
            kernels.Function(lambda A, B: np.where(A == 37, np.nan, 1.0) * (B.T > -1)), X, tmp_path / "g", tile_rows=10
        )
    with pytest.raises(KernelError, match=r"returned shape \(10,\)"):
        dkfm.build_gram(kernels.Function(lambda A, B: np.ones(len(A))), X, tmp_path / "h", tile_rows=10)
    with pytest.raises(KernelError, match="no kernel named 'gausian'"):
        dkfm.build_gram("gausian", X, tmp_path / "i")
    with pytest.raises(InvalidInputError, match="tile_rows"):
        dkfm.build_gram(K, X, tmp_path / "i", tile_rows=0)


def test_a_tile_too_large_for_a_thread_is_refused_with_one_that_fits(tmp_path, rng, monkeypatch):
    from dkfm.core import budget
    from dkfm.execution import memory

    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 4_000_000)
    with pytest.raises(BudgetError, match=r"bytes.*use tile_rows <= (\d+)") as caught:
        dkfm.build_gram(K, rng.normal(size=(1000, 3)), tmp_path / "gram", tile_rows=500)
    fits = int(str(caught.value).split("<= ")[1].split(",")[0])
    assert budget.gram_task_bytes(fits, 3) <= 4_000_000


def test_a_tile_task_pickles_to_under_ten_kilobytes(tmp_path, rng):
    np.save(tmp_path / "x.npy", rng.normal(size=(3000, 100)))
    task = (gram.write_tile, K, open_source(tmp_path / "x.npy"), str(tmp_path / "gram"), (3, 2), 500)
    assert len(pickle.dumps(task)) < 10_000


def test_a_gram_of_one_tile_is_computed_in_place_without_a_store(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(gram, "build_gram", None)
    X = rng.normal(size=(100, 3))
    found = gram.compute_driver_gram(K, X, workspace=tmp_path / "w")
    np.testing.assert_allclose(found, oracles.gaussian(X, X, 2.0), rtol=1e-13)
    assert found.flags.f_contiguous
    assert not (tmp_path / "w").exists()


def test_a_gram_of_many_tiles_is_the_same_and_a_workspace_keeps_it(tmp_path, rng):
    X = rng.normal(size=(100, 3))
    truth = np.tril(oracles.gaussian(X, X, 2.0))
    np.testing.assert_allclose(np.tril(gram.compute_driver_gram(K, X, tile_rows=30)), truth, rtol=1e-13)
    for _ in range(2):
        np.testing.assert_allclose(
            np.tril(gram.compute_driver_gram(K, X, tile_rows=30, workspace=tmp_path)), truth, rtol=1e-13
        )
    (kept,) = tmp_path.glob("gram-*.zarr")
    before = chunk_files(kept)
    gram.compute_driver_gram(K, X, tile_rows=30, workspace=tmp_path)
    assert chunk_files(kept) == before
    assert gram.gram_store_path(K, X, tmp_path) == kept


@pytest.mark.parametrize("damage", ["delete", "flip"])
def test_a_damaged_gram_is_never_read_as_data(tmp_path, rng, damage):
    X = rng.normal(size=(100, 3))
    gram.compute_driver_gram(K, X, tile_rows=30, workspace=tmp_path)
    chunk = gram.gram_store_path(K, X, tmp_path) / "gram" / "c" / "1" / "3"
    if damage == "delete":
        chunk.unlink()
    else:
        chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    with pytest.raises(DamagedStoreError, match=r"(15 chunks and must have 16|Tile \(1, 3\)).*build again"):
        gram.compute_driver_gram(K, X, tile_rows=30, workspace=tmp_path)


def test_a_failed_build_leaves_no_temporary_files(rng, tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(DkfmError):
        gram.compute_driver_gram(kernels.Function(lambda A, B: np.ones(3)), rng.normal(size=(100, 3)), tile_rows=30)
    assert list(tmp_path.iterdir()) == []


def test_a_build_refused_for_memory_leaves_nothing_and_goes_on_with_the_tile_it_named(tmp_path, rng, monkeypatch):
    from dkfm.execution import memory

    X = rng.normal(size=(300, 3))
    with monkeypatch.context() as small:
        small.setattr(cpus, "COUNT", 2)
        small.setattr(memory, "clear_caches_and_measure_memory", lambda: 4_000_000)
        with pytest.raises(BudgetError):
            dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=300)
    assert not (tmp_path / "gram").exists()
    assert dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=50).chunks == (50, 50)


def test_an_unfinished_gram_in_a_workspace_goes_on_whatever_its_tiles(tmp_path, rng, monkeypatch):
    X = rng.normal(size=(100, 3))
    path = gram.gram_store_path(K, X, tmp_path)
    dkfm.build_gram(K, X, path, tile_rows=30)
    (path / "_COMPLETE").unlink()
    before = chunk_files(path)
    monkeypatch.setattr(gram, "TILE_ROWS", 40)
    gram.compute_driver_gram(K, X, workspace=tmp_path)
    assert chunk_files(path) == before


def test_a_tile_that_is_lost_from_a_finished_gram_is_told(tmp_path, rng):
    X = rng.normal(size=(60, 3))
    dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=20)
    (tmp_path / "gram" / "gram" / "c" / "1" / "0").unlink()
    with pytest.raises(DamagedStoreError, match="build again"):
        dkfm.build_gram(K, X, tmp_path / "gram")


@pytest.mark.parametrize("name", ["notes.txt", "c/notes.txt", "c/0/notes.txt"])
def test_a_file_that_is_no_tile_is_named_and_not_to_be_deleted(tmp_path, rng, name):
    X = rng.normal(size=(20, 3))
    dkfm.build_gram(K, X, tmp_path / "g", tile_rows=8)
    (tmp_path / "g" / "gram" / name).write_text("mine")
    with pytest.raises(UnsupportedStoreError, match=rf"holds {name}, which is no chunk .* move it elsewhere.$"):
        dkfm.build_gram(K, X, tmp_path / "g", tile_rows=8)


@pytest.mark.slow
def test_builds_of_one_gram_at_once_all_end_with_it(tmp_path, rng):
    X = rng.normal(size=(60, 3))
    truth = oracles.gaussian(X, X, 2.0)
    for attempt in range(4):
        build = partial(dkfm.build_gram, K, X, tmp_path / f"gram{attempt}", tile_rows=20)
        with ThreadPoolExecutor(4) as pool:
            found = [built.result()[:] for built in [pool.submit(build) for _ in range(4)]]
        for block in found:
            np.testing.assert_allclose(block, truth, rtol=1e-13)
        assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_every_tile_is_durable_before_the_marker(tmp_path, rng, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or fsync(fd))
    dkfm.build_gram(K, rng.normal(size=(50, 3)), tmp_path / "gram", tile_rows=20)
    marker = next(i for i, path in enumerate(synced) if "_COMPLETE" in path)
    for i in range(3):
        folder = str(tmp_path / "gram" / "gram" / "c" / str(i))
        assert folder in synced[:marker]
        for j in range(3):
            assert any(path.startswith(f"{folder}/.{j}.") for path in synced[:marker]), "before it has its name"


def test_a_gram_too_large_for_the_disk_is_refused_before_anything_is_made(tmp_path, rng, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, 70_000))
    with pytest.raises(BudgetError, match=r"82400 bytes.*70000 bytes.*larger disk"):
        dkfm.build_gram(K, rng.normal(size=(100, 3)), tmp_path / "gram", tile_rows=20)
    assert not (tmp_path / "gram").exists()


def test_a_function_leaves_no_gram_in_a_workspace_that_nothing_would_find(tmp_path, rng):
    gram.compute_driver_gram(
        kernels.Function(lambda A, B: A @ B.T), rng.normal(size=(50, 3)), tile_rows=20, workspace=tmp_path
    )
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_goes_on_needs_disk_for_what_is_missing_only(tmp_path, rng, monkeypatch):
    import shutil

    X = rng.normal(size=(200, 3))
    dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=50)
    (tmp_path / "gram" / "_COMPLETE").unlink()
    (tmp_path / "gram" / "gram" / "c" / "1" / "0").unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, 40_000))
    assert np.isfinite(dkfm.build_gram(K, X, tmp_path / "gram")[:]).all()


def test_a_gram_inside_a_model_is_refused_for_what_it_is(tmp_path, rng):
    X = rng.normal(size=(30, 3))
    dkfm.KernelPCA(1).fit(X).save(tmp_path / "model")
    with pytest.raises(StoreExistsError, match="lies inside a dkfm model store"):
        dkfm.build_gram(K, X, tmp_path / "model" / "gram", tile_rows=10)
    dkfm.load(tmp_path / "model")


@pytest.mark.parametrize("kernel", [kernels.Gaussian("median"), kernels.Gaussian((1.0, 2.0))])
def test_a_kernel_that_does_not_fit_rows_on_disk_begins_no_store(kernel, tmp_path, rng):
    np.save(tmp_path / "x.npy", rng.normal(size=(30, 3)))
    with pytest.raises(KernelError, match=r"training rows|3 columns"):
        dkfm.build_gram(kernel, tmp_path / "x.npy", tmp_path / "gram")
    assert not (tmp_path / "gram").exists()


@pytest.mark.parametrize("n", [511, 512, 513, 700])
def test_few_rows_are_computed_in_tiles_with_the_values_of_one(n, rng):
    X = rng.normal(size=(n, 6))
    np.testing.assert_allclose(np.tril(gram.compute_driver_gram(K, X)), np.tril(K(X, X)), rtol=0, atol=1e-15)


def test_a_function_of_the_user_and_a_fit_in_a_thread_compute_few_rows_at_once(rng, monkeypatch):
    X, tiles, evaluate = rng.normal(size=(700, 3)), [], gram.evaluate_block
    monkeypatch.setattr(gram, "evaluate_block", lambda k, A, B, *at: tiles.append(len(A)) or evaluate(k, A, B, *at))
    gram.compute_driver_gram(kernels.Function(lambda A, B: A @ B.T), X)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gram.compute_driver_gram, K, X).result()
    assert tiles == [700, 700]
    gram.compute_driver_gram(K, X)
    assert sorted(tiles[2:]) == [188, 512, 512]
