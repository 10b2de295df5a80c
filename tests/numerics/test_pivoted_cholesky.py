"""Pivots: exact ranks, bounds that hold, one answer with and without a Gram matrix, kernels that are not PSD."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfm
from dkfm import kernels
from dkfm.core import budget
from dkfm.errors import BudgetError, InvalidInputError, KernelError, NotPSDError
from dkfm.execution import memory
from dkfm.numerics import pivoted_cholesky
from dkfm.numerics.pivoted_cholesky import forecast_rank
from helpers import strategies

EPS = np.finfo(np.float64).eps


def both(kernel, X, **options):
    """Pivots from the Gram matrix and column by column."""
    evaluate = kernel.make_evaluator(X)
    by_columns = pivoted_cholesky.factor_columns(kernel.diag(X), lambda p: evaluate(X[p : p + 1])[0], **options)
    return pivoted_cholesky.factor_gram(np.asfortranarray(kernel(X)), **options), by_columns


def pivot_laws(found, kernel, X, tol=None):
    """What pivots obey, however they were found, of each row's own scale."""
    K, r = kernel(X), len(found.row_indices)
    lengths = np.sqrt(K.diagonal())
    lengths = np.where(lengths > 0, lengths, 1.0)
    A, left_of_all = K / lengths[:, np.newaxis] / lengths, found.residual_summary.largest_by_rank
    assert len(set(found.row_indices.tolist())) == r == len(found.root.values)
    assert found.root.weights.shape == (r, r)
    assert not np.tril(found.root.weights, -1).any()
    assert found.root.weights.flags.c_contiguous
    F = K[:, found.row_indices] @ found.root.weights / lengths[:, np.newaxis]
    left = A.diagonal() - np.square(F).sum(axis=1)
    stop = max(64 * EPS, (tol or 0) ** 2)
    assert left.max() <= stop * (1 + 1e-9) + 64 * EPS  # the features round, too
    assert left.min() >= -1e-12
    assert np.abs(F @ F.T - A).max() <= stop + 1e-12
    assert (found.root.values > 64 * EPS).all()
    assert len(left_of_all) == r + 1
    for j in {0, r // 2, r}:  # nested: the first pivots are the factor of lower rank, and what remains is known
        short = found.root.truncate(j).weights
        features = K[:, found.row_indices[:j]] @ short / lengths[:, np.newaxis]
        most = (A.diagonal() - np.square(features).sum(axis=1)).max()
        assert most <= left_of_all[j] * (1 + 1e-6) + 1e-12
    assert len(found.root.dropped_values) == len(X) - r
    np.testing.assert_allclose(np.sort(np.delete(left, found.row_indices))[::-1], found.root.dropped_values, atol=1e-12)
    coefficients = (F @ found.root.weights.T) * lengths[found.row_indices]
    norm = np.linalg.norm(coefficients, axis=1).max(initial=1.0)
    assert 0.5 * norm <= found.residual_summary.coefficient_norm <= 2 * norm  # 16 random signs estimate it


@given(strategies.rows(1, 40), strategies.expressions, st.sampled_from([None, 1e-3, 0.3]))
@settings(max_examples=60)
def test_pivots_obey_the_laws_on_any_rows_and_kernels(X, kernel, tol):
    if kernel.definiteness is not kernels.Definiteness.PSD:
        return
    for found in both(kernel, X, tol=tol):
        pivot_laws(found, kernel, X, tol)


@pytest.mark.costly
@pytest.mark.parametrize("sigma", [0.05, 0.5, 3.0])
def test_more_pivots_than_one_block_of_columns_are_the_same_both_ways(sigma, rng):
    k, X = kernels.Gaussian(sigma), rng.normal(size=(900, 2))
    of_gram, by_columns = both(k, X)
    for found in (of_gram, by_columns):
        pivot_laws(found, k, X)
    same = of_gram.row_indices[:50] == by_columns.row_indices[:50]
    assert same.mean() > 0.9 or sigma < 0.1  # ties of equal diagonals may fall otherwise
    assert abs(len(of_gram.row_indices) - len(by_columns.row_indices)) <= 3


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kernel", "X", "rank"),
    [
        (kernels.Linear(), np.random.default_rng(0).normal(size=(80, 6)), 6),
        (kernels.Gaussian(0.3), np.repeat(np.random.default_rng(0).normal(size=(500, 3)), 2, axis=0), 500),
        (kernels.Polynomial(2), np.random.default_rng(0).normal(size=(80, 3)), 6),
        (kernels.Constant(3.0), np.zeros((5, 1)), 1),
        (kernels.Linear(), np.zeros((5, 2)), 0),
        (1e-10 * kernels.Gaussian(0.5), np.random.default_rng(0).normal(size=(50, 3)), 50),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is 0 on these rows:dkfm.errors.DkfmWarning")
def test_the_rank_is_exact_where_it_is_known(kernel, X, rank):
    for found in both(kernel, X):
        assert len(found.row_indices) == rank
        pivot_laws(found, kernel, X)
    for basis in ("symmetric", "spectral", "cholesky"):
        assert dkfm.ExactFeatureMap(kernel, basis=basis).fit(X).rank_ == rank


def test_a_pivot_that_is_only_rounding_is_discarded(rng, monkeypatch):
    k, X = kernels.Gaussian(3.0), rng.normal(size=(300, 2))
    plain, dpstrf = pivoted_cholesky.factor_gram(np.asfortranarray(k(X))), pivoted_cholesky.lapack.dpstrf
    # LAPACK goes on into rounding, as its running subtraction can make it.
    monkeypatch.setattr(
        pivoted_cholesky.lapack, "dpstrf", lambda K, tol, **options: dpstrf(K, tol=tol / 1000, **options)
    )
    found = pivoted_cholesky.factor_gram(np.asfortranarray(k(X)))
    np.testing.assert_array_equal(found.row_indices, plain.row_indices)
    pivot_laws(found, k, X)


def test_a_row_that_was_rejected_once_is_not_looked_at_again(rng, monkeypatch):
    # Two ways to add up the same squares may disagree about a row at the stop, by the last bit: here, by more.
    k, X = kernels.Gaussian(20.0), rng.normal(size=(150, 3))
    evaluate, chosen = k.make_evaluator(X), []
    other = int(np.setdiff1d(np.arange(150), both(k, X)[1].row_indices)[0])
    plain = pivoted_cholesky._compute_residuals

    def disagreeing(*arguments):
        left = plain(*arguments)
        left[other] = 1e-13
        return left

    monkeypatch.setattr(pivoted_cholesky, "_compute_residuals", disagreeing)

    def choose(left):
        chosen.append(int(left.argmax()))
        assert chosen.count(chosen[-1]) == 1
        return chosen[-1]

    found = pivoted_cholesky.factor_columns(np.ones(150), lambda p: evaluate(X[p : p + 1])[0], choose=choose)
    assert other in chosen
    assert other not in found.row_indices


def test_a_limit_takes_the_first_pivots(rng):
    k, X = kernels.Gaussian(1.0), rng.normal(size=(300, 2))
    for found, short in zip(both(k, X), both(k, X, limit=20), strict=True):
        np.testing.assert_array_equal(short.row_indices, found.row_indices[:20])
        np.testing.assert_allclose(short.root.weights, found.root.weights[:20, :20], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(
            short.residual_summary.largest_by_rank, found.residual_summary.largest_by_rank[:21], rtol=1e-6
        )


def test_a_build_by_columns_computes_only_the_columns_of_its_pivots(rng):
    k, X, asked = kernels.Gaussian(2.0), rng.normal(size=(2000, 2)), []
    evaluate = k.make_evaluator(X)
    found = pivoted_cholesky.factor_columns(np.ones(2000), lambda p: asked.append(p) or evaluate(X[p : p + 1])[0])
    assert asked == found.row_indices.tolist()
    assert len(asked) < 200


@pytest.mark.parametrize("build", ["gram", "columns"])
def test_an_indefinite_kernel_is_refused_with_numbers(build, rng):
    sigmoid = kernels.Function(lambda X, Y: np.tanh(2 * X @ Y.T - 1))
    with pytest.raises(NotPSDError, match=r'after \d+ features, k.* of (a row|two rows) is -?\d.*basis="spectral"'):
        dkfm.ExactFeatureMap(sigmoid, basis="cholesky", build=build).fit(rng.normal(size=(50, 3)))


def test_a_build_goes_from_columns_to_the_gram_where_the_rank_turns_out_high(rng, monkeypatch):
    monkeypatch.setattr(pivoted_cholesky, "BLOCK_COLUMNS", 16)
    monkeypatch.setattr(budget, "gram_and_pivots_seconds", lambda *_: 1e-3)
    monkeypatch.setattr(budget, "columnwise_pivots_seconds", lambda n, d, r: 1e-4 * r / 16)
    made, of_gram = [], pivoted_cholesky.factor_gram
    monkeypatch.setattr(pivoted_cholesky, "factor_gram", lambda *a, **o: made.append(1) or of_gram(*a, **o))
    X = rng.normal(size=(400, 3))
    low = dkfm.ExactFeatureMap(kernels.Gaussian(10.0), basis="cholesky").fit(X)
    assert (made, low.rank_ < 120) == ([], True)
    high = dkfm.ExactFeatureMap(kernels.Gaussian(0.1), basis="cholesky").fit(X)
    assert (made, high.rank_) == ([1], 400)


def test_a_forecast_follows_what_remains():
    assert forecast_rank(np.array([1.0]), 1e-3, 50) == 50
    assert forecast_rank(np.ones(20), 1e-14, 500) == 500
    assert forecast_rank(10.0 ** -np.arange(5.0), 1e-14, 500) == 14
    assert forecast_rank(10.0 ** -np.arange(16.0), 1e-14, 500) == 15


@pytest.mark.slow
@pytest.mark.parametrize("build", ["auto", "columns"])
def test_columns_are_refused_before_memory_ends_with_what_was_reached(build, rng, monkeypatch):
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 150 * 2**20)
    counted = {"columns": r"after \d+ of them", "auto": r"after [\d,]+ pivots"}  # then in rounds, which hold less
    with pytest.raises(BudgetError, match=rf"{counted[build]} the error bound is \d.*tol= or n_landmarks="):
        dkfm.ExactFeatureMap(kernels.Gaussian(0.001), basis="cholesky", build=build).fit(rng.normal(size=(6000, 2)))


def test_a_value_that_is_not_finite_is_told_by_its_rows(rng):
    X = np.ones((400, 1))
    X[7] = 1e60
    with pytest.raises(KernelError, match="returned inf for rows"):
        dkfm.ExactFeatureMap(kernels.Polynomial(3), basis="cholesky", build="columns").fit(X)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"basis": "cholesky", "rcond": 1e-9}, "use tol"),
        ({"basis": "cholesky", "on_indefinite": "clip"}, 'use basis="spectral"'),
        ({"build": "rows"}, "build must be one of auto, gram, columns"),
        ({"dtype": "float16"}, "dtype must be one of float64, float32"),
        ({"tol": -1.0}, "tol must be in"),
        ({"basis": "cholesky", "build": "gram", "landmarks": "random_pivots", "n_landmarks": 3}, "by columns"),
    ],
)
def test_parameters_that_do_not_go_together_are_refused(parameters, words, rng):
    with pytest.raises(InvalidInputError, match=words):
        dkfm.ExactFeatureMap(kernels.Gaussian(), **parameters).fit(rng.normal(size=(9, 2)))
