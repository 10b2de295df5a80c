"""Real clusters on loopback, and the pieces that run tasks: window, BLAS threads, caches."""

import subprocess
import sys
import threading
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from scipy import linalg
from scipy.linalg import lapack
from threadpoolctl import threadpool_info

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.errors import ClusterError, InvalidInputError, KernelError
from dkfm.estimators.mixins import scoring
from dkfm.execution import blas_threads as blas_module
from dkfm.execution import executors, model_cache, task_runner
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.gram import build as gram
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import prepare_scorer

K = kernels.Gaussian(2.0)


def blas_threads():
    import scipy.linalg  # noqa: F401  # its BLAS must be loaded to be seen

    return {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}


def test_the_main_job_runs_on_a_cluster_without_a_warning(client, tmp_path, rng):
    X, Z = rng.normal(size=(300, 5)), rng.normal(size=(1000, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gram = dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=100)
        np.testing.assert_array_equal(gram[:], dkfm.build_gram(K, X, tmp_path / "here", tile_rows=100, client=None)[:])
        pca = dkfm.KernelPCA(3, kernel=K, tile_rows=100).fit(X)
        phi = dkfm.ExactFeatureMap(K, tile_rows=100).fit(X)
        report = dkfm.batch_score(pca, Z, tmp_path / "scores", chunk_rows=100, progress=False)
        lazy = phi.transform(da.from_array(Z, chunks=(100, 5))).compute()
    assert report.chunks == 10
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "scores").compute(), pca.transform(Z), atol=1e-11)
    np.testing.assert_allclose(lazy, phi.transform(Z), atol=1e-9)


@pytest.mark.slow
def test_builds_of_one_gram_at_once_on_a_cluster_all_end_with_it(threaded_client, tmp_path, rng):
    X = rng.normal(size=(60, 3))
    for attempt in range(4):
        build = partial(dkfm.build_gram, K, X, tmp_path / f"gram{attempt}", tile_rows=20, client=threaded_client)
        with ThreadPoolExecutor(3) as pool:
            found = [built.result()[:] for built in [pool.submit(build) for _ in range(3)]]
        for block in found:
            np.testing.assert_allclose(block, K(X), rtol=1e-13)


def test_the_dashboard_answers_and_everything_listens_on_loopback_alone(client):
    assert client.dashboard_link.startswith("http://127.0.0.1:")
    assert urllib.request.urlopen(client.dashboard_link, timeout=20).status == 200
    import psutil

    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_errors_of_tasks_on_a_cluster_keep_their_names(client, tmp_path, rng):
    Z = rng.normal(size=(50, 3))
    Z[33] = np.nan
    pca = dkfm.KernelPCA(1, kernel=K).fit(rng.normal(size=(20, 3)))
    with pytest.raises(InvalidInputError, match="row 33"):
        dkfm.batch_score(pca, Z, tmp_path / "s", chunk_rows=10, progress=False)
    bad = kernels.Function(lambda X, Y: np.full((len(X), len(Y)), np.inf))
    with pytest.raises(KernelError, match="returned inf"):
        dkfm.build_gram(bad, rng.normal(size=(50, 3)), tmp_path / "g", tile_rows=10)


def _threads_seen(X, Y):
    return np.full((len(X), len(Y)), max(blas_threads()), dtype=float)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["processes", "inside", "pool"])
def test_tasks_have_one_blas_thread_and_the_driver_all_of_them_after(kind, request, tmp_path, rng):
    before = blas_threads()
    used = {"processes": "client", "inside": "threaded_client"}.get(kind)
    if used:
        request.getfixturevalue(used)
    found = dkfm.build_gram(kernels.Function(_threads_seen), rng.normal(size=(120, 3)), tmp_path / "g", tile_rows=20)
    assert np.unique(found[:]).tolist() == [1.0]
    assert blas_threads() == before


@pytest.mark.slow
def test_work_inside_tasks_has_no_more_threads_than_cores(threaded_client, tmp_path, rng, monkeypatch):
    from dkfm.core.cpus import COUNT

    seen = {}

    def watch(module, name):
        function, found = getattr(module, name), seen.setdefault(name, [])

        def watched(*args, **options):
            found.append(max(blas_threads()))
            return function(*args, **options)

        monkeypatch.setattr(module, name, watched)

    for module, name in (
        (gram, "evaluate_block"),
        (linalg, "eigh"),
        (lapack, "dpstrf"),
        (scoring, "compute_finite_scores"),
    ):
        watch(module, name)
    X, before = rng.normal(size=(60, 3)), blas_threads()

    def fit(estimator):
        return estimator.fit(X), estimator.transform(X)

    maps = [dkfm.ExactFeatureMap(K, basis=basis, build="gram") for basis in ("spectral", "cholesky")]
    components = [dkfm.KernelPCA(2, kernel=K), dkfm.KernelPCA(2, kernel=K, tile_rows=20)]
    (fitted, _), *_ = threaded_client.gather(threaded_client.map(fit, 3 * [*maps, *components], pure=False))
    fitted.transform(da.from_array(X, chunks=(10, 3))).compute()
    dkfm.batch_score(fitted, X, tmp_path / "s", chunk_rows=10, progress=False)
    threads = sum(threaded_client.nthreads().values())
    for found in seen.values():
        assert found
        assert max(found) * threads <= max(COUNT, threads)
    assert blas_threads() == before


