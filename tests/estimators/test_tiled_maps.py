"""Maps of all rows in the cholesky basis whose weights stay on disk: those of memory, saved, scored, refused."""

import pickle
import subprocess
import sys

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.sparse import csr_array
from sklearn.linear_model import LinearRegression

import contracts
import dkfm
from dkfm import ExactFeatureMap, kernels
from dkfm.cli.app import main
from dkfm.core import cpus
from dkfm.errors import DkfmError, DkfmWarning, InvalidInputError, NotPSDError, NotSupportedError, StoreError
from dkfm.execution import lazy_scoring
from dkfm.gram import product_costs
from dkfm.storage import model_store, raw_chunk_reader, streamed_weights

KERNELS = [kernels.Gaussian(0.7), kernels.Laplacian(1.0), kernels.Gaussian(1.0) + 0.5 * kernels.Polynomial(2)]


def tiled(kernel, workspace, **options):
    return ExactFeatureMap(kernel, basis="cholesky", build="tiled", tile_rows=40, workspace=workspace, **options)


@pytest.fixture(autouse=True)
def small_panels(monkeypatch):
    """Weights are read a few columns at a time."""
    for module in (streamed_weights, model_store):
        monkeypatch.setattr(module, "CHUNK_BYTES", 10 * 90 * 8)
    monkeypatch.setattr(streamed_weights, "PANEL_BYTES", 30 * 90 * 8)


@pytest.mark.costly
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_tiled_maps_obey_the_laws(kernel, rng, tmp_path):
    X, Z = rng.normal(size=(90, 3)), rng.normal(size=(31, 3))
    phi = tiled(kernel, tmp_path).fit(X)
    contracts.check_feature_map(phi, X, Z)
    contracts.check_scoring(phi, Z)
    assert phi.rank_ == 90
    assert phi.certificate_ == phi.training_certificate_
    assert "landmark_indices_" not in vars(phi)
    np.testing.assert_array_equal(phi.model_.landmarks, X)


@pytest.mark.costly
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_a_tiled_map_is_as_exact_as_one_in_memory(kernel, rng, tmp_path):
    X, Z = rng.normal(size=(120, 4)), rng.normal(size=(40, 4))
    weights = rng.uniform(0.5, 2, 120)
    phi = tiled(kernel, tmp_path, centered=True).fit(X, sample_weight=weights)
    truth = ExactFeatureMap(kernel, basis="cholesky", centered=True).fit(X, sample_weight=weights)
    assert phi.error_bound_ <= 1.1 * truth.error_bound_
    assert phi.certificate_.relative_error <= min(phi.error_bound_, 4 * truth.certificate_.relative_error + 1e-14)
    found, expected = (each.transform(Z) @ each.transform(X).T for each in (phi, truth))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.abs(kernel.diag(X)).max())
    np.testing.assert_allclose(phi.residual(Z), truth.residual(Z), rtol=0, atol=1e-10 * kernel.diag(Z).max())
    np.testing.assert_allclose(phi.error_bounds_[[0, -1]], truth.error_bounds_[[0, -1]], rtol=0.1)
    L = np.linalg.cholesky(kernel(X))
    mean = weights @ kernel(X) / weights.sum()
    dense = np.linalg.solve(L, (kernel(Z, X) - mean).T).T
    np.testing.assert_allclose(phi.transform(Z), dense, rtol=0, atol=1e-10 * np.abs(dense).max())


