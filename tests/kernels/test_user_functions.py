"""Functions of the user's in a store: named, digested, never imported unasked."""

import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client
from sklearn.metrics.pairwise import rbf_kernel

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.core import trusted_functions
from dkfm.errors import InvalidInputError, KernelError, UntrustedError
from dkfm.kernels import serialization
from helpers.cluster_process import start_cluster

SOURCE = """
import functools
import numpy as np
open(__file__ + ".imported", "a").close()

def least(X, Y):
    return np.minimum(X[:, None], Y).sum(-1)

def root(X):
    return np.sqrt(X)

class Holder:
    @staticmethod
    def least(X, Y):
        return least(X, Y)

def pair(x, y):
    return float(np.minimum(x, y).sum())

class Caller:
    def __call__(self, X, Y):
        return least(X, Y)

def twice(function):
    @functools.wraps(function)
    def wrapper(X, Y):
        return 2 * function(X, Y)
    return wrapper

@twice
def decorated(X, Y):
    return least(X, Y)

number = 3
local = (lambda: (lambda X, Y: least(X, Y)))()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, that says when it was imported."""
    (tmp_path / "theirs.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import theirs

    (tmp_path / "theirs.py.imported").unlink()
    yield theirs
    sys.modules.pop("theirs", None)


@pytest.fixture
def rows(rng):
    return rng.uniform(size=(40, 3))


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "dkfm", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_model_with_a_function_is_loaded_only_where_it_is_trusted(module, rows, tmp_path):
    fitted = dkfm.ExactFeatureMap(kernels.Function(module.least)).fit(rows)
    fitted.save(tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "zarr.json").read_text())["attributes"]["dkfm"]["kernel"]
    assert stored["function"]["function"] == "theirs:least"
    assert len(stored["function"]["source"]) == 64
    for trusted in ((), ["theirs:pair"], ["theirs"]):
        with pytest.raises(UntrustedError, match=r'trusted=\["theirs:least"\]'):
            dkfm.load(tmp_path / "model", trusted=trusted)
    loaded = dkfm.load(tmp_path / "model", trusted=["theirs:least"])
    np.testing.assert_array_equal(loaded.transform(rows), fitted.transform(rows))
    for wrong in ("theirs:least", None, [3]):
        with pytest.raises(InvalidInputError, match="trusted takes a list"):
            dkfm.load(tmp_path / "model", trusted=wrong)
    with pytest.raises(InvalidInputError, match="trusted takes a list"):
        dkfm.batch_score(tmp_path / "model", rows, tmp_path / "out", trusted="theirs:least")


@pytest.mark.slow
def test_a_stranger_s_model_does_not_even_import_the_module(module, rows, tmp_path):
    dkfm.ExactFeatureMap(kernels.Function(module.least)).fit(rows).save(tmp_path / "model")
    np.save(tmp_path / "z.npy", rows)
    for command in (("score", "model", "z.npy", "out"), ("verify", "model"), ("info", "model")):
        done = run(*command, cwd=tmp_path)
        assert done.returncode == (0 if command[0] == "info" else 1)
        assert "theirs:least" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "theirs.py.imported").exists()
    done = run("score", "model", "z.npy", "out", "--trusted", "theirs:least", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "theirs.py.imported").exists()


