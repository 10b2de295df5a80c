"""Temporary folders: what a process leaves, how it ended, and what the next one takes for a dead one's."""

import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import dask.array as da
import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import BudgetError, StoreError, TemporaryStoreWarning
from dkfm.execution import lazy_scoring
from dkfm.files import local, process_records
from dkfm.files import temporary_folders as scratch
from dkfm.gram import build
from dkfm.gram.training_data import as_training_data
from helpers.harness import left

ENDINGS = [signal.SIGTERM, signal.SIGHUP]

GRAM = """
import select, sys, numpy as np
from dkfm import kernels; from dkfm.gram import build as gram
X = np.random.default_rng(0).normal(size=(40, 2))
with gram.build_stored_gram(kernels.Gaussian(1.0), X, tile_rows=20):
    print("there", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:  # read() misses a signal that comes just before it
        pass
"""

FOLDER = """
import select, sys
from dkfm.files import temporary_folders as scratch
with scratch.open_temporary_folder("gram"):
    print("there", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:  # read() misses a signal that comes just before it
        pass
"""

SAVING = """
import select, sys
from pathlib import Path
from dkfm.storage import zarr_store as store
with store.new_store(Path(sys.argv[1]) / "model", "rows", {}, ["rows"]):
    print("there", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:  # read() misses a signal that comes just before it
        pass
"""

FORKED = """
import os, sys
from dkfm.files import temporary_folders as scratch
made = scratch.TemporaryFolder("gram")
child = os.fork()
if child == 0:
    made.remove()
    sys.exit()
os.waitpid(child, 0)
print(made.path.exists())
"""

FIT = """
import sys, time
from pathlib import Path
from dkfm.core import budget; from dkfm.cli import app as cli; from dkfm.gram import build as gram, product_costs
here, write_tile = Path(sys.argv[1]), gram.write_tile
budget.fit_bytes = budget.lanczos_bytes = lambda *_: 2**60  # the Gram matrix is not kept in memory ..
product_costs.value_seconds = lambda *_: 1.0  # .. nor computed twice

def slow(*work):
    (here / "begun").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    return write_tile(*work)

gram.write_tile = slow
options = ["--kernel", "gaussian", "--param", "sigma=1", "--tile-rows", "200", "--components", "2"]
cli.main(["fit", str(here / "train.npy"), str(here / "model"), *options])
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary directory of this process and of those that it starts."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@contextmanager
def process(code, *arguments):
    """Run a script that says a word and then waits; it is killed at the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            assert running.stdout.readline() == b"there\n", running.stderr.read()
            yield running
        finally:
            running.kill()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_is_told_to_end_removes_its_gram_and_ends_as_it_would_without_dkfm(temporary, ending):
    with process(GRAM) as script:
        assert len(left(temporary)) == 1
        script.send_signal(ending)
        assert script.wait() == -ending
        assert script.stderr.read() == b""
    assert left(temporary) == []


@pytest.mark.slow
def test_the_next_fit_removes_what_a_killed_one_left_and_nothing_of_a_living_one(temporary, rng):
    X = rng.normal(size=(30, 2))
    with process(FOLDER) as living:
        (alive,) = left(temporary)
        with process(GRAM) as killed:
            killed.kill()
            killed.wait()
        assert len(left(temporary)) == 2
        with build.build_stored_gram(kernels.Gaussian(1.0), X, tile_rows=20):
            assert len(left(temporary)) == 2
        assert left(temporary) == [alive]
        living.kill()
        living.wait()
    scratch.remove_abandoned(temporary)
    assert left(temporary) == []


@pytest.mark.slow
def test_the_command_fit_removes_its_gram_when_it_is_told_to_end(temporary, tmp_path, rng):
    np.save(tmp_path / "train.npy", rng.normal(size=(600, 2)))
    with subprocess.Popen([sys.executable, "-c", FIT, str(tmp_path)]) as fit:
        try:
            while not (tmp_path / "begun").exists():
                assert fit.poll() is None
                threading.Event().wait(0.01)
            assert len(left(temporary)) == 1
            fit.send_signal(signal.SIGTERM)
            (tmp_path / "go").touch()
            assert fit.wait() == -signal.SIGTERM
        finally:
            fit.kill()
    assert left(temporary) == []


@pytest.mark.costly
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_store_whose_writer_was_ended_leaves_nothing_beside_the_next_one(tmp_path, rng, ending):
    with process(SAVING, tmp_path) as writer:
        assert len(left(tmp_path)) == 1
        writer.send_signal(ending)
        writer.wait()
    assert len(left(tmp_path)) == (ending == signal.SIGKILL)
    dkfm.KernelPCA(1).fit(rng.normal(size=(10, 2))).save(tmp_path / "model")
    assert left(tmp_path) == ["model"]


