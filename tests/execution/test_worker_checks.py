"""What every worker is asked before the first task, on real clusters; and what becomes of one that is not fit."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import ClusterError, UnfitWorkerError
from dkfm.execution import worker_checks
from dkfm.execution.worker_checks import WorkerRequirements
from dkfm.scoring import receipts
from dkfm.sources.opening import open_source
from dkfm.storage.output_files import LocalOutput
from helpers import harness


@pytest.fixture
def requirements(tmp_path, rng):
    np.save(tmp_path / "rows.npy", rng.normal(size=(20, 3)))
    source, place = open_source(tmp_path / "rows.npy"), LocalOutput(tmp_path / "store")
    (tmp_path / "store").mkdir()
    place.write_file("probe", b"text")
    return WorkerRequirements(place, "probe", b"text", worker_checks.local_versions(), 1000, 0, source, source.stamp())


def changed(requirements, **values):
    return WorkerRequirements(
        **{field: getattr(requirements, field) for field in requirements.__dataclass_fields__}
        | {"probe": "probe"}
        | values
    )


def test_workers_that_are_fit_are_taken(threaded_client, requirements):
    worker_checks.find_unfit_workers(threaded_client, requirements)


@pytest.mark.parametrize("name", ["python", *worker_checks._PACKAGES])
def test_another_version_of_any_package_is_told_with_both(threaded_client, requirements, name):
    had = f"no {name}" if requirements.versions[name] is None else f"{name} {requirements.versions[name]}"
    for version, told in (("9.9", "9.9"), *([] if requirements.versions[name] is None else [(None, "has none")])):
        other = changed(requirements, versions=requirements.versions | {name: version})
        with pytest.raises(UnfitWorkerError, match=rf"^The worker inproc://\S+ has {had}, and the driver {told}; "):
            worker_checks.find_unfit_workers(threaded_client, other)


def test_another_patch_of_python_is_the_same_python():
    assert worker_checks.local_versions()["python"] == ".".join(map(str, sys.version_info[:2]))


def test_versions_are_looked_up_once_a_process(monkeypatch):
    """Looking up a version reads the package's metadata (2 ms each), at both ends of a job on a cluster."""
    before = worker_checks.local_versions()
    monkeypatch.setattr(worker_checks.metadata, "version", lambda name: pytest.fail(f"{name} was looked up again"))
    assert worker_checks.local_versions() == before


def test_a_worker_that_sees_another_store_is_named(threaded_client, requirements, tmp_path):
    (tmp_path / "other").mkdir()
    for text in (None, b"texts", b"tex"):  # no probe, another one, a part of it
        if text is not None:
            LocalOutput(tmp_path / "other").write_file("probe", text)
        other = changed(requirements, location=LocalOutput(tmp_path / "other"))
        with pytest.raises(
            UnfitWorkerError, match=r"^The worker inproc://\S+ does not see the same .*other as the driver"
        ):
            worker_checks.find_unfit_workers(threaded_client, other)


def test_a_worker_that_sees_other_rows_or_no_model_is_named(threaded_client, requirements, tmp_path):
    with pytest.raises(
        UnfitWorkerError, match=r"The worker inproc://\S+ does not see the same .*rows.npy as the driver"
    ):
        worker_checks.find_unfit_workers(threaded_client, changed(requirements, stamp="another"))
    (tmp_path / "rows.npy").unlink()
    with pytest.raises(UnfitWorkerError, match=r"The worker inproc://\S+ cannot take tasks: .*rows.npy"):
        worker_checks.find_unfit_workers(threaded_client, requirements)
    with pytest.raises(UnfitWorkerError, match="does not see the model /nowhere"):
        worker_checks.find_unfit_workers(threaded_client, changed(requirements, source=None, model_path="/nowhere"))


def test_a_worker_with_too_little_memory_is_named_with_both_numbers(threaded_client, requirements):
    with pytest.raises(UnfitWorkerError, match=r"has \S+ MB .* for a task of 1,000,000,000 MB"):
        worker_checks.find_unfit_workers(threaded_client, changed(requirements, task_bytes=10**15))


