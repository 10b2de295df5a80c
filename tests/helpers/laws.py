"""What every kernel, map, estimator and store obeys. The tests run each class through these."""

import copy
import json
import pickle

import dask.array as da
import numpy as np
import pytest
from scipy.sparse import csr_array, csr_matrix
from sklearn.base import clone

import dkfm
from dkfm import kernels
from dkfm.errors import InvalidInputError
from dkfm.kernels import serialization
from helpers import oracles

EPS = np.finfo(np.float64).eps


def scale_of(kernel, X):
    """The size of the kernel's values, for tolerances: a sum of products rounds like its largest term."""
    return max(float(np.abs(kernel.diag(X)).max()), float(np.abs(kernel(X)).max()), 1e-300)


def kernel_laws(kernel, X, Y, rtol=1e-12):
    """What every kernel obeys on rows X and Y of one width."""
    size = scale_of(kernel, np.vstack([X, Y]))
    block = kernel(X, Y)
    gram_laws(kernel, X, size, rtol)
    block_laws(kernel, X, Y, block, rtol * size)
    precision_laws(kernel, X, Y)
    sparse_laws(kernel, X, Y, block, rtol * size)
    value_laws(kernel, X)


def gram_laws(kernel, X, size, rtol):
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


def block_laws(kernel, X, Y, block, atol):
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


def precision_laws(kernel, X, Y):
    """float32 rows give float32 values, that are those of the stored rows in float64 to 1e-5 of the largest."""
    x, y = (X * 1.1).astype(np.float32), (Y * 1.1).astype(np.float32)  # that float32 products round
    truth = kernel(x.astype(np.float64), y.astype(np.float64))
    found = kernel(x, y)
    assert found.dtype == kernel(x).dtype == kernel.diag(x).dtype == np.float32
    size = scale_of(kernel, np.vstack([x, y]).astype(np.float64))
    assert np.abs(found - truth).max() <= 1e-5 * size + np.finfo(np.float32).tiny
    assert np.array_equal(kernel(x), kernel(x).T)
    np.testing.assert_array_equal(kernel(x, y.astype(np.float64)), truth)
    np.testing.assert_array_equal(kernel(x.astype(np.float64), y), truth)


def sparse_laws(kernel, X, Y, block, atol):
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


def value_laws(kernel, X):
    back = serialization.from_config(json.loads(json.dumps(serialization.to_config(kernel))))
    assert back == kernel
    assert hash(back) == hash(kernel)
    assert serialization.kernel_digest(back) == serialization.kernel_digest(kernel)
    assert pickle.loads(pickle.dumps(kernel)) == kernel
    assert copy.deepcopy(kernel) == kernel
    assert eval(repr(kernel), vars(kernels)) == kernel, "the repr builds the kernel again"
    assert kernel.resolve(X).definiteness is kernel.definiteness


def map_laws(phi, X, Z, bound=1e-9):
    """Exactness of a fitted map, its certificate, residual and bases, for training rows X and other rows Z."""
    k = phi.kernel_
    size = scale_of(k, np.vstack([X, Z]))
    features, others = phi.transform(X), phi.transform(Z)
    assert features.shape == (len(X), phi._n_features_out)
    assert np.abs(features @ features.T - k(X)).max() <= bound * size
    assert np.abs(features @ others.T - k(X, Z)).max() <= bound * size
    assert phi.certificate_.error <= bound
    residual = phi.residual(Z)
    assert (residual >= 0).all()
    assert (phi.residual(X) <= bound * size).all()
    gap = np.abs(others @ others.T - k(Z))
    assert (gap <= np.sqrt(np.outer(residual, residual)) + (1e-8 + bound) * size).all()
    assert phi.rank_ + len(phi.dropped_) == len(X)
    assert len(phi.error_bounds_) == phi.rank_ + 1
    allowed = phi.error_bound_ * np.sqrt(k.diag(X).max() * k.diag(Z))
    assert (np.abs(features @ others.T - k(X, Z)) <= allowed + bound * size).all()


def scoring_laws(estimator, Z, rtol=1e-9):
    """Any chunking, pickling and cloning of a fitted estimator give what its transform gives on rows Z."""
    truth = estimator.transform(Z)
    weights = max(1.0, float(np.abs(truth).max()))
    for chunk in {1, max(1, len(Z) // 2), len(Z)}:
        lazy = estimator.transform(da.from_array(Z, chunks=(chunk, -1)))
        assert lazy.shape == truth.shape
        assert lazy.dtype == truth.dtype
        assert lazy.chunks[0] == da.core.normalize_chunks((chunk,), (len(Z),))[0]
        np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), truth, rtol=rtol, atol=rtol / 10 * weights)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(estimator)).transform(Z), truth)
    assert not hasattr(clone(estimator), "model_")


def store_laws(estimator, Z, path):
    """A loaded estimator is the saved one to the last bit, and the saved store refuses to be overwritten."""
    estimator.save(path)
    loaded = dkfm.load(path)
    assert type(loaded) is type(estimator)
    assert loaded.kernel_ == estimator.kernel_
    assert loaded.certificate_ == estimator.certificate_
    assert loaded.get_params()["kernel"] == estimator.kernel_
    for name, array in estimator._fitted_arrays().items():
        np.testing.assert_array_equal(getattr(loaded, f"{name}_"), array)
    np.testing.assert_array_equal(loaded.transform(Z), estimator.transform(Z))
