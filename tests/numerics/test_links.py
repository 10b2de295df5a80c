"""Links: what classes and their chances come to, beside SciPy's and scikit-learn's own words for them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit

from dkfm import kernels
from dkfm.errors import UnsupportedStoreError
from dkfm.numerics import links
from dkfm.numerics.certificates.reference_scores import ReferenceScorer, propagate_error_through_link
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import prepare_scorer

PRODUCTS = st.integers(1, 4).flatmap(lambda q: arrays(np.float64, (5, q), elements=st.floats(-800, 800)))
CHANCES = [links.SIGMOID, links.SOFTMAX, links.MODIFIED_HUBER]


def through(link, product):
    return links.link_by_name(link)(product.copy(), lambda: pytest.fail("no diagonal is asked for"))


@given(PRODUCTS)
def test_the_class_is_that_of_the_largest_column_or_of_the_sign_of_one(product):
    expected = product.argmax(axis=1) if product.shape[1] > 1 else product[:, 0] > 0
    np.testing.assert_array_equal(through(links.ARGMAX, product)[:, 0], expected)


@given(PRODUCTS)
def test_chances_are_the_formulas_and_add_up_to_1(product):
    both = product if product.shape[1] > 1 else np.hstack([-product, product])
    halves = (np.clip(both, -1, 1) + 1) / 2
    halves[halves.sum(axis=1) == 0] = 1
    ratios = np.exp(product - product.max(axis=1, keepdims=True))
    formulas = {links.SIGMOID: expit(both), links.MODIFIED_HUBER: halves, links.SOFTMAX: ratios}
    for link, formula in formulas.items():
        found, sums = through(link, product), formula.sum(axis=1, keepdims=True)
        some = sums[:, 0] > 1e-300  # below that only logarithms have the shares
        np.testing.assert_allclose(found[some], (formula / np.where(sums > 0, sums, 1))[some], atol=1e-12)
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)
        assert found.shape[1] == links.output_width(link, product.shape[1])


@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("columns", [1, 3])
def test_a_row_that_overflows_has_no_class_and_no_chances(lost, columns):
    product = np.zeros((2, columns))
    product[1, 0] = lost
    with np.errstate(invalid="ignore"):
        for link in (links.ARGMAX, *CHANCES):
            found = through(link, product)
            np.testing.assert_array_equal(links.find_valid_rows(found), [True, False])
        assert through(links.ARGMAX, product)[1, 0] == links.NO_CODE


def test_chances_of_all_but_impossible_classes_are_still_shares():
    np.testing.assert_allclose(through(links.SIGMOID, np.array([[-1000.0, -1001.0]])), expit([[1.0, -1.0]]))


@pytest.mark.parametrize("link", sorted(links._REGISTRY))
def test_every_link_has_bounds_of_its_errors_and_is_described(link, rng):
    pages = Path(__file__).parents[2] / "docs" / "explanation" / "store_formats.md"
    assert f"`{link}`" in pages.read_text(encoding="utf-8")
    X, W = rng.normal(size=(40, 2)), rng.normal(size=(40, 1 if link == links.NOT_NEGATIVE else 3))
    model = Model(kernels.Gaussian(1.0), X, {"head": Head(W, link=link)})
    values, allowed = ReferenceScorer(model).compute(["head"], X[:9])["head"]
    found = prepare_scorer(model)("head", X[:9])
    assert values.shape == found.shape == (9, links.output_width(link, W.shape[1]))
    assert (np.abs(values - found) <= allowed).all()


def test_a_link_whose_errors_are_not_known_has_no_bound():
    with pytest.raises(AssertionError, match="'exp' are not known"):
        propagate_error_through_link("exp", np.ones((2, 3)), np.ones((2, 3)), 1e-16)


def test_a_link_that_is_not_in_the_registry_is_refused():
    with pytest.raises(UnsupportedStoreError, match="no link 'exec'"):
        links.link_by_name("exec")