def test_a_tiled_map_is_saved_scored_in_jobs_and_found_again(rng, tmp_path, monkeypatch):
    X, Z = rng.normal(size=(90, 3)), rng.normal(size=(200, 3))
    phi = tiled(KERNELS[2], tmp_path / "work").fit(X)
    phi.save(tmp_path / "model")
    loaded, features = dkfm.load(tmp_path / "model"), phi.transform(Z)
    np.testing.assert_allclose(loaded.transform(Z), features, rtol=0, atol=1e-11)
    assert loaded.verify(Z).residuals.shape == (200,)
    assert phi.verify(Z).residuals.shape == (200,)
    truncated = loaded.truncate(rank=20)
    np.testing.assert_allclose(truncated.transform(Z), features[:, :20], rtol=0, atol=1e-11)
    dkfm.batch_score(phi, Z, tmp_path / "scores.zarr")
    np.testing.assert_allclose(np.asarray(dkfm.open_scores(tmp_path / "scores.zarr")), features, rtol=0, atol=1e-11)
    monkeypatch.setattr(lazy_scoring, "SMALL_MODEL", 0)
    lazy = phi.transform(da.from_array(Z, chunks=(70, 3)))
    reads, real = [], raw_chunk_reader.read_own_array
    monkeypatch.setattr(
        raw_chunk_reader, "read_own_array", lambda path, part=(): reads.append(path.name) or real(path, part)
    )
    np.testing.assert_allclose(lazy.compute(scheduler="sync"), features, rtol=0, atol=1e-11)
    assert sum(name.startswith("head.") for name in reads) >= 9  # 30 columns at a time, for three blocks of rows
    again = pickle.loads(pickle.dumps(phi))  # the arrays of the estimator refer to the workspace
    np.testing.assert_array_equal(again.transform(Z), features)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("c/*/*")}
    tiled(KERNELS[2], tmp_path / "work").fit(X)
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("c/*/*")}


def test_without_its_workspace_a_map_says_so(rng, tmp_path):
    phi = tiled(KERNELS[0], tmp_path / "work").fit(rng.normal(size=(90, 3)))
    (tmp_path / "work").rename(tmp_path / "moved")
    with pytest.raises(StoreError, match=r"root-.* are gone, .* fit again, or load a saved model"):
        phi.transform(np.zeros((1, 3)))


def test_a_row_in_the_span_of_others_is_named_and_nothing_stays(rng, tmp_path):
    X = rng.normal(size=(90, 3))
    X[70] = X[3]
    with pytest.raises(NotPSDError, match=r"Row 70 .* use build=\"rounds\" for a map"):
        tiled(KERNELS[0], tmp_path).fit(X)
    X[12] = 0.0
    with pytest.raises(NotPSDError, match="Row 12 is the zero vector"):
        tiled(kernels.Polynomial(5), tmp_path).fit(X[:20])
    for kernel in (kernels.Sigmoid(1.0, 0.0), kernels.NegativeSquaredDistance()):
        with pytest.raises(NotPSDError, match=r"is not positive semi-definite|is the zero vector"):
            tiled(kernel, tmp_path).fit(X)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"basis": "spectral"},
        {"tol": 0.1},
        {"dtype": "float32"},
        {"workspace": None},
        {"landmarks": "uniform", "n_landmarks": 5},
        {"landmarks": "pivots"},
        {"landmarks": [1, 2]},
    ],
)
def test_parameters_that_do_not_go_with_tiles_are_refused(options, rng, tmp_path):
    phi = tiled(KERNELS[0], tmp_path).set_params(**options)
    with pytest.raises(InvalidInputError, match='build="tiled"'):
        phi.fit(rng.normal(size=(20, 3)))
    with pytest.raises(InvalidInputError, match='build="tiled"'):
        dkfm.plan_fit(phi, (20, 3))
    assert list(tmp_path.iterdir()) == []


def test_what_needs_the_weights_in_memory_is_refused(rng, tmp_path):
    X, y = rng.normal(size=(90, 3)), rng.normal(size=90)
    phi = tiled(KERNELS[0], tmp_path).fit(X)
    line = LinearRegression().fit(phi.transform(X), y)
    for use in (
        lambda: phi.truncate(rank=3),
        lambda: dkfm.fold(phi, line),
        lambda: dkfm.KernelPCA.from_map(phi, 2),
        lambda: dkfm.KernelRidge.from_map(phi, y, X),
        lambda: dkfm.KernelFisher.from_map(phi, y > 0, X),
    ):
        with pytest.raises(NotSupportedError, match="the weights in memory"):
            use()


def test_rows_of_any_scale_have_a_map(rng, tmp_path):
    X = rng.normal(size=(20, 30)) * np.logspace(-156, 100, 20)[:, np.newaxis]
    with pytest.warns(DkfmWarning, match="of 1 of 20 rows is below 2e-308"):
        phi = tiled(kernels.Linear(), tmp_path).fit(X)
    assert phi.certificate_.relative_error < 1e-12


