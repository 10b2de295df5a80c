"""Workers, drivers and schedulers are killed during factors in tiles: the same bits, and no tile is computed twice."""

import signal
import sys
import time
from contextlib import nullcontext

import numpy as np
import pytest

import dkfm
from helpers import harness
from helpers.fit_driver import fit_command
from helpers.harness import TOTALS, Site, left, numbers, process, run, wait_for

TILES = {"regression": 36, "map": 67}
"""Files of a factor, and of a map the chunks of its root."""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A folder with the rows of a fit, and the model of an undisturbed one on threads."""
    folder = tmp_path_factory.mktemp("fit")
    np.save(folder / "train.npy", np.random.default_rng(0).normal(size=(4000, 30)))
    for kind in TILES:
        run(fit_command(kind, folder / "train.npy", folder / kind))
    return folder


@pytest.fixture
def temporary(tmp_path):
    """The temporary folder of drivers, in which nothing may stay."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def command(kind, train, target, address="threads"):
    return fit_command(kind, train / "train.npy", target / "model", workspace=target / "work", address=address)


def tiles_of(target):
    files = (path for name in ("factor", "root") for path in target.glob(f"work/{name}-*/{name}/c/*/*"))
    return {path: path.stat().st_ino for path in files if path.name.isdigit()}


def require_same(kind, train, target):
    truth, found = dkfm.load(train / kind), dkfm.load(target / "model")
    if kind == "map":
        weights, expected = (each.model_.head("features").weights for each in (found, truth))
        np.testing.assert_array_equal(weights, expected)
    else:
        np.testing.assert_array_equal(found.dual_coef_, truth.dual_coef_)
        np.testing.assert_array_equal(found.loo_predictions_, truth.loo_predictions_)
    kept = {"regression": ["factor"], "map": ["factor", "root"]}[kind]
    assert sorted(path.name.split("-")[0] for path in (target / "work").iterdir()) == kept


def wait_for_a_tile(target, driver):
    before = len(tiles_of(target))
    wait_for(lambda: driver.poll() is not None or len(tiles_of(target)) != before, "a tile")


@pytest.mark.parametrize("kind", TILES)
@numbers(1, 20)
def test_killed_workers_change_no_bit(train, temporary, tmp_path, kind, faults):
    rng = np.random.default_rng(faults)
    with Site(tmp_path / "site") as site:
        while faults > 0:
            if (tmp_path / "work").exists():
                (tmp_path / "work").rename(tmp_path / f"done-{faults}")
            environment = harness.environment(TMPDIR=str(temporary))
            with process(
                command(kind, train, tmp_path, site.address), tmp_path / "driver.log", env=environment
            ) as driver:
                while driver.poll() is None and faults > 0 and len(tiles_of(tmp_path)) < TILES[kind]:
                    wait_for_a_tile(tmp_path, driver)
                    time.sleep(float(rng.uniform(0.0, 0.3)))
                    faults -= driver.poll() is None and site.kill_a_worker(rng)
                assert driver.wait(harness.LIMIT) == 0, (tmp_path / "driver.log").read_text()
            require_same(kind, train, tmp_path)
            assert left(temporary) == []


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("where", ["threads", "cluster"])
@numbers(1, 20)
def test_a_killed_driver_goes_on_with_the_tiles_that_are_there(train, temporary, tmp_path, where, kind, faults):
    rng, killed = np.random.default_rng(faults), 0
    environment = harness.environment(TMPDIR=str(temporary))
    with Site(tmp_path / "site") if where == "cluster" else nullcontext() as site:
        address = site.address if site else "threads"
        while not (tmp_path / "model").exists():
            there = tiles_of(tmp_path)
            with process(command(kind, train, tmp_path, address), tmp_path / "driver.log", env=environment) as driver:
                if killed < faults and len(there) < TILES[kind]:
                    wait_for_a_tile(tmp_path, driver)
                    time.sleep(float(rng.uniform(0.0, 0.05)))
                    if driver.poll() is None:
                        driver.send_signal(signal.SIGKILL)
                        killed += 1
                        continue
                assert driver.wait(harness.LIMIT) == 0, (tmp_path / "driver.log").read_text()
            assert there.items() <= tiles_of(tmp_path).items(), "a tile was computed again"
    TOTALS.faults += killed
    assert killed > 0
    require_same(kind, train, tmp_path)
    assert left(temporary) == []


@numbers(1, 20)
def test_after_a_dead_scheduler_the_next_driver_goes_on(train, temporary, tmp_path, faults):
    rng, killed, log = np.random.default_rng(faults), 0, tmp_path / "driver.log"
    environment = harness.environment(TMPDIR=str(temporary))
    while killed < faults:
        there = tiles_of(tmp_path)
        with (
            Site(tmp_path / "site") as site,
            process(command("regression", train, tmp_path, site.address), log, env=environment) as driver,
        ):
            wait_for_a_tile(tmp_path, driver)
            time.sleep(float(rng.uniform(0.0, 0.3)))
            site.scheduler.send_signal(signal.SIGKILL)
            code = driver.wait(harness.LIMIT)
        assert there.items() <= tiles_of(tmp_path).items(), "a tile was computed again"
        if code == 0:  # it had ended before
            require_same("regression", train, tmp_path)
            (tmp_path / "model").rename(tmp_path / f"model-{killed}")
            (tmp_path / "work").rename(tmp_path / f"done-{killed}")
            continue
        killed += 1
        assert log.read_text().splitlines()[-1].startswith("dkfm.errors.ClusterError: ")
        assert not (tmp_path / "model").exists()
    TOTALS.faults += killed
    there = tiles_of(tmp_path)
    run(command("regression", train, tmp_path))
    assert there.items() <= tiles_of(tmp_path).items(), "a tile was computed again"
    require_same("regression", train, tmp_path)
    assert left(temporary) == []


def test_a_dead_scheduler_is_one_sentence_and_the_tiles_stay(train, temporary, tmp_path):
    np.save(tmp_path / "y.npy", np.arange(4000.0))
    fit = [
        sys.executable,
        "-m",
        "dkfm",
        "fit",
        str(train / "train.npy"),
        str(tmp_path / "model"),
        "--method",
        "ridge",
        "--solver",
        "tiled",
    ]
    options = ["--kernel", "gaussian", "--param", "sigma=5", "--targets", str(tmp_path / "y.npy"), "--tile-rows", "500"]
    log = tmp_path / "driver.log"
    with Site(tmp_path / "site") as site:
        place = ["--workspace", str(tmp_path / "work"), "--scheduler", site.address]
        environment = harness.environment(TMPDIR=str(temporary))
        with process([*fit, *options, *place], log, env=environment) as driver:
            wait_for_a_tile(tmp_path, driver)
            site.scheduler.send_signal(signal.SIGKILL)
            assert driver.wait(harness.LIMIT) == 3, log.read_text()
    assert harness.sentence(log.read_text()).startswith("ClusterError: ")
    assert not (tmp_path / "model").exists()
    there = tiles_of(tmp_path)
    assert there
    run([*fit, *options, "--workspace", str(tmp_path / "work")])
    assert there.items() <= tiles_of(tmp_path).items()
    assert left(temporary) == []
