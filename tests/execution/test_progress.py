"""Progress: told where somebody looks, silent everywhere else and of what takes no time."""

import io
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from tqdm.auto import tqdm

import dkfm
from dkfm import kernels
from dkfm.core import budget
from dkfm.execution import progress, task_runner

K = kernels.Gaussian(1.0)
ESTIMATORS = [
    dkfm.KernelPCA(2, kernel=K, tile_rows=20),
    dkfm.ExactFeatureMap(K, tile_rows=20),
    dkfm.ExactFeatureMap(K, basis="cholesky", build="gram", tile_rows=20),
]
COLUMNS = dkfm.ExactFeatureMap(K, basis="cholesky", build="columns")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Return what makes standard error a terminal; pytest would take it back from a fixture."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread would outlive the test

    def become():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return become


@pytest.fixture
def long(monkeypatch):
    """Every Gram matrix takes long enough for a bar, and every root 40 seconds."""
    monkeypatch.setattr(progress, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(budget, "eigendecomposition_seconds", lambda *_: 40.0)
    monkeypatch.setattr(budget, "gram_and_pivots_seconds", lambda *_: 40.0)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_a_fit_shows_its_tiles_and_the_time_that_the_root_will_take(estimator, terminal, long, rng):
    stderr = terminal()
    clone(estimator).fit(rng.normal(size=(60, 3)))
    shown = stderr.getvalue()
    assert "dkfm-gram: 100%" in shown
    assert "6/6" in shown
    assert shown.index("dkfm-gram") < shown.index("dkfm-root, about 40 s: 00:00")


def test_the_time_of_the_root_is_told_before_it_begins(terminal, long, rng, monkeypatch):
    from dkfm.numerics import kernel_components

    stderr, told, solve = terminal(), [], kernel_components.solve_components_by_eigh
    monkeypatch.setattr(
        kernel_components, "solve_components_by_eigh", lambda *args: told.append(stderr.getvalue()) or solve(*args)
    )
    dkfm.KernelPCA(2).fit(rng.normal(size=(20, 3)))
    assert told == ["\rdkfm-root, about 40 s: 00:00"]


def test_pivots_without_a_gram_matrix_move_a_bar(terminal, long, rng, monkeypatch):
    monkeypatch.setattr(progress, "_import_tqdm", lambda: partial(tqdm, mininterval=0))
    stderr = terminal()
    phi = clone(COLUMNS).fit(rng.normal(size=(400, 6)))
    shown = stderr.getvalue()
    assert "| 256/400 [" in shown
    assert f"100%|##########| {phi.rank_}/{phi.rank_} [" in shown


def test_conjugate_gradients_show_their_residual(terminal, long, rng, monkeypatch, caplog):
    monkeypatch.setattr(progress, "_import_tqdm", lambda: partial(tqdm, mininterval=0))
    X, stderr = rng.normal(size=(400, 6)), terminal()
    ridge = dkfm.KernelRidge(0.3, kernel=K, solver="cg")
    clone(ridge).fit(X, X[:, 0])
    shown = re.findall(r"dkfm-solve: (\d+)product [^\r]*, residual (\S+) of (\S+)\]", stderr.getvalue())
    assert len(shown) > 3
    assert {tol for _, _, tol in shown} == {"1.0e-10"}
    assert float(shown[-1][1]) < 1e-3 * float(shown[0][1])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.0)
    with caplog.at_level("INFO", "dkfm"):
        clone(ridge).fit(X, X[:, 0])
    logged = re.findall(r"products, .* a second, residual (\S+) of 1\.0e-10", caplog.text)
    assert set(logged) == {residual for _, residual, _ in shown}


@pytest.mark.parametrize("estimator", [*ESTIMATORS, COLUMNS], ids=repr)
def test_nothing_is_shown_without_progress_or_without_a_terminal(estimator, terminal, long, rng, monkeypatch):
    X, stderr = rng.normal(size=(60, 3)), terminal()
    clone(estimator).set_params(progress=False).fit(X)
    assert stderr.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clone(estimator).fit(X)
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("estimator", [*ESTIMATORS, COLUMNS], ids=repr)
def test_small_fits_show_nothing(estimator, terminal, rng):
    stderr = terminal()
    clone(estimator).fit(rng.normal(size=(60, 3)))
    assert stderr.getvalue() == ""


