"""What every feature map obeys."""

import numpy as np

from contracts.kernel import value_scale


def check_feature_map(phi, X, Z, bound=1e-9):
    """Exactness of a fitted map, its certificate, residual and bases, for training rows X and other rows Z."""
    k = phi.kernel_
    size = value_scale(k, np.vstack([X, Z]))
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