def test_a_forked_child_removes_nothing_of_its_parent(temporary):
    assert subprocess.check_output([sys.executable, "-c", FORKED], text=True).split() == ["True"]
    assert left(temporary) == []


@pytest.mark.slow
def test_a_model_that_went_to_a_worker_is_gone_with_its_process_and_swept_if_that_was_killed(temporary):
    code = """
import sys, pickle, numpy as np, dask.array as da, dkfm
from dkfm.execution import lazy_scoring as lazy
lazy.SMALL_MODEL = 0
map = dkfm.ExactFeatureMap("rbf").fit(np.eye(5))
pickle.dumps(map.transform(da.ones((4, 5))).dask)
print("there", flush=True)
sys.stdin.read()
"""
    with process(code) as script:
        assert len(left(temporary)) == 1
        script.communicate(b"")
    assert left(temporary) == []
    with process(code) as script:
        script.kill()
        script.wait()
    assert len(left(temporary)) == 1
    scratch.TemporaryFolder("model").remove()
    assert left(temporary) == []


def test_a_lazy_gram_that_is_given_has_no_name_on_the_disk(temporary, rng):
    X = rng.normal(size=(50, 2))
    K = kernels.Linear()(X, X)
    given = as_training_data(kernels.as_kernel("precomputed"), da.from_array(K, chunks=20))
    assert left(temporary) == []
    np.testing.assert_array_equal(given.compute_gram(None, None), K)


def test_a_folder_that_a_thread_makes_again_after_an_interruption_goes_at_the_end(tmp_path):
    with pytest.raises(KeyboardInterrupt), scratch.open_temporary_folder("partial", tmp_path) as folder:
        raise KeyboardInterrupt
    assert left(tmp_path) == []
    (folder / "model").mkdir(parents=True)
    scratch.remove_all_folders()
    assert left(tmp_path) == []
    assert folder not in scratch._folders


def told(folder, **changes):
    """Make a temporary folder of this process whose record tells something else, and let its lock go."""
    made = scratch.TemporaryFolder("gram", folder)
    record = made.path / "owner.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))
    fcntl.flock(made._record, fcntl.LOCK_UN)
    del scratch._folders[made.path]
    return made.path


@pytest.mark.parametrize(
    ("changes", "swept"),
    [
        ({}, False),  # this process
        ({"start": "1"}, True),  # its number was another's before
        ({"pid": 2**22 + 1}, True),
        ({"boot": "another", "pid": 2**22 + 1}, None),  # started anew: by the machine's name alone nobody knows
        ({"boot": "another", "host": "elsewhere", "pid": 2**22 + 1}, False),
        ({"boot": "another", "locked": False}, False),
        ({"pids": "another container"}, True),  # whose lock would be held
        ({"pids": "another container", "locked": False}, False),
        ({"pid": None}, True),
    ],
)
def test_a_folder_is_swept_where_its_process_has_ended_for_certain(tmp_path, changes, swept):
    path = told(tmp_path, **changes)
    scratch.remove_abandoned(tmp_path)
    expected = bool(process_records._describe_host()["machine"]) if swept is None else swept
    assert path.exists() != expected


def test_a_folder_whose_lock_is_held_is_alive_whatever_its_record_tells(tmp_path):
    path = told(tmp_path, pid=2**22 + 1)
    with (path / "owner.json").open("r+") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        scratch.remove_abandoned(tmp_path)
        assert path.exists()
    scratch.remove_abandoned(tmp_path)
    assert not path.exists()


def test_links_strangers_folders_and_what_has_no_record_are_not_touched(tmp_path):
    elsewhere, shared = tmp_path / "elsewhere", tmp_path / "shared"
    elsewhere.mkdir()
    shared.mkdir()
    precious = told(elsewhere, pid=2**22 + 1)
    (shared / f"dkfm-gram-{'0' * 32}").symlink_to(precious)  # to a folder that would be swept at its own place
    (shared / f"dkfm-gram-{'1' * 32}").mkdir()
    (shared / f"dkfm-gram-{'1' * 32}" / "mine").touch()
    for digit, text in (("2", "no JSON"), ("3", "[]"), ("4", "{}")):
        (shared / f"dkfm-gram-{digit * 32}").mkdir()
        (shared / f"dkfm-gram-{digit * 32}" / "owner.json").write_text(text)
    (shared / f"dkfm-gram-{'5' * 32}").mkdir()
    os.link(precious / "owner.json", shared / f"dkfm-gram-{'5' * 32}" / "owner.json")
    (shared / "dkfm-gram-mine").mkdir()
    (shared / f"dkfm-gram-{'6' * 32}").write_text("a file")
    if os.geteuid() == 0:
        stranger = told(shared, pid=2**22 + 1)
        os.chown(stranger, 65534, 65534)
        planted = told(shared, pid=2**22 + 1)
        os.chown(planted / "owner.json", 65534, 65534)
    before = left(shared)
    scratch.remove_abandoned(shared)
    assert left(shared) == before
    assert (precious / "owner.json").exists()


