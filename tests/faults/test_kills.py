"""Workers, drivers and schedulers are killed at random moments; the output is that of an undisturbed run."""

import signal
import sys
import time
from contextlib import ExitStack

import numpy as np
import pytest

from helpers import harness
from helpers.harness import TOTALS, Site, numbers, process, run, sentence, wait_for


@numbers(4, 200)
def test_killed_workers_cost_time_and_no_row(job, tmp_path, faults):
    rng, number = np.random.default_rng(faults), 0
    with Site(tmp_path / "site") as site:
        while faults > 0:
            target, number = tmp_path / f"scores{number}", number + 1
            with process(job.command(target, "--scheduler", site.address), tmp_path / "driver.log") as driver:
                wait_for((target / "zarr.json").exists, "the output")
                while driver.poll() is None and faults > 0:
                    job.wait_for_a_chunk(target, driver)  # or no chunk would ever be done on a busy machine
                    time.sleep(float(rng.uniform(0.0, 1.0)))
                    faults -= driver.poll() is None and site.kill_a_worker(rng)
                assert driver.wait(harness.LIMIT) == 0, (tmp_path / "driver.log").read_text()
            job.settle(target)


@numbers(3, 50)
def test_a_killed_driver_goes_on_with_the_same_command(job, tmp_path, faults):
    rng, target = np.random.default_rng(faults), tmp_path / "scores"
    with Site(tmp_path / "site") as site:
        command = job.command(target, "--scheduler", site.address)
        while faults > 0:
            for _ in range(min(faults, 5)):
                with process(command) as driver:
                    time.sleep(float(rng.uniform(1.0, 5.0)))
                    killed = driver.poll() is None
                TOTALS.faults += killed
                faults -= killed
                job.count_lost_work(target)
            run(command)
            job.settle(target)


@numbers(1, 20)
def test_a_dead_scheduler_is_one_sentence_and_another_one_goes_on(job, tmp_path, faults):
    rng, target = np.random.default_rng(faults), tmp_path / "scores"
    while faults > 0:
        with Site(tmp_path / "site") as site, ExitStack() as stack:
            log = tmp_path / "driver.log"
            log.unlink(missing_ok=True)
            driver = stack.enter_context(process(job.command(target, "--scheduler", site.address), log))
            job.wait_for_a_chunk(target, driver)
            time.sleep(float(rng.uniform(0.0, 1.0)))
            site.scheduler.send_signal(signal.SIGKILL)
            code = driver.wait(harness.LIMIT)
            if code == 0:
                job.settle(target)  # it was done
                continue
            TOTALS.faults += 1
            faults -= 1
            assert code == 3
            assert "ClusterError" in sentence(log.read_text())
            assert "The same command goes on" in log.read_text()
        if faults % 4 == 0:
            run(job.command(target))
            job.settle(target)


def test_two_drivers_on_one_output_both_finish_it(job, tmp_path):
    target = tmp_path / "scores"
    with ExitStack() as stack:
        drivers = [stack.enter_context(process(job.command(target), tmp_path / f"{i}.log")) for i in range(2)]
        codes = [driver.wait(harness.LIMIT) for driver in drivers]
    TOTALS.faults += 1
    said = [(tmp_path / f"{i}.log").read_text() for i in range(2)]
    assert codes[0] == 0 or codes[1] == 0, said
    for code, text in zip(codes, said, strict=True):
        assert code == 0 or "StoreExistsError" in sentence(text)  # both began to make it at the same moment
    run(job.command(target))
    job.settle(target)


def test_a_job_that_is_told_to_end_says_so_and_keeps_what_is_done(job, tmp_path):
    target, log = tmp_path / "scores", tmp_path / "driver.log"
    with process(job.command(target), log) as driver:
        for _ in range(4):  # more than there are threads: of some the driver has been told
            job.wait_for_a_chunk(target, driver)
        driver.send_signal(signal.SIGTERM)
        TOTALS.faults += 1
        assert driver.wait(60) == 130
    assert "goes on from there with the same command" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert "chunks were there" in run(job.command(target))
    job.settle(target)