@pytest.mark.slow
def test_a_stored_file_a_sparse_array_and_a_precomputed_kernel(rng, tmp_path):
    X = rng.normal(size=(90, 3))
    np.save(tmp_path / "x.npy", X)
    phi = tiled(KERNELS[0], tmp_path / "a").fit(X)
    np.testing.assert_array_equal(
        tiled(KERNELS[0], tmp_path / "a").fit(tmp_path / "x.npy").transform(X), phi.transform(X)
    )
    sparse = tiled(KERNELS[0], tmp_path / "b").fit(csr_array(X))
    np.testing.assert_allclose(sparse.transform(X), phi.transform(X), rtol=0, atol=1e-11)
    for refused in ("precomputed", kernels.Function(lambda X, Y: X @ Y.T)):
        with pytest.raises(DkfmError, match="root in tiles"):
            tiled(refused, tmp_path / "c").fit(KERNELS[0](X))
        with pytest.raises(DkfmError, match="root in tiles"):
            dkfm.plan_fit(tiled(refused, tmp_path / "c"), (90, 90))


def test_the_plan_has_the_disk_and_the_time_of_the_factor_and_the_root(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(cpus, "COUNT", 2)
    monkeypatch.setattr(product_costs, "value_seconds", lambda kernel, d: 1e-9)
    monkeypatch.setattr(product_costs, "multiplication_seconds", lambda: 4e-11)
    phi = ExactFeatureMap(KERNELS[0], basis="cholesky", build="tiled", workspace=tmp_path / "work")
    plan = dkfm.plan_fit(phi, (40_000, 50))
    assert plan.method == "a Cholesky factor in tiles on disk, and weights that stay there"
    assert plan.place == str(tmp_path / "work")
    assert 8 * 40_000**2 * 1.5 < plan.disk_bytes < 8 * 40_000**2 * 1.6
    assert plan.memory_bytes < 3 * 10**9
    assert 1.5 < plan.seconds / dkfm.plan_fit(phi, (20_000, 50)).seconds / 4 < 2.1
    small = tiled(KERNELS[0], tmp_path / "work")
    X = rng.normal(size=(90, 3))
    plan = dkfm.plan_fit(small, X)
    small.fit(X)
    written = sum(file.stat().st_size for file in (tmp_path / "work").rglob("c/*/*"))
    assert plan.disk_bytes <= written <= 1.1 * plan.disk_bytes


def test_the_command_fits_and_describes_it(rng, tmp_path):
    X = rng.normal(size=(90, 3))
    np.save(tmp_path / "x.npy", X)
    where = [str(tmp_path / "x.npy"), str(tmp_path / "model"), "--workspace", str(tmp_path / "work")]
    options = ["--basis", "cholesky", "--build", "tiled", "--kernel", "gaussian", "--param", "sigma=0.7"]
    found = CliRunner().invoke(main, ["fit", *where, "--method", "features", *options])
    assert found.exit_code == 0, found.output
    (root,) = (tmp_path / "work").glob("root-*")
    assert "[90, 90]" in CliRunner().invoke(main, ["info", str(root)]).output
    F = dkfm.load(tmp_path / "model").transform(X)
    np.testing.assert_allclose(F @ F.T, KERNELS[0](X), rtol=0, atol=1e-12)


MEMORY = """
import sys
import numpy as np
from dkfm import ExactFeatureMap, kernels
from dkfm.core import budget, cpus
from dkfm.execution import memory
from dkfm.gram.linear_systems import tiled_inverse_factor
n, kernel = 4000, kernels.Gaussian(3.0)
X = np.random.default_rng(0).normal(size=(n, 10))
ExactFeatureMap(kernel, basis="cholesky").fit(X[:300]).transform(X[:10])
before = memory.peak_memory()
ExactFeatureMap(kernel, basis="cholesky", build="tiled", workspace=sys.argv[1], tile_rows=500).fit(X)
each = max(budget.factor_task_bytes(500, 10), tiled_inverse_factor.task_bytes(n, 500))
print(memory.peak_memory() - before, budget.tiled_map_bytes(n, 10, cpus.COUNT * each))
"""


@pytest.mark.slow
def test_a_fit_takes_the_memory_that_its_budget_says(tmp_path):
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    taken, predicted = map(int, subprocess.check_output(command).split())
    # NumPy's BLAS and SciPy's have buffers of 32 MB for each thread, which were there before the fit or not.
    assert taken < predicted <= 1.5 * (taken + 2 * cpus.COUNT * 2**25)
