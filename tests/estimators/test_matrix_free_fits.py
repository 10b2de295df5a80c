"""Components by products without a matrix: those of every other method, the same bits on a cluster, and no file."""

import tempfile
from copy import deepcopy

import numpy as np
import pytest
from distributed import Client
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.decomposition import KernelPCA as Peer

from dkfm import KernelPCA, kernels
from dkfm.errors import BudgetError, ConvergenceError, DkfmWarning, InvalidInputError, KernelError
from dkfm.estimators.fitting import eigenproblem_setup, fit_certificates
from dkfm.execution import lazy_scoring, memory
from dkfm.files import temporary_folders
from dkfm.gram import matrix_free, product_costs
from dkfm.gram.product_costs import ProductMethod
from dkfm.numerics.eigensolvers import lanczos
from helpers.harness import left


@pytest.fixture
def method(monkeypatch):
    """Function that leaves one method to the fits that follow; it returns those that they could take."""
    select = eigenproblem_setup.rank_product_costs

    def leave(only):
        monkeypatch.setattr(
            eigenproblem_setup, "rank_product_costs", lambda *given: [c for c in select(*given) if c.method is only]
        )

    return leave


@pytest.fixture
def no_file(monkeypatch):
    """Nothing may be written."""

    def refuse(*_, **__):
        raise AssertionError("a temporary folder")

    monkeypatch.setattr(temporary_folders, "TemporaryFolder", refuse)


@pytest.mark.costly
@pytest.mark.parametrize("centered", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", [kernels.Gaussian(2.0), kernels.Polynomial(3), kernels.Laplacian(4.0)], ids=repr)
def test_components_are_those_of_a_full_decomposition(kernel, weighted, centered, rng, method, no_file):
    X, Z = rng.normal(size=(1400, 6)) * [3, 2, 1, 1, 1, 1], rng.normal(size=(40, 6))
    weights = rng.uniform(0.5, 2.0, 1400) if weighted else None
    truth = KernelPCA(5, kernel=kernel, centered=centered, eigen_solver="dense").fit(X, sample_weight=weights)
    method(ProductMethod.MATRIX_FREE)
    found = KernelPCA(5, kernel=kernel, centered=centered).fit(X, sample_weight=weights)
    scale = np.sqrt(truth.eigenvalues_[0])
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=1e-11)
    # Eigenvectors have the rounding of the matrix, divided by the gaps between eigenvalues.
    np.testing.assert_allclose(found.transform(Z), truth.transform(Z), rtol=0, atol=1e-10 * scale)
    np.testing.assert_allclose(found.total_variance_, truth.total_variance_, rtol=1e-11)
    assert found.certificate_.error < 1e-12


def test_components_are_scikit_learns_to_ten_digits(rng, method):
    X = rng.normal(size=(1500, 8)) * np.linspace(3, 1, 8)
    method(ProductMethod.MATRIX_FREE)
    found = KernelPCA(6, kernel="rbf", gamma=0.02).fit(X)
    peer = Peer(6, kernel="rbf", gamma=0.02, eigen_solver="dense").fit(X)
    np.testing.assert_allclose(found.eigenvalues_, peer.eigenvalues_, rtol=1e-10)
    signs = np.sign(np.einsum("ij,ij->j", found.transform(X), peer.transform(X)))
    np.testing.assert_allclose(
        found.transform(X) * signs, peer.transform(X), rtol=0, atol=1e-10 * np.sqrt(peer.eigenvalues_[0])
    )


