"""What the tests of fold share."""

import warnings

import numpy as np
from sklearn.base import clone

import dkfm
from dkfm import kernels
from dkfm.estimators import linear_model_readers
from dkfm.estimators.stored.folded import StoredFold

OUTPUTS = ("predict", "decision_function", "predict_proba", "transform")


def rows_and_labels(seed, classes, n=60):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    angle = np.arctan2(X[:, 1], X[:, 0]) + rng.normal(scale=0.3, size=n)
    return X, np.digitize(angle, np.linspace(-np.pi, np.pi, classes + 1)[1:-1])


def map_of(basis, X, **options):
    return dkfm.ExactFeatureMap(kernels.Gaussian(1.5), basis=basis, **options).fit(X)


def rounding_scale(head, affine, K):
    """Return ``sum |k| |W| |A| + |b|`` (n, q) for kernel values (n, N): the scale of rounding in head and map."""
    W = np.abs(np.asarray(head.weights[:, : head.n_columns], np.float64))
    sums = np.abs(K) @ W
    if head.offset is not None:
        sums += np.abs(head.offset)
    if head.sqrt_eigenvalues is not None:
        sums = (sums * np.abs(head.sqrt_eigenvalues)) @ W.T
    return sums @ np.abs(affine.dense_weights) + np.abs(affine.offset)


def fitted(model, phi, X, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's solvers on few rows
        return clone(model).fit(phi.transform(X), y)


def allowed(phi, model, Z, output):
    """Return what rounding allows the pair and its fold to differ by: 64 eps (sum |k| |W_map| |A| + |b|)."""
    after = linear_model_readers.read_linear_model(model).affine_outputs[output][0]
    head, eps = phi.model_.head(phi._output_head_name), np.finfo(phi.model_.dtype).eps
    K = np.asarray(phi.model_.kernel(Z, phi.model_.original_landmarks), np.float64)
    return 64 * eps * rounding_scale(head, after, K).max(axis=1)


def has(model, output):
    """Return whether a model has an output; a discriminant analysis by least squares has a method that only raises."""
    return hasattr(model, output) and not (output == "transform" and getattr(model, "solver", "") == "lsqr")


def require_equal(folded, phi, model, Z):
    """Raise unless a fold returns what the pair does, everything of it and nothing else, and can be loaded again."""
    StoredFold.from_record(folded._to_record(), hasattr(folded, "transform"))
    F = phi.transform(Z)
    for output in OUTPUTS:
        assert hasattr(folded, output) == has(model, output), output
        if not hasattr(folded, output):
            continue
        found, expected = np.asarray(getattr(folded, output)(Z)), np.asarray(getattr(model, output)(F))
        assert found.shape == expected.shape, output
        bound = allowed(phi, model, Z, output)
        if output == "predict" and hasattr(folded, "classes_"):
            decision = np.asarray(model.decision_function(F)).reshape(len(F), -1)
            both = decision if decision.shape[1] > 1 else np.hstack([-decision, decision])
            ordered = np.sort(both, axis=1)
            clear = ordered[:, -1] - ordered[:, -2] > 2 * bound
            assert clear.mean() > (0.9 if phi.model_.dtype == np.float64 else 0.1)  # the bound is no estimate
            np.testing.assert_array_equal(found[clear], expected[clear])
            continue
        difference = np.abs(found - expected).reshape(len(F), -1)
        # Chances change by less than what they are made of, and round themselves; but for shares of small sums.
        scale = 4 if output == "predict_proba" else 1
        assert (scale * bound + 64 * np.finfo(phi.model_.dtype).eps >= difference.T).all(), output