@pytest.mark.slow
def test_a_function_that_changed_since_is_refused(module, rows, tmp_path):
    dkfm.ExactFeatureMap(kernels.Function(module.least)).fit(rows).save(tmp_path / "model")
    (tmp_path / "theirs.py").write_text(SOURCE.replace("minimum", "maximum") + "# of another size")
    np.save(tmp_path / "z.npy", rows)
    done = run("score", "model", "z.npy", "out", "--trusted", "theirs:least", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("UntrustedError: The source of theirs:least is not what it was")
    assert not (tmp_path / "out").exists()
    (tmp_path / "theirs.py").unlink()
    done = run("score", "model", "z.npy", "out", "--trusted", "theirs:least", cwd=tmp_path)
    assert done.returncode == 1
    assert "theirs:least cannot be imported here" in done.stderr


def test_every_kernel_with_a_function_goes_through_a_store(module, rows):
    for kernel in (
        kernels.Function(module.least),
        kernels.Function(module.Holder.least),
        kernels.Pairwise(module.pair),
        kernels.Outer(module.root),
        kernels.Gaussian(2.0).warp(module.root) + 0.5 * kernels.Function(module.least),
    ):
        stored = json.loads(json.dumps(serialization.to_config(kernel)))
        assert not serialization.is_code_free(kernel)
        assert serialization.from_config(stored, serialization.function_paths(kernel)) == kernel
        with pytest.raises(UntrustedError):
            serialization.from_config(stored)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda module: lambda X, Y: X @ Y.T, "no other process can import it"),
        (lambda module: module.local, "no other process can import it"),
        (lambda module: np.sqrt, "cannot be saved|wrap it in a function of yours"),
        (lambda module: len, "wrap it in a function of yours"),
        (lambda module: module.Caller(), "only a function with a module and a name"),
        (lambda module: module.decorated, "is decorated and cannot be saved; call it in a plain function of a module"),
        (lambda module: rbf_kernel, "is decorated and cannot be saved"),
        (lambda module: __import__("functools").partial(module.least), "only a function with a module and a name"),
    ],
)
def test_a_function_that_no_other_process_could_import_is_not_saved(make, words, module, rows, tmp_path):
    fitted = dkfm.ExactFeatureMap(kernels.Function(module.least)).fit(rows)
    fitted.model_.kernel.__dict__["function"] = make(module)
    with pytest.raises(KernelError, match=words):
        fitted.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_name_that_means_something_else_by_now_is_not_saved(module, monkeypatch):
    kernel = kernels.Function(module.least)
    monkeypatch.setattr(module, "least", module.pair)
    with pytest.raises(KernelError, match="now means something else"):
        serialization.to_config(kernel)


def test_a_function_whose_module_was_edited_since_it_was_imported_is_not_saved(module, rows, tmp_path):
    fitted = dkfm.ExactFeatureMap(kernels.Function(module.least)).fit(rows)
    (tmp_path / "theirs.py").write_text(SOURCE.replace("minimum", "maximum"))
    with pytest.raises(KernelError, match="edited since it was imported"):
        fitted.save(tmp_path / "model")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Run the command line in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda line: CliRunner().invoke(main, line.split())


@pytest.mark.parametrize("source", ["def f(:", "1 / 0", "raise SystemError('no')"])
def test_a_module_that_cannot_be_imported_is_one_sentence(source, here, tmp_path):
    (tmp_path / "broken.py").write_text(source)
    np.save("x.npy", np.ones((3, 2)))
    done = here("fit x.npy model --kernel broken:f")
    assert done.exit_code == 1
    assert done.stderr.startswith("KernelError: broken:f cannot be imported here")


def test_a_function_that_raises_is_one_sentence_on_the_command_line(module, here, rows):
    np.save("x.npy", rows)
    done = here("fit x.npy model --kernel theirs:root --quiet")
    assert done.exit_code == 1
    assert done.stderr.startswith("KernelError: Function(root) raised TypeError")


@pytest.mark.parametrize("path", ["theirs:number", "theirs:none", "nowhere:f", "theirs:", ":f", ".x:f"])
def test_a_path_that_leads_to_no_function_is_refused(path, module):
    with pytest.raises(KernelError, match=r"cannot be imported here|is not a function"):
        trusted_functions.import_function(path)


@pytest.mark.slow
def test_a_fitted_estimator_with_a_function_scores_on_a_cluster_without_being_asked(module, rows, tmp_path):
    fitted = dkfm.KernelPCA(2, kernel=kernels.Function(module.least), tile_rows=15).fit(rows)
    fitted.save(tmp_path / "model")
    with start_cluster(tmp_path) as address, Client(address) as client:  # it finds the module where this process does
        options = {"client": client, "progress": False}
        dkfm.batch_score(fitted, rows, tmp_path / "out", **options)
        with pytest.raises(UntrustedError):
            dkfm.batch_score(tmp_path / "model", rows, tmp_path / "other", **options)
        dkfm.batch_score(tmp_path / "model", rows, tmp_path / "o", **options, trusted=["theirs:least"])
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "out").compute(), fitted.transform(rows), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_large_model_with_a_function_is_spilled_and_read_back_in_a_worker(module, tmp_path, rng):
    import pickle

    import dask.array as da

    X = rng.uniform(size=(900, 3))
    fitted = dkfm.ExactFeatureMap(kernels.Function(module.least), basis="spectral").fit(X)
    carried = fitted._get_graph_model()
    assert type(carried).__name__ == "TemporaryModelStore"
    assert len(pickle.dumps(carried)) < 1000
    lazy = fitted.transform(da.from_array(X, chunks=(300, 3)))
    np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), fitted.transform(X), rtol=0, atol=1e-9)
