"""Prepared models of a process: how many stay, for how long, and what makes room."""

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.execution import memory, model_cache
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import prepare_scorer

K = kernels.Gaussian(1.0)


@pytest.fixture(autouse=True)
def empty_cache():
    model_cache._scorers.clear_unless_busy()
    yield
    model_cache._scorers.clear_unless_busy()


@pytest.fixture
def saved(tmp_path, rng):
    """A fitted estimator, where it is saved, and rows."""
    fitted = dkfm.KernelPCA(2, kernel=K).fit(rng.normal(size=(20, 3)))
    fitted.save(tmp_path / "model")
    return fitted, tmp_path / "model", rng.normal(size=(9, 3))


def score(model, rows, path, **options):
    dkfm.batch_score(model, rows, path, progress=False, overwrite=True, **options)
    return dkfm.open_scores(path).compute()


@pytest.mark.parametrize("limit", [2**28, 2**30, 2**32, 10**11])
@pytest.mark.parametrize("held", [10**8, 2**28, 10**10])
def test_tasks_modules_and_cached_models_stay_below_the_limit_at_which_workers_pause(limit, held):
    tasks = 3 * memory.thread_budget(limit, 3, 0, held) if held <= limit else 0
    assert tasks + min(held, memory._MODULE_BYTES) + memory.cache_bytes(limit) <= max(
        memory._PAUSE_SHARE * limit, memory._MODULE_BYTES
    )


def test_models_that_are_not_the_latest_stay_while_the_memory_of_the_worker_has_room_for_them(monkeypatch):
    scorer = prepare_scorer(Model(K, np.ones((10, 1)), {"scores": Head(np.ones((10, 1)))}))
    monkeypatch.setattr(model_cache, "worker_memory_limit", lambda: 4 * 10**9)
    monkeypatch.setattr(memory, "cache_bytes", {4 * 10**9: 2 * model_cache._prepared_bytes(scorer)}.__getitem__)
    for i in range(5):
        model_cache.get_scorer(f"test-{i}", lambda: scorer)
    assert [i for i in range(5) if f"test-{i}" in model_cache._scorers] == [2, 3, 4]
    model_cache.remove_model("test-3")
    assert [i for i in range(5) if f"test-{i}" in model_cache._scorers] == [2, 4]


def test_a_model_counts_as_many_bytes_as_the_plan_of_its_job(saved, tmp_path):
    _, path, rows = saved
    score(path, rows, tmp_path / "out")
    (scorer,) = model_cache._scorers._values.values()
    assert model_cache._prepared_bytes(scorer) == dkfm.plan_score(path, rows, tmp_path / "new").model_bytes


@pytest.mark.slow
def test_threads_prepare_a_saved_model_once_for_all_jobs_and_anew_when_it_changed(saved, tmp_path, rng, monkeypatch):
    fitted, path, rows = saved
    prepared, prepare = [], model_cache.prepare_compact_scorer
    monkeypatch.setattr(model_cache, "prepare_compact_scorer", lambda model: prepared.append(1) or prepare(model))
    for _ in range(3):
        np.testing.assert_allclose(score(path, rows, tmp_path / "out"), fitted.transform(rows), atol=1e-12)
    assert len(prepared) == 1
    other = dkfm.KernelPCA(2, kernel=K).fit(rng.normal(size=(20, 3)))
    other.save(path, overwrite=True)
    np.testing.assert_allclose(score(path, rows, tmp_path / "out"), other.transform(rows), atol=1e-12)
    assert len(prepared) == 2


@pytest.mark.slow
def test_models_of_estimators_and_of_user_functions_are_not_kept(saved, tmp_path, rng, monkeypatch):
    fitted, _, rows = saved
    score(fitted, rows, tmp_path / "out")
    own = dkfm.KernelPCA(1, kernel=kernels.Function(linear)).fit(rng.normal(size=(20, 3)))
    own.save(tmp_path / "own")
    score(tmp_path / "own", rows, tmp_path / "out", trusted=[f"{__name__}:linear"])
    assert len(model_cache._scorers) == 0


def linear(X, Y):
    return X @ Y.T


@pytest.mark.slow
def test_models_make_room_for_all_other_work_and_for_a_job_that_would_not_fit(saved, tmp_path, monkeypatch):
    _, path, rows = saved
    score(path, rows, tmp_path / "out")
    need = dkfm.plan_score(path, rows, tmp_path / "new")
    need = need.model_bytes + need.threads * need.task_bytes
    monkeypatch.setattr(memory, "measure_free_memory", lambda: need - len(model_cache._scorers))
    assert memory.task_budget(None, 1, needed=need - 1) == need - 1
    assert len(model_cache._scorers) == 1
    assert not dkfm.plan_score(path, rows, tmp_path / "new").streamed
    assert len(model_cache._scorers) == 0
    monkeypatch.undo()
    score(path, rows, tmp_path / "out")
    assert memory.clear_caches_and_measure_memory() > 0
    assert len(model_cache._scorers) == 0


def test_models_do_not_stay_after_a_job_where_little_memory_is_free(saved, tmp_path, monkeypatch):
    _, path, rows = saved
    free = memory.measure_free_memory
    monkeypatch.setattr(model_cache.memory, "measure_free_memory", lambda: min(free(), 10**9))
    monkeypatch.setattr(model_cache, "_FREE_SHARE", 1e-9)
    score(path, rows, tmp_path / "out")
    assert len(model_cache._scorers) == 0
