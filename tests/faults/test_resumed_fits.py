"""Drivers of fits are killed again and again: each goes on from its workspace, and does one product or round again."""

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
            before = steps_of(tmp_path, kind)
            with process(command, tmp_path / "driver.log", env=environment) as started:
                if killed < faults:
                    wait_for(
                        lambda done=before: started.poll() is not None or steps_of(tmp_path, kind) > done, "a step"
                    )
                    time.sleep(float(rng.uniform(0.0, 0.5)))
                    if started.poll() is None:
                        started.send_signal(signal.SIGKILL)
                        killed += 1
                        continue
                assert started.wait(harness.LIMIT) == 0, (tmp_path / "driver.log").read_text()
    TOTALS.faults += killed
    assert killed > 0
    truth, found = (dkfm.load(folder / f"{kind}-model") for folder in (undisturbed, tmp_path))
    name = "scores" if kind == "components" else "features"
    np.testing.assert_array_equal(found.model_.head(name).weights, truth.model_.head(name).weights)
    assert steps_of(tmp_path, kind) <= steps_of(undisturbed, kind) + killed
    assert left(tmp_path / f"{kind}-work") == []
    assert left(temporary) == []
