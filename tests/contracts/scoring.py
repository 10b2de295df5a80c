"""What every fitted estimator that transforms obeys."""

import pickle

import dask.array as da
import numpy as np
from sklearn.base import clone


def check_scoring(estimator, Z, rtol=1e-9):
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
