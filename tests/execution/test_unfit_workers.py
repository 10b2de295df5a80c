"""A worker that is unfit at the start of a job is left aside with a warning, unless no fit one is left."""

import itertools
import warnings

import dask
import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import BudgetError, ClusterError, DkfmWarning, UnfitWorkerError
from dkfm.execution import memory, worker_checks
from dkfm.execution.worker_checks import WorkerRequirements, _Answer
from dkfm.scoring import receipts
from dkfm.storage import model_store, streamed_weights
from dkfm.storage.output_files import LocalOutput
from helpers.recorded import drop_resource_warnings

ANSWERS = {
    "fit": _Answer("", "a BLAS"),
    "unfit": _Answer("has no numba.", ""),
    "broken": ModuleNotFoundError("No module named 'dkfm'"),
    "late": TimeoutError(),
    "gone": ConnectionRefusedError(),
}

PAIRS = [kinds for n in (1, 2) for kinds in itertools.product(ANSWERS, repeat=n)]
"""Answers of one worker, and of two in any order."""
THREES = [pytest.param(kinds, marks=pytest.mark.slow) for kinds in itertools.combinations_with_replacement(ANSWERS, 3)]

NO_WATCH = {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause", "terminate")}
"""Configuration of workers that take tasks however little memory they have."""


@pytest.mark.alike
@pytest.mark.parametrize("kinds", [*PAIRS, *THREES], ids="-".join)
def test_the_unfit_are_returned_where_another_may_be_fit_and_raised_where_none_is(threaded_client, monkeypatch, kinds):
    answers = {f"tcp://{i}": ANSWERS[kind] for i, kind in enumerate(kinds)}
    monkeypatch.setattr(worker_checks, "_ask_workers", lambda *_: answers)
    requirements = WorkerRequirements(LocalOutput("/"), "", b"", {}, 0, 0, None, "")
    unfit = [f"tcp://{i}" for i, kind in enumerate(kinds) if kind in ("unfit", "broken")]
    if set(kinds) == {"late"}:
        with pytest.raises(ClusterError, match="No worker has answered"):
            worker_checks.find_unfit_workers(threaded_client, requirements)
    elif unfit and not {"fit", "late"} & set(kinds):
        with pytest.raises(UnfitWorkerError) as raised:
            worker_checks.find_unfit_workers(threaded_client, requirements)
        assert raised.value.worker == unfit[0]
    else:
        found = worker_checks.find_unfit_workers(threaded_client, requirements)
        assert [error.worker for error in found] == unfit


@pytest.fixture
def uneven(tmp_path):
    """Return a function that opens a client of workers of this process, and their addresses, by their memory limits."""
    from contextlib import contextmanager

    from distributed import Client, LocalCluster, Worker

    @contextmanager
    def opened(*limits):
        scratch = {"temporary-directory": str(tmp_path)} | NO_WATCH
        with (
            dask.config.set(scratch),
            LocalCluster(processes=False, n_workers=0, dashboard_address="127.0.0.1:0") as cluster,
            Client(cluster) as client,
        ):
            for i, limit in enumerate(limits):
                options = {"nthreads": 1, "memory_limit": limit}
                cluster.worker_spec[i] = {"cls": Worker, "options": options}
            cluster.sync(cluster._correct_state)
            client.wait_for_workers(len(limits), timeout=60)
            yield client, [cluster.workers[i].address for i in range(len(limits))]

    return opened


def test_a_worker_with_too_little_memory_is_left_aside_by_a_job_and_by_its_plan(uneven, tmp_path, rng):
    pca, Z = dkfm.KernelPCA(1, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(20, 3))), rng.normal(size=(200, 3))
    with uneven("1MB", "8GB") as (client, (small, large)):
        with pytest.warns(DkfmWarning) as told:
            plan = dkfm.plan_score(pca, Z, tmp_path / "out", chunk_rows=10, client=client)
        assert (plan.worker, len(drop_resource_warnings(told))) == (large, 1)
        plan.require()
        with pytest.warns(DkfmWarning) as told:
            report = dkfm.batch_score(pca, Z, tmp_path / "out", chunk_rows=10, client=client, progress=False)
    (warning,) = drop_resource_warnings(told)
    assert str(warning.message).startswith(f"The worker {small} has ")
    assert str(warning.message).endswith("It gets no more tasks of this job.")
    assert report.chunks == 20
    assert {receipt.worker for receipt in receipts.read_receipts(LocalOutput(tmp_path / "out"))} == {large}
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "out").compute(), pca.transform(Z), atol=1e-11)


@pytest.mark.slow
def test_a_worker_with_too_little_memory_is_left_aside_by_a_gram_matrix(uneven, tmp_path, rng):
    X = rng.normal(size=(100, 3))
    with uneven("1MB", "8GB") as (client, (small, _)), pytest.warns(DkfmWarning, match=f"The worker {small} has"):
        gram = dkfm.build_gram(kernels.Gaussian(2.0), X, tmp_path / "gram", tile_rows=20, client=client)
    np.testing.assert_allclose(gram[:], kernels.Gaussian(2.0)(X), rtol=1e-13)


def test_workers_that_all_have_too_little_memory_are_refused_with_the_largest(uneven, tmp_path, rng):
    pca, Z = dkfm.KernelPCA(1, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(20, 3))), rng.normal(size=(200, 3))
    with uneven("1MB", "2MB") as (client, (_, large)), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BudgetError, match=f"on the worker {large} "):
            dkfm.batch_score(pca, Z, tmp_path / "out", client=client, progress=False)
        with pytest.raises(BudgetError, match="A tile of 20 rows"):
            dkfm.build_gram(kernels.Gaussian(2.0), Z, tmp_path / "gram", tile_rows=20, client=client)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_no_worker_is_left_aside_whose_memory_holds_a_task_that_reads_weights_from_the_store(
    threaded_client, tmp_path, rng, monkeypatch
):
    monkeypatch.setattr(streamed_weights, "PANEL_BYTES", 600 * 70 * 8)
    monkeypatch.setattr(model_store, "CHUNK_BYTES", 600 * 10 * 8)
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="cholesky").fit(rng.normal(size=(600, 5)))
    phi.save(tmp_path / "model")
    arguments = tmp_path / "model", rng.normal(size=(500, 5)), tmp_path / "out"

    def plan(**limits):
        budgets = {name: lambda shared, limit=limit: limit - shared for name, limit in limits.items()}
        monkeypatch.setattr(memory, "worker_task_budget_functions", lambda client, shared: budgets)
        return dkfm.plan_score(*arguments, chunk_rows=60, client=threaded_client)

    whole = plan(large=10**12)
    needed = whole.model_bytes + whole.task_bytes
    assert (whole.streamed, whole.worker) == (False, "large")
    assert plan(small=needed, large=10**12).worker == "small"
    streamed = plan(small=needed - 1, large=10**12)
    assert (streamed.streamed, streamed.worker) == (True, "small")
    assert plan(tiny=1000, small=needed, large=10**12).worker == "small"
