"""A real Slurm: workers and drivers in its queue are cancelled and put back into it, and no row is lost or wrong."""

import os
import re
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.needs import needs
from cluster.sockets import listening
from helpers import harness
from helpers.harness import process, run, wait_for

needs("munged", "slurmctld", "slurmd", "sbatch", "import dask_jobqueue", "import cryptography")

from cluster.slurm import processes_of, slurm  # noqa: E402  # only where there is one

ROOT = Path(__file__).parents[2]
ROWS, CHUNK_ROWS = 7_200, 150
"""Of a job that lasts until Slurm has done what is asked of it, on a quick machine too."""

YAML = """
jobqueue:
  slurm: {{cores: 1, memory: 1GB, walltime: "00:10:00", interface: lo, log-directory: {0}/logs, local-directory: {0}}}
distributed: {{deploy: {{lost-worker-timeout: 1s}}}}
dkfm: {{jobs: 2, wait: 90s}}
"""


@pytest.fixture(scope="module")
def queue():
    """A Slurm, of which the environment tells its commands."""
    with slurm() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        # The script says dkfm, as a user's does.
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        yield started


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return harness.Job.made(tmp_path_factory.mktemp("slurm"), ROWS, CHUNK_ROWS)


@pytest.fixture
def folder(queue, tmp_path):
    """Where a run has its file and its outputs; afterwards nothing of it is in the queue, or runs."""
    (tmp_path / "dkfm.yaml").write_text(YAML.format(tmp_path))
    yield tmp_path
    wait_for(lambda: not queue.jobs(), "the end of all jobs", 60)
    wait_for(lambda: not processes_of(tmp_path), "the end of all processes", 30)
    assert not list(tmp_path.glob(".dkfm-slurm-*"))


def scored(job, folder):
    return job.command(folder / "out", "--scheduler", f"slurm:{folder}/dkfm.yaml")


@contextmanager
def suspended(folder, number):
    """Suspend the nanny that a job of Slurm's runs and its worker, which does the chunks, while the context lasts."""
    there = [found for found in processes_of(folder) if found.environ().get("SLURM_JOB_ID") == number]
    nannies = [found for found in there if "distributed" in " ".join(found.cmdline())]
    workers = [worker for nanny in nannies for worker in nanny.children(recursive=True)]
    assert workers
    for found in nannies + workers:
        found.suspend()
    try:
        yield
    finally:
        for found in nannies + workers:
            found.resume()


def submit(queue, job, folder):
    """Submit the driver by the script of cluster/slurm; return the number of its job."""
    arguments = [*map(str, job.paths(folder / "out")), "--chunk-rows", str(CHUNK_ROWS)]
    script = ROOT / "cluster/slurm/score.sbatch"
    return queue.ask("sbatch", "--parsable", "--chdir", str(folder), "--mem=1G", str(script), *arguments)


def wait_for_the_end(queue, number):
    wait_for(lambda: state(queue, number)[0] in {"COMPLETED", "FAILED"}, "the end of the driver", harness.LIMIT)


def state(queue, number):
    """Return what Slurm says of a job: its state, and how often it was put back."""
    said = queue.ask("scontrol", "--oneliner", "show", "job", number)
    return re.search(r"JobState=(\w+)", said)[1], int(re.search(r"Restarts=(\d+)", said)[1])


def wait_for_chunks(job, folder, number=4):
    wait_for(lambda: job.chunks_there(folder / "out") >= number, "chunks", harness.LIMIT)


def test_a_worker_job_that_is_cancelled_is_replaced_and_costs_no_row(queue, job, folder):
    with process(scored(job, folder), folder / "log") as driver:
        wait_for_chunks(job, folder)
        first = {number for number, _ in queue.jobs("dask-worker")}
        assert len(first) == 2
        assert listening(processes_of(folder)) == {"127.0.0.1"}
        with suspended(folder, max(first)):  # or it might do all that is left before another job is there
            queue.ask("scancel", min(first))
            harness.TOTALS.faults += 1
            wait_for(lambda: {number for number, _ in queue.jobs("dask-worker")} - first, "another job")
        assert driver.wait(harness.LIMIT) == 0, (folder / "log").read_text()
    assert "every chunk as it was written" in run([*harness.DKFM, "verify", str(folder / "out")])
    job.settle(folder / "out")


@pytest.mark.parametrize("how", [("scontrol", "requeue"), ("scancel", "--batch", "--signal=USR1")], ids=" ".join)
def test_a_driver_job_that_goes_back_into_the_queue_goes_on_from_there(queue, job, folder, how):
    number = submit(queue, job, folder)
    wait_for_chunks(job, folder)
    queue.ask(*how, number)
    harness.TOTALS.faults += 1
    wait_for(lambda: state(queue, number)[1] == 1, "the requeue")
    wait_for(lambda: state(queue, number)[0] == "PENDING", "its place in the queue")
    before = job.chunks_there(folder / "out")
    # Slurm lets it wait for two minutes; in the very second of its end a node would take it for the one that ended.
    queue.ask("scontrol", "update", f"JobId={number}", "StartTime=now+3")
    wait_for_the_end(queue, number)
    log = (folder / f"dkfm-{number}.log").read_text()
    assert state(queue, number) == ("COMPLETED", 1), log
    assert "Interrupted; dkfm score goes on from there with the same command." in log
    assert re.search(r"7,200 rows, (\d+) of 48 chunks were there", log), log
    assert before < ROWS // CHUNK_ROWS
    assert "Traceback" not in log
    job.settle(folder / "out")


def test_a_driver_job_that_is_cancelled_takes_its_workers_along_and_the_next_one_goes_on(queue, job, folder):
    number = submit(queue, job, folder)
    wait_for_chunks(job, folder)
    queue.ask("scancel", number)
    harness.TOTALS.faults += 1
    wait_for(lambda: not queue.jobs(), "the end of all jobs", 30)
    assert state(queue, number) == ("CANCELLED", 0)
    assert not list(folder.glob(".dkfm-slurm-*"))
    again = submit(queue, job, folder)
    wait_for_the_end(queue, again)
    log = (folder / f"dkfm-{again}.log").read_text()
    assert state(queue, again) == ("COMPLETED", 0), log
    assert "chunks were there" in log
    job.settle(folder / "out")


def test_workers_leave_a_driver_that_was_killed(queue, job, folder):
    with process(scored(job, folder), folder / "log") as driver:
        wait_for_chunks(job, folder)
        driver.send_signal(signal.SIGKILL)
        harness.TOTALS.faults += 1
        driver.wait(30)
    wait_for(lambda: not queue.jobs(), "the end of all jobs", 100)
    job.count_lost_work(folder / "out")
    run(job.command(folder / "out"))
    job.settle(folder / "out")
    (left,) = folder.glob(".dkfm-slurm-*")  # nobody was there to remove it
    shutil.rmtree(left)
