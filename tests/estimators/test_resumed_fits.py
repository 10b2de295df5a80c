"""A fit that was killed goes on from its workspace: at most one product or round is done again, with the same bits."""

import numpy as np
import pytest

from dkfm import ExactFeatureMap, KernelPCA, kernels
from dkfm.errors import ConvergenceError
from dkfm.estimators.fitting import eigenproblem_setup, feature_maps, fit_certificates
from dkfm.gram import matrix_free, row_passes, streamed_pivots
from dkfm.gram.fit_checkpoints import Checkpoint
from dkfm.gram.product_costs import ProductMethod
from dkfm.gram.stored_gram import StoredGram
from helpers.harness import left

K = kernels.Gaussian(2.0)


class Killed(BaseException):
    """What ends a fit at some call."""


@pytest.fixture
def kill_at(monkeypatch):
    """Function that counts the calls of a function of an object, and raises at one of them."""

    def arm(owner, name, at=None):
        real, calls = getattr(owner, name), []

        def counted(*given, **options):
            calls.append(name)
            if len(calls) == at:
                raise Killed
            return real(*given, **options)

        monkeypatch.setattr(owner, name, counted)
        return calls

    with monkeypatch.context():
        yield arm


@pytest.mark.slow
@pytest.mark.parametrize("method", [ProductMethod.MATRIX_FREE, ProductMethod.STORED])
def test_killed_components_go_on(method, rng, tmp_path, monkeypatch, kill_at, caplog):
    caplog.set_level("INFO", "dkfm")
    X, weights = rng.normal(size=(1400, 3)), rng.uniform(1, 2, 1400)
    select = eigenproblem_setup.rank_product_costs
    monkeypatch.setattr(
        eigenproblem_setup, "rank_product_costs", lambda *given: [c for c in select(*given) if c.method is method]
    )
    pca = KernelPCA(12, kernel=K, workspace=tmp_path, tile_rows=500, progress=False)
    owner = matrix_free.MatrixFreeGram if method is ProductMethod.MATRIX_FREE else StoredGram
    with monkeypatch.context():
        calls = kill_at(owner, "__matmul__")
        truth = pca.fit(X, sample_weight=weights).eigenvectors_
    products = len(calls)
    assert products > 6
    for at in (1, 2, 3, products):
        folder = tmp_path / str(at)
        pca.set_params(workspace=folder)
        monkeypatch.undo()
        monkeypatch.setattr(
            eigenproblem_setup, "rank_product_costs", lambda *given: [c for c in select(*given) if c.method is method]
        )
        kill_at(owner, "__matmul__", at)
        with pytest.raises(Killed):
            pca.fit(X, sample_weight=weights)
        calls = kill_at(owner, "__matmul__")
        np.testing.assert_array_equal(pca.fit(X, sample_weight=weights).eigenvectors_, truth)
        assert len(calls) == products - at + 1
        assert all(name.startswith("gram-") for name in left(folder))
    assert f"the fit goes on after {products - 2} products" in caplog.text  # one product was that for the means


def take_small_rounds(monkeypatch):
    monkeypatch.setattr(row_passes, "PASS_TILE_ROWS", 200)
    monkeypatch.setattr(streamed_pivots, "ROUND_CANDIDATES", 60)
    monkeypatch.setattr(streamed_pivots, "_LARGEST", 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"tol": 1e-4}, {"landmarks": "random_pivots", "n_landmarks": 200, "random_state": 3}]
)
def test_killed_rounds_go_on(options, rng, tmp_path, monkeypatch, kill_at):
    np.save(tmp_path / "x.npy", rng.normal(size=(900, 3)))
    take_small_rounds(monkeypatch)
    phi = ExactFeatureMap(K, basis="cholesky", workspace=tmp_path / "w", progress=False, **options)
    calls = kill_at(streamed_pivots, "_run_round")
    truth = phi.fit(tmp_path / "x.npy").model_.head("features").weights
    rounds = len(calls)
    assert rounds > 3
    for at in (1, 2, rounds):
        monkeypatch.undo()
        take_small_rounds(monkeypatch)
        kill_at(streamed_pivots, "_run_round", at)
        with pytest.raises(Killed):
            phi.fit(tmp_path / "x.npy")
        calls = kill_at(streamed_pivots, "_run_round")
        found = phi.fit(tmp_path / "x.npy").model_.head("features").weights
        np.testing.assert_array_equal(found, truth)
        assert len(calls) == rounds - at + 1
        assert left(tmp_path / "w") == []


