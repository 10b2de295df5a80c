"""Sums over training rows, beside dense formulas."""

import numpy as np
import pytest

from dkfm import kernels
from dkfm.estimators.fitting.out_of_core_rows import _add_products
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import prepare_scorer
from dkfm.numerics.skinny_and_triangular_matmul import add_lower_products
from dkfm.numerics.training_statistics import EqualRows, add_features_and_products

K = kernels.Gaussian(2.0)


@pytest.mark.parametrize("add_products", [add_lower_products, _add_products])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("n", "r"), [(1, 1), (7, 3), (2500, 40), (300, 0)])
def test_sums_of_features_and_products_are_added(add_products, is_weighted, n, r, rng):
    X, landmarks, W = rng.normal(size=(n, 3)), rng.normal(size=(50, 3)), rng.normal(size=(50, r))
    weights = rng.uniform(0, 3, size=n) if is_weighted else np.ones(n)
    weights[: n // 3] *= not is_weighted
    columns = rng.normal(size=(n, 2))
    start = rng.normal(size=(r, r))
    first, second = np.ones((2, r)), start + start.T
    truth = second.copy()
    score = prepare_scorer(Model(K, landmarks, {"features": Head(W)}))
    add_features_and_products(score, [X[: n // 2], X[n // 2 :]], columns, weights, first, second, add_products)
    features = K(X, landmarks) @ W
    # Sums of at most 2,500 terms: their rounding is eps times the sum of the terms' sizes, at most.
    allowed = 50 * np.finfo(float).eps * (1 + np.abs(features * weights[:, None]).T @ np.abs(features))
    assert (np.abs(second - truth - (features * weights[:, None]).T @ features) <= allowed).all()
    np.testing.assert_array_equal(second, second.T)
    np.testing.assert_allclose(first, 1 + columns.T @ features, rtol=1e-9, atol=1e-9)


def test_products_refuse_what_would_be_copied(rng):
    for values, out in [
        (rng.normal(size=(4, 3)).T, np.zeros((4, 4))),
        (rng.normal(size=(4, 3)).astype(np.float32), np.zeros((3, 3))),
        (rng.normal(size=(4, 3)), np.zeros((4, 4))),
        (rng.normal(size=(4, 3)), np.zeros((3, 6))[:, ::2]),
    ]:
        with pytest.raises(AssertionError, match="float64"):
            add_lower_products(values, out)


def test_equal_rows_are_those_of_weight_one():
    rows = EqualRows(5)
    np.testing.assert_array_equal(rows.weights, np.ones(5))
    np.testing.assert_array_equal(rows.weighted_columns(), np.ones((5, rows.n_columns)))
    assert rows.subset(slice(1, 4)) == EqualRows(3)
