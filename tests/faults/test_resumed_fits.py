"""Drivers of fits and schedulers are killed again and again: each fit goes on, and does one product or round again."""

import shutil
import signal
import time
from contextlib import nullcontext

import numpy as np
import pytest

import dkfm
from helpers import harness
from helpers.fit_driver import fit_command
from helpers.harness import TOTALS, Site, left, numbers, process, run, wait_for


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with the rows of both fits, their models, and how many steps each took."""
    folder = tmp_path_factory.mktemp("fits")
    rng = np.random.default_rng(0)
    np.save(folder / "components.npy", rng.normal(size=(7000, 30)))
    np.save(folder / "pivots.npy", rng.normal(size=(100_000, 5)))
    for kind in ("components", "pivots"):
        run(driver(folder, kind, folder))
    return folder


def driver(folder, kind, target, address="threads"):
    paths = {"workspace": target / f"{kind}-work", "steps": target / f"{kind}-steps"}
    return fit_command(kind, folder / f"{kind}.npy", target / f"{kind}-model", **paths, address=address)


def steps_of(folder, kind):
    path = folder / f"{kind}-steps"
    return len(path.read_text()) if path.exists() else 0


def wait_for_steps(started, rng, folder, kind):
    """Wait until a driver has made some steps, or ended, and then for a moment."""
    wanted = steps_of(folder, kind) + int(rng.integers(2, 5))
    wait_for(lambda: started.poll() is not None or steps_of(folder, kind) >= wanted, "steps")
    time.sleep(float(rng.uniform(0.0, 0.1)))


@pytest.mark.parametrize("kind", ["components", "pivots"])
@pytest.mark.parametrize("where", ["threads", "cluster"])
@numbers(1, 15)
def test_a_killed_driver_goes_on(undisturbed, tmp_path, kind, where, faults):
    rng, killed, temporary = np.random.default_rng(faults), 0, tmp_path / "tmp"
    temporary.mkdir()
    environment = harness.environment(TMPDIR=str(temporary))
    with Site(tmp_path / "site") if where == "cluster" else nullcontext() as site:
        command = driver(undisturbed, kind, tmp_path, site.address if site else "threads")
        while not (tmp_path / f"{kind}-model").exists():
            with process(command, tmp_path / "driver.log", env=environment) as started:
                if killed < faults:
                    wait_for_steps(started, rng, tmp_path, kind)
                    if started.poll() is None:
                        started.send_signal(signal.SIGKILL)
                        killed += 1
                        continue
                assert started.wait(harness.LIMIT) == 0, (tmp_path / "driver.log").read_text()
    TOTALS.faults += killed
    assert killed > 0
    require_same(undisturbed, tmp_path, kind, killed)
    assert left(temporary) == []


def require_same(undisturbed, folder, kind, killed):
    """Require the bits of the fit that nothing disturbed, and one step more for each kill at the most."""
    truth, found = (dkfm.load(where / f"{kind}-model") for where in (undisturbed, folder))
    name = "scores" if kind == "components" else "features"
    np.testing.assert_array_equal(found.model_.head(name).weights, truth.model_.head(name).weights)
    assert steps_of(folder, kind) <= steps_of(undisturbed, kind) + killed
    assert left(folder / f"{kind}-work") == []


@pytest.mark.parametrize("kind", ["components", "pivots"])
@numbers(1, 15)
def test_after_a_dead_scheduler_the_next_driver_goes_on(undisturbed, tmp_path, kind, faults):
    rng, log, temporary, killed, of_this_fit = np.random.default_rng(faults), tmp_path / "log", tmp_path / "tmp", 0, 0
    temporary.mkdir()
    environment = harness.environment(TMPDIR=str(temporary))
    while killed < faults:
        log.unlink(missing_ok=True)
        with (
            Site(tmp_path / "site") as site,
            process(driver(undisturbed, kind, tmp_path, site.address), log, env=environment) as started,
        ):
            wait_for_steps(started, rng, tmp_path, kind)
            site.scheduler.send_signal(signal.SIGKILL)
            code = started.wait(harness.LIMIT)
        if code == 0:  # it had ended before
            require_same(undisturbed, tmp_path, kind, of_this_fit)
            shutil.rmtree(tmp_path / f"{kind}-model")
            (tmp_path / f"{kind}-steps").unlink()
            of_this_fit = 0
            continue
        killed, of_this_fit = killed + 1, of_this_fit + 1
        assert log.read_text().splitlines()[-1].startswith("dkfm.errors.ClusterError: ")
        assert not (tmp_path / f"{kind}-model").exists()
    TOTALS.faults += killed
    with Site(tmp_path / "site") as site:
        run(driver(undisturbed, kind, tmp_path, site.address))
    require_same(undisturbed, tmp_path, kind, of_this_fit)
    assert left(temporary) == []