@pytest.mark.slow
def test_a_cluster_gives_the_bits_of_threads(rng, method, processes, tmp_path, monkeypatch):
    X = rng.normal(size=(1400, 6))
    method(ProductMethod.MATRIX_FREE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Client(processes):
        on_workers = KernelPCA(5, kernel="rbf", tile_rows=500).fit(X)
    on_threads = KernelPCA(5, kernel="rbf", tile_rows=500).fit(X)
    np.testing.assert_array_equal(on_workers.eigenvalues_, on_threads.eigenvalues_)
    np.testing.assert_array_equal(on_workers.model_.head("scores").weights, on_threads.model_.head("scores").weights)
    assert left(tmp_path) == []


@pytest.mark.costly
@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("centered", [True, False])
def test_workers_measure_the_certificate(rng, processes, tmp_path, monkeypatch, centered, is_sparse):
    X, weights = rng.normal(size=(700, 6)), rng.uniform(1, 2, 700)
    X = csr_array(X * (X > 0)) if is_sparse else X
    pca = KernelPCA(5, kernel="rbf", centered=centered, workspace=tmp_path).fit(X, sample_weight=weights)
    monkeypatch.setattr(fit_certificates, "SMALL_ROWS", 100)
    monkeypatch.setattr(lazy_scoring, "SMALL_MODEL", 0)
    monkeypatch.setattr(fit_certificates, "choose_tile_rows", lambda n, width: 90)
    sound, damaged = pca.model_, deepcopy(pca.model_)
    damaged.head("scores").weights[650, 0] += 1.0

    def measure(model):
        tiles = iter([X])
        return fit_certificates.certify_components(model, pca.eigenvalues_, tiles, weights, tmp_path, False)

    def measure_both():
        with pytest.warns(DkfmWarning, match="The certificate of these scores is"):
            worse = measure(damaged)
        return measure(sound), worse

    here = measure_both()
    with Client(processes):
        there = measure_both()
    np.testing.assert_allclose(here[1].error, there[1].error, rtol=1e-6)
    assert max(here[0].error, there[0].error) < 1e-12
    assert [found.pairs for found in here] == [found.pairs for found in there]
    assert left(tmp_path) == []


def multiply_rows(X, Y):
    return X @ Y.T


def count_products(monkeypatch, fit):
    """Return what a fit returns, and how many products it takes."""
    counts, solve = [], lanczos.largest_eigenpairs

    def solve_and_count(*given):
        pairs = solve(*given)
        counts.append(pairs.n_products)
        return pairs

    monkeypatch.setattr(lanczos, "largest_eigenpairs", solve_and_count)
    return fit(), counts[-1]


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(("weighted", "centered"), [(True, True), (False, False)])
def test_a_start_from_some_rows_saves_products_and_finds_the_same(
    rng, method, monkeypatch, weighted, centered, is_sparse
):
    X = rng.normal(size=(1600, 8)) * [4, 3, 2, 1, 1, 1, 1, 1]
    weights = rng.uniform(0.1, 5.0, 1600) if weighted else None
    method(ProductMethod.MATRIX_FREE)
    pca = KernelPCA(4, kernel=kernels.Gaussian(5.0), centered=centered)
    rows = csr_array(X) if is_sparse else X
    near, products = count_products(monkeypatch, lambda: clone(pca).fit(rows, sample_weight=weights))
    monkeypatch.setattr(product_costs, "has_near_start", lambda kernel: False)
    random, more = count_products(monkeypatch, lambda: clone(pca).fit(rows, sample_weight=weights))
    assert products < more
    np.testing.assert_allclose(near.eigenvalues_, random.eigenvalues_, rtol=1e-11)
    atol = 1e-10 * near.eigenvalues_[0] ** 0.5
    np.testing.assert_allclose(near.transform(X[:50]), random.transform(X[:50]), rtol=0, atol=atol)


def test_a_fit_goes_on_from_a_state_whose_start_was_another(rng, method, monkeypatch, tmp_path):
    X = rng.normal(size=(1600, 8))
    method(ProductMethod.MATRIX_FREE)
    pca = KernelPCA(4, kernel=kernels.Gaussian(2.0), eigen_solver="arpack", workspace=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(product_costs, "has_near_start", lambda kernel: False)  # as on a machine that rounds otherwise
        _, whole = count_products(patch, lambda: clone(pca).set_params(workspace=None).fit(X))
        with pytest.raises(ConvergenceError):
            clone(pca).set_params(max_iter=whole - 1).fit(X)
    taken, multiply = [], matrix_free.MatrixFreeGram.__matmul__
    monkeypatch.setattr(matrix_free.MatrixFreeGram, "__matmul__", lambda *given: taken.append(1) or multiply(*given))
    clone(pca).fit(X)
    assert len(taken) == 2  # the last product of the first fit was not kept


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(
    "rows",
    [
        lambda rng: np.zeros((1500, 2)),
        lambda rng: np.ones((1500, 2)),
        lambda rng: np.repeat(rng.normal(size=(3, 2)), 500, axis=0),
    ],
    ids=["zero", "equal", "three"],
)
def test_rows_of_low_rank_have_a_start(rng, method, rows, centered):
    X = rows(rng)
    method(ProductMethod.MATRIX_FREE)
    found = KernelPCA(4, kernel=kernels.Linear(), centered=centered).fit(X)
    truth = KernelPCA(4, kernel=kernels.Linear(), centered=centered, eigen_solver="dense").fit(X)
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=1e-11, atol=1e-11 * truth.eigenvalues_[0])


def test_only_a_kernel_without_negative_eigenvalues_and_of_this_package_has_a_near_start():
    for kernel, has in (
        (kernels.Gaussian(2.0), True),
        (kernels.Sigmoid(1.0, 0.0), False),
        (kernels.NegativeSquaredDistance(), False),
        (kernels.Function(multiply_rows), False),
    ):
        assert product_costs.has_near_start(kernel) == has


def test_a_row_that_the_kernel_does_not_take_has_its_number(rng, method):
    X = rng.uniform(size=(5000, 3))
    X[4321, 1] = -1.0
    method(ProductMethod.MATRIX_FREE)
    with pytest.raises(InvalidInputError, match=r"row 4321 has -1\.0 in column 1"):
        KernelPCA(2, kernel=kernels.ChiSquared()).fit(X)


def test_a_kernel_that_overflows_is_named(rng, method):
    X = rng.normal(size=(1400, 3))
    X[1000] = 1e200
    method(ProductMethod.MATRIX_FREE)
    with pytest.raises(KernelError, match=r"rows (1000 and \d+|\d+ and 1000)"):
        KernelPCA(2, kernel="poly").fit(X)


def test_a_pilot_names_no_rows_of_its_sample(rng, monkeypatch):
    X = rng.normal(size=(2100, 3))
    X[2 * 512] = 1e200  # a row of the sample, where it has the number 512
    monkeypatch.setattr(eigenproblem_setup, "SMALL_ROWS", 2000)
    with pytest.raises(KernelError, match=r"rows? \D*(1024|\d+ and 1024)"):
        KernelPCA(2, kernel="poly").fit(X)


def test_a_small_matrix_is_kept_and_none_is_begun_without_memory(rng, monkeypatch):
    X = rng.normal(size=(1400, 3))
    opened = []
    original = eigenproblem_setup.open_eigenproblem
    monkeypatch.setattr(
        eigenproblem_setup,
        "open_eigenproblem",
        lambda data, method, *rest: opened.append(method) or original(data, method, *rest),
    )
    KernelPCA(2, kernel="rbf").fit(X)
    assert opened == [ProductMethod.DENSE]
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 10**6)
    with pytest.raises(BudgetError, match="Lanczos with N = 1400"):
        KernelPCA(2, kernel="rbf").fit(X)
    assert opened == [ProductMethod.DENSE]
