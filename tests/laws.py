"""What every kernel, map, estimator and store obeys. The tests run each class through these."""

import pickle

import dask.array as da
import numpy as np
from sklearn.base import clone

import dkfm
from dkfm.kernels import config

EPS = np.finfo(np.float64).eps


def scale_of(kernel, X):
    """The size of the kernel's values, for tolerances: a sum of products rounds like its largest term."""
    return max(float(np.abs(kernel.diag(X)).max()), 1e-300)


def kernel_laws(kernel, X, Y, rtol=1e-12):
    """Symmetry, diagonal, PSD, blocks, JSON, pickle, repr, freshness of a kernel on rows X and Y of one width."""
    K = kernel(X)
    size = scale_of(kernel, np.vstack([X, Y]))
    assert K.shape == (len(X), len(X))
    assert K.dtype == np.float64
    assert np.array_equal(K, K.T), "symmetric to the last bit"
    np.testing.assert_allclose(np.diag(K), kernel.diag(X), rtol=rtol, atol=rtol * size)
    assert np.linalg.eigvalsh(K)[0] >= -1e-12 * len(X) * size, "positive semi-definite to rounding"
    block = kernel(X, Y)
    np.testing.assert_allclose(block, kernel(Y, X).T, rtol=rtol, atol=rtol * size)
    points = np.array([[kernel(x[None], y[None])[0, 0] for y in Y] for x in X])
    np.testing.assert_allclose(block, points, rtol=rtol, atol=rtol * size)
    prepared = kernel.prepare(Y)
    np.testing.assert_allclose(prepared(X), block, rtol=rtol, atol=rtol * size)
    first = prepared(X)
    prepared(X)[:] = np.nan
    assert np.isfinite(first).all(), "every block is the caller's own"
    back = config.from_config(config.to_config(kernel))
    assert back == kernel
    assert hash(back) == hash(kernel)
    assert config.digest(back) == config.digest(kernel)
    assert pickle.loads(pickle.dumps(kernel)) == kernel
    assert eval(repr(kernel), vars(dkfm.kernels)) == kernel, "the repr builds the kernel again"


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
    assert len(phi.eigenvalues_) + len(phi.dropped_) == len(X)


def scoring_laws(estimator, Z):
    """Any chunking, pickling and cloning of a fitted estimator give what its transform gives on rows Z."""
    truth = estimator.transform(Z)
    weights = max(1.0, float(np.abs(truth).max()))
    for chunk in {1, max(1, len(Z) // 2), len(Z)}:
        lazy = estimator.transform(da.from_array(Z, chunks=(chunk, -1)))
        assert lazy.shape == truth.shape
        assert lazy.dtype == truth.dtype
        assert lazy.chunks[0] == da.core.normalize_chunks((chunk,), (len(Z),))[0]
        np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), truth, rtol=1e-9, atol=1e-10 * weights)
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
    np.testing.assert_array_equal(loaded.eigenvalues_, estimator.eigenvalues_)
    np.testing.assert_array_equal(loaded.transform(Z), estimator.transform(Z))
