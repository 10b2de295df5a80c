"""The tile loop: any tiling agrees within the rounding bound, every link is what its formula says."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfm import kernels
from dkfm.core.chunking import row_slices
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.errors import InvalidInputError, KernelError, UnsupportedStoreError
from dkfm.numerics import links, scorer
from dkfm.numerics.model import Head, Model

KINDS = ["scores", "features", "rotated", "triangular", "residual", "short"]


class Kept:
    """Weights as a store has them: read by panels."""

    def __init__(self, weights, panel):
        self.weights, self.panel_columns = weights, panel
        self.shape, self.dtype = weights.shape, weights.dtype

    def __getitem__(self, places):
        return self.weights[places].copy()


def make(rng, n, d, q, offset, dtype="float64", panel=None):
    """Make a model with a head of every kind; some share their weights, and some landmarks have none in any."""

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    W, V, b = normal(n, q), normal(n, q) / n, normal(q) if offset else None
    if panel is not None:
        V = Kept(V, panel)
    heads = {
        "scores": Head(W, b),
        "features": Head(V, b),
        "rotated": Head(V, b, sqrt_eigenvalues=np.abs(normal(q))),
        "triangular": Head(np.triu(normal(n, n)), triangular=True),
        "residual": Head(V, link=links.RESIDUAL),
        "short": Head(V, link=links.RESIDUAL, n_leading_columns=q // 2),
    }
    return Model(kernels.Gaussian(2.0), normal(n, d), heads)


def truth_and_bound(model, Z, name):
    """Return an output by dense formulas in float64, and what rounding allows between any two ways to compute it."""
    head, eps = model.head(name), np.finfo(model.dtype).eps
    W = head.weights.weights if isinstance(head.weights, Kept) else head.weights
    W = W[:, : head.n_leading_columns].astype(float)
    b = np.zeros(W.shape[1]) if head.offset is None else head.offset.astype(float)
    values = np.exp(-((Z[:, None].astype(model.dtype) - model.landmarks).astype(float) ** 2).sum(axis=2) / 8)
    product, error = values @ W - b, 64 * eps * (np.abs(values) @ np.abs(W) + np.abs(b))
    if head.sqrt_eigenvalues is not None:
        return (product * head.sqrt_eigenvalues) @ W.T, (
            (error + 64 * eps * np.abs(product)) * head.sqrt_eigenvalues
        ) @ np.abs(W.T)
    if head.link == links.RESIDUAL:
        truth = np.maximum(1 - (product**2).sum(axis=1, keepdims=True), 0)
        return truth, (2 * np.abs(product) * error + error**2).sum(axis=1, keepdims=True) + 64 * eps
    return product, error


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 7), st.integers(1, 5), st.integers(1, 60)),
    rows=st.none() | st.integers(1, 70),
    chunk=st.integers(1, 60),
    threads=st.integers(1, 3),
    names=st.lists(st.sampled_from(KINDS), min_size=1, unique=True),
    dtype=st.sampled_from(["float64", "float32"]),
    panel=st.none() | st.integers(1, 6),
    offset=st.booleans(),
)
def test_any_tile_chunks_threads_and_set_of_heads_agree_within_the_rounding_bound(
    shape, rows, chunk, threads, names, dtype, panel, offset
):
    n, d, q, m = shape
    rng = np.random.default_rng(n * m)
    model, Z = make(rng, n, d, q, offset, dtype, panel), rng.normal(size=(m, d))
    score = replace(scorer.prepare_scorer(model), threads=threads)
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda part: score.score_heads(names, Z[part], rows), row_slices(m, chunk)))
    for name in names:
        found = np.concatenate([part[name] for part in parts])
        assert found.dtype == dtype
        truth, bound = truth_and_bound(model, Z, name)
        assert (np.abs(found - truth) <= bound).all()
        assert (np.abs(found - score(name, Z)) <= bound).all()


def test_heads_together_share_one_kernel_block(rng):
    calls = []

    def block(X, Y):
        calls.append(len(X))
        return X @ Y.T

    model = make(rng, 40, 3, 4, True)
    model = replace(model, kernel=kernels.Function(block))
    score, Z = scorer.prepare_scorer(model), rng.normal(size=(100, 3))
    both = score.score_heads(["scores", "features", "triangular"], Z, 30)
    assert calls == [25, 25, 25, 25]  # tiles of one size, none above what was asked for
    for name, found in both.items():
        np.testing.assert_array_equal(found, score(name, Z, 30))


def test_a_kernel_may_score_with_another_model_meanwhile(rng):
    X, Z = rng.normal(size=(40, 3)), rng.normal(size=(30, 3))
    inner = scorer.prepare_scorer(Model(kernels.Gaussian(1.0), X, {"scores": Head(rng.normal(size=(40, 40)))}))

    def block(A, B):
        inner("scores", A)
        return np.ones((len(A), len(B)))

    nested = kernels.Gaussian(2.0) + kernels.Function(block)
    W = rng.normal(size=(40, 2))
    score = scorer.prepare_scorer(Model(nested, X, {"scores": Head(W)}))
    score("scores", Z)  # from here on this thread has a buffer that both could take
    found = score("scores", Z, 7)
    np.testing.assert_allclose(found, (kernels.Gaussian(2.0)(Z, X) + 1) @ W, rtol=1e-10)


def test_landmarks_without_weights_are_dropped_and_nothing_changes(rng):
    model, Z = make(rng, 50, 3, 4, True), rng.normal(size=(20, 3))
    heads = {name: model.heads[name] for name in ("scores", "residual", "short")}
    for head in heads.values():
        head.weights[10:30] = 0
    sparser = Model(model.kernel, model.landmarks, heads)
    fewer = scorer.drop_idle_landmarks(sparser)
    assert fewer.landmarks.shape == (30, 3)
    for name in heads:
        np.testing.assert_allclose(
            scorer.prepare_scorer(fewer)(name, Z), scorer.prepare_scorer(sparser)(name, Z), rtol=1e-12
        )
    assert scorer.drop_idle_landmarks(fewer) is fewer
    heads["scores"].weights[12] = 1.0  # in one head is enough
    assert scorer.drop_idle_landmarks(Model(model.kernel, model.landmarks, heads)).landmarks.shape == (31, 3)
    heads["scores"].weights[13:23] = 1.0  # few that are idle are not worth a copy of the others
    assert scorer.drop_idle_landmarks(Model(model.kernel, model.landmarks, heads)).landmarks.shape == (50, 3)


def test_a_model_keeps_one_landmark_and_those_that_a_rotation_maps_back_to(rng):
    nothing = Model(kernels.Gaussian(1.0), rng.normal(size=(5, 2)), {"scores": Head(np.zeros((5, 3)))})
    assert scorer.drop_idle_landmarks(nothing).landmarks.shape == (1, 2)
    weights = np.eye(5)[:, :2]
    rotated = replace(nothing, heads={"features": Head(weights, sqrt_eigenvalues=np.ones(2))})
    assert scorer.drop_idle_landmarks(rotated) is rotated
    assert not scorer.prepare_scorer(
        replace(rotated, heads={"features": Head(weights[:, :0], sqrt_eigenvalues=np.ones(0))})
    )("features", np.zeros((3, 2))).any()


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.Gaussian(30.0),
        kernels.Polynomial(2, scale=0.01, offset=1.0),
        kernels.Gaussian(30.0) + 0.5 * kernels.Linear().warp(kernels.Affine(0.1)),
        kernels.Laplacian(30.0),
        kernels.Cosine() ** 2,
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_kernel_writes_its_block_where_it_is_told(kernel, dtype, rng):
    X, Z = rng.normal(size=(40, 9)).astype(dtype), rng.normal(size=(7, 9)).astype(dtype)
    out = np.full((7, 40), np.nan, dtype)
    found = kernel.make_evaluator(X)(Z, out)
    if kernel.supports_float32 and not isinstance(kernel, kernels.Power):
        assert np.shares_memory(found, out)
    np.testing.assert_array_equal(found, kernel.make_evaluator(X)(Z))


def test_no_temporary_grows_with_the_number_of_rows(rng):
    import tracemalloc

    model = Model(kernels.Gaussian(3.0), rng.normal(size=(2000, 20)), {"scores": Head(rng.normal(size=(2000, 2)))})
    score, peaks = scorer.prepare_scorer(model), []
    for rows in (20 * 512, 200 * 512):  # whole tiles, so that both have the same
        Z = np.zeros((rows, 20))
        tracemalloc.start()
        with ThreadPoolExecutor(1) as fresh:  # this thread may have a buffer from before
            fresh.submit(score, "scores", Z).result()
        peaks.append(tracemalloc.get_traced_memory()[1] - 8 * 2 * rows)
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]


def test_the_same_tiling_gives_the_same_bits(rng):
    model, Z = make(rng, 300, 20, 5, True), rng.normal(size=(2000, 20))
    score = scorer.prepare_scorer(model)
    np.testing.assert_array_equal(score("scores", Z), score("scores", Z))


def test_the_residual_link_is_the_clipped_difference(rng):
    model, Z = make(rng, 30, 4, 3, False), rng.normal(size=(50, 4))
    product = model.kernel(Z, model.landmarks) @ model.heads["residual"].weights
    truth = np.maximum(1 - (product**2).sum(axis=1), 0)[:, None]
    np.testing.assert_allclose(scorer.prepare_scorer(model)("residual", Z, 7), truth, atol=1e-14)
    assert (truth == 0).any() or (truth > 0).any()


def test_an_unknown_head_or_link_is_refused(rng):
    with pytest.raises(InvalidInputError, match="it has scores, features"):
        make(rng, 3, 2, 1, False).head("labels")
    with pytest.raises(UnsupportedStoreError, match="no link"):
        links.link_by_name("eval")


def test_a_row_that_overflows_the_kernel_is_named():
    model = Model(kernels.Polynomial(3), np.ones((2, 1)), {"scores": Head(np.ones((2, 1)))})
    Z = np.array([[1.0], [1e200], [2.0]])
    with pytest.raises(KernelError, match="Row 1 of the file overflows"):
        scorer.compute_finite_scores(scorer.prepare_scorer(model), "scores", Z, "the file")


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (700, 11), (2, 3)])
def test_lent_memory_begins_where_registers_read_it_at_once(shape):
    buffers = ThreadBuffer()
    with buffers.borrow(*shape, np.dtype(np.float32)) as first, buffers.borrow(*shape, np.dtype(np.float32)) as second:
        assert first.shape == second.shape == shape
        assert not np.shares_memory(first, second)
        assert [a.ctypes.data % 64 for a in (first, second)] == [0, 0]
    with buffers.borrow(*shape, np.dtype(np.float32)) as again:
        assert again.ctypes.data in (first.ctypes.data, second.ctypes.data)