def test_links_inside_a_swept_folder_are_removed_and_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    path = told(tmp_path, pid=2**22 + 1)
    (path / "link").symlink_to(tmp_path / "mine")
    scratch.remove_abandoned(tmp_path)
    assert left(tmp_path) == ["mine"]
    assert left(tmp_path / "mine") == ["thesis"]


def test_only_the_owner_reads_a_temporary_folder(temporary):
    with scratch.open_temporary_folder("slurm") as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert (path / "owner.json").stat().st_mode & 0o777 == 0o600


def test_signals_are_handled_in_the_main_thread_while_a_folder_is_there_and_where_nobody_else_does(temporary):
    seen = {}

    def look():
        with scratch.open_temporary_folder("gram"):
            seen.update({number: signal.getsignal(number) for number in ENDINGS})

    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    try:
        look()
        assert signal.SIG_DFL not in seen.values()
        assert [signal.getsignal(number) for number in ENDINGS] == [signal.SIG_DFL] * 2
        other = threading.Thread(target=look)
        other.start()
        other.join()
        assert set(seen.values()) == {signal.SIG_DFL}
        signal.signal(signal.SIGTERM, own := lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
        look()
        assert seen == {signal.SIGTERM: own, signal.SIGHUP: signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_large_temporary_store_is_announced_with_its_size_and_place(temporary, rng, monkeypatch):
    monkeypatch.setattr(scratch, "_ANNOUNCED_BYTES", 10_000)
    X = rng.normal(size=(60, 2))
    words = rf"The Gram matrix takes 29.8 kB in {temporary}.*--workspace.*TMPDIR"
    with pytest.warns(TemporaryStoreWarning, match=words), build.build_stored_gram(kernels.Linear(), X, tile_rows=30):
        pass
    with pytest.warns(TemporaryStoreWarning, match=r"The Gram matrix takes 28.8 kB"):
        as_training_data(kernels.as_kernel("precomputed"), da.from_array(X @ X.T, chunks=20))
    monkeypatch.setattr(lazy_scoring, "SMALL_MODEL", 0)
    phi = dkfm.ExactFeatureMap("rbf").fit(X)
    with pytest.warns(TemporaryStoreWarning, match="The model for Dask's workers"):
        phi.transform(da.ones((4, 2)))


@pytest.mark.slow
def test_a_temporary_store_that_does_not_fit_is_refused_with_both_numbers_before_it_is_begun(
    temporary, rng, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, 20_000))
    X = rng.normal(size=(60, 2))
    words = r"The Gram matrix in .*29760 bytes.*20000 bytes.*workspace=.*--workspace.*TMPDIR"
    with pytest.raises(BudgetError, match=words), build.build_stored_gram(kernels.Linear(), X, tile_rows=30):
        pass
    with pytest.raises(BudgetError, match=r"28800 bytes.*20000 bytes.*TMPDIR"):
        as_training_data(kernels.as_kernel("precomputed"), da.from_array(X @ X.T, chunks=20))
    monkeypatch.setattr(lazy_scoring, "SMALL_MODEL", 0)
    phi = dkfm.ExactFeatureMap("rbf").fit(X)
    with pytest.raises(BudgetError, match="The model for Dask's workers"):
        phi.transform(da.ones((4, 2)))
    with pytest.raises(BudgetError, match="The model for the tasks"):
        dkfm.batch_score(phi, X, temporary / "out", progress=False)
    gc.collect()
    assert left(temporary) == []


def test_a_task_that_outlives_a_temporary_store_does_not_bring_it_back(tmp_path):
    root = Path(tmp_path / "gone" / "gram")
    with pytest.raises(StoreError, match="was removed meanwhile"), local.new_file(root / "c" / "0" / "0", root):
        pass
    assert left(tmp_path) == []


def test_a_build_goes_on_without_what_a_killed_one_had_half_written_an_hour_ago(tmp_path, rng):
    X = rng.normal(size=(40, 2))
    dkfm.build_gram(kernels.Linear(), X, tmp_path / "gram", tile_rows=20)
    old, new = (tmp_path / "gram" / f".workers.{digit * 32}.partial" for digit in "01")
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    dkfm.build_gram(kernels.Linear(), X, tmp_path / "gram", tile_rows=20)
    assert (old.exists(), new.exists()) == (False, True)
