"""Workers, drivers and schedulers are killed during fits by matrix-free products: the same bits, or one sentence."""

import signal
import sys
import time

import numpy as np
import pytest

import dkfm
from helpers import harness
from helpers.fit_driver import fit_command
from helpers.harness import TOTALS, Site, left, numbers, process, run, sentence, wait_for


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A folder with the rows of a fit, and the model of an undisturbed one on threads."""
    folder = tmp_path_factory.mktemp("fit")
    np.save(folder / "train.npy", np.random.default_rng(0).normal(size=(9000, 30)))
    run(command(folder, folder / "model"))
    return folder


def command(train, model, address="threads"):
    return fit_command("components", train / "train.npy", model, address=address)


@pytest.fixture
def temporary(tmp_path):
    """The temporary folder of drivers, in which nothing may stay."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def require_same(train, model):
    truth, found = dkfm.load(train / "model"), dkfm.load(model)
    np.testing.assert_array_equal(found.eigenvectors_, truth.eigenvectors_)


@numbers(2, 30)
def test_killed_workers_change_no_bit(train, temporary, tmp_path, faults):
    rng = np.random.default_rng(faults)
    with Site(tmp_path / "site") as site:
        while faults > 0:
            driver_command = command(train, tmp_path / "model", site.address)
            environment = harness.environment(TMPDIR=str(temporary))
            with process(driver_command, tmp_path / "driver.log", env=environment) as driver:
                while driver.poll() is None and faults > 0:
                    # Products go on while the right side of one is in the folder.
                    wait_for(lambda: driver.poll() is not None or list(temporary.glob("*/*")), "a product")
                    time.sleep(float(rng.uniform(0.0, 1.0)))
                    faults -= driver.poll() is None and site.kill_a_worker(rng)
                assert driver.wait(harness.LIMIT) == 0, (tmp_path / "driver.log").read_text()
            require_same(train, tmp_path / "model")
            assert left(temporary) == []


@numbers(1, 20)
def test_what_a_killed_driver_left_is_removed_by_the_next_one(train, temporary, tmp_path, faults):
    environment = harness.environment(TMPDIR=str(temporary))
    with Site(tmp_path / "site") as site:
        driver_command = command(train, tmp_path / "model", site.address)
        for _ in range(faults):
            with process(driver_command, env=environment) as driver:
                wait_for(lambda: driver.poll() is not None or list(temporary.glob("*/*")), "the rows")
                killed = driver.poll() is None
            TOTALS.faults += killed
        run(["env", f"TMPDIR={temporary}", *driver_command])
        require_same(train, tmp_path / "model")
    assert left(temporary) == []


def test_a_dead_scheduler_is_one_sentence_and_nothing_is_left(train, temporary, tmp_path):
    options = ["--method", "pca", "--components", "5", "--kernel", "gaussian", "--param", "sigma=5"]
    with Site(tmp_path / "site") as site:
        fit = [sys.executable, "-m", "dkfm", "fit", str(train / "train.npy"), str(tmp_path / "model"), *options]
        driver_command, log = [*fit, "--scheduler", site.address], tmp_path / "driver.log"
        with process(driver_command, log, env=harness.environment(TMPDIR=str(temporary))) as driver:
            wait_for(lambda: driver.poll() is not None or list(temporary.glob("*/*")), "the rows")
            site.scheduler.send_signal(signal.SIGKILL)
            assert driver.wait(harness.LIMIT) == 3, log.read_text()
        assert sentence(log.read_text()).startswith("ClusterError: ")
        assert not (tmp_path / "model").exists()
    assert left(temporary) == []


def pivots(folder, model, *options):
    fit = ["--method", "features", "--basis", "cholesky", "--kernel", "gaussian", "--param", "sigma=4", "--tol", "1e-3"]
    return [sys.executable, "-m", "dkfm", "fit", str(folder / "rows.npy"), str(model), "--overwrite", *fit, *options]


@numbers(2, 30)
def test_killed_workers_change_no_pivot(temporary, tmp_path, faults):
    rng = np.random.default_rng(faults)
    np.save(tmp_path / "rows.npy", rng.normal(size=(60_000, 5)))
    run(pivots(tmp_path, tmp_path / "truth"))
    truth = dkfm.load(tmp_path / "truth")
    with Site(tmp_path / "site") as site:
        while faults > 0:
            driver_command = pivots(tmp_path, tmp_path / "model", "--scheduler", site.address)
            environment = harness.environment(TMPDIR=str(temporary))
            with process(driver_command, tmp_path / "driver.log", env=environment) as driver:
                while driver.poll() is None and faults > 0:
                    wait_for(lambda: driver.poll() is not None or list(temporary.glob("*/*")), "a round")
                    time.sleep(float(rng.uniform(0.0, 1.0)))
                    faults -= driver.poll() is None and site.kill_a_worker(rng)
                assert driver.wait(harness.LIMIT) == 0, (tmp_path / "driver.log").read_text()
            found = dkfm.load(tmp_path / "model")
            np.testing.assert_array_equal(found.landmark_indices_, truth.landmark_indices_)
            np.testing.assert_array_equal(found.model_.head("features").weights, truth.model_.head("features").weights)
            assert left(temporary) == []