KILLER = """
import os
from pathlib import Path

import numpy as np
from scipy.spatial.distance import cdist


def kernel(X, Y):
    if (np.abs(X[:, 0]) == 7.0).any() and (Path(__file__).parent / "armed").exists():
        os._exit(17)
    return np.exp(-cdist(X, Y))
"""


def test_a_task_that_kills_its_workers_is_named_and_all_else_is_done(tmp_path, monkeypatch):
    import dkfm

    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "killer.py").write_text(KILLER)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    from killer import kernel

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, 3))
    rows[1234, 0] = 7.0
    np.save(tmp_path / "rows.npy", rows)
    dkfm.KernelPCA(2, kernel=dkfm.kernels.Function(kernel)).fit(rows[:100]).save(tmp_path / "model")
    (folder / "armed").touch()
    target = tmp_path / "scores"
    with Site(folder) as site:
        command = [*harness.DKFM, "score", *map(str, (tmp_path / "model", tmp_path / "rows.npy", target))]
        command += ["--chunk-rows", "100", "--trusted", "killer:kernel", "--no-progress", "--scheduler", site.address]
        told = sentence(run(command, code=4))
        assert "rows 1200 to 1299 (chunks 12" in told
        assert "the other 19 chunks are done" in told
        TOTALS.faults += 1
        assert sorted(int(path.parent.name) for path in target.glob("scores/c/*/0")) == [
            n for n in range(20) if n != 12
        ]
        (folder / "armed").unlink()
        assert "19 of 20 chunks were there" in run(command)
    found = dkfm.open_scores(target).compute(scheduler="synchronous")
    assert np.isfinite(found).all()
    dkfm.verify_scores(target, tmp_path / "rows.npy", trusted=["killer:kernel"])


def test_workers_that_are_all_paused_are_a_sentence_within_the_stall_timeout(job, tmp_path):
    target = tmp_path / "scores"
    with Site(tmp_path / "site", 1, DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE="0.01") as site:
        time.sleep(3)
        start = time.monotonic()
        told = sentence(run(job.command(target, "--scheduler", site.address, "--stall-timeout", "4"), code=3))
        assert time.monotonic() - start < 30
    TOTALS.faults += 1
    assert "StalledError" in told
    assert "paused" in told


def test_workers_that_are_gone_are_a_sentence_within_the_stall_timeout(job, tmp_path):
    target = tmp_path / "scores"
    with Site(tmp_path / "site", 1) as site:
        log = tmp_path / "driver.log"
        with process(job.command(target, "--scheduler", site.address, "--stall-timeout", "6"), log) as driver:
            wait_for(lambda: job.chunks_there(target) > 0, "a chunk")
            harness.end(site.nannies[0])
            TOTALS.faults += 1
            assert driver.wait(60) == 3
    told = sentence(log.read_text())
    assert "StalledError" in told
    assert "there is no worker" in told
    run(job.command(target))
    job.settle(target)


@pytest.mark.timeout(300)
def test_a_hung_worker_s_chunks_are_run_elsewhere_and_what_it_writes_late_changes_nothing(job, tmp_path):
    import dkfm

    target = tmp_path / "scores"
    with Site(tmp_path / "site", 1) as site:
        site.start_worker(1, OPENBLAS_CORETYPE="Haswell")
        log = tmp_path / "driver.log"
        # If both workers are there before the job begins, it warns that they compute by different BLAS.
        command = [sys.executable, "-m", "dkfm", *job.command(target, "--scheduler", site.address)[len(harness.DKFM) :]]
        with process(command, log) as driver:
            wait_for(lambda: job.chunks_there(target) > 3, "some chunks")
            hung = site.worker_of(site.nannies[0])
            harness.os.kill(hung, signal.SIGSTOP)
            TOTALS.faults += 1
            try:
                assert driver.wait(120) == 0, log.read_text()
            finally:
                harness.os.kill(hung, signal.SIGCONT)
        time.sleep(3)  # it writes what it was at
        assert "were started again" in log.read_text()
    found = dkfm.verify_scores(target, job.folder / "rows.npy")
    assert found.worst < 1
