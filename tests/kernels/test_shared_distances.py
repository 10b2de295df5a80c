"""Sums and products of functions of the distance compute it once, and keep the digits of their parts."""

from dataclasses import dataclass
from functools import reduce
from operator import add, mul

import numpy as np
import pytest

from dkfm import kernels
from dkfm.kernels.pairwise import radial_forms, squared_distances

G = kernels.Gaussian
TERMS = {
    "roots": (G(2.0), kernels.Exponential(1.0)),
    "three widths": (G(0.5), G(2.0), G(8.0)),
    "multiples": (1e-8 * G(0.3), kernels.Exponential(1.0), 1e6 * kernels.Matern(1.5, 3.0)),
    "functions": (G(2.0) ** 2, kernels.Exp(kernels.RationalQuadratic(0.7, 2.0)), 2.0 * (G(1.0) + G(3.0))),
}


def rows(rng, d, shift, dtype):
    """Return rows in clusters, with near pairs and equal rows."""
    X = rng.normal(size=(60, d)) + shift * rng.integers(-1, 2, (60, 1))
    X[20:30] = X[:10] + 0.01 * rng.normal(size=(10, d))
    X[30:40] = X[:10] + 1e-4 * rng.normal(size=(10, d))
    X[40:50] = X[:10]
    return X.astype(dtype)


def value_from_differences(kernel, Z, X):
    """Return the values of a function of the distance from squared distances in extended precision."""
    form = kernel.radial_form(X.shape[1])
    squares = (((Z[:, np.newaxis] - X).astype(np.longdouble) / form.scale) ** 2).sum(axis=2)
    return form.map_values(-squares.astype(np.float64))


@pytest.mark.parametrize("operation", [add, mul], ids=["sum", "product"])
@pytest.mark.parametrize("d", [2, 30])
@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_a_combination_is_that_of_its_parts_to_its_own_scale(terms, dtype, shift, d, operation):
    X, Z = (rows(np.random.default_rng(0), d, shift, dtype) for _ in range(2))
    combination = reduce(operation, terms)
    found, expected = combination(Z, X), reduce(operation, (value_from_differences(k, Z, X) for k in terms))
    largest = float(combination.diag(X[:1])[0])
    limit = 1e-5 if dtype == np.float32 else 3e-14  # 8 eps times squared norms of some tens; see Gaussian
    assert np.abs(found - expected).max() <= limit * largest
    assert (np.diag(found)[:20] == combination.diag(X[:20])).all()


@pytest.mark.parametrize("others", [(), (kernels.Linear(), kernels.Cosine())], ids=["alone", "among others"])
def test_distances_are_computed_once(rng, monkeypatch, others):
    made, prepare = [], radial_forms.prepare_negative_squared_distances
    monkeypatch.setattr(
        radial_forms, "prepare_negative_squared_distances", lambda *given: made.append(1) or prepare(*given)
    )
    X = rng.normal(size=(9, 6))
    (kernels.Linear() + reduce(add, (G(1.0), *others, 2.0 * G(3.0), G(2.0) * kernels.Matern(2.5))))(X)
    assert len(made) == 1


def test_a_term_with_a_length_scale_for_each_column_has_its_own_distances(rng):
    X = rng.normal(size=(9, 2))
    k, other = G((1.0, 5.0)), G(2.0)
    np.testing.assert_allclose((k + other)(X), k(X) + other(X), rtol=1e-15)


def test_terms_of_weight_0_are_computed(rng):
    X = rng.normal(size=(9, 6))
    assert not (0.0 * G(1.0) + 0.0 * G(2.0))(X).any()


@dataclass(frozen=True)
class Doubled(kernels.Gaussian):
    """A kernel of a user's that changes how blocks are computed."""

    def prepare(self, landmarks):
        inner = super().prepare(landmarks)
        return lambda Z, out=None, /: 2 * inner(Z, out)


def test_a_subclass_that_computes_blocks_in_another_way_is_asked_for_them(rng):
    X = rng.normal(size=(9, 6))
    for k in (Doubled(1.0) + G(2.0), 0.5 * Doubled(1.0) + G(2.0), (Doubled(1.0) + G(3.0)) + G(2.0)):
        np.testing.assert_allclose(k(X), sum(term(X) for term in k.parts), rtol=1e-14)
    assert (Doubled(1.0) + G(2.0))(X)[0, 0] == 3


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_equal_rows_give_the_diagonal_whatever_the_order_of_the_terms(rng, dtype):
    X = rng.normal(size=(60, 5)).astype(dtype)
    for weights in rng.uniform(0.01, 1.0, (20, 4)):
        a, b, c, e = map(float, weights)
        k = kernels.Constant(a) + b * G(1.0) + kernels.ArcCosine(0) * c + e * G(2.0)
        np.testing.assert_array_equal(np.diag(k(X)), k.diag(X))


@pytest.mark.parametrize("d", [8, 64])
def test_a_wide_and_a_narrow_term_recompute_no_more_pairs_than_each_alone(rng, monkeypatch, d):
    X, Z = rng.normal(size=(200, d)), rng.normal(size=(100, d))
    pairs, compute = [], squared_distances._Products._pair_squared_distances

    def count(products, Z, i, j):
        pairs.append(len(i))
        return compute(products, Z, i, j)

    monkeypatch.setattr(squared_distances._Products, "_pair_squared_distances", count)
    narrow, wide = G(np.sqrt(d) / 16), G(np.sqrt(d))
    counts = []
    for k in (narrow, wide, narrow + wide):
        pairs.clear()
        k(Z, X)
        counts.append(sum(pairs))
    assert counts[2] <= counts[0] + counts[1]


def test_a_nested_term_that_needs_float64_is_computed_in_it(rng):
    X = rng.normal(size=(40, 9)).astype(np.float32)
    k = (G(1.0) + kernels.Matern(0.7, 2.0)) + kernels.Exp(kernels.RationalQuadratic(0.5)) * G(3.0)
    assert not k.get_valid_radial_form(9).supports_float32
    truth = k(X.astype(np.float64))
    assert np.abs(k(X) - truth).max() <= 1e-6 * truth.max()