def test_a_worker_whose_blas_does_not_obey_is_named(threaded_client, requirements, monkeypatch):
    monkeypatch.setattr(worker_checks, "measure_task_blas_threads", lambda: 8)
    with pytest.raises(UnfitWorkerError, match="computes with 8 BLAS threads a task; start it with OMP_NUM_THREADS=1"):
        worker_checks.find_unfit_workers(threaded_client, requirements)


def test_workers_of_which_none_answers_are_an_error(threaded_client, requirements, monkeypatch):
    monkeypatch.setattr(worker_checks, "_ANSWER_TIMEOUT", 0.0)
    with pytest.raises(ClusterError, match="No worker has answered"):
        worker_checks.find_unfit_workers(threaded_client, requirements)


@pytest.mark.slow
def test_a_mark_is_gone_with_the_job_whatever_its_end(threaded_client, tmp_path, rng):
    pca = dkfm.KernelPCA(1, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(20, 3)))
    Z = rng.normal(size=(50, 3))
    dkfm.batch_score(pca, Z, tmp_path / "good", chunk_rows=10, progress=False)
    Z[7] = np.nan
    with pytest.raises(dkfm.errors.InvalidInputError):
        dkfm.batch_score(pca, Z, tmp_path / "bad", chunk_rows=10, progress=False)
    for name in ("good", "bad"):
        segments = [path.read_text() for path in (tmp_path / name / "_journal").glob("*")]
        assert all(json.loads(text)["receipts"] != "[]" for text in segments)


