"""A command imports what it uses; Ctrl-C in the first moments of a command ends it without a traceback."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

import dkfm

RUN = """
import atexit, gc, sys
collected = []

class Watch:  # of the first large package that a command imports
    def find_spec(name, path=None, target=None):
        if name == "numpy":
            collected.append(gc.isenabled())

def report():
    open("modules", "w").write(" ".join(sys.modules))
    assert gc.isenabled() and not any(collected)

sys.meta_path.insert(0, Watch)
atexit.register(report)
from dkfm.cli.app import main
main()
"""

HEAVY = {"zarr", "dask", "distributed", "tornado", "jinja2", "matplotlib", "numba", "IPython", "tqdm"}
"""What no command needs that works on threads of its own, and whose standard error is no terminal."""

TABLES = {"pandas", "pyarrow", "polars"}
SKLEARN = {"sklearn", "joblib"}
SCIPY = {"scipy", "numpy.ma", "numpy.f2py", "numpy.testing"}
"""SciPy, and the parts of NumPy that come with it or for nothing."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    rows = np.random.default_rng(0).normal(size=(40, 8))  # of few columns, SciPy computes distances
    np.save(folder / "rows.npy", rows)
    K, y = dkfm.kernels.Gaussian(2.0), np.arange(40) % 3
    dkfm.KernelPCA(2, kernel=K).fit(rows).save(folder / "model")
    dkfm.KernelFisher(kernel=K).fit(rows, y).save(folder / "discriminants")
    phi = dkfm.ExactFeatureMap(K).fit(rows)
    phi.save(folder / "map")
    dkfm.fold(phi, LinearRegression().fit(phi.transform(rows), y)).save(folder / "folded")
    dkfm.batch_score(folder / "model", folder / "rows.npy", folder / "out", progress=False)
    return folder


@pytest.mark.costly
@pytest.mark.parametrize(
    ("command", "unused"),
    [
        ("--help", HEAVY | TABLES | SKLEARN | SCIPY | {"numpy"}),
        pytest.param("score --help", HEAVY | TABLES | SKLEARN | SCIPY | {"numpy"}, marks=pytest.mark.slow),
        ("score model rows.npy new", HEAVY | TABLES | SKLEARN | SCIPY),
        pytest.param(
            "score model rows.npy out", HEAVY | TABLES | SKLEARN | SCIPY, marks=pytest.mark.slow
        ),  # a finished output, which is read again
        ("score model rows.npy new --dry-run", HEAVY | TABLES | SKLEARN | SCIPY),
        pytest.param("verify out", HEAVY | TABLES | SKLEARN | SCIPY, marks=pytest.mark.slow),
        ("verify out --against rows.npy", HEAVY | TABLES | SKLEARN | SCIPY),
        pytest.param("verify model", HEAVY | TABLES | SKLEARN | SCIPY, marks=pytest.mark.slow),
        pytest.param("verify map", HEAVY | TABLES | SKLEARN | SCIPY, marks=pytest.mark.slow),
        ("verify map --against rows.npy", HEAVY | TABLES | SKLEARN | {"scipy"}),
        ("verify discriminants", HEAVY | TABLES | SKLEARN | {"scipy"}),
        pytest.param("verify folded", HEAVY | TABLES | SKLEARN | SCIPY, marks=pytest.mark.slow),
        pytest.param("info out", HEAVY | TABLES | SKLEARN | SCIPY, marks=pytest.mark.slow),
        ("info model", HEAVY | TABLES | SKLEARN | SCIPY),
    ],
)
def test_a_command_imports_no_module_that_it_does_not_use(stores, monkeypatch, command, unused):
    monkeypatch.chdir(stores)
    ran = subprocess.run([sys.executable, "-c", RUN, *command.split()], check=True, capture_output=True, text=True)
    assert "AssertionError" not in ran.stderr  # of the report at the exit
    imported = set((stores / "modules").read_text().split())  # packages and their modules
    (stores / "modules").unlink()
    assert "dkfm" in imported
    assert not imported & unused


@pytest.mark.costly
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("missing.npy other --kernel gaussian", "There is no"),
        pytest.param("rows.npy other --kernel gausian", "near it: gaussian", marks=pytest.mark.slow),
        pytest.param(
            "rows.npy other --kernel gaussian --dry-run --columns a", "name columns of Parquet", marks=pytest.mark.slow
        ),
        pytest.param("rows.npy model --kernel gaussian", "holds something already", marks=pytest.mark.slow),
        pytest.param("rows.npy other --map map --method fisher --labels no.npy", "There is no", marks=pytest.mark.slow),
    ],
)
def test_a_fit_is_refused_before_scikit_learn_is_imported(stores, monkeypatch, arguments, reason):
    monkeypatch.chdir(stores)
    command = [sys.executable, "-c", RUN, "fit", *arguments.split()]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode != 0
    assert reason in ran.stderr
    assert not set((stores / "modules").read_text().split()) & (TABLES | SKLEARN)
    (stores / "modules").unlink()


@pytest.mark.costly
@pytest.mark.parametrize(
    "call",
    [
        'batch_score("model", "rows.npy", "scores", progress=False)',
        'plan_score("model", "rows.npy", "scores")',
        'verify_scores("out", "rows.npy")',
    ],
)
def test_a_public_function_imports_no_module_that_it_does_not_use(stores, monkeypatch, call):
    monkeypatch.chdir(stores)
    code = f"import dkfm, sys; dkfm.{call}; print(*sys.modules)"
    imported = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not imported & (HEAVY | TABLES | SKLEARN | SCIPY)


@pytest.mark.parametrize("command", [["-m", "dkfm"], ["dkfm"]])
def test_an_interruption_during_the_imports_is_no_traceback(tmp_path, command):
    (tmp_path / "click.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(60)\n")
    (tmp_path / "dkfm").write_text("from dkfm.cli.app import main\nmain()\n")  # as pip writes it
    path = os.pathsep.join([str(tmp_path), *sys.path])
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = subprocess.Popen(
        [sys.executable, *command, "-h"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, **told
    )
    while not (tmp_path / "begun").exists():
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=30)
    assert started.returncode == -signal.SIGINT
    assert said == b""
