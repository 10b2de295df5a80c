"""CSR rows through kernels, estimators, stores and clusters: what dense rows give, and never densified."""

import subprocess
import sys

import dask.array as da
import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression

import dkfm
from dkfm import kernels
from dkfm.cli import inspection
from dkfm.core import rows as kernel_rows
from dkfm.errors import InvalidInputError, StoreError
from dkfm.storage import csr, zarr_store

MEMORY = """
import numpy as np
from scipy import sparse
from dkfm import kernels; from dkfm.execution import memory as preflight
rng = np.random.default_rng(0)
X = sparse.random(100_000, 50_000, 1e-4, "csr", random_state=rng)
Y = sparse.random(500, 50_000, 1e-4, "csr", random_state=rng)
block = kernels.{kernel}(X, Y)
assert block.shape == (100_000, 500)
i = rng.integers(100_000, size=20)
truth = kernels.{kernel}(X[i].toarray(), Y.toarray())
assert np.abs(block[i] - truth).max() < 1e-12
print(preflight.peak_memory())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["Gaussian(3.0)", "Polynomial(3, offset=1.0)", "Cosine()"])
def test_a_large_sparse_block_stays_below_a_gigabyte(kernel):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(kernel=kernel)], capture_output=True, text=True, timeout=200, check=True
    )
    assert int(done.stdout) < 1e9


@pytest.fixture
def points(rng):
    dense = rng.poisson(0.3, size=(90, 40)) * rng.uniform(0.5, 2, size=(90, 40))
    dense[7] = 0.0
    return dense[:60], dense[60:]


@pytest.mark.costly
@pytest.mark.parametrize("kernel", [kernels.Gaussian(3.0), kernels.Cosine(), kernels.Exp(0.1 * kernels.Linear())])
def test_estimators_take_sparse_rows_as_they_take_dense_ones(kernel, points, tmp_path):
    X, Z = points
    x, z = sparse.csr_matrix(X), sparse.csr_array(Z)
    dense = dkfm.ExactFeatureMap(kernel, basis="spectral").fit(X)
    phi = dkfm.ExactFeatureMap(kernel, basis="spectral", tile_rows=25).fit(x)
    assert phi.rank_ == dense.rank_
    assert phi.certificate_.error < 1e-11
    for rows in (Z, z):
        products = phi.transform(rows) @ phi.transform(x).T
        np.testing.assert_allclose(products, kernel(Z, X), rtol=0, atol=1e-10)
    np.testing.assert_allclose(phi.residual(z), dense.residual(Z), rtol=0, atol=1e-10)
    assert phi.verify(z).against.error < 1e-10
    phi.save(tmp_path / "model")
    loaded = dkfm.load(tmp_path / "model")
    assert sparse.issparse(loaded.model_.landmarks)
    np.testing.assert_array_equal(loaded.transform(z), phi.transform(z))
    np.testing.assert_array_equal(loaded.verify().certificate.error, phi.certificate_.error)
    assert inspection.describe_store(tmp_path / "model")["columns"] == 40


def test_the_users_rows_are_left_as_they_were_and_not_kept(points):
    x = sparse.csr_array(points[0])
    # Every value as the sum of two halves, which CSR may hold.
    doubled = sparse.csr_array((np.repeat(x.data / 2, 2), np.repeat(x.indices, 2), 2 * x.indptr), x.shape)
    assert doubled.nnz == 2 * x.nnz
    values = doubled.data.copy()
    pca = dkfm.KernelPCA(2, kernel=kernels.Linear()).fit(doubled)
    before = pca.transform(doubled)
    np.testing.assert_array_equal(doubled.data, values)
    doubled.data[:] = 0.0
    np.testing.assert_array_equal(pca.transform(x), before)


@pytest.mark.slow
def test_sparse_rows_are_scored_on_a_cluster_and_lazily(client, points, tmp_path):
    X, Z = points
    x, z = sparse.csr_array(X), sparse.csr_array(Z)
    pca = dkfm.KernelPCA(3, kernel=kernels.Gaussian(3.0), tile_rows=20).fit(x)
    truth = dkfm.KernelPCA(3, kernel=kernels.Gaussian(3.0)).fit(X).transform(Z)
    dkfm.batch_score(pca, z, tmp_path / "out", client=client, chunk_rows=11, progress=False)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "out").compute(), truth, rtol=0, atol=1e-11)
    lazy = pca.transform(da.from_array(Z, chunks=(7, 40)).map_blocks(sparse.csr_array))
    np.testing.assert_allclose(lazy.compute(), truth, rtol=0, atol=1e-11)


def test_an_invalid_sparse_row_scores_nan_and_is_counted(points, tmp_path):
    X, Z = points
    z = sparse.csr_array(Z)
    z.data[z.indptr[4]] = np.nan
    pca = dkfm.KernelPCA(3, kernel=kernels.Gaussian(3.0)).fit(sparse.csr_array(X))
    report = dkfm.batch_score(pca, z, tmp_path / "out", on_invalid="nan", progress=False)
    assert report.invalid_rows == 1
    found = dkfm.open_scores(tmp_path / "out").compute()
    assert np.isnan(found[4]).all()
    assert np.isfinite(np.delete(found, 4, axis=0)).all()
    with pytest.raises(InvalidInputError, match="row 4 contains NaN"):
        dkfm.batch_score(pca, z, tmp_path / "other", progress=False)


def fit_in_float32(name, rows, y):
    phi = dkfm.ExactFeatureMap(kernels.Linear(), dtype="float32").fit(rows)
    return {
        "ExactFeatureMap": lambda: phi,
        "KernelPCA": lambda: dkfm.KernelPCA(2, dtype="float32").fit(rows),
        "KernelPCA.from_map": lambda: dkfm.KernelPCA.from_map(phi, n_components=2),
        "KernelFisher": lambda: dkfm.KernelFisher(shrinkage=1.0, dtype="float32").fit(rows, y),
        "KernelRidge": lambda: dkfm.KernelRidge(0.1, dtype="float32").fit(rows, 1.0 * y),
        "KernelRidgeClassifier": lambda: dkfm.KernelRidgeClassifier(0.1, dtype="float32").fit(rows, y),
        "fold": lambda: dkfm.fold(phi, LogisticRegression().fit(phi.transform(rows), y)),
    }[name]()


@pytest.mark.parametrize("earlier", [False, True], ids=["", "as earlier versions wrote it"])
@pytest.mark.parametrize(
    "name",
    [
        "ExactFeatureMap",
        "KernelPCA",
        "KernelPCA.from_map",
        "KernelFisher",
        "KernelRidge",
        "KernelRidgeClassifier",
        "fold",
    ],
)
def test_a_float32_model_of_sparse_rows_is_loaded_as_it_was(name, earlier, points, tmp_path, monkeypatch):
    rows, y = sparse.csr_array(points[0].astype(np.float32)), np.arange(len(points[0])) % 2
    fitted = fit_in_float32(name, rows, y)
    if earlier:
        write = csr.write_csr
        monkeypatch.setattr(csr, "write_csr", lambda group, name, rows, dtype: write(group, name, rows))
    fitted.save(tmp_path / "model")
    stored = zarr_store.open_array(tmp_path / "model", "landmarks.data", "r")
    assert stored.dtype == (np.float64 if earlier else np.float32)
    loaded = dkfm.load(tmp_path / "model")
    assert loaded.model_.landmarks.dtype == np.float32
    output = next(iter(fitted.model_.heads))
    of_loaded, of_fitted = (model._compute_output(output, rows) for model in (loaded, fitted))
    np.testing.assert_array_equal(of_loaded, of_fitted)
    assert dkfm.batch_score(tmp_path / "model", rows, tmp_path / "out", progress=False).rows == len(y)


def test_a_killed_sparse_build_is_found_again_by_its_rows(points, tmp_path):
    x = sparse.csr_array(points[0])
    first = dkfm.build_gram(kernels.Linear(), x, tmp_path / "gram", tile_rows=25)
    again = dkfm.build_gram(kernels.Linear(), x.copy(), tmp_path / "gram", tile_rows=25)
    np.testing.assert_array_equal(first[:], again[:])
    changed = x.copy()
    changed.indices[0] = (changed.indices[0] + 1) % 40
    changed.sort_indices()
    with pytest.raises(StoreError, match="other rows"):
        dkfm.build_gram(kernels.Linear(), changed, tmp_path / "gram", tile_rows=25)


def test_a_kernel_of_dense_rows_says_so(points):
    x = sparse.csr_array(points[0])
    for kernel in (kernels.Laplacian(), kernels.Gaussian() + kernels.JensenShannon(), kernels.Linear().warp(np.sin)):
        with pytest.raises(InvalidInputError, match="takes dense rows"):
            kernel(x)
    with pytest.raises(InvalidInputError, match="takes dense rows"):
        dkfm.KernelPCA(2, kernel=kernels.Laplacian()).fit(x)


@pytest.mark.parametrize("damage", ["indptr", "falling", "indices", "columns"])
def test_arrays_that_do_not_make_rows_are_refused(damage, points, tmp_path):
    x = sparse.csr_array(points[0])
    with zarr_store.new_store(tmp_path / "rows", "rows", {}, csr.array_names("rows")) as group:
        csr.write_csr(group, "rows", x)
    np.testing.assert_array_equal(csr.read_csr(tmp_path / "rows", "rows", 40, slice(5, 9)).toarray(), points[0][5:9])
    columns = 40
    if damage == "columns":
        columns = 3
    else:
        name, value = {"indptr": ("indptr", 10**6), "falling": ("indptr", 0), "indices": ("indices", -7)}[damage]
        zarr_store.open_array(tmp_path / "rows", f"rows.{name}", "r+")[-1 if damage == "indptr" else 3] = value
    with pytest.raises(StoreError, match="do not make rows"):
        csr.read_csr(tmp_path / "rows", "rows", columns)


@pytest.mark.slow
def test_a_sparse_row_counts_in_the_budget_as_what_it_holds():
    rng = np.random.default_rng(0)
    place = np.arange(10_000) // 10, rng.integers(10**6, size=10_000)
    x = sparse.csr_array((rng.uniform(size=10_000), place), shape=(1000, 10**6))
    assert kernel_rows.estimate_float64s_per_row(x) < 30
    pca = dkfm.KernelPCA(2, kernel=kernels.Linear()).fit(x)
    assert pca.model_.nbytes < 10**6
    assert pca.model_.n_features_in == 10**6


def test_many_columns_take_no_memory_of_their_own():
    import tracemalloc

    x = sparse.csr_array(([1.0, 2.0, 3.0], [0, 5, 2**28 - 1], [0, 1, 2, 3]), shape=(3, 2**28))
    for kernel in (kernels.Linear(), kernels.Gaussian(2.0), kernels.Cosine()):
        kernel(x[:, :6])  # what it imports at its first call would count
        tracemalloc.start()
        values = kernel(x)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_allclose(values, kernel(np.diag([1.0, 2.0, 3.0])), rtol=1e-12)
        assert peak < 10**5


def test_rows_without_a_value_are_zeros():
    empty, one = sparse.csr_array((2, 5)), sparse.csr_array(np.eye(5)[:1])
    for kernel in (kernels.Linear(), kernels.Gaussian(), kernels.Cosine(), kernels.ArcCosine(0)):
        for a, b in ((empty, one), (one, empty), (empty, empty)):
            np.testing.assert_allclose(kernel(a, b), kernel(a.toarray(), b.toarray()), rtol=1e-12)