def test_a_root_is_announced_from_two_seconds_on(terminal):
    stderr = terminal()
    for seconds, words in ((1.9, ""), (2.1, "\rdkfm-root, about 2 s: 00:00")):
        with progress.show_elapsed_bar(seconds, shown=True):
            assert stderr.getvalue() == words


def test_a_fit_inside_a_worker_shows_nothing(terminal, long, rng, threaded_client):
    stderr, fit = terminal(), clone(ESTIMATORS[0]).fit
    assert threaded_client.submit(fit, rng.normal(size=(60, 3))).result().eigenvalues_.shape == (2,)
    assert stderr.getvalue() == ""


NOTEBOOK = """
import io, sys, types, warnings
warnings.simplefilter("always")
sys.modules["ipywidgets"] = None
sys.modules["ipykernel.zmqshell"] = types.ModuleType("zmqshell")
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace(kernel="a kernel")
from dkfm.execution import progress
progress.MIN_SECONDS = 0.0
with progress.step_bar("dkfm-gram", 2, "task", shown=True) as bar:
    bar.update(2)
"""


def test_a_notebook_without_widgets_has_the_plain_bar_and_no_warning():
    found = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, check=True)
    assert found.stdout == ""
    assert "dkfm-gram: 100%" in found.stderr
    assert "TqdmWarning" not in found.stderr


def test_progress_is_a_parameter_that_no_model_keeps(rng, tmp_path):
    X = rng.normal(size=(30, 3))
    for estimator in (dkfm.KernelPCA(2, progress=False), dkfm.ExactFeatureMap(K, progress=False)):
        assert estimator.get_params()["progress"] is False
        assert clone(estimator).progress is False
        fitted = estimator.fit(X)
        fitted.save(tmp_path / type(fitted).__name__)
        loaded = dkfm.load(tmp_path / type(fitted).__name__)
        assert "progress" not in loaded._params_at_fit
        assert loaded.progress is True
        np.testing.assert_array_equal(loaded.transform(X), fitted.transform(X))
        np.testing.assert_array_equal(clone(loaded).fit(X).transform(X), fitted.transform(X))


def test_the_command_line_turns_bars_on_and_off(rng, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from dkfm.cli.app import main

    monkeypatch.chdir(tmp_path)
    np.save("x.npy", rng.normal(size=(60, 3)))
    asked, step_bar = {}, task_runner.step_bar

    def seen(name, total, unit, shown):
        asked[name] = shown
        return step_bar(name, total, unit, shown)

    monkeypatch.setattr(task_runner, "step_bar", seen)
    for number, (option, shown) in enumerate([("", True), ("--progress", True), ("--no-progress", False)]):
        for line in (
            f"fit x.npy m{number} --kernel linear --tile-rows 20 {option}",
            f"score m{number} x.npy s{number} {option}",
        ):
            result = CliRunner().invoke(main, line.split())
            assert result.exit_code == 0, result.output
        assert asked == {"dkfm-gram": shown, "dkfm-score": shown}
        asked.clear()


@pytest.mark.slow
def test_tasks_are_called_by_what_they_do_on_the_dashboard(threaded_client, rng, tmp_path):
    X = rng.normal(size=(60, 3))
    fitted = clone(ESTIMATORS[0]).fit(X)
    dkfm.batch_score(fitted, X, tmp_path / "s", chunk_rows=20, progress=False)
    prefixes = threaded_client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.task_prefixes))
    assert prefixes == {"dkfm-gram", "dkfm-score"}


@given(st.integers(1, budget.LARGEST_DENSE_N - 1), st.integers(2, 9))
def test_the_seconds_of_a_root_grow_with_the_cube_of_its_rows(n, times):
    assert budget.eigendecomposition_seconds(n) < budget.eigendecomposition_seconds(n + 1)
    assert budget.eigendecomposition_seconds(times * n) == pytest.approx(
        times**3 * budget.eigendecomposition_seconds(n)
    )


def test_the_seconds_of_a_root_are_those_of_the_table_of_limits():
    for n, measured in ((2000, 1), (4000, 6), (8000, 50), (20_000, 13 * 60), (32_765, 3600)):
        assert measured / 1.5 < budget.eigendecomposition_seconds(n) < 1.5 * measured