def test_the_state_after_each_round_is_read_as_it_was(rng, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", rng.normal(size=(900, 3)))
    take_small_rounds(monkeypatch)
    given, recomputed = [], set()
    run_round, save = streamed_pivots._run_round, streamed_pivots._save

    def save_and_read(state, draws, checkpoint):
        state.n_pivots_at_recompute = len(state.numbers) - 1  # as if a pass had preceded this round
        save(state, draws, checkpoint)
        found = streamed_pivots._resume(
            given[-1][1], np.random.RandomState(1), Checkpoint(checkpoint._folder, checkpoint._identity)
        )
        for name in ("residuals", "numbers", "rows", "pivot_norms", "largest_residuals", "n_pivots_at_recompute"):
            np.testing.assert_array_equal(getattr(found, name), getattr(state, name))
        np.testing.assert_array_equal(found.factor.lower, state.factor.lower)
        recomputed.add(found.n_pivots_at_recompute)

    monkeypatch.setattr(
        streamed_pivots, "_run_round", lambda *arguments: (given.append(arguments), run_round(*arguments))
    )
    monkeypatch.setattr(streamed_pivots, "_save", save_and_read)
    ExactFeatureMap(K, basis="cholesky", tol=1e-3, workspace=tmp_path / "w", progress=False).fit(tmp_path / "x.npy")
    assert len(recomputed) > 2


@pytest.mark.slow
def test_rows_that_changed_begin_anew(rng, tmp_path, monkeypatch, kill_at):
    np.save(tmp_path / "x.npy", rng.normal(size=(900, 3)))
    take_small_rounds(monkeypatch)
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-3, workspace=tmp_path / "w", progress=False)
    kill_at(streamed_pivots, "_run_round", 2)
    with pytest.raises(Killed):
        phi.fit(tmp_path / "x.npy")
    other = rng.normal(size=(900, 3))
    np.save(tmp_path / "x.npy", other)
    monkeypatch.undo()
    take_small_rounds(monkeypatch)
    truth = ExactFeatureMap(K, basis="cholesky", tol=1e-3, progress=False).fit(tmp_path / "x.npy")
    np.testing.assert_array_equal(phi.fit(tmp_path / "x.npy").landmark_indices_, truth.landmark_indices_)


def force(monkeypatch, method):
    select = eigenproblem_setup.rank_product_costs
    monkeypatch.setattr(
        eigenproblem_setup, "rank_product_costs", lambda *given: [c for c in select(*given) if c.method is method]
    )


@pytest.mark.slow
def test_more_products_go_on_from_a_fit_that_did_not_converge(rng, tmp_path, monkeypatch, kill_at):
    X = rng.normal(size=(1400, 3))
    force(monkeypatch, ProductMethod.MATRIX_FREE)
    pca = KernelPCA(12, kernel=K, eigen_solver="arpack", max_iter=5, workspace=tmp_path, progress=False)
    with pytest.raises(ConvergenceError, match="raise max_iter"):
        pca.fit(X)
    calls = kill_at(matrix_free.MatrixFreeGram, "__matmul__")
    with pytest.raises(ConvergenceError, match="After 3 products"):
        pca.set_params(max_iter=3).fit(X)  # fewer than the state has: from the beginning
    assert len(calls) == 3
    found = pca.set_params(max_iter=50).fit(X).eigenvectors_
    assert left(tmp_path) == []
    total = len(calls) - 3
    truth = KernelPCA(12, kernel=K, eigen_solver="arpack", max_iter=50, progress=False).fit(X).eigenvectors_
    assert len(calls) - 3 - total > total
    np.testing.assert_array_equal(found, truth)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["components", "map"])
def test_a_kill_after_the_search_begins_it_not_anew(kind, rng, tmp_path, monkeypatch, kill_at):
    X = rng.normal(size=(1400, 3))
    force(monkeypatch, ProductMethod.MATRIX_FREE)
    if kind == "components":
        fit, owner, name = KernelPCA(12, kernel=K, workspace=tmp_path), matrix_free.MatrixFreeGram, "__matmul__"
        kill_at(fit_certificates, "certify_components", 1)
    else:
        fit = ExactFeatureMap(K, basis="cholesky", tol=1e-3, build="rounds", workspace=tmp_path)
        owner, name = streamed_pivots, "_run_round"
        kill_at(feature_maps, "certify_map", 1)
    with pytest.raises(Killed):
        fit.fit(X)
    calls = kill_at(owner, name)
    fit.fit(X)
    assert len(calls) <= 1
    assert left(tmp_path) == []
