"""What computes scores is the same on every worker as at the driver, or the worker is refused; other BLAS is told."""

from types import SimpleNamespace

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import DkfmWarning
from dkfm.execution import blas_threads, worker_checks
from dkfm.execution.worker_checks import WorkerRequirements
from dkfm.storage.output_files import LocalOutput
from helpers import harness
from helpers.recorded import drop_resource_warnings

COMPUTING = ("numpy", "scipy", "numba", "llvmlite")

HIDING = """\
import importlib.metadata as metadata, sys
sys.modules["numba"] = None
found = metadata.version
def version(name):
    if name == "numba":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
"""


def requirements_of(versions):
    """Return requirements of versions and nothing else."""
    return WorkerRequirements(LocalOutput("/"), "", b"", versions, 1000, 0, None, "")


def blas_version_of(monkeypatch, found):
    """Return what is said of a process that has loaded these libraries."""
    with monkeypatch.context() as patch:
        libraries = SimpleNamespace(info=lambda: found)
        patch.setattr(blas_threads, "ThreadpoolController", lambda: SimpleNamespace(select=lambda **_: libraries))
        patch.setattr(blas_threads, "_blas_info", blas_threads._blas_info.__wrapped__)
        return blas_threads.describe_blas_libraries()


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize(("here", "there"), [("1.0", "2.0"), ("1.0", None), (None, "2.0")])
def test_whatever_computes_is_refused_with_both_versions_absent_ones_too(monkeypatch, name, here, there):
    versions = worker_checks.local_versions()
    assert name in versions
    monkeypatch.setattr(worker_checks, "_version", (versions | {name: there}).get)
    fault = worker_checks._find_version_fault(requirements_of(versions | {name: here}))
    had, needed = f"{name} {there}" if there else f"no {name}", here or "has none"
    assert fault == f"has {had}, and the driver {needed}; install the same on both."


def test_what_neither_has_is_no_difference(monkeypatch):
    versions = worker_checks.local_versions() | {"numba": None, "llvmlite": None}
    monkeypatch.setattr(worker_checks, "_version", versions.get)
    assert worker_checks._find_version_fault(requirements_of(versions)) == ""


def test_pyarrow_is_compared_where_a_table_is_read_or_written_and_nowhere_else(threaded_client, tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    rows = np.random.default_rng(0).normal(size=(30, 2))
    np.save(tmp_path / "rows.npy", rows)
    pq.write_table(pa.table({"a": rows[:, 0], "b": rows[:, 1]}), tmp_path / "rows.parquet")
    dkfm.KernelPCA(1, kernel=kernels.Gaussian(2.0)).fit(rows).save(tmp_path / "model")
    asked = []
    monkeypatch.setattr(
        worker_checks, "find_unfit_workers", lambda _, needs: asked.append("pyarrow" in needs.versions) or []
    )
    for source, target in (("rows.npy", "a"), ("rows.npy", "a.parquet"), ("rows.parquet", "b")):
        options = {"columns": ["a", "b"]} if source == "rows.parquet" else {}
        with pytest.warns(DkfmWarning) if options else pytest.MonkeyPatch.context():
            dkfm.plan_score(tmp_path / "model", tmp_path / source, tmp_path / target, client=threaded_client)
    assert asked == [False, True, True]


def test_the_blas_that_is_compared_is_numpys_and_scipys_and_no_other_packages(monkeypatch):
    def library(path, version):
        return {"user_api": "blas", "internal_api": "openblas", "version": version, "filepath": path}

    site = "/numpy-env/lib/site-packages"
    own = [library(f"{site}/numpy.libs/a.so", "1"), library(f"{site}/scipy.libs/b.so", "2")]
    others = [library(f"{site}/faiss.libs/c.so", "3"), library("/numpy-env/lib/libopenblas.so", "4")]
    assert blas_version_of(monkeypatch, [*own, *others]) == "openblas 1, openblas 2"
    assert blas_version_of(monkeypatch, others[1:]) == "openblas 4"
    assert blas_version_of(monkeypatch, []) == ""
    assert blas_threads.describe_blas_libraries() != ""


def test_workers_with_different_blas_or_processors_are_a_warning_for_rounding_allows_them(threaded_client, monkeypatch):
    requirements, answers = requirements_of(worker_checks.local_versions()), {}
    one = "openblas 0.3.30 for SkylakeX"
    for worker in ("tcp://a:1", "tcp://b:2", "tcp://c:3"):
        answers[worker] = worker_checks._Answer("", one)
    monkeypatch.setattr(worker_checks, "_ask_workers", lambda *_: answers)
    worker_checks.find_unfit_workers(threaded_client, requirements)
    for other in ("openblas 0.3.30 for Zen", "openblas 0.3.29 for SkylakeX", "unknown for unknown"):
        answers["tcp://c:3"] = worker_checks._Answer("", other)
        with pytest.warns(DkfmWarning, match=r"within rounding\.$") as told:
            worker_checks.find_unfit_workers(threaded_client, requirements)
        (warning,) = drop_resource_warnings(told)
        assert f"{one} on tcp://a:1" in str(warning.message)
        assert f"{other} on tcp://c:3" in str(warning.message)
    answers["tcp://c:3"] = worker_checks._Answer("has no numba.", "")
    (unfit,) = worker_checks.find_unfit_workers(threaded_client, requirements)
    assert str(unfit) == "The worker tcp://c:3 has no numba."


def test_a_worker_says_what_it_computes_with(threaded_client):
    worker_checks.find_unfit_workers(threaded_client, requirements_of(worker_checks.local_versions(tables=True)))
    (answer,) = threaded_client.run(worker_checks._answer, requirements_of(worker_checks.local_versions())).values()
    assert answer == worker_checks._Answer(
        "", f"{blas_threads.describe_blas_libraries()} for {blas_threads.describe_blas_architectures()}"
    )


@pytest.mark.slow
def test_a_real_worker_without_numba_scores_nothing_for_a_driver_that_has_it(tmp_path):
    pytest.importorskip("numba", reason="the extra fast is not installed; .ci/run has it")
    job = harness.Job.made(tmp_path, rows=1000)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(HIDING)
    with harness.Site(tmp_path / "site", workers=1) as site:
        told = harness.run(job.command(tmp_path / "out", "--scheduler", site.address), code=3)
    told = harness.sentence(told)
    assert told.startswith("UnfitWorkerError: The worker tcp://127.0.0.1:")
    assert f"has no numba, and the driver {worker_checks.local_versions()['numba']}; install the same on both." in told
    assert not list((tmp_path / "out").rglob("c/*"))


def test_the_gram_matrix_asks_for_the_same(threaded_client, tmp_path, monkeypatch):
    rows, asked = np.random.default_rng(0).normal(size=(30, 2)), []
    monkeypatch.setattr(worker_checks, "find_unfit_workers", lambda _, needs: asked.append(needs.versions) or [])
    dkfm.build_gram(kernels.Gaussian(1.0), rows, tmp_path / "gram", client=threaded_client)
    assert asked == [worker_checks.local_versions()]