def test_a_fit_inside_a_task_computes_in_place(threaded_client, rng):
    X = rng.normal(size=(60, 3))

    def fit(rows):
        return dkfm.KernelPCA(2, kernel=K, tile_rows=20).fit(rows).eigenvalues_

    found = threaded_client.submit(fit, X).result()
    np.testing.assert_allclose(found, dkfm.KernelPCA(2, kernel=K).fit(X).eigenvalues_, rtol=1e-12)


def test_an_asynchronous_client_is_refused_by_name():
    class Client:
        asynchronous = True

    with pytest.raises(ClusterError, match="asynchronous"):
        executors.ClientExecutor(Client())


def test_the_window_is_bounded_and_every_task_runs_once():
    taken, found, waiting = [], [], []

    def tasks():
        for i in range(50):
            taken.append(i)
            waiting.append(len(taken) - len(found))
            yield (i,)

    with executors.open_executor(None) as executor:
        task_runner.run_tasks(executor, "dkfm-test", lambda i: i, tasks(), 50, False, found.append)
        assert 1 < max(waiting) <= 3 * executor.threads + executor.threads
    assert sorted(found) == list(range(50))


def test_a_failed_task_ends_the_job_and_the_pool():
    def work(i):
        if i == 7:
            raise InvalidInputError("Seven.")
        return i

    before = set(threading.enumerate())
    with pytest.raises(InvalidInputError, match="Seven"), executors.open_executor(None) as executor:
        task_runner.run_tasks(executor, "dkfm-test", work, ((i,) for i in range(50)), 50, progress=False)
    assert not set(threading.enumerate()) - before  # others may end meanwhile


def test_blas_threads_are_one_inside_and_as_before_outside_also_when_nested_in_threads():
    before = blas_threads()
    barrier = threading.Barrier(4)

    def nested(_):
        with single_blas_thread():
            barrier.wait(10)
            inside = blas_threads()
            barrier.wait(10)
        return inside

    with ThreadPoolExecutor(4) as pool:
        assert all(found == {1} for found in pool.map(nested, range(4)))
    assert blas_threads() == before


def test_blas_libraries_are_searched_for_again_only_after_an_import(monkeypatch):
    searches, search = [], blas_module.ThreadpoolController
    monkeypatch.setattr(blas_module, "ThreadpoolController", lambda: searches.append(1) or search())
    blas_module._find_blas_libraries.cache_clear()
    for _ in range(3):
        with single_blas_thread():
            assert blas_threads() == {1}
    assert len(searches) == 1
    monkeypatch.setitem(sys.modules, "dkfm_test_of_an_import", None)
    with single_blas_thread():
        assert blas_threads() == {1}
    assert len(searches) == 2


def test_a_prepared_model_is_made_once_per_process_and_few_are_kept():
    made = []

    def make():
        made.append(1)
        return prepare_scorer(Model(K, np.ones((1, 1)), {"scores": Head(np.ones((1, 1)))}))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: model_cache.get_scorer("test-digest", make), range(50)))
    assert len(made) == 1
    assert len({id(scorer) for scorer in found}) == 1
    model_cache.remove_model("test-digest")
    assert "test-digest" not in model_cache._scorers


@pytest.mark.slow
def test_no_scheduler_at_an_address_is_a_named_error():
    result = CliRunner().invoke(main, ["score", "m", "i", "o", "--scheduler", "tcp://127.0.0.1:1"])
    assert result.exit_code == 3
    assert "There is no scheduler at tcp://127.0.0.1:1" in result.output


@pytest.mark.slow
def test_what_a_worker_compiles_stays_in_its_own_scratch_directory(client, tmp_path, rng):
    pytest.importorskip("numba")
    from dkfm import build_gram, kernels

    build_gram(kernels.Laplacian(2.0), rng.normal(size=(60, 3)), tmp_path / "gram", tile_rows=30, client=client)

    def look(dask_worker):
        folder = Path(dask_worker.local_directory) / "dkfm-compiled"
        return folder.stat().st_mode & 0o077, [p.name for p in folder.rglob("*.nbi")]

    for others, indexes in client.run(look).values():
        assert others == 0
        assert any("_sum_absolute" in name for name in indexes)


UNANSWERED = """
import asyncio, time
from dkfm.execution.clusters.local import local_cluster

async def unanswered(**heartbeat):
    await asyncio.sleep(60)

if __name__ == "__main__":
    with local_cluster() as cluster:
        cluster.wait_for_workers(1)
        cluster.scheduler.handlers["heartbeat_worker"] = unanswered
        time.sleep(1.2)
"""


@pytest.mark.slow
def test_a_worker_that_leaves_with_a_heartbeat_under_way_prints_nothing(tmp_path):
    script = tmp_path / "unanswered.py"
    script.write_text(UNANSWERED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _said(*command):
    done = subprocess.run(
        [sys.executable, "-m", "dkfm", *command], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.slow
def test_a_port_of_something_else_a_file_that_is_none_and_no_certificate_are_a_sentence_each(client, tmp_path):
    (tmp_path / "scheduler.json").write_text('{"id": 1}')
    for address, told in (
        (client.dashboard_link.replace("http", "tcp").removesuffix("/status"), "is it the port of its dashboard?"),
        (str(tmp_path / "scheduler.json"), "is not the file of a running scheduler"),
        (str(tmp_path / "none.json"), "none.json; it is the file that a scheduler writes"),
        ("tls://127.0.0.1:1", "cluster/tls makes some"),
    ):
        code, lines = _said("score", "m", "r", "o", "--scheduler", address)
        assert code == 3, lines
        assert len(lines) == 1, lines
        assert lines[0].startswith("ClusterError: "), lines
        assert told in lines[0]
