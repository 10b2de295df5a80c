"""The tile loop: any tiling agrees within the rounding bound, every link is what its formula says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm import apply, kernels, links
from dkfm.errors import InvalidInputError, KernelError, UnsupportedStoreError
from dkfm.model import Head, Model


def make(rng, n, d, q, offset):
    heads = {
        "scores": Head(rng.normal(size=(n, q)), rng.normal(size=q) if offset else None),
        "residual": Head(rng.normal(size=(n, q)) / n, link=links.RESIDUAL),
    }
    return Model(kernels.Gaussian(2.0), rng.normal(size=(n, d)), heads)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(1, 50), st.integers(1, 60), st.booleans())
def test_any_tiling_agrees_within_the_rounding_bound(n, d, q, m, rows, offset):
    rng = np.random.default_rng(n * m)
    model, Z = make(rng, n, d, q, offset), rng.normal(size=(m, d))
    score = apply.prepare(model)
    head = model.heads["scores"]
    sizes = np.abs(model.kernel(Z, model.landmarks)) @ np.abs(head.weights)
    bound = 64 * np.finfo(float).eps * (sizes + (0 if head.offset is None else np.abs(head.offset)))
    assert (np.abs(score("scores", Z, rows) - score("scores", Z)) <= bound).all()
    dense = model.kernel(Z, model.landmarks) @ head.weights - (0 if head.offset is None else head.offset)
    assert (np.abs(score("scores", Z, rows) - dense) <= bound).all()


def test_the_same_tiling_gives_the_same_bits(rng):
    model, Z = make(rng, 300, 20, 5, True), rng.normal(size=(2000, 20))
    score = apply.prepare(model)
    np.testing.assert_array_equal(score("scores", Z), score("scores", Z))


def test_the_residual_link_is_the_clipped_difference(rng):
    model, Z = make(rng, 30, 4, 3, False), rng.normal(size=(50, 4))
    product = model.kernel(Z, model.landmarks) @ model.heads["residual"].weights
    truth = np.maximum(1 - (product**2).sum(axis=1), 0)[:, None]
    np.testing.assert_allclose(apply.prepare(model)("residual", Z, 7), truth, atol=1e-14)
    assert (truth == 0).any() or (truth > 0).any()


def test_an_unknown_head_or_link_is_refused(rng):
    with pytest.raises(InvalidInputError, match="it has scores, residual"):
        make(rng, 3, 2, 1, False).head("labels")
    with pytest.raises(UnsupportedStoreError, match="no link"):
        links.by_name("eval")


def test_a_row_that_overflows_the_kernel_is_named():
    model = Model(kernels.Polynomial(3), np.ones((2, 1)), {"scores": Head(np.ones((2, 1)))})
    Z = np.array([[1.0], [1e200], [2.0]])
    with pytest.raises(KernelError, match="Row 11 of the file overflows"):
        apply.finite_scores(apply.prepare(model), "scores", Z, "the file", 10)
