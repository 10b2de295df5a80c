"""Distances of rows with a few columns, compiled by LLVM: SciPy's bits, in any tile, at any place in memory."""

import copy
import pickle
import platform
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from dkfm import kernels
from dkfm.errors import MissingExtraError
from dkfm.kernels import separable
from dkfm.kernels.pairwise import block_operations, squared_distances

SIZES = (1, 15, 16, 17, 255, 256, 257, 500)
"""Numbers of landmarks around whole vectors and whole parts."""


@pytest.fixture
def compiled():
    pytest.importorskip("llvmlite", reason="the extra fast is not installed; .ci/run has it")
    from dkfm.kernels.pairwise.squares_llvm import CompiledSquares

    return CompiledSquares


def negative_squares(Z, X, weights, dtype):
    """Return what SciPy and NumPy compute without LLVM."""
    out = np.empty((len(Z), len(X)), dtype)
    if weights.size == 1:
        return np.multiply(cdist(Z, X, "sqeuclidean"), weights, out=out, casting="same_kind")
    return np.negative(cdist(Z, X, "sqeuclidean", w=-weights), out=out, casting="same_kind")


def assert_same(found, expected):
    """Assert equal bits; where a compiler may round two operations at once, nearly equal ones."""
    if platform.machine() in {"x86_64", "AMD64"}:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(found.dtype).eps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8, 11])
def test_compiled_squares_are_those_of_scipy_and_nothing_else_is_written(compiled, d, dtype, rng):
    for m in SIZES:
        Z, X = rng.normal(size=(37, d)) * 10.0 ** rng.integers(-3, 4, 37)[:, None], rng.normal(size=(m, d))
        for weights in (np.array(-0.7), -rng.uniform(0.1, 3, d)):
            memory = np.full((39, m + 5), 7.0, dtype)
            compiled(X, weights)(Z, memory[1:-1, 2:-3])
            assert_same(memory[1:-1, 2:-3], negative_squares(Z, X, weights, dtype))
            memory[1:-1, 2:-3] = 7
            assert (memory == 7).all()
            compiled(X, weights)(Z[:0], memory[:0, 2:-3])


LAYOUTS = [np.asfortranarray, lambda X: np.repeat(X, 2, axis=1)[:, ::2], lambda X: X[::-1, ::-1].copy()[::-1, ::-1]]


@pytest.mark.parametrize("layout", [*LAYOUTS, np.float32])
def test_rows_may_have_any_layout(compiled, layout, rng):
    Z, X = np.float32(rng.normal(size=(9, 5))).astype(np.float64), rng.normal(size=(40, 5))
    out = np.empty((9, 40))
    compiled(X, np.array(-1.0))(layout(Z), out)
    assert_same(out, -cdist(Z, X, "sqeuclidean"))
    compiled(layout(Z), np.array(-1.0))(X, out.reshape(40, 9))
    assert_same(out.reshape(40, 9), -cdist(X, Z, "sqeuclidean"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_may_have_any_layout(compiled, layout, rng):
    Z, X, out = rng.normal(size=(9, 5)), rng.normal(size=(40, 5)), layout(np.empty((9, 40)))
    compiled(X, np.array(-1.0))(Z, out)
    assert_same(out, -cdist(Z, X, "sqeuclidean"))


def test_rows_and_blocks_that_do_not_fit_are_refused(compiled, rng):
    Z, X, read_only = rng.normal(size=(9, 5)), rng.normal(size=(40, 5)), np.empty((9, 40))
    read_only.flags.writeable = False
    fill = compiled(X, np.array(-1.0))
    rows = [(Z[:, :4], np.empty((9, 40))), (Z[:, :1], np.empty((9, 40)))]
    for wrong, out in [*rows, (Z, np.empty((9, 39))), (Z, np.empty((8, 40))), (Z, read_only)]:
        with pytest.raises(ValueError, match=r"^Rows of 5 columns fill a writable block of 40; got"):
            fill(wrong, out)


def test_copies_outlive_what_they_are_copies_of(compiled, rng):
    Z, X = rng.normal(size=(9, 5)), rng.normal(size=(40, 5))
    for scale in (np.array(-1.0), -rng.uniform(0.5, 2, 5)):
        first = compiled(X, scale)
        copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
        first._columns.fill(np.nan)
        del first
        for one in copies:
            out = np.empty((9, 40))
            one(Z, out)
            assert_same(out, negative_squares(Z, X, scale, "float64"))


def test_threads_compile_and_fill_at_once(compiled, rng):
    from dkfm.kernels.pairwise import squares_llvm

    squares_llvm._compile.cache_clear()
    Z, X = rng.normal(size=(300, 7)), rng.normal(size=(500, 7))
    expected = kernels.Gaussian(1.0)(Z, X)
    squares_llvm._compile.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: kernels.Gaussian(1.0)(Z, X), range(16)):
            np.testing.assert_array_equal(found, expected)


def test_a_broken_llvmlite_is_named(monkeypatch):
    monkeypatch.setattr(block_operations, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(MissingExtraError, match=r"^llvmlite, of the extra fast, cannot be loaded: .*; install"):
        block_operations.has_llvm.__wrapped__()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("d", range(1, 9))
def test_a_value_is_the_same_in_any_tile(d, dtype, rng):
    if d > 4:
        pytest.importorskip("llvmlite", reason="the extra fast is not installed; .ci/run has it")
    Z, X = rng.normal(size=(70, d)).astype(dtype), rng.normal(size=(300, d)).astype(dtype)
    for k in (kernels.Gaussian(1.3), kernels.Matern(1.5, rng.uniform(0.5, 2, d)), kernels.RationalQuadratic(0.7, 2.0)):
        whole = k(Z, X)
        for rows, columns in (
            (slice(3, 9), slice(1, 2)),
            (slice(0, 70), slice(2, 300)),
            (slice(66, 67), slice(60, 81)),
        ):
            np.testing.assert_array_equal(k(Z[rows], X[columns]), whole[rows, columns])


@pytest.mark.parametrize("d", range(1, 9))
def test_without_llvm_the_values_are_the_same_up_to_rounding(compiled, d, rng, monkeypatch):
    X = np.concatenate([rng.normal(size=(60, d)) + 30 * shift for shift in (0, 1)])
    X[1] = X[0] + 1e-9
    scales = rng.uniform(0.5, 2, d)
    chosen = [kernels.Gaussian(1.0), kernels.Exponential(2.0), kernels.Matern(2.5, scales), kernels.Periodic(1.0, 3.0)]
    for k in (*chosen, kernels.NegativeSquaredDistance() + kernels.Constant(4.0 * d)):
        found, found32 = k(X, X[:50]), k(X.astype(np.float32), X[:50].astype(np.float32))
        with monkeypatch.context() as patched:
            for module in (separable, squared_distances):
                patched.setattr(module, "has_llvm", lambda: False)
            np.testing.assert_allclose(found, k(X, X[:50]), rtol=1e-12, atol=1e-14)
            expected = k(X.astype(np.float32), X[:50].astype(np.float32))
        np.testing.assert_allclose(found32, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
