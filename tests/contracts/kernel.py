"""What every kernel obeys."""

import copy
import json
import pickle

import numpy as np
import pytest
from scipy.sparse import csr_array, csr_matrix

from dkfm import kernels
from dkfm.errors import InvalidInputError
from dkfm.kernels import serialization
from helpers import oracles


def value_scale(kernel, X):
    """The size of the kernel's values, for tolerances: a sum of products rounds like its largest term."""
    return max(float(np.abs(kernel.diag(X)).max()), float(np.abs(kernel(X)).max()), 1e-300)


def check_kernel(kernel, X, Y, rtol=1e-12):
    """What every kernel obeys on rows X and Y of one width."""
    size = value_scale(kernel, np.vstack([X, Y]))
    block = kernel(X, Y)
    _check_gram(kernel, X, size, rtol)
    _check_blocks(kernel, X, Y, block, rtol * size)
    _check_float32(kernel, X, Y)
    _check_sparse_rows(kernel, X, Y, block, rtol * size)
    _check_value(kernel, X)


def _check_gram(kernel, X, size, rtol):
    K = kernel(X)
    assert K.shape == (len(X), len(X))
    assert K.dtype == np.float64
    assert np.array_equal(K, K.T), "symmetric to the last bit"
    np.testing.assert_allclose(np.diag(K), kernel.diag(X), rtol=rtol, atol=rtol * size)
    duplicated = kernel(np.vstack([X, X]))
    np.testing.assert_allclose(duplicated[: len(X), len(X) :], K, rtol=rtol, atol=rtol * size)
    if kernel.definiteness is kernels.Definiteness.CONDITIONAL:
        K, duplicated = oracles.centred(K), oracles.centred(duplicated)
    if kernel.definiteness is not kernels.Definiteness.INDEFINITE:
        for gram in (K, duplicated):
            assert np.linalg.eigvalsh(gram)[0] >= -1e-12 * len(gram) * size, "as definite as it says, to rounding"


def _check_blocks(kernel, X, Y, block, atol):
    np.testing.assert_allclose(block, kernel(Y, X).T, rtol=1e-12, atol=atol)
    points = np.array([[kernel(x[None], y[None])[0, 0] for y in Y] for x in X])
    np.testing.assert_allclose(block, points, rtol=1e-12, atol=atol)
    rows, columns = slice(len(X) // 3, None), slice(None, len(Y) // 2 + 1)
    np.testing.assert_allclose(block[rows, columns], kernel(X[rows], Y[columns]), rtol=1e-12, atol=atol)
    prepared = kernel.make_evaluator(Y)
    np.testing.assert_allclose(prepared(X), block, rtol=1e-12, atol=atol)
    first = prepared(X)
    prepared(X)[:] = np.nan
    assert np.isfinite(first).all(), "every block is the caller's own"


def _check_float32(kernel, X, Y):
    """float32 rows give float32 values, that are those of the stored rows in float64 to 1e-5 of the largest."""
    x, y = (X * 1.1).astype(np.float32), (Y * 1.1).astype(np.float32)  # that float32 products round
    truth = kernel(x.astype(np.float64), y.astype(np.float64))
    found = kernel(x, y)
    assert found.dtype == kernel(x).dtype == kernel.diag(x).dtype == np.float32
    size = value_scale(kernel, np.vstack([x, y]).astype(np.float64))
    assert np.abs(found - truth).max() <= 1e-5 * size + np.finfo(np.float32).tiny
    assert np.array_equal(kernel(x), kernel(x).T)
    np.testing.assert_array_equal(kernel(x, y.astype(np.float64)), truth)
    np.testing.assert_array_equal(kernel(x.astype(np.float64), y), truth)


def _check_sparse_rows(kernel, X, Y, block, atol):
    """Sparse rows, on either side, give what dense rows give, or a refusal."""
    x, y = csr_array(X), csr_matrix(Y)
    if not kernel.supports_sparse:
        with pytest.raises(InvalidInputError, match=r"dense rows|sparse rows dense"):
            kernel(x, y)
        return
    for found in (kernel(x, y), kernel(X, y), kernel(x, Y)):
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found, block, rtol=1e-12, atol=atol)
    np.testing.assert_allclose(kernel.diag(x), kernel.diag(X), rtol=1e-12, atol=atol)
    assert kernel(x.astype(np.float32), y.astype(np.float32)).dtype == np.float32


def _check_value(kernel, X):
    back = serialization.from_config(json.loads(json.dumps(serialization.to_config(kernel))))
    assert back == kernel
    assert hash(back) == hash(kernel)
    assert json.dumps(serialization.to_config(back)) == json.dumps(serialization.to_config(kernel))
    assert pickle.loads(pickle.dumps(kernel)) == kernel
    assert copy.deepcopy(kernel) == kernel
    assert eval(repr(kernel), vars(kernels)) == kernel, "the repr builds the kernel again"
    assert kernel.resolve(X).definiteness is kernel.definiteness