def _installed(folder, name, version):
    """Let a folder look as if it had a package, for those who import from it first."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def _lacking_dkfm(folder):
    (folder / "dkfm").mkdir(parents=True)
    (folder / "dkfm/__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'dkfm'\", name='dkfm')\n")


@pytest.mark.slow
def test_workers_of_other_versions_score_nothing(tmp_path):
    job = harness.Job.made(tmp_path, rows=1000)
    _installed(tmp_path / "site", "numpy", "9.9")
    with harness.Site(tmp_path / "site", workers=1) as site:  # its folder comes first among what a worker imports
        for dry in ([], ["--dry-run"]):
            told = harness.run(job.command(tmp_path / "out", "--scheduler", site.address, *dry), code=3)
            assert harness.sentence(told).startswith("UnfitWorkerError: The worker tcp://127.0.0.1:")
            assert "has numpy 9.9, and the driver 2." in told
            assert not list((tmp_path / "out").rglob("c/*"))


@pytest.mark.slow
def test_workers_without_dkfm_are_named(tmp_path):
    job = harness.Job.made(tmp_path, rows=1000)
    _lacking_dkfm(tmp_path / "site")
    with harness.Site(tmp_path / "site", workers=1) as site:
        told = harness.run(job.command(tmp_path / "out", "--scheduler", site.address), code=3)
    told = harness.sentence(told)
    assert "The worker tcp://127.0.0.1:" in told
    assert "No module named 'dkfm'" in told
    assert told.endswith("install the same versions there, of dkfm too.")


def _small(site):
    # So little that it may take no task; what watches its memory would pause it, and is off.
    never = {f"DASK_DISTRIBUTED__WORKER__MEMORY__{part}": "False" for part in ("TARGET", "SPILL", "PAUSE", "TERMINATE")}
    site.start_worker(1, memory="1MB", **never)


def _of_another_version(site):
    other = site.folder / "other"  # of this worker alone
    _installed(other, "numpy", "9.9")
    path = os.pathsep.join([str(other), *filter(None, [os.environ.get("PYTHONPATH")])])
    site.start_worker(2, before=["env", f"PYTHONPATH={path}"])


@pytest.mark.slow
def test_workers_that_join_unfit_are_left_aside_and_told_of(tmp_path):
    job = harness.Job.made(tmp_path)
    with harness.Site(tmp_path / "site", workers=1) as site:
        first = _wait_for_first_worker(site)
        command = job.command(tmp_path / "out", "--scheduler", site.address)
        command = [word for word in command if word not in ("-W", "error")]
        driver = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=harness.environment()
        )
        job.wait_for_a_chunk(tmp_path / "out", driver)
        _small(site)
        _of_another_version(site)
        _, told = driver.communicate(timeout=harness.LIMIT)
        assert len(_workers(site)) == 3
    assert driver.returncode == 0, told
    assert told.count("It gets no more tasks of this job.") == 2
    assert "has numpy 9.9" in told
    assert "for a task of" in told  # too little memory
    assert {receipt.worker for receipt in receipts.read_receipts(LocalOutput(tmp_path / "out"))} == {first}
    job.settle(tmp_path / "out")


@pytest.mark.slow
def test_a_worker_that_joins_a_gram_matrix_unfit_is_left_aside(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(3000, 40)))
    with harness.Site(tmp_path / "site", workers=1) as site:
        command = [sys.executable, "-m", "dkfm", "fit", str(tmp_path / "rows.npy"), str(tmp_path / "model")]
        # Bessel functions take long enough to join in.
        command += ["--kernel", "matern", "--param", "nu=1.7", "--param", "length_scale=6", "--tile-rows", "200"]
        command += ["--components", "2", "--workspace", str(tmp_path / "gram"), "--scheduler", site.address]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=harness.environment()) as driver:
            harness.wait_for(
                lambda: list(tmp_path.glob("gram/*/gram/c/*/*")) or driver.poll() is not None, "a tile", 60
            )
            _of_another_version(site)
            _, told = driver.communicate(timeout=harness.LIMIT)
    assert driver.returncode == 0, told
    assert told.count("It gets no more tasks of this job.") == 1


@pytest.mark.slow
def test_a_scheduler_that_goes_while_workers_are_asked_is_one_sentence(tmp_path):
    job = harness.Job.made(tmp_path, rows=1000)
    with harness.Site(tmp_path / "site", workers=1) as site:
        assert _workers(site)
        os.kill(site.worker_of(site.nannies[0]), signal.SIGSTOP)
        driver = subprocess.Popen(
            job.command(tmp_path / "out", "--scheduler", site.address), stderr=subprocess.PIPE, text=True
        )
        harness.wait_for(lambda: list(tmp_path.glob("out/_journal/*")) or driver.poll() is not None, "the mark", 60)
        harness.end(site.scheduler)
        _, told = driver.communicate(timeout=harness.LIMIT)
    assert driver.returncode == 3
    assert harness.sentence(told).startswith("ClusterError: ")
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_worker_that_is_unfit_at_the_start_is_left_aside_and_told_of(tmp_path):
    job = harness.Job.made(tmp_path, rows=4000)
    with harness.Site(tmp_path / "site", workers=1) as site:
        first = _wait_for_first_worker(site)
        _of_another_version(site)
        harness.wait_for(lambda: len(_workers(site)) == 2, "the second worker")
        command = [word for word in job.command(tmp_path / "out", "--scheduler", site.address) if word != "-W"]
        command.remove("error")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=harness.LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("It gets no more tasks of this job.") == 1
    assert "has numpy 9.9, and the driver" in done.stderr
    assert {receipt.worker for receipt in receipts.read_receipts(LocalOutput(tmp_path / "out"))} == {first}
    job.settle(tmp_path / "out")


def _wait_for_first_worker(site):
    harness.wait_for(lambda: len(_workers(site)) == 1, "the first worker")
    (worker,) = _workers(site)
    return worker


def _workers(site):
    from distributed import Client

    # Dask has a warning of its own where versions differ, which is what these tests do.
    with warnings.catch_warnings(action="ignore"), Client(site.address, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=60)
        return list(client.scheduler_info(n_workers=-1)["workers"])


@pytest.mark.slow
def test_an_adaptive_cluster_without_a_worker_starts_some(tmp_path, rng):
    from distributed import Client

    from dkfm.execution.clusters.local import local_cluster

    pca = dkfm.KernelPCA(1, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(20, 3)))
    Z = rng.normal(size=(500, 3))
    with local_cluster() as cluster, Client(cluster) as client:
        cluster.scale(0)
        deadline = time.monotonic() + 30
        while cluster.scheduler_info["workers"] and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.adapt(minimum=0, maximum=2, interval="200ms")
        report = dkfm.batch_score(pca, Z, tmp_path / "out", chunk_rows=50, progress=False, client=client)
    assert report.chunks == 10
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "out").compute(), pca.transform(Z), atol=1e-11)


def test_an_error_of_fitness_names_its_worker_after_a_pickle():
    import pickle

    error = pickle.loads(pickle.dumps(UnfitWorkerError("tcp://a:1", "is not fit.")))
    assert (error.worker, str(error)) == ("tcp://a:1", "The worker tcp://a:1 is not fit.")
