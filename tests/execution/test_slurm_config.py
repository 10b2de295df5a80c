"""Files of Slurm's clusters: what is refused, in which words; what a cluster does, with commands that only write."""

import logging
import os
import re
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from dkfm.errors import ClusterError, InvalidInputError, MissingExtraError
from dkfm.execution.clusters import slurm
from dkfm.execution.clusters.connect import connect
from dkfm.execution.clusters.slurm import slurm_cluster
from dkfm.execution.clusters.slurm_config import read_slurm_file
from helpers.harness import wait_for


def section(more=""):
    """Return what a job is, for a machine of its own."""
    return f'jobqueue: {{slurm: {{cores: 4, memory: 8GB, walltime: "02:00:00", interface: lo{more}}}}}\n'


@pytest.fixture
def file(tmp_path):
    """A file of a cluster, from its text."""

    def written(text):
        path = tmp_path / "dkfm.yaml"
        path.write_text(text)
        return str(path)

    return written


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Slurm's sbatch and scancel, which write down what they were called with, and do nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "scancel"):
        script = folder / name
        # A process's number serves as that of the job, which two at once must not share.
        script.write_text(
            f'#!/bin/sh\necho {name} "$1" $$ >> "{tmp_path}/calls"\ncat "$1" >> "{tmp_path}/scripts" 2>/dev/null\n'
            "echo Submitted batch job $$\n"
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dkfm: {jobs: [", "is no YAML in line 1: expected"),
        ("\x00", "is no YAML"),
        ("just words", "must be a file of Dask's configuration"),
        ("", "must be a file of Dask's configuration"),
        ("1: 2", "must be a file of Dask's configuration"),
        ("dkfm: !!python/object/apply:os.getcwd []", "is no YAML in line 1: could not determine a constructor"),
        ("dkfm: 3", "must be a section of jobs, minimum-jobs, maximum-jobs, wait, not 3"),
        ("dkfm: {job: 3}", "not {'job': 3}"),
        ("dkfm: {jobs: two}", "jobs in dkfm of .* must be a whole number from 1 on, not 'two'"),
        ("dkfm: {jobs: 0}", "jobs in dkfm of .* must be a whole number from 1 on, not 0"),
        ("dkfm: {jobs: true}", "jobs in dkfm of .* must be a whole number from 1 on, not True"),
        ("dkfm: {minimum-jobs: 0, maximum-jobs: 9}", "minimum-jobs in dkfm of .* from 1 on, not 0"),
        ("dkfm: {minimum-jobs: 3, maximum-jobs: 2}", "has minimum-jobs 3, more than maximum-jobs 2"),
        ("dkfm: {jobs: 3, maximum-jobs: 4}", "has jobs, or minimum-jobs and maximum-jobs, not both"),
        ("dkfm: {wait: soon}", "wait in dkfm of .* must be a time, as 90m or 2h, not 'soon'"),
        ("dkfm: {wait: -1}", "must be a time, as 90m or 2h, not -1"),
        ("dkfm: {wait: .inf}", "must be a time, as 90m or 2h, not inf"),
        ("dkfm: {wait: yes}", "must be a time, as 90m or 2h, not True"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_sentence(file, text, said):
    with pytest.raises(InvalidInputError, match=said) as refused:
        read_slurm_file(file(text))
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_a_named_error(tmp_path):
    with pytest.raises(InvalidInputError, match=r"none\.yaml cannot be read: No such file or directory"):
        read_slurm_file(str(tmp_path / "none.yaml"))
    with pytest.raises(InvalidInputError, match="cannot be read: Is a directory"):
        read_slurm_file(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "minimum", "maximum", "wait"),
    [
        ("dkfm:", 1, 1, 3600),
        ("jobqueue: {}", 1, 1, 3600),
        ("dkfm: {jobs: 3, wait: 2h}", 3, 3, 7200),
        ("dkfm: {maximum-jobs: 20, wait: 90}", 1, 20, 90),
        ("dkfm: {minimum-jobs: 2}", 2, 2, 3600),
    ],
)
def test_a_file_says_how_many_jobs_and_how_long_to_wait(file, text, minimum, maximum, wait):
    spec = read_slurm_file(file(text))
    assert (spec.min_jobs, spec.max_jobs, spec.first_worker_timeout_seconds) == (minimum, maximum, wait)
    assert "dkfm" not in spec.dask_config


def test_without_slurm_a_cluster_is_refused_by_name(file, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ClusterError, match="sbatch is not on the PATH"), slurm_cluster(file("dkfm: {jobs: 1}")):
        pass


@pytest.mark.parametrize("package", ["dask_jobqueue", "cryptography"])
def test_a_package_that_is_missing_names_the_extra(commands, file, monkeypatch, package):
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] == package or name == "dkfm.execution.clusters.slurm_job_classes"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dkfm\[slurm\]'"), slurm_cluster(file("dkfm: {}")):
        pass


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dkfm:", "must have cores and memory"),
        ("jobqueue: 3", "jobqueue in .* must have a section slurm"),
        ("jobqueue: {slurm: }", "jobqueue in .* must have a section slurm"),
        ("jobqueue: {slurm: {walltme: 1h}}", "has walltme, unknown to dask-jobqueue"),
        ("jobqueue: {slurm: {cores: 1.5}}", "cores in jobqueue.slurm of .* whole number from 1 on, not 1.5"),
        ("jobqueue: {slurm: {cores: 1, memory: much}}", "memory in jobqueue.slurm of .* must be as 16GB, not 'much'"),
        ("jobqueue: {slurm: {cores: 1, memory: 16}}", "memory in jobqueue.slurm of .* must be a text, not 16"),
        ("jobqueue: {slurm: {walltime: 12:00:00}}", "walltime .* must be a text, not 43200; put it in quotes"),
        ("jobqueue: {slurm: {worker-extra-args: --lifetime 1h}}", "worker-extra-args .* must be a list of texts"),
        ("jobqueue: {slurm: {cores: 1, memory: 1GB, scheduler-options: 3}}", "scheduler-options .* be a section"),
        (
            "jobqueue: {slurm: {cores: 1, memory: 1GB, scheduler-options: {dashboard_address: ':8787'}}}",
            "must be on loopback, as 127.0.0.1:8787, not :8787",
        ),
        (
            "jobqueue: {slurm: {cores: 1, memory: 1GB, scheduler-options: {protocol: 'tcp://'}}}",
            "must not have protocol: dkfm uses TLS",
        ),
        (
            "jobqueue: {slurm: {cores: 1, memory: 1GB, shared-temp-directory: /no/such/folder}}",
            "must be a folder that is there, not /no/such/folder",
        ),
        (
            "jobqueue: {slurm: {cores: 1, memory: 1GB, interface: no-such}}",
            "The cluster of .* does not start: .*no-such",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_anything_is_submitted(commands, file, text, said):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    with pytest.raises((InvalidInputError, ClusterError), match=said), slurm_cluster(file(text)):
        pass
    assert not (commands / "calls").exists()
    assert not list(commands.glob(".dkfm-slurm-*"))


def test_jobs_are_submitted_and_cancelled_also_after_an_error_and_nothing_is_left(commands, file):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    import dask

    asked = ("distributed.scheduler.allowed-failures", "jobqueue.slurm.cores")
    before = [dask.config.get(key, None) for key in asked]
    shared = commands / "shared"
    shared.mkdir()

    def fail(cluster, wait):
        assert wait == 3600
        (folder,) = shared.iterdir()
        modes = {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()}
        assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})
        assert cluster.scheduler_address.startswith("tls://127.0.0.1:")
        assert cluster.dashboard_link.startswith("http://127.0.0.1:")
        assert cluster.scheduler.allowed_failures == 10
        assert [dask.config.get(key) for key in asked] == [10, 4]
        raise KeyError

    path = file(section(f", shared-temp-directory: {shared}") + "dkfm: {jobs: 2}")
    with pytest.raises(KeyError), slurm_cluster(path) as (cluster, wait):
        fail(cluster, wait)
    calls = [line.split() for line in (commands / "calls").read_text().splitlines()]
    submitted = {number for name, _, number in calls if name == "sbatch"}
    assert len(submitted) == 2
    assert {number for name, number, _ in calls if name == "scancel"} == submitted
    script = (commands / "scripts").read_text()
    assert "#SBATCH -t 02:00:00" in script
    assert "--nthreads 4 --memory-limit 7.45GiB --nanny --death-timeout 60 --dashboard-address 127.0.0.1:0" in script
    assert f"--tls-key {shared}/.dkfm-slurm-" in script
    assert list(shared.iterdir()) == []
    assert [dask.config.get(key, None) for key in asked] == before


def test_what_a_file_says_of_dask_stands(commands, file):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    path = file(section(", processes: 2") + "distributed: {scheduler: {allowed-failures: 40}}")
    with slurm_cluster(path) as (cluster, _):
        assert cluster.scheduler.allowed_failures == 40
    assert "--nworkers 2" in (commands / "scripts").read_text()


def test_a_job_that_slurm_does_not_take_is_told_in_its_words(commands, file):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    (commands / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: gpu' >&2\nexit 1\n")
    path = file(section() + "dkfm: {jobs: 2}")
    said = "does not take the job that .* describes: sbatch: error: invalid partition: gpu.$"
    with pytest.raises(ClusterError, match=said), slurm_cluster(path):
        pass
    assert not list(commands.glob(".dkfm-slurm-*"))


@pytest.mark.slow
def test_a_submission_that_fails_in_the_middle_is_repeated_and_fails_nothing(commands, file, monkeypatch):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    from dkfm.execution.clusters import slurm_job_classes

    monkeypatch.setattr(slurm_job_classes, "_RETRY_AFTER", 0.5)
    with slurm_cluster(file(section() + "dkfm: {jobs: 1}")) as (cluster, _):
        works = (commands / "bin/sbatch").read_text()
        (commands / "bin/sbatch").write_text(f"#!/bin/sh\ntouch {commands}/refused\nexit 1\n")
        del cluster.workers[next(iter(cluster.workers))]  # as where a worker was lost
        wait_for((commands / "refused").exists, "a submission that fails")
        (commands / "bin/sbatch").write_text(works)
        wait_for(lambda: (commands / "calls").read_text().count("sbatch") == 2, "another submission")
    with slurm_cluster(file(section() + "dkfm: {jobs: 1}")) as (cluster, _):
        (commands / "refused").unlink()
        (commands / "bin/sbatch").write_text(f"#!/bin/sh\ntouch {commands}/refused\nexit 1\n")
        del cluster.workers[next(iter(cluster.workers))]
        wait_for((commands / "refused").exists, "a submission that fails")


def test_an_interruption_while_jobs_are_cancelled_waits_until_they_are(commands, file):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    signal.signal(signal.SIGINT, signal.default_int_handler)  # that import, here or in another test, replaces it
    with pytest.raises(KeyboardInterrupt), slurm_cluster(file(section() + "dkfm: {jobs: 2}")) as (cluster, _):
        interrupting(commands / "bin/scancel")
    assert cluster.status.name == "closed"
    assert (commands / "calls").read_text().count("scancel") == 2
    assert not list(commands.glob(".dkfm-slurm-*"))


def test_a_cluster_is_closed_once_though_an_interruption_comes_while_its_thread_starts(monkeypatch):
    interruptions, closed = iter([KeyboardInterrupt, SystemExit]), []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *task):
            super().submit(*task)
            for error in interruptions:
                raise error

    monkeypatch.setattr(slurm, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(SystemExit):
        slurm._close(SimpleNamespace(close=lambda: closed.append(1)))
    assert closed == [1]


def test_an_error_while_jobs_are_cancelled_is_raised():
    with pytest.raises(OSError, match="no scancel"):
        slurm._close(SimpleNamespace(close=Mock(side_effect=OSError("no scancel"))))


def interrupting(script):
    """Let a command send this process what Ctrl-C does, and take its time."""
    script.write_text(script.read_text().replace("#!/bin/sh", f"#!/bin/sh\nkill -INT {os.getpid()}; sleep 1"))


@pytest.mark.slow
def test_ctrl_c_stays_with_the_program(commands, file):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    code = "import signal; from dkfm.execution.clusters.slurm import slurm_cluster\n"
    code += f"with slurm_cluster({file(section())!r}): pass\n"
    code += "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_in_another_thread_it_is_refused_by_name(commands, file):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    code = f"""
import threading
from dkfm.errors import ClusterError
from dkfm.execution.clusters.slurm import is_no_late_connection, slurm_cluster

def start():
    try:
        with slurm_cluster({file(section())!r}):
            pass
    except ClusterError as error:
        print(error)

thread = threading.Thread(target=start)
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "is started in the main thread of a program" in done.stdout
    assert done.stderr == ""


def test_only_who_has_the_certificates_gets_in(commands, file):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    from distributed import Client

    with slurm_cluster(file(section())) as (cluster, _):
        address = cluster.scheduler_address
        with Client(cluster, set_as_default=False) as client:
            assert client.scheduler_info()["address"] == address
        for where, security in [(address, "Security.temporary()"), (address.replace("tls", "tcp"), "None")]:
            code = f"from distributed import Client, Security; Client({where!r}, timeout=3, security={security})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 1
            assert re.search(r"^(OSError|TimeoutError|.*Comm\w+Error): ", done.stderr, re.M), done.stderr


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [(ValueError("invalid operation on non-started TCPListener"), False), (ValueError("x"), True)],
)
def test_a_worker_that_connects_at_the_end_leaves_no_traceback(error, is_shown, caplog):
    logger = logging.getLogger("tornado.application")
    slurm._close(SimpleNamespace(close=lambda: None))
    try:
        logger.error("Exception in callback", exc_info=error)
        logger.error("without an exception")
    finally:
        logger.removeFilter(slurm.is_no_late_connection)
    assert len(caplog.records) == 1 + is_shown


@pytest.mark.parametrize("name", ["distributed.batched", "distributed.client", "distributed.comm.tcp"])
def test_a_connection_that_breaks_after_the_end_leaves_no_traceback(commands, file, caplog, name):
    pytest.importorskip("dask_jobqueue")  # reason: it is an extra
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.INFO)  # another test may have silenced it
    try:
        missing = pytest.raises(ClusterError, match="No worker of")
        with missing, connect(f"slurm:{file(section())}", set_as_default=False, wait_for_workers=0.1):
            pass
        logger.error("Batched Comm Closed", exc_info=ValueError("closed"))
    finally:
        logger.setLevel(before)
    assert not [record for record in caplog.records if record.name == name]
